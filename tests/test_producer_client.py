"""The Python client against a real server: what it enqueues, what it reads back, and what it leaves behind."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
import redis
from rq import Queue
from rq.job import Job
from rq.utils import as_text

from batonq.producer import Producer, keys, serializer
from batonq.producer.client import connect, describe, make_job
from batonq.producer.embedded import EmbeddedServer
from batonq.producer.errors import JobError, JobNotFoundError, ResultTimeoutError
from batonq.producer.schema import FUNCTION, RESULT_TTL, PromptJob
from tests.support.answering import Answering, answer
from tests.support.running import ANSWERING, environment
from tests.support.servers import server


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    with server(tmp_path_factory.mktemp("valkey")) as started:
        yield started


@pytest.fixture
def producer(running: EmbeddedServer) -> Iterator[Producer]:
    producer = Producer(running.url, queue="tiny")
    producer.connection.flushall()
    yield producer
    producer.connection.close()


def test_a_job_is_a_stock_rq_job(producer: Producer) -> None:
    job_id = producer.submit(prompt="a secret prompt", max_tokens=50, custom_id="mine")
    job = Job.fetch(job_id, connection=producer.connection, serializer=serializer)
    assert job.func_name == FUNCTION
    assert job.kwargs["prompt"] == "a secret prompt"
    assert job.kwargs["id"] == job_id
    assert job.kwargs["model"] == job.origin == "tiny"
    assert (job.timeout, job.result_ttl, job.failure_ttl) == (-1, RESULT_TTL, RESULT_TTL)
    assert job.description == "generate: 15 characters, max_tokens 50"
    assert Queue("tiny", connection=producer.connection, serializer=serializer).job_ids == [job_id]
    assert PromptJob.model_validate(job.kwargs).sampling.max_tokens == 50


def test_descriptions_tell_sizes_only() -> None:
    assert describe(make_job(token_ids=[1, 2, 3])) == "generate: 3 tokens"
    chat = make_job(messages=[{"role": "system", "content": "ab"}, {"role": "user", "content": "c"}], max_tokens=1)
    assert describe(chat) == "generate: 3 characters in 2 messages, max_tokens 1"


def test_a_job_goes_to_the_queue_of_its_model(producer: Producer) -> None:
    other = producer.submit(prompt="a", model="other")
    assert producer.connection.lrange(keys.queue("other"), 0, -1) == [other.encode()]


def test_many_jobs_keep_their_order(producer: Producer) -> None:
    ids = producer.submit_many(make_job(prompt=f"p{i}", model="odd" if i % 7 == 0 else None) for i in range(600))
    assert len(set(ids)) == 600
    queued = [as_text(item) for item in producer.connection.lrange(keys.queue("tiny"), 0, -1)]
    assert queued == [job_id for i, job_id in enumerate(ids) if i % 7]


def test_the_same_id_is_enqueued_once(producer: Producer) -> None:
    job = make_job(prompt="a", id="only")
    assert producer.submit_many([job, make_job(prompt="b")])[0] == producer.submit(job) == "only"
    assert producer.connection.llen(keys.queue("tiny")) == 2
    assert producer.enqueue([job.model_copy(update={"model": "tiny"})]) == {"only"}


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"prompt": "a", "top_p": 0}, "invalid_parameter", "top_p"),
        ({"prompt": "a", "guided_json": {}}, "unsupported_parameter", "guided_json"),
        ({}, "invalid_parameter", None),
    ],
)
def test_fields_that_make_no_job(producer: Producer, fields: dict[str, object], code: str, param: str | None) -> None:
    with pytest.raises(JobError) as caught:
        producer.submit(**fields)
    assert (caught.value.code, caught.value.param) == (code, param)
    assert producer.connection.dbsize() == 0


def test_a_job_needs_a_queue(running: EmbeddedServer) -> None:
    with pytest.raises(JobError) as caught:
        Producer(connect(running.url)).submit(prompt="a")
    assert caught.value.code == "missing_model"


def test_results_of_jobs_that_ended(running: EmbeddedServer, producer: Producer) -> None:
    good, bad, foreign = producer.submit_many(
        [make_job(prompt="héllo 🔥", custom_id="c"), make_job(prompt="fail: a"), make_job(prompt="foreign: a")]
    )
    worker = Answering(running.url, "tiny", 0)
    for job_id in (good, bad, foreign):
        worker.take(job_id.encode())
    open_job = producer.submit(prompt="later")
    results = producer.results([good, bad, foreign, open_job, "unknown"])
    assert results.keys() == {good, bad, foreign}
    errors = {job_id: result.error for job_id, result in results.items() if result.error is not None}
    assert errors.keys() == {bad, foreign}
    assert results[good].choices[0].text == answer("héllo 🔥")
    assert results[good].custom_id == "c"
    assert errors[bad].code == "context_length_exceeded"
    assert errors[foreign].code == "job_failed"
    assert "RuntimeError: it broke" in errors[foreign].message
    assert results[foreign].model == "tiny"


def test_a_result_that_is_none_of_ours(producer: Producer) -> None:
    job_id = producer.submit(prompt="a")
    producer.connection.hset(keys.job(job_id), "status", "finished")
    producer.connection.xadd(keys.results(job_id), {"type": 1, "return_value": "gASVBQAAAA=="})
    result = producer.result(job_id, timeout=5)
    assert result.error is not None
    assert result.error.code == "invalid_result"


def test_a_canceled_job_has_ended(producer: Producer) -> None:
    job_id = producer.submit(prompt="a")
    Job.fetch(job_id, connection=producer.connection, serializer=serializer).cancel()
    result = producer.result(job_id, timeout=5)
    assert result.error is not None
    assert result.error.code == "job_canceled"


def test_waiting_for_a_result(running: EmbeddedServer, producer: Producer) -> None:
    job_id = producer.submit(prompt="a")
    command = [sys.executable, ANSWERING, "--redis-url", running.url, "--model", "tiny", "--served-model-name", "tiny"]
    worker = subprocess.Popen(command, env=environment(answer_seconds=0.2))
    try:
        assert producer.result(job_id, timeout=60).choices[0].text == answer("a")
        assert producer.result(job_id).choices[0].text == answer("a")  # and again
    finally:
        worker.terminate()
        assert worker.wait(30) == 0


def test_waiting_ends(producer: Producer) -> None:
    with pytest.raises(ResultTimeoutError) as late:
        producer.result(producer.submit(prompt="a"), timeout=0.05)
    assert late.value.values["seconds"] == 0.05
    with pytest.raises(JobNotFoundError):
        producer.result("unknown")


def test_an_earlier_try_is_not_the_result(producer: Producer) -> None:
    job_id = producer.submit(prompt="a")
    producer.connection.xadd(keys.results(job_id), {"type": 4})  # rq notes a retry like this
    with pytest.raises(ResultTimeoutError):
        producer.result(job_id, timeout=0.05)


def test_deleting_leaves_nothing(running: EmbeddedServer, producer: Producer) -> None:
    ids = producer.submit_many([make_job(prompt="a"), make_job(prompt="fail:")])
    worker = Answering(running.url, "tiny", 0)
    for job_id in ids:
        worker.take(job_id.encode())
        producer.connection.set(keys.tokens(job_id), b"x")
        producer.connection.hset(keys.context(job_id), "a", "b")
    producer.delete([*ids, "unknown"])
    assert {key.decode() for key in producer.connection.scan_iter()} == {"rq:queues", "answered"}


def test_a_lost_connection_is_an_error() -> None:
    producer = Producer("unix:///nonexistent/server.sock", queue="tiny")
    with pytest.raises(redis.ConnectionError):
        producer.submit(prompt="a")


def test_many_producers_with_the_same_ids(running: EmbeddedServer, producer: Producer) -> None:
    """Two processes that submit the same jobs at once enqueue each once."""
    program = (
        "import sys; from batonq.producer import Producer; from batonq.producer.client import make_job\n"
        "Producer(sys.argv[1], queue='tiny').submit_many(make_job(prompt='a', id=f'job-{i}') for i in range(2000))"
    )
    racers = [subprocess.Popen([sys.executable, "-c", program, running.url]) for _ in range(2)]
    assert [racer.wait(60) for racer in racers] == [0, 0]
    assert producer.connection.llen(keys.queue("tiny")) == 2000
