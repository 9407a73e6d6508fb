"""vLLM's item cache: its contents, its admissions, and its watchers.

vLLM keeps this cache twice: the tensors in its engine core, and a mirror of names and sizes in this process. Both evict
by themselves and agree because both see the same items in the same order. So the mirror is the truth about the engine
core as long as every item passes here in the order of the submissions, and one that the mirror holds need not travel
again: its digest does.

Inside a plain vLLM server (`share`) there is a second writer: vLLM's own route, whose renderer fills the mirror in a
thread. Then an admission holds a lock that every change of the mirror takes, and watchers are notified on the event
loop, in the order of the changes.

Only the mirrored kind of cache (`lru`) is known this well. Of any other one nothing is announced, and every submission
has to bring its features.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Container, Generator, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Self

from semel.aio import at_once
from semel.core import Digest, Feature, FeatureInfo, Item, Modality
from semel.engine.protocol import ItemCacheWatcher
from semel.engine.vllm.compat.internals import find_mirror, item_size, unknown_contents, watch_removals
from semel.engine.vllm.compat.shared_item_cache import SharedItemCache
from semel.errors import FeatureMissing

__all__ = ["Admission", "ItemCache"]


@dataclass(frozen=True, slots=True)
class Admission:
    """The outcome for the items of one prompt."""

    fresh: tuple[Digest, ...]
    """Those that were not held: they travel with the request."""

    referred: tuple[Digest, ...] = ()
    """Those that were held: the engine core gets their digests only."""

    queries: int = 0
    """Places of those that are counted here."""

    hits: int = 0
    """Of them, those whose item vLLM's cache had when their turn came."""


@dataclass(frozen=True, slots=True)
class _Entry:
    digest: Digest
    holding: FeatureInfo
    size: int
    """The bytes that vLLM charges for it."""


