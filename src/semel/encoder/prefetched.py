"""Encoder outputs that came for one request, in blocks that belong to somebody else.

The process that fetched an output lends its blocks to the engine, with the request, under a lease. The output can be
loaded for that request and no other, and once: the first step that needs it plans its load and forgets it. The lender
may write the blocks again when the lease is *done*: every rank has loaded them, or nobody will, because the request has
ended, has computed past the item, found it elsewhere, or the weights have changed. A lease is done once, and never
while a rank may read its blocks.

An allocation that was undone (its request was preempted in the same step) changes nothing here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from semel.core import PrefetchedOutput
from semel.encoder.eviction import Key

__all__ = ["PrefetchedOutputs"]


class PrefetchedOutputs:
    """The prefetched outputs of one engine's requests."""

    def __init__(self) -> None:
        self.on_use: Callable[[int], None] = lambda _: None
        """Called with a lease before its load is planned."""
        self.on_done: Callable[[int], None] = lambda _: None
        """Called with a lease whose blocks nobody reads any more."""
        self._waiting: dict[str, dict[Key, tuple[PrefetchedOutput, int]]] = {}
        self._open: set[int] = set()

    def __contains__(self, request: str) -> bool:
        """Return whether it was said what came for a request, and the request has not ended."""
        return request in self._waiting

    def add(self, request: str, prefetched_outputs: Iterable[tuple[Key, PrefetchedOutput, int]]) -> None:
        """Say once what came for a request: keys, outputs, and the positions at which their items end."""
        waiting = self._waiting.setdefault(request, {})
        for key, prefetched, end in prefetched_outputs:
            if prefetched.lease not in self._open and key not in waiting:
                self._open.add(prefetched.lease)
                waiting[key] = (prefetched, end)

    def get(self, request: str, key: Key) -> PrefetchedOutput | None:
        """Return the output of this key that came for this request and was not used."""
        found = self._waiting.get(request, _NOTHING).get(key)
        return None if found is None else found[0]

    def use(self, request: str, key: Key) -> PrefetchedOutput:
        """Take it for a step that loads it. Nobody else will, and its lease is open until `end`."""
        prefetched, _ = self._waiting[request].pop(key)
        self.on_use(prefetched.lease)
        return prefetched

    def end(self, lease: int) -> None:
        """End a lease: every rank has loaded the output."""
        self._open.discard(lease)
        self.on_done(lease)

    def drop(self, request: str, key: Key) -> None:
        """Drop an output that the request does not need."""
        found = self._waiting.get(request, _NOTHING).pop(key, None)
        if found is not None:
            self.end(found[0].lease)

    def advance(self, request: str, computed: int) -> None:
        """Drop the outputs of items that end before the tokens that the request has computed."""
        waiting = self._waiting.get(request)
        if waiting:
            for key in [key for key, (_, end) in waiting.items() if end <= computed]:
                self.drop(request, key)

    def finish(self, request: str) -> None:
        """Drop the outputs of a request that has ended. A load that is under way stays open until it ends."""
        for prefetched, _ in self._waiting.pop(request, _NOTHING).values():
            self.end(prefetched.lease)

    def forget_all(self) -> None:
        """Use nothing that has come so far: the weights have changed."""
        for request, waiting in self._waiting.items():
            for key in tuple(waiting):
                self.drop(request, key)


_NOTHING: dict[Key, tuple[PrefetchedOutput, int]] = {}
