"""The routes that score documents for a query: by embeddings of prompts or tokens, or as pairs with a cross-encoder."""

from __future__ import annotations

import asyncio
import time
from typing import Final

import msgspec
from pydantic import TypeAdapter
from starlette.requests import Request
from starlette.responses import Response

from semel.frontend.api.pooling.responses import write_list
from semel.frontend.api.pooling.score_requests import RerankRequest, ScoreRequest, ScoringRequest
from semel.frontend.api.pooling.score_responses import RerankList, ScoreList, cosines, max_similarities, ranked
from semel.frontend.routes.call import Call, read_prompt_json, serve_call
from semel.frontend.routes.openapi import DocumentedRoute
from semel.frontend.routes.pooled_prompts import PooledPrompt, PromptPool, usage_of
from semel.frontend.routes.pooling import pooling_route, written
from semel.frontend.service import SCORING_ROUTES, FrontendState
from semel.render.offload import run_if_heavy

__all__ = ["scoring_routes"]

_SCORE: Final = TypeAdapter(ScoreRequest)
_RERANK: Final = TypeAdapter(RerankRequest)
_RESULT_BYTES: Final = 256
_FEW_NUMBERS: Final = 16_384
"""Of vectors that are compared on the event loop: it takes about 2 ms."""


def scoring_routes(service: FrontendState) -> list[DocumentedRoute]:
    """The routes for scores and reranking."""

    async def score(request: Request) -> Response:
        """Score documents for a query, or pairs of both."""
        return await serve_call(request, service, _SCORE, _score, read_prompt_json)

    async def rerank(request: Request) -> Response:
        """Put documents in the order of their scores for a query."""
        return await serve_call(request, service, _RERANK, _rerank, read_prompt_json)

    return [
        pooling_route(path, rerank, _RERANK, RerankList)
        if "rerank" in path
        else pooling_route(path, score, _SCORE, ScoreList)
        for path in SCORING_ROUTES
    ]


async def _score(call: Call, request: ScoreRequest) -> Response:
    pooled, scores = await _scores(call, request)
    head = {
        "id": f"score-{call.answer_id(request.request_id)}",
        "object": "list",
        "created": int(time.time()),
        "model": call.serving.model,
        "usage": usage_of(pooled),
    }
    data = ({"index": number, "object": "score", "score": score} for number, score in enumerate(scores))
    pieces = write_list(head, ((msgspec.json.encode(one),) for one in data))
    return await written(call, _RESULT_BYTES * (1 + len(scores)), pieces)


async def _rerank(call: Call, request: RerankRequest) -> Response:
    pooled, scores = await _scores(call, request)
    tokens = usage_of(pooled)["prompt_tokens"]
    await asyncio.sleep(0)  # 2,048 results are two turns of the event loop, of 3 ms each
    _, documents = request.queries_and_documents()
    head = {
        "id": f"score-{call.answer_id(request.request_id)}",
        "model": call.serving.model,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }
    results = ranked(documents, scores, request.top_n)
    pieces = write_list(head, ((msgspec.json.encode(one),) for one in results), "results")
    chars = sum(len(document) for document in documents if isinstance(document, str))
    nbytes = _RESULT_BYTES * (1 + len(scores)) + 6 * chars  # a control character takes six bytes of JSON
    return await written(call, nbytes, pieces)


async def _scores(call: Call, request: ScoringRequest) -> tuple[list[PooledPrompt], list[float]]:
    """Pool the prompts of a request, and return them with the scores of its documents."""
    model = call.serving.pooling(SCORING_ROUTES[0])
    queries, documents = request.queries_and_documents()
    places = [f"documents[{number}]" for number in range(len(documents))]
    if model.task != "classify":
        places = [*(f"queries[{number}]" for number in range(len(queries))), *places]
    prompts = PromptPool(call, request.params(model.task), request.tenant(call.tenant), request.priority)
    pooled = await prompts.pool(request.inputs(model.task), places)
    if model.task == "classify":
        return pooled, [one.numbers[0] for one in pooled]

    def compare() -> list[float]:
        if model.task == "token_embed":
            tokens = [(one.numbers, one.shape[-1]) for one in pooled]
            return max_similarities(tokens[: len(queries)], tokens[len(queries) :])
        vectors = [one.numbers for one in pooled]
        return cosines(vectors[: len(queries)], vectors[len(queries) :])

    numbers = sum(len(one.data) for one in pooled) // 4
    is_light = model.task == "embed" and numbers <= _FEW_NUMBERS  # for tokens NumPy is loaded first
    return pooled, await run_if_heavy(compare, light=is_light)
