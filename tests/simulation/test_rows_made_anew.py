"""Rows on disk that are divided, changed or joined as they are read are those made in memory, bit by bit."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from fedjax_cluster import faults, local, nn
from fedjax_cluster.algorithms import REGISTRY, ifca
from fedjax_cluster.data import in_memory, on_devices, open_population, write_population
from fedjax_cluster.data.validation import check_federation
from fedjax_cluster.experiments import tuning
from fedjax_cluster.experiments.config import RunConfig
from fedjax_cluster.experiments.held_out import held_out
from fedjax_cluster.parallel import ahead
from fedjax_cluster.simulation import streaming
from fedjax_cluster.simulation.identity import fingerprint
from fedjax_cluster.simulation.loop import simulate
from tests.federations import blobs

SGD = local.sgd(0.1, batch_size=8, steps=2)
SHOWN = (
    faults.disguise(share=0.3, group=1),
    faults.schism(share=0.3),
    faults.infiltrators(share=0.3, group=1, joins=2),
)
OF_ROWS = (faults.label_flip(share=0.3), faults.colluders(share=0.3), *SHOWN)


@pytest.fixture(scope="module")
def population(tmp_path_factory):
    return write_population(tmp_path_factory.mktemp("population") / "p", blobs(clients=13), shard_megabytes=0.002)


@pytest.fixture(autouse=True)
def short_lots(monkeypatch):
    """Several lots in a run, and chunks that are not full."""
    monkeypatch.setattr(streaming, "MOST_ROUNDS", 3)
    monkeypatch.setattr(ahead, "MOST_IN_CHUNK", 4)


def method(name, **options):
    further = {"cfl_gp": {"cluster_cohort": True}, "ifca": {"start_rounds": 2}}.get(name, {})
    return REGISTRY[name](nn.linear(), local=SGD, **{"participation": 0.4, "clusters": 2} | further | options)


def assert_same(one, other):
    for name in other.history:
        if name != "seconds":
            np.testing.assert_array_equal(one.history[name], other.history[name], err_msg=name)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(one.state), jax.device_get(other.state))


def assert_equal_rows(on_disk, resident):
    """In memory, and taken out of order."""
    some = [9, 0, 4]
    for whole, rows in ((in_memory(on_disk), resident), (in_memory(on_disk, some), in_memory(resident, some))):
        assert jax.tree.structure(whole) == jax.tree.structure(rows)
        jax.tree.map(np.testing.assert_array_equal, whole, rows)


@pytest.mark.parametrize("fault", OF_ROWS, ids=lambda fault: type(fault).__name__)
def test_changed_rows_are_those_in_memory_and_are_held_out_alike(population, fault):
    marked, resident = (faults.afflicted(each, fault, seed=3) for each in (population, in_memory(population)))
    assert_equal_rows(marked, resident)
    assert_equal_rows(on_devices(marked), resident)
    own, shown = in_memory(population), in_memory(marked).train
    changed = shown if shown.shown is None else shown.shown
    assert any((np.asarray(a) != np.asarray(b)).any() for a, b in zip(own.train, changed, strict=False))
    assert_equal_rows(held_out(marked, seed=2), held_out(resident, seed=2))
    assert fingerprint(marked) == fingerprint(faults.afflicted(population, fault, seed=3))
    if fault.shows:  # what the clients train on is as it was
        assert fingerprint(marked) == fingerprint(population)
    else:
        assert fingerprint(marked) not in (fingerprint(population), fingerprint(faults.afflicted(population, fault, 4)))


def test_rows_that_are_held_out_are_no_training_rows(population):
    found, whole = held_out(population, seed=1), population.train
    assert found.train.num_examples.tolist() == [n - max(1, round(0.2 * n)) for n in whole.num_examples.tolist()]
    np.testing.assert_array_equal(np.add(found.train.num_examples, found.test.num_examples), whole.num_examples)
    for client in (0, 7):
        rows = [
            row.tobytes() for data in (found.train, found.test) for row in data.x[client][: data.num_examples[client]]
        ]
        assert sorted(rows) == sorted(row.tobytes() for row in whole.x[client][: whole.num_examples[client]])
    assert fingerprint(found) != fingerprint(held_out(population, seed=2))
    assert (found.test.x[0] != held_out(population, seed=2).test.x[0]).any()
    with pytest.raises(ValueError, match="validation rows are of a federation in memory"):
        held_out(population._replace(validation=in_memory(population).test), seed=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("ifca", OF_ROWS[0]),
        ("fedgwc", OF_ROWS[1]),
        ("ifca", OF_ROWS[2]),
        ("cfl_gp", OF_ROWS[2]),
        ("gradient_loss", OF_ROWS[3]),
        ("cfl_gp", OF_ROWS[4]),
    ],
)
def test_runs_with_faults_of_rows_are_those_in_memory(population, tmp_path, name, fault):
    options = {"eval_every": 4, "eval_clients": 9, "progress": False, "fault": fault, "seed": 1}
    one = method(name)
    resident = simulate(one, in_memory(population), rounds=7, **options)
    assert_same(simulate(one, population, rounds=7, **options), resident)
    assert_same(simulate(one, on_devices(population), rounds=7, **options), resident)
    simulate(one, population, rounds=4, run_dir=tmp_path, **options)
    assert_same(simulate(one, population, rounds=7, run_dir=tmp_path, **options), resident)


@pytest.mark.slow
@pytest.mark.parametrize("where", [lambda population: population, on_devices], ids=["streamed", "brought"])
def test_newcomers_are_admitted_as_in_memory(population, tmp_path, where):
    longer = blobs(clients=4, rows=30, seed=5)
    fault = {"fault": faults.sign_flip(share=0.2)}
    runs = [simulate(method("ifca"), each, rounds=4, progress=False, **fault) for each in
            (where(population), in_memory(population))]  # fmt: skip
    written = write_population(tmp_path / "newcomers", longer)
    for new in (longer, written):
        found = [each.admit(new) for each in runs]
        assert_equal_rows(found[0].federation, found[1].federation)
        np.testing.assert_array_equal(found[0].labels, found[1].labels)
        jax.tree.map(np.testing.assert_array_equal, found[0].per_client, found[1].per_client)
        np.testing.assert_array_equal(*(each.predict(np.ones((2, 6), np.float32), 15) for each in found))
    assert fingerprint(found[0].federation) != fingerprint(runs[0].federation)


@pytest.mark.slow
def test_a_rate_is_chosen_for_clients_on_disk_as_in_memory(population, tmp_path):
    config = RunConfig(method="ifca", clusters=2, rounds=6, model="linear", participation=0.4, fault="label_flip")
    there = dataclasses.replace(config, population=str(population.train.x.store.folder))
    found = [
        tuning.tuned(there, directory=tmp_path / "runs", progress=False),
        tuning.tuned(dataclasses.replace(config, clients=13), federation=in_memory(population), progress=False),
    ]
    assert found[0].learning_rate == found[1].learning_rate
    assert found[0].tuning["figures"] == found[1].tuning["figures"]
    assert json.loads((tmp_path / "runs" / "tuning.json").read_text())


@pytest.mark.slow
def test_each_part_is_read_from_where_it_is(population, tmp_path):
    """All were tested on the training part's files."""
    mirrored = in_memory(population)
    mirrored = mirrored._replace(test=mirrored.test._replace(y=2 - mirrored.test.y))
    other = write_population(tmp_path / "other", mirrored._replace(group=None))
    mixed = population._replace(test=other.test)
    assert fingerprint(mixed) not in (fingerprint(population), fingerprint(other))
    np.testing.assert_array_equal(on_devices(mixed).test.y[3], other.test.y[3])
    options = {"rounds": 2, "progress": False}
    accuracy = simulate(method("ifca"), mixed, **options).per_client.accuracy
    np.testing.assert_array_equal(accuracy, simulate(method("ifca"), mirrored, **options).per_client.accuracy)
    with pytest.raises(ValueError, match="of one part are on disk, and those of the other in memory"):
        check_federation(population._replace(test=mirrored.test))


@pytest.mark.slow
def test_other_groups_are_another_experiment(population, tmp_path):
    """A run directory gave back the purity of the groups before."""
    assert fingerprint(open_population(population.train.x.store.folder)) == fingerprint(population)
    options = {"rounds": 1, "progress": False, "run_dir": tmp_path}
    one = ifca(nn.linear(), clusters=2, local=SGD, participation=0.4)
    simulate(one, population, **options)
    with pytest.raises(ValueError, match="belongs to another experiment: data is"):
        simulate(one, population._replace(group=np.arange(13, dtype=np.int32)), **options)
