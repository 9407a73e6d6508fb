"""An engine that embeds (Qwen2-VL with `--runner pooling --convert embed`) behind a frontend, next to bare vLLM.

Vectors are vLLM's to the last bit if prompts come one at a time. In batches, and with a prefix that is cached, the
kernels add in another order.
"""

from __future__ import annotations

import asyncio
import base64
import json
from array import array
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from typing import Any, Final, cast

import cohere
import httpx
import numpy as np
import openai
import pytest

from semel.core import Digest, Output, Submission, Tenant
from semel.errors import FeatureMissing, FeatureRejected, InvalidRequest
from semel.render import ChatRequest, Rendered
from tests.engine.engines import COMMON, Engines, ShippedRig, Start
from tests.engine.hostile import disguised, more_room, unchecked
from tests.engine.parity import draw_image, image_part, random_chat, words
from tests.engine.vllm_server import KEYS, frontend_of, vllm_client
from tests.frontend.rig import Rig

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

EMBEDDINGS: Final = "/v1/embeddings"
DIMENSIONS: Final = 128
INSTRUCTIONS: Final = {"search_query": "Find: ", "search_document": ""}
START: Final = Start(
    "qwen2-vl",
    (
        *("--runner", "pooling", "--convert", "embed", "--max-model-len", "4096", "--max-num-batched-tokens", "2048"),
        *("--limit-mm-per-prompt", '{"image": 4, "video": 0}', "--mm-processor-cache-gb", "0.002"),
        *(
            "--hf-overrides",
            json.dumps({"matryoshka_dimensions": [32, 64, DIMENSIONS], "task_instructions": INSTRUCTIONS}),
        ),
    ),
    common=tuple(flag for flag in COMMON if flag != "--disable-log-stats"),
)
TOLERANCE: Final[Mapping[str, Any]] = {"rtol": 1e-4, "atol": 1e-5}
Chat = list[dict[str, Any]]


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


async def bare(rig: ShippedRig, chat: Chat | str, **params: Any) -> list[float]:
    """What vLLM makes of a chat or a text by itself."""
    from vllm.pooling_params import PoolingParams
    from vllm.renderers.params import ChatParams

    if isinstance(chat, str):
        prompt: Any = {"prompt_token_ids": rig.llm.renderer.get_tokenizer().encode(chat)}
    else:
        kwargs = ChatParams(chat_template_kwargs={"add_generation_prompt": False})
        _, (prompt,) = await rig.llm.renderer.render_chat_async([chat], kwargs)
    async for result in rig.llm.encode(prompt, PoolingParams(task="embed", **params), request_id="bare"):
        found: list[float] = result.outputs.data.tolist()
    return found


async def post(app: Rig, body: dict[str, Any], tenant: str = "one") -> dict[str, Any]:
    response = await app.post(EMBEDDINGS, body, Authorization=f"Bearer {KEYS[tenant]}")
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def vectors(answer: dict[str, Any]) -> list[list[float]]:
    return [one["embedding"] for one in answer["data"]]


async def embedded(app: Rig, *inputs: Chat | str, tenant: str = "one", **options: Any) -> list[list[float]]:
    return vectors(await post(app, {"input": inputs[0] if len(inputs) == 1 else [*inputs], **options}, tenant))


def random_inputs(seed: int, count: int, images: int) -> list[Chat | str]:
    """Chats with up to two of so many images, and texts."""
    rng = np.random.default_rng(seed)
    parts = [image_part(draw_image(rng)) for _ in range(images)]
    inputs: list[Chat | str] = []
    for _ in range(count):
        shown = [parts[int(number)] for number in rng.integers(0, images, int(rng.integers(0, 3)))]
        inputs.append(random_chat(rng, shown) if rng.random() < 0.8 else words(rng))
    return inputs


async def rendered(rig: ShippedRig, chat: Chat) -> Rendered:
    return await rig.pipeline.chat(ChatRequest(chat, add_generation_prompt=False), Tenant("one"))


