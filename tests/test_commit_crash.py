"""Killed at every point of a commit: the next driver ends with the same files as if nothing had happened."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from sharding_jobs import content, drive, paths, publish, start_job

from sharding.commit import commit_shard, promote, read_receipts
from sharding.failpoints import SWITCH
from sharding.storage import Storage, open_storage

CODE = "import sys; sys.path.insert(0, sys.argv[2]); from sharding_jobs import drive; drive(sys.argv[1], 'crashed')"
POINTS = [
    "plan.after",
    "publish.before",
    "publish.after",
    "receipt.before",
    "receipt.after",
    "promote.before",
    "promote.after",
    "seal.before",
]
PARTS = ["part-00000.parquet", "part-00001.parquet", "part-00002.parquet"]


def crash(storage: Storage, switch: str) -> None:
    environment = {**os.environ, SWITCH: switch}
    arguments = [sys.executable, "-c", CODE, storage.uri, str(Path(__file__).parent)]
    assert subprocess.run(arguments, env=environment, check=False).returncode == -signal.SIGKILL


def check_complete(storage: Storage) -> None:
    assert [path for path in paths(storage) if not path.startswith("_candelabra/")] == ["_SUCCESS", *PARTS]
    assert [storage.read_bytes(part) for part in PARTS] == [content(shard) for shard in range(3)]
    assert paths(storage, "_candelabra/attempts") == []
    assert sorted(read_receipts(storage)) == [0, 1, 2]
    assert storage.local_root is None or not any(storage.scratch_dir().iterdir())


@pytest.mark.parametrize("point", POINTS)
def test_a_driver_killed_at_any_point_is_finished_by_the_next(tmp_path: Path, point: str) -> None:
    storage = open_storage(str(tmp_path / "out"))
    crash(storage, f"{point}=kill" if point in ("plan.after", "seal.before") else f"{point}=kill:2")
    assert not storage.exists("_SUCCESS")
    assert {path for path in paths(storage) if path.endswith(".parquet") and "/" not in path} <= set(PARTS)
    drive(storage.uri)
    check_complete(storage)


def test_an_attempt_without_receipt_is_an_orphan_that_the_next_driver_removes(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path / "out"))
    crash(storage, "publish.after=kill")
    (orphan,) = paths(storage, "_candelabra/attempts")
    assert drive(storage.uri) == [orphan]
    check_complete(storage)


def test_a_driver_killed_again_and_again_gets_there(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path / "out"))
    for point in ("plan.after", "publish.after", "receipt.after", "promote.before", "seal.before"):
        crash(storage, f"{point}=kill")
    drive(storage.uri)
    check_complete(storage)


@pytest.mark.parametrize("point", ["publish.after", "receipt.after"])
def test_the_same_holds_on_an_object_store(s3_bucket: str, point: str) -> None:
    storage = open_storage(f"{s3_bucket}/out")
    crash(storage, f"{point}=kill:2")
    drive(storage.uri)
    check_complete(storage)


def test_a_copy_without_its_delete_is_finished_on_an_object_store(s3_bucket: str) -> None:
    """The two halves of a promotion there: the crash lies between them, so both names exist."""
    storage = open_storage(f"{s3_bucket}/out")
    plan = start_job(storage)
    receipt = publish(storage, plan, 0)
    assert commit_shard(storage, receipt).won
    storage.write_bytes(receipt.part, content(0))
    drive(storage.uri)
    check_complete(storage)


def test_a_crash_between_receipt_and_promotion_of_a_retry_ends_with_the_new_part(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path / "out"))
    drive(storage.uri)
    plan = start_job(storage)
    storage.delete("_SUCCESS")
    retried = publish(storage, plan, 1, content(1, "better rows"), generation=1)
    assert commit_shard(storage, retried).won
    drive(storage.uri)
    assert storage.read_bytes("part-00001.parquet") == content(1, "better rows")
    assert storage.exists("_SUCCESS")
    promote(storage, retried)
