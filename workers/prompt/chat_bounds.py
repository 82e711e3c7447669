"""What a chat template may use up: steps and sizes, counted. Knows the pieces of Jinja that make much out of little.

Three things are bounded, all by counting and none by a clock, so that a row ends the same way on every machine:

    steps   lines of Python run while rendering, in the template and in what it calls
    sizes   everything that such a function returns, every list that the template writes, and operands and arguments
            from which one call of the interpreter could make something large
    output  characters of the prompt, while it is made

A list weighs as much as its text would be long: lists may hold one another twice, and a few lines make a value whose
text fills any memory.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any, NoReturn

import jinja2

MOST_STEPS = 1_000_000
MOST_SIZE = 16 << 20
_MOST_BITS = 4096
_MOST_WIDTH = 10_000
_STEPS_PER_PART = 4
_WIDE_FORMAT = re.compile(r"%[^a-zA-Z%]*(\*|[0-9]{5})|\{[^{}]*([0-9]{5}|\{)")
_WIDE_METHODS = frozenset({"center", "ljust", "rjust", "zfill", "expandtabs"})


class TooMuch(BaseException):
    """A bound is passed. No Exception: Jinja and templates' helpers catch those."""


def too_much(what: str) -> NoReturn:
    """End the template.

    Raises:
        TooMuch: Always.
    """
    raise TooMuch(f"{what} is beyond bounds")


class CountedSteps:
    """Counts lines of Python in this thread while entered, and weighs what functions return."""

    def __enter__(self) -> CountedSteps:
        self._steps = 0
        self._before = sys.gettrace()
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Callable[..., Any]:
        self._steps += 1
        if event == "return" and argument is not None:
            self._steps += weigh(argument) // _STEPS_PER_PART
        if self._steps > MOST_STEPS:
            too_much("its number of steps")
        return self._trace


def weigh(value: Any) -> int:
    """Look at every part of a value.

    Returns:
        What the work on it counts: lists and parts of lists, and every 256 characters.

    Raises:
        TooMuch: Its text would be too long.
    """
    if isinstance(value, str | bytes):
        if len(value) > MOST_SIZE:
            too_much("a value")
        return len(value) >> 8
    if not isinstance(value, list | tuple | dict | set | frozenset):
        return 0
    size, parts, waiting = 0, 0, [value]
    while waiting:
        inner = waiting.pop()
        parts += 1
        if isinstance(inner, dict):
            waiting += inner.keys()
            waiting += inner.values()
        elif isinstance(inner, list | tuple | set | frozenset):
            waiting += inner
        else:
            size += len(inner) if isinstance(inner, str | bytes) else 1
        if size + parts + len(waiting) > MOST_SIZE or parts > MOST_STEPS:
            too_much("a value")
    return parts


def check_operands(operator: str, left: Any, right: Any) -> None:
    """Refuse an operation whose result could be large, before it is computed."""
    if operator == "%" and isinstance(left, str | bytes):
        check_format(left)
        weigh(right)
        return
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * abs(right) if operator == "**" else left.bit_length() + right.bit_length()
        if operator in ("*", "**") and bits > _MOST_BITS:
            too_much("a number")
        return
    sizes = [len(side) if hasattr(side, "__len__") else abs(side) for side in (left, right) if _has_size(side)]
    if len(sizes) == 2 and (sizes[0] * sizes[1] if operator == "*" else sum(sizes)) > MOST_SIZE:
        too_much("a value")


def _has_size(value: Any) -> bool:
    return isinstance(value, int | str | bytes | list | tuple)


def check_method(owner: str | bytes, name: str, args: tuple[Any, ...]) -> None:
    """Refuse a call of a string's method whose result could be large."""
    if name in _WIDE_METHODS and any(isinstance(value, int) and abs(value) > _MOST_WIDTH for value in args):
        too_much(f"the width of {name}")
    if name in ("format", "format_map"):
        check_format(owner)
    if name == "replace" and len(args) > 1:
        check_replace(owner, args[0], args[1])
    if name == "join" and args and isinstance(args[0], Iterable) and not isinstance(args[0], Iterator):
        parts = list(args[0])
        if len(owner) * len(parts) + sum(len(part) for part in parts if isinstance(part, str)) > MOST_SIZE:
            too_much("a value")


def check_format(text: str | bytes) -> None:
    """Refuse a format with a width of five digits, or one that comes from an argument."""
    if _WIDE_FORMAT.search(text if isinstance(text, str) else text.decode("latin-1")):
        too_much("the width in a format")


def check_replace(text: str | bytes, old: Any, new: Any) -> None:
    """Refuse a replacement whose result could be large."""
    if isinstance(old, str | bytes) and isinstance(new, str | bytes):
        count = len(text) // len(old) if old else len(text) + 1
        if len(text) + count * len(new) > MOST_SIZE:
            too_much("a value")


def bounded_joining(inner: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that puts something between or around parts, unless the result could be large."""

    @jinja2.pass_eval_context
    def bounded(context: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        parts = value if isinstance(value, str) else list(value)
        count = parts.count("\n") + 1 if isinstance(parts, str) else len(parts)
        weigh(parts)
        size = len(parts) if isinstance(parts, str) else sum(len(str(part)) for part in parts)
        for given in (*args, *kwargs.values()):
            size += count * (abs(given) if isinstance(given, int) else len(str(given)))
        if size > MOST_SIZE:
            too_much("a value")
        passed = (context, parts) if getattr(inner, "jinja_pass_arg", None) is not None else (parts,)
        return inner(*passed, *args, **kwargs)

    return bounded


def bounded_format(inner: Callable[..., Any]) -> Callable[..., Any]:
    """The filter `format`."""

    def bounded(value: Any, *args: Any, **kwargs: Any) -> Any:
        check_format(str(value))
        return inner(value, *args, **kwargs)

    return bounded


def bounded_replace(inner: Callable[..., Any]) -> Callable[..., Any]:
    """The filter `replace`."""

    @jinja2.pass_eval_context
    def bounded(context: Any, text: Any, old: Any, new: Any, count: Any = None) -> Any:
        check_replace(str(text), str(old), str(new))
        return inner(context, str(text), old, new, count)

    return bounded
