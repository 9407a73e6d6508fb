"""Qwen2-VL on the real engine: parity with vLLM's own rendering, malformed features, many items in one prompt."""

from __future__ import annotations

import gc
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from semel.core import Feature, Layout, Mask, Media, Modality, Placeholder, Prompt, Tensor, Timeline
from semel.errors import FeatureMissing, FeatureRejected, InvalidRequest, PromptTooLong
from semel.processing import from_torch, to_torch
from semel.render import ChatRequest, ProcessItem, Rendered
from tests.engine.parity import Rig, compare, distinct, image_part, picture, random_chat, running, submission, words

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

MAX_ITEMS = 4_096
RNG = np.random.default_rng(9)


@pytest.fixture(scope="module")
async def rig(tiny: Callable[[str], Path]) -> AsyncIterator[Rig]:
    arguments = {"max_model_len": 32_768, "limit_mm_per_prompt": {"image": MAX_ITEMS, "video": 0}}
    async with running(tiny("qwen2-vl"), **arguments) as started:
        yield started


@pytest.fixture
async def good(rig: Rig) -> Rendered:
    """A prompt with one image."""
    rng = np.random.default_rng(7)
    return await rig.pipeline.chat(ChatRequest(random_chat(rng, [image_part(picture(rng))])))


async def test_fifty_random_chats_are_answered_as_by_vllm_itself(rig: Rig) -> None:
    rng = np.random.default_rng(0)
    chats = [random_chat(rng, [image_part(picture(rng)) for _ in range(index % 5)]) for index in range(50)]
    answers = await compare(rig, chats)
    assert distinct(answers) >= 0.95


async def test_the_comparison_fails_when_two_pixel_planes_are_swapped(rig: Rig) -> None:
    rng = np.random.default_rng(1)
    chat = random_chat(rng, [image_part(picture(rng))])
    await compare(rig, [chat])
    swapped = replace(rig, pipeline=replace(rig.pipeline, process=swapping_planes(rig.pipeline.process)))
    with pytest.raises(AssertionError, match="chat 0 differs"):
        await compare(swapped, [chat])


def swapping_planes(process: ProcessItem) -> ProcessItem:
    async def swapped(media: Media, options: Mapping[str, object], **_: object) -> Feature:
        feature = await process(media, options)
        planes = to_torch(feature.tensors["pixel_values"]).reshape(-1, 3, 2 * 14 * 14)
        pixels = from_torch(planes[:, [1, 0, 2]].reshape(-1, 3 * 2 * 14 * 14))
        return replace(feature, tensors={**feature.tensors, "pixel_values": pixels})

    return swapped


def with_tensor(name: str, change: Callable[[np.ndarray], np.ndarray]) -> Callable[[Feature], Feature]:
    def changed(feature: Feature) -> Feature:
        array = change(to_torch(feature.tensors[name]).numpy().copy())
        tensor = Tensor(str(array.dtype), array.shape, np.ascontiguousarray(array).data.cast("B"))
        return replace(feature, tensors={**feature.tensors, name: tensor})

    return changed


def with_layout(change: Callable[[tuple[int, ...]], Layout]) -> Callable[[Feature], Feature]:
    return lambda feature: replace(feature, layout=change(feature.layout.token_ids))


