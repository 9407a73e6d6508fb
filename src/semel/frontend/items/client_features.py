"""Features that a client sends with its request: read, held against the contract, and given an identity.

Nothing that a client says of a tensor is believed. A feature is held against the contract before anything else is made
of it (threats S9), its identity is the digest of its bytes for the tenant, and the name that the client gave it is not
looked at, unless a seal of the fleet's own says what it was made of (S11, S12). What its values mean the worker checks
before the engine sees them. No I/O.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from semel.core import Contract, Digest, Feature, Field, Item, Key, Layout, Mask, Tenant, Tensor
from semel.errors import FeatureRejected, InvalidRequest, MediaTooLarge
from semel.frontend.api.generate_request import Place, RequestItem
from semel.frontend.items.ownership import feature_digest, has_tag, is_sealed
from semel.interchange.safetensors import DIGEST, Entry, Faulty, FeatureEntry
from semel.interchange.vllm_items import read_item
from semel.wire.limits import Limits

__all__ = ["IdentifiedItem", "Owner", "features_of", "identify_items"]

_MAX_BYTES: Final = Limits().max_feature_bytes


@dataclass(frozen=True, slots=True)
class Owner:
    """For whom a request's items are identified, and by what key."""

    tenant: Tenant
    key: Key


@dataclass(frozen=True, slots=True)
class IdentifiedItem:
    """An item in its place."""

    item: Item
    place: Place
    feature: Feature | None
    """What the client has sent of it; None for one that is only named."""

    is_own: bool
    """Whether it is the tenant's: what was sent is, what was named if its tag says so."""


def features_of(entries: Sequence[Entry]) -> Mapping[str, Feature]:
    """The features of a file under the names that it gives them; a fault of one refuses all."""
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
    """All items of a prompt, whose places do not overlap. It reads every byte that was sent: not for the event loop."""
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
        feature = one.feature or _unpacked(one, token_ids, contract)
        _check(feature, contract)
    except (InvalidRequest, FeatureRejected) as error:
        raise InvalidRequest.of("features", f"the {one.modality} at {one.place.offset:,}: {error}") from None
    # A file's feature is one object however often it is shown: its bytes are read once.
    if (made := digests.get(id(one.feature))) is None or one.feature is None:
        digests[id(one.feature)] = made = feature_digest(feature, owner.tenant, owner.key)
    return IdentifiedItem(Item(one.modality, _identity(one, made, owner.key)), one.place, feature, is_own=True)


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


def _unpacked(one: RequestItem, token_ids: Sequence[int], contract: Contract) -> Feature:
    """The feature of an item that came in vLLM's form: the later of its two parts is the one that counts."""
    tensors: dict[str, Tensor] = {}
    for packed in one.packed:
        tensors |= read_item(packed)
    fields = contract.fields.get(one.modality, {})
    shaped = {name: _batched(tensor, fields.get(name)) for name, tensor in tensors.items()}
    return Feature(one.modality, shaped, _layout(one.place, token_ids))


def _batched(tensor: Tensor, field: Field | None) -> Tensor:
    """The tensor as a processor gives it: vLLM's items are cut out of batches, ours are batches of one."""
    if field is not None and len(field.shape) == len(tensor.shape) + 1 and field.shape[0] == 1:
        return Tensor(tensor.dtype, (1, *tensor.shape), tensor.data)
    return tensor


def _layout(place: Place, token_ids: Sequence[int]) -> Layout:
    """The layout by the prompt itself. vLLM leaves masks out: embeddings are then where the commonest token is."""
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
