"""Primitives that are one derivative of a trilinear form T(x, kernel, y), such as a product and its gradients.

The gradients of each are the two other derivatives, and theirs again two of the three. So one primitive, of which the
parameter `wanted` says by what T is derived, has gradients of any order in either mode, all in forms of one's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
from jax import Array
from jax.extend.core import Primitive
from jax.interpreters import ad

from fedjax_cluster.nn.varying import equally_varying

ROLES = ("x", "kernel", "y")
PRECISION = "jax_default_matmul_precision"


def written_precision() -> Any:
    """JAX's setting where a product is written, which may not hold any more where it is compiled: a parameter."""
    return getattr(jax.config, PRECISION)


def at_precision(form: Callable[..., Array]) -> Callable[..., Array]:
    """`form` with a parameter `precision`, at which its products are traced."""

    def traced(*operands: Array, precision: Any, **params: Any) -> Array:
        with jax.default_matmul_precision(precision):
            return form(*operands, **params)

    return traced


def check_dtypes(x: Array, kernel: Array) -> None:
    """Raises a TypeError where the two differ, as the gradient of one would then be of the other's type."""
    if x.dtype != kernel.dtype:
        raise TypeError(f"x is {x.dtype} and kernel {kernel.dtype}; cast one of them, as Flax's layers do")


def contract(primitive: Primitive, wanted: str, operands: Mapping[str, Array], **params: Any) -> Array:
    """∂T/∂wanted, in the shape of `wanted`, of the two other roles."""
    first, second = (operands[role] for role in ROLES if role != wanted)
    return primitive.bind(*equally_varying(first, second), wanted=wanted, **params)


def differentiable(primitive: Primitive) -> None:
    """Gives a primitive of two operands its derivatives."""
    ad.defbilinear(primitive, partial(_to_first, primitive), partial(_to_second, primitive))


def _to_first(primitive: Primitive, cotangent: Array, first, second: Array, *, wanted: str, **params: Any) -> Array:
    mine, other = (role for role in ROLES if role != wanted)
    return contract(primitive, mine, {wanted: cotangent, other: second}, **params)


def _to_second(primitive: Primitive, cotangent: Array, first: Array, second, *, wanted: str, **params: Any) -> Array:
    other, mine = (role for role in ROLES if role != wanted)
    return contract(primitive, mine, {wanted: cotangent, other: first}, **params)
