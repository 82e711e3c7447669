"""After the journey: the rows of a finished dataset that lie nearest to a question. A brute-force look, no index.

usage: python -m benchmarks.nearest SPEC.yaml QUESTION [--count 5] [--show COLUMN,COLUMN] [--set FIELD=VALUE ...]

The question is embedded by the engine, model and settings of the spec that made the dataset.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from benchmarks.engine import SpecEngine
from jobs.spec import load_spec

EXCERPT_CHARS = 160


def nearest_rows(
    vectors: NDArray[np.float32], question: NDArray[np.float32], count: int
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Indexes and cosine similarities of the `count` rows most like the question, best first.

    Args:
        vectors: float32 (rows, width).
        question: float32 (width,).
        count: How many.
    """
    lengths = np.linalg.norm(vectors, axis=1) * np.linalg.norm(question)
    scores = (vectors @ question) / np.maximum(lengths, np.finfo(np.float32).tiny)
    best = np.argsort(-scores, kind="stable")[:count].astype(np.int64)
    return best, scores[best]


def distinct_rows(table: pa.Table, text: str) -> pa.Table:
    """The first row of every text: a docstring that ten classes share is one answer."""
    numbered = table.append_column("row", pa.array(np.arange(table.num_rows)))
    first = numbered.group_by(text, use_threads=False).aggregate([("row", "min")])["row_min"]
    return table.take(first.sort())


def excerpt(text: str) -> str:
    """The first paragraph, in one line, cut to what a table shows."""
    line = " ".join(text.split("\n\n")[0].split())
    return line if len(line) <= EXCERPT_CHARS else line[: EXCERPT_CHARS - 1] + "…"


def main() -> None:
    """Ask a question and print the nearest rows as a table."""
    parser = argparse.ArgumentParser(description="rows of a finished dataset nearest to a question")
    parser.add_argument("spec", type=Path)
    parser.add_argument("question")
    parser.add_argument("--count", type=int, default=5)
    parser.add_argument("--show", default="module,name", help="columns to print beside the text")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="FIELD=VALUE")
    arguments = parser.parse_args()
    spec = load_spec(arguments.spec, arguments.overrides)
    column = "embedding" if spec.output.column == "auto" else spec.output.column
    shown, text = arguments.show.split(","), spec.task.text or ""

    table = pq.read_table(spec.output.path, columns=[*shown, text, column])
    table = distinct_rows(table.filter(pc.is_valid(table[column])), text)
    embeddings = table[column].combine_chunks()
    vectors = embeddings.flatten().to_numpy().reshape(table.num_rows, embeddings.type.list_size)
    question, _ = SpecEngine(arguments.spec, overrides=arguments.overrides).embed([arguments.question])
    rows, scores = nearest_rows(vectors, question[0], arguments.count)

    answer = Table(title=f"nearest to: {arguments.question}", title_justify="left", show_lines=True)
    answer.add_column("cosine", justify="right")
    for name in (*shown, text):
        answer.add_column(name, overflow="fold")
    for row, score in zip(rows.tolist(), scores.tolist(), strict=True):
        values = [str(table[name][row].as_py()) for name in shown]
        answer.add_row(f"{score:.3f}", *values, excerpt(table[text][row].as_py()))
    Console().print(answer)


if __name__ == "__main__":
    main()
