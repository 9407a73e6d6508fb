"""Models that pool, over HTTP: forms of inputs and vectors, tenants, limits, and routes that do not fit."""

from __future__ import annotations

import asyncio
import base64
import struct
from array import array
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import openai
import pytest

from semel.core import Keyring, PoolingModel, Prompt, Timeline
from semel.frontend.api.pooling.requests import Encoding
from semel.frontend.api.pooling.responses import encode_vector
from semel.frontend.routes import pooled_prompts
from semel.lab.testing.engine import EchoEngine, echo_vector
from tests.frontend.rig import MAX_TOKENS, Rig, rig
from tests.render.drawn import Drawing, drawn, image_part
from tests.waiting import until

EMBEDDINGS = "/v1/embeddings"
EMBED = PoolingModel("embed", ("embed", "token_embed"), scores=True, instructions={"query": "Find: "})
CLASSIFY = PoolingModel("classify", ("classify",), labels=("no", None, "yes", "maybe"))


def pooling_engine(pooling: PoolingModel) -> Any:
    return lambda contract: EchoEngine(replace(contract, pooling=pooling))


@pytest.fixture
async def embedder(tmp_path: Path, drawing: Drawing) -> AsyncIterator[Rig]:
    """A model that embeds, whose engine caches items."""
    async with rig(tmp_path, drawing.pipeline, engine_bytes=1 << 20, make_engine=pooling_engine(EMBED)) as made:
        yield made


@pytest.fixture
async def classifier(tmp_path: Path, drawing: Drawing) -> AsyncIterator[Rig]:
    async with rig(tmp_path, drawing.pipeline, make_engine=pooling_engine(CLASSIFY)) as made:
        yield made


async def expected(app: Rig, text: str | Sequence[int], numbers: int = 4) -> list[float]:
    """What the engine makes of a text, in float32."""
    tokens = (await app.ok("/tokenize", {"prompt": text}))["tokens"] if isinstance(text, str) else text
    return array("f", echo_vector(Prompt(tokens, Timeline.decoder([]), ()), {}, numbers)).tolist()


def vectors(answer: Mapping[str, Any]) -> list[Any]:
    assert [one["index"] for one in answer["data"]] == list(range(len(answer["data"])))
    return [one["embedding"] for one in answer["data"]]


async def test_each_text_has_an_embedding_of_its_own_E2(embedder: Rig) -> None:
    answer = await embedder.ok(EMBEDDINGS, {"model": "tiny", "input": ["hello", "there", "hello"], "user": "u"})
    hello, there = await expected(embedder, "hello"), await expected(embedder, "there")
    assert vectors(answer) == [hello, there, hello]
    assert hello != there
    assert (answer["object"], answer["model"], answer["data"][0]["object"]) == ("list", "tiny", "embedding")
    assert answer["id"].startswith("embd-")
    tokens = [len((await embedder.ok("/tokenize", {"prompt": text}))["tokens"]) for text in ("hello", "there")]
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] == 2 * tokens[0] + tokens[1]
    assert answer["usage"]["completion_tokens"] == 0


async def test_an_input_is_a_text_tokens_or_a_chat_alone_or_with_others(embedder: Rig) -> None:
    tokens = (await embedder.ok("/tokenize", {"prompt": "hello"}))["tokens"]
    hello = await expected(embedder, "hello")
    chat = [{"role": "user", "content": "hello"}]
    for sent in ("hello", ["hello"], tokens, [tokens]):
        assert vectors(await embedder.ok(EMBEDDINGS, {"input": sent})) == [hello]
    rendered = await embedder.ok("/v1/chat/completions/render", {"messages": chat, "add_generation_prompt": False})
    of_chat = await expected(embedder, rendered["token_ids"])
    forms: list[dict[str, Any]] = [{"messages": chat}, {"messages": [chat]}, {"input": chat}, {"input": [chat]}]
    for form in forms:
        assert vectors(await embedder.ok(EMBEDDINGS, form)) == [of_chat]
    assert vectors(await embedder.ok(EMBEDDINGS, {"messages": [chat, chat]})) == [of_chat] * 2


