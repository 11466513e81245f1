"""The walls of the house: who imports whom, what is light, and what is shipped."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
ROOMS = ("producer", "worker", "engine", "kernels")

#: The modules of other rooms that each room may import; None: any of that room.
ALLOWED: dict[str, dict[str, set[str] | None]] = {
    "kernels": {},
    "engine": {"kernels": None},
    "worker": {"engine": None, "producer": {"schema", "serializer", "keys"}},
    "producer": {"engine": {"sampling_params"}},
}


def imports(path: Path) -> set[str]:
    """Every batonq module that a file imports, at its top or in a function."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            # `from batonq.producer import keys` names a module by its alias.
            room_only = node.module.count(".") == 1
            found |= {f"{node.module}.{alias.name}" if room_only else node.module for alias in node.names}
    return {name for name in found if name.startswith("batonq.")}


@pytest.mark.parametrize("path", [path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))], ids=str)
def test_imports_run_one_way(path: Path) -> None:
    room = path.relative_to(ROOT).parts[0]
    for name in imports(path):
        _, other, *rest = name.split(".")
        if other == room:
            continue
        assert other in ALLOWED[room], f"{room} imports {name}"
        modules = ALLOWED[room][other]
        assert modules is None or rest[0] in modules, f"{room} imports {name}"


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("batonq.producer", ["torch", "numpy", "transformers", "typer", "batonq.worker", "batonq.engine.engine"]),
        ("batonq.producer.client", ["torch", "numpy", "transformers", "batonq.worker", "batonq.engine.engine"]),
        ("batonq.producer.run", ["torch", "numpy", "transformers", "batonq.worker", "batonq.engine.engine"]),
        ("batonq.worker.worker", ["torch", "transformers"]),
        ("batonq.worker.cli", ["torch", "numpy", "transformers", "rq"]),
        ("batonq.engine", ["torch", "numpy"]),
        ("batonq.engine.engine", ["torch", "numpy", "redis"]),
        ("batonq.engine.scheduler", ["torch", "numpy", "redis"]),
        ("batonq.engine.loading", ["torch", "transformers", "redis"]),
        ("batonq.engine.models.loader", ["torch", "transformers", "safetensors", "huggingface_hub"]),
        ("batonq.engine.runner", ["torch"]),
        ("batonq.engine.sampler", ["torch"]),
        ("batonq.kernels", ["torch", "numpy"]),
        ("batonq.kernels.backend", ["torch"]),
        ("batonq.kernels.cpu_sampling", ["torch"]),
    ],
)
def test_importing_brings_no_more_than_is_needed(module: str, absent: list[str]) -> None:
    program = f"import sys, {module}; print(*sorted(set({absent!r}) & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


@pytest.mark.parametrize("room", ROOMS)
def test_every_room_is_typed_and_documented(room: str) -> None:
    assert (ROOT / room / "py.typed").is_file()
    assert import_module(f"batonq.{room}").__doc__


def test_rooms_export_what_they_say() -> None:
    for room in ("producer", "engine"):
        module = import_module(f"batonq.{room}")
        for name in module.__all__:
            assert getattr(module, name).__name__ == name
        with pytest.raises(AttributeError):
            module.nothing_of_the_kind  # noqa: B018


def test_compose_runs_a_server_that_loses_nothing_and_a_worker_that_hands_on() -> None:
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    command = services["redis"]["command"]
    options = {command[i].removeprefix("--"): command[i + 1] for i in range(1, len(command), 2)}
    assert options["appendonly"] == "yes"
    assert options["maxmemory-policy"] == "noeviction"
    assert options["stream-node-max-bytes"] == "256"
    assert all("healthcheck" in service for service in services.values())
    worker = services["worker"]
    assert worker["depends_on"]["redis"]["condition"] == "service_healthy"
    from batonq.worker.worker import STOP_SECONDS  # noqa: PLC0415

    assert int(worker["stop_grace_period"].removesuffix("s")) > STOP_SECONDS
    for service in services.values():
        for mount in service["volumes"]:
            assert mount.split(":")[0] in yaml.safe_load((ROOT / "docker-compose.yml").read_text())["volumes"]


def test_commands_of_compose_and_dockerfile_exist() -> None:
    from batonq.producer.cli import COMMANDS  # noqa: PLC0415

    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    assert services["worker"]["command"][0] in COMMANDS
    assert services["worker"]["healthcheck"]["test"][2] in COMMANDS
    dockerfile = (ROOT / "Dockerfile").read_text()
    copied = {word for line in dockerfile.splitlines() if line.startswith("COPY") for word in line.split()[1:-1]}
    assert set(ROOMS) | {"pyproject.toml", "CMakeLists.txt", "LICENSE", "README.md", "constraints.txt"} == copied
    assert all((ROOT / name).exists() for name in copied)


def test_versions_that_make_installs_satisfy_what_the_package_asks_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    pins = dict(
        line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")
    )
    assert pins["torch"] == "2.13.0"
    extras = project["project"]["optional-dependencies"]
    wanted = [*project["project"]["dependencies"], *extras["worker"], *extras["embedded"]]
    for requirement in wanted:
        name, _, extra = requirement.split(">")[0].split("<")[0].strip().lower().rstrip("]").partition("[")
        assert name in pins, f"{name} is not pinned"
        assert not extra or extra in pins, f"{extra} is not pinned"