async def vector(rig: ShippedRig, one: Rendered, name: str = "ours", **params: object) -> list[float]:
    stream = await rig.engine.submit(Submission(name, one.prompt, one.features, {"task": "embed", **params}))
    try:
        outputs: list[Output] = [output async for output in stream]
    finally:
        await stream.close()
    assert outputs[0].pooling is not None
    return array("f", outputs[0].pooling.data).tolist()


async def test_the_contract_says_what_the_model_pools(engine: ShippedRig) -> None:
    pooling: Any = engine.engine.contract.pooling
    assert (pooling.task, pooling.scores, pooling.labels) == ("embed", True, ())
    assert set(pooling.supported) >= {"embed", "token_embed"}
    assert pooling.config["seq_pooling_type"] == "LAST"


async def test_vectors_are_vllms_to_the_last_bit_one_at_a_time(engine: ShippedRig, app: Rig) -> None:
    inputs = random_inputs(1, 24, 12)
    expected, found = [], []
    for one in inputs:
        await engine.engine.reset()
        expected.append(await bare(engine, one))
    for one in inputs:
        await engine.engine.reset()
        found += await embedded(app, one)
    assert found == expected
    assert len({tuple(one) for one in found}) > 20, "the control: different inputs have different vectors"
    assert all(len(one) == DIMENSIONS for one in found)


async def test_200_random_requests_with_evictions_and_a_second_tenant(engine: ShippedRig, app: Rig) -> None:
    inputs = random_inputs(2, 60, 24)
    expected = []
    for one in inputs:
        await engine.engine.reset()
        expected.append(await bare(engine, one))
    await engine.engine.reset()
    before = app.metrics("semel_mm_cache")
    evictions = engine.engine.item_cache.evictions
    rng = np.random.default_rng(3)

    async def ask(_: int) -> None:
        chosen = [int(number) for number in rng.integers(0, len(inputs), int(rng.integers(1, 5)))]
        tenant = "two" if rng.random() < 0.3 else "one"
        kinds = {type(inputs[number]) for number in chosen}
        if len(kinds) > 1:  # a request has texts or chats
            chosen = [number for number in chosen if isinstance(inputs[number], list)]
        found = await embedded(app, *[inputs[number] for number in chosen], tenant=tenant)
        np.testing.assert_allclose(found, [expected[number] for number in chosen], **TOLERANCE)

    for start in range(0, 200, 20):
        await asyncio.gather(*map(ask, range(start, start + 20)))
    after = app.metrics("semel_mm_cache")
    name = f'semel_mm_cache_hits_total{{modality="image",model="{engine.engine.contract.model}",tier="worker"}}'
    assert float(after[name]) - float(before.get(name, 0)) > 50
    assert engine.engine.item_cache.evictions > evictions


async def test_a_repeated_image_is_a_hit_and_another_tenants_is_not(engine: ShippedRig, app: Rig) -> None:
    await engine.engine.reset()
    part = image_part(draw_image(np.random.default_rng(5)))

    async def counts(text: str, tenant: str) -> tuple[float, float]:
        names = ("semel_mm_cache_queries_total", "semel_mm_cache_hits_total")
        labels = f'{{modality="image",model="{engine.engine.contract.model}",tier="worker"}}'
        before = [float(app.metrics(name).get(name + labels, 0)) for name in names]
        await embedded(app, [{"role": "user", "content": [part, {"type": "text", "text": text}]}], tenant=tenant)
        queries, hits = (float(app.metrics(name).get(name + labels, 0)) for name in names)
        return queries - before[0], hits - before[1]

    assert await counts("red", "one") == (1, 0)
    assert await counts("12", "one") == (1, 1)
    assert await counts("red", "two") == (1, 0)
    assert await counts("12", "two") == (1, 1)


