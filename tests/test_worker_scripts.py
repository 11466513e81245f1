"""The worker's scripts where one call speaks of many jobs, and on a server that has lost what they lean on."""

from __future__ import annotations

import time

import pytest
import redis
from rq import Queue

from batonq.producer import keys
from batonq.producer.schema import FUNCTION
from batonq.worker.messages import pack_ids, unpack_ids
from batonq.worker.scripts import Claim, Committed, ContextCommit, ContextEnd, Ending, Finished, Scripts
from tests.support.claims import claim_jobs
from tests.support.workers import QUEUE


def claims(scripts: Scripts, queue: Queue, count: int) -> list[Claim]:
    """So many new jobs, claimed and pinned with two contexts each."""
    for _ in range(count):
        queue.enqueue(FUNCTION, prompt="x", n=2)
    claimed = claim_jobs(scripts, [QUEUE], "w", count)
    for claim in claimed:
        contexts = [(name, {"digest": "d"}) for name in names(claim)]
        assert scripts.pin([(claim.ownership, False, contexts)]) == [True]
    return claimed


def names(claim: Claim) -> list[str]:
    return keys.context_ids(claim.ownership.job_id, 2)


def news(claim: Claim, index: int, start: int, *tokens: int, **fields: str) -> ContextCommit:
    return ContextCommit(names(claim)[index], start, pack_ids(tokens), b"", {**fields})


def test_each_job_of_a_commit_has_its_own_outcome(connection: redis.Redis, queue: Queue) -> None:
    scripts = Scripts(connection)
    lost, grown, _silent, gap, last = claimed = claims(scripts, queue, 5)
    assert scripts.release("w", [lost.ownership]) == [True]
    said = [
        [news(lost, 0, 0, 1)],
        [news(grown, 0, 0, 1, 2), news(grown, 1, 0, 3, state="RUNNING")],
        [],
        [news(gap, 0, 0, 1), news(gap, 1, 1, 2)],
        [news(last, 1, 0, 4, 5)],
    ]
    outcomes = scripts.commit([(claim.ownership, contexts) for claim, contexts in zip(claimed, said, strict=True)])
    fine = Committed.DONE
    assert outcomes == [Committed.LOST, fine, fine, Committed.CONTRADICTION, fine]

    def tokens(claim: Claim) -> list[list[int]]:
        return [unpack_ids(connection.get(keys.tokens(name)) or b"") for name in names(claim)]

    assert [tokens(claim) for claim in claimed] == [[[], []], [[1, 2], [3]], [[], []], [[], []], [[], [4, 5]]]
    states = [connection.hget(keys.context(name), "state") for name in names(grown)]
    assert states == [None, b"RUNNING"]


def ending(claim: Claim) -> Ending:
    contexts = [ContextEnd(name, 0, {"state": "FINISHED"}) for name in names(claim)]
    result = {"type": "1", "return_value": "x"}
    return Ending(claim.ownership, QUEUE, "w", "finished", result, time.time(), 0.5, 60, contexts=contexts)


def test_an_end_that_the_server_refuses_hurts_no_other(connection: redis.Redis, queue: Queue) -> None:
    """More ends than one script takes, with one whose key holds what it can't hold."""
    scripts = Scripts(connection)
    claimed = claims(scripts, queue, 70)
    odd = claimed[3]
    connection.set(keys.results(odd.ownership.job_id), "not a stream")
    endings = [ending(claim) for claim in claimed]
    with pytest.raises(redis.ResponseError, match="WRONGTYPE"):
        scripts.finish(endings)
    others = [claim.ownership.job_id for claim in claimed if claim is not odd]
    assert {connection.hget(keys.job(job_id), "status") for job_id in others} == {b"finished"}
    again = scripts.finish([each for each in endings if each.ownership != odd.ownership])
    assert again == [Finished(done=True, retried=False, follow_up=False)] * 69
    assert {connection.xlen(keys.results(job_id)) for job_id in others} == {1}


def test_a_released_context_shows_how_far_it_is(connection: redis.Redis, queue: Queue) -> None:
    scripts = Scripts(connection)
    (claim,) = claims(scripts, queue, 1)
    scripts.commit([(claim.ownership, [news(claim, 0, 0, 7, 8, 9)])])
    scripts.release("w", [claim.ownership])
    shown = [connection.hmget(keys.context(name), "state", "token_count") for name in names(claim)]
    assert shown == [[b"PREEMPTED", b"3"], [b"PREEMPTED", b"0"]]


def test_a_server_that_forgets_scripts_and_closes_connections(connection: redis.Redis, queue: Queue) -> None:
    scripts = Scripts(connection)
    (claim,) = claims(scripts, queue, 1)
    for start in range(3):
        assert scripts.commit([(claim.ownership, [news(claim, 0, start, start)])]) == [Committed.DONE]
        connection.script_flush()
        connection.client_kill_filter(_type="normal", skipme=True)
    assert unpack_ids(connection.get(keys.tokens(names(claim)[0]))) == [0, 1, 2]
