"""Holdings: what the engine's item cache has, and how much of it each frontend knows (D2).

The engine reports what it stored and evicted. Net changes get the next number when they are announced. A log has
the number of each digest's last change, so what a peer lacks is what the log has after the number that it knows: one
answer for all peers that know as much, and for a peer that comes back after its session broke. A peer that knows
nothing, or less than the log goes back to, gets all there is in slices. Changes that happen meanwhile reach it at once:
it may hear of a digest twice, and the last word is right.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from itertools import islice, takewhile, zip_longest
from typing import Final, Generic, TypeVar

from semel.core import Digest, FeatureInfo
from semel.ledger.announcement import MAX_BATCH, Announcement

__all__ = ["Holdings"]

_P = TypeVar("_P", bound=Hashable)
_T = TypeVar("_T")

_MAX_LOG: Final = 65_536
"""Digests whose last change is remembered: about 10 MB."""


class Holdings(Generic[_P]):
    """The items that the engine has, by digest. A peer is any hashable value that identifies a session."""

    def __init__(self, *, max_log: int = _MAX_LOG) -> None:
        self.nbytes = 0
        """Bytes of the features that the engine has."""

        self.number = 0
        """Of the last change that could be announced."""

        self._max_log = max_log
        self._infos: dict[Digest, FeatureInfo] = {}
        self._before: dict[Digest, FeatureInfo | None] = {}  # digests changed since that number: what they were then
        self._log: OrderedDict[Digest, int] = OrderedDict()
        self._floor = 0
        """The number from which on the log is complete."""

        self._known: dict[_P, int] = {}
        """The number that each peer knows everything up to, but for its slices."""

        self._slices: dict[_P, tuple[tuple[Digest, ...], int]] = {}
        """Of peers that have not got all slices: all digests, and how many of them they have got."""

        self._all: tuple[int, tuple[Digest, ...]] = 0, ()
        """Everything as of a number: peers that come together share it."""

    def __contains__(self, digest: Digest) -> bool:
        return digest in self._infos

    def __len__(self) -> int:
        return len(self._infos)

    # Reports of the engine.

    def hold(self, digest: Digest, holding: FeatureInfo) -> None:
        """Add a feature that the engine has stored."""
        self._change(digest, holding)

    def drop(self, digest: Digest) -> None:
        """Remove a feature that the engine has evicted."""
        self._change(digest, None)

    # Peers.

    def join(self, peer: _P, known: int | None = None) -> list[Announcement]:
        """Begin a session with a peer that knows everything up to a number, or nothing. Returns its first updates.

        The rest of its slices is for `next_slice`.
        """
        self.number_changes()
        if known is None or not self._floor <= known <= self.number:
            return [self._begin_slices(peer)]
        self._known[peer] = known
        return self.changes(peer) or [Announcement(known, known)]

    def leave(self, peer: _P) -> None:
        """End the session of a peer, if there is one."""
        self._known.pop(peer, None)
        self._slices.pop(peer, None)

    def known(self, peer: _P) -> tuple[int, bool]:
        """Return the number that a peer knows, and whether slices are still to come: its state."""
        return self._known[peer], peer in self._slices

    def next_slice(self, peer: _P) -> Announcement | None:
        """Return the next slice for a peer; None if it has all of them."""
        if (slices := self._slices.get(peer)) is None:
            return None
        self.number_changes()  # or it may hear of a digest that is gone again before it has a number, and not of that
        known = self._known[peer]
        return self._slice(peer, known, known, *slices)

    def changes(self, peer: _P) -> list[Announcement]:
        """Return what a peer lacks, in order. It knows everything then, but for its slices."""
        self.number_changes()
        known = self._known[peer]
        if known == self.number:
            return []
        if known < self._floor:
            return [self._begin_slices(peer), *iter(lambda: self.next_slice(peer), None)]
        self._known[peer] = self.number
        return self._since(known, more=peer in self._slices)

    def catch_up(self, peers: Sequence[_P]) -> list[Announcement]:
        """Return the same for many peers of the same state."""
        announcements = self.changes(peers[0])
        for peer in peers[1:]:
            self._known[peer] = self.number
            if peers[0] not in self._slices:  # they had to begin anew, and have all of it
                self._slices.pop(peer, None)
        return announcements

    def number_changes(self) -> None:
        """Give what has changed a number, before it is announced."""
        if not self._before:
            return
        self.number += 1
        for digest in self._before:
            self._log[digest] = self.number
            self._log.move_to_end(digest)
        self._before.clear()
        while len(self._log) > self._max_log:
            _, self._floor = self._log.popitem(last=False)

    def _begin_slices(self, peer: _P) -> Announcement:
        number, digests = self._all
        if number != self.number:
            self._all = number, digests = self.number, tuple(self._infos)
        self._known[peer] = number
        return self._slice(peer, None, number, digests, 0)

    def _slice(self, peer: _P, since: int | None, number: int, digests: tuple[Digest, ...], begin: int) -> Announcement:
        end = begin + MAX_BATCH
        if more := end < len(digests):
            self._slices[peer] = digests, end
        else:
            self._slices.pop(peer, None)
        return Announcement(since, number, holdings=self._infos_of(digests[begin:end]), more=more)

    def _infos_of(self, digests: Iterable[Digest]) -> dict[Digest, FeatureInfo]:
        return {digest: info for digest in digests if (info := self._infos.get(digest)) is not None}

    def _since(self, known: int, *, more: bool) -> list[Announcement]:
        """Return what has changed since a number, what is gone first. Only the last part moves the peer on."""
        changed = [digest for digest, _ in takewhile(lambda entry: entry[1] > known, reversed(self._log.items()))]
        gone = _batches(digest for digest in changed if digest not in self._infos)
        stored = _batches(digest for digest in reversed(changed) if digest in self._infos)
        parts = list(zip_longest(gone, stored, fillvalue=()))
        return [
            Announcement(known, self.number if part == len(parts) else known, tuple(out), self._infos_of(new), more)
            for part, (out, new) in enumerate(parts, 1)
        ]

    def _change(self, digest: Digest, after: FeatureInfo | None) -> None:
        now = self._infos.pop(digest, None)
        if now is not None:
            self.nbytes -= now.nbytes
        if after is not None:
            self._infos[digest] = after
            self.nbytes += after.nbytes
        if self._before.setdefault(digest, now) == after:
            del self._before[digest]
        elif len(self._before) > self._max_log:
            self.number_changes()


def _batches(values: Iterable[_T]) -> Iterator[list[_T]]:
    rest = iter(values)
    while batch := list(islice(rest, MAX_BATCH)):
        yield batch
