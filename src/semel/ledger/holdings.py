"""Holdings: what the engine's item cache has, and which changes each frontend has not heard of yet (D2).

The engine reports what it stored and evicted. Frontends receive net changes only, in numbered batches. A peer that has
received anything has received everything up to the last flush, so one set of changes serves all peers: a flush costs
changes × peers.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Generic, TypeVar

from semel.core import Digest, FeatureInfo
from semel.ledger.announcement import MAX_BATCH, Announcement, Gone, Have

__all__ = ["Holdings"]

_P = TypeVar("_P", bound=Hashable)
_T = TypeVar("_T")

_Unnumbered = Callable[[int], Announcement]


@dataclass(slots=True)
class _PeerState:
    """How much of the changes a peer has received."""

    number: int = 0
    is_new: bool = True


class Holdings(Generic[_P]):
    """What the engine has, by digest. A peer is any hashable value that identifies a session."""

    def __init__(self) -> None:
        self.nbytes = 0
        """Bytes of the features that the engine has."""
        self._infos: dict[Digest, FeatureInfo] = {}
        self._before: dict[Digest, FeatureInfo | None] = {}  # changed digests: what the last flush announced
        self._peers: dict[_P, _PeerState] = {}

    def __contains__(self, digest: Digest) -> bool:
        return digest in self._infos

    def __len__(self) -> int:
        return len(self._infos)

    def get(self, digest: Digest) -> FeatureInfo | None:
        """The feature info of a digest that the engine has."""
        return self._infos.get(digest)

    # Reports of the engine.

    def hold(self, digest: Digest, holding: FeatureInfo) -> None:
        """The engine has a feature from now on."""
        self._change(digest, holding)

    def drop(self, digest: Digest) -> None:
        """The engine no longer has a feature."""
        self._change(digest, None)

    # Peers.

    def join(self, peer: _P) -> None:
        """A session begins: the peer knows nothing yet, and its numbers begin at 0."""
        self._peers[peer] = _PeerState()

    def leave(self, peer: _P) -> None:
        """A session ends, if there is one."""
        self._peers.pop(peer, None)

    def announcements(self) -> list[tuple[_P, Announcement]]:
        """All announcements since the last call, in order for each peer: `Gone` before `Have`."""
        changes = list(self._changes())
        everything = list(_haves(self._infos.items())) if any(state.is_new for state in self._peers.values()) else []
        self._before.clear()
        flushed: list[tuple[_P, Announcement]] = []
        for peer, state in self._peers.items():
            for unnumbered in everything if state.is_new else changes:
                flushed.append((peer, unnumbered(state.number)))
                state.number += 1
            state.is_new = False
        return flushed

    def _change(self, digest: Digest, after: FeatureInfo | None) -> None:
        now = self._infos.pop(digest, None)
        if now is not None:
            self.nbytes -= now.nbytes
        if after is not None:
            self._infos[digest] = after
            self.nbytes += after.nbytes
        if not self._peers:
            self._before.clear()
        elif self._before.setdefault(digest, now) == after:
            del self._before[digest]

    def _changes(self) -> Iterator[_Unnumbered]:
        for batch in _batches(digest for digest in self._before if digest not in self._infos):
            yield partial(Gone, digests=tuple(batch))
        yield from _haves((digest, self._infos[digest]) for digest in self._before if digest in self._infos)


def _haves(holdings: Iterable[tuple[Digest, FeatureInfo]]) -> Iterator[_Unnumbered]:
    for batch in _batches(holdings):
        yield partial(Have, holdings=dict(batch))


def _batches(values: Iterable[_T]) -> Iterator[list[_T]]:
    rest = iter(values)
    while batch := list(islice(rest, MAX_BATCH)):
        yield batch
