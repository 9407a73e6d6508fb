"""Features that come with a prompt: in the file that the render route gives, or in vLLM's JSON (E2, S9-S12, S18)."""

from __future__ import annotations

import base64
import json
import pickle
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from msgspec.msgpack import Ext

from semel.cache import LruCache
from semel.core import Digest, Feature, Field, Key, Layout, Mask, Output, Submission, Tenant, Tensor
from semel.errors import FeatureRejected, InvalidRequest
from semel.frontend.api.tokens.generate_request import Place, RequestItem
from semel.frontend.budget import Budget
from semel.frontend.http.body import BodyLimits
from semel.frontend.items import client_features as given
from semel.frontend.items import ownership
from semel.frontend.items.client_features import Owner, identify_items
from semel.frontend.items.ownership import feature_digest
from semel.frontend.limits import BudgetLimits
from semel.frontend.routes.render import SAFETENSORS
from semel.frontend.service import ServedModel
from semel.interchange.safetensors import FeatureEntry, read_file, write
from semel.interchange.vllm_items import read_item
from semel.render import ChatRenderer
from semel.telemetry.stages import Stage
from tests.frontend.rig import CONTRACT, MAX_TOKENS, Rig, rig
from tests.frontend.test_generate import CHAT, GENERATE, RENDER, body, digests_of
from tests.render.drawn import FEATURE_BYTES, Drawing
from tests.waiting import until

FIELDS = {"pixel_values": Field("uint8", (FEATURE_BYTES,))}
Change = Callable[[dict[str, Any]], object]


@pytest.fixture
def drawing(parts_renderer: ChatRenderer) -> Drawing:
    return Drawing(parts_renderer, LruCache(64 * FEATURE_BYTES))


@pytest.fixture
def stages() -> list[Stage]:
    return []


@pytest.fixture
async def app(tmp_path: Path, drawing: Drawing, stages: list[Stage]) -> AsyncIterator[Rig]:
    """A frontend whose contract says what an image is, and which takes the time of what it does."""
    pipeline = replace(drawing.pipeline, timings=lambda _, stage: stages.append(stage))
    async with rig(tmp_path, pipeline, engine_bytes=64 * FEATURE_BYTES) as made:
        before = made.service.serving()
        contract = replace(before.contract, fields={"image": FIELDS})
        made.service.begin(ServedModel(before.fleet, contract, before.pipeline))
        yield made


async def file_of(app: Rig, *numbers: int, **fields: Any) -> bytes:
    reply = await app.post(RENDER, body(*numbers, **fields), accept=SAFETENSORS)
    assert reply.status_code == 200, reply.text
    return reply.content


async def post_file(app: Rig, content: bytes) -> httpx.Response:
    return await app.client.post(GENERATE, content=content, headers={"content-type": SAFETENSORS})


def rewritten(content: bytes, change: Change, *, pixel: int | None = None) -> bytes:
    """The file after a change of its prompt, and with other pixels in all of its items."""
    file = read_file(memoryview(content))
    prompt = json.loads(file.texts["generate"])
    change(prompt)
    features = {entry.digest: entry.feature for entry in file.entries if isinstance(entry, FeatureEntry)}
    if pixel is not None:
        features = {digest: repainted(feature, pixel) for digest, feature in features.items()}
    return b"".join(write(features, {"generate": json.dumps(prompt)}))


def repainted(feature: Feature, pixel: int) -> Feature:
    tensor = feature.tensors["pixel_values"]
    return replace(feature, tensors={"pixel_values": Tensor("uint8", tensor.shape, memoryview(bytes([pixel]) * 4_096))})


def unsealed(prompt: dict[str, Any]) -> None:
    del prompt["features"]["mm_seals"]


def packed(
    data: bytes,
    *,
    dtype: str = "uint8",
    shape: tuple[int, ...] | None = None,
    code: int = 3,
    name: str = "pixel_values",
) -> str:
    """An item as vLLM packs one."""
    element = {"data": (dtype, shape or (len(data),), Ext(code, data)), "field": ("batched", {"keep_on_cpu": False})}
    return base64.b64encode(msgspec.msgpack.encode({name: element})).decode()


