"""Before the journey: real text that every machine has, the docstrings of Python's standard library, as a Parquet file.

usage: python -m benchmarks.stdlib_docs OUT.parquet [--rows N]

Columns: `module`, `name` (qualified), `kind` (dictionary: module, class, function, method, property) and `doc`, in the
order of sorted names: the same Python gives the same file. Downloads nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import inspect
import io
import pkgutil
import sys
import types
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

SKIPPED = frozenset({"antigravity", "this", "idlelib", "test", "turtledemo", "turtle", "tkinter", "xxlimited"})
"""Modules that open windows, browsers or print when imported, and the test suite."""

SKIPPED_PARTS = frozenset({"test", "tests", "__main__"})

EVERYWHERE = frozenset({"__new__", "__dict__", "__weakref__"})

ROW_GROUP_ROWS = 2_000

SCHEMA = pa.schema(
    [
        pa.field("module", pa.string(), nullable=False),
        pa.field("name", pa.string(), nullable=False),
        pa.field("kind", pa.dictionary(pa.int32(), pa.string()), nullable=False),
        pa.field("doc", pa.string(), nullable=False),
    ]
)


@dataclass(frozen=True, slots=True, order=True)
class Docstring:
    """One docstring and whose it is."""

    module: str
    name: str
    kind: str
    doc: str


def stdlib_modules() -> Iterator[types.ModuleType]:
    """Import every module of the standard library that can be imported here, in order of name."""
    for name in sorted(sys.stdlib_module_names - SKIPPED):
        yield from _with_submodules(name)


def collect() -> list[Docstring]:
    """Every docstring of the standard library, each object once, sorted by module and name. Prints nothing."""
    with (
        warnings.catch_warnings(),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        warnings.simplefilter("ignore")
        return _collect()


def _collect() -> list[Docstring]:
    modules = {module.__name__: module for module in stdlib_modules()}
    found: dict[int, Docstring] = {}
    for name, module in modules.items():
        _keep(found, module, name, name, "module")
        for attribute, value in _members(module):
            home = getattr(value, "__module__", None)
            if home != name and home in modules:
                continue  # re-exported: it is recorded where it lives
            if inspect.isclass(value):
                _collect_class(found, value, name, attribute)
            elif inspect.isroutine(value):
                _keep(found, value, name, attribute, "function")
    return sorted(found.values())


def to_table(rows: list[Docstring]) -> pa.Table:
    """Rows as a table of `SCHEMA`."""
    columns = {field.name: [getattr(row, field.name) for row in rows] for field in SCHEMA}
    arrays = [pa.array(columns[field.name], pa.string()).cast(field.type) for field in SCHEMA]
    return pa.table(arrays, schema=SCHEMA)


def _with_submodules(name: str) -> Iterator[types.ModuleType]:
    if any(part in SKIPPED_PARTS or part.startswith("__") for part in name.split(".")):
        return
    try:
        module = importlib.import_module(name)
    except (ImportError, OSError):
        return
    yield module
    for info in sorted(pkgutil.iter_modules(getattr(module, "__path__", ())), key=lambda info: info.name):
        yield from _with_submodules(f"{name}.{info.name}")


def _members(owner: object) -> Iterator[tuple[str, object]]:
    for name, value in sorted(vars(owner).items()):
        # What the interpreter puts into every class ("Return len(self).") says the same a thousand times.
        if not isinstance(value, types.WrapperDescriptorType) and name not in EVERYWHERE:
            yield name, value


def _collect_class(found: dict[int, Docstring], cls: type, module: str, name: str) -> None:
    if id(cls) in found:
        return
    _keep(found, cls, module, name, "class")
    for attribute, value in _members(cls):
        inner = getattr(value, "__func__", value)  # classmethod, staticmethod
        qualified = f"{name}.{attribute}"
        if inspect.isclass(inner) and inner.__qualname__ == f"{cls.__qualname__}.{attribute}":
            _collect_class(found, inner, module, qualified)
        elif inspect.isroutine(inner):
            _keep(found, inner, module, qualified, "method")
        elif inspect.isdatadescriptor(inner):
            _keep(found, inner, module, qualified, "property")


def _keep(found: dict[int, Docstring], value: object, module: str, name: str, kind: str) -> None:
    doc = getattr(value, "__doc__", None)
    if not isinstance(doc, str) or id(value) in found:
        return
    text = inspect.cleandoc(doc).strip()
    if text and " at 0x" not in text:  # an address would make every run another file
        found[id(value)] = Docstring(module, name, kind, text)


def main() -> None:
    """Write the file and say what is in it."""
    parser = argparse.ArgumentParser(description="write the standard library's docstrings as a Parquet file")
    parser.add_argument("out", type=Path)
    parser.add_argument("--rows", type=int, help="at most this many rows, spread evenly")
    arguments = parser.parse_args()
    rows = collect()
    if arguments.rows is not None and arguments.rows < len(rows):
        rows = [rows[number * len(rows) // arguments.rows] for number in range(arguments.rows)]
    table = to_table(rows)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    unfinished = arguments.out.with_name(f".{arguments.out.name}.unfinished")
    pq.write_table(table, unfinished, row_group_size=ROW_GROUP_ROWS)
    unfinished.replace(arguments.out)
    modules = len({row.module for row in rows})
    print(f"{arguments.out}: {table.num_rows:,} docstrings of {modules:,} modules, {table.nbytes / 1e6:.1f} MB of text")


if __name__ == "__main__":
    main()
