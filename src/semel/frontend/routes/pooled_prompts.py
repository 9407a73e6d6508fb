"""The prompts of one request to a model that pools, submitted some at a time, and what was made of each.

Each prompt goes the way of a chat or a completion, and is charged, counted and placed as one. Until its answer begins
the request may be called back, and nothing of it is dropped: its account is charged for all of it to the end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from semel.aio import concurrently
from semel.core import Layout, Modality, Output, Prompt, Tenant
from semel.errors import EngineFailed
from semel.fleet.affinity import ConversationPrefix
from semel.fleet.stream import BufferedAnswer
from semel.frontend.api.pooling.requests import PoolingInput
from semel.frontend.api.shared.usage import Usage, UsageCounter
from semel.frontend.execution import submit_request
from semel.frontend.routes.call import Call
from semel.render import ChatRequest, ParsedRequest, has_parts

__all__ = ["PooledPrompt", "pool", "usage_of"]

_AT_ONCE: Final = 256
"""Prompts of one request that are under way: the sequences of an engine, so that one request can fill it."""


@dataclass(frozen=True, slots=True)
class PooledPrompt:
    """The pooling output of one prompt."""

    shape: tuple[int, ...]
    data: bytes
    """float32, little endian."""

    usage: UsageCounter

    @property
    def numbers(self) -> memoryview:
        """Its numbers, flat."""
        return memoryview(self.data).cast("f")


async def pool(
    call: Call,
    inputs: Sequence[PoolingInput],
    params: Mapping[str, object],
    *,
    tenant: Tenant,
    priority: int = 0,
    add_special_tokens: bool = True,
) -> list[PooledPrompt]:
    """Pool each input. They belong to one request, whose first failure is that of all."""
    for one in inputs:
        if isinstance(one, str):
            call.serving.check_text(one)
    if any(isinstance(one, ChatRequest) and has_parts(one.messages) for one in inputs):
        call.account.take(3 * call.account.charged // 4)  # at most so much is base64, for all of them
    pooled: dict[int, PooledPrompt] = {}
    turn = asyncio.Lock()  # the budget charges the memory in which a text becomes tokens: one does at a time

    async def work(number: int) -> None:
        one = inputs[number]
        if isinstance(one, ChatRequest):
            parsed = await call.read_charged(one, tenant)
        else:
            parsed = _in_turn(turn, _read_text(call, one, add_special_tokens=add_special_tokens))
        stream, prompt = await submit_request(
            call.serving,
            parsed,
            request_id=f"{call.request_id}-{number}",
            sampling=params,
            tenant=tenant,
            priority=priority,
            opening=_opening(call, one),
            kind=BufferedAnswer,
            answer_account=call.account,
        )
        del parsed  # it has the media
        try:
            outputs = [output async for output in stream]
            nbytes = sum(len(output.pooling.data) for output in outputs if output.pooling is not None)
            call.account.grow(nbytes)
            pooled[number] = _joined(outputs, prompt)
        finally:
            await stream.close()

    await concurrently(range(len(inputs)), work, at_once=_AT_ONCE)
    return [pooled[number] for number in range(len(inputs))]


def usage_of(pooled: Sequence[PooledPrompt]) -> Usage:
    """Return the usage of all prompts of a request."""
    total = UsageCounter(0)
    multimodal: dict[Modality, int] = {}
    for one in pooled:
        total.prompt_tokens += one.usage.prompt_tokens
        if one.usage.cached_tokens is not None:
            total.cached_tokens = (total.cached_tokens or 0) + one.usage.cached_tokens
        for modality, count in one.usage.multimodal_tokens.items():
            multimodal[modality] = multimodal.get(modality, 0) + count
    total.multimodal_tokens = multimodal
    return total.whole()


def _read_text(call: Call, prompt: str | Sequence[int], *, add_special_tokens: bool) -> ParsedRequest:
    return call.serving.pipeline.read_completion(prompt, add_special_tokens=add_special_tokens, room=call.text_room)


def _in_turn(turn: asyncio.Lock, parsed: ParsedRequest) -> ParsedRequest:
    async def assemble(layouts: Sequence[Layout]) -> Prompt:
        async with turn:
            return await parsed.assemble(layouts)

    return replace(parsed, assemble=assemble)


def _opening(call: Call, one: PoolingInput) -> ConversationPrefix | None:
    if not call.serving.fleet.has_choice:
        return None
    if isinstance(one, ChatRequest):
        return ConversationPrefix.of_chat(one.messages)
    return ConversationPrefix.of_prompt(one)


def _joined(outputs: Sequence[Output], prompt: Prompt) -> PooledPrompt:
    usage = UsageCounter.of(prompt)
    pieces = []
    for output in outputs:
        usage.add(output)
        if output.pooling is not None:
            pieces.append(output.pooling)
    if not pieces:
        raise EngineFailed("the engine pooled nothing; send the request again")
    return PooledPrompt(pieces[0].shape, b"".join(piece.data for piece in pieces), usage)