async def test_an_image_is_processed_and_sent_once_in_embeddings_too(embedder: Rig, drawing: Drawing) -> None:
    chats = [[{"role": "user", "content": [image_part(7), {"type": "text", "text": text}]}] for text in ("a", "b")]
    first = await embedder.ok(EMBEDDINGS, {"messages": chats})
    again = await embedder.ok(EMBEDDINGS, {"messages": chats})
    other = await embedder.ok(EMBEDDINGS, {"messages": [{"role": "user", "content": [image_part(8)]}]})
    assert vectors(first) == vectors(again)
    assert vectors(first)[0] != vectors(first)[1] != vectors(other)[0]
    assert drawing.processed == [7, 8]
    assert first["usage"]["prompt_tokens_details"]["multimodal_tokens"] == {"image": 2 * len(drawn_layout(7))}
    hits = embedder.metrics("semel_mm_cache_hits_total")
    assert hits['semel_mm_cache_hits_total{modality="image",model="tiny",tier="worker"}'] == "3.0"


def drawn_layout(number: int) -> tuple[int, ...]:
    from semel.core import Media

    return drawn(Media("image", str(number).encode())).layout.token_ids


async def test_a_tenants_images_are_its_own(tmp_path: Path, drawing: Drawing) -> None:
    keys = Keyring([("one", "k" * 32), ("two", "l" * 32)])
    body = {"messages": [{"role": "user", "content": [image_part(3)]}]}
    async with rig(
        tmp_path, drawing.pipeline, engine_bytes=1 << 20, keys=keys, make_engine=pooling_engine(EMBED)
    ) as app:
        found = []
        for key in ("k" * 32, "l" * 32, "k" * 32):
            response = await app.post(EMBEDDINGS, body, Authorization=f"Bearer {key}")
            assert response.status_code == 200, response.text
            found.append(response.json()["data"])
        assert app.engine.salts and len(app.engine.salts) == 2
    assert drawing.processed == [3, 3]
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize(("dtype", "code"), [("float32", "f"), ("float16", "e")])
@pytest.mark.parametrize("endianness", ["native", "little", "big"])
async def test_base64_has_the_bytes_of_the_numbers(embedder: Rig, dtype: str, code: str, endianness: str) -> None:
    form = {"encoding_format": "base64", "embed_dtype": dtype, "endianness": endianness}
    (written,) = vectors(await embedder.ok(EMBEDDINGS, {"input": "hello", **form}))
    order = ">" if endianness == "big" else "<"
    assert list(struct.unpack(f"{order}4{code}", base64.b64decode(written))) == await expected(embedder, "hello")


@pytest.mark.parametrize("numbers", [(70_000.0, -70_000.0, float("nan"), 65_519.9), (1e-8, -0.0, 65_504.0, 0.1)])
def test_what_a_half_cannot_hold_is_infinite_as_torch_has_it(numbers: tuple[float, ...]) -> None:
    data = array("f", numbers).tobytes()
    written = b"".join(encode_vector((4,), data, Encoding("base64", "float16")))
    with np.errstate(over="ignore"):
        expected = np.frombuffer(data, np.float32).astype(np.float16)
    np.testing.assert_array_equal(np.frombuffer(base64.b64decode(written), np.float16), expected)


async def test_the_openai_client_gets_its_vectors(embedder: Rig) -> None:
    client = openai.AsyncOpenAI(api_key="none", base_url="http://frontend/v1", http_client=cast("Any", embedder.client))
    answer = await client.embeddings.create(model="tiny", input=["hello", "there"])
    assert [one.embedding for one in answer.data] == [await expected(embedder, text) for text in ("hello", "there")]
    assert answer.usage.prompt_tokens > 0


async def test_the_engine_gets_pooling_parameters_and_the_priority(embedder: Rig) -> None:
    await embedder.ok(EMBEDDINGS, {"input": "hello", "dimensions": 2, "use_activation": False, "priority": 3})
    last = embedder.engine.last
    assert last is not None
    assert dict(last.sampling) == {"task": "embed", "dimensions": 2, "use_activation": False}
    assert last.priority == 3


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({}, "input: send either input or messages"),
        ({"input": "a", "messages": [{"role": "user", "content": "a"}]}, "input: send either input or messages"),
        ({"input": []}, "input: must have at least one entry"),
        ({"input": ["a"] * 2_049}, "input: 2,049 inputs; the limit is 2,048"),
        ({"input": "a", "encoding_format": "bytes"}, "encoding_format: must be 'float' or 'base64'"),
        ({"input": "a", "embed_dtype": "fp8_e4m3"}, "embed_dtype: must be 'float32' or 'float16'"),
        ({"input": "a", "truncate_prompt_tokens": 8}, "truncate_prompt_tokens: not supported"),
        ({"input": "a", "normalize": True}, "normalize: not supported: use use_activation"),
        ({"input": "a", "padding": "max_length"}, "padding: not supported"),
        ({"messages": [{"role": "user", "content": "a"}], "add_special_tokens": True}, "add_special_tokens: only with"),
        ({"input": "a " * (MAX_TOKENS + 1)}, "tokens; tiny takes 4,096"),
    ],
)
async def test_what_cannot_be_served_is_refused_by_name(embedder: Rig, body: dict[str, Any], said: str) -> None:
    status, message = await embedder.refused(EMBEDDINGS, body)
    assert status == 400
    assert said in message


