"""The demo in small: docstrings to a Parquet file, a job over them with the packaged model, a question, its answers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

ROOT = Path(__file__).resolve().parent.parent
SPEC = "configs/embed-minilm.yaml"


def run(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", "-m", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def docs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("demo") / "docs.parquet"
    done = run("benchmarks.stdlib_docs", str(path), "--rows", "400")
    assert (done.returncode, done.stderr) == (0, "")
    return path


def test_the_library_gives_some_ten_thousand_docstrings_each_with_its_place(tmp_path: Path) -> None:
    done = run("benchmarks.stdlib_docs", str(tmp_path / "all.parquet"))
    assert done.returncode == 0, done.stderr
    table = pq.read_table(tmp_path / "all.parquet")
    assert 8_000 < table.num_rows < 20_000
    assert all(column.null_count == 0 for column in table.columns)
    places = list(zip(table["module"].to_pylist(), table["name"].to_pylist(), strict=True))
    assert places == sorted(places)
    assert ("subprocess", "Popen") in places
    assert ("json", "dumps") in places


def test_the_same_python_gives_the_same_file(docs: Path, tmp_path: Path) -> None:
    again = tmp_path / "again.parquet"
    assert run("benchmarks.stdlib_docs", str(again), "--rows", "400").returncode == 0
    assert again.read_bytes() == docs.read_bytes()


def test_a_question_finds_the_docstring_that_answers_it(docs: Path, tmp_path: Path) -> None:
    settings = [f"input.path={docs}", f"output.path={tmp_path / 'out'}"]
    overrides = [word for setting in settings for word in ("--set", setting)]
    done = run("jobs", "submit", SPEC, "--backend", "local", *overrides)
    assert done.returncode == 0, done.stderr
    table = pq.read_table(tmp_path / "out")
    assert table.num_rows == 400
    target = next(row for row in table.to_pylist() if row["kind"] == "function" and row["n_tokens"] > 20)
    asked = run("benchmarks.nearest", SPEC, target["doc"].split("\n\n")[0], "--count", "3", *overrides)
    assert asked.returncode == 0, asked.stderr
    assert target["name"] in asked.stdout
