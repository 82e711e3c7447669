"""Whole jobs: what planning, Ray, committing and resuming cost around the engine. Every job is a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

ROOT = Path(__file__).resolve().parent.parent
FAKE_MODEL = "fake:8"
# The driver runs as the command line does, and says at the end how large it grew; its Ray processes are not counted.
DRIVER = (
    "import sys\n"
    "from benchmarks.machine import peak_memory_bytes\n"
    "from jobs.cli import main\n"
    "try:\n    main()\n"
    "finally:\n    print(f'PEAK {peak_memory_bytes()}', file=sys.stderr)\n"
)


@dataclass(frozen=True, slots=True)
class JobRun:
    """One `submit`, from outside.

    Attributes:
        wall_s: Seconds from the start of the process to its end.
        report: The job's report, as `--json` gives it.
        peak_memory_bytes: Largest resident size of the driver.
    """

    wall_s: float
    report: dict[str, float]
    peak_memory_bytes: int


def submit(spec: Path, *settings: str) -> JobRun:
    """Run a job to its end.

    Args:
        spec: Its spec.
        settings: `field=value` each.

    Raises:
        RuntimeError: It did not complete.
    """
    words = [sys.executable, "-c", DRIVER, "submit", str(spec), "--json"]
    for setting in settings:
        words += ["--set", setting]
    started = time.perf_counter()
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    wall_s = time.perf_counter() - started
    if done.returncode != 0:
        raise RuntimeError(f"the job ended with {done.returncode}: {done.stderr}")
    peak = next(line for line in done.stderr.splitlines() if line.startswith("PEAK "))
    return JobRun(wall_s, json.loads(done.stdout), int(peak.split()[1]))


def write_fake_spec(folder: Path, source: Path) -> Path:
    """A spec for the test engine, whose arithmetic costs next to nothing; output in the same folder."""
    path = folder / "fake.yaml"
    path.write_text(
        "name: bench\n"
        "task: {kind: embed, text: text}\n"
        f"model: {{source: '{FAKE_MODEL}'}}\n"
        f"input: {{path: {source}}}\n"
        f"output: {{path: {folder / 'out'}}}\n"
    )
    return path


def time_planning(folder: Path, files: int) -> tuple[float, int]:
    """Seconds to list and plan `files` small files, and the peak memory of the process that does it."""
    source = folder / "many"
    source.mkdir(parents=True)
    table = pa.table({"text": [f"text {row}" for row in range(10)]})
    pq.write_table(table, source / "0.parquet")
    content = (source / "0.parquet").read_bytes()
    for number in range(1, files):
        (source / f"{number}.parquet").write_bytes(content)
    spec = write_fake_spec(folder, source)
    code = (
        "import time\nfrom benchmarks.machine import peak_memory_bytes\n"
        "from jobs.prepare import prepare_job\nfrom jobs.spec import load_spec\n"
        "started = time.perf_counter()\n"
        f"prepared = prepare_job(load_spec({str(spec)!r}))\n"
        f"assert len(prepared.plan.files) == {files}\n"
        "print(time.perf_counter() - started, peak_memory_bytes())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    seconds, peak = done.stdout.split()
    return float(seconds), int(peak)


def time_resuming(folder: Path, shards: int) -> tuple[JobRun, JobRun]:
    """A job of `shards` shards of one row, and the same job resumed when only its last shard is missing."""
    folder.mkdir(parents=True)
    source = folder / "rows.parquet"
    pq.write_table(pa.table({"text": [f"text {row}" for row in range(shards)]}), source)
    spec = write_fake_spec(folder, source)
    settings = ("sharding.target_rows=1", "backend=local")
    first = submit(spec, *settings)
    out = folder / "out"
    last = max((out / "_candelabra/receipts").iterdir())
    last.unlink()
    (out / "_SUCCESS").unlink()
    return first, submit(spec, *settings)


def driver_memory(folder: Path, rows: int) -> JobRun:
    """A job of `rows` rows on Ray with the test engine."""
    folder.mkdir(parents=True)
    source = folder / "rows.parquet"
    pq.write_table(pa.table({"text": [f"text {row}" for row in range(rows)]}), source, row_group_size=20_000)
    return submit(write_fake_spec(folder, source), "workers.replicas=1", "workers.cpus=1")
