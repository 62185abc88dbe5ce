"""Block Krylov spaces: bases of the leading directions of clients, on one device or divided among several."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from fedjax_cluster.clustering.similarity import matmul


def random_start(rng_key: Array, mask: Array, width: int) -> Array:
    """Random columns; the n-th client that counts takes the n-th row, whatever stands between."""
    position = jnp.maximum(jnp.cumsum(mask, dtype=jnp.int32) - 1, 0)
    rows = jax.random.normal(rng_key, (mask.shape[0], width), jnp.float32)[position]
    return jnp.where(mask[:, None], rows, 0.0)


def krylov_basis(apply: Callable[[Array], Array], start: Array, depth: int, devices: int = 1) -> Array:
    """Orthonormal columns that span {S, AS, …, A^(depth-1) S}."""
    block = orthonormal(start, devices)
    basis = block
    for _ in range(depth - 1):
        block = apply(block)
        block = orthonormal(block - matmul(basis, matmul(basis.T, block)), devices)
        basis = jnp.concatenate([basis, block], axis=1)
    # Where A has low rank, later blocks are rounding noise and no longer orthogonal to the first ones.
    return orthonormal(basis, devices)


def orthonormal(block: Array, devices: int) -> Array:
    """An orthonormal basis of the columns of a block [M, w]: each device's rows first, then what these leave."""
    num_rows, width = block.shape
    share = -(-num_rows // devices)
    if devices == 1 or share < width:
        return jnp.linalg.qr(block)[0]
    rows = jnp.pad(block, ((0, devices * share - num_rows), (0, 0))).reshape(devices, share, width)
    own, left = jnp.linalg.qr(rows)
    among, _ = jnp.linalg.qr(left.reshape(devices * width, width))
    found = jnp.einsum("dsw,dwv->dsv", own, among.reshape(devices, width, width), precision="highest")
    return found.reshape(-1, width)[:num_rows]


def products_of_columns(profile: Array, block: Array, devices: int) -> Array:
    """The products [D, w] of the columns of a profile [M, D] with a block [M, w]; of several devices D at a time."""
    num_columns, width = profile.shape[1], block.shape[1]
    size = max(1, num_columns // width)
    if devices == 1 or size == num_columns:
        return matmul(profile.T, block)

    def write(turn: Array, products: Array) -> Array:
        # The last part reaches back to fit, where it is read and where it is written.
        columns = lax.dynamic_slice_in_dim(profile, turn * size, size, 1)
        return lax.dynamic_update_slice_in_dim(products, matmul(columns.T, block), turn * size, 0)

    products = jnp.zeros((num_columns, width), profile.dtype)
    return lax.fori_loop(0, -(-num_columns // size), write, products)
