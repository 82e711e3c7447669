"""Between every station and a local disk: plain os calls with atomic renames. Retries nothing but stale handles.

Create-if-absent is a hard link of a complete temporary file: `link(2)` fails if the name exists, and no reader can see
half a record. File systems without hard links get `O_EXCL`, which keeps "one winner" and loses "never half".
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pyarrow as pa

from sharding.errors import (
    AuthenticationError,
    CandelabraError,
    DiskFullError,
    InfrastructureError,
    NotFoundError,
    StorageError,
)
from sharding.storage.base import Entry, Folder, Storage

SCRATCH = "_candelabra/scratch"
_NO_HARD_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV}
_Result = TypeVar("_Result")


def translate_os_error(error: OSError, path: str) -> CandelabraError:
    """The project's error for an `OSError` on `path`; use it wherever a local file is written outside this package."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DiskFullError(f"no space left to write: `{path}`", hint="free space, then submit again: it resumes")
    if error.errno in (errno.EACCES, errno.EPERM):
        return AuthenticationError(f"permission denied: `{path}`")
    if error.errno == errno.EROFS:
        return InfrastructureError(f"the file system is read-only: `{path}`")
    if isinstance(error, (FileNotFoundError, NotADirectoryError)):
        return NotFoundError(f"no such file: `{path}`")
    reason = error.strerror or str(error)
    return StorageError(f"file system error ({reason.lower()}): `{path}`")


