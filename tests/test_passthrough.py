"""Untouched columns come out as they went in: types, nulls, values, metadata; odd files are read all the same."""

from __future__ import annotations

import datetime
import decimal
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from job_files import JobFiles

from jobs import run_job

_ZONE = datetime.timezone(datetime.timedelta(hours=2))


def every_type() -> pa.Table:
    """Two hundred rows, every third value null, of every type that Parquet can hold."""

    def column(values: list[Any], kind: pa.DataType) -> pa.Array:
        return pa.array([values[i % len(values)] if i % 3 else None for i in range(200)], kind)

    day = datetime.datetime(2024, 2, 29, 12, 30, 15, 123456)
    columns = {
        "zoned": column([day.replace(tzinfo=_ZONE)], pa.timestamp("us", "Europe/Berlin")),
        "nanoseconds": column([1_709_209_815_123_456_789, -1], pa.timestamp("ns")),
        "zoned_nanoseconds": column([1_709_209_815_123_456_789], pa.timestamp("ns", "UTC")),
        "milliseconds": column([day.replace(microsecond=5000)], pa.timestamp("ms")),
        "date": column([day.date()], pa.date32()),
        "time": column([day.time()], pa.time64("us")),
        "duration": column([datetime.timedelta(days=1, microseconds=7)], pa.duration("us")),
        "decimal128": column([decimal.Decimal("-12345678901234567890.123456")], pa.decimal128(38, 6)),
        "decimal256": column([decimal.Decimal("1" * 60 + ".25")], pa.decimal256(76, 2)),
        "small": column([-128, 127], pa.int8()),
        "large": column([2**64 - 1], pa.uint64()),
        "integer": column([2**62], pa.int64()),
        "half": pa.array([1.5, None] * 100, pa.float16()),
        "number": column([float("nan"), float("inf"), -0.0, 5e-324], pa.float64()),
        "flag": column([True, False], pa.bool_()),
        "dictionary": column(["a", "b", "c"], pa.string()).dictionary_encode(),
        "large_string": column(["ü", ""], pa.large_string()),
        "view": column(["view"], pa.string()).cast(pa.string_view()),
        "binary": column([b"\x00\xff", b""], pa.binary()),
        "large_binary": column([b"\x00"], pa.large_binary()),
        "fixed": column([b"abcd"], pa.binary(4)),
        "list": column([[1, None, 3], []], pa.list_(pa.int16())),
        "large_list": column([["x"], []], pa.large_list(pa.string())),
        "vector": column([[1.0, 2.0, float("nan")]], pa.list_(pa.float32(), 3)),
        "struct": column(
            [{"a": 1, "b": {"c": ["x", None]}}],
            pa.struct([("a", pa.int32()), ("b", pa.struct([("c", pa.list_(pa.string()))]))]),
        ),
        "map": column([[("k", 1), ("l", None)]], pa.map_(pa.string(), pa.int64())),
        "structs": column([[{"a": None}, {"a": 2}]], pa.list_(pa.struct([("a", pa.int64())]))),
        "nothing": pa.nulls(200, pa.string()),
        "null": pa.nulls(200, pa.null()),
    }
    fields = [pa.field(name, array.type, metadata={"note": f"about {name}"}) for name, array in columns.items()]
    fields.append(pa.field("doc", pa.string(), nullable=False, metadata={"unit": "text"}))
    arrays = [*columns.values(), pa.array([f"text {i}" for i in range(200)])]
    return pa.Table.from_arrays(arrays, schema=pa.schema(fields, metadata={"owner": "somebody"}))


@pytest.mark.parametrize("row_group_size", [7, 64, 1000])
def test_every_column_type_reads_back_equal_with_nulls_and_metadata(files: JobFiles, row_group_size: int) -> None:
    path = files.write_input(every_type(), row_group_size=row_group_size)
    source = pq.read_table(path)
    assert run_job(files.spec(sharding__target_rows=90)).exit_code == 0
    parts = sorted(files.out().glob("part-*.parquet"))
    out = pa.concat_tables(pq.read_table(part) for part in parts)
    for field in source.schema:
        kept = out.schema.field(field.name)
        assert kept.equals(field), field.name
        assert {**(kept.metadata or {}), b"PARQUET:field_id": b""} == {
            **(field.metadata or {}),
            b"PARQUET:field_id": b"",
        }
        before, after = source[field.name].combine_chunks(), out[field.name].combine_chunks()
        assert before.to_string(window=300) == after.to_string(window=300), field.name
        assert before.null_count == after.null_count
    assert out.schema.metadata[b"owner"] == b"somebody"


@pytest.mark.parametrize("kind", [pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())])
def test_every_string_type_gives_the_vectors_of_plain_strings(files: JobFiles, kind: pa.DataType) -> None:
    texts = pa.array([f"text {i % 11}" for i in range(300)] + [None])
    files.write_input(pa.table({"doc": texts}), "plain.parquet")
    files.write_input(pa.table({"doc": texts.cast(kind)}), "other.parquet")
    results = []
    for name in ("plain", "other"):
        spec = files.spec(input__path=str(files.root / f"{name}.parquet"), output__path=str(files.out(name)))
        assert run_job(spec).exit_code == 0
        results.append(files.rows(name).drop_columns("doc"))
    assert results[0].equals(results[1])


