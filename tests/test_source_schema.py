"""Agreement of types, nested ones too."""

from __future__ import annotations

import pyarrow as pa
import pytest

from sharding.errors import SchemaMismatchError
from sharding.schema import SchemaAgreement, merge_type

STRICT = pa.field("x", pa.int32(), nullable=False)
LOOSE = pa.field("x", pa.int32())


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (pa.int32(), pa.int64()),
        (pa.int32(), pa.uint32()),
        (pa.float32(), pa.float64()),
        (pa.string(), pa.large_string()),
        (pa.string(), pa.binary()),
        (pa.decimal128(10, 2), pa.decimal128(12, 2)),
        (pa.timestamp("us"), pa.timestamp("ns")),
        (pa.timestamp("us"), pa.timestamp("us", "UTC")),
        (pa.timestamp("us", "Europe/Paris"), pa.timestamp("us", "UTC")),
        (pa.null(), pa.string()),
        (pa.list_(pa.int32()), pa.list_(pa.int64())),
        (pa.list_(pa.int32()), pa.large_list(pa.int32())),
        (pa.list_(pa.float32(), 3), pa.list_(pa.float32(), 4)),
        (pa.list_(pa.float32(), 3), pa.list_(pa.float32())),
        (pa.struct([LOOSE]), pa.struct([pa.field("y", pa.int32())])),
        (pa.struct([LOOSE]), pa.struct([LOOSE, pa.field("y", pa.int32())])),
        (pa.struct([("x", pa.int32())]), pa.struct([("x", pa.int64())])),
        (pa.map_(pa.string(), pa.int32()), pa.map_(pa.string(), pa.int64())),
        (pa.dictionary(pa.int8(), pa.string()), pa.dictionary(pa.int32(), pa.string())),
        (pa.dictionary(pa.int8(), pa.string()), pa.string()),
        (
            pa.list_(pa.struct([("a", pa.list_(pa.int32()))])),
            pa.list_(pa.struct([("a", pa.list_(pa.int64()))])),
        ),
    ],
    ids=str,
)
def test_types_that_differ_do_not_agree(first: pa.DataType, second: pa.DataType) -> None:
    assert merge_type(first, second) is None
    assert merge_type(second, first) is None
    agreement = SchemaAgreement()
    agreement.add("first", pa.schema([("c", first)]))
    with pytest.raises(SchemaMismatchError) as caught:
        agreement.add("second", pa.schema([("c", second)]))
    for part in ("`c`", "`first`", "`second`", f"`{first}`", f"`{second}`"):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("strict", "loose"),
    [
        (pa.struct([STRICT]), pa.struct([LOOSE])),
        (pa.list_(STRICT), pa.list_(LOOSE)),
        (pa.large_list(STRICT), pa.large_list(LOOSE)),
        (pa.list_(STRICT, 3), pa.list_(LOOSE, 3)),
        (pa.list_view(STRICT), pa.list_view(LOOSE)),
        (pa.large_list_view(STRICT), pa.large_list_view(LOOSE)),
        (pa.map_(pa.string(), STRICT), pa.map_(pa.string(), LOOSE)),
        (pa.struct([("a", pa.list_(pa.struct([STRICT])))]), pa.struct([("a", pa.list_(pa.struct([LOOSE])))])),
    ],
    ids=str,
)
def test_nested_nullability_becomes_that_of_both(strict: pa.DataType, loose: pa.DataType) -> None:
    assert not strict.equals(loose)
    assert merge_type(strict, loose) == loose
    assert merge_type(loose, strict) == loose
    assert merge_type(strict, strict) == strict


def test_the_name_of_a_list_child_counts_for_nothing() -> None:
    first = pa.list_(pa.field("element", pa.struct([STRICT])))
    second = pa.list_(pa.field("item", pa.struct([LOOSE])))
    merged = merge_type(first, second)
    assert merged == pa.list_(pa.field("element", pa.struct([LOOSE])))


def test_three_files_agree_on_the_weakest() -> None:
    agreement = SchemaAgreement()
    agreement.add("a", pa.schema([STRICT]))
    agreement.add("b", pa.schema([STRICT]))
    assert not agreement.schema.field("x").nullable
    agreement.add("c", pa.schema([LOOSE]))
    agreement.add("d", pa.schema([STRICT]))
    assert agreement.schema.field("x").nullable
