"""A worker process without a model: answers jobs in rq's key layout with text made from the prompt alone.

It takes a worker's options, so that `batonq run --worker-command` can start it. A job stays queued until its answer is
written, in one transaction, so it may be killed at any time. Prompts that begin with `fail:`, `foreign:` and `die:`
end in an error of ours, in a failure as rq leaves it, and in the death of the process. `ANSWER_SECONDS` slows it down.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
import zlib
from base64 import b64encode
from hashlib import blake2b
from types import FrameType
from typing import Any
from uuid import uuid4

import redis

from batonq.producer import keys, serializer
from batonq.producer.schema import RESULT_TTL, Choice, ErrorInfo, PromptJob, Result, Usage

#: List of the custom ids that were answered, each time it happened.
ANSWERED = "answered"


def answer(text: str) -> str:
    """What the model would say: the same to the same prompt."""
    return f"{text[::-1]} {blake2b(text.encode(), digest_size=4).hexdigest()}"


def prompt_text(job: PromptJob) -> str:
    if job.messages is not None:
        return "\n".join(message.content for message in job.messages)
    return job.prompt if job.prompt is not None else " ".join(map(str, job.token_ids or ()))


def make_result(job: PromptJob) -> Result:
    text = prompt_text(job)
    result = Result(id=str(job.id), custom_id=job.custom_id, model=str(job.model), seed=job.sampling.seed or 1)
    if text.startswith("fail:"):
        return result.model_copy(update={"error": ErrorInfo(code="context_length_exceeded", message="too long")})
    said = answer(text)
    usage = Usage(prompt_tokens=len(text), completion_tokens=len(said), cached_tokens=0, total_tokens=len(text + said))
    choice = Choice(index=0, text=said, token_ids=list(said.encode()), finish_reason="stop")
    return result.model_copy(update={"choices": [choice], "usage": usage, "effective": job.sampling})


def finish(connection: redis.Redis, queue: str, job: PromptJob, result: Result) -> None:
    """Everything at once: result, status, registry, and word to the client."""
    job_id = str(job.id)
    foreign = prompt_text(job).startswith("foreign:")
    failed = foreign or result.error is not None
    entry: Any = {"type": 2 if failed else 1, "worker_name": "answering"}
    if failed:
        trace = "Traceback (most recent call last):\nRuntimeError: it broke"
        entry["exc_string"] = b64encode(zlib.compress(trace.encode())).decode()
    if not foreign:
        entry["return_value"] = b64encode(serializer.dumps(result.model_dump(mode="json"))).decode()
    with connection.pipeline() as pipe:
        pipe.lrem(keys.queue(queue), 1, job_id)
        pipe.hset(keys.job(job_id), "status", "failed" if failed else "finished")
        pipe.expire(keys.job(job_id), RESULT_TTL)
        pipe.xadd(keys.results(job_id), entry)
        pipe.zadd((keys.failed if failed else keys.finished)(queue), {job_id: time.time() + RESULT_TTL})
        pipe.rpush(ANSWERED, str(job.custom_id))
        if job.client_id is not None:
            pipe.rpush(keys.done(job.client_id), job_id)
        pipe.execute()


class Answering:
    def __init__(self, url: str, queue: str, seconds: float) -> None:
        self.connection: Any = redis.Redis.from_url(url)  # redis's types leave out what a blmove may wait
        self.queue = queue
        self.seconds = seconds
        self.name = uuid4().hex
        self.stopping = False

    def stop(self, _number: int, _frame: FrameType | None) -> None:
        self.stopping = True

    def register(self) -> None:
        key = keys.worker(self.name)
        self.connection.hset(key, mapping={"queues": self.queue, "pid": os.getpid()})
        self.connection.sadd(keys.WORKERS, key)
        self.connection.sadd(keys.workers_of_queue(self.queue), key)

    def unregister(self) -> None:
        key = keys.worker(self.name)
        self.connection.srem(keys.WORKERS, key)
        self.connection.srem(keys.workers_of_queue(self.queue), key)

    def work(self) -> None:
        self.register()
        queue = keys.queue(self.queue)
        while not self.stopping:
            if self.connection.blmove(queue, queue, 0.1, "LEFT", "LEFT") is not None:
                self.take(self.connection.lindex(queue, 0))
        self.unregister()

    def take(self, job_id: Any) -> None:
        data = self.connection.hget(keys.job(job_id.decode()), "data")
        if data is None:  # deleted meanwhile
            self.connection.lrem(keys.queue(self.queue), 1, job_id)
            return
        _function, _instance, _arguments, fields = serializer.loads(zlib.decompress(data))
        job = PromptJob.model_validate(fields)
        if prompt_text(job).startswith("die:"):
            os._exit(70)
        time.sleep(self.seconds)  # the work
        finish(self.connection, self.queue, job, make_result(job))


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--redis-url", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--served-model-name", required=True)
    parser.add_argument("--num-threads")
    options = parser.parse_args()
    if options.model == "no-such-model":
        raise SystemExit("there is no model no-such-model")
    seconds = float(os.environ.get("ANSWER_SECONDS", "0"))
    worker = Answering(options.redis_url, options.served_model_name, seconds)
    signal.signal(signal.SIGTERM, worker.stop)
    worker.work()


if __name__ == "__main__":
    main()
