"""`make test-gpu`, second half: tokens a second on a GPU, next to PyTorch where that is installed. Builds nothing.

usage: python -m benchmarks.gpu [--model NAME ...] [--limit-s N] [--rounds N] [--scratch FOLDER]

Every figure is measured in a process of its own, within what is left of the limit; what does not end in it, or fails,
is told and left out. Prints the machine, the seed, and the median of the rounds.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu_models import MODELS, SEED, write_model
from workers.resources.devices import cuda_obstacle, probe_cuda

CACHE_BYTES = 8 << 30
STEP_TOKENS = 8192
Figures = dict[str, float]


def measure_ours(name: str, folder: Path, dtype: str, rounds: int) -> Figures:
    """Tokens a second of candle_py on the first device: embeddings, or a decoder's prompts and new tokens."""
    import candle_py

    sizes = MODELS[name]
    began = time.perf_counter()
    engine = candle_py.Engine.load(folder, device="cuda", dtype=dtype)
    figures = {"load s": time.perf_counter() - began}
    rows = _rows(name)
    ids = np.concatenate(rows).astype(np.uint32)
    offsets = np.arange(0, len(ids) + 1, sizes.row_tokens, dtype=np.uint32)
    pooling = "last" if sizes.new_tokens else "mean"

    def embed() -> int:
        engine.embed(ids, offsets, pooling=pooling, normalize=True)
        return len(ids)

    def generate() -> int:
        generator = engine.generator(max_rows=sizes.rows, cache_bytes=CACHE_BYTES, step_tokens=STEP_TOKENS)
        for index, row in enumerate(rows):
            generator.add(index, row.astype(np.uint32), max_new_tokens=sizes.new_tokens)
        found = 0
        while generator.pending:
            found += sum(len(event.ids) for event in generator.step())
        return found

    figures["prompt tokens/s" if sizes.new_tokens else "tokens/s"] = _median(embed, rounds)
    if sizes.new_tokens:
        figures["new tokens/s"] = _median(generate, rounds)
    return figures


def measure_torch(name: str, folder: Path, dtype: str, rounds: int) -> Figures:
    """The same of PyTorch and transformers, with weights made on the device; prompts are of one length: no padding."""
    torch: Any = importlib.import_module("torch")
    transformers: Any = importlib.import_module("transformers")
    sizes = MODELS[name]
    began = time.perf_counter()
    torch.manual_seed(SEED)
    torch.set_default_dtype(getattr(torch, dtype))
    config = transformers.AutoConfig.from_pretrained(folder)
    kind = transformers.AutoModelForCausalLM if sizes.new_tokens else transformers.AutoModel
    with torch.device("cuda"):
        model = kind.from_config(config, attn_implementation="sdpa").eval()
    figures = {"load s": time.perf_counter() - began}
    ids = torch.from_numpy(np.stack(_rows(name))).cuda()

    def embed() -> int:
        with torch.inference_mode():
            if sizes.new_tokens:
                model.model(ids).last_hidden_state[:, -1].float().cpu()
            else:
                for part in ids.split(256):
                    model(part).last_hidden_state.mean(1).float().cpu()
        return int(ids.numel())

    def generate() -> int:
        new = sizes.new_tokens
        with torch.inference_mode():
            found = model.generate(ids, max_new_tokens=new, min_new_tokens=new, do_sample=False, pad_token_id=0)
        return int((found.shape[1] - ids.shape[1]) * ids.shape[0])

    figures["prompt tokens/s" if sizes.new_tokens else "tokens/s"] = _median(embed, rounds)
    if sizes.new_tokens:
        figures["new tokens/s"] = _median(generate, rounds)
    return figures


SIDES: dict[str, Callable[[str, Path, str, int], Figures]] = {"candelabra": measure_ours, "torch": measure_torch}


