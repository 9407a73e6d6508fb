"""Whose a digest is: a tag that goes with it when it is shown, and that has to come back with it.

A digest is made for one tenant, but it does not tell for whom: whoever has learnt somebody else's could name it. So the
routes that render show a tag beside each, keyed as digests are, over the tenant and the digest. Every frontend of the
fleet can so tell a tenant's digests from all others, and keeps none for it (threats S12). Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hmac import compare_digest
from typing import Any, Final

from blake3 import blake3

from semel.core import Digest, Key, Tenant, frame

__all__ = ["TAGS", "is_of", "tag_of", "tagged"]

TAGS: Final = "mm_tags"
"""The name of the tags in a rendered prompt's features, parallel to `mm_hashes`."""

_DOMAIN: Final = b"semel.tag.1"
_TAG_BYTES: Final = 16


def tag_of(digest: Digest, tenant: Tenant, key: Key) -> str:
    """The tag that says that a digest is this tenant's."""
    # A missing salt and an empty one are different tenants, as they are in a digest.
    salt = b"" if tenant.salt is None else b"\x01" + tenant.salt.encode(errors="surrogatepass")
    hasher = blake3(key=key.secret)
    for piece in frame((_DOMAIN, tenant.name.encode(), salt, digest)):
        hasher.update(piece)
    return hasher.hexdigest(length=_TAG_BYTES)


def is_of(digest: Digest, tag: str, tenant: Tenant, key: Key) -> bool:
    """Whether the tag says so."""
    return compare_digest(tag.encode(errors="surrogatepass"), tag_of(digest, tenant, key).encode())


def tagged(body: Mapping[str, Any], tenant: Tenant, key: Key) -> Mapping[str, Any]:
    """A rendered prompt (`renderings`) with a tag for each of its digests."""
    if (features := body["features"]) is None:
        return body
    shown: Mapping[str, Sequence[str]] = features["mm_hashes"]
    tags = {kind: [tag_of(Digest(bytes.fromhex(one)), tenant, key) for one in hashes] for kind, hashes in shown.items()}
    return {**body, "features": {**features, TAGS: tags}}
