"""From messages to a prompt: the model's own Jinja chat template, in a sandbox that ends. Tokenises nothing.

The environment is the one that transformers gives its templates: trimmed blocks, loop controls, `raise_exception`,
`strftime_now`, `tojson` without HTML escapes, and the tokenizer's special tokens by name. A template is a stranger's
program: what it may use up is counted (see `workers.prompt.chat_bounds`), and what it raises, runs into, or asks for
beyond the sandbox is an error of that row alone.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Mapping, Sequence
from types import BuiltinMethodType
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from sharding.errors import RecordRow
from workers.errors import ModelError
from workers.prompt.chat_bounds import (
    MOST_SIZE,
    CountedSteps,
    TooMuch,
    bounded_format,
    bounded_joining,
    bounded_replace,
    check_method,
    check_operands,
    too_much,
    weigh,
)

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
            with CountedSteps():
                for part in self._template.generate(variables):
                    size += len(part)
                    if size > MOST_SIZE:
                        too_much("its output")
                    parts.append(part)
        except TooMuch as error:
            raise RecordRow(f"{TEMPLATE_FAILED}: `{error}`") from None
        except Exception as error:  # noqa: BLE001 - whatever a stranger's template does is its row's error
            raise RecordRow(f"{TEMPLATE_FAILED}: `{_told(error)}`") from None
        return "".join(parts)


def _told(error: Exception) -> str:
    """One bounded line about an error; the type's name where the message alone would not say it."""
    text = " ".join(str(error).split())[:300]
    return text if isinstance(error, jinja2.TemplateError) and text else f"{type(error).__name__} {text}".strip()


class _Code(CodeGenerator):
    """Templates' code, in which every list, tuple and dictionary that is written out is weighed."""

    def visit_List(self, node: nodes.List, frame: Frame) -> None:  # noqa: N802 - as Jinja names them
        """Write a list."""
        self._weighed(super().visit_List, node, frame)

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:  # noqa: N802
        """Write a tuple; one that is assigned to is left as it is."""
        if node.ctx == "load":
            self._weighed(super().visit_Tuple, node, frame)
        else:
            super().visit_Tuple(node, frame)

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:  # noqa: N802
        """Write a dictionary."""
        self._weighed(super().visit_Dict, node, frame)

    def _weighed(self, visit: Callable[[Any, Frame], None], node: nodes.Node, frame: Frame) -> None:
        self.write("environment.weighed(")
        visit(node, frame)
        self.write(")")


class _Environment(ImmutableSandboxedEnvironment):
    """transformers' environment for chat templates, with sizes bounded."""

    code_generator_class = _Code
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
            self.filters[name] = bounded_joining(self.filters[name])
        self.filters["format"] = bounded_format(self.filters["format"])
        self.filters["replace"] = bounded_replace(self.filters["replace"])
        for name in _UNKNOWN_GLOBALS:
            self.globals.pop(name, None)
        self.globals["raise_exception"] = _raise_exception

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Compute `left operator right` unless the result could be large."""
        check_operands(operator, left, right)
        return self.weighed(super().call_binop(context, operator, left, right))

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 - as Jinja names them
        """Call something unless it is a string's method that could make much out of little."""
        owner = getattr(__obj, "__self__", None)
        if isinstance(__obj, BuiltinMethodType) and isinstance(owner, str | bytes):
            check_method(owner, __obj.__name__, args)
        return __self.weighed(super().call(__context, __obj, *args, **kwargs))

    def weighed(self, value: Any) -> Any:
        """A value, unless its text would be too long."""
        weigh(value)
        return value


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
        too_much("the width of tojson")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
