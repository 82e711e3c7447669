"""Beside the sources: do all files have the same columns? Compares types; converts nothing and reads no file."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa

from sharding.errors import SchemaMismatchError, SourceError


class SchemaAgreement:
    """Takes the files' schemas one after the other and keeps the one that holds for all.

    The first file gives the columns, their order and their metadata. Others must have the same names and types, in
    any order; whether a field may be null, and metadata, may differ (a field is nullable if it is so anywhere).
    """

    def __init__(self) -> None:
        self._first_path = ""
        self._schema: pa.Schema | None = None

    @property
    def schema(self) -> pa.Schema:
        """The schema that holds for every file so far."""
        if self._schema is None:
            raise ValueError("no schema was added")
        return self._schema

    def add(self, path: str, schema: pa.Schema) -> None:
        """Compares one more file.

        Raises:
            SchemaMismatchError: A column is missing on either side, or has another type; names file, column, types.
            SourceError: Two columns of the file have the same name.
        """
        if self._schema is not None and self._schema.equals(schema):
            return
        twice = {name for name in schema.names if schema.names.count(name) > 1}
        if twice:
            raise SourceError(f"a column appears twice in `{path}`: `{min(twice)}`")
        if self._schema is None:
            self._first_path, self._schema = path, schema
            return
        self._schema = self._merge(path, self._schema, schema)

    def _merge(self, path: str, agreed: pa.Schema, other: pa.Schema) -> pa.Schema:
        fields: list[pa.Field[Any]] = []
        for field in agreed:
            if field.name not in other.names:
                raise SchemaMismatchError(
                    f"a column of `{self._first_path}` (type `{field.type}`) is missing in `{path}`: `{field.name}`"
                )
            merged = merge_field(field, other.field(field.name))
            if merged is None:
                raise SchemaMismatchError(
                    f"column `{field.name}` has type `{field.type}` in `{self._first_path}` "
                    f"but another in `{path}`: `{other.field(field.name).type}`",
                    hint="cast one of them, or run them as two jobs",
                )
            fields.append(merged)
        for field in other:
            if field.name not in agreed.names:
                raise SchemaMismatchError(
                    f"a column of `{path}` (type `{field.type}`) is missing in `{self._first_path}`: `{field.name}`"
                )
        return pa.schema(fields, metadata=agreed.metadata)


def merge_field(first: pa.Field[Any], second: pa.Field[Any]) -> pa.Field[Any] | None:
    """The first field, nullable if either is, at every depth; None when the types differ."""
    kind = merge_type(first.type, second.type)
    if kind is None:
        return None
    return first.with_type(kind).with_nullable(first.nullable or second.nullable)


def merge_type(first: pa.DataType, second: pa.DataType) -> pa.DataType | None:
    """The first type with the nullability of both, or None when they differ in anything else.

    The name of a list's child (`item`, `element`, `array`) is the writer's habit and counts for nothing.
    """
    if first.equals(second):
        return first
    if first.id != second.id:
        return None
    if pa.types.is_struct(first):
        return _merge_struct(first, second)
    if pa.types.is_map(first):
        return _merge_map(first, second)
    make = _LISTS.get(first.id)
    return _merge_list(first, second, make) if make else None


def _merge_struct(first: Any, second: Any) -> pa.DataType | None:
    if [field.name for field in first] != [field.name for field in second]:
        return None
    fields: list[pa.Field[Any]] = []
    for one, other in zip(first, second, strict=True):
        field = merge_field(one, other)
        if field is None:
            return None
        fields.append(field)
    return pa.struct(fields)


def _merge_map(first: Any, second: Any) -> pa.DataType | None:
    key, item = merge_field(first.key_field, second.key_field), merge_field(first.item_field, second.item_field)
    if key is None or item is None or first.keys_sorted != second.keys_sorted:
        return None
    make: Any = pa.map_
    merged: pa.DataType = make(key, item, keys_sorted=first.keys_sorted)
    return merged


def _merge_list(first: Any, second: Any, make: Callable[[Any, int], pa.DataType]) -> pa.DataType | None:
    size = getattr(first, "list_size", -1)
    value = merge_field(first.value_field, second.value_field)
    if value is None or size != getattr(second, "list_size", -1):
        return None
    return make(value, size)


_LISTS: dict[int, Callable[[Any, int], pa.DataType]] = {
    pa.list_(pa.null()).id: lambda value, _: pa.list_(value),
    pa.large_list(pa.null()).id: lambda value, _: pa.large_list(value),
    pa.list_view(pa.null()).id: lambda value, _: pa.list_view(value),
    pa.large_list_view(pa.null()).id: lambda value, _: pa.large_list_view(value),
    pa.list_(pa.null(), 1).id: pa.list_,
}
