"""The routes that render without generating: the tokens and items of a request. All of them inspect (E1, E2)."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from functools import partial
from typing import Final

import msgspec
from pydantic import TypeAdapter
from starlette.requests import Request
from starlette.responses import Response

from semel.core import Prompt
from semel.frontend.api.openai.requests import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeChatRequest,
    TokenizeRequest,
    TokenizeTextRequest,
)
from semel.frontend.api.tokens.render_response import (
    PROMPT,
    Detokenized,
    RenderedPrompt,
    Tokenized,
    generate_body,
    tokens_body,
)
from semel.frontend.http.download import Download, in_memory
from semel.frontend.items.ownership import with_seals, with_tags
from semel.frontend.routes.call import Call, serve_call
from semel.frontend.routes.openapi import DocumentedRoute, takes
from semel.frontend.service import FrontendState, ServedModel
from semel.interchange.safetensors import write
from semel.render import ParsedRequest
from semel.web.openapi import JSON, shape
from semel.web.responses import json_response

__all__ = ["SAFETENSORS", "inspection_routes"]

SAFETENSORS: Final = "application/x-safetensors"
"""A client that accepts this gets prompt and tensors in one file, for the generate route or for injection."""

_CHAT: Final = TypeAdapter(ChatCompletionRequest)
_COMPLETION: Final = TypeAdapter(CompletionRequest)
_DETOKENIZE: Final = TypeAdapter(DetokenizeRequest)
_TOKENIZE: Final[TypeAdapter[TokenizeChatRequest | TokenizeTextRequest]] = TypeAdapter(TokenizeRequest)
_RENDERED: Final = {JSON: shape(RenderedPrompt), SAFETENSORS: {"type": "string", "format": "binary"}}


def inspection_routes(service: FrontendState) -> list[DocumentedRoute]:
    """The routes for rendering and tokenizing."""

    async def render_chat(request: Request) -> Response:
        """The prompt of a chat and where its items sit, or with `Accept` their tensors."""
        if _accepts_tensors(request):
            return await serve_call(request, service, _CHAT, partial(_tensors, service))
        return await serve_call(request, service, _CHAT, _render_chat)

    async def render_completion(request: Request) -> Response:
        """The tokens of each prompt."""
        return await serve_call(request, service, _COMPLETION, _render_completion)

    async def tokenize(request: Request) -> Response:
        """The tokens of a text or of a chat; those of a chat with its items in place."""
        return await serve_call(request, service, _TOKENIZE, _tokenize)

    async def detokenize(request: Request) -> Response:
        """The text of tokens."""
        return await serve_call(request, service, _DETOKENIZE, _detokenize)

    return [
        DocumentedRoute(path, endpoint, methods=["POST"], operation=operation)
        for path, endpoint, operation in (
            ("/v1/chat/completions/render", render_chat, takes(_CHAT, _RENDERED)),
            ("/v1/completions/render", render_completion, takes(_COMPLETION, {JSON: shape(list[RenderedPrompt])})),
            ("/tokenize", tokenize, takes(_TOKENIZE, {JSON: shape(Tokenized)})),
            ("/detokenize", detokenize, takes(_DETOKENIZE, {JSON: shape(Detokenized)})),
        )
    ]


def _accepts_tensors(request: Request) -> bool:
    ranges = ",".join(request.headers.getlist("accept")).split(",")
    return any(one.partition(";")[0].strip().lower() == SAFETENSORS for one in ranges)


async def _inspect(serving: ServedModel, parsed_request: ParsedRequest) -> Prompt:
    return (await serving.pipeline.inspector.render(parsed_request, serving.fleet.holding)).prompt


async def _render_chat(call: Call, request: ChatCompletionRequest) -> Response:
    prompt = await _inspect(call.serving, await call.read_chat(request, "inspect"))
    body = _body(call.serving, request, prompt, f"chatcmpl-{uuid.uuid4().hex}")
    return json_response(with_tags(body, request.tenant(call.tenant), call.serving.pipeline.key))


async def _tensors(service: FrontendState, call: Call, request: ChatCompletionRequest) -> Response:
    parsed_request = await call.read_chat(request, "inspect")
    inspector = call.serving.pipeline.inspector
    features = await inspector.features(parsed_request, max_bytes=service.max_tensor_bytes, spend=call.account.take)
    prompt = await parsed_request.assemble([features[item.digest].layout for item in parsed_request.items])
    body = _body(call.serving, request, prompt, f"chatcmpl-{uuid.uuid4().hex}")
    owner = request.tenant(call.tenant), call.serving.pipeline.key
    texts = {PROMPT: msgspec.json.encode(await asyncio.to_thread(with_seals, body, features, *owner)).decode()}
    pieces = write(features, texts)
    nbytes = sum(map(len, pieces))
    return Download(in_memory(pieces), nbytes, call.account, media_type=SAFETENSORS, within_s=service.body.max_s)


async def _render_completion(call: Call, request: CompletionRequest) -> Response:
    serving = call.serving
    prompts = request.prompts()
    request_id = f"cmpl-{uuid.uuid4().hex}"
    bodies = []
    for number, text in enumerate(prompts):
        serving.check_text(text)
        special = request.add_special_tokens
        parsed_request = serving.pipeline.read_completion(text, add_special_tokens=special, room=call.text_room)
        its_id = request_id if len(prompts) == 1 else f"{request_id}-{number}"
        bodies.append(_body(serving, request, await _inspect(serving, parsed_request), its_id))
    return json_response(bodies)


def _body(
    serving: ServedModel, request: ChatCompletionRequest | CompletionRequest, prompt: Prompt, request_id: str
) -> RenderedPrompt:
    serving.check_length(len(prompt.token_ids))
    return generate_body(
        prompt,
        request_id=request_id,
        model=serving.model,
        sampling=request.sampling(),
        stream=request.stream,
        stream_options=None if request.stream_options is None else request.stream_options.model_dump(),
        cache_salt=request.cache_salt,
    )


async def _tokenize(call: Call, request: TokenizeChatRequest | TokenizeTextRequest) -> Response:
    serving = call.serving
    max_tokens = serving.contract.max_tokens
    token_ids: Sequence[int]
    if isinstance(request, TokenizeChatRequest):
        token_ids = (await _inspect(serving, await call.read_chat(request, "inspect"))).token_ids
    else:
        serving.check_text(request.prompt)
        encode = partial(serving.pipeline.encode, add_special_tokens=request.add_special_tokens, room=call.text_room)
        token_ids = await asyncio.to_thread(encode, request.prompt)
    texts = await asyncio.to_thread(serving.pipeline.tokenizer.tokens, token_ids) if request.return_token_strs else None
    return json_response(tokens_body(token_ids, max_tokens, texts))


async def _detokenize(call: Call, request: DetokenizeRequest) -> Response:
    body: Detokenized = {"prompt": await asyncio.to_thread(call.serving.pipeline.tokenizer.decode, request.tokens)}
    return json_response(body)
