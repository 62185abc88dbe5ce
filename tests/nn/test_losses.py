"""Losses and masked metrics against scikit-learn and plain NumPy."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sklearn.metrics

from fedjax_cluster.nn.losses import objective, scale

CLASSES = objective("cross_entropy")
VALUES = objective("mse")


def numpy_cross_entropy(logits, y):
    logits = np.asarray(logits, np.float64)
    log_sum = np.log(np.exp(logits).sum(-1))
    return log_sum - np.take_along_axis(logits, np.asarray(y)[..., None], -1)[..., 0]


@pytest.mark.parametrize("valid", range(1, 13))
def test_classification_metrics_are_those_of_scikit_learn(valid):
    rng = np.random.default_rng(valid)
    predictions = rng.dirichlet(np.ones(5), 12).astype(np.float32)
    y = rng.integers(0, 5, 12).astype(np.int32)
    mask = rng.permutation(np.arange(12) < valid)
    scores = jax.jit(CLASSES.metrics)(predictions, y, mask)
    rows, chosen = y[mask], predictions[mask].argmax(1)
    recalls = [np.mean(chosen[rows == label] == label) for label in np.unique(rows)]
    np.testing.assert_allclose(scores["accuracy"], sklearn.metrics.accuracy_score(rows, chosen), rtol=1e-6)
    np.testing.assert_allclose(scores["balanced_accuracy"], np.mean(recalls), rtol=1e-6)
    if len(np.unique(rows)) == len(np.unique(np.concatenate([rows, chosen]))):  # it warns of classes never seen
        expected = sklearn.metrics.balanced_accuracy_score(rows, chosen)
        np.testing.assert_allclose(scores["balanced_accuracy"], expected, rtol=1e-6)
    exact = predictions[mask].astype(np.float64)
    expected = sklearn.metrics.log_loss(rows, exact / exact.sum(1, keepdims=True), labels=range(5))
    np.testing.assert_allclose(scores["loss"], expected, rtol=1e-4)


def test_values_in_padding_do_not_matter():
    predictions = jnp.array([[0.7, 0.3], [jnp.nan, jnp.nan], [0.2, 0.8]])
    scores = CLASSES.metrics(predictions, jnp.array([0, -1, 0]), jnp.array([True, False, True]))
    assert float(scores["accuracy"]) == 0.5
    assert float(scores["balanced_accuracy"]) == 0.5
    np.testing.assert_allclose(scores["loss"], -(np.log(0.7) + np.log(0.2)) / 2, rtol=1e-6)
    error = VALUES.metrics(jnp.array([1.0, jnp.nan]), jnp.array([3.0, 0.0]), jnp.array([True, False]))
    assert float(error["loss"]) == 4.0


def test_no_valid_row_gives_nan():
    nothing = jnp.zeros(3, bool)
    scores = CLASSES.metrics(jnp.full((3, 2), 0.5), jnp.zeros(3, jnp.int32), nothing)
    assert all(np.isnan(value) for value in scores.values())
    assert np.isnan(VALUES.metrics(jnp.ones((3, 1)), jnp.ones(3), nothing)["loss"])


def test_an_impossible_class_costs_a_finite_loss():
    scores = CLASSES.metrics(jnp.array([[1.0, 0.0]]), jnp.array([1]), jnp.array([True]))
    np.testing.assert_allclose(scores["loss"], -np.log(1.1754944e-38), rtol=1e-5)


def test_small_label_types_hold_many_classes():
    """argmax must not be squeezed into the labels' type: 300 is 44 in a byte."""
    predictions = jax.nn.one_hot(jnp.array([300]), 301)
    assert float(CLASSES.metrics(predictions, jnp.array([44], jnp.uint8), jnp.array([True]))["accuracy"]) == 0.0


@pytest.mark.slow
def test_cross_entropy_per_example_and_per_token():
    logits = jax.random.normal(jax.random.key(0), (4, 3, 5))
    y = jnp.arange(12).reshape(4, 3) % 5
    expected = numpy_cross_entropy(logits, y)
    np.testing.assert_allclose(CLASSES.loss(logits[:, 0], y[:, 0]), expected[:, 0], rtol=1e-5)
    np.testing.assert_allclose(CLASSES.loss(logits, y), expected.mean(1), rtol=1e-5)
    mask = jnp.array([True, True, False, True])
    scores = CLASSES.metrics(CLASSES.predict(logits), y, mask)
    np.testing.assert_allclose(scores["loss"], expected[np.asarray(mask)].mean(), rtol=1e-5)
    right = np.asarray(logits.argmax(-1) == y)[np.asarray(mask)]
    np.testing.assert_allclose(scores["accuracy"], right.mean(), rtol=1e-6)


