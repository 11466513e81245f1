"""What an operator sees: contexts, their history, dead letters; and how these go back to their queue."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import redis
from rq import Queue
from rq.rate_limit import RateLimit

from batonq.engine.sampling_params import SamplingParams
from batonq.producer import Producer, keys
from batonq.producer.embedded import EmbeddedServer
from batonq.producer.inspection import count_jobs, dead_letters, find_context, find_contexts
from batonq.producer.inspection_commands import age
from batonq.producer.schema import FUNCTION
from batonq.worker.requests import CONTEXT_SCHEMA
from batonq.worker.scripts import Scripts
from tests.support.definition import alone
from tests.support.redis_keys import registries
from tests.support.servers import eventually
from tests.support.workers import QUEUE, WorkerProcess, worker
from tests.test_producer_cli import batonq

SLOW = {"step_seconds": 0.01, "num_blocks": 4000, "max_model_len": 4000}
#: An engine that never gets to its first token.
STUCK = {"step_seconds": 60.0}


def submit(producer: Producer, prompt: str, max_tokens: int = 5, **fields: Any) -> str:
    return producer.submit(prompt=prompt, temperature=0, ignore_eos=True, max_tokens=max_tokens, **fields)


def definition(prompt: str, length: int = 5) -> list[int]:
    return alone(list(prompt.encode()), SamplingParams(temperature=0, ignore_eos=True, max_tokens=length))


def shown(valkey: EmbeddedServer, *arguments: str, code: int = 0) -> list[str]:
    """Lines of a command's output."""
    command, *rest = arguments
    done = batonq(command, "--redis-url", valkey.url, *rest)
    assert (done.returncode, done.stderr) == (code, "")
    return done.stdout.splitlines()


def committed(connection: redis.Redis, context_id: str) -> int:
    return connection.strlen(keys.tokens(context_id)) // 4


def kill_until_dead(producer: Producer, running: WorkerProcess, job_id: str) -> None:
    """Kill each engine that gets the job, in the step that holds it, until the worker gives it up."""
    connection, seen = producer.connection, b"0"

    def claimed_anew() -> bytes | None:
        status, epoch = connection.hmget(keys.job(job_id), "status", "batonq_epoch")
        return epoch if status in {b"started", b"failed"} and epoch != seen else None

    while True:
        seen = eventually(claimed_anew, "it is claimed") or b""
        if int(connection.hget(keys.job(job_id), "batonq_crashes") or 0) == 3:
            eventually(lambda: producer.statuses([job_id])[job_id] == "failed", "it is given up")
            return
        eventually(lambda: sleeps(running.child().pid), "it is in a step")
        running.child().kill()


def sleeps(pid: int) -> bool:
    """Whether a process is in `time.sleep`, as the null engine is in a step, and not waiting for a message."""
    return "nanosleep" in Path(f"/proc/{pid}/wchan").read_text()


def test_a_job_that_was_taken_over_shows_its_history(
    valkey: EmbeddedServer, connection: redis.Redis, producer: Producer, tmp_path: Path
) -> None:
    job_id = submit(producer, "x", 300, id="relayed")
    with worker(valkey.url, "first", log=tmp_path / "log", **SLOW) as running:
        eventually(lambda: committed(connection, job_id) > 5, "it runs")
        running.child().kill()
        eventually(lambda: connection.hget(keys.job(job_id), "batonq_epoch") == b"2", "it is claimed again")
        heading, line = shown(valkey, "contexts", "--queue", QUEUE)
        assert heading.split() == ["ID", "STATE", "OWNER", "TOKENS", "AGE", "EPOCH"]
        assert line.split()[0] == job_id
        assert line.split()[2] == "first"
        assert line.split()[-1] == "2"
        assert line.index("first") == heading.index("OWNER")
        producer.result(job_id, timeout=60)
    found = find_context(producer, job_id)
    events = [(event.event, event.worker, event.epoch) for event in found.history]
    assert events == [
        ("enqueued", None, None),
        ("claimed", "first", 1),
        ("crashed", "first", 1),
        ("claimed", "first", 2),
        ("finished", "first", 2),
    ]
    times = [event.at for event in found.history if event.at is not None]
    assert times == sorted(times)
    assert len(times) == 5
    tokens = [event.tokens for event in found.history]
    assert tokens[:2] == [None, 0]
    assert tokens[2] == tokens[3]
    assert tokens[2] is not None
    assert 5 < tokens[2] < 300
    assert tokens[4] == 300
    (context,) = found.contexts
    assert (context.state, context.owners, context.resumes) == ("FINISHED", ["first", "first"], 1)
    lines = shown(valkey, "context", job_id)
    assert "output    300 of at most 300 tokens" in lines
    assert "owners    first, first" in lines
    assert [line.split()[1] for line in lines[-5:]] == [event for event, _, _ in events]
    whole = json.loads("\n".join(shown(valkey, "context", job_id, "--json")))
    assert whole["status"] == "finished"
    assert whole["history"][2]["event"] == "crashed"


