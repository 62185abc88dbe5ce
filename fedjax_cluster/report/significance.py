"""Methods against one another over seeds: mean ranks, and a paired test of the best against each other."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import scipy  # whose parts are loaded when first used

EQUAL_DIGITS = 6  # of float32
FEWEST_PAIRS = 3  # a deviation of two differences says nothing
TEST = "two-sided paired t-test"


class Paired(NamedTuple):
    """A paired test of the best method against another."""

    p: float
    pairs: int


def best_of(values: np.ndarray, *, higher: bool) -> int | None:
    """The method of the best mean over the seeds that it has, one without a gap before others.

    Args:
      values: [methods, seeds], NaN where a run has none.
      higher: whether more is better.

    Returns:
      Its row; None where no value is finite.

    >>> best_of(np.asarray([[0.5, 0.7], [0.8, 0.9], [0.99, np.nan]]), higher=True)
    1
    """
    values, known = rounded(values), np.isfinite(values)
    counts = known.sum(axis=1)
    if not counts.any():
        return None
    means = rounded(np.where(known, values, 0.0).sum(axis=1) / np.maximum(counts, 1))
    means = np.where(counts == counts.max(), means if higher else -means, -np.inf)
    return int(np.argmax(means))


def mean_ranks(values: np.ndarray, *, higher: bool) -> np.ndarray:
    """Mean over the seeds of each method's rank among all: 1 is the best, equal ones share the mean of their ranks.

    Args:
      values: [methods, seeds]; where a run has none (NaN), it ranks last.
      higher: whether more is better.

    Returns:
      f64[methods].

    >>> mean_ranks(np.asarray([[0.9, 0.8], [0.7, 0.8], [np.nan, 0.1]]), higher=True)
    array([1.25, 1.75, 3.  ])
    >>> mean_ranks(np.asarray([[5 / 6], [np.float32(5 / 6)]]), higher=True)
    array([1.5, 1.5])
    """
    worse = rounded(-values if higher else values)
    return scipy.stats.rankdata(np.where(np.isfinite(worse), worse, np.inf), axis=0).mean(axis=1)


def paired_tests(values: np.ndarray, best: int) -> list[Paired | None]:
    """Student's t-test, two-sided, on the differences of the best method and each other over the seeds both have.

    Args:
      values: [methods, seeds], NaN where a run has none.
      best: row of the method to test against.

    Returns:
      For each method its p, not adjusted for the number of methods; None for the best itself, where fewer than three
      seeds have both values, and where all differ by the same, of which no spread is known.

    >>> tests = paired_tests(np.asarray([[0.9, 0.8, 0.9], [0.7, 0.7, 0.75], [0.1, 0.2, np.nan]]), best=0)
    >>> [test and (round(test.p, 4), test.pairs) for test in tests]
    [None, (0.0351, 3), None]
    """
    values = rounded(values)
    return [None if row == best else _paired(values[best], other) for row, other in enumerate(values)]


def rounded(values: Any) -> np.ndarray:
    """Values [...] to six digits, whatever their unit: beyond these they differ by rounding.

    As many right answers in another order of summation are a mean that differs in its last digits.

    >>> rounded([100 * 5 / 6, 100 * np.float32(5 / 6), 1.5e-7, 0.0, np.nan])
    array([8.33333e+01, 8.33333e+01, 1.50000e-07, 0.00000e+00,         nan])
    """
    given = np.asarray(values, np.float64)
    return np.asarray([float(f"{value:.{EQUAL_DIGITS - 1}e}") for value in given.flat]).reshape(given.shape)


def _paired(one: np.ndarray, other: np.ndarray) -> Paired | None:
    both = np.isfinite(one) & np.isfinite(other)
    pairs = int(both.sum())
    if pairs < FEWEST_PAIRS:
        return None
    if np.array_equal(one[both], other[both]):
        return Paired(1.0, pairs)
    rounding = 2 * 10.0 ** (1 - EQUAL_DIGITS) * max(np.abs(one[both]).max(), np.abs(other[both]).max())
    if np.ptp(one[both] - other[both]) <= rounding:
        return None
    return Paired(float(scipy.stats.ttest_rel(one[both], other[both]).pvalue), pairs)
