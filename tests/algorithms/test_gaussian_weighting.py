"""FedGWC's weighting: rewards of a cohort, and what the paper proves of their averages."""

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_cluster import clustering
from fedjax_cluster.algorithms.fedgwc import weighting as gaussian_weighting
from tests.reference import fedgwc as reference
from tests.reference.interactions import gaussian_rewards


def test_rewards_of_clusters_in_one_cohort_are_those_of_each_alone():
    losses = jnp.asarray(np.random.default_rng(0).gamma(2.0, size=(7, 3)), jnp.float32)
    slot = jnp.asarray([0, 2, 0, 2, 0, 2, 1])
    took = jnp.ones((7, 3), bool).at[3].set(False)
    together = gaussian_weighting.cluster_rewards(losses, took, slot, 3)
    for cluster in range(3):
        own = np.flatnonzero((np.asarray(slot) == cluster) & np.asarray(took[:, 0]))
        alone = clustering.gaussian_rewards(losses[own])
        np.testing.assert_allclose(np.asarray(together)[own], alone, rtol=1e-5)
    assert float(together[3]) == 0.0


def test_steps_that_only_some_take_are_no_part_of_rewards():
    """Alone in a step one has reward 1: an outlier with twice the others' steps would be rewarded as they are."""
    losses = jnp.asarray(np.random.default_rng(0).gamma(2.0, size=(6, 8)), jnp.float32).at[0].add(20.0)
    number = jnp.asarray([8, 4, 4, 4, 2, 0])
    took = jnp.arange(8)[None] < number[:, None]
    slot, examples = jnp.asarray([0, 0, 0, 0, 1, 0]), jnp.asarray([5.0, 1.0, 2.0, 3.0, 1.0, 9.0])
    common = np.asarray(losses[:4, :4], np.float64)
    rewards = jax.jit(gaussian_weighting.cluster_rewards, static_argnames="num_clusters")
    for weight, alone in (
        (None, gaussian_rewards(common)),
        (examples, reference.released_rewards(common, np.asarray(examples[:4]))),
    ):
        found = rewards(losses, took, slot, num_clusters=2, weight=weight)
        np.testing.assert_allclose(found[:4], alone, rtol=1e-4)
        assert found[4:].tolist() == [1.0, 0.0]


def test_centred_rows_forget_a_clients_own_difficulty():
    rng = np.random.default_rng(0)
    matrix = rng.random((6, 6)).astype(np.float32)
    known = (rng.random((6, 6)) < 0.8) & ~np.eye(6, dtype=bool)
    mask = jnp.asarray([True] * 5 + [False])
    plain = gaussian_weighting.centred(jnp.asarray(matrix), mask, jnp.asarray(known))
    harder = gaussian_weighting.centred(
        jnp.asarray(matrix + rng.random((6, 1)).astype(np.float32)), mask, jnp.asarray(known)
    )
    np.testing.assert_allclose(plain, harder, atol=1e-6)
    assert (np.asarray(plain)[~known] == 0).all()
    assert (np.asarray(plain)[5] == 0).all()


def test_the_public_codes_rewards():
    losses, examples = np.random.default_rng(0).gamma(2.0, size=(5, 4)), np.asarray([3.0, 1.0, 4.0, 1.0, 5.0])
    share = examples / examples.sum()
    mean = share @ losses
    variance = share @ (losses - mean) ** 2
    expected = np.exp(-0.5 * (losses - mean) ** 2 / variance).mean(1)
    actual = gaussian_weighting.released_rewards(
        jnp.asarray(losses, jnp.float32), jnp.ones((5, 4), bool), jnp.asarray(examples, jnp.float32)
    )
    np.testing.assert_allclose(actual, expected / expected.sum(), rtol=1e-4)


def _weights(reward, rate):
    """Γ after each of the rounds in which a single pair meets, for many independent pairs."""
    path = []
    update = jax.jit(
        jax.vmap(
            lambda p, r, a: clustering.update_interactions(p, r, jnp.zeros(1, jnp.int32), None, a), in_axes=(0, 0, None)
        )
    )
    matrix = jnp.zeros((reward.shape[1], 1, 1))
    for number, row in enumerate(reward):
        own = 1 / (number + 1) if rate == "count" else rate
        matrix = update(matrix, jnp.asarray(row)[:, None], jnp.float32(own))
        path.append(np.asarray(matrix)[:, 0, 0])
    return np.asarray(path)


def test_theorem_5_1_decreasing_rates_converge_to_the_mean_reward():
    reward = np.random.default_rng(0).beta(2, 3, (400, 50)).astype(np.float32)
    path = _weights(reward, "count")
    np.testing.assert_allclose(path[-1], reward.mean(0), atol=1e-5)
    assert np.abs(path[-1] - 0.4).max() < 0.4 * np.abs(path[15] - 0.4).max()


def test_theorem_5_2_and_proposition_5_3_constant_rate():
    """The mean goes to μ; the variance to α/(2−α)·σ²/S, S steps averaged in a reward: below σ²."""
    alpha, steps = 0.2, 4
    draws = np.random.default_rng(1).beta(2, 3, (60, 4000, steps)).astype(np.float32)
    path = _weights(draws.mean(-1), alpha)
    np.testing.assert_allclose(path[-1].mean(), 0.4, atol=3e-3)
    np.testing.assert_allclose(path[-1].var(), alpha / (2 - alpha) * draws.var() / steps, rtol=0.08)
