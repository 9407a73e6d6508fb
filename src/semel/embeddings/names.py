"""Names in the embedding store, and the key of its seals. Pure.

A name is keyed with the fleet key over the encoder's identity and the item's digest (threats S11, S12). So what another
encoder made has another name, tenants share no name, and a reader of the store can neither compute a name nor
learn what it stands for. The keys in the store::

    semel:e1:NAME                  the manifest
    semel:e1:NAME:NONCE:INDEX      one chunk of the writer that the manifest names
    semel:e1:probe:NAME            the hash of the encoder's probe, sealed
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from semel.core import Digest, Key, hash_parts

__all__ = ["chunk_keys", "embedding_name", "manifest_key", "probe_key", "probe_name", "seal_key"]

_NAME_DOMAIN: Final = b"semel.embedding.1"
_SEAL_DOMAIN: Final = b"semel.embedding.seal.1"
_PROBE_DOMAIN: Final = b"semel.embedding.probe.1"
_ROOT: Final = b"semel:e1:"


def embedding_name(key: Key, identity: bytes, digest: Digest) -> Digest:
    """Return the name of an item's encoder output. `identity` is the encoder's."""
    return Digest(hash_parts((_NAME_DOMAIN, identity, digest), key).digest())


def probe_name(key: Key, identity: bytes) -> Digest:
    """Return the name of an encoder's probe."""
    return Digest(hash_parts((_PROBE_DOMAIN, identity), key).digest())


def seal_key(key: Key) -> Key:
    """Return the key of seals. It is derived from the fleet key, so that a seal is never a name or a digest."""
    return Key(hash_parts((_SEAL_DOMAIN,), key).digest())


def manifest_key(name: Digest) -> bytes:
    """Return where the manifest of an encoder output is."""
    return _ROOT + name.hex().encode()


def chunk_keys(name: Digest, nonce: bytes, count: int) -> Sequence[bytes]:
    """Return where the chunks are that a writer with this nonce has written."""
    prefix = b"%s%s:%s:" % (_ROOT, name.hex().encode(), nonce.hex().encode())
    return [b"%s%d" % (prefix, index) for index in range(count)]


def probe_key(name: Digest) -> bytes:
    """Return where the hash of an encoder's probe is."""
    return _ROOT + b"probe:" + name.hex().encode()
