"""The path of a request from a client to an engine: parse, fetch, digest, layout, render.

After the digest, an item *is* its digest: equal items of a request are looked up once, and the prompt names them by
digest only. An item that the request's worker has is only named. A cached feature is used. The rest is processed; equal
work in flight runs once. A worker can be chosen between parsing and rendering: the choice needs only the digests.

This is the path of `execute`, the default intent. A request that is only inspected takes another path (`inspector`),
which has no effect on anything here.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import cast

from semel.aio import concurrently
from semel.cache import Cache, Flight, LayoutCache, NoCache
from semel.core import Digest, Feature, Identity, Item, Key, Layout, Media, Modality, Prompt, Tenant
from semel.core.options import item_options, with_media_io
from semel.errors import InvalidRequest, PromptTooLong, RequestError, ServiceError
from semel.render.chat.messages import Attachment, Conversation
from semel.render.chat.renderer import ChatRenderer, ChatRequest
from semel.render.documents import Documents, expand_documents
from semel.render.file_sources import FileSources, IdentityOf, Resolved, Wait
from semel.render.inspector import Inspector
from semel.render.media.parsed_request import (
    AssemblePrompt,
    ComputeLayout,
    Cut,
    FeatureInfoOf,
    ParsedRequest,
    ProcessItem,
    Rendered,
    nothing_known,
)
from semel.render.media.part_source import NO_FILES
from semel.render.media.source import Document, DocumentPage, MediaFile, MediaName, Source
from semel.render.media.source_fetch import Fetch, Intent, Spend, fetch_sources
from semel.render.offload import is_cheap, run_if_heavy
from semel.render.tokens.expand import expand, expand_encoder
from semel.render.tokens.tokenizer import TextRoom, Tokenizer, unlimited_room
from semel.store import Pin, no_pin
from semel.telemetry.stages import Stopwatch, Timings, untimed

__all__ = ["Admit", "Lookups", "Pipeline", "check_chars", "has_parts"]

Admit = Callable[[Sequence[Source], Sequence[str]], None]
"""Raises if a request has more items than allowed. The second argument is the part of the request that names each."""

Lookups = Callable[[Modality, int, bool], None]
"""Receives item lookups: their modality, their number, and whether they needed no processing."""


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Renders the requests of one model for one kind of engine."""

    tokenizer: Tokenizer
    chat_renderer: ChatRenderer | None
    """None for a model without a chat template."""

    process: ProcessItem
    fingerprint: str
    key: Key
    cache: Cache = field(default_factory=NoCache)
    lookups: Lookups = lambda *_: None
    flight: Flight[Digest, Feature] = field(default_factory=Flight, repr=False)

    process_apart: ProcessItem | None = field(default=None, repr=False)
    """Processes for inspections, if `process` writes into the feature cache's memory."""

    lay_out: ComputeLayout | None = field(default=None, repr=False)
    """Computes layouts for inspections without making features, if that is possible."""

    apply: AssemblePrompt | None = field(default=None, repr=False)
    """Assembles prompts of models whose items are not simply spliced. If None, their chats are refused."""

    cut: Cut | None = field(default=None, repr=False)
    """Cuts clips that are longer than the encoder's maximum. If None, they are refused."""

    fetch: Fetch | None = field(default=None, repr=False)
    """Fetches media behind URLs. If None, only data URLs are accepted."""

    files: FileSources = field(default_factory=FileSources)
    """The files that chats may name."""

    documents: Documents = field(default_factory=Documents, repr=False)
    """The documents that chats may have."""

    timings: Timings = untimed
    """Receives the duration of each stage of a generating request."""

    max_tokens: int | None = None
    """Maximum tokens of a prompt. Once the items of a request exceed it, no more features are made for it."""

    layouts: LayoutCache[Digest] = field(default_factory=LayoutCache)
    """Both intents fill it and only `inspect` reads it, so that reading it changes nothing that `execute` sees."""

    inspections: Flight[Digest, Feature] = field(default_factory=Flight, repr=False)
    looks: Flight[Digest, Layout] = field(default_factory=Flight, repr=False)

    @property
    def inspector(self) -> Inspector:
        """The inspector of this pipeline."""
        process = self.process_apart or self.process
        return Inspector(process, self.layouts, self.inspections, self.lay_out, self.looks)

    async def chat(self, request: ChatRequest, tenant: Tenant | None = None) -> Rendered:
        """Render a chat with all its features."""
        return await self.render(await self.read_chat(request, tenant))

    async def read_chat(
        self,
        request: ChatRequest,
        tenant: Tenant | None = None,
        *,
        intent: Intent = "execute",
        admit: Admit = lambda *_: None,
        spend: Spend = lambda _: None,
        pin: Pin = no_pin,
        spend_feature: Spend | None = None,
        max_chars: int | None = None,
        room: TextRoom = unlimited_room,
    ) -> ParsedRequest:
        """Parse a chat, and fetch the media that it names by URL.

        `admit` is called with its sources before any is fetched, and raises if there are too many. `spend` is called
        with the number of fetched bytes before they are stored, and raises if they are not allowed; so is
        `spend_feature` with the size of features that have no room in shared memory. `pin` is called while a store
        reads or writes them. A chat whose texts have more than `max_chars` is refused, and its text becomes tokens in a
        `room`.
        """
        if self.chat_renderer is None:
            raise InvalidRequest("this model does not chat: it has no chat template")
        watch = Stopwatch(self.timings if intent == "execute" else untimed)
        light = is_cheap(request.messages, request.tools, request.chat_template_kwargs)
        owner = tenant or Tenant()
        may_attach = has_parts(request.messages)
        located = await self.files.locate(request.messages, owner) if may_attach else NO_FILES
        conversation = await run_if_heavy(partial(Conversation.parse, request.messages, located), light=light)
        attachments = conversation.attachments if may_attach else ()
        if attachments:
            sources = tuple([attachment.source for attachment in attachments])
            places = [attachment.where for attachment in attachments]
            admit(sources, places)
        if not light and max_chars is not None:
            check_chars(await asyncio.to_thread(lambda: sum(map(len, conversation.strings()))), max_chars)
        watch.lap("parse")
        renderer, name = self.chat_renderer, _name(tenant)
        tokenize = partial(
            renderer.tokenize,
            tools=request.tools,
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
            template_kwargs=request.chat_template_kwargs,
            room=room,
        )
        if not attachments:
            prompt = _ChatPrompt((), partial(tokenize, conversation), renderer, self.apply, name, light)
            return ParsedRequest((), {}, request.mm_processor_kwargs, prompt.assemble, name)
        fetched = await fetch_sources(sources, self.fetch, owner, intent, spend, pin)
        read_file = partial(self.files.read, owner, spend, pin)
        options = with_media_io(request.mm_processor_kwargs, request.media_io_kwargs)
        identity_of = cache(partial(self._identity, options=options, tenant=tenant))
        if not is_cheap(options):  # `frames_indices` of 65,000 frames take 19 ms
            await asyncio.to_thread(lambda: [identity_of(one.modality) for one in fetched])
        if any(isinstance(source, Document) for source in fetched):
            opened = await self.documents.open(
                fetched, owner, self.key, identity_of, read_file, self.files.names, remembers=intent == "execute"
            )
            fetched = [source for pages in opened for source in pages]
            conversation = await run_if_heavy(partial(expand_documents, conversation, opened), light=light)
            attachments = conversation.attachments
            places = [attachment.where for attachment in attachments]
            admit(fetched, places)
        if any(isinstance(source, MediaFile | MediaName) for source in fetched):
            fetched = await self.files.resolve(
                cast("Sequence[Resolved | MediaName]", fetched),
                owner,
                identity_of,
                read_file,
                lazily=intent == "execute",
            )
        if fetched is not sources:
            watch.lap("fetch")
        resolved = cast("Sequence[Resolved]", fetched)
        items, media = await run_if_heavy(
            partial(self._identify, resolved, identity_of), light=light and fetched is sources
        )
        contents: Sequence[tuple[Digest, Media | None]] = ()
        are_written: Wait | None = None
        if intent == "execute" and (request.return_media_ids or any(map(_is_named, attachments))):
            contents = await self.files.remember(
                attachments, resolved, items, owner, self.key, identity_of, all_of_them=request.return_media_ids
            )
            are_written = self.files.publish(attachments, owner, identity_of)
        watch.lap("digest")
        return ParsedRequest(
            items,
            media,
            options,
            _ChatPrompt(
                items, partial(tokenize, conversation), renderer, self.apply, name, light, are_written
            ).assemble,
            name,
            spend_feature,
            read_file,
            tuple([content for content, _ in contents]),
            {content: one for content, one in contents if one is not None},
            {item.digest: place for item, place in reversed([*zip(items, places, strict=True)])},
        )

    def read_completion(
        self, prompt: str | Sequence[int], *, add_special_tokens: bool = True, room: TextRoom = unlimited_room
    ) -> ParsedRequest:
        """Parse a prompt of text or tokens, without items. A text becomes tokens in a `room`."""
        if self.chat_renderer is None:
            raise InvalidRequest("this model does not complete text: it transcribes")
        renderer = self.chat_renderer

        async def assembling(_: Sequence[Layout]) -> Prompt:
            if not isinstance(prompt, str):
                return _assemble_text(renderer, prompt)
            encode = partial(self.encode, prompt, add_special_tokens=add_special_tokens, room=room)
            return _assemble_text(renderer, await run_if_heavy(encode, light=is_cheap(prompt)))

        return ParsedRequest((), {}, {}, assembling)

    def encode(self, text: str, *, add_special_tokens: bool = False, room: TextRoom = unlimited_room) -> list[int]:
        """Return the tokens of a text, made in a `room`."""
        with room(len(text)):
            return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def read_transcription(self, media: Media, decoder_text: str, tenant: Tenant | None = None) -> ParsedRequest:
        """Parse a clip for an encoder-decoder model, and the beginning of the decoder's prompt."""
        (item,), distinct = self._identify([media], partial(self._identity, options={}, tenant=tenant))

        async def assembling(layouts: Sequence[Layout]) -> Prompt:
            (layout,) = layouts
            return expand_encoder(self.tokenizer.encode(decoder_text), item=item, layout=layout)

        return ParsedRequest((item,), distinct, {}, assembling, _name(tenant))

    async def render(self, request: ParsedRequest, holding: FeatureInfoOf = nothing_known) -> Rendered:
        """Make the prompt of a parsed request, and the features of its items for which `holding` returns nothing."""
        watch = Stopwatch(self.timings)
        if not request.items:
            prompt = await request.assemble(())
            watch.lap("render")
            return Rendered(prompt, {})
        counts = Counter(request.items)
        layouts: dict[Digest, Layout] = {}
        features: dict[Digest, Feature] = {}

        tokens = 0

        def charge(item: Item, layout: Layout) -> None:
            nonlocal tokens
            tokens += counts[item] * len(layout)
            self._check_tokens(tokens)

        def find(item: Item) -> bool:
            if (info := holding(item.digest)) is not None:
                layouts[item.digest] = info.layout
                charge(item, info.layout)
            elif (feature := self.cache.get(item.digest)) is not None:
                features[item.digest] = feature
                charge(item, feature.layout)
            else:
                return False
            self.lookups(item.modality, counts[item], True)
            return True

        async def find_or_make(item: Item) -> None:
            if not find(item):  # it may have become known while this one waited
                self.lookups(item.modality, counts[item], False)
                features[item.digest] = made = await self._make(request, item.digest)
                charge(item, made.layout)

        unknown = [item for item in counts if not find(item)]
        watch.lap("layout")
        if unknown:
            await concurrently(unknown, find_or_make)
            watch.lap("process")
        layouts.update((digest, feature.layout) for digest, feature in features.items())
        for digest, layout in layouts.items():
            self.layouts.put(digest, layout)
        prompt = await request.assemble([layouts[item.digest] for item in request.items])
        watch.lap("render")
        return Rendered(prompt, features, partial(self._make, request.assembled()))

    def _check_tokens(self, tokens: int) -> None:
        """Refuse a request whose items alone are too long. An encoder-decoder prompt does not contain them."""
        if self.max_tokens is not None and self.chat_renderer is not None and tokens >= self.max_tokens:
            raise PromptTooLong(
                f"the items alone have {tokens:,} tokens or more; the model takes {self.max_tokens:,} with the answer: "
                "send fewer or smaller ones"
            )

    async def _make(self, request: ParsedRequest, digest: Digest) -> Feature:
        """Return the feature of an item, cached or processed. That is decided without an await."""
        if (feature := self.cache.get(digest)) is not None:
            return feature

        async def work() -> Feature:
            try:
                media = await request.media_of(digest)
            except RequestError as error:
                raise _UnreadError(error) from None
            made = await self.process(
                media,
                item_options(media.modality, request.options),
                group=request,
                tenant=request.tenant,
                spend=request.spend,
            )
            return self.cache.put(digest, made, tenant=request.tenant)

        with request.naming(digest):
            try:
                return await self.flight.do(digest, work)
            except _UnreadError as unread:
                raise unread.error from None

    def _identify(
        self, media: Sequence[Resolved], identity_of: IdentityOf
    ) -> tuple[tuple[Item, ...], Mapping[Digest, Resolved]]:
        """Return the items in order, and the media of each distinct item."""
        items: list[Item] = []
        distinct: dict[Digest, Resolved] = {}
        for one in media:
            if isinstance(one, MediaFile | DocumentPage):
                assert one.digest is not None, "files without a digest have been read"
                items.append(Item(one.modality, one.digest))
                distinct.setdefault(one.digest, one)
                continue
            item = Item(one.modality, identity_of(one.modality).digest(one.data))
            items.append(item)
            if not isinstance(distinct.get(item.digest), Media):  # rather than a file that has to be read
                distinct[item.digest] = one
        return tuple(items), distinct

    def _identity(self, modality: Modality, options: Mapping[str, object], tenant: Tenant | None) -> Identity:
        try:
            return Identity(
                key=self.key,
                modality=modality,
                fingerprint=self.fingerprint,
                options=item_options(modality, options),
                tenant=tenant,
            )
        except ValueError:  # from json and str.encode, which refuse no other value
            raise InvalidRequest("mm_processor_kwargs and cache_salt must be valid JSON and valid Unicode") from None


