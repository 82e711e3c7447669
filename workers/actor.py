"""The worker as a Ray actor sees it: wiring only. Two threads: one computes, one answers how far it is."""

from __future__ import annotations

import logging
import os

import pyarrow as pa

from workers.config import Assignment, ShardResult, WorkerConfig
from workers.progress import Progress
from workers.worker import Worker


class WorkerActor:
    """One model replica. `jobs.cluster` makes a Ray actor of it; a dead one stays dead."""

    def __init__(self, config: WorkerConfig) -> None:
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
        if config.threads is not None:
            os.environ["RAYON_NUM_THREADS"] = str(config.threads)  # the tokenizer's pool, before it is made
        pa.set_memory_pool(pa.system_memory_pool())  # gives freed memory back; the default one keeps the largest window
        self._config = config
        self._worker: Worker | None = None

    def load(self) -> int:
        """Load the model. Not done in the constructor: an exception there would only say that the actor is gone.

        Returns:
            The process id.
        """
        self._worker = Worker(self._config)
        return os.getpid()

    def run(self, assignment: Assignment) -> ShardResult:
        """Compute one assignment."""
        assert self._worker is not None, "load() comes first"
        return self._worker.run(assignment)

    def progress(self) -> Progress:
        """How far the running assignment is."""
        return Progress() if self._worker is None else self._worker.progress()
