"""Prompts that vLLM's `apply` makes of layouts, held against what it makes of the real media."""

from __future__ import annotations

import base64
import io
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from semel.compose import compose_pipeline
from semel.core import Digest, Item, Key, Layout, Media, Modality, Prompt, Target
from semel.engine.vllm.model.assembly import Assembler, company_limits
from semel.engine.vllm.model.processor import VllmProcessor
from semel.errors import ConfigError, InvalidRequest, ServiceError
from semel.lab.testing.models import FAMILIES
from semel.processing import Family, Pool
from semel.processing.pool.pipe import Description
from semel.render import ChatRequest
from semel.render.tokens.expand import expand
from tests.engine.assembled import Bench, Drawn, Places, places_of

Folder = Callable[[str], Path]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

TARGET = Target("float32")
STRANGER = "gemma3 as a stranger"
CHATTING = sorted({*FAMILIES, STRANGER} - {"whisper"})
OWN_RULES = ("gemma3n", "glm-4.1v", "internvl-chat", "paligemma", STRANGER)
"""Families whose items do not simply replace one token."""

IN_CI = {*OWN_RULES, "deepseek-vl2", "gemma3", "qwen2-vl", "qwen2.5-omni", "qwen3-vl"}


@pytest.fixture(scope="module")
def bench(tiny: Folder) -> Callable[[str], Bench]:
    made: dict[str, Bench] = {}

    def find(family: str) -> Bench:
        if family not in made:
            made[family] = Bench(
                tiny(family.removesuffix(" as a stranger")), Family() if family.endswith("stranger") else None
            )
        return made[family]

    return find


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=() if name in IN_CI else pytest.mark.nightly) for name in CHATTING]
)
def test_tokens_places_and_masks_are_those_of_the_real_media(bench: Callable[[str], Bench], family: str) -> None:
    prompts = bench(family)
    rng = np.random.default_rng(0)
    compared = 0
    for _ in range(16):
        drawn = prompts.draw(rng, prompts.some_modalities(rng, 5))
        try:
            bare = prompts.by_vllm(drawn)
        except RuntimeError:  # vLLM loses an image of Gemma 3 among newlines
            with pytest.raises(InvalidRequest):
                prompts.by_layouts(drawn)
            continue
        assert_same(prompts, prompts.by_layouts(drawn), bare)
        if prompts.splices(drawn):
            assert_same(prompts, spliced(prompts, drawn), bare)
        compared += 1
    assert compared >= 10


@pytest.mark.parametrize("family", OWN_RULES)
def test_a_splice_is_not_enough_where_a_model_has_rules_of_its_own(bench: Callable[[str], Bench], family: str) -> None:
    prompts = bench(family)
    modality: Modality = "video" if family == "glm-4.1v" else "image"
    assert prompts.assembler.rules[modality].kind == "apply"
    drawn = prompts.draw(np.random.default_rng(0), [modality])
    try:
        wrong = spliced(prompts, drawn)
    except InvalidRequest:  # there is no such token
        return
    with pytest.raises(AssertionError):
        assert_same(prompts, wrong, prompts.by_vllm(drawn))


@pytest.mark.parametrize("family", ["qwen2-vl", "glm-4.1v", "internvl-chat"])
def test_a_text_with_a_placeholder_too_many_or_too_few_is_refused_S14(
    bench: Callable[[str], Bench], family: str
) -> None:
    prompts = bench(family)
    modality: Modality = "video" if family == "glm-4.1v" else "image"
    drawn = prompts.draw(np.random.default_rng(1), [modality])
    layouts = [(modality, prompts.layout(*drawn.media[0]))]
    target: list[int] = prompts.assembler.rules[modality].updates[0].target
    spelled = Drawn([*target, *drawn.token_ids], drawn.media)
    with pytest.raises(InvalidRequest, match="2 placeholders for 1"):
        prompts.assemble(spelled.token_ids, layouts)
    _, ((_, offset, _),) = prompts.by_vllm(spelled)
    assert offset == 0  # what nobody counts, vLLM takes for the item's place
    with pytest.raises(InvalidRequest, match="1 placeholders for 2"):
        prompts.assemble(drawn.token_ids, layouts * 2)


