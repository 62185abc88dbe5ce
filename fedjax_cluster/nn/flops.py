"""Floating-point operations, read off a traced program."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import jaxprs_in_params

from fedjax_cluster.types import DatasetInfo, Model


def gradient_flops(model: Model, info: DatasetInfo, batch: int, sequence: bool = False) -> float:
    """FLOPs of the matrix products and convolutions in one gradient of the mean loss over `batch` examples.

    Read off the traced program, each convolution and each of its gradients as the direct algorithm would do it.

    Args:
      model: any.
      info: shape of its inputs, and what it predicts.
      batch: examples in the mini-batch.
      sequence: inputs are whole numbers, and so is one target for each of them.

    Returns:
      The number of operations; a product and its addition count as two.

    >>> from fedjax_cluster import nn
    >>> info = DatasetInfo("digits", (8, 8), 10, "classification")
    >>> gradient_flops(nn.linear(), info, 1) == 2 * 2 * 64 * 10
    True
    """
    dtype = jnp.int32 if sequence else jnp.float32
    x = jax.ShapeDtypeStruct((batch, *info.input_shape), dtype)
    target = {"regression": jnp.float32}.get(info.task, jnp.int32)
    y = jax.ShapeDtypeStruct((batch, *(info.input_shape if sequence else ())), target)
    variables = jax.eval_shape(lambda key: model.init(key, info), jax.random.key(0))

    def loss(params: Any, stats: Any, x: Any, y: Any) -> Any:
        outputs, _ = model.apply(variables._replace(params=params, stats=stats), x, train=True)
        return model.loss(outputs, y).mean()

    return _flops(jax.make_jaxpr(jax.grad(loss))(variables.params, variables.stats, x, y).jaxpr)


def _flops(jaxpr: Any) -> float:
    total = 0.0
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            shape = equation.invars[0].aval.shape
            total += 2.0 * math.prod(equation.outvars[0].aval.shape) * math.prod(shape[axis] for axis in contracted)
        elif name == "own_weight_convolution":
            kernel, window = equation.invars[1].aval.shape, equation.params["window"]
            # Zeros put between the pixels by a stride's gradient are no work.
            total += (
                2.0
                * math.prod(equation.outvars[0].aval.shape)
                * math.prod(kernel[:3])
                / math.prod(window.input_dilation)
            )
        times = equation.params.get("length", 1) if name == "scan" else 1
        total += times * sum(_flops(inner) for inner in jaxprs_in_params(equation.params))
    return total