def test_contexts_are_listed_by_state_and_age(
    valkey: EmbeddedServer, connection: redis.Redis, producer: Producer, tmp_path: Path
) -> None:
    done = submit(producer, "a", id="done")
    with worker(valkey.url, "w", log=tmp_path / "log", **SLOW) as running:
        producer.result(done, timeout=60)
        runs = submit(producer, "b", 3000, id="runs")
        eventually(lambda: connection.hget(keys.context(runs), "state") == b"RUNNING", "it runs")
        eventually(lambda: committed(connection, runs) > 5, "it has tokens")
        (row,) = map(json.loads, shown(valkey, "contexts", "--json"))
        assert (row["id"], row["state"], row["owner"], row["epoch"]) == ("runs", "RUNNING", "w", 1)
        assert row["tokens"] > 5
        assert [json.loads(line)["id"] for line in shown(valkey, "contexts", "--all", "--json")] == [done, runs]
        (first,) = shown(valkey, "contexts", "--all", "--json", "--limit", "1")
        assert json.loads(first)["tokens"] == 5, "of an ended context, its hash tells"
        (ended,) = shown(valkey, "contexts", "--state", "finished", "--json")
        assert json.loads(ended)["id"] == done
        assert find_contexts(connection, queue="another") == []
        running.process.terminate()
        assert running.wait() == 0
    (context,) = find_contexts(connection, states={"PREEMPTED"})
    assert (context.id, context.owner) == (runs, None)
    assert shown(valkey, "contexts")[1].split()[:3] == [runs, "PREEMPTED", "-"]
    assert [event.event for event in find_context(producer, runs).history] == ["enqueued", "claimed", "released"]


def test_many_contexts_are_found_by_few_round_trips(connection: redis.Redis) -> None:
    with connection.pipeline() as pipe:
        for i in range(3000):
            fields = {"state": "RUNNING", "queue": QUEUE, "job_id": f"j{i}", "token_count": 7, "created_at": 3000 - i}
            pipe.hset(keys.context(f"j{i}"), mapping=fields)  # type: ignore[arg-type]
            pipe.set(f"other:{i}", "x")
        pipe.execute()
    before = connection.info("commandstats").get("cmdstat_scan", {"calls": 0})["calls"]
    found = find_contexts(connection)
    assert [context.id for context in found] == [f"j{i}" for i in reversed(range(3000))]
    assert {context.tokens for context in found} == {7}
    stats = connection.info("commandstats")
    assert stats["cmdstat_scan"]["calls"] - before < 30
    assert "cmdstat_keys" not in stats


def test_several_outputs_are_shown_briefly(valkey: EmbeddedServer, producer: Producer, tmp_path: Path) -> None:
    job_id = submit(producer, "x", n=3, id="three")
    with worker(valkey.url, "w", "--burst", log=tmp_path / "log") as running:
        assert running.wait() == 0
    lines = shown(valkey, "context", job_id)
    assert lines[4].split() == ["CONTEXT", "STATE", "OWNERS", "TOKENS", "OF", "RESUMES"]
    assert [line.split()[:5] for line in lines[5:8]] == [[f"three.{i}", "FINISHED", "w", "5", "5"] for i in range(3)]
    assert [line.split()[1:] for line in lines[-3:]] == [
        ["enqueued", "-", "-", "-"],
        ["claimed", "w", "1", "0"],
        ["finished", "w", "1", "15"],
    ]
    one = json.loads(shown(valkey, "context", "three.1", "--json")[0])
    assert [(context["id"], context["index"], context["schema"]) for context in one["contexts"]] == [
        ("three.1", 1, CONTEXT_SCHEMA)
    ]
    assert one["history"][-1]["tokens"] == 15


def test_an_unknown_id(valkey: EmbeddedServer) -> None:
    done = batonq("context", "--redis-url", valkey.url, "nobody.1")
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "batonq: there is no context or job nobody.1\n")


