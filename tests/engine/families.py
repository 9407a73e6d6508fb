"""The families of models in one table: how an engine is started, what both sides are asked, what is malformed.

A question is a chat, or a clip with the tokens that begin its transcript.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pytest
from _pytest.mark import ParameterSet

from semel.core import Feature, Layout, Mask, Tensor
from semel.lab.testing.models import FAMILIES as TINY
from semel.processing import to_torch
from semel.processing.processor import ProcessorKind
from tests.engine.engines import Start
from tests.engine.family_questions import TRANSCRIPT_STARTS, family_questions
from tests.engine.parity import (
    Chat,
    Clip,
    Question,
    audio_part,
    clip,
    draw_image,
    image_part,
    random_chat,
    video,
    video_part,
    words,
)
from tests.engine.rendering import Rendering, same_places, same_places_within_newlines

__all__ = [
    "EVICTING",
    "FAMILIES",
    "GENERIC",
    "MAX_IMAGES",
    "TRANSCRIPT_STARTS",
    "WRONG_QWEN2_VL",
    "Family",
    "Questions",
    "Wrong",
    "image_chat",
    "row",
]

MAX_IMAGES: Final = 4_096
EVICTING: Final = ("--mm-processor-cache-gb", "0.256")
"""A small item cache; vLLM itself fails on a prompt whose items do not fit into it together."""

Change = Callable[[Feature], Feature]
Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Questions:
    """What is compared, and how much of it there is."""

    make: Callable[[], list[Question]]
    items: int | None = None
    """How many items their renderings have; None if renderings are not compared."""

    min_distinct: float = 0.95
    """How many of the answers differ from one another: else a comparison would say nothing."""

    same_places: Callable[[Rendering, Rendering], None] = same_places


@dataclass(frozen=True)
class Wrong:
    """A feature that the engine must never see, and what its refusal says."""

    change: Change
    message: str
    question: Callable[[], Question] | None = None
    """With the item that is changed; None for that of the family."""


@dataclass(frozen=True)
class Family:
    """A family on a real engine."""

    start: Start
    questions: Mapping[str, Questions]
    good: Callable[[], Question]
    """With one item."""

    wrong: Mapping[str, Wrong] = field(default_factory=dict)
    processors: tuple[ProcessorKind, ...] = ("hf", "vllm")
    """Those that may make its features."""

    is_nightly: bool = False
    """Whether CI leaves it to the nightly run: its engine would be one start too many."""

    is_kept: bool = True
    """Whether a repeat travels without its tensor; an encoder-decoder encodes it again."""


def image_chat(seed: int) -> Chat:
    """A random chat with one picture."""
    rng = np.random.default_rng(seed)
    return random_chat(rng, [image_part(draw_image(rng))])


def image_chats(count: int = 24, most: int = 3) -> Callable[[], list[Question]]:
    """Random chats with none to `most` pictures each."""

    def make() -> list[Question]:
        rng = np.random.default_rng(0)
        return [random_chat(rng, [image_part(draw_image(rng)) for _ in range(i % (most + 1))]) for i in range(count)]

    return make


def chats_with_newlines() -> list[Question]:
    """Random ones, and two images that touch, with newlines of the client's own around them."""
    rng = np.random.default_rng(0)
    chats: list[Question] = [random_chat(rng, [image_part(draw_image(rng)) for _ in range(i % 4)]) for i in range(24)]
    newlines = ("", "\n", "\n\n")
    for before, behind in [(before, behind) for before in newlines for behind in newlines]:
        first, second = image_part(draw_image(rng)), image_part(draw_image(rng))
        texts = [{"type": "text", "text": words(rng) + before}, {"type": "text", "text": behind + words(rng)}]
        chats.append([{"role": "user", "content": [texts[0], first, second, texts[1]]}])
    return chats


