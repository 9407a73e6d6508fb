"""Backoff of a frontend's reconnects: short after a connection broke, long after a refusal that an operator
has to see to. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random, SystemRandom
from typing import Final

__all__ = ["NO_HANDSHAKE", "Backoff", "Retries"]

NO_HANDSHAKE: Final = "no_handshake"
"""The code of an attempt whose connection could not be encrypted: the keys differ, or the generation of the socket."""

_SYSTEM: Final = SystemRandom()
_NO_HANDSHAKES: Final = 12
"""Times in a row that a worker with two generations of keys may be met by the wrong one: 1 of 4,096."""


@dataclass(frozen=True, slots=True)
class Backoff:
    """The delay before a frontend connects again: doubled with each attempt."""

    first_s: float = 0.05
    max_s: float = 2.0
    refused_first_s: float = 30.0
    """After a refusal because of the protocol's version or the key."""

    refused_max_s: float = 300.0

    def delay_s(self, failures: int, random: Random = _SYSTEM) -> float:
        """Return the delay before the next attempt, with jitter, so that a fleet does not connect all at once."""
        return _doubled(self.first_s, self.max_s, failures) * random.uniform(0.5, 1.0)

    def refused_delay_s(self, refusals: int, random: Random = _SYSTEM) -> float:
        """Return the same after a refusal."""
        return _doubled(self.refused_first_s, self.refused_max_s, refusals) * random.uniform(0.5, 1.0)


class Retries:
    """The attempts of a link since its last session."""

    def __init__(self, backoff: Backoff) -> None:
        self.failures = 0
        self._backoff = backoff
        self._code = ""
        self._refusals = 0
        """Refusals in a row, for the same reason."""

    def reset(self) -> None:
        """There was a session, or something has changed: the next attempt may do."""
        self.failures = self._refusals = 0

    def delay_s(self, code: str, generations: int, random: Random) -> float:
        """Return the delay after an attempt or a session that ended with a code."""
        self._refusals = self._refusals + 1 if code == self._code else 1
        self._code = code
        failures, self.failures = self.failures, self.failures + 1
        # Other keys may be taken, and another socket of the same worker may have the right ones: these are tried soon.
        quick = {"protocol": 0, "key": 2 * (generations - 1), NO_HANDSHAKE: _NO_HANDSHAKES}.get(code)
        if quick is None or self._refusals <= quick:
            return self._backoff.delay_s(failures, random)
        return self._backoff.refused_delay_s(self._refusals - quick - 1, random)


def _doubled(first_s: float, max_s: float, times: int) -> float:
    return min(max_s, first_s * 2.0 ** min(times, 30))