async def packed_body(app: Rig, *numbers: int) -> dict[str, Any]:
    """A rendered prompt as vLLM's render route gives it."""
    rendered: dict[str, Any] = await app.ok(RENDER, body(*numbers))
    features = rendered["features"]
    del features["mm_tags"]
    features["mm_hashes"]["image"] = [f"some-name-{number}" for number in numbers]
    features["kwargs_data"] = {"image": [packed(bytes([number]) * FEATURE_BYTES) for number in numbers]}
    return rendered


def sent(app: Rig) -> float:
    return sum(map(float, app.metrics("semel_features_sent_total").values()))


async def chat_tokens(app: Rig, *numbers: int) -> list[int]:
    answer = await app.ok(CHAT, body(*numbers, return_token_ids=True))
    tokens: list[int] = answer["choices"][0]["token_ids"]
    return tokens


async def test_what_was_rendered_with_its_tensors_is_answered_as_the_chat_is_and_nothing_is_processed_for_it(
    app: Rig, drawing: Drawing
) -> None:
    content = await file_of(app, 1, 2, 1)
    processed, cached = list(drawing.processed), len(drawing.cache)
    reply = await post_file(app, content)
    assert reply.status_code == 200, reply.text
    assert (drawing.processed, len(drawing.cache)) == (processed, cached)
    assert reply.json()["choices"][0]["token_ids"] == await chat_tokens(app, 1, 2, 1)
    assert app.service.budget.in_flight == app.service.budget.requests == 0


async def test_tensors_of_the_fleet_s_own_are_the_chat_s_items_from_then_on(app: Rig) -> None:
    """Sealed: encoded once, whichever way it comes, and named by digest the next time."""
    assert (await post_file(app, await file_of(app, 1, 2))).status_code == 200
    rendered = await app.ok(RENDER, body(1, 2))
    await until(lambda: all(app.worker.holding(digest) for digest in digests_of(rendered)))
    before = sent(app)
    named = await app.ok(GENERATE, rendered)
    assert named["choices"][0]["token_ids"] == await chat_tokens(app, 1, 2)
    assert sent(app) == before == 2


async def is_poisoned(app: Rig) -> bool:
    """Whether a chat with an image is answered for other pixels, after these were sent under the image's digest."""
    reply = await post_file(app, rewritten(await file_of(app, 1), lambda _: None, pixel=99))
    assert reply.status_code == 200, reply.text
    answers = [await app.ok(CHAT, body(1, return_token_ids=True, **salt)) for salt in ({}, {"cache_salt": "other"})]
    mine, truth = (answer["choices"][0]["token_ids"] for answer in answers)
    return bool(mine != truth)


