"""What a model's outputs are worth: loss, predictions and masked metrics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

LossName = Literal["auto", "cross_entropy", "mse"]

# Probabilities below this count as this: a mixture may give a class exactly 0.
SMALLEST_PROBABILITY = 1e-12


class Objective(NamedTuple):
    """The three functions of a model that know the task; see `fedjax_cluster.types.Model`."""

    loss: Callable[[Array, Array], Array]
    predict: Callable[[Array], Array]
    metrics: Callable[[Array, Array, Array], dict[str, Array]]


def objective(loss: LossName = "auto") -> Objective:
    """The loss, prediction and metrics that go together.

    "cross_entropy": outputs are logits [N, ..., classes], y integers [N, ...], predictions probabilities.
    "mse": outputs are values of y's size, predictions are the outputs.
    "auto": "mse" for outputs [N, 1], "cross_entropy" for anything else.

    Args:
      loss: "auto", "cross_entropy" or "mse".

    Returns:
      An `Objective`.

    Raises:
      ValueError: an unknown name.

    >>> import jax.numpy as jnp
    >>> two_classes = objective("cross_entropy")
    >>> two_classes.loss(jnp.zeros((3, 2)), jnp.array([0, 1, 1])).round(4)
    Array([0.6931, 0.6931, 0.6931], dtype=float32)
    """
    if loss == "cross_entropy":
        return Objective(cross_entropy, jax.nn.softmax, classification_metrics)
    if loss == "mse":
        return Objective(squared_error, lambda outputs: outputs, regression_metrics)
    if loss != "auto":
        raise ValueError(f"loss is {loss!r}; choose 'auto', 'cross_entropy' or 'mse'")
    classes, values = objective("cross_entropy"), objective("mse")

    def chosen(outputs: Array) -> Objective:
        return values if outputs.ndim == 2 and outputs.shape[-1] == 1 else classes

    return Objective(
        loss=lambda outputs, y: chosen(outputs).loss(outputs, y),
        predict=lambda outputs: chosen(outputs).predict(outputs),
        metrics=lambda predictions, y, mask: chosen(predictions).metrics(predictions, y, mask),
    )


def cross_entropy(outputs: Array, y: Array) -> Array:
    """Cross entropy −log softmax(outputs)[y] per example, averaged over y's further dimensions (tokens).

    Args:
      outputs: f32[N, ..., classes], logits.
      y: integers [N, ...].

    Returns:
      f32[N].

    Raises:
      ValueError: y is not of integers, or its shape is not that of outputs without the classes.
    """
    _check_labels(outputs, y)
    losses = optax.softmax_cross_entropy_with_integer_labels(outputs, y)
    return losses.reshape(losses.shape[0], -1).mean(axis=1)


def squared_error(outputs: Array, y: Array) -> Array:
    """Squared error (outputs − y)² per example, averaged over its dimensions.

    Args:
      outputs: f32[N, ...].
      y: [N, ...] with as many values per example; uint8 images are scaled to [0, 1] like a model's inputs.

    Returns:
      f32[N].

    Raises:
      ValueError: outputs and y differ in size.
    """
    if outputs.size != y.size or outputs.shape[0] != y.shape[0]:
        raise ValueError(
            f"outputs have shape {outputs.shape} and y {y.shape}: the squared error needs as many values per"
            " example; labels of classes need loss='cross_entropy', other targets a matching num_outputs"
        )
    errors = outputs - scale(y).astype(jnp.float32).reshape(outputs.shape)
    return jnp.square(errors).reshape(errors.shape[0], -1).mean(axis=1)


def classification_metrics(predictions: Array, y: Array, mask: Array) -> dict[str, Array]:
    """Accuracy, balanced accuracy (mean recall over the classes present) and −log probability of the label.

    Args:
      predictions: f32[N, ..., classes], probabilities, of one model or of a mixture.
      y: integers [N, ...].
      mask: bool[N], the valid rows.

    Returns:
      {"accuracy", "balanced_accuracy", "loss"}, f32[] each; NaN where no row is valid. The probability in the
      loss is clipped to at least 1e-12.

    Raises:
      ValueError: as `cross_entropy`.

    >>> import jax.numpy as jnp
    >>> predictions = jnp.array([[0.9, 0.1], [0.8, 0.2], [0.6, 0.4], [0.5, 0.5]])
    >>> scores = classification_metrics(predictions, jnp.array([0, 0, 1, 1]), jnp.array([1, 1, 1, 0], bool))
    >>> round(float(scores["accuracy"]), 3), float(scores["balanced_accuracy"])
    (0.667, 0.5)
    """
    _check_labels(predictions, y)
    num_classes = predictions.shape[-1]
    labels = y.reshape(-1).astype(jnp.int32)
    valid = jnp.broadcast_to(mask.reshape(-1, *[1] * (y.ndim - 1)), y.shape).reshape(-1)
    correct = valid & (predictions.argmax(axis=-1).reshape(-1) == labels)
    probability = jnp.take_along_axis(predictions, y[..., None].astype(jnp.int32), axis=-1).reshape(-1)
    losses = -jnp.log(jnp.maximum(probability, SMALLEST_PROBABILITY))

    def per_class(rows: Array) -> Array:
        return jax.ops.segment_sum(rows.astype(jnp.float32), labels, num_classes)

    examples = per_class(valid)
    present = examples > 0
    recall = jnp.where(present, per_class(correct) / jnp.maximum(examples, 1.0), 0.0)
    return {
        "accuracy": correct.sum().astype(jnp.float32) / valid.sum().astype(jnp.float32),
        "balanced_accuracy": recall.sum() / present.sum().astype(jnp.float32),
        "loss": jnp.where(valid, losses, 0.0).sum() / valid.sum().astype(jnp.float32),
    }


def regression_metrics(predictions: Array, y: Array, mask: Array) -> dict[str, Array]:
    """Mean squared error over the valid rows.

    Args:
      predictions: f32[N, ...].
      y: [N, ...], as in `squared_error`.
      mask: bool[N], the valid rows.

    Returns:
      {"loss"}, f32[]; NaN where no row is valid.

    Raises:
      ValueError: as `squared_error`.
    """
    errors = jnp.where(mask, squared_error(predictions, y), 0.0)
    return {"loss": errors.sum() / mask.sum().astype(jnp.float32)}


def scale(x: Array) -> Array:
    """Raw data as a model takes it: uint8 from [0, 255] to [0, 1], other integers (tokens) as is, floats as float32.

    bfloat16 stays as well: `mixed_precision` asks for it.

    >>> import jax.numpy as jnp
    >>> scale(jnp.array([0, 255], jnp.uint8))
    Array([0., 1.], dtype=float32)
    """
    if x.dtype == jnp.uint8:
        return x.astype(jnp.float32) / 255.0
    as_is = jnp.issubdtype(x.dtype, jnp.integer) or x.dtype == jnp.bfloat16
    return x if as_is else x.astype(jnp.float32)


def _check_labels(outputs: Array, y: Array) -> None:
    if not jnp.issubdtype(y.dtype, jnp.integer):
        raise ValueError(
            f"y has dtype {y.dtype}, but cross entropy over {outputs.shape[-1]} outputs needs integer labels;"
            " pass loss='mse' for a regression with several outputs"
        )
    if outputs.shape[:-1] != y.shape:
        raise ValueError(
            f"outputs have shape {outputs.shape} and y {y.shape}: labels must have the outputs' shape without"
            " its last dimension, the classes"
        )
