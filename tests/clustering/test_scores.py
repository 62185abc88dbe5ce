import math
from fractions import Fraction

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sklearn.metrics
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjax_cluster.clustering import scores
from tests.reference import scores as reference

M = 14
labelings = st.lists(st.integers(0, 4), min_size=M, max_size=M).map(np.array)
masks = st.lists(st.booleans(), min_size=M, max_size=M).map(np.array)
AGREEMENT = {
    "adjusted_rand_index": sklearn.metrics.adjusted_rand_score,
    "rand_index": sklearn.metrics.rand_score,
    "purity": None,
}
SEPARATION = {"silhouette": sklearn.metrics.silhouette_score, "davies_bouldin": sklearn.metrics.davies_bouldin_score}


def _features(seed):
    return np.random.default_rng(seed).normal(size=(M, 3)).astype(np.float32)


@pytest.mark.parametrize("name", AGREEMENT)
@settings(max_examples=40, deadline=None)
@given(labelings, labelings)
def test_agreement_equals_the_definition(name, a, b):
    actual = getattr(scores, name)(a, b)
    assert actual.dtype == jnp.float32
    chex.assert_trees_all_close(actual, getattr(reference, name)(a, b), atol=1e-6)
    if AGREEMENT[name] is not None:
        chex.assert_trees_all_close(actual, AGREEMENT[name](a, b), atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("labels", [4, 90])
def test_agreement_of_many_clients_is_counted_where_labels_are_few(labels):
    rng = np.random.default_rng(labels)
    a = rng.integers(-1, labels, 50_000)
    b = np.where(rng.random(len(a)) < 0.6, a, rng.integers(-1, labels, len(a)))
    mask = rng.random(len(a)) < 0.9
    keep = mask & (a >= 0) & (b >= 0)
    expected = sklearn.metrics.adjusted_rand_score(a[keep], b[keep])
    chex.assert_trees_all_close(scores.adjusted_rand_index(a, b, mask=mask), expected, atol=1e-5)
    majority = sum(np.bincount(b[keep & (a == label)]).max() for label in range(labels)) / keep.sum()
    chex.assert_trees_all_close(scores.purity(a, b, mask=mask), majority, atol=1e-6)
    assert scores.adjusted_rand_index(a, a) == 1


@pytest.mark.parametrize("name", AGREEMENT)
@settings(max_examples=20, deadline=None)
@given(labelings, labelings, masks, masks)
def test_agreement_leaves_out_masked_and_unlabelled_clients(name, a, b, mask, labelled):
    keep = mask & labelled
    actual = getattr(scores, name)(np.where(labelled, a, -1), b, mask=mask)
    expected = getattr(reference, name)(a[keep], b[keep]) if keep.any() else np.nan
    chex.assert_trees_all_close(actual, expected, atol=1e-6)


@settings(max_examples=20, deadline=None)
@given(labelings, labelings, st.permutations(range(5)), st.permutations(range(M)))
def test_agreement_ignores_names_and_order(a, b, names, order):
    order, renamed = np.array(order), 1000 * np.array(names)[a]
    for name in AGREEMENT:
        score = getattr(scores, name)
        chex.assert_trees_all_close(score(renamed[order], b[order]), score(a, b), atol=1e-6)


@settings(max_examples=30, deadline=None)
@given(labelings, labelings)
def test_only_equal_partitions_score_exactly_one(a, b):
    equal = len(set(zip(a, b, strict=True))) == len(set(a)) == len(set(b))
    assert (scores.adjusted_rand_index(a, b) == 1.0) == equal
    assert (scores.rand_index(a, b) == 1.0) == equal


def test_trivial_partitions():
    alone, together = np.arange(M), np.zeros(M, int)
    assert scores.adjusted_rand_index(alone, alone) == scores.adjusted_rand_index(together, together) == 1.0
    assert scores.adjusted_rand_index(alone, together) == 0.0
    assert scores.rand_index(alone, together) == 0.0
    assert scores.purity(alone, together) == 1.0
    for name in AGREEMENT:
        assert np.isnan(getattr(scores, name)(np.zeros(0, int), np.zeros(0, int)))


@pytest.mark.slow
def test_pairs_of_many_clients_do_not_overflow():
    """100 000 clients have 5·10⁹ pairs, more than int32 holds."""
    rng = np.random.default_rng(0)
    groups = rng.choice(3, size=100_000, p=[0.7, 0.2, 0.1])
    labels = np.where(rng.random(100_000) < 0.2, rng.integers(3, size=100_000), groups)
    expected = sklearn.metrics.adjusted_rand_score(groups, labels)
    chex.assert_trees_all_close(scores.adjusted_rand_index(groups, labels), expected, atol=1e-5)
    chex.assert_trees_all_close(
        scores.rand_index(groups, labels), sklearn.metrics.rand_score(groups, labels), atol=1e-5
    )
    one_off = groups.copy()
    one_off[0] = (one_off[0] + 1) % 3
    assert scores.adjusted_rand_index(groups, (groups + 1) % 3) == 1.0
    assert scores.adjusted_rand_index(groups, one_off) < 1.0


def _exact_adjusted_rand(table):
    """Its definition in fractions, of the numbers of clients in both clusters."""
    both, in_a, in_b = (
        sum(math.comb(n, 2) for n in sizes.ravel().tolist()) for sizes in (table, table.sum(1), table.sum(0))
    )
    expected = Fraction(in_a * in_b, math.comb(int(table.sum()), 2))
    return float((both - expected) / (Fraction(in_a + in_b, 2) - expected))


APART = {"0 and 1": [[0, 1], [1, -2]], "0 and 0, 1": [[1, 0], [1, -2]], "0, 1 and 1, 2, 3": [[1, 1], [2, -4]]}


@pytest.mark.parametrize("apart", APART)
@pytest.mark.parametrize("size", [40_000, 1_000_000])
def test_a_few_clients_apart_from_very_many_are_scored(size, apart):
    """{0} and {1} of a million scored .03, {0} and {0, 1} .674: differences of numbers near M²/2 in float32."""
    table = np.array(APART[apart])
    table[1, 1] += size
    cell = np.repeat(np.arange(4), table.ravel())
    expected = _exact_adjusted_rand(table)
    if size < 100_000:
        chex.assert_trees_all_close(expected, sklearn.metrics.adjusted_rand_score(cell // 2, cell % 2), atol=1e-12)
    # Those of few labels are counted, those of others sorted.
    for first in (0, 90):
        found = scores.adjusted_rand_index(first + cell // 2, first + cell % 2)
        chex.assert_trees_all_close(found, expected, atol=2e-7)


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.sampled_from([0, 1, 2, 5, 1000, 110_000]), min_size=9, max_size=9),
    st.sampled_from([0, 90]),
    st.randoms(),
)
def test_agreement_of_a_million_in_unequal_clusters(sizes, first, random):
    table = np.array([1, *sizes[1:-1], 3]).reshape(3, 3)
    place = np.random.default_rng(random.getrandbits(32)).permutation(1_000_000)[: table.sum()]
    cell = np.full(1_000_000, -1)
    cell[place] = np.repeat(np.arange(9), table.ravel())
    a, b = (np.where(cell < 0, -1, first + label) for label in (cell // 3, cell % 3))
    chex.assert_trees_all_close(scores.adjusted_rand_index(a, b), _exact_adjusted_rand(table), atol=3e-7)


@pytest.mark.parametrize("name", SEPARATION)
@settings(max_examples=25, deadline=None)
@given(labelings, st.integers(0, 10**6))
def test_separation_equals_the_definition(name, labels, seed):
    features = _features(seed)
    actual = getattr(scores, name)(features, labels)
    assert actual.dtype == jnp.float32
    chex.assert_trees_all_close(actual, getattr(reference, name)(features, labels), rtol=1e-4, atol=1e-5)
    if len(set(labels.tolist())) > 1:
        chex.assert_trees_all_close(actual, SEPARATION[name](features, labels), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", SEPARATION)
@settings(max_examples=15, deadline=None)
@given(labelings, masks, st.integers(0, 10**6))
def test_separation_leaves_masked_clients_out(name, labels, mask, seed):
    features = _features(seed)
    spoiled = np.where(mask[:, None], features, np.nan)
    actual = getattr(scores, name)(spoiled, 7 * labels, mask=mask, num_labels=5)
    expected = getattr(reference, name)(features[mask], labels[mask])
    chex.assert_trees_all_close(actual, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", SEPARATION)
@pytest.mark.parametrize(("scale", "offset"), [(1e-20, 0.0), (1e15, 0.0), (1.0, 4096.0)])
def test_separation_ignores_scale_and_offset(name, scale, offset):
    features = np.round(_features(0) * 256) / 256
    labels = np.arange(M) % 3
    moved = (features * scale + offset).astype(np.float32)
    expected = getattr(reference, name)(features, labels)
    chex.assert_trees_all_close(getattr(scores, name)(moved, labels), expected, rtol=1e-4)


def test_separation_of_special_cases():
    """Scores, defined: one cluster, clients alone, centroids that coincide."""
    features = np.array([[0.0], [2.0], [1.0], [1.0]])
    one, two = np.array([3, 3, 3, 3]), np.array([0, 0, 1, 1])
    assert np.isnan(scores.silhouette(features, one))
    assert np.isnan(scores.davies_bouldin(features, one))
    assert scores.davies_bouldin(features, two) == np.inf
    assert scores.silhouette(features, np.arange(4)) == 0.0
    chex.assert_trees_all_close(scores.silhouette(features, np.array([0, 1, 2, 2])), 0.5)


@pytest.mark.slow
def test_adjusted_scores_see_sorted_frequencies_only():
    rng = np.random.default_rng(0)
    counts = rng.integers(1, 50, size=(M, 6))
    labels = np.arange(M) % 3
    frequencies = reference.ranked_frequencies(counts)
    shuffled = rng.permuted(counts, axis=1) * rng.integers(1, 9, size=(M, 1))
    for name in SEPARATION:
        expected = getattr(reference, name)(frequencies, labels)
        chex.assert_trees_all_close(SEPARATION[name](frequencies, labels), expected)
        adjusted = getattr(scores, f"wasserstein_adjusted_{name}")
        chex.assert_trees_all_close(adjusted(counts, labels), expected, rtol=1e-4)
        chex.assert_trees_all_close(adjusted(shuffled, labels), expected, rtol=1e-4)
        empty = np.concatenate([counts, np.zeros((1, 6), int)])
        chex.assert_trees_all_close(adjusted(empty, np.append(labels, 0)), expected, rtol=1e-4)


def test_scores_run_under_jit():
    features, labels = jnp.asarray(_features(0)), jnp.arange(M) % 3

    @jax.jit
    def all_scores(features, labels):
        return scores.adjusted_rand_index(labels, labels // 2), scores.silhouette(features, labels)

    expected = scores.adjusted_rand_index(labels, labels // 2), scores.silhouette(features, labels)
    chex.assert_trees_all_close(all_scores(features, labels), expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: scores.purity(np.arange(3), np.arange(2)), "2 labels for 3 clients"),
        (lambda: scores.rand_index(np.ones(3), np.arange(3)), "labels are integers"),
        (lambda: scores.silhouette(np.ones(3), np.arange(3)), "must have 2 axes"),
        (lambda: scores.silhouette(np.full((3, 1), np.nan), np.arange(3)), "NaN or infinite"),
        (lambda: scores.davies_bouldin(np.ones((3, 1)), np.arange(3), num_labels=2), "3 different labels"),
        (lambda: scores.wasserstein_adjusted_silhouette(-np.ones((3, 2)), np.arange(3)), "negative"),
    ],
)
def test_mistakes_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("far", [1e3, 1e6, 1e9, 1e17])
def test_a_cluster_far_away_costs_the_others_no_digit(far):
    """From the middle of all, 500 000 away, what differs in two near clusters was .03 of the truth or nothing."""
    rng = np.random.default_rng(3)
    points = np.concatenate([rng.normal(size=(6, 3)), rng.normal(size=(5, 3)) + 4, rng.normal(size=(4, 3)) + far])
    points, label = points.astype(np.float32), np.repeat([0, 1, 2], [6, 5, 4])
    exact = points.astype(np.float64)
    for name, expected in SEPARATION.items():
        np.testing.assert_allclose(getattr(scores, name)(points, label), expected(exact, label), rtol=1e-5)
