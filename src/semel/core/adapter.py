"""A LoRA adapter: weights that an engine adds to its model's own for the requests that name it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Final

from msgspec import Meta

__all__ = ["MAX_ADAPTER_NAME_CHARS", "Adapter", "AdapterChange", "LatestChanges"]

MAX_ADAPTER_NAME_CHARS: Final = 128
_MAX_CHANGES: Final = 1_024


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter that a worker has loaded."""

    name: str
    """The `model` of the requests that it answers."""

    root: str
    """The folder or hub name that it was loaded from."""

    content: str
    """A hash of its files: the same name may be loaded again with other weights."""

    parent: str
    """The name of the model that it is for."""


@dataclass(frozen=True, slots=True)
class AdapterChange:
    """A load or unload that an operator asked one worker for, and that all others follow."""

    name: Annotated[str, Meta(min_length=1, max_length=MAX_ADAPTER_NAME_CHARS)]
    time_us: Annotated[int, Meta(ge=0, le=1 << 62)]
    """By the clock of that worker, and later than that of any change of this name that it knew."""

    root: Annotated[str, Meta(max_length=4_096)] = ""
    content: Annotated[str, Meta(max_length=64)] = ""
    """Empty for an unload."""

    is_3d_weight: bool = False


class LatestChanges:
    """The last change of each name, of the 1,024 names that were changed last: wherever they are merged, the same."""

    def __init__(self) -> None:
        self._by_name: dict[str, AdapterChange] = {}

    def __iter__(self) -> Iterator[AdapterChange]:
        return iter(tuple(self._by_name.values()))

    def get(self, name: str) -> AdapterChange | None:
        """Return the last change of a name."""
        return self._by_name.get(name)

    def next_time_us(self, name: str, now_us: int) -> int:
        """Return the time for another change of a name: after the last one, whoever's clock is wrong."""
        last = self._by_name.get(name)
        return now_us if last is None else max(now_us, last.time_us + 1)

    def is_new(self, change: AdapterChange) -> bool:
        """Return whether nothing as late is known of its name. Of two at the same time all choose the same one."""
        known = self._by_name.get(change.name)
        if known is None:
            return len(self._by_name) < _MAX_CHANGES or _order(change) > min(map(_order, self._by_name.values()))
        return _order(change) > _order(known)

    def note(self, change: AdapterChange) -> bool:
        """Take note of a change; returns whether it is new."""
        if not self.is_new(change):
            return False
        self._by_name[change.name] = change
        if len(self._by_name) > _MAX_CHANGES:
            del self._by_name[min(self._by_name.values(), key=_order).name]
        return True


def _order(change: AdapterChange) -> tuple[int, str, str]:
    return change.time_us, change.content, change.name
