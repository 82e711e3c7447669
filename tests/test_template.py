"""Text templates: exact text, nulls, and what is refused."""

from __future__ import annotations

import decimal

import pyarrow as pa
import pytest

from sharding.errors import InputError
from workers.prompt.template import is_text_type, parse_template


def texts(template: str, **columns: pa.Array) -> list[str | None]:
    return list(parse_template(template).render(pa.record_batch(columns)).to_pylist())


def test_a_plain_name_is_a_column() -> None:
    assert texts("doc", doc=pa.array(["a", None, ""])) == ["a", None, ""]


def test_braces_in_values_are_left_alone() -> None:
    title, body = pa.array(["{body}", "{{x}}", "}{"]), pa.array(["{title}", "{}", "{0}"])
    assert texts("{title}\n\n{body}", title=title, body=body) == ["{body}\n\n{title}", "{{x}}\n\n{}", "}{\n\n{0}"]


def test_doubled_braces_are_literal() -> None:
    assert texts("{{{a}}} {{b}}", a=pa.array(["x"])) == ["{x} {b}"]


def test_a_column_may_stand_twice_and_have_any_name() -> None:
    batch = pa.record_batch({"a b-ü.c": pa.array(["x"])})
    assert parse_template("{a b-ü.c}/{a b-ü.c}").render(batch).to_pylist() == ["x/x"]


def test_a_null_in_any_named_column_makes_the_text_null_and_is_named() -> None:
    batch = pa.record_batch({"title": pa.array(["t", None, "t"]), "body": pa.array([None, "b", "b"])})
    template = parse_template("{title} {body}")
    assert template.render(batch).to_pylist() == [None, None, "t b"]
    assert "`body`" in template.null_reason(batch, 0)
    assert "`title`" in template.null_reason(batch, 1)


@pytest.mark.parametrize("bad", ["{", "a}", "{a", "{}", "{a}{", "{{}", "{{a}}"])
def test_unmatched_braces_and_templates_without_columns_are_refused(bad: str) -> None:
    with pytest.raises(InputError):
        parse_template(bad)


@pytest.mark.parametrize(
    "kind", [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int8(), pa.string())]
)
def test_every_string_type_is_read_as_text(kind: pa.DataType) -> None:
    column = pa.array(["a", None, "ü"]).cast(kind)
    assert texts("doc", doc=column) == ["a", None, "ü"]
    assert texts("<{doc}>", doc=column) == ["<a>", None, "<ü>"]
    assert is_text_type(kind, in_template=False)


def test_numbers_and_dates_are_text_in_templates_only() -> None:
    number, price = pa.array([7]), pa.array([decimal.Decimal("1.50")])
    assert texts("{n}: {p}", n=number, p=price) == ["7: 1.50"]
    assert not is_text_type(pa.int64(), in_template=False)
    assert is_text_type(pa.int64(), in_template=True)


@pytest.mark.parametrize("kind", [pa.list_(pa.string()), pa.struct([("a", pa.string())]), pa.binary()])
def test_nested_and_binary_columns_are_no_text(kind: pa.DataType) -> None:
    assert not is_text_type(kind, in_template=True)
