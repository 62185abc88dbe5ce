"""What one client computes on all of its rows: the gradient of its loss, and how well a model does on some of them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax

from fedjax_cluster.types import ClientData, Model, PyTree, Variables


def full_gradient(model: Model, variables: Variables, data: ClientData, *, chunk: int = 256) -> PyTree:
    """Gradient of the mean loss over all of one client's rows in inference mode, `chunk` rows at a time."""
    rows = data.x.shape[0]
    chunk = min(chunk, rows)

    def loss(params: PyTree, number: Array) -> Array:
        # The last chunk reaches back over rows already done; they are masked, not counted twice.
        start = jnp.minimum(number * chunk, rows - chunk)
        place = start + jnp.arange(chunk)
        x, y = (lax.dynamic_slice_in_dim(leaf, start, chunk) for leaf in (data.x, data.y))
        outputs, _ = model.apply(Variables(params, variables.stats), x, train=False)
        return jnp.sum(jnp.where((place >= number * chunk) & (place < data.num_examples), model.loss(outputs, y), 0.0))

    def add(number: Array, total: PyTree) -> PyTree:
        return jax.tree.map(jnp.add, total, jax.grad(loss)(variables.params, number))

    zeros = jax.tree.map(jnp.zeros_like, variables.params)
    total = lax.fori_loop(0, (data.num_examples + chunk - 1) // chunk, add, zeros)
    count = jnp.maximum(data.num_examples, 1).astype(jnp.float32)
    return jax.tree.map(lambda leaf: leaf / count, total)


def score_rows(model: Model, variables: Variables, first: Array, data: ClientData) -> Array:
    """f32[]: accuracy on the rows from `first` on, or minus the loss where there is none."""
    place = jnp.arange(data.x.shape[0])
    outputs, _ = model.apply(variables, data.x, train=False)
    figures = model.metrics(model.predict(outputs), data.y, (place >= first) & (place < data.num_examples))
    score = figures["accuracy"] if "accuracy" in figures else -figures["loss"]
    return jnp.nan_to_num(score, nan=0.0)