def test_a_job_before_its_first_claim_and_one_that_was_canceled(
    valkey: EmbeddedServer, connection: redis.Redis, producer: Producer
) -> None:
    job_id = submit(producer, "x")
    found = find_context(producer, job_id)
    assert (found.status, found.queue, found.contexts) == ("queued", QUEUE, [])
    assert [event.event for event in found.history] == ["enqueued"]
    producer.cancel(job_id)
    assert [event.event for event in find_context(producer, job_id).history] == ["enqueued", "canceled"]
    assert shown(valkey, "context", job_id)[1] == "status    canceled"


def test_a_dead_job_is_listed_and_finishes_when_it_is_queued_again(
    valkey: EmbeddedServer, connection: redis.Redis, producer: Producer, tmp_path: Path
) -> None:
    job_id = submit(producer, "x", id="dead", stream=True)
    with worker(valkey.url, "deadly", log=tmp_path / "log", **STUCK) as running:
        kill_until_dead(producer, running, job_id)
    died = (
        "engine_crashed: the engine died 3 times while it ran this job; crashed by deadly; claimed by deadly; crashed"
    )
    assert shown(valkey, "context", job_id)[3].startswith(f"error     {died}")
    (letter,) = dead_letters(producer)
    assert (letter.id, letter.queue, letter.code, letter.deaths) == (job_id, QUEUE, "engine_crashed", 3)
    assert letter.owners[0] == "deadly"
    assert dead_letters(producer, "another") == []
    heading, line = shown(valkey, "jobs", "--dead")
    assert heading.split() == ["ID", "QUEUE", "ENDED", "DEATHS", "OWNERS", "ERROR"]
    assert died in line
    assert json.loads(shown(valkey, "jobs", "--dead", "--json", "--queue", QUEUE)[0])["deaths"] == 3

    assert shown(valkey, "jobs", "--dead", "--requeue") == ["1 queued again"]
    assert dead_letters(producer) == []
    assert registries(connection, QUEUE, job_id) == set()
    assert connection.ttl(keys.job(job_id)) == connection.ttl(keys.context(job_id)) == -1
    assert shown(valkey, "jobs", "--dead", "--requeue", code=1) == ["0 queued again"]
    with worker(valkey.url, "mild", "--burst", log=tmp_path / "log") as running:
        assert running.wait() == 0
    assert producer.result(job_id).choices[0].token_ids == definition("x")
    assert "".join(chunk.text for chunk in producer.stream(job_id)) == producer.result(job_id).choices[0].text
    history = find_context(producer, job_id).history
    events = [event.event for event in history]
    assert events[:3] == ["created", "claimed", "crashed"]
    assert events[-3:] == ["requeued", "claimed", "finished"]
    assert events.count("crashed") == 3
    assert (history[1].worker, history[-1].worker) == ("deadly", "mild")
    assert connection.hget(keys.job(job_id), "batonq_crashes") is None


def test_requeueing_twice_is_once(
    valkey: EmbeddedServer, connection: redis.Redis, producer: Producer, tmp_path: Path
) -> None:
    refused = submit(producer, "x" * 50, id="refused")
    finished = submit(producer, "y", id="finished")
    with worker(valkey.url, "w", "--burst", log=tmp_path / "log", max_model_len=40) as running:
        assert running.wait() == 0
    assert producer.requeue([refused, finished, "nobody"]) == [refused]
    assert producer.requeue([refused, finished, "nobody"]) == []
    assert connection.lrange(keys.queue(QUEUE), 0, -1) == [refused.encode()]
    lines = shown(valkey, "jobs", "--dead", "--requeue", refused, finished, "nobody", code=1)
    assert lines[0] == "0 queued again"
    assert lines[1:] == [
        "refused: its status is queued",
        "finished: its status is finished",
        "nobody: there is no such job",
    ]
    assert connection.llen(keys.queue(QUEUE)) == 1
    history = [event.event for event in find_context(producer, refused).history]
    assert history == ["created", "claimed", "requeued"]
    with worker(valkey.url, "w", "--burst", log=tmp_path / "log", max_model_len=400) as running:
        assert running.wait() == 0
    assert producer.result(refused).choices[0].token_ids == definition("x" * 50)


