"""S9: a feature of wrong names, dtypes, shapes or sizes is refused before an engine sees it (CVE-2025-62372).

The real engine with malformed features is in `tests/engine`, the contract's every word in `tests/core/test_feature.py`.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from semel.core import Contract, Digest, Feature, Item, Layout, Mask, Placeholder, Prompt, Submission, Tensor, Timeline
from semel.engine.vllm.requests.inputs import build_item, check_prompt
from semel.errors import FeatureRejected, InvalidRequest
from semel.interchange.safetensors import FeatureEntry
from semel.worker.injection import inject
from tests.core.test_feature import CONTRACT, feature, tensor
from tests.worker.stored import Store

DIGEST = Digest(bytes(32))
PIXELS, GRID = tensor("uint8", 6, 4), tensor("int64", 1, 3)
WRONG = {
    "a row too short": feature(tensors={"pixels": tensor("uint8", 6, 3), "grid": GRID}),
    "a dimension less": feature(tensors={"pixels": tensor("uint8", 24), "grid": GRID}),
    "a dimension more": feature(tensors={"pixels": tensor("uint8", 1, 6, 4), "grid": GRID}),
    "another dtype": feature(tensors={"pixels": tensor("float32", 6, 4), "grid": GRID}),
    "a grid of two": feature(tensors={"pixels": PIXELS, "grid": tensor("int64", 1, 2)}),
    "no grid": feature(tensors={"pixels": PIXELS}),
    "one tensor more": feature(tensors={"pixels": PIXELS, "grid": GRID, "more": GRID}),
    "no embedding": feature(layout=Layout((7, 7), Mask([0, 0]))),
    "more embeddings than fit": feature(layout=Layout((7,) * 9)),
    "another modality": feature(modality="audio"),
}


class _NaiveEngine:
    """Checks the number of dimensions, as was shipped, and reads rows of four; what it raises ends it for everybody."""

    def __init__(self) -> None:
        self.dead = False

    def submit(self, given: Feature) -> None:
        if len(given.tensors["pixels"].shape) != 2:
            raise FeatureRejected("pixels must have two dimensions")
        try:
            self._encode(given.tensors["pixels"], given.tensors["grid"])
        except (IndexError, KeyError, TypeError):
            self.dead = True

    def _encode(self, pixels: Tensor, grid: Tensor) -> None:
        rows = pixels.data.cast("B", [pixels.shape[0], 4])  # of its memory, whatever the shape says
        for row in range(pixels.shape[0]):
            _ = rows[row, 3]
        _ = grid.data.cast("B").cast("q")[2]


def _to_the_letter(given: Feature, contract: Contract) -> None:
    contract.check(given)


def test_a_naive_engine_is_ended_by_one_request() -> None:
    naive = _NaiveEngine()
    naive.submit(feature())
    assert not naive.dead
    naive.submit(WRONG["a row too short"])
    assert naive.dead


@pytest.mark.parametrize("given", WRONG.values(), ids=WRONG)
async def test_a_wrong_feature_is_never_injected(given: Feature) -> None:
    store = Store(replace(CONTRACT, cache_bytes=1 << 20))
    (outcome,) = await inject(store, [FeatureEntry(DIGEST, given)], lambda *_: None, peer="test")
    assert outcome.status == "refused"
    assert not store.held


@pytest.mark.parametrize("given", WRONG.values(), ids=WRONG)
def test_a_wrong_feature_of_a_request_is_refused_before_the_engine_s_input_is_built(
    monkeypatch: pytest.MonkeyPatch, given: Feature
) -> None:
    def build(_: Feature) -> None:
        raise AssertionError("the engine saw it")

    model: Any = SimpleNamespace(is_encoder_decoder=False, build=build, check=build, admit=_to_the_letter)
    layout = given.layout
    place = Placeholder(0, len(layout), layout.mask)
    prompt = Prompt(layout.token_ids, Timeline.decoder([place]), (Item(given.modality, DIGEST),))
    cache: Any = None
    submission = Submission("r", prompt, {DIGEST: given})
    with pytest.raises((FeatureRejected, InvalidRequest)):
        check_prompt(submission, CONTRACT, model, cache)
        build_item(given, CONTRACT, model)
