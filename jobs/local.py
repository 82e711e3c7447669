"""The backend without Ray: one worker in a thread of this process. A worker that dies takes the job with it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from jobs.backend import Errored, Event, Finished, RunningTotals
from workers.config import Assignment, WorkerConfig
from workers.worker import Worker


class LocalBackend:
    """See `jobs.backend.Backend`."""

    def __init__(self, config: WorkerConfig) -> None:
        self._config = config
        self._worker: Worker | None = None
        self._events: queue.Queue[Event] = queue.Queue()
        self._thread: threading.Thread | None = None

    def start(self, interrupted: Callable[[], bool]) -> int:
        """Load the model."""
        self._worker = Worker(self._config)
        return 1

    def idle(self) -> list[int]:
        """The one replica, unless it works."""
        return [0] if self._thread is None else []

    def assign(self, replica: int, assignment: Assignment) -> None:
        """Start computing in a thread."""
        self._thread = threading.Thread(target=self._run, args=(assignment,), name="worker", daemon=True)
        self._thread.start()

    def _run(self, assignment: Assignment) -> None:
        assert self._worker is not None
        try:
            self._events.put(Finished(0, self._worker.run(assignment)))
        except Exception as error:  # noqa: BLE001 - told to the driver, which decides
            self._events.put(Errored(0, error))

    def wait(self, timeout_s: float) -> list[Event]:
        """See `jobs.backend.Backend.wait`."""
        try:
            event = self._events.get(timeout=timeout_s)
        except queue.Empty:
            return []
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        return [event]

    def totals(self) -> RunningTotals:
        """See `jobs.backend.Backend.totals`."""
        if self._worker is None or self._thread is None:
            return RunningTotals(0, 0)
        progress = self._worker.progress()
        return RunningTotals(progress.rows, progress.tokens)

    def stop(self) -> None:
        """Nothing to let go of: the thread is a daemon, and what it publishes without a receipt never counts."""
