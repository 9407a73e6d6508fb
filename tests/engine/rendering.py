"""What vLLM makes of a chat before its engine sees it, held against what semel makes of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from semel.core import Feature, Placeholder, Prompt, Timeline
from semel.render import ChatRequest, Rendered
from tests.engine.parity import Chat, Clip, Question, Rig

Place = tuple[int, int, tuple[bool, ...] | None]


@dataclass(frozen=True)
class Rendering:
    """A prompt as its engine would see it: tokens, where its items stand, and their tensors."""

    token_ids: list[int]
    places: Mapping[str, Sequence[Place]]
    items: Mapping[str, Sequence[Mapping[str, Any]]]


async def bare_rendering(rig: Rig, messages: Chat) -> Rendering:
    """vLLM's own. Its cache must not know the items: it would leave their tensors out."""
    from vllm.renderers.params import ChatParams

    params = ChatParams(chat_template_kwargs={"add_generation_prompt": True})
    _, (prompt,) = await rig.llm.renderer.render_chat_async([messages], params)
    return rendering_of(prompt)


def rendering_of(prompt: Any) -> Rendering:
    """A prompt of vLLM's."""
    places = {modality: list(map(_place, ranges)) for modality, ranges in prompt.get("mm_placeholders", {}).items()}
    items = {
        modality: [{name: element.data for name, element in item.items()} for item in items]
        for modality, items in prompt.get("mm_kwargs", {}).items()
    }
    return Rendering(prompt["prompt_token_ids"], places, items)


async def our_rendering(rig: Rig, messages: Chat) -> Rendering:
    """semel's, through the engine's own way of building items."""
    rendered = await rig.pipeline.chat(ChatRequest(messages))
    places: dict[str, list[Place]] = {}
    items: dict[str, list[Mapping[str, Any]]] = {}
    for item, place in zip(rendered.prompt.items, rendered.prompt.timeline, strict=True):
        mask = None if place.mask is None else tuple(map(bool, place.mask.bits))
        places.setdefault(item.modality, []).append((place.offset, place.length, mask))
        items.setdefault(item.modality, []).append(_built(rig, rendered.features[item.digest]))
    return Rendering(list(rendered.prompt.token_ids), places, items)


def same_places(ours: Rendering, bare: Rendering) -> None:
    """Assert that items stand where vLLM puts them, with the same masks."""
    assert ours.places == bare.places


def same_embeddings(ours: Rendering, bare: Rendering) -> None:
    """Assert that every embedding has its position; a place may begin or end with tokens that take none."""
    assert ours.places.keys() == bare.places.keys()
    for modality, places in bare.places.items():
        assert list(map(_embeddings, ours.places[modality])) == list(map(_embeddings, places))


def same_places_within_newlines(ours: Rendering, bare: Rendering) -> None:
    """vLLM's places begin and end with a token of newlines, which two images may share; ours are within these."""
    for mine, its in zip(ours.places.get("image", ()), bare.places.get("image", ()), strict=True):
        assert _embeddings(mine) == _embeddings(its)
        assert (mine[0], mine[1]) == (its[0] + 1, its[1] - 2)


async def compare_renderings(
    rig: Rig, chats: Sequence[Question], compare_places: Callable[[Rendering, Rendering], None] = same_places
) -> int:
    """Assert that chats are rendered alike: tokens, places, masks, all bits of tensors. Returns the count of items."""
    compared = 0
    for chat in chats:
        assert not isinstance(chat, Clip), "vLLM renders no clip apart from its answer"
        await rig.engine.reset()
        bare, ours = await bare_rendering(rig, chat), await our_rendering(rig, chat)
        assert ours.token_ids == bare.token_ids
        compare_places(ours, bare)
        compared += same_items(ours, bare)
    await rig.engine.reset()
    return compared


def same_items(ours: Rendering, bare: Rendering) -> int:
    """Assert that the tensors are the same, bit for bit; how many items there are."""
    assert ours.items.keys() == bare.items.keys()
    count = 0
    for modality, theirs in bare.items.items():
        for mine, its in zip(ours.items[modality], theirs, strict=True):
            assert mine.keys() == its.keys()
            for name, value in its.items():
                assert _same(mine[name], value), f"{name} differs"
            count += 1
    return count


def _same(mine: Any, its: Any) -> bool:
    """Whether two values of a field are the same bit by bit: a tensor, a number, or several (a list to an engine)."""
    import torch

    if isinstance(its, torch.Tensor):
        return isinstance(mine, torch.Tensor) and mine.dtype == its.dtype and torch.equal(mine, its)
    if isinstance(its, list | tuple):
        return isinstance(mine, list | tuple) and len(mine) == len(its) and all(map(_same, mine, its))
    return type(mine) is type(its) and bool(mine == its)


def rebuilt(rendered: Rendered, feature: Feature) -> Rendered:
    """The prompt of one item with another feature, made consistent with it: only the feature itself is wrong."""
    item, place = rendered.prompt.items[0], rendered.prompt.timeline[0]
    if rendered.prompt.encoder_token_ids is not None:
        timeline = Timeline.encoder([Placeholder(0, len(feature.layout))])
        ids = feature.layout.token_ids
        prompt = Prompt(rendered.prompt.token_ids, timeline, (item,), encoder_token_ids=ids)
        return Rendered(prompt, {item.digest: feature})
    tokens = list(rendered.prompt.token_ids)
    tokens[place.offset : place.end] = feature.layout.token_ids
    moved = Placeholder(place.offset, len(feature.layout), feature.layout.mask)
    return Rendered(Prompt(tokens, Timeline.decoder([moved]), (item,)), {item.digest: feature})


def _built(rig: Rig, feature: Feature) -> Mapping[str, Any]:
    return {name: element.data for name, element in rig.engine._model.build(feature).items()}


def _embeddings(place: Place) -> list[int]:
    offset, length, mask = place
    return [offset + index for index in range(length) if mask is None or mask[index]]


def _place(place: Any) -> Place:
    mask = None if place.is_embed is None else tuple(place.is_embed.tolist())
    return place.offset, place.length, mask
