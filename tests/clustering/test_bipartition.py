import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.cluster.hierarchy
import scipy.spatial.distance
from hypothesis import given, settings
from hypothesis import strategies as st

import fedjax_cluster.clustering as fcc
from fedjax_cluster.recipes.separation import largest_guaranteed_noise, probability_of_correct_split
from tests.reference import bipartition as reference

M = 8


def _bipartition(similarity, mask=None):
    return jax.device_get(fcc.optimal_bipartition(similarity, mask))


def _similarity(seed, num_clients=M, decimals=None):
    values = np.random.default_rng(seed).uniform(-1, 1, (num_clients, num_clients))
    values = 0.5 * (values + values.T)
    if decimals is not None:
        values = np.round(values, decimals)
    np.fill_diagonal(values, 1.0)
    return values.astype(np.float32)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([None, 1, 0]))
def test_equals_the_best_of_all_splits(seed, decimals):
    """Rounded similarities tie; then the objective must be equal."""
    similarity = _similarity(seed, decimals=decimals)
    labels, max_cross = _bipartition(similarity)
    assert (labels.dtype, max_cross.dtype) == (jnp.int32, jnp.float32)
    assert labels[0] == 0
    assert set(labels.tolist()) == {0, 1}
    assert max_cross == reference.best_max_cross(similarity)
    assert reference.largest_across(similarity, labels) == max_cross


@pytest.mark.parametrize("num_clients", [100, 700])
def test_equals_single_linkage_of_scipy(num_clients):
    for seed in range(3):
        similarity = _similarity(seed, num_clients)
        labels, max_cross = _bipartition(similarity)
        condensed = scipy.spatial.distance.squareform(1.0 - similarity.astype(np.float64), checks=False)
        tree = scipy.cluster.hierarchy.linkage(condensed, "single")
        expected = scipy.cluster.hierarchy.fcluster(tree, 2, "maxclust")
        chex.assert_trees_all_equal(labels == 1, expected != expected[0])
        chex.assert_trees_all_close(max_cross, 1.0 - tree[-1, 2], atol=1e-6)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6), st.lists(st.booleans(), min_size=M, max_size=M).map(np.array))
def test_masked_clients_equal_the_subset(seed, mask):
    mask[[1, 5]] = True
    similarity = _similarity(seed)
    spoiled = np.where(mask[:, None] & mask[None, :], similarity, np.nan)
    labels, max_cross = _bipartition(spoiled, mask)
    assert max_cross == reference.best_max_cross(similarity[np.ix_(mask, mask)])
    assert (labels[~mask] == -1).all()
    assert labels[np.argmax(mask)] == 0
    assert reference.largest_across(similarity, labels) == max_cross


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**6), st.permutations(range(M)).map(np.array))
def test_order_and_scale_do_not_matter(seed, order):
    similarity = _similarity(seed)
    labels, _ = _bipartition(similarity)
    moved, _ = _bipartition((2.0 * similarity - 1.0)[np.ix_(order, order)])
    assert fcc.scores.rand_index(labels[order], moved) == 1.0


def test_diagonal_is_ignored():
    similarity = _similarity(0)
    expected = _bipartition(similarity)
    for diagonal in (-9.0, 9.0, 1e9, np.nan, np.inf):
        np.fill_diagonal(similarity, diagonal)
        chex.assert_trees_all_equal(_bipartition(similarity), expected)
    group = np.arange(M) % 2
    gap = fcc.separation_gap(similarity, group)
    for diagonal in (-9.0, np.nan, np.inf):
        np.fill_diagonal(similarity, diagonal)
        assert fcc.separation_gap(similarity, group) == gap
    similarity[0, 1] += 1
    with pytest.raises(ValueError, match="not symmetric"):
        fcc.optimal_bipartition(similarity)


def test_runs_under_jit_with_too_few_clients():
    jitted = jax.jit(chex.assert_max_traces(lambda mask: fcc.optimal_bipartition(_similarity(0), mask), n=1))
    for count in (0, 1):
        labels, max_cross = jitted(jnp.arange(M) < count)
        assert labels.tolist() == [0] * count + [-1] * (M - count)
        assert max_cross == np.inf
        assert not fcc.largest_safe_noise(max_cross) > 0.0


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6), st.lists(st.integers(0, 2), min_size=M, max_size=M).map(np.array))
def test_separation_gap_equals_its_definition(seed, group):
    similarity = _similarity(seed)
    chex.assert_trees_all_close(
        fcc.separation_gap(similarity, group), reference.separation_gap(similarity, group), atol=1e-6
    )


def test_separation_gap_leaves_clients_out():
    similarity, group = _similarity(1), np.array([0, 0, 1, 1, -1, -1, 2, 2])
    keep = group >= 0
    expected = reference.separation_gap(similarity[np.ix_(keep, keep)], group[keep])
    chex.assert_trees_all_close(fcc.separation_gap(similarity, group), expected, atol=1e-6)
    masked = fcc.separation_gap(similarity, np.abs(group), mask=keep)
    chex.assert_trees_all_close(masked, expected, atol=1e-6)


def test_separation_gaps_of_many_matrices_at_once():
    stack = np.stack([_similarity(seed) for seed in range(5)])
    group = np.arange(M) % 3
    gaps = jax.jit(jax.vmap(lambda similarity: fcc.separation_gap(similarity, group)))(stack)
    chex.assert_trees_all_close(gaps, np.array([reference.separation_gap(s, group) for s in stack]), atol=1e-6)


