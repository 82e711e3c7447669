"""The same jobs on a real embedded Ray: same bytes, dead workers replaced, poison isolated, nothing left behind."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator

import psutil
import pyarrow as pa
import pytest
import ray
from job_files import JobFiles, leftovers, part_digests, sample_table
from ray.cluster_utils import Cluster

from jobs import run_job
from jobs.errors import ExitCode, exit_code_of
from sharding.errors import InfrastructureError

pytestmark = pytest.mark.slow


def ray_processes(root: psutil.Process) -> list[psutil.Process]:
    """Processes below `root` that belong to Ray."""
    return [process for process in root.children(recursive=True) if is_ray(process)]


def is_ray(process: psutil.Process) -> bool:
    """Whether a process is a server or worker of Ray's; its agents notice a dead server only half a minute later."""
    try:
        words = " ".join(process.cmdline())
    except psutil.Error:
        return False
    return "ray::WorkerActor" in words or "raylet" in words.split("/")[-1] or "gcs_server" in words


@pytest.fixture
def reference(files: JobFiles) -> dict[str, str]:
    """Digests of an undisturbed run without Ray."""
    files.write_input(sample_table(2000), row_group_size=130)
    run_job(files.spec(output__path=str(files.out("reference"))))
    return part_digests(files.out("reference"))


@pytest.fixture
def cluster() -> Iterator[None]:
    """A Ray on this machine that several jobs of one test share."""
    ray.init(address="local", include_dashboard=False, num_cpus=2, object_store_memory=80 << 20, log_to_driver=False)
    yield
    ray.shutdown()


def wait_until(condition: object, timeout_s: float = 60.0) -> None:
    """Wait for something another process does."""
    deadline = time.monotonic() + timeout_s
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.01)


@pytest.mark.parametrize("replicas", [1, 2])
def test_ray_gives_the_same_bytes_as_the_local_backend_and_leaves_no_process(
    files: JobFiles, reference: dict[str, str], replicas: int
) -> None:
    report = run_job(files.spec(backend="ray", workers__replicas=replicas, workers__cpus=1))
    assert (report.state, report.computed_rows) == ("complete", 2000)
    assert part_digests(files.out()) == reference
    assert leftovers(files.out()) == []
    assert not ray.is_initialized()
    wait_until(lambda: not ray_processes(psutil.Process()))


def test_workers_that_keep_dying_between_batches_are_replaced_and_the_job_completes(
    files: JobFiles, reference: dict[str, str]
) -> None:
    spec = files.spec_file(backend="ray", batch__budget_tokens=600)
    done = files.run(
        "submit",
        str(spec),
        "--json",
        "--verbose",
        environment={"CANDELABRA_FAILPOINTS": "compute=kill:9"},
        timeout_s=300,
    )
    assert done.code == 0, done.stderr
    assert done.stderr.count("the worker died") >= 3
    assert part_digests(files.out()) == reference
    assert leftovers(files.out()) == []


@pytest.mark.parametrize("step", ["read", "compute", "publish.before", "publish.after"])
def test_a_worker_killed_once_at_any_step_changes_no_byte(
    files: JobFiles, reference: dict[str, str], step: str
) -> None:
    marker = files.root / "once"
    done = files.run(
        "submit",
        str(files.spec_file(backend="ray")),
        environment={"CANDELABRA_FAILPOINTS": f"{step}=exit137:2@{marker}"},
        timeout_s=300,
    )
    assert done.code == 0, done.stderr
    assert marker.exists()
    assert part_digests(files.out()) == reference
    assert leftovers(files.out()) == []


def test_a_row_that_kills_every_worker_is_isolated_and_recorded(files: JobFiles, cluster: None) -> None:
    texts = [f"text {i}" for i in range(60)]
    texts[41] = "oom here"
    files.write_input(pa.table({"id": list(range(60)), "doc": texts}))
    report = run_job(files.spec(backend="ray", sharding__target_rows=30, workers__cpus=1))
    assert report.exit_code == ExitCode.COMPLETE
    rows = files.rows().to_pylist()
    assert [row["id"] for row in rows] == list(range(60))
    bad = [row for row in rows if row["error"] is not None]
    assert [row["id"] for row in bad] == [41]
    assert "killed" in bad[0]["error"]
    assert bad[0]["embedding"] is None


def test_a_driver_killed_on_ray_leaves_no_process_and_is_resumed_to_the_same_bytes(
    files: JobFiles, reference: dict[str, str]
) -> None:
    spec = str(files.spec_file(backend="ray", sharding__target_rows=100))
    driver = files.start("submit", spec, environment={"CANDELABRA_FAILPOINTS": "receipt.after=kill:4"})
    started: dict[int, psutil.Process] = {}

    def look() -> bool:
        if driver.poll() is None:
            started.update({process.pid: process for process in ray_processes(psutil.Process(driver.pid))})
        return driver.poll() is not None

    wait_until(look, 120)
    driver.communicate()
    assert driver.returncode == -signal.SIGKILL
    assert started
    wait_until(lambda: not any(process.is_running() and is_ray(process) for process in started.values()))
    done = files.run("submit", spec)
    assert done.code == 0, done.stderr
    assert part_digests(files.out()) == reference
    assert leftovers(files.out()) == []


