"""One walk over a client's rows, some at a time, without training: losses, gradients, scores, predictions."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from fedjax_cluster.local import mean_loss, without_padding
from fedjax_cluster.types import ClientData, Model, PyTree, Variables

GRADIENT_ROWS = 256
# Rows that go through a model together. On a CPU as many as its caches hold: of a LeNet-5, 64 rows took 22 µs each, 256
# took 41 and 512 took 48; an MLP has a tenth to lose. Elsewhere products must be large.
CPU_ROWS, ACCELERATOR_ROWS = 64, 256
LEAST_SCORE = -1e30  # finite, so that clients' scores can be compared and summed


def walk_rows(
    visit: Callable[[Any, PyTree, Array, Array], Any],
    carry: Any,
    rows: PyTree,
    num_examples: Array | int,
    *,
    chunk: int | None = None,
) -> Any:
    """Folds a function over rows, `chunk` at a time: carry ← visit(carry, piece, fresh, start).

    The last piece reaches back over rows that were visited before; `fresh` leaves them out, and the padding.

    Args:
      visit: of the carry, leaves [chunk, ...], bool[chunk], and i32[], the place of the piece's first row.
      carry: the start.
      rows: leaves [N, ...].
      num_examples: rows beyond it are padding.
      chunk: None takes what suits the platform that the program is lowered for.
    """
    if chunk is None and jax.tree.leaves(rows)[0].shape[0] > CPU_ROWS:
        cpu, other = (functools.partial(_walk, visit, size) for size in (CPU_ROWS, ACCELERATOR_ROWS))
        return lax.platform_dependent(carry, rows, num_examples, cpu=cpu, default=other)
    return _walk(visit, chunk or CPU_ROWS, carry, rows, num_examples)


def _walk(
    visit: Callable[[Any, PyTree, Array, Array], Any], chunk: int, carry: Any, rows: PyTree, num_examples: Array | int
) -> Any:
    count = jax.tree.leaves(rows)[0].shape[0]
    size = min(chunk, count)

    def advance(number: Array, carry: Any) -> Any:
        start = jnp.minimum(number * size, count - size)
        piece = jax.tree.map(lambda leaf: lax.dynamic_slice_in_dim(leaf, start, size), rows)
        place = start + jnp.arange(size)
        return visit(carry, piece, (place >= number * size) & (place < num_examples), start)

    return lax.fori_loop(0, (num_examples + size - 1) // size, advance, carry)


def dataset_loss(model: Model, variables: Variables, data: ClientData, *, chunk: int | None = None) -> Array:
    """Mean loss f32[] of one client's examples, `chunk` rows at a time."""

    def add(total: Array, piece: tuple[Array, Array], fresh: Array, start: Array) -> Array:
        mean, _ = mean_loss(model, variables, (*piece, fresh), train=False)
        return total + mean * jnp.sum(fresh.astype(jnp.float32))

    total = walk_rows(add, jnp.zeros(()), (data.x, data.y), data.num_examples, chunk=chunk)
    return total / jnp.maximum(data.num_examples, 1).astype(jnp.float32)


def example_losses(model: Model, variables: Variables, data: ClientData, *, chunk: int | None = None) -> Array:
    """Loss f32[N] of each of one client's examples, `chunk` rows at a time; 0 on padding."""

    def write(losses: Array, piece: tuple[Array, Array], fresh: Array, start: Array) -> Array:
        outputs, _ = model.apply(variables, piece[0], train=False)
        found = model.loss(outputs, piece[1]).astype(losses.dtype)
        return lax.dynamic_update_slice_in_dim(losses, found, start, 0)

    rows = data.x.shape[0]
    losses = walk_rows(write, jnp.zeros(rows), (data.x, data.y), data.num_examples, chunk=chunk)
    return jnp.where(jnp.arange(rows) < data.num_examples, losses, 0.0)