def test_squared_error():
    outputs = jnp.array([[1.0], [2.0]])
    chex.assert_trees_all_equal(VALUES.loss(outputs, jnp.array([3.0, 2.0])), jnp.array([4.0, 0.0]))
    picture = jnp.full((2, 2, 2), 255, jnp.uint8)
    chex.assert_trees_all_close(VALUES.loss(jnp.zeros((2, 4)), picture), jnp.ones(2))
    chex.assert_trees_all_equal(VALUES.predict(outputs), outputs)


@pytest.mark.slow
def test_auto_takes_one_output_for_a_regression():
    auto = objective("auto")
    values, logits = jnp.array([[1.0], [2.0]]), jnp.array([[1.0, 0.0], [0.0, 2.0]])
    chex.assert_trees_all_equal(auto.loss(values, jnp.array([0.0, 2.0])), jnp.array([1.0, 0.0]))
    chex.assert_trees_all_equal(auto.predict(values), values)
    assert set(auto.metrics(values, jnp.ones(2), jnp.ones(2, bool))) == {"loss"}
    np.testing.assert_allclose(auto.loss(logits, jnp.array([0, 1])), numpy_cross_entropy(logits, [0, 1]), rtol=1e-6)
    np.testing.assert_allclose(auto.predict(logits).sum(1), 1.0, rtol=1e-6)
    assert "accuracy" in auto.metrics(logits, jnp.array([0, 1]), jnp.ones(2, bool))


@pytest.mark.slow
def test_metrics_of_many_clients():
    predictions = jax.nn.softmax(jax.random.normal(jax.random.key(0), (3, 6, 4)))
    y = jnp.arange(18).reshape(3, 6) % 4
    mask = jnp.arange(6)[None] < jnp.array([6, 3, 1])[:, None]
    together = jax.vmap(CLASSES.metrics)(predictions, y, mask)
    for i in range(3):
        alone = CLASSES.metrics(predictions[i], y[i], mask[i])
        chex.assert_trees_all_close(jax.tree.map(lambda leaf, i=i: leaf[i], together), alone, rtol=1e-6)


def test_scale():
    np.testing.assert_allclose(scale(jnp.array([0, 51, 255], jnp.uint8)), [0, 0.2, 1])
    assert scale(jnp.array([7], jnp.int32)).dtype == jnp.int32
    assert scale(jnp.array([True])).dtype == jnp.float32


@pytest.mark.parametrize(
    ("name", "outputs", "y", "complaint"),
    [
        ("cross_entropy", jnp.ones((3, 2)), jnp.ones(3), "loss='mse'"),
        ("cross_entropy", jnp.ones((3, 2)), jnp.ones((3, 1), jnp.int32), "shape"),
        ("mse", jnp.ones((3, 2)), jnp.ones(3), "loss='cross_entropy'"),
    ],
)
def test_mistakes_raise(name, outputs, y, complaint):
    with pytest.raises(ValueError, match=complaint):
        objective(name).loss(outputs, y)


def test_an_unknown_loss_raises():
    with pytest.raises(ValueError, match="hinge"):
        objective("hinge")


@pytest.mark.parametrize("name", ["cross_entropy", "mse"])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_outputs_of_half_precision_are_judged_in_single(name, dtype):
    """Of eight bits a loss is rounded to 0.4 %, and many a probability is another's."""
    outputs = jax.random.normal(jax.random.key(0), (400, 3)).astype(dtype)
    y = jax.random.randint(jax.random.key(1), (400,), 0, 3)
    y = y if name == "cross_entropy" else jax.nn.one_hot(y, 3)
    own, mask = objective(name), jnp.ones(400, bool)
    chex.assert_trees_all_equal(own.loss(outputs, y), own.loss(outputs.astype(jnp.float32), y))
    chex.assert_trees_all_equal(own.metrics(outputs, y, mask), own.metrics(outputs.astype(jnp.float32), y, mask))