def test_more_replicas_than_fit_is_told_at_once_with_need_and_have(files: JobFiles, cluster: None) -> None:
    files.write_input(sample_table(50))
    with pytest.raises(InfrastructureError, match="2 CPUs") as caught:
        run_job(files.spec(backend="ray", workers__replicas=3, workers__cpus=1))
    assert exit_code_of(caught.value) == ExitCode.INFRASTRUCTURE
    with pytest.raises(InfrastructureError, match="0 GPUs"):
        run_job(files.spec(backend="ray", workers__gpus=1))


def test_an_address_without_a_cluster_is_an_infrastructure_error(files: JobFiles) -> None:
    files.write_input(sample_table(50))
    done = files.run("submit", str(files.spec_file(backend="ray", ray__address="127.0.0.1:1")), timeout_s=180)
    assert done.code == ExitCode.INFRASTRUCTURE, done.stderr
    assert "127.0.0.1:1" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_running_cluster_of_two_nodes_is_used_by_its_address_and_left_as_it_was(
    files: JobFiles, reference: dict[str, str]
) -> None:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": 80 << 20})
    try:
        cluster.add_node(num_cpus=1, object_store_memory=80 << 20)
        spec = files.spec_file(backend="ray", ray__address=cluster.address, workers__cpus=1)
        done = files.run("submit", str(spec), "--json", "--verbose", timeout_s=200)
        assert done.code == 0, done.stderr
        assert "placing 2 replicas of 1 CPU and 0 GPUs" in done.stderr
        assert part_digests(files.out()) == reference
        ray.init(address=cluster.address, log_to_driver=False)
        wait_until(lambda: ray.available_resources().get("CPU") == 2)
    finally:
        ray.shutdown()
        cluster.shutdown()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_driver_on_ray_finishes_what_is_in_flight_and_says_so(
    files: JobFiles, number: signal.Signals, code: int
) -> None:
    files.write_input(sample_table(4000))
    spec = str(files.spec_file(backend="ray", sharding__target_rows=10))
    driver = files.start("submit", spec, "--json")
    receipts = files.out() / "_candelabra" / "receipts"
    wait_until(lambda: driver.poll() is not None or list(receipts.glob("*.json")))
    driver.send_signal(number)
    stdout, stderr = driver.communicate(timeout=60)
    assert driver.returncode == code, stderr
    assert json.loads(stdout)["state"] == "interrupted"
    assert "Traceback" not in stderr
    assert "SIGTERM received" not in stderr
    assert files.run("submit", spec).code == 0
    assert files.rows()["id"].to_pylist() == list(range(4000))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("server", ["", "gcs_server", "raylet"])
def test_a_driver_interrupted_while_ray_starts_ends_as_at_any_other_time(
    files: JobFiles, number: signal.Signals, code: int, server: str
) -> None:
    files.write_input(sample_table(4000))
    spec = str(files.spec_file(backend="ray", sharding__target_rows=10))
    driver = files.start("submit", spec, "--json")
    progress = files.out() / "_candelabra" / "progress.json"

    def begun() -> bool:
        names = [process.name() for process in psutil.Process(driver.pid).children(recursive=True)]
        return progress.exists() and (not server or server in names)

    wait_until(lambda: driver.poll() is not None or begun())
    driver.send_signal(number)
    stdout, stderr = driver.communicate(timeout=60)
    assert driver.returncode == code, stderr
    assert json.loads(stdout)["state"] == "interrupted"
    assert "Traceback" not in stderr
    assert files.run("submit", spec).code == 0


def test_stdout_is_the_report_alone_though_a_worker_dies(files: JobFiles) -> None:
    files.write_input(sample_table(3000))
    driver = files.start("submit", str(files.spec_file(backend="ray", sharding__target_rows=20)), "--json")
    receipts = files.out() / "_candelabra" / "receipts"
    wait_until(lambda: driver.poll() is not None or list(receipts.glob("*.json")))
    worker = next(
        process
        for process in psutil.Process(driver.pid).children(recursive=True)
        if "ray::WorkerActor" in " ".join(process.cmdline())
    )
    worker.kill()
    stdout, stderr = driver.communicate(timeout=60)
    assert driver.returncode == 0, stderr
    assert json.loads(stdout)["rows"] == 3000


def test_a_job_that_waits_for_a_place_can_be_interrupted(files: JobFiles, cluster: None) -> None:
    files.write_input(sample_table(100))

    @ray.remote(num_cpus=2)
    class Occupant:
        """Holds every CPU."""

        def ready(self) -> bool:
            return True

    occupant = Occupant.remote()
    ray.get(occupant.ready.remote())
    address = ray.get_runtime_context().gcs_address
    spec = str(files.spec_file(backend="ray", ray__address=address, workers__cpus=1, workers__replicas=1))
    driver = files.start("submit", spec, "--json")
    wait_until(lambda: driver.poll() is not None or pending_actors())
    driver.send_signal(signal.SIGINT)
    stdout, stderr = driver.communicate(timeout=60)
    assert driver.returncode == 130, stderr
    assert json.loads(stdout)["state"] == "interrupted"
    ray.kill(occupant)


def pending_actors() -> bool:
    """Whether an actor waits for a place."""
    return any(actor["State"] == "PENDING_CREATION" for actor in ray._private.state.actors().values())
