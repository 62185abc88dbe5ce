"""Ranks by counting, against NumPy's sort, on values that sit badly: ties, zeros of both signs, subnormal, enormous."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_cluster import order_statistics as order

ROWS, COLUMNS, SLOTS = 40, 24, 3
TINY = np.float32(1e-42)
KINDS = {
    "normal": lambda rng: rng.normal(size=(ROWS, COLUMNS)),
    "heavy": lambda rng: rng.standard_cauchy((ROWS, COLUMNS)) ** 3,
    "ties": lambda rng: rng.integers(-2, 3, (ROWS, COLUMNS)),
    "zeros": lambda rng: np.where(rng.random((ROWS, COLUMNS)) < 0.7, rng.choice([0.0, -0.0], (ROWS, COLUMNS)), 1.0),
    "subnormal": lambda rng: rng.choice([-2 * TINY, -TINY, 0.0, TINY, 2 * TINY, 1e-38, -1e-38], (ROWS, COLUMNS)),
    "enormous": lambda rng: rng.choice([1.0, -1.0, 1e-30, 3e15], (ROWS, COLUMNS)) * rng.random((ROWS, COLUMNS)),
}
ranked = functools.partial(jax.jit, static_argnames="block")(order.ranked_mean)
nearest = jax.jit(order.nearest_mean)
value = jax.jit(order.value_of_rank)


def values(kind, seed=0):
    x = KINDS[kind](np.random.default_rng(seed)).astype(np.float32)
    return np.where(np.abs(x) < 2.0**-126, 0, x).astype(np.float32) if kind == "subnormal" else x


@pytest.mark.parametrize("kind", KINDS)
def test_the_value_of_each_rank_is_that_of_a_sort(kind):
    raw = KINDS[kind](np.random.default_rng(1)).astype(np.float32)
    ordered = np.sort(values(kind, 1), 0)
    for rank in (0, 7, ROWS // 2, ROWS - 1):
        np.testing.assert_array_equal(value(raw, rank), ordered[rank])
    some = np.arange(COLUMNS) % ROWS
    np.testing.assert_array_equal(value(raw, some), ordered[some, np.arange(COLUMNS)])


@pytest.mark.parametrize("block", [None, 16])
def test_means_of_ranks_are_those_of_each_slots_sorted_rows(block):
    """A slot of many rows, of one, and of none; rows of no slot; blocks that do not divide the columns."""
    rng = np.random.default_rng(2)
    slot = np.where(rng.random(ROWS) < 0.2, SLOTS, 0).astype(np.int32)
    slot[5] = 1
    count = np.bincount(slot, minlength=SLOTS + 1)[:SLOTS]
    for kind in KINDS:
        x = values(kind, 3)
        for first, stop in ((0 * count, count), (count // 5, count - count // 5), ((count - 1) // 2, count // 2 + 1)):
            first, stop = np.maximum(first, 0), np.minimum(stop, count)
            found = np.asarray(ranked(x, slot, first, stop, block=block))
            for each in range(SLOTS):
                rows = np.sort(x[slot == each].astype(np.float64), 0)[first[each] : stop[each]]
                expected = rows.mean(0) if len(rows) else np.zeros(COLUMNS)
                np.testing.assert_allclose(found[each], expected, rtol=2e-5, atol=1e-6 * np.abs(rows).max(initial=0))


def test_the_nearest_to_a_centre_are_those_of_a_sort_by_distance_and_size():
    x, slot = values("ties", 4), (np.arange(ROWS) % 2).astype(np.int32)
    centre, wanted = np.random.default_rng(5).integers(-1, 2, (2, COLUMNS)).astype(np.float32), np.array([13, 4])
    found = np.asarray(nearest(x, centre, slot, wanted))
    for each in range(2):
        for column in range(COLUMNS):
            own = sorted(x[slot == each, column], key=lambda v: (abs(v - centre[each, column]), v))
            np.testing.assert_allclose(found[each, column], np.mean(own[: wanted[each]]), rtol=1e-6, atol=1e-6)


def test_the_smallest_are_summed_and_the_infinite_do_not_count():
    x = values("normal", 6)
    x[np.random.default_rng(7).random(x.shape) < 0.3] = np.inf
    count = np.arange(COLUMNS) % 9
    expected = [np.sort(x[:, j])[: count[j]].sum() for j in range(COLUMNS)]
    np.testing.assert_allclose(jax.jit(order.smallest_sum)(x, jnp.asarray(count)), expected, rtol=1e-5, atol=1e-5)
