"""The built module: its stubs, its version, its threads, and that the GIL is free while it works."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import tomllib
from pathlib import Path

import candle_py
import numpy as np
import pytest
from engine_models import GOLDEN, minilm, ragged

ROOT = Path(__file__).parent.parent


def test_stubs_match_the_module(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mypy.stubtest", "candle_py", "--concise"]
    run = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert (run.returncode, run.stdout) == (0, ""), run.stderr


def test_capabilities_tell_the_build_and_the_machine() -> None:
    found = candle_py.capabilities()
    packages = tomllib.loads((ROOT / "candle-py" / "Cargo.lock").read_text())["package"]
    versions = {package["name"]: package["version"] for package in packages}
    assert found["candle_version"] == versions["candle-core"]
    assert found["version"] == versions["candle-py"] == versions["candle-engine"]
    assert found["cpu"] in ("scalar", "avx2", "avx512")
    assert found["cpu_bfloat16"] in (found["cpu"], "amx")
    has = found["cpu_features"]
    narrow = (
        "avx-vnni"
        if found["cpu"] != "scalar" and has["avxvnni"]
        else {"avx512": "avx2"}.get(found["cpu"], found["cpu"])
    )
    assert found["cpu_int8"] == ("avx512-vnni" if found["cpu"] == "avx512" and has["avx512vnni"] else narrow)
    assert (found["cuda"], found["nccl"]) == (False, False)
    assert all(isinstance(value, bool) for value in found["cpu_features"].values())
    assert 1 <= found["threads_default"] <= len(os.sched_getaffinity(0))


_ONE_CPU = """
import os, sys
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
import candle_py
engine = candle_py.Engine.load(sys.argv[1])
print(candle_py.capabilities()["threads_default"], engine.info["threads"])
print(candle_py.Engine.load(sys.argv[1], threads=8).info["threads"])
"""


def test_threads_follow_the_affinity() -> None:
    run = subprocess.run([sys.executable, "-c", _ONE_CPU, GOLDEN / "bert"], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["1", "1", "1"]


def test_threads_are_never_more_than_asked_for() -> None:
    assert candle_py.Engine.load(GOLDEN / "bert", threads=1).info["threads"] == 1
    available = candle_py.capabilities()["threads_default"]
    assert candle_py.Engine.load(GOLDEN / "bert", threads=10_000).info["threads"] == available


@pytest.mark.parametrize("threads", [1, None])
def test_python_goes_on_while_a_forward_runs(threads: int | None) -> None:
    """With a switch interval of minutes, another thread runs only where this one lets go of the GIL by itself."""
    engine = candle_py.Engine.load(minilm(), threads=threads)
    ids, offsets = ragged([np.random.default_rng(1).integers(1000, 30_000, 512).tolist()] * 24)
    started, finished = threading.Event(), []

    def forward() -> None:
        started.set()
        engine.embed(ids, offsets)
        finished.append(True)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(600)
    try:
        worker = threading.Thread(target=forward)
        worker.start()
        started.wait()
        still_running = not finished
        worker.join()
    finally:
        sys.setswitchinterval(interval)
    assert still_running
    assert finished


def test_many_threads_may_use_one_engine() -> None:
    engine = candle_py.Engine.load(GOLDEN / "modernbert")
    generator = np.random.default_rng(3)
    batches = [ragged([generator.integers(3, 384, length).tolist() for length in (5, 60, 200)]) for _ in range(8)]
    wanted = [np.array(engine.hidden_states(*batch)) for batch in batches]
    found: list[np.ndarray | None] = [None] * len(batches)

    def work(index: int) -> None:
        for _ in range(5):
            found[index] = np.array(engine.hidden_states(*batches[index]))

    workers = [threading.Thread(target=work, args=(index,)) for index in range(len(batches))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for one, other in zip(wanted, found, strict=True):
        np.testing.assert_array_equal(one, other)