async def test_a_naive_frontend_lets_a_digest_stand_for_what_a_client_says_S11(
    app: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(given, "_identity", lambda one, *_: Digest(bytes.fromhex(one.name)))
    assert await is_poisoned(app)


async def test_what_a_client_sends_is_known_by_its_bytes_whatever_it_is_called_S11(app: Rig) -> None:
    assert not await is_poisoned(app)


async def test_a_seal_is_of_one_tenant_S12(app: Rig) -> None:
    content = await file_of(app, 1, cache_salt="mine")
    stolen = await post_file(app, rewritten(content, lambda prompt: prompt.update(cache_salt="yours")))
    assert stolen.status_code == 200
    rendered = await app.ok(RENDER, body(1, cache_salt="mine"))
    assert stolen.json()["features"]["mm_hashes"] != rendered["features"]["mm_hashes"]
    assert (await app.post(GENERATE, rendered)).status_code == 404


@pytest.mark.parametrize("stream", [False, True])
async def test_the_answer_tells_the_names_by_which_what_was_sent_can_be_named(app: Rig, stream: bool) -> None:
    content = rewritten(await file_of(app, 1, 2, stream=stream), unsealed)
    reply = await post_file(app, content)
    answer = json.loads(reply.text.partition("\n")[0].removeprefix("data: ")) if stream else reply.json()
    prompt = json.loads(read_file(memoryview(content)).texts["generate"])
    assert answer["features"]["mm_hashes"] != prompt["features"]["mm_hashes"]
    named = {**prompt, "features": answer["features"], "stream": False}
    before = sent(app)
    again = await app.ok(GENERATE, named)
    assert again["choices"][0]["token_ids"] == await chat_tokens(app, 1, 2)
    assert "features" not in again
    foreign = await app.post(GENERATE, {**named, "cache_salt": "yours"})
    assert (foreign.status_code, foreign.json()["error"]["code"]) == (404, "unknown_features")
    assert before == 2


async def test_vllm_s_own_form_is_taken_and_answered_as_the_chat_is(app: Rig) -> None:
    rendered = await packed_body(app, 2, 4, 2)
    answer = await app.ok(GENERATE, rendered)
    assert answer["choices"][0]["token_ids"] == await chat_tokens(app, 2, 4, 2)
    assert app.service.budget.in_flight == 0


async def test_an_embedding_mask_that_vllm_leaves_out_is_told_by_the_tokens(app: Rig) -> None:
    rendered = await packed_body(app, 3)
    (place_told,) = rendered["features"]["mm_placeholders"]["image"]
    bits = place_told.pop("is_embed")
    await app.ok(GENERATE, rendered)
    assert app.engine.last is not None
    (placed,) = app.engine.last.prompt.timeline
    assert placed.mask == Mask(bits)


@pytest.mark.slow
def test_an_item_of_vllm_s_is_read_as_vllm_reads_it() -> None:
    torch = pytest.importorskip("torch")
    from vllm.entrypoints.scale_out.token_in_token_out.mm_serde import encode_mm_kwargs_item
    from vllm.multimodal.inputs import MultiModalBatchedField, MultiModalFieldElem, MultiModalKwargsItem

    tensors = {
        "pixels": torch.arange(12, dtype=torch.bfloat16).reshape(3, 4),
        "grid": torch.tensor([1, 2, 3]),
        "one": torch.tensor(7),
    }
    elements = {name: MultiModalFieldElem(data=one, field=MultiModalBatchedField()) for name, one in tensors.items()}
    read = read_item(encode_mm_kwargs_item(MultiModalKwargsItem(elements)))
    for name, one in tensors.items():
        assert read[name].shape == tuple(one.shape)
        assert f"torch.{read[name].dtype}" == str(one.dtype)
        assert bytes(read[name].data) == bytes(one.flatten().view(torch.uint8).numpy())


def test_tensors_whose_layout_nobody_can_prove_need_a_seal_of_the_fleet_S9() -> None:
    contract = replace(CONTRACT, fields={"image": {"pixel_values": Field("uint8", (None,))}})
    shown = RequestItem("image", "any", Place(offset=0, length=2), packed=(packed(b"abc"),))
    owner = Owner(Tenant(), Key(bytes(32)))
    (one,) = identify_items([shown], [5, 5], contract, owner)  # the control: such tensors are proven otherwise
    assert one.feature is not None
    sealed_only = replace(contract, needs_seal=("image",))
    with pytest.raises(InvalidRequest, match="need a seal of this fleet"):
        identify_items([shown], [5, 5], sealed_only, owner)
    name = Digest(bytes(range(32)))
    seal = ownership._seal_of(name, one.item.digest, owner.key)
    (own,) = identify_items([replace(shown, name=name.hex(), seal=seal)], [5, 5], sealed_only, owner)
    assert own.item.digest == name


class _Payload:
    """What a pickle can do."""

    ran = False

    def __reduce__(self) -> tuple[Any, ...]:
        return setattr, (_Payload, "ran", True)


def test_a_naive_reader_runs_what_a_client_has_pickled_S10() -> None:
    item = base64.b64decode(packed(pickle.dumps(_Payload()), code=1))
    _Payload.ran = False
    msgspec.msgpack.decode(item, ext_hook=lambda _, data: pickle.loads(data))
    assert _Payload.ran


@pytest.mark.parametrize("code", [1, 2, -1])
async def test_nothing_that_a_client_has_pickled_is_run_S10(app: Rig, code: int) -> None:
    rendered = await packed_body(app, 1)
    _Payload.ran = False
    rendered["features"]["kwargs_data"]["image"] = [packed(pickle.dumps(_Payload()), code=code)]
    status, message = await app.refused(GENERATE, rendered)
    assert (status, "never a pickle" in message, _Payload.ran) == (400, True, False)


@pytest.mark.parametrize(
    ("item", "why"),
    [
        ("*", "base64"),
        (base64.b64encode(b"\x81").decode(), "msgpack"),
        (base64.b64encode(b"\x81\xa1a\x82\xa5field" + b"\x91" * 100_000 + b"\x01").decode(), "msgpack"),
        (base64.b64encode(msgspec.msgpack.encode({})).decode(), "msgpack"),
        (base64.b64encode(msgspec.msgpack.encode({"pixel_values": {"data": 1.5}})).decode(), "msgpack"),
        (packed(b"x" * 10), "takes uint8[4096]"),
        (packed(b"x" * FEATURE_BYTES, dtype="int8"), "takes uint8[4096]"),
        (packed(b"x" * FEATURE_BYTES, dtype="object"), "no tensor"),
        (packed(b"x" * FEATURE_BYTES, shape=(2**31 - 1, 2**31 - 1)), "no tensor"),
        (packed(b"x" * FEATURE_BYTES, shape=(2**31,)), "msgpack"),
        (packed(b"x" * FEATURE_BYTES, name="pixels"), "the tensors"),
    ],
)
async def test_an_item_that_is_none_is_refused_before_an_engine_sees_it_S9(app: Rig, item: str, why: str) -> None:
    rendered = await packed_body(app, 1)
    rendered["features"]["kwargs_data"]["image"] = [item]
    status, message = await app.refused(GENERATE, rendered)
    assert (status, why in message) == (400, True), message
    assert app.engine.submissions == app.service.budget.in_flight == 0


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda one: one["features"]["mm_hashes"].update(image=["0" * 64]), "does not show"),
        (lambda one: one["features"]["mm_placeholders"]["image"][0].update(length=3), "other tokens"),
        (lambda one: one["features"]["mm_placeholders"]["image"][0].update(offset=10**6), "other tokens"),
        (lambda one: one["features"]["mm_placeholders"]["image"][0].update(is_embed=[True] * 4), "is_embed"),
        (lambda one: one["features"].update(mm_placeholders={"image": []}), "mm_placeholders"),
        (lambda one: one["token_ids"].__setitem__(slice(None), [7] * len(one["token_ids"])), "other tokens"),
        (lambda one: one.update(model="other"), "model"),
        (lambda one: one.update(features=None), "does not show"),
        (lambda one: one["features"].update(mm_hashes={"video": one["features"]["mm_hashes"]["image"]}), "mm_"),
    ],
)
async def test_a_file_whose_prompt_does_not_fit_its_tensors_is_refused_S9(app: Rig, change: Change, why: str) -> None:
    reply = await post_file(app, rewritten(await file_of(app, 1), change))
    assert reply.status_code in (400, 404)
    assert why in reply.json()["error"]["message"]
    assert app.engine.submissions == app.service.budget.in_flight == 0


