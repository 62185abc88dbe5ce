"""Cohorts with some clients of each cluster, as FedGWC draws them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_cluster import cohorts


def test_the_sampling_rate_is_kept_by_clusters_large_enough():
    """Theorem A.5: no more clients than before where every cluster has 3/ρ of them; below that, three each."""
    for sizes in ([100], [60, 40], [30, 30, 40]):
        assert int(cohorts.cluster_cohort_sizes(0.1, jnp.asarray(sizes), 100).sum()) == 10
    assert int(cohorts.cluster_cohort_sizes(0.1, jnp.asarray([80, 10, 10]), 100).sum()) == 14
    rng = np.random.default_rng(0)
    for _ in range(200):
        clusters, clients = int(rng.integers(1, 6)), int(rng.integers(6, 60))
        sizes = rng.multinomial(clients, rng.dirichlet(np.ones(clusters)))
        rate = float(rng.uniform(0.02, 1.0))
        total = int(cohorts.cluster_cohort_sizes(rate, jnp.asarray(sizes), sum(sizes)).sum())
        assert total <= cohorts.largest_cluster_cohorts(rate, clients, clusters)


def test_those_seen_seldom_come_first():
    """With one client to draw, its chance is ∝ 1/(1 + times seen); nobody comes twice or from outside."""
    label, seen = jnp.asarray([0, 0, 0, 1, -1]), jnp.asarray([0.0, 1.0, 3.0, 7.0, 0.0])
    draw = jax.vmap(lambda key: cohorts.per_cluster(key, label, jnp.asarray([1, 1]), 3, seen=seen))
    index, mask, _ = draw(jax.random.split(jax.random.key(0), 4000))
    assert (np.asarray(mask) == [True, True, False]).all()
    assert (np.asarray(index)[:, 1:] == [3, 5]).all()
    share = np.bincount(np.asarray(index)[:, 0], minlength=3) / 4000
    np.testing.assert_allclose(share, np.asarray([1, 1 / 2, 1 / 4]) / 1.75, atol=0.03)


@pytest.mark.slow
def test_of_very_many_clients_the_same_are_drawn_by_a_search_as_by_sorting_all(monkeypatch):
    rng = np.random.default_rng(0)
    label, seen = jnp.asarray(rng.integers(-1, 3, 600)), jnp.asarray(rng.integers(0, 3, 600), jnp.float32)
    some = jnp.asarray(np.sort(rng.choice(600, 20, replace=False)))
    # A cluster that wants nobody, and one that has nobody.
    size, first = jnp.asarray([10, 0, 7, 5]), (some, jnp.asarray([2, 0, 3, 1]))
    draw = functools.partial(cohorts.per_cluster, jax.random.key(0), label, size, 30)
    for options in ({}, {"seen": seen}, {"seen": seen, "first": first}):
        searched = draw(**options)
        with monkeypatch.context() as patch:
            patch.setattr(cohorts, "FEW", 600)
            sorted_all = draw(**options)
        assert int(searched.mask.sum()) == 17
        np.testing.assert_array_equal(searched.index, sorted_all.index)
        np.testing.assert_array_equal(searched.mask, sorted_all.mask)


def test_a_capacity_above_all_clients_is_padded():
    selection = cohorts.per_cluster(jax.random.key(0), jnp.asarray([0, 1, 0, -1]), jnp.asarray([1, 1]), 7)
    index, mask = np.asarray(selection.index), np.asarray(selection.mask)
    assert mask.tolist() == [True] * 2 + [False] * 5
    assert (index[2:] == 4).all()
    assert set(index[:2]) in ({0, 1}, {1, 2})


@pytest.mark.parametrize(("rate", "clients", "wanted"), [(0.6, 100_000, 60_000), (0.6, 800_000, 480_000), (0.1, 25, 3)])
def test_large_clusters_send_no_more_than_their_share(rate, clients, wanted):
    """In float32 0.6 of 100 000 clients is above 60 000."""
    assert int(cohorts.cluster_cohort_sizes(rate, jnp.asarray([clients]), clients)[0]) == wanted
    assert wanted <= cohorts.largest_cluster_cohorts(rate, clients, 1)
