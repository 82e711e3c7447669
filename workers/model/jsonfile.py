"""Reading one JSON file of a model folder, with errors that name it. Knows no key of any of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from workers.errors import ModelError

NO_LIMIT = 10**20
"""From here on a length is a tokenizer's way to say that it has none (transformers writes `int(1e30)`)."""


def read_json(path: Path) -> Any:
    """Read a JSON file of a model folder.

    Returns:
        What the file holds, or None when there is no such file.

    Raises:
        ModelError: The file cannot be read or is not JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8-sig"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, UnicodeDecodeError, ValueError, RecursionError) as error:
        raise ModelError(f"a file of the model is not readable JSON ({error}): `{path}`") from error


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON file that holds an object; a missing file is an empty one.

    Raises:
        ModelError: The file cannot be read, is not JSON or holds something else.
    """
    content = read_json(path)
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ModelError(f"a file of the model holds {type(content).__name__} instead of an object: `{path}`")
    return content


def read_count(content: dict[str, Any], key: str, path: Path, *, least: int = 1) -> int | None:
    """Take a whole number out of a file's content.

    Returns:
        The number, or None when the key is missing, null, or so large that it means "no limit".

    Raises:
        ModelError: The value is not a whole number, or below `least`.
    """
    value = content.get(key)
    if value is None:
        return None
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ModelError(f"{path.name} gives a {key} that is no whole number from {least} on: `{value!r}`")
    return None if value >= NO_LIMIT else value
