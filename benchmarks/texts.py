"""The texts of `make bench`: docstrings and their paragraphs, each once, shuffled by the seed. Downloads nothing."""

from __future__ import annotations

import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.machine import SEED
from benchmarks.stdlib_docs import collect

SHORTEST_CHARS = 20


def make_texts(path: Path, rows: int) -> Path:
    """Write `rows` distinct texts as a Parquet file with one column, `text`.

    Raises:
        ValueError: This Python's library does not have as many.
    """
    docs = [row.doc for row in collect()]
    paragraphs = [part.strip() for doc in docs for part in doc.split("\n\n")]
    distinct = [text for text in dict.fromkeys(docs + paragraphs) if len(text) >= SHORTEST_CHARS]
    if len(distinct) < rows:
        raise ValueError(f"only {len(distinct)} distinct texts, {rows} are wanted")
    random.Random(SEED).shuffle(distinct)
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"text": distinct[:rows]}), path, row_group_size=2_000)
    return path
