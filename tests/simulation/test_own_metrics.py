"""Metrics of one's own are given what they compare in one shape, and told what they cannot do."""

import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_cluster import local, nn, simulate
from fedjax_cluster.algorithms import fedavg
from fedjax_cluster.data import from_arrays
from tests.federations import blobs

LOCAL = local.sgd(0.1, batch_size=8, steps=1)
METHOD = fedavg(nn.linear(), local=LOCAL)


def mae(predictions, y, mask):
    error = jnp.abs(predictions - y.astype(jnp.float32)).T  # of several numbers too the rows are last
    return {"mae": jnp.mean(error, where=mask)}


@pytest.mark.parametrize("outputs", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_predictions_of_numbers_have_the_shape_of_their_targets(outputs):
    """[N, 1] less [N] was [N, N], and its mean a number like any other."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, 4)).astype(np.float32)
    y = (x @ rng.normal(size=(4, outputs))).astype(np.float32)
    federation = from_arrays(x, y[:, 0] if outputs == 1 else y, np.arange(60) % 4)
    method = fedavg(nn.linear(num_outputs=outputs, loss="mse"), local=LOCAL)
    result = simulate(method, federation, rounds=1, metrics=[mae], progress=False)
    test, told = federation.test, result.per_client.metrics["mae"]
    for client in range(4):
        count = test.num_examples[client]
        found = np.asarray(result.predict(test.x[client, :count], client)).reshape(test.y[client, :count].shape)
        assert told[client] == pytest.approx(np.abs(found - test.y[client, :count]).mean(), rel=1e-5)


@pytest.mark.parametrize("number", [float, np.asarray, bool], ids=["float", "numpy", "if"])
def test_a_metric_that_needs_values_is_named(number):
    def own(predictions, y, mask):
        return {"own": jnp.asarray(number(predictions.mean()))}

    with pytest.raises(ValueError, match=r"^the metric own makes numbers of arrays that have no values yet"):
        simulate(METHOD, blobs(), rounds=1, metrics=[own], progress=False)


def test_whole_numbers_to_predict_are_no_classes():
    x = np.arange(48.0, dtype=np.float32).reshape(24, 2)
    federation = from_arrays(x, np.arange(24), np.arange(24) % 4, task="regression")
    method = fedavg(nn.linear(num_outputs=1, loss="mse"), local=local.sgd(1e-6, batch_size=8, steps=1))
    result = simulate(method, federation, rounds=1, metrics=[mae], progress=False)
    count = federation.test.num_examples[1]
    found = result.predict(federation.test.x[1, :count], 1)[:, 0] - federation.test.y[1, :count]
    assert result.per_client.metrics["mae"][1] == pytest.approx(np.abs(found).mean(), rel=1e-5)


def test_who_is_not_evaluated_adds_nothing_to_a_metric():
    """A metric may have a number for no rows."""

    def one(predictions, y, mask):
        rows = jnp.sum(mask.astype(jnp.float32))
        return {"one": rows / jnp.maximum(rows, 1.0)}

    result = simulate(METHOD, blobs(clients=8), rounds=2, eval_every=1, eval_clients=3, metrics=[one], progress=False)
    assert result.history["one"].tolist() == [1.0, 1.0]
