"""Features that lie to the encoder, and an engine that lets them through: no check of semel stands before it."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

import numpy as np
import pytest

from semel.core import Digest, Feature, Layout, Mask
from semel.errors import FeatureRejected
from semel.render import Rendered
from tests.engine.engines import ShippedRig
from tests.engine.families import Change, with_tensor
from tests.engine.parity import Answer, Rig, joined, submission
from tests.engine.rendering import rebuilt

__all__ = [
    "CONTRADICTIONS",
    "MISFITS",
    "disguised",
    "is_ended_alone",
    "less_room",
    "more_room",
    "outcomes",
    "unchecked",
]

_MORE: Final = 3


def unchecked(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every feature through to the engine, whatever its tensors and its layout say."""
    model = rig.engine._model
    for name in ("admit", "check", "_check_layout"):
        monkeypatch.setattr(model, name, lambda *_: None)
    monkeypatch.setattr(model, "_counts_rows", set())
    monkeypatch.setattr(model.known, "agrees", lambda *_: True)


def more_room(feature: Feature) -> Feature:
    """A layout for more embeddings than there will be."""
    ids, mask = feature.layout.token_ids, feature.layout.mask
    if mask is None:
        return replace(feature, layout=Layout((*ids, *ids[:1] * _MORE)))
    bits = list(mask.bits)
    last = max(index for index, bit in enumerate(bits) if bit)
    ids = (*ids[: last + 1], *ids[last : last + 1] * _MORE, *ids[last + 1 :])
    return replace(feature, layout=Layout(ids, Mask([*bits[: last + 1], *[1] * _MORE, *bits[last + 1 :]])))


def less_room(feature: Feature) -> Feature:
    """A layout for one embedding less than there will be."""
    ids, mask = feature.layout.token_ids, feature.layout.mask
    if mask is None:
        return replace(feature, layout=Layout(ids[1:]))
    first = list(mask.bits).index(1)
    bits = [*mask.bits[:first], *mask.bits[first + 1 :]]
    return replace(feature, layout=Layout((*ids[:first], *ids[first + 1 :]), Mask(bits)))


MISFITS: Final[Mapping[str, Change]] = {"more room than embeddings": more_room, "less room": less_room}

CONTRADICTIONS: Final[Mapping[str, tuple[str, Change]]] = {
    "qwen2-vl: a larger grid": ("qwen2-vl", with_tensor("image_grid_thw", lambda a: a * np.array([1, 2, 2]))),
    "qwen2-vl: a smaller grid": ("qwen2-vl", with_tensor("image_grid_thw", lambda a: a * 0 + np.array([1, 2, 2]))),
    "qwen2.5-vl: a larger grid": ("qwen2.5-vl", with_tensor("image_grid_thw", lambda a: a * np.array([1, 2, 2]))),
    "llava: too few pixels": ("llava", with_tensor("pixel_values", lambda a: a[..., 14:])),
    "idefics3: a tile too many": ("idefics3", with_tensor("num_patches", lambda a: a + 1)),
    "gemma3: too few pixels": ("gemma3", with_tensor("pixel_values", lambda a: a[..., 14:])),
    "qwen2-audio: too few bands": ("qwen2-audio", with_tensor("input_features", lambda a: a[1:])),
}
"""Tensors on which an encoder raises, or of which it makes something else."""


def disguised(rendered: Rendered, change: Change, mark: int = 1) -> Rendered:
    """The prompt of one item with a feature that was changed, under a digest of its own, which depends on `mark`."""
    (feature,) = rendered.features.values()
    hostile = rebuilt(rendered, change(feature))
    digest = Digest(bytes(byte ^ mark for byte in rendered.prompt.items[0].digest))
    item = replace(hostile.prompt.items[0], digest=digest)
    return Rendered(replace(hostile.prompt, items=(item,)), {digest: hostile.features[rendered.prompt.items[0].digest]})


async def outcomes(rig: Rig, requests: Mapping[str, Rendered], **sampling: object) -> dict[str, Answer | str]:
    """The answers to requests that are sent at once, or why a feature was rejected."""

    async def outcome(name: str, rendered: Rendered) -> Answer | str:
        stream: Any = None
        try:
            stream = await rig.engine.submit(replace(submission(rendered, **sampling), request_id=name))
            return joined([output async for output in stream])
        except FeatureRejected as error:
            return str(error)
        finally:
            if stream is not None:
                await stream.close()

    return dict(zip(requests, await asyncio.gather(*(outcome(*one) for one in requests.items())), strict=True))


async def is_ended_alone(rig: ShippedRig, good: Rendered, hostile: Rendered, message: str) -> None:
    """The request, twice and beside another one, whose answer is the same as without it; and so is the next one's."""
    await rig.engine.reset()
    expected = await outcomes(rig, {"good": good})
    await rig.engine.reset()
    before = await rig.totals()
    got = await outcomes(rig, {"hostile": hostile, "good": good})
    again = await outcomes(rig, {"hostile": hostile}, max_tokens=1)  # neither its output nor its prefix is kept
    for refusal in (got["hostile"], again["hostile"]):
        assert isinstance(refusal, str), "it was answered"
        assert re.search(message, refusal), refusal
    assert got["good"] == expected["good"]
    for forget in (False, True):
        if forget:
            await rig.llm.reset_prefix_cache()
        assert await outcomes(rig, {"good": good}) == expected
    after = await rig.totals()
    assert after.rejected - before.rejected == 2
