"""Names of the store's entries, their format, and their authentication. Pure.

A name is keyed with the fleet key over the encoder's identity and the item's digest (threats S11, S12). So what another
encoder made has another name, tenants share no name, and a reader of the store can neither compute a name nor
learn what it stands for. The keys in the store::

    semel:e1:NAME                  the manifest
    semel:e1:NAME:NONCE:INDEX      one chunk of the writer that the manifest names
    semel:e1:probe:NAME            the hash of the encoder's probe, sealed

An entry is a manifest of fixed size and chunks of 1 MiB. The manifest has two seals, both keyed blake3 under a key
that only the fleet has. The first covers the name and the manifest itself, so shape and size are believed, and room
reserved for them, only after it held. The second covers the name, the header and all bytes; it is computed over chunks
as they come, and nothing counts as an embedding before it held. So an entry that was changed, swapped, cut or written
by somebody else is refused (threats S26). The probe of an encoder has a seal of the same kind.
"""

from __future__ import annotations

import secrets
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hmac import compare_digest
from typing import Final, Self

from blake3 import blake3

from semel.core import Digest, Form, Key, form_bytes, hash_parts

__all__ = [
    "CHUNK_BYTES",
    "MANIFEST_BYTES",
    "MAX_PROBE_BYTES",
    "Header",
    "Manifest",
    "Seal",
    "chunk_keys",
    "embedding_name",
    "manifest_key",
    "open_probe",
    "output_nbytes",
    "probe_key",
    "probe_name",
    "seal_key",
    "seal_probe",
    "split_chunks",
]

_NAME_DOMAIN: Final = b"semel.embedding.1"
_SEAL_DOMAIN: Final = b"semel.embedding.seal.1"
_PROBE_NAME_DOMAIN: Final = b"semel.embedding.probe.1"
_ROOT: Final = b"semel:e1:"

CHUNK_BYTES: Final = 1 << 20
"""Larger values keep a store's only thread from others, and arrive more slowly; smaller ones cost more calls."""

_MAGIC: Final = b"semelem1"
_NONCE_BYTES: Final = 16
_SEAL_BYTES: Final = 32
_HEADER: Final = struct.Struct(f"<8s24sIIQI{_NONCE_BYTES}s")
MANIFEST_BYTES: Final = _HEADER.size + 2 * _SEAL_BYTES

MAX_PROBE_BYTES: Final = 64 + _SEAL_BYTES
"""With its seal."""

_MAX_SIDE: Final = 0xFFFF_FFFF
_MAX_BYTES: Final = 1 << 40
_MANIFEST_DOMAIN: Final = b"manifest"
_CONTENT_DOMAIN: Final = b"contents"
_PROBE_DOMAIN: Final = b"theprobe"


def embedding_name(key: Key, identity: bytes, digest: Digest) -> Digest:
    """Return the name of an item's encoder output. `identity` is the encoder's."""
    return Digest(hash_parts((_NAME_DOMAIN, identity, digest), key).digest())


def probe_name(key: Key, identity: bytes) -> Digest:
    """Return the name of an encoder's probe."""
    return Digest(hash_parts((_PROBE_NAME_DOMAIN, identity), key).digest())


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


def output_nbytes(form: Form) -> int | None:
    """Return how many bytes an encoder output of this form has; None if the store takes none such."""
    try:
        nbytes = form_bytes(form)
    except ValueError:
        return None
    return nbytes if max(form[:2]) <= _MAX_SIDE and nbytes <= _MAX_BYTES else None


