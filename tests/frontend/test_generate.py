"""Prompts that were rendered elsewhere: tokens in and out in vLLM's shapes, items by digest, only one's own (E2)."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from semel.cache import LruCache
from semel.core import Digest, Key, Keyring, Tenant
from semel.fleet.fleet import Fleet
from semel.frontend.items import client_features as given
from semel.frontend.items.ownership import has_tag, tag_of
from semel.render import ChatRenderer
from semel.telemetry.stages import Stage
from tests.frontend.rig import MAX_IMAGES, Rig, rig
from tests.render.drawn import FEATURE_BYTES, Drawing, chat
from tests.waiting import until

CHAT, RENDER, GENERATE = "/v1/chat/completions", "/v1/chat/completions/render", "/inference/v1/generate"
ACME, UMBRA = "acme-0123456789abcdef", "umbra-0123456789abcdef"


@pytest.fixture
def drawing(parts_renderer: ChatRenderer) -> Drawing:
    return Drawing(parts_renderer, LruCache(64 * FEATURE_BYTES))


@pytest.fixture
async def app(tmp_path: Path, drawing: Drawing) -> AsyncIterator[Rig]:
    async with rig(tmp_path, drawing.pipeline, engine_bytes=64 * FEATURE_BYTES) as made:
        yield made


@pytest.fixture
async def guarded(tmp_path: Path, drawing: Drawing) -> AsyncIterator[Rig]:
    keys = Keyring([("acme", ACME), ("umbra", UMBRA)])
    async with rig(tmp_path, drawing.pipeline, engine_bytes=64 * FEATURE_BYTES, keys=keys) as made:
        yield made


def body(*numbers: int, **fields: Any) -> dict[str, Any]:
    return {"messages": list(chat(*numbers).messages), **fields}


def digests_of(rendered: dict[str, Any]) -> list[Digest]:
    return [Digest(bytes.fromhex(one)) for hashes in rendered["features"]["mm_hashes"].values() for one in hashes]


async def executed(app: Rig, *numbers: int, **fields: Any) -> tuple[dict[str, Any], list[int]]:
    """A chat that was answered and rendered, once its worker has announced its items; and the answer's tokens."""
    answer = await app.ok(CHAT, body(*numbers, return_token_ids=True, **fields))
    rendered = await app.ok(RENDER, body(*numbers, **fields))
    await until(lambda: all(app.worker.holding(digest) for digest in digests_of(rendered)))
    return rendered, answer["choices"][0]["token_ids"]


async def refused(app: Rig, rendered: dict[str, Any]) -> tuple[int, str, str]:
    reply = await app.post(GENERATE, rendered)
    error = reply.json()["error"]
    return reply.status_code, error["code"], error["message"]


async def test_what_was_rendered_is_taken_as_it_is_and_answered_as_the_chat_was(app: Rig) -> None:
    rendered, tokens = await executed(app, 1, 2, 1)
    answer = await app.ok(GENERATE, rendered)
    assert answer["choices"][0]["token_ids"] == tokens
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["request_id"] == f"generate-tokens-{rendered['request_id']}"
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(rendered["token_ids"]), 4)


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0.5, "max_tokens": 3, "seed": 7, "stop": ["x"], "priority": 3},
        {"logprobs": True, "top_logprobs": 2, "n": 1, "stream_interval": 3},
        {"logprobs": True, "logprob_token_ids": [1, 2]},
        {"structured_outputs": {"choice": ["a", "b"]}, "min_tokens": 1},
        {"bad_words": ["x"]},
        {"stream": True, "stream_options": {"include_usage": True}},
        {"cache_salt": "mine"},
    ],
)
async def test_every_rendering_of_ours_is_taken_with_the_same_sampling(app: Rig, fields: dict[str, Any]) -> None:
    await executed(app, 1, **({"cache_salt": fields["cache_salt"]} if "cache_salt" in fields else {}))
    rendered = await app.ok(RENDER, body(1, **fields))
    reply = await app.post(GENERATE, rendered)
    assert reply.status_code == 200, reply.text
    assert app.engine.last is not None
    strides = {} if fields.get("stream") else {"stream_interval": 16}
    assert app.engine.last.sampling == {**strides, **rendered["sampling_params"]}
    assert app.engine.last.cache_salt == fields.get("cache_salt")


