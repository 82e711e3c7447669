"""Our engine's turn: embed a column in this process alone, no Ray and no job; one JSON line on stdout.

usage: python -m benchmarks.own SPEC.yaml TEXTS.parquet [options]         the twin of `benchmarks/peers.py`
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path


def main() -> None:
    """Take a turn."""
    parser = argparse.ArgumentParser()
    parser.add_argument("spec", type=Path)
    parser.add_argument("texts", type=Path)
    parser.add_argument("--column", default="text")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--spawned", type=float, default=time.time(), help="when this process was started")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="FIELD=VALUE")
    parser.add_argument("--vectors", type=Path, help="where the embeddings go, as .npy")
    arguments = parser.parse_args()

    import numpy as np
    import pyarrow.parquet as pq

    from benchmarks.engine import SpecEngine
    from benchmarks.machine import peak_memory_bytes, resident_memory_bytes

    texts = pq.read_table(arguments.texts, columns=[arguments.column])[arguments.column].to_pylist()
    overrides = [f"input.path={arguments.texts}", f"task.text={arguments.column}", *arguments.overrides]
    engine = SpecEngine(arguments.spec, threads=arguments.threads, overrides=overrides)
    engine.embed(texts[:1])
    first_vector_s = time.time() - arguments.spawned
    resident_bytes = resident_memory_bytes()
    engine.embed(texts[:64])
    start = time.perf_counter()
    vectors, tokens = engine.embed(texts)
    seconds = time.perf_counter() - start
    if arguments.vectors is not None:
        np.save(arguments.vectors, vectors)
    print(
        json.dumps(
            {
                "tokens": tokens,
                "seconds": seconds,
                "first_vector_s": first_vector_s,
                "resident_bytes": resident_bytes,
                "peak_memory_bytes": peak_memory_bytes(),
            }
        )
    )


if __name__ == "__main__":
    main()
