import sys

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sklearn.cluster
from hypothesis import example, given, settings
from hypothesis import strategies as st

import fedjax_cluster.clustering as fcc
from tests.reference import kmeans as reference

M, R, K = 40, 3, 4
kmeans_module = sys.modules["fedjax_cluster.clustering.kmeans"]


def _points(seed, spread=1.0):
    rng = np.random.default_rng(seed)
    centers = 3.0 * rng.normal(size=(K, R))
    return (centers[rng.integers(K, size=M)] + spread * rng.normal(size=(M, R))).astype(np.float32)


def _kmeans(*args, **kwargs):
    """The result in NumPy, whose indexing compiles nothing."""
    return jax.device_get(fcc.kmeans(*args, **kwargs))


def _same_partition(a, b):
    return fcc.scores.adjusted_rand_index(a, b) == 1.0


@pytest.mark.slow
def test_finds_the_best_of_all_partitions():
    """Ten restarts miss it now and then among points without any clusters."""
    found = 0
    for seed in range(12):
        points = np.random.default_rng(seed).normal(size=(M, R)).astype(np.float32)
        result = _kmeans(jax.random.key(seed), points, K, mask=np.arange(M) < 8)
        best = reference.best_inertia(points[:8], K)
        assert result.inertia >= best * (1 - 1e-5)
        found += result.inertia <= best * (1 + 1e-5)
    assert found >= 10


@pytest.mark.slow
def test_is_as_good_as_scikit_learn():
    """By the mean of points without clear clusters, on which each misses the best now and then."""
    over = []
    for seed in range(16):
        points = _points(seed)
        peer = sklearn.cluster.KMeans(K, n_init=10, random_state=seed).fit(points)
        over.append(float(_kmeans(jax.random.key(seed), points, K).inertia / peer.inertia_))
    assert np.mean(over) <= 1.005
    assert np.max(over) <= 1.03


@pytest.mark.slow
@pytest.mark.parametrize("r", [1, 7, 8, 9, 20, 8 * 64 + 1])
def test_distances_are_the_same_in_groups_of_columns(r):
    points, centers = (np.random.default_rng(r).normal(size=(rows, r)).astype(np.float32) for rows in (11, 3))
    found = kmeans_module._from_centers(jnp.asarray(points), jnp.asarray(centers))
    chex.assert_trees_all_close(found, np.square(points[None] - centers[:, None]).sum(-1), rtol=1e-5)


def test_a_seed_is_drawn_by_its_squared_distance():
    points = jnp.asarray([[0.0]] * 50 + [[1.0], [1.5]])

    def second(key, mask):
        return kmeans_module._seeds(key, points, mask, 2, 2, 1)[0, 1, 0]

    keys, everybody = jax.random.split(jax.random.key(0), 2000), jnp.ones(52, bool)
    drawn = np.asarray(jax.jit(jax.vmap(second, (0, None)))(keys, everybody))
    # Nearly always the first is one of the fifty. The two others leave as much of each other, so that the first of two
    # draws is taken.
    assert abs(np.mean(drawn[drawn > 0] == 1.5) - 2.25 / 3.25) < 0.04
    assert not np.any(jax.jit(jax.vmap(second, (0, None)))(keys, everybody.at[51].set(False)) == 1.5)


def test_parts_of_the_result_agree():
    points = _points(0)
    labels, centers, inertia = _kmeans(jax.random.key(0), points, K)
    sizes = chex.Dimensions(M=M, K=K, R=R)
    chex.assert_shape([labels, centers, inertia], [sizes["M"], sizes["KR"], ()])
    chex.assert_type([labels, centers, inertia], [jnp.int32, jnp.float32, jnp.float32])
    for cluster in range(K):
        chex.assert_trees_all_close(centers[cluster], points[labels == cluster].mean(axis=0), rtol=1e-5)
    chex.assert_trees_all_close(inertia, reference.inertia(points, labels), rtol=1e-5)
    nearest = ((points[:, None] - np.asarray(centers)[None]) ** 2).sum(axis=2).argmin(axis=1)
    chex.assert_trees_all_equal(labels, nearest)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(0, 2), min_size=M, max_size=M), st.integers(K, M), st.integers(0, 10**6))
def test_no_cluster_is_empty_among_duplicates(values, count, seed):
    """At most three different points for four clusters, down to one point a cluster."""
    points = np.repeat(np.array(values, np.float32)[:, None], R, axis=1)
    labels, centers, _ = _kmeans(jax.random.key(seed), points, K, mask=np.arange(M) < count)
    assert set(labels[:count].tolist()) == set(range(K))
    chex.assert_tree_all_finite(centers)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6), st.integers(K, M))
