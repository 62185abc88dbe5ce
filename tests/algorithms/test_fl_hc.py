"""FL+HC against its NumPy oracle, and what its clusters do."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_cluster import local, nn, parallel, tree
from fedjax_cluster.algorithms.fl_hc import fl_hc
from fedjax_cluster.algorithms.round import labels
from fedjax_cluster.simulation.loop import simulate
from fedjax_cluster.types import Churn
from tests.algorithms.test_oracles import assert_models_equal, models_of, start_of
from tests.algorithms.test_personal import cohorts_of
from tests.federations import as_lists, blobs, play
from tests.reference import fl_hc as reference

CLIENTS, RATE, STEPS = 9, 0.3, 2
OWN = local.sgd(RATE, batch_size=None, steps=STEPS)
# Part of the clients in a round, of whom all, or who is there, are compared.
PART = {"participation": 0.5, "weighting": "uniform"}
SETTINGS = {
    "all": {"slots": 4, "warm_up": 2},
    "threshold": {"slots": 9, "warm_up": 1, "threshold": 0.7, "linkage": "average"},
    "fewer slots than the threshold leaves": {"slots": 2, "warm_up": 1, "threshold": 0.3, "metric": "manhattan"},
    "at once": {"slots": 3, "warm_up": 0, "metric": "cosine", "linkage": "single"},
    "a layer": {"slots": 9, "warm_up": 0, "threshold": 0.3, "layers": ("*/kernel",), "cluster_cohort": True, **PART},
    "ward": {"slots": 3, "warm_up": 2, "linkage": "ward", **PART},
    "a cohort": {"slots": 3, "warm_up": 2, "cluster_cohort": True, "metric": "manhattan", **PART},
}


def build(slots, metric="euclidean", **options):
    return fl_hc(nn.linear(), clusters=slots, local=OWN, distance=metric, **options)


@pytest.mark.parametrize(
    "setting", [name if name == "a cohort" else pytest.param(name, marks=pytest.mark.slow) for name in SETTINGS]
)
def test_fl_hc_is_its_algorithm(setting):
    """Clients of unequal sizes; every option off its default once."""
    options, rounds = SETTINGS[setting], 6
    federation = blobs(clients=CLIENTS, groups=3)
    algorithm, warm_up = build(**options), options["warm_up"]
    start, cohorts = models_of(start_of(algorithm, federation))[0], cohorts_of(algorithm, federation, rounds)
    if algorithm.compares_all:
        cohorts[warm_up] = list(range(CLIENTS))
    state, reports = play(algorithm, federation, rounds)
    data = as_lists(federation)
    weight = {number: 1 if "weighting" in options else len(y) for number, (_, y) in enumerate(data)}
    given = {key: value for key, value in options.items() if key in ("slots", "metric", "linkage", "threshold")}
    given["compared"] = (True, not algorithm.layers)
    label, models, means = reference.fl_hc(
        start, data, cohorts, rate=RATE, steps=STEPS, warm_up=warm_up, weight=weight, **given
    )
    assert 1 < len(models) < CLIENTS
    if setting == "threshold":
        assert len(models) < options["slots"]
    found = np.asarray(labels(state.clients.membership))[:CLIENTS]
    assert found.tolist() == [label.get(number, -1) for number in range(CLIENTS)]
    assert state.clusters.active.tolist() == [place < len(models) for place in range(options["slots"])]
    assert_models_equal(models_of(state)[: len(models)], models)
    # Ours have the bias first.
    means = means if algorithm.layers else np.roll(means, 3, 1)
    np.testing.assert_allclose(state.server.mean[: len(models)], means, rtol=2e-4, atol=2e-5)
    known, heard = set(), []
    for chosen in cohorts[warm_up:]:
        heard.append(set(chosen) - known)
        known |= heard[-1]
    sent = [len(chosen) for chosen in cohorts]
    for place, new in enumerate(heard, warm_up):
        sent[place] += len(new)
    bias = start[1].size / (start[0].size + start[1].size) if algorithm.layers else 0.0
    less = [0.0] * warm_up + [bias * len(new) for new in heard]
    np.testing.assert_allclose([report.costs.models_up for report in reports], np.subtract(sent, less), rtol=1e-6)
    # The first clusters start from the model that was sent.
    down = [models - len(heard[0]) * (place == warm_up) for place, models in enumerate(sent)]
    assert [float(report.costs.models_down) for report in reports] == down
    assert [float(report.costs.gradient_evaluations) for report in reports] == [STEPS * models for models in sent]
    events = [bool(report.event) for report in reports]
    assert events == [bool(report.costs.clusterings) for report in reports] == [n == warm_up for n in range(rounds)]
    assert int(reports[warm_up].num_changed) == sum(label[client] != 0 for client in cohorts[warm_up])
    assert [int(report.num_changed) for report in reports[warm_up + 1 :]] == [len(new) for new in heard[1:]]


@pytest.mark.slow
def test_groups_are_found_and_their_models_are_better_than_the_common_one():
    """Three groups of unequal clients, a third of them in a round."""
    federation = blobs(clients=15, groups=3, rows=60)
    result = simulate(build(3, warm_up=3, participation=0.3), federation, rounds=8, eval_every=1, progress=False)
    history = result.history
    np.testing.assert_allclose(history["adjusted_rand_index"], [0.0] * 3 + [1.0] * 5, atol=1e-6)
    assert history["accuracy"][-1] > 0.9 > history["accuracy"][2] + 0.1
    # Everybody once, and a third of them in every other round.
    assert history["num_clients"].tolist() == [5] * 3 + [15] + [5] * 4
    event = result.events[0].content
    assert event["labels"][:15].tolist() == result.labels.tolist()
    apart = event["distance"][:15, :15]
    np.testing.assert_array_equal(apart, apart.T)
    alike = result.labels[:, None] == result.labels[None]
    assert apart[alike].max() < apart[~alike].min()


@pytest.mark.slow
def test_who_is_away_or_sends_nothing_finite_joins_when_it_is_next_heard():
    federation = blobs(clients=CLIENTS, groups=3, rows=60)
    whole, _ = play(build(3, warm_up=1), federation, 2)
    expected = np.asarray(labels(whole.clients.membership))[:CLIENTS].tolist()
    x = federation.train.x.copy()
    x[4] = np.nan
    spoilt = federation._replace(train=federation.train._replace(x=x))
    state, reports = play(build(3, warm_up=1), spoilt, 2)
    found = np.asarray(labels(state.clients.membership))[:CLIENTS].tolist()
    assert found == [-1 if client == 4 else label for client, label in enumerate(expected)]
    assert int(reports[1].num_rejected) == 1
    # Nobody at all is heard: the clustering waits, and all go on with one model.
    none = federation._replace(train=federation.train._replace(x=x * np.nan))
    state, reports = play(build(3, warm_up=1), none, 3)
    assert [float(report.costs.clusterings) for report in reports] == [0, 1, 1]
    assert not any(report.event for report in reports)
    assert state.clusters.active.tolist() == [True, False, False]
    assert (np.asarray(labels(state.clients.membership))[:CLIENTS] == 0).all()


@pytest.mark.slow
def test_newcomers_join_the_nearest_cluster():
    """One client of each group comes after the clustering; before it, all newcomers have the common model."""
    federation = blobs(clients=12, groups=3, rows=60)
    for arrival in (1, 4):
        churn = [Churn(arrival, join=(9, 10, 11))]
        algorithm = build(3, warm_up=3, linkage="average")
        result = simulate(algorithm, federation, rounds=6, churn=churn, progress=False)
        assert result.labels.tolist() == [0, 1, 2] * 4
    broken = jax.tree.map(lambda leaf: jnp.asarray(leaf[3]), federation.train)
    broken = broken._replace(x=broken.x * jnp.nan)
    lost = build(3, warm_up=3).admit(jax.random.key(0), jax.tree.map(jnp.asarray, result.state), broken, jnp.asarray(3))
    assert int(labels(lost.clients.membership)[3]) == -1


@pytest.mark.slow
def test_what_the_server_computes_in_a_clustering_gives_the_clusters_that_there_are():
    federation = blobs(clients=CLIENTS, groups=3, rows=60)
    for options in ({}, {"cluster_cohort": True, "participation": 0.7}):
        algorithm = build(3, warm_up=1, **options)
        state = jax.tree.map(jnp.asarray, play(algorithm, federation, 6)[0])
        found = jax.jit(algorithm.cluster)(jax.random.key(0), state)
        known = np.asarray(labels(state.clients.membership))
        assert (known >= 0).all()
        pairs = {(int(one), int(other)) for one, other in zip(found, known, strict=True) if one >= 0}
        assert len(pairs) == 3, options


@pytest.mark.slow
def test_updates_that_do_not_fit_into_memory_are_refused_before_anything_is_computed(monkeypatch):
    federation = blobs(clients=15, groups=3, rows=60)
    few = build(3, participation=0.3, cluster_cohort=True)
    size = tree.size(few.model.init(jax.random.key(0), federation.info).params)
    monkeypatch.setattr(parallel, "memory_left", lambda: 4 * 5 * (2 * size + 15))
    simulate(few, federation, rounds=1, progress=False)
    with pytest.raises(
        ValueError, match=r"updates of 1[56] clients that are compared, .*; give cluster_cohort=True and a"
    ):
        simulate(dataclasses.replace(few, cluster_cohort=False), federation, rounds=1, progress=False)
    with pytest.raises(
        ValueError, match=r"updates of [67] clients that are compared, .*; give a smaller participation"
    ):
        simulate(dataclasses.replace(few, participation=0.4), federation, rounds=1, progress=False)


def test_ward_is_of_euclidean_distances():
    with pytest.raises(ValueError, match=r"linkage is 'ward', .* distance is 'cosine'; give another linkage"):
        build(3, "cosine", linkage="ward")
