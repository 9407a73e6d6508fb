"""Scores and reranking over HTTP: by embeddings and with cross-encoders, in every form of queries and documents."""

from __future__ import annotations

from array import array
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from math import sqrt
from pathlib import Path
from typing import Any

import pytest

from semel.core import PoolingModel, Prompt, Timeline
from semel.frontend.api.pooling import score_responses
from semel.frontend.service import SCORING_ROUTES
from semel.lab.testing.engine import EchoEngine, echo_vector
from semel.render import ChatTemplate
from semel.render.chat.sandbox import Template
from tests.frontend.rig import Rig, rig
from tests.frontend.test_pooling import CLASSIFY, EMBED, embedder, expected, pooling_engine
from tests.render.drawn import Drawing, image_part

__all__ = ["embedder"]

RERANKER = PoolingModel("classify", ("classify",), labels=("LABEL_0",), scores=True, pair_form="joined")
LATE = PoolingModel("token_embed", ("embed", "token_embed"), scores=True)


@pytest.fixture
async def reranker(tmp_path: Path, drawing: Drawing) -> AsyncIterator[Rig]:
    """A cross-encoder whose prompts are a query and a document, one after the other."""
    async with rig(tmp_path, drawing.pipeline, make_engine=pooling_engine(RERANKER)) as made:
        made.engine.pooled_shape = (1,)
        yield made


@pytest.fixture
async def late(tmp_path: Path, drawing: Drawing) -> AsyncIterator[Rig]:
    """A model of late interaction: three vectors of four numbers for each prompt."""
    async with rig(tmp_path, drawing.pipeline, make_engine=pooling_engine(LATE)) as made:
        made.engine.pooled_shape = (3, 4)
        yield made


def cosine(first: Sequence[float], second: Sequence[float]) -> float:
    product = sum(a * b for a, b in zip(first, second, strict=True))
    return product / sqrt(sum(a * a for a in first) * sum(b * b for b in second))


def of_tokens(tokens: Sequence[int], numbers: int) -> list[float]:
    return array("f", echo_vector(Prompt(tokens, Timeline.decoder([]), ()), {}, numbers)).tolist()


def scores(answer: Any) -> list[float]:
    assert [(one["index"], one["object"]) for one in answer["data"]] == [
        (number, "score") for number in range(len(answer["data"]))
    ]
    return [one["score"] for one in answer["data"]]


@pytest.mark.parametrize(
    "names", [("queries", "documents"), ("queries", "items"), ("data_1", "data_2"), ("text_1", "text_2")]
)
async def test_a_score_is_the_cosine_of_two_embeddings(embedder: Rig, names: tuple[str, str]) -> None:
    query, documents = "hello", ["there", "hello", "you"]
    vectors = [await expected(embedder, text) for text in documents]
    of_query = await expected(embedder, query)
    answer = await embedder.ok("/score", {names[0]: query, names[1]: documents, "model": "tiny"})
    assert scores(answer) == pytest.approx([cosine(of_query, vector) for vector in vectors])
    assert answer["id"].startswith("score-")
    each = await embedder.ok("/v1/score", {names[0]: documents, names[1]: documents[::-1]})
    pairs = zip(vectors, vectors[::-1], strict=True)
    assert scores(each) == pytest.approx([cosine(first, second) for first, second in pairs])
    tokens = [len((await embedder.ok("/tokenize", {"prompt": text}))["tokens"]) for text in [query, *documents]]
    assert answer["usage"]["prompt_tokens"] == sum(tokens), "the query is embedded once"


