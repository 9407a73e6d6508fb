"""Media that a chat names instead of sending it: files of a media store, and what the tenant has sent before.

A content that has been an item before is one without its bytes: its digest is remembered, under the same processor,
options and tenant. Its bytes are read, from the store, only where no worker and no cache has its feature.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, Self

from blake3 import blake3

from semel.aio import concurrently, run_if_large
from semel.core import Digest, Identity, Item, Key, Media, Modality, Tenant
from semel.errors import InvalidRequest, UnknownMedia
from semel.media.signature import FileKind
from semel.render.chat.messages import Attachment
from semel.render.media.names import MediaNames
from semel.render.media.parsed_request import ReadFile
from semel.render.media.part_source import NO_FILES, Files, named_files
from semel.render.media.shared_names import SharedNames
from semel.render.media.source import DocumentPage, MediaFile, MediaName
from semel.render.media.source_fetch import Spend
from semel.store import Pin
from semel.store.bindings import Binding, BucketBindings
from semel.store.names import file_id, parse_id
from semel.store.store import MediaStore
from semel.telemetry.meter import Sample

__all__ = ["FileSources", "IdentityOf", "Resolved", "Wait"]

_MAX_FILES: Final = 4_096
_READS_AT_ONCE: Final = 8
_NAMES_AT_ONCE: Final = 16
"""As many as a tenant has operations of the store at once (threats S30)."""

_REFERENCE: Final = b"semel.reference.1"

Wait = Callable[[], Coroutine[Any, Any, None]]
"""Waits until names are in the store, but not for long."""

IdentityOf = Callable[[Modality], Identity]
"""Computes the digests of a request's items of a modality."""

Resolved = Media | MediaFile | DocumentPage
"""Media, or what has a known digest: a file, or a page of a document."""


