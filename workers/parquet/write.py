"""Last station of a shard: rows in input order become one whole local Parquet file. Publishes nothing."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import pyarrow as pa
import pyarrow.parquet as pq

from sharding.errors import CandelabraError
from sharding.storage import translate_os_error
from workers.parquet.tables import join_tables

_ROW_GROUP_BYTES = 64 << 20
_COMPRESSION_LEVEL = 3


class PartWriter:
    """Writes one part; the bytes depend on the rows and the schema alone.

    Row groups close when their rows hold 64 MiB in Arrow's own layout, so a reader's memory stays bounded however wide
    the embeddings are. Floating-point lists are stored byte-stream-split: they compress about a tenth better with zstd
    and dictionaries never pay on them.
    """

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self._path = path
        self._schema = schema
        self._pending: list[pa.Table] = []
        self._pending_bytes = 0
        self.rows = 0
        vectors = _vector_paths(schema)
        with _disk_errors(str(path)):
            self._writer = pq.ParquetWriter(
                path,
                schema,
                compression="zstd",
                compression_level=_COMPRESSION_LEVEL,
                use_dictionary=[name for name in _leaf_paths(schema) if name not in vectors],
                use_byte_stream_split=vectors,
                write_page_index=True,
            )

    def write(self, rows: pa.RecordBatch) -> None:
        """Append rows of exactly the part's schema.

        Raises:
            DiskFullError: No space is left for the temporary file.
        """
        table = pa.Table.from_batches([rows], self._schema)
        self._pending.append(table)
        self._pending_bytes += table.nbytes
        self.rows += table.num_rows
        if self._pending_bytes >= _ROW_GROUP_BYTES:
            self._flush()

    def close(self) -> tuple[int, str]:
        """Finish the file.

        Returns:
            Its size in bytes and the SHA-256 of its content.
        """
        with _disk_errors(str(self._path)):
            if self._pending:
                self._flush()
            self._writer.close()
            digest = hashlib.sha256()
            with self._path.open("rb") as file:
                while block := file.read(1 << 20):
                    digest.update(block)
            return self._path.stat().st_size, digest.hexdigest()

    def _flush(self) -> None:
        tables, self._pending, self._pending_bytes = self._pending, [], 0
        with _disk_errors(str(self._path)):
            for table in join_tables(tables):
                self._writer.write_table(table, row_group_size=max(1, table.num_rows))

    def __enter__(self) -> PartWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            with contextlib.suppress(pa.ArrowException, OSError, CandelabraError):  # the first error is the one to tell
                self._writer.close()
            self._path.unlink(missing_ok=True)


def _leaf_paths(schema: pa.Schema) -> list[str]:
    sink = pa.BufferOutputStream()
    pq.ParquetWriter(sink, schema).close()
    leaves = pq.ParquetFile(pa.BufferReader(sink.getvalue())).schema
    return [leaves.column(index).path for index in range(len(leaves))]


def _vector_paths(schema: pa.Schema) -> list[str]:
    """Parquet paths of the fixed-size lists of float32, which no dictionary helps."""
    wanted = {
        f"{field.name}.list.{field.type.value_field.name}"
        for field in schema
        if pa.types.is_fixed_size_list(field.type) and pa.types.is_float32(field.type.value_type)
    }
    leaves = _leaf_paths(schema)
    return [path for path in leaves if path in wanted and leaves.count(path) == 1]


@contextlib.contextmanager
def _disk_errors(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise translate_os_error(error, path) from error
