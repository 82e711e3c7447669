"""Whole jobs from and to a real S3 server on loopback: calm, failing, with a killed driver, with two drivers."""

from __future__ import annotations

import random
import signal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from job_files import JobFiles, part_digests, sample_table
from s3_server import FaultyS3, random_faults

from jobs import run_job
from sharding.storage import open_storage


def bucket_rows(uri: str) -> pa.Table:
    """All rows of an output in a bucket, as any reader that skips underscores would see them."""
    storage = open_storage(uri)
    parts = [entry.path for entry in storage.list_folder().files if entry.path.endswith(".parquet")]
    return pa.concat_tables(pq.read_table(storage.open_parquet_source(part)) for part in parts)


def put_input(files: JobFiles, uri: str, rows: int = 600) -> None:
    """Upload the sample input in three files."""
    table = sample_table(rows)
    for number in range(3):
        step = rows // 3
        local = files.write_input(table.slice(number * step, step), f"local/{number}.parquet", row_group_size=90)
        open_storage(uri).publish_file(local, f"{number}.parquet")


def reference(files: JobFiles, rows: int = 600) -> list[str]:
    """Digests of the parts of the same job on local files."""
    put_input(files, str(files.root / "in"), rows)
    run_job(files.spec(input__path=str(files.root / "in"), output__path=str(files.out("reference"))))
    return list(part_digests(files.out("reference")).values())


def bucket_digests(uri: str) -> list[str]:
    """Digests of the parts in a bucket, in order."""
    import hashlib

    storage = open_storage(uri)
    parts = [entry.path for entry in storage.list_folder().files if entry.path.endswith(".parquet")]
    return [hashlib.sha256(storage.read_bytes(part)).hexdigest() for part in parts]


def test_a_job_from_and_to_a_bucket_gives_the_bytes_of_the_local_one(files: JobFiles, s3_bucket: str) -> None:
    put_input(files, f"{s3_bucket}/in")
    spec = files.spec(input__path=f"{s3_bucket}/in/*.parquet", output__path=f"{s3_bucket}/out")
    assert run_job(spec).exit_code == 0
    assert bucket_digests(f"{s3_bucket}/out") == reference(files)
    state = [entry.path for entry in open_storage(f"{s3_bucket}/out").list("_candelabra/attempts")]
    assert state == []
    assert run_job(spec).computed_rows == 0


def test_a_third_of_all_requests_failing_does_not_stop_a_job(files: JobFiles, faulty_s3: FaultyS3) -> None:
    put_input(files, f"{faulty_s3.uri}/in")
    faulty_s3.proxy.decide = random_faults(7, 1 / 3)
    spec = files.spec(input__path=f"{faulty_s3.uri}/in", output__path=f"{faulty_s3.uri}/out", workers__max_attempts=10)
    report = run_job(spec)
    faults = faulty_s3.proxy.faults
    faulty_s3.proxy.decide = random_faults(0, 0.0)
    assert report.exit_code == 0
    assert faults > 10
    assert bucket_digests(f"{faulty_s3.uri}/out") == reference(files)


@pytest.mark.parametrize("step", ["publish.after", "receipt.after", "promote.before", "seal.before"])
def test_a_driver_killed_while_writing_to_a_bucket_is_resumed_to_the_same_bytes(
    files: JobFiles, s3_bucket: str, step: str
) -> None:
    put_input(files, f"{s3_bucket}/in")
    spec = str(files.spec_file(input__path=f"{s3_bucket}/in", output__path=f"{s3_bucket}/out"))
    hit = 1 if step == "seal.before" else 3
    killed = files.run("submit", spec, environment={"CANDELABRA_FAILPOINTS": f"{step}=kill:{hit}"})
    assert killed.code == -signal.SIGKILL, killed.stderr
    done = files.run("submit", spec)
    assert done.code == 0, done.stderr
    assert bucket_digests(f"{s3_bucket}/out") == reference(files)
    assert list(open_storage(f"{s3_bucket}/out").list("_candelabra/attempts")) == []


def test_of_two_drivers_on_one_bucket_output_each_row_is_written_once(files: JobFiles, s3_bucket: str) -> None:
    put_input(files, f"{s3_bucket}/in")
    spec = str(files.spec_file(input__path=f"{s3_bucket}/in", output__path=f"{s3_bucket}/out"))
    drivers = [files.start("submit", spec, "--json") for _ in range(2)]
    ends = [driver.communicate(timeout=180) for driver in drivers]
    assert sorted(driver.returncode for driver in drivers) in ([0, 4], [0, 0]), ends
    assert bucket_rows(f"{s3_bucket}/out")["id"].to_pylist() == list(range(600))


def test_refused_credentials_exit_5_and_a_missing_bucket_is_named(
    files: JobFiles, s3_bucket: str, faulty_s3: FaultyS3
) -> None:
    spec = str(files.spec_file(input__path=f"{faulty_s3.uri}/in", output__path=f"{faulty_s3.uri}/out"))
    faulty_s3.proxy.decide = lambda request: "403"
    refused = files.run("submit", spec)
    assert refused.code == 5, refused.stderr
    assert "Traceback" not in refused.stderr
    faulty_s3.proxy.decide = random_faults(random.Random(1).randint(0, 9), 0.0)
    missing = files.run("submit", str(files.spec_file(input__path="s3://no-such-bucket-here/in")))
    assert missing.code in (5, 6), missing.stderr
    assert "no-such-bucket-here" in missing.stderr
    assert "Traceback" not in missing.stderr
