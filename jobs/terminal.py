"""Between the command line and the person: results on stdout, errors and logs on stderr. Imports nothing heavy."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from typing import Any, NoReturn


def log_to_stderr(*, verbose: bool) -> None:
    """What modules log goes to stderr: errors alone, or all of it."""
    level = logging.INFO if verbose else logging.ERROR
    logging.basicConfig(level=level, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s %(message)s")


def fail(error: Exception) -> NoReturn:
    """End the program with an error's text and hint on stderr, as data too where that was asked, and its exit code."""
    from jobs.errors import exit_code_of

    _end(str(error), getattr(error, "hint", None), type(error).__name__, int(exit_code_of(error)))


def fail_usage(error: Any) -> NoReturn:
    """The same for an exception of typer's about the command line."""
    text = error.format_message().rstrip(".")
    context = getattr(error, "ctx", None)
    hint = None if context is None else f"`{context.command_path} --help` says what there is"
    _end(f"{text[:1].lower()}{text[1:]}", hint, "UsageError", error.exit_code)


def _end(text: str, hint: str | None, kind: str, code: int) -> NoReturn:
    if "--json" in sys.argv:
        print(json.dumps({"error": text, "hint": hint, "kind": kind, "exit_code": code}))
    print(f"error: {text}", file=sys.stderr)
    if hint:
        print(f"hint: {hint}", file=sys.stderr)
    sys.exit(code)


def print_json(data: Any) -> None:
    """Data, on stdout."""
    print(json.dumps(data, indent=2, default=str))


def show(found: Any, render: Callable[[Any], None], *, as_json: bool) -> None:
    """Print what was found: as data, or as `jobs.render` draws it."""
    if not as_json:
        render(found)
    else:
        print_json([item.to_dict() for item in found] if isinstance(found, list) else found.to_dict())
