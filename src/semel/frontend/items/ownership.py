"""Ownership of digests: the tag that a response returns with a digest, and that a request must send with it.

A digest is made for one tenant but does not name it, so a client that learned another tenant's digest could use it.
Therefore the render routes return a tag with each digest: a hash over the tenant and the digest, keyed with the fleet
key. With it every frontend of the fleet recognises a tenant's digests, without storing any (threats S12).

Tensors that a client sends are different: nothing that the client claims about them is trusted. Their identity is the
digest of their own bytes, made for the tenant. Only tensors that the fleet made itself keep the digest of their media.
A seal proves this: it is keyed too, over that digest, the tenant and every byte. Pure.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping
from hmac import compare_digest
from typing import Final

import msgspec

from semel.core import Digest, Feature, Key, Tenant, Tensor, hash_parts
from semel.frontend.api.tokens.render_response import RenderedFeatures, RenderedPrompt

__all__ = [
    "SEALS",
    "TAGS",
    "feature_digest",
    "features_with_tags",
    "has_tag",
    "is_sealed",
    "tag_of",
    "with_seals",
    "with_tags",
]

TAGS: Final = "mm_tags"
"""The key of the tags in a rendered prompt's features, parallel to `mm_hashes`."""

SEALS: Final = "mm_seals"
"""The key of the seals, which are present if the tensors are."""

_DOMAIN: Final = b"semel.tag.1"
_SEAL_DOMAIN: Final = b"semel.seal.1"
_FEATURE_DOMAIN: Final = b"semel.feature.1"
_TAG_BYTES: Final = 16


def tag_of(digest: Digest, tenant: Tenant, key: Key) -> str:
    """The tag that proves that a digest belongs to this tenant."""
    return hash_parts((_DOMAIN, *tenant.parts, digest), key).hexdigest(length=_TAG_BYTES)


def has_tag(digest: Digest, tag: str, tenant: Tenant, key: Key) -> bool:
    """Return whether `tag` proves that a digest belongs to this tenant."""
    return _equal(tag, tag_of(digest, tenant, key))


def feature_digest(feature: Feature, tenant: Tenant, key: Key) -> Digest:
    """A feature's identity for a tenant: a digest of its tensors, with their names, its layout and its origin."""
    mask = feature.layout.mask
    parts: list[bytes | memoryview] = [_FEATURE_DOMAIN, *tenant.parts, feature.modality.encode()]
    parts += [array("q", feature.layout.token_ids).tobytes(), b"" if mask is None else bytes(mask.bits)]
    for name, tensor in sorted(feature.tensors.items()):
        parts += [name.encode(), tensor.dtype.encode(), array("q", tensor.shape).tobytes(), _bytes(tensor)]
    if feature.origin is not None:
        parts.append(json.dumps(msgspec.to_builtins(feature.origin), sort_keys=True).encode())
    return Digest(hash_parts(parts, key).digest())


def is_sealed(digest: Digest, made: Digest, seal: str, key: Key) -> bool:
    """Return whether the seal proves that the fleet made the feature for `digest`; `made` is its own digest."""
    return _equal(seal, _seal_of(digest, made, key))


def with_tags(body: RenderedPrompt, tenant: Tenant, key: Key) -> RenderedPrompt:
    """A rendered prompt with a tag for each of its digests."""
    features = body["features"]
    return body if features is None else {**body, "features": features_with_tags(features, tenant, key)}


def features_with_tags(features: RenderedFeatures, tenant: Tenant, key: Key) -> RenderedFeatures:
    """The items of a rendered prompt with a tag for each of their digests."""
    tags = {
        kind: [tag_of(Digest(bytes.fromhex(one)), tenant, key) for one in hashes]
        for kind, hashes in features["mm_hashes"].items()
    }
    return {**features, TAGS: tags}


def with_seals(
    body: RenderedPrompt, features: Mapping[Digest, Feature], tenant: Tenant, key: Key
) -> Mapping[str, object]:
    """A rendered prompt with tags, and with a seal for each of its features. Hashes all their bytes."""
    if (rendered := with_tags(body, tenant, key)["features"]) is None:
        return body
    made = {one.hex(): _seal_of(one, feature_digest(feature, tenant, key), key) for one, feature in features.items()}
    seals = {kind: [made[one] for one in hashes] for kind, hashes in rendered["mm_hashes"].items()}
    return {**body, "features": {**rendered, SEALS: seals}}


def _seal_of(digest: Digest, made: Digest, key: Key) -> str:
    return hash_parts((_SEAL_DOMAIN, digest, made), key).hexdigest(length=_TAG_BYTES)


def _bytes(tensor: Tensor) -> bytes | memoryview:
    return tensor.data.cast("B") if tensor.nbytes else b""


def _equal(claimed: str, true: str) -> bool:
    return compare_digest(claimed.encode(errors="surrogatepass"), true.encode())
