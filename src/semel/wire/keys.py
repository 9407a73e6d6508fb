"""Transport keys: who may be which end of a link, and which generation of keys a link uses. Pure.

Each role has an X25519 pair of its own: a frontend's file has its own secret and the workers' public key, so it cannot
make a worker, and vice versa. A rotation adds a generation and leaves the one before it accepted. The rules:

- A worker takes every generation that its file has, each with the keys of that generation only.
- A frontend begins with its newest, and with every failure tries the next one that its file has. So two ends whose
  files have any generation in common find it, whichever file was replaced first.
- A link of a generation that is not in the file any more ends.

Both ends of a generation also share a `link` key, with which a handshake proves over any address that they belong
together. It is no digest's key: rotating transport keys keeps every digest.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from semel.core import Key
from semel.wire.proof import Role

__all__ = ["DERIVED", "MAX_GENERATIONS", "PUBLIC_BYTES", "Generation", "TransportKeys"]

PUBLIC_BYTES: Final = 32
MAX_GENERATIONS: Final = 2

DERIVED: Final = 0
"""The number of the only generation that comes of a fleet key."""


@dataclass(frozen=True, slots=True, repr=False)
class Generation:
    """The keys of one role and one generation."""

    number: int
    secret: bytes
    """This role's own X25519 secret."""

    peer: bytes
    """The public key of the other role."""

    link: Key
    """The key that both roles prove in a handshake."""

    made_s: int = field(default=0, compare=False)
    """Its creation, in seconds of Unix time; nothing is decided by it."""

    def __post_init__(self) -> None:
        if self.number < 0:
            raise ValueError(f"a generation is counted from 1, this one is {self.number}")
        if len(self.secret) != PUBLIC_BYTES or len(self.peer) != PUBLIC_BYTES:
            raise ValueError(f"a transport key has {PUBLIC_BYTES} bytes")

    def __repr__(self) -> str:
        return f"Generation({self.number}, {self.link.id})"


@dataclass(frozen=True, slots=True)
class TransportKeys:
    """One role's generations, the oldest first."""

    role: Role
    generations: tuple[Generation, ...]

    def __post_init__(self) -> None:
        numbers = [one.number for one in self.generations]
        if not 1 <= len(numbers) <= MAX_GENERATIONS:
            raise ValueError(f"there are 1 to {MAX_GENERATIONS} generations of transport keys, not {len(numbers)}")
        if sorted(set(numbers)) != numbers:
            raise ValueError(f"the generations {numbers} are not in order")
        if len({one.link for one in self.generations}) < len(numbers):
            raise ValueError(f"the generations {numbers} have the same key")

    @property
    def newest(self) -> Generation:
        """The one that links should use."""
        return self.generations[-1]

    def get(self, link_id: str) -> Generation | None:
        """Return the generation whose link key has this id; None if it is not accepted."""
        return next((one for one in self.generations if one.link.id == link_id), None)

    def attempt(self, failures: int, *, newest_only: bool = False) -> Generation:
        """Return what a frontend tries next after so many failures in a row."""
        if newest_only:
            return self.newest
        return self.generations[-1 - failures % len(self.generations)]

    def accepts(self, generation: Generation) -> bool:
        """Return whether a link that was opened with a generation may stay. Its number alone does not say so."""
        return generation in self.generations
