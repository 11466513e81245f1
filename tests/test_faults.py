"""Faults at named points, injected into real workers over a tiny model: the output is a calm run's, byte for byte.

Each test is named by the fault. Where nothing else is said, jobs of every kind are under way: greedy and sampled, with
penalties, stop strings, log probabilities, streams and two outputs.
"""

from __future__ import annotations

import random
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgpack
import psutil
import pytest
import redis

from batonq.producer import Producer, keys
from batonq.producer.embedded import EmbeddedServer
from batonq.producer.errors import JobNotFoundError
from batonq.producer.schema import PromptJob
from batonq.worker import step_log
from batonq.worker.scripts import Scripts
from tests.support.fleets import QUEUE, Fleet, Outcome, calm_outcomes, fleet, jobs, tiny_model
from tests.support.proxies import proxy
from tests.support.servers import eventually

SLOW = {"step_seconds": 0.005}
FAST_LEASE = ("--lease", "1.0")
JOBS = jobs(8, 120)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory, model: Path) -> dict[str, Outcome]:
    return calm_outcomes(tmp_path_factory.mktemp("calm"), model, JOBS)


def connect(running: Fleet) -> redis.Redis:
    return redis.Redis.from_url(running.valkey.url)


def tokens_committed(running: Fleet, made: list[PromptJob] = JOBS) -> int:
    with connect(running) as connection:
        names = [name for job in made for name in keys.context_ids(str(job.id), job.n)]
        return sum(connection.strlen(keys.tokens(name)) for name in names) // 4


def halfway(running: Fleet) -> None:
    eventually(lambda: tokens_committed(running) > 100, "tokens are committed")


POINTS = [(1, "before sample"), (1, "after sample"), (20, "after sample")]


@pytest.mark.parametrize("victim", ["child", "parent", "both"])
@pytest.mark.parametrize(("step", "point"), POINTS, ids=["before the first sample", "before the first commit", "later"])
def test_killed_at_a_point(
    victim: str, step: int, point: str, tmp_path: Path, model: Path, expected: dict[str, Outcome]
) -> None:
    once = tmp_path / "struck"
    faults = {"at": point, "step": step, "do": "hang", "once": str(once)}
    with fleet(tmp_path / "fleet", *FAST_LEASE, model=model, **faults) as running:
        running.submit(JOBS)
        running.start_worker(0)
        eventually(once.exists, "the point is reached")
        running.start_worker(1)
        running.kill(0, victim)
        running.await_end(JOBS)
        assert running.outcomes(JOBS) == expected


def test_killed_after_a_commit_that_nobody_has_read(tmp_path: Path, model: Path, expected: dict[str, Outcome]) -> None:
    with fleet(tmp_path / "fleet", *FAST_LEASE, model=model, **SLOW) as running:
        running.submit(JOBS)
        running.start_worker(0)
        streaming = next(str(job.id) for job in JOBS if job.stream and job.n == 1)
        with connect(running) as connection:
            eventually(lambda: connection.xlen(keys.stream(streaming)) > 3, "a stream has entries")
        running.kill(0, "both")
        running.start_worker(1)
        running.await_end(JOBS)
        assert running.outcomes(JOBS) == expected


def test_killed_while_it_computes_what_another_had_begun(
    tmp_path: Path, model: Path, expected: dict[str, Outcome]
) -> None:
    with fleet(tmp_path / "fleet", *FAST_LEASE, model=model, **SLOW) as running:
        running.submit(JOBS)
        running.start_worker(0)
        halfway(running)
        running.faults = {"at": "before sample", "step": 1, "do": "hang", "once": str(tmp_path / "struck")}
        running.kill(0, "both")
        running.start_worker(1)
        eventually((tmp_path / "struck").exists, "the second owner computes")
        running.kill(1, "both")
        running.start_worker(2)
        running.await_end(JOBS)
        assert running.outcomes(JOBS) == expected


