"""The same token ids as transformers and vLLM make of the same messages, with the tiny models' own files."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semel.core import Modality
from semel.lab.testing.models import build
from semel.render import ChatRenderer, ChatTemplate, Tokenizer
from semel.render.chat.messages import Conversation
from semel.render.chat.template_messages import transcribe
from tests.effort import examples

PLACEHOLDERS: dict[str, dict[Modality, str]] = {
    "qwen2-vl": {"image": "<|image_pad|>", "video": "<|video_pad|>"},
    "qwen2-audio": {"audio": "<|AUDIO|>"},
}
STRING_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{{ enable_thinking }}{% endif %}"
)

WORDS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20) | st.sampled_from(
    [
        *("hello there", " two  spaces ", "line\nbreak\r\n\t", "ünïcödé 🙂 日本語", "e\u0301", "<|im_end|>", "{{ x }}"),
        *("\0", "<|"),
    ]
)
MEDIA: dict[str, list[dict[str, Any]]] = {
    "qwen2-vl": [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,YWJj"}},
        {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,YWJj"}},
    ],
    "qwen2-audio": [
        {"type": "input_audio", "input_audio": {"data": "YWJj", "format": "wav"}},
        {"type": "audio_url", "audio_url": {"url": "data:audio/wav;base64,YWJj"}},
    ],
}
EXAMPLES = settings(deadline=None, max_examples=examples(50))
CALLS = st.sampled_from([[], [{"type": "function", "function": {"name": "f", "arguments": '{"ä": "<b>"}'}}]])


def insertion(modality: Modality, index: int, /) -> str:
    if modality == "audio":
        return f"Audio {index}: <|audio_bos|><|AUDIO|><|audio_eos|>"
    return f"<|vision_start|>{PLACEHOLDERS['qwen2-vl'][modality]}<|vision_end|>"


def chats(family: str) -> st.SearchStrategy[list[dict[str, Any]]]:
    part = WORDS | WORDS.map(lambda text: {"type": "text", "text": text}) | st.sampled_from(MEDIA[family])
    turn = st.fixed_dictionaries(
        {
            "role": st.sampled_from(["user", "assistant", "system", "tool"]),
            "content": WORDS | st.lists(part, max_size=4),
        },
        optional={"tool_calls": CALLS, "name": WORDS, "reasoning": WORDS, "tool_call_id": WORDS},
    )
    return st.lists(turn, min_size=1, max_size=4)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for family in PLACEHOLDERS:
        build(family, folder / family)
    return folder


@pytest.fixture(scope="module", params=PLACEHOLDERS)
def folder(models: Path, request: pytest.FixtureRequest) -> Path:
    return models / str(request.param)


@pytest.fixture(scope="module", params=[None, STRING_TEMPLATE], ids=["its own template", "a string template"])
def override(request: pytest.FixtureRequest) -> str | None:
    text: str | None = request.param
    return text


@pytest.fixture(scope="module")
def renderer(folder: Path, override: str | None) -> ChatRenderer:
    template = ChatTemplate.load(folder, override=override)
    return ChatRenderer(template, Tokenizer.load(folder), PLACEHOLDERS[folder.name], insertion)


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.load(folder)


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


@EXAMPLES
@given(text=WORDS)
def test_text_gives_the_tokens_of_transformers(tokenizer: Tokenizer, reference: Any, text: str) -> None:
    assert tokenizer.encode(text) == reference.encode(text, add_special_tokens=False)
    assert tokenizer.encode(text, add_special_tokens=True) == reference.encode(text)
    assert tokenizer.decode(tokenizer.encode(text)) == reference.decode(reference.encode(text))


@EXAMPLES
@given(data=st.data(), continued=st.booleans())
def test_chats_give_the_tokens_of_transformers(
    folder: Path, override: str | None, renderer: ChatRenderer, reference: Any, data: st.DataObject, continued: bool
) -> None:
    conversation = Conversation.parse(data.draw(chats(folder.name)))
    shown = transcribe(conversation, content_format=renderer.template.content_format, insertion=insertion)
    options: dict[str, Any] = {"continue_final_message": continued, "add_generation_prompt": not continued}
    try:
        expected = reference.apply_chat_template(
            shown, chat_template=override, tokenize=True, return_dict=False, enable_thinking=True, **options
        )
    except ValueError:
        return  # there is nothing to continue
    assert expected == renderer.tokenize(conversation, template_kwargs={"enable_thinking": True}, **options)


_VLLM_MARKS: Mapping[Modality, str] = {"audio": "<##AUDIO##>", "image": "<##IMAGE##>", "video": "<##VIDEO##>"}


class VllmParser:
    """The part of vLLM's media tracker that its message parser talks to."""

    model_config = SimpleNamespace(enable_prompt_embeds=False)

    def __init__(self, seen: dict[str, int]) -> None:
        self.seen = seen
        self.placeholders: dict[str, list[str]] = {}

    def add(self, modality: Modality) -> None:
        self.seen[modality] = self.seen.get(modality, 0) + 1
        self.placeholders.setdefault(_VLLM_MARKS[modality], []).append(insertion(modality, self.seen[modality]))

    def parse_image(self, *_: object) -> None:
        self.add("image")

    def parse_video(self, *_: object) -> None:
        self.add("video")

    def parse_audio(self, *_: object) -> None:
        self.add("audio")

    parse_input_audio = parse_audio

    def mm_placeholder_storage(self) -> dict[str, list[str]]:
        return self.placeholders


@pytest.mark.engine
@EXAMPLES
@given(
    data=st.data(),
    tools=st.none() | st.just([{"type": "function", "function": {"name": "f"}}]),
    interleaves=st.booleans(),
)
def test_chats_give_the_tokens_of_vllms_renderer(
    folder: Path,
    override: str | None,
    renderer: ChatRenderer,
    reference: Any,
    data: st.DataObject,
    tools: list[Any] | None,
    interleaves: bool,
) -> None:
    from vllm.renderers.chat_utils import MODALITY_PLACEHOLDERS_MAP, _parse_chat_message_content, _postprocess_messages
    from vllm.renderers.hf import resolve_chat_template_content_format, safe_apply_chat_template

    assert all(MODALITY_PLACEHOLDERS_MAP[modality] == mark for modality, mark in _VLLM_MARKS.items())
    messages = data.draw(chats(folder.name))
    if data.draw(st.booleans()):
        messages.append({"role": "developer", "content": data.draw(WORDS)})
    config = SimpleNamespace(
        model=str(folder),
        tokenizer=str(folder),
        revision=None,
        tokenizer_revision=None,
        code_revision=None,
        trust_remote_code=False,
        hf_config=SimpleNamespace(model_type="none"),
    )
    content_format = resolve_chat_template_content_format(override, tools, "auto", reference, model_config=config)
    seen: dict[str, int] = {}
    tracker = SimpleNamespace(create_parser=lambda **_: VllmParser(seen))
    theirs = [
        turn
        for message in copy.deepcopy(messages)
        for turn in _parse_chat_message_content(message, tracker, content_format, interleave_strings=interleaves)
    ]
    _postprocess_messages(theirs)
    expected = safe_apply_chat_template(
        config, reference, theirs, tools=tools, chat_template=override, add_generation_prompt=True, enable_thinking=True
    )

    conversation = Conversation.parse(messages)
    assert renderer.template.chosen_for(tools).content_format == content_format
    renderer = replace(renderer, interleaves=interleaves)
    assert renderer.tokenize(conversation, tools=tools, template_kwargs={"enable_thinking": True}) == expected
