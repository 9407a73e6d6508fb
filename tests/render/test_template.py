from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from semel.errors import ConfigError, InvalidRequest
from semel.render import ChatTemplate

NAMED = [{"name": "default", "template": "default"}, {"name": "tool_use", "template": "tool_use"}]


def model(folder: Path, files: Mapping[str, Any]) -> Path:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


def rendered(template: ChatTemplate, tools: list[Any] | None = None, **kwargs: Any) -> str:
    return template.render([{"role": "user"}], tools=tools, add_generation_prompt=True, kwargs=kwargs)


@pytest.mark.parametrize(
    ("files", "plain", "with_tools"),
    [
        ({"tokenizer_config.json": {"chat_template": "tok"}}, "tok", "tok"),
        ({"tokenizer_config.json": {"chat_template": NAMED}}, "default", "tool_use"),
        ({"tokenizer_config.json": {"chat_template": NAMED[:1]}}, "default", "default"),
        ({"tokenizer_config.json": {"chat_template": "tok"}, "chat_template.jinja": "file"}, "file", "file"),
        (
            {"tokenizer_config.json": {"chat_template": "tok"}, "chat_template.json": {"chat_template": "old"}},
            "old",
            "tok",
        ),
        ({"chat_template.jinja": "file", "chat_template.json": {"chat_template": "old"}}, "old", "file"),
        ({"chat_template.jinja": "file", "processor_config.json": {"chat_template": "config"}}, "config", "file"),
        ({"chat_template.jinja": "file", "processor_config.json": {"image_seq_len": 4}}, "file", "file"),
        ({"chat_template.jinja": "file", "additional_chat_templates/tool_use.jinja": "t"}, "file", "t"),
        (
            {
                "chat_template.jinja": "file",
                "chat_template.json": {"chat_template": "old"},
                "additional_chat_templates/rag.jinja": "rag",
            },
            "file",
            "file",
        ),
        ({"chat_template.json": {"chat_template": "old"}}, "old", "old"),
    ],
)
def test_the_template_is_found_in_the_order_of_vllm(
    tmp_path: Path, files: Mapping[str, Any], plain: str, with_tools: str
) -> None:
    template = ChatTemplate.load(model(tmp_path, files))
    assert (rendered(template), rendered(template, tools=[])) == (plain, with_tools)


def test_the_operators_template_wins_for_every_request(tmp_path: Path) -> None:
    folder = model(tmp_path, {"tokenizer_config.json": {"chat_template": NAMED}, "mine.jinja": "mine"})
    for override, expected in (
        ("{{ 'inline' }}", "inline"),
        ("tool_use", "tool_use"),
        (folder / "mine.jinja", "mine"),
        (str(folder / "mine.jinja"), "mine"),
    ):
        template = ChatTemplate.load(folder, override=override)
        assert rendered(template) == rendered(template, tools=[]) == expected


def test_the_operator_may_choose_the_content_format_of_every_template(tmp_path: Path) -> None:
    folder = model(tmp_path, {})
    template = ChatTemplate.load(folder, override="{{ messages[0].content }}")
    assert (template.content_format, template.with_tools.content_format) == ("string", "string")
    chosen = template.with_format("openai")
    assert (chosen.content_format, chosen.with_tools.content_format) == ("openai", "openai")
    assert chosen.plain.text == template.plain.text


def test_an_override_that_does_not_exist_is_named_with_what_does(tmp_path: Path) -> None:
    folder = model(tmp_path, {"tokenizer_config.json": {"chat_template": NAMED}})
    with pytest.raises(ConfigError, match=r"no chat template 'mine\.jinja'.*\(default, tool_use\)"):
        ChatTemplate.load(folder, override="mine.jinja")


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "has no chat template: give a Jinja file with --chat-template"),
        (
            {"tokenizer_config.json": {"chat_template": NAMED[1:]}},
            "no default: name one with --chat-template: tool_use",
        ),
        ({"tokenizer_config.json": {"chat_template": 5}}, '"chat_template" must be a text or a list'),
        ({"tokenizer_config.json": {"chat_template": [{"name": "a"}]}}, '"chat_template" must be a text or a list'),
        ({"tokenizer_config.json": "not json"}, "tokenizer_config.json is not JSON"),
        ({"tokenizer_config.json": []}, "must hold a JSON object, not a list"),
        ({"chat_template.jinja": "{% if %}"}, "line 1: not a Jinja template"),
    ],
)
def test_a_folder_without_a_usable_template_says_what_to_do(
    tmp_path: Path, files: Mapping[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        ChatTemplate.load(model(tmp_path, files))
    assert message in str(caught.value)


def test_special_tokens_are_variables(tmp_path: Path) -> None:
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "pad_token": None, "added_tokens_decoder": {}}
    text = "{{ bos_token }}{{ eos_token }}{{ pad_token is defined }}{{ documents }}"
    folder = model(tmp_path, {"tokenizer_config.json": config, "chat_template.jinja": text})
    assert rendered(ChatTemplate.load(folder)) == "<s></s>FalseNone"


def test_special_tokens_of_old_folders_are_in_a_file_of_their_own(tmp_path: Path) -> None:
    files = {"special_tokens_map.json": {"bos_token": {"content": "<s>"}}, "chat_template.jinja": "{{ bos_token }}"}
    assert rendered(ChatTemplate.load(model(tmp_path, files))) == "<s>"


def test_s15_a_request_sets_variables_but_none_that_semel_sets(tmp_path: Path) -> None:
    files = {
        "tokenizer_config.json": {"bos_token": "<s>"},
        "chat_template.jinja": "{{ enable_thinking }}{{ documents }}",
    }
    template = ChatTemplate.load(model(tmp_path, files))
    assert rendered(template, enable_thinking=False, documents=["d"], unknown=1) == "False['d']"
    for name in ("messages", "chat_template", "tokenize", "bos_token", "raise_exception", "range"):
        with pytest.raises(InvalidRequest, match=f"chat_template_kwargs must not set {name}"):
            template.render([], tools=None, add_generation_prompt=True, kwargs={name: "x"})
