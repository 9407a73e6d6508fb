from __future__ import annotations

import pytest

from semel.render.chat.sandbox import Template

MESSAGES = "{% for m in messages %}"
END = "{% endfor %}"
TEMPLATES = {
    "no loop over content": ("string", f"{MESSAGES}{{{{ m.role }}}}: {{{{ m.content }}}}{END}"),
    "loop over an attribute": ("openai", f"{MESSAGES}{{% for c in m.content %}}{{{{ c.text }}}}{END}{END}"),
    "loop over a key": ("openai", f"{MESSAGES}{{% for c in m['content'] %}}{{{{ c.text }}}}{END}{END}"),
    "loop over another key": ("string", f"{MESSAGES}{{% for c in m['parts'] %}}{{{{ c.text }}}}{END}{END}"),
    "loop over filtered content": (
        "openai",
        f"{MESSAGES}{{% for c in m.content | selectattr('type', 'equalto', 'text') %}}{{{{ c.text }}}}{END}{END}",
    ),
    "loop over a slice of content": ("openai", f"{MESSAGES}{{% for c in m.content[1:] %}}{{{{ c.text }}}}{END}{END}"),
    "messages by another name": (
        "openai",
        f"{{% set turns = messages[1:] %}}{{% for m in turns %}}{{% for c in m.content %}}x{END}{END}",
    ),
    "messages by a third name": (
        "openai",
        f"{{% set a = messages | list %}}{{% set b = a %}}{{% for m in b %}}{{% for c in m['content'] %}}x{END}{END}",
    ),
    "a variable named content": (
        "openai",
        f"{MESSAGES}{{% set content = m.content %}}{{% for c in content %}}x{END}{END}",
    ),
    "a variable named otherwise": ("string", f"{MESSAGES}{{% set body = m.content %}}{{% for c in body %}}x{END}{END}"),
    "a macro that gets content by position": (
        "openai",
        f"{{% macro show(body) %}}{{% for c in body %}}x{END}{{% endmacro %}}{MESSAGES}{{{{ show(m.content) }}}}{END}",
    ),
    "a macro that gets content by name": (
        "openai",
        f"{{% macro f(a, b) %}}{{% for c in b %}}x{END}{{% endmacro %}}{MESSAGES}{{{{ f(1, b=m['content']) }}}}{END}",
    ),
    "a macro that gets a role": (
        "string",
        f"{{% macro show(body) %}}{{% for c in body %}}x{END}{{% endmacro %}}{MESSAGES}{{{{ show(m.role) }}}}{END}",
    ),
    "a macro with a parameter named content that gets none": (
        "string",
        f"{{% macro show(content) %}}{{% for c in content %}}x{END}{{% endmacro %}}{MESSAGES}{{{{ show('a') }}}}{END}",
    ),
    "a message by index": ("string", f"{{% for c in messages[0].content %}}x{END}"),
    "a loop that unpacks messages": (
        "string",
        f"{{% for a, b in messages %}}x{END}{MESSAGES}{{% for c in m.content %}}x{END}{END}",
    ),
    "a loop that unpacks content": ("string", f"{MESSAGES}{{% for a, b in m.content %}}x{END}{END}"),
    "an assignment into a namespace": (
        "string",
        f"{{% set n = namespace(m=1) %}}{{% set n.m = messages %}}{MESSAGES}{{% for c in m.content %}}x{END}{END}",
    ),
    "inside a generation block": (
        "openai",
        f"{MESSAGES}{{% generation %}}{{% for c in m.content %}}x{END}{{% endgeneration %}}{END}",
    ),
}


@pytest.mark.parametrize(("expected", "text"), TEMPLATES.values(), ids=TEMPLATES)
def test_the_content_format_is_read_off_the_template(expected: str, text: str) -> None:
    assert Template.compile(text, origin="test").content_format == expected


@pytest.mark.engine
@pytest.mark.parametrize("text", [text for _, text in TEMPLATES.values()], ids=TEMPLATES)
def test_vllm_gives_the_same_answer(text: str) -> None:
    from vllm.renderers.hf import _detect_content_format

    assert Template.compile(text, origin="test").content_format == _detect_content_format(text, default="string")


def test_s15_variables_that_are_assigned_in_a_circle_end() -> None:
    circle = "{% set a = messages %}{% set b = a %}{% set a = b %}"  # vLLM 0.32 does not come back from it
    template = Template.compile(f"{circle}{{% for m in a %}}{{% for c in m.content %}}x{END}{END}", origin="test")
    assert template.content_format == "openai"
