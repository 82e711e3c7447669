"""Between every station and an object store (S3, GCS, Azure): whole puts, conditional puts, ranged reads.

A put is atomic in all of them. A conditional put whose answer is lost may have been done: the content of the object
decides. Parts of a large put that was broken off are invisible and the client removes them; those of a killed process
stay hidden in the bucket until its lifecycle rule for incomplete multipart uploads removes them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import obstore
import pyarrow as pa
from obstore import exceptions
from obstore.store import AzureStore, GCSStore, S3Store

from sharding.errors import (
    AuthenticationError,
    CandelabraError,
    DriftError,
    InputError,
    NotFoundError,
    StorageError,
)
from sharding.storage.base import Entry, Folder, Storage
from sharding.storage.ranges import open_ranges
from sharding.storage.retry import RetryPolicy, call_with_retries
from sharding.storage.scratch import process_scratch, sweep_scratch
from sharding.storage.uri import Location

if TYPE_CHECKING:
    from obstore import ObjectMeta
    from obstore.store import ClientConfig, RetryConfig

_PART_BYTES = 16 * 1024 * 1024
_MOST_PARTS = 9_000  # S3 allows 10,000
_PARALLEL_PARTS = 4
_MOST_COPIED_BYTES = 5 * 1024**3
_VARIABLES = ("AWS_", "AZURE_", "GOOGLE_", "HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy")
_STATUS = re.compile(r"status code: (\d{3})")
_HINTS = {
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY or run with a role; profiles in ~/.aws are not read",
    "gs": "set GOOGLE_APPLICATION_CREDENTIALS or run with a service account",
    "az": "set AZURE_STORAGE_ACCOUNT_NAME and a key or token, or run with a managed identity",
}

_Result = TypeVar("_Result")


class RemoteStorage(Storage):
    """A prefix of a bucket. Connections are shared by all storages of one bucket in this process."""

    def __init__(self, location: Location, retry: RetryPolicy | None = None) -> None:
        super().__init__(location.uri)
        self._location = location
        self._retry = retry or RetryPolicy()
        self._prefix = location.key
        self._store = _open_store(location.scheme, location.bucket, self._retry, _environment())

    def __reduce__(self) -> tuple[object, ...]:
        return (RemoteStorage, (self._location, self._retry))

    def list(self, prefix: str = "") -> Iterator[Entry]:
        def collect() -> list[Entry]:
            chunks = obstore.list(self._store, self._key(prefix) or None)
            return [self._entry(meta) for chunk in chunks for meta in chunk]

        entries = self._call(prefix, collect)
        return iter(sorted(entries, key=lambda entry: entry.path.encode()))

    def list_folder(self, prefix: str = "") -> Folder:
        result = self._call(prefix, lambda: obstore.list_with_delimiter(self._store, self._key(prefix) or None))
        folders = sorted(map(self._relative, result["common_prefixes"]), key=str.encode)
        files = sorted(map(self._entry, result["objects"]), key=lambda entry: entry.path.encode())
        return Folder(tuple(folders), tuple(files))

    def head(self, path: str) -> Entry | None:
        try:
            return self._entry(self._call(path, lambda: obstore.head(self._store, self._key(path))))
        except NotFoundError:
            return None

    def read_bytes(self, path: str) -> bytes:
        return self._call(path, lambda: bytes(obstore.get(self._store, self._key(path)).bytes()))

    def write_bytes(self, path: str, data: bytes) -> None:
        self._call(path, lambda: obstore.put(self._store, self._key(path), data, use_multipart=False))

    def create(self, path: str, data: bytes) -> bool:
        def attempt() -> bool:
            try:
                obstore.put(self._store, self._key(path), data, mode="create", use_multipart=False)
            except exceptions.AlreadyExistsError:
                # ours all the same, if an earlier answer was lost; if it is not there, another's put is under way
                return bytes(obstore.get(self._store, self._key(path)).bytes()) == data
            return True

        def translate(error: Exception) -> Exception | None:
            if isinstance(error, FileNotFoundError) and not _is_bucket_missing(error):
                return StorageError(f"a conditional put was refused, but nothing is there: `{self.full_uri(path)}`")
            return self._translate(error, path)

        return call_with_retries(attempt, translate, self._retry)

    def publish_file(self, local: Path, path: str) -> None:
        try:
            size_bytes = local.stat().st_size
        except FileNotFoundError as error:
            raise StorageError(f"the part to publish is gone: `{local}`") from error
        if self._location.scheme == "s3" and size_bytes > _MOST_COPIED_BYTES:
            raise InputError(
                f"a part of {size_bytes} bytes is more than S3 copies at once: `{self.full_uri(path)}`",
                hint="set smaller sharding.target_rows or sharding.target_bytes",
            )
        chunk = max(_PART_BYTES, -(-size_bytes // _MOST_PARTS))

        def put() -> None:
            obstore.put(self._store, self._key(path), local, chunk_size=chunk, max_concurrency=_PARALLEL_PARTS)

        self._call(path, put)
        local.unlink(missing_ok=True)

    def move(self, source: str, target: str) -> None:
        try:
            self._call(source, lambda: obstore.copy(self._store, self._key(source), self._key(target)))
        except NotFoundError:
            if self.head(target) is None:
                raise
            return
        self.delete(source)

    def delete(self, path: str, missing_ok: bool = True) -> None:
        if not missing_ok and self.head(path) is None:
            raise NotFoundError(f"no such file: `{self.full_uri(path)}`")
        try:
            self._call(path, lambda: obstore.delete(self._store, self._key(path)))
        except NotFoundError as error:
            if _is_bucket_missing(error.__cause__):
                raise

    def open_parquet_source(self, path: str, entry: Entry | None = None) -> pa.NativeFile:
        known = entry or self.head(path)
        if known is None:
            raise NotFoundError(f"no such file: `{self.full_uri(path)}`")
        condition = {"if_match": f'"{known.version}"'} if self._has_etag(known) else {}

        def fetch(start: int, stop: int) -> Any:
            options: Any = {"range": (start, stop), **condition}
            return self._call(path, lambda: obstore.get(self._store, self._key(path), options=options).bytes())

        return open_ranges(fetch, known.size_bytes)

    def scratch_dir(self) -> Path:
        return process_scratch()

    def clear_scratch(self) -> None:
        sweep_scratch()

    def _key(self, path: str) -> str:
        return f"{self._prefix}/{path}".strip("/")

    def _relative(self, key: str) -> str:
        return key.removeprefix(f"{self._prefix}/") if self._prefix else key

    def _entry(self, meta: ObjectMeta) -> Entry:
        etag = (meta["e_tag"] or "").strip('"')  # quoted by some requests and stores, plain by others
        version = etag or f"{meta['size']}-{int(meta['last_modified'].timestamp() * 1e9)}"
        return Entry(self._relative(meta["path"]), meta["size"], version)

    def _has_etag(self, entry: Entry) -> bool:
        return not entry.version.startswith((f"{entry.size_bytes}-", "W/"))

    def _call(self, path: str, call: Callable[[], _Result]) -> _Result:
        return call_with_retries(call, lambda error: self._translate(error, path), self._retry)

    def _translate(self, error: Exception, path: str) -> CandelabraError | None:
        uri = self.full_uri(path)
        if isinstance(error, CandelabraError):
            return error
        if isinstance(error, ValueError):
            return InputError(f"not a valid object name: `{uri}`", hint="control characters and `//` are not possible")
        if _is_bucket_missing(error):
            return NotFoundError(f"no such bucket: `{self._location.bucket}`")
        if isinstance(error, FileNotFoundError):
            return NotFoundError(f"no such file: `{uri}`")
        refused = isinstance(error, exceptions.PermissionDeniedError | exceptions.UnauthenticatedError)
        if refused or _status(error) in ("401", "403"):
            return AuthenticationError(f"the store refuses access: `{uri}`", hint=_HINTS[self._location.scheme])
        if isinstance(error, exceptions.PreconditionError):
            return DriftError(
                f"a source file was replaced while it was read: `{uri}`",
                hint="restore the file to resume, or choose another output path",
            )
        if isinstance(error, exceptions.BaseError | OSError):
            return StorageError(f"the store keeps failing ({_first_line(error)}): `{uri}`")
        return None


def _first_line(error: Exception) -> str:
    text = str(error).partition("\n")[0]
    return text if len(text) <= 300 else f"{text[:300]}..."


def _status(error: Exception) -> str | None:
    """The HTTP status of a failed listing, for which the client has one type whatever happened."""
    match = _STATUS.search(str(error)) if isinstance(error, exceptions.GenericError) else None
    return match[1] if match else None


def _is_bucket_missing(error: BaseException | None) -> bool:
    """By the error code that stores put into the answer, for which the client has no type of its own."""
    return error is not None and ("NoSuchBucket" in str(error) or "ContainerNotFound" in str(error))


def _environment() -> tuple[tuple[str, str], ...]:
    return tuple(sorted(item for item in os.environ.items() if item[0].startswith(_VARIABLES)))


@lru_cache(maxsize=64)
def _open_store(
    scheme: str, bucket: str, retry: RetryPolicy, environment: tuple[tuple[str, str], ...]
) -> S3Store | GCSStore | AzureStore:
    """Credentials, region and endpoint come from the environment; a change there opens a new store."""
    endpoints = [value for name, value in environment if "ENDPOINT" in name or name == "AZURE_STORAGE_USE_EMULATOR"]
    client: ClientConfig = {
        "timeout": timedelta(seconds=retry.request_timeout_s),
        "connect_timeout": timedelta(seconds=10),
        "allow_http": any(value.startswith("http://") or value == "true" for value in endpoints),
    }
    retries: RetryConfig = {
        "max_retries": retry.request_retries,
        "retry_timeout": timedelta(seconds=retry.total_s),
        "backoff": {
            "init_backoff": timedelta(seconds=retry.initial_s),
            "max_backoff": timedelta(seconds=retry.longest_s),
            "base": retry.base,
        },
    }
    if scheme == "s3":
        return S3Store(bucket, client_options=client, retry_config=retries)
    if scheme == "gs":
        return GCSStore(bucket, client_options=client, retry_config=retries)
    return AzureStore(bucket, client_options=client, retry_config=retries)
