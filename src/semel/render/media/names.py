"""A frontend's memory of the media that tenants have sent: contents, their names, digests of items, counts of pages.

A content is known by the id that it would have as a file. A name (`uuid`) belongs to a tenant, with its salt, and to
the content that it was sent with (threats S11, S12). A name that was sent with two contents is ambiguous: alone it
means neither. Everything is bounded for each tenant by itself; what is forgotten has to be sent again. Pure.
"""

from __future__ import annotations

from typing import Final

from semel.core import Digest, LruMap, Tenant, hash_parts
from semel.errors import AmbiguousMedia
from semel.media.signature import FileKind
from semel.store.bindings import AMBIGUOUS

__all__ = ["MAX_NAME_CHARS", "MediaNames", "name_key"]

MAX_NAME_CHARS: Final = 256
_MAX_ENTRIES: Final = 16_384


class _Memory:
    """The memory of one tenant's media."""

    __slots__ = ("confirmed", "contents", "digests", "names", "pages")

    def __init__(self, max_entries: int) -> None:
        self.contents: LruMap[Digest, FileKind] = LruMap(max_entries)
        self.names: LruMap[bytes, Digest] = LruMap(max_entries)
        self.digests: LruMap[Digest, Digest] = LruMap(max_entries)
        self.pages: LruMap[Digest, int] = LruMap(max_entries)
        self.confirmed: LruMap[bytes, tuple[Digest, float]] = LruMap(max_entries)
        """By name: what a store has bound it to as well, and when that was seen."""


class MediaNames:
    """The memory of each tenant's media; the operator has named the tenants. It belongs to one event loop."""

    def __init__(self, max_entries: int = _MAX_ENTRIES) -> None:
        self._max_entries = max_entries
        self._memories: dict[str, _Memory] = {}

    def add_content(self, tenant: Tenant, content: Digest, modality: FileKind) -> None:
        """Remember a content that a tenant has sent."""
        self._memory(tenant).contents.put(content, modality)

    def modality(self, tenant: Tenant, content: Digest) -> FileKind | None:
        """Return what a content was sent as; None if the tenant has not sent it, or it is forgotten."""
        return self._memory(tenant).contents.get(content)

    def bind(self, tenant: Tenant, name: str, content: Digest) -> None:
        """Bind a name to a content that a tenant has sent."""
        names, key = self._memory(tenant).names, name_key(tenant, name)
        bound = names.get(key)
        names.put(key, content if bound in (None, content) else AMBIGUOUS)

    def content(self, tenant: Tenant, name: str, where: str) -> Digest | None:
        """Return the content that a tenant has sent under a name; None if it has sent none, or it is forgotten."""
        content = self.bound(tenant, name)
        if content == AMBIGUOUS:
            raise AmbiguousMedia.of(where, "its uuid was sent with two contents: send the media itself")
        return content

    def bound(self, tenant: Tenant, name: str) -> Digest | None:
        """Return the content that a name is bound to, which is `AMBIGUOUS` for one that means none."""
        return self._memory(tenant).names.get(name_key(tenant, name))

    def confirm(self, tenant: Tenant, name: str, content: Digest, now_s: float) -> None:
        """Remember that a store has bound a name to a content."""
        self._memory(tenant).confirmed.put(name_key(tenant, name), (content, now_s))

    def is_confirmed(self, tenant: Tenant, name: str, since_s: float) -> bool:
        """Return whether a store was seen to have bound a name to what it is bound to here."""
        memory, key = self._memory(tenant), name_key(tenant, name)
        content, at_s = memory.confirmed.get(key) or (None, 0.0)
        return content is not None and at_s >= since_s and content == memory.names.get(key)

    def remember_digest(self, tenant: Tenant, reference: Digest, digest: Digest) -> None:
        """Remember the item of a content, under a processor and options that the reference covers too."""
        self._memory(tenant).digests.put(reference, digest)

    def digest(self, tenant: Tenant, reference: Digest) -> Digest | None:
        """Return the item's digest, if it is known."""
        return self._memory(tenant).digests.get(reference)

    def remember_pages(self, tenant: Tenant, reference: Digest, pages: int) -> None:
        """Remember the number of pages of a document, under a reference as for `remember_digest`."""
        self._memory(tenant).pages.put(reference, pages)

    def pages(self, tenant: Tenant, reference: Digest) -> int | None:
        """Return a document's number of pages, if it is known. A call changes nothing."""
        return self._memory(tenant).pages.peek(reference)

    def _memory(self, tenant: Tenant) -> _Memory:
        if (memory := self._memories.get(tenant.name)) is None:
            memory = self._memories[tenant.name] = _Memory(self._max_entries)
        return memory


def name_key(tenant: Tenant, name: str) -> bytes:
    """32 bytes for a name and the tenant's salt, however long they are; a missing salt is not an empty one."""
    salt = b"" if tenant.salt is None else b"\x01" + tenant.salt.encode(errors="surrogatepass")
    return hash_parts((salt, name.encode(errors="surrogatepass"))).digest()
