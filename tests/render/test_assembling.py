"""Chats of models whose items do not simply replace one token: who puts the items in, and what stays text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semel.core import Assembly, AssemblyKind, Feature, Key, Layout, Media, Modality
from semel.errors import ConfigError, InvalidRequest, ServiceError
from semel.processing.pool.pipe import Description
from semel.render import ChatRenderer, ChatRequest, Pipeline
from semel.render.chat.messages import Conversation

SEVERAL = "<image>"
"""Three tokens of the test's tokenizer."""

LAYOUTS: Mapping[Modality, Layout] = {"image": Layout((9, 9)), "audio": Layout((8,))}


class Calls(list[tuple[list[int], list[Modality], str]]):
    """Stands for a pool: notes what it is asked, and puts every item before the text."""

    async def __call__(
        self, token_ids: Sequence[int], items: Sequence[tuple[Modality, Layout]], /, *, tenant: str = ""
    ) -> Assembly:
        self.append((list(token_ids), [modality for modality, _ in items], tenant))
        return Assembly(token_ids, [(index, 0) for index in range(len(items))])


async def process(media: Media, options: Mapping[str, object], **_: Any) -> Feature:
    del options
    return Feature(media.modality, {}, LAYOUTS[media.modality])


@pytest.fixture
def calls() -> Calls:
    return Calls()


@pytest.fixture
def pipeline(string_renderer: ChatRenderer, calls: Calls) -> Pipeline:
    described = Description(
        "f",
        {"image": SEVERAL, "audio": "<|AUDIO|>"},
        encoder_decoder=False,
        insertions={"video": ""},
        assembly={"image": "apply", "audio": "splice", "video": "apply"},
    )
    renderer = replace(
        string_renderer, placeholders=described.placeholders, insertion=described.insertion, assembly=described.assembly
    )
    return Pipeline(renderer.tokenizer, renderer, process, "f", Key(bytes(32)), apply=calls)


def chat(*parts: Any) -> ChatRequest:
    return ChatRequest([{"role": "user", "content": list(parts)}])


async def test_only_items_that_need_it_go_to_the_model_s_processor(
    pipeline: Pipeline, calls: Calls, pixel: dict[str, Any], clip: dict[str, Any]
) -> None:
    heard = (await pipeline.chat(chat("hello", clip))).prompt
    assert not calls
    assert [place.length for place in heard.timeline] == [1]
    both = (await pipeline.chat(chat("hello", clip, pixel))).prompt
    ((token_ids, modalities, _),) = calls
    assert modalities == ["audio", "image"]
    assert pipeline.tokenizer.decode(token_ids).count(SEVERAL) == 1
    assert [item.modality for item in both.items] == ["audio", "image"]
    assert [*both.token_ids] == [8, 9, 9, *token_ids]


async def test_a_chat_without_items_needs_no_processor_and_may_spell_a_placeholder_of_several_tokens(
    pipeline: Pipeline, calls: Calls
) -> None:
    prompt = (await pipeline.chat(chat(f"what is {SEVERAL}?"))).prompt
    assert f"what is {SEVERAL}?" in pipeline.tokenizer.decode([*prompt.token_ids])
    assert not calls


async def test_without_a_processor_it_is_refused(pipeline: Pipeline, pixel: dict[str, Any]) -> None:
    with pytest.raises(ServiceError, match="has to assemble"):
        await replace(pipeline, apply=None).chat(chat(pixel))


async def test_places_that_make_no_prompt_are_an_error(pipeline: Pipeline, pixel: dict[str, Any]) -> None:
    async def lossy(token_ids: Sequence[int], items: object, /, *, tenant: str = "") -> Assembly:
        del items, tenant
        return Assembly(token_ids, [])

    with pytest.raises(ServiceError, match="1 items have 0 places"):
        await replace(pipeline, apply=lossy).chat(chat(pixel))


@given(before=st.sampled_from(["", "a ", SEVERAL, f"{SEVERAL}<", "<<image>", "<|AUDIO|>"]), behind=st.text(max_size=4))
def test_a_text_that_spells_a_placeholder_of_several_tokens_has_other_tokens_S14(
    string_renderer: ChatRenderer, before: str, behind: str
) -> None:
    kinds: Mapping[Modality, AssemblyKind] = {"image": "apply"}
    renderer = replace(
        string_renderer, placeholders={"image": SEVERAL, "audio": "<|AUDIO|>"}, insertion=spelled, assembly=kinds
    )
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,cG5n"}}
    conversation = Conversation.parse([{"role": "user", "content": [f"{before}{behind}", image]}])
    token_ids = renderer.tokenize(conversation)
    target = renderer.tokenizer.encode(SEVERAL)
    assert len(target) > 1
    assert count(token_ids, target) == 1
    assert f"{before}{behind}".strip() in renderer.tokenizer.decode(token_ids)


def test_cut_once_a_spelling_gives_the_placeholder_s_own_tokens(string_renderer: ChatRenderer) -> None:
    """The control of the test before: what is right for one token is not for several."""
    tokenizer = string_renderer.tokenizer
    assert tokenizer.encode_apart(["<", "image>"]) == tokenizer.encode(SEVERAL)


def test_placeholders_of_several_tokens_have_no_id_unless_they_are_to_be_spliced(pipeline: Pipeline) -> None:
    renderer = pipeline.chat_renderer
    assert renderer is not None
    assert renderer.placeholder_ids() == {4: "audio"}
    with pytest.raises(ConfigError, match="is not a token"):
        replace(renderer, assembly={}).placeholder_ids()


def test_a_model_that_inserts_its_items_writes_nothing_for_them() -> None:
    described = Description("f", {}, encoder_decoder=False, insertions={"image": ""}, assembly={"image": "apply"})
    assert described.insertion("image", 1) == ""
    with pytest.raises(ConfigError, match="takes no audio"):
        described.insertion("audio", 1)


async def test_a_token_of_a_spliced_modality_without_its_item_is_refused(pipeline: Pipeline) -> None:
    with pytest.raises(InvalidRequest, match="placeholder of audio"):
        await pipeline.render(pipeline.read_completion([1, 4, 2]))


def spelled(modality: Modality, index: int, /) -> str:
    del index
    return SEVERAL if modality == "image" else "<|AUDIO|>"


def count(token_ids: Sequence[int], target: Sequence[int]) -> int:
    size = len(target)
    starts = [at for at in range(len(token_ids) - size + 1) if [*token_ids[at : at + size]] == [*target]]
    return sum(1 for before, after in pairwise([-size, *starts]) if after - before >= size)
