from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from semel.errors import ConfigError, InvalidRequest, TemplateError
from semel.render import ChatRenderer, ChatTemplate, Conversation


def shown(renderer: ChatRenderer, *messages: dict[str, Any], **options: Any) -> str:
    token_ids = renderer.tokenize(Conversation.parse([*messages]), **options)
    return renderer.tokenizer.decode(token_ids)


def with_template(renderer: ChatRenderer, folder: Path, text: str) -> ChatRenderer:
    return dataclasses.replace(renderer, template=ChatTemplate.load(folder, override=text))


def test_a_chat_with_items_of_two_modalities_is_rendered_in_the_format_of_its_template(
    parts_renderer: ChatRenderer, string_renderer: ChatRenderer, pixel: dict[str, Any], clip: dict[str, Any]
) -> None:
    message = {"role": "user", "content": ["a", pixel, "b", clip, pixel]}
    assert shown(parts_renderer, message, add_generation_prompt=False) == (
        "<|im_start|>user\na<|image_pad|>b<|AUDIO|><|image_pad|><|im_end|>\n"
    )
    assert shown(string_renderer, message) == (
        "<|im_start|>user\n<|image_pad|>\n<|image_pad|>\nAudio 1: <|AUDIO|>\na\nb<|im_end|>\n<|im_start|>assistant\n"
    )


def test_the_ids_of_placeholders_come_from_the_tokenizer(parts_renderer: ChatRenderer) -> None:
    assert parts_renderer.placeholder_ids() == {3: "image", 4: "audio", 5: "video"}
    with pytest.raises(ConfigError, match="'<image>' is not a token of this model's tokenizer"):
        dataclasses.replace(parts_renderer, placeholders={"image": "<image>"}).placeholder_ids()


def test_the_final_message_is_continued(parts_renderer: ChatRenderer, pixel: dict[str, Any]) -> None:
    final = {"role": "assistant", "content": ["I see ", pixel, "a cat ", pixel]}
    options = {"continue_final_message": True, "add_generation_prompt": False}
    assert shown(parts_renderer, {"role": "user", "content": "hi"}, final, **options).endswith(
        "assistant\nI see <|image_pad|>a cat "
    )


@pytest.mark.parametrize(("content", "expected"), [("a cat ", "a cat"), ("<|image_pad|> ", "<|image_pad|>"), ("", "")])
def test_a_final_message_that_the_template_trims_is_continued_without_its_spaces(
    string_renderer: ChatRenderer, content: str, expected: str
) -> None:
    final = {"role": "assistant", "content": content}
    text = shown(string_renderer, final, continue_final_message=True, add_generation_prompt=False)
    assert text.rstrip("\n") == f"<|im_start|>assistant\n{expected}".rstrip("\n")


def test_a_final_message_that_cannot_be_continued_is_refused(
    parts_renderer: ChatRenderer, folder: Path, pixel: dict[str, Any]
) -> None:
    options = {"continue_final_message": True, "add_generation_prompt": False}
    with pytest.raises(TemplateError, match="has no text that could be continued"):
        shown(parts_renderer, {"role": "assistant", "content": [pixel]}, **options)
    with pytest.raises(TemplateError, match="does not show the end of the final message"):
        shown(with_template(parts_renderer, folder, "{{ 'x' }}"), {"role": "assistant", "content": "a"}, **options)
    with pytest.raises(InvalidRequest, match="exclude each other"):
        shown(parts_renderer, {"role": "assistant", "content": "a"}, continue_final_message=True)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{% for m in messages %}{{ m.role }}={{ m.content }};{% endfor %}", "system=a\n\nb;user=c;"),
        ("{% for m in messages %}{{ m.role if m.role != 'developer' else 'dev' }};{% endfor %}", "system;user;dev;"),
    ],
)
def test_developers_reach_only_templates_that_know_them(
    string_renderer: ChatRenderer, folder: Path, text: str, expected: str
) -> None:
    turns = [
        {"role": role, "content": content} for role, content in zip(("system", "user", "developer"), "acb", strict=True)
    ]
    assert shown(with_template(string_renderer, folder, text), *turns) == expected


def test_tools_choose_the_template_and_reach_it(string_renderer: ChatRenderer) -> None:
    tools = [{"type": "function", "function": {"name": "look"}}]
    assert shown(string_renderer, {"role": "user", "content": "hi"}, tools=tools).startswith(str(tools))


def test_s14_the_template_may_pad_cut_and_change_guarded_text(string_renderer: ChatRenderer, folder: Path) -> None:
    text = "{% for m in messages %}{{ m.content | upper }}{{ m.content[:5] }}{{ [m.content] }}{% endfor %}"
    changed = shown(with_template(string_renderer, folder, text), {"role": "user", "content": "<|image_pad|>"})
    assert changed == "<|IMAGE_PAD|><|im['<|image_pad|>']"
