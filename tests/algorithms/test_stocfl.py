"""StoCFL against its NumPy oracle, and what its clusters do."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_cluster import local, nn, parallel, tree
from fedjax_cluster.algorithms.round import labels, one_hot
from fedjax_cluster.algorithms.stocfl import merge, stocfl
from fedjax_cluster.simulation.loop import simulate
from fedjax_cluster.types import Churn, ClientData, State
from tests.algorithms.test_oracles import assert_models_equal, models_of, start_of
from tests.algorithms.test_personal import cohorts_of
from tests.federations import as_lists, blobs, one_step, play
from tests.reference import stocfl as reference

CLIENTS, RATE, STEPS = 9, 0.3, 2
OWN = local.sgd(RATE, batch_size=None, steps=STEPS)


def model_of(clusters):
    kernel, bias = (np.asarray(clusters.params["output"][part][0], np.float64) for part in ("kernel", "bias"))
    return kernel, bias


@pytest.mark.parametrize("weighting", [pytest.param("uniform", marks=pytest.mark.slow), "examples"])
@pytest.mark.parametrize(
    ("participation", "slots", "tau"),
    [
        pytest.param(1.0, 9, 0.5, marks=pytest.mark.slow),
        pytest.param(0.4, 9, 0.8, marks=pytest.mark.slow),
        (0.4, 4, 0.999),
    ],
)
def test_stocfl_is_its_public_code_with_means_over_all_that_were_heard(participation, slots, tau, weighting):
    """Clients of unequal sizes, part of them in a round, clusters that merge late, fewer slots than clusters."""
    federation, rounds = blobs(clients=CLIENTS, groups=3), 5
    algorithm = stocfl(
        nn.linear(), clusters=slots, local=OWN, tau=tau, proximal=0.7, anchor_epochs=3, participation=participation,
        weighting=weighting,
    )  # fmt: skip
    start, cohorts = models_of(start_of(algorithm, federation))[0], cohorts_of(algorithm, federation, rounds)
    state, reports = play(algorithm, federation, rounds)
    data = as_lists(federation)
    weight = {number: len(y) if weighting == "examples" else 1 for number, (_, y) in enumerate(data)}
    clusters, common, spared = reference.stocfl(
        start, data, cohorts, rate=RATE, steps=STEPS, proximal=0.7, tau=tau, slots=slots, anchor_steps=3, weight=weight
    )
    assert 1 < len(clusters) <= slots
    found, ours = np.asarray(labels(state.clients.membership))[:CLIENTS], models_of(state)
    assert state.clusters.active.sum() == len(clusters)
    for cluster in clusters:
        slot = cluster["slot"]
        assert np.flatnonzero(found == slot).tolist() == cluster["members"]
        assert_models_equal([ours[slot]], [cluster["model"]])
        shown = np.linalg.norm(cluster["shown"])
        assert float(np.linalg.norm(state.server.shown[slot])) == pytest.approx(shown, rel=1e-4)
    assert_models_equal([model_of(state.server.common)], [common])
    heard = set().union(*cohorts)
    assert set(np.flatnonzero(found < 0).tolist()) == set(range(CLIENTS)) - heard
    # Once an anchor and its movement, and in each round two models both ways; who holds a model is not sent it.
    sent = 2 * sum(map(len, cohorts)) + len(heard)
    assert sum(float(report.costs.models_up) for report in reports) == sent
    assert sum(float(report.costs.models_down) for report in reports) == sent - spared
    assert float(reports[0].costs.models_down) == len(cohorts[0])
    steps = 2 * STEPS * sum(map(len, cohorts)) + 3 * len(heard)
    assert sum(float(report.costs.gradient_evaluations) for report in reports) == steps


@pytest.mark.slow
def test_united_clusters_keep_the_model_of_the_larger_and_new_ones_take_what_is_free():
    # Slots 0 and 3 are linked by the client who comes first; slot 1 is free; slot 2 stays; the last client is alone.
    shown = jnp.asarray([[4.0, 0, 0], [0, 0, 0], [0, 0, 1], [3, 3.9, 0]])
    heard, members = jnp.asarray([2.0, 0, 1, 3]), jnp.asarray([2.0, 0, 1, 3])
    arrived, new = jnp.asarray([[2.0, 1, 0], [9, 9, 9], [0, -1, 0]]), jnp.asarray([True, False, True])
    index = jnp.arange(7, 10)
    found = merge(shown, heard, members, arrived, new, index, 0.85)
    assert found.moved.tolist() == [0, 1, 2, 0]
    assert found.slot.tolist() == [0, -1, 1]
    assert found.source.tolist() == [3, -1, 2, 3]  # slot 3 is in use no more, and keeps its own
    assert found.heard.tolist() == [6, 1, 1, 0]
    np.testing.assert_allclose(found.shown, [[9, 4.9, 0], [0, -1, 0], [0, 0, 1], [0, 0, 0]], rtol=1e-6)
    # New clusters are named by their smallest clients, in whatever order these come.
    for order in ([0, 1, 2], [2, 0, 1]):
        named = merge(
            shown * 0, heard * 0, members, jnp.eye(3)[jnp.asarray(order)], new | True, index[jnp.asarray(order)], 0.5
        )
        assert named.slot.tolist() == order
    # A cosine of −1 is no tie, but there are two slots only.
    few = merge(
        shown[:2], heard[:2], members[:2], jnp.asarray([[0.0, 1, 0], [0, -1, 0]]), new[:2] | True, index[:2], 0.5
    )
    assert len(set(few.slot.tolist()) | {0}) == 2


@pytest.mark.slow
def test_a_newcomer_joins_whom_it_is_like_and_the_unheard_are_given_the_common_model():
    federation = blobs(clients=CLIENTS, groups=3, rows=60)
    algorithm = stocfl(nn.linear(), clusters=6, local=OWN, tau=0.75, participation=0.4)
    state, _ = play(algorithm, federation, 1)
    state = jax.tree.map(jnp.asarray, state)
    found = labels(state.clients.membership)
    unheard = int(np.flatnonzero(np.asarray(found)[:CLIENTS] < 0)[0])
    client = jax.tree.map(lambda leaf: jnp.asarray(leaf[unheard]), federation.train)
    variables, _ = algorithm.personalize(jax.random.key(0), state, client, jnp.asarray(unheard))
    np.testing.assert_array_equal(variables.params["output"]["kernel"][0], model_of(state.server.common)[0])
    clients = state.clients._replace(present=state.clients.present.at[unheard].set(False))
    admitted = algorithm.admit(jax.random.key(1), state._replace(clients=clients), client, jnp.asarray(unheard))
    full = play(stocfl(nn.linear(), clusters=6, local=OWN, tau=0.75), federation, 1)[0]
    group = np.asarray(labels(full.clients.membership))[:CLIENTS]
    like = [other for other in range(CLIENTS) if found[other] >= 0 and group[other] == group[unheard]]
    slot = int(labels(admitted.clients.membership)[unheard])
    assert admitted.clusters.active[slot]
    assert {int(found[other]) for other in like} <= {slot}
    assert float(admitted.server.heard.sum()) == float(state.server.heard.sum()) + 1
    # A newcomer of nothing finite is of no cluster, and breaks none.
    broken = client._replace(x=client.x * jnp.nan)
    lost = algorithm.admit(jax.random.key(1), state._replace(clients=clients), broken, jnp.asarray(unheard))
    assert int(labels(lost.clients.membership)[unheard]) == -1
    assert np.isfinite(lost.server.shown).all()


@pytest.mark.slow
def test_groups_are_found_by_the_few_of_each_round():
    """Three groups of unequal clients, a third of them in a round; nobody is compared twice."""
    federation = blobs(clients=15, groups=3, rows=60)
    result = simulate(stocfl(nn.linear(), clusters=8, local=OWN, tau=0.75, participation=0.3), federation, rounds=12)
    assert result.history["adjusted_rand_index"][-1] == 1.0
    assert result.history["accuracy"][-1] > 0.9


@pytest.mark.slow
def test_who_moves_is_counted_in_the_round_or_not():
    """Two clusters that have become alike unite, beside a round of one of their four clients."""
    algorithm = stocfl(nn.linear(), clusters=4, local=OWN, participation=0.25)
    federation, slot = blobs(clients=4), jnp.array([0, 1, 0, 1])
    one = parallel.client_mapping("scan", devices=jax.devices()[:1])
    population = parallel.place_population(federation.train, federation.info, one)
    state, _ = algorithm.init(jax.random.key(0), population)
    clients = state.clients._replace(membership=one_hot(slot, 4), counted=(slot + 1).astype(jnp.int32))
    server = state.server._replace(shown=state.server.shown.at[:2, 0].set(2.0), heard=jnp.array([2.0, 2.0, 0.0, 0.0]))
    clusters = state.clusters._replace(active=jnp.array([True, True, False, False]))
    state = State(clusters, clients, server, jnp.int32(1))
    new, info = one_step(algorithm, population, state)
    assert int(info.num_clients.sum()) == 1
    assert np.asarray(labels(new.clients.membership)).tolist() == [0] * 4
    assert int(info.num_changed) == 2


@pytest.mark.slow
def test_movements_that_do_not_fit_into_memory_are_refused_before_anything_is_computed(monkeypatch):
    federation = blobs(clients=15, groups=3, rows=60)
    few = stocfl(nn.linear(), clusters=8, local=OWN, participation=0.3)
    size = tree.size(few.model.init(jax.random.key(0), federation.info).params)
    monkeypatch.setattr(parallel, "memory_left", lambda: 4 * 5 * (2 * size + 15))
    simulate(few, federation, rounds=1, progress=False)
    with pytest.raises(ValueError, match=r"movements of \d clients who are heard first, .* let fewer take part"):
        simulate(dataclasses.replace(few, participation=0.4), federation, rounds=1, progress=False)


@pytest.mark.slow
def test_clusters_are_compared_until_none_unite_and_again_when_somebody_comes():
    _, reports = play(
        stocfl(nn.linear(), clusters=6, local=OWN, tau=0.75), blobs(clients=CLIENTS, groups=3, rows=60), 6
    )
    looks = [float(report.costs.clusterings) for report in reports]
    assert looks[:2] == [1, 1]
    assert looks == sorted(looks, reverse=True)
    assert looks[-1] == 0


@pytest.mark.slow
def test_who_comes_back_is_counted_once_and_is_where_it_is_counted():
    """Everybody who left and returned was added to the mean Ψ of a cluster again; here clusters merge meanwhile."""
    federation, churn = blobs(clients=CLIENTS, groups=3, rows=60), []
    for at in (2, 6):
        churn += [Churn(at, leave=(0, 4)), Churn(at + 2, join=(0, 4))]
    algorithm = stocfl(nn.linear(), clusters=6, local=OWN, tau=0.75, participation=0.5)
    left = simulate(algorithm, federation, rounds=12, churn=churn, progress=False)
    stayed = simulate(algorithm, federation, rounds=12, progress=False)
    assert float(left.state.server.heard.sum()) == float(stayed.state.server.heard.sum()) == CLIENTS
    assert left.history["adjusted_rand_index"][-1] == 1.0
    for state in (left.state, stayed.state):
        slot = np.asarray(labels(state.clients.membership))
        np.testing.assert_array_equal(state.clients.counted, slot + 1)
        np.testing.assert_array_equal(np.bincount(slot[:CLIENTS], minlength=6), state.server.heard)


@pytest.mark.slow
def test_a_newcomer_moves_nobody_and_what_it_links_is_united_in_the_next_round():
    """It merged clusters although nobody trained afterwards: clients were left with the model of others."""
    federation = blobs(clients=CLIENTS, groups=3, rows=60)
    for slots in (8, 2):
        algorithm = stocfl(nn.linear(), clusters=slots, local=OWN, tau=0.5)
        state = jax.tree.map(jnp.asarray, play(algorithm, federation, 6)[0])
        before = labels(state.clients.membership)
        x, y, _ = federation.train
        x, y, _ = federation.train
        # Alike to several clusters at once, or to none: what one group has, seen from the other side.
        for foreign, those, sign in ((False, slice(0, 3), 1), (True, slice(0, 9, 3), -1)):
            rows = jnp.concatenate(list(sign * x[those])), jnp.concatenate(list(y[those]))
            data = ClientData(*rows, jnp.asarray(180))
            clients = state.clients
            clients = clients._replace(present=clients.present.at[8].set(False), counted=clients.counted.at[8].set(0))
            after = algorithm.admit(jax.random.key(1), state._replace(clients=clients), data, jnp.asarray(8))
            assert labels(after.clients.membership)[:8].tolist() == before[:8].tolist()
            kept = state.clusters.active
            for new, old in zip(jax.tree.leaves(after.clusters), jax.tree.leaves(state.clusters), strict=True):
                np.testing.assert_array_equal(new[kept], old[kept])
            slot = int(labels(after.clients.membership)[8])
            assert after.clusters.active[slot]
            assert bool(kept[slot]) != (foreign and slots == 8)
            assert float(after.server.heard.sum()) == float(state.server.heard.sum()) + 1
            assert not after.server.settled
