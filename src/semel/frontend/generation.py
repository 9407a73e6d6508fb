"""The route that goes on with prompts that were rendered elsewhere: tokens in, tokens out (E2).

Nothing is left to render: the main caches and their counters are not touched. Items are named by digest, and each must
be this tenant's (`attribution`) and held by the worker that gets the request. Any other is answered as unknown, in the
same words whether nobody holds it or somebody else does (threats S12). What is not an item must be text: a placeholder
token outside of an item would stand for nothing (S14), and an item's tokens must be those that its worker holds (S9).
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Final

from fastapi import APIRouter, Request, Response
from pydantic import TypeAdapter

from semel.core import Digest, Feature, Holding, Placeholder, Prompt, Timeline
from semel.engine import Submission
from semel.errors import InvalidRequest, UnknownFeatures
from semel.frontend.attribution import is_of
from semel.frontend.endings import answered, wished_id
from semel.frontend.fleet import FleetStream, WholeStream
from semel.frontend.forms import FORM
from semel.frontend.generated import Generated
from semel.frontend.handling import Call, handle
from semel.frontend.inspection import SAFETENSORS
from semel.frontend.opening import Opening
from semel.frontend.remote import RemoteWorker
from semel.frontend.rendered import GenerateRequest, Shown
from semel.frontend.service import Service, Serving
from semel.render import ChatRenderer

__all__ = ["generation_routes"]

_REQUEST: Final = TypeAdapter(GenerateRequest)
_MAX_NAMED: Final = 16
_BINARY: Final = frozenset({FORM, SAFETENSORS, "application/octet-stream"})


def generation_routes(service: Service) -> APIRouter:
    """The route for rendered prompts."""
    router = APIRouter()

    @router.post("/inference/v1/generate", openapi_extra=_schema())
    async def generate(request: Request) -> Response:
        """Go on with a prompt that was rendered elsewhere, in tokens."""
        if (kind := request.headers.get("content-type", "").partition(";")[0].strip().lower()) in _BINARY:
            raise InvalidRequest(f"{kind} is not taken: send JSON that names items by digest, and inject their tensors")
        return await handle(request, service, _REQUEST, partial(_generate, wished_id(request)))

    return router


def _schema() -> dict[str, Any]:
    body = GenerateRequest.model_json_schema()
    return {"requestBody": {"content": {"application/json": {"schema": body}}, "required": True}}


async def _generate(wished: str | None, call: Call, asked: GenerateRequest) -> Response:
    request_id, serving = uuid.uuid4().hex, call.serving
    if (renderer := serving.pipeline.chat_renderer) is None:
        raise InvalidRequest(f"{serving.model} transcribes: send the clip to /v1/audio/transcriptions")
    tenant, shown, completion = asked.tenant(call.tenant), asked.shown(), asked.completion()
    serving.check_items(one.item for one in shown)
    serving.check_length(len(asked.token_ids))
    salt = tenant.prefix_salt
    worker = serving.fleet.choose((), prefix=Opening.of_prompt(asked.token_ids).key((), salt))
    if shown:
        key = serving.pipeline.key
        own = {one.item.digest for one in shown if is_of(one.item.digest, one.tag, tenant, key)}
        worker = _holder(serving, shown, own)
    prompt = _prompt_of(asked.token_ids, shown, worker, renderer)
    submission = Submission(request_id, prompt, {}, asked.sampling(), salt, priority=asked.priority)
    kind = FleetStream if asked.stream else WholeStream
    stream = await serving.fleet.submit(worker, submission, _cannot_make, kind)
    call.account.close()  # what is held from now on is a prompt that the model takes
    name = f"generate-tokens-{wished or asked.request_id or request_id}"
    answer = Generated(name, serving.model, prompt, count=completion.n, showing=completion.showing())
    return await answered(stream, answer, streamed=asked.stream)


def _holder(serving: Serving, shown: Sequence[Shown], own: set[Digest]) -> RemoteWorker:
    """The least busy worker that holds all items; of those that are not the tenant's own nothing is looked up."""
    digests, held = dict.fromkeys(one.item.digest for one in shown), serving.held_anywhere()
    if unknown := [digest for digest in digests if digest not in own or held(digest) is None]:
        raise _unknown(unknown)
    holders = [one for one in serving.fleet.serving if all(one.holding(digest) is not None for digest in digests)]
    if not holders:  # each is held somewhere, and nowhere all of them
        raise _unknown(digests)
    return min(holders, key=lambda one: one.load)


def _unknown(digests: Iterable[Digest]) -> UnknownFeatures:
    names = [digest.hex() for digest in digests]
    more = f" and {len(names) - _MAX_NAMED:,} more" if len(names) > _MAX_NAMED else ""
    return UnknownFeatures(
        f"features: not held for this tenant are {', '.join(names[:_MAX_NAMED])}{more}: send the chat to "
        "/v1/chat/completions, or render it again where it has been executed, with the same cache_salt"
    )


async def _cannot_make(digest: Digest) -> Feature:
    """Repairs nothing: the worker has lost the item meanwhile, and its media are not here."""
    raise _unknown([digest])


def _prompt_of(
    token_ids: Sequence[int], shown: Sequence[Shown], worker: RemoteWorker, renderer: ChatRenderer
) -> Prompt:
    _check_places(shown)
    placeholders: list[Placeholder] = []
    for one in shown:
        if (held := worker.holding(one.item.digest)) is None:
            raise _unknown([one.item.digest])
        if fault := _fault(token_ids, one, held):
            raise InvalidRequest(f"features: the {one.item.modality} at {one.place.offset:,} {fault}: render it again")
        placeholders.append(Placeholder(one.place.offset, len(held.layout), held.layout.mask))
    timeline = Timeline.decoder(placeholders)
    _check_text(token_ids, timeline, renderer)
    return Prompt(token_ids, timeline, tuple(one.item for one in shown))


def _check_places(shown: Sequence[Shown]) -> None:
    """Refuse items that overlap, before their tokens are looked at: that is then linear in the prompt (S16)."""
    try:
        Timeline.decoder(Placeholder(one.place.offset, one.place.length) for one in shown)
    except ValueError as error:
        raise InvalidRequest(f"features.mm_placeholders: {error}") from None


def _fault(token_ids: Sequence[int], one: Shown, held: Holding) -> str | None:
    """How an item differs from what is held of it."""
    offset, layout = one.place.offset, held.layout
    if held.modality != one.item.modality:
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
        raise InvalidRequest(f"token_ids: there is no token {max(token_ids):,}, the tokenizer has {size:,}")
    placeholders, start = renderer.placeholder_ids(), 0
    for end, after in [*((one.offset, one.end) for one in timeline), (len(token_ids), len(token_ids))]:
        for position in range(start, end):
            if (modality := placeholders.get(token_ids[position])) is not None:
                raise InvalidRequest(
                    f"token_ids: token {position:,} is the placeholder of {modality} items, and none is there: name "
                    "the item in features, or leave the token out"
                )
        start = after
