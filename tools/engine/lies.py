"""Features that lie, made from an honest one of any family, and what an engine makes of them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from math import prod
from typing import Final

import numpy as np
import pytest
from msgspec import structs

from semel.core import Feature, Tensor
from semel.errors import FeatureRejected
from semel.render import Rendered
from tests.engine.hostile import disguised, less_room, more_room, unchecked
from tests.engine.parity import Rig

__all__ = ["Lie", "grids", "lies", "outcome_of"]

_MAX_GRID: Final = 16
_OF_THE_ENCODER: Final = re.compile("^the encoder (failed on|made [0-9,]+ embeddings of) the ")


@dataclass(frozen=True)
class Lie:
    """A feature that says something false of itself."""

    name: str
    rendered: Rendered
    is_checked: bool = True
    """Whether semel's checks stand before the engine, or only the guard inside it."""

    may_be_answered: bool = False
    """Whether it may be harmless: some models do not look at what is false."""


def lies(honest: Rendered, other: Rendered) -> Iterator[Lie]:
    """Every kind of lie, from two prompts with one item each, of different sizes."""
    (feature,), (larger,) = honest.features.values(), other.features.values()
    marks = count(1)  # each lie is an item of its own: none is refused for what another one was
    for name, change in (("more room than embeddings", more_room), ("less room", less_room)):
        yield Lie(name, disguised(honest, change, next(marks)))
        yield Lie(f"{name}, unchecked", disguised(honest, change, next(marks)), is_checked=False)
    if feature.origin is None:
        return
    doubled = structs.replace(feature.origin, shape=tuple(2 * size for size in feature.origin.shape))
    false = replace(feature, origin=doubled)
    yield Lie("another origin", disguised(honest, lambda _: false, next(marks)), may_be_answered=True)
    swapped = replace(feature, origin=larger.origin, layout=larger.layout)
    yield Lie(
        "origin and layout of another item",
        disguised(honest, lambda _: swapped, next(marks)),
        may_be_answered=larger.layout == feature.layout,
    )
    for name in grids(feature):
        counted = partial(with_counts, name=name)
        yield Lie(f"{name} of another size", disguised(honest, counted, next(marks)), may_be_answered=True)


def grids(feature: Feature) -> list[str]:
    """The fields that count: a few whole numbers beside the pixels or samples."""
    return [
        name
        for name, tensor in feature.tensors.items()
        if tensor.dtype.startswith("int") and 0 < prod(tensor.shape) <= _MAX_GRID
    ]


def with_counts(feature: Feature, name: str) -> Feature:
    """The same item with greater numbers in a field."""
    tensor = feature.tensors[name]
    values = np.frombuffer(tensor.data, tensor.dtype).reshape(tensor.shape) * 2
    return replace(
        feature, tensors={**feature.tensors, name: Tensor(tensor.dtype, tensor.shape, values.data.cast("B"))}
    )


async def outcome_of(rig: Rig, honest: Rendered, lie: Lie) -> str:
    """What became of a lie; raises if it did anything to the next request.

    It is refused by semel, ended alone by the guard in the engine, or answered, which is the liar's own harm.
    """
    await rig.engine.reset()
    expected = await rig.answer(honest)
    with pytest.MonkeyPatch.context() as patch:
        if not lie.is_checked:
            unchecked(rig, patch)
        try:
            await rig.answer(lie.rendered)
            outcome = "answered"
        except FeatureRejected as error:
            outcome = "ended alone" if _OF_THE_ENCODER.match(str(error)) else "refused"
    await rig.engine.reset()
    assert await rig.answer(honest) == expected, f"another answer after {lie.name}"
    assert outcome != "answered" or lie.may_be_answered, f"{lie.name} was answered"
    assert outcome == "ended alone" or lie.is_checked, f"{lie.name} was {outcome}, and no check was there"
    return outcome
