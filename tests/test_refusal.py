"""A job that is refused before its first shard is handed out leaves its output as it was; one that starts is seen."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from engine_models import GOLDEN
from job_files import JobFiles, sample_table

from jobs import JobSpec, run_job
from jobs.errors import ExitCode, exit_code_of
from jobs.progress import JobProgress
from jobs.status import JobStatus, find_jobs, job_status
from sharding import layout
from sharding.errors import CandelabraError, DriftError, InfrastructureError, LeaseHeldError
from sharding.lease import Lease
from sharding.storage import LocalStorage, open_storage


@pytest.fixture
def model(files: JobFiles) -> Path:
    """A model of this test's own, that can be taken away."""
    return Path(shutil.copytree(GOLDEN / "st-mean-dense", files.root / "model"))


@pytest.fixture
def cluster() -> Iterator[None]:
    """A Ray of two CPUs."""
    ray.init(address="local", include_dashboard=False, num_cpus=2, object_store_memory=80 << 20, log_to_driver=False)
    yield
    ray.shutdown()


def tree(folder: Path) -> dict[str, bytes | None]:
    """Every file below a folder with its content, and every folder."""
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def refuse(spec: JobSpec, model: Path, look: Callable[[], object] = lambda: None) -> CandelabraError:
    """What a job ends with whose model goes away after everything was checked, while its workers start."""

    def take_away(now: JobProgress) -> None:
        assert now.phase == "starting workers"
        look()
        (model / "model.safetensors").unlink()

    with pytest.raises(CandelabraError) as caught:
        run_job(spec, on_progress=take_away)
    return caught.value


@pytest.mark.parametrize("made", ["", "deep", "deep/out"])
def test_a_job_that_is_refused_while_it_starts_leaves_nothing_at_all(files: JobFiles, model: Path, made: str) -> None:
    files.write_input(sample_table(200))
    (files.root / made).mkdir(parents=True, exist_ok=True)
    spec = files.spec(model__source=str(model), output__path=str(files.root / "deep/out"))
    before = tree(files.root)
    weights = (model / "model.safetensors").read_bytes()
    assert exit_code_of(refuse(spec, model)) in (ExitCode.USAGE, ExitCode.NOT_FOUND, ExitCode.DRIFT)
    (model / "model.safetensors").write_bytes(weights)
    assert tree(files.root) == before
    assert find_jobs(str(files.root)) == []
    assert run_job(spec).state == "complete"


def test_a_job_that_is_refused_changes_nothing_of_an_earlier_run(files: JobFiles, model: Path) -> None:
    files.write_input(sample_table(200))
    spec = files.spec(model__source=str(model))
    assert run_job(spec).row_errors == 4
    before, state = tree(files.out()), job_status(str(files.out())).state
    assert state == "complete"

    def take_away(now: JobProgress) -> None:
        (model / "model.safetensors").unlink()

    with pytest.raises(CandelabraError):
        run_job(spec, retry_failed=True, on_progress=take_away)
    after = tree(files.out())
    leases = {name for name in after.keys() | before.keys() if "_candelabra/lease/" in name}
    assert {name: after[name] for name in after.keys() - leases} == {
        name: before[name] for name in before.keys() - leases
    }
    assert all(json.loads(after[name] or b"")["released"] for name in leases)
    assert job_status(str(files.out())).state == "complete"


def test_a_job_whose_workers_start_is_seen_as_running(files: JobFiles, model: Path) -> None:
    files.write_input(sample_table(200))
    seen: list[JobStatus] = []

    def look() -> None:
        seen.append(job_status(str(files.out())))
        seen.extend(find_jobs(str(files.root)))

    refuse(files.spec(model__source=str(model)), model, look)
    first, listed = seen
    assert listed == first
    assert (first.job, first.state, first.rows, first.rows_done, first.shards) == ("test", "running", 200, 0, 2)
    assert first.driver is not None


def test_a_job_killed_while_its_workers_start_is_told_with_how_to_go_on(files: JobFiles) -> None:
    files.write_input(sample_table(200))
    spec, out = str(files.spec_file()), str(files.out())
    killed = files.run("submit", spec, environment={"CANDELABRA_FAILPOINTS": "plan.before=kill"})
    assert killed.code == -signal.SIGKILL
    found = job_status(out)
    assert find_jobs(str(files.root)) == [found]
    assert (found.job, found.state, found.rows, found.rows_done, found.shards) == ("test", "not planned", 200, 0, 2)
    assert (found.driver, found.progress) == (None, None)
    told = files.run("status", out)
    assert told.code == 0
    assert "not planned" in told.stdout
    assert "`candelabra submit` starts it again" in told.stdout
    assert "not planned" in files.run("list", str(files.root)).stdout
    again = files.run("resume", spec)
    assert again.code == ExitCode.NOT_FOUND
    assert "starts one" in again.stderr
    assert files.run("submit", spec).code == 0
    assert job_status(out).state == "complete"


def test_what_another_driver_wrote_meanwhile_stays(files: JobFiles) -> None:
    files.write_input(sample_table(200))
    other = Lease.acquire(open_storage(str(files.out())), owner="other", timeout_s=60)
    before = tree(files.out())
    with pytest.raises(LeaseHeldError):
        run_job(files.spec())
    assert tree(files.out()) == before
    other.discard()
    assert [path for path in files.out().rglob("*") if path.is_file()] == []
    with pytest.raises(CandelabraError):
        other.check()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"workers__replicas": 3, "workers__cpus": 1}, "3 replicas"),
        ({"workers__gpus": 1}, "GPU"),
        ({"workers__cpus": 99}, "99 CPUs"),
    ],
)
def test_a_job_without_room_in_the_cluster_leaves_nothing_and_is_no_job(
    files: JobFiles, cluster: None, changes: dict[str, object], words: str
) -> None:
    files.write_input(sample_table(50))
    before = tree(files.root)
    with pytest.raises(InfrastructureError, match=words):
        run_job(files.spec(backend="ray", **changes))
    assert tree(files.root) == before
    assert find_jobs(str(files.root)) == []


@pytest.mark.slow
def test_an_address_without_a_cluster_leaves_nothing(files: JobFiles) -> None:
    files.write_input(sample_table(50))
    spec = str(files.spec_file(backend="ray", ray__address="127.0.0.1:1"))
    before = tree(files.root)
    assert files.run("submit", spec).code == ExitCode.INFRASTRUCTURE
    assert tree(files.root) == before


@pytest.mark.parametrize("kind", ["embed", "generate"])
def test_a_resumed_job_reads_its_plan_once(files: JobFiles, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    files.write_input(sample_table(200))
    spec = files.spec(task={"kind": kind, "text": "doc"})
    reads: list[str] = []
    plain = LocalStorage.read_bytes

    def counting(storage: LocalStorage, path: str) -> bytes:
        reads.append(path)
        return plain(storage, path)

    monkeypatch.setattr(LocalStorage, "read_bytes", counting)
    run_job(spec)
    assert reads.count(layout.PLAN) == 0
    run_job(spec)
    assert reads.count(layout.PLAN) == 1


def test_a_plan_that_came_while_a_job_was_prepared_is_the_one_that_counts(
    files: JobFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    files.write_input(sample_table(200))
    acquire = Lease.acquire

    def late(*arguments: Any, **options: Any) -> Lease:
        monkeypatch.undo()
        run_job(files.spec(sharding__target_rows=50))
        return acquire(*arguments, **options)

    monkeypatch.setattr(Lease, "acquire", late)
    with pytest.raises(DriftError, match="plan `50`, now `100`"):
        run_job(files.spec())
    assert job_status(str(files.out())).state == "complete"
