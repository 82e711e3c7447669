"""Records on disk: versioned, strict, the same bytes for the same record; and the names of their files."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from sharding_jobs import plan_of, receipt_of

from sharding import layout
from sharding.errors import CorruptStateError
from sharding.layout import AttemptName
from sharding.manifest import FORMAT, LeaseRecord, ShardFailure, ShardReceipt, SuccessRecord, decode, encode, now

RECEIPT = receipt_of(
    plan_of(), 1, "_candelabra/attempts/x.parquet", b"rows", error_counts={"null": 2}, poison_rows=(3,)
)
RECORDS = (
    RECEIPT,
    ShardFailure(shard=3, attempts=3, error="out of memory: `137`", hint=None, at=now()),
    LeaseRecord(
        epoch=1,
        owner="job ü",
        nonce="ab",
        host="h",
        pid=7,
        process_start="1",
        boot_id="b",
        pid_namespace="pid:[1]",
        beat=0,
        at=now(),
    ),
    SuccessRecord(
        job="x",
        plan_digest="d",
        shards=1,
        rows=10,
        row_errors=0,
        error_counts={},
        tokens=1,
        size_bytes=2,
        sealed_at=now(),
    ),
)


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_a_record_is_read_back_equal_from_readable_text(record: object) -> None:
    data = encode(record)
    assert decode(type(record), data, "x") == record
    assert data.endswith(b"\n")
    assert data == encode(decode(type(record), data, "x"))
    assert json.loads(data)["format"] == FORMAT


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"surprise": 1}, "surprise"),
        ({"rows": "10"}, "rows"),
        ({"rows": 10.0}, "rows"),
        ({"rows": None}, "rows"),
        ({"rows": True}, "rows"),
        ({"error_counts": {"null": "2"}}, "error_counts"),
        ({"poison_rows": [1.5]}, "poison_rows"),
        ({"format": FORMAT + 1}, "format `2`"),
        ({"format": "1"}, "format `1`"),
        ({"format": None}, "format `None`"),
    ],
)
def test_what_is_not_known_is_refused(changes: dict[str, object], message: str) -> None:
    data = json.dumps({**json.loads(encode(RECEIPT)), **changes}).encode()
    with pytest.raises(CorruptStateError, match=message) as caught:
        decode(ShardReceipt, data, "receipts/00001.json")
    assert str(caught.value).endswith("`receipts/00001.json`")


def test_a_missing_key_is_named() -> None:
    content = json.loads(encode(RECEIPT))
    del content["sha256"]
    with pytest.raises(CorruptStateError, match="`sha256`"):
        decode(ShardReceipt, json.dumps(content).encode(), "x")


@pytest.mark.parametrize("data", [b"", b"{", encode(RECEIPT)[:-10], b"\xff\xfe", b"[]", b"null"])
def test_what_is_not_a_record_is_refused(data: bytes) -> None:
    with pytest.raises(CorruptStateError):
        decode(ShardReceipt, data, "x")


def test_a_newer_format_asks_for_an_upgrade() -> None:
    data = json.dumps({**json.loads(encode(RECEIPT)), "format": 9, "more": 1}).encode()
    with pytest.raises(CorruptStateError) as caught:
        decode(ShardReceipt, data, "x")
    assert "upgrade" in str(caught.value.hint)


def test_records_that_differ_give_different_bytes() -> None:
    assert encode(RECEIPT) != encode(replace(RECEIPT, attempt=2))
    assert encode(RECEIPT) == encode(replace(RECEIPT, error_counts={"null": 2}))


@pytest.mark.parametrize(
    ("shard", "generation", "path"),
    [
        (0, 0, "_candelabra/receipts/00000.json"),
        (12, 1, "_candelabra/receipts/00012.g1.json"),
        (123_456, 12, "_candelabra/receipts/123456.g12.json"),
    ],
)
def test_names_of_receipts_lead_back_to_the_shard(shard: int, generation: int, path: str) -> None:
    assert layout.receipt_path(shard, generation) == path
    assert layout.parse_receipt_path(path) == (shard, generation)


def test_names_of_attempts_lead_back_to_the_attempt() -> None:
    name = AttemptName(shard=7, generation=1, epoch=2, attempt=3, nonce="0af")
    assert layout.attempt_path(name) == "_candelabra/attempts/part-00007.g1-e2-a3-0af.parquet"
    assert layout.parse_attempt_path(layout.attempt_path(name)) == name


@pytest.mark.parametrize(
    "path",
    [
        "x",
        "00000.json.tmp",
        "00000.g0.json",
        "0.json",
        "part-00000.parquet",
        "part-00000.g0-e1-a1-X.parquet",
        "-1.json",
    ],
)
def test_other_names_are_not_ours(path: str) -> None:
    assert layout.parse_receipt_path(path) is None
    assert layout.parse_attempt_path(path) is None
