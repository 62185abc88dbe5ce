"""Runs on populations on disk are those in memory, bit by bit; what cannot stream says so."""

import csv
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from fedjax_cluster import cohorts, faults, local, nn, parallel
from fedjax_cluster.algorithms import REGISTRY, fedavg, fedgwc, ifca, starts
from fedjax_cluster.algorithms.round import check_square
from fedjax_cluster.data import in_memory, open_population, stored, write_population
from fedjax_cluster.experiments.config import RunConfig, build_federation
from fedjax_cluster.experiments.plans import plan
from fedjax_cluster.experiments.runs import run as carry_out
from fedjax_cluster.parallel import ahead
from fedjax_cluster.simulation import run, segment, streaming
from fedjax_cluster.simulation.history import summarize
from fedjax_cluster.simulation.identity import identity_of
from fedjax_cluster.simulation.loop import simulate
from fedjax_cluster.simulation.planning import check_lots
from fedjax_cluster.types import Churn
from tests.algorithms.test_fedgwc import build as hard_apart
from tests.algorithms.test_fedgwc import hard_and_easy
from tests.federations import blobs

SGD = local.sgd(0.1, batch_size=8, steps=2)
LIKE_IFCA = ("ifca", "cfl", "cfl_gp", "gradient_loss", "fedgwc", "fedem", "stocfl")
CLUSTERED = {name: {"clusters": 2} for name in LIKE_IFCA}
CLUSTERED["flexcfl"] = {"clusters": 2, "first_clients": 2}
CLUSTERED["fl_hc"] = {"clusters": 2, "warm_up": 2, "cluster_cohort": True}
# Where all clients are wanted at once.
NOT_STREAMED = {
    "fedsoft": "has all clients in its rounds",
    **dict.fromkeys(("fesem", "flag", "pacfl"), "wanted at once"),
}


@pytest.fixture(scope="module")
def population(tmp_path_factory):
    folder = tmp_path_factory.mktemp("population") / "p"
    return write_population(folder, blobs(clients=13), shard_megabytes=0.002)


@pytest.fixture(autouse=True)
def short_lots(monkeypatch):
    """Several lots in a run, and chunks that are not full."""
    monkeypatch.setattr(streaming, "MOST_ROUNDS", 3)
    monkeypatch.setattr(ahead, "MOST_IN_CHUNK", 4)


def method(name, **options):
    further = {"cfl_gp": {"cluster_cohort": True}}.get(name, {}) | CLUSTERED.get(name, {})
    return REGISTRY[name](nn.linear(), local=SGD, **({"participation": 0.4} | further | options))


