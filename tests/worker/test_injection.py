"""What becomes of injected items, and what is counted, against the obvious rules."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semel.core import Digest, Feature
from semel.errors import EngineDead, EngineFailed, FeatureRejected
from semel.interchange.injection import Outcome, Status
from semel.interchange.safetensors import Empty, Entry, Faulty, FeatureEntry
from semel.worker.injection import inject
from tests.worker.stored import Store, clip, digest_of, image, wrong

Counts = Counter[tuple[str, bool]]


async def injected(store: Store, *entries: Entry) -> tuple[list[Outcome], Counts]:
    counts: Counts = Counter()
    outcomes = await inject(store, entries, lambda modality, hit: counts.update([(modality, hit)]), peer="127.0.0.1:1")
    return outcomes, counts


def statuses(outcomes: list[Outcome]) -> list[Status]:
    return [outcome.status for outcome in outcomes]


kinds = st.sampled_from(["image", "clip", "wrong", "large", "failing", "empty", "faulty"])
CACHE_BYTES = 100


def entry_of(kind: str, digest: Digest) -> Entry:
    features = {"image": image(3), "clip": clip(4), "wrong": wrong(), "large": image(CACHE_BYTES + 1)}
    match kind:
        case "empty":
            return Empty(digest)
        case "faulty":
            return Faulty(digest.hex(), "it is broken")
        case _:
            return FeatureEntry(digest, features.get(kind, image(3)))


def obvious(kind: str, digest: Digest, held: set[Digest], cache_bytes: int) -> Status:
    """The rules, one after the other, as the requirements state them."""
    if kind == "faulty":
        return "refused"
    if kind == "empty" or not cache_bytes:
        return "skipped"
    if kind == "wrong":
        return "refused"
    if digest in held:
        return "held"
    if kind == "large":
        return "skipped"
    return "refused" if kind == "failing" else "stored"


@given(st.lists(st.tuples(kinds, st.integers(0, 4)), max_size=12), st.sampled_from([0, CACHE_BYTES]))
async def test_every_item_meets_the_fate_that_the_rules_give_it_and_counts_so_D6_D7_D8(
    steps: list[tuple[str, int]], cache_bytes: int
) -> None:
    held: set[Digest] = set()
    store = Store.of(cache_bytes)
    for kind, number in steps:
        digest = digest_of(number)
        expected = obvious(kind, digest, held, cache_bytes)
        store.failures = {digest: EngineFailed("no")} if kind == "failing" else {}
        (outcome,), counts = await injected(store, entry_of(kind, digest))
        assert (outcome.digest, outcome.status) == (digest.hex(), expected)
        assert (outcome.reason is None) == (expected in ("held", "stored"))
        modality = "audio" if kind == "clip" else "image"
        assert counts == ({(modality, expected == "held"): 1} if expected in ("held", "stored") else {})
        if expected == "stored":
            held.add(digest)
        assert store.held.keys() == held


async def test_an_item_that_the_engine_s_cache_cannot_take_is_skipped_with_the_engine_s_reason_D6() -> None:
    """Control: above, with the cache off."""
    store = Store(replace(Store().contract, cache_bytes=0), reason="it is of the kind shm: use lru")
    outcomes, counts = await injected(store, FeatureEntry(digest_of(1), image(3)))
    assert [(one.status, one.reason) for one in outcomes] == [("skipped", "it is of the kind shm: use lru")]
    assert not counts


async def test_a_wrong_feature_is_refused_with_the_contract_s_words_even_if_its_digest_is_held_D7_S9() -> None:
    store = Store(held={digest_of(1): image(3)})
    (outcome,), counts = await injected(store, FeatureEntry(digest_of(1), wrong()))
    assert outcome.status == "refused"
    assert outcome.reason == "pixel_values is Tensor(int8, [2]), tiny takes uint8[*]"
    assert not counts


async def test_a_feature_that_only_the_engine_knows_to_be_wrong_is_refused_in_its_words_D7() -> None:
    store = Store(failures={digest_of(1): FeatureRejected("pixel_values has values that are no numbers")})
    (outcome,), _ = await injected(store, FeatureEntry(digest_of(1), image(3)))
    assert outcome == Outcome(digest_of(1).hex(), "refused", "pixel_values has values that are no numbers")


async def test_an_engine_that_fails_on_one_item_is_a_warning_with_its_cause_and_the_others_go_on_D6(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = Store(failures={digest_of(2): RuntimeError("out of pages"), digest_of(3): TimeoutError()})
    outcomes, counts = await injected(store, *(FeatureEntry(digest_of(n), image(3)) for n in range(1, 5)))
    assert statuses(outcomes) == ["stored", "refused", "refused", "stored"]
    assert outcomes[1].reason == "the engine failed on it; the worker's log says why"
    assert counts == {("image", False): 2}
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 2
    assert "out of pages" in warnings[0]
    assert digest_of(2).hex() in warnings[0]


async def test_a_dead_engine_ends_the_injection_D6(caplog: pytest.LogCaptureFixture) -> None:
    store = Store(failures={digest_of(1): EngineDead("the engine has died")})
    with pytest.raises(EngineDead):
        await injected(store, *(FeatureEntry(digest_of(n), image(3)) for n in range(1, 5)))
    assert [record.levelname for record in caplog.records] == ["WARNING"]


async def test_an_item_that_a_request_brings_at_the_same_time_is_a_hit_D8() -> None:
    class Racing(Store):
        async def inject(self, digest: Digest, feature: Feature) -> bool:
            self.held[digest] = feature
            return False

    outcomes, counts = await injected(Racing(), FeatureEntry(digest_of(1), image(3)))
    assert statuses(outcomes) == ["held"]
    assert counts == {("image", True): 1}


async def test_an_item_that_the_engine_does_not_keep_is_skipped_and_not_counted_D6() -> None:
    class Full(Store):
        async def inject(self, digest: Digest, feature: Feature) -> bool:  # noqa: ARG002
            return False

    (outcome,), counts = await injected(Full(), FeatureEntry(digest_of(1), image(3)))
    assert outcome.status == "skipped"
    assert not counts
    (outcome,), counts = await injected(Store(), FeatureEntry(digest_of(1), image(101)))
    assert outcome.reason == "it has 101 bytes, the engine's item cache holds 100"
    assert not counts


async def test_each_call_leaves_one_line_in_the_log_that_says_who_and_what(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "semel.worker.injection")
    store = Store(replace(Store().contract, cache_bytes=10_000))
    entries = [
        FeatureEntry(digest_of(1), image(1_000)),
        FeatureEntry(digest_of(1), image(1_000)),
        FeatureEntry(digest_of(2), wrong()),
    ]
    await injected(store, *entries, Empty(digest_of(3)), Faulty("x", "y"))
    assert [record.getMessage() for record in caplog.records] == [
        "127.0.0.1:1 injected 5 items with 2,002 bytes: 1 stored, 1 held, 1 skipped, 2 refused"
    ]
