"""Receipts, promotion, orphans, sealing: on a local folder and on a real S3 server."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from s3_server import FaultyS3, first_faults, random_faults
from sharding_jobs import content, drive, paths, plan_of, publish, receipt_of, start_job

from sharding import layout
from sharding.commit import (
    CommitOutcome,
    add_counts,
    commit_shard,
    promote,
    promote_pending,
    read_receipts,
    read_success,
    remove_orphans,
    seal_job,
)
from sharding.errors import CorruptStateError, IncompleteError, RowErrorLimitError
from sharding.manifest import ShardReceipt, encode
from sharding.plan import ShardPlan
from sharding.plan_file import write_plan
from sharding.storage import Storage, open_storage, parse_uri
from sharding.storage.remote import RemoteStorage
from sharding.storage.retry import RetryPolicy

SEALED = ["_SUCCESS", "part-00000.parquet", "part-00001.parquet", "part-00002.parquet"]


@pytest.fixture(params=["local", "s3"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    if request.param == "local":
        return open_storage(str(tmp_path / "out"))
    return open_storage(f"{request.getfixturevalue('s3_bucket')}/out")


def visible(storage: Storage) -> list[str]:
    """What a reader of the output folder sees, and `_SUCCESS`."""
    return [entry.path for entry in storage.list_folder().files]


def attempts(storage: Storage) -> list[str]:
    return paths(storage, layout.ATTEMPTS)


def finish(storage: Storage, plan: ShardPlan, **changes: Any) -> dict[int, ShardReceipt]:
    for shard in plan.shards:
        outcome = commit_shard(storage, publish(storage, plan, shard.index, **changes))
        promote(storage, outcome.receipt)
    return read_receipts(storage)


def test_a_published_attempt_is_invisible_until_it_is_promoted(storage: Storage) -> None:
    plan = start_job(storage)
    receipt = publish(storage, plan, 1)
    assert visible(storage) == []
    outcome = commit_shard(storage, receipt)
    assert outcome == CommitOutcome(True, receipt)
    assert visible(storage) == []
    promote(storage, receipt)
    assert visible(storage) == ["part-00001.parquet"]
    assert storage.read_bytes("part-00001.parquet") == content(1)
    assert attempts(storage) == []


def test_the_first_receipt_counts_and_the_loser_is_removed(storage: Storage) -> None:
    plan = start_job(storage)
    first, second = publish(storage, plan, 0, nonce="first"), publish(storage, plan, 0, nonce="second", attempt=2)
    assert commit_shard(storage, second).won
    assert commit_shard(storage, first) == CommitOutcome(False, second)
    assert attempts(storage) == [second.attempt_file]
    promote(storage, second)
    assert commit_shard(storage, first) == CommitOutcome(False, second)
    assert read_receipts(storage) == {0: second}


def test_committing_the_same_attempt_twice_wins_twice(storage: Storage) -> None:
    plan = start_job(storage)
    receipt = publish(storage, plan, 0)
    assert commit_shard(storage, receipt).won
    promote(storage, receipt)
    again = commit_shard(storage, replace(receipt, seconds=9.0))
    assert again == CommitOutcome(True, receipt)
    assert visible(storage) == ["part-00000.parquet"]


def test_promotion_may_be_repeated(storage: Storage) -> None:
    plan = start_job(storage)
    receipt = publish(storage, plan, 0)
    commit_shard(storage, receipt)
    for _ in range(3):
        promote(storage, receipt)
    assert storage.read_bytes("part-00000.parquet") == content(0)


def test_a_promotion_without_attempt_and_part_is_corrupt_state(storage: Storage) -> None:
    plan = start_job(storage)
    receipt = publish(storage, plan, 0)
    storage.delete(receipt.attempt_file)
    with pytest.raises(CorruptStateError, match=r"is missing.*part-00000") as caught:
        promote(storage, receipt)
    assert "receipts/00000.json" in str(caught.value.hint)
    storage.write_bytes(receipt.part, b"something else")
    with pytest.raises(CorruptStateError, match="has 14 bytes"):
        promote(storage, receipt)


def test_of_several_drivers_exactly_one_writes_the_receipt(storage: Storage) -> None:
    plan = start_job(storage)
    code = (
        "import sys; sys.path.insert(0, sys.argv[3])\n"
        "from sharding.storage import open_storage; from sharding.plan_file import read_plan\n"
        "from sharding.commit import commit_shard; from sharding_jobs import publish\n"
        "s = open_storage(sys.argv[1]); plan = read_plan(s)\n"
        "receipts = [publish(s, plan, shard, nonce=sys.argv[2]) for shard in range(3)]\n"
        "print('ready', flush=True); sys.stdin.readline()\n"
        "print(*[commit_shard(s, r).won for r in receipts])\n"
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code, storage.uri, name, str(Path(__file__).parent)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for name in ("aaa", "bbb")
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    won = [process.communicate(timeout=60)[0].split() for process in processes]
    assert [sorted(pair) for pair in zip(*won, strict=True)] == [["False", "True"]] * 3
    receipts = read_receipts(storage, plan_digest=plan.digest)
    assert attempts(storage) == sorted(receipt.attempt_file for receipt in receipts.values())
    promote_pending(storage, receipts)
    seal_job(storage, plan, receipts, max_row_error_rate=0.0)
    assert visible(storage) == SEALED


def test_a_retried_generation_replaces_the_part(storage: Storage) -> None:
    plan = start_job(storage)
    finish(storage, plan, row_errors=2)
    retried = publish(storage, plan, 1, content(1, "better rows"), generation=1)
    assert commit_shard(storage, retried).won
    receipts = read_receipts(storage)
    assert receipts[1] == retried
    assert receipts[0].generation == 0
    assert promote_pending(storage, receipts) == [1]
    assert promote_pending(storage, receipts) == []
    assert storage.read_bytes("part-00001.parquet") == content(1, "better rows")
    assert seal_job(storage, plan, receipts, max_row_error_rate=1.0).row_errors == 4


def test_orphans_of_shards_with_a_receipt_are_removed(storage: Storage) -> None:
    plan = start_job(storage)
    kept = publish(storage, plan, 0, nonce="kept")
    commit_shard(storage, kept)
    orphan = publish(storage, plan, 0, nonce="orphan", attempt=2)
    waiting = publish(storage, plan, 1)
    retry = publish(storage, plan, 0, generation=1)
    storage.write_bytes(f"{layout.ATTEMPTS}/notes.txt", b"not ours")
    receipts = read_receipts(storage)
    assert remove_orphans(storage, receipts) == [orphan.attempt_file]
    assert attempts(storage) == sorted(
        [kept.attempt_file, waiting.attempt_file, retry.attempt_file, f"{layout.ATTEMPTS}/notes.txt"]
    )


def test_a_driver_that_should_be_dead_can_lose_no_row_and_add_none(storage: Storage) -> None:
    """The old driver was stopped between its worker's publish and its receipt; a new one has taken over."""
    plan = start_job(storage)
    old = publish(storage, plan, 0, nonce="old", epoch=1)
    receipts = read_receipts(storage)
    promote_pending(storage, receipts)
    remove_orphans(storage, receipts)  # the new driver starts
    assert commit_shard(storage, old).won  # the old one wakes up, and is first
    new = publish(storage, plan, 0, nonce="new", epoch=2)
    outcome = commit_shard(storage, new)
    assert outcome == CommitOutcome(False, old)
    promote(storage, outcome.receipt)
    promote(storage, old)  # the old one goes on, too
    late = publish(storage, plan, 0, nonce="late", epoch=1)
    drive(storage.uri)
    assert visible(storage) == SEALED
    assert attempts(storage) == []
    assert not storage.exists(late.attempt_file)


