"""The routes of models that pool: embeddings, classes, and what else a model makes of whole prompts.

A request has many inputs, each a prompt of its own (`pooled_prompts`). A large response is charged until it is sent.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Final

import msgspec
from pydantic import TypeAdapter
from starlette.requests import Request
from starlette.responses import Response

from semel.core import PoolingModel, PoolingTask, Tenant
from semel.errors import InvalidRequest
from semel.frontend.api.pooling.cohere_embed import (
    CohereEmbeddings,
    CohereEmbedRequest,
    encode_by_type,
    response_bytes_by_type,
)
from semel.frontend.api.pooling.requests import (
    ClassificationRequest,
    EmbeddingRequest,
    Encoding,
    PooledRequest,
    PoolingRequest,
)
from semel.frontend.api.pooling.responses import (
    ClassificationList,
    EmbeddingList,
    PoolingList,
    encode_vector,
    response_bytes,
    write_list,
    write_member,
)
from semel.frontend.http.download import Download, in_memory
from semel.frontend.routes.call import Call, read_prompt_json, serve_call
from semel.frontend.routes.openapi import DocumentedRoute, takes
from semel.frontend.routes.pooled_prompts import PooledPrompt, PromptPool, Truncation, usage_of
from semel.frontend.service import FrontendState
from semel.render.offload import run_if_heavy
from semel.web.openapi import JSON, shape

__all__ = ["pooling_route", "pooling_routes", "written"]

_EMBEDDING: Final = TypeAdapter(EmbeddingRequest)
_POOLING: Final = TypeAdapter(PoolingRequest)
_COHERE: Final = TypeAdapter(CohereEmbedRequest)
_CLASSIFICATION: Final = TypeAdapter(ClassificationRequest)
_FEW_BYTES: Final = 65_536
"""Of a response that is written on the event loop: it takes about 2 ms."""

_CHUNK_BYTES: Final = 65_536


def pooling_routes(service: FrontendState) -> list[DocumentedRoute]:
    """The routes for embeddings, classes and pooling."""

    async def embeddings(request: Request) -> Response:
        """Embed texts, tokens or chats, each as one vector."""
        return await serve_call(request, service, _EMBEDDING, _embed, read_prompt_json)

    async def embed(request: Request) -> Response:
        """Embed texts, images or both, as Cohere's API has it."""
        return await serve_call(request, service, _COHERE, _embed_cohere)

    async def pooling(request: Request) -> Response:
        """Pool texts, tokens or chats, as the model is served for."""
        return await serve_call(request, service, _POOLING, _pool, read_prompt_json)

    async def classify(request: Request) -> Response:
        """Classify texts, tokens or chats."""
        return await serve_call(request, service, _CLASSIFICATION, _classify, read_prompt_json)

    return [
        pooling_route("/v1/embeddings", embeddings, _EMBEDDING, EmbeddingList),
        pooling_route("/v2/embed", embed, _COHERE, CohereEmbeddings),
        pooling_route("/pooling", pooling, _POOLING, PoolingList),
        pooling_route("/classify", classify, _CLASSIFICATION, ClassificationList),
    ]


def pooling_route(path: str, endpoint: Callable[..., Any], kind: TypeAdapter[Any], answer: type) -> DocumentedRoute:
    """Return a route that takes one kind of request and answers in JSON."""
    operation = takes(kind, {JSON: shape(answer)}, named=True)
    return DocumentedRoute(path, endpoint, methods=["POST"], operation=operation)


async def _pool_inputs(call: Call, request: ClassificationRequest, task: PoolingTask) -> list[PooledPrompt]:
    """Pool the inputs of a request, which is dropped when this returns."""
    prompts = PromptPool(
        call,
        request.params(task),
        request.tenant(call.tenant),
        request.priority,
        add_special_tokens=request.add_special_tokens is not False,
    )
    return await prompts.pool(request.inputs())


def _list_head(kind: str, call: Call, request: PooledRequest, pooled: Sequence[PooledPrompt]) -> dict[str, Any]:
    """Return the members of a response besides its entries."""
    return {
        "id": f"{kind}-{call.answer_id(request.request_id)}",
        "object": "list",
        "created": int(time.time()),
        "model": call.serving.model,
        "usage": usage_of(pooled),
    }


async def _embed(call: Call, request: EmbeddingRequest) -> Response:
    model = call.serving.pooling("/v1/embeddings")
    pooled = await _pool_inputs(call, request, model.task)
    head = _list_head("embd", call, request, pooled)
    return await _vectors(call, head, {"object": "embedding"}, "embedding", pooled, request.encoding)


