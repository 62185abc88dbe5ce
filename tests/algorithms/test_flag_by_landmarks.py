"""FLAG by landmark clients: with everybody as landmark the exact one, with fewer what NumPy makes of them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_cluster import nn, parallel
from fedjax_cluster.algorithms import flag, one_shot_landmarks
from fedjax_cluster.algorithms.flag import landmarks as by_landmarks
from fedjax_cluster.algorithms.flag.state import Measured, Sent
from fedjax_cluster.algorithms.round import labels as labels_of
from fedjax_cluster.clustering.scores import adjusted_rand_index
from fedjax_cluster.report.methods import flag as flag_pictures
from fedjax_cluster.simulation.loop import simulate
from fedjax_cluster.simulation.segment import run_keys
from fedjax_cluster.types import Churn, ClientData, DatasetInfo
from tests.devices import needs_two
from tests.directions import FULL, lines, place
from tests.federations import as_lists
from tests.reference import flag as flag_reference
from tests.reference import landmarks, linkage

ONE = parallel.client_mapping("scan", devices=jax.devices()[:1])
TWO = parallel.client_mapping("chunked", 2, devices=jax.devices()[:2])
slow = functools.partial(pytest.param, marks=pytest.mark.slow)


def flag_by(number=None, threshold=0.6, **options):
    arguments = {"clusters": 4, "local": FULL, "gradient_epochs": 4, "max_vectors": 2, "threshold": threshold}
    return flag(nn.linear(), **{**arguments, **options}, landmarks=number)


@pytest.mark.slow
def test_flag_by_everybody_is_the_exact_one():
    population = place(lines())
    start = {"search_clients": 6, "search_rounds": 1, "search_epochs": 1, "light_model": nn.linear()}
    for options in ({}, {"threshold": None, **start}):
        exact, _ = flag_by(**options).init(run_keys(0).initialization, population)
        ours, _ = flag_by(9, **options).init(run_keys(0).initialization, population)
        assert labels_of(exact.clients.membership).tolist() == labels_of(ours.clients.membership).tolist()
        for one, other in zip(jax.tree.leaves(exact.server[:3]), jax.tree.leaves(ours.server[:3]), strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["average", slow("single"), slow("complete")])
def test_flag_by_some_merges_them_and_others_join_the_nearest(method):
    federation = lines(15)
    algorithm = flag_by(7, linkage=method)
    state, info = algorithm.init(run_keys(0).initialization, place(federation))
    chosen = state.server.landmarks.tolist()
    kernel = state.server.start.params["output"]
    start = tuple(np.asarray(kernel[name], np.float64) for name in ("kernel", "bias"))
    arguments = {"num_classes": 3, "rank": 2, "share": 0.01, "rate": 0.3, "epochs": 4}
    measured = [flag_reference.measure(start, x, y, **arguments) for x, y in as_lists(federation)]
    distance = landmarks.proximity(measured, chosen, delta=0.5, beta=0.5)
    np.testing.assert_allclose(state.server.matrices.proximity, distance[chosen], atol=3e-3)
    clusters = linkage.agglomerative(distance[chosen], method, 0.6)
    label = landmarks.extend_labels(distance, chosen, flag_reference.as_labels(clusters, 7).tolist(), method)
    assert labels_of(state.clients.membership).tolist() == label
    if method == "average":
        assert adjusted_rand_index(np.asarray(label), federation.group) == 1.0
    assert float(info.costs.clustering_seconds) > 0
    assert state.clients._fields == ("membership", "present")


@pytest.mark.slow
@pytest.mark.parametrize("mapping", [ONE, pytest.param(TWO, marks=needs_two)])
@pytest.mark.parametrize("at_a_time", [6, 40])
def test_others_join_some_at_a_time_what_numpy_makes_of_all(mapping, at_a_time):
    """Of numbers without groups, so that each linkage makes something else; nobody, one unheard, one with less."""
    rng, clients, features = np.random.default_rng(0), 39, 3
    sizes = np.where(np.arange(clients) == 5, 0, 2)
    data = ClientData(np.zeros((clients, 2, 2), np.float32), np.zeros((clients, 2), np.int32), sizes)
    population = parallel.place_population(data, DatasetInfo("rows", (2,), 2), mapping)
    counts, changes = rng.integers(2, 90, (clients, 2)), rng.normal(size=(clients, features)).astype(np.float32)
    vectors = rng.normal(size=(clients, 2, 2, 1)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=2, keepdims=True)
    vectors[7], counts[7] = 0, 0
    some, label, unheard = np.arange(0, clients, 2), rng.integers(0, 3, 20), 11
    given = changes.copy()
    given[unheard] = np.nan

    def measure(client):
        rows = (jnp.asarray(leaf)[client.index] for leaf in (vectors, counts, given))
        return Measured(*rows, client.index)

    sent = Sent(vectors[some], counts[some], changes[some], np.ones(20, bool))
    options = {"angles": "smallest", "delta": 0.5, "beta": 0.5}
    scales = by_landmarks.scales_of(jax.tree.map(jnp.asarray, sent), options)
    measured = list(zip(vectors, counts, [(change,) for change in changes], strict=True))
    membership, known = jax.nn.one_hot(label, 3), jnp.ones(20, bool)
    apart = landmarks.proximity(measured, some.tolist(), delta=0.5, beta=0.5)
    heard = (np.arange(clients) != unheard) & (sizes > 0)
    others = heard & ~np.isin(np.arange(clients), some)
    found = {}
    for kind in landmarks.REDUCTIONS:
        placed = functools.partial(by_landmarks.placed, scales, options, membership, known, kind)
        join = functools.partial(one_shot_landmarks.join, measure, placed=placed, at_a_time=at_a_time)
        joined, accepted = jax.jit(join)(population)[1:3]
        assert np.asarray(accepted)[:clients].tolist() == heard.tolist()
        assert joined.num_steps[:clients][heard].tolist() == np.flatnonzero(heard).tolist()
        there = sizes > 0  # what the unheard one sent was sent all the same
        assert joined.numbers[:clients][there].tolist() == np.where(np.arange(clients) != 7, 4, 0)[there].tolist()
        expected = np.asarray(landmarks.extend_labels(apart, some.tolist(), label.tolist(), kind))
        assert joined.slot[:clients][others].tolist() == expected[others].tolist()
        found[kind] = expected[others].tolist()
    near = np.asarray(by_landmarks.distances_to(scales, Measured(vectors, counts, changes, counts), options))
    np.testing.assert_allclose(near[others], apart[others], atol=1e-3)
    assert len({str(each) for each in found.values()}) == 3


@needs_two
@pytest.mark.slow
def test_landmarks_come_in_their_order_on_two_devices():
    algorithm, key = flag_by(5), run_keys(0).initialization
    state = [
        algorithm.init(key, parallel.place_population(lines(15).train, lines(15).info, mapping))[0]
        for mapping in (ONE, TWO)
    ]
    for one, two in zip(jax.tree.leaves(state[0].server), jax.tree.leaves(state[1].server), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-4)
    assert labels_of(state[0].clients.membership).tolist() == labels_of(state[1].clients.membership).tolist()[:15]


@pytest.mark.slow
def test_flag_by_landmarks_takes_newcomers_and_draws_its_matrices():
    federation = lines(15)
    algorithm = flag_by(7, clusters=3)
    churn = [Churn(1, leave=(0, 3, 4)), Churn(2, join=(3, 4))]
    result = simulate(algorithm, federation, rounds=3, churn=churn, mapping=ONE)
    known = result.labels >= 0
    assert known.sum() == 14
    assert adjusted_rand_index(result.labels[known], federation.group[known]) == 1.0
    drawn = flag_pictures.figures(result)
    assert {"dissimilarity_matrices", "dendrogram"} <= set(drawn)
    template, _ = algorithm.template(run_keys(0).initialization, place(federation))
    assert jax.tree.structure(template) == jax.tree.structure(result.state)
    assert [leaf.shape for leaf in jax.tree.leaves(template)] == [leaf.shape for leaf in jax.tree.leaves(result.state)]


@pytest.mark.slow
@pytest.mark.parametrize("left", [1, 0])
def test_who_comes_back_when_hardly_any_landmark_is_left(left):
    """Faults: scales of the landmarks that are left, two of which are neither near nor far; cluster 0 without any."""
    federation = lines(15)
    algorithm, population = flag_by(7, clusters=5), place(federation)
    state, _ = algorithm.init(run_keys(0).initialization, population)
    label = np.asarray(labels_of(state.clients.membership))
    landmarks = np.asarray(state.server.landmarks)
    last = int(label[landmarks].max())
    # One of the last cluster's and one of the first's stay, or nobody does.
    kept = [next(int(one) for one in landmarks if label[one] == cluster) for cluster in (0, last)] * left
    comes = next(one for one in range(15) if label[one] == last and one not in landmarks)
    gone = np.setdiff1d([*landmarks, comes], kept)
    gone = np.append(gone, np.flatnonzero(label == 0) if not left else []).astype(int)
    clients = state.clients
    clients = clients._replace(
        membership=clients.membership.at[gone].set(0.0), present=clients.present.at[gone].set(False)
    )
    data = jax.tree.map(lambda leaf: jnp.asarray(leaf)[comes], federation.train)
    found = algorithm.admit(jax.random.key(1), state._replace(clients=clients), data, jnp.asarray(comes))
    largest = int(np.argmax(np.asarray(clients.membership).sum(0)))
    assert int(labels_of(found.clients.membership)[comes]) == (last if left else largest)
    assert left or largest != 0
