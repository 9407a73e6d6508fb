"""Every family of models on a real engine, started as `semel worker` starts it: as by vLLM itself, or refused.

Both answers of a comparison pass through semel's encoder cache and lazy transfer, so one family is held to
transformers, which knows neither them nor vLLM; `test_encoder_engine` holds them to stock vLLM.
"""

from __future__ import annotations

import io
from dataclasses import replace

import numpy as np
import pytest

from semel.core import Layout, Prompt, Timeline
from semel.engine.vllm.compat.internals import ENCODER_CACHE, LAZY_TRANSFER_SCHEDULER, LAZY_TRANSFER_WORKER, SCHEDULER
from semel.engine.vllm.plugins.lazy_transfer import _LARGE_BYTES
from semel.errors import FeatureMissing, FeatureRejected
from semel.media import DecodeLimits, decode_audio
from semel.processing.processor import ProcessorKind
from semel.render import ChatRequest, Rendered
from tests.engine.engines import Engines, ShippedRig
from tests.engine.families import FAMILIES, GENERIC, Questions, Wrong, row
from tests.engine.family_questions import TRANSCRIPT_STARTS, family_questions, inverted
from tests.engine.parity import Clip, clip, compare, distinct, draw_image, image_part, random_chat
from tests.engine.rendering import compare_renderings, rebuilt
from tests.engine.test_encoder_engine import Running, transcribe_and_count
from tools.engine.family_parity import refused_sizes
from tools.engine.lies import lies, outcome_of

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]


def only(family: str) -> pytest.MarkDecorator:
    """For what one family alone can show; by night if its engine starts then only."""
    return pytest.mark.parametrize("rig", [row(family)], indirect=True)


@pytest.fixture
async def rig(request: pytest.FixtureRequest, engines: Engines) -> ShippedRig:
    return await engines.of(FAMILIES[request.param].start)


def each_row(*, are_rendered: bool = False) -> pytest.MarkDecorator:
    """The questions of the table's rows, through every processor that a family has."""
    rows = [
        row(name, questions, processor, kind=f" {kind} {processor}")
        for name, family in FAMILIES.items()
        for kind, questions in family.questions.items()
        for processor in family.processors
        if questions.items is not None or not are_rendered
    ]
    return pytest.mark.parametrize(("rig", "questions", "processor"), rows, indirect=["rig"])


each_family = pytest.mark.parametrize("rig", [row(name) for name in FAMILIES], indirect=True)
each_generic = pytest.mark.parametrize("rig", [row(name) for name in GENERIC], indirect=True)


@each_family
async def test_the_engine_has_the_parts_that_a_worker_ships_and_a_repeat_goes_through_them_E4(
    rig: ShippedRig, request: pytest.FixtureRequest
) -> None:
    family = FAMILIES[request.node.callspec.params["rig"]]
    config = rig.llm.vllm_config
    assert config.ec_manager_config.encoder_cache_manager_cls == ENCODER_CACHE
    assert config.scheduler_config.scheduler_cls == (
        SCHEDULER if family.start.encoder_planning else LAZY_TRANSFER_SCHEDULER
    )
    assert config.parallel_config.worker_cls == LAZY_TRANSFER_WORKER
    await rig.engine.reset()
    rendered = await rig.render(family.good())
    before = await rig.totals()
    expected = await rig.answer(rendered)
    await rig.llm.reset_prefix_cache()
    assert await rig.answer(rendered) == expected
    after = await rig.totals()
    assert after.planned - before.planned == (1 if family.is_kept else 2)
    (feature,) = rendered.features.values()
    is_large = max(tensor.nbytes for tensor in feature.tensors.values()) >= _LARGE_BYTES  # a small one is always sent
    assert (after.left_out_bytes > before.left_out_bytes) == (family.is_kept and is_large)


@each_row(are_rendered=True)
async def test_questions_are_rendered_as_by_vllm_itself(
    rig: ShippedRig, questions: Questions, processor: ProcessorKind
) -> None:
    through = rig.through(processor)
    assert await compare_renderings(through, questions.make(), questions.same_places) == questions.items


@each_row()
async def test_questions_are_answered_as_by_vllm_itself(
    rig: ShippedRig, questions: Questions, processor: ProcessorKind
) -> None:
    assert distinct(await compare(rig.through(processor), questions.make())) >= questions.min_distinct


