"""An embedded Ray has the processes that a job uses, no others, and computes like any Ray."""

from __future__ import annotations

from collections.abc import Iterator

import psutil
import pytest
import ray
import ray._private.node

from jobs.embedded_ray import _lean_node, start_embedded_ray

pytestmark = pytest.mark.slow

HELPERS = ("autoscaler/_private/monitor.py", "log_monitor.py", "dashboard/dashboard.py")


@pytest.fixture
def plain_node() -> Iterator[type]:
    """Ray's own class of nodes."""
    yield ray._private.node.Node
    ray.shutdown()


def negate(number: int) -> int:
    """Something for a worker to do."""
    return -number


def children() -> list[str]:
    return [" ".join(process.cmdline()) for process in psutil.Process().children(recursive=True)]


def test_ray_has_what_is_overridden(plain_node: type) -> None:
    for name in ("start_api_server", "start_ray_processes", "get_gcs_client", "start_monitor", "start_log_monitor"):
        assert callable(getattr(plain_node, name)), name


def test_embedded_ray_starts_no_helper_and_computes(plain_node: type) -> None:
    start_embedded_ray()
    lines = children()
    assert any("gcs_server" in line for line in lines)
    assert any("raylet" in line for line in lines)
    assert not [line for line in lines for helper in HELPERS if helper in line]
    servers = [line for line in lines if "raylet/raylet" in line]
    assert not [line for line in lines if line not in servers and ("IDLE" in line or "default_worker.py" in line)]
    assert ray.get(ray.remote(negate).remote(-7)) == 7
    assert ray._private.node.Node is plain_node


def test_nothing_is_left_after_shutdown(plain_node: type) -> None:
    start_embedded_ray()
    servers = [
        process
        for process in psutil.Process().children(recursive=True)
        if any(word in " ".join(process.cmdline()) for word in ("gcs_server", "raylet/raylet"))
    ]
    assert len(servers) == 2
    ray.shutdown()
    _, alive = psutil.wait_procs(servers, timeout=30)
    assert not alive


def test_ray_of_another_make_starts_as_it_comes(plain_node: type, monkeypatch: pytest.MonkeyPatch) -> None:
    class OtherNode:
        """A node class without what would be overridden."""

    monkeypatch.setattr(ray._private.node, "Node", OtherNode)
    with _lean_node():
        assert ray._private.node.Node is OtherNode
