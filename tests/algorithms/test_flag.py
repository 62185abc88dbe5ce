"""FLAG and PACFL against plain NumPy, and what they must tell apart."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_cluster import clustering, faults, local, nn, parallel
from fedjax_cluster.algorithms.flag.flag import flag
from fedjax_cluster.algorithms.pacfl import pacfl
from fedjax_cluster.algorithms.round import labels as labels_of
from fedjax_cluster.data import digits, scenarios
from fedjax_cluster.simulation.loop import simulate
from fedjax_cluster.simulation.segment import run_keys
from fedjax_cluster.types import Churn
from tests.directions import EPOCHS, FULL, ROUNDS, SCAN, at_threshold, lines, model_of, pacfl_started, place
from tests.federations import as_lists, blobs
from tests.reference import federated, linkage
from tests.reference import flag as reference
from tests.turns import drawn_batches, linear_models, turns


def measured(federation, start, share=0.01):
    arguments = {"num_classes": 3, "rank": 2, "share": share, "rate": 0.3, "epochs": EPOCHS}
    return [reference.measure(start, x, y, **arguments) for x, y in as_lists(federation)]


# ------------------------------------------------------------------------------------------ clustering


def test_matrices_and_clusters_are_algorithm_2():
    _, state, info = at_threshold()
    data, gradient, proximity = reference.matrices(measured(lines(), model_of(state.server.start)), delta=0.5, beta=0.5)
    np.testing.assert_allclose(state.server.matrices.data, data, atol=0.1)
    np.testing.assert_allclose(state.server.matrices.gradient, gradient, atol=0.1)
    np.testing.assert_allclose(state.server.matrices.proximity, proximity, atol=3e-3)
    clusters = linkage.agglomerative(proximity, "average", 0.6)
    assert labels_of(state.clients.membership).tolist() == reference.as_labels(clusters, 9).tolist()
    assert clustering.scores.adjusted_rand_index(labels_of(state.clients.membership), lines().group) == 1.0
    assert state.clusters.active.tolist() == [True, True, True, False]
    assert bool(info.event)


@pytest.mark.slow
def test_training_is_federated_averaging_in_each_cluster():
    algorithm, state, _ = at_threshold()
    federation = lines()
    result = simulate(algorithm, federation, rounds=ROUNDS, mapping=SCAN)
    starts = [model_of(jax.tree.map(lambda leaf, k=k: leaf[k], state.clusters)) for k in range(3)]
    expected = reference.train_clusters(
        starts, federation.group, as_lists(federation), rate=0.3, steps=2, rounds=ROUNDS
    )
    trained = [model_of(jax.tree.map(lambda leaf, k=k: leaf[k], result.state.clusters)) for k in range(3)]
    for own, other in zip(trained, expected, strict=True):
        for part, value in zip(own, other, strict=True):
            np.testing.assert_allclose(part, value, rtol=1e-3, atol=1e-4)
    (event,) = result.events
    assert event.round == -1
    np.testing.assert_array_equal(event.content["proximity"], state.server.matrices.proximity)
    assert event.content["labels"].tolist() == federation.group.tolist()
    assert result.history["num_changed"].sum() == 0


@pytest.mark.slow
@pytest.mark.parametrize("method", ["flag", "pacfl"])
def test_rounds_of_some_of_the_clients_are_averages_by_examples(method):
    """Catches a participation that is not heeded, and a mean by clients, by default or at all."""
    algorithm, state = at_threshold()[:2] if method == "flag" else pacfl_started()
    algorithm = dataclasses.replace(algorithm, participation=0.5, local=local.sgd(0.3, batch_size=4, steps=2))
    federation = lines()
    sizes = federation.train.num_examples
    for turn in turns(algorithm, federation, 2, state=state):
        assert len(turn.clients) == 5
        label = np.argmax(turn.before.clients.membership, -1)
        expected = federated.train_cohort(
            linear_models(turn.before.clusters.params), label, drawn_batches(turn, federation), 0.3, sizes
        )
        for own, other in zip(linear_models(turn.after.clusters.params), expected, strict=True):
            for part, value in zip(own, other, strict=True):
                np.testing.assert_allclose(part, value, rtol=1e-3, atol=1e-4)
    assert any(len(set(sizes[label == k].tolist())) > 1 for k in range(3))


def test_costs_of_the_clustering_are_counted():
    _, state, info = at_threshold()
    clients, size = 9, 33  # 10·3 + 3 parameters
    used = np.count_nonzero(np.abs(np.asarray(state.clients.vectors)).max(axis=2))
    assert float(info.costs.models_down) == clients
    assert float(info.costs.models_up) == pytest.approx(clients + used * 10 / size)
    assert float(info.costs.gradient_evaluations) == clients * EPOCHS
    assert used == np.count_nonzero(np.asarray(state.clients.counts))


def test_counts_that_are_not_shared_weigh_all_angles_equally():
    population = place(lines())
    arguments = {"clusters": 4, "local": FULL, "gradient_epochs": 0, "max_vectors": 2, "threshold": 0.6}
    private, _ = flag(nn.linear(), share_class_counts=False, **arguments).init(jax.random.key(0), population)
    uniform, _ = flag(nn.linear(), delta=0.0, **arguments).init(jax.random.key(0), population)
    np.testing.assert_allclose(private.server.matrices.data, uniform.server.matrices.data, rtol=1e-5)
    assert np.asarray(private.clients.counts).max() == 1
    assert np.abs(np.asarray(private.server.matrices.data) - at_threshold()[1].server.matrices.data).max() > 1.0
    # Without local epochs there is no direction: all angles are 90°, and Ĝ is 0.
    off = ~np.eye(9, dtype=bool)
    np.testing.assert_allclose(np.asarray(private.server.matrices.gradient)[off], 90.0)
    np.testing.assert_allclose(np.asarray(private.server.matrices.proximity).max(), 0.5, rtol=1e-5)


def test_a_client_that_cannot_be_measured_is_left_out_and_counted():
    population = place(lines())
    x = population.data.x.at[4].set(jnp.nan)
    broken = dataclasses.replace(population, data=population.data._replace(x=x))
    state, info = at_threshold()[0].init(run_keys(0).initialization, broken)
    others = np.arange(9) != 4
    found = np.asarray(labels_of(state.clients.membership))
    assert clustering.scores.adjusted_rand_index(found[others], lines().group[others]) == 1.0
    assert int(info.num_rejected) == 1
    assert found[4] in (0, 2)  # the largest: the other groups' three members
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((state.server.matrices, state.clients)))


@pytest.mark.parametrize("landmarks", [None, pytest.param(8, marks=pytest.mark.slow)])
def test_who_was_silent_is_asked_again_before_the_clustering(landmarks):
    """It was in the largest cluster for good."""
    arguments = {"clusters": 5, "local": FULL, "gradient_epochs": EPOCHS, "max_vectors": 2, "threshold": 0.6}
    method = flag(nn.linear(), landmarks=landmarks, **arguments)
    silent, federation = faults.afflict(method, lines(), faults.drop_out(0.3), seed=0)
    key, population = run_keys(0).initialization, place(federation)
    start = method.model.init(key, population.info)
    assert 0 < silent.measure_all(key, population, start).accepted.sum() < 9
    state, info = silent.init(key, population)
    assert int(info.num_rejected) == 0
    assert clustering.scores.adjusted_rand_index(labels_of(state.clients.membership), lines().group) == 1.0


@pytest.mark.slow
@pytest.mark.parametrize("landmarks", [None, 8])
def test_a_newcomer_that_is_silent_is_asked_again(landmarks):
    """It was asked once, and in the largest cluster for good."""
    arguments = {"clusters": 5, "local": FULL, "gradient_epochs": EPOCHS, "max_vectors": 2, "threshold": 0.6}
    method = flag(nn.linear(), landmarks=landmarks, **arguments)
    silent, federation = faults.afflict(method, lines(), faults.drop_out(0.3, share=1.0), seed=0)
    state, _ = silent.init(run_keys(0).initialization, place(federation))
    index = next(i for i in range(9) if landmarks is None or i not in state.server.landmarks)
    absent = jax.tree.map(lambda leaf: leaf.at[index].set(jnp.zeros_like(leaf[index])), state.clients)
    client = jax.tree.map(lambda leaf: jnp.asarray(leaf[index]), federation.train)
    admit = jax.jit(lambda key: silent.admit(key, state._replace(clients=absent), client, jnp.asarray(index)))
    for number in range(10):
        new = admit(jax.random.key(number))
        assert labels_of(new.clients.membership).tolist() == labels_of(state.clients.membership).tolist()


@pytest.mark.slow
@pytest.mark.parametrize("method", ["flag", "pacfl"])
def test_a_newcomer_joins_the_nearest_cluster(method):
    federation = lines()
    if method == "flag":
        algorithm, state, _ = at_threshold()
    else:
        algorithm, state = pacfl_started()
    for index in (3, 7):
        absent = jax.tree.map(lambda leaf, i=index: leaf.at[i].set(jnp.zeros_like(leaf[i])), state.clients)
        client = jax.tree.map(lambda leaf, i=index: jnp.asarray(leaf[i]), federation.train)
        new = jax.jit(algorithm.admit)(jax.random.key(9), state._replace(clients=absent), client, jnp.asarray(index))
        assert labels_of(new.clients.membership).tolist() == labels_of(state.clients.membership).tolist()


@pytest.mark.slow
@pytest.mark.parametrize("linkage_name", ["average", "complete"])
def test_who_could_not_be_measured_disturbs_no_newcomer(linkage_name):
    """Clients 0 and 1 sent infinities; the others come back to where they were, and a third such to the largest."""
    population = place(lines())
    x = population.data.x.at[:2].set(jnp.nan)
    broken = dataclasses.replace(population, data=population.data._replace(x=x))
    algorithm = flag(
        nn.linear(), clusters=5, local=FULL, gradient_epochs=EPOCHS, max_vectors=2, threshold=0.6, linkage=linkage_name
    )
    state, info = algorithm.init(run_keys(0).initialization, broken)
    before = labels_of(state.clients.membership)
    assert int(info.num_rejected) == 2
    assert clustering.scores.adjusted_rand_index(before[2:], lines().group[2:]) == 1.0
    admit = jax.jit(algorithm.admit)
    for index in range(2, 9):
        absent = jax.tree.map(lambda leaf, i=index: leaf.at[i].set(jnp.zeros_like(leaf[i])), state.clients)
        client = jax.tree.map(lambda leaf, i=index: jnp.asarray(leaf[i]), lines().train)
        new = admit(jax.random.key(9), state._replace(clients=absent), client, jnp.asarray(index))
        assert labels_of(new.clients.membership).tolist() == before.tolist()
    sick = client._replace(x=jnp.full_like(client.x, jnp.nan))
    new = admit(jax.random.key(9), state._replace(clients=absent), sick, jnp.asarray(8))
    largest = np.bincount(before[:8]).argmax()
    assert int(labels_of(new.clients.membership)[8]) == largest
    assert not new.clients.known[8]


# ------------------------------------------------------------------------------- what must be told apart


@pytest.mark.slow
def test_permuted_labels_are_seen_by_flag_and_not_by_pacfl():
    """Concept shift: the same images under permuted labels span the same space."""
    federation = scenarios.label_permutation(digits(), clients=12, num_groups=3, seed=0)
    own = local.sgd(0.1, batch_size=10, epochs=2)
    found = {}
    for name, algorithm in {
        "flag": flag(nn.mlp(hidden=(16,)), clusters=8, local=own, gradient_epochs=10),
        "pacfl": pacfl(nn.mlp(hidden=(16,)), clusters=12, local=own, threshold=10.0),
    }.items():
        state, _ = algorithm.init(run_keys(0).initialization, place(federation))
        found[name] = clustering.scores.adjusted_rand_index(labels_of(state.clients.membership), federation.group)
    assert found["flag"] == 1.0
    assert found["pacfl"] < 0.5


# ------------------------------------------------------------------------------------------------ input


@pytest.mark.parametrize(
    ("method", "arguments", "message"),
    [
        (flag, {"clusters": 0}, "clusters is 0"),
        (flag, {"beta": 1.5}, "beta is 1.5"),
        (flag, {"delta": -0.1}, "delta is -0.1"),
        (flag, {"threshold": 2.0}, "threshold is 2.0"),
        (flag, {"gradient_epochs": -1}, "gradient_epochs is -1"),
        (flag, {"max_vectors": 0}, "max_vectors is 0"),
        (flag, {"vector_share": 0.0}, "vector_share is 0.0"),
        (flag, {"interval": 0.3}, "interval is 0.3"),
        (flag, {"linkage": "ward"}, "linkage is 'ward'"),
        (flag, {"angles": "mean"}, "angles is 'mean'"),
        (flag, {"search_clients": 0}, "search_clients is 0"),
        (flag, {"search_epochs": 0}, "search_epochs is 0"),
        (flag, {"elbow": "alpha"}, "elbow is 'alpha'"),
        (flag, {"local": object(), "gradient_epochs": 0, "search_epochs": 2}, "must be a LocalUpdate"),
        (flag, {"local": object()}, "must be a LocalUpdate"),
        (pacfl, {"clusters": 0}, "clusters is 0"),
        (pacfl, {"threshold": -1.0}, "threshold is -1.0"),
        (pacfl, {"num_vectors": 0}, "num_vectors is 0"),
        (pacfl, {"angles": "mean"}, "angles is 'mean'"),
    ],
)
def test_mistakes_are_named(method, arguments, message):
    with pytest.raises(ValueError, match=message):
        method(nn.linear(), **{"clusters": 2, "local": FULL, **arguments})


def test_more_clusters_than_slots_are_refused():
    algorithm = pacfl(nn.linear(), clusters=2, local=FULL, threshold=0.0, num_vectors=1)
    with pytest.raises(ValueError, match="found 9 clusters at 0°, but clusters is 2"):
        algorithm.init(jax.random.key(0), place(lines()))


def test_examples_without_classes_are_refused():
    population = place(blobs())
    regression = dataclasses.replace(population, info=population.info._replace(num_classes=0, task="regression"))
    for method in (flag, pacfl):
        with pytest.raises(ValueError, match="class by class"):
            method(nn.linear(), clusters=2, local=FULL).init(jax.random.key(0), regression)


@pytest.mark.slow
def test_rows_that_fill_up_devices_are_in_no_cluster_of_a_run_that_is_resumed(tmp_path):
    """A cluster that everybody has left was counted for the row that nobody has."""
    algorithm, federation = at_threshold()[0], lines()
    two = parallel.client_mapping("scan", devices=jax.devices()[:2])
    first = np.flatnonzero(simulate(algorithm, federation, rounds=1, mapping=two, progress=False).labels == 0)
    run = functools.partial(
        simulate, algorithm, federation, mapping=two, progress=False, churn=[Churn(1, leave=tuple(first.tolist()))]
    )
    whole = run(rounds=3)
    run(rounds=2, run_dir=tmp_path / "run")
    resumed = run(rounds=3, run_dir=tmp_path / "run")
    np.testing.assert_array_equal(resumed.history["num_clusters"], whole.history["num_clusters"])
    assert resumed.summary["num_clusters"] == whole.summary["num_clusters"] == 2
