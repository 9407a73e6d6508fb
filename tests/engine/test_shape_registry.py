"""What is remembered of features by digest: their shapes, the latest ones."""

from __future__ import annotations

from semel.core import Digest, Feature, Layout, Tensor
from semel.engine.vllm.model.model import ShapeRegistry


def digest_of(number: int) -> Digest:
    return Digest(number.to_bytes(32, "big"))


def feature_of(size: int) -> Feature:
    return Feature("image", {"pixels": Tensor("uint8", (size,), memoryview(bytes(size)))}, Layout((1,)))


def test_a_digest_agrees_with_the_first_shape_that_it_came_with_D7() -> None:
    known = ShapeRegistry()
    assert known.agrees(digest_of(1), feature_of(3))
    assert not known.agrees(digest_of(1), feature_of(4))
    assert known.agrees(digest_of(1), feature_of(3)), "the first one stays"
    known.forget()
    assert known.agrees(digest_of(1), feature_of(4))


def test_what_was_used_longest_ago_is_forgotten_and_a_mismatch_is_no_use_S18() -> None:
    known = ShapeRegistry(max_digests=2)
    for number in (1, 2):
        assert known.agrees(digest_of(number), feature_of(3))
    known.refer(digest_of(1))
    known.refer(digest_of(9))
    assert not known.agrees(digest_of(2), feature_of(4))
    assert known.agrees(digest_of(3), feature_of(3))
    assert known.agrees(digest_of(2), feature_of(4)), "forgotten, so that any shape agrees"
    assert known.agrees(digest_of(3), feature_of(3))
    assert known.agrees(digest_of(1), feature_of(9)), "forgotten too, by then"
