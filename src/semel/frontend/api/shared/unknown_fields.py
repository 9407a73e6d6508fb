"""The top-level fields of a request that its API does not have: ignored with a warning, refused, or ignored. Pure.

Gateways and user interfaces add fields of their own, and vLLM ignores them. But a field with a typing error would be
ignored too, so a near miss of a field that the API has is refused.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from semel.errors import InvalidRequest, excerpt

__all__ = ["UnknownFields", "UnknownFieldsMode", "nearest"]

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
    """The unknown fields of one request. Of their values nothing is kept."""

    mode: UnknownFieldsMode = "refuse"
    elsewhere: frozenset[str] = frozenset()
    """The fields of all APIs. One that another API has is ignored too, and is not taken for a typing error. Empty for a
    part of a request, whose unknown fields are always refused."""

    count: int = 0
    names: Sequence[str] = ()
    """Of the first ones, cut to a length that no field has."""

    def check(self, names: Sequence[str], known: Collection[str], sent: Collection[str]) -> None:
        """Count the fields, and refuse those that are not ignored.

        `known` are the fields that the API has, `sent` those of the request.
        """
        self.count, self.names = len(names), [name[: _MAX_NAME_CHARS + 1] for name in names[:_MAX_NAMES]]
        if self.mode == "ignore" or not names:
            return
        for name in self.names:
            if name not in self.elsewhere and (meant := nearest(name, known)) is not None and meant not in sent:
                raise InvalidRequest.of(_printed(name), f"unknown field; did you mean {meant}?")
        if self.mode == "refuse":
            hint = ", or let the operator set --unknown-fields warn" if self.elsewhere else ""
            raise InvalidRequest.of(_printed(self.names[0]), f"unknown field; leave it out{hint}")

    def header(self) -> str:
        """List the names for a header: ASCII without controls, commas and spaces in a name, and of a bounded length."""
        more = [f"{self.count - len(self.names)} more"] if self.count > len(self.names) else []
        return ", ".join([*map(_printed, self.names), *more])


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Find the known name that was probably meant: the same letters written otherwise, or one slip away."""
    if len(name) > _MAX_NAME_CHARS:
        return None
    plain = _NOT_ALIKE.sub("", name.lower())
    return min((one for one in known if _is_near(name, one) or _is_alike(plain, one)), default=None)


def _printed(name: str) -> str:
    cut = name if len(name) <= _MAX_NAME_CHARS else f"{name[: _MAX_NAME_CHARS - 3]}..."
    return excerpt(_NOT_PRINTED.sub("?", cut)) or "?"


def _is_alike(plain: str, known: str) -> bool:
    """Compare them without case and what stands between words: `maxTokens`."""
    return len(plain) >= _MIN_ALIKE_CHARS and plain == _NOT_ALIKE.sub("", known)


def _is_near(name: str, known: str) -> bool:
    """Find out if one letter is missing, too many or another, or two are swapped."""
    if min(len(name), len(known)) < _MIN_NEAR_CHARS or abs(len(name) - len(known)) > 1:
        return False
    shorter = min(len(name), len(known))
    first = next((at for at in range(shorter) if name[at] != known[at]), shorter)
    left, right = name[first:], known[first:]
    while left and right and left[-1] == right[-1]:
        left, right = left[:-1], right[:-1]
    return max(len(left), len(right)) <= 1 or (len(left) == 2 and left == right[::-1])
