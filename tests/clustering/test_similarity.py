import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.spatial.distance
from hypothesis import given, settings
from hypothesis import strategies as st

import fedjax_cluster.clustering as fcc
from fedjax_cluster.clustering import similarity
from tests.reference import similarity as reference


def _updates(seed, shape=(7, 12)):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def test_cosine_similarity_equals_the_definition():
    updates = _updates(0)
    updates[3] = 0.0
    actual = fcc.cosine_similarity(updates)
    assert actual.dtype == jnp.float32
    chex.assert_trees_all_close(actual, reference.cosine_similarity(updates), atol=1e-6)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**6), st.lists(st.integers(-30, 30), min_size=7, max_size=7))
def test_cosine_similarity_ignores_the_scale_of_each_row(seed, exponents):
    updates = _updates(seed)
    scaled = updates * (10.0 ** np.array(exponents, np.float64)[:, None])
    chex.assert_trees_all_close(
        fcc.cosine_similarity(scaled.astype(np.float32)), fcc.cosine_similarity(updates), atol=2e-6
    )


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**6))
def test_cosine_similarity_ignores_an_orthonormal_transform(seed):
    """CFL, Eq. 45: what makes encrypted updates cluster alike."""
    updates = _updates(seed)
    rotation, _ = np.linalg.qr(np.random.default_rng(seed).normal(size=(12, 12)))
    expected = fcc.cosine_similarity(updates)
    chex.assert_trees_all_close(fcc.cosine_similarity(updates @ rotation), expected, atol=2e-6)
    chex.assert_trees_all_close(fcc.cosine_similarity(updates[:, ::-1]), expected, atol=2e-6)


def test_cosine_similarity_stays_in_range_with_unit_diagonal():
    updates = np.repeat(_updates(1, (4, 5000)), 4, axis=0) * np.linspace(0.1, 9, 16, dtype=np.float32)[:, None]
    cosine = np.asarray(fcc.cosine_similarity(updates))
    assert cosine.max() <= 1.0
    assert (np.diagonal(cosine) == 1.0).all()
    chex.assert_trees_all_equal(cosine, cosine.T)


def test_cosine_similarity_leaves_masked_clients_out():
    updates = _updates(2)
    mask = np.array([True, False, True, True, False, True, True])
    expected = reference.cosine_similarity(np.where(mask[:, None], updates, 0.0))
    for spoiled in (updates, np.where(mask[:, None], updates, np.nan)):
        chex.assert_trees_all_close(fcc.cosine_similarity(spoiled, mask=mask), expected, atol=1e-6)


def test_gram_of_blocks_adds_up(monkeypatch):
    """A chunk that is lost or counted twice shows in a width that is no multiple of the chunk."""
    block = _updates(3, (5, 103))
    expected = block.astype(np.float64) @ block.T.astype(np.float64)
    whole = fcc.block_gram(block)
    chex.assert_trees_all_close(fcc.block_gram(block[:, :40]) + fcc.block_gram(block[:, 40:]), whole, rtol=1e-5)
    chex.assert_trees_all_close(whole, expected, rtol=1e-5, atol=1e-5)
    monkeypatch.setattr(similarity, "_CHUNK", 25)
    chex.assert_trees_all_close(
        jax.jit(lambda x: similarity._gram.__wrapped__(x, None))(block), expected, rtol=1e-5, atol=1e-5
    )


def test_gram_of_half_precision_accumulates_in_single():
    block = jnp.ones((2, 5000), jnp.bfloat16)
    gram = fcc.block_gram(block)
    assert gram.dtype == jnp.float32
    assert float(gram[0, 1]) == 5000.0  # bfloat16 would give 4992


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: fcc.cosine_similarity(np.ones(3)), "must have 2 axes"),
        (lambda: fcc.cosine_similarity(np.array([[1.0, np.nan]])), "NaN or infinite"),
        (lambda: fcc.cosine_similarity(np.ones((2, 2)), mask=np.ones(3, bool)), "mask has shape"),
        (lambda: fcc.cosine_similarity(np.ones((2, 2)), mask=np.ones(2)), "must be bool"),
        (lambda: fcc.block_gram(np.ones((2, 3, 4))), "must have 2 axes"),
    ],
)
def test_mistakes_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def _cdist(points, others, metric):
    names = {"euclidean": "euclidean", "manhattan": "cityblock", "cosine": "cosine"}
    return scipy.spatial.distance.cdist(np.asarray(points, np.float64), np.asarray(others, np.float64), names[metric])


@pytest.mark.parametrize("metric", ["euclidean", "manhattan", "cosine"])
def test_distances_are_scipys(metric):
    """Of more columns than are summed at a time, near one another and far from the origin, tiny and huge."""
    rng = np.random.default_rng(0)
    points, others = rng.normal(size=(7, 5_000)).astype(np.float32), rng.normal(size=(4, 5_000)).astype(np.float32)
    for scale, offset in ((1.0, 0.0), (1e-2, 100.0), (1e-25, 0.0), (1e25, 0.0)):
        first, second = (np.float32(scale) * part + np.float32(offset) for part in (points, others))
        expected = _cdist(first, second, metric)
        tolerance = {"rtol": 1e-5} if metric != "cosine" else {"rtol": 0, "atol": 2e-6}
        np.testing.assert_allclose(fcc.pairwise_distances(first, second, metric), expected, **tolerance)
        own = np.asarray(jax.jit(lambda rows: fcc.pairwise_distances(rows, metric=metric))(first))
        np.testing.assert_allclose(own, _cdist(first, first, metric), atol=0 if metric != "cosine" else 2e-6, rtol=1e-5)
        assert metric == "cosine" or (np.diagonal(own) == 0).all()


def test_distances_of_what_cannot_be_compared():
    zero = np.zeros((1, 3), np.float32)
    assert fcc.pairwise_distances(zero, np.ones((1, 3)), "cosine").tolist() == [[1.0]]
    assert fcc.pairwise_distances(zero).tolist() == [[0.0]]
    with pytest.raises(ValueError, match="points has 3 columns and others 2: give rows of equal length"):
        fcc.pairwise_distances(zero, np.ones((1, 2)))
    with pytest.raises(ValueError, match="metric is 'l2', which is unknown"):
        fcc.pairwise_distances(zero, metric="l2")
    with pytest.raises(ValueError, match="others holds NaN"):
        fcc.pairwise_distances(zero, zero * np.nan)