def test_receipts_that_contradict_are_refused(storage: Storage) -> None:
    plan = start_job(storage)
    receipt = publish(storage, plan, 0)
    commit_shard(storage, receipt)
    with pytest.raises(CorruptStateError, match="belongs to plan"):
        read_receipts(storage, plan_digest="another")
    with pytest.raises(CorruptStateError, match="belongs to plan"):
        commit_shard(storage, replace(receipt, plan_digest="another", attempt_file="x"))
    storage.write_bytes(layout.receipt_path(1, 0), encode(receipt))
    with pytest.raises(CorruptStateError, match="contradicts its name"):
        read_receipts(storage)
    storage.write_bytes(layout.receipt_path(1, 0), encode(receipt)[:-20])
    with pytest.raises(CorruptStateError, match="cut short"):
        read_receipts(storage)
    storage.delete(layout.receipt_path(1, 0))
    storage.write_bytes(f"{layout.RECEIPTS}/copy of 00000.json", encode(receipt))
    with pytest.raises(CorruptStateError, match="unknown file"):
        read_receipts(storage)


def test_ten_thousand_receipts_are_read(tmp_path: Path) -> None:
    plan = plan_of()
    folder = tmp_path / layout.RECEIPTS
    folder.mkdir(parents=True)
    template = encode(receipt_of(plan, 0, "attempt-X", b"")).replace(b'"shard": 0', b'"shard": X')
    for shard in range(10_000):
        (tmp_path / layout.receipt_path(shard, 0)).write_bytes(template.replace(b"X", b"%d" % shard))
    receipts = read_receipts(open_storage(str(tmp_path)))
    assert list(receipts) == list(range(10_000))
    assert receipts[9_999].attempt_file == "attempt-9999"


