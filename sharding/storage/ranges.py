"""From a remote Parquet file to the reader: a seekable file over ranged requests. Keeps one small range."""

from __future__ import annotations

import io
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import pyarrow as pa

_RANGE_BYTES = 8 * 1024 * 1024
_KEPT_BYTES = 256 * 1024
_PARALLEL = 8

FetchRange = Callable[[int, int], Any]
"""(start, stop) -> the bytes of that range, as anything with the buffer protocol."""


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_PARALLEL, thread_name_prefix="ranges")


class RangeFile(io.RawIOBase):
    """A read-only file whose content lives elsewhere. Large reads are split and fetched at the same time."""

    def __init__(self, fetch: FetchRange, size_bytes: int) -> None:
        super().__init__()
        self._fetch = fetch
        self._size = size_bytes
        self._place = 0
        self._kept = (0, b"")  # where the last small read began, and what it gave: small reads come in rows

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._place

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        origin = {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self._size}[whence]
        if origin + offset < 0:
            raise ValueError(f"negative position: `{origin + offset}`")
        self._place = origin + offset
        return self._place

    def read(self, size: int | None = -1) -> bytes:
        start = min(self._place, self._size)
        stop = self._size if size is None or size < 0 else min(self._size, start + size)
        data = self._read_range(start, stop)
        self._place = stop
        return data

    def readall(self) -> bytes:
        return self.read()

    def readinto(self, buffer: Any) -> int:
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def _read_range(self, start: int, stop: int) -> bytes:
        if start >= stop:
            return b""
        if stop - start <= _KEPT_BYTES:
            low, kept = self._kept
            if not low <= start <= stop <= low + len(kept):
                ahead = min(self._size, max(stop, start + _KEPT_BYTES))
                low, kept = self._kept = start, bytes(self._fetch(start, ahead))
            return kept[start - low : stop - low]
        if stop - start <= _RANGE_BYTES:
            return bytes(self._fetch(start, stop))
        starts = range(start, stop, _RANGE_BYTES)
        parts = _pool().map(lambda low: self._fetch(low, min(low + _RANGE_BYTES, stop)), starts)
        return b"".join(memoryview(part) for part in parts)


def open_ranges(fetch: FetchRange, size_bytes: int) -> pa.NativeFile:
    """A `pyarrow` file over `fetch`; ranges outside the file are never asked for."""
    return pa.PythonFile(RangeFile(fetch, size_bytes), mode="r")
