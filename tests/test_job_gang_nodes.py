"""Split models on a Ray cluster of several nodes with declared GPUs: lost nodes, spare nodes, drivers that end."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import ray
from gangs import GENERATE, LONG_S, Blows, rank_processes, wait_until, write_prompts, write_split_model
from job_files import JobFiles
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group_table

from jobs import run_job
from jobs.errors import ExitCode, exit_code_of
from sharding.errors import InfrastructureError

pytestmark = pytest.mark.slow
SPLIT: dict[str, Any] = {
    "backend": "ray",
    "task": GENERATE,
    "model__tensor_parallel": 2,
    "workers__cpus": 1,
    "workers__gpus": 1,
    "workers__rank_timeout_s": 5,
    "ray__placement_timeout_s": 60,
    "sharding__target_rows": 50,
}


class Nodes:
    """A cluster whose nodes have two CPUs and two declared GPUs each: room for one gang of two."""

    def __init__(self, count: int) -> None:
        self._cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "object_store_memory": 80 << 20})
        self.address = self._cluster.address
        options = {"num_cpus": 2, "num_gpus": 2, "object_store_memory": 80 << 20}
        self.alive = [self._cluster.add_node(wait=False, **options) for _ in range(count)]
        self._cluster.wait_for_nodes()
        ray.init(address=self.address, log_to_driver=False)

    def hosts(self) -> set[str]:
        """Nodes that hold a gang."""
        groups = placement_group_table().values()
        return {group["bundles_to_node_id"][0] for group in groups if group["state"] == "CREATED"}

    def lose(self, ids: set[str]) -> None:
        """Nodes go without a word."""
        for node in [node for node in self.alive if node.node_id in ids]:
            self._cluster.remove_node(node, allow_graceful=False)
            self.alive.remove(node)

    def nothing_is_held(self) -> bool:
        """Whether no GPU, placement group or rank is left of any job."""
        free = ray.available_resources()
        groups = placement_group_table().values()
        return (
            (free.get("GPU", 0), free.get("CPU", 0)) == (2 * len(self.alive), 2 * len(self.alive))
            and all(group["state"] == "REMOVED" for group in groups)
            and not rank_processes()
        )

    def end(self) -> None:
        """Shut all of it down."""
        ray.shutdown()
        self._cluster.shutdown()


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    """Three nodes, of which the last test loses all."""
    found = Nodes(3)
    yield found
    found.end()


def test_ranks_that_no_node_has_room_for_are_told_at_once_with_what_each_has(files: JobFiles, nodes: Nodes) -> None:
    source = write_split_model(files)
    write_prompts(files, 50)
    with pytest.raises(InfrastructureError, match="4 ranks on one node, each with 1 CPU, 1 GPU") as caught:
        run_job(files.spec(**SPLIT | {"model__source": source, "model__tensor_parallel": 4}))
    assert exit_code_of(caught.value) == ExitCode.INFRASTRUCTURE
    assert str(caught.value).count("2 CPUs, 2 GPUs") == 3
    assert nodes.nothing_is_held()


@pytest.mark.parametrize(
    ("blows", "code"), [([signal.SIGINT] * 2, ExitCode.INTERRUPTED), ([signal.SIGKILL], -signal.SIGKILL)]
)
def test_a_driver_that_is_interrupted_or_killed_leaves_no_gpu_taken(
    files: JobFiles, nodes: Nodes, blows: list[signal.Signals], code: int
) -> None:
    source = write_split_model(files)
    write_prompts(files, 6000)
    changes = SPLIT | {"model__source": source, "ray__address": nodes.address, "workers__replicas": 1}
    driver = files.start("submit", str(files.spec_file(**changes)))
    wait_until(lambda: rank_processes(0) and rank_processes(1))
    assert not nodes.nothing_is_held()
    for blow in blows:
        driver.send_signal(blow)
    _, stderr = driver.communicate(timeout=LONG_S)
    assert driver.returncode == code, stderr
    assert "Traceback" not in stderr
    wait_until(nodes.nothing_is_held)


def test_a_gang_that_hangs_holds_up_no_other(files: JobFiles, nodes: Nodes) -> None:
    source = write_split_model(files)
    write_prompts(files, 1500)
    receipts = files.out() / "_candelabra" / "receipts"
    seen: list[str] = []

    def stop_until_others_have_worked() -> None:
        stopped = rank_processes(1)[0]
        before = len(list(receipts.glob("*.json")))
        stopped.suspend()
        wait_until(lambda: len(list(receipts.glob("*.json"))) >= before + 3)
        seen.append(stopped.status())
        stopped.kill()

    Blows(stop_until_others_have_worked)
    changes = SPLIT | {"model__source": source, "workers__rank_timeout_s": LONG_S, "workers__replicas": 2}
    report = run_job(files.spec(**changes))
    assert (seen, report.state, report.rows) == ([psutil.STATUS_STOPPED], "complete", 1500)
    wait_until(nodes.nothing_is_held)


def test_of_two_gangs_whose_nodes_are_lost_one_recovers_on_the_spare_and_none_is_a_deadline_error(
    files: JobFiles, nodes: Nodes, caplog: pytest.LogCaptureFixture
) -> None:
    source = write_split_model(files)
    write_prompts(files, 2000)
    changes = SPLIT | {"model__source": source, "workers__max_attempts": 1}
    lost: set[str] = set()

    def lose_hosts() -> None:
        lost.update(nodes.hosts())
        nodes.lose(lost)

    Blows(lose_hosts)
    report = run_job(files.spec(**changes, workers__replicas=2))
    assert (len(lost), report.state, report.rows) == (2, "complete", 2000)
    assert caplog.text.count("the node of a rank was lost") >= 2
    assert "a rank was lost" not in caplog.text.replace("node of a rank was lost", "")
    wait_until(nodes.nothing_is_held)
    Blows(lambda: nodes.lose(nodes.hosts()))
    changes |= {"ray__placement_timeout_s": 4, "output__path": str(files.out("second"))}
    with pytest.raises(InfrastructureError, match=r"no node had room for 2 ranks on one node, .* within 4 s") as caught:
        run_job(files.spec(**changes, workers__replicas=1))
    assert "the nodes have, taken or free: `0 CPUs, 0 GPUs" in str(caught.value)
    assert exit_code_of(caught.value) == ExitCode.INFRASTRUCTURE
    assert all(group["state"] == "REMOVED" for group in placement_group_table().values())
