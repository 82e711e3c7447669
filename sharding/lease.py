"""Beside the driver: one driver per output. Says who may drive and who has lost it; stops nobody by itself.

Each epoch is a file, created if absent: creating the next one is the takeover, and of several takers one wins. The
owner overwrites its own file with a growing beat. A taker on the same host asks the kernel whether the owner lives; a
taker elsewhere watches the beat for `timeout_s` by its own monotonic clock. Clocks of two hosts are never compared.

The lease spares double work; that no row is written twice rests on receipts (`sharding.commit`), not on the lease.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from sharding import layout
from sharding.errors import LeaseHeldError, LeaseLostError, NotFoundError
from sharding.manifest import LeaseRecord, decode, encode, now
from sharding.storage import Storage

_KEPT_EPOCHS = 8
_LOOKS = 20  # how often a taker looks at a silent owner within the timeout
_SAME_HOST_HINT = "stop it first, or watch it with the `status` command"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a process runs, precisely enough to ask this kernel whether it still does.

    Attributes:
        host: Host name; two containers of one machine may share it.
        boot_id: Changes when the machine starts; empty where the kernel does not tell.
        pid_namespace: Distinguishes containers, whose process numbers mean different things.
        pid: Process number.
        process_start: Start time by the kernel's count, so that a number that was given again is noticed.
    """

    host: str
    boot_id: str
    pid_namespace: str
    pid: int
    process_start: str


def this_place() -> Place:
    """The place of the calling process."""
    pid = os.getpid()
    return Place(socket.gethostname(), _boot_id(), _pid_namespace(), pid, _process_start(pid))


class Lease:
    """The right to drive one output. From `acquire` until `release`, or until someone takes it over."""

    def __init__(self, storage: Storage, record: LeaseRecord) -> None:
        self._storage = storage
        self._record = record
        self._lost = False
        self._lock = threading.Lock()

    @property
    def epoch(self) -> int:
        """Grows with every driver of this output; attempts and receipts carry it."""
        return self._record.epoch

    @classmethod
    def acquire(
        cls,
        storage: Storage,
        *,
        owner: str,
        timeout_s: float,
        place: Place | None = None,
        wait: Callable[[float], None] = time.sleep,
    ) -> Lease:
        """Takes the lease, at once if nobody holds it, or after watching a silent owner for `timeout_s`.

        Args:
            storage: The output.
            owner: Free text that tells people who drives.
            timeout_s: Seconds without a beat after which an owner on another host counts as gone. Several times the
                interval between beats.
            place: Where the driver runs; by default this process.
            wait: Sleeps between two looks at a silent owner.

        Raises:
            LeaseHeldError: The owner lives, or another taker was faster.
        """
        here = place or this_place()
        epoch = _highest_epoch(storage)
        if epoch:
            current = _read(storage, epoch)
            if not current.released and not _is_dead(current, here):
                if _is_same_host(current, here):
                    raise _held(current)
                _watch(storage, current, timeout_s, wait)
        record = LeaseRecord(
            epoch=epoch + 1,
            owner=owner,
            nonce=secrets.token_hex(8),
            host=here.host,
            pid=here.pid,
            process_start=here.process_start,
            boot_id=here.boot_id,
            pid_namespace=here.pid_namespace,
            beat=0,
            at=now(),
        )
        path = layout.lease_path(record.epoch)
        if not storage.create(path, encode(record)):
            raise _held(_read(storage, _highest_epoch(storage)))
        highest = _highest_epoch(storage)
        if highest != record.epoch:  # we slept so long that epochs came and went: ours is in the past
            storage.delete(path)
            raise _held(_read(storage, highest))
        for number in _epochs(storage):
            if number <= record.epoch - _KEPT_EPOCHS:
                storage.delete(layout.lease_path(number))
        return cls(storage, record)

    def beat(self) -> None:
        """Shows that the owner lives; a thread calls it several times within the timeout.

        Raises:
            LeaseLostError: Another driver took over.
        """
        with self._lock:
            if not self._record.released:
                self._record = replace(self._record, beat=self._record.beat + 1, at=now())
                self._storage.write_bytes(layout.lease_path(self.epoch), encode(self._record))
        self.check()

    def check(self) -> None:
        """Asks the storage whether the lease is still ours.

        Raises:
            LeaseLostError: Another driver took over.
        """
        if self.is_lost():
            raise LeaseLostError(
                f"another driver took this output over, in epoch: `{_highest_epoch(self._storage)}`",
                hint="this driver stops; the other one goes on from the receipts",
            )

    def is_lost(self) -> bool:
        """True when a higher epoch exists. Asks the storage (one listing); once lost, always lost."""
        if not self._lost:
            self._lost = _highest_epoch(self._storage) != self.epoch
        return self._lost

    def discard(self) -> None:
        """Ends the lease and removes its record and all earlier ones, where no trace of a driver is to stay.

        For an output without a plan alone: epochs begin anew. Does nothing when the lease is lost or released. No beat
        may come after it.
        """
        with self._lock:
            if self._record.released or self.is_lost():
                return
            for number in sorted(_epochs(self._storage)):  # ours last: an earlier one must not be taken for the latest
                if number <= self.epoch:
                    self._storage.delete(layout.lease_path(number))

    def release(self) -> None:
        """Lets the next driver start at once. Does nothing when the lease is lost or released."""
        with self._lock:
            if self._record.released or self.is_lost():
                return
            self._record = replace(self._record, beat=self._record.beat + 1, at=now(), released=True)
            self._storage.write_bytes(layout.lease_path(self.epoch), encode(self._record))


