"""The package as a user installs it: into an empty environment, without a compiler."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
import zipfile
from importlib import resources
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built where no compiler and no build tool can be found."""
    target = tmp_path_factory.mktemp("wheel")
    tools = tmp_path_factory.mktemp("tools")
    (tools / "python3").symlink_to(sys.executable)
    environment = {"PATH": str(tools), "HOME": os.environ["HOME"], "CC": "/nonexistent/cc", "CXX": "/nonexistent/c++"}
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(target), str(ROOT)],
        env=environment,
        check=True,
    )
    (built,) = target.glob("batonq-*.whl")
    return built


def test_the_wheel_holds_the_four_rooms_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    rooms = {name.split("/")[1] for name in names if name.startswith("batonq/")}
    assert rooms == {"producer", "worker", "engine", "kernels"}
    assert {name.split("/")[0] for name in names} == {"batonq", f"{wheel.name.split('-py3')[0]}.dist-info"}
    shipped = {Path(*Path(name).parts[1:]) for name in names if name.startswith("batonq/")}
    kept = {path.relative_to(ROOT) for room in rooms for path in (ROOT / room).rglob("*") if path.is_file()}
    assert shipped == {path for path in kept if path.suffix in (".py", ".lua", ".typed") or path.name == "py.typed"}


def test_where_there_is_a_compiler_the_library_is_shipped() -> None:
    """The environment of the tests itself was installed so, unless it has no compiler."""
    library = resources.files("batonq.kernels") / "libbatonq_cpu.so"
    assert library.is_file() or shutil.which("c++") is None


def test_a_light_install_can_enqueue(wheel: Path, tmp_path: Path) -> None:
    """Without the extras: the package alone, beside its light dependencies."""
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    pip = [str(python), "-m", "pip", "install", "-q", "-c", str(ROOT / "constraints.txt")]
    subprocess.run([*pip, str(wheel)], check=True)
    shown = subprocess.run(
        [tmp_path / "venv" / "bin" / "batonq", "--version"], capture_output=True, text=True, check=True
    )
    assert shown.stdout.startswith("batonq 0.")
    program = "import batonq.producer as p; print(p.PromptJob(prompt='hi').to_kwargs()['prompt'], p.Producer.__name__)"
    done = subprocess.run([python, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["hi", "Producer"]
    refused = subprocess.run(
        [tmp_path / "venv" / "bin" / "batonq", "worker", "--model", "smollm2-135m"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert refused.returncode == 1
    assert "pip install 'batonq[worker]'" in refused.stderr
