"""What every scenario has at hand: both servers and their clients, pictures, how often to ask, and the progress bar."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from semel.bench.serving.alternate import Pair, take_turns
from semel.bench.serving.client import Client
from semel.bench.serving.pictures import Pictures
from semel.bench.serving.procfs import processor_s
from semel.bench.serving.servers import Launch, Server

__all__ = ["Bench", "Effort", "Side", "Tell"]

_Result = TypeVar("_Result")


class Tell(Protocol):
    """Shows how far a run is."""

    def __call__(self, what: str, done: int, total: int) -> None:
        """What is done, how often it was, and how often it will be."""


@dataclass(frozen=True, slots=True)
class Effort:
    """How often things are asked. The first turns of everything warm it up and are not counted."""

    short_turns: int
    """Of what takes milliseconds."""

    long_turns: int
    """Of what takes a second: new pictures, conversations."""

    bursts: int
    """Of what runs for some time, or comes many at a time."""

    burst_s: float
    mixed_requests: int

    @classmethod
    def of(cls, *, quick: bool) -> Effort:
        """About 15 minutes on a machine with 2 cores; if quick, rougher and sooner."""
        return cls(40, 4, 4, 2.0, 300) if quick else cls(200, 10, 16, 2.0, 1_500)


@dataclass(frozen=True, slots=True)
class Side:
    """One server as a scenario sees it."""

    server: Server
    client: Client

    def processor_s(self) -> float:
        """The processor time of all its processes so far."""
        return processor_s(self.server.pids())

    def frontend_processor_s(self) -> float:
        """Of those that serve HTTP."""
        return processor_s(self.server.frontend_pids())


@dataclass(frozen=True, slots=True)
class Bench:
    """A run."""

    sides: Pair[Side]
    launch: Launch | None
    """How the servers were started, if here."""

    pictures: Pictures
    effort: Effort
    tell: Tell

    @property
    def is_here(self) -> bool:
        """Whether the processes of both sides can be looked at."""
        return self.sides.semel.server.is_here and self.sides.vllm.server.is_here

    async def turns(
        self, what: str, work: Callable[[Side, int], Awaitable[_Result]], *, turns: int, warming: int = 1
    ) -> Pair[list[_Result]]:
        """Let both sides do it in turns; those of the warm-up come before the first and are not in what is returned."""
        done = 0

        def on_turn() -> None:
            nonlocal done
            done += 1
            self.tell(what, done, turns + warming)

        all_turns = await take_turns(self.sides, work, turns=warming + turns, on_turn=on_turn)
        return Pair(all_turns.semel[warming:], all_turns.vllm[warming:])
