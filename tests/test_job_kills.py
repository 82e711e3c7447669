"""Drivers and workers killed at every step, two drivers at once: the rows are there once, byte for byte."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest
from job_files import JobFiles, leftovers, part_digests, sample_table

from jobs import run_job
from sharding.failpoints import NAMES

_STEPS = sorted(NAMES)


@pytest.fixture
def reference(files: JobFiles) -> dict[str, str]:
    """Digests of an undisturbed run over the sample input."""
    files.write_input(sample_table(1000), row_group_size=130)
    done = files.run("submit", str(files.spec_file(output__path=str(files.out("reference")))))
    assert done.code == 0, done.stderr
    return part_digests(files.out("reference"))


@pytest.mark.parametrize("hit", [1, 3])
@pytest.mark.parametrize("step", _STEPS)
def test_a_driver_killed_at_any_step_is_resumed_to_the_same_bytes(
    files: JobFiles, reference: dict[str, str], step: str, hit: int
) -> None:
    spec = str(files.spec_file())
    killed = files.run("submit", spec, environment={"CANDELABRA_FAILPOINTS": f"{step}=kill:{hit}"})
    once = {"plan.before", "plan.after", "seal.before"}
    assert killed.code == (0 if hit > 1 and step in once else -signal.SIGKILL), killed.stderr
    assert set(part_digests(files.out()).items()) <= set(reference.items())
    again = files.run("submit", spec)
    assert again.code == 0, again.stderr
    assert part_digests(files.out()) == reference
    assert leftovers(files.out()) == []
    assert files.rows()["id"].to_pylist() == list(range(1000))


@pytest.mark.slow
def test_thirty_random_kills_of_the_driver_lose_and_repeat_nothing(files: JobFiles, reference: dict[str, str]) -> None:
    rng = random.Random(20)
    kills, rounds = 0, 0
    while kills < 30:
        output = files.out(f"out{rounds}")
        rounds += 1
        assert rounds < 60, "jobs end before they can be killed"
        spec = str(files.spec_file(output__path=str(output), sharding__target_rows=100))
        for _ in range(8):
            process = files.start("submit", spec)
            _kill_somewhere_within(process, output, rng)
            if process.wait() != -signal.SIGKILL:
                break
            kills += 1
            assert set(part_digests(output).items()) <= set(reference.items())
        final = files.run("submit", spec)
        assert final.code == 0, final.stderr
        assert part_digests(output) == reference
        assert leftovers(output) == []


def _kill_somewhere_within(process: subprocess.Popen[str], output: Path, rng: random.Random) -> None:
    """Let the driver get its lease, then kill it after some time of its work."""
    leases = output / "_candelabra" / "lease"
    before = len(list(leases.glob("*.json")))
    while process.poll() is None and len(list(leases.glob("*.json"))) <= before:
        time.sleep(0.005)
    time.sleep(rng.uniform(0, 0.35))
    process.kill()
    process.communicate()


def test_of_two_drivers_started_together_one_works_and_the_other_exits_4(
    files: JobFiles, reference: dict[str, str]
) -> None:
    spec = str(files.spec_file())
    drivers = [files.start("submit", spec, "--json") for _ in range(2)]
    ends = [driver.communicate(timeout=120) for driver in drivers]
    codes = sorted(driver.returncode for driver in drivers)
    assert codes in ([0, 4], [0, 0]), ends
    if codes == [0, 0]:  # the second came when the first had finished: it found nothing to do
        assert any('"computed_rows": 0' in stdout for stdout, _ in ends)
    assert part_digests(files.out()) == reference


def test_a_second_driver_is_refused_while_the_first_is_stopped_but_alive(files: JobFiles) -> None:
    files.write_input(sample_table(3000))
    spec = str(files.spec_file(sharding__target_rows=10))
    first = files.start("submit", spec)
    while not list((files.out() / "_candelabra" / "receipts").glob("*.json")):
        assert first.poll() is None
        time.sleep(0.01)
    os.kill(first.pid, signal.SIGSTOP)
    try:
        second = files.run("submit", spec)
        assert second.code == 4
        assert str(first.pid) in second.stderr
        assert "Traceback" not in second.stderr
    finally:
        os.kill(first.pid, signal.SIGCONT)
    first.communicate()
    assert first.returncode == 0
    assert files.rows()["id"].to_pylist() == list(range(3000))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_driver_finishes_what_is_in_flight_and_can_be_resumed(
    files: JobFiles, number: signal.Signals, code: int
) -> None:
    files.write_input(sample_table(4000))
    spec = str(files.spec_file(sharding__target_rows=10))
    driver = files.start("submit", spec, "--json")
    while not list((files.out() / "_candelabra" / "receipts").glob("*.json")):
        assert driver.poll() is None
        time.sleep(0.01)
    driver.send_signal(number)
    stdout, stderr = driver.communicate(timeout=60)
    assert driver.returncode == code, stderr
    assert '"state": "interrupted"' in stdout
    assert "Traceback" not in stderr
    assert not (files.out() / "_SUCCESS").exists()
    assert files.run("submit", spec).code == 0
    assert files.rows()["id"].to_pylist() == list(range(4000))


def test_a_driver_on_a_silent_host_is_taken_over_and_what_it_does_later_never_counts(
    files: JobFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    files.write_input(sample_table(4000))  # enough shards that the first driver is stopped far from its end
    run_job(files.spec(sharding__target_rows=10, output__path=str(files.out("undisturbed"))))
    reference = part_digests(files.out("undisturbed"))
    first = files.start("submit", str(files.spec_file(sharding__target_rows=10)))
    receipts = files.out() / "_candelabra" / "receipts"
    while len(list(receipts.glob("*.json"))) < 2:
        assert first.poll() is None
        time.sleep(0.002)
    os.kill(first.pid, signal.SIGSTOP)
    try:
        lease = files.out() / "_candelabra" / "lease" / "000001.json"
        record = json.loads(lease.read_text())
        lease.write_text(json.dumps(record | {"host": "elsewhere", "boot_id": "another"}))
        monkeypatch.setattr("jobs.driver.LEASE_TIMEOUT_S", 1.0)
        report = run_job(files.spec(sharding__target_rows=10))
        assert (report.exit_code, report.state) == (0, "complete")
        assert part_digests(files.out()) == reference
    finally:
        os.kill(first.pid, signal.SIGCONT)
    _, stderr = first.communicate(timeout=60)
    assert first.returncode == 4, stderr
    assert part_digests(files.out()) == reference


@pytest.mark.parametrize("rows", [10, 130])
def test_shards_finished_by_any_mixture_of_runs_are_the_same_bytes(
    files: JobFiles, reference: dict[str, str], rows: int
) -> None:
    spec = str(files.spec_file())
    for hit in (2, 1, 4):
        files.run("submit", spec, environment={"CANDELABRA_FAILPOINTS": f"publish.after=kill:{hit}"})
    final = str(files.spec_file(batch__budget_tokens=rows, workers__cpus=1))
    assert files.run("submit", final).code == 0
    assert part_digests(files.out()) == reference


def test_status_of_a_killed_driver_says_that_nobody_works_on_the_job(files: JobFiles) -> None:
    files.write_input(sample_table(1000))
    files.run("submit", str(files.spec_file()), environment={"CANDELABRA_FAILPOINTS": "receipt.after=kill:3"})
    status = files.run("status", "out", "--json").json
    assert (status["state"], status["driver"]) == ("interrupted", None)
    assert 0 < status["rows_done"] < 1000
