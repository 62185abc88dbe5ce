"""What a notebook may give: clients like nobody, similarities of any size, shares that are whole, nothing at all."""

import contextlib
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.cluster import SpectralClustering

import fedjax_cluster as fc
from fedjax_cluster import clustering
from fedjax_cluster.aggregation import Rows, geometric_median, krum, median, multi_krum
from fedjax_cluster.clustering import scores


@pytest.mark.filterwarnings("ignore:Graph is not fully connected")
@pytest.mark.parametrize(("alone", "k"), [(1, 2), (2, 2), (2, 3)])
def test_clients_like_nobody_are_clusters_as_scikit_learn_has_it(alone, k):
    affinity = np.zeros((5 + alone, 5 + alone))
    affinity[:5, :5] = 1 - np.eye(5)
    expected = SpectralClustering(k, affinity="precomputed", assign_labels="cluster_qr").fit_predict(affinity)
    found = clustering.qr_partition(affinity, k)
    assert clustering.scores.adjusted_rand_index(found.labels, expected) == 1.0
    assert np.isfinite(found.embedding).all()


def test_the_gap_of_similarities_above_one_is_theirs():
    similarity = np.array([[9, 5, 0.5], [5, 9, 0.2], [0.5, 0.2, 9]])
    assert float(clustering.separation_gap(similarity, np.array([0, 0, 1]))) == pytest.approx(4.5)
    assert float(clustering.separation_gap(similarity, np.array([0, 1, 2]))) == pytest.approx(0.5)


@pytest.mark.parametrize(("share", "rows", "expected"), [(0.53, 100, 53), (0.21, 300, 63), (0.5, 7, 3), (0.01, 20, 1)])
def test_a_share_of_the_rows_is_rounded_down_once(share, rows, expected):
    x = np.random.default_rng(0).normal(size=(rows, 70))
    found = clustering.principal_vectors(x, np.zeros(rows, int), rows, 1, 70, share=share)
    assert int((np.abs(np.asarray(found[0])).max(0) > 0).sum()) == expected


@pytest.mark.parametrize(
    "rule", [median(), krum(), multi_krum(), geometric_median()], ids=lambda rule: type(rule).__name__
)
def test_rows_that_do_not_count_may_be_nan(rule):
    values = np.array([[0, 0], [1, 1], [2, 2], [3, 3], [4, 4], [np.nan, np.nan]], np.float32)
    slot = np.array([0, 0, 0, 0, 0, 1], np.int32)
    whole = rule.combine(Rows(jnp.asarray(values), jnp.asarray(slot), jnp.ones(6)), 1)
    without = rule.combine(Rows(jnp.asarray(values[:5]), jnp.asarray(slot[:5]), jnp.ones(5)), 1)
    np.testing.assert_array_equal(whole, without)


@pytest.mark.parametrize("rule", [krum(), multi_krum()], ids=lambda rule: type(rule).__name__)
def test_krum_does_not_choose_what_is_nan(rule):
    values = np.array([[0, 0], [1, 1], [2, 2], [3, 3], [4, 4], [np.nan, np.nan]], np.float32)
    assert np.isfinite(rule.combine(Rows(jnp.asarray(values), jnp.zeros(6, jnp.int32), jnp.ones(6)), 1)).all()


def test_what_holds_nothing_is_refused_in_one_line():
    key = jax.random.key(0)
    empty = [
        lambda: clustering.classwise_angles(np.zeros((3, 2, 4, 0)), np.ones((3, 2), int)),
        lambda: clustering.kmeans(key, np.zeros((3, 0)), 2),
        lambda: clustering.principal_vectors(np.zeros((0, 3)), np.zeros(0, int), 0, 2, 1),
        lambda: clustering.joint_basis(np.zeros((2, 3, 0))),
        lambda: clustering.scores.silhouette(np.zeros((0, 2)), np.zeros(0, int)),
        lambda: clustering.gaussian_rewards(np.zeros((0, 2))),
        lambda: clustering.data_dissimilarity(np.zeros((3, 3, 0)), np.ones((3, 0), int)),
    ]
    for call in empty:
        with pytest.raises(ValueError, match=r"is empty|at least one"):
            call()


def test_centroids_that_are_apart_in_double_precision_are_so():
    x = np.array([[0.0], [1e-4], [0.01], [0.0101], [2e4], [2e4 + 0.01]])
    labels = np.array([0, 0, 1, 1, 2, 2])
    with jax.enable_x64(True):
        assert float(clustering.scores.davies_bouldin(x, labels)) == pytest.approx(0.006667, rel=1e-3)


@pytest.mark.parametrize("count", [np.int32(4), np.int64(4), 4])
def test_a_mini_batch_is_the_same_in_double_precision(count):
    data = fc.types.ClientData(np.zeros((5, 2), np.float32), np.zeros(5, np.int32), count)
    index = [fc.local.mini_batch(jax.random.key(0), data, 2, 1)[2]]
    with jax.enable_x64(True):
        index.append(fc.local.mini_batch(jax.random.key(0), data, 2, 1)[2])
    np.testing.assert_array_equal(*index)


