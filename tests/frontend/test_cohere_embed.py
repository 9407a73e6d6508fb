"""Cohere's embeddings over HTTP: texts, images and both, instructions, truncation, and every form of a vector."""

from __future__ import annotations

import base64
import struct
from array import array
from typing import Any

import numpy as np
import pytest

from semel.core import Media, Prompt, Timeline
from semel.lab.testing.engine import echo_vector
from tests.frontend.rig import MAX_TOKENS, Rig
from tests.frontend.test_pooling import embedder, expected
from tests.render.drawn import Drawing, drawn, image_part

__all__ = ["embedder"]

EMBED = "/v2/embed"


def url(number: int) -> str:
    found: str = image_part(number)["image_url"]["url"]
    return found


async def last_text(app: Rig) -> str:
    assert app.engine.last is not None
    tokens = list(app.engine.last.prompt.token_ids)
    text: str = (await app.ok("/detokenize", {"tokens": tokens}))["prompt"]
    return text


async def test_texts_have_the_vectors_of_completions(embedder: Rig) -> None:
    answer = await embedder.ok(EMBED, {"model": "tiny", "texts": ["hello", "there"]})
    assert answer["embeddings"] == {"float": [await expected(embedder, text) for text in ("hello", "there")]}
    assert answer["texts"] == ["hello", "there"]
    assert answer["response_type"] == "embeddings_by_type"
    tokens = [len((await embedder.ok("/tokenize", {"prompt": text}))["tokens"]) for text in ("hello", "there")]
    assert answer["meta"]["billed_units"] == {"input_tokens": sum(tokens), "image_tokens": 0}


async def test_an_instruction_is_the_systems_message(embedder: Rig) -> None:
    await embedder.ok(EMBED, {"texts": ["hello"], "input_type": "query"})
    body = [
        {"role": "system", "content": [{"type": "text", "text": "Find: "}]},
        {"role": "user", "content": [{"type": "text", "text": "hello"}]},
    ]
    rendered = await embedder.ok("/v1/chat/completions/render", {"messages": body, "add_generation_prompt": False})
    assert embedder.engine.last is not None
    assert list(embedder.engine.last.prompt.token_ids) == rendered["token_ids"]
    status, message = await embedder.refused(EMBED, {"texts": ["hello"], "input_type": "classification"})
    assert (status, "input_type: the model does not know it; send one of query" in message) == (400, True)


async def test_images_and_inputs_are_chats_whose_images_are_processed_once(embedder: Rig, drawing: Drawing) -> None:
    content = [{"type": "image_url", "image_url": {"url": url(7)}}, {"type": "text", "text": "there"}]
    images = await embedder.ok(EMBED, {"images": [url(7), url(8)]})
    mixed = await embedder.ok(EMBED, {"inputs": [{"content": content}]})
    assert drawing.processed == [7, 8]
    assert len({tuple(one) for one in (*images["embeddings"]["float"], *mixed["embeddings"]["float"])}) == 3
    units = images["meta"]["billed_units"]
    layouts = [len(drawn(Media("image", str(number).encode())).layout) for number in (7, 8)]
    assert units["input_tokens"] == 0
    assert units["image_tokens"] > sum(layouts)
    assert "texts" not in images
    by_chat = await embedder.ok("/v1/embeddings", {"messages": [{"role": "user", "content": content}]})
    assert by_chat["data"][0]["embedding"] == mixed["embeddings"]["float"][0]


async def test_vectors_come_in_every_form_that_was_requested(embedder: Rig) -> None:
    embedder.engine.pooled_shape = (16,)
    kinds = ["float", "binary", "ubinary", "base64"]
    answer = await embedder.ok(EMBED, {"texts": ["hello", "you"], "embedding_types": kinds})
    found: dict[str, Any] = answer["embeddings"]
    assert list(found) == kinds
    for number, text in enumerate(("hello", "you")):
        vector = await expected(embedder, text, 16)
        packed = np.packbits(np.array(vector) >= 0)
        assert found["float"][number] == vector
        assert found["ubinary"][number] == packed.tolist()
        assert found["binary"][number] == (packed.astype(np.int16) - 128).tolist()
        assert list(struct.unpack("<16f", base64.b64decode(found["base64"][number]))) == vector
    embedder.engine.pooled_shape = (4,)
    status, message = await embedder.refused(EMBED, {"texts": ["hello"], "embedding_types": ["binary"]})
    assert (status, "a multiple of 8 numbers, and there are 4" in message) == (400, True)


def test_signs_are_packed_as_numpy_packs_them() -> None:
    from semel.frontend.api.pooling.cohere_embed import encode_by_type

    numbers = np.random.default_rng(1).standard_normal(64).astype("float32")
    packed = np.packbits(numbers >= 0).tolist()
    assert (
        b"".join(encode_by_type([numbers.tobytes()], ["ubinary"]))
        == b'{"ubinary":[%b]}' % str(packed).replace(" ", "").encode()
    )


@pytest.mark.parametrize(("truncate", "cut"), [("END", slice(5)), ("START", slice(-5, None))])
async def test_long_texts_are_cut_at_either_end(embedder: Rig, truncate: str, cut: slice) -> None:
    text = "hello there you what is this"
    tokens = (await embedder.ok("/tokenize", {"prompt": text}))["tokens"]
    assert len(tokens) > 5
    answer = await embedder.ok(EMBED, {"texts": [text], "max_tokens": 5, "truncate": truncate})
    vector = array("f", echo_vector(Prompt(tokens[cut], Timeline.decoder([]), ()), {})).tolist()
    assert answer["embeddings"]["float"] == [vector]


async def test_a_text_over_the_context_is_cut_unless_the_client_says_no(embedder: Rig) -> None:
    text = "a " * (50 * MAX_TOKENS)
    answer = await embedder.ok(EMBED, {"texts": [text]})
    assert answer["meta"]["billed_units"]["input_tokens"] == MAX_TOKENS
    assert (await embedder.refused(EMBED, {"texts": [text], "truncate": "NONE"}))[0] == 400
    status, message = await embedder.refused(EMBED, {"texts": ["a b c d e f"], "truncate": "NONE", "max_tokens": 2})
    assert (status, "max_tokens: an input has" in message) == (400, True)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({}, "send one of texts, images and inputs"),
        ({"texts": ["a"], "images": [url(1)]}, "send one of texts, images and inputs"),
        ({"texts": []}, "texts: must have at least one entry"),
        ({"texts": ["a"], "embedding_types": ["int8"]}, "embedding_types[0]: must be"),
        ({"inputs": [{"content": [{"type": "image_url"}]}]}, "messages[0].content[0]"),
    ],
)
async def test_what_cannot_be_embedded_is_refused(embedder: Rig, body: dict[str, Any], said: str) -> None:
    status, message = await embedder.refused(EMBED, body)
    assert status == 400
    assert said in message
