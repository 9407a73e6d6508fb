"""The way of a request, from what the client sent to what an engine takes: parse, digest, layout, render.

From the digest on, an item *is* its digest: equal items of a request are looked up once, and the prompt names them by
digest only. What is held where the request is going is only named; what is cached is taken; the rest is processed, and
equal work in flight is one. Between reading and rendering a worker can be chosen: it takes the digests, no more.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from semel.cache import Cache, Flight, NoCache
from semel.core import Digest, Feature, Holding, Identity, Item, Key, Layout, Media, Modality, Prompt, Tenant
from semel.errors import InvalidRequest, SemelError, ServiceError
from semel.render.assemble import assemble, assemble_encoder
from semel.render.chat import ChatRenderer
from semel.render.messages import Conversation
from semel.render.tokenizer import Tokenizer

__all__ = ["ChatRequest", "Draft", "Lookups", "Make", "Pipeline", "Process", "Rendered"]

_MAX_AT_ONCE: Final = 64

Process = Callable[[Media, Mapping[str, object]], Awaitable[Feature]]
"""Makes an item's feature of its media and the request's `mm_processor_kwargs`, wherever that happens."""

Make = Callable[[Digest], Awaitable[Feature]]
"""Gives the feature of one item of a request: from the cache, or processed."""

Lookups = Callable[[Modality, int, bool], None]
"""Told of items that were looked up: their modality, how many, and whether no processing was started for them."""


async def _cannot_make(digest: Digest) -> Feature:
    raise ServiceError(f"nothing is known of {digest!r} but its feature")


def _nothing(_: Digest) -> Holding | None:
    return None


def _uncounted(modality: Modality, count: int, hit: bool) -> None:
    pass


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """What of a chat request decides the prompt, under OpenAI's and vLLM's names."""

    messages: Sequence[object]
    tools: Sequence[object] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: Mapping[str, object] = field(default_factory=dict)
    mm_processor_kwargs: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class Draft:
    """A request that has been read: its items have digests, and nothing has been made of them yet."""

    items: tuple[Item, ...]
    media: Mapping[Digest, Media]
    """Of each item that differs."""

    options: Mapping[str, object]
    assemble: Callable[[Sequence[Layout]], Awaitable[Prompt]] = field(repr=False)
    """The prompt, once the layout of every item is known."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """A prompt, and the features of its items by digest, but for those that are held where it is going."""

    prompt: Prompt
    features: Mapping[Digest, Feature]
    make: Make = _cannot_make
    """For a feature that turns out not to be held."""


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Renders the requests of one model for one kind of engine."""

    tokenizer: Tokenizer
    chat_renderer: ChatRenderer | None
    """None for a model without a chat template."""

    process: Process
    fingerprint: str
    key: Key
    cache: Cache = field(default_factory=NoCache)
    lookups: Lookups = _uncounted
    flight: Flight[Digest, Feature] = field(default_factory=Flight, repr=False)

    async def chat(self, request: ChatRequest, tenant: Tenant | None = None) -> Rendered:
        """Render a chat with all its features."""
        return await self.render(await self.read_chat(request, tenant))

    async def transcription(self, media: Media, decoder_text: str, tenant: Tenant | None = None) -> Rendered:
        """Render a clip for an encoder-decoder model with its feature, and the text that its decoder begins with."""
        return await self.render(self.read_transcription(media, decoder_text, tenant))

    async def read_chat(self, request: ChatRequest, tenant: Tenant | None = None) -> Draft:
        """Read a chat."""
        if self.chat_renderer is None:
            raise InvalidRequest("this model does not chat: it has no chat template")
        conversation = await asyncio.to_thread(Conversation.parse, request.messages)
        items, media = self._identify(conversation.media, request.mm_processor_kwargs, tenant)
        assembling = partial(_assemble_chat, self.chat_renderer, conversation, request, items)
        return Draft(items, media, request.mm_processor_kwargs, assembling)

    def read_transcription(self, media: Media, decoder_text: str, tenant: Tenant | None = None) -> Draft:
        """Read a clip and the text that the decoder begins with."""
        (item,), distinct = self._identify([media], {}, tenant)

        async def assembling(layouts: Sequence[Layout]) -> Prompt:
            (layout,) = layouts
            return assemble_encoder(self.tokenizer.encode(decoder_text), item=item, layout=layout)

        return Draft((item,), distinct, {}, assembling)

    async def render(self, draft: Draft, holding: Callable[[Digest], Holding | None] = _nothing) -> Rendered:
        """Make the prompt of a draft, and the features of those of its items that `holding` does not know."""
        shown = Counter(draft.items)
        layouts: dict[Digest, Layout] = {}
        features: dict[Digest, Feature] = {}

        def find(item: Item) -> bool:
            if (held := holding(item.digest)) is not None:
                layouts[item.digest] = held.layout
            elif (feature := self.cache.get(item.digest)) is not None:
                features[item.digest] = feature
            else:
                return False
            self.lookups(item.modality, shown[item], True)
            return True

        async def find_or_make(item: Item) -> None:
            if not find(item):  # it may have come while this one waited for its turn
                self.lookups(item.modality, shown[item], False)
                features[item.digest] = await self._make(draft, item.digest)

        await _for_each([item for item in shown if not find(item)], find_or_make)
        layouts.update((digest, feature.layout) for digest, feature in features.items())
        prompt = await draft.assemble([layouts[item.digest] for item in draft.items])
        return Rendered(prompt, features, partial(self._make, draft))

    async def _make(self, draft: Draft, digest: Digest) -> Feature:
        """The feature of an item, cached or processed; nothing is awaited before that is decided."""
        if (feature := self.cache.get(digest)) is not None:
            return feature

        async def work() -> Feature:
            return self.cache.put(digest, await self.process(draft.media[digest], draft.options))

        return await self.flight.do(digest, work)

    def _identify(
        self, media: Sequence[Media], options: Mapping[str, object], tenant: Tenant | None
    ) -> tuple[tuple[Item, ...], Mapping[Digest, Media]]:
        """The items in order, and the media of each that differs."""
        identities: dict[Modality, Identity] = {}
        items: list[Item] = []
        distinct: dict[Digest, Media] = {}
        for one in media:
            if (identity := identities.get(one.modality)) is None:
                identities[one.modality] = identity = self._identity(one.modality, options, tenant)
            item = Item(one.modality, identity.digest(one.data))
            items.append(item)
            distinct.setdefault(item.digest, one)
        return tuple(items), distinct

    def _identity(self, modality: Modality, options: Mapping[str, object], tenant: Tenant | None) -> Identity:
        try:
            return Identity(
                key=self.key, modality=modality, fingerprint=self.fingerprint, options=options, tenant=tenant
            )
        except ValueError:  # of json and of str.encode: no other value is refused
            raise InvalidRequest("mm_processor_kwargs and cache_salt must be valid JSON and valid Unicode") from None


async def _assemble_chat(
    renderer: ChatRenderer,
    conversation: Conversation,
    request: ChatRequest,
    items: Sequence[Item],
    layouts: Sequence[Layout],
) -> Prompt:
    token_ids = await asyncio.to_thread(
        renderer.tokenize,
        conversation,
        tools=request.tools,
        add_generation_prompt=request.add_generation_prompt,
        continue_final_message=request.continue_final_message,
        template_kwargs=request.chat_template_kwargs,
    )
    return assemble(token_ids, placeholder_ids=renderer.placeholder_ids(), items=items, layouts=layouts)


async def _for_each(items: Iterable[Item], work: Callable[[Item], Awaitable[None]]) -> None:
    """Do the work for all of them, some at a time: a request with very many items must not fill the pool's queue."""
    room = asyncio.Semaphore(_MAX_AT_ONCE)

    async def do(item: Item) -> None:
        async with room:
            await work(item)

    try:
        async with asyncio.TaskGroup() as group:
            for item in items:
                group.create_task(do(item))
    except* SemelError as errors:
        raise errors.exceptions[0] from None