@pytest.mark.parametrize("script", ["claim", "pin", "commit", "finish", "release"])
def test_a_reply_is_lost(script: str, tmp_path: Path, model: Path, expected: dict[str, Outcome]) -> None:
    """The script was carried out, and its caller doesn't know."""
    with fleet(tmp_path / "fleet", model=model, **SLOW) as running, proxy(tmp_path, running.valkey.url) as between:
        running.url = between.url
        with connect(running) as connection:
            between.lose_reply_to = Scripts(connection).sha(script).encode()
        running.submit(JOBS)
        running.start_worker(0)
        if script == "release":
            halfway(running)
            running.workers[0].process.terminate()
            assert running.workers[0].process.wait(60) == 0
            running.start_worker(1)
        running.await_end(JOBS)
        assert between.lost.is_set()
        assert running.outcomes(JOBS) == expected


@pytest.mark.parametrize("script", ["claim", "commit", "finish"])
def test_killed_before_a_reply(script: str, tmp_path: Path, model: Path, expected: dict[str, Outcome]) -> None:
    with (
        fleet(tmp_path / "fleet", *FAST_LEASE, model=model, **SLOW) as running,
        proxy(tmp_path, running.valkey.url) as between,
    ):
        running.url = between.url
        with connect(running) as connection:
            between.lose_reply_to = Scripts(connection).sha(script).encode()
        between.on_loss = lambda: running.kill(0, "both")
        running.submit(JOBS)
        running.start_worker(0)
        assert between.lost.wait(60)
        running.start_worker(1)
        running.await_end(JOBS)
        assert running.outcomes(JOBS) == expected


def test_cut_off_from_the_server(tmp_path: Path, model: Path) -> None:
    """It stops before its lease is over, another takes over, and when the network is back nothing of it counts."""
    with fleet(tmp_path / "fleet", "--lease", "2.0", model=model, **SLOW) as running:
        long = jobs(8, 900, "long")
        with proxy(tmp_path, running.valkey.url) as between:
            running.url = between.url
            running.submit(long)
            running.start_worker(0)
            eventually(lambda: tokens_committed(running, long) > 100, "tokens are committed")
            between.cut.set()
            cut_at = time.monotonic()
            running.url = None
            running.start_worker(1)
            with connect(running) as connection:
                second = running.workers[1].name
                eventually(lambda: connection.scard(keys.worker_executions(second)), "another takes over")
            taken_at = time.monotonic()
            first = [
                sample.at
                for path in running.samples.iterdir()
                if path.name.startswith(f"{running.workers[0].child().pid}-")  # type: ignore[union-attr]
                for sample in step_log.read(path)
            ]
            assert max(first) < taken_at, "it went on after its lease was over"
            assert max(first) > cut_at, "it did not even go on for a while"
            between.cut.clear()
            eventually(lambda: "no longer ours" in running.log, "it hears that it has lost them")
            running.await_end(long)
            got = running.outcomes(long)
    assert got == calm_outcomes(tmp_path / "calm", model, long)


def restart(running: Fleet, change: Callable[[Path], object] = lambda _: None) -> None:
    """Kill the server and start it again in its directory, after `change` to it."""
    running.valkey.kill()
    change(running.valkey.directory)
    running.valkey = EmbeddedServer(running.valkey.directory)


def commands(log: bytes) -> list[int]:
    """Where each command, or each transaction as a whole, begins in an append-only file."""
    at, starts, inside = 0, list[int](), False
    while at < len(log):
        begin = at
        end = log.index(b"\r\n", at)
        words, at = [], end + 2
        for _ in range(int(log[begin + 1 : end])):
            end = log.index(b"\r\n", at)
            size = int(log[at + 1 : end])
            words.append(log[end + 2 : end + 2 + size].upper())
            at = end + 2 + size + 2
        if not inside:
            starts.append(begin)
        inside = (inside or words[0] == b"MULTI") and words[0] != b"EXEC"
    return starts