async def test_the_openai_client_gets_vllms_vectors_and_their_base64(engine: ShippedRig, app: Rig) -> None:
    model, texts = engine.engine.contract.model, ["what is red", "été 你好"]
    await engine.engine.reset()
    expected = [await bare(engine, text) for text in texts]
    await engine.engine.reset()
    client = openai.AsyncOpenAI(api_key=KEYS["one"], base_url="http://frontend/v1", http_client=cast("Any", app.client))
    answer = await client.embeddings.create(model=model, input=texts)
    np.testing.assert_allclose([one.embedding for one in answer.data], expected, **TOLERANCE)
    written: Any = await embedded(app, "what is red", encoding_format="base64")
    np.testing.assert_allclose(array("f", base64.b64decode(written[0])).tolist(), expected[0], **TOLERANCE)


async def test_dimensions_and_activation_are_the_engines_to_take_or_refuse(engine: ShippedRig, app: Rig) -> None:
    for params in ({"dimensions": 32}, {"use_activation": False}, {"dimensions": 64, "use_activation": False}):
        await engine.engine.reset()
        expected = await bare(engine, "what is red", **params)
        await engine.engine.reset()
        assert await embedded(app, "what is red", **params) == [expected]
    headers = {"Authorization": f"Bearer {KEYS['one']}"}
    refused = await app.post(EMBEDDINGS, {"input": "red", "dimensions": 33}, **headers)
    assert refused.status_code == 400
    assert "Matryoshka dimensions [32, 64, 128], got 33" in refused.json()["error"]["message"]


