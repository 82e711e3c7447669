"""Our engine's turn at generation: many prompts at once in this process alone; one JSON line on stdout.

usage: python -m benchmarks.own_generate MODEL PROMPTS.json [options]         the twin of `benchmarks/peer_llama.py`

PROMPTS.json holds lists of token ids. Prefill is the time to every prompt's first token; decoding is what the tokens
after it take.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import candle_py
import numpy as np
from numpy.typing import NDArray

from benchmarks.machine import peak_memory_bytes, resident_memory_bytes

CACHE_BYTES = 1 << 30


def generate(
    engine: candle_py.Engine, prompts: list[NDArray[np.uint32]], new: int
) -> tuple[float, list[list[int]], dict[str, Any]]:
    """Let greedy texts of `new` tokens grow: seconds, ids of each text and the generator's counters."""
    generator = engine.generator(max_rows=len(prompts), cache_bytes=CACHE_BYTES, step_tokens=512)
    ids: list[list[int]] = [[] for _ in prompts]
    started = time.perf_counter()
    for number, prompt in enumerate(prompts):
        generator.add(number, prompt, max_new_tokens=new)
    while generator.pending:
        for event in generator.step():
            ids[event.request_id] += event.ids
    return time.perf_counter() - started, ids, generator.stats


def main() -> None:
    """Take a turn."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", default="float32")
    arguments = parser.parse_args()
    prompts = [np.array(prompt, np.uint32) for prompt in json.loads(arguments.prompts.read_text())]
    engine = candle_py.Engine.load(arguments.model, threads=arguments.threads, dtype=arguments.dtype)
    loaded_bytes = resident_memory_bytes()
    prefill_s, _, _ = generate(engine, prompts, 1)
    all_s, ids, stats = generate(engine, prompts, arguments.new + 1)
    print(
        json.dumps(
            {
                "prefill_tokens_per_s": sum(map(len, prompts)) / prefill_s,
                "decode_tokens_per_s": len(prompts) * arguments.new / (all_s - prefill_s),
                "all_s": all_s,
                "stats": stats,
                "ids": ids,
                "loaded_bytes": loaded_bytes,
                "peak_memory_bytes": peak_memory_bytes(),
            }
        )
    )


if __name__ == "__main__":
    main()
