"""Media that ended processes: remembered for a while, in bounded number, and forgiven."""

from __future__ import annotations

import pytest

from semel.core import Media
from semel.errors import MediaTooLarge, MediaUndecodable
from semel.processing.pool.quarantine import Quarantine

REFUSAL = MediaUndecodable("no")
A, B = Media("image", b"aaaa"), Media("image", b"bbbb")


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def deadly(clock: Clock) -> Quarantine:
    return Quarantine(max_items=3, keep_s=10.0, clock=clock)


def test_what_crashed_a_process_is_refused_and_nothing_else_S6(deadly: Quarantine) -> None:
    deadly.quarantine(A, {}, REFUSAL)
    told = deadly.refusal(A, {})
    assert isinstance(told, MediaUndecodable)
    assert told is not REFUSAL, "an error that is raised twice keeps the frames of both"
    for media, options in ((B, {}), (A, {"size": 1}), (Media("audio", A.data), {})):
        assert deadly.refusal(media, options) is None


def test_what_one_tenants_media_did_is_held_against_no_other_tenant_S6(deadly: Quarantine) -> None:
    """The wrong implementation hashed bytes and options, and not whose they were."""
    deadly.quarantine(A, {}, REFUSAL, "acme")
    assert deadly.refusal(A, {}, "acme") is not None
    assert [deadly.refusal(A, {}, tenant) for tenant in ("umbra", "")] == [None, None]
    deadly.clear(A, {}, "umbra")
    assert deadly.refusal(A, {}, "acme") is not None, "nobody clears what is another's"
    for tenant in ("acme", "umbra"):
        deadly.suspect(B, {}, REFUSAL, tenant)
    assert deadly.refusal(B, {}, "acme") is None, "each had one try"


def test_a_suspect_has_a_second_try_S6(deadly: Quarantine) -> None:
    deadly.suspect(A, {}, REFUSAL)
    assert deadly.refusal(A, {}) is None
    deadly.suspect(A, {}, MediaTooLarge("too slow"))
    assert isinstance(deadly.refusal(A, {}), MediaTooLarge)


def test_what_was_processed_after_all_is_no_suspect_any_more(deadly: Quarantine) -> None:
    deadly.suspect(A, {}, REFUSAL)
    deadly.clear(B, {})
    deadly.clear(A, {})
    deadly.suspect(A, {}, REFUSAL)
    assert deadly.refusal(A, {}) is None


def test_it_is_tried_again_after_a_while(deadly: Quarantine, clock: Clock) -> None:
    deadly.quarantine(A, {}, REFUSAL)
    deadly.suspect(B, {}, REFUSAL)
    clock.now = 9.9
    assert deadly.refusal(A, {}) is not None
    clock.now = 10.0
    assert deadly.refusal(A, {}) is None
    deadly.suspect(B, {}, REFUSAL)
    assert deadly.refusal(B, {}) is None, "what happened long ago is not held against it"


def test_the_oldest_are_forgotten_when_there_are_too_many_S18(deadly: Quarantine) -> None:
    many = [Media("image", bytes([number])) for number in range(5)]
    for media in many:
        deadly.quarantine(media, {}, REFUSAL)
    assert len(deadly) == 3
    assert [deadly.refusal(media, {}) is not None for media in many] == [False, False, True, True, True]