class ItemCache:
    """The item cache of one engine. All calls come from one event loop; those that change it, one after the other."""

    def __init__(self, renderer: Any) -> None:
        self._sender = renderer.mm_processor_cache
        self._mirror = find_mirror(self._sender)
        self._entries: dict[Digest, _Entry] = {}
        self._names: dict[str, Digest] = {}
        """The digests by vLLM's names for them."""

        self._watchers: list[ItemCacheWatcher] = []
        self._changes: deque[tuple[Digest, FeatureInfo | None]] = deque()
        """Insertions, and removals (None), that the watchers do not know yet."""

        self._lock = threading.RLock()
        self._loop: asyncio.AbstractEventLoop | None = None
        """The event loop of the watchers, where other threads change the cache too."""

        self._home = threading.get_ident()
        self._nbytes = 0
        self._admitting = False
        self.evictions = 0
        """Items that had to make room for others."""
        if self._mirror is not None:
            watch_removals(self._mirror, self._on_removal)

    @classmethod
    def from_llm(cls, llm: Any) -> Self:
        """Return the item cache of an `AsyncLLM`."""
        return cls(llm.renderer)

    @property
    def capacity(self) -> int:
        """The bytes that it may hold; 0 if nothing is known of it or it is off."""
        return 0 if self._mirror is None else int(self._mirror.maxsize)

    @property
    def refusal(self) -> str:
        """Why nothing can be put in without a request; empty if it can."""
        if self.capacity:
            return ""
        is_off = self._sender is None or self._mirror is not None
        return "the engine's item cache is off" if is_off else unknown_contents(self._sender)

    @property
    def nbytes(self) -> int:
        """The bytes of the items that it holds, as vLLM counts them."""
        return self._nbytes

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, digest: Digest) -> bool:
        return digest in self._entries

    def __iter__(self) -> Iterator[Digest]:
        return iter(list(self._entries))

    def holding(self, digest: Digest) -> FeatureInfo | None:
        """Return what is known of an item that is held."""
        entry = self._entries.get(digest)
        return None if entry is None else entry.holding

    def fits(self, feature: Feature) -> bool:
        """Return whether the feature is not larger than the whole cache."""
        return feature.nbytes <= self.capacity

    def share(self, llm: Any) -> None:
        """Let vLLM's own route use the cache as well, in its threads; called on the engine's event loop."""
        self._loop, self._home = asyncio.get_running_loop(), threading.get_ident()
        if self._mirror is not None:
            SharedItemCache(self._sender, self._mirror, self._lock).install(llm.engine_core)

    def watch(self, watcher: ItemCacheWatcher) -> None:
        """Tell the watcher of everything that is held, and from now on of every change."""
        with self._lock:
            self._notify()
            for entry in self._entries.values():
                watcher.hold(entry.digest, entry.holding)
            self._watchers.append(watcher)

    def admit(
        self,
        items: Sequence[Item],
        data: Mapping[Modality, list[Any]],
        features: Mapping[Digest, Feature],
        counted: Container[Digest] = (),
    ) -> Admission:
        """Put a prompt's items in; of `data`, those that the engine core holds are replaced by None.

        `data` has for every item what vLLM made of its feature, None if there was none. Raises `FeatureMissing` before
        anything is changed if the engine core would have to do without one of them. Lookups of the items in `counted`
        are counted as vLLM does: one for each place, in order.
        """
        return at_once(self.admission(items, data, features, counted))

    def admission(
        self,
        items: Sequence[Item],
        data: Mapping[Modality, list[Any]],
        features: Mapping[Digest, Feature],
        counted: Container[Digest] = (),
        delivered: AbstractSet[Digest] = frozenset(),
    ) -> Generator[None, None, Admission]:
        """Admit in slices, for many items. Once begun it has to be done to its end, as the engine core will do it.

        Items that were `delivered` for this request alone count as new ones.
        """
        with self._lock:
            return (yield from self._admitted(items, data, features, counted, delivered))

    def _admitted(
        self,
        items: Sequence[Item],
        data: Mapping[Modality, list[Any]],
        features: Mapping[Digest, Feature],
        counted: Container[Digest],
        delivered: AbstractSet[Digest],
    ) -> Generator[None, None, Admission]:
        places = list(_places(items, data))
        built = {item.digest: row[index] for item, row, index in places}
        yield
        sizes = yield from self._fresh_sizes(built)
        admission = self._admission(built, sizes)
        if self._sender is None or not items:
            return admission
        queries = hits = 0
        fresh = set(delivered)
        self._admitting = True
        try:
            # In the order in which the engine core does it: touch all, then take them as they stand in the prompt.
            for item in items:
                self._sender.touch_sender_cache_item(item.digest.hex())
                yield
            for item, row, index in places:
                if item.digest in counted:
                    queries += 1
                    hits += item.digest not in fresh and self._sender.is_cached_item(item.digest.hex())
                    fresh.discard(item.digest)
                if item.digest in delivered and item.digest in self:
                    self._sender.touch_sender_cache_item(item.digest.hex())
                    row[index] = None
                else:
                    row[index] = self._put(item.digest, row[index], features, sizes)
                yield
        except BaseException:
            self.take_back(admission)
            raise
        finally:
            self._admitting = False
        return replace(admission, queries=queries, hits=hits)

    def take_back(self, admission: Admission) -> None:
        """Forget items that the engine core did not get after all."""
        self._discard(admission.fresh)

    def lost(self, referred: Iterable[Digest]) -> tuple[Digest, ...]:
        """Return which of the items that went by reference the engine core lacked when it gave up on their request.

        vLLM takes those that it names out of the mirror. If it named none, any of them may be the one.
        """
        referred = tuple(referred)
        if named := tuple(digest for digest in referred if digest not in self):
            return named
        self._discard(referred)
        return referred

    def clear(self) -> None:
        """Forget all, before the engine core does."""
        if self._mirror is not None:
            with self._lock:
                self._mirror.clear()

    def _fresh_sizes(self, built: Mapping[Digest, Any]) -> Generator[None, None, dict[Digest, int]]:
        """Yield the sizes of those that are not held; of one that has no data either, 0."""
        sizes: dict[Digest, int] = {}
        for digest, item in built.items() if self._mirror is not None else ():
            if digest not in self:
                sizes[digest] = 0 if item is None else item_size(item)
            yield
        return sizes

    def _admission(self, built: Mapping[Digest, Any], sizes: Mapping[Digest, int]) -> Admission:
        """Return who travels and who is referred to. A request that overflows the cache travels as a whole.

        After all its items were touched, the oldest one goes first, so an item that is referred to can only be evicted
        before its turn if all items of the request do not fit together.
        """
        referred = tuple(digest for digest in built if digest in self)
        without_data = [digest for digest, item in built.items() if item is None]
        if missing := [digest for digest in without_data if digest not in self]:
            raise FeatureMissing(missing)
        if not self._overflows(referred, sizes):
            return Admission(tuple(digest for digest in built if digest not in self), referred)
        if without_data:
            raise FeatureMissing(without_data)
        self._discard(referred)
        return Admission(tuple(built))

    def _overflows(self, referred: Iterable[Digest], sizes: Mapping[Digest, int]) -> bool:
        if self._mirror is None or not sizes:
            return False
        cached = sum(size for size in sizes.values() if size <= self.capacity)
        return cached + sum(self._entries[digest].size for digest in referred) > self.capacity

    def _put(self, digest: Digest, item: Any, features: Mapping[Digest, Feature], sizes: Mapping[Digest, int]) -> Any:
        """Return what travels of one item."""
        if item is None and self._mirror is not None and digest not in self:
            raise FeatureMissing([digest])  # it was dropped between two slices
        name = digest.hex()
        sent, _ = self._sender.get_and_update_item((item, []), name)
        if self._mirror is not None and name in self._mirror and digest not in self:
            size = sizes[digest] if digest in sizes else item_size(item)
            self._hold(_Entry(digest, FeatureInfo.of(features[digest]), size))
        return sent

    def _hold(self, entry: _Entry) -> None:
        self._entries[entry.digest] = entry
        self._names[entry.digest.hex()] = entry.digest
        self._nbytes += entry.size
        self._change(entry.digest, entry.holding)

    def _discard(self, digests: Iterable[Digest]) -> None:
        for digest in digests if self._sender is not None else ():
            self._sender.invalidate(digest.hex())

    def _on_removal(self, name: str) -> None:
        entry = None if (digest := self._names.pop(name, None)) is None else self._entries.pop(digest, None)
        if entry is None:
            return
        self._nbytes -= entry.size
        self.evictions += self._admitting
        self._change(entry.digest, None)

    def _change(self, digest: Digest, holding: FeatureInfo | None) -> None:
        """Have the watchers notified: at once, or by the event loop if this is another thread."""
        self._changes.append((digest, holding))
        if self._loop is None or threading.get_ident() == self._home:
            self._notify()
        else:
            with suppress(RuntimeError):  # the loop has ended, and its watchers with it
                self._loop.call_soon_threadsafe(self._notify)

    def _notify(self) -> None:
        while self._changes:
            digest, holding = self._changes.popleft()
            for watcher in self._watchers:
                if holding is None:
                    watcher.drop(digest)
                else:
                    watcher.hold(digest, holding)


def _places(items: Iterable[Item], data: Mapping[Modality, list[Any]]) -> Iterator[tuple[Item, list[Any], int]]:
    """Yield each item, with where its data stands among those of its modality."""
    seen = dict.fromkeys(data, 0)
    for item in items:
        yield item, data[item.modality], seen[item.modality]
        seen[item.modality] += 1