@example(1197, 5)
@example(980, 6)
def test_masked_points_change_nothing(seed, count):
    """The points that count stand anywhere among rows of NaN."""
    rng = np.random.default_rng(seed)
    mask = np.zeros(M, bool)
    mask[rng.permutation(M)[:count]] = True
    points = _points(seed)
    front = np.where(np.arange(M) < count, 1, 0).astype(bool)
    moved = np.full((M, R), np.nan, np.float32)
    moved[front] = points[mask]
    scattered = _kmeans(jax.random.key(seed), np.where(mask[:, None], points, np.nan), K, mask=mask)
    together = _kmeans(jax.random.key(seed), moved, K, mask=front)
    # Of restarts that end in one partition under other names, rounding decides.
    names = dict(zip(together.labels[front].tolist(), scattered.labels[mask].tolist(), strict=True))
    assert sorted(names.values()) == list(range(K))
    renamed = [names[label] for label in together.labels[front].tolist()]
    chex.assert_trees_all_equal(scattered.labels[mask], np.array(renamed, np.int32))
    assert (scattered.labels[~mask] == -1).all()
    order = [names[label] for label in range(K)]
    chex.assert_trees_all_close(scattered.centers[np.array(order)], together.centers, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(scattered.inertia, together.inertia, rtol=1e-4, atol=1e-5)


def test_padding_changes_nothing():
    points, key = _points(1), jax.random.key(1)
    plain = _kmeans(key, points, K)
    padded = np.concatenate([points, np.full((23, R), np.nan, np.float32)])
    result = _kmeans(key, padded, K, mask=np.arange(M + 23) < M)
    chex.assert_trees_all_equal(result.labels[:M], plain.labels)
    chex.assert_trees_all_close(result.inertia, plain.inertia, rtol=1e-6)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([1e-25, 1e-3, 1e12]))
def test_scale_and_rotation_change_nothing(seed, scale):
    points = _points(seed, spread=0.1)
    rotation, _ = np.linalg.qr(np.random.default_rng(seed).normal(size=(R, R)))
    key = jax.random.key(seed)
    labels = _kmeans(key, points, K).labels
    assert _same_partition(labels, _kmeans(key, (points * scale).astype(np.float32), K).labels)
    assert _same_partition(labels, _kmeans(key, (points @ rotation).astype(np.float32), K).labels)


def test_permutation_of_points_permutes_labels():
    points, order = _points(2, spread=0.1), np.random.default_rng(0).permutation(M)
    key = jax.random.key(0)
    assert _same_partition(_kmeans(key, points, K).labels[order], _kmeans(key, points[order], K).labels)


def test_points_far_from_the_origin():
    """|x|² + |c|² − 2xc would see nothing but rounding here, and so would means of uncentred points."""
    offset = 2.0**19
    points = np.round(_points(3, spread=0.2) * 16) / 16
    far = _kmeans(jax.random.key(0), points + offset, K)
    assert _same_partition(far.labels, _kmeans(jax.random.key(0), points, K).labels)
    chex.assert_trees_all_close(far.inertia, reference.inertia(points, far.labels), rtol=1e-3)


@pytest.mark.parametrize("low", [2.0, -3.3])
def test_points_near_the_largest_number(low):
    """The middle of their box was half of an infinite sum, and all centres NaN."""
    points = np.array([[low], [low + 0.1], [3.0], [3.1]], np.float32) * np.float32(1e38)
    labels, centers, _ = fcc.kmeans(jax.random.key(0), points, 2)
    assert _same_partition(labels, np.array([0, 0, 1, 1]))
    np.testing.assert_allclose(np.sort(np.ravel(centers)) / 1e38, [low + 0.05, 3.05], rtol=1e-6)


def test_close_clusters_and_a_far_one():
    """Three clusters 10⁻⁴ apart, one at distance 1: squares of 10⁻⁸ next to squares of 1."""
    group = np.arange(M) % K
    places = np.array([0.0, 1e-4, 2e-4, 1.0])
    points = places[group][:, None] + 1e-6 * np.random.default_rng(0).normal(size=(M, R))
    assert _same_partition(_kmeans(jax.random.key(0), points, K).labels, group)


def test_runs_under_jit_and_vmap_with_fewer_points_than_clusters():
    points = np.stack([_points(seed) for seed in range(4)])
    masks = np.arange(M)[None, :] < np.array([M, K - 1, 1, 0])[:, None]
    clustered = chex.assert_max_traces(lambda x, mask: fcc.kmeans(jax.random.key(0), x, K, mask=mask), n=1)
    batched = jax.jit(jax.vmap(clustered))
    labels, centers, _ = jax.device_get(batched(points, masks))
    chex.assert_trees_all_equal(labels[0], _kmeans(jax.random.key(0), points[0], K).labels)
    for row, count in ((1, K - 1), (2, 1), (3, 0)):
        assert sorted(labels[row][:count].tolist()) == list(range(count))
        assert (labels[row][count:] == -1).all()
    chex.assert_tree_all_finite(centers)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"k": 0}, "k is 0"),
        ({"k": M + 1}, f"only {M} clients count"),
        ({"k": 3, "mask": np.arange(M) < 2}, "only 2 clients count"),
        ({"k": 2.5}, "must be a Python int"),
        ({"k": 2, "points": np.zeros(M)}, "must have 2 axes"),
        ({"k": 2, "points": np.full((M, 2), np.nan)}, "NaN or infinite"),
        ({"k": 2, "num_restarts": 0}, "num_restarts is 0"),
        ({"k": 2, "max_iterations": 0}, "max_iterations is 0"),
    ],
)
def test_mistakes_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        fcc.kmeans(jax.random.key(0), **{"points": _points(0), **arguments})
