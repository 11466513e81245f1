"""Streams, several outputs a job and log probabilities: real workers on a real server, some of which die on the way."""

from __future__ import annotations

import signal
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import redis

from batonq.engine.sampling_params import SamplingParams, child_seed
from batonq.producer import Producer, keys
from batonq.producer.embedded import EmbeddedServer
from batonq.producer.errors import (
    JobError,
    JobFailedError,
    JobNotFoundError,
    ResultTimeoutError,
    StreamTrimmedError,
)
from batonq.producer.schema import Result
from batonq.producer.stream import StreamChunk
from batonq.worker.messages import pack_ids
from batonq.worker.scripts import Committed, ContextCommit, ContextEnd, Ending, Finished, Scripts, StreamEntry
from tests.support.claims import claim_jobs
from tests.support.definition import alone
from tests.support.null_engine import EOS, logprobs_of
from tests.support.servers import eventually
from tests.support.workers import QUEUE, worker

#: Slow enough that jobs of 100 tokens are met while they run.
SLOW = {"step_seconds": 0.01, "max_num_batched_tokens": 64, "num_blocks": 800}
#: Beginnings of these are everywhere in the null model's text, their ends almost nowhere.
TEASING_STOPS = [f"{chr(code)}{chr(code)}{chr(code)}" for code in range(33, 127)]


def long_job(producer: Producer, prompt: str, **fields: Any) -> str:
    """A job of 100 tokens by default; the k-th test prompt has seed k."""
    seed = int(prompt.rpartition(" ")[2])
    return producer.submit(prompt=prompt, **{"max_tokens": 100, "ignore_eos": True, "seed": seed, **fields})


def by_output(chunks: Iterable[StreamChunk]) -> dict[int, list[StreamChunk]]:
    outputs = defaultdict(list)
    for chunk in chunks:
        outputs[chunk.index].append(chunk)
    return dict(outputs)


def agree(outputs: dict[int, list[StreamChunk]], result: Result) -> None:
    """Each output's chunks add up to its text and its tokens, in order, and only the last says why it ended."""
    assert sorted(outputs) == [choice.index for choice in result.choices]
    for choice in result.choices:
        chunks = outputs[choice.index]
        assert "".join(chunk.text for chunk in chunks) == choice.text
        assert [token for chunk in chunks for token in chunk.token_ids] == choice.token_ids
        ends = [chunk.offset for chunk in chunks]
        assert ends == sorted(ends)
        assert ends[-1] == len(choice.token_ids)
        assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
        assert chunks[-1].finish_reason == choice.finish_reason


def test_a_stream_adds_up_to_the_final_text(valkey: EmbeddedServer, producer: Producer, tmp_path: Path) -> None:
    jobs = [
        long_job(
            producer, f"p {i}", stream=True, n=1 + i % 3, stop=TEASING_STOPS if i % 2 else ["q", "é"], ignore_eos=i < 6
        )
        for i in range(8)
    ]
    with worker(valkey.url, "w", log=tmp_path / "log", **SLOW):
        live = {job_id: by_output(producer.stream(job_id, timeout=60)) for job_id in jobs}
        for job_id in jobs:
            result = producer.result(job_id, timeout=60)
            agree(live[job_id], result)
            assert by_output(producer.stream(job_id)) == live[job_id], "another text when it is read afterwards"
            for choice in result.choices:
                shown = bytes(token for token in choice.token_ids if token != EOS).decode("utf-8", "replace")
                assert choice.text == shown if choice.finish_reason == "length" else shown.startswith(choice.text)
    assert sum(len(chunks) for outputs in live.values() for chunks in outputs.values()) > 40, (
        "not streamed, but sent whole"
    )
    assert {reason for o in live.values() for c in o.values() if (reason := c[-1].finish_reason)} == {"stop", "length"}


def test_a_stream_goes_on_from_any_offset(valkey: EmbeddedServer, producer: Producer, tmp_path: Path) -> None:
    job_id = long_job(producer, "p 1", stream=True, stop=TEASING_STOPS)
    with worker(valkey.url, "w", log=tmp_path / "log", **SLOW):
        chunks = list(producer.stream(job_id, timeout=60))
    assert len(chunks) > 5
    for i, chunk in enumerate(chunks[:-1]):
        assert list(producer.stream(job_id, start=chunk.offset)) == chunks[i + 1 :]
    producer.connection.xtrim(keys.stream(job_id), maxlen=len(chunks) - 2, approximate=False)
    assert list(producer.stream(job_id, start=chunks[1].offset)) == chunks[2:]
    with pytest.raises(StreamTrimmedError) as trimmed:
        list(producer.stream(job_id))
    assert trimmed.value.values["first"] == chunks[1].offset


