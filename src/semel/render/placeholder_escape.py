"""Keeping text text: what a client writes never becomes a placeholder token (threats S14).

A template mixes its own words with the client's, and afterwards nobody can tell whose `<|image_pad|>` it was. So the
client's spellings are broken before rendering: a guard letter goes behind the first character of each, and behind a
text that ends as one begins, since a template may put the rest of it there. The rendered text is split at the guard,
which removes it, and the pieces are tokenised apart, so no spelling is ever whole.

The guard is a letter that neither the request nor the template uses, taken from Linear A: nobody has been able to read
that script for 3,400 years, and unlike a noncharacter it survives the `repr` of a list that a template prints.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final

from semel.errors import InvalidRequest

__all__ = ["LETTERS", "are_spelled", "break_spellings", "map_strings", "strings_in", "unused_letters"]

LETTERS: Final = "".join(map(chr, range(0x10600, 0x10737)))
"""What guards are taken from: 311 letters of Linear A, all printable."""

_MAX_DEPTH: Final = 128


def strings_in(value: object) -> Iterator[str]:
    """Every string in a JSON value, names of fields too. Nesting is bounded, so that later walks may recurse."""
    layers: list[Iterator[object]] = [iter((value,))]
    while layers:
        for part in layers[-1]:
            if isinstance(part, str):
                yield part
            elif isinstance(part, Mapping):
                layers.append(iter((*part.keys(), *part.values())))
                break
            elif isinstance(part, list | tuple):
                layers.append(iter(part))
                break
        else:
            layers.pop()
        if len(layers) > _MAX_DEPTH:
            raise InvalidRequest(f"the request nests lists and objects over {_MAX_DEPTH} deep: flatten them")


def map_strings(value: Any, change: Callable[[str], str]) -> Any:
    """The same JSON value with `change` applied to each of its strings."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {map_strings(key, change): map_strings(inner, change) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [map_strings(inner, change) for inner in value]
    return value


def unused_letters(text: str) -> Iterator[str]:
    """The letters that may mark places of a rendering of `text`."""
    yield from (letter for letter in LETTERS if letter not in text)
    raise InvalidRequest(
        "the request uses all letters of Linear A (U+10600 to U+10736), but rendering it needs some that it does not "
        "use: leave a few out"
    )


def break_spellings(literals: Iterable[str], guard: str) -> Callable[[str], str]:
    """What puts `guard` into each of the `literals` that a text spells, and behind a text that ends as one begins."""
    literals = tuple(literals)
    # A look-ahead consumes one character only, so that spellings which overlap are all broken.
    starts = re.compile(f"(?s)(?={'|'.join(map(re.escape, literals))}).")
    begins, _ = _parts(literals)

    def broken(text: str) -> str:
        return starts.sub(rf"\g<0>{guard}", text) + (guard if text.endswith(begins) else "")

    return broken


def are_spelled(literals: Iterable[str], texts: Sequence[str]) -> bool:
    """Whether a text spells one of the literals, or one text ends as a literal begins and one begins as it ends."""
    literals = tuple(literals)
    words = "\0".join(texts)
    if any(literal in words for literal in literals):
        return True
    begins, ends = _parts(literals)
    return any(text.endswith(begins) for text in texts) and any(text.startswith(ends) for text in texts)


@lru_cache(64)
def _parts(literals: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What the literals begin with and what they end with, short of the whole."""
    cuts = [(literal, cut) for literal in literals for cut in range(1, len(literal))]
    return tuple(literal[:cut] for literal, cut in cuts), tuple(literal[cut:] for literal, cut in cuts)