def full_gradient(model: Model, variables: Variables, data: ClientData, *, chunk: int = GRADIENT_ROWS) -> PyTree:
    """Gradient of the mean loss over all of one client's rows, `chunk` at a time."""

    def loss(params: PyTree, piece: tuple[Array, Array], fresh: Array) -> Array:
        x, y = without_padding(piece, fresh)
        outputs, _ = model.apply(Variables(params, variables.stats), x, train=False)
        return jnp.sum(jnp.where(fresh, model.loss(outputs, y), 0.0))

    def add(total: PyTree, piece: tuple[Array, Array], fresh: Array, start: Array) -> PyTree:
        return jax.tree.map(jnp.add, total, jax.grad(loss)(variables.params, piece, fresh))

    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), variables.params)
    total = walk_rows(add, zeros, (data.x, data.y), data.num_examples, chunk=chunk)
    count = jnp.maximum(data.num_examples, 1).astype(jnp.float32)
    return jax.tree.map(lambda leaf: leaf / count, total)


def score_rows(model: Model, variables: Variables, first: Array, data: ClientData) -> Array:
    """f32[]: accuracy on the rows from `first` on, or minus the loss where there is no accuracy; 0 without rows.

    The loss is the one of the metrics, or of training where these have neither.
    """
    place = jnp.arange(data.x.shape[0])
    rows = (place >= first) & (place < data.num_examples)
    outputs, _ = model.apply(variables, data.x, train=False)
    figures = measure(model, model.predict(outputs), data.y, rows)
    if "accuracy" not in figures and "loss" not in figures:
        losses = jnp.where(rows, model.loss(outputs, data.y), 0.0)
        figures["loss"] = losses.sum() / rows.sum().astype(jnp.float32)
    score, worst = (figures["accuracy"], 0.0) if "accuracy" in figures else (-figures["loss"], LEAST_SCORE)
    return jnp.where(rows.any(), jnp.maximum(jnp.where(jnp.isnan(score), worst, score), worst), 0.0)


def measure(model: Model, predictions: Any, y: Array, mask: Array) -> dict[str, Array]:
    """The model's metrics f32[] over the rows of mask bool[N]; NaN where a prediction for one of them is not finite.

    Of NaN the largest is the first: a model that gives nothing else would be right wherever the first class is.
    """
    finite = finite_rows(predictions, mask)
    return {name: jnp.where(finite, value, jnp.nan) for name, value in model.metrics(predictions, y, mask).items()}


def finite_rows(predictions: Any, mask: Array) -> Array:
    """bool[]: no entry of leaves [N, ...] in a row of mask bool[N] is NaN or infinite."""
    rows = [jnp.isfinite(leaf).reshape(len(mask), -1).all(1) | ~mask for leaf in jax.tree.leaves(predictions)]
    return jnp.all(jnp.stack(rows))


def mixed_predictions(model: Model, variables: Variables, mixture: Array, x: Array) -> Any:
    """Predictions, leaves [N, ...], of a mixture f32[P] of models [P, ...]: Σ_p mixture_p · predict(f(x; θ_p))."""

    def mixed(rows: Array) -> Any:
        def one(variables: Variables) -> Any:
            outputs, _ = model.apply(variables, rows, train=False)
            return model.predict(outputs)

        if mixture.shape[0] == 1:
            return one(jax.tree.map(lambda leaf: leaf[0], variables))
        mean = functools.partial(jnp.tensordot, mixture, axes=1, precision="highest")
        return jax.tree.map(mean, lax.map(one, variables))

    def write(predictions: Any, piece: Array, fresh: Array, start: Array) -> Any:
        return jax.tree.map(
            lambda whole, part: lax.dynamic_update_slice_in_dim(whole, part, start, 0), predictions, mixed(piece)
        )

    count = x.shape[0]
    if count <= CPU_ROWS:
        return mixed(x)
    shape = jax.eval_shape(mixed, x)
    return walk_rows(write, jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shape), x, count)
