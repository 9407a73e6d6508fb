"""Timelines of prompts that grow, and of encoders."""

from __future__ import annotations

import pytest

from semel.core import Placeholder, Timeline


@pytest.mark.parametrize("known", [0, 1, 2, 3])
def test_a4_a_timeline_that_grew_equals_one_built_at_once(known: int) -> None:
    placeholders = [Placeholder(0, 4), Placeholder(4, 2), Placeholder(9, 3)]
    grown = Timeline.decoder(placeholders[:known]).followed_by(placeholders[known:])
    assert grown == Timeline.decoder(placeholders)
    assert grown.window(5, 10) == (1, 3)


def test_a4_what_is_new_must_be_behind_what_is_there() -> None:
    with pytest.raises(ValueError, match="overlap"):
        Timeline.decoder([Placeholder(0, 4)]).followed_by([Placeholder(3, 2)])


def test_a6_an_encoder_timeline_says_so() -> None:
    assert Timeline.encoder([Placeholder(0, 4)]).is_encoder
    assert not Timeline.decoder([Placeholder(0, 4)]).is_encoder
    assert not Timeline.decoder([]).is_encoder
