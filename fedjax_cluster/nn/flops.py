"""Floating-point operations, counted in a traced program."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import jaxprs_in_params

from fedjax_cluster.nn.trilinear import ROLES
from fedjax_cluster.types import DatasetInfo, Model


def gradient_flops(model: Model, info: DatasetInfo, batch: int) -> float:
    """FLOPs of the matrix products and convolutions in one gradient of the mean loss over `batch` examples.

    A multiplication and its addition count as two, convolutions and their gradients as in the direct algorithm. Where a
    program has branches, the largest counts. Depthwise convolutions of `nn.Conv`, which are no products, do not.
    The task decides what a target is: a token for each of the inputs, the inputs themselves, or one number.

    >>> from fedjax_cluster import nn
    >>> info = DatasetInfo("digits", (8, 8), 10, "classification")
    >>> gradient_flops(nn.linear(), info, 1) == 2 * 2 * 64 * 10
    True
    """
    x = jax.ShapeDtypeStruct((batch, *info.input_shape), jnp.int32 if info.task == "language" else jnp.float32)
    target = jnp.int32 if info.task in ("classification", "language") else jnp.float32
    shape = info.input_shape if info.task in ("language", "reconstruction") else ()
    y = jax.ShapeDtypeStruct((batch, *shape), target)
    key = jax.random.key(0)
    variables = jax.eval_shape(lambda key: model.init(key, info), key)

    def loss(params: Any, stats: Any, x: Any, y: Any) -> Any:
        outputs, _ = model.apply(variables._replace(params=params, stats=stats), x, train=True, rng_key=key)
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
            # The zeros that a stride's gradient inserts between the pixels cost nothing.
            products = math.prod(equation.outvars[0].aval.shape) * math.prod(kernel[:3])
            total += 2.0 * products / math.prod(window.input_dilation)
        elif name in ("rows_last_convolution", "dense_product"):
            wanted = equation.params["wanted"]
            roles = [role for role in ROLES if role != wanted] + [wanted]
            operands = (*equation.invars, *equation.outvars)
            shapes = {role: operand.aval.shape for role, operand in zip(roles, operands, strict=True)}
            total += 2.0 * math.prod(shapes["kernel"]) * math.prod(shapes["y"]) / shapes["kernel"][-1]
        elif name == "conv_general_dilated":
            kernel, features = equation.invars[1].aval.shape, equation.params["dimension_numbers"].rhs_spec[0]
            products = math.prod(equation.outvars[0].aval.shape) * math.prod(kernel) / kernel[features]
            total += 2.0 * products / math.prod(equation.params["lhs_dilation"])
        if name == "cond":
            total += max(_flops(branch.jaxpr) for branch in equation.params["branches"])
            continue
        times = equation.params.get("length", 1) if name == "scan" else 1
        total += times * sum(_flops(inner) for inner in jaxprs_in_params(equation.params))
    return total