async def _embed_cohere(call: Call, request: CohereEmbedRequest) -> Response:
    model = call.serving.pooling("/v2/embed")
    most = min(request.max_tokens or call.serving.contract.max_tokens, call.serving.contract.max_tokens)
    truncation = None if request.truncate == "NONE" else Truncation(most, keeps_end=request.truncate == "START")
    prompts = PromptPool(call, request.params(), Tenant(call.tenant), request.priority, truncation=truncation)
    pooled = await prompts.pool(request.prompts(model.instructions))
    longest = max(one.usage.prompt_tokens for one in pooled)
    if truncation is None and longest > most:
        raise InvalidRequest.of("max_tokens", f"an input has {longest:,} tokens: send less, or truncate END or START")
    vectors, types, tokens = [one.data for one in pooled], request.types, usage_of(pooled)["prompt_tokens"]
    head: dict[str, Any] = {
        "id": f"embd-{call.answer_id()}",
        "meta": {"api_version": {"version": "2"}, "billed_units": _billed(tokens, request)},
        "response_type": "embeddings_by_type",
        **({} if request.texts is None else {"texts": request.texts}),
    }

    pieces = write_member(head, "embeddings", encode_by_type(vectors, types))
    nbytes = response_bytes_by_type(vectors, types) + 6 * sum(map(len, request.texts or ())) + _FEW_BYTES // 64
    return await written(call, nbytes, pieces)


def _billed(tokens: int, request: CohereEmbedRequest) -> dict[str, int]:
    """Return the tokens of a request as vLLM counts them: all of them are an image's if there is one."""
    of_images = tokens if request.has_images else 0
    return {"input_tokens": tokens - of_images, "image_tokens": of_images}


async def _pool(call: Call, request: PoolingRequest) -> Response:
    model = call.serving.pooling("/pooling")
    _check_task(request.task, model)
    if request.dimensions is not None:
        raise InvalidRequest.of("dimensions", "not of this route, as in vLLM: use /v1/embeddings, or leave it out")
    pooled = await _pool_inputs(call, request, model.task)
    head = _list_head("pooling", call, request, pooled)
    return await _vectors(call, head, {"object": "pooling"}, "data", pooled, request.encoding)


async def _classify(call: Call, request: ClassificationRequest) -> Response:
    model = call.serving.pooling("/classify")
    pooled = await _pool_inputs(call, request, model.task)
    head = _list_head("classify", call, request, pooled)

    entries = ((msgspec.json.encode(_classes(number, one, model)),) for number, one in enumerate(pooled))
    return await written(call, response_bytes([one.data for one in pooled], Encoding()), write_list(head, entries))


def _check_task(task: str | None, model: PoolingModel) -> None:
    if task in (None, model.task):
        return
    if task in model.supported:
        raise InvalidRequest.of(
            "task",
            f"the model is served for {model.task}: leave it out, or start the worker with --pooler-config.task {task}",
        )
    raise InvalidRequest.of("task", f"the model is served for {model.task}; leave it out")


def _classes(number: int, one: PooledPrompt, model: PoolingModel) -> dict[str, Any]:
    probs = one.numbers.tolist()
    best = max(range(len(probs)), key=probs.__getitem__)
    label = model.labels[best] if best < len(model.labels) else None
    return {"index": number, "label": label, "probs": probs, "num_classes": len(probs)}


async def _vectors(
    call: Call, head: dict[str, Any], entry: dict[str, Any], name: str, pooled: list[PooledPrompt], encoding: Encoding
) -> Response:
    """Write a response with a vector for each input."""

    entries = (
        write_member({"index": number, **entry}, name, encode_vector(one.shape, one.data, encoding))
        for number, one in enumerate(pooled)
    )
    return await written(call, response_bytes([one.data for one in pooled], encoding), write_list(head, entries))


async def written(call: Call, nbytes: int, pieces: Iterable[bytes]) -> Response:
    """Write a response of at most so many bytes; a large one in a thread, and charged until it is sent."""
    call.account.grow(nbytes)
    chunks = await run_if_heavy(partial(_chunks, pieces), light=nbytes <= _FEW_BYTES)
    if nbytes <= _FEW_BYTES:
        return Response(b"".join(chunks), media_type=JSON)
    within_s = call.state.body.max_s
    return Download(in_memory(chunks), sum(map(len, chunks)), call.account, media_type=JSON, within_s=within_s)


def _chunks(pieces: Iterable[bytes]) -> list[bytes]:
    """Join pieces: to send thousands of small ones takes the event loop longer."""
    chunks, chunk = list[bytes](), list[bytes]()
    size = 0
    for piece in pieces:
        chunk.append(piece)
        if (size := size + len(piece)) >= _CHUNK_BYTES:
            chunks.append(b"".join(chunk))
            chunk, size = [], 0
    return [*chunks, b"".join(chunk)]
