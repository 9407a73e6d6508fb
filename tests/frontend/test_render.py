"""What the routes that only look answer: vLLM's shapes, with digests and masks, and tensors for who asks for them."""

from __future__ import annotations

from typing import Any

import pytest

from semel.errors import InvalidRequest
from semel.frontend.routes.render import SAFETENSORS
from semel.interchange.safetensors import FeatureEntry, read
from semel.processing.vocabulary import Vocabulary
from semel.render.tokens.remote_tokenizer import RemoteTokenizer
from tests.frontend.rig import MAX_IMAGES, MAX_TOKENS, Rig
from tests.render.drawn import FEATURE_BYTES, Drawing, chat

RENDER = "/v1/chat/completions/render"


def body(*numbers: int, **fields: Any) -> dict[str, Any]:
    return {"messages": list(chat(*numbers).messages), **fields}


async def test_a_rendered_chat_names_its_items_by_digest_place_and_mask(app: Rig) -> None:
    answer = await app.ok(RENDER, body(1, 2, temperature=0.5, max_tokens=7, cache_salt="s"))
    prompt = (await app.pipeline.chat(chat(1, 2))).prompt
    assert answer["token_ids"] == prompt.token_ids
    assert answer["sampling_params"] == {"n": 1, "temperature": 0.5, "max_tokens": 7}
    assert answer["cache_salt"] == "s"
    features = answer["features"]
    first, second = features["mm_placeholders"]["image"]
    assert first["is_embed"] == [False, True, True, False]
    assert second["is_embed"] is None
    assert [(one["offset"], one["length"]) for one in (first, second)] == [
        (place.offset, place.length) for place in prompt.timeline
    ]
    unsalted = (await app.ok(RENDER, body(1, 2)))["features"]["mm_hashes"]["image"]
    assert unsalted == [item.digest.hex() for item in prompt.items]
    assert not set(unsalted) & set(features["mm_hashes"]["image"])


@pytest.mark.slow
async def test_vllm_s_own_types_take_every_answer_E2(app: Rig) -> None:
    from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateRequest
    from vllm.entrypoints.serve.tokenize.protocol import DetokenizeResponse, TokenizeResponse

    answer = await app.ok(RENDER, body(1, 2, 1, stream=True, stream_options={"include_usage": True}, temperature=0.0))
    taken = GenerateRequest.model_validate(answer)
    assert taken.features is not None
    assert taken.features.mm_hashes == answer["features"]["mm_hashes"]
    assert taken.sampling_params.temperature == 0.0
    assert answer.keys() == taken.model_dump().keys()
    for one in await app.ok("/v1/completions/render", {"prompt": ["hello", "there"], "max_tokens": 3}):
        assert GenerateRequest.model_validate(one).sampling_params.max_tokens == 3
    tokenized = await app.ok("/tokenize", body(1))
    assert TokenizeResponse.model_validate(tokenized).model_dump() == tokenized
    detokenized = await app.ok("/detokenize", {"tokens": tokenized["tokens"]})
    assert DetokenizeResponse.model_validate(detokenized).model_dump() == detokenized


async def test_tokens_of_a_chat_are_those_that_it_is_executed_with(app: Rig) -> None:
    prompt = (await app.pipeline.chat(chat(3, 4))).prompt
    answer = await app.ok("/tokenize", body(3, 4))
    assert answer == {
        "count": len(prompt.token_ids),
        "max_model_len": MAX_TOKENS,
        "tokens": prompt.token_ids,
        "token_strs": None,
    }


async def test_tokens_can_be_named_as_the_vocabulary_has_them(app: Rig) -> None:
    raw = app.pipeline.tokenizer._raw
    for sent in ({"prompt": "hello there"}, body(3)):
        answer = await app.ok("/tokenize", {**sent, "return_token_strs": True})
        assert answer["token_strs"] == [raw.id_to_token(token) for token in answer["tokens"]]
        assert len(answer["token_strs"]) == answer["count"]


