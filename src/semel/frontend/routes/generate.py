"""The route that generates from rendered prompts: tokens in, tokens out (E2).

There is nothing to render, so nothing goes into the feature cache, and its counters do not move. An item that is named
by digest must belong to the tenant (`semel.frontend.items.ownership`), and a worker must have it. If no worker has all
items of a request, the feature cache supplies the rest. Any other digest is refused as unknown, with the same message
whether no worker has it or it belongs to another tenant (threats S12). Alternatively the request has the tensors
(`semel.frontend.items.client_features`): in a safetensors file whose metadata has the prompt, or in vLLM's JSON. Tokens
outside of items must be text: a placeholder token there would have no item (S14). The tokens of an item must be those
of its layout (S9).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

from msgspec import UNSET
from pydantic import TypeAdapter
from starlette.requests import Request
from starlette.responses import Response

from semel.core import Digest, Feature, FeatureInfo, Output, Placeholder, Prompt, Submission, Tenant, Timeline
from semel.engine import Stream
from semel.errors import FeatureRejected, InvalidRequest, UnknownFeatures
from semel.fleet.affinity import ConversationPrefix
from semel.fleet.stream import BufferedAnswer, StreamedAnswer
from semel.fleet.worker import RemoteWorker
from semel.frontend.api.tokens.generate_request import GenerateRequest, RequestItem
from semel.frontend.api.tokens.generate_response import Generated, GeneratedChunk, GenerateResponse
from semel.frontend.api.tokens.render_response import PROMPT, features_body
from semel.frontend.execution import submit
from semel.frontend.http.body import parse_body, read_bytes, take_values
from semel.frontend.http.sse import respond
from semel.frontend.items.client_features import IdentifiedItem, Owner, features_of, identify_items
from semel.frontend.items.ownership import features_with_tags
from semel.frontend.routes.call import Call, prompt_limits, read_prompt_json, serve_call
from semel.frontend.routes.openapi import DocumentedRoute, takes
from semel.frontend.routes.render import SAFETENSORS
from semel.frontend.service import FrontendState, ServedModel
from semel.interchange.safetensors import read_file
from semel.render import ChatRenderer, FeatureInfoOf
from semel.render.offload import run_if_heavy
from semel.telemetry.stages import Stopwatch
from semel.web.multipart import FORM
from semel.web.openapi import EVENTS, JSON, events_of, shape

__all__ = ["generation_routes"]

_REQUEST: Final = TypeAdapter(GenerateRequest)
_ANSWERS: Final = {JSON: shape(Generated), EVENTS: events_of(GeneratedChunk)}
_FILE: Final = {SAFETENSORS: {"schema": {"type": "string", "format": "binary"}}}
_MAX_NAMED: Final = 16
_SHORT_CHARS: Final = 65_536
_REFUSED_TYPES: Final = frozenset({FORM, "application/octet-stream"})


def generation_routes(service: FrontendState) -> list[DocumentedRoute]:
    """The route for rendered prompts."""

    async def generate(request: Request) -> Response:
        """Go on with a prompt that was rendered elsewhere, in tokens."""
        if (kind := request.headers.get("content-type", "").partition(";")[0].strip().lower()) in _REFUSED_TYPES:
            raise InvalidRequest(f"{kind} is not taken: send JSON, or {SAFETENSORS} with the prompt in its metadata")
        ask = _ask_file if kind == SAFETENSORS else read_prompt_json
        return await serve_call(request, service, _REQUEST, _generate, ask)

    return [DocumentedRoute("/inference/v1/generate", generate, methods=["POST"], operation=_operation())]


def _operation() -> dict[str, Any]:
    operation = takes(_REQUEST, _ANSWERS, named=True)
    return {
        **operation,
        "requestBody": {**operation["requestBody"], "content": {**operation["requestBody"]["content"], **_FILE}},
    }


async def _ask_file(
    request: Request, service: FrontendState, kind: TypeAdapter[GenerateRequest], call: Call
) -> GenerateRequest:
    """Parse a file. Its tensors are views of the body or copies; the account charges both.

    Some strings of its JSON are JSON too. The values of each are counted when it is parsed, because a comma may be
    escaped.
    """
    body = await read_bytes(request, service.body, call.account)
    limits = prompt_limits(service, call)

    def encode(text: str) -> bytes:
        take_values(data := text.encode(errors="surrogatepass"), limits, call.account)
        return data

    def admit(text: str) -> None:
        encode(text)

    file = await asyncio.to_thread(read_file, memoryview(body), admit=admit, spend=call.account.take)
    if (prompt := file.texts.get(PROMPT)) is None:
        raise InvalidRequest(
            f"the file has no prompt: its metadata needs {PROMPT!r}, as /v1/chat/completions/render gives it with "
            f"Accept: {SAFETENSORS}"
        )
    unknown = service.unknown_fields()
    text = await run_if_heavy(partial(encode, prompt), light=len(prompt) <= _SHORT_CHARS)
    parsed = await parse_body(text, kind, limits, unknown)
    if unknown.count:
        service.ignored_fields.tell(request, unknown)
    return call.admit(parsed).with_tensors(features_of(file.entries))


async def _generate(call: Call, parsed: GenerateRequest) -> Response:
    request_id, serving = call.request_id, call.serving
    if (pooling := serving.contract.pooling) is not UNSET:
        serving.refuse_to_generate(pooling)
    if (renderer := serving.pipeline.chat_renderer) is None:
        raise InvalidRequest(f"{serving.model} transcribes: send the clip to /v1/audio/transcriptions")
    watch = Stopwatch(serving.pipeline.timings)
    tenant, completion, is_file = parsed.tenant(call.tenant), parsed.completion(), parsed.is_file
    placed = await _placed(call, parsed, tenant)
    parsed = parsed.without_features()
    if placed:
        watch.lap("digest")
    worker = _worker_for(serving, placed, parsed.token_ids, tenant)
    if placed:
        watch.lap("layout")
    prompt = _prompt_of(parsed.token_ids, placed, serving.fleet.holding, renderer)
    watch.lap("render")
    sent = {one.item.digest: one.feature for one in placed if one.feature is not None}
    submission = Submission(
        request_id,
        prompt,
        sent,
        parsed.sampling(),
        tenant.prefix_salt,
        priority=parsed.priority,
        client_features=frozenset(sent),
    )
    keep = call.account.charged if is_file else sum(feature.nbytes for feature in sent.values())
    stream = await _begin(call, worker, submission, StreamedAnswer if parsed.stream else BufferedAnswer, keep)
    name = f"generate-tokens-{call.answer_id(parsed.request_id)}"
    features = features_body(prompt) if sent else None
    named = None if features is None else features_with_tags(features, tenant, serving.pipeline.key)
    options = completion.response_options()
    answer = GenerateResponse(name, serving.model, prompt, count=completion.n, options=options, features=named)
    return await respond(stream, answer, streamed=parsed.stream)


async def _placed(call: Call, parsed: GenerateRequest, tenant: Tenant) -> Sequence[IdentifiedItem]:
    """Read and identify the items of a request, after checking their number and their positions."""
    serving, items = call.serving, parsed.items()
    serving.check_items(items)
    serving.check_length(len(parsed.token_ids))
    _check_places(items)
    if parsed.is_packed:
        call.account.take(3 * call.account.charged // 4)  # its decoded base64, at most
    work = partial(identify_items, items, parsed.token_ids, serving.contract, Owner(tenant, serving.pipeline.key))
    return await asyncio.to_thread(work) if any(one.is_sent for one in items) else work()


async def _begin(
    call: Call, worker: RemoteWorker, submission: Submission, kind: type[StreamedAnswer], keep_bytes: int
) -> Stream:
    """Submit. A feature that the client sent can be sent again; one that it only named, while it is cached."""
    features, cache = submission.features, call.serving.pipeline.cache

    async def make(digest: Digest) -> Feature:
        if (feature := features.get(digest) or cache.get(digest)) is None:
            raise _unknown([digest])
        return feature

    begin = submit(call.serving, worker, submission, make, kind, account=call.account, keep_bytes=keep_bytes)
    if not features:
        return await begin
    with _clients_fault():
        return _OwnFeatures(await begin)


@contextmanager
def _clients_fault() -> Iterator[None]:
    try:
        yield
    except FeatureRejected as error:
        raise InvalidRequest.of("features", f"{error}") from None


class _OwnFeatures:
    """An answer to a client that sent features. The engine may still reject one when it encodes it."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self.close = stream.close

    async def __aiter__(self) -> AsyncIterator[Output]:
        with _clients_fault():
            async for output in self._stream:
                yield output


