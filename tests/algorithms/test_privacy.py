"""Orthonormal transforms: what Eq. 45 promises, and that they hide and give back."""

from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg

from fedjax_cluster.algorithms.cfl import privacy

SCHEMES = get_args(privacy.Scheme)


def matrix(scheme, size, seed=0):
    """P itself, column by column."""
    transform = privacy.orthonormal_transform(scheme, jax.random.key(seed), size)
    return np.asarray(jax.jit(jax.vmap(transform.apply))(jnp.eye(size))).T, transform


@pytest.mark.slow
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("size", [1, 8, 13])
def test_columns_are_orthonormal_and_the_inverse_is_the_transpose(scheme, size):
    whole, transform = matrix(scheme, size)
    assert whole.shape == (transform.size, size)
    np.testing.assert_allclose(whole.T @ whole, np.eye(size), atol=2e-6)
    vector = np.random.default_rng(0).normal(size=transform.size).astype(np.float32)
    np.testing.assert_allclose(transform.invert(vector), whole.T @ vector, atol=2e-6)


def test_a_permutation_moves_entries_and_the_others_mix_them():
    permutation, _ = matrix("permutation", 13)
    assert sorted(permutation.argmax(0)) == list(range(13))
    assert (permutation.sum(0) == 1).all()
    for scheme in ("hadamard", "householder"):
        mixed, _ = matrix(scheme, 13)
        assert (np.abs(mixed) > 1e-6).all(), "an entry could be read off"


def test_hadamard_is_scipys_matrix_times_the_signs():
    mixed, _ = matrix("hadamard", 8)
    signs = np.sign(mixed[0])
    np.testing.assert_allclose(mixed, scipy.linalg.hadamard(8) / np.sqrt(8) * signs, atol=1e-6)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_another_secret_is_another_transform(scheme):
    one, _ = matrix(scheme, 13, seed=0)
    assert not np.allclose(one, matrix(scheme, 13, seed=1)[0])


def test_mistakes_are_named():
    with pytest.raises(ValueError, match="'rot13'; it must be one of"):
        privacy.orthonormal_transform("rot13", jax.random.key(0), 3)
    with pytest.raises(ValueError, match="num_parameters is 0"):
        privacy.orthonormal_transform("permutation", jax.random.key(0), 0)