def video_chats() -> list[Question]:
    """Videos of three codecs, alone, two of them, and with an image."""
    rng = np.random.default_rng(5)
    kinds = [("libx264", "mp4"), ("mpeg4", "mp4"), ("libvpx", "webm")]
    chats: list[Question] = []
    for index in range(12):
        items = [video_part(video(rng, *kinds[index % 3])) for _ in range(1 + index % 2)]
        items += [image_part(draw_image(rng))] * (index % 4 == 3)
        chats.append(random_chat(rng, items))
    return chats


def video_chat() -> Chat:
    rng = np.random.default_rng(6)
    return random_chat(rng, [video_part(video(rng))])


def audio_chats() -> list[Question]:
    rng = np.random.default_rng(0)
    return [random_chat(rng, [audio_part(clip(rng)) for _ in range(index % 4)]) for index in range(20)]


def audio_chat() -> Chat:
    rng = np.random.default_rng(1)
    return random_chat(rng, [audio_part(clip(rng))])


def clips() -> list[Question]:
    rng = np.random.default_rng(0)
    return [Clip(clip(rng), TRANSCRIPT_STARTS[index % 2]) for index in range(10)]


def with_tensor(name: str, change: Callable[[Array], Array]) -> Change:
    """Another tensor instead of one, in a feature that has it."""

    def changed(feature: Feature) -> Feature:
        if name not in feature.tensors:
            return feature
        array = change(to_torch(feature.tensors[name]).numpy().copy())
        tensor = Tensor(str(array.dtype), array.shape, np.ascontiguousarray(array).data.cast("B"))
        return replace(feature, tensors={**feature.tensors, name: tensor})

    return changed


def with_layout(change: Callable[[tuple[int, ...]], Layout]) -> Change:
    """Another layout, made of the tokens of the right one."""
    return lambda feature: replace(feature, layout=change(feature.layout.token_ids))


def without_tensor(name: str) -> Change:
    return lambda feature: replace(feature, tensors={n: t for n, t in feature.tensors.items() if n != name})


def one_token_more(ids: tuple[int, ...]) -> Layout:
    return Layout((*ids, ids[0]))


