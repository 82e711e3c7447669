"""YAML at the edge: safe, bounded, with the line of every key. Knows the spec's shape only to suggest a nearer key.

No tag, anchor or alias is accepted: a spec is plain data, and each of them can make a small file into something else.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from jobs.errors import SpecError

_MAX_BYTES = 256 << 10
_MOST_BRACKETS = 1000
_NULL = re.compile(r"~|null|Null|NULL|")
_TRUE, _FALSE = re.compile(r"true|True|TRUE"), re.compile(r"false|False|FALSE")
_INTEGER = re.compile(r"[-+]?[0-9]{1,4000}")  # Python reads 4300 digits
_NUMBER = re.compile(r"[-+]?((\.[0-9]+|[0-9]+\.[0-9]*)([eE][-+]?[0-9]{1,4})?|[0-9]+[eE][-+]?[0-9]{1,4})")
Loc = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Document:
    """Plain data and the line (from 1) of each key path in it."""

    data: dict[str, Any]
    lines: dict[Loc, int]


def parse_yaml(path: Path) -> Document:
    """Read one YAML mapping.

    Raises:
        SpecError: Too large, not UTF-8, not YAML, not a mapping, a repeated key, a tag, an anchor or an alias.
    """
    try:
        size = path.stat().st_size
        if size > _MAX_BYTES:
            raise SpecError(f"{path}: a spec is at most {_MAX_BYTES} bytes, this file has: `{size}`")
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise SpecError(f"cannot read the spec ({error.strerror}): `{path}`") from error
    except UnicodeDecodeError as error:
        raise SpecError(f"{path}: not UTF-8 at byte: `{error.start}`") from error
    return parse_yaml_text(text, str(path))


def parse_yaml_text(text: str, where: str) -> Document:
    """As `parse_yaml`, from text; `where` names it in messages."""
    if text.count("[") + text.count("{") > _MOST_BRACKETS:
        raise SpecError(f"{where}: nested too deeply: more brackets than `{_MOST_BRACKETS}`")
    try:
        _refuse_references(text, where)
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        lines: dict[Loc, int] = {}
        data = _build(node, (), lines, where)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        problem = error.problem or "not YAML"
        line = "" if mark is None else f":{mark.line + 1}:{mark.column + 1}"
        tabs = "indent with spaces, never with tabs" if "\\t" in problem else None
        raise SpecError(f"{where}{line}: {problem}", hint=tabs) from None
    except yaml.YAMLError as error:
        raise SpecError(f"{where}: not YAML: `{str(error).splitlines()[0]}`") from None
    except RecursionError:
        raise SpecError(f"{where}: nested too deeply") from None
    if not isinstance(data, dict):
        raise SpecError(f"{where}: a spec is a mapping of keys to values, this is: `{type(data).__name__}`")
    return Document(data, lines)


def _refuse_references(text: str, where: str) -> None:
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        line = event.start_mark.line + 1 if event.start_mark is not None else 1
        anchor = getattr(event, "anchor", None)
        if anchor is not None:
            raise SpecError(f"{where}:{line}: anchors and aliases are not accepted: `{anchor}`")
        tag = getattr(event, "tag", None)
        if tag:
            raise SpecError(f"{where}:{line}: tags are not accepted: `{tag}`")


def _build(node: yaml.Node | None, loc: Loc, lines: dict[Loc, int], where: str) -> Any:
    if node is None:
        return None
    lines.setdefault(loc, node.start_mark.line + 1)
    if isinstance(node, yaml.MappingNode):
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            key = key_node.value
            if not isinstance(key, str):
                raise SpecError(f"{where}:{line}: a key must be a plain word")
            if key in result:
                raise SpecError(f"{where}:{line}: a key stands twice: `{key}`")
            lines[(*loc, key)] = line
            result[key] = _build(value_node, (*loc, key), lines, where)
        return result
    if isinstance(node, yaml.SequenceNode):
        return [_build(item, (*loc, index), lines, where) for index, item in enumerate(node.value)]
    quoted = getattr(node, "style", None) is not None
    return node.value if quoted else _scalar(node.value)


def _scalar(text: str) -> str | int | float | bool | None:
    """What an unquoted word means, by YAML 1.2's core schema: no dates, no base-60 numbers, no `yes` and `no`."""
    if _NULL.fullmatch(text):
        return None
    if _TRUE.fullmatch(text) or _FALSE.fullmatch(text):
        return bool(_TRUE.fullmatch(text))
    if _INTEGER.fullmatch(text):
        return int(text)
    return float(text) if _NUMBER.fullmatch(text) else text


def apply_overrides(data: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """A copy of `data` with each `section.field=value` set.

    Raises:
        SpecError: An override that is not of that form, or goes through a value that is no section.
    """
    result: dict[str, Any] = _copy(dict(data))
    for override in overrides:
        key, equals, text = override.partition("=")
        parts = key.strip().split(".")
        if not equals or not all(parts):
            raise SpecError(f"an override has the form section.field=value: `{override}`")
        value = _override_value(text, f"--set {key}")
        target = result
        for part in parts[:-1]:
            target = target.setdefault(part, {})
            if not isinstance(target, dict):
                raise SpecError(f"an override goes through a key that is no section: `{override}`")
        target[parts[-1]] = value
    return result


def _override_value(text: str, where: str) -> Any:
    """A list, mapping or quoted string as YAML reads it; other text as it stands (`#`, `:` and `*` mean nothing)."""
    if text[:1] in ("[", "{", '"', "'"):
        return parse_yaml_text(f"value: {text}", where).data["value"]
    return _scalar(text)


def _copy(data: Any) -> Any:
    return {key: _copy(value) for key, value in data.items()} if isinstance(data, dict) else data


def locate(loc: Loc, lines: Mapping[Loc, int]) -> int:
    """Line of a key path, or of the nearest section around it."""
    for length in range(len(loc), -1, -1):
        if loc[:length] in lines:
            return lines[loc[:length]]
    return 1


def nearest_key(model: type[BaseModel], loc: Loc) -> str | None:
    """The known key most like the last one of an unknown key path, if any is near."""
    for part in loc[:-1]:
        annotation = model.model_fields[str(part)].annotation if str(part) in model.model_fields else None
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return None
        model = annotation
    near = difflib.get_close_matches(str(loc[-1]), model.model_fields, n=1, cutoff=0.5)
    return near[0] if near else None
