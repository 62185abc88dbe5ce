"""Runs of equal values in sorted lists."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Int, Shaped


def run_index(*columns: Shaped[Array, " M"]) -> Int[Array, " M"]:
    """0 for the first run of equal entries (in all columns), 1 for the second, and so on."""
    starts = jnp.zeros(columns[0].shape[0] - 1, bool)
    for column in columns:
        starts |= column[1:] != column[:-1]
    return jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(starts, dtype=jnp.int32)])
