"""Before anything starts, of what no model is needed for: inputs, outputs, the columns that templates name, the schema.

Jobs that start and plans without weights pass through here alike. Reads footers and listings, and writes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa

from jobs.spec import JobSpec
from sharding.errors import InputError
from sharding.find import finds
from sharding.layout import part_name
from sharding.source import SourceListing, list_sources
from sharding.storage import Storage, is_inside, open_storage, parse_uri
from sharding.words import counted
from workers.prompt.template import TextTemplate, is_text_type, parse_template
from workers.results import FACT_FIELDS

_MAIN_COLUMNS = {"embed": "embedding", "classify": "label", "rerank": "score", "generate": "text", "score": "score"}


@dataclass(frozen=True, slots=True)
class PreparedInput:
    """Where rows come from and go to; both fit the spec."""

    output: Storage
    listing: SourceListing


@dataclass(frozen=True, slots=True)
class OutputColumns:
    """Columns of every part.

    Attributes:
        passed: Input columns, in output order.
        results: Names of the result columns, in order.
    """

    schema: pa.Schema
    passed: tuple[str, ...]
    results: tuple[str, ...]


def prepare_input(spec: JobSpec) -> PreparedInput:
    """Look at input and output.

    Raises:
        InputError: Files, columns, templates or output do not fit together.
        NotFoundError: An input is not there.
    """
    output = _open_output(spec)
    listing = list_sources(spec.input.path)
    _check_output_apart(spec, listing, output)
    _check_templates(spec, listing.schema)
    return PreparedInput(output, listing)


def main_column(spec: JobSpec) -> str:
    """Name of the column of the embedding, the label, the score or the text."""
    return _MAIN_COLUMNS[spec.task.kind] if spec.output.column == "auto" else spec.output.column


def check_dimensions(spec: JobSpec, width: int) -> None:
    """Check that embeddings of a model are not shorter than what is to be cut from them.

    Raises:
        InputError: They are.
    """
    asked = spec.task.dimensions
    if asked is not None and asked > width:
        raise InputError(f"task.dimensions is more than the model's {counted(width, 'value')}: `{asked}`")


def decide_columns(spec: JobSpec, schema: pa.Schema, fields: Sequence[pa.Field]) -> OutputColumns:
    """Put input and result columns together.

    Args:
        spec: The job.
        schema: Of the input.
        fields: What the task adds, as `workers.results.result_fields` says.

    Raises:
        InputError: Two columns would have one name.
    """
    results = [*fields, *FACT_FIELDS]
    names = [field.name for field in results]
    if len(set(names)) < len(names):
        raise InputError(f"output.column has the name of another result column: `{main_column(spec)}`")
    passed = list(spec.input.columns) if spec.input.columns is not None else schema.names
    clashes = [name for name in passed if name in names]
    if clashes and spec.output.on_conflict == "error":
        raise InputError(
            f"the input already has a column with a result's name: `{', '.join(clashes)}`",
            hint="set output.column, leave the column out of input.columns, or set output.on_conflict: overwrite",
        )
    columns = tuple(name for name in passed if name not in names)
    kept = [schema.field(name) for name in columns]
    return OutputColumns(pa.schema(kept + results, metadata=_still_true(schema.metadata)), columns, tuple(names))


def _open_output(spec: JobSpec) -> Storage:
    if parse_uri(spec.output.path).scheme == "hf":
        raise InputError(f"output.path cannot be written to, hf:// is for reading: `{spec.output.path}`")
    output = open_storage(spec.output.path)
    if output.local_root is not None and output.local_root.is_file():
        raise InputError(f"output.path is a file, not a folder: `{spec.output.path}`")
    return output


def _check_output_apart(spec: JobSpec, listing: SourceListing, output: Storage) -> None:
    inside = next((file.path for file in listing.files if is_inside(file.path, output.uri)), None)
    if inside is not None:
        raise InputError(
            f"output.path holds an input file, `{inside}`, and may not: `{spec.output.path}`",
            hint="write to a folder of its own",
        )
    for path in spec.input.path:
        if finds(path, output.full_uri(part_name(0))):
            raise InputError(
                f"input.path `{path}` would find the parts of the output: `output.path {spec.output.path}`",
                hint="write to a folder of its own: the next run would read this one's results",
            )


def _check_templates(spec: JobSpec, schema: pa.Schema) -> None:
    task = spec.task
    sources = [("task.query", task.query, True), ("task.text", task.text, True), ("task.answer", task.answer, True)]
    sources += [(f"task.messages[{i}]", message.content, False) for i, message in enumerate(task.messages or ())]
    for key, text, bare_column in sources:
        if not text:
            continue
        template = parse_template(text, bare_column=bare_column)
        if not bare_column and text in schema.names:
            raise InputError(
                f"{key} is the literal text `{text}`, which is also a column's name: `content: {text}`",
                hint=f"write {{{text}}} for the column's text",
            )
        _check_template_columns(key, template, schema)
    for name in spec.input.columns or ():
        if name not in schema.names:
            raise InputError(
                f"input.columns names a column that the input does not have: `{name}`",
                hint=f"the input has: {', '.join(schema.names)}",
            )


def _check_template_columns(key: str, template: TextTemplate, schema: pa.Schema) -> None:
    for name in template.columns:
        if name not in schema.names:
            raise InputError(
                f"{key} names a column that the input does not have: `{name}`",
                hint=f"the input has: {', '.join(schema.names)}",
            )
        kind = schema.field(name).type
        if not is_text_type(kind, in_template=len(template.columns) > 1 or template.literals != ("", "")):
            raise InputError(f"{key} names column `{name}`, which holds no text: `{kind}`")


def _still_true(metadata: dict[bytes, bytes] | None) -> dict[bytes, bytes] | None:
    """Schema metadata less what pandas and datasets wrote: both describe the columns, which are others now."""
    return (
        {key: value for key, value in metadata.items() if key not in (b"pandas", b"huggingface")} if metadata else None
    )
