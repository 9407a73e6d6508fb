"""Features that a client sends with its request: parsing, the check against the contract, and their identity.

Nothing that a client claims about a tensor is trusted. A feature is checked against the contract first (threats S9).
Its identity is the digest of its bytes for the tenant. The client's name for it is ignored, unless a seal of the fleet
proves of which media it was made (S11, S12). The worker checks the tensors' values before the engine gets them. No I/O.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from semel.core import Contract, Digest, Feature, Item, Key, Layout, Mask, Tenant, Tensor
from semel.errors import FeatureRejected, InvalidRequest, MediaTooLarge
from semel.frontend.api.tokens.generate_request import Place, RequestItem
from semel.frontend.items.ownership import feature_digest, has_tag, is_sealed
from semel.interchange.safetensors import DIGEST, Entry, Faulty, FeatureEntry
from semel.interchange.vllm_items import read_item
from semel.wire.limits import Limits

__all__ = ["IdentifiedItem", "Owner", "features_of", "identify_items"]

_MAX_BYTES: Final = Limits().max_feature_bytes


@dataclass(frozen=True, slots=True)
class Owner:
    """The tenant and the fleet key with which a request's items are identified."""

    tenant: Tenant
    key: Key


@dataclass(frozen=True, slots=True)
class IdentifiedItem:
    """An item with its digest and its position."""

    item: Item
    place: Place
    feature: Feature | None
    """The tensors that the client sent; None for an item that is only named."""

    is_own: bool
    """True if the item belongs to the tenant. A sent item does; a named item does if its tag is valid."""


def features_of(entries: Sequence[Entry]) -> Mapping[str, Feature]:
    """The features of a file by their names in it. An invalid one refuses the whole file."""
    found: dict[str, Feature] = {}
    for entry in entries:
        if isinstance(entry, Faulty):
            raise InvalidRequest(f"the item {entry.name} of the file cannot be used: {entry.reason}")
        if isinstance(entry, FeatureEntry):
            found[entry.digest.hex()] = entry.feature
    return found


def identify_items(
    items: Sequence[RequestItem], token_ids: Sequence[int], contract: Contract, owner: Owner
) -> list[IdentifiedItem]:
    """Identify all items of a prompt; they must not overlap. Hashes all sent bytes: keep it off the event loop."""
    digests: dict[int, Digest] = {}
    return [_placed(one, token_ids, contract, owner, digests) for one in items]


def _placed(
    one: RequestItem, token_ids: Sequence[int], contract: Contract, owner: Owner, digests: dict[int, Digest]
) -> IdentifiedItem:
    if not one.is_sent:
        digest = Digest(bytes.fromhex(one.name))
        is_own = has_tag(digest, one.tag, owner.tenant, owner.key)
        return IdentifiedItem(Item(one.modality, digest), one.place, None, is_own)
    try:
        feature = one.feature or _unpacked(one, token_ids)
        _check(feature, contract)
    except (InvalidRequest, FeatureRejected) as error:
        raise InvalidRequest.of("features", f"the {one.modality} at {one.place.offset:,}: {error}") from None
    # A feature of a file is one object for all items that use it, so its bytes are hashed once.
    if (made := digests.get(id(one.feature))) is None or one.feature is None:
        digests[id(one.feature)] = made = feature_digest(feature, owner.tenant, owner.key)
    identity = _identity(one, made, owner.key)
    if identity == made and one.modality in contract.needs_seal:
        raise InvalidRequest.of(
            "features",
            f"the {one.modality} at {one.place.offset:,}: tensors for {contract.model} need a seal of this fleet, as "
            "nothing else proves their layout: send the media, or the render route's file as it was",
        )
    return IdentifiedItem(Item(one.modality, identity), one.place, feature, is_own=True)


def _identity(one: RequestItem, made: Digest, key: Key) -> Digest:
    if one.seal and DIGEST.fullmatch(one.name):
        named = Digest(bytes.fromhex(one.name))
        if is_sealed(named, made, one.seal, key):
            return named
    return made


def _check(feature: Feature, contract: Contract) -> None:
    if feature.nbytes > _MAX_BYTES:
        raise MediaTooLarge(f"features: one has {feature.nbytes:,} bytes, it may have {_MAX_BYTES:,}: send less")
    contract.check(feature)


def _unpacked(one: RequestItem, token_ids: Sequence[int]) -> Feature:
    """The feature of an item in vLLM's form. Where its two parts have the same tensor, the later part counts."""
    tensors: dict[str, Tensor] = {}
    for packed in one.packed:
        tensors |= read_item(packed)
    return Feature(one.modality, tensors, _layout(one.place, token_ids))


def _layout(place: Place, token_ids: Sequence[int]) -> Layout:
    """The layout from the prompt's tokens. vLLM omits masks; then the most common token marks the embeddings."""
    tokens = tuple(token_ids[place.offset : place.offset + place.length])
    if len(tokens) != place.length:
        raise InvalidRequest(f"it ends at {place.offset + place.length:,}, the prompt has {len(token_ids):,} tokens")
    bits = place.is_embed
    if bits is None:
        ((commonest, _),) = Counter(tokens).most_common(1)
        bits = [token == commonest for token in tokens]
    elif len(bits) != len(tokens):
        raise InvalidRequest(f"is_embed has {len(bits):,} entries for {len(tokens):,} tokens")
    return Layout(tokens, None if all(bits) else Mask(bits))
