"""What a family is asked: each kind of chat that its modalities allow, and random chats in which items come back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from semel.core import Feature, Tensor
from semel.lab.testing.models import FAMILIES
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
)

__all__ = [
    "TRANSCRIPT_STARTS",
    "engine_arguments",
    "family_questions",
    "inverted",
    "kinds_of_chats",
    "mixed_chats",
]

TRANSCRIPT_STARTS: Final = (
    "<|startoftranscript|><|en|><|transcribe|><|notimestamps|>",
    "<|startoftranscript|><|de|><|translate|>",
)
_SINGLES: Final = 4  # also those of random chats: bare vLLM has processed each alone before it meets others
_MOST_OF_A_KIND: Final = 3


def kinds_of_chats(max_items: Mapping[str, int]) -> Iterator[tuple[str, Chat]]:
    """One text with other media each time: none, single items, two in both orders, and one of every modality."""

    def chat(items: list[dict[str, Any]]) -> Chat:
        return [{"role": "user", "content": [*items, {"type": "text", "text": "What is this?"}]}]

    yield "text", chat([])
    firsts = []
    for modality, limit in max_items.items():
        items = _parts(modality, _SINGLES)
        firsts.append(items[0])
        for item in items:
            yield modality, chat([item])
        if limit > 1:
            yield f"2 {modality}s", chat(items[:2])
            yield f"2 {modality}s", chat(items[1::-1])
    if len(firsts) > 1:
        yield "+".join(max_items), chat(firsts)


def mixed_chats(max_items: Mapping[str, int], count: int) -> Iterator[Chat]:
    """Random chats with items of every modality. Each item comes back, often after others took its room."""
    rng = np.random.default_rng(11)
    pools = {modality: _parts(modality, _SINGLES) for modality in max_items}
    for index in range(count):
        items: list[dict[str, Any]] = []
        for modality, limit in max_items.items():
            amount = int(rng.integers(0, min(limit, _MOST_OF_A_KIND) + 1)) if index else 1
            items += [pools[modality][which] for which in rng.integers(0, _SINGLES, amount).tolist()]
        yield random_chat(rng, [items[which] for which in rng.permutation(len(items)).tolist()])


def family_questions(family: str, mixed: int = 12) -> list[Question]:
    """Each kind of chat and so many random ones; clips, for a model without chats."""
    if family == "whisper":
        rng = np.random.default_rng(7)
        clips: list[Question] = [Clip(clip(rng), TRANSCRIPT_STARTS[index % 2]) for index in range(_SINGLES)]
        return clips * 2
    max_items = FAMILIES[family].serving.max_items
    return [*(chat for _, chat in kinds_of_chats(max_items)), *mixed_chats(max_items, mixed)]


def inverted(feature: Feature) -> Feature:
    """The same item with other values, which no check can tell: what a comparison has to find."""
    name = max(feature.tensors, key=lambda name: feature.tensors[name].nbytes)
    tensor = feature.tensors[name]
    values = np.frombuffer(tensor.data, np.uint8).copy()
    if tensor.dtype == "uint8":
        values = 255 - values
    else:  # the sign of a float is in its last byte
        width = tensor.nbytes // int(np.prod(tensor.shape))
        values[width - 1 :: width] ^= 0x80
    return replace(feature, tensors={**feature.tensors, name: Tensor(tensor.dtype, tensor.shape, values.data)})


def engine_arguments(family: str, folder: Path) -> Any:
    """vLLM's own arguments for a family, from the flags that its table names."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    flags = ["--model", str(folder), "--seed", "0", *FAMILIES[family].serving.engine_flags]
    return EngineArgs.from_cli_args(parser.parse_args(flags))


def _parts(modality: str, count: int) -> list[dict[str, Any]]:
    """So many different items of a modality."""
    rng = np.random.default_rng([7, *modality.encode()])
    match modality:
        case "image":
            return [image_part(draw_image(rng)) for _ in range(count)]
        case "audio":
            return [audio_part(clip(rng)) for _ in range(count)]
        case _:
            return [video_part(video(rng)) for _ in range(count)]
