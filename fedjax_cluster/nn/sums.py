"""Sums of short floats: added up in their own format, one by one, they stop growing at 256 times an addend."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array


def sums_in(dtype: jnp.dtype) -> jnp.dtype:
    """The dtype of sums of such numbers: float32 for shorter floats, of which 256 + 1 may be 256."""
    short = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4
    return jnp.dtype(jnp.float32) if short else dtype


def with_bias(x: Array, bias: Array | None) -> Array:
    """x + bias in the dtype of x; the bias's gradient, a sum over all that it is added to, is added up in `sums_in`."""
    if bias is None:
        return x
    wide = sums_in(x.dtype)
    return (x.astype(wide) + bias.astype(wide)).astype(x.dtype)


def rows_of(table: Array, index: Array) -> Array:
    """The rows of a table [n, d] at index [...]; the gradients of one that stands there often add up in `sums_in`."""
    return jnp.take(table.astype(sums_in(table.dtype)), index, axis=0).astype(table.dtype)
