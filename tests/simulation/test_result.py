"""What a result tells of its clients, its models as files, and its one screen."""

import csv
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_cluster import local, nn, report
from fedjax_cluster.algorithms import fedavg, ifca
from fedjax_cluster.nn.losses import objective
from fedjax_cluster.simulation.client_files import write_clients
from fedjax_cluster.simulation.loop import simulate
from fedjax_cluster.simulation.many import simulate_many
from fedjax_cluster.simulation.model_files import save_clusters
from fedjax_cluster.types import Event, Model, UserFederation, Variables
from tests.federations import blobs


@pytest.fixture(scope="module")
def result():
    method = fedavg(nn.linear(), local=local.sgd(0.1, batch_size=8, steps=1))
    return simulate(method, blobs(), rounds=3, eval_every=1)


def test_the_clients_are_told_one_by_one(result):
    told = result.per_client
    federation = result.federation
    count = len(federation.train.num_examples)
    assert [np.shape(column) for column in told[:4]] == [(count,)] * 4
    assert all(isinstance(column, np.ndarray) for column in told[:4])
    assert list(told.metrics) == ["balanced_accuracy"]
    assert told.accuracy.mean() == pytest.approx(result.summary["accuracy"], abs=1e-6)
    assert told.loss.mean() == pytest.approx(result.summary["test_loss"], abs=1e-6)
    np.testing.assert_array_equal(told.examples, federation.train.num_examples)
    np.testing.assert_array_equal(told.cluster, result.labels)
    rows = federation.test.num_examples[2]
    predicted = result.predict(federation.test.x[2, :rows], client=2).argmax(-1)
    assert told.accuracy[2] == pytest.approx(np.mean(predicted == federation.test.y[2, :rows]), abs=1e-6)
    assert result.per_client is told, "evaluated once"


def largest(predictions, y, mask):
    return {"largest": np.float32(0) + predictions.max(where=mask[:, None], initial=0.0)}


@pytest.mark.parametrize("together", [None, False, pytest.param(True, marks=pytest.mark.slow)])
def test_metrics_of_ones_own_are_told_of_each_client_too(result, tmp_path, together):
    options = {"rounds": 3, "eval_every": 3, "metrics": [largest], "progress": False}
    if together is None:
        found = simulate(result.algorithm, result.federation, run_dir=tmp_path / "run", **options)
        read = simulate(result.algorithm, result.federation, run_dir=tmp_path / "run", **options)
        np.testing.assert_array_equal(read.per_client.metrics["largest"], found.per_client.metrics["largest"])
    else:
        found = simulate_many(result.algorithm, result.federation, seeds=(0, 1), together=together, **options).results[
            0
        ]
    told = found.per_client.metrics["largest"]
    assert list(found.per_client.metrics) == ["balanced_accuracy", "largest"]
    assert told.mean() == pytest.approx(found.history["largest"][-1], rel=1e-5)
    assert 0.1 < told.min() < told.max() <= 1.0
    with found.write_clients(tmp_path / "clients.csv").open() as file:
        assert [np.float32(row["largest"]) for row in csv.DictReader(file)] == told.tolist()


def test_a_metric_may_be_called_as_a_column_is(tmp_path):
    chunks = [(np.arange(2), {"cluster": np.asarray([7.0, 8.0]), "other": np.ones(2)})]
    file = write_clients(tmp_path / "clients.csv", {"cluster": np.asarray([3, 4])}, chunks)
    assert file.read_text().split() == ["client,cluster,cluster", "(metric),other", "0,3,7.0,1.0", "1,4,8.0,1.0"]


def test_assignments_are_those_of_events_and_the_last(result):
    count = len(result.labels)
    event = Event(0, {"labels": np.full(count + 1, 7)})  # with a row of padding
    before = dataclasses.replace(result, events=(event,))
    rounds, cluster = before.assignments
    assert rounds.tolist() == [1, 3]
    np.testing.assert_array_equal(cluster, [np.full(count, 7), result.labels])
    assert result.assignments.rounds.tolist() == [1, 3]


def test_the_repr_is_a_screen(result):
    lines = repr(result).splitlines()
    assert 8 < len(lines) <= 24
    assert max(map(len, lines)) <= 80
    assert "3 rounds" in lines[0]
    assert "test accuracy" in repr(result)
    assert "per_client" in repr(result)


def test_saved_models_are_read_without_the_package(result, tmp_path):
    numpy = pytest.importorskip("safetensors.numpy")
    from flax.traverse_util import unflatten_dict

    files = result.save_models(tmp_path / "models", clients=True)
    assert files[0] == tmp_path / "models" / "cluster0.safetensors"
    assert len(files) == 1 + len(result.labels)
    read = unflatten_dict(numpy.load_file(files[0]), sep="/")
    x = result.federation.test.x[0]
    outputs, _ = result.algorithm.model.apply(Variables(read["params"], read.get("stats", {})), x, train=False)
    expected = result.predict(x, client=0)
    np.testing.assert_allclose(result.algorithm.model.predict(outputs), expected, rtol=1e-5)
    own = unflatten_dict(numpy.load_file(files[1]), sep="/")
    np.testing.assert_array_equal(own["mixture"], [1.0])
    assert own["params"].keys() == read["params"].keys()