def forget(directory: Path, part: float) -> None:
    """Cut the append-only file at a command, so that it holds about this part of what it held."""
    (file,) = (directory / "appendonlydir").glob("*.incr.aof")
    log = file.read_bytes()
    starts = commands(log)
    file.write_bytes(log[: starts[int(len(starts) * part)]])


def test_the_server_is_killed(tmp_path: Path, model: Path, expected: dict[str, Outcome]) -> None:
    """Synced at every write, it loses nothing that it acknowledged."""
    with fleet(tmp_path / "fleet", model=model, **SLOW) as running:
        with connect(running) as connection:
            connection.config_set("appendfsync", "always")
        running.submit(JOBS)
        running.start_worker(0)
        halfway(running)
        before = tokens_committed(running)
        restart(running)
        assert tokens_committed(running) >= before
        running.await_end(JOBS)
        assert running.outcomes(JOBS) == expected


@pytest.mark.parametrize("part", [0.9, 0.5])
def test_the_server_comes_back_younger(part: float, tmp_path: Path, model: Path, expected: dict[str, Outcome]) -> None:
    """Acknowledged tokens, claims and perhaps ends are gone: they are made again, the same, at the same offsets."""
    with fleet(tmp_path / "fleet", *FAST_LEASE, model=model, **SLOW) as running:
        running.submit(JOBS)
        running.start_worker(0)
        halfway(running)
        before = tokens_committed(running)
        restart(running, lambda directory: forget(directory, part))
        assert tokens_committed(running) < before
        running.await_end(JOBS)
        assert running.outcomes(JOBS) == expected


def test_the_server_comes_back_empty(tmp_path: Path, model: Path, expected: dict[str, Outcome]) -> None:
    """The producer is told so, and what it submits again, under the same ids, gives the same."""
    with fleet(tmp_path / "fleet", *FAST_LEASE, model=model, **SLOW) as running:
        running.submit(JOBS)
        running.start_worker(0)
        halfway(running)
        restart(running, lambda directory: [file.unlink() for file in (directory / "appendonlydir").iterdir()])
        producer = Producer(running.valkey.url)
        with pytest.raises(JobNotFoundError):
            producer.result(str(JOBS[0].id), 10)
        producer.connection.close()
        eventually(lambda: "no longer ours" in running.log, "the worker drops what it ran")
        with connect(running) as connection:
            assert not connection.keys(keys.stream("*")), "a job that nobody knows has streamed"
        running.submit(JOBS)
        running.await_end(JOBS)
        assert running.outcomes(JOBS) == expected


@pytest.mark.parametrize("how", ["full", "read-only"])
def test_the_server_takes_no_writes(how: str, tmp_path: Path, model: Path, expected: dict[str, Outcome]) -> None:
    """Contexts wait at the commit, so many tokens ahead and no more; then all goes on, without a token drawn twice."""
    with fleet(tmp_path / "fleet", model=model, **SLOW) as running, connect(running) as connection:
        running.submit(JOBS)
        running.start_worker(0)
        halfway(running)
        if how == "full":
            connection.config_set("maxmemory", "1mb")
        else:
            connection.replicaof("127.0.0.1", 1)
        eventually(lambda: "the server can't be used" in running.log, "the worker is refused")
        if how == "full":
            connection.config_set("maxmemory", "0")
        else:
            connection.replicaof("no", "one")
        running.await_end(JOBS)
        assert running.outcomes(JOBS) == expected
        drawn = running.drawn()
        assert len(drawn) == len(set(drawn))


