"""The top-level fields of a request that its API does not have: ignored with a warning, refused, or ignored. Pure.

Gateways and user interfaces add fields of their own, and vLLM ignores them. But a field with a typing error would be
ignored too, so a near miss of a field that the API has is refused.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Final, Literal

from semel.errors import InvalidRequest, excerpt

__all__ = ["UnknownFields", "UnknownFieldsMode", "header_of", "nearest"]

UnknownFieldsMode = Literal["warn", "refuse", "ignore"]

_MAX_NAMES: Final = 16
"""So many unknown fields of a request are named, and compared with those that the API has."""

_MAX_NAME_CHARS: Final = 64
_MIN_NEAR_CHARS: Final = 6
"""Shorter names are never a near miss of each other: `top_a` and `models` mean something elsewhere."""

_MIN_ALIKE_CHARS: Final = 4
_NOT_ALIKE: Final = re.compile(r"[^a-z0-9]")
_NOT_PRINTED: Final = re.compile(r"[^A-Za-z0-9_.\[\]-]")


@dataclass(slots=True)
class UnknownFields:
    """The unknown fields of one request, counted while they are read. Of their values nothing is kept."""

    mode: UnknownFieldsMode = "refuse"
    elsewhere: frozenset[str] = frozenset()
    """The fields of all APIs. One that another API has is ignored too, and is not taken for a typing error. Empty for a
    part of a request, whose unknown fields are always refused."""

    count: int = 0
    names: list[str] = field(default_factory=list)
    """Of the first ones, cut to a length that no field has."""

    def add(self, name: str) -> None:
        """Count a field."""
        self.count += 1
        if len(self.names) < _MAX_NAMES:
            self.names.append(name[: _MAX_NAME_CHARS + 1])

    def clear(self) -> None:
        """Begin again, with the same request."""
        self.count = 0
        self.names.clear()

    def check(self, known: Collection[str], sent: Collection[str]) -> None:
        """Refuse what is not ignored. `known` are the fields that the API has, `sent` those of them in the request."""
        if self.mode == "ignore" or not self.count:
            return
        for name in self.names:
            if name in self.elsewhere:
                continue
            if (meant := nearest(name, known)) is not None and meant not in sent:
                raise InvalidRequest.of(_printed(name), f"unknown field; did you mean {meant}?")
        if self.mode == "refuse":
            hint = ", or let the operator set --unknown-fields warn" if self.elsewhere else ""
            raise InvalidRequest.of(_printed(self.names[0]), f"unknown field; leave it out{hint}")


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that `name` was probably meant to be: the same letters written otherwise, or one slip away."""
    if len(name) > _MAX_NAME_CHARS:
        return None
    plain = _NOT_ALIKE.sub("", name.lower())
    return min((one for one in known if _is_near(name, one) or _is_alike(plain, one)), default=None)


def header_of(names: Iterable[str], count: int) -> str:
    """The names in a header: ASCII without controls, commas and spaces inside a name, and of a bounded length."""
    printed = [_printed(name) for name in names]
    more = [f"{count - len(printed)} more"] if count > len(printed) else []
    return ", ".join([*printed, *more])


def _printed(name: str) -> str:
    cut = name if len(name) <= _MAX_NAME_CHARS else f"{name[: _MAX_NAME_CHARS - 3]}..."
    return excerpt(_NOT_PRINTED.sub("?", cut)) or "?"


def _is_alike(plain: str, known: str) -> bool:
    """Whether they differ only in case and in what stands between words: `maxTokens`."""
    return len(plain) >= _MIN_ALIKE_CHARS and plain == _NOT_ALIKE.sub("", known)


def _is_near(name: str, known: str) -> bool:
    """Whether one letter is missing, too many or another, or two are swapped."""
    if min(len(name), len(known)) < _MIN_NEAR_CHARS or abs(len(name) - len(known)) > 1:
        return False
    shorter = min(len(name), len(known))
    first = next((at for at in range(shorter) if name[at] != known[at]), shorter)
    left, right = name[first:], known[first:]
    while left and right and left[-1] == right[-1]:
        left, right = left[:-1], right[:-1]
    return max(len(left), len(right)) <= 1 or (len(left) == 2 and left == right[::-1])
