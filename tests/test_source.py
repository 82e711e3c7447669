"""Sources: footers, odd and broken files, agreement on one schema, and thousands of files."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.parquet.encryption as pe
import pytest
from s3_server import FaultyS3, random_faults

from sharding.errors import AuthenticationError, NotFoundError, SchemaMismatchError, SourceError
from sharding.source import RowGroup, SourceFile, list_sources
from sharding.storage import open_storage

TABLE = pa.table({"id": [1, 2, 3], "doc": ["a", None, "c"]})


def write(path: Path, table: pa.Table = TABLE, row_group_size: int | None = None) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path, row_group_size=row_group_size)
    return path


def without_row_group(path: Path) -> Path:
    with pq.ParquetWriter(path, TABLE.schema):
        pass
    return path


def test_a_file_is_described_by_its_footer(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", pa.table({"id": range(25)}), row_group_size=10)
    status = path.stat()
    metadata = pq.read_metadata(path)
    groups = tuple(RowGroup(metadata.row_group(i).num_rows, metadata.row_group(i).total_byte_size) for i in range(3))
    listing = list_sources([str(tmp_path)])
    assert listing.files == (
        SourceFile(str(path), status.st_size, 25, f"{status.st_size}-{status.st_mtime_ns}", groups),
    )
    assert [group.rows for group in groups] == [10, 10, 5]
    assert listing.schema == pa.schema([("id", pa.int64())])


@pytest.mark.parametrize("workers", [1, 16])
def test_the_order_is_that_of_the_names_however_many_read(tmp_path: Path, workers: int) -> None:
    for number in range(200):
        write(tmp_path / f"{number:03d}.parquet", pa.table({"id": pa.array(range(number % 7), pa.int64())}))
    files = list_sources([str(tmp_path)], workers=workers).files
    assert [Path(file.path).stem for file in files] == [f"{number:03d}" for number in range(200)]
    assert [file.rows for file in files] == [number % 7 for number in range(200)]


def test_files_without_rows_are_fine(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", TABLE.slice(0, 0))
    without_row_group(tmp_path / "b.parquet")
    listing = list_sources([str(tmp_path)])
    assert [file.rows for file in listing.files] == [0, 0]
    assert listing.files[1].row_groups == ()
    assert listing.schema.equals(TABLE.schema)


def test_a_file_of_zero_rows_must_agree_all_the_same(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet")
    write(tmp_path / "b.parquet", pa.table({"id": pa.array([], pa.int32()), "doc": pa.array([], pa.string())}))
    with pytest.raises(SchemaMismatchError, match="int32"):
        list_sources([str(tmp_path)])


def cut_end(data: bytes) -> bytes:
    return data[:-100]


def cut_middle(data: bytes) -> bytes:
    return data[: len(data) // 2]


def bad_length(data: bytes) -> bytes:
    return data[:-8] + b"\xff\xff\xff\x7f" + data[-4:]


def bad_footer(data: bytes) -> bytes:
    length = int.from_bytes(data[-8:-4], "little")
    return data[: -8 - length] + b"\x5a" * length + data[-8:]


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda data: b"", "0 bytes"),
        (lambda data: b"PAR1", "cut short|cannot be read"),
        (lambda data: b"id,doc\n1,a\n" * 10, "not Parquet"),
        (cut_end, "not Parquet"),
        (cut_middle, "not Parquet"),
        (bad_length, "cut short|cannot be read"),
        (bad_footer, "cannot be read|cut short"),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, damage: object, reason: str) -> None:
    write(tmp_path / "a.parquet")
    broken = write(tmp_path / "b b.parquet")
    assert callable(damage)
    broken.write_bytes(damage(broken.read_bytes()))
    write(tmp_path / "c.parquet")
    with pytest.raises(SourceError, match=reason) as caught:
        list_sources([str(tmp_path)])
    assert f"`{broken}`" in str(caught.value)
    assert "\n" not in str(caught.value)


class _Keys(pe.KmsClient):  # type: ignore[misc]
    def wrap_key(self, key_bytes: bytes, master_key_identifier: str) -> bytes:
        return key_bytes

    def unwrap_key(self, wrapped_key: bytes, master_key_identifier: str) -> bytes:
        return wrapped_key


@pytest.mark.parametrize("plaintext_footer", [False, True])
def test_an_encrypted_file_is_named(tmp_path: Path, plaintext_footer: bool) -> None:
    factory = pe.CryptoFactory(lambda configuration: _Keys())
    configuration = pe.EncryptionConfiguration(
        footer_key="footer", column_keys={"key": ["id", "doc"]}, plaintext_footer=plaintext_footer
    )
    properties = factory.file_encryption_properties(pe.KmsConnectionConfig(), configuration)
    pq.write_table(TABLE, tmp_path / "a.parquet", encryption_properties=properties)
    with pytest.raises(SourceError, match=r"is encrypted.*a\.parquet"):
        list_sources([str(tmp_path)])


def test_the_first_broken_file_is_the_one_that_is_named(tmp_path: Path) -> None:
    for number in range(50):
        path = write(tmp_path / f"{number:02d}.parquet")
        if number in (20, 35):
            path.write_bytes(b"broken")
    for _ in range(3):
        with pytest.raises(SourceError, match=r"20\.parquet"):
            list_sources([str(tmp_path)])


def test_a_missing_path_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="nowhere"):
        list_sources([str(tmp_path / "nowhere")])


def test_a_name_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet").rename(tmp_path / os.fsdecode(b"\xff.parquet"))
    with pytest.raises(SourceError, match="UTF-8"):
        list_sources([str(tmp_path)])


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_permission_is_reported(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet").chmod(0)
    with pytest.raises(AuthenticationError):
        list_sources([str(tmp_path)])


def test_schemas_may_differ_in_order_nullability_and_metadata(tmp_path: Path) -> None:
    first = pa.schema(
        [pa.field("id", pa.int64(), nullable=False, metadata={"unit": "none"}), pa.field("doc", pa.string())],
        metadata={"origin": "first"},
    )
    second = pa.schema([pa.field("doc", pa.string()), pa.field("id", pa.int64())], metadata={"origin": "second"})
    write(tmp_path / "a.parquet", pa.table([[1], ["x"]], schema=first))
    write(tmp_path / "b.parquet", pa.table([["y"], [2]], schema=second))
    schema = list_sources([str(tmp_path)]).schema
    assert schema.names == ["id", "doc"]
    assert schema.field("id").nullable  # one of the files may hold nulls
    assert schema.field("id").metadata == {b"unit": b"none"}
    assert schema.metadata == {b"origin": b"first"}


def test_columns_that_differ_are_named_with_file_and_types(tmp_path: Path) -> None:
    first = write(tmp_path / "a.parquet")
    second = write(tmp_path / "b.parquet", pa.table({"id": pa.array([1], pa.int32()), "doc": ["a"]}))
    with pytest.raises(SchemaMismatchError) as caught:
        list_sources([str(tmp_path)])
    for part in (str(first), str(second), "`id`", "`int64`", "`int32`"):
        assert part in str(caught.value)


@pytest.mark.parametrize("missing_in", ["first", "second"])
def test_a_column_missing_in_some_file_is_named(tmp_path: Path, missing_in: str) -> None:
    names = ("a.parquet", "b.parquet") if missing_in == "first" else ("b.parquet", "a.parquet")
    write(tmp_path / names[0], TABLE.drop_columns(["doc"]))
    write(tmp_path / names[1])
    with pytest.raises(SchemaMismatchError, match="missing in") as caught:
        list_sources([str(tmp_path)])
    assert str(caught.value).endswith("`doc`")
    assert f"missing in `{tmp_path / names[0]}`" in str(caught.value)


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", pa.table([[1], [2]], names=["id", "id"]))
    with pytest.raises(SourceError, match=r"twice.*`id`"):
        list_sources([str(tmp_path)])


def test_sources_on_s3_are_read_by_ranges_through_a_storm(faulty_s3: FaultyS3, tmp_path: Path) -> None:
    storage = open_storage(f"{faulty_s3.uri}/in put")
    table = pa.table({"id": range(60_000), "wide": [os.urandom(20) for _ in range(60_000)]})
    for name in ("a b.parquet", "ü#%.parquet", "k=v/c.parquet"):
        local = write(tmp_path / "local", table, row_group_size=10_000)
        storage.publish_file(local, name)
    faulty_s3.proxy.requests.clear()
    faulty_s3.proxy.decide = random_faults(7, 1 / 3, ("503", "500", "slow", "drop", "cut"))
    listing = list_sources([f"{faulty_s3.uri}/in put"])
    assert [file.path.rpartition("/in put/")[2] for file in listing.files] == [
        "a b.parquet",
        "k=v/c.parquet",
        "ü#%.parquet",
    ]
    assert [file.rows for file in listing.files] == [60_000] * 3
    assert all(len(file.row_groups) == 6 and file.version for file in listing.files)
    assert listing.schema.equals(table.schema)
    assert faulty_s3.proxy.faults > 0
    assert len(faulty_s3.proxy.requests) < 20 + 2 * faulty_s3.proxy.faults  # one range for each footer


def test_a_broken_file_on_s3_is_named(faulty_s3: FaultyS3) -> None:
    open_storage(faulty_s3.uri).write_bytes("x.parquet", b"garbage" * 100)
    with pytest.raises(SourceError, match=r"not Parquet.*`s3://.*/x.parquet`"):
        list_sources([f"{faulty_s3.uri}/x.parquet"])


def test_twenty_four_thousand_files_are_planned_in_little_memory(tmp_path: Path) -> None:
    write(tmp_path / "00000.parquet", pa.table({"id": [1, 2], "doc": ["x", "y"], "tags": [["a"], []]}))
    for number in range(1, 24_000):
        os.link(tmp_path / "00000.parquet", tmp_path / f"{number:05d}.parquet")
    code = (
        "import resource, sys\n"
        "from sharding.source import list_sources; from sharding.plan import plan_shards\n"
        "list_sources([sys.argv[1] + '/0000*.parquet'])\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "files = list_sources([sys.argv[1]]).files\n"
        "shards = plan_shards(files, target_rows=1000, target_bytes=1 << 27)\n"
        "print(len(files), sum(s.rows for s in shards), len(shards), len(shards[0].pieces))\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )
    run = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    counts, grown_kb = run.stdout.splitlines()
    assert counts == "24000 48000 48 500"
    assert int(grown_kb) < 100 * 1024