async def test_text_is_completed_and_its_longest_answer_left_to_the_context(app: Rig) -> None:
    for rendered in await app.ok("/v1/completions/render", {"prompt": ["hello", "there you"], "max_tokens": 3}):
        assert (await app.ok(GENERATE, rendered))["choices"][0]["token_ids"]
    await app.ok(GENERATE, {"token_ids": [1, 2], "sampling_params": {"temperature": 0.0}})
    assert app.engine.last is not None
    assert app.engine.last.sampling == {"stream_interval": 16, "n": 1, "temperature": 0.0}


async def test_text_has_no_stages_of_items_and_what_has_items_has_those_it_went_through(
    tmp_path: Path, drawing: Drawing
) -> None:
    timed: list[Stage] = []
    pipeline = replace(drawing.pipeline, timings=lambda _, stage: timed.append(stage))
    async with rig(tmp_path, pipeline, engine_bytes=FEATURE_BYTES) as made:
        rendered, _ = await executed(made, 1)
        timed.clear()
        await made.ok(GENERATE, rendered)
        assert timed == ["digest", "layout", "render", "send", "first_token"]
        timed.clear()
        await made.ok(GENERATE, {"token_ids": [1, 2], "sampling_params": {}})
        assert timed == ["render", "send", "first_token"]


@pytest.fixture(scope="module")
def vllm_types() -> Any:
    """Before there is a worker: the import takes so long that a link would be given up meanwhile."""
    from vllm.entrypoints.scale_out.token_in_token_out import protocol

    return protocol


@pytest.mark.slow
async def test_vllm_s_own_types_take_every_answer_E2(vllm_types: Any, app: Rig) -> None:
    rendered, _ = await executed(app, 1, 2)
    answer = await app.ok(GENERATE, {**rendered, "return_token_ids": True})
    taken = vllm_types.GenerateTokensResponse.model_validate(answer)
    assert taken.prompt_token_ids == rendered["token_ids"]
    assert taken.mm_placeholders is not None
    assert answer.keys() == taken.model_dump().keys()
    assert answer["choices"][0].keys() == taken.choices[0].model_dump().keys()
    streamed = {**rendered, "stream": True, "return_token_ids": True, "stream_options": {"include_usage": True}}
    *events, done = (await app.post(GENERATE, streamed)).text.strip().split("\n\n")
    assert done == "data: [DONE]"
    kind = vllm_types.GenerateTokensStreamResponse
    chunks = [kind.model_validate(json.loads(one.removeprefix("data: "))) for one in events]
    assert [token for chunk in chunks for one in chunk.choices for token in one.token_ids] == taken.choices[0].token_ids
    assert [chunk.prompt_token_ids is not None for chunk in chunks] == [True, False, False, False, False]
    assert chunks[-1].usage.completion_tokens == 4
    assert app.service.budget.in_flight == 0


async def test_what_was_rendered_but_never_executed_is_unknown_and_named(app: Rig, drawing: Drawing) -> None:
    known, _ = await executed(app, 1)
    rendered = await app.ok(RENDER, body(1, 2))
    status, code, message = await refused(app, rendered)
    assert (status, code) == (404, "unknown_features")
    assert rendered["features"]["mm_hashes"]["image"][1] in message
    assert known["features"]["mm_hashes"]["image"][0] not in message
    assert "/v1/chat/completions" in message
    assert drawing.processed.count(2) == 1  # by the route that renders, not by this one


async def test_what_the_worker_has_lost_meanwhile_is_repaired_from_the_cache_and_else_unknown_too(
    app: Rig, drawing: Drawing
) -> None:
    rendered, tokens = await executed(app, 1)
    app.engine.lost.update(digests_of(rendered))
    assert (await app.ok(GENERATE, rendered))["choices"][0]["token_ids"] == tokens
    drawing.cache.clear()
    app.engine.lost.update(digests_of(rendered))
    assert (await refused(app, rendered))[:2] == (404, "unknown_features")
    assert app.service.budget.requests == 0


