"""Tells what was ignored of a request: to the client in a header, to the operator in a metric and in the log."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Final

from starlette.requests import Request

from semel.frontend.api.shared.unknown_fields import UnknownFields
from semel.telemetry import metrics
from semel.telemetry.meter import Sample

__all__ = ["IGNORED_FIELDS", "IGNORED_FIELDS_HEADER", "IgnoredFields"]

IGNORED_FIELDS_HEADER: Final = "x-semel-ignored-fields"
IGNORED_FIELDS: Final = "ignored_fields"
"""The key under which a request's state has the value of that header, if something was ignored."""

_LOG_EVERY_S: Final = 60.0

logger = logging.getLogger(__name__)


class IgnoredFields:
    """Counts the unknown fields of requests by route, and logs some of them once a minute at most."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._fields: Counter[str] = Counter()
        self._quiet_until = float("-inf")
        self._unlogged = 0

    def tell(self, request: Request, unknown: UnknownFields) -> None:
        """Count what was ignored of a request, and warn of it."""
        route = getattr(request.scope.get("route"), "path", "unknown")
        self._fields[route] += unknown.count
        if unknown.mode == "warn":
            setattr(request.state, IGNORED_FIELDS, header := unknown.header())
            self._log(route, header)

    def samples(self) -> Iterator[Sample]:
        """The counters, for a meter."""
        for route, count in self._fields.items():
            yield metrics.IGNORED_FIELDS, count, (route,)

    def _log(self, route: str, header: str) -> None:
        self._unlogged += 1
        if (now := self._now()) < self._quiet_until:
            return
        logger.warning(
            "a request to %s has fields that no API has or this one does not; they are ignored: %s "
            "(requests with such fields since the last line like this: %d)",
            *(route, header, self._unlogged),
        )
        self._quiet_until, self._unlogged = now + _LOG_EVERY_S, 0
