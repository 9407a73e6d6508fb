"""The context of every scenario: both servers and their clients, images, number of rounds, progress bar."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from semel.lab.bench.serving.alternate import Pair, take_turns
from semel.lab.bench.serving.client import Client
from semel.lab.bench.serving.images import Images
from semel.lab.bench.serving.procfs import cpu_s
from semel.lab.bench.serving.servers import Launch, Server

__all__ = ["Bench", "Effort", "Side", "Tell"]

_Result = TypeVar("_Result")


class Tell(Protocol):
    """Shows the progress of a run."""

    def __call__(self, what: str, done: int, total: int) -> None:
        """The current work, its finished rounds, and their total."""


@dataclass(frozen=True, slots=True)
class Effort:
    """The number of rounds. The first rounds of each measurement are warm-up and not counted."""

    short_turns: int
    """For requests that take milliseconds."""

    long_turns: int
    """For requests that take a second: new images, conversations."""

    bursts: int
    """For measurements that run for some time, or with many requests at once."""

    burst_s: float
    mixed_requests: int
    agent_turns: int

    @classmethod
    def of(cls, *, quick: bool) -> Effort:
        """About 15 minutes on a machine with 2 cores; with `quick` shorter and less exact."""
        return cls(40, 4, 4, 2.0, 300, 12) if quick else cls(200, 10, 16, 2.0, 1_500, 50)


@dataclass(frozen=True, slots=True)
class Side:
    """One server as a scenario sees it."""

    server: Server
    client: Client
    levels: str = ""
    """`SEMEL` of vLLM's own server with semel inside; empty for another."""

    @property
    def has_door(self) -> bool:
        """Return whether it is vLLM's own server with semel inside."""
        return bool(self.levels)

    def cpu_s(self) -> float:
        """Return the CPU time of all its processes so far."""
        return cpu_s(self.server.pids())

    def frontend_cpu_s(self) -> float:
        """Return the CPU time of its HTTP processes so far."""
        return cpu_s(self.server.frontend_pids())


@dataclass(frozen=True, slots=True)
class Bench:
    """One run of the benchmark."""

    sides: Pair[Side]
    launch: Launch | None
    """How the servers were started; None if they were not started here."""

    images: Images
    effort: Effort
    tell: Tell

    @property
    def is_here(self) -> bool:
        """Return whether the processes of both sides can be inspected."""
        return self.sides.semel.server.is_here and self.sides.vllm.server.is_here

    async def turns(
        self, what: str, work: Callable[[Side, int], Awaitable[_Result]], *, turns: int, warming: int = 1
    ) -> Pair[list[_Result]]:
        """Let both sides do the work in alternation; the first `warming` rounds are not returned."""
        done = 0

        def on_turn() -> None:
            nonlocal done
            done += 1
            self.tell(what, done, turns + warming)

        all_turns = await take_turns(self.sides, work, turns=warming + turns, on_turn=on_turn)
        return Pair(all_turns.semel[warming:], all_turns.vllm[warming:])