def _worker_for(
    serving: ServedModel, placed: Sequence[IdentifiedItem], token_ids: Sequence[int], tenant: Tenant
) -> RemoteWorker:
    """The least loaded worker that has all items that are only named, or has most of them while the others are cached.

    Digests of other tenants are not looked up.
    """
    named = {one.item.digest: one.is_own for one in placed if one.feature is None}
    if not named:
        prefix = ConversationPrefix.of_prompt(token_ids).key((), tenant)
        return serving.fleet.choose((one.item.digest for one in placed), prefix=prefix, adapter=serving.adapter)
    info = serving.fleet.holding
    if unknown := [digest for digest, is_own in named.items() if not is_own or info(digest) is None]:
        raise _unknown(unknown)
    worker = serving.fleet.choose_holder(named, serving.pipeline.cache, adapter=serving.adapter)
    if worker is None:  # each item is on some worker, but no worker can have all of them
        raise _unknown(named)
    return worker


def _unknown(digests: Iterable[Digest]) -> UnknownFeatures:
    names = [digest.hex() for digest in digests]
    more = f" and {len(names) - _MAX_NAMED:,} more" if len(names) > _MAX_NAMED else ""
    return UnknownFeatures.of(
        "features",
        f"not held for this tenant are {', '.join(names[:_MAX_NAMED])}{more}: send their tensors, or "
        "the chat to /v1/chat/completions, or render it again where it has been executed, with the same cache_salt",
    )


