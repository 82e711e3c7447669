"""How a row's text is made: one column, or a template over columns. Reads no files and knows no model.

`{title}` stands for the column `title`; `{{` and `}}` are literal braces. A value is put in as it is: braces inside it
mean nothing. A row in which any named column is null has a null text, which becomes a row error that names the column.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from sharding.errors import InputError

_TOKEN = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")


@dataclass(frozen=True, slots=True)
class TextTemplate:
    """Parts of a template in order: literal strings, and the names of columns between them.

    `literals` is one longer than `columns`; a plain column has two empty literals around it.
    """

    source: str
    literals: tuple[str, ...]
    columns: tuple[str, ...]

    def render(self, batch: pa.RecordBatch) -> pa.Array:
        """The text of each row.

        Args:
            batch: Rows that hold every column of this template.

        Returns:
            string array, null where a column is null.
        """
        if not self.columns:
            return pa.array([self.literals[0]] * batch.num_rows, pa.string())
        texts = [_as_text(batch.column(name)) for name in self.columns]
        if len(texts) == 1 and self.literals == ("", ""):
            return texts[0]
        parts: list[pa.Array | pa.Scalar] = [pa.scalar(self.literals[0], pa.large_string())]
        for text, literal in zip(texts, self.literals[1:], strict=True):
            parts += [text.cast(pa.large_string()), pa.scalar(literal, pa.large_string())]
        return pc.binary_join_element_wise(*parts, pa.scalar("", pa.large_string()), null_handling="emit_null")

    def null_reason(self, batch: pa.RecordBatch, row: int) -> str:
        """Why the text of a row is null: names the first column that is."""
        nulls = (name for name in self.columns if not batch.column(name)[row].is_valid)
        return f"null text in column: `{next(nulls, self.source)}`"


def parse_template(text: str, *, bare_column: bool = True) -> TextTemplate:
    """Read a column name or a template.

    Args:
        text: The template.
        bare_column: A text without braces is a column name, and there is a column at least. Else it stands for itself.

    Raises:
        InputError: A brace without its partner, an empty name, or no column where there has to be one.
    """
    if bare_column and "{" not in text and "}" not in text:
        return TextTemplate(text, ("", ""), (text,))
    literals, columns, literal, end = [], [], "", 0
    for match in _TOKEN.finditer(text):
        literal += text[end : match.start()]
        end = match.end()
        if match.group() in ("{{", "}}"):
            literal += match.group()[0]
        elif match.group(1):
            literals.append(literal)
            columns.append(match.group(1))
            literal = ""
        else:
            raise InputError(
                f"unmatched or empty brace in a text template at character {match.start()}: `{text}`",
                hint="name a column as `{title}`; write `{{` and `}}` for literal braces",
            )
    literals.append(literal + text[end:])
    if bare_column and not columns:
        raise InputError(f"a text template names no column: `{text}`", hint="name a column as `{title}`")
    return TextTemplate(text, tuple(literals), tuple(columns))


def invalid_rows(texts: pa.Array) -> list[int]:
    """Rows whose bytes are not UTF-8: Parquet files of other writers hold such strings, and Arrow does not look."""
    try:
        texts.validate(full=True)
    except pa.ArrowInvalid:
        binary = texts.cast(pa.large_binary() if pa.types.is_large_string(texts.type) else pa.binary())
        return [row for row, value in enumerate(binary.to_pylist()) if value is not None and not _is_utf8(value)]
    return []


def _is_utf8(value: bytes) -> bool:
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True


def is_text_type(kind: pa.DataType, *, in_template: bool) -> bool:
    """Whether a column of this type can be read as text: strings always, numbers and the like only in templates."""
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        return True
    plain = pa.types.is_primitive(kind) or pa.types.is_decimal(kind)
    return in_template and plain and not pa.types.is_duration(kind)


def _as_text(column: pa.Array) -> pa.Array:
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    return column if pa.types.is_string(column.type) else column.cast(pa.large_string())