def test_a_tokenizer_of_another_process_refuses_to_name_tokens() -> None:
    with pytest.raises(InvalidRequest, match="return_token_strs: not for this model's tokenizer"):
        RemoteTokenizer(Vocabulary(("a",), 1), None, None).tokens([0])  # type: ignore[arg-type]


async def test_text_goes_to_tokens_and_back(app: Rig) -> None:
    answer = await app.ok("/tokenize", {"prompt": "hello there, ünïcode", "model": "tiny"})
    assert answer["count"] == len(answer["tokens"])
    assert (await app.ok("/detokenize", {"tokens": answer["tokens"]})) == {"prompt": "hello there, ünïcode"}
    (rendered,) = await app.ok("/v1/completions/render", {"prompt": "hello there, ünïcode"})
    assert rendered["token_ids"] == answer["tokens"]
    again = await app.ok("/v1/completions/render", {"prompt": [answer["tokens"], answer["tokens"][:2]]})
    assert [one["token_ids"] for one in again] == [answer["tokens"], answer["tokens"][:2]]
    assert [one["request_id"][-2:] for one in again] == ["-0", "-1"]


async def test_who_accepts_safetensors_gets_the_tensors_in_the_form_that_injection_takes(
    app: Rig, drawing: Drawing
) -> None:
    response = await app.post(RENDER, body(1, 2, 1), accept=f"application/json;q=0.5, {SAFETENSORS}")
    assert response.headers["content-type"] == SAFETENSORS
    assert int(response.headers["content-length"]) == len(response.content)
    entries = read(memoryview(response.content))
    expected = (await app.pipeline.chat(chat(1, 2))).features
    assert {entry.digest: entry.feature for entry in entries if isinstance(entry, FeatureEntry)} == expected
    assert len(entries) == 2
    assert drawing.lookups == {}


async def test_more_tensors_than_the_limit_are_refused(app: Rig) -> None:
    app.service.max_tensor_bytes = 3 * FEATURE_BYTES
    response = await app.post(RENDER, body(1, 2, 3, 4), accept=SAFETENSORS)
    assert response.status_code == 413
    assert "ask for fewer items" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "sent", "message"),
    [
        (RENDER, {"messages": []}, "messages"),
        (RENDER, body(*range(MAX_IMAGES + 1)), f"9 images; tiny takes {MAX_IMAGES}"),
        (RENDER, body(1, model="other"), "not served here"),
        (RENDER, body(1, use_beam_search=True), "use_beam_search"),
        (RENDER, {"messages": [{"role": "user", "content": "hello " * MAX_TOKENS}]}, "tiny takes 4,096"),
        ("/v1/completions/render", {"prompt": ""}, "the prompt is empty"),
        ("/v1/completions/render", {"prompt": []}, "prompt"),
        ("/v1/completions/render", {"prompt": "see <|image_pad|>"}, "leave <|image_pad|> out"),
        ("/v1/completions/render", {"prompt": [1, 2, 1_000_000]}, "no token 1,000,000"),
        ("/v1/completions/render", {"prompt": [1, -2]}, "prompt"),
        ("/tokenize", {}, "prompt"),
        ("/tokenize", body(*range(MAX_IMAGES + 1)), "9 images"),
        ("/tokenize", body(1, chat_template="{{ x }}"), "chat_template"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [1 << 40]}, "tokens"),
    ],
)
async def test_what_cannot_be_shown_is_refused_with_its_reason_and_nothing_is_processed(
    app: Rig, drawing: Drawing, path: str, sent: dict[str, Any], message: str
) -> None:
    status, told = await app.refused(path, sent)
    assert status == (404 if "model" in sent else 400)
    assert message in told
    assert not drawing.processed


async def test_while_nothing_is_served_nothing_is_shown(app: Rig) -> None:
    app.service.suspend("the model's processor is being warmed up")
    for path, sent in ((RENDER, body(1)), ("/tokenize", {"prompt": "hello"}), ("/detokenize", {"tokens": [1]})):
        status, told = await app.refused(path, sent)
        assert (status, "being warmed up" in told) == (503, True)
