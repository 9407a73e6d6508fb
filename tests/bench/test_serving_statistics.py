"""Medians, ratios and their errors."""

from __future__ import annotations

import math
import random
from statistics import median

import pytest

from semel.lab.bench.serving.statistics import (
    added,
    added_ratio,
    exactly,
    mean_of,
    mean_ratio,
    median_of,
    paired_ratio,
    ratio_of,
)


def series(middle: float, count: int, *, seed: int, spread: float = 0.1) -> list[float]:
    rng = random.Random(seed)
    return [middle * rng.lognormvariate(0, spread) for _ in range(count)]


def test_a_median_comes_with_its_quartiles_and_an_interval_around_it() -> None:
    figure = median_of([1, 2, 3, 4, 100])
    assert (figure.value, figure.q1, figure.q3, figure.count) == (3, 2, 4, 5)
    assert 1 <= figure.low <= 3 <= figure.high <= 100


def test_a_single_measurement_has_no_width() -> None:
    figure = median_of([7.0])
    assert (figure.low, figure.value, figure.high) == (7, 7, 7)
    assert exactly(7.0).low == exactly(7.0).high == 7


def test_the_interval_holds_the_truth_about_as_often_as_it_says() -> None:
    hits = sum((figure := median_of(series(10, 30, seed=seed))).low <= 10 <= figure.high for seed in range(200))
    assert 0.88 <= hits / 200 <= 1.0


def test_more_measurements_narrow_the_interval() -> None:
    few, many = median_of(series(10, 10, seed=1)), median_of(series(10, 400, seed=1))
    assert many.high - many.low < (few.high - few.low) / 2


def test_the_same_series_give_the_same_interval() -> None:
    values = series(10, 25, seed=3)
    assert median_of(values) == median_of(values)


def test_a_ratio_is_of_medians_and_not_of_means() -> None:
    mine, theirs = [1.0, 1.0, 1.0, 1.0, 90.0], [2.0] * 5
    assert ratio_of(mine, theirs).value == 0.5
    assert mean_ratio(mine, theirs).value == pytest.approx(9.4)
    assert mean_of(mine).value == pytest.approx(18.8)


def test_a_second_that_is_slow_for_both_widens_a_ratio_less_than_its_parts() -> None:
    # Turns are drawn whole. Control: drawn apart, the common noise stays in the ratio.
    slowness = series(1, 40, seed=5, spread=0.8)
    mine, theirs = [5 * one for one in slowness], [10 * one for one in slowness]
    figure = ratio_of(mine, theirs)
    assert figure.low == figure.high == pytest.approx(0.5)
    rng = random.Random(0)
    apart = [median(rng.choices(mine, k=40)) / median(rng.choices(theirs, k=40)) for _ in range(500)]
    assert max(apart) - min(apart) > 0.1


def test_what_slows_a_whole_round_down_is_not_in_a_ratio_of_pairs() -> None:
    # Rounds are slow by chance, and each side a little by itself. Control: the ratio of medians.
    slowness, *own = (series(1, 60, seed=seed, spread=spread) for seed, spread in ((1, 0.5), (2, 0.02), (3, 0.02)))
    mine, theirs = ([slow * one for slow, one in zip(slowness, each, strict=True)] for each in own)
    paired, apart = paired_ratio([1.03 * one for one in mine], theirs), ratio_of([1.03 * one for one in mine], theirs)
    assert 1.0 < paired.low < 1.03 < paired.high
    assert apart.high - apart.low > 1.5 * (paired.high - paired.low)
    with pytest.raises(ValueError, match="same length"):
        paired_ratio([1.0], [1.0, 2.0])


def test_what_a_picture_adds_is_compared_without_what_a_request_costs_anyhow() -> None:
    mine, theirs = [20.0] * 9, [30.0] * 9
    floor = [10.0] * 9
    assert added(mine, floor).value == 10
    assert added_ratio(mine, floor, theirs, floor).value == 0.5
    assert ratio_of(mine, theirs).value == pytest.approx(2 / 3)


def test_nothing_can_be_compared_with_what_adds_nothing() -> None:
    figure = added_ratio([12.0] * 5, [10.0] * 5, [10.0] * 5, [10.0] * 5)
    assert math.isinf(figure.value)
    assert math.isinf(figure.high)


def test_series_of_different_turns_are_refused() -> None:
    with pytest.raises(ValueError, match="same length"):
        ratio_of([1.0], [1.0, 2.0])
    with pytest.raises(ValueError, match="at least one"):
        median_of([])
