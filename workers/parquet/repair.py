"""Reads back the results of an earlier generation, so that `retry-failed` computes only the rows that had an error."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from sharding.errors import RetryShard
from sharding.storage import Storage
from sharding.words import counted
from workers.config import WorkerConfig

_READ_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class KeptResults:
    """Result columns of some rows from the part on disk; `good` marks the rows without error."""

    columns: list[pa.Array]
    good: NDArray[np.bool_]

    def merge(self, fresh: list[pa.Array]) -> list[pa.Array]:
        """The kept value where a row was good, the fresh one elsewhere."""
        rows = len(self.good)
        choice = pa.array(np.where(self.good, np.arange(rows), np.arange(rows) + rows))
        return [
            pa.concat_arrays([kept, new.cast(kept.type)]).take(choice)
            for kept, new in zip(self.columns, fresh, strict=True)
        ]


class KeptReader:
    """Gives the kept results in row order, any number of rows at a time."""

    def __init__(self, batches: Iterator[pa.RecordBatch], columns: tuple[str, ...]) -> None:
        self._batches = batches
        self._columns = columns
        self._rest: pa.RecordBatch | None = None

    def take(self, rows: int) -> KeptResults:
        """The results of the next `rows` rows.

        Raises:
            RetryShard: The part ends before them.
        """
        parts: list[pa.RecordBatch] = []
        missing = rows
        while missing:
            batch = self._rest if self._rest is not None else next(self._batches, None)
            if batch is None:
                raise RetryShard(f"the part on disk ends {counted(missing, 'row')} early")
            parts.append(batch.slice(0, missing))
            self._rest = batch.slice(missing) if batch.num_rows > missing else None
            missing -= parts[-1].num_rows
        table = pa.Table.from_batches(parts).combine_chunks()
        columns = [_one_array(table.column(name)) for name in self._columns]
        good = pc.is_null(columns[self._columns.index("error")]).to_numpy(zero_copy_only=False)
        return KeptResults(columns, good)


def read_kept(output: Storage, part: str, config: WorkerConfig) -> KeptReader:
    """Open the result columns of a final part."""

    def batches() -> Iterator[pa.RecordBatch]:
        with pq.ParquetFile(output.open_parquet_source(part), pre_buffer=False, buffer_size=_READ_BYTES) as file:
            yield from file.iter_batches(512, columns=list(config.result_columns))

    return KeptReader(batches(), config.result_columns)


def _one_array(column: pa.ChunkedArray) -> pa.Array:
    return column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays(column.chunks)