@dataclass(frozen=True, slots=True)
class FileSources:
    """The media that chats name. Without a store there is only what a tenant has sent before."""

    store: MediaStore | None = None
    names: MediaNames = field(default_factory=MediaNames, repr=False)
    shared: SharedNames | None = field(default=None, repr=False)
    """These names, shared with other frontends."""

    @classmethod
    def of(cls, store: MediaStore | None, bindings: BucketBindings | None) -> Self:
        """Create the sources of a frontend, whose names others know too if there are `bindings`."""
        names = MediaNames()
        return cls(store, names, None if bindings is None else SharedNames(bindings, names))

    def samples(self) -> Iterator[Sample]:
        """Return how names were shared."""
        return iter(()) if self.shared is None else self.shared.samples()

    async def locate(self, messages: Sequence[object], tenant: Tenant) -> Files:
        """Return the files that messages name, without those that the tenant does not have."""
        if not (ids := named_files(messages)):
            return NO_FILES
        if len(ids) > _MAX_FILES:
            raise InvalidRequest(f"the messages name {len(ids):,} files; the limit is {_MAX_FILES:,}")
        found: dict[str, tuple[Digest, FileKind | None]] = {}

        def is_named(text: str, digest: Digest) -> bool:
            if (modality := self.names.modality(tenant, digest)) is not None:
                found[text] = digest, modality
            return modality is not None

        async def look(entry: tuple[str, Digest]) -> None:
            text, digest = entry
            if self.store is not None and (file := await self.store.locate(tenant.name, digest)) is not None:
                found[text] = digest, file.modality

        # What was sent before needs no task, which would take more than all else here.
        parsed = ((text, parse_id(text)) for text in ids)
        unnamed = [(text, digest) for text, digest in parsed if digest is None or not is_named(text, digest)]
        # The first unknown one ends the request, whose error names it: it costs one operation, not eight (threats S30).
        start, at_once = 0, 1
        while start < len(unnamed):
            some = unnamed[start : start + at_once]
            await concurrently([(text, digest) for text, digest in some if digest is not None], look, at_once=at_once)
            if any(text not in found for text, _ in some):
                break
            start, at_once = start + at_once, min(2 * at_once, _READS_AT_ONCE)
        return found

    async def resolve(
        self,
        sources: Sequence[Resolved | MediaName],
        tenant: Tenant,
        identity_of: IdentityOf,
        read: ReadFile,
        *,
        lazily: bool,
    ) -> Sequence[Resolved]:
        """Return the media of all sources; of files whose digests are known, only these, if `lazily`.

        A file that is named twice is read once. Names that are not known here are looked up in the store, if `lazily`.
        """
        if lazily:
            await self._look_up((one for one in sources if isinstance(one, MediaName)), tenant, identity_of)
        unread: dict[tuple[Modality, Digest], MediaFile] = {}
        known: list[Resolved] = []
        for source in sources:
            one = self._file_of(source, tenant) if isinstance(source, MediaName) else source
            if isinstance(one, MediaFile):
                reference = _reference(identity_of, one.modality, one.id)
                if lazily and (digest := self.names.digest(tenant, reference)) is not None:
                    one = replace(one, digest=digest)
                else:
                    unread.setdefault((one.modality, one.id), one)
            known.append(one)
        media: dict[tuple[Modality, Digest], Media] = {}

        async def get(file: MediaFile) -> None:
            media[file.modality, file.id] = await read(file)

        await concurrently(unread.values(), get, at_once=_READS_AT_ONCE)
        return [
            media[one.modality, one.id] if isinstance(one, MediaFile) and one.digest is None else one for one in known
        ]

    async def remember(
        self,
        attachments: Sequence[Attachment],
        media: Sequence[Resolved],
        items: Sequence[Item],
        tenant: Tenant,
        key: Key,
        identity_of: IdentityOf,
        *,
        all_of_them: bool,
    ) -> list[tuple[Digest, Media | None]]:
        """Remember what was named, and what was sent under a name, or `all_of_them`.

        Returns the contents' ids, each with its bytes if these were sent.
        """
        found: list[tuple[Digest, Media | None]] = []
        named = [self._content_of(attachment, tenant) for attachment in attachments]  # before one is bound anew
        documents: set[str] = set()
        for attachment, content, one, item in zip(attachments, named, media, items, strict=True):
            name = attachment.name
            if isinstance(one, DocumentPage):
                if one.where not in documents:
                    documents.add(one.where)
                    found.append((one.content, one.document if isinstance(one.document, Media) else None))
                    self.names.add_content(tenant, one.content, "document")
                continue
            if content is None:
                if (name is None and not all_of_them) or not isinstance(one, Media):
                    continue
                hashed = await run_if_large(partial(blake3, one.data), one.nbytes)
                content = file_id(hashed.digest(), tenant.name, key)
                self.names.add_content(tenant, content, one.modality)
            if name is not None:
                self.names.bind(tenant, name, content)
            self.names.remember_digest(tenant, _reference(identity_of, item.modality, content), item.digest)
            found.append((content, one if isinstance(one, Media) else None))
        return found

    def publish(self, attachments: Sequence[Attachment], tenant: Tenant, identity_of: IdentityOf) -> Wait | None:
        """Begin to write the names of attachments to the store. Returns a call that waits for it, if there is any."""
        shared = self.shared
        if shared is None:
            return None
        names = {
            one.name: one.source.modality
            for one in attachments
            if one.name is not None and not shared.is_current(tenant, one.name)
        }
        if not names:
            return None
        return shared.write(tenant, len(names), partial(self._sync, shared, tenant, names.items(), identity_of))

    async def read(self, tenant: Tenant, spend: Spend, pin: Pin, file: MediaFile) -> Media:
        """Return the media of a file, whose bytes are spent first, and pinned while the store reads them."""
        found = None if self.store is None else await self.store.read(tenant.name, file.id, spend, pin)
        if found is None:
            raise UnknownMedia.of(file.where, "nobody has the media any more; send it again")
        _, data = found
        return Media(file.modality, await run_if_large(partial(bytes, data), len(data)))

    async def _look_up(self, sources: Iterable[MediaName], tenant: Tenant, identity_of: IdentityOf) -> None:
        """Bring names up to the store, in order, and no further than the first that nobody knows (threats S30)."""
        shared = self.shared
        if shared is None:
            return
        names = {one.name: one.modality for one in sources if not shared.is_current(tenant, one.name)}
        entries = list(names.items())
        for start in range(0, len(entries), _NAMES_AT_ONCE):
            some = entries[start : start + _NAMES_AT_ONCE]
            await self._sync(shared, tenant, some, identity_of)
            if any(self.names.bound(tenant, name) is None for name, _ in some):
                return

    async def _sync(
        self, shared: SharedNames, tenant: Tenant, names: Iterable[tuple[str, Modality]], identity_of: IdentityOf
    ) -> None:
        """Bring names in the store and in memory to the same."""

        async def sync(entry: tuple[str, Modality]) -> None:
            await shared.sync(tenant, entry[0], self._binding(tenant, *entry, identity_of))

        await concurrently(names, sync, at_once=_NAMES_AT_ONCE)

    def _binding(self, tenant: Tenant, name: str, modality: Modality, identity_of: IdentityOf) -> Binding | None:
        """Return what a name is bound to here, with the digest of its item, if it is known."""
        if (content := self.names.bound(tenant, name)) is None:
            return None
        known = self.names.modality(tenant, content)
        modality = modality if known is None or known == "document" else known
        reference = _reference(identity_of, modality, content)
        digest = self.names.digest(tenant, reference)
        return Binding(content, modality) if digest is None else Binding(content, modality, reference, digest)

    def _file_of(self, source: MediaName, tenant: Tenant) -> MediaFile:
        content = self.names.content(tenant, source.name, source.where)
        if content is None or self.names.modality(tenant, content) not in (None, source.modality):
            raise UnknownMedia.of(source.where, f"no {source.modality} was sent with this uuid; send the media itself")
        return MediaFile(source.modality, content, source.where)

    def _content_of(self, attachment: Attachment, tenant: Tenant) -> Digest | None:
        """Return the content that an attachment names, if it does."""
        match attachment.source:
            case MediaFile(id=content):
                return content
            case MediaName() as source:
                return self.names.content(tenant, source.name, source.where)
            case _:
                return None


def _reference(identity_of: IdentityOf, modality: Modality, content: Digest) -> Digest:
    """Return the name of a content in a tenant's memory: it covers all that an item's digest covers."""
    return identity_of(modality).digest(_REFERENCE + content)