def main() -> int:
    """Measure all that is asked for; 1 when none of our figures came."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", choices=sorted(MODELS))
    parser.add_argument("--limit-s", type=float, default=420.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--scratch", type=Path)
    parser.add_argument("--one", nargs=4, metavar=("SIDE", "MODEL", "FOLDER", "DTYPE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one is not None:
        side, name, folder, dtype = arguments.one
        print(json.dumps(SIDES[side](name, Path(folder), dtype, arguments.rounds)))
        return 0
    obstacle = _obstacle()
    if obstacle is not None:
        print(f"nothing is measured: {obstacle}", file=sys.stderr)
        return 1
    deadline = time.monotonic() + arguments.limit_s
    for line in _machine():
        print(line, flush=True)
    sides = [side for side in SIDES if side != "torch" or _has("torch", "transformers")]
    if "torch" not in sides:
        print("torch: not measured, since torch or transformers is not installed")
    came = 0
    with tempfile.TemporaryDirectory(dir=arguments.scratch) as scratch:
        for name in arguments.model or MODELS:
            began = time.monotonic()
            folder = write_model(name, Path(scratch) / name)
            print(f"{name}: written in {time.monotonic() - began:.1f} s", flush=True)
            for dtype in MODELS[name].dtypes:
                for side in sides:
                    figures = _apart(side, name, folder, dtype, arguments.rounds, deadline - time.monotonic())
                    came += side == "candelabra" and not isinstance(figures, str)
                    print(f"{name:12} {dtype:9} {side:11} {_shown(figures)}", flush=True)
    return 0 if came else 1


def _obstacle() -> str | None:
    import candle_py

    failure = candle_py.cuda_failure()
    told = None if failure is None else (str(failure), failure.hint or "")
    found = cuda_obstacle(bool(candle_py.capabilities()["cuda"]), probe_cuda(), told)
    return None if found is None else f"{found[0]}; {found[1]}"


def _apart(side: str, name: str, folder: Path, dtype: str, rounds: int, left_s: float) -> Figures | str:
    """Figures of one side from a process of its own, or what went wrong."""
    if left_s <= 0:
        return "left out: no time is left"
    command = [sys.executable, "-m", "benchmarks.gpu", "--rounds", str(rounds)]
    command += ["--one", side, name, str(folder), dtype]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=left_s, check=False)
    except subprocess.TimeoutExpired:
        return f"left out: not done in {left_s:.0f} s"
    if run.returncode:
        return "failed: " + (run.stderr.strip().splitlines() or ["no message"])[-1]
    figures: Figures = json.loads(run.stdout.splitlines()[-1])
    return figures


def _rows(name: str) -> list[np.ndarray[Any, np.dtype[np.int64]]]:
    sizes = MODELS[name]
    random = np.random.default_rng(SEED)
    return list(random.integers(1000, sizes.config["vocab_size"], (sizes.rows, sizes.row_tokens)))


def _median(work: Callable[[], int], rounds: int) -> float:
    """Tokens a second; the first time, which loads kernels, does not count. Results are on the host when it ends."""
    work()
    speeds = []
    for _ in range(rounds):
        began = time.perf_counter()
        tokens = work()
        speeds.append(tokens / (time.perf_counter() - began))
    return statistics.median(speeds)


def _machine() -> list[str]:
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total,utilization.gpu", "--format=csv,noheader"]
    try:
        said = "; ".join(subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip().splitlines())
    except (OSError, subprocess.CalledProcessError) as error:
        said = f"nvidia-smi failed ({error})"
    return [f"devices: {said}", f"system: {platform.platform()}, Python {platform.python_version()}", f"seed: {SEED}"]


def _has(*modules: str) -> bool:
    return all(importlib.util.find_spec(module) is not None for module in modules)


def _shown(figures: Figures | str) -> str:
    return figures if isinstance(figures, str) else "  ".join(f"{name} {value:,.1f}" for name, value in figures.items())


if __name__ == "__main__":
    sys.exit(main())
