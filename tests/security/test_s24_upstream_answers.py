"""S24: upstream answers as a weapon. The fields of a response are read in linear time, and long ones are not kept."""

from __future__ import annotations

import re
from time import process_time

import pytest

from semel.media.fetch import freshness
from semel.media.fetch.freshness import HEADERS, Freshness

NAIVE = re.compile(r"""\s*([^\s=,;"]+)(?:\s*=\s*(?:"((?:[^"\\]|\\.)*)"|([^\s,"]*)))?\s*(?:,|$)""")
"""The expression as it was: blanks on both sides of an empty value can be split in as many ways as there are."""

BLANKS = 8_000


def seconds_for(blanks: int) -> float:
    """How long a directive takes to read that many blanks are in; the best of three."""
    text = f"a={' ' * blanks}x y"

    def once() -> float:
        began = process_time()
        assert dict(freshness._directives(text)) == {"no-store": ""}
        return process_time() - began

    return min(once() for _ in range(3))


def check_linear() -> None:
    assert seconds_for(16 * BLANKS) < 0.05


def test_a_directive_of_blanks_takes_linear_time() -> None:
    check_linear()


def test_mutant_quantifiers_that_share_their_blanks_take_quadratic_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(freshness, "_DIRECTIVE", NAIVE)
    assert seconds_for(BLANKS // 4) > 8 * seconds_for(BLANKS // 16)


@pytest.mark.parametrize("name", HEADERS)
def test_a_response_with_an_endless_field_is_not_kept(name: str) -> None:
    fields = {"cache-control": "max-age=60", name: f"max-age=60,{'x' * 2_000}"}
    kept = Freshness.of(fields, sent_at=0, received_at=0)
    assert not kept.storable
    assert not kept.headers
    assert not kept.is_fresh(1)
