"""Chat templates: rendered as the reference does, and unable to loop, grow, or reach out of the sandbox."""

from __future__ import annotations

import contextlib
import datetime
import sys
import time

import pytest

from sharding.errors import RecordRow
from workers.errors import ModelError
from workers.prompt.chat import ChatTemplate
from workers.prompt.chat_bounds import MOST_SIZE

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
CHATML = """\
{%- if messages[0].role != 'system' %}
{{- '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""


def render(source: str, *contents: str, **arguments: object) -> str:
    messages = [("user", content) for content in contents or ("hi",)]
    return ChatTemplate(source, tokens=TOKENS, arguments=arguments).render(messages)


def failure(source: str, *contents: str) -> str:
    with pytest.raises(RecordRow) as caught:
        render(source, *contents)
    assert len(str(caught.value)) < 500
    return str(caught.value)


def test_a_chat_of_roles_is_rendered_with_the_models_own_marks() -> None:
    template = ChatTemplate(CHATML, tokens=TOKENS)
    assert template.render([("system", "Be brief."), ("user", "a <b> & 'c'")]) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\na <b> & 'c'<|im_end|>\n<|im_start|>assistant\n"
    )


def test_arguments_of_the_spec_reach_the_template() -> None:
    assert render(CHATML).endswith("<|im_start|>assistant\n")
    assert render(CHATML, enable_thinking=False).endswith("<think>\n\n</think>\n\n")
    assert render(CHATML, enable_thinking=True).endswith("<|im_start|>assistant\n")


def test_special_tokens_blocks_loop_controls_and_the_generation_tag_work_as_in_the_reference() -> None:
    source = (
        "{{ bos_token }}\n{% for m in messages %}\n    {% if loop.index > 2 %}{% break %}{% endif %}\n"
        "{% generation %}{{ m.content }}{% endgeneration %}\n{% endfor %}\n{{ eos_token }}"
    )
    assert render(source, "a", "b", "c") == "<s>\nab</s>"


def test_json_in_a_template_is_json_and_not_html() -> None:
    assert render("{{ {'a': '<ü&\"'} | tojson }}") == '{"a": "<ü&\\""}'
    assert render("{{ [1, 2] | tojson(indent=2) }}") == "[\n  1,\n  2\n]"


def test_the_date_is_the_planned_one_and_a_template_says_whether_it_asks() -> None:
    day = datetime.date(2024, 7, 26)
    template = ChatTemplate("{{ strftime_now('%d %b %Y') }}", tokens=TOKENS, date=day)
    assert template.asks_for_date
    assert template.render([("user", "x")]) == "26 Jul 2024"
    assert not ChatTemplate(CHATML, tokens=TOKENS).asks_for_date


def test_what_a_template_raises_is_the_rows_error_with_its_words() -> None:
    assert "roles must alternate" in failure("{{ raise_exception('roles must alternate') }}")
    assert "undefined" in failure("{{ nothing.at.all }}")
    assert "ZeroDivisionError" in failure("{{ 1 / 0 }}")
    assert failure("{{ raise_exception('x' * 100000) }}")


def test_one_rows_trouble_leaves_the_next_row_alone() -> None:
    template = ChatTemplate("{{ raise_exception('no') if messages[0].content == 'bad' else 'fine' }}", tokens=TOKENS)
    with pytest.raises(RecordRow):
        template.render([("user", "bad")])
    assert template.render([("user", "good")]) == "fine"


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}",
        "{% for a in range(99999) %}{% for b in range(99999) %}{{ b }}{% endfor %}{% endfor %}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
        "{% macro twice(n) %}{% if n %}{{ twice(n - 1) }}{{ twice(n - 1) }}{% endif %}{% endmacro %}{{ twice(60) }}",
        "{{ range(10 ** 9) | list | length }}",
        "{{ 'x' * 10 ** 11 }}",
        "{{ 10 ** (10 ** 10) }}",
        "{% set n = namespace(x=2) %}{% for i in range(80) %}{% set n.x = n.x * n.x %}{% endfor %}",
        "{% set n = namespace(x='ab') %}{% for i in range(80) %}{% set n.x = n.x + n.x %}{% endfor %}",
        "{% set n = namespace(x='ab') %}{% for i in range(80) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
        "{{ 'x' | center(10 ** 11) }}",
        "{{ ('a\\n' * 9999) | indent(10 ** 8) }}",
        "{{ 'x'.ljust(10 ** 11) }}",
        "{{ 'x'.zfill(10 ** 11) }}",
        "{{ '%99999999999d' % 1 }}",
        "{{ '%*d' % (99999999999, 1) }}",
        "{{ '{:99999999999}'.format(1) }}",
        "{{ '%99999999999d' | format(1) }}",
        "{{ ('x' * 9999999).replace('x', 'y' * 9999999) }}",
        "{{ ('x' * 9999999) | replace('x', 'y' * 9999999) }}",
        "{{ ('y' * 9999999).join('x' * 9999999) }}",
        "{{ ['y' * 9999999] * 99999 | int | length }}",
        "{{ ('x' * 9999999) | list | join('y' * 9999999) }}",
        "{% set n = namespace(x=[1]) %}{% for i in range(80) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x }}",
        "{% set n = namespace(x=[1]) %}{% for i in range(80) %}{% set n.x = (n.x, n.x) %}{% endfor %}{{ n.x ~ '' }}",
        "{% set n = namespace(x=[1]) %}{% for i in range(80) %}{% set n.x = {1: n.x, 2: n.x} %}{% endfor %}"
        "{{ n.x | tojson }}",
        "{% set n = namespace(x=1) %}{% for i in range(80) %}{% set n.x = dict(a=n.x, b=n.x) %}{% endfor %}{{ n.x }}",
        "{% set n = namespace(x=[1], y=[1]) %}{% for i in range(80) %}{% set n.x = [n.x, n.x] %}"
        "{% set n.y = [n.y, n.y] %}{% endfor %}{{ n.x == n.y }}",
        "{% set a = [['x' * 9999]] %}" + "{% set a = [a, a] %}" * 60 + "{{ '%s' % a }}",
        "{{ [0] * 9999 | map('default', 'x' * 999999) | list }}",
        "{{ ([''] * 99999) | map('default', 'x' * 999999, true) | list }}",
        "{% for i in range(99999) %}{% set a = [0] * 999999 %}{% endfor %}",
        "{% for i in range(99999) %}{% set a = 'x' * 9999999 %}{% endfor %}",
    ],
)
def test_a_template_that_loops_or_grows_is_a_row_error_in_bounded_time(source: str) -> None:
    started = time.monotonic()
    failure(source)
    assert time.monotonic() - started < 60  # without the bounds: hours, or all memory


def test_a_templates_output_is_bounded_while_it_is_made() -> None:
    assert "bounds" in failure("{% for i in range(9000) %}{{ messages[0].content }}{% endfor %}", "x" * 10_000)
    assert len(render("{{ messages[0].content }}", "x" * (MOST_SIZE // 2))) == MOST_SIZE // 2


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__ }}{{ messages.__init__.__globals__ }}",
        "{{ raise_exception.__globals__['sys'] }}",
        "{{ strftime_now.__globals__ }}",
        "{{ self.__init__.__globals__ }}",
        "{{ '{0.__class__.__mro__}'.format(1) }}",
        "{{ messages.append(1) }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}{{ os.getcwd() }}",
        "{{ lipsum.__globals__ }}",
        "{{ namespace.__init__ }}",
        "{{ (messages | map(attribute='__class__') | list)[0].__name__ }}",
    ],
)
def test_a_template_that_reaches_for_python_gets_an_error_or_nothing(source: str) -> None:
    with contextlib.suppress(RecordRow):
        assert render(source) == ""  # an attribute out of bounds is undefined, and prints as such


def test_a_template_that_is_no_jinja_is_the_models_error() -> None:
    with pytest.raises(ModelError, match="not valid Jinja"):
        ChatTemplate("{% for %}", tokens=TOKENS)


def test_rendering_leaves_a_debuggers_trace_as_it_was() -> None:
    before = sys.gettrace()
    render(CHATML)
    failure("{{ 1 / 0 }}")
    assert sys.gettrace() is before


def test_markdown_and_percent_signs_in_formats_are_no_harm() -> None:
    assert render("{{ '**%s** 100%%' % messages[0].content }}", "x") == "**x** 100%"
    assert render("{{ '{} and {:>4}'.format('a', 'b') }}") == "a and    b"
    assert render("{{ messages | map(attribute='content') | join(', ') }}", "a", "b") == "a, b"
    assert render("{{ 'a\\nb' | indent(2, true) }}|{{ 'x' | center(5) }}|{{ 'aXa' | replace('X', '-') }}") == (
        "  a\n  b|  x  |a-a"
    )