def test_files_of_different_dictionaries_are_one_output(files: JobFiles) -> None:
    for number in range(3):
        tags = pa.array([f"t{number}-{i}" for i in range(40)]).dictionary_encode()
        files.write_input(pa.table({"doc": [f"d {i}" for i in range(40)], "tag": tags}), f"in/{number}.parquet")
    assert run_job(files.spec(input__path=str(files.root / "in"))).exit_code == 0
    out = files.rows()
    assert out["tag"].to_pylist() == [f"t{number}-{i}" for number in range(3) for i in range(40)]
    assert len(list(files.out().glob("*.parquet"))) == 2


def test_dictionaries_that_do_not_fit_one_index_type_together_stay_what_they_were(files: JobFiles) -> None:
    for number in range(4):
        tags = pa.DictionaryArray.from_arrays(pa.array(range(100), pa.int8()), [f"t{number}-{i}" for i in range(100)])
        files.write_input(pa.table({"doc": [f"d {i}" for i in range(100)], "tag": tags}), f"in/{number}.parquet")
    spec = files.spec(input__path=str(files.root / "in"), sharding__target_rows=400)
    assert run_job(spec).exit_code == 0
    (part,) = files.out().glob("*.parquet")
    out = pq.read_table(part)
    assert out["tag"].to_pylist() == [f"t{number}-{i}" for number in range(4) for i in range(100)]
    assert out.schema.field("tag").type == pa.dictionary(pa.int8(), pa.string())


def test_dictionaries_inside_lists_and_structs_pass_through(files: JobFiles) -> None:
    flat = pa.array([f"v{i % 9}" for i in range(600)]).dictionary_encode()
    lists = pa.ListArray.from_arrays(pa.array(range(0, 601, 2), pa.int32()), flat)
    structs = pa.StructArray.from_arrays([flat.slice(0, 300)], ["a"])
    table = pa.table({"doc": [f"d {i}" for i in range(300)], "lists": lists, "structs": structs})
    path = files.write_input(table, row_group_size=50)
    assert run_job(files.spec(sharding__target_rows=300)).exit_code == 0
    source = pq.read_table(path)
    for name in ("lists", "structs"):
        assert files.rows()[name].to_pylist() == source[name].to_pylist()


def test_columns_named_like_the_inside_of_a_vector_pass_through(files: JobFiles) -> None:
    table = pa.table(
        {
            "doc": ["a", "b"],
            "embedding.list.source": ["x", "y"],
            "embedding.list.element": ["x", "y"],
            "v": pa.array([[1.0, 2.0]] * 2, pa.list_(pa.float32(), 2)),
            "v.list.element": ["x", "y"],
        }
    )
    files.write_input(table)
    assert run_job(files.spec()).exit_code == 0
    assert files.rows().select(table.column_names).equals(table.cast(files.rows().select(table.column_names).schema))


def test_files_of_no_rows_among_others_change_nothing(files: JobFiles) -> None:
    table = pa.table({"doc": ["a", "b"]})
    for number, part in enumerate((table.slice(0, 0), table, table.slice(0, 0))):
        files.write_input(part, f"in/{number}.parquet")
    with pq.ParquetWriter(files.root / "in" / "9.parquet", table.schema):
        pass  # a file without any row group
    assert run_job(files.spec(input__path=str(files.root / "in"))).exit_code == 0
    assert files.rows()["doc"].to_pylist() == ["a", "b"]


def test_a_row_group_far_larger_than_a_shard_is_cut_by_rows(files: JobFiles) -> None:
    files.write_input(pa.table({"doc": [f"d {i}" for i in range(5000)]}), row_group_size=5000)
    assert run_job(files.spec(sharding__target_rows=700)).exit_code == 0
    sizes = [pq.read_metadata(part).num_rows for part in sorted(files.out().glob("*.parquet"))]
    assert sum(sizes) == 5000
    assert max(sizes) <= 700
    assert files.rows()["doc"].to_pylist() == [f"d {i}" for i in range(5000)]


@pytest.mark.slow
def test_more_than_two_gibibytes_of_text_in_one_shard_stream_through(files: JobFiles) -> None:
    chunk = pa.array([f"{i} {'x' * (1 << 20)}" for i in range(100)], pa.large_string())
    table = pa.table({"id": list(range(2100)), "doc": pa.chunked_array([chunk] * 21)})
    assert table["doc"].nbytes > 2 << 30
    files.write_input(table, row_group_size=2100, dictionary_pagesize_limit=1 << 30, compression="zstd")
    del table, chunk
    spec = files.spec_file(sharding__target_rows=10_000, sharding__target_bytes=1 << 40, input__columns=["id"])
    done = files.run("submit", str(spec), "--json", timeout_s=300)
    assert done.code == 0, done.stderr
    assert files.rows()["id"].to_pylist() == list(range(2100))
    assert files.rows()["error"].null_count == 2100


def test_embeddings_too_wide_for_one_list_array_are_written_in_bounded_row_groups(files: JobFiles) -> None:
    width, rows = 65_536, 400
    files.write_input(pa.table({"doc": [f"d {i}" for i in range(rows)]}))
    assert run_job(files.spec(model__source=f"fake:{width}", sharding__target_rows=1000)).exit_code == 0
    (part,) = files.out().glob("*.parquet")
    footer = pq.read_metadata(part)
    assert footer.num_rows == rows
    assert footer.num_row_groups >= 2
    biggest = max(footer.row_group(group).num_rows for group in range(footer.num_row_groups))
    assert biggest * width * 4 <= 2 * (64 << 20)
