import importlib

import chex
import jax
import numpy as np
import pytest
import scipy.cluster.hierarchy
import scipy.spatial.distance

import fedjax_cluster.clustering as fcc
from tests.reference import linkage as reference

linkage_module = importlib.import_module("fedjax_cluster.clustering.linkage")
LINKAGES = ["average", "single", "complete", "ward"]
M = 60


def _distance(seed, num_clients=M, decimals=None):
    """Alternately distances of points and numbers that fulfil no triangle inequality."""
    rng = np.random.default_rng(seed)
    if seed % 2:
        distance = scipy.spatial.distance.cdist(*2 * (rng.normal(size=(num_clients, 3)),))
    else:
        distance = rng.random((num_clients, num_clients))
        distance = 0.5 * (distance + distance.T)
    if decimals is not None:
        distance = np.round(distance, decimals)
    np.fill_diagonal(distance, 0.0)
    return distance.astype(np.float32)


def _same(labels, expected, mask=None):
    """Equal partitions; `expected` holds the clients that count only."""
    padded = np.full(len(labels), -1)
    padded[np.ones(len(labels), bool) if mask is None else mask] = expected
    return fcc.scores.rand_index(labels, padded) == 1.0


def _scipy_tree(distance, linkage):
    condensed = scipy.spatial.distance.squareform(distance.astype(np.float64), checks=False)
    return scipy.cluster.hierarchy.linkage(condensed, linkage)


@pytest.mark.slow
@pytest.mark.parametrize("linkage", LINKAGES)
def test_equals_scipy_on_random_matrices(linkage):
    """66 matrices per linkage, with 5 to 60 clients of 60 that count."""
    for seed in range(66):
        rng = np.random.default_rng(1000 + seed)
        mask = rng.permutation(np.arange(M) < rng.integers(5, M + 1))
        distance = _distance(seed)
        expected = _scipy_tree(distance[np.ix_(mask, mask)], linkage)
        tree = fcc.dendrogram(np.where(mask[:, None] & mask[None, :], distance, np.nan), linkage, mask)
        chex.assert_trees_all_close(tree.heights[: len(expected)], expected[:, 2], rtol=1e-5)
        assert (np.asarray(tree.heights)[len(expected) :] == np.inf).all()
        clusters = int(rng.integers(1, 5))
        labels = np.asarray(fcc.cut_dendrogram(tree, num_clusters=clusters))
        assert (labels[~mask] == -1).all()
        assert _same(labels, scipy.cluster.hierarchy.fcluster(expected, clusters, "maxclust"), mask)
        threshold = 0.5 * (expected[-3, 2] + expected[-2, 2])
        labels = fcc.cut_dendrogram(tree, threshold=threshold)
        assert _same(labels, scipy.cluster.hierarchy.fcluster(expected, threshold, "distance"), mask)


def test_equals_scipy_with_200_clients():
    for seed in (0, 1):
        distance = _distance(seed, 200)
        expected = _scipy_tree(distance, "average")
        labels = fcc.agglomerative(distance, num_clusters=7)
        assert _same(labels, scipy.cluster.hierarchy.fcluster(expected, 7, "maxclust"))


@pytest.mark.parametrize("linkage", LINKAGES)
def test_equals_the_definition(linkage):
    distance = _distance(3)
    for threshold in (0.4, 0.9, 1.7):
        clusters = reference.agglomerative(distance[:10, :10], linkage, threshold)
        labels = np.asarray(fcc.agglomerative(distance, threshold, linkage=linkage, mask=np.arange(M) < 10))
        assert [set(np.flatnonzero(labels == c).tolist()) for c in range(len(clusters))] == sorted(clusters, key=min)