@dataclass(frozen=True, slots=True)
class _ChatPrompt:
    """The prompt of a chat, before the layouts of its items are known. It has no media."""

    items: Sequence[Item]
    tokenize: Callable[[], list[int]]
    renderer: ChatRenderer
    apply: AssemblePrompt | None
    tenant: str
    is_light: bool
    """If False, a thread makes its tokens."""

    are_written: Wait | None = None
    """Waits until its names are in the store, which goes on while its items are processed."""

    async def assemble(self, layouts: Sequence[Layout]) -> Prompt:
        """Make the prompt, with the layout of each item."""
        renderer, items = self.renderer, self.items
        if self.are_written is not None:
            await self.are_written()
        token_ids = await run_if_heavy(self.tokenize, light=self.is_light and renderer.tokenizer.is_local)
        if not items or renderer.splices(items):
            return expand(token_ids, placeholder_ids=renderer.placeholder_ids(), items=items, layouts=layouts)
        if self.apply is None:
            raise ServiceError("this model's processor has to assemble the prompt, and it is not there")
        pairs = [(item.modality, layout) for item, layout in zip(items, layouts, strict=True)]
        assembly = await self.apply(token_ids, pairs, tenant=self.tenant)
        try:
            return assembly.prompt(items, layouts)
        except ValueError as error:
            raise ServiceError(f"the assembled prompt cannot be read: {error}") from error