def test_a_sealed_job_says_what_it_holds(storage: Storage) -> None:
    plan = start_job(storage)
    assert read_success(storage) is None
    receipts = finish(storage, plan, row_errors=1, error_counts={"null text": 1}, tokens=50)
    record = seal_job(storage, plan, receipts, max_row_error_rate=0.1)
    assert visible(storage) == SEALED
    assert read_success(storage) == record
    assert (record.shards, record.rows, record.row_errors, record.tokens) == (3, 30, 3, 150)
    assert record.error_counts == {"null text": 3}
    assert record.size_bytes == sum(len(content(shard)) for shard in range(3))
    assert json.loads(storage.read_bytes("_SUCCESS"))["plan_digest"] == plan.digest


def test_nothing_is_sealed_while_a_shard_has_no_receipt(storage: Storage) -> None:
    plan = start_job(storage)
    receipts = finish(storage, plan)
    del receipts[1]
    with pytest.raises(IncompleteError, match=r"1 of 3 shards.*`1`"):
        seal_job(storage, plan, receipts, max_row_error_rate=1.0)
    assert not storage.exists(layout.SUCCESS)


def test_nothing_is_sealed_with_too_many_bad_rows(storage: Storage) -> None:
    plan = start_job(storage)
    receipts = finish(storage, plan, row_errors=1)
    with pytest.raises(RowErrorLimitError, match=r"than errors.max_row_error_rate 0\.09 allows: `3 of 30`"):
        seal_job(storage, plan, receipts, max_row_error_rate=0.09)
    assert not storage.exists(layout.SUCCESS)
    seal_job(storage, plan, receipts, max_row_error_rate=0.1)


def test_nothing_is_sealed_unless_every_part_is_there_and_no_other(storage: Storage) -> None:
    plan = start_job(storage)
    receipts = finish(storage, plan)
    with pytest.raises(CorruptStateError, match="has 9 rows, its shard 10"):
        seal_job(storage, plan, {**receipts, 1: replace(receipts[1], rows=9)}, max_row_error_rate=1.0)
    with pytest.raises(CorruptStateError, match="names a part"):
        seal_job(storage, plan, {**receipts, 7: replace(receipts[1], shard=7)}, max_row_error_rate=1.0)
    storage.write_bytes("part-00007.parquet", b"")
    with pytest.raises(CorruptStateError, match=r"did not write.*part-00007"):
        seal_job(storage, plan, receipts, max_row_error_rate=1.0)
    storage.delete("part-00007.parquet")
    storage.write_bytes("part-00001.parquet", b"cut")
    with pytest.raises(CorruptStateError, match="has 3 bytes"):
        seal_job(storage, plan, receipts, max_row_error_rate=1.0)
    storage.delete("part-00001.parquet")
    with pytest.raises(CorruptStateError, match="is missing"):
        seal_job(storage, plan, receipts, max_row_error_rate=1.0)
    assert not storage.exists(layout.SUCCESS)


def test_a_job_of_no_rows_is_sealed(storage: Storage) -> None:
    plan = write_plan(storage, plan_of(()))
    assert seal_job(storage, plan, finish(storage, plan), max_row_error_rate=0.0).rows == 0
    assert visible(storage) == ["_SUCCESS", "part-00000.parquet"]


def test_a_receipt_whose_answer_is_lost_counts_once(faulty_s3: FaultyS3) -> None:
    storage = RemoteStorage(parse_uri(f"{faulty_s3.uri}/out"), RetryPolicy(initial_s=0.005, longest_s=0.02))
    plan = start_job(storage)
    ours, theirs = publish(storage, plan, 0, nonce="ours"), publish(storage, plan, 0, nonce="theirs")
    faulty_s3.proxy.decide = first_faults("lose", 1, lambda request: "receipts" in request.path)
    assert commit_shard(storage, ours).won
    assert faulty_s3.proxy.faults == 1
    faulty_s3.proxy.decide = first_faults("lose", 1, lambda request: "receipts" in request.path)
    assert commit_shard(storage, theirs) == CommitOutcome(False, ours)


def test_a_job_completes_through_a_storm(faulty_s3: FaultyS3) -> None:
    storage = RemoteStorage(parse_uri(f"{faulty_s3.uri}/out"), RetryPolicy(initial_s=0.005, longest_s=0.02))
    plan = start_job(storage)
    faulty_s3.proxy.decide = random_faults(3, 1 / 3, ("503", "500", "slow", "drop", "lose", "cut"))
    record = seal_job(storage, plan, finish(storage, plan), max_row_error_rate=0.0)
    faulty_s3.proxy.decide = lambda request: None
    assert record.rows == 30
    assert visible(storage) == SEALED
    assert attempts(storage) == []
    kinds = Counter(fault for _, fault in faulty_s3.proxy.requests)
    assert kinds.total() - kinds[None] > 3


def test_counts_add_up() -> None:
    assert add_counts([{"b": 1}, {}, {"a": 2, "b": 3}]) == {"a": 2, "b": 4}
