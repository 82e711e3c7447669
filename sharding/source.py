"""From what the spec names to `SourceFile`s: finds Parquet files, reads their footers, agrees on one schema.

Reads no row. A folder stands for every `*.parquet` and `*.parq` below it; names that begin with `_` or `.` are skipped
as Spark does (`_x=1` is not), so the state directory of an earlier output is never read. Columns that exist only in
the folders' names (`date=2024-01-01/`) are not added.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice

import pyarrow as pa
import pyarrow.parquet as pq

from sharding.errors import CandelabraError, SourceError
from sharding.find import Found, find_files
from sharding.schema import SchemaAgreement
from sharding.storage import Storage

_CHUNK = 64
_TAIL_BYTES = 8
_SIGNATURE_BYTES = 28


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Rows, and uncompressed bytes, of one row group."""

    rows: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One Parquet file: full location, size on disk, rows, version tag (etag or size and time), row groups."""

    path: str
    size_bytes: int
    rows: int
    version: str
    row_groups: tuple[RowGroup, ...]


@dataclass(frozen=True, slots=True)
class SourceListing:
    """Every source in input order, and the schema that holds for all of them."""

    files: tuple[SourceFile, ...]
    schema: pa.Schema


def list_sources(paths: Sequence[str], *, workers: int = 16) -> SourceListing:
    """Finds the files and reads their footers, several at a time.

    Args:
        paths: Files, globs (`*`, `?`, `[...]` within a segment, `**` across) and folders, local or remote. What one
            of them stands for is sorted by path; the list's own order is kept; a file named twice is taken once.
        workers: Most footers to read at the same time.

    Returns:
        The files and their schema: columns and metadata of the first file, a field nullable if it is so in any file.

    Raises:
        NotFoundError: One of `paths` stands for no file.
        SourceError: A file cannot be read as Parquet; names it.
        SchemaMismatchError: Two files do not agree; names the file, the column and both types.
    """
    found = find_files(paths, workers=workers)
    agreement = SchemaAgreement()
    files: list[SourceFile] = []
    size = max(1, min(_CHUNK, len(found) // (workers * 4)))
    with ThreadPoolExecutor(workers, thread_name_prefix="footers") as pool:
        for chunk in pool.map(_read_footers, _chunks(found, size)):
            for item in chunk:
                if isinstance(item, CandelabraError):
                    pool.shutdown(wait=False, cancel_futures=True)
                    raise item
                file, schema = item
                agreement.add(file.path, schema)
                files.append(file)
    return SourceListing(tuple(files), agreement.schema)


def _chunks(items: Sequence[Found], size: int) -> Iterator[Sequence[Found]]:
    iterator = iter(items)
    while chunk := [*islice(iterator, size)]:
        yield chunk


def _read_footers(chunk: Iterable[Found]) -> list[tuple[SourceFile, pa.Schema] | CandelabraError]:
    result: list[tuple[SourceFile, pa.Schema] | CandelabraError] = []
    for found in chunk:
        try:
            result.append(_read_footer(found.storage, found))
        except CandelabraError as error:
            result.append(error)
            break
    return result


def _read_footer(storage: Storage, found: Found) -> tuple[SourceFile, pa.Schema]:
    uri = storage.full_uri(found.entry.path)
    try:
        uri.encode()
    except UnicodeEncodeError as error:
        raise SourceError(f"the name of a source file is not valid UTF-8: `{uri!a}`") from error
    with storage.open_parquet_source(found.entry.path, found.entry) as source:
        try:
            with pq.ParquetFile(source) as file:
                metadata, schema = file.metadata, file.schema_arrow
                encrypted = _is_encrypted(source, found.entry.size_bytes, metadata.serialized_size)
                groups = tuple(
                    RowGroup(group.num_rows, group.total_byte_size)
                    for group in map(metadata.row_group, range(metadata.num_row_groups))
                )
        except (pa.ArrowException, OSError) as error:
            raise _source_error(error, uri, found.entry.size_bytes) from error
    if encrypted:
        raise _encrypted(uri)
    if sum(group.rows for group in groups) != metadata.num_rows:
        raise SourceError(f"the footer contradicts itself about the number of rows: `{uri}`")
    return SourceFile(uri, found.entry.size_bytes, metadata.num_rows, found.entry.version, groups), schema


def _is_encrypted(source: pa.NativeFile, size_bytes: int, footer_bytes: int) -> bool:
    """True for encrypted columns under a plain footer: a signature then follows the footer proper.

    Asking such a column for its metadata would end the process. Signature and tail: Parquet modular encryption, 5.5,
    https://github.com/apache/parquet-format/blob/apache-parquet-format-2.10.0/Encryption.md
    """
    source.seek(size_bytes - _TAIL_BYTES)
    length = int.from_bytes(source.read(4), "little")
    return length == footer_bytes + _SIGNATURE_BYTES


def _source_error(error: Exception, uri: str, size_bytes: int) -> CandelabraError:
    reason = str(error).splitlines()[0].rstrip(".") if str(error) else type(error).__name__
    lowered = reason.lower()
    if size_bytes == 0:
        return SourceError(f"a source file is empty (0 bytes, not even a footer): `{uri}`")
    if "encrypt" in lowered or "decrypt" in lowered:
        return _encrypted(uri)
    if "magic bytes" in lowered or "footer" in lowered:
        return SourceError(f"a source file is not Parquet, or was cut short ({lowered}): `{uri}`")
    return SourceError(f"a source file cannot be read as Parquet ({lowered}): `{uri}`")


def _encrypted(uri: str) -> SourceError:
    return SourceError(f"a source file is encrypted: `{uri}`", hint="decrypt it first")