def oversized(feature: Feature) -> Feature:
    """A well-formed image of more embeddings than the engine's encoder cache holds."""
    side = 2 * 100
    pixels = Tensor("uint8", (side * side, 1176), memoryview(bytes(side * side * 1176)))
    grid = np.array([[1, side, side]]).data.cast("B")
    pad = feature.layout.token_ids[0]
    tensors = {"pixel_values": pixels, "image_grid_thw": Tensor("int64", (1, 3), grid)}
    return Feature("image", tensors, Layout((pad,) * (side * side // 4)))


def rebuilt(rendered: Rendered, change: Callable[[Feature], Feature]) -> Rendered:
    """The prompt with a changed feature, made consistent with it: only the feature itself is wrong."""
    item, place = rendered.prompt.items[0], rendered.prompt.timeline[0]
    feature = change(rendered.features[item.digest])
    tokens = list(rendered.prompt.token_ids)
    tokens[place.offset : place.end] = feature.layout.token_ids
    moved = Placeholder(place.offset, len(feature.layout), feature.layout.mask)
    return Rendered(Prompt(tokens, Timeline.decoder([moved]), (item,)), {item.digest: feature})


MALFORMED: Mapping[str, tuple[Callable[[Feature], Feature], str]] = {
    "a pixel too few in every patch": (
        with_tensor("pixel_values", lambda a: a[:, 1:]),
        r"pixel_values is .* takes uint8\[\*, 1176\]",
    ),
    "a dimension too many": (with_tensor("pixel_values", lambda a: a[None]), "pixel_values is"),
    "floats where the engine normalises": (
        with_tensor("pixel_values", lambda a: a.astype(np.float32)),
        r"Tensor\(float32",
    ),
    "a patch too few": (with_tensor("pixel_values", lambda a: a[1:]), r"image_grid_thw counts .* patches"),
    "a grid that does not tile": (
        with_tensor("image_grid_thw", lambda a: np.array([[1, 1, int(a.prod())]])),
        "does not tile",
    ),
    "a grid of nothing": (with_tensor("image_grid_thw", lambda a: a * 0), "does not tile"),
    "a negative grid": (with_tensor("image_grid_thw", lambda a: a * np.array([[1, -1, -1]])), "does not tile"),
    "a grid that overflows": (with_tensor("image_grid_thw", lambda a: a * 0 + 2**31), "image_grid_thw counts"),
    "a mask that takes fewer embeddings": (
        with_layout(lambda ids: Layout(ids, Mask([0] + [1] * (len(ids) - 1)))),
        "embeddings",
    ),
    "a token too many": (with_layout(lambda ids: Layout((*ids, ids[0]))), "embeddings"),
    "no token": (with_layout(lambda _: Layout(())), "no embedding"),
    "other tokens": (with_layout(lambda ids: Layout((5,) * len(ids))), "its tensors make"),
    "a tensor missing": (
        lambda f: replace(f, tensors={"pixel_values": f.tensors["pixel_values"]}),
        r"has the tensors \['pixel_values'\]",
    ),
    "a tensor too many": (
        lambda f: replace(f, tensors={**f.tensors, "more": f.tensors["image_grid_thw"]}),
        "has the tensors",
    ),
    "more embeddings than the encoder cache holds": (oversized, "10,000 embeddings, the engine's encoder cache holds"),
}


@pytest.mark.parametrize("case", MALFORMED)
async def test_a_malformed_feature_is_refused_by_what_is_wrong_and_the_engine_lives_on_S9(
    rig: Rig, good: Rendered, case: str
) -> None:
    change, message = MALFORMED[case]
    expected = await rig.answer(good)
    with pytest.raises((FeatureRejected, PromptTooLong), match=message):
        await rig.answer(rebuilt(good, change))
    assert await rig.answer(good) == expected


async def test_an_item_that_does_not_stand_where_its_layout_says_is_refused_S9(rig: Rig, good: Rendered) -> None:
    prompt, place = good.prompt, good.prompt.timeline[0]
    shifted = Timeline.decoder([replace(place, offset=place.offset + 1)])
    with pytest.raises(FeatureRejected, match="other tokens in the prompt"):
        await rig.answer(replace(good, prompt=replace(prompt, timeline=shifted)))
    shorter = Timeline.decoder([replace(place, length=place.length - 1)])
    with pytest.raises(FeatureRejected, match="its feature has"):
        await rig.answer(replace(good, prompt=replace(prompt, timeline=shorter)))
    past = Timeline.decoder([replace(place, offset=len(prompt.token_ids))])
    with pytest.raises(ValueError, match="the last placeholder ends at"):
        replace(prompt, timeline=past)
    await rig.engine.reset()
    with pytest.raises(FeatureMissing):
        await rig.answer(replace(good, features={}))
    await rig.answer(good)


async def test_a_digest_that_comes_again_with_a_feature_of_another_shape_is_refused_S9(
    rig: Rig, good: Rendered
) -> None:
    expected = await rig.answer(good)
    larger = await rig.pipeline.chat(ChatRequest([{"role": "user", "content": [image_part(picture(RNG, side=112))]}]))
    (identity,) = good.features
    (feature,) = larger.features.values()
    disguised = Rendered(replace(larger.prompt, items=good.prompt.items), {identity: feature})
    with pytest.raises(FeatureRejected, match="came before with another layout"):
        await rig.answer(disguised)
    assert await rig.answer(good) == expected


async def test_items_on_an_encoder_s_side_are_refused_by_a_decoder_only_model_S9(rig: Rig, good: Rendered) -> None:
    layout = next(iter(good.features.values())).layout
    timeline = Timeline.encoder([Placeholder(0, len(layout))])
    prompt = Prompt([1], timeline, good.prompt.items, encoder_token_ids=layout.token_ids)
    with pytest.raises(FeatureRejected, match="not one for a decoder-only model"):
        await rig.answer(replace(good, prompt=prompt))


async def test_a_reset_with_a_request_in_flight_forgets_everything_and_the_request_goes_on_D5(
    rig: Rig, good: Rendered
) -> None:
    expected = await rig.answer(good)
    stream = await rig.engine.submit(submission(good, max_tokens=60))
    tokens = list((await anext(aiter(stream))).token_ids)
    await rig.engine.reset()
    async for output in stream:
        tokens += output.token_ids
    assert len(tokens) == 60
    assert tuple(tokens[:12]) == expected.token_ids
    assert await rig.answer(good) == expected


async def test_an_item_of_a_modality_that_is_switched_off_is_refused(rig: Rig, good: Rendered) -> None:
    video: Modality = "video"
    items = (replace(good.prompt.items[0], modality=video),)
    with pytest.raises(InvalidRequest, match=r"1 items of the modality video, at most 0 .*--limit-mm-per-prompt"):
        await rig.answer(replace(good, prompt=replace(good.prompt, items=items)))


@pytest.mark.parametrize(
    "sampling",
    [
        {"logprobs": 10_000},
        {"min_tokens": 90},
        {"logit_bias": {10**9: 1.0}},
        {"allowed_token_ids": [10**9]},
        {"temperature": -1.0},
        {"max_tokens": 12.5},
        {"max_tokens": 10**30},
        {"seed": "abc"},
        {"seed": 2**70},
        {"ignore_eos": "yes"},
        {"bad_words": [5]},
        {"logprobs": 1.5},
        {"stop": [5]},
        {"nonsense": 1},
    ],
)
async def test_a_refused_request_leaves_no_trace_for_the_next_one_with_its_image(
    rig: Rig, sampling: dict[str, Any]
) -> None:
    """On bare vLLM the next good request for the image fails with HTTP 500."""
    rng = np.random.default_rng(len(str(sampling)))
    chat = random_chat(rng, [image_part(picture(rng))])
    rendered = await rig.pipeline.chat(ChatRequest(chat))
    with pytest.raises(InvalidRequest):
        await rig.engine.submit(submission(rendered, **sampling))
    await rig.answer(rendered)
    await rig.answer(rendered)


async def test_a_prompt_longer_than_the_model_takes_says_what_to_do(rig: Rig) -> None:
    rendered = await rig.pipeline.chat(ChatRequest([{"role": "user", "content": "word " * 40_000}]))
    with pytest.raises(PromptTooLong, match="--max-model-len"):
        await rig.answer(rendered)


async def test_closing_the_stream_aborts_the_request_in_the_engine(rig: Rig, good: Rendered) -> None:
    stream = await rig.engine.submit(submission(good, max_tokens=10_000))
    await anext(aiter(stream))
    assert rig.llm.get_num_unfinished_requests() == 1
    await stream.close()
    assert rig.llm.get_num_unfinished_requests() == 0
    await rig.answer(good)


async def test_equal_images_of_a_prompt_share_a_digest_and_are_processed_once(rig: Rig) -> None:
    processed: list[int] = []

    async def counting(media: Media, options: Mapping[str, object], **_: object) -> Feature:
        processed.append(len(media.data))
        return await rig.pipeline.process(media, options)

    rng = np.random.default_rng(3)
    part, other = image_part(picture(rng)), image_part(picture(rng))
    chat = [{"role": "user", "content": [part, other, part, {"type": "text", "text": words(rng)}, part]}]
    await compare(rig, [chat])
    counted = replace(rig, pipeline=replace(rig.pipeline, process=counting))
    await counted.ours(chat)
    assert len(processed) == 2


async def test_4096_images_in_one_prompt_are_rendered_validated_and_answered_S16(rig: Rig) -> None:
    rng = np.random.default_rng(4)
    parts = [image_part(picture(rng, side=56)) for _ in range(256)]
    content = [parts[index] for index in rng.integers(0, len(parts), MAX_ITEMS)]
    rendered = await rig.pipeline.chat(ChatRequest([{"role": "user", "content": content}]))
    assert len(rendered.prompt.items) == MAX_ITEMS
    assert {place.num_embeds for place in rendered.prompt.timeline} == {4}
    answer = await rig.answer(rendered)
    assert len(answer.token_ids) == 12
    gc.collect()