def test_a_streaming_job_that_was_queued_again_can_be_canceled(
    valkey: EmbeddedServer, connection: redis.Redis, producer: Producer, tmp_path: Path
) -> None:
    """What it wrote before it was stopped is gone, so that its stream can end anew."""
    job_id = submit(producer, "x", 3000, stream=True, id="stopped")
    with worker(valkey.url, "w", log=tmp_path / "log", **SLOW):
        eventually(lambda: connection.xlen(keys.stream(job_id)) > 2, "it streams")
        connection.publish(keys.pubsub("w"), json.dumps({"command": "stop-job", "job_id": job_id}))
        eventually(lambda: producer.statuses([job_id])[job_id] == "stopped", "it is stopped")
    assert [letter.code for letter in dead_letters(producer)] == ["job_stopped"]
    assert shown(valkey, "jobs", "--dead", "--requeue", job_id, "--json") == [
        json.dumps({"requeued": [job_id], "left": {}})
    ]
    assert find_contexts(connection)[0].state == "WAITING"
    assert producer.cancel(job_id)
    assert len(connection.xrange(keys.stream(job_id))) == 1


def test_a_rate_limited_job_waits_for_its_turn(connection: redis.Redis, queue: Queue, producer: Producer) -> None:
    first, second = (queue.enqueue(FUNCTION, prompt="x", rate_limit=RateLimit("k", 1)) for _ in range(2))
    connection.lrem(queue.key, 0, first.id)
    connection.hset(keys.job(first.id), "status", "failed")
    assert producer.requeue([first.id]) == [first.id]
    assert set(producer.statuses([first.id, second.id]).values()) == {"rate_limited"}
    assert queue.job_ids == []
    connection.zrem(f"{keys.PREFIX}:rl:k:allowed", first.id)
    connection.hset(keys.job(first.id), "status", "failed")
    assert producer.requeue([first.id]) == [first.id]
    assert queue.job_ids == [second.id]


def test_a_scheduled_job_waits_for_its_turn_too(connection: redis.Redis, queue: Queue) -> None:
    job = queue.enqueue(FUNCTION, prompt="x", rate_limit=RateLimit("k", 1))
    connection.lrem(queue.key, 0, job.id)
    connection.hset(keys.job(job.id), "status", "scheduled")
    connection.zadd(keys.scheduled(QUEUE), {job.id: 1})
    Scripts(connection).sweep(QUEUE, time.time(), 600)
    assert connection.hget(keys.job(job.id), "status") == b"rate_limited"
    assert connection.zscore(f"{keys.PREFIX}:rl:k:rate_limited", job.id) is not None
    assert queue.job_ids == []


def test_jobs_are_counted(valkey: EmbeddedServer, connection: redis.Redis, producer: Producer, queue: Queue) -> None:
    submit(producer, "x")
    submit(producer, "x", queue="other")
    canceled = submit(producer, "x", queue="other")
    producer.cancel(canceled)
    queue.enqueue(FUNCTION, prompt="x", depends_on=submit(producer, "y"))
    by_queue = {counts.queue: counts for counts in count_jobs(connection)}
    assert (by_queue[QUEUE].queued, by_queue[QUEUE].deferred) == (2, 1)
    assert (by_queue["other"].queued, by_queue["other"].canceled) == (2, 1)
    heading, *lines = shown(valkey, "jobs")
    assert heading.split()[:3] == ["QUEUE", "QUEUED", "RUNNING"]
    assert [line.split() for line in lines] == [
        [QUEUE, "2", "0", "0", "0", "0", "0", "1"],
        ["other", "2", "0", "0", "0", "1", "0", "0"],
    ]
    (counts,) = map(json.loads, shown(valkey, "jobs", "--queue", "other", "--json"))
    assert counts["queued"] == 2


@pytest.mark.parametrize("command", ["contexts", "context", "jobs"])
def test_help_teaches(command: str) -> None:
    done = batonq(command, "--help")
    assert done.returncode == 0
    assert f"\n    batonq {command} --redis-url" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["contexts"], "REDIS_URL"),
        (["contexts", "--redis-url", "x", "--state", "LAZY"], "LAZY"),
        (["jobs", "--redis-url", "x", "--requeue"], "--dead"),
        (["jobs", "--redis-url", "x", "--dead", "some"], "batonq context"),
        (["jobs", "--redis-url", "x", "--dead", "--requeue", "--queue", "q", "some"], "without ids"),
    ],
)
def test_mistakes_are_named(arguments: list[str], words: str) -> None:
    done = batonq(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert words in done.stderr


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(-1, "0 s"), (12.9, "12 s"), (200, "3 min"), (7300, "2 h"), (47.5 * 3600, "47 h"), (50 * 3600, "2 d")],
)
def test_ages_are_readable(seconds: float, words: str) -> None:
    assert age(seconds) == words
