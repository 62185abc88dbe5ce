"""One walk over a client's rows: losses, gradients and predictions in pieces are those of one pass."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_cluster import inference, nn
from fedjax_cluster.types import DatasetInfo
from tests.federations import INFO, as_lists, blobs
from tests.reference import federated


@pytest.mark.parametrize("valid", [20, 7, 1])
def test_dataset_loss_is_the_mean_over_all_rows(valid):
    federation, model = blobs(clients=1, groups=1, ragged=False), nn.linear()
    data = jax.tree.map(lambda leaf: jnp.asarray(leaf[0]), federation.train)._replace(num_examples=jnp.asarray(valid))
    start = model.init(jax.random.key(0), INFO)
    x, y = as_lists(federation)[0]
    own = tuple(np.asarray(start.params["output"][part], np.float64) for part in ("kernel", "bias"))
    expected = federated.gradient(*own, x[:valid], y[:valid])[2]
    assert float(inference.dataset_loss(model, start, data, chunk=6)) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("valid", [20, 7, 1])
def test_the_full_gradient_is_that_of_the_mean_loss(valid):
    federation, model = blobs(clients=1, groups=1, ragged=False), nn.linear()
    data = jax.tree.map(lambda leaf: jnp.asarray(leaf[0]), federation.train)._replace(num_examples=jnp.asarray(valid))
    start = model.init(jax.random.key(0), INFO)

    def loss(params):
        outputs, _ = model.apply(start._replace(params=params), data.x[:valid], train=False)
        return model.loss(outputs, data.y[:valid]).mean()

    found = inference.full_gradient(model, start, data, chunk=6)
    chex.assert_trees_all_close(found, jax.grad(loss)(start.params), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("rows", [1, 7, 8, 9, 16, 19])
@pytest.mark.parametrize("models", [1, 3])
def test_predictions_in_pieces_are_those_of_one_pass(monkeypatch, rows, models):
    """Of the mixture of the personal models, eight rows at a time, the last piece reaching back."""
    model, info = nn.mlp(hidden=(5,)), DatasetInfo("rows", (3,), 4)
    variables = jax.vmap(lambda key: model.init(key, info))(jax.random.split(jax.random.key(0), models))
    arguments = model, variables, jnp.arange(1.0, models + 1.0), jax.random.normal(jax.random.key(1), (rows, 3))
    monkeypatch.setattr(inference, "rows_at_once", lambda: rows)
    expected = inference.mixed_predictions(*arguments)
    monkeypatch.setattr(inference, "rows_at_once", lambda: 8)
    np.testing.assert_allclose(inference.mixed_predictions(*arguments), expected, rtol=1e-6)
