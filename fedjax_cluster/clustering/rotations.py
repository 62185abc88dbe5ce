"""Singular values of many small matrices, for the angles between all pairs of subspaces."""

from __future__ import annotations

import itertools

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

# The largest matrices that rotations serve, and the sweeps after which these have converged.
_LARGEST_ROTATED = 4
_SWEEPS = 5


def batched_singular_values(matrices: Float[Array, "p p ..."]) -> Float[Array, "p ..."]:
    """Singular values of many small matrices at once.

    Up to 4 by 4 by one-sided Jacobi rotations, which are arithmetic on whole arrays; LAPACK takes a call per matrix.

    Args:
        matrices: the same entry of all matrices side by side.

    Returns:
        Singular values, descending.

    >>> batched_singular_values(jnp.array([[3.0, 0.0], [0.0, -4.0]])).tolist()
    [4.0, 3.0]
    """
    rank = matrices.shape[0]
    if rank == 1:
        return jnp.abs(matrices[0])
    if rank > _LARGEST_ROTATED:
        values = jnp.linalg.svd(jnp.moveaxis(matrices, (0, 1), (-2, -1)), compute_uv=False)
        return jnp.moveaxis(values, -1, 0)

    def rotate(x: Array, y: Array) -> tuple[Array, Array]:
        """Makes two columns orthogonal."""
        product = (x * y).sum(axis=0)
        slope = ((y * y).sum(axis=0) - (x * x).sum(axis=0)) / jnp.where(product == 0.0, 1.0, 2.0 * product)
        tangent = jnp.where(slope < 0.0, -1.0, 1.0) / (jnp.abs(slope) + jnp.sqrt(1.0 + slope * slope))
        tangent = jnp.where(product == 0.0, 0.0, tangent)
        cosine = lax.rsqrt(1.0 + tangent * tangent)
        sine = cosine * tangent
        cosine, sine = cosine[None], sine[None]
        return cosine * x - sine * y, sine * x + cosine * y

    def sweep(_: Array, columns: list[Array]) -> list[Array]:
        columns = list(columns)
        for i, j in itertools.combinations(range(rank), 2):
            columns[i], columns[j] = rotate(columns[i], columns[j])
        return columns

    columns = lax.fori_loop(0, _SWEEPS, sweep, [matrices[:, j] for j in range(rank)])
    lengths = jnp.sqrt(jnp.stack([(column * column).sum(axis=0) for column in columns]))
    return -jnp.sort(-lengths, axis=0)