async def test_items_that_two_workers_hold_between_them_are_brought_together_from_the_cache(
    tmp_path: Path, drawing: Drawing
) -> None:
    """The wrong implementation wanted one worker to have all of them; as it still is when none of them is cached."""
    async with AsyncExitStack() as stack:
        sides = []
        for name in "ab":
            (tmp_path / name).mkdir(mode=0o700)
            one = rig(tmp_path / name, drawing.pipeline, engine_bytes=64 * FEATURE_BYTES)
            sides.append(await stack.enter_async_context(one))
        for number, side in enumerate(sides):
            await executed(side, number)  # each has its own
        first, second = sides
        served = first.service.serving()
        first.service.begin(replace(served, fleet=Fleet([first.worker, second.worker])))
        rendered = await first.ok(RENDER, body(0, 1))
        features = {digest: drawing.cache.get(digest) for digest in digests_of(rendered)}
        drawing.cache.clear()
        assert (await refused(first, rendered))[:2] == (404, "unknown_features")
        for digest, feature in features.items():
            assert feature is not None
            drawing.cache.put(digest, feature)
        answer = await first.ok(GENERATE, rendered)
        assert drawing.processed == [0, 1], "nothing was processed for it"
        chat = await first.ok(CHAT, body(0, 1, return_token_ids=True))
        assert answer["choices"][0]["token_ids"] == chat["choices"][0]["token_ids"]


async def spied(app: Rig) -> tuple[dict[str, Any], dict[str, Any]]:
    """What acme rendered and executed, and what umbra makes of it with all that acme was told but its key."""
    headers = {"authorization": f"Bearer {ACME}"}
    await app.client.post(CHAT, json=body(1), headers=headers)
    rendered = (await app.client.post(RENDER, json=body(1), headers=headers)).json()
    await until(lambda: all(app.worker.holding(digest) for digest in digests_of(rendered)))
    return rendered, headers


