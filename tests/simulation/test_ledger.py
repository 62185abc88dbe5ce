"""How often the server clustered, and the time it took: counts done by hand, and what is timed is what a round does."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_cluster import clustering, local, nn, parallel
from fedjax_cluster.algorithms import cfl, cfl_gp, fedavg, fedgwc, fesem, flag, pacfl
from fedjax_cluster.algorithms.round import labels
from fedjax_cluster.local import server_key
from fedjax_cluster.simulation.loop import simulate
from fedjax_cluster.simulation.segment import run_keys
from tests.federations import blobs, play

FULL = local.sgd(0.3, batch_size=None, steps=2)
BATCHES = local.sgd(0.3, batch_size=5, steps=2)


@functools.cache
def gradient_profiles(**options):
    return cfl_gp(nn.linear(), clusters=2, local=BATCHES, **options)


def bipartition():
    return cfl(nn.linear(), clusters=4, local=FULL, epsilon_1=0.3, epsilon_2=0.3, gamma_max=0.5, first_round=4)


def counts(algorithm, federation=None, rounds=6):
    """Of the rounds' own reports; `simulate` adds those of `init` to the first."""
    _, reports = play(algorithm, blobs() if federation is None else federation, rounds)
    return [float(report.costs.clusterings) for report in reports]


@pytest.mark.slow
def test_cfl_gp_clusters_in_its_clustering_rounds_until_it_stops():
    assert counts(gradient_profiles()) == [0, 1, 0, 1, 0, 1]
    assert counts(gradient_profiles(every=3)) == [0, 1, 0, 0, 1, 0]
    assert counts(gradient_profiles(every=1, cluster_until=3)) == [1, 1, 1, 0, 0, 0]
    result = simulate(gradient_profiles(every=1, stop_after=2), blobs(), rounds=12, eval_every=12)
    last = result.summary["first_round_of_final_clustering"] + 2
    assert result.history["clusterings"].tolist() == [1] * (last + 1) + [0] * (11 - last)


@pytest.mark.slow
def test_the_pilot_that_estimates_the_number_of_clusters_is_counted():
    algorithm = cfl_gp(nn.linear(), clusters="auto", local=BATCHES, max_clusters=3, pilot_rounds=5)
    found = simulate(algorithm, blobs(), rounds=4, eval_every=4).history["clusterings"]
    assert found.tolist() == [2, 1, 0, 1]  # the pilot clusters in its rounds 1 and 3


@pytest.mark.slow
def test_cfl_clusters_once_for_each_cluster_that_meets_the_criteria():
    """Not before its first round; every split has been tested, and a refused one is tested again in each round."""
    federation = blobs(clients=12, groups=3)
    result = simulate(bipartition(), federation, rounds=16, eval_every=16)
    tested, grown = result.history["clusterings"], np.diff(result.history["num_clusters"], prepend=1)
    assert not tested[:4].any()
    assert (tested >= grown).all()
    assert grown.sum() == 2
    assert tested[result.history["event"] == 1].min() >= 1
    never = cfl(nn.linear(), clusters=4, local=FULL, epsilon_1=0.0, epsilon_2=0.3, gamma_max=0.0, first_round=4)
    assert counts(never, federation, rounds=8) == [0] * 8
    # One cluster of everybody that always meets them, and finds no slot.
    always = cfl(nn.linear(), clusters=1, local=FULL, epsilon_1=1e9, epsilon_2=0.0, gamma_max=0.0, first_round=2)
    assert counts(always, federation, rounds=5) == [0, 0, 1, 1, 1]


@pytest.mark.slow
def test_fedgwc_clusters_where_a_cluster_has_come_to_rest():
    """A tolerance that all averages are below: after `patience` rounds, again and again, as one test restarts it."""
    options = {"tolerance": 10.0, "patience": 2, "max_children": 2, "participation": 0.5, "smallest": 4}
    algorithm = fedgwc(nn.linear(), clusters=1, local=FULL, **options)
    assert counts(algorithm) == [0, 1, 0, 1, 0, 1]
    assert counts(fedgwc(nn.linear(), clusters=2, local=FULL, participation=1.0, tolerance=10.0)) == [0] * 6


@pytest.mark.slow
@pytest.mark.parametrize("start", ["random", "clients"])
def test_fesem_clusters_in_every_round_and_at_a_start_from_clients(start):
    algorithm = fesem(nn.linear(), clusters=2, local=BATCHES, start=start, participation=0.5)
    found = simulate(algorithm, blobs(), rounds=3, eval_every=3).history["clusterings"]
    assert found.tolist() == [1 + (start == "clients"), 1, 1]


