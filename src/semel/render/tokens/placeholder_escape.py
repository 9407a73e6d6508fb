"""Placeholder escape: a client's text never becomes a placeholder token (threats S14).

A template mixes its own text with the client's. In the result it cannot be decided where an `<|image_pad|>` came from.
Therefore the client's spellings of placeholders are broken before rendering. A guard letter goes after the first
character of each spelling. One also goes after a text that ends with the beginning of a spelling, because a template
may add the rest. The rendered text is split at the guard, which removes it, and the pieces are tokenised separately, so
no spelling is ever complete.

The guard is a letter that neither the request nor the template uses. It comes from Linear A, a script that
has not been readable for 3,400 years. Unlike a noncharacter it survives the `repr` of a list that a template prints.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final

from semel.errors import InvalidRequest

__all__ = ["LETTERS", "are_spelled", "break_spellings", "map_strings", "strings_in", "unused_letters"]

LETTERS: Final = "".join(map(chr, range(0x10600, 0x10737)))
"""The letters that guards are chosen from: 311 letters of Linear A, all printable."""

_MAX_DEPTH: Final = 128


def strings_in(value: object) -> Iterator[str]:
    """Every string in a JSON value, including names of fields. Nesting is bounded, so that later walks may recurse."""
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
    """Return the same JSON value with `change` applied to each of its strings."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {map_strings(key, change): map_strings(inner, change) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [map_strings(inner, change) for inner in value]
    return value


def unused_letters(text: str) -> Iterator[str]:
    """Yield the letters that can mark positions in a rendering of `text`."""
    yield from (letter for letter in LETTERS if letter not in text)
    raise InvalidRequest(
        "the request uses all letters of Linear A (U+10600 to U+10736), but rendering it needs some that it does not "
        "use: leave a few out"
    )


def break_spellings(literals: Iterable[str], guard: str, *, apart: Iterable[str] = ()) -> Callable[[str], str]:
    """A function that puts `guard` into each spelling of the `literals`, and after a text that ends as one begins.

    Those that are `apart` are broken after each character: they are several tokens, and cut once, their parts may give
    these very tokens.
    """
    literals = tuple(literals)
    several = re.compile("|".join(map(re.escape, apart)) or "(?!)")
    # The look-ahead consumes only one character, so that overlapping spellings are all broken.
    starts = re.compile(f"(?s)(?={'|'.join(map(re.escape, literals))}).")
    begins, _ = _parts(literals)

    def broken(text: str) -> str:
        spread = several.sub(lambda found: guard.join(found[0]) + guard, text)
        return starts.sub(rf"\g<0>{guard}", spread) + (guard if text.endswith(begins) else "")

    return broken


def are_spelled(literals: Iterable[str], texts: Sequence[str]) -> bool:
    """Return whether a text spells one of the literals, alone or where one text ends and another begins."""
    literals = tuple(literals)
    words = "\0".join(texts)
    for literal in literals:
        if literal in words:
            return True
    begins, ends = _parts(literals)
    return any(text.endswith(begins) for text in texts) and any(text.startswith(ends) for text in texts)


@lru_cache(64)
def _parts(literals: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the proper prefixes and the proper suffixes of the literals."""
    cuts = [(literal, cut) for literal in literals for cut in range(1, len(literal))]
    return tuple(literal[:cut] for literal, cut in cuts), tuple(literal[cut:] for literal, cut in cuts)
