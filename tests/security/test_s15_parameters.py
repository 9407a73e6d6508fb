"""S15: templates come from the operator alone and run in a sandbox; numbers and lists of a request are bounded.

CVE-2025-61620, CVE-2025-62426, CVE-2026-34756. What a sandbox gives to templates is in `tests/render/test_sandbox.py`.
"""

from __future__ import annotations

import asyncio
from typing import Any

import jinja2
import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment
from pydantic import BaseModel

from semel.errors import TemplateError
from semel.frontend.api.openai import requests
from semel.frontend.service import ServedModel
from semel.render.chat.sandbox import Template
from tests.frontend.rig import MAX_IMAGES, Rig
from tests.operations import peak_bytes
from tests.render.drawn import chat

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MIB = 1024**2


@pytest.mark.parametrize(
    "field",
    [
        {"chat_template": "{{ 7 * 7 }}"},
        {"chat_template_kwargs": {"chat_template": "{{ 7 * 7 }}"}},
        {"chat_template_kwargs": {"messages": []}},
        {"chat_template_kwargs": {"raise_exception": "x"}},
        {"chat_template_kwargs": {"range": "x"}},
        {"chat_template_kwargs": {"tokenize": True}},
    ],
)
async def test_a_client_brings_no_template_and_hides_nothing_that_semel_sets(app: Rig, field: dict[str, Any]) -> None:
    """The naive route takes the client's template: it would answer with 49."""
    assert jinja2.Environment().from_string("{{ 7 * 7 }}").render() == "49"
    status, message = await app.refused(CHAT, {"messages": list(chat().messages), **field})
    assert status == 400
    assert "49" not in message
    assert app.engine.submissions == 0


ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__init__.__globals__ }}",
    "{{ raise_exception.__globals__ }}",
    "{{ strftime_now.__code__ }}",
    "{{ self.__init__.__globals__ }}",
    "{{ cycler.__init__.__globals__.os }}",
    "{{ ('%s' | format(1)).__class__.__base__ }}",
    "{{ '{0.__class__.__mro__}'.format(messages) }}",
    "{{ [messages] | map(attribute='__class__.__mro__') | list | first | first }}",
]


@pytest.mark.parametrize("text", ESCAPES)
def test_a_template_reaches_nothing_outside_of_what_it_was_given(text: str) -> None:
    shown = ""
    try:
        shown = Template.compile(text, origin="test").render({"messages": ["hello"]})
    except TemplateError as error:
        assert "cannot render these messages" in str(error)
    assert "class" not in shown
    assert "module" not in shown


def test_without_a_sandbox_the_same_templates_reach_the_interpreter() -> None:
    naive = jinja2.Environment()
    assert "<class" in naive.from_string(ESCAPES[0]).render()
    assert "<class" in naive.from_string(ESCAPES[7]).render(messages=["hello"])


BOMBS = {
    "a repeated text": "{{ 'a' * n }}",
    "a text repeated from the right": "{{ n * 'ab' }}",
    "a repeated list": "{{ ([0] * n) | length }}",
    "a range": "{{ range(n) | list | length }}",
    "a power": "{{ 2 ** n }}",
}


@pytest.mark.parametrize("text", BOMBS.values(), ids=BOMBS)
def test_a_number_that_a_client_chooses_makes_no_template_fill_the_memory(text: str) -> None:
    template = Template.compile(text, origin="test")
    assert peak_bytes(lambda: template.render({"n": 64 * MIB}), TemplateError) < MIB
    with pytest.raises(TemplateError, match="cannot render these messages"):
        template.render({"n": 64 * MIB})
    assert template.render({"n": 3})


def test_jinja_s_own_sandbox_multiplies_whatever_it_is_given() -> None:
    naive = ImmutableSandboxedEnvironment().from_string(BOMBS["a repeated text"])
    assert peak_bytes(lambda: naive.render({"n": 64 * MIB})) >= 64 * MIB


class _Naive(BaseModel):
    """What the fields are without bounds."""

    n: int = 1
    max_tokens: int | None = None
    logprobs: int | None = None
    stop: list[str] | None = None


