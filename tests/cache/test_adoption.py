"""A feature that lies in the segment already is held where it lies: no second copy, no second range."""

from __future__ import annotations

from semel.cache import SharedCache
from semel.core import Feature, Layout, Tensor
from tests.cache.examples import assert_equal, digest_of, feature_of


def test_what_a_child_has_written_is_held_without_a_copy_D4() -> None:
    cache = SharedCache.create(4096)
    room = cache.reserve(100)
    assert room is not None
    room.view()[:100] = b"x" * 100
    written = Feature("image", {"pixels": Tensor("uint8", (100,), room.view()[:100].toreadonly())}, Layout((1,)))
    del room
    assert cache.put(digest_of(1), written) is written
    assert cache.get(digest_of(1)) is written
    assert cache.occupied == cache.nbytes == 128


def test_what_was_evicted_and_is_still_in_use_is_held_again_D4() -> None:
    cache = SharedCache.create(256)
    first = cache.put(digest_of(1), feature_of(1, 128))
    cache.put(digest_of(2), feature_of(2, 128))
    cache.put(digest_of(3), feature_of(3, 100))
    assert digest_of(1) not in cache
    assert cache.put(digest_of(1), first) is first
    assert cache.lease(digest_of(1)) is not None
    assert_equal(first, 1, [128])
    assert cache.nbytes <= cache.capacity


def test_a_feature_of_another_segment_is_copied_D4() -> None:
    ours, theirs = SharedCache.create(1024), SharedCache.create(1024)
    foreign = theirs.put(digest_of(1), feature_of(1, 100))
    copied = ours.put(digest_of(1), foreign)
    assert copied is not foreign
    assert_equal(copied, 1, [100])


def test_a_range_that_is_used_again_is_not_taken_for_the_one_before_D4() -> None:
    cache = SharedCache.create(128)
    cache.put(digest_of(1), feature_of(1, 128))
    second = cache.put(digest_of(2), feature_of(2, 128))
    cache.discard(digest_of(2))
    assert_equal(cache.put(digest_of(1), feature_of(1, 128)), 1, [128])
    assert_equal(second, 2, [128])


def test_adopting_takes_what_lies_there_and_never_copies_D4() -> None:
    cache = SharedCache.create(1024)
    assert cache.adopt(digest_of(1), feature_of(1, 100)) is None
    assert (len(cache), cache.occupied) == (0, 0)
    lying = cache.put(digest_of(1), feature_of(1, 100))
    assert cache.adopt(digest_of(1), feature_of(1, 100)) is lying
    cache.discard(digest_of(1))
    assert cache.adopt(digest_of(1), lying) is lying
    assert cache.occupied == cache.nbytes == 128
