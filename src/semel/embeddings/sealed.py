"""The fleet's store of encoder outputs, as a worker uses it from threads: fetch, publish, and compare a probe.

Nothing that comes out of the store is believed before its seals held (`seal`). A store that fails in any way is a
counted outcome, never an exception, and every call ends by its deadline. Chunks go first, under keys with the writer's
own nonce, and the manifest last and only if there is none. So two writers never mix, and a reader of a manifest finds
all chunks unless the store has evicted some.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Final, Literal

from semel.core import Digest, Key
from semel.core.embedding import Form
from semel.embeddings.nodes import Node, Nodes
from semel.embeddings.protocol import BlobStore, Chunk, StoreDown, StoreError, StoreFull, StoreLate
from semel.embeddings.seal import (
    MANIFEST_BYTES,
    MAX_PROBE_BYTES,
    Header,
    Manifest,
    Seal,
    chunk_keys,
    embedding_name,
    manifest_key,
    open_probe,
    output_nbytes,
    probe_key,
    probe_name,
    seal_key,
    seal_probe,
    split_chunks,
)

__all__ = ["FetchOutcome", "Fetched", "PublishOutcome", "SealedStore", "Stage"]

FetchOutcome = Literal["hit", "miss", "late", "down", "sealed_wrong", "shape_wrong", "no_room"]
PublishOutcome = Literal["published", "already_there", "changed", "full", "late", "down", "unsupported"]

Stage = Callable[[Digest, Form], Sequence[memoryview] | None]
"""Reserves memory for an encoder output: writable buffers that together have at least its bytes. None: no room."""

_MARGIN_MS: Final = 600_000
"""Chunks outlive their manifest, which is written after them."""

_CLEANING_SHARE: Final = 0.2
"""Of a publication's time, for deleting what has become useless."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """The outcome of fetching one output."""

    digest: Digest
    outcome: FetchOutcome
    form: Form | None = None
    """Of a hit."""

    is_staged: bool = False
    """True if memory was reserved for it. Unless it is a hit, the caller frees that memory now: nobody writes it."""


