"""Messages count in singular and plural."""

from __future__ import annotations

import pyarrow as pa
import pytest
from job_files import JobFiles

from sharding.words import counted


@pytest.mark.parametrize(
    ("count", "told"), [(0, "0 rows"), (1, "1 row"), (2, "2 rows"), (1000, "1,000 rows"), (1_234_567, "1,234,567 rows")]
)
def test_one_is_singular_and_everything_else_plural(count: int, told: str) -> None:
    assert counted(count, "row") == told


def test_a_job_of_one_row_speaks_of_one_row(files: JobFiles) -> None:
    files.write_input(pa.table({"doc": ["a text"]}))
    spec = str(files.spec_file())
    plan = files.run("plan", spec)
    assert plan.code == 0, plan.stderr
    assert "1 file, 1 row," in plan.stdout
    assert "in 1 sampled row;" in " ".join(plan.stdout.replace("│", " ").split())
    assert files.run("submit", spec).code == 0
    assert "1 of 1 row committed, 1 of 1 shard, 0 bad rows" in files.run("status", "out").stdout
    assert "removed 0 files" in files.run("gc", "out").stdout
