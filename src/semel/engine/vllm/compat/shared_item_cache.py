"""vLLM's item cache with two writers: its own route, and semel's.

vLLM's route puts its items in while it renders, in a thread, and sends its request some time later; semel's puts them
in and sends at once, on the event loop. The engine core sees the order of the sends. So every change takes a lock, and
at each send the mirror is brought into the order that the engine core will have: of the items that pass through it, it
names none of semel's that the engine core has evicted. What vLLM's route has put in and not sent, maybe because its
client has gone, travels with the next request that has it.

In three cases the engine core may have evicted what the mirror names. Then it reports a miss, and the request is sent
again: an item that vLLM's route sends past the mirror (`skip_mm_cache`, embeddings of a client) takes room in the
engine core only; a request of vLLM's may be sent between two slices of a long admission, in the same thread; and
vLLM's own `pause_generation`, `sleep` and `reset_mm_cache` clear first the mirror and later the engine core.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Final

__all__ = ["SharedItemCache"]

_CALLS: Final = ("touch_sender_cache_item", "invalidate", "clear_cache")
_MAX_REMOVED: Final = 1_024


class SharedItemCache:
    """The half of vLLM's item cache in this process, for several threads."""

    def __init__(self, sender: Any, mirror: Any, lock: AbstractContextManager[Any]) -> None:
        self._mirror = mirror
        self._lock = lock
        self._sender = sender
        self._update = sender.get_and_update_item
        self._unsent: set[str] = set()
        self._removed: dict[str, Any] = {}
        """Items of vLLM's route that were removed last: their sizes and their places in a prompt."""

    def install(self, client: Any) -> None:
        """Use the lock for every change, and the order in which vLLM's client of the engine core sends."""
        add, on_remove = client.add_request_async, self._mirror._on_remove

        def remember(name: str, value: Any) -> None:
            on_remove(name, value)
            self._unsent.discard(name)
            if value.prompt_updates:  # semel's items have none
                self._removed.pop(name, None)  # or it would keep its old place
                self._removed[name] = value
                if len(self._removed) > _MAX_REMOVED:
                    del self._removed[next(iter(self._removed))]

        async def add_request_async(request: Any) -> None:
            self._renew([(one.mm_hash or one.identifier, one.data) for one in request.mm_features or ()])
            await add(request)

        self._mirror._on_remove = remember
        client.add_request_async = add_request_async
        for method in _CALLS:
            setattr(self._sender, method, self._locked(getattr(self._sender, method)))
        self._sender.is_cached_item = self._locked(self._is_cached_item)
        self._sender.get_and_update_item = self._locked(self._get_and_update_item)

    def _is_cached_item(self, name: str) -> bool:
        """Return whether the engine core has been sent it.

        Until its first request is sent, vLLM's route preprocesses a new item for each request: nobody knows yet whether
        that one will be.
        """
        return name in self._mirror and name not in self._unsent

    def _get_and_update_item(self, item: Any, name: str) -> Any:
        if item is None and name not in self._mirror and name in self._removed:
            # It went while vLLM rendered a prompt that has it. The engine core has it still, or reports a miss.
            return None, self._removed[name].prompt_updates
        updated = self._update(item, name)
        if item is None or not item[1]:
            return updated
        if updated is item and name in self._mirror:
            self._unsent.add(name)
        return item if name in self._unsent else updated

    def _renew(self, items: list[tuple[str, Any]]) -> None:
        """Do with the items of a request as the engine core does when it gets them."""
        with self._lock:
            for name, _ in items:
                self._mirror.touch(name)
            for name, data in items:
                if name in self._mirror:
                    self._mirror.touch(name)
                elif name in self._removed:  # if the engine core lacks it too, vLLM takes it out again
                    self._mirror.put_if_fits(name, self._removed[name])
                if data is not None:
                    self._unsent.discard(name)

    def _locked(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def locked(*arguments: Any) -> Any:
            with self._lock:
                return call(*arguments)

        return locked
