"""Beside a remote output: folders on this machine for parts that are not published yet. Holds no part of the output.

Each process has its own folder and keeps a lock on it. A folder whose lock is free belongs to a process that is gone
(killed, perhaps, in the middle of a large part) and is removed by the next process that needs one.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from typing import IO

_PREFIX = "candelabra-"
_LOCK = ".lock"

_mine: dict[int, tuple[Path, IO[bytes]]] = {}


def process_scratch() -> Path:
    """This process's folder; made at the first call."""
    pid = os.getpid()
    if pid not in _mine or not _mine[pid][0].is_dir():
        sweep_scratch()
        folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getuid()}-"))
        lock = open(folder / _LOCK, "wb")  # noqa: SIM115 - stays open: the lock lives as long as the process
        fcntl.flock(lock, fcntl.LOCK_EX)
        _mine[pid] = (folder, lock)
        atexit.register(_remove, pid, folder)
    return _mine[pid][0]


def _remove(pid: int, folder: Path) -> None:
    if os.getpid() == pid:  # a forked child has other folders
        shutil.rmtree(folder, ignore_errors=True)
        _mine.pop(pid)[1].close()


def sweep_scratch() -> None:
    """Removes the folders of this user's processes that are gone."""
    own = {folder for folder, _ in _mine.values()}
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}{os.getuid()}-*"):
        if folder not in own and _is_abandoned(folder):
            shutil.rmtree(folder, ignore_errors=True)


def _is_abandoned(folder: Path) -> bool:
    try:
        with open(folder / _LOCK, "r+b") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
    except OSError:  # held, or not made yet
        return False