@pytest.mark.parametrize("factory", [flag, pacfl])
@pytest.mark.slow
def test_one_shot_methods_cluster_once_and_measure_it_themselves(factory):
    options = {"threshold": 0.5, "gradient_epochs": 1} if factory is flag else {"threshold": 40.0}
    algorithm = factory(nn.linear(), clusters=8, local=BATCHES, **options)
    assert algorithm.cluster is None
    result = simulate(algorithm, blobs(), rounds=3, time_clustering=True)
    assert result.history["clusterings"].tolist() == [1, 0, 0]
    seconds = result.history["clustering_seconds"]
    # Eight clients: no compilation can hide in so little time.
    assert 0 < seconds[0] < 0.2
    assert seconds[1:].tolist() == [0, 0]
    assert result.summary["seconds_per_clustering"] == result.summary["clustering_seconds"] == seconds[0]


@pytest.mark.slow
def test_a_server_that_never_clusters_has_no_time_for_it():
    algorithm = fedavg(nn.linear(), local=BATCHES)
    result = simulate(algorithm, blobs(), rounds=3, eval_every=3, time_clustering=True)
    assert not result.history["clusterings"].any()
    assert "clustering_seconds" not in result.history
    assert result.summary["clusterings"] == result.summary["clustering_seconds"] == 0
    assert result.summary["seconds_per_clustering"] is None


# ------------------------------------------------------------------------------------------ what is timed


@pytest.mark.slow
@pytest.mark.parametrize("devices", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("rounds", [2, pytest.param(6, marks=pytest.mark.slow)])
def test_cfl_gp_is_timed_at_what_its_round_did(rounds, devices):
    """With the round's own key, the timed function finds the labels that the round left."""
    mapping = parallel.client_mapping("scan", devices=jax.devices()[:devices])
    algorithm = gradient_profiles()
    result = simulate(algorithm, blobs(), rounds=rounds, eval_every=rounds, mapping=mapping)
    assert result.history["clusterings"][-1] == 1
    key = server_key(jax.random.fold_in(run_keys(0).local, rounds - 1))
    found = jax.jit(functools.partial(algorithm.cluster, mapping=mapping))(key, result.state)
    assert found.tolist()[:8] == result.labels.tolist()
    # From another assignment it finds the same groups: it has looked at the profiles.
    turned = result.state.clients._replace(membership=jnp.roll(result.state.clients.membership, 3, axis=0))
    again = jax.jit(algorithm.cluster)(key, result.state._replace(clients=turned))
    assert float(clustering.scores.adjusted_rand_index(again[:8], jnp.asarray(result.labels))) == 1


def test_cfl_is_timed_at_what_its_round_did():
    """On the state before the first split, with the updates of that round, it finds that split."""
    algorithm, federation = bipartition(), blobs(clients=12, groups=3)
    result = simulate(algorithm, federation, rounds=16, eval_every=16)
    first = next(event for event in result.events if len(event.content["parent"]))
    state = simulate(algorithm, federation, rounds=first.round + 1, eval_every=50).state
    # The round's updates are in the state still; all are put back into one cluster, and the slots are free again.
    weights = jax.nn.one_hot(jnp.zeros(12, jnp.int32), 4)
    back = state._replace(
        clients=state.clients._replace(membership=weights),
        clusters=state.clusters._replace(active=jnp.arange(4) == 0),
        server=state.server._replace(splits=state.server.splits._replace(parent=jnp.full(3, -1, jnp.int32))),
    )
    found = algorithm.cluster(jax.random.key(0), back)
    side = first.content["side"][:, 0]
    assert found.tolist() == np.where(side == 1, first.content["child"][0], 0).tolist()


@pytest.mark.slow
def test_fedgwc_is_timed_at_what_its_round_did():
    """With the round's key, on the interactions that it left, it finds the labels of the split."""
    algorithm = fedgwc(
        **{"model": nn.linear(), "clusters": 2, "local": FULL, "rate": "participation", "participation": 0.75},
        **{"tolerance": 10.0, "patience": 20, "max_children": 2, "beta": 4.0},
    )
    federation, rounds = blobs(clients=12), 20
    before = simulate(algorithm, federation, rounds=rounds - 1, eval_every=50).state
    result = simulate(algorithm, federation, rounds=rounds, eval_every=50)
    assert result.history["clusterings"].tolist() == [0] * 19 + [1]
    calm = before.server.calm
    state = result.state._replace(
        clusters=before.clusters, clients=before.clients, server=result.state.server._replace(calm=calm.at[0].set(20))
    )
    key = server_key(jax.random.fold_in(run_keys(0).local, rounds - 1))
    found = algorithm.cluster(key, state)
    parts = labels(result.state.clients.membership)
    # Which child keeps the slot is the split's business: the larger.
    assert len(set(zip(found.tolist(), parts.tolist(), strict=True))) == 2
    assert len(set(found.tolist())) == len(set(parts.tolist())) == 2


@pytest.mark.slow
def test_fesem_is_timed_on_one_cohort():
    algorithm = fesem(nn.linear(), clusters=2, local=BATCHES, participation=0.5)
    result = simulate(algorithm, blobs(), rounds=3, eval_every=3)
    # Every client's model is its centre here, which is nearest to itself.
    assert algorithm.cluster(jax.random.key(0), result.state).tolist()[:8] == result.labels.tolist()
    moved = result.state._replace(clusters=result.state.clusters._replace(active=jnp.asarray([True, False])))
    chosen = algorithm.select(jax.random.key(0), moved).index
    expected = np.asarray(labels(moved.clients.membership)).copy()
    expected[np.asarray(chosen)] = 0
    assert algorithm.cluster(jax.random.key(0), moved).tolist() == expected.tolist()


# --------------------------------------------------------------------------------------------- the ledger


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(gradient_profiles, marks=pytest.mark.slow),
        bipartition,
        lambda: fesem(nn.linear(), clusters=2, local=BATCHES),
    ],
    ids=["cfl_gp", "cfl", "fesem"],
)
def test_a_round_takes_its_clusterings_times_the_time_of_one(make):
    result = simulate(make(), blobs(clients=12, groups=3), rounds=12, eval_every=12, time_clustering=True)
    seconds, summary = result.history["clustering_seconds"], result.summary
    assert np.isfinite(seconds).all()
    assert 0 < summary["seconds_per_clustering"] < 1
    np.testing.assert_allclose(seconds, result.history["clusterings"] * summary["seconds_per_clustering"])
    assert summary["clusterings"] == result.history["clusterings"].sum() > 0
    assert summary["clustering_seconds"] == pytest.approx(seconds.sum())


