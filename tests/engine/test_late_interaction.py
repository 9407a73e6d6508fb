"""An engine that embeds tokens, Qwen2-VL with `--pooler-config.task token_embed`, next to vLLM's server on it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any, Final

import httpx
import numpy as np
import pytest

from tests.engine.engines import COMMON, Engines, ShippedRig, Start
from tests.engine.test_pooling import TOLERANCE, documents_of
from tests.engine.vllm_server import KEYS, ask_both, frontend_of, vllm_client
from tests.frontend.rig import Rig

pytestmark = [pytest.mark.engine, pytest.mark.nightly, pytest.mark.timeout(600)]

SENT, HITS = "semel_features_sent_total", "semel_mm_cache_hits_total"
START: Final = Start(
    "qwen2-vl",
    (
        *("--runner", "pooling", "--convert", "embed", "--max-model-len", "4096"),
        *("--pooler-config", json.dumps({"task": "token_embed"})),
        *("--limit-mm-per-prompt", '{"image": 4, "video": 0}'),
    ),
    common=tuple(flag for flag in COMMON if flag != "--disable-log-stats"),
)


@pytest.fixture(scope="module")
async def engine(engines: Engines) -> ShippedRig:
    rig = await engines.of(START)
    await rig.engine.warm()
    return rig


@pytest.fixture(scope="module")
async def app(engine: ShippedRig, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Rig]:
    async with frontend_of(engine, tmp_path_factory.mktemp("w")) as app:
        yield app


@pytest.fixture(scope="module")
async def vllm(engine: ShippedRig) -> AsyncIterator[httpx.AsyncClient]:
    async with vllm_client(engine, START) as client:
        yield client


def counted(app: Rig, name: str, label: str = "") -> float:
    return sum(float(value) for labels, value in app.metrics(name).items() if label in labels)


@pytest.mark.parametrize("query", ["tell me more", documents_of(30)[1]])
async def test_scores_are_those_of_vllms_server(
    engine: ShippedRig, app: Rig, vllm: httpx.AsyncClient, query: Any
) -> None:
    documents = documents_of(30)
    expected, found = await ask_both(engine, app, vllm, "/score", {"queries": query, "documents": documents})
    of_vllm = [one["score"] for one in expected["data"]]
    np.testing.assert_allclose([one["score"] for one in found["data"]], of_vllm, **TOLERANCE)
    assert found["usage"]["prompt_tokens"] == expected["usage"]["prompt_tokens"]
    assert len({round(one, 4) for one in of_vllm}) == len(of_vllm), "the control: different documents differ"
    each = {"queries": documents, "documents": documents[::-1]}
    expected, found = await ask_both(engine, app, vllm, "/v1/score", each)
    of_vllm = [one["score"] for one in expected["data"]]
    np.testing.assert_allclose([one["score"] for one in found["data"]], of_vllm, **TOLERANCE)


async def test_documents_have_the_order_of_vllms_server_and_their_images_are_sent_once(
    engine: ShippedRig, app: Rig, vllm: httpx.AsyncClient
) -> None:
    body = {"query": "what is red", "documents": documents_of(31), "top_n": 3}
    expected, found = await ask_both(engine, app, vllm, "/v2/rerank", body)
    assert [one["index"] for one in found["results"]] == [one["index"] for one in expected["results"]]
    sent, hits = counted(app, SENT), counted(app, HITS, 'tier="worker"')
    again = await app.post("/v2/rerank", body, Authorization=f"Bearer {KEYS['one']}")
    assert again.json()["results"] == found["results"]
    assert counted(app, SENT) == sent > 0, "a repeat sends nothing"
    assert counted(app, HITS, 'tier="worker"') == hits + 3


async def test_the_vectors_of_tokens_are_vllms(engine: ShippedRig, app: Rig, vllm: httpx.AsyncClient) -> None:
    expected, found = await ask_both(engine, app, vllm, "/pooling", {"input": "what is red"})
    assert found["data"][0]["data"] == expected["data"][0]["data"]