@pytest.mark.parametrize("how", ["SIGTERM", "SIGKILL", "child"])
def test_a_stream_outlives_its_worker(how: str, valkey: EmbeddedServer, producer: Producer, tmp_path: Path) -> None:
    """What each owner has published is never published again, and nothing is left out between them."""
    jobs = [
        long_job(producer, f"p {i}", stream=True, n=1 + 2 * (i % 2), stop=TEASING_STOPS, logprobs=1) for i in range(4)
    ]
    contexts = [name for i, job_id in enumerate(jobs) for name in keys.context_ids(job_id, 1 + 2 * (i % 2))]
    connection = producer.connection
    with worker(valkey.url, "first", log=tmp_path / "log", max_num_seqs=12, **SLOW) as first:
        for name in contexts:
            eventually(lambda name=name: connection.strlen(keys.tokens(name)) >= 40, "ten tokens are committed")  # type: ignore[misc]
        if how == "child":
            first.child().kill()
        else:
            first.process.send_signal(signal.SIGTERM if how == "SIGTERM" else signal.SIGKILL)
            first.wait()
        before = {name: connection.xlen(keys.stream(name)) for name in contexts}
        if how != "child":
            with worker(valkey.url, "second", "--burst", log=tmp_path / "log", **SLOW) as second:
                assert second.wait() == 0
        outputs = {job_id: by_output(producer.stream(job_id, timeout=60)) for job_id in jobs}
    assert all(before.values())
    for i, job_id in enumerate(jobs):
        result = producer.result(job_id, timeout=60)
        agree(outputs[job_id], result)
        assert result.resumes == 1
        for choice in result.choices:
            seed = i if len(result.choices) == 1 else child_seed(i, choice.index)
            params = SamplingParams(seed=seed, max_tokens=100, ignore_eos=True)
            assert choice.token_ids == alone(list(f"p {i}".encode()), params)[: len(choice.token_ids)]
    for name in contexts:
        for key in keys.of_context(name):
            assert connection.ttl(key) != -1, f"{key} stays for ever"


def test_several_outputs_move_as_one(valkey: EmbeddedServer, producer: Producer, tmp_path: Path) -> None:
    """Claimed, given back and ended together, with one result; a worker counts contexts, not jobs."""
    jobs = [long_job(producer, f"p {i}", n=5) for i in range(5)]
    connection = producer.connection
    with worker(valkey.url, "first", log=tmp_path / "log", max_num_seqs=8, **SLOW) as first:
        eventually(lambda: connection.strlen(keys.tokens(f"{jobs[0]}.4")) >= 40, "ten tokens are committed")
        owned = connection.zcard(keys.started(QUEUE))
        assert owned == 2, "room for ten contexts is room for two jobs of five"
        first.process.send_signal(signal.SIGTERM)
        assert first.wait() == 0
    assert connection.lrange(keys.queue(QUEUE), 0, -1) == [job_id.encode() for job_id in jobs]
    with worker(valkey.url, "second", "--burst", log=tmp_path / "log", max_num_seqs=40, **SLOW) as second:
        assert second.wait() == 0
    for i, job_id in enumerate(jobs):
        result = producer.result(job_id)
        assert [choice.index for choice in result.choices] == [0, 1, 2, 3, 4]
        assert result.seed == i
        for choice in result.choices:
            params = SamplingParams(seed=child_seed(i, choice.index), max_tokens=100, ignore_eos=True)
            assert choice.token_ids == alone(list(f"p {i}".encode()), params)
        assert result.usage is not None
        assert (result.usage.prompt_tokens, result.usage.completion_tokens) == (3, 500)
        for name in keys.context_ids(job_id, 5):
            assert connection.hget(keys.context(name), "state") == b"FINISHED"


def test_a_job_larger_than_all_the_room_runs(valkey: EmbeddedServer, producer: Producer, tmp_path: Path) -> None:
    job_id = long_job(producer, "p 1", n=20, max_tokens=5)
    with worker(valkey.url, "w", "--burst", log=tmp_path / "log", max_num_seqs=4) as running:
        assert running.wait() == 0
    assert len(producer.result(job_id).choices) == 20


