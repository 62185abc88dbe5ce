"""Means of ranks by counting, against sorted columns: ties, signs, magnitudes, blocks, devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjax_cluster import parallel
from fedjax_cluster.order_statistics import BLOCK, Ranks, mean_of_nearest, mean_of_ranks

ROWS, COLUMNS, CLUSTERS = 14, 5, 3
# Few values, so that many are equal; both zeros, the least normal number, and what is largest of what clients may send.
VALUES = np.float32([-1e16, -3.5, -1.0, -1.2e-38, -0.0, 0.0, 1.2e-38, 1.0, 1.0000001, 3.5, 1e16])

ranked = jax.jit(mean_of_ranks, static_argnames=("mapping", "two_at_most"))
nearest = jax.jit(mean_of_nearest, static_argnames="mapping")


def sorted_mean(column, first, stop):
    return np.mean(np.sort(column.astype(np.float64))[first:stop])


def nearest_mean(column, centre, number):
    # As far as float32 tells: what is as near in it need not be in float64.
    order = sorted(column, key=lambda value: (abs(np.float32(value - centre)), value))
    return np.mean(np.float64(order[:number]))


@pytest.mark.slow
@settings(max_examples=60)
@given(st.data())
def test_columns_of_any_values(data):
    draw = data.draw
    values = np.array(draw(st.lists(st.sampled_from(VALUES), min_size=ROWS * COLUMNS, max_size=ROWS * COLUMNS)))
    values = values.reshape(ROWS, COLUMNS).astype(np.float32)
    slot = np.array(draw(st.lists(st.integers(0, CLUSTERS), min_size=ROWS, max_size=ROWS)), np.int32)
    count = np.bincount(slot, minlength=CLUSTERS + 1)[:CLUSTERS]
    first = np.array([draw(st.integers(0, max(each - 1, 0))) for each in count], np.int32)
    stop = np.array([draw(st.integers(a + 1, max(n, a + 1))) if n else 0 for a, n in zip(first, count, strict=True)])
    centre = draw(st.sampled_from(VALUES[np.abs(VALUES) < 1e16]))
    number = np.minimum(stop, count).astype(np.int32)
    found = ranked(values, slot, Ranks(jnp.asarray(first), jnp.asarray(stop, jnp.int32)))
    pair = np.minimum(stop, first + 2)
    of_two = ranked(values, slot, Ranks(jnp.asarray(first), jnp.asarray(pair, jnp.int32)), two_at_most=True)
    near = nearest(values, jnp.full((CLUSTERS, COLUMNS), centre), slot, jnp.asarray(number))
    for cluster, of in enumerate(count):
        own = values[slot == cluster]
        for column in range(COLUMNS):
            if not of:
                assert found[cluster, column] == near[cluster, column] == of_two[cluster, column] == 0
                continue
            scale = 1e-6 * (1 + np.abs(own[:, column]).max())
            expected = sorted_mean(own[:, column], first[cluster], stop[cluster])
            np.testing.assert_allclose(found[cluster, column], expected, rtol=1e-5, atol=scale)
            expected = sorted_mean(own[:, column], first[cluster], pair[cluster])
            np.testing.assert_allclose(of_two[cluster, column], expected, rtol=1e-5, atol=scale)
            expected = nearest_mean(own[:, column], centre, number[cluster])
            np.testing.assert_allclose(near[cluster, column], expected, rtol=1e-5, atol=scale)


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("columns", [1, BLOCK - 1, BLOCK, 2 * BLOCK + 3])
def test_blocks_and_devices_divide_the_columns(columns, devices):
    mapping = parallel.client_mapping("scan", devices=jax.devices()[:devices])
    rng = np.random.default_rng(columns)
    values = parallel.place_rows(mapping, rng.normal(size=(40, columns)).astype(np.float32))
    slot = np.arange(40, dtype=np.int32) % 2
    half = jnp.full((2, columns), 10)
    found = ranked(values, slot, Ranks(half, half + 1), mapping=mapping)
    own = np.asarray(values).reshape(20, 2, columns)
    np.testing.assert_array_equal(found, np.sort(own, 0)[10])
    # Each column of its own ranks.
    stop = jnp.asarray(rng.integers(1, 21, (2, columns)), jnp.int32)
    found = ranked(values, slot, Ranks(jnp.zeros_like(stop), stop), mapping=mapping)
    expected = [[sorted_mean(own[:, k, p], 0, stop[k, p]) for p in range(columns)] for k in range(2)]
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int32])
def test_ranks_beyond_a_clusters_rows_and_other_numbers(dtype):
    values = np.array([[5, -1], [1, 2], [3, 7], [9, 9]], dtype)
    slot, beyond = np.array([0, 0, 0, 2], np.int32), jnp.full(2, 8)
    first = jnp.asarray([1, 0])
    np.testing.assert_array_equal(ranked(values, slot, Ranks(first, beyond)), [[4, 4.5], [0, 0]])
    of_two = ranked(values, slot, Ranks(jnp.asarray([2, 0]), beyond), two_at_most=True)
    np.testing.assert_array_equal(of_two, [[5, 7], [0, 0]])
    before = Ranks(jnp.asarray([0, -1]), jnp.asarray([1, 0]))
    np.testing.assert_array_equal(ranked(values, slot, before, two_at_most=True), [[1, -1], [0, 0]])
    np.testing.assert_array_equal(nearest(values, np.zeros((2, 2), dtype), slot, beyond)[1], [0, 0])
    np.testing.assert_allclose(nearest(values, np.zeros((2, 2), dtype), slot, beyond)[0], [3, 8 / 3], rtol=1e-6)


def test_devices_exchange_columns_once_and_count_alone():
    """A collective inside the passes would run for each bit of each block."""
    mapping = parallel.client_mapping("scan", devices=jax.devices()[:2])
    values = parallel.place_rows(mapping, np.zeros((40, 3 * BLOCK), np.float32))
    slot, ranks = jnp.zeros(40, jnp.int32), Ranks(jnp.zeros(1, jnp.int32), jnp.ones(1, jnp.int32))
    program = ranked.lower(values, slot, ranks, mapping=mapping).compile().as_text()
    loops = [
        part for part in program.split("\n\n") if "body" in part.split("(", 1)[0] or "region" in part.split("(", 1)[0]
    ]
    assert loops
    assert not any(name in part for part in loops for name in ("all-reduce", "all-gather", "all-to-all"))


LAWS = {
    "normal": lambda rng, shape: rng.normal(size=shape),
    "heavy tails": lambda rng, shape: rng.standard_t(1, size=shape),
    "of all magnitudes": lambda rng, shape: np.exp(8 * rng.normal(size=shape)) * rng.choice([-1, 1], shape),
    "mostly zero": lambda rng, shape: np.where(rng.random(shape) < 0.6, 0.0, rng.normal(size=shape)),
    "some infinite": lambda rng, shape: np.where(rng.random(shape) < 0.01, -np.inf, rng.normal(size=shape)),
}


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("share", [0.1, 0.5])
def test_of_many_rows_guesses_and_halves_find_the_rank(law, share):
    """Faults: an end that stays where it is, a guess outside of the two, a search that stops before its rank."""
    rng = np.random.default_rng(0)
    values, slot = LAWS[law](rng, (1000, COLUMNS)).astype(np.float32), rng.integers(0, 4, 1000).astype(np.int32)
    values[slot == 3] = np.nan  # who does not count
    count = np.bincount(slot)[:3]
    first = (share * count).astype(np.int32)
    ends = Ranks(jnp.asarray(first), jnp.asarray(first + 2))
    of_two = ranked(values, slot, ends, two_at_most=True)
    for cluster in range(3):
        ordered = np.sort(values[slot == cluster].astype(np.float64), axis=0)
        np.testing.assert_allclose(of_two[cluster], ordered[first[cluster] :][:2].mean(0), rtol=1e-6)


def test_ranks_where_jax_is_set_to_64_bits():
    """What a search carries from turn to turn stays of 32 bits."""
    values = np.random.default_rng(0).normal(size=(60, COLUMNS)).astype(np.float32)
    with jax.enable_x64(True):
        slot = np.zeros(60, np.int32)
        found = ranked(values, slot, Ranks(jnp.int32([12]), jnp.int32([48])))
    np.testing.assert_allclose(found[0], np.sort(values, axis=0)[12:48].mean(0), rtol=1e-5, atol=1e-6)
