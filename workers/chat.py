"""From messages to a prompt: the model's own Jinja chat template, in a sandbox that ends. Tokenises nothing.

The environment is the one that transformers gives its templates: trimmed blocks, loop controls, `raise_exception`,
`strftime_now`, `tojson` without HTML escapes, and the tokenizer's special tokens by name. A template is a stranger's
program, so three things are bounded, all by counting and none by a clock, so that a row ends the same way everywhere:

    steps   lines of Python run while rendering, in the template and in what it calls (a trace function counts)
    sizes   every value that such a function returns, and the operands of `*`, `**`, `+`, `%` and of the string
            methods and filters that can make much out of little
    output  characters of the prompt, while it is made

What a template raises, runs into, or asks for beyond the sandbox is an error of that row alone.
"""

from __future__ import annotations

import datetime
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import BuiltinMethodType, FrameType
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from sharding.errors import RecordRow
from workers.errors import ModelError

MOST_STEPS = 1_000_000
MOST_SIZE = 16 << 20
_MOST_BITS = 4096
_MOST_WIDTH = 10_000
_WIDE_FORMAT = re.compile(r"%[^a-zA-Z%]*(\*|[0-9]{5})|\{[^{}]*([0-9]{5}|\{)")
_WIDE_METHODS = frozenset({"center", "ljust", "rjust", "zfill", "expandtabs"})
_WIDE_FILTERS = ("center", "indent", "join")
_UNKNOWN_GLOBALS = ("lipsum", "cycler", "joiner")
TEMPLATE_FAILED = "the chat template fails"


class ChatTemplate:
    """A compiled chat template; renders one row's messages after another, from one thread.

    Args:
        source: The Jinja template.
        tokens: `bos_token`, `eos_token` and the like, as text.
        arguments: What the spec passes to the template.
        date: What `strftime_now` tells.

    Attributes:
        asks_for_date: The template names `strftime_now`.

    Raises:
        ModelError: It is no Jinja template.
    """

    def __init__(
        self,
        source: str,
        *,
        tokens: Mapping[str, str],
        arguments: Mapping[str, Any] | None = None,
        date: datetime.date | None = None,
    ) -> None:
        environment = _Environment()
        midnight = datetime.datetime.combine(date or datetime.datetime.now(datetime.UTC), datetime.time())
        try:
            self._template = environment.from_string(source)
        except (jinja2.TemplateError, RecursionError, SyntaxError) as error:
            raise ModelError(f"the model's chat template is not valid Jinja: `{error}`") from error
        self.asks_for_date = "strftime_now" in source
        self._variables = {**tokens, "tools": None, "documents": None, **(arguments or {})}
        self._variables["strftime_now"] = lambda form: midnight.strftime(form)

    def render(self, messages: Sequence[tuple[str, str]], *, add_generation_prompt: bool = True) -> str:
        """The prompt of one row.

        Args:
            messages: Role and content of each.
            add_generation_prompt: End where the assistant's answer begins.

        Raises:
            RecordRow: The template raises, goes beyond a bound, or reaches out of the sandbox.
        """
        chat = [{"role": role, "content": content} for role, content in messages]
        variables = {**self._variables, "messages": chat, "add_generation_prompt": add_generation_prompt}
        parts: list[str] = []
        size = 0
        try:
            with _CountedSteps():
                for part in self._template.generate(variables):
                    size += len(part)
                    if size > MOST_SIZE:
                        _too_much("its output")
                    parts.append(part)
        except _TooMuch as error:
            raise RecordRow(f"{TEMPLATE_FAILED}: `{error}`") from None
        except Exception as error:  # noqa: BLE001 - whatever a stranger's template does is its row's error
            raise RecordRow(f"{TEMPLATE_FAILED}: `{_told(error)}`") from None
        return "".join(parts)


class _TooMuch(BaseException):
    """A bound is passed. No Exception: Jinja and templates' helpers catch those."""


def _too_much(what: str) -> NoReturn:
    raise _TooMuch(f"{what} is beyond bounds")


def _told(error: Exception) -> str:
    """One bounded line about an error; the type's name where the message alone would not say it."""
    text = " ".join(str(error).split())[:300]
    return text if isinstance(error, jinja2.TemplateError) and text else f"{type(error).__name__} {text}".strip()


class _CountedSteps:
    """Counts lines of Python in this thread while entered, and looks at what functions return."""

    def __enter__(self) -> None:
        self._steps = 0
        self._before = sys.gettrace()
        sys.settrace(self._trace)

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Callable[..., Any]:
        self._steps += 1
        if self._steps > MOST_STEPS:
            _too_much("its number of steps")
        if event == "return" and isinstance(argument, str | bytes | list | tuple | dict) and len(argument) > MOST_SIZE:
            _too_much("a value")
        return self._trace


