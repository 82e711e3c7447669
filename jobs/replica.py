"""One model replica on Ray: an actor, or a gang, one actor for each rank of a split model. Knows no shards.

A gang has a placement group of its own, all on one node, and lives and dies as one: when a rank is gone or silent, the
others' work fails at once or at the deadline, and what is left of it is killed. Nothing of it is used again: another
gang has other actors, another placement group, another address and another token.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import socket
import time
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, NodeDiedError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from jobs.placement import Placement
from sharding.errors import StopJob
from workers.config import RankConfig, WorkerConfig
from workers.errors import GroupLostError

_log = logging.getLogger(__name__)
_LAST_WORDS_S = 1.0
_NODE_DIED = "its node has died"
"""In Ray's account of an actor's death; a worker that its node killed for memory is told with other words."""
_KNOCK_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class Loss:
    """Why a replica is gone.

    Attributes:
        blameless: Its node went away, so what it computed is not suspected.
        stop: What the job ends with, where no other replica would do better.
    """

    reason: str
    blameless: bool
    stop: StopJob | None = None


@dataclass(slots=True)
class Gang:
    """What a split model has beside rank 0.

    Attributes:
        followers: Actors of ranks 1 and up.
        works: What each of them does; ends with the gang only.
        placing: Done once a node has room for all; None from then on.
        asked_at: When room was asked for, monotonic.
        placed_at: When it was there.
        node: Id of the node.
    """

    followers: tuple[Any, ...]
    works: tuple[ray.ObjectRef[Any], ...]
    group: PlacementGroup
    placing: ray.ObjectRef[Any] | None
    asked_at: float
    placed_at: float | None = None
    node: str | None = None

    def note_placed(self) -> None:
        """Remember where the gang is."""
        self.placing, self.placed_at = None, time.monotonic()
        self.node = placement_group_table(self.group)["bundles_to_node_id"].get(0)


@dataclass(slots=True)
class Replica:
    """One copy of the model.

    Attributes:
        actor: The worker, or rank 0.
        task: What it does now: loads, or computes an assignment.
        ready: It has loaded.
        mute: It did not say how far it is when asked, and is not asked again before the next assignment.
    """

    actor: Any
    task: ray.ObjectRef[Any] | None
    gang: Gang | None = None
    ready: bool = False
    mute: bool = False

    @property
    def idle(self) -> bool:
        """Whether it can be given an assignment."""
        if not self.ready or self.task is not None:
            return False
        return self.gang is None or not ray.wait(list(self.gang.works), timeout=0)[0]

    @property
    def awaited(self) -> list[ray.ObjectRef[Any]]:
        """All whose end is news."""
        found = [] if self.task is None else [self.task]
        if self.gang is not None:
            found += self.gang.works
            found += [] if self.gang.placing is None else [self.gang.placing]
        return found

    def explain_loss(self, error: Exception) -> Loss:
        """Why it is gone, from the first error seen and what the other ranks say.

        Args:
            error: What `ray.get` raised.
        """
        errors = [error]
        if self.gang is not None:
            errors += _errors_of([*([] if self.task is None else [self.task]), *self.gang.works])
        causes = [one.cause if isinstance(one, RayTaskError) else one for one in errors]
        stop = next((cause for cause in causes if isinstance(cause, StopJob)), None)
        gone = [one for one in errors if isinstance(one, RayError) and not isinstance(one, RayTaskError)]
        blameless = any(map(_is_of_the_node, gone))
        if self.gang is None:
            blameless |= isinstance(error, ActorUnavailableError)
            return Loss(f"the worker died ({first_line(error)})", blameless, stop)
        # Ray learns of a lost node later than the ranks do, and calls actors unavailable for other reasons, too.
        blameless = blameless or (self.gang.node is not None and self.gang.node not in answering_nodes())
        told = next((cause for cause in causes if isinstance(cause, GroupLostError)), error)
        what = "the node of a rank was lost" if blameless else "a rank was lost"
        return Loss(f"{what} ({first_line(gone[0] if gone else told)})", blameless, stop)

    def kill(self) -> None:
        """End every process of it, and give back what it held; never raises."""
        for actor in (self.actor, *(self.gang.followers if self.gang is not None else ())):
            with contextlib.suppress(RayError, ValueError):
                ray.kill(actor, no_restart=True)
        if self.gang is not None:
            with contextlib.suppress(RayError, ValueError, RuntimeError):
                remove_placement_group(self.gang.group)


def start_worker(config: WorkerConfig, placement: Placement) -> Replica:
    """Start a replica that one process holds. Returns at once."""
    from workers.actor import WorkerActor

    actor: Any = _actor_class(WorkerActor, placement).remote(placement.configure(config))
    return Replica(actor, actor.load.remote())


def start_gang(config: WorkerConfig, placement: Placement, rank_timeout_s: float) -> Replica:
    """Start a replica of several ranks. Returns at once; it may wait for room.

    Args:
        config: What every worker is told.
        placement: Ranks, and what each has.
        rank_timeout_s: How long a silent rank is waited for.
    """
    from workers.actor import FollowerActor, WorkerActor

    bundle = {"CPU": float(placement.cpus)} | ({"GPU": float(placement.gpus)} if placement.gpus else {})
    group = placement_group([bundle] * placement.ranks, strategy="STRICT_PACK")
    told, ranks = placement.configure(config), placement.ranks
    try:
        actor: Any = _actor_class(WorkerActor, placement, group, 0).remote(told)
        followers: list[Any] = [
            _actor_class(FollowerActor, placement, group, rank).remote(told) for rank in range(1, ranks)
        ]
        place = actor.meet.remote(RankConfig(0, ranks, "", secrets.token_hex(16), rank_timeout_s))
        up = [follower.ready.remote() for follower in followers]  # so that no rank waits for another one's process
        works = tuple(follower.follow.remote(place, rank, *up) for rank, follower in enumerate(followers, 1))
        gang = Gang(tuple(followers), works, group, group.ready(), time.monotonic())
        return Replica(actor, actor.load.remote(place, *up), gang)
    except BaseException:
        remove_placement_group(group)
        raise


def _actor_class(kind: type, placement: Placement, group: PlacementGroup | None = None, rank: int = 0) -> Any:
    options: dict[str, Any] = {}
    if group is not None:
        options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank)
    return ray.remote(kind).options(
        num_cpus=placement.cpus,
        num_gpus=placement.gpus,
        max_restarts=0,
        max_task_retries=0,
        max_concurrency=2,
        **options,
    )


def _errors_of(refs: list[ray.ObjectRef[Any]]) -> list[Exception]:
    """What went wrong with these, as far as a moment tells."""
    done, _ = ray.wait(refs, num_returns=len(refs), timeout=_LAST_WORDS_S)
    found: list[Exception] = []
    for ref in done:
        try:
            ray.get(ref)
        except RayError as error:
            found.append(error)
    return found


def _is_of_the_node(error: Exception) -> bool:
    return isinstance(error, NodeDiedError) or getattr(error, "preempted", False) or _NODE_DIED in str(error)


def answering_nodes() -> dict[str, dict[str, float]]:
    """Resources of each node that is really there, by its id: Ray calls one alive for a while after it has gone."""
    found = {}
    for node in ray.nodes():  # type: ignore[no-untyped-call]
        if node["Alive"]:
            address = (node["NodeManagerAddress"], node["NodeManagerPort"])
            with contextlib.suppress(OSError):
                socket.create_connection(address, timeout=_KNOCK_TIMEOUT_S).close()
                found[node["NodeID"]] = node["Resources"]
    return found


def first_line(error: BaseException) -> str:
    """The first line of an error's text, of bounded length."""
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:300]
