"""What the driver asks of whatever holds the workers. The Ray cluster and the in-process worker both answer to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from workers.config import Assignment, ShardResult


@dataclass(frozen=True, slots=True)
class Finished:
    """A replica finished an assignment."""

    replica: int
    result: ShardResult


@dataclass(frozen=True, slots=True)
class Errored:
    """A replica lives and reports an error."""

    replica: int
    error: Exception


@dataclass(frozen=True, slots=True)
class Died:
    """A replica is gone. `blameless`: its node went away, so what it computed is not suspected."""

    replica: int
    reason: str
    blameless: bool


Event = Finished | Errored | Died


@dataclass(frozen=True, slots=True)
class RunningTotals:
    """Rows and tokens of the assignments in flight."""

    rows: int
    tokens: int


class Backend(Protocol):
    """Replicas by number. A dead one is replaced by the backend itself, under the same number."""

    def start(self, interrupted: Callable[[], bool]) -> int:
        """Start the replicas; returns how many there are, as soon as one is ready or `interrupted` says so.

        Raises:
            InfrastructureError: They cannot be had here.
            StopJob: The model cannot be loaded.
        """

    def idle(self) -> list[int]:
        """Replicas that are ready for an assignment."""

    def assign(self, replica: int, assignment: Assignment) -> None:
        """Hand an assignment to an idle replica."""

    def wait(self, timeout_s: float) -> list[Event]:
        """What happened, at the latest after `timeout_s` seconds."""

    def totals(self) -> RunningTotals:
        """How far the assignments in flight are."""

    def stop(self) -> None:
        """Let go of every replica; never raises."""
