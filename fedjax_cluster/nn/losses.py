"""Losses, predictions and masked metrics of a model's outputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jaxtyping import Bool, Float, Int, Shaped

LossName = Literal["auto", "cross_entropy", "mse"]

# Probabilities are clipped to at least this: a mixture may give a class exactly 0.
SMALLEST_PROBABILITY = float(jnp.finfo(jnp.float32).tiny)  # of a metric: its loss is 87.3


class Objective(NamedTuple):
    """The three functions of a model that depend on the task; see `fedjax_cluster.types.Model`."""

    loss: Callable[[Array, Array], Array]
    predict: Callable[[Array], Array]
    metrics: Callable[[Array, Array, Array], dict[str, Array]]


def objective(loss: LossName = "auto") -> Objective:
    """The matching loss, prediction and metrics; ValueError for an unknown name.

    "cross_entropy": outputs are logits [N, ..., classes], y integers [N, ...], predictions probabilities.
    "mse": outputs are values, as many as in y; predictions are the outputs.
    "auto": "mse" for outputs [N, 1], "cross_entropy" for all others.

    >>> two_classes = objective("cross_entropy")
    >>> two_classes.loss(jnp.zeros((3, 2)), jnp.array([0, 1, 1])).round(4)
    Array([0.6931, 0.6931, 0.6931], dtype=float32)
    """
    if loss not in OBJECTIVES:
        raise ValueError(f"loss is {loss!r}; choose 'auto', 'cross_entropy' or 'mse'")
    return OBJECTIVES[loss]


def cross_entropy(outputs: Float[Array, "N *tokens classes"], y: Int[Array, " N *tokens"]) -> Float[Array, " N"]:
    """Cross entropy −log softmax(outputs)[y] of logits per example, averaged over the further dimensions of y (tokens).

    ValueError where y is not of integers, or its shape differs from that of outputs without the classes. Labels outside
    of 0 … classes − 1 are not looked for: −1 counts as the last class, and one beyond gives NaN.
    """
    _check_labels(outputs, y)
    outputs = wide(outputs)
    losses = optax.softmax_cross_entropy_with_integer_labels(outputs, y)
    return losses.reshape(losses.shape[0], -1).mean(axis=1)


def squared_error(outputs: Float[Array, "N ..."], y: Shaped[Array, "N ..."]) -> Float[Array, " N"]:
    """Squared error (outputs − y)² per example, averaged over its dimensions; ValueError for y of another size.

    y of uint8 (images) is scaled to [0, 1] like a model's inputs.
    """
    if outputs.size != y.size or outputs.shape[0] != y.shape[0]:
        raise ValueError(
            f"outputs have shape {outputs.shape} and y {y.shape}: the squared error needs as many values per"
            " example; labels of classes need loss='cross_entropy', other targets a matching num_outputs"
        )
    outputs, targets = wide(outputs), scale(y) if y.dtype == jnp.uint8 else y
    errors = outputs - targets.astype(outputs.dtype).reshape(outputs.shape)
    return jnp.square(errors).reshape(errors.shape[0], -1).mean(axis=1)


def classification_metrics(
    predictions: Float[Array, "N *tokens classes"], y: Int[Array, " N *tokens"], mask: Bool[Array, " N"]
) -> dict[str, Float[Array, ""]]:
    """Accuracy, balanced accuracy (mean recall over the classes present) and −log probability of the label.

    Of the rows in `mask`; NaN where there is none. `predictions` are probabilities, of one model or of a mixture, in
    float32: what is below 1.2e-38 counts as that, so that no example's loss is above 87.3, however sure the model was.

    >>> predictions = jnp.array([[0.9, 0.1], [0.8, 0.2], [0.6, 0.4], [0.5, 0.5]])
    >>> scores = classification_metrics(predictions, jnp.array([0, 0, 1, 1]), jnp.array([1, 1, 1, 0], bool))
    >>> round(float(scores["accuracy"]), 3), float(scores["balanced_accuracy"])
    (0.667, 0.5)
    """
    _check_labels(predictions, y)
    predictions = wide(predictions)
    num_classes = predictions.shape[-1]
    labels = y.reshape(-1).astype(jnp.int32)
    valid = jnp.broadcast_to(mask.reshape(-1, *[1] * (y.ndim - 1)), y.shape).reshape(-1)
    correct = valid & (predictions.argmax(axis=-1).reshape(-1).astype(jnp.int32) == labels)
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


def regression_metrics(
    predictions: Float[Array, "N ..."], y: Shaped[Array, "N ..."], mask: Bool[Array, " N"]
) -> dict[str, Float[Array, ""]]:
    """Mean squared error over the rows in `mask`, as "loss"; NaN where there is none."""
    errors = jnp.where(mask, squared_error(predictions, y), 0.0)
    return {"loss": errors.sum() / mask.sum().astype(jnp.float32)}


def scale(x: Array) -> Array:
    """Raw data as model inputs: uint8 scaled from [0, 255] to [0, 1], floats as float32.

    Other integers (tokens) are unchanged, and so is bfloat16, which `mixed_precision` asks for.

    >>> scale(jnp.array([0, 255], jnp.uint8))
    Array([0., 1.], dtype=float32)
    """
    if x.dtype == jnp.uint8:
        return x.astype(jnp.float32) / 255.0
    unchanged = jnp.issubdtype(x.dtype, jnp.integer) or x.dtype == jnp.bfloat16
    return x if unchanged else x.astype(jnp.float32)


def wide(outputs: Array) -> Array:
    """Outputs of half precision as float32: a loss of eight bits tells little, and probabilities of eight are tied."""
    short = jnp.issubdtype(outputs.dtype, jnp.floating) and outputs.dtype.itemsize < 4
    return outputs.astype(jnp.float32) if short else outputs


def _unchanged(outputs: Array) -> Array:
    return outputs


def _by_shape(outputs: Array) -> Objective:
    return OBJECTIVES["mse" if outputs.ndim == 2 and outputs.shape[-1] == 1 else "cross_entropy"]


def _auto_loss(outputs: Array, y: Array) -> Array:
    return _by_shape(outputs).loss(outputs, y)


def _auto_predict(outputs: Array) -> Array:
    return _by_shape(outputs).predict(outputs)


def _auto_metrics(predictions: Array, y: Array, mask: Array) -> dict[str, Array]:
    return _by_shape(predictions).metrics(predictions, y, mask)


# Functions of the module, not closures: models compare by them.
OBJECTIVES: dict[str, Objective] = {
    "auto": Objective(_auto_loss, _auto_predict, _auto_metrics),
    "cross_entropy": Objective(cross_entropy, jax.nn.softmax, classification_metrics),
    "mse": Objective(squared_error, _unchanged, regression_metrics),
}


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