def _prompt_of(
    token_ids: Sequence[int], placed: Sequence[IdentifiedItem], info_of: FeatureInfoOf, renderer: ChatRenderer
) -> Prompt:
    placeholders: list[Placeholder] = []
    for one in placed:
        info = info_of(one.item.digest) if one.feature is None else FeatureInfo.of(one.feature)
        if info is None:
            raise _unknown([one.item.digest])
        if fault := _fault(token_ids, one, info):
            raise InvalidRequest.of(
                "features", f"the {one.item.modality} at {one.place.offset:,} {fault}: render it again"
            )
        placeholders.append(Placeholder(one.place.offset, len(info.layout), info.layout.mask))
    timeline = Timeline.decoder(placeholders)
    _check_text(token_ids, timeline, renderer)
    return Prompt(token_ids, timeline, tuple(one.item for one in placed))


def _check_places(items: Sequence[RequestItem]) -> None:
    """Refuse overlapping items before reading their tokens, so that the work stays linear in the prompt (S16)."""
    try:
        Timeline.decoder(Placeholder(one.place.offset, one.place.length) for one in items)
    except ValueError as error:
        raise InvalidRequest.of("features.mm_placeholders", str(error)) from None


def _fault(token_ids: Sequence[int], one: IdentifiedItem, info: FeatureInfo) -> str | None:
    """Say how an item differs from the feature that is known for it; None if it does not."""
    offset, layout = one.place.offset, info.layout
    if info.modality != one.item.modality:
        return "is of another modality"
    if one.place.length != len(layout) or tuple(token_ids[offset : offset + len(layout)]) != layout.token_ids:
        return "has other tokens than it was rendered with"
    if one.place.is_embed is not None:
        bits = [True] * len(layout) if layout.mask is None else [bool(bit) for bit in layout.mask.bits]
        if one.place.is_embed != bits:
            return "has another is_embed than it was rendered with"
    return None


def _check_text(token_ids: Sequence[int], timeline: Timeline, renderer: ChatRenderer) -> None:
    if max(token_ids) >= (size := renderer.tokenizer.vocab_size):
        raise InvalidRequest.of("token_ids", f"there is no token {max(token_ids):,}, the tokenizer has {size:,}")
    placeholders, start = renderer.placeholder_ids(), 0
    for end, after in [*((one.offset, one.end) for one in timeline), (len(token_ids), len(token_ids))]:
        for position in range(start, end):
            if (modality := placeholders.get(token_ids[position])) is not None:
                raise InvalidRequest.of(
                    "token_ids",
                    f"token {position:,} is the placeholder of {modality} items, and none is there: name "
                    "the item in features, or leave the token out",
                )
        start = after
