"""Statistics of measured series: medians, slopes and their ratios, with their errors. Pure.

The sides alternate, so the series of a comparison have equal lengths, and a round is one draw of all of them. The error
of a figure is its 95% interval under the bootstrap: rounds are resampled with replacement, and the figure is computed
for each sample. The same series give the same interval.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

__all__ = [
    "Figure",
    "added",
    "added_beyond",
    "added_ratio",
    "exactly",
    "mean_of",
    "mean_ratio",
    "median_of",
    "paired_ratio",
    "ratio_of",
    "slope_of",
    "slope_ratio",
]

_DRAWS: Final = 2_000
_INTERVAL: Final = (2.5, 97.5)

_Values = np.ndarray[Any, np.dtype[np.float64]]
_Rounds = np.ndarray[Any, np.dtype[np.int64]]

_Statistic = Callable[[_Values, _Rounds], _Values]
"""One number of each row of values, which were measured in these rounds."""


@dataclass(frozen=True, slots=True)
class Figure:
    """A number and its error."""

    value: float
    low: float
    """The lower end of its 95% interval."""

    high: float
    q1: float | None = None
    """The lower quartile of the measurements; a ratio has none."""

    q3: float | None = None
    count: int = 1
    """The number of measurements."""


def exactly(value: float) -> Figure:
    """Return a figure that was counted and not measured."""
    return Figure(value, value, value)


def median_of(series: Sequence[float]) -> Figure:
    """Return the median of a series."""
    q1, q3 = np.percentile(_values(series), (25, 75))
    return _figure(lambda each: each(0), series, q1=float(q1), q3=float(q3))


def mean_of(series: Sequence[float]) -> Figure:
    """Return the mean of a series."""
    return _figure(lambda each: each(0), series, statistic=_mean)


def added(series: Sequence[float], floor: Sequence[float]) -> Figure:
    """Return what a series adds to its floor: the difference of their medians."""
    return _figure(lambda each: each(0) - each(1), series, floor)


def ratio_of(mine: Sequence[float], theirs: Sequence[float]) -> Figure:
    """Return the ratio of `mine`'s median to that of `theirs`."""
    return _figure(lambda each: _divided(each(0), each(1)), mine, theirs)


def paired_ratio(mine: Sequence[float], theirs: Sequence[float]) -> Figure:
    """Return the median of the rounds' ratios: what slows a whole round down is in none of them."""
    if len(mine) != len(theirs):
        raise ValueError(f"series of the same turns have the same length, not {[len(mine), len(theirs)]}")
    ratios = _divided(_values(mine), _values(theirs))
    return _figure(lambda each: each(0), ratios.tolist())


def mean_ratio(mine: Sequence[float], theirs: Sequence[float]) -> Figure:
    """Return the ratio of `mine`'s mean to that of `theirs`."""
    return _figure(lambda each: _divided(each(0), each(1)), mine, theirs, statistic=_mean)


def added_ratio(
    mine: Sequence[float], my_floor: Sequence[float], theirs: Sequence[float], their_floor: Sequence[float]
) -> Figure:
    """Return the ratio of what `mine` adds to its floor to what `theirs` adds to its own."""
    return _figure(lambda each: _divided(each(0) - each(1), each(2) - each(3)), mine, my_floor, theirs, their_floor)


def added_beyond(
    mine: Sequence[float], my_floor: Sequence[float], theirs: Sequence[float], their_floor: Sequence[float]
) -> Figure:
    """Return by how much `mine` adds more to its floor than `theirs` adds to its own."""
    return _figure(lambda each: (each(0) - each(1)) - (each(2) - each(3)), mine, my_floor, theirs, their_floor)


def slope_of(series: Sequence[float]) -> Figure:
    """By how much a series grows from one round to the next (Theil and Sen): the median over all pairs of rounds.

    Rounds that took unusually long change it little.
    """
    return _figure(lambda each: each(0), series, statistic=_slope)


def slope_ratio(mine: Sequence[float], theirs: Sequence[float]) -> Figure:
    """Return the ratio of `mine`'s slope to that of `theirs`."""
    return _figure(lambda each: _divided(each(0), each(1)), mine, theirs, statistic=_slope)


def _figure(
    formula: Callable[[Callable[[int], _Values]], _Values],
    *series: Sequence[float],
    statistic: _Statistic | None = None,
    q1: float | None = None,
    q3: float | None = None,
) -> Figure:
    """Return a formula over one statistic of each series, with its interval."""
    values = [_values(one) for one in series]
    count = len(values[0])
    if any(len(one) != count for one in values):
        raise ValueError(f"series of the same turns have the same length, not {[len(one) for one in values]}")
    draws = np.random.default_rng(count).integers(count, size=(_DRAWS, count))
    rounds = np.arange(count)[np.newaxis]
    statistic = statistic or _median
    drawn = formula(lambda number: statistic(values[number][draws], draws))
    value = formula(lambda number: statistic(values[number][rounds], rounds))
    # The nearest sample, not a value between two of them: infinities cannot be averaged.
    low, high = np.percentile(drawn, _INTERVAL, method="nearest")
    return Figure(float(value[0]), float(low), float(high), q1, q3, count)


def _median(values: _Values, _: _Rounds) -> _Values:
    return np.asarray(np.median(values, axis=1))


def _mean(values: _Values, _: _Rounds) -> _Values:
    return np.asarray(np.mean(values, axis=1))


def _slope(values: _Values, rounds: _Rounds) -> _Values:
    """Take the slope. A round that was drawn twice makes no pair with itself; rows without any pair have slope zero."""
    first, second = np.triu_indices(values.shape[1], 1)
    slopes = np.zeros(len(values))
    for row, (value, at) in enumerate(zip(values, rounds, strict=True)):
        apart = at[second] - at[first]
        pairs = apart != 0
        if pairs.any():
            slopes[row] = np.median((value[second] - value[first])[pairs] / apart[pairs])
    return slopes


def _values(series: Sequence[float]) -> _Values:
    if not series:
        raise ValueError("a figure needs at least one measurement")
    return np.asarray(series, dtype=np.float64)


def _divided(numerators: _Values, denominators: _Values) -> _Values:
    """Return the quotient; infinite if the denominator is not positive. An infinite ratio meets no limit."""
    endless = np.full_like(numerators, np.inf)
    return np.divide(numerators, denominators, out=endless, where=denominators > 0)
