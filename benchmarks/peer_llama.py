"""A peer's turn at generation: many prompts at once with llama.cpp, this process alone; one JSON line on stdout.

usage: .venv-bench/bin/python benchmarks/peer_llama.py MODEL.gguf PROMPTS.json [--new 64] [--threads 2]

PROMPTS.json holds lists of token ids. All prompts enter first, in batches of 512 tokens; then every sequence gets one
greedy token a step. llama-cpp-python is built from source for this machine: see docs/benchmarks.md. Imports nothing of
this project: it runs in an environment of its own.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import time
from pathlib import Path
from typing import Any

import llama_cpp  # type: ignore[import-not-found]
import numpy as np

BATCH_TOKENS = 2048
UNIT_TOKENS = 512
ROOM_TOKENS = 512


class Sequences:
    """A context in which `count` sequences grow."""

    def __init__(self, model: Path, count: int, threads: int) -> None:
        silent = llama_cpp.llama_log_callback(lambda *_: None)
        llama_cpp.llama_backend_init()
        llama_cpp.llama_log_set(silent, ctypes.c_void_p(0))
        self._silent = silent  # llama.cpp keeps only a pointer to it
        loaded = llama_cpp.llama_model_load_from_file(str(model).encode(), llama_cpp.llama_model_default_params())
        settings = llama_cpp.llama_context_default_params()
        settings.n_ctx = count * ROOM_TOKENS
        settings.n_seq_max = count
        settings.n_batch, settings.n_ubatch = BATCH_TOKENS, UNIT_TOKENS
        settings.n_threads = settings.n_threads_batch = threads
        settings.kv_unified = False
        self._context: Any = llama_cpp.llama_init_from_model(loaded, settings)
        self._vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(loaded))
        self._batch: Any = llama_cpp.llama_batch_init(BATCH_TOKENS, 0, 1)

    def decode(self, tokens: list[tuple[int, int, int, bool]]) -> dict[int, int]:
        """Let (token, position, sequence, whether its successor is wanted) in; the likeliest successors by sequence."""
        for index, (token, position, sequence, wanted) in enumerate(tokens):
            self._batch.token[index] = token
            self._batch.pos[index] = position
            self._batch.n_seq_id[index] = 1
            self._batch.seq_id[index][0] = sequence
            self._batch.logits[index] = wanted
        self._batch.n_tokens = len(tokens)
        if llama_cpp.llama_decode(self._context, self._batch) != 0:
            raise RuntimeError("llama_decode failed")
        found = {}
        for index, (_, _, sequence, wanted) in enumerate(tokens):
            if wanted:
                row = llama_cpp.llama_get_logits_ith(self._context, index)
                found[sequence] = int(np.ctypeslib.as_array(row, shape=(self._vocab,)).argmax())
        return found


def main() -> None:
    """Take a turn."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    prompts: list[list[int]] = json.loads(arguments.prompts.read_text())
    sequences = Sequences(arguments.model, len(prompts), arguments.threads)

    started = time.perf_counter()
    last: dict[int, int] = {}
    waiting: list[tuple[int, int, int, bool]] = []
    for number, prompt in enumerate(prompts):
        if len(waiting) + len(prompt) > BATCH_TOKENS:
            last |= sequences.decode(waiting)
            waiting = []
        waiting += [(token, place, number, place == len(prompt) - 1) for place, token in enumerate(prompt)]
    last |= sequences.decode(waiting)
    prefilled = time.perf_counter()
    ids = [[last[number]] for number in range(len(prompts))]
    for step in range(arguments.new):
        last = sequences.decode(
            [(last[number], len(prompt) + step, number, True) for number, prompt in enumerate(prompts)]
        )
        for number, token in last.items():
            ids[number].append(token)
    ended = time.perf_counter()
    print(
        json.dumps(
            {
                "prefill_tokens_per_s": sum(map(len, prompts)) / (prefilled - started),
                "decode_tokens_per_s": len(prompts) * arguments.new / (ended - prefilled),
                "ids": ids,
            }
        )
    )


if __name__ == "__main__":
    main()
