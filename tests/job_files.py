"""Helpers of the job tests: datasets, specs, drivers as real processes, and digests of what they wrote."""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from jobs.spec import JobSpec, parse_spec

_WORDS = [f"word{i}" for i in range(300)]


def sample_table(rows: int, *, seed: int = 1, null_every: int = 50) -> pa.Table:
    """Rows with an id, a text (some null, many repeated) and a few types that must pass through."""
    rng = random.Random(seed)
    texts = [
        None if null_every and i % null_every == 7 else " ".join(rng.choices(_WORDS, k=rng.randint(1, 30)))
        for i in range(rows)
    ]
    return pa.table(
        {
            "id": pa.array(range(rows), pa.int64()),
            "doc": pa.array(texts, pa.string()),
            "tag": pa.array([f"t{i % 5}" for i in range(rows)]).dictionary_encode(),
        }
    )


@dataclass(frozen=True)
class Finished:
    """A driver process that ended."""

    code: int
    stdout: str
    stderr: str

    @property
    def json(self) -> Any:
        """What it printed with `--json`."""
        return json.loads(self.stdout)


class JobFiles:
    """One folder with an input, a spec and outputs."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def write_input(self, table: pa.Table, name: str = "in.parquet", **options: Any) -> Path:
        """Write one source file; options go to the Parquet writer."""
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(table, path, **options)
        return path

    def data(self, **changes: Any) -> dict[str, Any]:
        """A spec as plain data; changes are `section__field=value` or whole sections."""
        data: dict[str, Any] = {
            "name": "test",
            "task": {"kind": "embed", "text": "doc"},
            "model": {"source": "fake:8"},
            "input": {"path": str(self.root / "in.parquet")},
            "output": {"path": str(self.root / "out")},
            "sharding": {"target_rows": 100},
            "backend": "local",
        }
        for key, value in changes.items():
            section, _, field = key.partition("__")
            if field:
                data.setdefault(section, {})[field] = value
            else:
                data[key] = value
        return data

    def spec(self, **changes: Any) -> JobSpec:
        """The same as a spec."""
        return parse_spec(self.data(**changes))

    def spec_file(self, **changes: Any) -> Path:
        """The same as a file (JSON is YAML)."""
        path = self.root / "job.yaml"
        path.write_text(json.dumps(self.data(**changes)))
        return path

    def start(self, *arguments: str, environment: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        """Start the command line as a process of its own."""
        return subprocess.Popen(
            [sys.executable, "-m", "jobs", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=self.root,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent), **(environment or {})},
        )

    def run(self, *arguments: str, environment: Mapping[str, str] | None = None, timeout_s: float = 120) -> Finished:
        """Run the command line to its end."""
        process = self.start(*arguments, environment=environment)
        try:
            stdout, stderr = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            stdout, stderr = process.communicate()
            raise AssertionError(f"no end within {timeout_s} s\n{stdout}\n{stderr}") from None
        return Finished(process.returncode, stdout, stderr)

    def out(self, name: str = "out") -> Path:
        """An output folder."""
        return self.root / name

    def rows(self, name: str = "out") -> pa.Table:
        """All rows of an output, as any reader that skips underscores would see them."""
        return pq.read_table(self.out(name))


def part_digests(output: Path) -> dict[str, str]:
    """SHA-256 of every file that a reader of the output would see, by name."""
    return {
        str(path.relative_to(output)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(output.rglob("*"))
        if path.is_file() and not any(part.startswith("_") for part in path.relative_to(output).parts)
    }


def leftovers(output: Path) -> list[str]:
    """Files under the state folder that a finished job should not leave."""
    state = output / "_candelabra"
    kinds = ("attempts", "scratch", "failures")
    return [str(path) for kind in kinds for path in (state / kind).rglob("*") if path.is_file()]
