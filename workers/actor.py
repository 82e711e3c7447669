"""The worker as Ray actors see it: wiring only. Each has two threads: one computes, one answers questions.

A model that one process holds is one `WorkerActor`. A split one is a `WorkerActor` of rank 0, which does all that a
worker does, and a `FollowerActor` for every other rank; see `jobs.replica`.
"""

from __future__ import annotations

import logging
import os
import socket
from dataclasses import replace
from pathlib import Path

import pyarrow as pa

from workers.config import Assignment, RankConfig, ShardResult, WorkerConfig
from workers.progress import Progress
from workers.worker import Worker, locate_model

_LOOPBACK = "127.0.0.1"


class WorkerActor:
    """One model replica, or rank 0 of one. `jobs.cluster` makes a Ray actor of it; a dead one stays dead."""

    def __init__(self, config: WorkerConfig) -> None:
        _start_logging()
        if config.threads is not None:
            os.environ["RAYON_NUM_THREADS"] = str(config.threads)  # the tokenizer's pool, before it is made
        pa.set_memory_pool(pa.system_memory_pool())  # gives freed memory back; the default one keeps the largest window
        self._config = config
        self._worker: Worker | None = None

    def meet(self, rank: RankConfig) -> tuple[str, RankConfig]:
        """Say where the model is, and where this process will listen: all ranks are on one machine.

        Returns:
            The model's path, and `rank` with an address. The port is free now and may be taken later, which is found
            when the ranks connect.
        """
        path = locate_model(self._config)
        with socket.socket() as listener:
            listener.bind((_LOOPBACK, 0))
            return str(path), replace(rank, address=f"{_LOOPBACK}:{listener.getsockname()[1]}")

    def load(self, place: tuple[str, RankConfig] | None = None, *_ready: None) -> int:
        """Load the model. Not done in the constructor: an exception there would only say that the actor is gone.

        Args:
            place: What `meet` said, for rank 0 of a group.

        Returns:
            The process id.
        """
        if place is None:
            self._worker = Worker(self._config)
        else:
            self._worker = Worker(self._config, Path(place[0]), place[1])
        return os.getpid()

    def run(self, assignment: Assignment) -> ShardResult:
        """Compute one assignment."""
        assert self._worker is not None, "load() comes first"
        return self._worker.run(assignment)

    def progress(self) -> Progress:
        """How far the running assignment is."""
        return Progress() if self._worker is None else self._worker.progress()


class FollowerActor:
    """A rank other than 0 of a replica that several processes hold together."""

    def __init__(self, config: WorkerConfig) -> None:
        _start_logging()
        self._config = config

    def ready(self) -> None:
        """The process is up."""

    def follow(self, place: tuple[str, RankConfig], number: int, *_ready: None) -> None:
        """Load this rank's part of the model and work for rank 0.

        Args:
            place: What rank 0's `meet` said.
            number: Which rank this is.

        Raises:
            GroupLostError: A rank is gone or silent.
        """
        from workers.engine.candle import follow_rank_0

        model = self._config.model
        follow_rank_0(
            Path(place[0]),
            device=model.device,
            dtype=model.dtype,
            threads=self._config.threads,
            rank=replace(place[1], rank=number),
        )


def _start_logging() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