def assert_same(one, other):
    for name in other.history:
        if name != "seconds":
            np.testing.assert_array_equal(one.history[name], other.history[name], err_msg=name)
    for a, b in zip(jax.tree.leaves(one.state), jax.tree.leaves(other.state), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_a_streamed_run_with_churn_is_that_in_memory(population):
    churn = [Churn(2, leave=(1, 4)), Churn(5, join=(6, 1))]
    options = {"rounds": 8, "eval_every": 3, "eval_clients": 5, "churn": churn, "progress": False}
    streamed = simulate(method("fedavg"), population, **options)
    assert_same(streamed, simulate(method("fedavg"), in_memory(population), **options))


@pytest.mark.slow
def test_starts_on_clients_and_clusters_are_those_in_memory(population, tmp_path):
    options = {"rounds": 5, "eval_every": 5, "progress": False}
    ours = method("ifca", start_rounds=2)
    streamed, resident = simulate(ours, population, **options), simulate(ours, in_memory(population), **options)
    assert_same(streamed, resident)
    jax.tree.map(np.testing.assert_array_equal, streamed.per_client, resident.per_client)
    with streamed.write_clients(tmp_path / "clients.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["client"]) for row in rows] == list(range(13))
    np.testing.assert_array_equal([np.float32(row["accuracy"]) for row in rows], resident.per_client.accuracy)
    np.testing.assert_array_equal([int(row["cluster"]) for row in rows], resident.labels)
    np.testing.assert_array_equal(
        streamed.predict(np.ones((2, 6), np.float32), 3), resident.predict(np.ones((2, 6), np.float32), 3)
    )


OF_WHAT_IS_SENT = {
    "fedavg": faults.drop_out(rate=0.5, share=0.5),
    "fedgwc": faults.stragglers(share=0.3),
    "ditto": faults.sign_flip(share=0.3),
    "cfl_gp": faults.scaled(share=0.2, factor=50.0),
    "ifca": faults.scaled(share=0.5, factor=-3.0),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_WHAT_IS_SENT)
def test_faults_of_what_is_sent_are_those_in_memory(population, tmp_path, name):
    options = {"eval_every": 4, "eval_clients": 9, "progress": False, "fault": OF_WHAT_IS_SENT[name]}
    # IFCA's start trains clients, chunk after chunk.
    one, other = method(name, **{"ifca": {"start_rounds": 2}}.get(name, {})), in_memory(population)
    resident = simulate(one, other, rounds=7, **options)
    assert_same(simulate(one, population, rounds=7, **options), resident)
    simulate(one, population, rounds=4, run_dir=tmp_path, **options)
    assert_same(simulate(one, population, rounds=7, run_dir=tmp_path, **options), resident)
    with pytest.raises(AssertionError):
        assert_same(simulate(one, population, rounds=7, **options | {"fault": None}), resident)


def test_the_faulty_of_a_population_are_those_of_its_clients_in_memory(population):
    marked = faults.afflicted(population, faults.drop_out(share=0.3), seed=1)
    there = faults.faulty_clients(marked)
    assert there.sum() == 4
    np.testing.assert_array_equal(faults.faulty_clients(in_memory(marked, [9, 0, 4, 12])), there[[9, 0, 4, 12]])


class draws_by_model(fedavg, abstract=True):
    """Draws other clients for other models."""

    def select(self, rng_key, state):
        total = sum(jnp.sum(leaf) for leaf in jax.tree.leaves(state.clusters.params))
        key = jax.random.fold_in(rng_key, jax.lax.bitcast_convert_type(total, jnp.uint32))
        return cohorts.uniform(key, state.clients.present, self.participation)


@pytest.mark.slow
def test_a_cohort_that_depends_on_rounds_is_drawn_when_its_round_comes(population):
    ours = draws_by_model(nn.linear(), local=SGD, participation=0.4)
    assert not ours.draws_ahead
    options = {"rounds": 4, "eval_every": 4, "progress": False}
    assert_same(simulate(ours, population, **options), simulate(ours, in_memory(population), **options))


@pytest.mark.slow  # compiles every method twice; others stand for them above
@pytest.mark.parametrize("name", [name for name in REGISTRY if name not in NOT_STREAMED])
def test_each_method_streams_as_in_memory(population, name):
    options = {"rounds": 7, "eval_every": 4, "progress": False}
    assert_same(simulate(method(name), population, **options), simulate(method(name), in_memory(population), **options))


@pytest.mark.slow
@pytest.mark.parametrize("landmarks", [pytest.param(None, marks=pytest.mark.slow), 8])
def test_cohorts_drawn_ahead_follow_clusters_that_split_in_between(tmp_path, monkeypatch, landmarks):
    """Who is seldom seen is drawn first, three rounds ahead; a split makes the rest of what was drawn another draw."""
    for module, constant in ((cohorts, "MANY"), (segment, "MOST_COMPARED"), (run, "MOST_COMPARED")):
        monkeypatch.setattr(module, constant, 20)
    monkeypatch.setattr(cohorts, "FEW", 1)
    hard = hard_and_easy(clients=24)
    folder = write_population(tmp_path / "p", hard, shard_megabytes=0.01)
    ours = hard_apart(clusters=3, participation=0.25, tolerance=0.02, patience=1, smallest=1, landmarks=landmarks)
    read = ahead.read_cohorts
    lots = []
    monkeypatch.setattr(streaming, "read_cohorts", lambda *given: lots.append(given[1]) or read(*given))
    options = {"rounds": 44, "eval_every": 22, "progress": False, "churn": [Churn(13, leave=(8, 17))]}
    streamed, resident = simulate(ours, folder, **options), simulate(ours, in_memory(folder), **options)
    assert_same(streamed, resident)
    split = [event.round for event in streamed.events if len(np.unique(event.content["labels"])) > 1]
    assert split
    assert any(number + 1 in lots and {number - 1, number} & set(lots) for number in split), (split, lots)


class draws_of_its_own(fedgwc, abstract=True):
    """As FedGWC, but everybody alike."""

    def select(self, rng_key, state):
        return cohorts.uniform(rng_key, state.clients.present, self.participation)


@pytest.mark.slow
def test_a_subclass_that_draws_otherwise_is_asked_itself(population):
    ours = draws_of_its_own(nn.linear(), local=SGD, clusters=2, participation=0.4)
    options = {"rounds": 4, "eval_every": 4, "progress": False}
    assert_same(simulate(ours, population, **options), simulate(ours, in_memory(population), **options))


@pytest.mark.slow
def test_the_clients_of_each_cluster_are_counted_anew_when_some_leave_and_join():
    churn = [Churn(1, leave=(2, 7)), Churn(3, join=(7,))]
    ours = hard_apart(landmarks=4, sampling="uniform")
    for rounds in (2, 4):
        state = simulate(ours, hard_and_easy(), rounds=rounds, churn=churn, progress=False).state
        expected = np.asarray(state.clients.membership).sum(0)
        assert expected.sum() == (10 if rounds == 2 else 11)
        np.testing.assert_array_equal(state.server.members, expected)


@pytest.fixture(scope="module")
def larger(tmp_path_factory):
    return write_population(tmp_path_factory.mktemp("larger") / "p", blobs(clients=70), shard_megabytes=0.01)


MANY = {"fedavg": {}, "ifca": {"start_rounds": 2}, "cfl_gp": {"landmarks": 3, "every": 1}, "fedgwc": {"landmarks": 3}}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in ("cfl_gp", "fedgwc"))) for name in MANY]
)
def test_many_clients_stream_as_in_memory(larger, monkeypatch, name):
    """Drawn without a random number for each, compared at evaluations alone, and a part of them asked for starts."""
    for module, constant in ((cohorts, "MANY"), (segment, "MOST_COMPARED"), (run, "MOST_COMPARED")):
        monkeypatch.setattr(module, constant, 20)
    monkeypatch.setattr(starts, "MOST_ASKED", 30)
    options = {"rounds": 8, "eval_every": 4, "progress": False, "churn": [Churn(3, leave=(2, 5))]}
    # A clustering round of CFL-GP has its three landmarks, and a cluster's cohort in FedGWC three clients at least.
    share = {"cfl_gp": 4 / 70, "fedgwc": 1 / 70}.get(name, 3 / 70)
    ours = method(name, participation=share, **MANY[name])
    streamed, resident = simulate(ours, larger, **options), simulate(ours, in_memory(larger), **options)
    assert_same(streamed, resident)
    known = np.isfinite(streamed.history["num_clusters"])
    assert np.flatnonzero(known).tolist() == [3, 7]
    assert streamed.history["num_clients"].max() <= 6


