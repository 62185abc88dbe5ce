"""Who takes part in a round."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import Array

from fedjax_cluster.types import Selection


def cohort_size(participation: float, num_clients: int) -> int:
    """C = ⌈participation · M⌉, at least one client.

    Raises:
      ValueError: participation outside (0, 1].

    >>> cohort_size(0.1, 25)
    3
    """
    if not 0 < participation <= 1:
        raise ValueError(
            f"participation is {participation}; it is the share of clients in a round, above 0 and up to 1"
        )
    return max(1, math.ceil(participation * num_clients - 1e-9))


def everyone(present: Array) -> Selection:
    """All clients that are present, each in its place.

    >>> everyone(jnp.asarray([True, True, False])).index.tolist()
    [0, 1, 3]
    """
    return in_place(present)


def uniform(rng_key: Array, present: Array, participation: float, *, first: Array | None = None) -> Selection:
    """A uniform draw without replacement of ⌈participation · present⌉ clients.

    Args:
      rng_key: decides the draw; a client's chance does not depend on how many absent rows follow it.
      present: bool[M].
      participation: share of the present clients, in (0, 1].
      first: bool[M], clients who come before all others; None is nobody.

    Returns:
      A Selection of C = ⌈participation · M⌉ rows.
    """
    capacity = present.shape[0]
    size = cohort_size(participation, capacity)
    if participation == 1:
        return in_place(present)
    wanted = jnp.ceil(participation * jnp.sum(present.astype(jnp.float32)) - 1e-4).astype(jnp.int32)
    score = jax.random.uniform(rng_key, (capacity,))
    if first is not None:
        score = score + first.astype(jnp.float32)
    score = jnp.where(present, score, -1.0)
    _, index = jax.lax.top_k(score, size)
    mask = jnp.arange(size) < jnp.maximum(wanted, 1)
    if size == capacity:
        return in_place(jnp.zeros(capacity, bool).at[index].set(mask) & present)
    return Selection(jnp.where(mask, index, capacity), mask)


def in_place(mask: Array) -> Selection:
    """A selection as large as the population: row i is client i where `mask` bool[M] holds."""
    capacity = mask.shape[0]
    return Selection(jnp.where(mask, jnp.arange(capacity, dtype=jnp.int32), capacity), mask)
