"""Which arrays differ from device to device under `shard_map`."""

from __future__ import annotations

import jax
from jax import Array, lax


def equally_varying(a: Array, b: Array) -> tuple[Array, Array]:
    """The two arrays, each marked as varying over the mesh axes that either varies over.

    JAX's operations do this to their operands, so that the gradient of an array shared by all devices is summed over
    them; a new primitive must do the same, and so must the carry of a loop.
    """
    axes_a, axes_b = _varying_axes(a), _varying_axes(b)
    return _also_varying(a, axes_b - axes_a), _also_varying(b, axes_a - axes_b)


def _also_varying(array: Array, axes: frozenset[str]) -> Array:
    return lax.pcast(array, tuple(axes), to="varying") if axes else array


def _varying_axes(array: Array) -> frozenset[str]:
    aval = jax.typeof(array)
    manual = getattr(aval, "mat", None)  # from jax 0.10.2 on; `vma` before
    return manual.varying if manual is not None else getattr(aval, "vma", frozenset())
