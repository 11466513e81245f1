"""Every Redis key in one place: rq's own, and ours under `{prefix}:batonq:`.

The prefix is rq's `RQ_KEY_PREFIX`, read from the environment when rq is imported. A prefix with a hash tag, such as
`{rq}`, puts every key into one Cluster slot.
"""

from __future__ import annotations

from rq.defaults import RQ_KEY_PREFIX

PREFIX = RQ_KEY_PREFIX

QUEUES = f"{PREFIX}:queues"
WORKERS = f"{PREFIX}:workers"
SUSPENDED = f"{PREFIX}:suspended"


def queue(name: str) -> str:
    """List of queued job ids, next one first."""
    return f"{PREFIX}:queue:{name}"


def job(job_id: str) -> str:
    """Hash of a job; the fence (`batonq_epoch`, `batonq_execution`) lives in it."""
    return f"{PREFIX}:job:{job_id}"


def results(job_id: str) -> str:
    """Stream of a job's results."""
    return f"{PREFIX}:results:{job_id}"


def started(queue_name: str) -> str:
    """Sorted set of `job id:execution id` now running."""
    return f"{PREFIX}:wip:{queue_name}"


def finished(queue_name: str) -> str:
    """Sorted set of finished job ids, scored by expiry."""
    return f"{PREFIX}:finished:{queue_name}"


def failed(queue_name: str) -> str:
    """Sorted set of failed job ids, scored by expiry."""
    return f"{PREFIX}:failed:{queue_name}"


def canceled(queue_name: str) -> str:
    """Sorted set of canceled job ids, scored by expiry."""
    return f"{PREFIX}:canceled:{queue_name}"


def scheduled(queue_name: str) -> str:
    """Sorted set of job ids to be queued later, scored by when."""
    return f"{PREFIX}:scheduled:{queue_name}"


def deferred(queue_name: str) -> str:
    """Sorted set of ids of jobs that wait for other jobs."""
    return f"{PREFIX}:deferred:{queue_name}"


def execution(job_id: str, execution_id: str) -> str:
    """Hash of one execution of a job."""
    return f"{PREFIX}:execution:{job_id}:{execution_id}"


def executions(job_id: str) -> str:
    """Sorted set of a job's execution ids."""
    return f"{PREFIX}:executions:{job_id}"


def dependents(job_id: str) -> str:
    """Set of ids of jobs that wait for this one."""
    return f"{PREFIX}:job:{job_id}:dependents"


def dependencies(job_id: str) -> str:
    """Set of ids of jobs that this one waits for (the double colon is rq's)."""
    return f"{PREFIX}:job::{job_id}:dependencies"


def worker(name: str) -> str:
    """Hash of a worker."""
    return f"{PREFIX}:worker:{name}"


def worker_executions(name: str) -> str:
    """Set of `job id:execution id` that a worker runs."""
    return f"{PREFIX}:worker:{name}:executions"


def workers_of_queue(queue_name: str) -> str:
    """Set of keys of the workers that serve a queue."""
    return f"{PREFIX}:workers:{queue_name}"


def pubsub(worker_name: str) -> str:
    """Channel on which a worker hears commands."""
    return f"{PREFIX}:pubsub:{worker_name}"


def context(context_id: str) -> str:
    """Hash that mirrors a context: its effective request, state and position."""
    return f"{PREFIX}:batonq:ctx:{context_id}"


def tokens(context_id: str) -> str:
    """String of a context's committed output token ids, packed as little-endian uint32."""
    return f"{PREFIX}:batonq:tok:{context_id}"


def logprobs(context_id: str) -> str:
    """String of the log probabilities of a context's committed tokens, a fixed number of bytes for each."""
    return f"{PREFIX}:batonq:lp:{context_id}"


def stream(context_id: str) -> str:
    """Stream of a context's text as it grows; an entry's id is the number of tokens up to its end."""
    return f"{PREFIX}:batonq:stream:{context_id}"


def lease(queue_name: str) -> str:
    """Hash of the leases of a queue's workers: name → counter, which changes as long as the worker lives."""
    return f"{PREFIX}:batonq:lease:{queue_name}"


def aside(queue_name: str) -> str:
    """Sorted set of queued job ids that wait outside the queue for a worker that can carry them on, by since when."""
    return f"{PREFIX}:batonq:aside:{queue_name}"


def followups(queue_name: str) -> str:
    """Hash of ended jobs whose dependents, callbacks or webhooks are not served yet: job id → worker that is at it."""
    return f"{PREFIX}:batonq:followups:{queue_name}"


def context_ids(job_id: str, n: int) -> list[str]:
    """Ids of a job's contexts: its own, or `{job id}.{i}` where it asks for several outputs."""
    return [job_id] if n == 1 else [f"{job_id}.{index}" for index in range(n)]


def of_context(context_id: str) -> tuple[str, ...]:
    """Every key that a context has."""
    return context(context_id), tokens(context_id), logprobs(context_id), stream(context_id)


def done(client_id: str) -> str:
    """List of ids of ended jobs, for a client that asked to be told (`PromptJob.client_id`)."""
    return f"{PREFIX}:batonq:done:{client_id}"
