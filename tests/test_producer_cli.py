"""The command line: light to import, clear when used wrongly."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.answering import answer
from tests.support.running import ANSWERING, environment
from tests.support.servers import server


def batonq(*arguments: str) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "-c", "from batonq.producer.cli import main; main()"]
    return subprocess.run(
        [*program, *arguments], env=environment(), capture_output=True, text=True, timeout=60, check=False
    )


def test_help_teaches_by_examples_and_imports_no_subcommand() -> None:
    program = (
        "import sys\nfrom batonq.producer.cli import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit as end:\n    assert end.code == 0\n"
        "heavy = {'torch', 'numpy', 'batonq.producer.commands', 'batonq.worker', 'batonq.kernels'}\n"
        "assert not heavy & sys.modules.keys(), heavy & sys.modules.keys()\n"
    )
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert "batonq run -i prompts.jsonl -o results.jsonl" in shown
    for command in ("run", "submit", "worker"):
        assert f"\n  {command} " in shown


def test_importing_the_client_is_light() -> None:
    program = (
        "import sys, batonq.producer\nassert 'redis' not in sys.modules\n"
        "from batonq.producer import Producer, PromptJob, Result, SamplingParams\n"
        "heavy = {'torch', 'numpy', 'typer', 'rich', 'sqlite3', 'batonq.worker', 'batonq.kernels'}\n"
        "assert not heavy & sys.modules.keys(), heavy & sys.modules.keys()\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize("command", ["run", "submit"])
def test_help_of_subcommands(command: str) -> None:
    done = batonq(command, "--help")
    assert done.returncode == 0
    assert "--model" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["rnu"], 2, "Did you mean 'run'"),
        (["run", "-i", "a"], 2, "Missing option"),
        (["submit", "--model", "m", "hi"], 2, "REDIS_URL"),
        (["submit", "--model", "m", "--redis-url", "unix:///nonexistent.sock", "hi"], 1, "Redis: "),
        (["submit", "--model", "m", "--redis-url", "nonsense", "hi"], 1, "scheme"),
        (["submit", "--model", "m", "--redis-url", "unix:///x", "--top-p", "2", "hi"], 1, "top_p"),
        (["run", "-i", "nothing.jsonl", "-o", "out.jsonl", "--model", "m"], 1, "no input file nothing.jsonl"),
    ],
)
def test_mistakes_end_in_a_sentence(arguments: list[str], code: int, words: str) -> None:
    done = batonq(*arguments)
    assert done.returncode == code
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_submit(tmp_path: Path) -> None:
    with server(tmp_path) as running:
        options = ["--model", "tiny", "--redis-url", running.url]
        job_id = batonq("submit", *options, "first").stdout.strip()
        assert json.loads(batonq("submit", *options, "--json", "second").stdout).keys() == {"id"}
        late = batonq("submit", *options, "--wait", "--timeout", "0.1", "third")
        assert (late.returncode, late.stdout) == (1, "")
        assert "had not ended" in late.stderr
        command = [sys.executable, ANSWERING, "--redis-url", running.url, "--model", "m", "--served-model-name", "tiny"]
        worker = subprocess.Popen(command)
        try:
            said = batonq("submit", *options, "--wait", "--chat", "--max-tokens", "5", "hello")
            assert said.stdout == answer("hello") + "\n"
            whole = batonq("submit", *options, "--wait", "--json", "--seed", "7", "hello")
            assert json.loads(whole.stdout)["seed"] == 7
            failed = batonq("submit", *options, "--wait", "fail: so")
            assert (failed.returncode, failed.stdout, failed.stderr) == (1, "", "batonq: too long\n")
        finally:
            worker.terminate()
            assert worker.wait(30) == 0
        assert len(job_id) == 32