async def test_a_score_of_late_interaction_sums_the_best_match_of_each_of_the_querys_tokens(
    late: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = ["hello", "what is", "there", "hello"]
    answer = await late.ok("/pooling", {"input": texts})
    query, *documents = [one["data"] for one in answer["data"]]

    def best(document: list[list[float]], token: list[float]) -> float:
        return max(sum(a * b for a, b in zip(token, other, strict=True)) for other in document)

    found = [sum(best(document, token) for token in query) for document in documents]
    assert len(set(found)) == len(texts) - 1, "the control: documents differ"
    body = {"queries": texts[0], "documents": texts[1:]}
    assert scores(await late.ok("/score", body)) == pytest.approx(found)
    monkeypatch.setattr(score_responses, "_MAX_SIMILARITIES", 1)  # a token of the query at a time
    assert scores(await late.ok("/score", body)) == pytest.approx(found)
    reranked = await late.ok("/rerank", {"query": texts[0], "documents": texts[1:]})
    assert [one["relevance_score"] for one in reranked["results"]] == pytest.approx(sorted(found, reverse=True))


async def test_documents_are_ranked_and_the_first_of_them_kept(embedder: Rig) -> None:
    documents = ["there", "hello", "you", "what"]
    body = {"query": "hello", "documents": documents}
    by_number = scores(await embedder.ok("/score", {"queries": "hello", "documents": documents}))
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        results = (await embedder.ok(path, body))["results"]
        assert [one["relevance_score"] for one in results] == sorted(by_number, reverse=True)
        assert all(by_number[one["index"]] == one["relevance_score"] for one in results)
        assert all(one["document"] == {"text": documents[one["index"]], "multi_modal": None} for one in results)
    first = await embedder.ok("/rerank", {**body, "top_n": 2})
    assert len(first["results"]) == 2
    assert first["usage"].keys() == {"prompt_tokens", "total_tokens"}
    assert first["results"][0]["index"] == 1


async def test_documents_may_have_images_which_are_processed_once(embedder: Rig, drawing: Drawing) -> None:
    document = {"content": [{"type": "text", "text": "there"}, image_part(7)]}
    body = {"query": "hello", "documents": [document, "hello", document]}
    answer = await embedder.ok("/rerank", body)
    again = await embedder.ok("/rerank", body)
    assert answer["results"] == again["results"]
    assert drawing.processed == [7]
    found = {one["index"]: one for one in answer["results"]}
    assert found[0]["relevance_score"] == found[2]["relevance_score"] != found[1]["relevance_score"]
    assert found[0]["document"] == {"text": None, "multi_modal": None}


async def test_a_content_is_a_prompt_without_a_chat_template(embedder: Rig) -> None:
    """Its items come first, and no line ends between them and the text, as in vLLM."""
    document = {"content": [{"type": "text", "text": "there"}, image_part(7)]}
    await embedder.ok("/score", {"queries": document, "documents": document})  # whichever of them is the last
    last = embedder.engine.last
    assert last is not None
    (place,) = last.prompt.timeline
    tokens = (await embedder.ok("/tokenize", {"prompt": "there"}))["tokens"]
    assert place.offset == 0
    assert list(last.prompt.token_ids[place.end :]) == tokens


async def test_a_cross_encoder_scores_each_pair_as_one_prompt(reranker: Rig) -> None:
    documents = ["there", "you"]
    answer = await reranker.ok("/score", {"queries": "hello ", "documents": documents})
    joined = [await expected(reranker, f"hello {document}", 1) for document in documents]
    assert scores(answer) == [one[0] for one in joined]
    each = await reranker.ok("/score", {"queries": ["hello ", "what "], "documents": documents})
    assert scores(each) == [joined[0][0], (await expected(reranker, "what you", 1))[0]]
    results = (await reranker.ok("/rerank", {"query": "hello ", "documents": documents}))["results"]
    assert [one["relevance_score"] for one in results] == sorted(scores(answer), reverse=True)
    assert reranker.engine.last is not None
    assert dict(reranker.engine.last.sampling) == {"task": "classify"}


async def test_a_pair_is_tokenised_as_one_if_the_model_separates_it(tmp_path: Path, drawing: Drawing) -> None:
    engine = pooling_engine(replace(RERANKER, pair_form="pair"))
    async with rig(tmp_path, drawing.pipeline, make_engine=engine) as app:
        app.engine.pooled_shape = (1,)
        answer = await app.ok("/score", {"queries": "hel", "documents": ["lo"]})
        tokens = drawing.pipeline.tokenizer.encode_pair("hel", "lo")
        assert scores(answer) == of_tokens(tokens, 1)
        assert tokens != drawing.pipeline.tokenizer.encode("hello"), "the control: joined they have other tokens"


async def test_the_operators_template_writes_pairs_and_gets_the_instruction(tmp_path: Path, drawing: Drawing) -> None:
    renderer = drawing.pipeline.chat_renderer
    assert renderer is not None
    text = "{{ instruction }}:{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
    template = Template.compile(text, origin="a test")
    own = ChatTemplate(template, template, {}, is_operators=True)
    pipeline = replace(drawing.pipeline, chat_renderer=replace(renderer, template=own))
    async with rig(tmp_path, pipeline, make_engine=pooling_engine(RERANKER)) as app:
        app.engine.pooled_shape = (1,)
        answer = await app.ok("/score", {"queries": "hello", "documents": ["you"], "instruction": "find"})
        tokens = (await app.ok("/tokenize", {"prompt": "find:<query>hello<document>you"}))["tokens"]
        assert scores(answer) == of_tokens(tokens, 1)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({}, "send queries and documents"),
        ({"queries": "a"}, "send queries and documents"),
        ({"queries": "a", "documents": "b", "text_1": "a"}, "send queries and documents"),
        ({"queries": ["a", "b"], "documents": ["a", "b", "c"]}, "2 queries and 3 documents"),
        ({"queries": "a", "documents": []}, "documents: must have at least one entry"),
        ({"queries": "a", "documents": "b", "max_tokens_per_doc": 8}, "max_tokens_per_doc: not supported"),
        ({"queries": "a", "documents": "b", "truncate_prompt_tokens": 8}, "truncate_prompt_tokens: not supported"),
        ({"queries": "a", "documents": ["b", "c " * 5_000]}, "documents[1]: the prompt has"),
        ({"queries": "a", "documents": {"content": [{"type": "image_url"}]}}, "documents[0]"),
    ],
)
async def test_what_cannot_be_scored_is_refused(embedder: Rig, body: dict[str, Any], said: str) -> None:
    status, message = await embedder.refused("/score", body)
    assert status == 400
    assert said in message


async def test_a_model_that_scores_nothing_refuses_and_names_what_works(
    tmp_path: Path, drawing: Drawing, app: Rig
) -> None:
    bodies = {path: {"query": "a", "queries": "a", "documents": ["b"]} for path in SCORING_ROUTES}
    for path, body in bodies.items():
        body.pop("queries" if "rerank" in path else "query")
        status, message = await app.refused(path, body)
        assert status == 400
        assert "tiny generates text and pools nothing" in message
    (tmp_path / "classifier").mkdir(mode=0o700)
    async with rig(tmp_path / "classifier", drawing.pipeline, make_engine=pooling_engine(CLASSIFY)) as classifier:
        for path, body in bodies.items():
            status, message = await classifier.refused(path, body)
            assert status == 400
            assert "tiny is served for classify" in message
            assert "/classify" in message
    assert isinstance(classifier.engine, EchoEngine)
    assert EMBED.scores
