"""The weight of the project only falls, and a request stays as short as it is."""

from __future__ import annotations

import pytest

from tools.weight import Row, journeys, weigh


@pytest.mark.slow
async def test_nothing_weighs_more_than_its_limit_or_where_that_is_missed_than_it_did() -> None:
    rows = [*weigh(), *await journeys()]
    print(*rows, sep="\n")  # noqa: T201 what a change did to it
    assert [row for row in rows if not row.is_taken] == []


def test_what_is_over_its_limit_and_grows_is_not_taken() -> None:
    assert Row("", 10, 10).is_taken
    assert Row("", 11, 10, missed=11).is_taken
    assert not Row("", 12, 10, missed=11).is_taken
    assert not Row("", 11, 10).is_taken