def oversized(feature: Feature) -> Feature:
    """A well-formed image of more embeddings than the engine's encoder cache holds."""
    side = 2 * 100
    pixels = Tensor("uint8", (side * side, 1176), memoryview(bytes(side * side * 1176)))
    grid = np.array([1, side, side]).data.cast("B")
    pad = feature.layout.token_ids[0]
    tensors = {"pixel_values": pixels, "image_grid_thw": Tensor("int64", (3,), grid)}
    return Feature("image", tensors, Layout((pad,) * (side * side // 4)))


def with_a_mark_as_embedding(feature: Feature) -> Feature:
    assert feature.layout.mask is not None
    return replace(feature, layout=Layout(feature.layout.token_ids, Mask([1, *feature.layout.mask.bits[1:]])))


def zero(array: Array, index: Any) -> Array:
    array[index] = 0
    return array


def ones_at(array: Array, run: slice) -> Array:
    array[:] = 0
    array[run] = 1
    return array


WRONG_QWEN2_VL: Final[Mapping[str, Wrong]] = {
    "a pixel too few in every patch": Wrong(
        with_tensor("pixel_values", lambda a: a[:, 1:]), r"pixel_values is .* takes uint8\[\*, 1176\]"
    ),
    "a dimension too many": Wrong(with_tensor("pixel_values", lambda a: a[None]), "pixel_values is"),
    "floats where the engine normalises": Wrong(
        with_tensor("pixel_values", lambda a: a.astype(np.float32)), r"Tensor\(float32"
    ),
    "a patch too few": Wrong(with_tensor("pixel_values", lambda a: a[1:]), r"image_grid_thw counts .* patches"),
    "a grid that does not tile": Wrong(
        with_tensor("image_grid_thw", lambda a: np.array([1, 1, int(a.prod())])), "does not tile"
    ),
    "a grid of nothing": Wrong(with_tensor("image_grid_thw", lambda a: a * 0), "does not tile"),
    "a negative grid": Wrong(with_tensor("image_grid_thw", lambda a: a * np.array([1, -1, -1])), "does not tile"),
    "a grid that overflows": Wrong(with_tensor("image_grid_thw", lambda a: a * 0 + 2**31), "image_grid_thw counts"),
    "a mask that takes fewer embeddings": Wrong(
        with_layout(lambda ids: Layout(ids, Mask([0] + [1] * (len(ids) - 1)))), "embeddings"
    ),
    "a token too many": Wrong(with_layout(one_token_more), "embeddings"),
    "no token": Wrong(with_layout(lambda _: Layout(())), "no embedding"),
    "other tokens": Wrong(with_layout(lambda ids: Layout((5,) * len(ids))), "its tensors make"),
    "a tensor missing": Wrong(without_tensor("image_grid_thw"), r"has the tensors \['pixel_values'\]"),
    "a tensor too many": Wrong(
        lambda f: replace(f, tensors={**f.tensors, "more": f.tensors["image_grid_thw"]}), "has the tensors"
    ),
    "more embeddings than the encoder cache holds": Wrong(
        oversized, "10,000 embeddings, the engine's encoder cache holds"
    ),
}


def row(name: str, *values: object, kind: str = "") -> ParameterSet:
    """A case of one family for pytest; the first word of its id is its group (`tests/groups.py`)."""
    marks = [pytest.mark.slow, pytest.mark.nightly] if FAMILIES[name].is_nightly else []
    return pytest.param(name, *values, id=f"{name}{kind}", marks=marks)


def generic(name: str) -> Family:
    """A family that semel has no code for: vLLM's processor, and an engine as `semel.lab.testing.models` has it.

    Its renderings are compared in `test_engine_inputs`.
    """
    return Family(
        Start(name, (*TINY[name].serving.engine_flags, *EVICTING)),
        {"items": Questions(lambda: family_questions(name, mixed=4), min_distinct=0.5)},
        lambda: family_questions(name, mixed=0)[1],
        processors=("vllm",),
    )


FAMILIES: Final[Mapping[str, Family]] = {
    "qwen2-vl": Family(
        Start(
            "qwen2-vl", ("--max-model-len", "32768", "--limit-mm-per-prompt", f'{{"image": {MAX_IMAGES}, "video": 0}}')
        ),
        {"images": Questions(image_chats(50, most=4), items=100)},
        lambda: image_chat(7),
        WRONG_QWEN2_VL,
    ),
    "qwen2.5-vl": Family(
        Start("qwen2.5-vl", ("--max-model-len", "4096", "--limit-mm-per-prompt", '{"image": 4, "video": 2}')),
        {
            "images": Questions(image_chats(), items=36),
            "videos": Questions(video_chats, items=21, min_distinct=0.9),
        },
        lambda: image_chat(1),
        {
            "a token too many": Wrong(with_layout(one_token_more), "embeddings"),
            "a row of patches": Wrong(
                with_tensor("image_grid_thw", lambda a: np.array([1, 1, int(a.prod())])), "does not tile"
            ),
            **{
                f"a video of {seconds:g} s a frame": Wrong(
                    with_tensor("second_per_grid_ts", lambda a, seconds=seconds: a * 0 + seconds),  # type: ignore[misc]
                    "second_per_grid_ts is",
                    question=video_chat,
                )
                for seconds in (0.0, -1.0, 6e4)
            },
        },
        is_nightly=True,
    ),
    "llava": Family(
        Start("llava", ("--max-model-len", "4096", "--limit-mm-per-prompt", '{"image": 4}')),
        {"images": Questions(image_chats(), items=36)},
        lambda: image_chat(1),
        {
            "a token too many": Wrong(with_layout(one_token_more), "pixel_values gives 36 embeddings"),
            "too few pixels": Wrong(with_tensor("pixel_values", lambda a: a[..., 14:]), r"takes float32\[3, 84, 84\]"),
        },
        is_nightly=True,
    ),
    "idefics3": Family(
        # Steps so small that one often ends amid an item.
        Start(
            "idefics3",
            (
                *("--max-model-len", "4096", "--max-num-batched-tokens", "96", "--max-num-seqs", "8"),
                *("--limit-mm-per-prompt", '{"image": 4}'),
            ),
            encoder_planning=True,
        ),
        {"images": Questions(image_chats(), items=36)},
        lambda: image_chat(1),
        {
            "a tile too many": Wrong(with_tensor("num_patches", lambda a: a + 1), "num_patches is"),
            "a tile too few": Wrong(with_tensor("pixel_values", lambda a: a[1:]), "num_patches is"),
            "a tile of zeros": Wrong(with_tensor("pixel_values", lambda a: zero(a, 0)), "nothing but zeros"),
            "a mask with a hole": Wrong(
                with_tensor("pixel_attention_mask", lambda a: zero(a, (0, 3, 3))), "one rectangle"
            ),
            "a mask of nothing": Wrong(with_tensor("pixel_attention_mask", lambda a: a * 0), "one rectangle"),
            "a mask without the top": Wrong(
                with_tensor("pixel_attention_mask", lambda a: zero(a, np.s_[:, :20])), "one rectangle"
            ),
            "a mark as embedding": Wrong(with_a_mark_as_embedding, "pixel_values gives"),
        },
        is_nightly=True,
    ),
    "gemma3": Family(
        Start("gemma3", ("--max-model-len", "4096", "--limit-mm-per-prompt", '{"image": 4}')),
        {"images": Questions(chats_with_newlines, items=54, same_places=same_places_within_newlines)},
        lambda: image_chat(1),
        {
            "a tile too many": Wrong(with_tensor("num_patches", lambda a: a + 1), r"num_patches is 2"),
            "too few pixels": Wrong(
                with_tensor("pixel_values", lambda a: a[..., 14:]), r"takes float32\[1, 3, 112, 112\]"
            ),
            "no mask": Wrong(with_layout(Layout), "pixel_values gives 16 embeddings"),
            "another mask": Wrong(
                with_layout(lambda ids: Layout(ids, Mask([1] + [0] * (len(ids) - 1)))),
                "pixel_values gives 16 embeddings",
            ),
        },
        is_nightly=True,
    ),
    "qwen2-audio": Family(
        Start("qwen2-audio", ("--max-model-len", "4096", "--limit-mm-per-prompt", '{"audio": 3}')),
        {"clips": Questions(audio_chats, items=30)},
        audio_chat,
        {
            "a mask that contradicts the layout": Wrong(
                with_tensor("feature_attention_mask", lambda a: ones_at(a, slice(0, 40))),
                "feature_attention_mask gives",
            ),
            "a mask with a gap": Wrong(
                with_tensor("feature_attention_mask", lambda a: ones_at(a, slice(10, 200))), "not a run of ones"
            ),
        },
        is_nightly=True,
    ),
    "whisper": Family(
        Start("whisper", ("--max-model-len", "448", "--max-num-batched-tokens", "3200")),
        {"clips": Questions(clips)},
        lambda: Clip(clip(np.random.default_rng(1)), TRANSCRIPT_STARTS[0]),
        {
            "an encoder's prompt of another length": Wrong(
                with_layout(lambda ids: Layout(ids[1:])), "the encoder has 1500 positions"
            )
        },
        is_kept=False,
    ),
    # Numbers in lists, ragged images, padding, placeholders of several tokens, three modalities.
    **{name: generic(name) for name in ("qwen3-vl", "llava-next", "internvl-chat", "qwen2.5-omni")},
    "mistral3": replace(generic("mistral3"), is_nightly=True),
}

GENERIC: Final = tuple(name for name, family in FAMILIES.items() if family.processors == ("vllm",))
