"""The simulated network does to shipped links and listeners what a real one would."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from semel.lab.simulate import clock
from semel.lab.simulate.costs import MODELLED
from semel.lab.simulate.faults import Blip, Broken, Crash, Drain, Fault, Partition
from semel.lab.simulate.network import Network, Pipe
from semel.lab.simulate.processes import FleetSize, Host
from semel.lab.simulate.whole import Plan, World
from semel.lab.simulate.workload import Catalogue, Talks, Traffic

SIZE = FleetSize(2, 2)
WORKLOAD = Talks(Catalogue(images=10, size=(112, 112)), Traffic(rate=10.0, seconds=4.0, answer_tokens=4))


async def play(faults: Sequence[Fault]) -> tuple[list[int], int, int]:
    """Sessions with worker 0 that each frontend has had; refused requests; lost bytes."""
    network = Network(MODELLED)
    world = World(Plan(WORKLOAD, SIZE, faults=faults, seed=3), Host(SIZE, MODELLED, 3, network))
    await world.start()
    await world.play()
    await asyncio.sleep(15)
    figures = world.collect()
    world.check()
    return [one.fleet.workers[0].sessions for one in world._frontends], figures.refused, network.lost_bytes


@pytest.mark.parametrize(
    ("fault", "sessions", "loses"),
    [
        (None, [1, 1], False),
        (Partition(1.0, (0,), 0, for_s=5.0), [1, 1], False),
        (Partition(1.0, (0,), 0, for_s=12.0), [2, 1], True),
        (Blip(1.0, 0), [2, 2], True),
        (Crash(1.0, 0, for_s=1.0), [2, 2], True),
        (Drain(1.0, 0, for_s=1.0), [2, 2], True),
        (Broken(1.0, 0, for_s=1.0), [1, 1], False),
    ],
    ids=str,
)
def test_a_fault_ends_the_sessions_that_it_concerns_and_no_others(
    fault: Fault | None, sessions: list[int], loses: bool
) -> None:
    found, refused, lost = clock.run(play([] if fault is None else [fault]))
    assert found == sessions
    assert loses or not lost
    assert refused <= 3  # requests go to the other worker


def test_messages_take_their_latency_and_their_bytes() -> None:
    async def main() -> list[float]:
        network = Network(MODELLED)
        arrived: list[float] = []
        pipe = Pipe(network, "to_workers", lambda _: arrived.append(network.loop.time()))
        for _ in range(2):
            pipe.send([bytes(int(MODELLED.bandwidth))])
        pipe.cut()
        pipe.send([b"held"])
        await asyncio.sleep(5)
        assert pipe.nbytes == 4
        pipe.heal()
        await asyncio.sleep(1)
        return arrived

    latency = MODELLED.latency_s
    assert clock.run(main()) == pytest.approx([1 + latency, 2 + latency, 5 + latency])