@pytest.mark.parametrize(
    "of",
    [
        lambda rows: clustering.pairwise_distances(rows).sum(),
        lambda rows: clustering.pairwise_distances(rows, metric="cosine").sum(),
        lambda rows: clustering.scores.silhouette(rows, np.array([0, 0, 1, 1, 1])),
        lambda rows: clustering.scores.davies_bouldin(rows, np.array([0, 0, 1, 1, 1])),
    ],
    ids=["distances", "cosines", "silhouette", "davies_bouldin"],
)
def test_distances_and_what_is_made_of_them_have_derivatives(of):
    """A row's distance from itself is a root of 0, of which NaN came to all derivatives."""
    rows = jnp.asarray(np.random.default_rng(0).normal(size=(5, 3)), jnp.float32)
    chex.assert_numerical_grads(of, (rows,), order=1, modes=["rev"], atol=0.02, rtol=0.02)
    for other in (rows[0], jnp.zeros(3)):
        assert np.isfinite(jax.grad(of)(rows.at[1].set(other))).all()


@pytest.mark.parametrize("far", [1e6, 1e17])
def test_a_row_far_away_costs_the_distances_of_others_no_digit(far):
    """As far as the docstring says: their squares are in the unit of the largest."""
    rows = np.array([[0.0], [1.0], [10.0], [11.0], [far]], np.float32)
    for metric in ("euclidean", "manhattan"):
        found = clustering.pairwise_distances(rows, metric=metric)
        np.testing.assert_allclose(found, np.abs(rows - rows.T.astype(np.float64)), rtol=1e-6)


def test_the_vectors_of_a_class_do_not_depend_on_the_units_of_another():
    """In units of all rows, the Gram matrix of a class that was far smaller was zero."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(90, 80)).astype(np.float32), np.arange(90) % 2
    alone = clustering.principal_vectors(x, y, 90, num_classes=2, rank=2)
    small = clustering.principal_vectors(np.where(y[:, None] == 1, 2.0**-73 * x, x), y, 90, num_classes=2, rank=2)
    np.testing.assert_allclose(small, alone, atol=1e-6)


def test_deviations_of_numbers_near_the_largest_are_theirs():
    values = np.array([-3.0, 3.0, 2.0, -2.0, 0.0], np.float32)
    expected = clustering.robust_deviations(values)
    np.testing.assert_allclose(clustering.robust_deviations(values * 1e38), expected, rtol=1e-5)
    far = clustering.robust_deviations(np.array([1.0, 2.0, 3.0, 3e38], np.float32))
    np.testing.assert_allclose(far[:3], [-1.0118, -0.3373, 0.3373], rtol=1e-3)


@pytest.mark.parametrize("size", [1e-37, 9e37, 3e38])
def test_rows_of_any_finite_size_have_their_angles(size):
    """By the largest entry itself XLA divides as it multiplies by its inverse, which beyond 8.5e37 is 0."""
    rows = (np.array([[1, 0], [1, 1], [0, 1]], np.float32) * np.float32(size)).astype(np.float32)
    half = math.sqrt(0.5)
    expected = np.array([[1, half, 0], [half, 1, half], [0, half, 1]])
    np.testing.assert_allclose(clustering.cosine_similarity(rows), expected, atol=1e-6)
    np.testing.assert_allclose(clustering.gradient_angles(rows), np.degrees(np.arccos(expected)), atol=0.1)
    np.testing.assert_allclose(clustering.pairwise_distances(rows, metric="cosine"), 1 - expected, atol=1e-6)
    losses = np.array([[0.0], [0.5], [1.0]], np.float32) * np.float32(size)
    rewards = clustering.gaussian_rewards(losses, np.ones((3, 1), bool))
    np.testing.assert_allclose(rewards, np.exp([-0.5, 0, -0.5]), rtol=1e-5)


def test_a_row_that_is_not_finite_leaves_those_of_others_alone():
    """Inside a program nothing can be refused."""
    found = jax.jit(clustering.cosine_similarity)(jnp.array([[1.0, 2.0], [np.inf, 1.0], [2.0, 1.0], [np.nan, 0.0]]))
    np.testing.assert_allclose(found, [[1, 0, 0.8, 0], [0, 0, 0, 0], [0.8, 0, 1, 0], [0, 0, 0, 0]], atol=1e-6)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "uint16", "int32", "uint32"])
def test_labels_of_any_width_are_labels_of_however_many_clients(dtype, monkeypatch):
    """Of many they are looked at where they are, and there the bounds themselves were cut off to so many bits."""
    monkeypatch.setattr(clustering.checks, "_HOST_SIZE", 4)
    labels = jnp.array([0, 0, 1, 1, 2, 2], dtype)
    assert float(clustering.scores.purity(labels, labels)) == 1.0


@pytest.mark.parametrize(
    ("entry", "value", "message"),
    [
        ((0, 2), np.nan, "holds NaN or infinite values between clients that count"),
        ((0, 2), 0.25, "is not symmetric"),
        (([0, 2], [2, 0]), -1.0, "holds negative values"),
        ((1, 1), np.nan, None),
        ((0, 3), np.nan, None),
    ],
    ids=["not finite", "not symmetric", "negative", "the diagonal", "who does not count"],
)
@pytest.mark.parametrize("entries", [2**22, 4], ids=["small", "large"])
def test_large_matrices_are_looked_at_where_they_are_like_small_ones(entries, entry, value, message, monkeypatch):
    """Large ones in a program of JAX, small ones by NumPy."""
    monkeypatch.setattr(clustering.checks, "_HOST_SIZE", entries)
    affinity = np.ones((4, 4), np.float32)
    affinity[entry] = value
    refused = pytest.raises(ValueError, match=message) if message else contextlib.nullcontext()
    with refused:
        clustering.spectral_clustering(jax.random.key(0), jnp.asarray(affinity), 2, np.array([True, True, True, False]))


def test_landmarks_are_the_same_in_double_precision():
    drawn = [clustering.draw_landmarks(jax.random.key(0), 5, np.ones(20, bool))]
    with jax.enable_x64(True):
        drawn.append(clustering.draw_landmarks(jax.random.key(0), 5, np.ones(20, bool)))
    np.testing.assert_array_equal(*drawn)


def test_directions_apart_in_double_precision_are_so():
    """Floors of float32's rounding made zeros of them."""
    angle = np.array([0.0, 5e-5])
    near = np.stack([np.cos(angle), np.sin(angle), 0 * angle], 1)[:, :, None]
    with jax.enable_x64(True):
        vectors = clustering.principal_vectors(np.array([[1.0, 0, 0], [0, 1e-6, 0]]), np.array([0, 0]), 2, 1, 2)
        np.testing.assert_allclose(np.abs(vectors[0]), np.eye(3)[:, :2], atol=1e-9)
        assert np.linalg.matrix_rank(clustering.joint_basis(near)) == 2
    assert np.linalg.matrix_rank(clustering.joint_basis(near.astype(np.float32))) == 1


