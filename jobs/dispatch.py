"""Decides what is tried next, and what a failure means: a pure state machine over shards. No Ray, no files, no clock.

A shard is pending, in flight, done or failed. An error costs it an attempt. A worker that dies under it is counted
apart: after the second death the shard is probed, halved again and again, until the rows that kill workers stand
alone; those become row errors and the rest of the shard is computed without them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

_DEATHS_BEFORE_PROBING = 2
_DEATHS_TO_CONVICT_A_ROW = 2
_MOST_POISON_ROWS = 32


@dataclass(frozen=True, slots=True)
class Work:
    """One thing for a replica to do: a whole shard, or a probe of some of its rows."""

    shard: int
    attempt: int
    poison_rows: tuple[int, ...] = ()
    probe: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class FailedShard:
    """A shard that no attempt could finish; the last error, in words."""

    shard: int
    attempts: int
    error: str
    hint: str | None


@dataclass(slots=True)
class _State:
    rows: int
    attempts: int = 0
    failures: int = 0
    deaths: int = 0
    poison: set[int] = field(default_factory=set)
    probes: deque[tuple[int, int]] = field(default_factory=deque)
    row_deaths: int = 0


class Dispatcher:
    """Hands out work until every shard is done or failed.

    Args:
        shards: (index, rows) of every shard still to do, in the order to try them.
        max_attempts: Errors a shard may have before it counts as failed.
    """

    def __init__(self, shards: Sequence[tuple[int, int]], *, max_attempts: int) -> None:
        self._max_attempts = max_attempts
        self._states = {index: _State(rows) for index, rows in shards}
        self._pending = deque(index for index, _ in shards)
        self._in_flight: set[int] = set()
        self.done: set[int] = set()
        self.failed: dict[int, FailedShard] = {}

    @property
    def in_flight(self) -> int:
        """Shards that a replica works on."""
        return len(self._in_flight)

    @property
    def finished(self) -> bool:
        """Nothing is pending or in flight."""
        return not self._pending and not self._in_flight

    def next_work(self) -> Work | None:
        """What an idle replica should do, or None when nothing is pending."""
        if not self._pending:
            return None
        shard = self._pending.popleft()
        self._in_flight.add(shard)
        state = self._states[shard]
        state.attempts += 1
        probe = state.probes[0] if state.probes else None
        return Work(shard, state.attempts, tuple(sorted(state.poison)), probe)

    def succeeded(self, work: Work) -> None:
        """The work is finished (for a whole shard: committed)."""
        self._in_flight.remove(work.shard)
        if work.probe is None:
            self.done.add(work.shard)
            return
        state = self._states[work.shard]
        state.probes.popleft()
        state.row_deaths = 0
        self._pending.appendleft(work.shard)

    def errored(self, work: Work, error: str, hint: str | None = None) -> None:
        """The worker lives and reports an error."""
        self._in_flight.remove(work.shard)
        state = self._states[work.shard]
        state.failures += 1
        self._retry_or_fail(work.shard, error, hint)

    def worker_died(self, work: Work, reason: str, *, blameless: bool = False) -> None:
        """The worker is gone. `blameless`: its node went, so the rows are not suspected."""
        self._in_flight.remove(work.shard)
        state = self._states[work.shard]
        if blameless:
            self._pending.appendleft(work.shard)
        elif work.probe is not None:
            self._probe_died(work, state, reason)
        else:
            state.deaths += 1
            if state.deaths < _DEATHS_BEFORE_PROBING:
                self._pending.append(work.shard)
            elif state.poison or state.deaths > _DEATHS_BEFORE_PROBING:
                state.failures += 1
                self._retry_or_fail(work.shard, reason, "see the worker's log; give workers more memory")
            else:
                state.probes.extend(_halves(0, state.rows))
                self._pending.append(work.shard)

    def _probe_died(self, work: Work, state: _State, reason: str) -> None:
        assert work.probe is not None
        start, stop = work.probe
        if stop - start > 1:
            state.probes.popleft()
            state.probes.extendleft(reversed(_halves(start, stop)))
        else:
            state.row_deaths += 1
            if state.row_deaths >= _DEATHS_TO_CONVICT_A_ROW:
                state.probes.popleft()
                state.poison.add(start)
                state.row_deaths = 0
        if len(state.poison) > _MOST_POISON_ROWS:
            self._fail(work.shard, f"{reason}; more than {_MOST_POISON_ROWS} rows kill workers", None)
        else:
            self._pending.append(work.shard)

    def _retry_or_fail(self, shard: int, error: str, hint: str | None) -> None:
        if self._states[shard].failures < self._max_attempts:
            self._pending.append(shard)
        else:
            self._fail(shard, error, hint)

    def _fail(self, shard: int, error: str, hint: str | None) -> None:
        self.failed[shard] = FailedShard(shard, self._states[shard].attempts, error, hint)


def _halves(start: int, stop: int) -> list[tuple[int, int]]:
    middle = (start + stop + 1) // 2
    return [half for half in ((start, middle), (middle, stop)) if half[0] < half[1]]