def test_what_vllm_puts_elsewhere_than_the_layout_says_is_never_served(bench: Callable[[str], Bench]) -> None:
    prompts = bench("paligemma")
    drawn = prompts.draw(np.random.default_rng(2), ["image"])
    layouts = [("image", prompts.layout(*drawn.media[0]))]

    class Shifted(type(prompts.processor)):  # type: ignore[misc]
        def apply(self, inputs: Any, timing_ctx: Any) -> Any:
            made = super().apply(inputs, timing_ctx)
            made["prompt_token_ids"].insert(0, 0)
            return made

    with with_class(prompts.processor, Shifted), pytest.raises(ServiceError, match="in another form"):
        prompts.assemble(drawn.token_ids, layouts)  # type: ignore[arg-type]
    assert prompts.assemble(drawn.token_ids, layouts).items  # type: ignore[arg-type]


def test_a_text_that_has_no_place_for_an_insertion_is_refused(bench: Callable[[str], Bench]) -> None:
    from vllm.multimodal.processing import PromptIndexTargets

    prompts = bench("paligemma")
    rule = prompts.assembler.rules["image"]
    behind = replace(rule, updates=tuple(update.with_target(PromptIndexTargets.prefix([3])) for update in rule.updates))
    assembler = Assembler(prompts.processor, {"image": behind})
    layout = prompts.layout(*prompts.draw(np.random.default_rng(4), ["image"]).media[0])
    assert assembler.assemble([3, 4], [("image", layout)]).places == [(0, 1)]
    with pytest.raises(InvalidRequest, match="no place in the prompt"):
        assembler.assemble([4, 3], [("image", layout)])


def test_items_that_depend_on_their_company_are_limited_to_what_is_right(
    bench: Callable[[str], Bench], tiny: Folder, caplog: pytest.LogCaptureFixture
) -> None:
    deepseek, qwen = bench("deepseek-vl2"), bench("qwen2-vl")
    assert limits(qwen) == {}
    with caplog.at_level(logging.WARNING):
        assert limits(deepseek) == {"image": 2}
    assert "at most 2 in a prompt" in caplog.text
    rng = np.random.default_rng(0)
    assert agrees(deepseek, deepseek.draw(rng, ["image"] * 2))
    assert not agrees(deepseek, deepseek.draw(rng, ["image"] * 3))  # so a limit is needed

    class Reversed(type(qwen.processor)):  # type: ignore[misc]
        def _cached_apply_hf_processor(self, inputs: Any, timing_ctx: Any) -> Any:
            made = super()._cached_apply_hf_processor(inputs, timing_ctx)
            return made._replace(hashes={modality: its[::-1] for modality, its in made.hashes.items()})

    class Impure(type(qwen.processor)):  # type: ignore[misc]
        def _cached_apply_hf_processor(self, inputs: Any, timing_ctx: Any) -> Any:
            return self._apply_hf_processor(inputs, timing_ctx)

    class Numbered(type(qwen.processor)):  # type: ignore[misc]
        def _recompute_cached_prompt_update(self, cached_update: Any, new_item_idx: int) -> Any:
            update = super()._recompute_cached_prompt_update(cached_update, new_item_idx)
            return update.with_content([new_item_idx + 1, *update.content.full])

    expected = {Reversed: 1, Impure: 0, Numbered: 1}
    for kind, limit in expected.items():
        with with_class(qwen.processor, kind):
            assert limits(qwen) == {"image": limit, "video": limit}


