"""Engines side by side: each in a process of its own, in turns, so that a machine's moods meet all of them alike."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.machine import Spread, spread
from jobs.spec import load_spec
from workers.model.resolve import resolve_model

ROOT = Path(__file__).resolve().parent.parent
BENCH_PYTHON = ROOT / ".venv-bench/bin/python"
SPEC = ROOT / "configs/embed-minilm.yaml"
OURS = "candelabra"
PEERS = ("onnxruntime", "openvino")


@dataclass(frozen=True, slots=True)
class Side:
    """What one engine did over all rounds.

    Attributes:
        tokens: Tokens of the texts by its own count.
        tokens_per_s: Of each round, tokenising included.
        first_vector_s: From the start of the process to the first embedding.
        peak_memory_bytes: Largest resident size of the process.
        difference: Largest absolute difference of any value from our engine's.
    """

    name: str
    tokens: int
    tokens_per_s: Spread
    first_vector_s: Spread
    peak_memory_bytes: Spread
    difference: float


def compare_engines(texts: Path, *, threads: int, rounds: int, scratch: Path) -> list[Side]:
    """Let every engine embed the same texts `rounds` times, in turns; ours comes first in the result."""
    model = resolve_model(load_spec(SPEC).model.source).path
    graph = scratch / "minilm.onnx"
    subprocess.run([BENCH_PYTHON, ROOT / "benchmarks/peers.py", "graft", model, graph], check=True)
    common = [str(texts), "--threads", str(threads)]
    commands = {OURS: _own_command(texts, threads)}
    for peer in PEERS:
        commands[peer] = [str(BENCH_PYTHON), str(ROOT / "benchmarks/peers.py"), peer, str(model), str(graph), *common]
    turns: dict[str, list[dict[str, float]]] = {name: [] for name in commands}
    for number in range(rounds):
        order = list(commands)[number % len(commands) :] + list(commands)[: number % len(commands)]
        for name in order:
            turns[name].append(_take_turn(commands[name], scratch / f"{name}.npy"))
    ours = np.load(scratch / f"{OURS}.npy")
    return [
        Side(
            name=name,
            tokens=int(results[0]["tokens"]),
            tokens_per_s=spread([result["tokens"] / result["seconds"] for result in results]),
            first_vector_s=spread([result["first_vector_s"] for result in results]),
            peak_memory_bytes=spread([result["peak_memory_bytes"] for result in results]),
            difference=float(np.abs(np.load(scratch / f"{name}.npy") - ours).max()),
        )
        for name, results in turns.items()
    ]


def own_turn(texts: Path, *, threads: int, scratch: Path) -> dict[str, float]:
    """One turn of our engine alone: tokens, seconds, first_vector_s, peak_memory_bytes."""
    return _take_turn(_own_command(texts, threads), scratch / f"{OURS}.npy")


def _own_command(texts: Path, threads: int) -> list[str]:
    return [sys.executable, "-m", "benchmarks.own", str(SPEC), str(texts), "--threads", str(threads)]


def _take_turn(command: list[str], vectors: Path) -> dict[str, float]:
    words = [*command, "--vectors", str(vectors), "--spawned", repr(time.time())]
    done = subprocess.run(words, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result