def test_log_probabilities_outlive_their_worker(valkey: EmbeddedServer, producer: Producer, tmp_path: Path) -> None:
    fields = {"logprobs": 2, "prompt_logprobs": 1}
    jobs = [long_job(producer, f"p {i}", n=1 + i % 2, **fields) for i in range(4)]
    first_of = [keys.context_ids(job_id, 1 + i % 2)[-1] for i, job_id in enumerate(jobs)]
    connection = producer.connection
    with worker(valkey.url, "first", log=tmp_path / "log", **SLOW) as first:
        for name in first_of:
            eventually(lambda name=name: connection.strlen(keys.tokens(name)) >= 40, "ten tokens are committed")  # type: ignore[misc]
        first.process.kill()
        first.wait()
    for name in first_of:
        assert connection.strlen(keys.logprobs(name)) == connection.strlen(keys.tokens(name)) // 4 * (12 + 8 * 2)
    with worker(valkey.url, "second", "--burst", log=tmp_path / "log", **SLOW) as second:
        assert second.wait() == 0
    for i, job_id in enumerate(jobs):
        result = producer.result(job_id)
        assert result.resumes == 1
        prompt = list(f"p {i}".encode())
        assert result.prompt_logprobs is not None
        assert [entry and entry.token_id for entry in result.prompt_logprobs] == [None, *prompt[1:]]
        for choice in result.choices:
            assert choice.logprobs is not None
            tokens = list(prompt)
            for entry, token in zip(choice.logprobs, choice.token_ids, strict=True):
                expected = logprobs_of(tokens, token, 2)
                assert (entry.token_id, entry.logprob, entry.rank) == (token, expected.logprob, expected.rank)
                assert [(top.token_id, top.logprob) for top in entry.top_logprobs] == list(expected.top)
                tokens.append(token)


def test_a_job_that_fails_ends_its_stream(valkey: EmbeddedServer, producer: Producer, tmp_path: Path) -> None:
    refused = producer.submit(prompt="x" * 1000, stream=True)
    running_one = long_job(producer, "p 1", stream=True, n=2)
    queued = producer.submit(prompt="later", stream=True)
    plain = producer.submit(prompt="x", max_tokens=1)
    with worker(valkey.url, "w", log=tmp_path / "log", max_num_seqs=2, **SLOW):
        chunks = producer.stream(running_one, timeout=60)
        read = [next(chunks)]
        assert producer.cancel(queued)
        assert producer.cancel(running_one)
        with pytest.raises(JobFailedError) as canceled:
            read.extend(chunks)
        assert canceled.value.code == "job_canceled"
        assert all(chunk.finish_reason is None for chunk in read)
        for job_id, code in ((queued, "job_canceled"), (refused, "context_length_exceeded")):
            with pytest.raises(JobFailedError) as failed:
                list(producer.stream(job_id, timeout=60))
            assert failed.value.code == code
    with pytest.raises(JobError) as silent:
        producer.stream(plain)
    assert silent.value.code == "not_streaming"
    with pytest.raises(JobError):
        producer.stream(running_one, start=[1, 2, 3])
    with pytest.raises(JobNotFoundError):
        producer.stream("unknown")


def test_a_stream_that_nobody_writes(producer: Producer) -> None:
    with pytest.raises(ResultTimeoutError):
        list(producer.stream(producer.submit(prompt="x", stream=True), timeout=0.05))


def test_repeated_commits_write_no_entry_twice(valkey: EmbeddedServer, producer: Producer) -> None:
    """As after lost replies: the same entries again, alone and with more behind them, and the end twice."""
    connection = redis.Redis.from_url(valkey.url)
    scripts = Scripts(connection)
    job_id = producer.submit(prompt="x", stream=True)
    (claim,) = claim_jobs(scripts, [QUEUE], "w")
    owner = claim.ownership
    assert scripts.pin([(owner, True, [(job_id, {"digest": "d"})])]) == [True]

    def entry(start: int, end: int) -> StreamEntry:
        tokens = list(range(start, end))
        return StreamEntry(end, {"text": f"{start}-{end};", "token_ids": pack_ids(tokens)})

    def commit(start: int, *entries: StreamEntry) -> None:
        tokens = pack_ids(list(range(start, entries[-1].end)))
        news = ContextCommit(job_id, start, tokens, b"", {"state": "RUNNING"}, entries)
        assert scripts.commit([(owner, [news])]) == [Committed.DONE]

    commit(0, entry(0, 3))
    commit(0, entry(0, 3))
    commit(0, entry(0, 3), entry(3, 5))
    commit(3, entry(3, 5))
    last = StreamEntry(7, {"text": "end", "finish_reason": "stop"}, last=True)
    contexts = [ContextEnd(job_id, 3, {"state": "FINISHED"}, [entry(3, 5), entry(5, 7), last])]
    ending = Ending(owner, QUEUE, "w", "finished", {"type": 1}, 0.0, 0.0, 600, None, contexts)
    for _ in range(2):
        assert scripts.finish([ending]) == [Finished(done=True, retried=False, follow_up=False)]
    chunks = list(producer.stream(job_id))
    assert [(chunk.text, chunk.offset) for chunk in chunks] == [("0-3;", 3), ("3-5;", 5), ("5-7;", 7), ("end", 7)]
    connection.close()