class _UnreadError(Exception):
    """A request cannot read the file that it names. Others that wait for the same feature may have its bytes."""

    def __init__(self, error: RequestError) -> None:
        super().__init__(str(error))
        self.error = error


def has_parts(messages: object) -> bool:
    """Return whether a message may have media: its content is more than a text."""
    for message in messages if isinstance(messages, list) else ():
        if not isinstance(message, dict) or not isinstance(message.get("content"), str):
            return True
    return False


def _is_named(attachment: Attachment) -> bool:
    return attachment.name is not None or isinstance(attachment.source, MediaFile | MediaName)


def _name(tenant: Tenant | None) -> str:
    return "" if tenant is None else tenant.name


def check_chars(count: int, limit: int) -> None:
    """Refuse a text that is longer than any prompt can be, before it is tokenised (S18)."""
    if count > limit:
        raise PromptTooLong(f"the prompt has {count:,} characters; the model takes {limit:,} at the very most")


def _assemble_text(renderer: ChatRenderer, token_ids: Sequence[int]) -> Prompt:
    """Return a prompt without items. A placeholder token in it is refused, because it has no item (S14)."""
    if token_ids and max(token_ids) >= (size := renderer.tokenizer.vocab_size):
        raise InvalidRequest.of("prompt", f"there is no token {max(token_ids):,}, the tokenizer has {size:,}")
    placeholders = renderer.placeholder_ids()
    for position, token in enumerate(token_ids):
        if (modality := placeholders.get(token)) is not None:
            raise InvalidRequest.of(
                "prompt",
                f"token {position} is the placeholder of {modality} items, and there are none: leave "
                f"{renderer.placeholders[modality]} out, or send a chat",
            )
    return expand(token_ids, placeholder_ids={}, items=(), layouts=())