async def test_a_naive_frontend_answers_for_a_digest_that_somebody_else_has_learnt_S12(
    guarded: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rendered, _ = await spied(guarded)
    monkeypatch.setattr(given, "has_tag", lambda *_: True)
    reply = await guarded.client.post(GENERATE, json=rendered, headers={"authorization": f"Bearer {UMBRA}"})
    assert reply.status_code == 200


def test_a_tag_is_of_one_digest_one_tenant_and_one_key_S12() -> None:
    digests = [Digest(bytes([number]) * 32) for number in range(2)]
    tenants = [
        Tenant(),
        Tenant("a"),
        Tenant("", "a"),
        Tenant("a", ""),
        Tenant("a", "b"),
        Tenant("ab"),
        Tenant("", "\1a"),
    ]
    keys = [Key(bytes([number]) * 32) for number in range(2)]
    tags = {(d, t, k.id): tag_of(d, t, k) for d in digests for t in tenants for k in keys}
    assert len(set(tags.values())) == len(tags)
    assert has_tag(digests[0], tag_of(digests[0], tenants[0], keys[0]), tenants[0], keys[0])
    assert not has_tag(digests[0], "é", tenants[0], keys[0])


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (
            lambda one: one["token_ids"].__setitem__(one["features"]["mm_placeholders"]["image"][0]["offset"], 9),
            "other tokens",
        ),
        (lambda one: one["features"]["mm_placeholders"]["image"][0].update(length=3), "other tokens"),
        (lambda one: one["features"]["mm_placeholders"]["image"][0].update(offset=0), "other tokens"),
        (lambda one: one["features"]["mm_placeholders"]["image"][0].update(offset=10**9), "other tokens"),
        (lambda one: one["features"]["mm_placeholders"]["image"][0].update(is_embed=[True] * 4), "is_embed"),
        (lambda one: one["features"]["mm_placeholders"]["image"].pop(), "mm_placeholders"),
        (lambda one: one["features"]["mm_tags"]["image"].pop(), "mm_tags"),
        (lambda one: one["features"]["mm_placeholders"].update(video=[]), "mm_placeholders"),
        (lambda one: one["features"]["mm_hashes"].update(image=["0" * 63, "0" * 64]), "mm_hashes"),
        (lambda one: one["features"].update(kwargs_data={"image": ["AAAA", None]}), "not msgpack of tensors"),
        (lambda one: one["features"].update(kwargs_data={"image": ["AAAA"]}), "kwargs_data"),
        (lambda one: one["features"].update(mm_metadata={"image": ["AAAA", None]}), "metadata and no kwargs_data"),
        (lambda one: one["features"].update(mm_seals={"image": ["AAAA"]}), "mm_seals"),
        (lambda one: one.update(content_parts=[{"type": "image_url"}]), "send media in a chat"),
        (lambda one: one.update(output_mode="text"), "output_mode"),
        (lambda one: one.update(kv_transfer_params={}), "kv_transfer_params"),
        (lambda one: one.update(token_ids=[]), "token_ids"),
        (lambda one: one.update(token_ids=[2**31]), "token_ids"),
        (lambda one: one.update(cache_salt="x" * 1_025), "cache_salt"),
        (lambda one: one["sampling_params"].update(n=129), "sampling_params.n"),
        (lambda one: one["sampling_params"].update(stop=["x"] * 17), "sampling_params.stop"),
        (lambda one: one["sampling_params"].update(echo=True), "no sampling parameter"),
        (lambda one: one["sampling_params"].update(extra_args={"a": 1}), "sampling_params.extra_args"),
        (lambda one: one.update(features=None), "placeholder"),
    ],
)
async def test_what_does_not_fit_is_refused_before_an_engine_sees_it_S9_S14_S15(
    app: Rig, change: Any, why: str
) -> None:
    rendered, _ = await executed(app, 1, 2)
    submissions = app.engine.submissions
    ids = app.pipeline.chat_renderer.placeholder_ids() if app.pipeline.chat_renderer else {}
    rendered["token_ids"].append(next(iter(ids))) if why == "placeholder" else None
    change(rendered)
    status, code, message = await refused(app, rendered)
    assert (status, code) == (400, "invalid_request"), message
    assert why in message
    assert app.engine.submissions == submissions


@pytest.mark.parametrize("kind", ["application/octet-stream", "multipart/form-data; boundary=b"])
async def test_a_body_of_another_kind_is_refused_before_it_is_read(app: Rig, kind: str) -> None:
    reply = await app.client.post(GENERATE, content=b"x" * 99, headers={"content-type": kind})
    assert reply.status_code == 400
    assert "application/x-safetensors" in reply.json()["error"]["message"]


async def test_two_items_in_one_place_are_refused(app: Rig) -> None:
    rendered, _ = await executed(app, 1, 1)
    places = rendered["features"]["mm_placeholders"]["image"]
    places[1] = places[0]
    status, _, message = await refused(app, rendered)
    assert (status, "overlap" in message) == (400, True)


async def test_there_are_no_tokens_beyond_the_vocabulary(app: Rig) -> None:
    status, _, message = await refused(app, {"token_ids": [2**31 - 1], "sampling_params": {}})
    assert (status, "there is no token" in message) == (400, True)


async def test_more_items_than_a_prompt_may_have_are_refused(app: Rig) -> None:
    rendered, _ = await executed(app, 1)
    for name in ("mm_hashes", "mm_placeholders", "mm_tags"):
        rendered["features"][name]["image"] *= MAX_IMAGES + 1
    assert (await refused(app, rendered))[0] == 400


async def test_log_probabilities_have_vllm_s_shape(app: Rig) -> None:
    from semel.core import Output
    from semel.frontend.api.shared.response_options import ResponseOptions
    from semel.frontend.api.tokens.generate_response import _logprobs

    output = Output(0, "", (5, 6), ({5: -1.0, 7: -0.5}, {6: float("-inf"), 8: -0.1}))
    first, second = _logprobs(output, ResponseOptions(logprobs=True, top_logprobs=1))
    own = {"token_id": 5, "logprob": -1.0, "rank": None}
    assert first == {**own, "top_logprobs": [own]}
    assert second["logprob"] == -9999.0