def test_a_long_outage_pauses_the_engine(tmp_path: Path, model: Path) -> None:
    """Longer than the lease, with nobody else there: afterwards it goes on with what it has."""
    long = jobs(8, 900, "long")
    with fleet(tmp_path / "fleet", *FAST_LEASE, model=model, **SLOW) as running:
        with proxy(tmp_path, running.valkey.url) as between:
            running.url = between.url
            running.submit(long)
            running.start_worker(0)
            eventually(lambda: tokens_committed(running, long) > 100, "tokens are committed")
            between.cut.set()

            def still() -> bool:
                before = running.drawn()
                time.sleep(0.3)  # many steps' time
                return running.drawn() == before

            eventually(still, "the engine pauses")
            between.cut.clear()
            running.await_end(long)
        samples = running.drawn()
        assert len(samples) == len(set(samples)), "tokens were drawn twice"


def test_the_step_loop_hangs(tmp_path: Path, model: Path, expected: dict[str, Outcome]) -> None:
    faults = {"at": "before sample", "step": 10, "do": "hang", "once": str(tmp_path / "struck")}
    with fleet(tmp_path / "fleet", "--step-timeout", "1", model=model, **faults) as running:
        running.submit(JOBS)
        running.start_worker(0)
        running.await_end(JOBS)
        assert "has not finished a step" in running.log
        assert running.outcomes(JOBS) == expected


def test_out_of_memory_in_a_step(tmp_path: Path, model: Path, expected: dict[str, Outcome]) -> None:
    faults = {"at": "before sample", "step": 10, "do": "out of memory", "once": str(tmp_path / "struck")}
    with fleet(tmp_path / "fleet", model=model, **faults) as running:
        running.submit(JOBS)
        running.start_worker(0)
        running.await_end(JOBS)
        assert running.outcomes(JOBS) == expected


