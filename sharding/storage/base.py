"""Between every station and the disk: what a storage can do. Declares only; the calls are in `local`, `remote`, `hub`.

Paths given to a storage are relative to its root, with `/` between segments, and written literally (no encoding).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa


@dataclass(frozen=True, slots=True)
class Entry:
    """One stored file.

    Attributes:
        path: Relative to the storage's root.
        size_bytes: Length of the content.
        version: Changes when the content does: the store's etag, or `size-mtime_ns` of a local file.
    """

    path: str
    size_bytes: int
    version: str


@dataclass(frozen=True, slots=True)
class Folder:
    """One level of a listing: names of the sub-folders (paths, relative to the root) and the files, both sorted."""

    folders: tuple[str, ...]
    files: tuple[Entry, ...]


class Storage(ABC):
    """A place that holds files: a local folder, or a prefix of a bucket. Safe to use from several threads; picklable.

    Every method retries what is worth retrying and then raises one of the project's own errors: `NotFoundError`,
    `AuthenticationError` (permission or credentials), `DiskFullError`, or `StorageError` for the rest.
    """

    def __init__(self, uri: str) -> None:
        self._uri = uri

    @property
    def uri(self) -> str:
        """Absolute and normalised: `/abs/path` or `s3://bucket/prefix`."""
        return self._uri

    @property
    def local_root(self) -> Path | None:
        """The folder on this machine, or None for a remote store."""
        return None

    def full_uri(self, path: str) -> str:
        """The location string of `path`, usable on its own."""
        return f"{self._uri.rstrip('/')}/{path}" if path else self._uri

    @abstractmethod
    def list(self, prefix: str = "") -> Iterator[Entry]:
        """Every file below the folder `prefix`, recursively, sorted by path. A folder that is not there is empty."""

    @abstractmethod
    def list_folder(self, prefix: str = "") -> Folder:
        """One level below the folder `prefix`. A folder that is not there is empty."""

    @abstractmethod
    def head(self, path: str) -> Entry | None:
        """The entry of one file, or None when there is no such file."""

    def exists(self, path: str) -> bool:
        """True when there is a file of exactly that path."""
        return self.head(path) is not None

    @abstractmethod
    def read_bytes(self, path: str) -> bytes:
        """The whole content.

        Raises:
            NotFoundError: There is no such file.
        """

    @abstractmethod
    def write_bytes(self, path: str, data: bytes) -> None:
        """Writes or overwrites atomically: a reader sees the old content or the new, never a part."""

    @abstractmethod
    def create(self, path: str, data: bytes) -> bool:
        """Writes only if there is no such file; atomic, and of several callers exactly one gets True.

        When an answer is lost on the way (the store did it, the connection broke), the content decides: it is ours
        if it equals `data`. So `data` must differ between callers (carry a nonce), or be the same in effect.
        """

    @abstractmethod
    def publish_file(self, local: Path, path: str) -> None:
        """Puts a whole local file at `path` in one atomic step; the local file is consumed.

        Local: a rename, or across devices a copy to a temporary name, fsync and rename. Remote: one put, in parts
        when it is large; parts that were uploaded before a failure are never visible.

        Raises:
            StorageError: The local file is gone (another attempt may succeed), or the store kept failing.
            InputError: The file is larger than the store can copy, so it could not be promoted.
        """

    @abstractmethod
    def move(self, source: str, target: str) -> None:
        """Moves a file, replacing `target`; done already (no source, target there) counts as success.

        Local: a rename. Remote: a copy inside the store, then a delete of the source.

        Raises:
            NotFoundError: Neither source nor target exists.
        """

    @abstractmethod
    def delete(self, path: str, missing_ok: bool = True) -> None:
        """Removes one file.

        Raises:
            NotFoundError: It is not there and `missing_ok` is False (stores that cannot tell are asked first).
        """

    @abstractmethod
    def open_parquet_source(self, path: str, entry: Entry | None = None) -> pa.NativeFile:
        """A seekable reader for `pyarrow.parquet.ParquetFile`: fetches the ranges that are asked for, as they are.

        Args:
            path: Relative to the root.
            entry: What a listing said about the file; saves one request to a remote store.
        """

    @abstractmethod
    def scratch_dir(self) -> Path:
        """A folder on this machine for whole temporary parts.

        For a local storage it lies on the same device, so that publishing is a rename.
        """

    @abstractmethod
    def clear_scratch(self) -> None:
        """Removes what dead processes left in the scratch folders. Not while workers of this job are writing."""
