"""Documents of a chat: each becomes its pages, which are images of the prompt from then on.

A page is known by its document's content, its number, its resolution and PDFium's version. So the next question about a
document opens nothing: the number of its pages is remembered, for its tenant and salt (threats S12), and its pages are
found by their digests. A document that was only named is read once a page is missing.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final, Protocol, TypeVar

from blake3 import blake3

from semel.aio import concurrently, run_if_large
from semel.core import Digest, Key, Media, Modality, Page, Tenant
from semel.core.digest import Identity, hash_parts
from semel.errors import InvalidRequest, MediaTooLarge, RequestError
from semel.media import DocumentLimits, pdfium_version
from semel.render.chat.messages import Attachment, Conversation, Message, Part
from semel.render.media.names import MediaNames
from semel.render.media.parsed_request import ReadFile
from semel.render.media.source import Document, DocumentPage, MediaFile
from semel.store.names import file_id

__all__ = ["CountPages", "Documents", "expand_documents"]

_PAGE: Final = b"semel.page.1"
_COUNT: Final = b"semel.pages.1"
_COUNTS_AT_ONCE: Final = 8

_T = TypeVar("_T")


class CountPages(Protocol):
    """Counts the pages of a document, in any process."""

    async def __call__(self, document: Media, /, *, group: Hashable | None = None, tenant: str = "") -> int:
        """Return their number; `group` and `tenant` are as for `ProcessItem`."""
        ...


@dataclass(frozen=True, slots=True)
class Documents:
    """The documents that a frontend takes."""

    count: CountPages | None = None
    """If None, no document is taken."""

    limits: DocumentLimits = field(default_factory=DocumentLimits)

    async def open(
        self,
        sources: Sequence[_T],
        tenant: Tenant,
        key: Key,
        identity_of: Callable[[Modality], Identity],
        read: ReadFile,
        names: MediaNames,
        *,
        remembers: bool,
    ) -> list[list[_T | DocumentPage]]:
        """Return each source, or the pages of the document that it is. `remembers`: whether counts are remembered."""
        opened: dict[str, _Opened] = {}
        sent: dict[Digest, Media] = {}
        counted: dict[Digest, tuple[Media | MediaFile, int]] = {}
        counting: defaultdict[Digest, asyncio.Lock] = defaultdict(asyncio.Lock)
        identity, group = identity_of("image"), object()

        async def count(document: Media | MediaFile, content: Digest) -> tuple[Media | MediaFile, int]:
            reference = identity.digest(_COUNT + content)
            if (pages := names.pages(tenant, reference)) is None:
                document = await read(document) if isinstance(document, MediaFile) else document
                pages = await self._count(document, group, tenant)
            if remembers:
                names.remember_pages(tenant, reference, pages)
            return document, pages

        async def open_one(source: Document) -> None:
            try:
                document, content = await self._identify(source, tenant, key)
                if isinstance(document, Media):  # one that is there twice is held, and charged, once
                    document = sent.setdefault(content, document)
                async with counting[content]:  # and read and counted once
                    if content not in counted:
                        counted[content] = await count(document, content)
                    of_all, pages = counted[content]
                document = document if isinstance(document, Media) else of_all
                opened[source.where] = _Opened(document, content, *self._choose(source, pages))
            except RequestError as error:
                raise error.at(source.where) from None

        documents = [source for source in sources if isinstance(source, Document)]
        await concurrently(documents, open_one, at_once=_COUNTS_AT_ONCE)
        pages = 0
        for source in documents:
            if (pages := pages + len(opened[source.where].numbers)) > (limit := self.limits.max_pages):
                raise MediaTooLarge.of(
                    source.where,
                    f"the documents have {pages:,} pages or more; the limit of a request is {limit:,} "
                    '(--max-document-pages): choose pages with "page_range"',
                )
        return [
            [*opened[source.where].pages(source, identity)] if isinstance(source, Document) else [source]
            for source in sources
        ]

    async def _identify(self, source: Document, tenant: Tenant, key: Key) -> tuple[Media | MediaFile, Digest]:
        """Return a document, and the id that it has as a file."""
        document = source.document
        if isinstance(document, MediaFile):
            return document, document.id
        assert isinstance(document, Media), "URLs have been fetched"
        hashed = await run_if_large(partial(blake3, document.data), document.nbytes)
        return document, file_id(hashed.digest(), tenant.name, key)

    async def _count(self, document: Media, group: Hashable, tenant: Tenant) -> int:
        if self.count is None:
            raise InvalidRequest("documents are not taken here: send their pages as images")
        if document.nbytes > (limit := self.limits.max_bytes):
            raise MediaTooLarge(
                f"the document has {document.nbytes:,} bytes; the limit is {limit:,} (--max-document-bytes)"
            )
        return await self.count(document, group=group, tenant=tenant.name)

    def _choose(self, source: Document, pages: int) -> tuple[range, int]:
        """Return the pages that are wanted of so many, and their resolution."""
        limit = self.limits.max_dpi
        dpi = source.dpi or min(self.limits.default_dpi, limit)
        if dpi > limit:
            raise MediaTooLarge(f"its dpi is {dpi:,}; the limit is {limit} (--max-document-dpi)")
        if source.first_page > pages:
            raise InvalidRequest(f"its page_range begins with page {source.first_page:,} of {pages:,}")
        last = pages if source.last_page is None else min(source.last_page, pages)
        return range(source.first_page, last + 1), dpi


@dataclass(frozen=True, slots=True)
class _Opened:
    """A document, and the pages of it that are wanted."""

    document: Media | MediaFile
    content: Digest
    numbers: range
    dpi: int

    def pages(self, source: Document, identity: Identity) -> Iterator[DocumentPage]:
        version = pdfium_version().encode()
        for number in self.numbers:
            parts = (_PAGE, self.content, b"%d" % number, b"%d" % self.dpi, version)
            digest = identity.digest(_PAGE + hash_parts(parts).digest())
            nbytes = self.document.nbytes if number == self.numbers.start else 0
            yield DocumentPage(self.document, self.content, Page(number, self.dpi), digest, source.where, nbytes)


def expand_documents(conversation: Conversation, opened: Sequence[Sequence[object]]) -> Conversation:
    """Return the conversation with pages in the places of documents; `opened` is what `Documents.open` returned."""
    left = iter(opened)

    def parts_of(part: Part) -> Iterator[Part]:
        pages = next(left) if isinstance(part, Attachment) else ()
        if not isinstance(part, Attachment) or not isinstance(part.source, Document):
            yield part
            return
        yield from (replace(part, source=page, name=None) for page in pages if isinstance(page, DocumentPage))

    return Conversation(
        tuple(
            Message(message.role, tuple(one for part in message.parts for one in parts_of(part)), message.fields)
            for message in conversation.messages
        )
    )
