"""An engine that classifies, Qwen2-VL with `--convert classify` and one class, next to the code of vLLM's server."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator
from typing import Any, Final

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from semel.core import Keyring
from tests.conftest import Folder
from tests.engine.engines import COMMON, Engines, ShippedRig, Start, running_as_worker
from tests.engine.test_pooling import KEYS, TOLERANCE, documents_of, scores_of, vllm_scores
from tests.frontend.rig import Rig
from tests.frontend.rig import rig as frontend_rig

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

START: Final = Start(
    "qwen2-vl",
    (
        *("--runner", "pooling", "--convert", "classify", "--max-model-len", "4096"),
        *("--limit-mm-per-prompt", '{"image": 4, "video": 0}'),
        *("--hf-overrides", json.dumps({"num_labels": 1, "id2label": {"0": "relevant"}})),
    ),
    common=tuple(flag for flag in COMMON if flag != "--disable-log-stats"),
)


@pytest.fixture(scope="module")
async def engine(engines: Engines, tiny: Folder, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ShippedRig]:
    """The tiny model with a head for one class."""
    await engines.close()
    folder = tmp_path_factory.mktemp("models") / "reranker"
    shutil.copytree(tiny(START.model), folder)
    weights = load_file(folder / "model.safetensors")
    weights["score.weight"] = torch.randn(1, 128, generator=torch.Generator().manual_seed(1))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    async with running_as_worker(START, folder) as rig:
        await rig.engine.warm()
        yield rig


@pytest.fixture(scope="module")
async def app(engine: ShippedRig, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Rig]:
    """A frontend of the engine; one for all tests, since a worker watches the engine for good."""
    keys, folder = Keyring(list(KEYS.items())), tmp_path_factory.mktemp("w")
    made: Any = lambda _: engine.engine  # noqa: E731
    async with frontend_rig(folder, engine.pipeline, make_engine=made, keys=keys) as app:
        yield app


@pytest.mark.parametrize("query", ["tell me more", documents_of(30)[1]])
async def test_scores_of_pairs_are_those_of_vllms_server(engine: ShippedRig, app: Rig, query: Any) -> None:
    documents = documents_of(30)
    await engine.engine.reset()
    expected = await vllm_scores(engine, "cross-encoder", query, documents)
    answer = await scores_of(app, "/score", {"queries": query, "documents": documents})
    np.testing.assert_allclose([one["score"] for one in answer["data"]], expected, **TOLERANCE)
    assert len({round(one, 5) for one in expected}) == len(expected), "the control: different documents differ"
    ranked = await scores_of(app, "/rerank", {"query": query, "documents": documents})
    order = sorted(range(len(expected)), key=lambda number: -expected[number])
    assert [one["index"] for one in ranked["results"]] == order


async def test_classes_are_what_vllm_makes_of_a_chat(engine: ShippedRig, app: Rig) -> None:
    from vllm.pooling_params import PoolingParams
    from vllm.renderers.params import ChatParams

    (content,) = [one["content"] for one in documents_of(31)[1:2]]
    chat = [{"role": "user", "content": content}]
    await engine.engine.reset()
    kwargs = ChatParams(chat_template_kwargs={"add_generation_prompt": False})
    _, (prompt,) = await engine.llm.renderer.render_chat_async([chat], kwargs)
    async for result in engine.llm.encode(prompt, PoolingParams(task="classify"), request_id="bare"):
        expected = result.outputs.data.tolist()
    await engine.engine.reset()
    answer = await scores_of(app, "/classify", {"messages": chat})
    assert answer["data"] == [{"index": 0, "label": "relevant", "probs": expected, "num_classes": 1}]
    by_pooling = await scores_of(app, "/pooling", {"messages": chat})
    np.testing.assert_allclose(by_pooling["data"][0]["data"], expected, **TOLERANCE)
