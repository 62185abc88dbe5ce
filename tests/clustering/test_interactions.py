import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fedjax_cluster.clustering as fcc
from tests.reference import interactions as reference

C, S, M = 6, 4, 9
masks = st.lists(st.booleans(), min_size=C, max_size=C).map(np.array)


def _losses(seed):
    return np.random.default_rng(seed).gamma(2.0, size=(C, S)).astype(np.float32)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), masks)
def test_rewards_equal_the_definition_on_the_clients_that_count(seed, mask):
    losses = _losses(seed)
    rewards = np.asarray(fcc.gaussian_rewards(np.where(mask[:, None], losses, np.nan), mask))
    assert rewards.dtype == np.float32
    assert (rewards[~mask] == 0.0).all()
    if mask.any():
        chex.assert_trees_all_close(rewards[mask], reference.gaussian_rewards(losses[mask]), rtol=1e-4)


def test_equal_losses_have_reward_one():
    """A rounded mean of equal numbers would give exp(-(n-1)/2n), not 1."""
    losses = np.full((7, 3), 0.1, np.float32)
    chex.assert_trees_all_equal(fcc.gaussian_rewards(losses), np.ones(7))
    chex.assert_trees_all_equal(fcc.gaussian_rewards(_losses(0)[:1]), np.ones(1))


@pytest.mark.parametrize(("scale", "offset"), [(1e-12, 0.0), (1e12, 0.0), (1.0, 512.0)])
def test_rewards_ignore_scale_and_offset(scale, offset):
    losses = np.round(_losses(1) * 64) / 64
    expected = reference.gaussian_rewards(losses)
    chex.assert_trees_all_close(fcc.gaussian_rewards(losses * scale + offset), expected, rtol=1e-4)


def test_rewards_of_clients_with_fewer_steps():
    """A step's moments are those of the clients that took it."""
    losses = _losses(2)
    steps = np.array([4, 2, 4, 3, 0, 4])
    mask = np.arange(S)[None, :] < steps[:, None]
    expected = np.zeros(C)
    for step in range(S):
        took = mask[:, step]
        expected[took] += reference.gaussian_rewards(losses[took, step : step + 1])
    rewards = fcc.gaussian_rewards(np.where(mask, losses, np.nan), mask)
    chex.assert_trees_all_close(rewards, expected / np.maximum(steps, 1), rtol=1e-4)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), masks, st.booleans())
def test_update_equals_the_definition_and_drops_padding(seed, mask, per_pair):
    rng = np.random.default_rng(seed)
    before = rng.random((M, M)).astype(np.float32)
    clients, rewards = rng.permutation(M)[:C], rng.random(C).astype(np.float32)
    rate = rng.random((C, C)).astype(np.float32) if per_pair else np.float32(0.3)
    index = np.where(mask, clients, M)
    known_rate = rate[np.ix_(mask, mask)] if per_pair else rate
    expected = reference.update_interactions(before, rewards[mask], clients[mask], known_rate)
    spoiled = np.where(mask, rewards, np.nan).astype(np.float32)
    actual = fcc.update_interactions(before, spoiled, index, mask, rate)
    assert actual.dtype == jnp.float32
    chex.assert_trees_all_close(actual, expected, rtol=1e-5, atol=1e-6)
    masked_only = fcc.update_interactions(before, spoiled, clients, mask, rate)
    chex.assert_trees_all_equal(masked_only, actual)


def test_update_never_wraps_around():
    before = jnp.zeros((3, 3))
    mask = jnp.array([True, True])
    jitted = jax.jit(lambda index: fcc.update_interactions(before, jnp.ones(2), index, mask, 1.0))
    for padding in (-1, 3, 99):
        assert jitted(jnp.array([0, padding])).tolist() == [[1.0, 0.0, 0.0], [0.0] * 3, [0.0] * 3]


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.lists(st.booleans(), min_size=M, max_size=M).map(np.array))
def test_affinity_equals_the_definition_on_the_clients_that_count(seed, mask):
    interactions = np.random.default_rng(seed).random((M, M)).astype(np.float32)
    spoiled = np.where(mask[:, None] & mask[None, :], interactions, np.nan)
    affinity = np.asarray(fcc.interaction_affinity(spoiled, 0.7, mask))
    assert affinity.dtype == np.float32
    chex.assert_trees_all_equal(affinity, affinity.T)
    expected = np.zeros((M, M))
    expected[np.ix_(mask, mask)] = reference.interaction_affinity(interactions[np.ix_(mask, mask)], 0.7)
    chex.assert_trees_all_close(affinity, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_affinity_keeps_its_digits_among_many_alike_clients():
    """Rows near 0.9 that differ by 1e-3: their squared norms are a million times their distances."""
    rng = np.random.default_rng(0)
    interactions = (0.9 + 1e-3 * rng.normal(size=(300, 300))).astype(np.float32)
    expected = reference.interaction_affinity(interactions, 1000.0)
    chex.assert_trees_all_close(fcc.interaction_affinity(interactions, 1000.0), expected, rtol=1e-3)


def test_affinity_ignores_the_entries_of_the_pair_itself():
    interactions = np.random.default_rng(0).random((M, M)).astype(np.float32)
    changed = interactions.copy()
    changed[2, 2] = changed[2, 5] = changed[5, 2] = changed[5, 5] = 77.0
    before, after = (np.asarray(fcc.interaction_affinity(matrix, 1.0))[2, 5] for matrix in (interactions, changed))
    chex.assert_trees_all_close(before, after, rtol=1e-2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: fcc.gaussian_rewards(np.ones(3)), "must have 2 axes"),
        (lambda: fcc.gaussian_rewards(np.ones((3, 2)), np.ones(2, bool)), "mask has shape"),
        (lambda: fcc.gaussian_rewards(np.array([[np.nan]])), "NaN or infinite"),
        (lambda: fcc.update_interactions(np.ones((3, 3)), np.ones(2), np.arange(3), None, 0.1), "3 labels"),
        (lambda: fcc.update_interactions(np.ones((3, 3)), np.ones(2), np.arange(2), None, 1.5), "outside"),
        (
            lambda: fcc.update_interactions(np.ones((3, 3)), np.ones(2), np.arange(2), None, np.ones((3, 3))),
            "square matrix",
        ),
        (lambda: fcc.interaction_affinity(np.ones((3, 3)), 0.0), "positive"),
        (lambda: fcc.interaction_affinity(np.full((3, 3), np.inf), 1.0), "NaN or infinite"),
    ],
)
def test_mistakes_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
