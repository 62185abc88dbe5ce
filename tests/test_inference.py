"""One walk over a client's rows: losses, gradients and predictions in pieces are those of one pass."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen

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


def test_losses_of_a_module_that_computes_in_a_narrower_format_are_float32():
    """FedEM and FedSoft ended in an error of types."""
    data = jax.tree.map(lambda leaf: jnp.asarray(leaf[0]), blobs(clients=1, groups=1, ragged=False).train)
    model = nn.from_flax(linen.Dense(3, dtype=jnp.bfloat16))
    start = model.init(jax.random.key(0), INFO)
    losses = inference.example_losses(model, start, data, chunk=6)
    assert losses.dtype == jnp.float32
    np.testing.assert_allclose(losses, model.loss(model.apply(start, data.x, train=False)[0], data.y), atol=0.1)


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 8, 19])
@pytest.mark.parametrize("models", [1, 3])
def test_predictions_in_pieces_are_those_of_one_pass(monkeypatch, rows, models):
    """Of the mixture of the personal models, eight rows at a time, the last piece reaching back."""
    model, info = nn.mlp(hidden=(5,)), DatasetInfo("rows", (3,), 4)
    variables = jax.vmap(lambda key: model.init(key, info))(jax.random.split(jax.random.key(0), models))
    arguments = model, variables, jnp.arange(1.0, models + 1.0), jax.random.normal(jax.random.key(1), (rows, 3))
    monkeypatch.setattr(inference, "CPU_ROWS", rows)
    expected = inference.mixed_predictions(*arguments)
    monkeypatch.setattr(inference, "CPU_ROWS", 8)
    np.testing.assert_allclose(inference.mixed_predictions(*arguments), expected, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("broken", [jnp.nan, jnp.inf])
def test_predictions_that_are_not_finite_have_no_figures(broken):
    """The largest of NaNs is the first: such a model would be right wherever the first class is."""
    model, y = nn.linear(), jnp.zeros(4, jnp.int32)
    predictions = jnp.full((4, 3), 1 / 3).at[3].set(broken)
    known, all_rows = (inference.measure(model, predictions, y, jnp.arange(4) < count) for count in (3, 4))
    assert float(known["accuracy"]) == 1
    assert {name: float(value) for name, value in known.items()}.keys() == all_rows.keys()
    assert all(np.isnan(value) for value in all_rows.values())


@pytest.mark.slow
@pytest.mark.parametrize(("loss", "outputs"), [("cross_entropy", 3), ("mse", 1)])
def test_a_model_that_diverged_scores_below_any_other(loss, outputs):
    """CFL would else never take a part back to its parent's model: minus a loss, 0 is the best there is."""
    federation, model = blobs(clients=1, groups=1, ragged=False), nn.linear(loss=loss, num_outputs=outputs)
    data = jax.tree.map(lambda leaf: jnp.asarray(leaf[0]), federation.train)
    data = data if loss == "cross_entropy" else data._replace(y=data.y.astype(jnp.float32)[:, None])
    variables = model.init(jax.random.key(0), INFO)
    scores = [
        float(
            inference.score_rows(
                model, jax.tree.map(lambda leaf, f=factor: f * leaf, variables), jnp.asarray(first), data
            )
        )
        for factor, first in ((1.0, 5), (jnp.nan, 5), (3e38, 5), (1.0, 20))
    ]
    assert scores[1] < scores[0]
    assert scores[1] == scores[2]
    assert np.isfinite(scores).all()
    assert scores[3] == 0


def test_a_score_without_accuracy_or_loss_is_that_of_training():
    """CFL ended in a KeyError where metrics of one's own have neither."""
    federation = blobs(clients=1, groups=1, ragged=False)
    model = nn.linear()._replace(metrics=lambda predictions, y, mask: {"nll": jnp.zeros(())})
    data = jax.tree.map(lambda leaf: jnp.asarray(leaf[0]), federation.train)
    variables = model.init(jax.random.key(0), INFO)
    outputs, _ = model.apply(variables, data.x, train=False)
    expected = -model.loss(outputs, data.y)[5:].mean()
    np.testing.assert_allclose(inference.score_rows(model, variables, jnp.asarray(5), data), expected, rtol=1e-6)
