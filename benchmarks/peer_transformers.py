"""A peer's turn at generation: many prompts at once with transformers on PyTorch, alone; one JSON line on stdout.

usage: .venv-bench/bin/python benchmarks/peer_transformers.py MODEL.gguf PROMPTS.json [--dtype bfloat16] [--new 64]

PROMPTS.json holds lists of token ids, which are padded on the left to the longest. The file's weights are dequantised
when they are loaded. Imports nothing of this project: it runs in an environment of its own, see docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import json
import time
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any

import torch  # type: ignore[import-not-found]
import transformers  # type: ignore[import-not-found]


def generate(model: Any, prompts: list[list[int]], new: int) -> tuple[float, list[list[int]]]:
    """Seconds that `new` greedy tokens of all prompts take, and the tokens."""
    longest = max(map(len, prompts))
    padding = [[0] * (longest - len(prompt)) for prompt in prompts]
    ids = torch.tensor([pad + prompt for pad, prompt in zip(padding, prompts, strict=True)])
    mask = torch.tensor([pad + [1] * len(prompt) for pad, prompt in zip(padding, prompts, strict=True)])
    started = time.perf_counter()
    with torch.inference_mode():
        whole = model.generate(
            ids,
            attention_mask=mask,
            do_sample=False,
            use_cache=True,
            max_new_tokens=new,
            min_new_tokens=new,
            pad_token_id=0,
            eos_token_id=None,
        )
    return time.perf_counter() - started, whole[:, longest:].tolist()


def main() -> None:
    """Take a turn."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    with redirect_stderr(StringIO()):  # another progress bar
        model = transformers.AutoModelForCausalLM.from_pretrained(
            arguments.model.parent, gguf_file=arguments.model.name, dtype=getattr(torch, arguments.dtype)
        ).eval()
    prompts: list[list[int]] = json.loads(arguments.prompts.read_text())
    generate(model, prompts, 2)
    prefill_s, _ = generate(model, prompts, 1)
    all_s, ids = generate(model, prompts, arguments.new + 1)
    print(
        json.dumps(
            {
                "prefill_tokens_per_s": sum(map(len, prompts)) / prefill_s,
                "decode_tokens_per_s": len(prompts) * arguments.new / (all_s - prefill_s),
                "ids": ids,
            }
        )
    )


if __name__ == "__main__":
    main()