def test_numbered_placeholders_are_each_replaced_once(bench: Callable[[str], Bench]) -> None:
    """As in Phi's prompts, whose second image has another placeholder than the first."""
    qwen = bench("qwen2-vl")
    first, second = (qwen.processor.info.get_tokenizer().encode(text) for text in ("<|image_1|>", "<|image_2|>"))

    class Phi(type(qwen.processor)):  # type: ignore[misc]
        def _recompute_cached_prompt_update(self, cached_update: Any, new_item_idx: int) -> Any:
            update = super()._recompute_cached_prompt_update(cached_update, new_item_idx)
            return update.with_target([first, second][new_item_idx])

    drawn = qwen.draw(np.random.default_rng(3), ["image", "image"])
    layouts = [("image", qwen.layout(modality, medium)) for modality, medium in drawn.media]
    with with_class(qwen.processor, Phi):
        assembler = Assembler.from_processor(qwen.processor, qwen.family, qwen.config)
        rule = assembler.rules["image"]
        assert (rule.kind, rule.text, rule.is_numbered) == ("apply", "<|image_", False)
        assembly = assembler.assemble([5, *first, 6, *second, 7], layouts)  # type: ignore[arg-type]
        assert (assembly.token_ids, assembly.places) == ([5, 6, 7], [(0, 1), (1, 2)])
        with pytest.raises(InvalidRequest, match="2 placeholders for 1"):
            assembler.assemble([5, *first, 6, *first, 7], layouts[:1] * 2)  # type: ignore[arg-type]


def test_modalities_that_share_a_placeholder_are_counted_together(bench: Callable[[str], Bench]) -> None:
    qwen = bench("qwen2-vl")
    image, video = (qwen.assembler.rules[modality] for modality in ("image", "video"))
    (target,) = image.updates[0].target
    shared = replace(video, updates=tuple(update.with_target([target]) for update in video.updates))
    assembler = Assembler(qwen.processor, {"image": image, "video": shared})
    items: list[tuple[Modality, Layout]] = [("image", Layout((8, 8))), ("video", Layout((9,)))]
    assembly = assembler.assemble([target, 5, target], items)
    assert (assembly.token_ids, assembly.places) == ([5], [(0, 0), (1, 1)])
    with pytest.raises(InvalidRequest, match="1 placeholders for 2 image and video items"):
        assembler.assemble([target, 5], items)


def test_audio_inside_a_video_is_refused_at_start(bench: Callable[[str], Bench]) -> None:
    qwen = bench("qwen2-vl")
    config = qwen.processor.info.ctx.get_mm_config()
    before = config.mm_processor_kwargs
    config.mm_processor_kwargs = {"use_audio_in_video": True}
    try:
        with pytest.raises(ConfigError, match="use_audio_in_video"):
            Assembler.from_processor(qwen.processor, qwen.family, qwen.config)
    finally:
        config.mm_processor_kwargs = before


async def test_a_pool_assembles_as_its_processor_does(tiny: Folder, bench: Callable[[str], Bench]) -> None:
    prompts = bench("paligemma")
    drawn = prompts.draw(np.random.default_rng(4), ["image"])
    layout = prompts.layout(*drawn.media[0])
    pool = await Pool.start(tiny("paligemma"), TARGET, spares=0, processor="vllm")
    try:
        assert pool.description.assembly == {"image": "apply"}
        assert pool.description.placeholders == {}
        assert pool.description.insertion("image", 1) == ""
        assembly = await pool.assemble(drawn.token_ids, [("image", layout)], tenant="a")
        assert places_of(assembly.prompt([Item("image", Digest(bytes(32)))], [layout])) == prompts.by_vllm(drawn)
        with pytest.raises(InvalidRequest, match="cannot have any video"):
            await pool.assemble(drawn.token_ids, [("video", layout)])
        assert (pool.assembled, pool.processed, pool.decoded, pool.failed) == (1, 0, 0, 0)
    finally:
        await pool.close()


