"""The backend on Ray: connects, places replicas, replaces dead ones, leaves nothing behind. Knows no shards.

`max_restarts=0` throughout: a replacement is a new actor that the driver asked for, so a dead worker's late answer can
never be taken for a live one's. What a replica is, one actor or a gang of them, `jobs.replica` says.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import tempfile
import time
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import AuthenticationError as RayAuthenticationError
from ray.exceptions import RayError, RayTaskError

from jobs.backend import Died, Errored, Event, Finished, RunningTotals
from jobs.embedded_ray import start_embedded_ray
from jobs.interrupts import keeping_signals
from jobs.placement import Placement, describe_nodes, place_replicas
from jobs.replica import Replica, answering_nodes, first_line, start_gang, start_worker
from sharding.errors import AuthenticationError, InfrastructureError
from sharding.words import counted
from workers.config import Assignment, WorkerConfig
from workers.errors import GroupLostError

_log = logging.getLogger(__name__)
_READY_TIMEOUT_S = 300.0
_LOAD_TIMEOUT_S = 1800.0  # of a gang: hundreds of gigabytes are read twice, once for their digest
_PROGRESS_TIMEOUT_S = 2.0
_KNOCK_TIMEOUT_S = 10.0
_SECOND_S = 1.0
_MOST_REPLACEMENTS_IN_A_ROW = 5


class RayBackend:
    """See `jobs.backend.Backend`.

    Args:
        config: What every worker is told.
        address: Address of a cluster, or None for an embedded Ray on this machine.
        replicas, cpus, gpus: As the spec says; None for auto.
        ranks: Processes that hold one model together.
        rank_bytes: Memory of a node that each of them takes at least; 0 counts none.
        rank_timeout_s: How long a silent one of them is waited for.
        placement_timeout_s: How long the job waits for room where no replica of several ranks has any.
    """

    def __init__(
        self,
        config: WorkerConfig,
        *,
        address: str | None,
        replicas: int | None,
        cpus: int | None,
        gpus: int | None,
        ranks: int,
        rank_bytes: int,
        rank_timeout_s: float,
        placement_timeout_s: float,
    ) -> None:
        self._config = config
        self._address = address
        self._wanted = (replicas, cpus, gpus)
        self._ranks = ranks
        self._rank_bytes = rank_bytes
        self._rank_timeout_s = rank_timeout_s
        self._placement_timeout_s = placement_timeout_s
        self._placement: Placement | None = None
        self._replicas: dict[int, Replica] = {}
        self._connected_here = False
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._losses_in_a_row = 0

    def start(self, interrupted: Callable[[], bool]) -> int:
        """Connect and start the replicas; returns once the first is ready, or when interrupted."""
        self._connect()
        self._placement = place_replicas(
            _nodes(), *self._wanted, device=self._config.model.device, ranks=self._ranks, rank_bytes=self._rank_bytes
        )
        _log.info("placing %s of %s", counted(self._placement.replicas, "replica"), self._placement.size)
        for number in range(self._placement.replicas):
            self._replicas[number] = self._launch()
        self._wait_for_first(interrupted)
        return len(self._replicas)

    def _connect(self) -> None:
        if ray.is_initialized():
            return
        try:
            # Ray puts the driver's working directory first on every worker's path: a folder `workers` of the user's
            # must not be imported instead of ours.
            self._folder = tempfile.TemporaryDirectory(prefix="candelabra-ray-")
            with contextlib.chdir(self._folder.name), keeping_signals():
                self._init()
        except RayAuthenticationError as error:
            raise AuthenticationError(
                f"the Ray cluster refused us ({first_line(error)}): `{self._address}`",
                hint="give this process the cluster's token (RAY_AUTH_MODE, RAY_AUTH_TOKEN)",
            ) from error
        except (ConnectionError, RayError, RuntimeError, ValueError, OSError) as error:
            raise InfrastructureError(
                f"cannot connect to Ray ({first_line(error)}): `{self._address or 'local'}`",
                hint="check ray.address and, if the cluster asks for one, its token (RAY_AUTH_MODE, RAY_AUTH_TOKEN); "
                "or leave the address out for an embedded Ray",
            ) from error
        self._connected_here = True

    def _init(self) -> None:
        if self._address is not None:
            _knock(self._address)
            ray.init(address=self._address, log_to_driver=False, logging_level=logging.ERROR)
            return
        start_embedded_ray()

    def _launch(self) -> Replica:
        assert self._placement is not None
        if self._ranks == 1:
            return start_worker(self._config, self._placement)
        return start_gang(self._config, self._placement, self._rank_timeout_s)

    def _wait_for_first(self, interrupted: Callable[[], bool]) -> None:
        seconds = _READY_TIMEOUT_S if self._ranks == 1 else self._placement_timeout_s + _LOAD_TIMEOUT_S
        deadline = time.monotonic() + seconds
        while not interrupted() and not any(replica.ready for replica in self._replicas.values()):
            for event in self.wait(_SECOND_S):
                if isinstance(event, Errored):
                    raise event.error
            if time.monotonic() > deadline:
                raise InfrastructureError(
                    f"no worker was placed and loaded within seconds: `{seconds:.0f}`",
                    hint="see `ray status`: are the CPUs or GPUs taken by others?",
                )

    def idle(self) -> list[int]:
        """See `jobs.backend.Backend.idle`."""
        return [number for number, replica in self._replicas.items() if replica.idle]

    def assign(self, replica: int, assignment: Assignment) -> None:
        """See `jobs.backend.Backend.assign`."""
        given = self._replicas[replica]
        given.task, given.mute = given.actor.run.remote(assignment), False

    def wait(self, timeout_s: float) -> list[Event]:
        """See `jobs.backend.Backend.wait`."""
        events = self._overdue()
        awaited = {ref: number for number, replica in self._replicas.items() for ref in replica.awaited}
        if not awaited:
            time.sleep(min(timeout_s, _SECOND_S))
            return events
        done, _ = ray.wait(list(awaited), num_returns=len(awaited), timeout=0)
        if not done and not events:
            done, _ = ray.wait(list(awaited), num_returns=1, timeout=timeout_s)
        for ref in done:
            if ref in self._replicas[awaited[ref]].awaited:  # else of one that has been replaced since
                event = self._collect(awaited[ref], ref)
                events += [] if event is None else [event]
        return events

    def _collect(self, number: int, ref: ray.ObjectRef[Any]) -> Event | None:
        replica = self._replicas[number]
        if replica.gang is not None and ref == replica.gang.placing:
            replica.gang.note_placed()
            return None
        try:
            answer = ray.get(ref)
        except RayTaskError as error:
            if ref != replica.task or isinstance(error.cause, GroupLostError):
                return self._lost(number, error)
            replica.task = None
            return Errored(number, error.cause if isinstance(error.cause, Exception) else error)
        except RayError as error:
            return self._lost(number, error)
        if ref != replica.task:
            return self._lost(number, GroupLostError("a rank has stopped following"))
        replica.task = None
        self._losses_in_a_row = 0
        if replica.ready:
            return Finished(number, answer)
        replica.ready = True
        return None

    def _lost(self, number: int, error: Exception) -> Event:
        replica = self._replicas[number]
        loss = replica.explain_loss(error)
        _log.warning("replica=%d %s; starting another", number, loss.reason)
        replica.kill()
        self._losses_in_a_row += 1
        if not replica.ready and loss.stop is not None:
            return Errored(number, loss.stop)
        if self._losses_in_a_row > _MOST_REPLACEMENTS_IN_A_ROW * len(self._replicas) and not replica.ready:
            return Errored(number, InfrastructureError(f"workers keep dying before they are ready: `{loss.reason}`"))
        self._replicas[number] = self._launch()
        return Died(number, loss.reason, loss.blameless)

    def _overdue(self) -> list[Event]:
        """The end of the job where no gang has had room for too long, and gangs that took too long to load."""
        now, gangs = time.monotonic(), {n: one.gang for n, one in self._replicas.items() if one.gang is not None}
        if gangs and all(gang.placing is not None for gang in gangs.values()):
            number, last = max(gangs.items(), key=lambda item: item[1].asked_at)
            if now > last.asked_at + self._placement_timeout_s:
                return [Errored(number, self._no_room())]
        slow = [
            number
            for number, gang in gangs.items()
            if gang.placed_at is not None
            and now > gang.placed_at + _LOAD_TIMEOUT_S
            and not self._replicas[number].ready
        ]
        told = GroupLostError(f"it did not load within {_LOAD_TIMEOUT_S:.0f} s")
        return [self._lost(number, told) for number in slow]

    def _no_room(self) -> InfrastructureError:
        assert self._placement is not None
        nodes = describe_nodes(list(answering_nodes().values()))
        return InfrastructureError(
            f"no node had room for {self._placement.size} within {self._placement_timeout_s:g} s; "
            f"the nodes have, taken or free: `{nodes}`",
            hint="see `ray status`: what holds them, and which nodes are gone?",
        )

    def totals(self) -> RunningTotals:
        """See `jobs.backend.Backend.totals`."""
        working = [one for one in self._replicas.values() if one.ready and one.task is not None and not one.mute]
        asked = {one.actor.progress.remote(): one for one in working}
        done, late = ray.wait(list(asked), num_returns=len(asked), timeout=_PROGRESS_TIMEOUT_S) if asked else ([], [])
        for ref in late:
            asked[ref].mute = True  # a stopped one must not make everybody wait every second
        rows = tokens = 0
        for ref in done:
            with contextlib.suppress(RayError):
                answer = ray.get(ref)
                rows, tokens = rows + answer.rows, tokens + answer.tokens
        return RunningTotals(rows, tokens)

    def stop(self) -> None:
        """Kill every actor of ours and give back every placement group; an embedded Ray goes too."""
        for replica in self._replicas.values():
            replica.kill()
        self._replicas.clear()
        if self._connected_here:
            ray.shutdown()
            self._connected_here = False
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


def _knock(address: str) -> None:
    """Ray waits a minute for a cluster that is not there; a refused connection tells at once.

    Raises:
        OSError: Nobody listens at `host:port`. Other forms of address are left to Ray.
    """
    host, _, port = address.rpartition(":")
    if host and port.isdigit() and "/" not in host:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_KNOCK_TIMEOUT_S).close()


def _nodes() -> list[dict[str, float]]:
    """Resources of each live node."""
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
