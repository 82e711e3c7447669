"""Engines side by side: each in a process of its own, in turns, so that a machine's moods meet all of them alike."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.machine import Spread, spread
from jobs.spec import load_spec
from workers.model.resolve import resolve_model

ROOT = Path(__file__).resolve().parent.parent
BENCH_PYTHON = ROOT / ".venv-bench/bin/python"
SPEC = ROOT / "configs/embed-minilm.yaml"
OURS = {f"candelabra {dtype}": dtype for dtype in ("float32", "bfloat16", "int8")}
PEERS = {"ONNX Runtime float32": "onnxruntime", "OpenVINO float32": "openvino", "OpenVINO bfloat16": "openvino-bf16"}


@dataclass(frozen=True, slots=True)
class Side:
    """What one engine did over all rounds.

    Attributes:
        tokens: Tokens of the texts by its own count.
        tokens_per_s: Of each round, tokenising included.
        first_vector_s: From the start of the process to the first embedding.
        resident_bytes: Resident size of the process after the first embedding.
        peak_memory_bytes: Largest resident size of the process.
        least_cosine: The least cosine of any text's vector to that of our engine in float32.
    """

    name: str
    tokens: int
    tokens_per_s: Spread
    first_vector_s: Spread
    resident_bytes: Spread
    peak_memory_bytes: Spread
    least_cosine: float


def graft(model: Path, scratch: Path) -> Path:
    """The peers' form of a BERT folder."""
    graph = scratch / f"{model.name}.onnx"
    subprocess.run([BENCH_PYTHON, ROOT / "benchmarks/peers.py", "graft", model, graph], check=True)
    return graph


def compare_engines(
    model: Path, graph: Path, texts: Path, *, threads: int, rounds: int, scratch: Path
) -> dict[str, Side]:
    """Let every engine embed the same texts `rounds` times, in turns.

    Args:
        model: Folder of a BERT.
        graph: Its form for the peers, see `graft`.
        texts: Parquet file with a column `text`.
        threads: Of each engine.
        rounds: Turns of each engine.
        scratch: Folder for vectors.
    """
    commands = {name: _own_command(model, texts, threads, dtype) for name, dtype in OURS.items()}
    for name, peer in PEERS.items():
        script = [str(BENCH_PYTHON), str(ROOT / "benchmarks/peers.py"), peer, str(model), str(graph), str(texts)]
        commands[name] = [*script, "--threads", str(threads)]
    turns: dict[str, list[dict[str, float]]] = {name: [] for name in commands}
    for number in range(rounds):
        order = list(commands)[number % len(commands) :] + list(commands)[: number % len(commands)]
        for name in order:
            turns[name].append(_take_turn(commands[name], scratch / f"{name}.npy"))
    exact = np.load(scratch / f"{next(iter(OURS))}.npy")
    return {
        name: Side(
            name=name,
            tokens=int(results[0]["tokens"]),
            tokens_per_s=spread([result["tokens"] / result["seconds"] for result in results]),
            first_vector_s=spread([result["first_vector_s"] for result in results]),
            resident_bytes=spread([result["resident_bytes"] for result in results]),
            peak_memory_bytes=spread([result["peak_memory_bytes"] for result in results]),
            least_cosine=_least_cosine(np.load(scratch / f"{name}.npy"), exact),
        )
        for name, results in turns.items()
    }


def _least_cosine(found: NDArray[np.float32], exact: NDArray[np.float32]) -> float:
    found, exact = found.astype(np.float64), exact.astype(np.float64)
    lengths = np.linalg.norm(found, axis=1) * np.linalg.norm(exact, axis=1)
    return float(((found * exact).sum(1) / lengths).min())


def own_turn(texts: Path, *, threads: int, scratch: Path) -> dict[str, float]:
    """One turn of our engine alone, MiniLM in float32: tokens, seconds, first_vector_s, memory."""
    model = resolve_model(load_spec(SPEC).model.source).path
    return _take_turn(_own_command(model, texts, threads, "float32"), scratch / "own.npy")


def _own_command(model: Path, texts: Path, threads: int, dtype: str) -> list[str]:
    words = [sys.executable, "-m", "benchmarks.own", str(SPEC), str(texts), "--threads", str(threads)]
    return [*words, "--set", f"model.source={model}", "--set", f"model.dtype={dtype}"]


def _take_turn(command: list[str], vectors: Path) -> dict[str, float]:
    return run_turn([*command, "--vectors", str(vectors), "--spawned", repr(time.time())])


def run_turn(command: list[str]) -> dict[str, Any]:
    """One turn in a process of its own: what its last line of output says, as JSON."""
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result