class LocalStorage(Storage):
    """A folder of this machine (or a shared file system that is mounted here). It need not exist yet."""

    def __init__(self, root: str) -> None:
        super().__init__(root)
        self._root = Path(root)

    def __reduce__(self) -> tuple[object, ...]:
        return (LocalStorage, (self._uri,))

    @property
    def local_root(self) -> Path | None:
        return self._root

    def list(self, prefix: str = "") -> Iterator[Entry]:
        entries = self._guard(prefix, lambda: [*self._walk(prefix, ())])
        return iter(sorted(entries, key=lambda entry: os.fsencode(entry.path)))

    def _walk(self, prefix: str, above: tuple[tuple[int, int], ...]) -> Iterator[Entry]:
        folder = self._root / prefix
        try:
            status = folder.stat()
            with os.scandir(folder) as scan:
                children = [*scan]
        except (FileNotFoundError, NotADirectoryError):
            return
        here = (status.st_dev, status.st_ino)
        if here in above:  # a symbolic link back to a folder above
            return
        for child in children:
            path = f"{prefix}/{child.name}" if prefix else child.name
            if path == SCRATCH:
                continue
            if child.is_dir():
                yield from self._walk(path, (*above, here))
            elif (entry := _entry(path, child)) is not None:
                yield entry

    def list_folder(self, prefix: str = "") -> Folder:
        folders: list[str] = []
        files: list[Entry] = []

        def scan_once() -> None:
            try:
                with os.scandir(self._root / prefix) as scan:
                    for child in scan:
                        path = f"{prefix}/{child.name}" if prefix else child.name
                        if child.is_dir():
                            folders.append(path)
                        elif (entry := _entry(path, child)) is not None:
                            files.append(entry)
            except (FileNotFoundError, NotADirectoryError):
                return

        self._guard(prefix, scan_once)
        files.sort(key=lambda entry: os.fsencode(entry.path))
        return Folder(tuple(sorted(folders, key=os.fsencode)), tuple(files))

    def head(self, path: str) -> Entry | None:
        def look() -> Entry | None:
            try:
                status = (self._root / path).stat()
            except (FileNotFoundError, NotADirectoryError):
                return None
            return Entry(path, status.st_size, _version(status)) if stat.S_ISREG(status.st_mode) else None

        return self._guard(path, look)

    def read_bytes(self, path: str) -> bytes:
        return self._guard(path, lambda: (self._root / path).read_bytes())

    def write_bytes(self, path: str, data: bytes) -> None:
        def write() -> None:
            temporary = self._write_temporary(data)
            try:
                temporary.replace(self._target(path))
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise
            _sync_folder((self._root / path).parent)

        self._guard(path, write)

    def create(self, path: str, data: bytes) -> bool:
        return self._guard(path, lambda: self._create(path, data))

    def _create(self, path: str, data: bytes) -> bool:
        target = self._target(path)
        if target.exists():
            return False
        temporary = self._write_temporary(data)
        try:
            target.hardlink_to(temporary)
        except FileExistsError:
            # over NFS the first answer may be lost: the link count tells whether the name is ours
            return temporary.stat().st_nlink > 1
        except OSError as error:
            if error.errno not in _NO_HARD_LINKS:
                raise
            if not _create_exclusive(target, data):
                return False
        finally:
            temporary.unlink(missing_ok=True)
        _sync_folder(target.parent)
        return True

    def publish_file(self, local: Path, path: str) -> None:
        if not local.is_file():
            raise StorageError(f"the part to publish is gone: `{local}`")

        def publish() -> None:
            target = self._target(path)
            _sync_file(local)
            try:
                local.replace(target)
            except OSError as error:
                if error.errno != errno.EXDEV:
                    raise
                temporary = self._temporary_path()
                try:
                    shutil.copyfile(local, temporary)
                    _sync_file(temporary)
                    temporary.replace(target)
                except BaseException:
                    temporary.unlink(missing_ok=True)
                    raise
                local.unlink(missing_ok=True)
            _sync_folder(target.parent)

        self._guard(path, publish)

    def move(self, source: str, target: str) -> None:
        def rename() -> None:
            try:
                (self._root / source).replace(self._target(target))
            except FileNotFoundError:
                if not (self._root / target).is_file():
                    raise
                return
            _sync_folder((self._root / target).parent)

        self._guard(source, rename)

    def delete(self, path: str, missing_ok: bool = True) -> None:
        self._guard(path, lambda: (self._root / path).unlink(missing_ok=missing_ok))

    def open_parquet_source(self, path: str, entry: Entry | None = None) -> pa.NativeFile:
        return self._guard(path, lambda: pa.OSFile(str(self._root / path), "rb"))

    def scratch_dir(self) -> Path:
        folder = self._root / SCRATCH
        self._guard(SCRATCH, lambda: folder.mkdir(parents=True, exist_ok=True))
        return folder

    def clear_scratch(self) -> None:
        def clear() -> None:
            for child in (self._root / SCRATCH).glob("*"):
                child.unlink(missing_ok=True)

        self._guard(SCRATCH, clear)

    def _temporary_path(self) -> Path:
        return self.scratch_dir() / f"{os.getpid()}-{secrets.token_hex(8)}.tmp"

    def _write_temporary(self, data: bytes) -> Path:
        temporary = self._temporary_path()
        try:
            with open(temporary, "xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        return temporary

    def _target(self, path: str) -> Path:
        target = self._root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        return target

    def _guard(self, path: str, call: Callable[[], _Result]) -> _Result:
        try:
            try:
                return call()
            except OSError as error:
                if error.errno != errno.ESTALE:
                    raise
                return call()  # a network file system forgot the handle: look the name up again
        except OSError as error:
            raise translate_os_error(error, self.full_uri(path)) from error


def _entry(path: str, child: os.DirEntry[str]) -> Entry | None:
    try:
        status = child.stat()
    except FileNotFoundError:  # removed since the scan, or a dangling link
        return None
    return Entry(path, status.st_size, _version(status)) if stat.S_ISREG(status.st_mode) else None


def _version(status: os.stat_result) -> str:
    return f"{status.st_size}-{status.st_mtime_ns}"


def _create_exclusive(target: Path, data: bytes) -> bool:
    try:
        with open(target, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except FileExistsError:
        return False
    return True


def _sync_file(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_folder(path: Path) -> None:
    """Makes a rename durable. Some network file systems refuse to sync a folder: then their own rules hold."""
    try:
        _sync_file(path)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EBADF, errno.EACCES, errno.EISDIR):
            raise
