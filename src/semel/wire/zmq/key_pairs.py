"""The transport keys of both roles: how they are made, rotated and retired, and how a file holds those of one role.

Only the operator has both files. What they have in common is checked before they are changed: the same generations,
and each the public key of the other's secret.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace
from typing import Final, Self

import msgspec

from semel.core import Key
from semel.wire.keys import MAX_GENERATIONS, PUBLIC_BYTES, Generation, TransportKeys
from semel.wire.proof import Role
from semel.wire.zmq.address import public_key

__all__ = ["KeyPairs", "decode_keys", "encode_keys"]

_FIRST: Final = 1


class _Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    generation: int
    made: int
    secret: str
    peer: str
    link: str


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    role: Role
    generations: list[_Row]


@dataclass(frozen=True, slots=True)
class KeyPairs:
    """The keys of both roles, generation by generation."""

    frontend: TransportKeys
    worker: TransportKeys

    def __post_init__(self) -> None:
        ours, theirs = self.frontend.generations, self.worker.generations
        if [(one.number, one.link) for one in ours] != [(one.number, one.link) for one in theirs]:
            raise ValueError("frontends and workers have different generations")
        for one, other in zip(ours, theirs, strict=True):
            if public_key(one.secret) != other.peer or public_key(other.secret) != one.peer:
                raise ValueError(f"generation {one.number} of frontends is not that of workers")

    @classmethod
    def make(cls, now_s: int) -> Self:
        """Return a first generation."""
        frontend, worker = _generation(_FIRST, now_s)
        return cls(TransportKeys("frontend", (frontend,)), TransportKeys("worker", (worker,)))

    def rotate(self, now_s: int) -> Self:
        """Return one more generation; the newest of those before it stays accepted."""
        frontend, worker = _generation(self.frontend.newest.number + 1, now_s)
        return type(self)(_with(self.frontend, frontend), _with(self.worker, worker))

    def retire(self) -> Self:
        """Only the newest generation."""
        return type(self)(_newest(self.frontend), _newest(self.worker))


def encode_keys(keys: TransportKeys) -> str:
    """Return the file of one role."""
    rows = [
        _Row(one.number, one.made_s, one.secret.hex(), one.peer.hex(), one.link.secret.hex())
        for one in keys.generations
    ]
    text = msgspec.json.encode(_File(keys.role, rows))
    return msgspec.json.format(text, indent=2).decode() + "\n"


def decode_keys(text: str) -> TransportKeys:
    """Return the keys in a file; a `ValueError` if it is none, without any of its contents."""
    try:
        file = msgspec.json.decode(text, type=_File)
        rows = [
            Generation(
                one.generation,
                bytes.fromhex(one.secret),
                bytes.fromhex(one.peer),
                Key(bytes.fromhex(one.link)),
                made_s=one.made,
            )
            for one in file.generations
        ]
    except (msgspec.DecodeError, ValueError):
        raise ValueError("it has no transport keys") from None
    return TransportKeys(file.role, tuple(rows))


def _generation(number: int, now_s: int) -> tuple[Generation, Generation]:
    """Return what frontends and what workers get."""
    ours, theirs, link = (secrets.token_bytes(PUBLIC_BYTES) for _ in range(3))
    return (
        Generation(number, ours, public_key(theirs), Key(link), made_s=now_s),
        Generation(number, theirs, public_key(ours), Key(link), made_s=now_s),
    )


def _with(keys: TransportKeys, generation: Generation) -> TransportKeys:
    return replace(keys, generations=(*keys.generations, generation)[-MAX_GENERATIONS:])


def _newest(keys: TransportKeys) -> TransportKeys:
    return replace(keys, generations=(keys.newest,))