@pytest.mark.parametrize(
    ("rig", "wrong"),
    [row(name, wrong, kind=f": {kind}") for name, family in FAMILIES.items() for kind, wrong in family.wrong.items()],
    indirect=["rig"],
)
async def test_a_malformed_feature_is_refused_by_what_is_wrong_and_the_engine_lives_on_S9(
    rig: ShippedRig, wrong: Wrong, request: pytest.FixtureRequest
) -> None:
    family = FAMILIES[request.node.callspec.params["rig"]]
    rendered = await rig.render((wrong.question or family.good)())
    (feature,) = rendered.features.values()
    expected = await rig.answer(rendered)
    with pytest.raises(FeatureRejected, match=wrong.message):
        await rig.answer(rebuilt(rendered, wrong.change(feature)))
    assert await rig.answer(rendered) == expected


@each_generic
async def test_an_item_with_other_values_is_answered_otherwise(rig: ShippedRig, request: pytest.FixtureRequest) -> None:
    """The control of the comparisons: no check can tell such a feature from the right one."""
    rendered = await rig.render(FAMILIES[request.node.callspec.params["rig"]].good())
    (feature,) = rendered.features.values()
    await rig.engine.reset()
    right = await rig.answer(rendered)
    await rig.engine.reset()
    assert await rig.answer(rebuilt(rendered, inverted(feature))) != right
    await rig.engine.reset()


@each_generic
async def test_a_feature_that_lies_is_refused_or_ended_alone_S9(
    rig: ShippedRig, request: pytest.FixtureRequest
) -> None:
    first, second = family_questions(request.node.callspec.params["rig"], mixed=0)[1:3]
    honest, other = await rig.render(first), await rig.render(second)
    outcomes = {lie.name: await outcome_of(rig, honest, lie) for lie in lies(honest, other)}
    assert {"refused", "ended alone"} <= set(outcomes.values())


@each_generic
async def test_images_of_any_size_are_answered(rig: ShippedRig) -> None:
    assert await refused_sizes(rig, 30) == {}


@only("idefics3")
async def test_equal_images_of_a_prompt_are_answered_alike(rig: ShippedRig) -> None:
    rng = np.random.default_rng(2)
    part, other = image_part(draw_image(rng)), image_part(draw_image(rng))
    await compare(rig, [random_chat(rng, [part, other, part]), random_chat(rng, [part, part, part, other])])


@only("gemma3")
async def test_the_spelling_of_the_placeholder_stays_text_S14(rig: ShippedRig) -> None:
    rng = np.random.default_rng(3)
    content = [image_part(draw_image(rng)), {"type": "text", "text": "what is <start_of_image> ?"}]
    rendered = await rig.pipeline.chat(ChatRequest([{"role": "user", "content": content}]))
    assert len(rendered.prompt.items) == 1
    await rig.answer(rendered)


@only("whisper")
async def test_vllm_keeps_no_clips_for_an_encoder_decoder_so_injecting_one_does_nothing_D6(rig: ShippedRig) -> None:
    rendered = await rig.render(Clip(clip(np.random.default_rng(3)), TRANSCRIPT_STARTS[0]))
    expected = await rig.answer(rendered)
    ((identity, feature),) = rendered.features.items()
    assert rig.engine.contract.cache_bytes == 0
    assert not await rig.engine.inject(identity, feature)
    assert not rig.engine.holds(identity)
    with pytest.raises(FeatureMissing):
        await rig.answer(replace(rendered, features={}))
    with pytest.raises(FeatureRejected, match="the encoder has 1500 positions"):
        await rig.engine.inject(identity, replace(feature, layout=Layout((0,) * 1_499)))
    await rig.engine.reset()
    assert await rig.answer(rendered) == expected


@only("whisper")
async def test_b9_free_space_of_an_encoder_decoder_never_exceeds_its_capacity(rig: ShippedRig) -> None:
    await transcribe_and_count(Running("cache", rig.llm, rig.page))


@only("whisper")
async def test_a_prompt_without_its_encoder_s_side_is_refused_S9(rig: ShippedRig) -> None:
    text = Rendered(Prompt([1, 2], Timeline.decoder([]), ()), {})
    with pytest.raises(FeatureRejected, match="not one for an encoder-decoder model"):
        await rig.answer(text)


def test_a_clip_decodes_to_the_samples_that_vllm_reads() -> None:
    from vllm.multimodal.media.audio import load_audio

    data = clip(np.random.default_rng(2))
    samples, _ = load_audio(io.BytesIO(data), sr=None)
    assert np.array_equal(decode_audio(data, DecodeLimits(), sampling_rate=16_000), samples)
