"""What is published, against a slow model that looks at everything, and mutants that the model catches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

from semel.core import Digest
from semel.embeddings.publishing import Publishing
from tests.effort import examples
from tests.embeddings.stores import Script, digest_of, play

STEPS = settings(max_examples=examples(80), stateful_step_count=60, deadline=None)
AFTER, ITEMS, BYTES_PER_S = 2, 3, 100.0
BELIEVED_S = 5.05
"""No sum of the waits below, so that nothing hangs on how numbers are rounded."""
digests = st.integers(0, 4).map(digest_of)


@dataclass
class Item:
    used_at: int
    shows: int = 0
    nbytes: int | None = None
    published_at: float | None = None
    """When it was last known to be in the store."""
    wanted_since: int | None = None
    """When it could be published for the first time since it last could not."""


class Model:
    """Looks at all items for every answer."""

    def __init__(self) -> None:
        self.step = 0
        self.now = 0.0
        self.items: dict[Digest, Item] = {}
        self.taken: dict[Digest, Item] = {}
        self.free_at = 0.0
        self.is_draining = False

    def use(self, digest: Digest) -> Item:
        item = self.items.setdefault(digest, Item(self.step))
        item.used_at = self.step
        while len(self.items) > ITEMS:
            del self.items[min(self.items, key=lambda one: self.items[one].used_at)]
        return item

    def settle(self, shown: Digest | None = None) -> None:
        """What failed, was lost or has expired is wanted again only when something is heard of it."""
        self.step += 1
        for digest, item in self.items.items():
            is_due = self.is_draining or item.shows >= AFTER
            is_published = item.published_at is not None and self.now - item.published_at < BELIEVED_S
            if item.nbytes is None or is_published or not is_due or digest in self.taken:
                item.wanted_since = None
            elif item.wanted_since is None and digest == shown:
                item.wanted_since = self.step

    def next(self, now: float) -> Digest | None:
        wanted = {digest: item for digest, item in self.items.items() if item.wanted_since is not None}
        if not wanted or (now < self.free_at and not self.is_draining):
            return None
        return min(wanted, key=lambda one: wanted[one].wanted_since or 0)


class Machine(RuleBasedStateMachine):
    make: Callable[[], Publishing] = lambda: Publishing(
        AFTER, believed_s=BELIEVED_S, bytes_per_s=BYTES_PER_S, max_items=ITEMS
    )

    def __init__(self) -> None:
        super().__init__()
        self.publishing = type(self).make()
        self.model = Model()
        self.now = 0.0

    @rule(digest=digests)
    def show(self, digest: Digest) -> None:
        self.publishing.show(digest, self.now)
        self.model.use(digest).shows += 1
        self.model.settle(digest)

    @rule(digest=digests, nbytes=st.sampled_from([10, 100, 1_000]))
    def saved(self, digest: Digest, nbytes: int) -> None:
        self.publishing.saved(digest, nbytes, self.now)
        self.model.use(digest).nbytes = nbytes
        self.model.settle(digest)

    @rule(digest=digests)
    def gone(self, digest: Digest) -> None:
        self.publishing.gone(digest)
        if digest in self.model.items:
            self.model.items[digest].nbytes = None
        self.model.settle()

    @rule(digest=digests)
    def lost(self, digest: Digest) -> None:
        self.publishing.lost(digest, self.now)
        if digest in self.model.items:
            self.model.items[digest].published_at = None
        self.model.settle(digest)

    @rule(seconds=st.sampled_from([0.0, 0.1, 1.0, 10.0]))
    def take(self, seconds: float) -> None:
        self.now += seconds
        self.model.now = self.now
        expected = self.model.next(self.now)
        assert self.publishing.has_ready == any(one.wanted_since is not None for one in self.model.items.values())
        assert self.publishing.take(self.now) == expected
        if expected is not None:
            item = self.model.items[expected]
            self.model.taken[expected] = item
            self.model.free_at = max(self.now, self.model.free_at) + (item.nbytes or 0) / BYTES_PER_S
        self.model.settle()

    @rule(digest=digests, published=st.booleans(), is_known=st.booleans())
    def done(self, digest: Digest, published: bool, is_known: bool) -> None:
        if is_known and self.model.taken:
            digest = min(self.model.taken)
        self.publishing.done(digest, published, self.now)
        item = self.model.taken.pop(digest, None)
        if item is not None:
            item.published_at = self.now if published else None
        is_another = item is not None and self.model.items.get(digest) is not item
        self.model.settle(digest if is_another else None)

    @rule(chance=st.integers(0, 9))
    def forget_all(self, chance: int) -> None:
        if chance:
            return
        self.publishing.forget_all()
        self.model.items.clear()

    @rule(chance=st.integers(0, 9))
    def drain(self, chance: int) -> None:
        if chance:
            return
        self.publishing.drain(self.now)
        self.model.is_draining = True
        ranked = sorted(self.model.items.items(), key=lambda one: (-one[1].shows, one[1].used_at))
        for item in self.model.items.values():
            item.wanted_since = None
        for digest, _ in ranked:
            self.model.settle(digest)


def test_what_is_published_is_what_the_model_says() -> None:
    run_state_machine_as_test(Machine, settings=STEPS)


class _ShownOnce(Publishing):
    def __init__(self, publish_after: int, **options: float) -> None:
        super().__init__(publish_after - 1, **options)  # type: ignore[arg-type]


class _TwiceAtOnce(Publishing):
    def take(self, now: float) -> Digest | None:
        if (digest := super().take(now)) is not None:
            self._in_progress.pop(digest)
        return digest


class _AtAnySpeed(Publishing):
    def take(self, now: float) -> Digest | None:
        self._free_at = 0.0
        return super().take(now)


class _NotInTheHostCache(Publishing):
    def gone(self, digest: Digest) -> None:
        """Nothing is ever gone."""


class _Unbounded(Publishing):
    def __init__(self, publish_after: int, *, max_items: int, **options: float) -> None:
        super().__init__(publish_after, max_items=100 * max_items, **options)


class _OldWeights(Publishing):
    def forget_all(self) -> None:
        """Nothing is ever forgotten."""


class _AgainAndAgain(Publishing):
    def done(self, digest: Digest, published: bool, now: float) -> None:
        super().done(digest, published, now)
        if (entry := self._entries.peek(digest)) is not None:
            self._admit(digest, entry, now)


class _OnceInALife(Publishing):
    def __init__(self, publish_after: int, *, max_items: int, bytes_per_s: float, **_: float) -> None:
        super().__init__(publish_after, max_items=max_items, bytes_per_s=bytes_per_s)


class _AtEveryShow(Publishing):
    def __init__(self, publish_after: int, *, max_items: int, bytes_per_s: float, **_: float) -> None:
        super().__init__(publish_after, max_items=max_items, bytes_per_s=bytes_per_s, believed_s=0.0)


class _NeverLost(Publishing):
    def lost(self, digest: Digest, now: float) -> None:
        """What was published is there."""


ONE, TWO = digest_of(1), digest_of(2)
WANTED: Script = (("saved", ONE, 1_000), ("show", ONE), ("show", ONE))
PUBLISHED: Script = (("take", 0.0), ("done", ONE, True, True))
SCRIPTS: dict[type[Publishing], Script] = {
    _ShownOnce: (("saved", ONE, 10), ("show", ONE), ("take", 0.0)),
    _TwiceAtOnce: (*WANTED, ("take", 0.0), ("show", ONE), ("take", 10.0)),
    _AtAnySpeed: (*WANTED, ("saved", TWO, 10), ("show", TWO), ("show", TWO), ("take", 0.0), ("take", 1.0)),
    _NotInTheHostCache: (*WANTED, ("gone", ONE), ("take", 0.0)),
    _Unbounded: (*WANTED, *(("show", digest_of(number)) for number in range(2, 5)), ("take", 0.0)),
    _OldWeights: (*WANTED, ("forget_all", 0), ("take", 0.0)),
    _OnceInALife: (*WANTED, *PUBLISHED, ("take", 10.0), ("show", ONE), ("take", 0.0)),
    _AtEveryShow: (("saved", ONE, 10), *WANTED[1:], *PUBLISHED, ("take", 1.0), ("show", ONE), ("take", 0.0)),
    _NeverLost: (("saved", ONE, 10), *WANTED[1:], *PUBLISHED, ("lost", ONE), ("take", 1.0)),
    _AgainAndAgain: (*WANTED, ("take", 0.0), ("done", ONE, False, True), ("take", 10.0)),
}


@pytest.mark.parametrize("mutant", SCRIPTS)
def test_the_model_catches_a_broken_choice(mutant: type[Publishing]) -> None:
    class Broken(Machine):
        make = lambda: mutant(  # noqa: E731
            AFTER, believed_s=BELIEVED_S, bytes_per_s=BYTES_PER_S, max_items=ITEMS
        )

    play(Machine(), SCRIPTS[mutant])
    with pytest.raises(AssertionError):
        play(Broken(), SCRIPTS[mutant])
