from __future__ import annotations

import datetime as dt
from typing import Any

import pytest

from semel.errors import ConfigError, TemplateError
from semel.render.chat.sandbox import Template
from semel.render.tokens.placeholder_escape import LETTERS


def rendered(text: str, **variables: Any) -> str:
    return Template.compile(text, origin="test").render(variables)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{% for x in [1, 2, 3] %}{% if x == 2 %}{% continue %}{% endif %}{{ x }}{% endfor %}", "13"),
        ("{% for x in [1, 2, 3] %}{% if x == 2 %}{% break %}{% endif %}{{ x }}{% endfor %}", "1"),
        ("a\n  {% if true %}\nb\n  {% endif %}\nc", "a\nb\nc"),
        ("{% generation %}said{% endgeneration %}!", "said!"),
        ("{% set x = 1 %}{% generation %}{% set x = 2 %}{% endgeneration %}{{ x }}", "1"),
        ("{{ {'ä': '<b>', 'n': none} | tojson }}", '{"ä": "<b>", "n": null}'),
        ("{{ {'b': 1, 'a': [2]} | tojson(indent=1, sort_keys=true) }}", '{\n "a": [\n  2\n ],\n "b": 1\n}'),
        ("{{ [1, {'a': 2}] | tojson(separators=(',', ':')) }}", '[1,{"a":2}]'),
        ("{{ 'ä🙂\x7f\"' | tojson(ensure_ascii=true) }}", '"\\u00e4\\ud83d\\ude42\\u007f\\""'),
    ],
)
def test_templates_have_what_transformers_gives_them(text: str, expected: str) -> None:
    assert rendered(text) == expected


def test_templates_can_ask_for_the_date() -> None:
    before = dt.date.today()
    shown = rendered("{{ strftime_now('%Y-%m-%d') }}")
    assert before <= dt.date.fromisoformat(shown) <= dt.date.today()


def test_s14_ascii_json_leaves_the_letters_of_a_guard() -> None:
    assert rendered("{{ x | tojson(ensure_ascii=true) }}", x=f"é{LETTERS[3]}") == f'"\\u00e9{LETTERS[3]}"'


def test_what_a_template_refuses_is_told() -> None:
    with pytest.raises(TemplateError, match="refuses these messages: roles must alternate"):
        rendered("{{ raise_exception('roles must alternate') }}")


@pytest.mark.parametrize(
    "text",
    [
        "{{ missing.attribute }}",
        "{{ 1 / 0 }}",
        "{{ messages + 1 }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ range(10000000) | list }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_s7_s15_what_a_template_fails_with_is_not_told_and_the_sandbox_holds(text: str) -> None:
    with pytest.raises(TemplateError, match=r"cannot render these messages \(\w+\): check roles") as caught:
        rendered(text, messages=["secret"])
    assert caught.value.__cause__ is not None
    assert str(caught.value.__cause__) not in str(caught.value)


def test_a_text_that_is_not_jinja_is_named_with_its_line() -> None:
    with pytest.raises(ConfigError, match=r"^here, line 2: not a Jinja template"):
        Template.compile("a\n{% for %}", origin="here")
