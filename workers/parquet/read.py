"""First station of a shard: Arrow rows of its pieces, streamed in small batches. Decides nothing about them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.parquet as pq

from sharding.errors import DriftError, RetryShard
from sharding.failpoints import failpoint
from sharding.storage import Entry, Storage, open_storage, split_uri
from workers.config import AssignedPiece
from workers.parquet.tables import join_tables

MOST_BATCH_ROWS = 512
"""Few enough that the engine waits for the first batch of a shard only a moment, and that memory stays small."""
_BATCH_BYTES = 16 << 20
_DECODED_ROWS = 64
_READ_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class RowBatch:
    """Consecutive rows of a shard, in input order; `start` is the first one's position in the shard."""

    start: int
    rows: pa.RecordBatch


def read_rows(
    pieces: Sequence[AssignedPiece], columns: Sequence[str], *, most_rows: int = MOST_BATCH_ROWS
) -> Iterator[RowBatch]:
    """Stream the rows of a shard.

    A batch holds at most `most_rows` rows, and stops growing at 16 MiB. Files are decoded 64 rows at a time, fewer
    where the footer tells of large rows: neither a giant row group nor a dictionary of long texts unfolds in memory.

    Args:
        pieces: Row ranges of source files, in order.
        columns: Top-level columns to read, in the order wanted.
        most_rows: Most rows of a batch.

    Raises:
        DriftError: A file is no longer the one that was planned.
        RetryShard: A file that could be read at plan time cannot be read now.
    """
    position = 0
    for piece in pieces:
        for rows in _gathered(read_file_rows(piece, columns), most_rows):
            failpoint("read")
            yield RowBatch(position, rows)
            position += rows.num_rows


def read_file_rows(piece: AssignedPiece, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """Stream one row range of one file; see `read_rows`."""
    folder, name = split_uri(piece.path)
    storage = open_storage(folder)
    entry = _check_version(storage, name, piece)
    try:
        with pq.ParquetFile(
            storage.open_parquet_source(name, entry), pre_buffer=False, buffer_size=_READ_BYTES
        ) as file:
            yield from _file_rows(file, piece, columns)
    except (pa.ArrowException, OSError) as error:
        raise RetryShard(f"cannot read rows {piece.start} to {piece.stop} ({error}): `{piece.path}`") from error
    _check_version(storage, name, piece)  # rewritten in place while it was read: some rows would be of the new content


def _check_version(storage: Storage, name: str, piece: AssignedPiece) -> Entry:
    entry = storage.head(name)
    if entry is None or entry.version != piece.version:
        now = "the file is gone" if entry is None else entry.version
        raise DriftError(
            f"a source file changed since the plan (planned version `{piece.version}`, now `{now}`): `{piece.path}`",
            hint="put the file back, or start a new output",
        )
    return entry


def _gathered(batches: Iterator[pa.RecordBatch], most_rows: int) -> Iterator[pa.RecordBatch]:
    """Consecutive batches joined until they are large enough; joined the same way in every run."""
    pending: list[pa.RecordBatch] = []
    rows = size_bytes = 0
    for batch in batches:
        if pending and rows + batch.num_rows > most_rows:
            yield from _joined(pending)
            pending, rows, size_bytes = [], 0, 0
        pending.append(batch)
        rows += batch.num_rows
        size_bytes += batch.nbytes
        if size_bytes >= _BATCH_BYTES:
            yield from _joined(pending)
            pending, rows, size_bytes = [], 0, 0
    if pending:
        yield from _joined(pending)


def _joined(batches: list[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for table in join_tables([pa.Table.from_batches([batch]) for batch in batches]):
        yield from table.to_batches()


def _file_rows(file: pq.ParquetFile, piece: AssignedPiece, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    first_row = 0
    for group in range(file.metadata.num_row_groups):
        footer = file.metadata.row_group(group)
        start, stop = max(piece.start, first_row), min(piece.stop, first_row + footer.num_rows)
        if start < stop:
            batch_rows = max(1, min(_DECODED_ROWS, _BATCH_BYTES * footer.num_rows // max(1, footer.total_byte_size)))
            row = first_row
            for batch in file.iter_batches(batch_rows, row_groups=[group], columns=list(columns)):
                low, high = max(start - row, 0), min(stop - row, batch.num_rows)
                if low < high:
                    yield batch.slice(low, high - low).select(list(columns))
                row += batch.num_rows
                if row >= stop:
                    break
        first_row += footer.num_rows