@dataclass(frozen=True, slots=True)
class Header:
    """The part of a manifest about its chunks."""

    form: Form
    nonce: bytes
    """The writer's: chunks of two writers have different keys."""

    @classmethod
    def new(cls, form: Form) -> Self:
        """Return the header of a new entry. A form that the store does not take is a `ValueError`."""
        if output_nbytes(form) is None:
            raise ValueError(f"an encoder output of the form {form} is none that can be stored")
        return cls(form, secrets.token_bytes(_NONCE_BYTES))

    @property
    def nbytes(self) -> int:
        """The size of all chunks together."""
        return output_nbytes(self.form) or 0

    @property
    def chunk_count(self) -> int:
        """Number of chunks."""
        return -(-self.nbytes // CHUNK_BYTES)

    def pack(self) -> bytes:
        """Encode it."""
        rows, columns, dtype = self.form
        return _HEADER.pack(_MAGIC, dtype.encode(), rows, columns, self.nbytes, CHUNK_BYTES, self.nonce)

    @classmethod
    def unpack(cls, raw: bytes) -> Self | None:
        """Return the header that these bytes are; None for any others than those of `pack`."""
        if len(raw) != _HEADER.size:
            return None
        _, dtype, rows, columns, _, _, nonce = _HEADER.unpack(raw)
        form = (rows, columns, dtype.rstrip(b"\0").decode("latin-1"))
        if output_nbytes(form) is None:
            return None
        header = cls(form, nonce)
        return header if header.pack() == raw else None


class Seal:
    """The seal over an entry's contents, computed while its bytes come."""

    __slots__ = ("_hash", "nbytes")

    def __init__(self, key: Key, name: Digest, header: Header) -> None:
        self._hash = blake3(_CONTENT_DOMAIN + name + header.pack(), key=key.secret)
        self.nbytes = 0

    def add(self, pieces: Iterable[memoryview]) -> None:
        """Add the bytes that follow."""
        for piece in pieces:
            self._hash.update(piece)
            self.nbytes += piece.nbytes

    def digest(self) -> bytes:
        """Return the seal of all bytes that were added."""
        return self._hash.digest()


@dataclass(frozen=True, slots=True)
class Manifest:
    """A header and the seal of its contents. It is written last, so its readers find all chunks."""

    header: Header
    seal: bytes

    def pack(self, key: Key, name: Digest) -> bytes:
        """Encode and seal it."""
        raw = self.header.pack() + self.seal
        return raw + _seal_manifest(key, name, raw)

    @classmethod
    def unpack(cls, raw: bytes, key: Key, name: Digest) -> Self | None:
        """Parse a manifest; None for one that nobody with the key has written under this name."""
        body, seal = raw[:-_SEAL_BYTES], raw[-_SEAL_BYTES:]
        if len(raw) != MANIFEST_BYTES or not compare_digest(seal, _seal_manifest(key, name, body)):
            return None
        header = Header.unpack(body[: _HEADER.size])
        return None if header is None else cls(header, body[_HEADER.size :])

    def holds(self, seal: Seal) -> bool:
        """Return whether all bytes came, and are those that were sealed."""
        return seal.nbytes == self.header.nbytes and compare_digest(seal.digest(), self.seal)


def split_chunks(buffers: Sequence[memoryview], nbytes: int) -> Iterator[list[memoryview]]:
    """Yield the first bytes of some buffers, in chunks. A chunk may lie across buffers."""
    if sum(buffer.nbytes for buffer in buffers) < nbytes:
        raise ValueError(f"the buffers have less than {nbytes:,} bytes")
    chunk: list[memoryview] = []
    room = min(CHUNK_BYTES, nbytes)
    for buffer in buffers:
        rest = buffer.cast("B")[:nbytes]
        while rest:
            chunk.append(rest[:room])
            rest = rest[room:]
            nbytes -= chunk[-1].nbytes
            room -= chunk[-1].nbytes
            if not room:
                yield chunk
                chunk, room = [], min(CHUNK_BYTES, nbytes)
        if not nbytes:
            return


def seal_probe(key: Key, name: Digest, probe: bytes) -> bytes:
    """Return the hash of an encoder's probe, as it is stored."""
    return probe + blake3(_PROBE_DOMAIN + name + probe, key=key.secret).digest()


def open_probe(key: Key, name: Digest, raw: bytes) -> bytes | None:
    """Return the hash that was stored; None for bytes that nobody with the key has written under this name."""
    probe = raw[:-_SEAL_BYTES]
    return probe if compare_digest(raw, seal_probe(key, name, probe)) else None


def _seal_manifest(key: Key, name: Digest, raw: bytes) -> bytes:
    return blake3(_MANIFEST_DOMAIN + name + raw, key=key.secret).digest()