async def test_a_prompt_may_fill_the_context_because_nothing_is_generated(embedder: Rig) -> None:
    (token, *_) = (await embedder.ok("/tokenize", {"prompt": "a"}))["tokens"]
    await embedder.ok(EMBEDDINGS, {"input": [token] * MAX_TOKENS})
    status, message = await embedder.refused(EMBEDDINGS, {"input": [token] * (MAX_TOKENS + 1)})
    assert (status, message) == (400, "the prompt has 4,097 tokens; tiny takes 4,096")


async def test_a_model_that_pools_refuses_chats_and_names_what_works(embedder: Rig) -> None:
    chat = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 1}
    bodies: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": chat,
        "/v1/messages": {**chat, "model": "tiny"},
        "/v1/responses": {"input": "hello"},
        "/v1/completions": {"prompt": "hello", "max_tokens": 1},
        "/invocations": {"prompt": "hello", "max_tokens": 1},
        "/inference/v1/generate": {"token_ids": [1], "sampling_params": {"max_tokens": 1}},
    }
    for route, body in bodies.items():
        status, message = await embedder.refused(route, body)
        assert status == 400, route
        assert "tiny generates no text" in message, route
        assert "/v1/embeddings" in message, route
    assert embedder.engine.submissions == 0


async def test_a_model_that_chats_refuses_to_pool_and_names_what_works(app: Rig) -> None:
    for route in (EMBEDDINGS, "/pooling", "/classify"):
        status, message = await app.refused(route, {"input": "hello"})
        assert status == 400, route
        assert "tiny generates text and pools nothing: use /v1/chat/completions" in message
        assert "--runner pooling" in message


async def test_a_model_that_embeds_refuses_to_classify_and_the_other_way_round(embedder: Rig) -> None:
    status, message = await embedder.refused("/classify", {"input": "hello"})
    assert status == 400
    assert "tiny is served for embed" in message
    assert "/v1/embeddings" in message


async def test_pooling_gives_what_the_model_is_served_for(embedder: Rig) -> None:
    answer = await embedder.ok("/pooling", {"input": ["hello"], "task": "embed"})
    assert answer["data"] == [{"index": 0, "object": "pooling", "data": await expected(embedder, "hello")}]
    embedder.engine.pooled_shape = (3, 4)
    answer = await embedder.ok("/pooling", {"input": "hello"})
    assert answer["data"][0]["data"] == [await expected(embedder, "hello")] * 3
    status, message = await embedder.refused("/pooling", {"input": "hello", "task": "token_embed"})
    assert status == 400
    assert "--pooler-config.task token_embed" in message
    assert (await embedder.refused("/pooling", {"input": "hello", "task": "plugin"}))[0] == 400
    assert "dimensions" in (await embedder.refused("/pooling", {"input": "hello", "dimensions": 2}))[1]


async def test_classes_have_the_models_names(classifier: Rig) -> None:
    answer = await classifier.ok("/classify", {"input": ["hello", "there"]})
    for one, text in zip(answer["data"], ("hello", "there"), strict=True):
        probs = await expected(classifier, text)
        best = max(range(4), key=probs.__getitem__)
        label = CLASSIFY.labels[best]
        assert one == {"index": one["index"], "label": label, "probs": probs, "num_classes": 4}
    assert (await classifier.refused(EMBEDDINGS, {"input": "hello"}))[0] == 400


