"""The matrix product of a dense layer, whose weights' gradient is as fast for one width of the layer as for another.

That gradient, xᵀ·dy, goes down the columns of x. Rows that lie a multiple of 2 KiB apart (512 or 1 024 features, the
3 072 numbers of a 32×32 image) fall into the same few sets of a CPU's first cache and push each other out, so that the
product takes up to twice the time of one with a few features more or less. There it has one cache line more in a row.
Of a layer with few features, such as the last one, the gradient is computed the other way round.

The product y is one derivative of the trilinear form T = Σ y[n, j] · x[n, i] · kernel[i, j] (`trilinear`).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jaxtyping import Float

from fedjax_cluster.nn.trilinear import at_precision, check_dtypes, contract, differentiable, written_precision

# Bytes after which rows share a CPU's cache sets, of one line, and how many rows it takes for them to be pushed out.
PERIOD, LINE, ROWS = 2048, 64, 16
NARROW = 20  # features up to which dyᵀ·x is two to three times as fast as xᵀ·dy

contraction_p = Primitive("dense_product")


def product(x: Float[Array, "N inputs"], kernel: Float[Array, "inputs features"]) -> Float[Array, "N features"]:
    """x @ kernel, of one dtype, or a TypeError.

    >>> product(jnp.ones((2, 3)), jnp.ones((3, 4))).shape
    (2, 4)
    """
    check_dtypes(x, kernel)
    return contract(contraction_p, "y", {"x": x, "kernel": kernel}, precision=written_precision())


def dot_general(x: Array, kernel: Array, dimensions: Any, **options: Any) -> Array:
    """`lax.dot_general` for a Flax module: `product` where that is what is asked for."""
    plain = x.ndim == kernel.ndim == 2 and dimensions == (((1,), (0,)), ((), ()))
    if plain and x.dtype == kernel.dtype and all(option is None for option in options.values()):
        return product(x, kernel)
    return lax.dot_general(x, kernel, dimensions, **options)


def _of_y(x: Array, kernel: Array) -> Array:
    return lax.dot_general(x, kernel, (((1,), (0,)), ((), ())))


def _of_x(kernel: Array, y: Array) -> Array:
    return lax.dot_general(y, kernel, (((1,), (1,)), ((), ())))


def _of_kernel(x: Array, y: Array) -> Array:
    return lax.dot_general(x, y, (((0,), (0,)), ((), ())))


def _of_kernel_on_cpu(x: Array, y: Array) -> Array:
    (rows, features), size = x.shape, x.dtype.itemsize
    if y.shape[1] <= NARROW:
        # The small operand and the small result are transposed apart, and the product is of rows as they lie.
        return lax.optimization_barrier(_of_y(lax.optimization_barrier(y.T), x)).T
    if rows < ROWS or features * size % PERIOD:
        return _of_kernel(x, y)
    # Behind a barrier, or XLA would take the zeros out of the product again.
    spread = lax.optimization_barrier(jnp.pad(x, ((0, 0), (0, LINE // size))))
    return _of_kernel(spread, y)[:features]


FORMS = {"x": _of_x, "kernel": _of_kernel, "y": _of_y}
CPU_FORMS = {**FORMS, "kernel": _of_kernel_on_cpu}


@at_precision
def _evaluate(first: Array, second: Array, *, wanted: str) -> Array:
    return FORMS[wanted](first, second)


@at_precision
def _on_cpu(first: Array, second: Array, *, wanted: str) -> Array:
    return CPU_FORMS[wanted](first, second)


@contraction_p.def_abstract_eval
def _abstract_eval(first, second, *, wanted: str, precision: Any):
    return jax.make_jaxpr(partial(_evaluate, wanted=wanted, precision=precision))(first, second).out_avals[0]


def _batch(operands, axes, *, wanted: str, precision: Any) -> tuple[Array, int]:
    cpu, other = (jax.vmap(partial(form, wanted=wanted, precision=precision), axes) for form in (_on_cpu, _evaluate))
    return (lax.platform_dependent(*operands, cpu=cpu, default=other) if wanted == "kernel" else other(*operands)), 0


contraction_p.def_impl(jax.jit(_evaluate, static_argnames=("wanted", "precision")))
differentiable(contraction_p)
batching.primitive_batchers[contraction_p] = _batch
mlir.register_lowering(contraction_p, mlir.lower_fun(_evaluate, multiple_results=False))
mlir.register_lowering(contraction_p, mlir.lower_fun(_on_cpu, multiple_results=False), platform="cpu")