def read_lease(storage: Storage) -> LeaseRecord | None:
    """The record of the latest epoch, or None when nobody ever drove this output."""
    epoch = _highest_epoch(storage)
    return _read(storage, epoch) if epoch else None


def _watch(storage: Storage, seen: LeaseRecord, timeout_s: float, wait: Callable[[float], None]) -> None:
    """Returns when the owner was silent for the whole timeout, or has released the lease meanwhile."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        wait(min(timeout_s / _LOOKS, max(deadline - time.monotonic(), 0.0)))
        if _highest_epoch(storage) != seen.epoch:
            raise _held(_read(storage, _highest_epoch(storage)))
        current = _read(storage, seen.epoch)
        if current.released:
            return
        if (current.nonce, current.beat) != (seen.nonce, seen.beat):
            raise _held(current)


def _held(record: LeaseRecord) -> LeaseHeldError:
    where = f"{record.owner}, process {record.pid} on {record.host}, epoch {record.epoch}"
    return LeaseHeldError(f"another driver works on this output: `{where}`", hint=_SAME_HOST_HINT)


def _epochs(storage: Storage) -> list[int]:
    numbers = (layout.parse_numbered_path(entry.path) for entry in storage.list_folder(layout.LEASES).files)
    return [number for number in numbers if number is not None]


def _highest_epoch(storage: Storage) -> int:
    return max(_epochs(storage), default=0)


def _read(storage: Storage, epoch: int) -> LeaseRecord:
    path = layout.lease_path(epoch)
    try:
        data = storage.read_bytes(path)
    except NotFoundError as error:
        raise LeaseHeldError("another driver just took this output", hint=_SAME_HOST_HINT) from error
    return decode(LeaseRecord, data, storage.full_uri(path))


def _is_same_host(record: LeaseRecord, here: Place) -> bool:
    known = bool(here.boot_id and here.pid_namespace)
    theirs = (record.host, record.boot_id, record.pid_namespace)
    return known and theirs == (here.host, here.boot_id, here.pid_namespace)


def is_gone(record: LeaseRecord) -> bool:
    """Whether the owner ran on this host and is dead; False for one elsewhere, of whom nothing is known here."""
    return _is_dead(record, this_place())


def _is_dead(record: LeaseRecord, here: Place) -> bool:
    """True only when this kernel knows that the owner is gone."""
    return _is_same_host(record, here) and _process_start(record.pid) != record.process_start


def _boot_id() -> str:
    return _read_kernel("/proc/sys/kernel/random/boot_id")


def _pid_namespace() -> str:
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""


def _process_start(pid: int) -> str:
    """Start time of a process in clock ticks since boot; empty when there is no such process, or only its remains."""
    fields = _read_kernel(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return fields[19] if len(fields) > 19 and fields[0] not in ("Z", "X") else ""


def _read_kernel(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""
