"""Who may carry a context on: the same arithmetic, the same weights, a version that reads what is there.

`tests/golden` holds what each version of the protocol left in Redis of one job in mid-decode. To add a version:
`python -m tests.test_handover VERSION` from the root, with the package installed.
"""

from __future__ import annotations

import json
import sys
import tempfile
from base64 import b64decode, b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis
from rq import Queue
from rq.job import Job

from batonq.engine.sampling_params import SamplingParams
from batonq.producer import Producer, keys, serializer
from batonq.producer.embedded import EmbeddedServer
from batonq.producer.schema import FUNCTION, PromptJob
from batonq.worker.messages import unpack_ids
from batonq.worker.requests import CONTEXT_READER, CONTEXT_SCHEMA
from tests.support.definition import alone
from tests.support.servers import eventually, server
from tests.support.workers import QUEUE, WorkerProcess, error_of, result_of, status, worker

GOLDEN = Path(__file__).parent / "golden"
PROMPT, SAMPLING = "carried on", {"temperature": 0.8, "seed": 11, "max_tokens": 90, "ignore_eos": True}
TOKENS = alone(list(PROMPT.encode()), SamplingParams.model_validate(SAMPLING))
SLOW = {"step_seconds": 0.01, "max_num_batched_tokens": 64, "num_blocks": 400}


def begin(url: str, log: Path, job_id: str = "carried", exact: str = "prefer", **engine: float | str) -> Job:
    """A job that has some tokens, and whose worker was stopped in order."""
    connection = redis.Redis.from_url(url)
    queue = Queue(QUEUE, connection=connection, serializer=serializer)
    fields = PromptJob(prompt=PROMPT, sampling=SAMPLING, exact=exact, stream=True).to_kwargs()  # type: ignore[arg-type]
    job = queue.enqueue(FUNCTION, kwargs=fields, job_id=job_id, result_ttl=600, failure_ttl=600, description="d")
    with worker(url, f"first-{job_id}", log=log, **SLOW, **engine) as running:
        eventually(lambda: connection.strlen(keys.tokens(job_id)) >= 20, "the job has tokens")
        running.process.terminate()
        assert running.wait() == 0
    assert status(job) == "queued"
    return job


def check_carried_on(job: Job, *, numerics: list[str], resumes: int = 1) -> None:
    eventually(lambda: status(job) == "finished", "it is carried on")
    result = result_of(job)
    assert result.choices[0].token_ids == TOKENS
    assert result.numerics == numerics
    assert result.exact == (len(numerics) == 1)
    assert result.resumes == resumes


@contextmanager
def second(valkey: EmbeddedServer, tmp_path: Path, *options: str, **engine: float | str) -> Iterator[WorkerProcess]:
    with worker(valkey.url, "second", *options, log=tmp_path / "second", **engine) as running:
        yield running


def aside(connection: redis.Redis) -> set[bytes]:
    return set(connection.zrange(keys.aside(QUEUE), 0, -1))


@pytest.mark.parametrize("exact", ["prefer", "require"])
def test_a_worker_of_its_numerics_is_preferred(
    exact: str, valkey: EmbeddedServer, connection: redis.Redis, tmp_path: Path
) -> None:
    """One of others leaves it aside, and goes on with other jobs; its own finds it."""
    job = begin(valkey.url, tmp_path / "first", exact=exact, numerics_id="x")
    with second(valkey, tmp_path, numerics_id="y") as other:
        eventually(lambda: aside(connection) == {b"carried"}, "it is set aside")
        eventually(lambda: "other numerics than ours (y)" in other.log.read_text(), "its log tells why")
        quick = Queue(QUEUE, connection=connection, serializer=serializer).enqueue(FUNCTION, prompt="quick")
        eventually(lambda: status(quick) == "finished", "others are served meanwhile")
        assert status(job) == "queued"
        with worker(valkey.url, "third", log=tmp_path / "third", numerics_id="x"):
            check_carried_on(job, numerics=["x"])
    assert aside(connection) == set()


def test_after_the_grace_it_goes_on_with_others(
    valkey: EmbeddedServer, connection: redis.Redis, tmp_path: Path
) -> None:
    prefer = begin(valkey.url, tmp_path / "first", numerics_id="x")
    require = begin(valkey.url, tmp_path / "first", "required", "require", numerics_id="x")
    with second(valkey, tmp_path, "--exact-grace", "0", numerics_id="y"):
        check_carried_on(prefer, numerics=["x", "y"], resumes=2)
        eventually(lambda: aside(connection) == {b"required"}, "the other one waits for its own")
        assert status(require) == "queued"


def test_without_tokens_any_numerics_will_do(valkey: EmbeddedServer, connection: redis.Redis, tmp_path: Path) -> None:
    job = begin(valkey.url, tmp_path / "first", exact="require", numerics_id="x")
    connection.delete(keys.tokens(job.id), keys.stream(job.id))  # as if nothing had been committed yet
    with second(valkey, tmp_path, numerics_id="y"):
        check_carried_on(job, numerics=["y"])