def test_a_positive_gap_means_a_split_that_cuts_no_group():
    """Corollary 1."""
    rng, seen = np.random.default_rng(0), 0
    for _ in range(40):
        group = np.arange(M) % 3
        updates = rng.normal(size=(3, 20))[group] + rng.uniform(0.2, 1.5) * rng.normal(size=(M, 20))
        similarity = fcc.cosine_similarity(updates)
        labels, _ = _bipartition(similarity)
        if fcc.separation_gap(similarity, group) > 0:
            seen += 1
            assert all(len(set(labels[group == g].tolist())) == 1 for g in range(3))
    assert 5 < seen < 40


def test_bounds_equal_the_angles_of_the_proof():
    alignment = reference.noise_alignment(np.array([0.0, 0.1, 0.5, 0.9, 1.0]))
    for k in (2, 3, 7):
        expected = np.vectorize(reference.cross_similarity_bound)(alignment, k)
        chex.assert_trees_all_close(fcc.cross_similarity_bound(alignment, k), expected, atol=1e-3)


def test_safe_noise_of_rounded_similarities_and_of_no_split():
    found = fcc.largest_safe_noise(np.float32([1.0000001, -1.0000001, np.inf]))
    np.testing.assert_array_equal(found, [0.0, 1.0, np.nan])


@pytest.mark.parametrize("noise", [0.0, 0.3, 0.5, 1.0])
def test_safe_noise_is_where_the_bounds_meet(noise):
    """Eq. 38: two clients of one group with noise γ are at least 1 − 2γ² alike."""
    alignment = reference.noise_alignment(np.array([noise]))
    chex.assert_trees_all_close(fcc.largest_safe_noise(alignment), np.array([[noise]]), atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("k", [2, 3, 4])
def test_theorem_1_holds_at_stationary_points(k):
    """Gradients that sum to zero, plus noise of known relative size."""
    rng = np.random.default_rng(k)
    group = np.repeat(np.arange(k), 2)
    for _ in range(15):
        signal = rng.normal(size=(k, 6))
        signal[-1] = -signal[:-1].sum(axis=0)
        clean, noise = signal[group], rng.normal(size=(len(group), 6))
        noise_level = rng.uniform(0.0, 0.6, len(group))
        length = noise_level * np.linalg.norm(clean, axis=1) / np.linalg.norm(noise, axis=1)
        similarity = np.asarray(fcc.cosine_similarity(clean + noise * length[:, None]))
        labels, max_cross = _bipartition(similarity)
        alignment = reference.noise_alignment(noise_level)
        assert max_cross <= fcc.cross_similarity_bound(alignment, k).max() + 1e-5
        together = group[:, None] == group[None, :]
        assert (similarity[together] >= alignment[together] - 1e-5).all()
        if noise_level.max() < fcc.largest_safe_noise(max_cross):
            assert all(len(set(labels[group == g].tolist())) == 1 for g in range(k))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: fcc.optimal_bipartition(np.ones((2, 3))), "must be square"),
        (lambda: fcc.optimal_bipartition(np.ones((1, 1))), "at least two"),
        (lambda: fcc.optimal_bipartition(np.ones((3, 3)), np.array([True, False, False])), "at least two"),
        (lambda: fcc.optimal_bipartition(np.full((3, 3), np.nan)), "NaN or infinite"),
        (lambda: fcc.separation_gap(np.ones((3, 3)), np.arange(2)), "2 labels for 3 clients"),
        (lambda: fcc.cross_similarity_bound(0.5, 1), "num_distributions is 1"),
        (lambda: fcc.cross_similarity_bound(1.5, 2), "outside"),
    ],
)
def test_mistakes_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.slow
def test_five_hundred_matrices_against_all_bipartitions():
    """Up to ten clients; every third matrix is rounded, so that similarities tie."""
    for seed in range(500):
        similarity = _similarity(seed, 2 + seed % 9, decimals=1 if seed % 3 == 0 else None)
        labels, max_cross = _bipartition(similarity)
        assert max_cross == reference.best_max_cross(similarity)
        assert reference.largest_across(similarity, labels) == max_cross


@pytest.mark.slow
def test_two_thousand_clients_against_single_linkage_of_scipy():
    similarity = _similarity(0, 2000)
    condensed = scipy.spatial.distance.squareform(1.0 - similarity.astype(np.float64), checks=False)
    expected = scipy.cluster.hierarchy.fcluster(scipy.cluster.hierarchy.linkage(condensed, "single"), 2, "maxclust")
    chex.assert_trees_all_equal(_bipartition(similarity).labels == 1, expected != expected[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("k", "gamma", "least", "most"), [(2, 1.5, 1.0, 1.0), (10, 1.1, 0.9, 1.0), (10, 2.2, 0.0, 0.1)]
)
def test_figure_3_at_a_few_points(k, gamma, least, most):
    """Right with a probability near one up to ten distributions and γ > 1 at d = 100 (CFL, Eq. 30), and not beyond."""
    chance = probability_of_correct_split(k, gamma, draws=10)
    assert least <= chance <= most


def test_theorem_1_guarantees_less_noise_for_more_distributions():
    """For two, H > −H: γ < √½; the picture's line falls with k."""
    limits = [largest_guaranteed_noise(k) for k in (2, 3, 5, 10)]
    assert limits[0] == pytest.approx(np.sqrt(0.5), abs=1e-3)
    assert limits == sorted(limits, reverse=True)
    assert limits[-1] > 0
