"""The index of a media store against a slow model, and what it promises to tenants."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from hypothesis.stateful import run_state_machine_as_test as run_machine

from semel.core import Digest
from semel.fairness.tenant_lru import TenantLru
from semel.store.index import SMALLEST_BYTES, FileIndex, NoRoom, newest, renewed
from semel.store.names import StoredFile
from tests.effort import examples
from tests.store.model import OWNERS, Model, digest_of, file_from

CAPACITY = 8 * SMALLEST_BYTES
IDLE_S = 50.0
OWNER = st.integers(0, len(OWNERS) - 1)
CONTENT = st.integers(0, 5)
SIZE = st.sampled_from([0, 1, SMALLEST_BYTES, 2 * SMALLEST_BYTES, 4 * SMALLEST_BYTES, 9 * SMALLEST_BYTES])
QUICK = settings(
    max_examples=examples(75), stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)


def size_of(content: int) -> int:
    """The same content has the same size."""
    return (1, SMALLEST_BYTES, 2 * SMALLEST_BYTES, 3 * SMALLEST_BYTES, 100, 5 * SMALLEST_BYTES)[content]


class IndexMachine(RuleBasedStateMachine):
    """Uploads, uses, deletions, expiries and restarts of three owners."""

    kind: type[FileIndex] = FileIndex

    @initialize()
    def start(self) -> None:
        self.now_s = 0.0
        self.index = self.kind(CAPACITY, idle_s=IDLE_S)
        self.model = Model(CAPACITY, IDLE_S)
        self.writing: list[StoredFile] = []

    def tick(self, by_s: float = 1.0) -> float:
        self.now_s += by_s
        return self.now_s

    @rule(owner=OWNER, content=CONTENT, ttl_s=st.integers(1, 200))
    def begin(self, owner: int, content: int, ttl_s: int) -> None:
        now_s = self.tick()
        if self.writing:
            return  # what is refused while another is being written loses the order of use: a test of its own
        file = file_from(owner, content, nbytes=size_of(content), created_s=int(now_s), expires_s=int(now_s) + ttl_s)
        try:
            expected = self.model.reserve(file.owner, file.nbytes, now_s)
        except NoRoom:
            with pytest.raises(NoRoom):
                self.index.reserve(file.owner, file.nbytes, now_s)
            return
        assert {gone.id for gone in self.index.reserve(file.owner, file.nbytes, now_s)} == expected
        self.writing.append(file)

    @precondition(lambda self: self.writing)
    @rule(fails=st.booleans())
    def end(self, fails: bool) -> None:
        file = self.writing.pop()
        if fails:
            self.index.cancel(file.owner, file.nbytes)
            self.model.cancel(file.owner, file.nbytes)
            return
        if (existing := self.model.files.get(file.id)) is not None:
            file = renewed(file, [existing], -1.0)
        assert self.index.commit(file) == self.model.commit(file)

    @rule(foreign=OWNER, pick=st.integers(0, 20))
    def get(self, foreign: int, pick: int) -> None:
        now_s, files = self.tick(), sorted(self.model.files.values(), key=lambda file: file.id)
        file = files[pick % len(files)] if files else file_from(0, 0)
        query = file.owner if pick % 3 else OWNERS[foreign], file.id, now_s
        assert self.index.get(*query) == self.model.get(*query)

    @rule(owner=OWNER, of=OWNER, content=CONTENT)
    def remove(self, owner: int, of: int, content: int) -> None:
        file = self.model.files.get(digest_of(of, content))
        if file is not None and file.owner == OWNERS[owner]:
            self.model.leave(file.id)
        else:
            file = None
        assert self.index.remove(OWNERS[owner], digest_of(of, content)) == file

    @rule(by_s=st.sampled_from([1.0, 30.0, 60.0, 200.0]))
    def wait(self, by_s: float) -> None:
        self.tick(by_s)

    @rule()
    def sweep(self) -> None:
        now_s = self.tick()
        assert {file.id for file in self.index.expire(now_s)} == self.model.expire(now_s)

    @rule(
        owner=OWNER,
        limit=st.integers(1, 4),
        order=st.sampled_from(["asc", "desc"]),
        purpose=st.sampled_from(["", "vision", "user_data", "batch"]),
        after=st.none() | st.tuples(OWNER, CONTENT),
    )
    def page(self, owner: int, limit: int, after: tuple[int, int] | None, **how: Any) -> None:
        now_s = self.tick()
        how |= {"limit": limit, "after": None if after is None else digest_of(*after)}
        assert self.index.page(OWNERS[owner], now_s, **how) == self.model.page(OWNERS[owner], now_s, **how)

    @precondition(lambda self: not self.writing)
    @rule(seed=st.randoms(use_true_random=False))
    def restart(self, seed: Any) -> None:
        """The order of use is lost, and that of the uploads takes its place."""
        now_s = self.tick()
        files = list(self.model.files.values())
        self.model = Model(CAPACITY, IDLE_S)
        self.model.room.now_s = now_s if files else 0.0
        for file in sorted(files, key=lambda file: (file.created_s, file.id)):
            self.model.put(file)
        seed.shuffle(files)
        self.index = self.kind(CAPACITY, idle_s=IDLE_S)
        listing = self.index.listing()
        assert not listing.add(files)
        assert not [doomed for slice_ in listing.finish(now_s) for doomed in slice_]

    @invariant()
    def has_what_the_model_has(self) -> None:
        assert {file.id: file for file in self.index} == self.model.files
        assert [self.index.nbytes_of(owner) for owner in OWNERS] == [self.model.nbytes_of(owner) for owner in OWNERS]
        assert self.index.nbytes <= CAPACITY


def test_the_index_does_what_the_model_does() -> None:
    run_machine(IndexMachine, settings=QUICK)


class ForgetsExpiry(FileIndex):
    """The wrong implementation: what has expired is found until it is swept."""

    def get(self, owner: str, digest: Digest, now_s: float) -> StoredFile | None:
        del now_s
        return super().get(owner, digest, -1.0)


class SharesIds(FileIndex):
    """The wrong implementation: an id is enough."""

    def remove(self, owner: str, digest: Digest) -> StoredFile | None:
        del owner
        found = next((file for file in self if file.id == digest), None)
        return None if found is None else super().remove(found.owner, digest)


class ForgetsFailures(FileIndex):
    """The wrong implementation: what was not written stays charged."""

    def cancel(self, owner: str, nbytes: int) -> None: ...


@pytest.mark.parametrize("mutant", [pytest.param(ForgetsExpiry, marks=pytest.mark.slow), SharesIds, ForgetsFailures])
def test_mutants_of_the_index_are_found(mutant: type[FileIndex]) -> None:
    machine = type("Mutant", (IndexMachine,), {"kind": mutant})
    effort = settings(
        QUICK, max_examples=500, phases=[Phase.generate], report_multiple_bugs=False, derandomize=True, database=None
    )
    with pytest.raises((AssertionError, pytest.fail.Exception)):  # `pytest.raises` inside of it fails so
        run_machine(machine, settings=effort)


def fill(index: FileIndex, owner: int, contents: range, now_s: float = 0.0) -> None:
    for content in contents:
        file = file_from(owner, content, created_s=content)
        index.reserve(file.owner, file.nbytes, now_s)
        index.commit(file)


def test_a_tenant_that_floods_the_store_evicts_its_own_files_and_not_those_of_others_S21() -> None:
    index = FileIndex(CAPACITY)
    fill(index, 0, range(3))
    fill(index, 1, range(100))
    assert {file.id for file in index if file.owner == OWNERS[0]} == {digest_of(0, content) for content in range(3)}
    assert index.nbytes_of(OWNERS[1]) == 5 * SMALLEST_BYTES


def test_mutant_without_shares_the_flood_takes_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TenantLru, "_idle_lines", lambda self, _: list(self._lines.values()))
    index = FileIndex(CAPACITY)
    fill(index, 0, range(3))
    fill(index, 1, range(100))
    assert index.nbytes_of(OWNERS[0]) == 0


def test_what_is_being_written_is_not_evicted_and_a_refusal_changes_nothing() -> None:
    index = FileIndex(CAPACITY)
    fill(index, 0, range(2))
    for _ in range(6):
        index.reserve(OWNERS[0], 1, 0.0)
    with pytest.raises(NoRoom):
        index.reserve(OWNERS[0], 3 * SMALLEST_BYTES, 0.0)
    assert (len(index), index.nbytes) == (2, CAPACITY)
    assert len(index.reserve(OWNERS[0], 2 * SMALLEST_BYTES, 0.0)) == 2


@settings(max_examples=examples(250), deadline=None)
@given(st.data())
def test_a_listing_brings_an_index_up_to_the_objects_whatever_happens_meanwhile(data: st.DataObject) -> None:
    """Files of others come and go; ours that come or go while the objects are listed stay as they are."""
    index = FileIndex(100 * SMALLEST_BYTES)
    contents = st.sets(st.tuples(OWNER, CONTENT))
    ours, theirs, gone_there, added, removed = (data.draw(contents) for _ in range(5))
    for one in ours:
        file = file_from(*one)
        index.reserve(file.owner, file.nbytes, 0.0)
        index.commit(file)
    listing = index.listing()
    objects = (ours | theirs) - gone_there
    moment = data.draw(st.integers(0, 2))

    def interfere(at: int) -> None:
        if at != moment:
            return
        for one in removed - added:
            index.remove(OWNERS[one[0]], digest_of(*one))
        for one in added:
            file = file_from(*one, revision=2)
            index.reserve(file.owner, file.nbytes, 0.0)
            index.commit(file)

    interfere(0)
    listing.add([file_from(*one) for one in objects])
    interfere(1)
    slices = listing.finish(0.0)
    if moment == 2:
        next(slices, None)
        interfere(2)
    for doomed in slices:
        assert not doomed
    have = {file.id for file in index}
    must = {digest_of(*one) for one in (objects - removed) | added}
    may = must | {digest_of(*one) for one in removed - ours}  # theirs, removed before we knew of them
    assert must <= have <= may
    assert index.nbytes == len(have) * SMALLEST_BYTES


def test_of_two_objects_of_one_file_every_listing_keeps_the_same() -> None:
    old, new = file_from(0, 0), replace(file_from(0, 0, revision=2), name="new.png")
    for order in ([old, new], [new, old]):
        index = FileIndex(CAPACITY)
        listing = index.listing()
        assert listing.add(order) == [old]
        assert not [doomed for slice_ in listing.finish(0.0) for doomed in slice_]
        assert list(index) == [new]
        assert newest(order, 0.0) == new


def test_a_listing_with_more_than_there_is_room_for_dooms_the_oldest_of_whoever_has_the_most() -> None:
    index = FileIndex(CAPACITY)
    listing = index.listing()
    listing.add([file_from(0, content, created_s=content) for content in range(2)])
    listing.add([file_from(1, content, created_s=content) for content in range(2, 22)])
    doomed = [file for slice_ in listing.finish(0.0) for file in slice_]
    assert [file.id for file in doomed] == [digest_of(1, content) for content in range(2, 16)]
    assert index.nbytes == CAPACITY
