"""Fourth station of a shard: token rows through the engine, results back to every row. Reads and writes no files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from sharding.errors import RecordRow
from sharding.failpoints import failpoint
from workers.batch import TokenBatch, batch_tokens, row_lengths
from workers.config import WorkerConfig
from workers.engine.base import BatchOutput, Engine
from workers.results import fact_arrays, result_arrays
from workers.tokenization.window import RepeatedTexts, TextWindow, UniqueResult

NOT_FINITE = "the model gave a result that is not finite, or zero"


@dataclass(frozen=True, slots=True)
class RowResults:
    """Finished rows: the batch has the part's schema; `tokens` counts what the engine computed."""

    batch: pa.RecordBatch
    error_counts: Counter[str]
    tokens: int


def compute_window(
    window: TextWindow,
    config: WorkerConfig,
    engine: Engine,
    repeated: RepeatedTexts,
    advance: Callable[[int], None],
) -> RowResults:
    """Compute the fresh texts of a window and give every row its result.

    Args:
        window: Rows and tokens.
        config: The job's settings.
        engine: The loaded model.
        repeated: Results of earlier windows; takes those of this one.
        advance: Told the tokens of each finished batch.
    """
    results = _unique_results(window, config, engine, repeated, advance)
    columns = _columns(window, config, engine, results)
    by_name = dict(zip(config.result_columns, columns, strict=True))
    rows = window.batch.rows
    arrays = [by_name[name] if name in by_name else rows.column(name) for name in config.output_schema.names]
    counts = count_errors(by_name["error"])
    return RowResults(
        pa.RecordBatch.from_arrays(arrays, schema=config.output_schema), counts, int(window.tokens.offsets[-1])
    )


def count_errors(errors: pa.Array) -> Counter[str]:
    """Row errors by message, less what differs from row to row."""
    return Counter(text.partition(": `")[0] for text in errors.to_pylist() if text is not None)


def _unique_results(
    window: TextWindow,
    config: WorkerConfig,
    engine: Engine,
    repeated: RepeatedTexts,
    advance: Callable[[int], None],
) -> dict[int, UniqueResult]:
    """Result of each distinct text of the window, by its position in `window.keys`."""
    tokens = window.tokens
    results = {position: repeated.find(window.keys[position]) for position in window.known}
    lengths = row_lengths(tokens.offsets)
    counts = lengths if tokens.counts is None else tokens.counts
    bad = tokens.errors
    good = np.array([i for i in range(len(lengths)) if i not in bad], np.int64)

    def keep(token_row: int, values: NDArray[np.float32] | None, error: str | None) -> None:
        position = int(window.fresh[token_row])
        result = UniqueResult(values, error, int(counts[token_row]), bool(tokens.truncated[token_row]))
        results[position] = result
        repeated.store(window.keys[position], result)

    for token_row, error in bad.items():
        keep(token_row, None, error)
    batches = batch_tokens(
        tokens.ids, tokens.offsets, good, budget_tokens=config.budget_tokens, type_ids=tokens.type_ids
    )
    for batch in batches:
        failpoint("compute")
        for part, output in _forward(engine, batch):
            if isinstance(output, str):
                keep(int(part.rows[0]), None, output)
                continue
            not_finite = set(output.bad_rows)
            for i, token_row in enumerate(part.rows):
                finite = i not in not_finite
                keep(int(token_row), output.values[i] if finite else None, None if finite else NOT_FINITE)
        advance(len(batch.ids))
    return results


def _forward(engine: Engine, batch: TokenBatch) -> Iterator[tuple[TokenBatch, BatchOutput | str]]:
    """Compute a batch; one that the engine refuses is halved until the rows it cannot take stand alone."""
    try:
        yield batch, engine.forward(batch)
    except RecordRow as error:
        if len(batch) == 1:
            yield batch, str(error)
            return
        middle = len(batch) // 2
        yield from _forward(engine, batch.select(0, middle))
        yield from _forward(engine, batch.select(middle, len(batch)))


def _columns(
    window: TextWindow, config: WorkerConfig, engine: Engine, results: dict[int, UniqueResult]
) -> list[pa.Array]:
    rows = window.batch.rows.num_rows
    by_unique = [results[position] for position in range(len(window.keys))]
    computed = window.unique >= 0
    picked = window.unique[computed]
    width = engine.info.width
    table = np.zeros((len(by_unique), width), np.float32)
    for position, result in enumerate(by_unique):
        if result.values is not None:
            table[position] = result.values
    values = np.zeros((rows, width), np.float32)
    values[computed] = table[picked]
    n_tokens = np.zeros(rows, np.int32)
    n_tokens[computed] = np.array([result.n_tokens for result in by_unique], np.int32)[picked]
    truncated = np.zeros(rows, np.bool_)
    truncated[computed] = np.array([result.truncated for result in by_unique], np.bool_)[picked]
    errors: list[str | None] = [None] * rows
    for computed_row in np.flatnonzero(computed):
        errors[computed_row] = by_unique[window.unique[computed_row]].error
    for row, error in window.row_errors.items():
        errors[row] = error
    ok = computed & np.array([error is None for error in errors], np.bool_)
    decoder = config.task.decoder
    labels = engine.info.labels if decoder is None or not decoder.labels else [name.strip() for name in decoder.labels]
    fresh = [
        *result_arrays(config.task, labels, values, ok),
        *fact_arrays(n_tokens, truncated, computed, errors),
    ]
    return fresh if window.kept is None else window.kept.merge(fresh)
