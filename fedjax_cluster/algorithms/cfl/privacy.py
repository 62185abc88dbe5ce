"""Orthonormal transforms of updates that clients share and the server does not know (CFL, Sec. V-B, Algorithm 5).

Norms and cosines of updates do not change under any of them, so the server clusters and averages what it cannot read;
the clients turn the average back.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax import Array

from fedjax_cluster.local import shuffled_rows
from fedjax_cluster.privacy.gaussian import gaussian

Scheme = Literal["permutation", "hadamard", "householder"]
NUM_REFLECTIONS = 2


class OrthonormalTransform(NamedTuple):
    """A secret change of coordinates P with PᵀP = 1, for vectors of one size."""

    apply: Callable[[Array], Array]  # f32[d] -> f32[size]
    invert: Callable[[Array], Array]  # f32[size] -> f32[d], Pᵀ
    size: int  # d, or the next power of two


def orthonormal_transform(scheme: Scheme, rng_key: Array, num_parameters: int) -> OrthonormalTransform:
    """The transform that all clients who share a key have in common.

    - "permutation": the coordinates in another order, O(d); entries themselves stay readable.
    - "hadamard": random signs, then the Walsh–Hadamard transform of the next power of two, O(d log d); every entry
      sent is a sum of all.
    - "householder": a permutation and two reflections x − 2v⟨v, x⟩ at random unit vectors, O(d).

    Args:
      scheme: one of the above.
      rng_key: the clients' secret.
      num_parameters: d.

    Returns:
      An OrthonormalTransform; it may be made and used inside jit.

    Raises:
      ValueError: an unknown scheme, or no parameter.

    References:
      CFL, Eqs. 45 and 46.

    >>> transform = orthonormal_transform("hadamard", jax.random.key(0), 5)
    >>> vector = jnp.arange(5.0)
    >>> transform.size, bool(jnp.allclose(transform.invert(transform.apply(vector)), vector, atol=1e-5))
    (8, True)
    """
    check_scheme(scheme)
    if num_parameters < 1:
        raise ValueError(f"num_parameters is {num_parameters}; there is nothing to transform")
    if scheme == "permutation":
        return _permutation(rng_key, num_parameters)
    return (_hadamard if scheme == "hadamard" else _householder)(rng_key, num_parameters)


def check_scheme(scheme: str) -> None:
    """Raises a ValueError for an unknown scheme."""
    if scheme not in get_args(Scheme):
        raise ValueError(f"the transform is {scheme!r}; it must be one of {', '.join(get_args(Scheme))}")


def unprotected(privacy: gaussian, of_gradients: bool, fall_back_after: int | None) -> str | None:
    """What CFL's clients send that differential privacy does not cover, and what to do; None for nothing."""
    if of_gradients:
        return "similarity_of is 'gradients', which clients would send beside their updates; give 'updates'"
    if fall_back_after is not None:
        return "fall_back_after is given, for which clients send accuracies without noise; give none"
    if privacy.clipping == "layers" or privacy.quantile is not None:
        return "an update of cfl is one vector, and its clip stays; give clipping 'flat', and no quantile"
    return None


def _permutation(rng_key: Array, size: int) -> OrthonormalTransform:
    place = shuffled_rows(rng_key, 0, size, size)
    return OrthonormalTransform(
        lambda vector: vector[place],
        lambda vector: jnp.zeros_like(vector).at[place].set(vector, unique_indices=True),
        size,
    )


def _hadamard(rng_key: Array, size: int) -> OrthonormalTransform:
    padded = 1 << max(0, math.ceil(math.log2(size)))
    signs = jax.random.rademacher(rng_key, (size,), jnp.float32)
    return OrthonormalTransform(
        lambda vector: _walsh_hadamard(jnp.pad(signs * vector, (0, padded - size))),
        lambda vector: signs * _walsh_hadamard(vector)[:size],
        padded,
    )


def _walsh_hadamard(vector: Array) -> Array:
    """The orthonormal Walsh–Hadamard transform f32[2ⁿ], which is its own inverse."""
    size = vector.shape[0]
    for level in range(size.bit_length() - 1):
        pairs = vector.reshape(-1, 2, 1 << level)
        vector = jnp.stack([pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]], 1).reshape(size)
    return vector / math.sqrt(size)


def _householder(rng_key: Array, size: int) -> OrthonormalTransform:
    order_key, *mirror_keys = jax.random.split(rng_key, 1 + NUM_REFLECTIONS)
    order = _permutation(order_key, size)
    mirrors = []
    for key in mirror_keys:
        normal = jax.random.normal(key, (size,))
        mirrors.append(normal / jnp.linalg.norm(normal))

    def reflect(vector: Array, mirror: Array) -> Array:
        return vector - 2 * jnp.dot(mirror, vector, precision="highest") * mirror

    def apply(vector: Array) -> Array:
        vector = order.apply(vector)
        for mirror in mirrors:
            vector = reflect(vector, mirror)
        return vector

    def invert(vector: Array) -> Array:
        for mirror in reversed(mirrors):
            vector = reflect(vector, mirror)
        return order.invert(vector)

    return OrthonormalTransform(apply, invert, size)