@pytest.mark.slow
def test_many_clients_are_compared_at_evaluations_and_events_alone(monkeypatch):
    """The same figures as of few clients, where there are any; also in a run that was left in between."""
    federation, options = blobs(clients=31), {"seed": 1, "eval_every": 4, "progress": False}
    ours = method("ifca", start_rounds=2)
    always = simulate(ours, federation, rounds=10, **options)
    for module in (segment, run):
        monkeypatch.setattr(module, "MOST_COMPARED", 20)
    seldom = simulate(ours, federation, rounds=10, **options)
    due = [3, 7, 9]
    for name in ("num_clusters", "adjusted_rand_index", "purity"):
        np.testing.assert_array_equal(seldom.history[name][due], always.history[name][due])
        assert np.isnan(np.delete(seldom.history[name], due)).all()
    assert seldom.summary["num_clusters"] == always.summary["num_clusters"]
    # As a run is told of that was interrupted after six rounds, or after two.
    for rounds, known in ((6, 3), (2, None)):
        cut = {name: column[:rounds] for name, column in seldom.history.items()}
        told = summarize(ours, federation, seldom.state, cut, 1, 0.0)
        assert told["num_clusters"] == (None if known is None else int(always.history["num_clusters"][known]))
        np.testing.assert_equal(told["adjusted_rand_index"], cut["adjusted_rand_index"][-1 if known is None else known])
    for a, b in zip(jax.tree.leaves(seldom.state), jax.tree.leaves(always.state), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("name", NOT_STREAMED)
def test_methods_that_want_all_rows_say_so_before_any_round(population, name):
    with pytest.raises(ValueError, match=NOT_STREAMED[name]) as error:
        simulate(method(name, clusters=2), population, rounds=2, progress=False)
    with pytest.raises(ValueError, match=NOT_STREAMED[name]):
        check_lots(method(name, clusters=2), population)
    assert "in_memory" in str(error.value)
    assert "\n" not in str(error.value)


class of_all(ifca, abstract=True):
    """As IFCA, with everybody in every round."""

    def select(self, rng_key, state):
        return cohorts.uniform(rng_key, state.clients.present, 1.0)


@pytest.mark.slow
def test_a_method_of_ones_own_is_told_apart_by_as_many_clients_as_it_takes(population, tmp_path):
    """Fault: the two clients by which a program was told apart were too few for its clusters, which the run said."""
    options = {"participation": 0.4, "clusters": 5}
    with pytest.raises(ValueError, match=r"of_all has all clients in its rounds.*in_memory"):
        simulate(of_all(nn.linear(), local=SGD, **options), population, rounds=1, run_dir=tmp_path, progress=False)
    with pytest.raises(ValueError, match="clusters is 14 but there are only 13 clients"):
        identity_of(of_all(nn.linear(), local=SGD, clusters=14), population, 0, 1, None, ())


def test_all_clients_in_a_round_are_refused(population, tmp_path):
    with pytest.raises(ValueError, match="participation below 1"):
        simulate(fedavg(nn.linear(), local=SGD), population, rounds=2, progress=False, run_dir=tmp_path / "r")
    assert not (tmp_path / "r").exists()  # and another run can have it
    with pytest.raises(ValueError, match=r"room for all 1\d clients here: give a smaller .* fewer clusters, each"):
        simulate(method("fedgwc", participation=0.6, clusters=4), population, rounds=2, progress=False)
    with pytest.raises(ValueError, match="whoever takes part, but with cluster_cohort=True; the rows"):
        simulate(method("cfl_gp", cluster_cohort=False), population, rounds=2, progress=False)
    with pytest.raises(ValueError, match="whoever takes part, but with fewer first_clients; the rows"):
        simulate(method("flexcfl", first_clients=7), population, rounds=2, progress=False)


def test_pairs_of_too_many_clients_are_refused(monkeypatch):
    monkeypatch.setattr(parallel, "memory_left", lambda: 4e10)
    check_square("cfl", 100_000)
    with pytest.raises(ValueError, match=r"40 GB, but 40 GB of this device are free; .* at most 100000 clients"):
        check_square("cfl", 100_001)


def test_an_interrupted_run_goes_on_as_if_it_had_not_been(population, tmp_path):
    whole = simulate(method("fedavg"), population, rounds=8, eval_every=3, eval_clients=5, progress=False)
    simulate(
        method("fedavg"), population, rounds=4, eval_every=3, eval_clients=5, run_dir=tmp_path / "r", progress=False
    )
    again = open_population(population.train.x.store.folder)
    options = {"rounds": 8, "eval_every": 3, "eval_clients": 5, "run_dir": tmp_path / "r", "progress": False}
    resumed = simulate(method("fedavg"), again, **options)
    np.testing.assert_array_equal(resumed.history["loss"], whole.history["loss"])
    for a, b in zip(jax.tree.leaves(resumed.state), jax.tree.leaves(whole.state), strict=True):
        np.testing.assert_array_equal(a, b)
    with pytest.raises(ValueError, match="data is"):
        simulate(method("fedavg"), in_memory(population, np.arange(13)[::-1]), **options)


def test_an_evaluation_alone_is_made_up_for(population, tmp_path):
    def stop(_):
        raise KeyboardInterrupt

    options = {"rounds": 3, "eval_every": 3, "progress": False}
    with pytest.raises(KeyboardInterrupt):
        simulate(method("fedavg"), population, run_dir=tmp_path, callbacks=[stop], checkpoint_every=0, **options)
    again = simulate(method("fedavg"), population, run_dir=tmp_path, **options)
    assert_same(again, simulate(method("fedavg"), population, **options))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fedavg", "ditto"])
def test_single_clients_are_read_for_their_predictions_and_models(population, tmp_path, name):
    found = simulate(method(name), population, rounds=2, progress=False)
    memory = in_memory(population)
    expected = simulate(method(name), memory, rounds=2, progress=False)
    for client in (0, 12):
        x = memory.test.x[client]
        np.testing.assert_array_equal(found.predict(x, client), expected.predict(x, client))
    files = found.save_models(tmp_path / "disk", clients=True)
    for one, other in zip(files, expected.save_models(tmp_path / "memory", clients=True), strict=True):
        np.testing.assert_equal(load_file(one), load_file(other))


def test_a_configuration_names_a_population(population, tmp_path):
    folder = str(population.train.x.store.folder)
    config = RunConfig(method="fedavg", model="linear", population=folder, participation=0.4, rounds=2)
    result = carry_out(config, run_dir=tmp_path / "run", progress=False)
    assert result.summary["scenario"] == population.info.name
    assert RunConfig.from_json(config.to_json()) == config
    with pytest.raises(ValueError, match="would take all clients in a round: give a participation below 1"):
        plan(dataclasses.replace(config, participation=1.0), tmp_path / "other")
    assert plan(config, tmp_path / "other").task() == "2 rounds"
    with pytest.raises(ValueError, match="clients is 5, but the population"):
        build_federation(RunConfig(population=folder, clients=5))
    for further in ({"scenario": "xor"}, {"dataset": "mnist"}, {"test_fraction": 0.5}):
        with pytest.raises(ValueError, match="give one of the two"):
            RunConfig.from_json({"population": folder, **further})


@pytest.mark.slow
def test_the_cheapest_wrong_way_is_not_taken(population, monkeypatch):
    """Rows of the whole population never reach the devices in one array."""
    largest = []
    own = stored.Store.read

    def read(store, part, clients):
        largest.append(len(clients))
        return own(store, part, clients)

    monkeypatch.setattr(stored.Store, "read", read)
    simulate(method("fedavg"), population, rounds=8, eval_every=3, progress=False)
    lot = 3 * 6  # three cohorts of ⌈0.4 · 13⌉
    assert set(largest) <= {1, 4, lot}, "a client for its shape, chunks of clients, and lots of cohorts"
    assert largest.count(lot) == 3


@pytest.mark.parametrize("part", ["train", "test"])
def test_other_counts_than_a_population_has_are_refused(population, part):
    """Its rows are read as they are, and a run is told apart by the population alone."""
    count = np.array(getattr(population, part).num_examples)
    count[0] = 0
    other = population._replace(**{part: getattr(population, part)._replace(num_examples=count)})
    with pytest.raises(ValueError, match=f"`num_examples` of '{part}' is not that of the population on disk"):
        simulate(method("fedavg"), other, rounds=1, progress=False)
