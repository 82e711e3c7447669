"""The backend on Ray: connects, places replicas, replaces dead ones, leaves nothing behind. Knows no shards.

`max_restarts=0` throughout: a replacement is a new actor that the driver asked for, so a dead worker's late answer can
never be taken for a live one's.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import tempfile
import time
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import (
    ActorUnavailableError,
    GetTimeoutError,
    NodeDiedError,
    RayError,
    RayTaskError,
)
from ray.exceptions import AuthenticationError as RayAuthenticationError

from jobs.backend import Died, Errored, Event, Finished, RunningTotals
from jobs.embedded_ray import start_embedded_ray
from jobs.placement import Placement, place_replicas
from sharding.errors import AuthenticationError, InfrastructureError
from workers.config import Assignment, WorkerConfig

_log = logging.getLogger(__name__)
_READY_TIMEOUT_S = 300.0
_PROGRESS_TIMEOUT_S = 2.0
_KNOCK_TIMEOUT_S = 10.0
_SECOND_S = 1.0
_MOST_REPLACEMENTS_IN_A_ROW = 5


@dataclass(slots=True)
class _Replica:
    actor: Any
    ready: bool = False
    task: ray.ObjectRef[Any] | None = None


class RayBackend:
    """See `jobs.backend.Backend`.

    Args:
        config: What every worker is told.
        address: Address of a cluster, or None for an embedded Ray on this machine.
        replicas, cpus, gpus: As the spec says; None for auto.
    """

    def __init__(
        self, config: WorkerConfig, *, address: str | None, replicas: int | None, cpus: int | None, gpus: int | None
    ) -> None:
        self._config = config
        self._address = address
        self._wanted = (replicas, cpus, gpus)
        self._placement: Placement | None = None
        self._replicas: dict[int, _Replica] = {}
        self._connected_here = False
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._losses_in_a_row = 0

    def start(self) -> int:
        """Connect and start the replicas; returns once the first is ready."""
        self._connect()
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
        replicas, cpus, gpus = self._wanted
        self._placement = place_replicas(nodes, replicas, cpus, gpus, device=self._config.model.device)
        _log.info(
            "placing %d replicas of %d CPUs, %d GPUs",
            self._placement.replicas,
            self._placement.cpus,
            self._placement.gpus,
        )
        for number in range(self._placement.replicas):
            self._replicas[number] = self._launch()
        self._wait_for_first()
        return len(self._replicas)

    def _connect(self) -> None:
        if ray.is_initialized():
            return
        try:
            # Ray puts the driver's working directory first on every worker's path: a folder `workers` of the user's
            # must not be imported instead of ours.
            self._folder = tempfile.TemporaryDirectory(prefix="candelabra-ray-")
            with contextlib.chdir(self._folder.name):
                self._init()
        except RayAuthenticationError as error:
            raise AuthenticationError(
                f"the Ray cluster refused us ({_first_line(error)}): `{self._address}`",
                hint="give this process the cluster's token (RAY_AUTH_MODE, RAY_AUTH_TOKEN)",
            ) from error
        except (ConnectionError, RayError, RuntimeError, ValueError, OSError) as error:
            raise InfrastructureError(
                f"cannot connect to Ray ({_first_line(error)}): `{self._address or 'local'}`",
                hint="check ray.address, or leave it out for an embedded Ray",
            ) from error
        self._connected_here = True

    def _init(self) -> None:
        if self._address is not None:
            _knock(self._address)
            ray.init(address=self._address, log_to_driver=False, logging_level=logging.ERROR)
            return
        start_embedded_ray()

    def _launch(self) -> _Replica:
        from workers.actor import WorkerActor

        assert self._placement is not None
        actor_class = ray.remote(WorkerActor).options(
            num_cpus=self._placement.cpus,
            num_gpus=self._placement.gpus,
            max_restarts=0,
            max_task_retries=0,
            max_concurrency=2,
        )
        actor: Any = actor_class.remote(self._placement.configure(self._config))
        return _Replica(actor, task=actor.load.remote())

    def _wait_for_first(self) -> None:
        deadline = time.monotonic() + _READY_TIMEOUT_S
        while not any(replica.ready for replica in self._replicas.values()):
            for event in self.wait(_SECOND_S):
                if isinstance(event, Errored):
                    raise event.error
            if time.monotonic() > deadline:
                raise InfrastructureError(
                    f"no worker was placed and loaded within seconds: `{_READY_TIMEOUT_S:.0f}`",
                    hint="see `ray status`: are the CPUs or GPUs taken by others?",
                )

    def idle(self) -> list[int]:
        """See `jobs.backend.Backend.idle`."""
        return [number for number, replica in self._replicas.items() if replica.ready and replica.task is None]

    def assign(self, replica: int, assignment: Assignment) -> None:
        """See `jobs.backend.Backend.assign`."""
        self._replicas[replica].task = self._replicas[replica].actor.run.remote(assignment)

    def wait(self, timeout_s: float) -> list[Event]:
        """See `jobs.backend.Backend.wait`."""
        tasks = {replica.task: number for number, replica in self._replicas.items() if replica.task is not None}
        if not tasks:
            time.sleep(min(timeout_s, _SECOND_S))
            return []
        done, _ = ray.wait(list(tasks), num_returns=len(tasks), timeout=0)
        if not done:
            done, _ = ray.wait(list(tasks), num_returns=1, timeout=timeout_s)
        return [event for task in done if (event := self._collect(tasks[task])) is not None]

    def _collect(self, number: int) -> Event | None:
        replica = self._replicas[number]
        was_ready = replica.ready
        assert replica.task is not None
        try:
            answer = ray.get(replica.task)
        except RayTaskError as error:
            replica.task = None
            return Errored(number, error.cause if isinstance(error.cause, Exception) else error)
        except RayError as error:
            return self._lost(number, error, was_ready)
        replica.task = None
        self._losses_in_a_row = 0
        if was_ready:
            return Finished(number, answer)
        replica.ready = True
        return None

    def _lost(self, number: int, error: RayError, was_ready: bool) -> Event:
        reason = f"the worker died ({_first_line(error)})"
        _log.warning("replica=%d %s; starting another", number, reason)
        self._losses_in_a_row += 1
        if self._losses_in_a_row > _MOST_REPLACEMENTS_IN_A_ROW * len(self._replicas) and not was_ready:
            return Errored(number, InfrastructureError(f"workers keep dying before they are ready: `{reason}`"))
        with contextlib.suppress(RayError, ValueError):
            ray.kill(self._replicas[number].actor, no_restart=True)
        self._replicas[number] = self._launch()
        blameless = (
            isinstance(error, ActorUnavailableError | NodeDiedError) or "node" in str(error).lower().split(".")[0]
        )
        return Died(number, reason, blameless)

    def totals(self) -> RunningTotals:
        """See `jobs.backend.Backend.totals`."""
        working = [replica for replica in self._replicas.values() if replica.ready and replica.task is not None]
        if not working:
            return RunningTotals(0, 0)
        asked = [replica.actor.progress.remote() for replica in working]
        with contextlib.suppress(RayError, GetTimeoutError):
            answers: list[Any] = ray.get(asked, timeout=_PROGRESS_TIMEOUT_S)
            return RunningTotals(sum(answer.rows for answer in answers), sum(answer.tokens for answer in answers))
        return RunningTotals(0, 0)

    def stop(self) -> None:
        """Kill every actor of ours; an embedded Ray goes too."""
        for replica in self._replicas.values():
            with contextlib.suppress(RayError, ValueError):
                ray.kill(replica.actor, no_restart=True)
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


def _first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:300]
