"""PACFL by landmark clients: with everybody as landmark the exact one, with fewer what NumPy makes of them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_cluster import clustering, nn, parallel, privacy
from fedjax_cluster.algorithms import one_shot_landmarks
from fedjax_cluster.algorithms import pacfl as by_method
from fedjax_cluster.algorithms.round import labels as labels_of
from fedjax_cluster.clustering.scores import adjusted_rand_index
from fedjax_cluster.report.methods import flag as pictures
from fedjax_cluster.simulation.loop import simulate
from fedjax_cluster.simulation.segment import run_keys
from fedjax_cluster.types import Churn
from tests.devices import needs_two
from tests.directions import FULL, LIGHT, lines, place
from tests.federations import as_lists
from tests.reference import flag as reference
from tests.reference import landmarks, linkage

ONE = parallel.client_mapping("scan", devices=jax.devices()[:1])
TWO = parallel.client_mapping("chunked", 2, devices=jax.devices()[:2])
KEY = run_keys(0).initialization
slow = functools.partial(pytest.param, marks=pytest.mark.slow)


def pacfl_by(number=None, threshold=14.0, **options):
    arguments = {"clusters": 5, "local": FULL, "threshold": threshold, "landmarks": number}
    return by_method(nn.linear(), **{**arguments, **options})


@pytest.mark.slow
@pytest.mark.parametrize("threshold", [None, "search"])
def test_everybody_is_the_exact_method(threshold):
    few = {"search_rounds": 1, "search_epochs": 1, "light_model": LIGHT} if threshold else {}
    exact, told = pacfl_by(None, threshold, **few).init(KEY, place(lines()))
    ours, same = pacfl_by(9, threshold, **few).init(KEY, place(lines()))
    assert labels_of(exact.clients.membership).tolist() == labels_of(ours.clients.membership).tolist()
    assert ours.server.landmarks.tolist() == list(range(9))
    for one, other in zip(jax.tree.leaves(exact.server), jax.tree.leaves(ours.server[:3]), strict=True):
        np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(exact.clients.vectors, ours.server.vectors)
    timed = jnp.zeros(())
    assert told.costs._replace(clustering_seconds=timed) == same.costs._replace(clustering_seconds=timed)


@pytest.mark.parametrize(("method", "threshold"), [("average", 33.0), slow("single", 25.0), slow("complete", 40.0)])
@pytest.mark.parametrize("at_a_time", [4, slow(128)])
def test_some_are_merged_and_others_join_the_nearest(method, threshold, at_a_time, monkeypatch):
    """Clients of fifteen directions, so that a linkage that measures otherwise puts them elsewhere."""
    monkeypatch.setattr(one_shot_landmarks, "MOST_JOINED", at_a_time)
    federation = lines(15, groups=15)
    state, info = pacfl_by(7, threshold, linkage=method).init(KEY, place(federation))
    chosen = state.server.landmarks.tolist()
    angles = reference.pacfl_angles(as_lists(federation), num_classes=3, rank=1)[:, chosen]
    np.testing.assert_allclose(state.server.angles, angles[chosen], atol=0.1)
    clusters = linkage.agglomerative(angles[chosen], method, threshold)
    assert len(clusters) == 4
    own = reference.as_labels(clusters, 7).tolist()
    expected = landmarks.extend_labels(angles, chosen, own, method)
    assert labels_of(state.clients.membership).tolist() == expected
    assert state.clients._fields == ("membership", "present")
    # Each client's three vectors of ten numbers, of a model of 33.
    assert float(info.costs.models_up) == pytest.approx(15 * 30 / 33)


@pytest.mark.slow
def test_who_is_absent_or_unheard_is_nobodys_neighbour():
    """An absent client is in no cluster; one of infinite rows in the largest, and compared with nobody as landmark."""
    federation = lines(15)
    x = np.array(federation.train.x)
    chosen = np.asarray(pacfl_by(7).init(KEY, place(federation))[0].server.landmarks)
    others = np.setdiff1d(np.arange(15), chosen)
    x[[chosen[2], others[1]]] = np.inf
    count = np.array(federation.train.num_examples)
    count[others[0]] = 0
    given = federation._replace(train=federation.train._replace(x=x, num_examples=count))
    state, info = pacfl_by(7).init(KEY, place(given))
    found = np.asarray(labels_of(state.clients.membership))
    assert state.server.landmarks.tolist() == chosen.tolist()
    assert state.server.known.tolist() == [place != 2 for place in range(7)]
    assert found[others[0]] == -1
    assert int(info.num_rejected) == 2
    heard = np.setdiff1d(np.arange(15), [others[0], others[1], chosen[2]])
    assert adjusted_rand_index(found[heard], federation.group[heard]) == 1.0
    assert found[chosen[2]] == found[others[1]] == np.bincount(found[heard]).argmax()


@needs_two
def test_landmarks_that_one_device_has_no_room_for_come_in_their_order():
    """Of seven, six are where the first half of the clients is, of whom each device measures four."""
    chosen = jnp.asarray([0, 1, 2, 3, 5, 6, 12])
    federation = lines(15, groups=15)
    one, two = (
        pacfl_by(7).measure_all(KEY, parallel.place_population(federation.train, federation.info, mapping), chosen)
        for mapping in (ONE, TWO)
    )
    np.testing.assert_allclose(np.abs(one.collected), np.abs(two.collected), atol=1e-4)


@needs_two
@pytest.mark.slow
def test_two_devices_give_the_same_clusters():
    """Of clients in 15 directions, whom only distances put somewhere."""
    federation = lines(15, groups=15)
    one, two = (
        pacfl_by(7, 33.0).init(KEY, parallel.place_population(federation.train, federation.info, mapping))[0]
        for mapping in (ONE, TWO)
    )
    for leaf, other in zip(jax.tree.leaves(one.server), jax.tree.leaves(two.server), strict=True):
        np.testing.assert_allclose(leaf, other, rtol=1e-4, atol=1e-2)
    assert labels_of(one.clients.membership).tolist() == labels_of(two.clients.membership).tolist()[:15]


@pytest.mark.slow
def test_newcomers_join_and_pictures_are_of_landmarks():
    federation = lines(15)
    algorithm = pacfl_by(7)
    churn = [Churn(1, leave=(0, 3, 4)), Churn(2, join=(3, 4))]
    result = simulate(algorithm, federation, rounds=3, churn=churn, mapping=ONE)
    known = result.labels >= 0
    assert known.sum() == 14
    assert adjusted_rand_index(result.labels[known], federation.group[known]) == 1.0
    assert result.events[0].content["landmarks"].tolist() == result.state.server.landmarks.tolist()
    assert set(pictures.figures(result)) == {"dendrogram"}


@pytest.mark.slow
def test_a_server_sees_noise_of_landmarks_and_others():
    """As without landmarks, and to the same numbers: noise is each client's own."""
    loud = privacy.gaussian(
        clip=1.0, noise_multiplier=1.0, delta=1e-5, clustering_clip=1.0, clustering_noise_multiplier=1e4
    )
    exact, some = (pacfl_by(number, None, privacy=loud, clusters=8).init(KEY, place(lines())) for number in (None, 5))
    shown, server = np.asarray(exact[0].clients.vectors), some[0].server
    assert np.asarray(server.vectors).std() == pytest.approx(2e4, rel=0.25)
    np.testing.assert_array_equal(shown[np.asarray(server.landmarks)], server.vectors)
    between = np.degrees(np.arccos(np.clip(largest_cosines(shown), 0, 1)))[:, np.asarray(server.landmarks)]
    own = np.asarray(clustering.agglomerative(np.asarray(server.angles), threshold=float(server.threshold))).tolist()
    expected = landmarks.extend_labels(between, server.landmarks.tolist(), own, "average")
    assert labels_of(some[0].clients.membership).tolist() == expected


def largest_cosines(shown):
    """Between what the clients' vectors [M, L, f, p] span."""
    spans = [np.linalg.qr(np.concatenate(list(own), axis=1).astype(np.float64))[0] for own in shown]
    return np.array([[np.linalg.norm(one.T @ other, 2) for other in spans] for one in spans])
