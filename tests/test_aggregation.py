"""Robust aggregation against slow versions of the papers, per cluster, and inside the methods."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjax_cluster import aggregation, neighbours, parallel, server, tree
from fedjax_cluster.parallel import Contribution
from fedjax_cluster.simulation import arguments, identity
from fedjax_cluster.types import ONE_DEVICE, Churn
from tests.algorithms import test_protocol as protocol
from tests.federations import blobs, one_step
from tests.reference import aggregation as oracle

ROWS, SLOTS = 12, 3
RULES = (
    aggregation.trimmed_mean(share=0.2),
    aggregation.median(),
    aggregation.krum(byzantine=1),
    aggregation.multi_krum(byzantine=1),
    aggregation.multi_krum(byzantine=1, selected=2),
    aggregation.bulyan(byzantine=1),
    aggregation.geometric_median(iterations=6),
    aggregation.norm_clipping(norm=1.5),
)


@functools.partial(jax.jit, static_argnames=("rule", "mapping"))
def combined(rule, sent, accepted, mapping=ONE_DEVICE):
    if rule.streams:
        return server.weighted_mean(server.reduce_rows(rule, sent, accepted, SLOTS))
    return server.combine(rule, sent, accepted, SLOTS, mapping).value


def cohort(slots, seed=0, faulty=True):
    """Contributions of twelve clients, two of them far off, in leaves of two shapes."""
    rng = np.random.default_rng(seed)
    vectors = rng.normal(size=(ROWS, 7)).astype(np.float32)
    vectors[[1, 6]] *= 50 if faulty else 1
    weight = rng.integers(1, 9, ROWS).astype(np.float32)
    return Contribution(np.asarray(slots, np.int32), weight, vectors)


def as_leaves(sent):
    value = {"a": sent.value[:, :4].reshape(-1, 2, 2), "b": sent.value[:, 4:]}
    return Contribution(*jax.tree.map(jnp.asarray, (sent.slot, sent.weight, {"delta": value, "stats": {}})))


def flat(value):
    return np.concatenate([np.asarray(value["delta"][name]).reshape(SLOTS, -1) for name in "ab"], 1)


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES, ids=str)
@settings(max_examples=25)
@given(
    slots=st.lists(st.integers(-1, SLOTS - 1), min_size=ROWS, max_size=ROWS),
    accepted=st.lists(st.booleans(), min_size=ROWS, max_size=ROWS),
    seed=st.integers(0, 99),
)
def test_every_cluster_has_what_the_paper_makes_of_its_clients_alone(rule, slots, accepted, seed):
    """Clusters of one client and of none, clients without a cluster, and those that are left out, among them."""
    sent, accepted = cohort(slots, seed), np.asarray(accepted)
    found = flat(combined(rule, as_leaves(sent), jnp.asarray(accepted)))
    for slot in range(SLOTS):
        rows = (sent.slot == slot) & accepted
        if rows.any():
            expected = oracle.of(rule, sent.value[rows], sent.weight[rows])
            np.testing.assert_allclose(found[slot], expected, rtol=2e-4, atol=1e-5)
    order = np.random.default_rng(seed).permutation(ROWS)
    moved = combined(rule, jax.tree.map(lambda leaf: leaf[order], as_leaves(sent)), jnp.asarray(accepted[order]))
    for slot in set(sent.slot[accepted & (sent.slot >= 0)]):
        # Of two who are each other's nearest, either is Krum's.
        if isinstance(rule, aggregation.trimmed_mean | aggregation.median | aggregation.geometric_median):
            np.testing.assert_allclose(flat(moved)[slot], found[slot], rtol=1e-4, atol=1e-5)


def test_the_oracles_agree_with_others():
    vectors = cohort([0] * ROWS).value.astype(np.float64)
    np.testing.assert_allclose(oracle.median(vectors), np.median(vectors, 0))
    np.testing.assert_allclose(oracle.trimmed_mean(vectors, 0.25), scipy.stats.trim_mean(vectors, 0.25))
    centre = oracle.geometric_median(vectors, np.ones(ROWS), 300, 1e-9)
    least = sum(np.linalg.norm(vectors - centre, axis=1))
    for step in np.eye(7) * 0.05:
        assert min(sum(np.linalg.norm(vectors - centre - way, axis=1)) for way in (step, -step)) > least


@pytest.mark.parametrize("factor", [0.0, 1e-4, -10.0, 1e12])
def test_the_geometric_median_stays_near_the_many_wherever_some_are(factor):
    """Steps from no change do not leave it where some send none, and those from the mean do not come back from afar."""
    sent = cohort([0] * ROWS, faulty=False)
    sent.value[:] = 3 + 0.1 * sent.value
    sent.value[:4] *= factor
    sent.weight[:] = 1
    found = flat(combined(aggregation.geometric_median(), as_leaves(sent), jnp.ones(ROWS, bool)))[0]
    farthest = np.linalg.norm(sent.value[4:] - np.median(sent.value[4:], 0), axis=1).max()
    assert np.linalg.norm(found - np.median(sent.value[4:], 0)) < farthest


TOGETHER = np.ones((9, 9), bool)
ORACLES = {aggregation.krum: oracle.krum, aggregation.multi_krum: oracle.multi_krum, aggregation.bulyan: oracle.bulyan}


@pytest.mark.slow
@pytest.mark.parametrize(
    "rule", [aggregation.median(), aggregation.multi_krum(byzantine=1), aggregation.bulyan(byzantine=1)], ids=str
)
def test_clients_divided_among_devices_change_nothing(rule):
    two = parallel.client_mapping("scan", devices=jax.devices()[:2])
    sent, accepted = as_leaves(cohort([0, 1, 0, 0, 2, 0, 0, -1, 0, 1, 0, 0])), jnp.arange(ROWS) != 3
    divided = parallel.place_rows(two, (sent, accepted))
    chex.assert_trees_all_close(
        combined(rule, *divided, mapping=two), combined(rule, sent, accepted), rtol=1e-5, atol=1e-6
    )


def test_devices_divide_the_columns_of_distances():
    two = parallel.client_mapping("scan", devices=jax.devices()[:2])
    leaves = [np.random.default_rng(0).normal(size=(9, width)).astype(np.float32) for width in (5, 1, 4)]
    rows = np.concatenate(leaves, 1).astype(np.float64)
    expected = np.square(rows[:, None] - rows[None]).sum(2)
    found = jax.jit(lambda leaves, offset: neighbours.distances([leaf + offset for leaf in leaves], TOGETHER, two))
    np.testing.assert_allclose(found(leaves, 0.0), expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(found(leaves, 1e4), expected, rtol=1e-2, atol=1e-2)  # what its digits allow


@pytest.mark.parametrize("rule", [rule for rule in RULES if "byzantine" in rule.__dataclass_fields__], ids=str)
@pytest.mark.parametrize("shared", [1e3, 1e4])
def test_what_all_clients_share_does_not_hide_who_is_near(rule, shared):
    """|x|² + |y|² − 2xy had no digit left: Krum took the first. Two move the mean so far that it is no help either."""
    both = dataclasses.replace(rule, byzantine=2)
    for seed in range(5):
        sent = cohort([0] * 10 + [1] * 2, seed, faulty=False)
        sent.value[:] += shared * np.linspace(-1, 1, 7, dtype=np.float32)
        sent.value[[2, 5]] *= np.array([[-30], [40]], np.float32)
        found = flat(combined(both, as_leaves(sent), jnp.ones(ROWS, bool)))[0]
        more = [both.selected] if isinstance(both, aggregation.multi_krum) else []
        expected = ORACLES[type(rule)](sent.value[:10].astype(np.float64), 2, *more)
        np.testing.assert_allclose(found, expected, atol=1e-5 * shared)


def test_a_share_of_the_clients_is_cut_without_rounding_errors():
    """0.14 · 50 is above 7 in floating point, of which eight would be cut."""
    assert 0.14 * 50 > 7
    assert aggregation.trimmed_mean(share=0.14).cuts(51)[[49, 50, 51]].tolist() == [7, 7, 8]


def test_krum_adds_squares_of_distances():
    """By sums of distances it would be the first of these clients, by squares the second."""
    places = np.array([(-5, -3), (-1, -2), (-5, -2), (8, -8), (-5, -3), (4, 6), (6, -7)], np.float32)
    value = np.zeros((ROWS, 7), np.float32)
    value[:7, [0, 6]] = places
    sent = Contribution(np.array([0] * 7 + [-1] * 5, np.int32), np.ones(ROWS, np.float32), value)
    found = flat(combined(aggregation.krum(byzantine=1), as_leaves(sent), jnp.ones(ROWS, bool)))[0]
    np.testing.assert_array_equal(found[[0, 6]], places[1])


@pytest.mark.parametrize("byzantine", [0, 2, 5])
def test_clients_are_chosen_one_after_the_other_among_those_that_are_left(byzantine):
    """Three clusters side by side, with more faulty clients than were said, in sums of which nothing is left over."""
    rng = np.random.default_rng(byzantine)
    vectors = rng.normal(size=(70, 3)).astype(np.float32)
    vectors[rng.choice(70, 25, replace=False)] *= 10.0 ** rng.integers(1, 7, (25, 1))
    slot = rng.permutation(np.repeat([0, 1, 2, 3], [40, 3, 19, 8])).astype(np.int32)
    count = np.bincount(slot)[:3]
    wanted = np.maximum(count - 2 * byzantine, 1)
    # Exact to the bit, so that near ties are the oracle's.
    distance = np.square(vectors[:, None].astype(np.float64) - vectors[None]).sum(2).astype(np.float32)
    choose = jax.jit(neighbours.nearest_again_and_again, static_argnames=("byzantine", "num_slots"))
    found = choose(distance, slot, wanted, count, byzantine=byzantine, num_slots=3)
    for cluster in range(3):
        rows = np.flatnonzero(slot == cluster)
        expected = rows[oracle.bulyan_choice(vectors[rows].astype(np.float64), byzantine)]
        assert set(np.flatnonzero(found)) & set(rows) == set(expected)
    assert not np.asarray(found)[slot == 3].any()


@pytest.mark.slow
@pytest.mark.parametrize("rule", [rule for rule in RULES if "byzantine" in rule.__dataclass_fields__], ids=str)
@pytest.mark.parametrize("size", [3e18, 1e25, 3e37])
def test_nobody_is_chosen_for_what_has_no_square(rule, size):
    """Two infinities were taken for near: Krum took the change of one of two clients that sent 1e19 or more."""
    sent = cohort([0] * ROWS, faulty=False)
    sent.value[[3, 8]] = size * np.array([[1], [1 if size < 1e30 else -1]])
    both = dataclasses.replace(rule, byzantine=2)
    found = flat(combined(both, as_leaves(sent), jnp.ones(ROWS, bool)))[0]
    assert np.abs(found).max() < 4


def test_what_nobody_sent_is_nothing_whatever_the_rule_makes_of_it():
    """The median's NaN went into SCAFFOLD's control variate, and every later update was refused."""

    class careless(aggregation.Aggregation):
        def combine(self, rows, num_slots):
            return jax.tree.map(lambda leaf: jnp.full((num_slots, *leaf.shape[1:]), jnp.nan), rows.value)

    sent = as_leaves(cohort([0, 2] * (ROWS // 2)))
    found = flat(server.combine(careless(), sent, jnp.arange(ROWS) % 2 == 0, SLOTS).value)
    assert np.isnan(found[0]).all()
    assert not found[1:].any()


def test_statistics_follow_the_clients_that_were_chosen():
    sent = cohort([0] * ROWS)
    stats = jnp.arange(ROWS, dtype=jnp.float32)
    rows = as_leaves(sent)
    rows = rows._replace(value={**rows.value, "stats": stats})
    best = int(np.argmin(oracle.krum_scores(sent.value.astype(np.float64), 1)))
    assert combined(aggregation.krum(byzantine=1), rows, jnp.ones(ROWS, bool))["stats"][0] == best
    clipped = combined(aggregation.norm_clipping(1e-3), rows, jnp.ones(ROWS, bool))["stats"][0]
    np.testing.assert_allclose(clipped, np.average(np.arange(ROWS), weights=sent.weight), rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fedavg", "cfl"])
def test_a_median_is_kept_for_its_own_clusters_by_the_round(name):
    """The ways that contributions are kept: by the loop over clients, and by CFL, which has them all."""
    plain, population, state, info = protocol.started(name)
    robust = dataclasses.replace(plain, aggregation=aggregation.median())
    new, report = one_step(robust, population, state)
    chex.assert_trees_all_equal_shapes_and_dtypes(new, state)
    chex.assert_trees_all_equal_shapes_and_dtypes(report, info)
    usual, _ = one_step(plain, population, state)
    gap = tree.ravel(jax.tree.map(jnp.subtract, new.clusters.params, usual.clusters.params))
    assert 1e-5 < float(jnp.abs(gap).max()) < 1.0


def test_no_aggregation_is_no_option_of_a_configuration():
    """So that runs saved before there was a choice are still the same runs."""
    assert "aggregation" not in protocol.build("fedavg").config
    rule = aggregation.trimmed_mean(share=0.1)
    made = dataclasses.replace(protocol.build("fedavg"), aggregation=rule)
    assert made.config["aggregation"] == {"rule": "trimmed_mean", "share": 0.1}
    assert made != protocol.build("fedavg")
    for name, same in (("mean", None), ("trimmed-mean", aggregation.trimmed_mean())):
        assert dataclasses.replace(made, aggregation=name) == dataclasses.replace(made, aggregation=same)


class first(aggregation.Aggregation):
    """A rule of the user's own: the first client's change, many times."""

    factor = 1.0

    def combine(self, rows, num_slots):
        return jax.tree.map(lambda leaf: self.factor * leaf[:num_slots], rows.value)


def test_a_run_knows_the_code_of_a_rule_of_the_users_own(monkeypatch):
    method = dataclasses.replace(protocol.build("fedavg"), aggregation=first())
    found = []
    for factor in (1.0, 1.0, 2.0):
        monkeypatch.setattr(first, "factor", factor)
        found.append(identity.identity_of(method, blobs(), 0, 10, None, ())["programs"]["the aggregation"])
    assert found[0] == found[1] != found[2]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: aggregation.trimmed_mean(share=0.5),
            r"share is 0\.5; .* below 0\.5; half or more would leave nothing",
        ),
        (lambda: aggregation.norm_clipping(norm=0.0), r"norm is 0\.0; it must be a number, positive and finite"),
        (lambda: aggregation.named("norm-clipping"), r"needs the largest norm of a change"),
        (lambda: aggregation.named("mode"), r"unknown aggregation 'mode'; known: mean, trimmed-mean"),
        (lambda: aggregation.named("median", share=0.1), r"aggregation median has no share"),
        (lambda: aggregation.krum(byzantine=-1), r"byzantine is -1; it must be a whole number, at least 0"),
    ],
)
def test_bad_rules_are_refused_in_a_line(make, message):
    with pytest.raises(ValueError, match=message) as caught:
        make()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("rule", "least"), [("krum", 5), ("multi_krum", 5), ("bulyan", 7)])
def test_a_round_with_too_few_clients_is_refused_before_it(rule, least):
    made = aggregation.named(rule, byzantine=1)
    algorithm = dataclasses.replace(protocol.build("fedavg"), aggregation=made)
    arguments.check_arguments(algorithm, blobs(clients=least), rounds=1)
    with pytest.raises(ValueError, match=rf"{rule} with byzantine 1 needs {least} clients in a round"):
        arguments.check_arguments(algorithm, blobs(clients=least - 1), rounds=1)
    fewer = [Churn(3, leave=(0,))]
    arguments.check_arguments(algorithm, blobs(clients=least), rounds=3, churn=fewer)
    with pytest.raises(ValueError, match=rf"but {least - 1} take part"):
        arguments.check_arguments(algorithm, blobs(clients=least), rounds=4, churn=fewer)
    few = dataclasses.replace(algorithm, participation=0.5)
    with pytest.raises(ValueError, match=rf"but {least - 1} take part"):
        arguments.check_arguments(few, blobs(clients=2 * least - 2), rounds=1)


@pytest.mark.parametrize(
    ("name", "options", "clients"),
    [
        ("fedgwc", {"participation": 0.1}, 3),
        ("fedgwc", {"participation": 0.1, "variant": "released"}, 1),
        ("fedsoft", {"participation": 0.5, "clusters": 4}, 2),
        ("fedavg", {"participation": 0.1}, 1),
    ],
)
def test_rules_are_checked_against_the_clients_that_a_method_draws(name, options, clients):
    """FedGWC's cohorts are never smaller than three; FedSoft draws for each of its clusters apart."""
    method = dataclasses.replace(protocol.build(name), **options)
    assert method.clients_in_round(10) == clients
    made = dataclasses.replace(method, aggregation=aggregation.krum(byzantine=0))
    if clients >= 3:
        arguments.check_arguments(made, blobs(clients=10), rounds=1)
    else:
        with pytest.raises(ValueError, match=rf"but {clients} take part"):
            arguments.check_arguments(made, blobs(clients=10), rounds=1)


@pytest.mark.parametrize("size", [1e-30, 1.0, 1e10, 1e25, 3e38])
def test_changes_whose_squares_overflow_are_clipped_and_not_lost(size):
    change = {"kernel": jnp.asarray([[3.0, 0.0]]) * (size / 4), "bias": jnp.asarray([4.0]) * (size / 4)}
    found = aggregation.norm_clipping(0.5).limit(change)
    length = size * 5 / 4
    np.testing.assert_allclose(found["kernel"][0, 0], min(0.5, length) * 0.6, rtol=1e-6)
    np.testing.assert_allclose(found["bias"][0], min(0.5, length) * 0.8, rtol=1e-6)
    assert not jax.tree.leaves(aggregation.norm_clipping(0.5).limit({"bias": jnp.zeros(2)}))[0].any()


def test_the_median_of_the_largest_numbers_is_theirs():
    """Compilers make ½(a + b) of ½a + ½b."""
    large = jnp.array([[1.8e38], [1.8e38], [0.0]])
    found = aggregation.median().combine(aggregation.Rows(large, jnp.zeros(3, jnp.int32), jnp.ones(3)), 1)
    assert found.tolist() == large[:1].tolist()