@pytest.mark.parametrize("shift", [3600, -3600])
def test_wall_clocks_jump(
    shift: int, tmp_path: Path, model: Path, expected: dict[str, Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By an hour, those of the server and of one of two workers, while jobs run: no lease lapses."""
    library, clock = tmp_path / "wall_clock.so", tmp_path / "shift"
    source = Path(__file__).parent / "support" / "wall_clock.c"
    subprocess.run(["cc", "-shared", "-fPIC", "-O2", "-o", library, source, "-ldl"], check=True)
    clock.write_bytes(bytes(8))
    shifted = {"LD_PRELOAD": str(library), "WALL_CLOCK_SHIFT": str(clock)}
    with ExitStack() as stack:
        with monkeypatch.context() as patch:  # for the server, which is started here
            for name, value in shifted.items():
                patch.setenv(name, value)
            running = stack.enter_context(fleet(tmp_path / "fleet", *FAST_LEASE, model=model, **SLOW))
        running.submit(JOBS)
        running.start_worker(0)
        running.environment = shifted
        running.start_worker(1)
        halfway(running)
        before = time.time()
        clock.write_bytes(shift.to_bytes(8, "little", signed=True))
        with connect(running) as connection:
            assert abs(connection.time()[0] - before - shift) < 60, "the server's clock has not jumped"
        running.await_end(JOBS)
        assert "lapsed" not in running.log
        assert running.outcomes(JOBS) == expected


def test_sigterm_in_the_middle_of_long_jobs(tmp_path: Path, model: Path) -> None:
    """Everything is handed back in good time, and no sample of the first owner is drawn again."""
    long = jobs(8, 900, "long")
    with fleet(tmp_path / "fleet", model=model, **SLOW) as running:
        running.submit(long)
        running.start_worker(0)
        eventually(lambda: tokens_committed(running, long) > 100, "tokens are committed")
        running.workers[0].process.terminate()
        assert running.workers[0].process.wait(30) == 0
        running.start_worker(1)
        running.await_end(long)
        samples = running.drawn()
        assert len(samples) == len(set(samples))


def test_canceled_while_it_changes_hands(tmp_path: Path, model: Path, expected: dict[str, Outcome]) -> None:
    with fleet(tmp_path / "fleet", *FAST_LEASE, model=model, **SLOW) as running:
        running.submit(JOBS)
        running.start_worker(0)
        halfway(running)
        running.kill(0, "both")
        producer = Producer(running.valkey.url)
        gone = str(JOBS[2].id)
        assert producer.cancel(gone)
        running.start_worker(1)
        rest = [job for job in JOBS if job.id != gone]
        running.await_end(rest)
        assert running.outcomes(rest) == {job_id: outcome for job_id, outcome in expected.items() if job_id != gone}
        assert producer.statuses([gone]) == {gone: "canceled"}
        with connect(running) as connection:
            assert not connection.exists(keys.tokens(gone))
            assert b"error" in connection.xrevrange(keys.stream(gone), count=1)[0][1]
            assert not connection.zcard(keys.started(QUEUE))
        producer.connection.close()


#: What nobody of us would have written, in a context that has tokens: which key or field, and its value.
_NONSENSE: dict[str, tuple[str, Any]] = {
    "no request": ("request", b""),
    "another kind of request": ("request", msgpack.packb([1, 2])),
    "an absurd input": ("request", msgpack.packb({"input": b"\xff" * 400, "sampling": {}})),
    "a pickle": ("request", b"\x80\x04cposix\nsystem\n(S'true'\ntR."),
    "parts of tokens": ("tok", b"\x01\x02\x03"),
    "tokens that do not exist": ("tok", b"\xff" * 40),
    "too many tokens": ("tok", b"\x01\x00\x00\x00" * 5000),
    "tokens after their end": ("tok", (b"\x00\x01\x00\x00" + b"\x01\x00\x00\x00") * 5),
    "no count": ("resumes", b"many"),
    "no text": ("owners", b"\xff\xfe"),
}


@pytest.mark.parametrize("what", _NONSENSE)
def test_malformed_metadata(what: str, tmp_path: Path, model: Path, expected: dict[str, Outcome]) -> None:
    """The job fails with an error that says so; its neighbours finish."""
    victim = str(JOBS[6].id)  # one that ends at EOS
    with fleet(tmp_path / "fleet", *FAST_LEASE, model=model, **SLOW) as running, connect(running) as connection:
        running.submit(JOBS)
        running.start_worker(0)
        eventually(lambda: connection.strlen(keys.tokens(victim)) >= 20, "the victim has tokens")
        running.kill(0, "both")
        field, value = _NONSENSE[what]
        if field == "tok":
            connection.set(keys.tokens(victim), value)
        else:
            connection.hset(keys.context(victim), field, value)
        running.start_worker(1)
        running.await_end(JOBS)
        rest = [job for job in JOBS if job.id != victim]
        assert running.errors([victim]) == {victim: "unreadable_context"}
        assert running.outcomes(rest) == {job_id: outcome for job_id, outcome in expected.items() if job_id != victim}
        assert running.workers[1].process.poll() is None


def test_payloads_of_two_contexts_are_swapped(tmp_path: Path, model: Path) -> None:
    """A request that belongs to another job isn't run for this one."""
    first, second = "job-0", "job-1"
    with fleet(tmp_path / "fleet", *FAST_LEASE, model=model, **SLOW) as running, connect(running) as connection:
        running.submit(JOBS)
        running.start_worker(0)
        eventually(lambda: connection.strlen(keys.tokens(first)) and connection.strlen(keys.tokens(second)), "tokens")
        running.kill(0, "both")
        held = {name: connection.hgetall(keys.context(name)) for name in (first, second)}
        connection.hset(keys.context(first), mapping=held[second])
        connection.hset(keys.context(second), mapping=held[first])
        running.start_worker(1)
        running.await_end(JOBS)
        producer = Producer(running.valkey.url)
        for name, result in producer.results([first, second]).items():
            job = next(job for job in JOBS if job.id == name)
            assert result.effective is not None
            assert result.effective.temperature == job.sampling.temperature
            assert result.usage is not None
            assert result.usage.prompt_tokens == len(job.token_ids or ())
        producer.connection.close()


def test_both_are_frozen_and_woken(tmp_path: Path, model: Path, expected: dict[str, Outcome]) -> None:
    """The owner wakes up past its lease: everything of it is refused, it drops its contexts, and serves new jobs."""
    with fleet(tmp_path / "fleet", *FAST_LEASE, model=model, **SLOW) as running:
        running.submit(JOBS)
        frozen = running.start_worker(0)
        halfway(running)
        child = frozen.child()
        assert child is not None
        stopped = [psutil.Process(frozen.process.pid), child]
        for process in stopped:
            process.suspend()
        running.start_worker(1)
        running.await_end(JOBS)
        assert "its lease has lapsed" in running.log
        for process in stopped:
            process.resume()
        eventually(lambda: "no longer ours" in running.log, "it hears that it has lost them")
        assert running.outcomes(JOBS) == expected
        running.workers[1].process.send_signal(signal.SIGTERM)
        running.workers[1].process.wait(60)
        more = jobs(8, 40, "more")
        running.submit(more)
        running.await_end(more)


def test_a_worker_comes_back_under_its_own_name(tmp_path: Path, model: Path, expected: dict[str, Outcome]) -> None:
    """Within its lease, as under a supervisor that gives it a fixed name: what it had owned goes on."""
    with fleet(tmp_path / "fleet", "--lease", "30", model=model, **SLOW) as running:
        running.names[0] = "fixed"
        running.submit(JOBS)
        running.start_worker(0)
        halfway(running)
        running.kill(0, "both")
        running.start_worker(0)
        running.await_end(JOBS)
        assert running.outcomes(JOBS) == expected


def test_nobody_takes_over_from_the_living_after_an_outage(tmp_path: Path, model: Path) -> None:
    """The server is away for longer than a lease, so nobody could renew: all go on with what they have."""
    long = jobs(16, 900, "long")
    with fleet(tmp_path / "fleet", *FAST_LEASE, model=model, **SLOW) as running, connect(running) as connection:
        for slot in range(2):
            running.start_worker(slot)
            running.await_ready(slot)
        running.submit(long)
        names = [running.workers[slot].name for slot in range(2)]
        eventually(lambda: all(connection.scard(keys.worker_executions(name)) for name in names), "both have jobs")
        eventually(lambda: tokens_committed(running, long) > 100, "tokens are committed")
        running.valkey.process.send_signal(signal.SIGSTOP)
        time.sleep(2.5)  # more than two leases
        running.valkey.process.send_signal(signal.SIGCONT)
        running.await_end(long)
        assert "is dead" not in running.log
        samples = running.drawn()
        assert len(samples) == len(set(samples)), "tokens were drawn twice"


@pytest.mark.parametrize("times", [6, pytest.param(50, marks=pytest.mark.soak)])
def test_healthy_contexts_are_not_suspected_for_ever(times: int, tmp_path: Path, model: Path) -> None:
    """The engine is killed again and again, each time after progress: nobody is taken for the culprit."""
    chance, sampling = random.Random(1), {"max_tokens": 1900, "ignore_eos": True, "temperature": 0}
    long = [PromptJob(id=f"long-{i}", model=QUEUE, token_ids=(i, 2), sampling=sampling) for i in range(2)]
    with fleet(tmp_path / "fleet", model=model, **SLOW) as running, connect(running) as connection:
        running.submit(long)
        worker = running.start_worker(0)
        for _ in range(times):
            before = tokens_committed(running, long)
            goal = before + chance.randint(1, 20)
            eventually(lambda g=goal: tokens_committed(running, long) > g, "progress")  # type: ignore[misc]
            child = worker.child()
            assert child is not None
            child.kill()
            eventually(lambda c=child: worker.child() not in (None, c), "another engine")  # type: ignore[misc]
            assert all(int(connection.hget(keys.job(str(job.id)), "batonq_crashes") or 0) <= 1 for job in long)
        running.await_end(long)
        assert not any(isinstance(outcome.choices, dict) for outcome in running.outcomes(long).values())