@pytest.mark.slow
def test_without_being_asked_nothing_is_timed_and_the_summary_says_so():
    result = simulate(gradient_profiles(), blobs(), rounds=4, eval_every=4)
    assert "clustering_seconds" not in result.history
    assert result.summary["clusterings"] == 2
    assert result.summary["clustering_seconds"] is None


@pytest.mark.slow
def test_a_resumed_run_times_again_and_takes_up_older_ones(tmp_path):
    """Extended with and without timing."""
    simulate(gradient_profiles(), blobs(), rounds=4, eval_every=4, run_dir=tmp_path / "run", time_clustering=True)
    longer = simulate(gradient_profiles(), blobs(), rounds=8, eval_every=4, run_dir=tmp_path / "run")
    assert np.isnan(longer.history["clustering_seconds"][4:]).all()
    assert longer.summary["clustering_seconds"] is longer.summary["seconds_per_clustering"] is None
    again = simulate(
        gradient_profiles(), blobs(), rounds=12, eval_every=4, run_dir=tmp_path / "run", time_clustering=True
    )
    seconds = again.history["clustering_seconds"]
    np.testing.assert_allclose(seconds, again.history["clusterings"] * again.summary["seconds_per_clustering"])
    assert again.summary["clusterings"] == 6
    kept = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert kept["clustering_seconds"] == pytest.approx(seconds.sum())


def test_a_run_that_is_taken_up_knows_what_clustering_took_at_its_start(tmp_path):
    """Interrupted before its end, at which methods that cluster in rounds are timed."""
    method, stop = pacfl(nn.linear(), clusters=8, local=BATCHES, threshold=40.0), []

    def interrupt(evaluation):
        if not stop:
            stop.append(evaluation.round)
            raise KeyboardInterrupt

    options = {"rounds": 4, "eval_every": 1, "run_dir": tmp_path / "run", "time_clustering": True}
    options |= {"checkpoint_every": 0, "progress": False, "callbacks": [interrupt]}
    with pytest.raises(KeyboardInterrupt):
        simulate(method, blobs(), **options)
    whole = simulate(method, blobs(), **options)
    assert whole.history["clustering_seconds"][1:].tolist() == [0, 0, 0]
    assert whole.summary["clustering_seconds"] == whole.history["clustering_seconds"][0] > 0
