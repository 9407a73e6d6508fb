"""HTTP's rules of caching, against a slow and obvious model of them (RFC 9111), and by example."""

from __future__ import annotations

from dataclasses import dataclass
from email.utils import formatdate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semel.media.fetch.freshness import Freshness

SENT_AT = 1_000_000_000


@dataclass(frozen=True)
class Response:
    """A response in the terms of the standard; times are seconds from when its request was sent."""

    delay_s: int
    date: int | None
    age_s: int | None
    max_ages: tuple[int | str, ...]
    expires: int | str | None
    others: frozenset[str]
    etag: str | None
    modified: str | None
    vary: str | None

    def headers(self) -> dict[str, str]:
        directives = [f"max-age={value}" for value in self.max_ages] + sorted(self.others)
        expires = _date(self.expires) if isinstance(self.expires, int) else self.expires
        fields = {
            "cache-control": ", ".join(directives) or None,
            "date": None if self.date is None else _date(self.date),
            "age": None if self.age_s is None else str(self.age_s),
            "expires": expires,
            "etag": self.etag,
            "last-modified": self.modified,
            "vary": self.vary,
        }
        return {name: value for name, value in fields.items() if value is not None}

    def lifetime_s(self) -> int:
        if any(other.lower().startswith("no-cache") for other in self.others):
            return 0
        if self.max_ages:
            return min(value if isinstance(value, int) else 0 for value in self.max_ages)
        if isinstance(self.expires, int):
            return max(0, self.expires - (self.delay_s if self.date is None else self.date))
        return 0

    def age_after(self, seconds: int) -> int:
        """The standard's `current_age`, so many seconds after the response came."""
        apparent_age = 0 if self.date is None else max(0, self.delay_s - self.date)
        corrected_age = (self.age_s or 0) + self.delay_s
        return max(apparent_age, corrected_age) + seconds

    def is_storable(self) -> bool:
        forbidden = "no-store" in self.others or self.vary == "*"
        return not forbidden and bool(self.lifetime_s() or self.etag or self.modified)

    def is_fresh_after(self, seconds: int) -> bool:
        return self.is_storable() and self.lifetime_s() > self.age_after(seconds)


def _date(seconds: int) -> str:
    return formatdate(SENT_AT + seconds, usegmt=True)


SECONDS = st.integers(0, 200)
RESPONSES = st.builds(
    Response,
    delay_s=st.integers(0, 30),
    date=st.none() | st.integers(-200, 200),
    age_s=st.none() | SECONDS,
    max_ages=st.lists(SECONDS | st.sampled_from(["", "-1", "x", "1.5"]), max_size=2).map(tuple),
    expires=st.none() | st.integers(-200, 400) | st.sampled_from(["0", "-1", "never"]),
    others=st.frozensets(
        st.sampled_from(
            (
                *("no-store", "no-cache", 'No-Cache="set-cookie, x"', "private", "public", "must-revalidate"),
                *("s-maxage=900", "immutable", 'ext="max-age=999, no-store"', "stale-if-error=900"),
            )
        ),
        max_size=3,
    ),
    etag=st.none() | st.just('W/"1"'),
    modified=st.none() | st.just(_date(-1_000)),
    vary=st.sampled_from([None, None, "accept", "*"]),
)


@given(RESPONSES, st.integers(0, 400))
def test_a_response_is_used_again_exactly_as_long_as_the_standard_says(response: Response, seconds: int) -> None:
    received_at = SENT_AT + response.delay_s
    read = Freshness.of(response.headers(), sent_at=SENT_AT, received_at=received_at)
    assert read.storable == response.is_storable()
    assert read.is_fresh(received_at + seconds) == response.is_fresh_after(seconds)
    assert not read.is_fresh(received_at - 1)


@given(RESPONSES, RESPONSES, st.integers(0, 400))
def test_what_took_two_responses_is_used_no_longer_than_either(hop: Response, target: Response, seconds: int) -> None:
    hop_at = SENT_AT + hop.delay_s
    first = Freshness.of(hop.headers(), sent_at=SENT_AT, received_at=hop_at)
    then = SENT_AT + 40 + target.delay_s
    second = Freshness.of(target.headers(), sent_at=SENT_AT + 40, received_at=then)
    both = second.limited_by(first)
    assert both.is_fresh(then + seconds) == (second.is_fresh(then + seconds) and first.is_fresh(then + seconds))


def fresh(**fields: str) -> Freshness:
    return Freshness.of(
        {name.replace("_", "-"): value for name, value in fields.items()}, sent_at=SENT_AT, received_at=SENT_AT
    )


@pytest.mark.parametrize(
    "cache_control", ['max-age=60, a="no end', "max-age=60; no-store", "=,max-age=9", ",,max-age=9"]
)
def test_what_cannot_be_read_is_taken_as_a_prohibition(cache_control: str) -> None:
    assert not fresh(cache_control=cache_control, etag='"1"').storable


def test_a_confirmation_renews_what_it_says_and_keeps_what_it_does_not() -> None:
    kept = fresh(cache_control="max-age=10", etag='"1"', age="5")
    later = SENT_AT + 100
    renewed = kept.confirmed({}, sent_at=later, received_at=later)
    assert renewed.is_fresh(later + 9)
    assert not renewed.is_fresh(later + 10)
    changed = kept.confirmed({"cache-control": "max-age=1", "etag": '"2"'}, sent_at=later, received_at=later)
    assert not changed.is_fresh(later + 1)
    assert changed.conditions() == {"If-None-Match": '"2"'}
    assert not kept.confirmed({"cache-control": "no-store"}, sent_at=later, received_at=later).storable


def test_a_response_without_a_lifetime_is_asked_about_with_what_it_was_marked_by() -> None:
    kept = fresh(etag='"1"', last_modified="Sun, 01 Nov 2026 00:00:00 GMT")
    assert kept.storable
    assert not kept.is_fresh(SENT_AT)
    assert kept.conditions() == {"If-None-Match": '"1"', "If-Modified-Since": "Sun, 01 Nov 2026 00:00:00 GMT"}