def test_an_embedding_that_is_none_is_named():
    with pytest.raises(ValueError, match=r"embedding is \(1, 2\); it must be an Embedding"):
        clustering.landmark_directions(np.ones((3, 2)), (1, 2))


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("label", [[0, 0, 1, 1, 2], [0, 0, 1, 1, 1]])
def test_a_score_of_what_is_not_finite_is_none(value, label):
    """Under `jit`, where nothing can be refused: it stood as a plausible score."""
    features, label = jnp.array([[0.0, 2.0], [1.0, 1.0], [5.0, 1.0], [6.0, 0.0], [value, 1.0]]), jnp.array(label)
    for score in (scores.silhouette, scores.davies_bouldin, scores.wasserstein_adjusted_silhouette):
        assert math.isnan(jax.jit(score)(features, label)), score
        assert math.isfinite(jax.jit(score)(features, label, mask=jnp.arange(5) < 4)), score


def test_a_split_across_what_is_not_known_is_not_known():
    similarity = jnp.array([[1, 0.5, 0.5, 0.4], [0.5, 1, 0.9, 0.9], [0.5, 0.9, 1, jnp.nan], [0.4, 0.9, jnp.nan, 1]])
    assert math.isnan(jax.jit(clustering.optimal_bipartition)(similarity).max_cross)


def test_class_counts_may_be_as_large_as_numbers_are():
    counts = np.array([[9, 0, 0], [0, 9, 0], [3, 3, 3], [1, 1, 1]], np.float32)
    label = jnp.array([0, 0, 1, 1])
    for size in (1.0, 3e37, 1e-37):
        assert float(scores.wasserstein_adjusted_silhouette(size * counts, label)) == 1.0


@pytest.mark.parametrize("diagonal", [1.0, 1e8, math.nan])
def test_differences_of_similarities_do_not_know_the_diagonal(diagonal):
    rng = np.random.default_rng(0)
    similarity = rng.normal(size=(7, 7)).astype(np.float32)
    similarity = similarity + similarity.T
    np.fill_diagonal(similarity, diagonal)
    mask = np.arange(7) != 2
    others = [[[z for z in range(7) if mask[z] and z not in (i, j)] for j in range(7)] for i in range(7)]
    expected = [
        [
            np.mean([abs(similarity[i, z] - similarity[j, z]) for z in others[i][j]]) * (i != j and mask[i] and mask[j])
            for j in range(7)
        ]
        for i in range(7)
    ]
    for found in (
        clustering.similarity_differences(similarity, mask),
        jax.jit(clustering.similarity_differences)(similarity, mask),
    ):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_scores_need_nothing_from_the_host():
    label, features = jnp.array([0, 0, 1, 1]), jnp.array([[0.0], [1.0], [3.0], [4.0]])
    similarity = jnp.where(label[:, None] == label[None, :], 0.9, -0.1)
    calls = [
        lambda: scores.purity(label, label),
        lambda: scores.silhouette(features, label),
        lambda: clustering.separation_gap(similarity, label),
    ]
    for call in calls:
        expected = float(call())
        with jax.transfer_guard_host_to_device("disallow"):
            found = call()
        assert float(found) == expected
