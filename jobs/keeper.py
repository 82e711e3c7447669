"""Keeps the driver's lease alive from a thread, and tells the driver when it is lost. Takes no lease over."""

from __future__ import annotations

import logging
import threading
from types import TracebackType

from sharding.errors import CandelabraError, LeaseLostError
from sharding.lease import Lease

_log = logging.getLogger(__name__)
LEASE_TIMEOUT_S = 30.0
"""How long a driver on another host may be silent before its lease is taken over."""
_BEAT_S = 2.0


class LeaseKeeper:
    """While entered, beats every two seconds; leaving releases the lease, so that the next driver starts at once."""

    def __init__(self, lease: Lease) -> None:
        self._lease = lease
        self._stop = threading.Event()
        self._lost: LeaseLostError | None = None
        self._thread = threading.Thread(target=self._beat, name="lease", daemon=True)

    @property
    def epoch(self) -> int:
        """Epoch of the lease held."""
        return self._lease.epoch

    def _beat(self) -> None:
        while not self._stop.wait(_BEAT_S):
            try:
                self._lease.beat()
            except LeaseLostError as error:
                self._lost = error
                return
            except CandelabraError as error:
                _log.warning("the lease could not be renewed, trying again: %s", error)

    def check(self) -> None:
        """Go on only while the lease is ours.

        Raises:
            LeaseLostError: Another driver took over.
        """
        if self._lost is not None:
            raise self._lost

    def check_now(self) -> None:
        """As `check`, but asks the store: for an error that a takeover would explain."""
        self.check()
        try:
            self._lease.check()
        except LeaseLostError as error:
            self._lost = error
            raise

    def discard(self) -> None:
        """End the lease without a trace; see `sharding.lease.Lease.discard`."""
        self._stop.set()
        self._thread.join()
        self._lease.discard()

    def __enter__(self) -> LeaseKeeper:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        if self._lost is None:
            try:
                self._lease.release()
            except CandelabraError as failure:
                _log.warning("the lease could not be released: %s", failure)
