"""What a frontend serves with, and whether it can."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from semel.core import Contract
from semel.errors import NotReady
from semel.frontend.fleet import Fleet
from semel.render import Pipeline

__all__ = ["Service", "Serving"]


@dataclass(frozen=True, slots=True)
class Serving:
    """The workers, and the pipeline that renders for them."""

    model: str
    """The name that clients know the model by."""

    fleet: Fleet
    contract: Contract
    pipeline: Pipeline


@dataclass(slots=True)
class Service:
    """The state behind the routes: ready with something to serve, or not and the reason."""

    max_body_bytes: int = 256 * 1024**2
    """The largest request that is read; over it the answer is 413."""

    started: int = field(default_factory=lambda: int(time.time()))
    _serving: Serving | None = None
    _reason: str = "the frontend is starting"

    def begin(self, serving: Serving) -> None:
        """Serve from now on."""
        self._serving, self._reason = serving, ""

    def suspend(self, reason: str) -> None:
        """Refuse new requests, with the reason."""
        self._serving, self._reason = None, reason

    @property
    def reason(self) -> str:
        """Why nothing can be served; empty when it can."""
        return self._reason

    def serving(self) -> Serving:
        """What to serve with."""
        if self._serving is None:
            raise NotReady(f"{self._reason}; try again in a moment")
        return self._serving