class _Environment(ImmutableSandboxedEnvironment):
    """transformers' environment for chat templates, with sizes bounded."""

    intercepted_binops = frozenset({"*", "**", "+", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, loopcontrols],
            optimized=False,  # these two: constants would be folded while compiling, where nothing counts
            finalize=_as_is,
        )
        self.filters["tojson"] = _to_json
        for name in _WIDE_FILTERS:
            self.filters[name] = _bounded_width(self.filters[name])
        self.filters["format"] = _bounded_format(self.filters["format"])
        self.filters["replace"] = _bounded_replace(self.filters["replace"])
        for name in _UNKNOWN_GLOBALS:
            self.globals.pop(name, None)
        self.globals["raise_exception"] = _raise_exception

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Compute `left operator right` unless the result could be large."""
        _check_operands(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 - as Jinja names them
        """Call something unless it is a string's method that could make much out of little."""
        owner = getattr(__obj, "__self__", None)
        if isinstance(__obj, BuiltinMethodType) and isinstance(owner, str | bytes):
            _check_method(owner, __obj.__name__, args)
        return super().call(__context, __obj, *args, **kwargs)


class _Generation(Extension):
    """`{% generation %}`: marks what an assistant says, for training; here it is just its content."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja types it

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        """Read the block."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@jinja2.pass_context
def _as_is(_: object, value: object) -> object:
    return value


def _check_operands(operator: str, left: Any, right: Any) -> None:
    if operator == "%" and isinstance(left, str | bytes):
        _check_format(left)
        return
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * abs(right) if operator == "**" else left.bit_length() + right.bit_length()
        if operator in ("*", "**") and bits > _MOST_BITS:
            _too_much("a number")
        return
    sizes = [len(side) if hasattr(side, "__len__") else abs(side) for side in (left, right) if _has_size(side)]
    if len(sizes) == 2 and (sizes[0] * sizes[1] if operator == "*" else sum(sizes)) > MOST_SIZE:
        _too_much("a value")


def _has_size(value: Any) -> bool:
    return isinstance(value, int | str | bytes | list | tuple)


def _check_method(owner: str | bytes, name: str, args: tuple[Any, ...]) -> None:
    if name in _WIDE_METHODS and any(isinstance(value, int) and abs(value) > _MOST_WIDTH for value in args):
        _too_much(f"the width of {name}")
    if name in ("format", "format_map"):
        _check_format(owner)
    if name == "replace" and len(args) > 1:
        _check_replace(owner, args[0], args[1])
    if name == "join" and args and isinstance(args[0], Iterable) and not isinstance(args[0], Iterator):
        parts = list(args[0])
        if len(owner) * len(parts) + sum(len(part) for part in parts if isinstance(part, str)) > MOST_SIZE:
            _too_much("a value")


def _check_format(text: str | bytes) -> None:
    if _WIDE_FORMAT.search(text if isinstance(text, str) else text.decode("latin-1")):
        _too_much("the width in a format")


def _check_replace(text: str | bytes, old: Any, new: Any) -> None:
    if isinstance(old, str | bytes) and isinstance(new, str | bytes):
        count = len(text) // len(old) if old else len(text) + 1
        if len(text) + count * len(new) > MOST_SIZE:
            _too_much("a value")


def _bounded_width(inner: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that puts something between or around parts, unless the result could be large."""

    @jinja2.pass_eval_context
    def bounded(context: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        parts = value if isinstance(value, str) else list(value)
        count = parts.count("\n") + 1 if isinstance(parts, str) else len(parts)
        size = len(parts) if isinstance(parts, str) else sum(len(str(part)) for part in parts)
        for given in (*args, *kwargs.values()):
            size += count * (abs(given) if isinstance(given, int) else len(str(given)))
        if size > MOST_SIZE:
            _too_much("a value")
        passed = (context, parts) if getattr(inner, "jinja_pass_arg", None) is not None else (parts,)
        return inner(*passed, *args, **kwargs)

    return bounded


def _bounded_format(inner: Callable[..., Any]) -> Callable[..., Any]:
    def bounded(value: Any, *args: Any, **kwargs: Any) -> Any:
        _check_format(str(value))
        return inner(value, *args, **kwargs)

    return bounded


def _bounded_replace(inner: Callable[..., Any]) -> Callable[..., Any]:
    @jinja2.pass_eval_context
    def bounded(context: Any, text: Any, old: Any, new: Any, count: Any = None) -> Any:
        _check_replace(str(text), str(old), str(new))
        return inner(context, str(text), old, new, count)

    return bounded


def _raise_exception(message: Any) -> NoReturn:
    raise jinja2.TemplateError(str(message)[:1000])


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is, without the HTML escapes of Jinja's own filter; a template may ask for an indent."""
    if (indent if isinstance(indent, int) else len(indent or "")) > 64:
        _too_much("the width of tojson")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
