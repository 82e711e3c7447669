"""Imports run one way (`jobs` to `workers` to `sharding`), and heavy ones only where they belong and when needed."""

from __future__ import annotations

import ast
import fnmatch
import json
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LAYERS = ("sharding", "workers", "jobs")  # each may import itself and those before it
OWN = {*LAYERS, "benchmarks", "tests"}
ONLY_HERE = {
    "ray": ("jobs/cluster.py", "jobs/embedded_ray.py", "jobs/replica.py", "workers/actor.py"),
    "candle_py": ("workers/engine/candle.py",),
    "obstore": ("sharding/storage*",),
    "pyarrow.fs": ("sharding/storage*",),
    "fsspec": ("sharding/storage*",),
    "jinja2": ("workers/prompt/chat*.py",),
    "llguidance": ("workers/generation/constrain.py",),
    "torch": (),
    "transformers": (),
    "onnxruntime": (),
}
HEAVY = ("ray", "candle_py", "pyarrow", "numpy", "pydantic", "obstore", "tokenizers", "huggingface_hub", "jinja2")


def sources() -> list[Path]:
    found = [path for layer in LAYERS for path in sorted((ROOT / layer).rglob("*.py"))]
    assert len(found) > 20
    return found


def imported_names(path: Path) -> Iterator[str]:
    """Every module that a file imports, wherever in the file; `from a import b` gives both `a` and `a.b`."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            assert node.module is not None
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("import_module", "importlib.import_module"):
            argument = node.args[0]
            if isinstance(argument, ast.Constant):
                yield str(argument.value)


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", sources(), ids=relative)
def test_a_layer_imports_only_itself_and_those_below(path: Path) -> None:
    layer = relative(path).split("/")[0]
    allowed = set(LAYERS[: LAYERS.index(layer) + 1])
    taken = {name.split(".")[0] for name in imported_names(path)} & OWN
    assert taken <= allowed, f"{layer} must not import {sorted(taken - allowed)}"


@pytest.mark.parametrize("depth", [2, 3], ids=["folders", "modules"])
def test_workers_imports_itself_in_no_circle(depth: int) -> None:
    files = {relative(path).removesuffix(".py").replace("/", "."): path for path in (ROOT / "workers").rglob("*.py")}
    graph: dict[str, set[str]] = {}
    for module, path in files.items():
        place = ".".join(module.split(".")[:depth])
        taken = {".".join(name.split(".")[:depth]) for name in imported_names(path) if name in files}
        graph.setdefault(place, set()).update(taken - {place})
    assert graph["workers.pipeline"]
    TopologicalSorter(graph).prepare()  # a CycleError names the circle


@pytest.mark.parametrize("path", sources(), ids=relative)
def test_what_is_kept_to_one_place_is_imported_only_there(path: Path) -> None:
    taken = set(imported_names(path))
    for module, places in ONLY_HERE.items():
        if any(name == module or name.startswith(f"{module}.") for name in taken):
            assert any(fnmatch.fnmatch(relative(path), place) for place in places), f"{module} in {relative(path)}"


def test_the_linter_is_told_the_same_rules() -> None:
    ruff = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["ruff"]["lint"]
    banned = set(ruff["flake8-tidy-imports"]["banned-api"])
    exempt = {place for place, codes in ruff["per-file-ignores"].items() if "TID251" in codes}
    for module in ("ray", "candle_py", "obstore", "pyarrow.fs"):
        assert module in banned
        for place in ONLY_HERE[module]:
            assert place in exempt or f"{place}.py" in exempt


@pytest.mark.parametrize("statement", ["import jobs.cli", "import jobs", "import jobs.verbs, jobs.shell"])
def test_the_command_line_loads_nothing_heavy(statement: str) -> None:
    code = f"{statement}; import sys, json; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert set(HEAVY) & set(json.loads(done.stdout)) == set()


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys, runpy, json\n"
        "sys.argv = ['candelabra', '--help']\n"
        "try:\n    runpy.run_module('jobs', run_name='__main__')\n"
        "finally:\n    print('MODULES' + json.dumps(sorted(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    modules = done.stdout.partition("MODULES")[2]
    assert set(HEAVY) & set(json.loads(modules)) == set()