class SealedStore:
    """Encoder outputs of one encoder, by the digests of their items. Any thread may use it."""

    def __init__(self, key: Key, identity: bytes, nodes: Nodes, ttl_s: int) -> None:
        self._key = key
        self._seal_key = seal_key(key)
        self._identity = identity
        self._nodes = nodes
        self._ttl_ms = 1_000 * ttl_s

    @property
    def is_up(self) -> bool:
        """True if any node is asked at all."""
        return self._nodes.is_up

    @property
    def is_whole(self) -> bool:
        """True if all nodes are."""
        return self._nodes.is_whole

    def revive(self, timeout_s: float) -> None:
        """Try nodes again that failed, if it is time for that."""
        self._nodes.revive(timeout_s)

    def fetch(
        self, rows: Mapping[Digest, int], stage: Stage, deadline: float, *, width: tuple[int, str] | None = None
    ) -> list[Fetched]:
        """Read encoder outputs into memory that `stage` reserves, in the order in which they are asked for.

        Each item comes with the number of rows that its layout wants. `width` is the engine's number of columns and
        dtype, if they are known. Never raises but what `stage` does.
        """
        groups: dict[Node, list[_Wanted]] = {}
        for digest, count in rows.items():
            name = embedding_name(self._key, self._identity, digest)
            groups.setdefault(self._nodes.choose(name), []).append(_Wanted(digest, name, count, width))
        found: dict[Digest, Fetched] = {}
        for index, (node, group) in enumerate(groups.items()):
            now = time.monotonic()
            share = now + (deadline - now) / (len(groups) - index)
            found |= {one.digest: one for one in self._fetch_from(node, group, stage, share)}
        return [found[digest] for digest in rows]

    def publish(
        self, digest: Digest, form: Form, buffers: Sequence[memoryview], is_intact: Callable[[], bool], deadline: float
    ) -> PublishOutcome:
        """Store an encoder output, which lies in the buffers. `is_intact` says whether they still have it.

        Never raises but what `is_intact` does.
        """
        if output_nbytes(form) is None:
            return "unsupported"
        name = embedding_name(self._key, self._identity, digest)
        entry = _Entry(name, Header.new(form), buffers)
        try:
            with self._nodes.choose(name).attempt() as blobs:
                return self._publish(blobs, entry, is_intact, deadline)
        except StoreFull:
            return "full"
        except StoreDown as error:
            return _outcome(error)

    def compare_probe(self, probe: bytes, deadline: float) -> bytes:
        """Tell the fleet what this encoder makes of the probe: a hash of at most 64 bytes.

        Returns the fleet's, which is ours if it had none; also if a full store does not take ours. Raises `StoreError`.
        """
        name = probe_name(self._key, self._identity)
        with self._nodes.choose(name).attempt() as blobs:
            found = self._read_probe(blobs, name, deadline)
            if found is None:
                ours = seal_probe(self._seal_key, name, probe)
                with suppress(StoreFull):  # it can be read from
                    if not blobs.put_new(probe_key(name), ours, None, deadline):  # another worker was quicker
                        found = self._read_probe(blobs, name, deadline)
        return probe if found is None else found

    def _read_probe(self, blobs: BlobStore, name: Digest, deadline: float) -> bytes | None:
        """Return the fleet's probe. What somebody else has put there is deleted."""
        raw = blobs.get_many([probe_key(name)], MAX_PROBE_BYTES, deadline)[0]
        if raw is None:
            return None
        found = open_probe(self._seal_key, name, raw)
        if found is None:
            _delete(blobs, [probe_key(name)], deadline)
        return found

    def _fetch_from(self, node: Node, group: Sequence[_Wanted], stage: Stage, deadline: float) -> list[Fetched]:
        """Return what one node has. After a failure, the rest of the group shares its outcome."""
        staged: set[Digest] = set()

        def reserve(digest: Digest, form: Form) -> Sequence[memoryview] | None:
            if (buffers := stage(digest, form)) is not None:
                staged.add(digest)
            return buffers

        found: list[Fetched] = []
        outcome: FetchOutcome = "late"
        try:
            if time.monotonic() < deadline:  # else it has waited for a thread, which is no fault of the node
                with node.attempt() as blobs, _reading():
                    keys = [manifest_key(one.name) for one in group]
                    manifests = blobs.get_many(keys, MANIFEST_BYTES, deadline)
                    with suppress(StoreLate):  # the node has answered: there was too little time for so many bytes
                        for one, raw in zip(group, manifests, strict=True):
                            became, form = self._receive(blobs, one, raw, reserve, deadline)
                            found.append(Fetched(one.digest, became, form, one.digest in staged))
        except StoreDown as error:
            outcome = _outcome(error)
        return found + [Fetched(one.digest, outcome, None, one.digest in staged) for one in group[len(found) :]]

    def _receive(
        self, blobs: BlobStore, one: _Wanted, raw: bytes | None, stage: Stage, deadline: float
    ) -> tuple[FetchOutcome, Form | None]:
        if raw is None:
            return "miss", None
        manifest = Manifest.unpack(raw, self._seal_key, one.name)
        if manifest is None:
            _delete(blobs, [manifest_key(one.name)], deadline)
            return "sealed_wrong", None
        header = manifest.header
        entry_keys = [manifest_key(one.name), *chunk_keys(one.name, header.nonce, header.chunk_count)]
        if not one.fits(header.form):
            _delete(blobs, entry_keys, deadline)
            return "shape_wrong", None
        if (buffers := stage(one.digest, header.form)) is None:
            return "no_room", None
        seal = Seal(self._seal_key, one.name, header)
        came = blobs.get_into(entry_keys[1:], split_chunks(buffers, header.nbytes), seal.add, deadline)
        if came == "whole" and manifest.holds(seal):
            return "hit", header.form
        _delete(blobs, entry_keys, deadline)
        return ("miss" if came == "missing" else "sealed_wrong"), None

    def _publish(
        self, blobs: BlobStore, entry: _Entry, is_intact: Callable[[], bool], deadline: float
    ) -> PublishOutcome:
        now = time.monotonic()
        working = now + (1 - _CLEANING_SHARE) * (deadline - now)
        key = manifest_key(entry.name)
        if (raw := blobs.get_many([key], MANIFEST_BYTES, working)[0]) is not None:
            if Manifest.unpack(raw, self._seal_key, entry.name) is not None:
                return "already_there"
            _delete(blobs, [key], working)
        seal = Seal(self._seal_key, entry.name, entry.header)
        outcome: PublishOutcome = "changed"
        try:
            blobs.put(entry.keys, entry.chunks(seal), self._ttl_ms + _MARGIN_MS, working)
            if is_intact():
                manifest = Manifest(entry.header, seal.digest()).pack(self._seal_key, entry.name)
                is_first = blobs.put_new(key, manifest, self._ttl_ms, working)
                outcome = "published" if is_first else "already_there"
        except StoreLate:  # the node has answered: there was too little time for so many bytes
            outcome = "late"
        finally:
            if outcome != "published":
                _delete(blobs, entry.keys, deadline)
        return outcome


@dataclass(frozen=True, slots=True)
class _Wanted:
    digest: Digest
    name: Digest
    rows: int
    width: tuple[int, str] | None

    def fits(self, form: Form) -> bool:
        return form[0] == self.rows and (self.width is None or form[1:] == self.width)


@dataclass(frozen=True, slots=True)
class _Entry:
    """An entry that is about to be stored."""

    name: Digest
    header: Header
    buffers: Sequence[memoryview]

    @property
    def keys(self) -> Sequence[bytes]:
        return chunk_keys(self.name, self.header.nonce, self.header.chunk_count)

    def chunks(self, seal: Seal) -> Iterator[Chunk]:
        """Yield the chunks, each sealed when it is about to be sent."""
        for chunk in split_chunks(self.buffers, self.header.nbytes):
            seal.add(chunk)
            yield chunk


def _outcome(error: StoreDown) -> Literal["late", "down"]:
    return "late" if isinstance(error, StoreLate) else "down"


@contextmanager
def _reading() -> Iterator[None]:
    """Treat a store that is too full to be read from as down."""
    try:
        yield
    except StoreFull as error:
        raise StoreDown("the embedding store says that it is full when it is read from") from error


def _delete(blobs: BlobStore, keys: Sequence[bytes], deadline: float) -> None:
    """Delete what is of no use. What cannot be deleted expires by itself."""
    with suppress(StoreError):
        blobs.delete(keys, deadline)