def test_a_parameters_shape_and_name_come_back(result, tmp_path):
    """A scalar came back as one of length 1, and a / in a name as a branch."""
    numpy = pytest.importorskip("safetensors.numpy")

    def saved(name):
        clusters = result.state.clusters._replace(params={"of": {name: np.ones(1)}}, stats={})
        return numpy.load_file(save_clusters(tmp_path, result.state._replace(clusters=clusters), [0], {})[0])

    assert saved("scale")["params/of/scale"].shape == ()
    with pytest.raises(ValueError, match="params → of → a/b has a / in a name"):
        saved("a/b")


def test_models_are_not_mixed_with_others(result, tmp_path):
    pytest.importorskip("safetensors.numpy")
    result.save_models(tmp_path)
    assert result.save_models(tmp_path) == [tmp_path / "cluster0.safetensors"]
    (tmp_path / "mine.safetensors").touch()
    result.save_models(tmp_path)
    (tmp_path / "cluster2.safetensors").touch()
    with pytest.raises(ValueError, match=r"holds cluster2\.safetensors, which would stay by them"):
        result.save_models(tmp_path)
    with pytest.raises(ValueError, match="is a file; give a folder"):
        result.save_models(tmp_path / "mine.safetensors")
    with pytest.raises(ValueError, match="folder is None"):
        result.save_models(None)


@pytest.mark.parametrize(
    ("client", "x", "said"),
    [
        (1.5, np.ones((1, 6)), "client is 1.5; it must be"),
        ("a", np.ones((1, 6)), "client is 'a'; it must be"),
        (True, np.ones((1, 6)), "client is True; it must be"),
        (99, np.ones((1, 6)), "client is 99; the federation has"),
        (0, np.full((1, 6), "a"), "x holds <U1; give rows of numbers"),
        (0, np.ones((1, 5)), "x has rows of shape"),
        (0, np.ones((1, 6), np.uint8), "x holds bytes, which models divide by 255, and the clients' x float32"),
    ],
)
def test_predictions_that_cannot_be_are_refused_in_a_line(result, client, x, said):
    with pytest.raises(ValueError, match=said):
        result.predict(x, client)


def test_a_user_is_asked_for_by_name(result):
    count = len(result.labels)
    users = np.array([f"user {i}" for i in range(count)])
    named = dataclasses.replace(result, federation=UserFederation.of(result.federation, users))
    x = result.federation.test.x[2]
    np.testing.assert_array_equal(named.predict(x, "user 2"), result.predict(x, 2))
    with pytest.raises(ValueError, match="client is 'Anna', which is no user's id; see user_ids"):
        named.predict(x, "Anna")


@pytest.mark.slow
def test_an_agreement_tells_of_how_many_clients_it_is():
    """With part of the clients in a round IFCA has an index of 1 by a few of them."""
    method = ifca(nn.linear(), clusters=2, local=local.sgd(0.1, batch_size=8, steps=1), participation=0.3)
    result = simulate(method, blobs(), rounds=1, progress=False)
    missing = int((result.labels < 0).sum())
    assert result.summary["num_unclustered"] == missing == 5
    assert report.tables.of_clustered(result.summary) == ", of 3 of 8 clients"
    assert report.tables.of_clustered({**result.summary, "num_unclustered": 0}) == ""
    assert ", of 3 of 8 clients" in repr(result)
    told = {**result.summary, "num_clusters": 2}
    shown = {name: remark for name, _, remark in report.headlines.main_figures(told)}
    assert shown["Agreement with groups"].endswith(", of 3 of 8 clients")
    assert ", of 3 of 8 clients" in report.headlines.lead(told, None)


@pytest.mark.slow
def test_parameters_in_lists_are_read_back_by_a_start_and_predictions_may_be_several(tmp_path):
    numpy, federation = pytest.importorskip("safetensors.numpy"), blobs()

    def init(rng_key, info):
        return Variables([{"w": jax.random.normal(rng_key, (6, 3))}, {"b": jnp.zeros(3)}], {})

    def apply(variables, x, *, train, rng_key=None):
        first, second = variables.params
        return {"logits": x @ first["w"] + second["b"][None], "value": x.sum(1)}, variables.stats

    own = objective("cross_entropy")
    model = Model(
        init,
        apply,
        lambda outputs, y: own.loss(outputs["logits"], y),
        lambda outputs: {"p": own.predict(outputs["logits"]), "value": outputs["value"]},
        lambda predictions, y, mask: own.metrics(predictions["p"], y, mask),
    )
    method = fedavg(model, local=local.sgd(0.1, batch_size=8, steps=1))
    result = simulate(method, federation, rounds=1, progress=False)
    arrays = numpy.load_file(result.save_models(tmp_path / "models")[0])
    start = model.init(jax.random.key(0), federation.info)
    params = jax.tree_util.tree_map_with_path(
        lambda place, _: arrays["params/" + jax.tree_util.keystr(place, simple=True, separator="/")], start.params
    )
    x = federation.test.x[0]
    outputs, _ = apply(Variables(params, {}), x, train=False)
    found = result.predict(x, 0)
    assert {name: type(part) for name, part in found.items()} == {"p": np.ndarray, "value": np.ndarray}
    np.testing.assert_allclose(found["p"], own.predict(outputs["logits"]), rtol=1e-5)
    np.testing.assert_allclose(found["value"], x.sum(1), rtol=1e-5)
