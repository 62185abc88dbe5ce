"""Cohorts of very many clients: the laws of the small draws, and nothing of padding, devices or absent clients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_cluster import cohorts
from fedjax_cluster.types import Selection

CLIENTS, SIZE = 1000, 40


@pytest.fixture(autouse=True)
def many(monkeypatch):
    """A thousand clients are many here."""
    monkeypatch.setattr(cohorts, "MANY", 100)


def chosen(selection):
    index, mask = np.asarray(selection.index), np.asarray(selection.mask)
    assert (index[~mask] > index[mask].max()).all()
    assert len(set(index[mask])) == mask.sum()
    return index[mask]


def present(*, last=CLIENTS, holes=False):
    there = np.arange(CLIENTS) < last
    if holes:
        there[::3] = False
    return there


@pytest.mark.slow
@pytest.mark.parametrize("there", [present(), present(holes=True), present(last=60), present(last=3), present(last=1)])
def test_as_many_of_those_present_are_drawn_as_are_wanted(there):
    draw = jax.jit(lambda key, there: cohorts.uniform(key, there, SIZE / CLIENTS))
    for seed in range(5):
        drawn = chosen(draw(jax.random.key(seed), jnp.asarray(there)))
        assert there[drawn].all()
        assert len(drawn) == max(1, np.ceil(there.sum() * SIZE / CLIENTS - 1e-4))


@pytest.mark.parametrize("participation", [SIZE / CLIENTS, 0.5, 0.9999, 1.0])
def test_nobody_is_drawn_where_nobody_is_present(participation):
    selection = cohorts.uniform(jax.random.key(0), jnp.zeros(CLIENTS, bool), participation)
    assert not np.asarray(selection.mask).any()
    assert (np.asarray(selection.index) == CLIENTS).all()


def test_each_client_and_each_pair_is_drawn_alike_often():
    """Sums over 4 000 draws against the binomial law: counts of clients, and of pairs of neighbours, within 5 σ."""
    draw = jax.jit(jax.vmap(lambda key: cohorts.uniform(key, jnp.asarray(present(holes=True)), SIZE / CLIENTS).index))
    index, clients = np.asarray(draw(jax.random.split(jax.random.key(0), 4000))), present(holes=True).sum()
    wanted = int(np.ceil(clients * SIZE / CLIENTS - 1e-4))
    drawn = np.zeros((4000, CLIENTS + 1), bool)
    np.put_along_axis(drawn, index, True, axis=1)
    drawn = drawn[:, :-1][:, present(holes=True)]
    count, share = drawn.sum(0), wanted / clients
    assert count.sum() == 4000 * wanted
    assert np.abs(count - 4000 * share).max() < 5 * np.sqrt(4000 * share)
    assert abs(count.var() / (4000 * share * (1 - share)) - 1) < 0.2
    pairs = (drawn[:, 1:] & drawn[:, :-1]).sum()
    expected = 4000 * (clients - 1) * share * (wanted - 1) / (clients - 1)
    assert abs(pairs - expected) < 5 * np.sqrt(expected)


@pytest.mark.slow
def test_absent_rows_after_the_last_client_change_nothing():
    key, more = jax.random.key(3), jnp.pad(jnp.asarray(present()), (0, 200))
    np.testing.assert_array_equal(
        chosen(cohorts.uniform(key, jnp.asarray(present()), SIZE / CLIENTS)),
        chosen(cohorts.uniform(key, more, SIZE / CLIENTS)),
    )


@pytest.mark.slow
def test_a_draw_side_by_side_is_that_of_each_alone():
    keys = jax.random.split(jax.random.key(1), 6)
    draw = jax.jit(lambda key: cohorts.uniform(key, jnp.asarray(present(holes=True)), SIZE / CLIENTS))
    together = jax.vmap(draw)(keys)
    for number, key in enumerate(keys):
        np.testing.assert_array_equal(draw(key).index, together.index[number])


@pytest.mark.parametrize("valid", [5, 3, 2])
def test_these_come_before_all_others(valid):
    drawn = Selection(jnp.asarray([7, 3, 9, 1, 4]), jnp.arange(5) < valid)
    these, there = jnp.asarray([3, 5, 8]), jnp.asarray([True, False, True])
    found = cohorts.with_these_first(drawn, these, there, 20, jnp.asarray(True))
    assert found.mask.tolist() == drawn.mask.tolist()
    assert np.asarray(found.index)[:valid].tolist() == [3, 8, 7, 9, 1][:valid]
    assert (np.asarray(found.index)[valid:] == 20).all()
    same = cohorts.with_these_first(drawn, these, there, 20, jnp.asarray(False))
    np.testing.assert_array_equal(same.index, drawn.index)


def test_a_cohort_of_everybody_stays_in_place():
    everybody = cohorts.in_place(jnp.ones(6, bool))
    found = cohorts.with_these_first(everybody, jnp.asarray([4, 5]), jnp.ones(2, bool), 6, jnp.asarray(True))
    assert found.index.tolist() == list(range(6))


LABEL = np.where(np.arange(CLIENTS) < 990, np.where(np.arange(CLIENTS) % 200 == 7, 2, np.arange(CLIENTS) % 2), -1)


@pytest.mark.slow
def test_each_cluster_has_as_many_as_it_wants_and_the_first_before_others():
    """Cluster 2 has five clients, so few that chance alone does not bring all of them."""
    first = jnp.asarray([0, 2, 4, 7, 9, 11, 995]), jnp.asarray([2, 9, 0])
    draw = jax.jit(lambda key: cohorts.per_cluster(key, jnp.asarray(LABEL), jnp.asarray([20, 10, 5]), 50, first=first))
    for seed in range(10):
        drawn = chosen(draw(jax.random.key(seed)))
        assert np.bincount(LABEL[drawn], minlength=3).tolist() == [20, 10, 5]
        assert np.isin([0, 2, 4], drawn).sum() >= 2
        assert np.isin([9, 11], drawn).all()


@pytest.mark.slow
def test_clients_seen_seldom_come_before_others(monkeypatch):
    """A first client of a cluster is drawn ∝ 1/(1 + times seen); of more, within 5 σ of the draw by Gumbel noise."""
    seen = jnp.asarray(np.random.default_rng(0).integers(1, 5, CLIENTS).astype(np.float32))

    def draws(wanted, capacity, number):
        size = jnp.asarray([wanted, 0, 0])
        draw = jax.jit(
            jax.vmap(lambda key: cohorts.per_cluster(key, jnp.asarray(LABEL), size, capacity, seen=seen).index)
        )
        found = np.asarray(draw(jax.random.split(jax.random.key(4), number)))[:, :wanted]
        return np.bincount(np.asarray(seen)[found.reshape(-1)].astype(int), minlength=5)[1:]

    own = LABEL == 0
    weight = np.array(
        [(1 / (1 + np.asarray(seen)[own]) * (np.asarray(seen)[own] == times)).sum() for times in range(1, 5)]
    )
    expected = 1500 * weight / weight.sum()
    assert (np.abs(draws(1, 10, 1500) - expected) < 5 * np.sqrt(expected)).all()
    of_many = draws(60, 62, 300)
    monkeypatch.setattr(cohorts, "MANY", 10**9)
    of_few = draws(60, 62, 300)
    assert (np.abs(of_many - of_few) < 5 * np.sqrt(of_few)).all()


@pytest.mark.slow
@pytest.mark.parametrize("turns", [0, 32])
def test_who_never_comes_is_searched_for(turns, monkeypatch):
    monkeypatch.setattr(cohorts, "MOST_TURNS", turns)
    drawn = chosen(cohorts.per_cluster(jax.random.key(5), jnp.asarray(LABEL), jnp.asarray([12, 3, 4]), 30))
    assert np.bincount(LABEL[drawn], minlength=3).tolist() == [12, 3, 4]


@pytest.mark.parametrize(
    ("participation", "present"), [(0.6, 5125), (0.3, 10250), (0.15, 20500), (0.33, 9400), (0.1, 7)]
)
def test_a_cohort_of_thousands_is_as_large_whatever_rows_follow(participation, present):
    """On two devices, which have a row of padding, one client more was drawn."""
    for absent in (0, 1, 3):
        there = jnp.arange(present + absent) < present
        wanted = int(cohorts.wanted_clients(participation, there))
        assert wanted == cohorts.cohort_size(participation, present)
    assert int(cohorts.wanted_clients(participation, jnp.zeros(5, bool))) == 0