async def test_a_chat_of_a_model_that_inserts_its_images_is_vllm_s_prompt(
    tiny: Folder, bench: Callable[[str], Bench]
) -> None:
    pipeline = compose_pipeline(tiny("paligemma"), TARGET, Key(bytes(32)))
    prompts = bench("paligemma")
    buffer = io.BytesIO()
    image = Image.linear_gradient("L").convert("RGB")
    image.save(buffer, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "caption en <image>"}]
    ours = (await pipeline.chat(ChatRequest([{"role": "user", "content": parts}]))).prompt
    tokenizer = prompts.processor.info.get_tokenizer()
    text = tokenizer.encode("<bos>caption en <image>", add_special_tokens=False)
    assert places_of(ours) == prompts.by_vllm(Drawn(text, [("image", image)]))
    bare = (await pipeline.chat(ChatRequest([{"role": "user", "content": "caption en"}]))).prompt
    assert [*bare.token_ids] == tokenizer.encode("<bos>caption en\n", add_special_tokens=False)


def test_features_of_a_merging_model_end_where_its_embeddings_do(tiny: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """So the tokens around them may merge with the text: the layout stays what it was."""
    buffer = io.BytesIO()
    Image.linear_gradient("L").convert("RGB").save(buffer, "PNG")
    media = Media("image", buffer.getvalue(), "image/png")
    whole = VllmProcessor.load(tiny("gemma3"), TARGET).process(media).layout
    monkeypatch.setattr("semel.engine.vllm.model.processor.family_of", lambda _: Family())
    stranger = VllmProcessor.load(tiny("gemma3"), TARGET)
    layout = stranger.process(media).layout
    assert layout.mask is None
    assert layout.token_ids == whole.token_ids[1:-1]
    assert Description.of(stranger).assembly == {"image": "apply"}


def limits(prompts: Bench) -> dict[Modality, int]:
    return dict(company_limits(prompts.processor, prompts.family, prompts.config))


def agrees(prompts: Bench, drawn: Drawn) -> bool:
    return spliced(prompts, drawn) == prompts.by_vllm(drawn)


def spliced(prompts: Bench, drawn: Drawn) -> Places:
    """The prompt by replacing one token per item, as semel does it itself where that is right."""
    vocabulary = prompts.processor.info.get_tokenizer().get_vocab()
    ids = {vocabulary[text]: modality for modality, text in prompts.texts.items() if text in vocabulary}
    items = [Item(modality, Digest(bytes([index]) * 32)) for index, (modality, _) in enumerate(drawn.media)]
    layouts = [prompts.layout(modality, medium) for modality, medium in drawn.media]
    prompt: Prompt = expand(drawn.token_ids, placeholder_ids=ids, items=items, layouts=layouts)
    return places_of(prompt)


def assert_same(prompts: Bench, ours: Places, bare: Places) -> None:
    """The same tokens, places and masks. Text around an item, which vLLM counts as part of it, is text with us."""
    assert ours[0] == bare[0]
    assert [modality for modality, _, _ in ours[1]] == [modality for modality, _, _ in bare[1]]
    for (modality, offset, mask), (_, its_offset, its_mask) in zip(ours[1], bare[1], strict=True):
        rule = prompts.assembler.rules[modality]
        assert offset == its_offset + len(rule.before)
        assert len(mask) == len(its_mask) - len(rule.before) - len(rule.behind)
        assert embedded(offset, mask) == embedded(its_offset, its_mask)


def embedded(offset: int, mask: Sequence[bool]) -> list[int]:
    return [offset + index for index, bit in enumerate(mask) if bit]


class with_class:  # noqa: N801 - reads as a statement
    """A processor as if it were of another class, whose instances it has none of."""

    def __init__(self, processor: Any, kind: type) -> None:
        self.processor, self.kind, self.own = processor, kind, type(processor)

    def __enter__(self) -> None:
        self.processor.__class__ = self.kind

    def __exit__(self, *_: object) -> None:
        self.processor.__class__ = self.own
