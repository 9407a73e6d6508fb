"""A request before and after rendering, and the types of the functions that make its features."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Protocol

from semel.core import Assembly, Digest, Feature, FeatureInfo, Item, Layout, Media, Modality, Prompt
from semel.errors import RequestError, ServiceError
from semel.media import Pieces
from semel.render.media.source import DocumentPage, MediaFile

__all__ = [
    "AssemblePrompt",
    "ComputeLayout",
    "Cut",
    "FeatureInfoOf",
    "MakeFeature",
    "ParsedRequest",
    "ProcessItem",
    "ReadFile",
    "Rendered",
    "nothing_known",
]

MakeFeature = Callable[[Digest], Awaitable[Feature]]
"""Returns the feature of one item of a request: from the cache, or processed."""

FeatureInfoOf = Callable[[Digest], FeatureInfo | None]
"""Returns what the request's worker has of an item, if it has it. A call changes nothing."""


ReadFile = Callable[[MediaFile], Awaitable[Media]]
"""Reads a file, and charges its bytes to the request."""


class ProcessItem(Protocol):
    """Makes an item's feature from its media and the request's `mm_processor_kwargs`, in any process."""

    def __call__(
        self,
        media: Media,
        options: Mapping[str, object],
        /,
        *,
        group: Hashable | None = None,
        tenant: str = "",
        spend: Callable[[int], None] | None = None,
    ) -> Awaitable[Feature]:
        """The feature. `group` identifies the request, so that the requests of a `tenant` share its turns fairly.

        Tenants share the processes fairly. What an item of one tenant does to its process counts against no other.
        `spend` is called with the size of a feature that has no room in shared memory, before it is stored, and raises
        if it is not allowed.
        """
        ...


class ComputeLayout(Protocol):
    """Computes the layout that an item's feature would have, in any process, without making the feature."""

    def __call__(
        self, media: Media, options: Mapping[str, object], /, *, group: Hashable | None = None, tenant: str = ""
    ) -> Awaitable[Layout]:
        """Return the layout; `group` and `tenant` are as for `ProcessItem`."""
        ...


class AssemblePrompt(Protocol):
    """Puts items into a prompt by the rules of the model's processor, in any process."""

    def __call__(
        self, token_ids: Sequence[int], items: Sequence[tuple[Modality, Layout]], /, *, tenant: str = ""
    ) -> Awaitable[Assembly]:
        """Return the prompt without its items, and their places; `tenant` is as for `ProcessItem`."""
        ...


class Cut(Protocol):
    """Cuts a clip into pieces that fit the encoder, in any process."""

    def __call__(self, media: Media, spend: Callable[[int], None], /, *, tenant: str = "") -> Awaitable[Pieces]:
        """The pieces. `spend` is called with their size before they are stored, and raises if they are not allowed.

        `tenant` is as for `ProcessItem`.
        """
        ...


async def _is_assembled(_: Sequence[Layout]) -> Prompt:
    raise ServiceError("the prompt of this request has been assembled already")


async def _cannot_make(digest: Digest) -> Feature:
    raise ServiceError(f"nothing is known of {digest!r} but its feature")


@dataclass(frozen=True, slots=True, eq=False)
class ParsedRequest:
    """A parsed request: its items have digests, but no features or layouts yet."""

    items: tuple[Item, ...]
    media: Mapping[Digest, Media | MediaFile | DocumentPage]
    """The media of each distinct item. A file is read only if nobody has its feature."""

    options: Mapping[str, object]
    assemble: Callable[[Sequence[Layout]], Awaitable[Prompt]] = field(repr=False)
    """Makes the prompt from the layouts of all items."""

    tenant: str = ""
    """The name of the tenant whose request it is."""

    spend: Callable[[int], None] | None = field(default=None, repr=False)
    """Charges features that have no room in shared memory."""

    read_file: ReadFile | None = field(default=None, repr=False)
    contents: tuple[Digest, ...] = ()
    """The ids of its contents as files, of all items if they are wanted."""

    sent: Mapping[Digest, Media] = field(default_factory=dict, repr=False)
    """Those of the contents whose bytes came with it, or were read for it."""

    places: Mapping[Digest, str] = field(default_factory=dict)
    """The part of the request that names each item first, for errors."""

    documents: dict[Digest, asyncio.Future[Media]] = field(default_factory=dict, repr=False)
    """The documents that were read for their pages."""

    @contextmanager
    def naming(self, digest: Digest) -> Iterator[None]:
        """Faults of an item that are raised inside name its part of the request."""
        try:
            yield
        except RequestError as error:
            if error.param is None and (place := self.places.get(digest)):
                raise error.at(place) from None
            raise

    async def media_of(self, digest: Digest) -> Media:
        """Return the media of an item."""
        media = self.media[digest]
        if isinstance(media, Media):
            return media
        if isinstance(media, DocumentPage):
            return replace(await self._document_of(media), page=media.page)
        assert self.read_file is not None, "a request with files can read them"
        return await self.read_file(media)

    async def _document_of(self, page: DocumentPage) -> Media:
        """Return a page's document. A file is read, and charged, once for all pages that are made at a time."""
        if isinstance(page.document, Media):
            return page.document
        assert self.read_file is not None, "a request with files can read them"
        if (reading := self.documents.get(page.content)) is None:
            reading = self.documents[page.content] = asyncio.ensure_future(self.read_file(page.document))
            reading.add_done_callback(lambda done: done.cancelled() or done.exception())  # seen, if nobody waits
        return await asyncio.shield(reading)  # the other pages may be for others too

    def assembled(self) -> ParsedRequest:
        """The parts that are still needed after the prompt is made: each media once, to make its feature again."""
        return replace(self, assemble=_is_assembled, sent={}, documents={})


@dataclass(frozen=True, slots=True)
class Rendered:
    """A prompt, and the features of its items by digest, without those that the worker has."""

    prompt: Prompt
    features: Mapping[Digest, Feature]
    make: MakeFeature = _cannot_make
    """Makes a feature that the worker turns out not to have."""


def nothing_known(_: Digest) -> FeatureInfo | None:
    """Return a `FeatureInfoOf` for callers without a worker: no feature is known."""
    return None