def test_other_weights_never_carry_it_on(valkey: EmbeddedServer, connection: redis.Redis, tmp_path: Path) -> None:
    job = begin(valkey.url, tmp_path / "first", weights_id="old")
    with second(valkey, tmp_path, "--exact-grace", "1000", weights_id="new"):
        eventually(lambda: aside(connection) == {b"carried"}, "it is set aside")
    with second(valkey, tmp_path, "--exact-grace", "0", weights_id="new"):
        eventually(lambda: status(job) == "failed", "after the grace it is failed")
    assert error_of(job) == "model_changed"


def test_other_weights_begin_anew_what_has_no_tokens(
    valkey: EmbeddedServer, connection: redis.Redis, tmp_path: Path
) -> None:
    job = begin(valkey.url, tmp_path / "first", weights_id="old")
    connection.delete(keys.tokens(job.id), keys.stream(job.id))
    with second(valkey, tmp_path, weights_id="new"):
        eventually(lambda: status(job) == "finished", "it is run")
    assert result_of(job).choices[0].token_ids == TOKENS
    assert connection.hget(keys.context(job.id), "weights") == b"new"


def restore(connection: redis.Redis, version: str) -> None:
    for name, dump in json.loads((GOLDEN / f"{version}.json").read_text()).items():
        connection.restore(name, 0, b64decode(dump))


@pytest.mark.parametrize("version", sorted(path.stem for path in GOLDEN.glob("*.json")))
def test_every_version_that_was_ever_written_is_carried_on(
    version: str, valkey: EmbeddedServer, connection: redis.Redis, tmp_path: Path
) -> None:
    restore(connection, version)
    assert connection.hget(keys.context("carried"), "schema") == version.encode()
    begun = unpack_ids(connection.get(keys.tokens("carried")) or b"")
    assert begun == TOKENS[: len(begun)] != []
    job = Job.fetch("carried", connection, serializer)
    with second(valkey, tmp_path):
        check_carried_on(job, numerics=["null"])
    chunks = list(Producer(connection).stream("carried"))
    assert [token for chunk in chunks for token in chunk.token_ids] == TOKENS


def test_the_present_version_is_among_them() -> None:
    assert (GOLDEN / f"{CONTEXT_SCHEMA}.json").exists()
    assert CONTEXT_SCHEMA.split(".")[0] == str(CONTEXT_READER)


def test_a_newer_minor_is_read_and_what_it_added_is_kept(
    valkey: EmbeddedServer, connection: redis.Redis, tmp_path: Path
) -> None:
    job = begin(valkey.url, tmp_path / "first")
    major, minor = CONTEXT_SCHEMA.split(".")
    newer = {"schema": f"{major}.{int(minor) + 1}", "hue": "blue"}
    connection.hset(keys.context("carried"), mapping=newer)
    with second(valkey, tmp_path):
        check_carried_on(job, numerics=["null"])
    kept = connection.hmget(keys.context("carried"), list(newer))
    assert kept == [value.encode() for value in newer.values()]


def test_a_newer_major_is_left_alone(valkey: EmbeddedServer, connection: redis.Redis, tmp_path: Path) -> None:
    job = begin(valkey.url, tmp_path / "first")
    newer = {"schema": f"{CONTEXT_READER + 1}.0", "min_reader": CONTEXT_READER + 1}
    connection.hset(keys.context("carried"), mapping=newer)
    before = connection.hgetall(keys.context("carried"))
    with second(valkey, tmp_path, "--exact-grace", "0") as running:
        eventually(lambda: aside(connection) == {b"carried"}, "it is set aside")
        quick = Queue(QUEUE, connection=connection, serializer=serializer).enqueue(FUNCTION, prompt="quick")
        eventually(lambda: status(quick) == "finished", "others are served meanwhile")
        assert status(job) == "queued"
        eventually(lambda: "carried: written by a newer version" in running.log.read_text(), "its log tells why")
    assert connection.hgetall(keys.context("carried")) == before


def test_a_newer_version_that_old_readers_may_read(
    valkey: EmbeddedServer, connection: redis.Redis, tmp_path: Path
) -> None:
    """A major that says that this one can read it is carried on."""
    job = begin(valkey.url, tmp_path / "first")
    connection.hset(keys.context("carried"), mapping={"schema": f"{CONTEXT_READER + 1}.0"})
    with second(valkey, tmp_path):
        check_carried_on(job, numerics=["null"])


def write_golden(version: str) -> None:
    """Record what this version leaves of a job in mid-decode."""
    with tempfile.TemporaryDirectory() as name, server(Path(name) / "valkey") as running:
        begin(running.url, Path(name) / "log")
        with redis.Redis.from_url(running.url) as connection:
            written = connection.hget(keys.context("carried"), "schema")
            assert written == version.encode(), written
            names = [keys.job("carried"), keys.queue(QUEUE), *keys.of_context("carried")]
            dumps = {key: b64encode(connection.dump(key)).decode() for key in names if connection.exists(key)}
    (GOLDEN / f"{version}.json").write_text(json.dumps(dumps, indent=1) + "\n")


if __name__ == "__main__":
    write_golden(sys.argv[1])
