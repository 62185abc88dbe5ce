"""Models that compute in a narrower format than their parameters are kept in."""

from __future__ import annotations

from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jax import Array

from fedjax_cluster.nn.losses import scale
from fedjax_cluster.types import Model, PyTree, Variables

Precision = Literal["float32", "bfloat16"]


def mixed_precision(model: Model, precision: Precision = "bfloat16") -> Model:
    """The same model, computed in another format: parameters and scaled inputs are cast, outputs come back in float32.

    The parameters themselves stay float32, and so do their gradients, which come back through the cast: they are the
    masters that an optimiser moves. Losses and the statistics of batch norm are float32 too. `local.sgd(…,
    precision="bfloat16")` does this to the training alone, and leaves evaluation in float32.

    Args:
      model: any `Model`; a Flax module with a `dtype` of its own keeps to that.
      precision: "bfloat16", or "float32" for the model as it is.

    Returns:
      A `Model` with the same variables.

    Raises:
      ValueError: another precision.

    >>> from fedjax_cluster import nn
    >>> from fedjax_cluster.types import DatasetInfo
    >>> model = mixed_precision(nn.mlp((4,)))
    >>> variables = model.init(jax.random.key(0), DatasetInfo("toy", (3,), 2))
    >>> outputs, _ = model.apply(variables, jnp.ones((1, 3)), train=False)
    >>> variables.params["output"]["kernel"].dtype, outputs.dtype
    (dtype('float32'), dtype('float32'))
    """
    if check_precision(precision) == "float32":
        return model
    narrow = jnp.dtype(precision)

    def apply(variables: Variables, x: Array, *, train: bool, rng_key: Array | None = None) -> tuple[Any, PyTree]:
        params = _cast(variables.params, narrow)
        # Scaled first: a format of eight bits would round the bytes themselves.
        outputs, stats = model.apply(
            Variables(params, variables.stats), _cast(scale(x), narrow), train=train, rng_key=rng_key
        )
        return _cast(outputs, jnp.float32), _cast(stats, jnp.float32)

    return model._replace(apply=apply)


def _cast(tree: PyTree, dtype: Any) -> PyTree:
    return jax.tree.map(lambda leaf: leaf.astype(dtype) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf, tree)


def check_precision(precision: Precision) -> Precision:
    """The precision; ValueError for one that is not known."""
    if precision not in get_args(Precision):
        raise ValueError(f"precision is {precision!r}; choose {' or '.join(get_args(Precision))}")
    return precision
