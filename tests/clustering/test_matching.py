import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fedjax_cluster.clustering as fcc
from tests.reference import matching as reference

M, K = 12, 4
labelings = st.lists(st.integers(-1, K - 1), min_size=M, max_size=M).map(np.array)


@settings(max_examples=60, deadline=None)
@given(labelings, labelings)
def test_overlap_is_the_best_of_all_permutations(new, old):
    renamed = np.asarray(fcc.match_labels(new, old, K))
    assert renamed.dtype == np.int32
    assert reference.overlap(renamed, old) == reference.best_overlap(new, old, K)
    chex.assert_trees_all_equal(renamed == -1, new == -1)
    pairs = {(a, b) for a, b in zip(new.tolist(), renamed.tolist(), strict=True)}
    assert len(pairs) == len({a for a, _ in pairs}) == len({b for _, b in pairs})


@settings(max_examples=60, deadline=None)
@given(labelings, labelings)
def test_ties_keep_the_most_names(new, old):
    """Read off with one witness per cluster, so that clusters without clients show their name too."""
    witnesses = np.concatenate([new, np.arange(K)])
    renamed = fcc.match_labels(witnesses, np.concatenate([old, np.full(K, -1)]), K)
    kept = int((np.asarray(renamed[M:]) == np.arange(K)).sum())
    assert kept == reference.most_kept_names(new, old, K)


@settings(max_examples=20, deadline=None)
@given(labelings, st.permutations(range(K)))
def test_undoes_any_renaming(old, names):
    new = np.append(names, -1)[old]
    chex.assert_trees_all_equal(fcc.match_labels(new, old, K), old)


@settings(max_examples=20, deadline=None)
@given(labelings, labelings, st.lists(st.booleans(), min_size=M, max_size=M).map(np.array))
def test_masked_clients_have_no_say(new, old, mask):
    expected = fcc.match_labels(np.where(mask, new, -1), old, K)
    chex.assert_trees_all_equal(fcc.match_labels(new, old, K, mask=mask), expected)


def test_many_clients_and_clusters_stay_exact():
    rng = np.random.default_rng(0)
    old = rng.integers(64, size=20_000)
    names = rng.permutation(64)
    chex.assert_trees_all_equal(fcc.match_labels(names[old], old, 64), old)


def test_ties_keep_their_names_up_to_the_clients_that_the_docstring_has():
    clients = 2**24 // (K + 1) // 4
    new, old = np.repeat([0, 1], 2 * clients), np.tile(np.repeat([0, 1], clients), 2)
    chex.assert_trees_all_equal(fcc.match_labels(new, old, K), new)
    # One client more is worth more than two names.
    chex.assert_trees_all_equal(fcc.match_labels(np.append(new[1:], 1), np.append(old[1:], 0), K)[:9], np.ones(9))


def test_runs_under_jit():
    new, old = jnp.array([1, 1, 0]), jnp.array([0, 0, 1])
    jitted = jax.jit(chex.assert_max_traces(lambda new, old: fcc.match_labels(new, old, 2), n=1))
    assert jitted(new, old).tolist() == jitted(new, old).tolist() == [0, 0, 1]


@pytest.mark.parametrize(
    ("new", "old", "k", "message"),
    [
        ([0, 1], [0, 1, 1], 2, "2 clients"),
        ([0, 2], [0, 1], 2, "outside -1..1"),
        ([0, 1], [0, -2], 2, "from -1 on"),
        ([0, 1], [0, 1], 0, "k is 0"),
        ([0.0, 1.0], [0, 1], 2, "labels are integers"),
    ],
)
def test_mistakes_are_named(new, old, k, message):
    with pytest.raises(ValueError, match=message):
        fcc.match_labels(np.array(new), np.array(old), k)
