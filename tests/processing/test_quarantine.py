"""Media that ended processes: remembered for a while, in bounded number, and forgiven."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from semel.core import Media, Page, hash_parts
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


async def test_what_crashed_a_process_is_refused_and_nothing_else_S6(deadly: Quarantine) -> None:
    await deadly.quarantine(A, {}, REFUSAL)
    told = await deadly.refusal(A, {})
    assert isinstance(told, MediaUndecodable)
    assert told is not REFUSAL, "an error that is raised twice keeps the frames of both"
    for media, options in ((B, {}), (A, {"size": 1}), (Media("audio", A.data), {})):
        assert await deadly.refusal(media, options) is None


async def test_what_one_tenants_media_did_is_held_against_no_other_tenant_S6(deadly: Quarantine) -> None:
    """The wrong implementation hashed bytes and options, and not whose they were."""
    await deadly.quarantine(A, {}, REFUSAL, "acme")
    assert await deadly.refusal(A, {}, "acme") is not None
    assert [await deadly.refusal(A, {}, tenant) for tenant in ("umbra", "")] == [None, None]
    await deadly.clear(A, {}, "umbra")
    assert await deadly.refusal(A, {}, "acme") is not None, "nobody clears what is another's"
    for tenant in ("acme", "umbra"):
        await deadly.suspect(B, {}, REFUSAL, tenant)
    assert await deadly.refusal(B, {}, "acme") is None, "each had one try"


async def test_a_suspect_has_a_second_try_S6(deadly: Quarantine) -> None:
    await deadly.suspect(A, {}, REFUSAL)
    assert await deadly.refusal(A, {}) is None
    await deadly.suspect(A, {}, MediaTooLarge("too slow"))
    assert isinstance(await deadly.refusal(A, {}), MediaTooLarge)


async def test_what_was_processed_after_all_is_no_suspect_any_more(deadly: Quarantine) -> None:
    await deadly.suspect(A, {}, REFUSAL)
    await deadly.clear(B, {})
    await deadly.clear(A, {})
    await deadly.suspect(A, {}, REFUSAL)
    assert await deadly.refusal(A, {}) is None


async def test_it_is_tried_again_after_a_while(deadly: Quarantine, clock: Clock) -> None:
    await deadly.quarantine(A, {}, REFUSAL)
    await deadly.suspect(B, {}, REFUSAL)
    clock.now = 9.9
    assert await deadly.refusal(A, {}) is not None
    clock.now = 10.0
    assert await deadly.refusal(A, {}) is None
    await deadly.suspect(B, {}, REFUSAL)
    assert await deadly.refusal(B, {}) is None, "what happened long ago is not held against it"


async def test_the_oldest_are_forgotten_when_there_are_too_many_S18(deadly: Quarantine) -> None:
    many = [Media("image", bytes([number])) for number in range(5)]
    for media in many:
        await deadly.quarantine(media, {}, REFUSAL)
    assert len(deadly) == 3
    assert [await deadly.refusal(media, {}) is not None for media in many] == [False, False, True, True, True]


async def test_a_document_is_hashed_for_its_pages_while_the_event_loop_goes_on(
    deadly: Quarantine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """64 MB take 20 ms, twice for each of its pages."""
    threads = set[int]()

    def hashing(parts: Any) -> Any:
        threads.add(threading.get_ident())
        return hash_parts(parts)

    monkeypatch.setattr("semel.processing.pool.quarantine.hash_parts", hashing)
    pages = [Media("image", bytes(2 << 20), page=Page(number, 72)) for number in (1, 2)]
    await deadly.quarantine(pages[0], {}, REFUSAL)
    assert [await deadly.refusal(page, {}) is not None for page in pages] == [True, False]
    await deadly.suspect(pages[1], {}, REFUSAL)
    await deadly.clear(pages[1], {})
    assert threads and threading.get_ident() not in threads
