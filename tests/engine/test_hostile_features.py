"""What lies to the encoder ends its own request, on real engines that are started as a worker's are.

Every check that stands before the engine is taken away here. What is checked there is in `test_families`.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.engines import Engines, ShippedRig
from tests.engine.families import FAMILIES, Change
from tests.engine.hostile import CONTRADICTIONS, MISFITS, disguised, is_ended_alone, unchecked

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]


IN_CI = ("qwen2-vl", "llava-next")


def row(family: str, kind: str, change: Change) -> Any:
    """A test of one family; those that are not for CI share the nightly engines."""
    marks = () if family in IN_CI else (pytest.mark.slow, pytest.mark.nightly)
    return pytest.param(family, change, id=kind, marks=marks)


@pytest.fixture
async def rig(request: pytest.FixtureRequest, engines: Engines) -> ShippedRig:
    return await engines.of(FAMILIES[request.param].start)


@pytest.mark.parametrize(
    ("rig", "change"),
    [row(name, f"{name}: {kind}", change) for name in FAMILIES for kind, change in MISFITS.items()],
    indirect=["rig"],
)
async def test_an_item_with_room_for_other_embeddings_than_its_encoder_makes_is_ended_alone_S9(
    rig: ShippedRig, change: Change, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    family = FAMILIES[request.node.callspec.params["rig"]]
    good = await rig.render(family.good())
    unchecked(rig, monkeypatch)
    hostile = disguised(good, change)
    (feature,), (honest,) = hostile.features.values(), good.features.values()
    message = (
        f"^the encoder made {honest.layout.num_embeds:,} embeddings of the {honest.modality} feature, "
        f"its layout has {feature.layout.num_embeds:,}$"
    )
    await is_ended_alone(rig, good, hostile, message)


@pytest.mark.parametrize(
    ("rig", "change"), [row(name, kind, change) for kind, (name, change) in CONTRADICTIONS.items()], indirect=["rig"]
)
async def test_an_item_whose_tensors_contradict_each_other_is_ended_alone_S9(
    rig: ShippedRig, change: Change, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    family = FAMILIES[request.node.callspec.params["rig"]]
    good = await rig.render(family.good())
    unchecked(rig, monkeypatch)
    await is_ended_alone(rig, good, disguised(good, change), "^the encoder (failed on|made [0-9]+ embeddings of) the ")
