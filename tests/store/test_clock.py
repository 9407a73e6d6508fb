"""A machine's clock that jumps deletes no file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from semel.store.clock import FileClock
from semel.store.store import MediaStore
from tests.store.stores import KEY, MIB, all_of, on_disk, upload_of

DAY_S = 86_400.0
FILES = 5


class Machine:
    """A wall clock that can be set, and a monotonic one that cannot."""

    def __init__(self) -> None:
        self.up_s = 100.0
        self.offset_s = 1_000_000.0

    def wall(self) -> float:
        return self.up_s + self.offset_s

    def monotonic(self) -> float:
        return self.up_s


def file_clock(machine: Machine) -> Callable[[], float]:
    return FileClock(machine.wall, machine.monotonic)


async def kept_after_a_jump(folder: Path, jump_s: float, clock_of: Callable[[Machine], Callable[[], float]]) -> int:
    """The files of two tenants that are left when the clock is wrong for a second, and right again."""
    machine = Machine()
    store = MediaStore(
        on_disk(folder), key=KEY, capacity_bytes=64 * MIB, ttl_s=int(30 * DAY_S), clock=clock_of(machine)
    )
    await store.refresh()
    for tenant in ("acme", "umbra"):
        for number in range(FILES):
            await store.put(tenant, upload_of(bytes([number])))
    machine.offset_s += jump_s
    for _ in range(2):
        machine.up_s += 1
        await store.expire()
        await store.refresh()
    machine.offset_s -= jump_s
    machine.up_s += 1
    await store.expire()
    await store.refresh()
    assert len(await all_of(store)) == len(await all_of(store, "umbra"))
    return sum([len(page) async for page in on_disk(folder).list("")])


@pytest.mark.parametrize("days", [31, -31, 400, 0.1])
async def test_a_clock_that_is_wrong_for_a_moment_deletes_nothing(tmp_path: Path, days: float) -> None:
    assert await kept_after_a_jump(tmp_path, days * DAY_S, file_clock) == 2 * FILES


async def test_control_by_the_wall_clock_alone_every_file_is_deleted(tmp_path: Path) -> None:
    assert await kept_after_a_jump(tmp_path, 31 * DAY_S, lambda machine: machine.wall) == 0


def test_a_clock_that_stays_where_it_jumped_to_is_believed_after_a_minute() -> None:
    machine = Machine()
    clock = file_clock(machine)
    machine.offset_s += DAY_S
    assert clock() == machine.wall() - DAY_S
    machine.up_s += 30
    machine.offset_s += DAY_S  # it jumps again
    assert clock() == machine.wall() - 2 * DAY_S
    machine.up_s += 59
    assert clock() == machine.wall() - 2 * DAY_S
    machine.up_s += 1
    assert clock() == machine.wall()


def test_small_steps_of_the_clock_are_followed_both_ways() -> None:
    machine = Machine()
    clock = file_clock(machine)
    for step_s in (1_800.0, 1_800.0, -3_000.0, 0.5):
        machine.offset_s += step_s
        machine.up_s += 1
        assert clock() == pytest.approx(machine.wall())
