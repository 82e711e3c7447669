"""The memory that a cache of keys and values takes: that of the pages which tokens were written to."""

from __future__ import annotations

import subprocess
import sys

from engine_models import GOLDEN

_CHILD = """
import sys
import candle_py, numpy as np

def resident_kib():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmRSS:"))

def generate(rows):
    generator = engine.generator(max_rows=MOST_ROWS, cache_bytes=CACHE_BYTES)
    for number in range(rows):
        generator.add(number, np.arange(3, 11, dtype=np.uint32) + number, max_new_tokens=4)
    while generator.pending:
        generator.step()
    return resident_kib()

CACHE_BYTES, MOST_ROWS = 48 << 20, 512
engine = candle_py.Engine.load(sys.argv[1])
warm = generate(8)
blocks = engine.generator(max_rows=MOST_ROWS, cache_bytes=CACHE_BYTES).stats["blocks"]
print(blocks * engine.generator(max_rows=1, cache_bytes=CACHE_BYTES).stats["block_bytes"])
print(*[generate(8) - warm for _ in range(20)])
"""


def test_a_new_cache_takes_no_memory_that_is_not_written_even_where_another_was_before() -> None:
    # Caches of this size are those that an allocator would make of freed memory, and clear.
    run = subprocess.run(
        [sys.executable, "-c", _CHILD, str(GOLDEN / "llama")], capture_output=True, text=True, check=True
    )
    size_bytes, *grown_kib = [int(number) for number in run.stdout.split()]
    assert size_bytes > 32 << 20
    assert len(grown_kib) == 20
    assert max(grown_kib) < 8 * 1024
