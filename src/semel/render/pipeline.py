"""The way of a request, from what the client sent to what an engine takes: parse, digest, layout, render.

From the digest on, an item *is* its digest: equal items of a request are processed once, and the prompt names them by
digest only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from semel.core import Digest, Feature, Identity, Item, Key, Media, Modality, Prompt, Tenant
from semel.errors import InvalidRequest, SemelError
from semel.render.assemble import assemble, assemble_encoder
from semel.render.chat import ChatRenderer
from semel.render.messages import Conversation
from semel.render.tokenizer import Tokenizer

__all__ = ["ChatRequest", "Pipeline", "Process", "Rendered"]

_MAX_AT_ONCE: Final = 64

Process = Callable[[Media, Mapping[str, object]], Awaitable[Feature]]
"""Makes an item's feature of its media and the request's `mm_processor_kwargs`, wherever that happens."""


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """What of a chat request decides the prompt, under OpenAI's and vLLM's names."""

    messages: Sequence[object]
    tools: Sequence[object] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: Mapping[str, object] = field(default_factory=dict)
    mm_processor_kwargs: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Rendered:
    """A prompt, and the features of its items by digest."""

    prompt: Prompt
    features: Mapping[Digest, Feature]


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Renders the requests of one model for one kind of engine."""

    tokenizer: Tokenizer
    chat_renderer: ChatRenderer | None
    """None for a model without a chat template."""

    process: Process
    fingerprint: str
    key: Key

    async def chat(self, request: ChatRequest, tenant: Tenant | None = None) -> Rendered:
        """Render a chat."""
        if self.chat_renderer is None:
            raise InvalidRequest("this model does not chat: it has no chat template")
        conversation = await asyncio.to_thread(Conversation.parse, request.messages)
        items, features = await self._features(conversation.media, request.mm_processor_kwargs, tenant)
        token_ids = await asyncio.to_thread(
            self.chat_renderer.tokenize,
            conversation,
            tools=request.tools,
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
            template_kwargs=request.chat_template_kwargs,
        )
        prompt = assemble(
            token_ids,
            placeholder_ids=self.chat_renderer.placeholder_ids(),
            items=items,
            layouts=[features[item.digest].layout for item in items],
        )
        return Rendered(prompt, features)

    async def transcription(self, media: Media, decoder_text: str, tenant: Tenant | None = None) -> Rendered:
        """Render a clip for the encoder of an encoder-decoder model, and the text that its decoder begins with."""
        (item,), features = await self._features([media], {}, tenant)
        token_ids = self.tokenizer.encode(decoder_text)
        return Rendered(assemble_encoder(token_ids, item=item, layout=features[item.digest].layout), features)

    async def _features(
        self, media: Sequence[Media], options: Mapping[str, object], tenant: Tenant | None
    ) -> tuple[list[Item], dict[Digest, Feature]]:
        """The items in order, and the feature of each that differs."""
        identities: dict[Modality, Identity] = {}
        items: list[Item] = []
        distinct: dict[Digest, Media] = {}
        for one in media:
            if (identity := identities.get(one.modality)) is None:
                identities[one.modality] = identity = self._identity(one.modality, options, tenant)
            item = Item(one.modality, identity.digest(one.data))
            items.append(item)
            distinct.setdefault(item.digest, one)
        features = await self._process_all(distinct.values(), options)
        return items, dict(zip(distinct, features, strict=True))

    async def _process_all(self, media: Iterable[Media], options: Mapping[str, object]) -> list[Feature]:
        """The features in order, some at a time: a request with very many items must not fill the pool's queue."""
        room = asyncio.Semaphore(_MAX_AT_ONCE)

        async def process(one: Media) -> Feature:
            async with room:
                return await self.process(one, options)

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(process(one)) for one in media]
        except* SemelError as errors:
            raise errors.exceptions[0] from None
        return [task.result() for task in tasks]

    def _identity(self, modality: Modality, options: Mapping[str, object], tenant: Tenant | None) -> Identity:
        try:
            return Identity(
                key=self.key, modality=modality, fingerprint=self.fingerprint, options=options, tenant=tenant
            )
        except ValueError:  # of json and of str.encode: no other value is refused
            raise InvalidRequest("mm_processor_kwargs and cache_salt must be valid JSON and valid Unicode") from None
