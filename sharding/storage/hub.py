"""Between the sources and the Hugging Face Hub: reads data sets by `hf://`. Writes nothing and keeps no local copy.

Endpoint (`HF_ENDPOINT`) and token (`HF_TOKEN`, or the one that was saved at login) are those of `huggingface_hub`. Its
API is used rather than its file system, which caches listings and forgets a file's blob id when it is asked anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote

import pyarrow as pa
from huggingface_hub import HfApi, get_session, get_token, hf_hub_url, hf_raise_for_status
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.hf_api import RepoFile, RepoFolder

from sharding.errors import (
    AuthenticationError,
    CandelabraError,
    InfrastructureError,
    InputError,
    NotFoundError,
    StorageError,
)
from sharding.storage.base import Entry, Folder, Storage
from sharding.storage.ranges import open_ranges
from sharding.storage.retry import RetryPolicy, call_with_retries
from sharding.storage.scratch import process_scratch, sweep_scratch
from sharding.storage.uri import Location

_TYPES = {"datasets": "dataset", "spaces": "space"}
_MISSING = (EntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError)
_Result = TypeVar("_Result")


class HubStorage(Storage):
    """A folder of a repository on the Hub, at a revision (`hf://datasets/org/name@revision/folder`). Read-only."""

    def __init__(self, location: Location, retry: RetryPolicy | None = None) -> None:
        super().__init__(location.uri)
        self._location = location
        self._retry = retry or RetryPolicy()
        kind, _, name = location.bucket.partition("/")
        self._type = _TYPES.get(kind, "model")
        name = name if kind in _TYPES else location.bucket
        self._repository, _, revision = name.partition("@")
        self._revision = unquote(revision) or None

    def __reduce__(self) -> tuple[object, ...]:
        return (HubStorage, (self._location, self._retry))

    def list(self, prefix: str = "") -> Iterator[Entry]:
        files = (item for item in self._tree(prefix, recursive=True) if isinstance(item, RepoFile))
        return iter(sorted(map(self._entry, files), key=lambda entry: entry.path.encode()))

    def list_folder(self, prefix: str = "") -> Folder:
        items = self._tree(prefix, recursive=False)
        folders = sorted((self._relative(item.path) for item in items if isinstance(item, RepoFolder)), key=str.encode)
        files = map(self._entry, (item for item in items if isinstance(item, RepoFile)))
        return Folder(tuple(folders), tuple(sorted(files, key=lambda entry: entry.path.encode())))

    def _tree(self, prefix: str, *, recursive: bool) -> Sequence[RepoFile | RepoFolder]:
        folder = self._key(prefix)

        def collect() -> Sequence[RepoFile | RepoFolder]:
            try:
                tree = HfApi().list_repo_tree(
                    self._repository,
                    folder or None,
                    recursive=recursive,
                    revision=self._revision,
                    repo_type=self._type,
                )
                return [item for item in tree if not folder or item.path.startswith(f"{folder}/")]
            except EntryNotFoundError:  # no such folder
                return []

        return self._call(prefix, collect)

    def head(self, path: str) -> Entry | None:
        def ask() -> Sequence[RepoFile | RepoFolder]:
            return HfApi().get_paths_info(
                self._repository, [self._key(path)], revision=self._revision, repo_type=self._type
            )

        infos = self._call(path, ask)
        return next((self._entry(info) for info in infos if isinstance(info, RepoFile)), None)

    def read_bytes(self, path: str) -> bytes:
        return self._call(path, lambda: self._get(path, {}))

    def open_parquet_source(self, path: str, entry: Entry | None = None) -> pa.NativeFile:
        known = entry or self.head(path)
        if known is None:
            raise NotFoundError(f"no such file: `{self.full_uri(path)}`")

        def fetch(start: int, stop: int) -> bytes:
            data = self._call(path, lambda: self._get(path, {"range": f"bytes={start}-{stop - 1}"}))
            if len(data) != stop - start:
                raise StorageError(f"the Hub sent {len(data)} bytes of {stop - start}: `{self.full_uri(path)}`")
            return data

        return open_ranges(fetch, known.size_bytes)

    def _get(self, path: str, headers: dict[str, str]) -> bytes:
        url = hf_hub_url(self._repository, self._key(path), repo_type=self._type, revision=self._revision)
        token = get_token()
        asked = {**headers, "accept-encoding": "identity", **({"authorization": f"Bearer {token}"} if token else {})}
        response = get_session().get(url, headers=asked, timeout=self._retry.request_timeout_s)
        hf_raise_for_status(response)
        return response.content

    def write_bytes(self, path: str, data: bytes) -> None:
        raise self._read_only(path)

    def create(self, path: str, data: bytes) -> bool:
        raise self._read_only(path)

    def publish_file(self, local: Path, path: str) -> None:
        raise self._read_only(path)

    def move(self, source: str, target: str) -> None:
        raise self._read_only(source)

    def delete(self, path: str, missing_ok: bool = True) -> None:
        raise self._read_only(path)

    def scratch_dir(self) -> Path:
        return process_scratch()

    def clear_scratch(self) -> None:
        sweep_scratch()

    def _read_only(self, path: str) -> InputError:
        return InputError(
            f"hf:// can be read only: `{self.full_uri(path)}`", hint="write to a local path, s3://, gs:// or az://"
        )

    def _key(self, path: str) -> str:
        return f"{self._location.key}/{path}".strip("/")

    def _relative(self, key: str) -> str:
        return key.removeprefix(f"{self._location.key}/") if self._location.key else key

    def _entry(self, info: RepoFile) -> Entry:
        return Entry(self._relative(info.path), info.size, info.blob_id)

    def _call(self, path: str, call: Callable[[], _Result]) -> _Result:
        return call_with_retries(call, lambda error: self._translate(error, path), self._retry)

    def _translate(self, error: Exception, path: str) -> CandelabraError | None:
        uri = self.full_uri(path)
        if isinstance(error, OfflineModeIsEnabled):
            return InfrastructureError(f"HF_HUB_OFFLINE is set, so this cannot be read: `{uri}`", hint="unset it")
        status = error.response.status_code if isinstance(error, HfHubHTTPError) else None
        if isinstance(error, GatedRepoError) or status in (401, 403):
            return AuthenticationError(
                f"the Hub refuses access: `{uri}`",
                hint="check the name; if it is private or gated, accept its terms and set HF_TOKEN",
            )
        if isinstance(error, _MISSING):
            return NotFoundError(f"no such file, repository or revision: `{uri}`")
        return self._failure(error, uri)

    def _failure(self, error: Any, uri: str) -> CandelabraError | None:
        """The client's own errors are OSErrors, except those of its HTTP library, whose name depends on the version."""
        if not isinstance(error, OSError | HfHubHTTPError) and not type(error).__module__.startswith("httpx"):
            return None
        return StorageError(f"the Hub keeps failing ({str(error).partition(chr(10))[0][:300]}): `{uri}`")
