"""Pooling whose gradient is one pass over the image, under any map over clients.

The gradient of XLA's `reduce_window` maximum scatters, and is slow inside loops and under `vmap`. Here the forward
pass keeps the position of the maximum in each window (one byte per output), which selects the gradient.
"""

from __future__ import annotations

from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Float

from fedjax_cluster.nn.merged_pooling import FEW_CHANNELS, merged_max_pool
from fedjax_cluster.nn.sums import sums_in
from fedjax_cluster.nn.windows import Padding, Pair, Sides, Window, check_fit, explicit_padding, pair, slices_by_tap


def max_pool(
    x: Float[Array, "N H W C"], window_shape: Sides, strides: Sides | None = None, padding: Padding = "VALID"
) -> Float[Array, "N H_out W_out C"]:
    """The maximum over windows, as `flax.linen.max_pool`; the gradient goes to the first maximum of a window.

    Args:
      x: f32[N, H, W, C].
      window_shape: an integer or (height, width).
      strides: an integer or (height, width); 1 by default, as in Flax.
      padding: "VALID", "SAME", an integer for all four sides, or per dimension an integer or (low, high); of −∞.

    Returns:
      f32[N, H', W', C]. Of equal maxima in a window, the first in row-major order takes the gradient: a subgradient.

    Raises:
      ValueError: x is not [N, H, W, C], a window that does not fit into the padded image, or an unknown padding.

    >>> x = jnp.arange(16.0).reshape(1, 4, 4, 1)
    >>> max_pool(x, (2, 2), (2, 2))[0, :, :, 0]
    Array([[ 5.,  7.],
           [13., 15.]], dtype=float32)
    """
    shape, window = _window(x, window_shape, strides, padding)
    if jnp.issubdtype(x.dtype, jnp.integer):
        # No integer is −∞, and none has a gradient.
        lowest = np.asarray(jnp.iinfo(x.dtype).min, x.dtype)
        return _xla_max_pool(x, shape, window, lowest)
    return _max_pool(x, shape, window)


def avg_pool(
    x: Float[Array, "N H W C"], window_shape: Sides, strides: Sides | None = None, padding: Padding = "VALID"
) -> Float[Array, "N H_out W_out C"]:
    """The mean over windows, f32[N, H', W', C], as `flax.linen.avg_pool`; padding counts as zeros.

    Args:
      x, window_shape, strides, padding: as in `max_pool`, but padded by zeros.

    Raises:
      ValueError: as `max_pool`.

    >>> x = jnp.arange(16.0).reshape(1, 4, 4, 1)
    >>> avg_pool(x, (2, 2), (2, 2))[0, :, :, 0]
    Array([[ 2.5,  4.5],
           [10.5, 12.5]], dtype=float32)
    """
    shape, window = _window(x, window_shape, strides, padding)
    size = shape[0] * shape[1]
    x = x if jnp.issubdtype(x.dtype, jnp.floating) else x.astype(jnp.float32)
    if _tiles(shape, window):
        return _tiled(x, shape).sum(axis=(2, 4)) / size
    wide = x.astype(sums_in(x.dtype))
    return (reduce(lax.add, slices_by_tap(wide, shape, window)) / size).astype(x.dtype)


def _max_pool(x: Array, shape: Pair, window: Window) -> Array:
    # A step of `cnn` compiled for a TPU v5e takes half the cycles with XLA's own pooling, one of `lenet5` a third.
    # On an H200 a step of 128 clients × b = 32 takes 9.6 ms with it and 10.0 without, one of `lenet5` 17.7 and 13.7.
    own, other = (partial(form, shape=shape, window=window) for form in (_own_max_pool, _xla_max_pool))
    if _tiles(shape, window) and x.shape[-1] <= FEW_CHANNELS:
        other = partial(merged_max_pool, shape=shape)
    return lax.platform_dependent(x, cpu=own, cuda=own, rocm=own, default=other)


def _xla_max_pool(x: Array, shape: Pair, window: Window, lowest: Any = -jnp.inf) -> Array:
    pads = ((0, 0), *window.padding, (0, 0))
    return lax.reduce_window(x, lowest, lax.max, (1, *shape, 1), (1, *window.strides, 1), pads)


@partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def _own_max_pool(x: Array, shape: Pair, window: Window) -> Array:
    if _tiles(shape, window):
        return _tiled(x, shape).max(axis=(2, 4))
    return reduce(lax.max, slices_by_tap(x, shape, window, -jnp.inf))


@_own_max_pool.defjvp
def _max_pool_jvp(shape: Pair, window: Window, primals, tangents):
    (x,), (tangent,) = primals, tangents
    maximum = _own_max_pool(x, shape, window)
    position_type = jnp.int8 if shape[0] * shape[1] < 128 else jnp.int32
    if _tiles(shape, window):
        # The transpose of the last sum writes the gradient once, row by row; that of slices would pad and add.
        # The position is a reduction, which XLA computes once; it would repeat a chain of comparisons for every use
        # in the backward pass (a step of the whole `cnn` took 1.15 times as long).
        tiles = _tiled(x, shape)
        rows, columns = (lax.broadcasted_iota(position_type, tiles.shape, axis) for axis in (2, 4))
        position, last = rows * shape[1] + columns, shape[0] * shape[1] - 1
        attained = tiles == maximum[:, :, None, :, None]
        first = jnp.where(attained, position, jnp.full_like(position, last)).min(axis=(2, 4))
        chosen = position == first[:, :, None, :, None]
        return maximum, jnp.where(chosen, _tiled(tangent, shape), 0.0).sum(axis=(2, 4))
    first, highest = jnp.zeros(maximum.shape, position_type), jnp.full_like(maximum, -jnp.inf)
    for position, tap in enumerate(slices_by_tap(x, shape, window, -jnp.inf)):
        first = jnp.where(tap > highest, jnp.full_like(first, position), first)
        highest = lax.max(highest, tap)
    taps = enumerate(slices_by_tap(tangent, shape, window))
    return maximum, reduce(lax.add, [jnp.where(first == position, tap, 0.0) for position, tap in taps])


def _tiles(shape: Pair, window: Window) -> bool:
    return window == Window(strides=shape)


def _tiled(x: Array, shape: Pair) -> Array:
    """Adjacent windows without overlap, as [N, H', kh, W', kw, C]; a remainder is left out."""
    n, height, width, channels = x.shape
    height, width = height // shape[0], width // shape[1]
    return x[:, : height * shape[0], : width * shape[1]].reshape(n, height, shape[0], width, shape[1], channels)


def _window(x: Array, window_shape, strides, padding: Padding) -> tuple[Pair, Window]:
    if np.ndim(x) != 4:
        raise ValueError(f"x has shape {np.shape(x)}; pooling takes [N, H, W, C]")
    shape = pair(window_shape, "window_shape")
    steps = pair(1 if strides is None else strides, "strides")
    pads = explicit_padding(padding, x.shape[1:3], shape, steps)
    check_fit(x.shape[1:3], shape, pads)
    return shape, Window(steps, pads)