@pytest.mark.parametrize("linkage", ["single", "complete"])
def test_ties_give_equal_heights(linkage):
    """With tied distances trees differ, but single linkage's clusters do not."""
    for seed in range(6):
        distance = _distance(seed, decimals=1)
        tree = fcc.dendrogram(distance, linkage)
        expected = _scipy_tree(distance, linkage)
        if linkage == "single":
            chex.assert_trees_all_close(tree.heights, expected[:, 2], rtol=1e-6)
            threshold = float(expected[M // 2, 2])
            labels = scipy.cluster.hierarchy.fcluster(expected, threshold + 1e-6, "distance")
            assert _same(fcc.cut_dendrogram(tree, threshold=np.float32(threshold)), labels)
        labels = np.asarray(fcc.cut_dendrogram(tree, num_clusters=5))
        for cluster in range(5):
            inside = distance[np.ix_(labels == cluster, labels == cluster)]
            if linkage == "complete":
                assert inside.max() <= tree.heights[M - 6]


@pytest.mark.parametrize("linkage", ["average", "single", "complete"])
def test_merges_at_the_threshold_itself(linkage):
    """FLAG's α = 1 gives one cluster although the largest distances are exactly 1."""
    distance = np.ones((M, M), np.float32) - np.eye(M, dtype=np.float32)
    distance[:7, :7] *= np.float32(0.3)
    assert set(fcc.agglomerative(distance, 1.0, linkage=linkage).tolist()) == {0}
    assert fcc.agglomerative(distance, 0.3, linkage=linkage).tolist() == [0] * 7 + list(range(1, M - 6))
    assert fcc.agglomerative(distance, 0.29, linkage=linkage).tolist() == list(range(M))


@pytest.mark.parametrize("value", [0.1, 0.3, 0.7, 1.1])
def test_clusters_that_are_all_at_the_threshold_are_merged(value):
    """Sums of equal distances round up, and their mean was an ulp above each."""
    distance = np.full((M, M), value, np.float32)
    for inside in (1.0, 0.5):
        distance[:7, :7] = distance[7:20, 7:20] = distance[20:25, 20:25] = np.float32(value * inside)
        tree = fcc.dendrogram(distance)
        assert set(fcc.cut_dendrogram(tree, np.float32(value)).tolist()) == {0}
        assert set(np.asarray(tree.heights)) <= {np.float32(value), np.float32(value * inside)}


@pytest.mark.parametrize("diagonal", [np.nan, np.inf, 1e9])
def test_anything_may_be_on_the_diagonal(diagonal, monkeypatch):
    distance = _distance(0)
    expected = fcc.dendrogram(distance)
    np.fill_diagonal(distance, diagonal)
    chex.assert_trees_all_equal(fcc.dendrogram(distance), expected)
    monkeypatch.setattr(linkage_module, "_DEVICE_LIMIT", 2)
    chex.assert_trees_all_equal(fcc.dendrogram(distance).merges, expected.merges)


@pytest.mark.parametrize("linkage", LINKAGES)
def test_host_and_device_agree(linkage, monkeypatch):
    mask = np.arange(M) % 7 != 3
    for seed in range(4):
        on_device = fcc.dendrogram(_distance(seed), linkage, mask)
        with monkeypatch.context() as patched:
            patched.setattr(linkage_module, "_DEVICE_LIMIT", 10)
            on_host = fcc.dendrogram(_distance(seed), linkage, mask)
        chex.assert_trees_all_close(on_device, on_host, rtol=1e-5)
        chex.assert_trees_all_equal_dtypes(on_device, on_host)


def test_every_cut_of_one_tree_under_jit():
    distance = _distance(1)
    tree = jax.jit(fcc.dendrogram)(distance)
    cut = jax.jit(chex.assert_max_traces(lambda tree, threshold: fcc.cut_dendrogram(tree, threshold), n=1))
    counts = [int(cut(tree, threshold).max()) + 1 for threshold in np.linspace(0.0, 9.0, 19)]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] == M
    assert counts[-1] == 1
    labels = jax.jit(lambda n: fcc.cut_dendrogram(tree, num_clusters=n))(9)
    chex.assert_trees_all_equal(labels, fcc.agglomerative(distance, num_clusters=9))


@pytest.mark.parametrize("linkage", LINKAGES)
def test_permutation_of_clients_permutes_clusters(linkage):
    distance, order = _distance(1), np.random.default_rng(0).permutation(M)
    labels = fcc.agglomerative(distance, num_clusters=6, linkage=linkage)
    moved = fcc.agglomerative(distance[np.ix_(order, order)], num_clusters=6, linkage=linkage)
    assert _same(np.asarray(labels)[order], moved)


def test_single_linkage_cut_in_two_is_the_optimal_bipartition():
    distance = _distance(0)
    labels = fcc.agglomerative(distance, num_clusters=2, linkage="single")
    chex.assert_trees_all_equal(labels, fcc.optimal_bipartition(-distance).labels)


def test_one_client_and_none_that_counts():
    assert fcc.agglomerative(np.zeros((1, 1)), 0.5).tolist() == [0]
    labels = fcc.agglomerative(_distance(0), 0.5, mask=np.zeros(M, bool))
    assert (np.asarray(labels) == -1).all()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: fcc.agglomerative(np.zeros((3, 3))), "exactly one"),
        (lambda: fcc.agglomerative(np.zeros((3, 3)), 0.5, 2), "exactly one"),
        (lambda: fcc.agglomerative(np.zeros((3, 3)), num_clusters=4), "only 3 clients"),
        (lambda: fcc.agglomerative(np.zeros((3, 3)), 0.5, linkage="median"), "linkage is 'median', which is unknown"),
        (lambda: fcc.agglomerative(np.triu(np.ones((3, 3))), 0.5), "not symmetric"),
        (lambda: fcc.agglomerative(np.full((3, 3), np.nan), 0.5), "NaN or infinite"),
        (lambda: fcc.agglomerative(np.zeros((3, 3)), np.nan), "threshold is NaN"),
        (lambda: fcc.agglomerative(np.zeros((0, 0)), 0.5), "empty"),
    ],
)
def test_mistakes_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