async def test_a_feature_that_lies_ends_its_request_alone(engine: ShippedRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's output processor would end the engine: a failed request has no pooling output."""
    await engine.engine.reset()
    chat: Chat = [{"role": "user", "content": [image_part(draw_image(np.random.default_rng(6), side=112))]}]
    good = await rendered(engine, chat)
    expected = await vector(engine, good)
    await engine.engine.reset()
    hostile = disguised(good, more_room)
    with monkeypatch.context() as patch:
        unchecked(engine, patch)
        results = await asyncio.gather(
            vector(engine, hostile, "hostile"), vector(engine, good, "good"), return_exceptions=True
        )
        assert isinstance(results[0], FeatureRejected), results[0]
        assert isinstance(results[1], list)
        np.testing.assert_allclose(results[1], expected, **TOLERANCE)
    await engine.engine.reset()
    assert await vector(engine, good) == expected


async def test_an_item_that_the_engine_core_has_lost_is_missed_and_sent_again(engine: ShippedRig, app: Rig) -> None:
    await engine.engine.reset()
    chat: Chat = [{"role": "user", "content": [image_part(draw_image(np.random.default_rng(7)))]}]
    one = await rendered(engine, chat)
    expected = await vector(engine, one)
    lost = replace(one, features={})
    await engine.llm.reset_prefix_cache()
    await engine.llm.engine_core.reset_mm_cache_async()  # and not its mirror
    await engine.llm.reset_encoder_cache()
    with pytest.raises(FeatureMissing):
        await vector(engine, lost)
    assert await vector(engine, one) == expected
    found = await embedded(app, chat)
    await engine.llm.reset_prefix_cache()
    await engine.llm.engine_core.reset_mm_cache_async()
    await engine.llm.reset_encoder_cache()
    assert await embedded(app, chat) == found


async def test_what_the_engine_does_not_pool_is_refused(engine: ShippedRig) -> None:
    one = await rendered(engine, [{"role": "user", "content": "red"}])
    for sampling, said in (
        ({"max_tokens": 1}, "does not support generation"),
        ({"task": "classify"}, "Unsupported task: 'classify'"),
        ({"task": "embed", "extra_kwargs": {}}, "extra_kwargs: not of a model that pools"),
        ({"task": "embed", "dimensions": "many"}, "Expected `int"),
    ):
        with pytest.raises(InvalidRequest, match=said):
            await engine.engine.submit(Submission("refused", one.prompt, one.features, sampling))


async def test_an_injected_item_is_pooled(engine: ShippedRig) -> None:
    await engine.engine.reset()
    chat: Chat = [{"role": "user", "content": [image_part(draw_image(np.random.default_rng(8)))]}]
    one = await rendered(engine, chat)
    expected = await vector(engine, one)
    await engine.engine.reset()
    ((digest, feature),) = one.features.items()
    assert await engine.engine.inject(Digest(digest), feature)
    assert await vector(engine, replace(one, features={})) == expected


async def vllm_scores(rig: ShippedRig, kind: str, queries: Any, documents: Any) -> list[float]:
    """The scores of vLLM's server code, with the prompts that it makes, one at a time."""
    from vllm.entrypoints.pooling.scoring.io_processor import ScoringIOProcessors, ScoringServeContext
    from vllm.entrypoints.pooling.scoring.protocol import ScoreDataRequest
    from vllm.renderers.chat_utils import ChatTemplateConfig

    config = ChatTemplateConfig(chat_template=None, chat_template_content_format="auto")
    renderer = rig.llm.renderer
    io = ScoringIOProcessors[kind](vllm_config=rig.llm.vllm_config, renderer=renderer, chat_template_config=config)
    request = ScoreDataRequest(data_1=queries, data_2=documents)
    ctx = ScoringServeContext(
        request=request,
        model_name="tiny",
        request_id="bare",
        pooling_params=io.create_pooling_params(request),
        lora_request=None,
        priorities=None,
        prompt_extras=None,
    )
    for made in [io.render(one) for one in io.get_request_factory_online(ctx)]:
        async for result in rig.llm.encode(made["prompts"], made["params"], request_id="bare"):
            ctx.final_res_batch.append(result)
    io.post_process_online(ctx)
    return [float(one.outputs) for one in ctx.final_res_batch]


def documents_of(seed: int) -> list[Any]:
    """Texts, and contents with images, one of which comes twice."""
    rng = np.random.default_rng(seed)
    part, other = image_part(draw_image(rng)), image_part(draw_image(rng))
    return [
        "what is red",
        {"content": [{"type": "text", "text": words(rng)}, part]},
        {"content": [other]},
        "été 你好",
        {"content": [part, {"type": "text", "text": words(rng)}, {"type": "text", "text": "12"}]},
    ]


async def scores_of(app: Rig, path: str, body: dict[str, Any]) -> dict[str, Any]:
    response = await app.post(path, body, Authorization=f"Bearer {KEYS['one']}")
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


@pytest.mark.parametrize("query", ["tell me more", documents_of(30)[1]])
async def test_scores_by_embeddings_are_those_of_vllms_server(engine: ShippedRig, app: Rig, query: Any) -> None:
    documents = documents_of(30)
    await engine.engine.reset()
    expected = await vllm_scores(engine, "bi-encoder", query, documents)
    answer = await scores_of(app, "/score", {"queries": query, "documents": documents})
    np.testing.assert_allclose([one["score"] for one in answer["data"]], expected, **TOLERANCE)
    assert len({round(one, 4) for one in expected}) == len(expected), "the control: different documents differ"
    ranked = await scores_of(app, "/v2/rerank", {"query": query, "documents": documents, "top_n": 3})
    order = sorted(range(len(expected)), key=lambda number: -expected[number])[:3]
    assert [one["index"] for one in ranked["results"]] == order


def as_cohere(client: httpx.AsyncClient) -> cohere.AsyncClientV2:
    return cohere.AsyncClientV2(KEYS["one"], base_url=str(client.base_url).rstrip("/"), httpx_client=client)


async def test_the_cohere_client_gets_the_same_from_semel_and_from_vllms_server(
    engine: ShippedRig, app: Rig, vllm: httpx.AsyncClient
) -> None:
    model: Any = engine.engine.contract.model
    image = image_part(draw_image(np.random.default_rng(40)))["image_url"]["url"]
    mixed: Any = {"content": [{"type": "text", "text": "what"}, {"type": "image_url", "image_url": {"url": image}}]}
    calls: list[dict[str, Any]] = [
        {"texts": ["what is red"], "input_type": "search_document"},
        {"texts": ["what is red"], "input_type": "search_query"},
        {"images": [image], "input_type": "search_document"},
        {"inputs": [mixed], "input_type": "search_query"},
        {"texts": ["what is red"], "input_type": "search_document", "output_dimension": 32},
        {"texts": ["été 你好"], "input_type": "search_document", "embedding_types": ["float", "ubinary", "base64"]},
        {"texts": ["what is red " * 500], "input_type": "search_document", "max_tokens": 64, "truncate": "START"},
    ]
    seen = set()
    for call in calls:
        answers = []
        for client in (vllm, app.client):
            await engine.engine.reset()
            answers.append(await as_cohere(client).v2.embed(model=model, **call))
        expected, found = answers
        assert found.embeddings == expected.embeddings, call
        assert (found.texts, found.response_type) == (expected.texts, expected.response_type)
        assert found.meta is not None and expected.meta is not None
        assert found.meta.billed_units == expected.meta.billed_units
        seen.add(str(found.embeddings))
    assert len(seen) == len(calls), "the control: each call has an answer of its own"
    with pytest.raises(cohere.BadRequestError, match="input_type"):
        await as_cohere(app.client).v2.embed(model=model, texts=["red"], input_type="classification")


async def test_the_cohere_client_reranks_as_with_vllms_server(
    engine: ShippedRig, app: Rig, vllm: httpx.AsyncClient
) -> None:
    model: Any = engine.engine.contract.model
    documents = ["what is red", "été 你好", "tell me more", "12"]
    for options in ({}, {"top_n": 2}):
        answers = []
        for client in (vllm, app.client):
            await engine.engine.reset()
            options_: Any = options
            answer = await as_cohere(client).v2.rerank(model=model, query="red", documents=documents, **options_)
            answers.append([(one.index, one.relevance_score) for one in answer.results])
        expected, found = answers
        assert [number for number, _ in found] == [number for number, _ in expected]
        np.testing.assert_allclose([one for _, one in found], [one for _, one in expected], **TOLERANCE)
    assert len(found) == 2


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (EMBEDDINGS, {"input": "what is red"}),
        (EMBEDDINGS, {"input": "what is red", "encoding_format": "base64", "dimensions": 64}),
        ("/pooling", {"input": [1, 2, 3], "task": "embed"}),
        ("/score", {"queries": "red", "documents": ["what is red", "12"]}),
        ("/v1/score", {"text_1": ["red", "12"], "text_2": ["what is red", "12"]}),
        ("/v2/rerank", {"query": "red", "documents": ["what is red", "12"]}),
    ],
)
async def test_plain_requests_have_the_members_and_numbers_of_vllms_server(
    engine: ShippedRig, app: Rig, vllm: httpx.AsyncClient, path: str, body: dict[str, Any]
) -> None:
    answers = []
    for client in (vllm, app.client):
        await engine.engine.reset()
        headers = {"Authorization": f"Bearer {KEYS['one']}"}
        response = await client.post(path, json={"model": engine.engine.contract.model, **body}, headers=headers)
        assert response.status_code == 200, response.text
        answers.append(response.json())
    expected, found = answers
    assert found.keys() >= expected.keys()
    assert found["usage"]["prompt_tokens"] == expected["usage"]["prompt_tokens"]
    name = "results" if "results" in expected else "data"
    if "score" in path or name == "results":
        for one, other in zip(found[name], expected[name], strict=True):
            assert one.keys() == other.keys()
            assert one["index"] == other["index"]
            score = "score" if "score" in one else "relevance_score"
            assert one[score] == pytest.approx(other[score], rel=1e-4, abs=1e-5)
    else:
        assert found[name] == expected[name]