async def test_a_vector_of_many_pieces_arrives_whole(embedder: Rig) -> None:
    embedder.engine.pooled_shape = (50, 4_000)  # 800 KB: four messages
    answer = await embedder.ok("/pooling", {"input": "hello"})
    rows = answer["data"][0]["data"]
    assert len(rows) == 50
    assert all(row == rows[0] for row in rows)
    assert rows[0] == await expected(embedder, "hello", 4_000)
    assert embedder.service.budget.in_flight == 0


async def test_one_request_has_a_bounded_number_of_prompts_under_way(
    embedder: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pooled_prompts, "_AT_ONCE", 5)
    most = 0
    submit = EchoEngine.submit

    async def counted(engine: EchoEngine, submission: Any) -> Any:
        nonlocal most
        most = max(most, len(embedder.worker._streams))
        return await submit(engine, submission)

    monkeypatch.setattr(EchoEngine, "submit", counted)
    texts = [f"hello {number}" for number in range(40)]
    answer = await embedder.ok(EMBEDDINGS, {"input": texts})
    assert vectors(answer) == [await expected(embedder, text) for text in texts]
    assert 1 < most <= 5


async def test_a_request_is_charged_to_its_end_and_its_failure_ends_all_of_it(embedder: Rig) -> None:
    embedder.engine.fault = "first_token"
    response = await embedder.post(EMBEDDINGS, {"input": ["hello"] * 40})
    assert response.status_code == 500
    embedder.engine.fault = None
    assert embedder.service.budget.in_flight == 0
    assert embedder.service.budget.requests == 0
    assert not embedder.worker._streams


async def test_an_item_that_the_engine_had_lost_is_sent_again(embedder: Rig) -> None:
    body = {"messages": [{"role": "user", "content": [image_part(7)]}]}
    first = await embedder.ok(EMBEDDINGS, body)
    embedder.engine.lost.update(embedder.engine._items)
    assert vectors(await embedder.ok(EMBEDDINGS, body)) == vectors(first)


async def test_vectors_that_wait_for_the_others_are_charged_S18(embedder: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pooled_prompts, "_AT_ONCE", 1)
    embedder.engine.pooled_shape = (10_000,)
    budget, charged = embedder.service.budget, []
    submit = EchoEngine.submit

    async def counted(engine: EchoEngine, submission: Any) -> Any:
        charged.append(budget.in_flight)
        return await submit(engine, submission)

    monkeypatch.setattr(EchoEngine, "submit", counted)
    await embedder.ok(EMBEDDINGS, {"input": [f"hello {number}" for number in range(20)]})
    assert charged[-1] - charged[0] >= 19 * 40_000
    assert budget.in_flight == 0
    monkeypatch.setattr(budget, "limits", replace(budget.limits, max_request_bytes=400_000))
    status, message = await embedder.refused(EMBEDDINGS, {"input": [f"hello {number}" for number in range(20)]})
    assert (status, "--max-request-media-bytes" in message) == (400, True)
    assert budget.in_flight == 0


async def test_a_tenants_prompts_wait_for_its_own_turns_and_not_for_anothers_S21(
    tmp_path: Path, drawing: Drawing
) -> None:
    keys = Keyring([("one", "k" * 32), ("two", "l" * 32)])
    body = {"input": ["hello", "there"]}
    async with rig(tmp_path, drawing.pipeline, keys=keys, make_engine=pooling_engine(EMBED)) as app:
        turns = app.service.pooling_turns.setdefault("one", asyncio.Lock())
        async with turns:
            waiting = asyncio.create_task(app.post(EMBEDDINGS, body, Authorization=f"Bearer {'k' * 32}"))
            assert (await app.post(EMBEDDINGS, body, Authorization=f"Bearer {'l' * 32}")).status_code == 200
            assert not waiting.done()
        assert (await waiting).status_code == 200
        del turns
        await until(lambda: not app.service.pooling_turns)


async def test_a_client_that_leaves_ends_all_prompts_of_its_request_S18(embedder: Rig) -> None:
    embedder.engine.pause_s = 60.0
    asking = asyncio.create_task(embedder.post(EMBEDDINGS, {"input": [f"hello {number}" for number in range(600)]}))
    await until(lambda: len(embedder.worker._streams) == 256)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await until(lambda: not embedder.worker._streams)
    assert embedder.service.budget.in_flight == 0
    embedder.engine.pause_s = 0.0
    assert vectors(await embedder.ok(EMBEDDINGS, {"input": "hello"})) == [await expected(embedder, "hello")]
