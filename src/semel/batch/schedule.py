"""The order in which lines are sent: those that share an item follow one another. Pure.

The first line with an item goes alone; those that share it follow as soon as it was answered, before any new item. By
then the server knows the item, and the client its id. No free place waits for that: if nothing else is left, a line
goes at once.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from semel.batch.lines import Line
from semel.core.lru import LruMap

__all__ = ["Schedule"]

_MAX_SENT: Final = 65_536
"""Items that are remembered: as many as `semel.openai` knows ids of."""


class Schedule:
    """The lines that were read and not sent yet."""

    def __init__(self) -> None:
        self._near: deque[Line] = deque()
        """Lines whose items were all sent before, or that have none."""

        self._new: deque[Line] = deque()
        self._wanted: set[int] = set()
        """The new items of these lines."""

        self._behind: dict[int, deque[Line]] = {}
        """Lines by the item that they wait for."""

        self._led: dict[int, tuple[int, ...]] = {}
        """The new items of lines that are in flight, by their numbers."""

        self._leading: set[int] = set()
        """All of these items."""

        self._sent: LruMap[int, bool] = LruMap(_MAX_SENT)

    def __len__(self) -> int:
        return len(self._near) + len(self._new) + sum(map(len, self._behind.values()))

    def add(self, line: Line) -> None:
        """Add a line."""
        new = [item for item in line.items if item not in self._sent]
        if not new:
            self._near.append(line)
        elif (item := next((one for one in new if one in self._leading or one in self._wanted), None)) is not None:
            self._behind.setdefault(item, deque()).append(line)
        else:
            self._new.append(line)
            self._wanted.update(new)

    def take(self) -> Line | None:
        """Return the line to send next; `done` is called with it when it was answered."""
        while line := self._next():
            if (item := next((one for one in line.items if one in self._leading), None)) is None:
                return self._begin(line)
            self._behind.setdefault(item, deque()).append(line)
        if not self._behind:
            return None
        item, lines = next(iter(self._behind.items()))
        line = lines.popleft()
        if not lines:
            del self._behind[item]
        return self._begin(line)

    def done(self, line: Line) -> None:
        """Note that a line was answered."""
        for item in self._led.pop(line.number):
            self._leading.discard(item)
            self._sent.put(item, True)
            self._near.extend(self._behind.pop(item, ()))

    def _next(self) -> Line | None:
        queue = self._near or self._new
        return queue.popleft() if queue else None

    def _begin(self, line: Line) -> Line:
        new = tuple(item for item in line.items if item not in self._leading and not self._sent.get(item))
        self._led[line.number] = new
        self._leading.update(new)
        self._wanted.difference_update(line.items)
        return line