ABUSES: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"n": 1_000_000}),
    (CHAT, {"n": 0}),
    (CHAT, {"n": -1}),
    (CHAT, {"max_tokens": 2**31}),
    (CHAT, {"max_tokens": 0}),
    (CHAT, {"max_completion_tokens": 2**63}),
    (CHAT, {"min_tokens": 2**40}),
    (CHAT, {"logprobs": True, "top_logprobs": 1_000}),
    (CHAT, {"seed": 2**64}),
    (CHAT, {"temperature": float("1e999")}),
    (CHAT, {"stop": ["x"] * 17}),
    (CHAT, {"stop": ["x" * 1_025]}),
    (CHAT, {"stop_token_ids": [1] * 129}),
    (CHAT, {"logit_bias": {str(token): 1.0 for token in range(1_025)}}),
    (CHAT, {"cache_salt": "x" * 1_025}),
    (COMPLETIONS, {"prompt": "hello", "logprobs": 1_000}),
    (COMPLETIONS, {"prompt": ["hello"] * 257}),
    (COMPLETIONS, {"prompt": [2**31]}),
    (COMPLETIONS, {"prompt": []}),
]


def test_fields_without_bounds_take_anything() -> None:
    assert _Naive.model_validate({"n": 1_000_000, "max_tokens": 2**31, "stop": ["x"] * 10_000}).n == 1_000_000


@pytest.mark.parametrize(("path", "field"), ABUSES, ids=lambda value: str(value)[:40])
async def test_numbers_and_lists_that_would_cost_others_are_refused(app: Rig, path: str, field: dict[str, Any]) -> None:
    body = {"messages": list(chat().messages), **field} if path == CHAT else field
    if field.get("temperature"):
        response = await app.client.post(path, content=b'{"messages":[{"role":"user"}],"temperature":1e999}')
    else:
        response = await app.post(path, body)
    assert response.status_code == 400, response.text
    assert next(name for name in field if name != "prompt" or len(field) == 1) in response.json()["error"]["message"]
    assert app.engine.submissions == 0


LONG = "x" * 600_000
"""Of a text that is within a bound of its own, and not within it twice."""

PRODUCTS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "answers by the logprobs of each": (
        "logprob_token_ids",
        {"n": 1, "logprobs": True, "logprob_token_ids": list(range(128))},
        {"n": 128, "logprobs": True, "logprob_token_ids": list(range(128))},
    ),
    "tools and what is for the template": (
        "characters",
        {"tools": [{"type": "function", "function": {"name": "f", "description": LONG}}]},
        {
            "tools": [{"type": "function", "function": {"name": "f", "description": LONG}}],
            "chat_template_kwargs": {"a": LONG},
        },
    ),
    "images of a message by messages": (
        " images; ",
        {"messages": list(chat(*range(MAX_IMAGES)).messages)},
        {"messages": [message for n in range(3) for message in chat(*range(n, n + 4)).messages]},
    ),
    "texts of a message by messages": (
        "characters",
        {"messages": [{"role": "user", "content": "x" * 1_000}]},
        {"messages": [{"role": "user", "content": "x" * 1_000}] * 200},
    ),
}
"""By what is multiplied: a word of the refusal; a request at the bound of each part; one whose parts are all within
their bounds, and whose product is not."""


async def check_the_product_is_bounded(app: Rig, name: str, *, within_s: float = 60.0) -> None:
    word, within, over = PRODUCTS[name]
    plain = {"messages": list(chat().messages)}
    assert (await app.post(CHAT, {**plain, **within})).status_code == 200
    answered = app.engine.submissions
    try:
        async with asyncio.timeout(within_s):  # an engine that gets it works for as long as its answers take
            response = await app.post(CHAT, {**plain, **over})
    except TimeoutError:
        raise AssertionError("it was submitted") from None
    assert response.status_code == 400, response.text
    assert word in response.json()["error"]["message"]
    assert app.engine.submissions == answered


@pytest.mark.parametrize("name", PRODUCTS)
async def test_what_is_bounded_singly_is_bounded_in_its_product(app: Rig, name: str) -> None:
    """Those that are bounded by now. Prompts × `n`, items × pixels and answers × tokens × logprobs are not (S21)."""
    await check_the_product_is_bounded(app, name)


PRODUCT_MUTANTS: dict[str, tuple[Any, str, Any]] = {
    "answers by the logprobs of each": (requests, "_MAX_CHOSEN_LOGPROBS", 10**9),
    "tools and what is for the template": (requests, "_MAX_TEMPLATE_CHARS", 10**9),
    "images of a message by messages": (ServedModel, "check_items", lambda *_: None),
    "texts of a message by messages": (ServedModel, "max_chars", 10**9),
}


@pytest.mark.parametrize("name", PRODUCTS)
async def test_a_mutant_that_bounds_the_parts_only_is_found(
    app: Rig, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(*PRODUCT_MUTANTS[name])
    with pytest.raises(AssertionError):
        await check_the_product_is_bounded(app, name, within_s=0.5)
