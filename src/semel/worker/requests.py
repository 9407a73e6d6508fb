"""The requests that a worker answers, by frontend and id."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from semel.engine.observed import Observed
from semel.fairness.turns import Turn

__all__ = ["Request", "abort_waiting", "request_ids", "tasks_of"]


@dataclass(slots=True)
class Request:
    """A request that is being answered."""

    task: asyncio.Task[None] | None = None
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when it waits for nothing in the intake."""

    observed: Observed | None = None
    """The span attributes of the answer, where requests are traced."""

    turn: Turn | None = None
    """Its turn at the engine, once it has one."""

    is_submitted: bool = False
    is_aborted: bool = False
    """True if an operator has ended it before it was submitted."""


Requests: TypeAlias = Iterable[Mapping[str, Request]]
"""Those of each frontend."""


def request_ids(requests: Requests, among: Collection[str] = ()) -> set[str]:
    """Return the ids of requests: all, or those among some."""
    found = {request_id for of_frontend in requests for request_id in of_frontend}
    return found.intersection(among) if among else found


def abort_waiting(requests: Requests, aborted: Collection[str]) -> set[str]:
    """End those with these ids that the engine does not have yet; returns their ids."""
    waiting = set()
    for of_frontend in requests:
        for request_id in of_frontend.keys() & aborted:
            request = of_frontend[request_id]
            if not request.is_submitted and request.task is not None:
                request.is_aborted = True
                request.task.cancel()
                waiting.add(request_id)
    return waiting


def tasks_of(requests: Requests) -> Iterator[asyncio.Task[None]]:
    """Yield the tasks that answer them."""
    for of_frontend in requests:
        for request in of_frontend.values():
            if request.task is not None:
                yield request.task
