"""The plain names `jobs`, `workers` and `sharding` are ours, even where the user's own folders are called the same."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs.verbs import PROGRAM

NAMES = ("jobs", "workers", "sharding")
ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A working directory whose own `jobs`, `workers` and `sharding` betray themselves when imported."""
    for name in NAMES:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"raise SystemExit('imported the user\\'s own {name}')\n")
    return tmp_path


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    """A working directory with folders of our names that hold no Python at all."""
    for name in NAMES:
        (tmp_path / name).mkdir()
        (tmp_path / name / "monday.yaml").write_text("a: 1\n")
    return tmp_path


def script(name: str) -> str:
    """Entry point of the installed distribution, beside the interpreter."""
    path = Path(sys.executable).with_name(name)
    assert path.is_file(), f"{name} is not installed beside {sys.executable}: run `make install`"
    return str(path)


def run(command: list[str], directory: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")} | environment
    return subprocess.run(command, cwd=directory, env=env, capture_output=True, text=True, timeout=300)


def test_no_other_distribution_owns_our_names() -> None:
    owners = importlib.metadata.packages_distributions()
    assert {name: set(owners.get(name, ())) for name in NAMES} == {name: {PROGRAM} for name in NAMES}


def test_the_distribution_brings_no_further_top_level_name() -> None:
    owners = importlib.metadata.packages_distributions()
    mine = {name for name, distributions in owners.items() if PROGRAM in distributions}
    assert {name for name in mine if not name.startswith("__editable__")} == set(NAMES)


def test_the_distribution_brings_every_package_of_the_source_tree() -> None:
    setup = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    here = {path.parent.relative_to(ROOT).as_posix() for name in NAMES for path in (ROOT / name).rglob("*.py")}
    assert set(setup["packages"]) == {folder.replace("/", ".") for folder in here}


@pytest.mark.parametrize("command", ["jobs", PROGRAM])
@pytest.mark.parametrize("kind", ["hostile", "plain"])
def test_entry_points_use_the_installed_package(command: str, kind: str, request: pytest.FixtureRequest) -> None:
    directory = request.getfixturevalue(kind)
    done = run([script(command), "schema"], directory)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)


@pytest.mark.parametrize("kind", ["hostile", "plain"])
def test_the_module_form_with_a_safe_path_uses_the_installed_package(kind: str, request: pytest.FixtureRequest) -> None:
    directory = request.getfixturevalue(kind)
    done = run([sys.executable, "-P", "-m", "jobs", "schema"], directory)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_bare_module_form_takes_the_working_directory_as_python_does(hostile: Path) -> None:
    done = run([sys.executable, "-m", "jobs", "schema"], hostile)
    assert done.returncode != 0
    assert "imported the user's own jobs" in done.stderr


def test_doctor_names_the_folders_of_the_working_directory(plain: Path) -> None:
    done = run([script(PROGRAM), "doctor"], plain)
    assert "`jobs`, `workers`, `sharding`" in " ".join(done.stdout.split())


@pytest.mark.parametrize("kind", ["hostile", "plain"])
def test_ray_workers_started_from_such_a_directory_use_the_installed_package(
    kind: str, request: pytest.FixtureRequest
) -> None:
    directory = request.getfixturevalue(kind)
    pq.write_table(pa.table({"doc": [f"text number {row}" for row in range(40)]}), directory / "in.parquet")
    (directory / "embed.yaml").write_text(
        "name: names\n"
        "task: {kind: embed, text: doc}\n"
        "model: {source: 'fake:8'}\n"
        "input: {path: in.parquet}\n"
        "output: {path: out}\n"
        "workers: {replicas: 1, cpus: 1}\n"
    )
    done = run([script(PROGRAM), "submit", "embed.yaml"], directory)
    assert done.returncode == 0, done.stderr
    assert pq.read_table(directory / "out").num_rows == 40
