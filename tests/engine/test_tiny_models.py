"""Every tiny model through vLLM's own renderer and processor, without an engine; and how its answers are judged."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from semel.testing.models import FAMILIES
from semel.testing.models.templates import chat_template
from tests.engine.bare import Verdict, engine_arguments, questions, verdict
from tests.engine.parity import Answer

Folder = Callable[[str], Path]

MODALITIES = {"image_url": "image", "video_url": "video", "input_audio": "audio"}

ONE = Answer((1, 2), ({1: -0.5}, {2: -0.1}))
NEAR = Answer((1, 2), ({1: -0.5}, {2: -0.2}))


@pytest.fixture
def renderer(family: str, tiny: Folder) -> Iterator[Any]:
    from vllm.renderers import renderer_from_config

    shown = renderer_from_config(engine_arguments(family, tiny(family)).create_engine_config())
    yield shown
    shown.shutdown()


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "whisper"])
def test_vllm_renders_every_kind_of_chat_of_a_tiny_model(renderer: Any, family: str) -> None:
    from vllm.renderers.params import ChatParams

    serving = FAMILIES[family].serving
    supported = renderer.mm_processor.info.supported_mm_limits
    assert {modality for modality, limit in supported.items() if limit != 0} == set(serving.modalities)
    lengths: dict[str, set[int]] = {}
    for kind, chat in questions(serving.max_items):
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
    (_, chat), *_ = [one for one in questions({"image": 1}) if one[0] == "image"]
    with pytest.raises(AssertionError, match="prompt replacement"):
        renderer.render_chat([chat], ChatParams(chat_template=forgetful))


def test_a_verdict_counts_answers_that_differ_in_logprobs_alone() -> None:
    found = verdict(["image", "image", "audio"], [ONE, NEAR, ONE], [ONE, NEAR, NEAR])
    assert found == Verdict(questions=3, distinct=2, distinct_tokens=1, repeats=2, kinds=["image", "audio"])
    assert not found.is_right
    assert verdict(["image", "image"], [ONE, NEAR], [ONE, NEAR]).is_right
