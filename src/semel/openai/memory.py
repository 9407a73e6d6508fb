"""A client's memory of servers: ids by digest, and which servers return ids. Bounded.

It has no media and no keys, only their digests. Threads and event loops may share one.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence

from semel.core.lru import LruMap

__all__ = ["Memory"]

_MAX_SERVERS = 1_024


class Memory:
    """The ids of the media that were sent, by server and digest."""

    def __init__(self, max_ids: int = 65_536) -> None:
        """`max_ids`: beyond it, the ids that were not used for longest are forgotten. One takes about 300 bytes."""
        self._ids: LruMap[tuple[bytes, bytes], str] = LruMap(max_ids)
        self._returns_ids: LruMap[bytes, bool] = LruMap(_MAX_SERVERS)
        self._lock = threading.Lock()

    def returns_ids(self, server: bytes) -> bool | None:
        """Return whether a server returns ids; None if it has not answered yet."""
        with self._lock:
            return self._returns_ids.get(server)

    def known(self, server: bytes, digests: Iterable[bytes | None]) -> dict[bytes, str]:
        """Return the ids of these media at a server, as far as it has returned them."""
        with self._lock:
            found = {one: self._ids.get((server, one)) for one in digests if one is not None}
            return {digest: media_id for digest, media_id in found.items() if media_id is not None}

    def learn(self, server: bytes, digests: Sequence[bytes | None], ids: Sequence[str | None]) -> None:
        """Learn the ids that a server returned for a request's media; another number of ids is ignored."""
        with self._lock:
            self._returns_ids.put(server, True)
            if len(digests) == len(ids):
                for digest, media_id in zip(digests, ids, strict=True):
                    if digest is not None and media_id:
                        self._ids.put((server, digest), media_id)

    def leave(self, server: bytes) -> None:
        """Note that a server returned no ids. One that has returned some before is not left for that."""
        with self._lock:
            if self._returns_ids.peek(server) is None:
                self._returns_ids.put(server, False)

    def forget(self, server: bytes, ids: Mapping[bytes, str]) -> None:
        """Forget ids that a server does not know any more. Those that another request has learned meanwhile stay."""
        with self._lock:
            for digest, media_id in ids.items():
                if self._ids.peek((server, digest)) == media_id:
                    self._ids.pop((server, digest))

    def __len__(self) -> int:
        return len(self._ids)

    def __repr__(self) -> str:
        return f"Memory({len(self):,} ids)"
