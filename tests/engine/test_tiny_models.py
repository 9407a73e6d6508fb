"""Every tiny model through vLLM's own renderer and processor, without an engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from semel.lab.testing.models import FAMILIES
from semel.lab.testing.models.text import chat_template
from tests.engine.family_questions import engine_arguments, kinds_of_chats

Folder = Callable[[str], Path]

MODALITIES = {"image_url": "image", "video_url": "video", "input_audio": "audio"}


IN_CI = ("internvl-chat", "llava-next", "mistral3", "qwen2.5-omni", "qwen3-vl")


@pytest.fixture
def renderer(family: str, tiny: Folder) -> Iterator[Any]:
    from vllm.renderers import renderer_from_config

    shown = renderer_from_config(engine_arguments(family, tiny(family)).create_engine_config())
    yield shown
    shown.shutdown()


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=() if name in IN_CI else pytest.mark.nightly) for name in FAMILIES if name != "whisper"],
)
def test_vllm_renders_every_kind_of_chat_of_a_tiny_model(renderer: Any, family: str) -> None:
    from vllm.renderers.params import ChatParams

    serving = FAMILIES[family].serving
    supported = renderer.mm_processor.info.supported_mm_limits
    assert {modality for modality, limit in supported.items() if limit != 0} == set(serving.modalities)
    lengths: dict[str, set[int]] = {}
    for kind, chat in kinds_of_chats(serving.max_items):
        _, (prompt,) = renderer.render_chat([chat], ChatParams(chat_template_kwargs={"add_generation_prompt": True}))
        items = Counter(MODALITIES[part["type"]] for part in chat[0]["content"] if part["type"] != "text")
        places = {modality: len(found) for modality, found in prompt.get("mm_placeholders", {}).items()}
        assert places == dict(items), kind
        lengths.setdefault(kind, set()).add(len(prompt["prompt_token_ids"]))
        assert len(prompt["prompt_token_ids"]) < serving.max_model_len - 100
    assert all(length > max(lengths["text"]) for kind, found in lengths.items() for length in found if kind != "text")


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mistral3"])
def test_a_template_that_forgets_its_images_is_seen(renderer: Any, family: str) -> None:
    from vllm.renderers.params import ChatParams

    forgetful = chat_template({"image": ""}, turn="''", end="''", answer="''")
    (_, chat), *_ = [one for one in kinds_of_chats({"image": 1}) if one[0] == "image"]
    with pytest.raises(AssertionError, match="prompt replacement"):
        renderer.render_chat([chat], ChatParams(chat_template=forgetful))
