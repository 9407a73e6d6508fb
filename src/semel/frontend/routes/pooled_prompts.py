"""The prompts of one request to a model that pools, submitted some at a time, and what was made of each.

Each prompt goes the way of a chat or a completion, and is charged, counted and placed as one. Until its answer begins
the request may be called back, and nothing of it is dropped: its account is charged for all of it to the end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, cast

from msgspec import UNSET

from semel.aio import concurrently, in_slices, run_if_large
from semel.core import Layout, Modality, Output, Prompt, Tenant
from semel.errors import EngineFailed, RequestError
from semel.fleet.affinity import ConversationPrefix
from semel.fleet.stream import BufferedAnswer
from semel.frontend.api.pooling.requests import PoolingInput, ScoreInput
from semel.frontend.api.shared.usage import Usage, UsageCounter
from semel.frontend.execution import submit_request
from semel.frontend.routes.call import Call
from semel.render import ChatRequest, ParsedRequest, Pipeline, has_parts
from semel.render.chat.contents import scoring_renderer

__all__ = ["PooledPrompt", "PromptPool", "Truncation", "usage_of"]

_AT_ONCE: Final = 256
"""Prompts of one request that are under way: the sequences of an engine, so that one request can fill it."""

_ITERATIONS: Final = 3
"""Of the event loop, between the beginnings of two prompts: each goes on in several of them."""

_SLICE_S: Final = 0.002
"""Of the time in which they are listed."""


@dataclass(frozen=True, slots=True)
class Truncation:
    """The tokens after which texts are cut; chats are not, because a cut could go through an item."""

    most: int
    keeps_end: bool = False


@dataclass(frozen=True, slots=True)
class PooledPrompt:
    """The pooling output of one prompt."""

    shape: tuple[int, ...]
    data: bytes
    """float32, little endian."""

    usage: UsageCounter

    @property
    def numbers(self) -> memoryview[float]:
        """Its numbers, flat."""
        return memoryview(self.data).cast("f")


@dataclass(frozen=True, slots=True)
class _OneChat:
    """One of the chats of a request."""

    request: ChatRequest
    owner: Tenant

    def chat(self) -> ChatRequest:
        return self.request

    def tenant(self, _: str = "", /) -> Tenant:
        return self.owner


@dataclass(frozen=True, slots=True)
class PromptPool:
    """The pooling of the prompts of one request."""

    call: Call
    params: Mapping[str, object]
    """The engine's pooling parameters."""

    tenant: Tenant
    priority: int = 0
    add_special_tokens: bool = True
    """Of texts."""

    truncation: Truncation | None = None
    turn: asyncio.Lock = field(default_factory=asyncio.Lock, repr=False)
    """The budget charges the memory in which a text becomes tokens: one does at a time."""

    async def pool(self, prompts: Iterable[PoolingInput], places: Sequence[str] = ()) -> list[PooledPrompt]:
        """Pool each prompt. The first failure is that of all; `places` are their parts of the request."""
        call, pooled = self.call, dict[int, PooledPrompt]()
        inputs, have_media = await in_slices(self._listed(prompts), _SLICE_S)
        if have_media:
            call.account.take(3 * call.account.charged // 4)  # at most so much is base64, for all of them

        async def work(number: int) -> None:
            try:
                pooled[number] = await self._pool(inputs[number], f"{call.request_id}-{number}")
            except RequestError as error:
                if len(inputs) == 1:
                    raise
                raise error.at(places[number] if places else f"input[{number}]") from None

        numbers = iter(range(len(inputs)))
        turns = call.state.pooling_turns.setdefault(call.tenant, asyncio.Lock())

        async def work_on(_: int) -> None:
            for number in numbers:  # each takes the next one: a task for each input would be thousands at once
                if len(inputs) > 1:
                    await _turn_of_loop(turns)
                await work(number)

        at_once = min(_AT_ONCE, len(inputs))
        await asyncio.sleep(0)  # what is done for all of them at once has a turn of the loop to itself
        await concurrently(range(at_once), work_on, at_once=at_once)
        await asyncio.sleep(0)
        return [pooled[number] for number in range(len(inputs))]

    def _listed(self, prompts: Iterable[PoolingInput]) -> Generator[None, None, tuple[list[PoolingInput], bool]]:
        """Return all prompts, and whether any may have media."""
        inputs, have_media = [], False
        for one in prompts:
            if self.truncation is None and isinstance(one, str):
                self.call.serving.check_text(one)
            have_media = have_media or _may_have_media(one)
            inputs.append(one)
            yield
        return inputs, have_media

    async def _pool(self, one: PoolingInput, request_id: str) -> PooledPrompt:
        account = self.call.account
        parsed = await self._read(one)
        submitting = submit_request(
            self.call.serving,
            parsed,
            request_id=request_id,
            sampling=self.params,
            tenant=self.tenant,
            priority=self.priority,
            opening=_opening(self.call, one),
            kind=BufferedAnswer,
            answer_account=account,
        )
        del parsed  # it has the media
        stream, prompt = await submitting
        try:
            outputs = [output async for output in stream]
            account.grow(sum(len(output.pooling.data) for output in outputs if output.pooling is not None))
            return await _joined(outputs, prompt)
        finally:
            await stream.close()

    async def _read(self, one: PoolingInput) -> ParsedRequest:
        call = self.call
        if isinstance(one, ChatRequest):
            return await call.read_chat(_OneChat(one, self.tenant), is_charged=True)
        if isinstance(one, ScoreInput):
            chat = _OneChat(one.chat, self.tenant)
            return await call.read_chat(chat, pipeline=_scoring_pipeline(call, one), is_charged=True)
        if isinstance(one, str) and self.truncation is not None:
            async with self.turn:
                one = await asyncio.to_thread(_truncated, call, one, self.truncation)
        read = call.serving.pipeline.read_completion
        parsed = read(one, add_special_tokens=self.add_special_tokens, room=call.text_room)

        async def assemble(layouts: Sequence[Layout]) -> Prompt:
            async with self.turn:
                return await parsed.assemble(layouts)

        return replace(parsed, assemble=assemble)


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


async def _turn_of_loop(turns: asyncio.Lock) -> None:
    """Wait for a turn of the event loop in which no other prompt of the tenant begins: 256 at once would take 60 ms."""
    async with turns:
        for _ in range(_ITERATIONS):
            await asyncio.sleep(0)


def _truncated(call: Call, text: str, truncation: Truncation) -> list[int]:
    chars = call.serving.max_chars
    text = text[-chars:] if truncation.keeps_end else text[:chars]
    with call.text_room(len(text)):
        return call.serving.pipeline.tokenizer.encode_within(text, truncation.most, keeps_end=truncation.keeps_end)


def _may_have_media(one: PoolingInput) -> bool:
    chat = one.chat if isinstance(one, ScoreInput) else one
    return isinstance(chat, ChatRequest) and has_parts(chat.messages)


def _scoring_pipeline(call: Call, one: ScoreInput) -> Pipeline:
    pipeline, pooling = call.serving.pipeline, call.serving.contract.pooling
    assert pipeline.chat_renderer is not None
    assert pooling is not UNSET
    renderer = scoring_renderer(pipeline.chat_renderer, pooling.pair_form, has_pair=one.has_pair)
    return replace(pipeline, chat_renderer=renderer)


def _opening(call: Call, one: PoolingInput) -> ConversationPrefix | None:
    if not call.serving.fleet.has_choice:
        return None
    if isinstance(one, ScoreInput):
        return None
    if isinstance(one, ChatRequest):
        return ConversationPrefix.of_chat(cast("Sequence[Mapping[str, Any]]", one.messages))
    return ConversationPrefix.of_prompt(one)


async def _joined(outputs: Sequence[Output], prompt: Prompt) -> PooledPrompt:
    usage = UsageCounter.of(prompt)
    pieces = []
    for output in outputs:
        usage.add(output)
        if output.pooling is not None:
            pieces.append(output.pooling)
    if not pieces:
        raise EngineFailed("the engine pooled nothing; send the request again")
    data = [piece.data for piece in pieces]
    return PooledPrompt(pieces[0].shape, await run_if_large(partial(b"".join, data), sum(map(len, data))), usage)
