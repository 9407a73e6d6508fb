"""Which connections are taken, and which are closed for others: beside a slow and obvious model, with mutants (S25)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semel.web.admission import EXPENDABLE, Admission, Place, Stage, mark_evictable
from tests.effort import examples

MAX, RESERVE, OF_ADDRESS = 6, 2, 4
ADDRESSES = ("a", "b", "c", "d")

Step = tuple[str, int]
"""What happens: `open ADDRESS`, a stage, or `ends`; and to which of the connections that there are."""

STEPS = st.lists(
    st.tuples(
        st.sampled_from([f"open {one}" for one in ADDRESSES] * 2 + ["silent", "idle", "busy", "ends"]),
        st.integers(0, 30),
    ),
    max_size=80,
)


@dataclass(eq=False)
class Seen:
    """A connection, and what was seen of it."""

    place: Place
    since: int
    """The step with which it entered its stage."""

    is_closed: bool = False

    def close(self) -> None:
        assert not self.is_closed, "closed twice"
        self.is_closed = True


@dataclass
class Model:
    """Every connection in a list, looked through from the oldest on."""

    seen: list[Seen] = field(default_factory=list)

    def live(self, *, reserved: bool) -> list[Seen]:
        return [one for one in self.seen if one.place.stage is not None and one.place.is_reserved == reserved]

    def held(self, address: str) -> int:
        return sum(one.place.address == address for one in self.live(reserved=False))

    def in_stage(self, stage: Stage) -> list[Seen]:
        return [one for one in self.live(reserved=False) if one.place.stage is stage]


def check_open(model: Model, admission: Admission, address: str, step: int) -> None:
    """Open one, and see that whoever lost its place for it had to."""
    before = {one: one.place.stage for one in model.seen}
    held = {one: model.held(one) for one in ADDRESSES}
    total, at_limit = len(model.live(reserved=False)), held[address] >= OF_ADDRESS
    own_silent = [one for one in model.in_stage(Stage.SILENT) if one.place.address == address]
    reserved = len(model.live(reserved=True))
    place = admission.open(address)
    opened = Seen(place, step)
    place.on_eviction = opened.close
    closed = [one for one in model.seen if before[one] is not None and one.place.stage is None]
    model.seen.append(opened)
    assert all(one.is_closed for one in closed)
    assert not [one for one in closed if before[one] is Stage.BUSY and not one.place.is_reserved], "an answer was cut"
    regular = [one for one in closed if not one.place.is_reserved]
    if total < MAX and not at_limit:
        assert not closed
        assert not place.is_reserved
        return
    if place.is_reserved:
        assert not regular, "closed in vain"
        assert len(closed) == (reserved >= RESERVE)
        assert not own_silent, "one of its own could have made room"
        return
    assert len(closed) == len(regular) == 1, "more than the limit"
    (victim,) = regular
    if victim.place.address == address:
        assert victim.since == min(one.since for one in own_silent), "an older one could have gone"
        return
    assert not at_limit
    assert held[victim.place.address] > held[address] + (before[victim] is Stage.IDLE), "the poor paid for the rich"


def check(admission: Admission, steps: Sequence[Step]) -> None:
    model = Model()
    for step, (what, number) in enumerate(steps):
        if what.startswith("open "):
            check_open(model, admission, what.removeprefix("open "), step)
        elif live := [one for one in model.seen if one.place.stage is not None]:
            one = live[number % len(live)]
            if what == "ends":
                one.place.release()
                continue
            one.since = one.since if one.place.stage is Stage(what) else step
            one.place.enter(Stage(what))
        check_counts(model, admission)


def check_counts(model: Model, admission: Admission) -> None:
    assert len(admission) == len(model.live(reserved=False)) <= MAX
    stages = {stage.value: len(model.in_stage(stage)) for stage in Stage}
    assert dict(admission.by_stage()) == stages | {"reserved": len(model.live(reserved=True))}
    assert len(model.live(reserved=True)) <= RESERVE
    assert all(model.held(one) <= OF_ADDRESS for one in ADDRESSES)


def made(kind: type[Admission] = Admission) -> Admission:
    return kind(MAX, reserve=RESERVE, max_per_address=OF_ADDRESS)


@given(STEPS)
@settings(max_examples=examples(300), deadline=None)
def test_who_loses_a_place_had_no_request_or_more_connections_than_the_other_S25(steps: Sequence[Step]) -> None:
    check(made(), steps)


class WithoutLimit(Admission):
    def open(self, address: str, *, is_proxy: bool = False) -> Place:  # noqa: ARG002
        return self._add(Place(self, address, is_reserved=False))


class ClosesAnswers(Admission):
    def _victim(self, address: str, count: int) -> Place | None:
        return super()._victim(address, count) or next(iter(self.all_busy), None)

    all_busy: list[Place] = []  # noqa: RUF012

    def move(self, place: Place, stage: Stage | None) -> None:
        super().move(place, stage)
        self.all_busy = [one for one in [*self.all_busy, place] if one.stage is Stage.BUSY and not one.is_reserved]


class ServesTheRich(Admission):
    def _victim(self, address: str, count: int) -> Place | None:  # noqa: ARG002
        return self._evictable[Stage.SILENT].oldest_of_largest() or self._evictable[Stage.IDLE].oldest_of_largest()


class RefusesFirst(Admission):
    def _victim(self, address: str, count: int) -> Place | None:  # noqa: ARG002
        return None


class ForgetsAddresses(Admission):
    def open(self, address: str, *, is_proxy: bool = True) -> Place:  # noqa: ARG002
        return super().open(address, is_proxy=True)


class EndlessReserve(Admission):
    def _open_reserved(self, address: str) -> Place:
        place = Place(self, address, is_reserved=True)
        self._reserved.add(place)
        return place


ANSWERED: list[Step] = [("open a", 0), ("open a", 0), ("open b", 0), ("open b", 0), ("open c", 0), ("open c", 0)]
ANSWERED += [("busy", number) for number in range(6)]
SCRIPTS: dict[type[Admission], list[Step]] = {
    WithoutLimit: [("open a", 0)] * 7,
    ClosesAnswers: [*ANSWERED, ("open d", 0)],
    ServesTheRich: [("open a", 0), ("open a", 0), ("busy", 0), ("busy", 1), *([("open b", 0)] * 4), ("open a", 0)]
    + [("busy", number) for number in range(2, 7)]
    + [("ends", 2), ("open c", 0), ("open b", 0)],
    RefusesFirst: [("open a", 0)] * 3 + [("open b", 0)] * 4,
    ForgetsAddresses: [("open a", 0)] * 5 + [("busy", 0)] * 5 + [("open a", 0)],
    EndlessReserve: [*ANSWERED, *([("open a", 0)] * 4)],
}


@pytest.mark.parametrize("mutant", SCRIPTS, ids=lambda kind: kind.__name__)
def test_a_mutant_is_found(mutant: type[Admission]) -> None:
    check(made(), SCRIPTS[mutant])
    with pytest.raises(AssertionError):
        check(made(mutant), SCRIPTS[mutant])


def test_a_flood_from_one_address_costs_nobody_else_a_connection_S25() -> None:
    admission = Admission(100, reserve=RESERVE)
    closed: list[str] = []

    def opened(address: str) -> Place:
        place = admission.open(address)
        place.on_eviction = lambda: closed.append(address)
        return place

    others = [opened(f"honest {number}") for number in range(40)]
    for place in others[:20]:
        place.enter(Stage.BUSY)
        place.enter(Stage.IDLE)
    for _ in range(10_000):
        opened("flood")
    newcomers = [opened(f"new {number}") for number in range(20)]
    assert set(closed) == {"flood"}
    assert all(place.stage is not None and not place.is_reserved for place in (*others, *newcomers))
    assert admission.closed["silent"] == len(closed) == 10_000 - 60 + 20


def test_a_named_proxy_has_no_limit_of_its_own() -> None:
    admission = made()
    places = [admission.open("a", is_proxy=True) for _ in range(MAX)]
    assert not [place for place in places if place.is_reserved or place.stage is None]


def test_what_has_given_up_its_protection_is_closed_for_another() -> None:
    admission = made()
    scope: dict[str, Any] = {}
    places = [admission.open(ADDRESSES[number % 3]) for number in range(MAX)]
    for place in places:
        place.enter(Stage.BUSY)
    assert admission.open("d").is_reserved
    mark_evictable(scope)  # a server that has no such thing
    scope["extensions"] = {EXPENDABLE: {"give_up": lambda: places[0].enter(Stage.SILENT)}}
    mark_evictable(scope)
    assert not admission.open("d").is_reserved
    assert places[0].stage is None
