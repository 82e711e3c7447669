"""Beside plan and commit: the names inside one output directory. Pure string work; reads and writes nothing.

    part-00000.parquet                                         final parts
    _SUCCESS                                                   the job is sealed
    _candelabra/plan.json
    _candelabra/receipts/00000.json, 00000.g1.json             generation 0, and after retry-failed
    _candelabra/attempts/part-00000.g0-e1-a1-<nonce>.parquet   published, not promoted: no reader looks here
    _candelabra/failures/00003.json                            a shard that ran out of attempts
    _candelabra/lease/000001.json                              one per epoch

The leading underscore makes Spark, DuckDB, Arrow and Hive skip the whole state directory.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

STATE = "_candelabra"
SUCCESS = "_SUCCESS"
PLAN = f"{STATE}/plan.json"
REPORT = f"{STATE}/report.json"
PROGRESS = f"{STATE}/progress.json"
RECEIPTS = f"{STATE}/receipts"
ATTEMPTS = f"{STATE}/attempts"
FAILURES = f"{STATE}/failures"
LEASES = f"{STATE}/lease"

_DIGITS = 5
_RECEIPT = re.compile(r"^(\d{5,})(?:\.g([1-9]\d*))?\.json$")
_ATTEMPT = re.compile(r"^part-(\d{5,})\.g(\d+)-e(\d+)-a(\d+)-([0-9a-z]+)\.parquet$")
_NUMBERED = re.compile(r"^(\d{5,})\.json$")


@dataclass(frozen=True, slots=True)
class AttemptName:
    """What the name of an attempt file says."""

    shard: int
    generation: int
    epoch: int
    attempt: int
    nonce: str


def shard_digits(shard_count: int) -> int:
    """Digits in the names of parts, so that their lexical order is the input order for any number of shards."""
    return max(_DIGITS, len(str(max(shard_count - 1, 0))))


def part_name(shard: int, digits: int = _DIGITS) -> str:
    """Final name of a shard's part, relative to the output; `ShardPlan.part_name` knows the digits."""
    return f"part-{shard:0{digits}d}.parquet"


def receipt_path(shard: int, generation: int) -> str:
    """Where the receipt of a shard lies; generation 0 is the first run, each `retry-failed` adds one."""
    suffix = f".g{generation}" if generation else ""
    return f"{RECEIPTS}/{shard:0{_DIGITS}d}{suffix}.json"


def attempt_path(name: AttemptName) -> str:
    """Where one published attempt lies until it is promoted or removed."""
    parts = f"g{name.generation}-e{name.epoch}-a{name.attempt}-{name.nonce}"
    return f"{ATTEMPTS}/part-{name.shard:0{_DIGITS}d}.{parts}.parquet"


def failure_path(shard: int) -> str:
    return f"{FAILURES}/{shard:0{_DIGITS}d}.json"


def lease_path(epoch: int) -> str:
    return f"{LEASES}/{epoch:06d}.json"


def parse_receipt_path(path: str) -> tuple[int, int] | None:
    """(shard, generation) of a path under `receipts/`, or None for a name of another kind."""
    match = _RECEIPT.match(path.rpartition("/")[2])
    return (int(match[1]), int(match[2] or 0)) if match else None


def parse_attempt_path(path: str) -> AttemptName | None:
    """What a path under `attempts/` says, or None for a name of another kind."""
    match = _ATTEMPT.match(path.rpartition("/")[2])
    if match is None:
        return None
    return AttemptName(int(match[1]), int(match[2]), int(match[3]), int(match[4]), match[5])


def parse_numbered_path(path: str) -> int | None:
    """The number in the name of a failure or lease file, or None for a name of another kind."""
    match = _NUMBERED.match(path.rpartition("/")[2])
    return int(match[1]) if match else None


def is_visible_parquet(path: str) -> bool:
    """True when a reader of the output folder would take a file of that path, relative to the output, for data."""
    return path.endswith(".parquet") and not any(name.startswith(("_", ".")) for name in path.split("/"))
