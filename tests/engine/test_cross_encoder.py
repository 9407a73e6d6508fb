"""An engine that classifies, Qwen2-VL with `--convert classify` and one class, next to vLLM's server on it."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from typing import Any, Final

import httpx
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.conftest import Folder
from tests.engine.engines import COMMON, Engines, ShippedRig, Start, running_as_worker
from tests.engine.test_pooling import TOLERANCE, documents_of
from tests.engine.vllm_server import KEYS, ask_both, frontend_of, vllm_client
from tests.frontend.rig import Rig

pytestmark = [pytest.mark.engine, pytest.mark.nightly, pytest.mark.timeout(600)]

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
    weights["language_model.score.weight"] = torch.randn(1, 128, generator=torch.Generator().manual_seed(1))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    async with running_as_worker(START, folder) as rig:
        await rig.engine.warm()
        yield rig


@pytest.fixture(scope="module")
async def app(engine: ShippedRig, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Rig]:
    async with frontend_of(engine, tmp_path_factory.mktemp("w")) as app:
        yield app


@pytest.fixture(scope="module")
async def vllm(engine: ShippedRig) -> AsyncIterator[httpx.AsyncClient]:
    async with vllm_client(engine, START) as client:
        yield client


@pytest.mark.parametrize("query", ["tell me more", documents_of(30)[1]])
async def test_scores_of_single_pairs_are_those_of_vllms_server_to_the_last_bit(
    engine: ShippedRig, app: Rig, vllm: httpx.AsyncClient, query: Any
) -> None:
    scores = []
    for document in documents_of(30):
        expected, found = await ask_both(engine, app, vllm, "/score", {"queries": query, "documents": document})
        assert found["data"] == expected["data"]
        assert found["usage"]["prompt_tokens"] == expected["usage"]["prompt_tokens"]
        scores.append(found["data"][0]["score"])
    assert len(set(scores)) == len(scores), "the control: different documents differ"


@pytest.mark.parametrize("query", ["tell me more", documents_of(30)[1]])
async def test_documents_have_the_order_and_scores_of_vllms_server(
    engine: ShippedRig, app: Rig, vllm: httpx.AsyncClient, query: Any
) -> None:
    body = {"query": query, "documents": documents_of(30)}
    for path in ("/rerank", "/v2/rerank"):
        expected, found = (
            [(one["index"], one["relevance_score"]) for one in answer["results"]]
            for answer in await ask_both(engine, app, vllm, path, body)
        )
        assert [number for number, _ in found] == [number for number, _ in expected]
        np.testing.assert_allclose([one for _, one in found], [one for _, one in expected], **TOLERANCE)


async def test_two_hundred_random_pairs_with_repeats_and_a_second_tenant(
    engine: ShippedRig, app: Rig, vllm: httpx.AsyncClient
) -> None:
    """Scores are of the pair alone, whatever else is cached or runs."""
    documents, rng = documents_of(32) + documents_of(33), np.random.default_rng(34)
    expected = {}
    for number, query in enumerate(documents):
        await engine.engine.reset()
        answer = await vllm.post("/score", json={"queries": query, "documents": documents})
        expected[number] = [one["score"] for one in answer.json()["data"]]
    await engine.engine.reset()

    async def ask(_: int) -> None:
        query, tenant = int(rng.integers(len(documents))), "two" if rng.random() < 0.3 else "one"
        chosen = [int(one) for one in rng.integers(len(documents), size=3)]
        body = {"queries": documents[query], "documents": [documents[one] for one in chosen]}
        response = await app.post("/score", body, Authorization=f"Bearer {KEYS[tenant]}")
        assert response.status_code == 200, response.text
        found = [one["score"] for one in response.json()["data"]]
        np.testing.assert_allclose(found, [expected[query][one] for one in chosen], **TOLERANCE)

    for start in range(0, 80, 16):
        await asyncio.gather(*map(ask, range(start, start + 16)))


async def test_classes_are_those_of_vllms_server(engine: ShippedRig, app: Rig, vllm: httpx.AsyncClient) -> None:
    (content,) = [one["content"] for one in documents_of(31)[1:2]]
    chat = [{"role": "user", "content": content}]
    expected, found = await ask_both(engine, app, vllm, "/classify", {"messages": chat})
    assert found["data"] == expected["data"]
    expected, found = await ask_both(engine, app, vllm, "/pooling", {"messages": chat})
    assert found["data"] == expected["data"]
