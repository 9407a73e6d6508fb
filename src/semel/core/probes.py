"""What a process's libraries make of the probes: small media that every frontend and worker decodes when it starts.

Two processes with equal results make equal features, whatever patches of their libraries they run. Each probe has a
short hash of its own, so that whoever differs can be told in what.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from blake3 import blake3

__all__ = ["PROBE_BYTES", "Probes"]

PROBE_BYTES: Final = 4
"""The bytes of one probe's hash."""

_NO_VERSIONS: Final[Mapping[str, str]] = {}


@dataclass(frozen=True, slots=True)
class Probes:
    """The results of all probes in one process."""

    catalogue: str
    """Which probes: a hash of their names and media."""

    results: bytes
    """The hashes of what came out, in the catalogue's order."""

    versions: Mapping[str, str] = field(default_factory=lambda: _NO_VERSIONS, compare=False)
    """Of the libraries, to be told where results differ; equal results may have different ones."""

    def __len__(self) -> int:
        return len(self.results) // PROBE_BYTES

    @property
    def hash(self) -> str:
        """Of all results together."""
        return blake3(self.catalogue.encode() + b"\0" + self.results).hexdigest()

    def first_difference(self, other: Probes) -> int | None:
        """The number of the first probe of the same catalogue whose results differ."""
        for start in range(0, max(len(self.results), len(other.results)), PROBE_BYTES):
            part = slice(start, start + PROBE_BYTES)
            if self.results[part] != other.results[part]:
                return start // PROBE_BYTES
        return None