async def test_a_file_that_is_none_is_refused_S10(app: Rig) -> None:
    content = await file_of(app, 1)
    file = read_file(memoryview(content))
    features = {entry.digest: entry.feature for entry in file.entries if isinstance(entry, FeatureEntry)}
    ((digest, feature),) = features.items()
    small = replace(feature, tensors={"pixel_values": Tensor("uint8", (3,), memoryview(b"abc"))})
    wrong: dict[bytes, str] = {
        b"": "at least 8 bytes",
        content[:-1]: "bytes of tensors",
        (1 << 40).to_bytes(8, "little") + content[8:]: "header",
        b"".join(write(features)): "no prompt",
        b"".join(write(features, {"generate": "[" * 50_000})): "",
        b"".join(write({digest: small}, file.texts)): "takes uint8[4096]",
        content.replace(digest.hex().encode(), b"../" + digest.hex()[3:].encode()): "no digest",
    }
    for body_of_it, why in wrong.items():
        reply = await post_file(app, body_of_it)
        assert (reply.status_code, why in reply.json()["error"]["message"]) == (400, True), reply.text
    assert app.engine.submissions == app.service.budget.in_flight == 0


async def test_what_the_worker_finds_wrong_with_a_client_s_tensors_is_the_client_s_fault_S9(
    app: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    content, named = await file_of(app, 1), await file_of(app)

    async def refuse(_: Submission) -> None:
        raise FeatureRejected("the image feature is malformed: its grid does not tile")

    monkeypatch.setattr(app.engine, "submit", refuse)
    reply = await post_file(app, content)
    assert (reply.status_code, "does not tile" in reply.text) == (400, True)
    assert (await post_file(app, named)).status_code == 500


@pytest.mark.parametrize("stream", [False, True])
async def test_what_the_encoder_finds_wrong_with_a_client_s_tensors_is_the_client_s_fault_S9(
    app: Rig, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    asked = [rewritten(await file_of(app, *own), lambda one: one.update(stream=stream)) for own in ((1,), ())]

    class Rejecting:
        async def __aiter__(self) -> AsyncIterator[Output]:
            none: list[Output] = []
            for output in none:
                yield output
            raise FeatureRejected("the encoder made 4 embeddings of the image feature, its layout has 7")

        async def close(self) -> None: ...

    async def submit(_: Submission) -> Rejecting:
        return Rejecting()

    monkeypatch.setattr(app.engine, "submit", submit)
    replies = [await post_file(app, content) for content in asked]
    assert all("4 embeddings of the image feature" in reply.text for reply in replies)
    if stream:
        assert ["feature_rejected" in reply.text for reply in replies] == [False, True]
    else:
        assert [reply.status_code for reply in replies] == [400, 500]
    assert app.service.budget.in_flight == 0


async def test_commas_among_tensors_mean_nothing_and_those_of_the_header_are_counted_S18(app: Rig) -> None:
    """A grey picture is nothing but commas; counted as values of JSON they would be over any limit."""
    app.service.body = BodyLimits(max_values=1_000)
    assert (await post_file(app, rewritten(await file_of(app, 1), lambda _: None, pixel=ord(",")))).status_code == 200
    many = rewritten(await file_of(app, 1), lambda one: one.update(token_ids=[1] * (2_000 + 2 * MAX_TOKENS)))
    reply = await post_file(app, many)
    assert (reply.status_code, "--max-body-values" in reply.text) == (413, True)


@pytest.mark.parametrize("form", ["file", "json"])
async def test_what_a_client_sends_is_within_the_budget_of_a_request_and_of_the_process_S18(
    app: Rig, form: str
) -> None:
    content = await file_of(app, 1, 2, 3) if form == "file" else json.dumps(await packed_body(app, 1, 2, 3)).encode()
    headers = {"content-type": SAFETENSORS if form == "file" else "application/json"}
    for limits, status in (
        (BudgetLimits(max_request_bytes=3 * FEATURE_BYTES, max_bytes=1 << 30), 413),
        (BudgetLimits(max_request_bytes=1 << 20, max_bytes=1 << 20), 429),
        (BudgetLimits(), 200),
    ):
        app.service.budget = Budget(limits)
        with app.service.budget.open() as other:
            other.take(limits.max_bytes - 2 * FEATURE_BYTES if status == 429 else 0)
            reply = await app.client.post(GENERATE, content=content, headers=headers)
            assert reply.status_code == status, reply.text
        assert app.service.budget.in_flight == 0


async def test_while_the_answer_has_not_begun_what_was_sent_is_in_the_account_S18(
    app: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    content, held = await file_of(app, 1), []
    submit = app.engine.submit

    async def watched(submission: Submission) -> Any:
        held.append(app.service.budget.in_flight)
        return await submit(submission)

    monkeypatch.setattr(app.engine, "submit", watched)
    await post_file(app, content)
    assert held[0] >= len(content)
    assert app.service.budget.in_flight == 0


def test_an_identity_by_bytes_tells_all_that_a_feature_is_S11() -> None:
    def feature(**changes: Any) -> Feature:
        tensors = {"a": Tensor("uint8", (2, 3), memoryview(b"abcdef")), "b": Tensor("uint8", (0,), memoryview(b""))}
        return replace(Feature("image", tensors, Layout((1, 2, 2))), **changes)

    def tensor(dtype: str, shape: tuple[int, ...], data: bytes, name: str = "a") -> dict[str, Any]:
        return {"tensors": {name: Tensor(dtype, shape, memoryview(data)), "b": feature().tensors["b"]}}

    key, tenant = Key(bytes(32)), Tenant("a", "b")
    changed = [
        feature(),
        feature(modality="video"),
        feature(layout=Layout((1, 2, 3))),
        feature(layout=Layout((1, 2, 2), Mask([False, True, True]))),
        feature(tensors={"a": feature().tensors["a"]}),
        feature(**tensor("int8", (2, 3), b"abcdef")),
        feature(**tensor("uint8", (3, 2), b"abcdef")),
        feature(**tensor("uint8", (2, 3), b"abcdeg")),
        feature(**tensor("uint8", (2, 3), b"abcdef", "c")),
    ]
    digests = [feature_digest(one, tenant, key) for one in changed]
    digests += [feature_digest(feature(), *owner) for owner in ((Tenant("a"), key), (tenant, Key(bytes([1]) * 32)))]
    assert len(set(digests)) == len(digests)
    assert feature_digest(feature(), tenant, key) == digests[0]
