"""plan.json: written once, read back equal, refused when it no longer fits."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest
from sharding_jobs import paths, plan_of, source

from sharding import layout
from sharding.errors import CorruptStateError, DriftError, InputError
from sharding.plan import make_plan, plan_shards
from sharding.plan_file import check_drift, read_plan, write_plan
from sharding.storage import Storage, open_storage

NESTED = pa.schema(
    [
        pa.field("at", pa.timestamp("ns", "Europe/Paris"), nullable=False, metadata={"unit": "ns"}),
        pa.field("price", pa.decimal128(20, 4)),
        pa.field("tags", pa.list_(pa.struct([("k", pa.string()), ("v", pa.dictionary(pa.int8(), pa.string()))]))),
        pa.field("embedding", pa.list_(pa.field("element", pa.float32()), 384)),
        pa.field("mäp", pa.map_(pa.string(), pa.float64())),
    ],
    metadata={"origin": "test"},
)


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return open_storage(str(tmp_path / "out"))


def change(storage: Storage, **changes: object) -> None:
    content = json.loads(storage.read_bytes(layout.PLAN))
    storage.write_bytes(layout.PLAN, json.dumps({**content, **changes}).encode())


def test_a_plan_is_read_back_equal(storage: Storage) -> None:
    files = (source("/data/ü #%=.parquet", (5, 0, 25)), source("s3://bucket/b.parquet", ()), source("/c", (3,)))
    plan = make_plan(
        job="näme",
        identity={"task.prompt": 'a "quoted"\nprompt', "model.revision": "abc"},
        input_schema=NESTED,
        output_schema=NESTED.append(pa.field("error", pa.string())),
        files=files,
        shards=plan_shards(files, target_rows=10, target_bytes=1 << 20),
        notes=["one", "two"],
    )
    assert read_plan(storage) is None
    assert write_plan(storage, plan) is plan
    again = read_plan(storage)
    assert again == plan
    assert again is not None
    assert again.input_schema.equals(NESTED, check_metadata=True)
    assert again.rows == 33


def test_a_person_can_read_it(storage: Storage) -> None:
    write_plan(storage, plan_of())
    text = storage.read_bytes(layout.PLAN).decode()
    content = json.loads(text)
    assert content["input_columns"] == {"id": "int64", "doc": "string"}
    assert content["identity"]["model.revision"] == "abc"
    assert '\n  ["/data/a.parquet",30,3000,"v1"]\n' in text
    assert "\n  [10,[[0,10,20]]],\n" in text


def test_the_first_plan_stays(storage: Storage) -> None:
    first = write_plan(storage, plan_of())
    assert write_plan(storage, plan_of(target_rows=5)) == first
    assert read_plan(storage) == first


def test_of_two_processes_that_plan_at_once_both_get_the_same_plan(storage: Storage) -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[3])\n"
        "from sharding.storage import open_storage; from sharding.plan_file import write_plan\n"
        "from sharding_jobs import plan_of\n"
        "plan = plan_of(target_rows=int(sys.argv[2])); s = open_storage(sys.argv[1])\n"
        "print('ready', flush=True); sys.stdin.readline(); print(write_plan(s, plan).digest)\n"
    )
    folder = str(Path(__file__).parent)
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code, storage.uri, rows, folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rows in ("3", "7")
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    digests = {process.communicate(timeout=60)[0] for process in processes}
    on_disk = read_plan(storage)
    assert on_disk is not None
    assert digests == {f"{on_disk.digest}\n"}


@pytest.mark.parametrize("name", ["part-00000.parquet", "old.parquet"])
def test_a_folder_that_holds_other_data_is_refused(storage: Storage, name: str) -> None:
    storage.write_bytes(name, b"")
    with pytest.raises(InputError, match="holds Parquet files"):
        write_plan(storage, plan_of())
    assert paths(storage) == [name]


def test_other_files_and_hidden_ones_do_not_matter(storage: Storage) -> None:
    for name in ("README.md", "_old.parquet", ".x.parquet", "_folder/x.parquet"):
        storage.write_bytes(name, b"")
    write_plan(storage, plan_of())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"job": 7}, "job"),
        ({"surprise": 1}, "surprise"),
        ({"shards": [[10, [[0, 0]]]]}, "shards"),
        ({"format": 2}, "format `2`"),
        ({"input_schema": "AAAA"}, "schema"),
        ({"input_schema": "no base64!"}, "schema"),
        ({"identity": {"model.revision": "abd", "task.prompt": ""}}, "digest"),
        ({"shards": [[30, [[0, 0, 30]]]]}, "digest"),
    ],
)
def test_a_plan_that_was_tampered_with_is_refused(storage: Storage, changes: dict[str, object], message: str) -> None:
    write_plan(storage, plan_of())
    change(storage, **changes)
    with pytest.raises(CorruptStateError, match=message) as caught:
        read_plan(storage)
    assert "plan.json`" in str(caught.value)


@pytest.mark.parametrize("keep", [0, 1, 300, -10])
def test_a_plan_cut_short_is_refused(storage: Storage, keep: int) -> None:
    write_plan(storage, plan_of())
    storage.write_bytes(layout.PLAN, storage.read_bytes(layout.PLAN)[:keep])
    with pytest.raises(CorruptStateError, match="cut short"):
        read_plan(storage)


def test_a_newer_format_asks_for_an_upgrade(storage: Storage) -> None:
    write_plan(storage, plan_of())
    change(storage, format=99)
    with pytest.raises(CorruptStateError) as caught:
        read_plan(storage)
    assert "upgrade" in str(caught.value.hint)


def test_an_unchanged_plan_has_not_drifted() -> None:
    check_drift(plan_of(), plan_of())
    check_drift(plan_of(), plan_of(target_rows=5))  # the targets count only if the identity names them


@pytest.mark.parametrize(
    ("wanted", "parts"),
    [
        (
            plan_of(identity={"model.revision": "def", "task.prompt": ""}),
            ["1 difference:", "model.revision: plan `abc`, now `def`"],
        ),
        (
            plan_of(identity={"model.revision": "abc", "task.pooling": "cls"}),
            ["2 differences:", "task.pooling: plan absent, now `cls`", "task.prompt: plan ``, now absent"],
        ),
        (plan_of((source(version="v2"),)), ["file `/data/a.parquet`: plan version `v1`", "now version `v2`"]),
        (plan_of((source(groups=(10, 10)),)), ["30 rows, 3,000 bytes", "20 rows, 2,000 bytes"]),
        (
            plan_of((source("/data/b.parquet"),)),
            ["file `/data/a.parquet`: plan version `v1`, now absent", "file `/data/b.parquet`: plan absent, now"],
        ),
    ],
)
def test_drift_shows_each_difference_with_both_values(wanted: object, parts: list[str]) -> None:
    with pytest.raises(DriftError) as caught:
        check_drift(plan_of(), wanted)  # type: ignore[arg-type]
    for part in parts:
        assert part in str(caught.value)
    assert "another output" in str(caught.value.hint)


def test_another_order_of_the_files_is_drift() -> None:
    files = (source("/a"), source("/b"), source("/c"))
    with pytest.raises(DriftError, match="at 1: plan `/b`, now `/c`"):
        check_drift(plan_of(files), plan_of((files[0], files[2], files[1])))


def test_thousands_of_differences_are_counted_not_listed() -> None:
    old = tuple(source(f"/{number}") for number in range(5000))
    new = tuple(source(f"/{number}", version="v2") for number in range(5000))
    with pytest.raises(DriftError, match="5,000 differences:") as caught:
        check_drift(plan_of(old, 10**6), plan_of(new, 10**6))
    assert "and 4980 more" in str(caught.value)
    assert len(str(caught.value)) < 5000


def test_a_plan_of_many_files_is_written_and_read(storage: Storage) -> None:
    plan = plan_of(tuple(source(f"/data/{number:06d}.parquet", (7,)) for number in range(24_000)), 100)
    write_plan(storage, plan)
    assert read_plan(storage) == plan
