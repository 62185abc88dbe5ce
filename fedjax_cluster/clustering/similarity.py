"""Inner products and cosines between clients' vectors, in full float32 precision on every backend."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from fedjax_cluster.clustering import checks

# A chunk of columns is cast, scaled and multiplied at a time, so that no second copy of a large block is made; on a
# CPU one that stays in the cache, as a product of few long rows is otherwise a third slower than the processor.
_CHUNK = 2_048
_ACCELERATOR_CHUNK = 65_536

_matmul = partial(jnp.matmul, precision=lax.Precision.HIGHEST)


def block_gram(block: Any) -> Array:
    r"""Inner products of all pairs of clients.

    .. math:: A_{ij} = \langle g_i, g_j \rangle

    The Gram matrix of stacked blocks [B_1, …, B_K] is the sum of the blocks' Gram matrices, so a profile of
    which one block changes needs one product of [M, d], not of [M, Kd].

    Args:
        block: f32[M, d] (or a narrower float), one row per client.

    Returns:
        f32[M, M], symmetric, in the square of the block's unit. A row that is not finite spoils its own row
        and column only.

    Raises:
        ValueError: `block` is not a matrix of real numbers.

    Example:
        >>> import jax.numpy as jnp
        >>> block_gram(jnp.array([[1.0, 2.0], [3.0, 4.0]])).tolist()
        [[5.0, 11.0], [11.0, 25.0]]

    References:
        CFL-GP, Algorithm 3, line 1, where Σ_c g_c g_cᵀ has the same eigenvalues.
    """
    block = jnp.asarray(block)
    if block.ndim != 2 or not jnp.issubdtype(block.dtype, jnp.floating):
        block = checks.floats(block, "block", 2)
    return _gram(block, None)


def row_products(left: Array, right: Array) -> Array:
    """Inner products f32[M, N] of the rows of [M, d] with the rows of [N, d]."""
    return _over_chunks(lambda a, b: _matmul(a, b.T), left, right)


@jax.jit
def _gram(block: Array, scale: Array | None) -> Array:
    """Σ over column chunks of C Cᵀ, where C is the chunk divided by the rows' scale."""

    def product(chunk: Array) -> Array:
        chunk = chunk.astype(jnp.float32)
        if scale is not None:
            chunk = chunk / scale[:, None]
        return _matmul(chunk, chunk.T)

    return _over_chunks(product, block)


def _over_chunks(product: Callable[..., Array], *blocks: Array) -> Array:
    """The sum of `product(*chunks)` over chunks of the columns that all blocks have."""
    size = _CHUNK if jax.default_backend() == "cpu" else _ACCELERATOR_CHUNK
    num_chunks = blocks[0].shape[1] // size
    total = product(*(block[:, num_chunks * size :] for block in blocks))
    if num_chunks:

        def add(index: Array, total: Array) -> Array:
            return total + product(*(lax.dynamic_slice_in_dim(block, index * size, size, axis=1) for block in blocks))

        total = lax.fori_loop(0, num_chunks, add, total)
    return total


def cosine_similarity(updates: Any, mask: Any = None) -> Array:
    r"""Cosine of the angle between all pairs of clients' updates.

    .. math:: \alpha_{ij} = \frac{\langle \Delta_i, \Delta_j \rangle}{\|\Delta_i\| \|\Delta_j\|}

    Args:
        updates: f32[M, d], one row per client, in any unit (the scale of a row does not matter).
        mask: bool[M], clients that count; None means all.

    Returns:
        f32[M, M] in [-1, 1], symmetric, with diagonal exactly 1. Rows and columns of zero updates and of
        masked-out clients are 0, their diagonal too.

    Raises:
        ValueError: wrong shapes, or non-finite updates of clients that count.

    Example:
        >>> import jax.numpy as jnp
        >>> updates = jnp.array([[1.0, 0.0], [0.0, 2.0], [-3.0, 0.0], [0.0, 0.0]])
        >>> cosine_similarity(updates)[0].tolist()
        [1.0, 0.0, -1.0, 0.0]

    References:
        CFL, Eqs. 13 and 44; FLAG, Eq. 2.
    """
    updates = checks.floats(updates, "updates", 2)
    mask = checks.client_mask(mask, updates.shape[0])
    checks.finite(updates, "updates", mask)
    return _cosine_similarity(updates, mask)


@jax.jit
def _cosine_similarity(updates: Array, mask: Array) -> Array:
    # With its largest entry at 1 a row's norm neither overflows nor underflows.
    largest = jnp.abs(updates).max(axis=1, initial=0.0)
    scale = jnp.where(largest > 0.0, largest, 1.0)
    return _cosine_from_gram(_gram(updates, scale), mask)


def cosine_from_gram(gram: Any, mask: Any = None) -> Array:
    r"""Cosines from inner products, where the updates themselves are too large to keep.

    .. math:: \alpha_{ij} = A_{ij} / \sqrt{A_{ii} A_{jj}}

    Args:
        gram: f32[M, M], a sum of `block_gram` over the parts of the updates.
        mask: bool[M], clients that count; None means all.

    Returns:
        f32[M, M] as `cosine_similarity` gives it.

    Raises:
        ValueError: `gram` is not square, or not finite between clients that count.

    Example:
        >>> import jax.numpy as jnp
        >>> first, second = jnp.array([[1.0], [1.0]]), jnp.array([[0.0], [1.0]])
        >>> round(float(cosine_from_gram(block_gram(first) + block_gram(second))[0, 1]), 4)
        0.7071

    References:
        CFL, Eq. 44.
    """
    gram = checks.square(gram, "gram")
    mask = checks.client_mask(mask, gram.shape[0])
    checks.finite_matrix(gram, "gram", mask)
    return _cosine_from_gram(gram, mask)


@jax.jit
def _cosine_from_gram(gram: Array, mask: Array) -> Array:
    squared_norm = jnp.diagonal(gram)
    counts = mask & (squared_norm > 0.0)
    inverse_norm = jnp.where(counts, lax.rsqrt(jnp.where(counts, squared_norm, 1.0)), 0.0)
    pairs = counts[:, None] & counts[None, :]
    cosine = jnp.where(pairs, gram, 0.0) * inverse_norm[:, None] * inverse_norm[None, :]
    row, column = jnp.indices(gram.shape, sparse=True)
    # A matrix product rounds ij and ji differently, and their mean would be contracted to unequal sums.
    cosine = jnp.clip(jnp.where(row > column, cosine, cosine.T), -1.0, 1.0)
    return jnp.where(row == column, counts.astype(jnp.float32)[:, None], cosine)
