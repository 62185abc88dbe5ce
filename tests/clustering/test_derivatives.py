"""Derivatives of clustering functions and robust rules, against differences and at the points where roots have none."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_cluster import aggregation, clustering, privacy

RNG = np.random.default_rng(0)
COUNTS = np.full((4, 2), 4)
BASES = np.linalg.qr(RNG.normal(size=(4, 2, 6, 2)))[0].astype(np.float32)
WEIGHTS = RNG.normal(size=60).astype(np.float32)


def weighed(values):
    return jnp.vdot(values, WEIGHTS[: values.size].reshape(values.shape))


def differences(of, at, step=2e-3):
    of, steps = jax.jit(jax.vmap(of)), step * np.eye(at.size, dtype=np.float32).reshape(-1, *at.shape)
    return ((of(at + steps) - of(at - steps)) / (2 * step)).reshape(at.shape)


def check(of, at, rtol=0.02):
    expected = differences(of, at)
    np.testing.assert_allclose(jax.jit(jax.grad(of))(at), expected, atol=rtol * np.abs(expected).max())


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "reduction"), [(1, "smallest"), (2, "sum")])
def test_angles_of_bases(rank, reduction):
    """Clients are compared with themselves too, and a class of few examples has columns of zeros."""

    def of(bases):
        return weighed(clustering.classwise_angles(bases, COUNTS, reduction))

    bases = BASES[..., :rank]
    check(of, bases)
    short = bases.copy()
    short[1, :, :, -1] = 0.0
    assert np.isfinite(jax.grad(of)(short)).all()


def test_angles_of_gradients():
    def of(rows):
        return weighed(clustering.gradient_angles(rows))

    rows = RNG.normal(size=(4, 3)).astype(np.float32)
    check(of, rows)
    rows[0] = 1.0, 0.0, 2.0
    for factor in (2.0, -1.0, 0.0):  # parallel rows, whose angle is at its end, and one without direction
        rows[1] = factor * rows[0]
        assert np.isfinite(jax.grad(of)(rows)).all()


@pytest.mark.slow
def test_landmarks_proximity():
    """A landmark is compared with itself too."""

    def of(updates):
        return weighed(clustering.landmark_proximity(BASES, COUNTS, updates, jnp.arange(3)))

    check(of, RNG.normal(size=(4, 3)).astype(np.float32))


def test_an_embedding_of_rows_that_have_fewer_directions():
    def of(rows):
        return clustering.profile_embedding(rows, rank=2).singular_values.sum()

    rows = jnp.zeros((4, 3)).at[0, 0].set(2.0)
    assert np.isfinite(jax.grad(of)(rows)).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "clients"),
    [
        (aggregation.median(), 5),
        (aggregation.median(), 6),
        (aggregation.trimmed_mean(share=0.2), 6),
        (aggregation.geometric_median(iterations=4), 6),
    ],
    ids=str,
)
def test_robust_rules(rule, clients):
    """Whatever the rule, a shift of all rows of a cluster shifts its result."""
    slot = jnp.arange(clients) % 2

    def of(rows, weigh=weighed):
        return weigh(rule.combine(aggregation.Rows(rows, slot, jnp.ones(clients)), 2))

    rows = RNG.normal(size=(clients, 3)).astype(np.float32)
    check(of, rows)
    for alike in (jnp.ones((clients, 3)), jnp.zeros((clients, 3))):
        found = jax.jit(jax.grad(functools.partial(of, weigh=jnp.sum)))(alike)
        np.testing.assert_allclose(found.sum(0), 2.0, rtol=1e-5)


@pytest.mark.parametrize("values", [[3, 4, 1], [0.1, 0.2, 0.1], [0, 0, 0], [1e30, 1e30, 0], [1e-25, 0, 0]])
@pytest.mark.parametrize("clip", ["rule", "privacy"])
def test_clipping(clip, values):
    private = privacy.gaussian(clip=1.0, noise_multiplier=1.0, delta=1e-5)

    def of(change):
        if clip == "rule":
            return weighed(aggregation.norm_clipping(1.0).limit(change))
        return weighed(private.clipped(change, jnp.ones(1))[0])

    values = np.asarray(values, np.float32)
    if 1e-3 < np.abs(values).max() < 1e3:
        check(of, values)
    assert np.isfinite(jax.grad(of)(values)).all()


def test_deviations_of_equal_numbers_have_derivatives():
    assert np.isfinite(jax.grad(lambda values: clustering.robust_deviations(values).sum())(jnp.ones(4))).all()


def test_the_bound_of_two_distributions_is_a_straight_line():
    """Its sine is that of π, which is not quite 0, and the root beside it has no slope at 1."""
    assert float(jax.grad(lambda alignment: clustering.cross_similarity_bound(alignment, 2))(1.0)) == -1.0


def test_the_gap_of_groups_has_a_derivative():
    similarity = jnp.array([[1.0, 0.9, -0.5], [0.9, 1.0, -0.2], [-0.5, -0.2, 1.0]])
    found = jax.grad(lambda matrix: clustering.separation_gap(matrix, jnp.array([0, 0, 1])))(similarity)
    # The least within, twice in the matrix, less the largest across, of which the row is the first part's.
    np.testing.assert_allclose(found, [[0.0, 0.5, 0.0], [0.5, 0.0, -1.0], [0.0, 0.0, 0.0]])
