"""Inner products and cosines between clients' vectors, in full float32 precision on every backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, ArrayLike, Bool, Float

from fedjax_cluster.clustering import checks
from fedjax_cluster.clustering.checks import Mask

HUGE = 2.0**80  # in whose units no square of float32 overflows
_ROUNDING = 8  # units in the last place of a cosine, as far as which that of equal directions may be from 1

# Columns are cast, scaled and multiplied in chunks, so that no second copy of a large block is made; on a CPU in chunks
# that stay in the cache, as a product of few long rows is otherwise a third slower than the processor.
_CHUNK = 2_048
_ACCELERATOR_CHUNK = 65_536

matmul = partial(jnp.matmul, precision=lax.Precision.HIGHEST)


def block_gram(block: Float[ArrayLike, "M d"]) -> Float[Array, "M M"]:
    r"""Inner products of all pairs of clients; what CFL-GP's Algorithm 3, line 1, needs of Σ_c g_c g_cᵀ.

    .. math:: A_{ij} = \langle g_i, g_j \rangle

    The Gram matrix of stacked blocks is the sum of theirs: where one block changes, one product of [M, d] is enough.

    Args:
      block: one row per client; narrower floats are summed in float32.

    Returns:
      Symmetric, in the square of the block's unit. A row that is not finite spoils only its row and column.

    Raises:
      ValueError: `block` is no matrix of real numbers.

    >>> block_gram(jnp.array([[1.0, 2.0], [3.0, 4.0]])).tolist()
    [[5.0, 11.0], [11.0, 25.0]]
    """
    block = checks.as_array(block, "block")
    if block.ndim != 2 or not jnp.issubdtype(block.dtype, jnp.floating):
        block = checks.floats(block, "block", 2)
    return _gram(jnp.asarray(block), None)


def unit(values: Float[Array, ...], axis: int | None = None, keepdims: bool = False) -> Float[Array, ...]:
    """The power of two below the largest entry: divided by it, no digit changes, and no square or product overflows."""
    _, exponent = jnp.frexp(jnp.abs(values).max(axis=axis, keepdims=keepdims, initial=0.0))
    # Compilers divide by a power of two as they multiply by its inverse, which has to be a normal number as well.
    least = int(jnp.finfo(values.dtype).minexp)
    return jnp.ldexp(jnp.ones((), values.dtype), jnp.clip(exponent - 1, least, -least))


def root(squares: Float[Array, ...]) -> Float[Array, ...]:
    """√x, with the derivative 0 at 0: a row stays at distance 0 from itself."""
    none = squares == 0.0
    return jnp.where(none, 0.0, jnp.sqrt(jnp.where(none, 1.0, squares)))


def of_length_one(rows: Float[Array, "M d"]) -> Float[Array, "M d"]:
    """Rows of the same directions; a row of zeros stays."""
    rows = rows / unit(rows, axis=1, keepdims=True)
    length = root(jnp.square(rows).sum(axis=1, keepdims=True))
    return rows / jnp.where(length > 0.0, length, 1.0)


def degrees(cosines: Float[Array, ...]) -> Float[Array, ...]:
    """arccos in degrees, with the derivative 0 where it is 0° or 180° but for rounding: its slope is infinite there.

    >>> degrees(jnp.array([1.0, 0.0, -1.0])).tolist()
    [0.0, 90.0, 180.0]
    """
    cosines = jnp.clip(cosines, -1.0, 1.0)
    at_end = 1.0 - jnp.abs(cosines) <= _ROUNDING * jnp.finfo(cosines.dtype).eps
    inside = jnp.arccos(jnp.where(at_end, 0.0, cosines))
    angles = jnp.degrees(jnp.where(at_end, lax.stop_gradient(jnp.arccos(cosines)), inside))
    return jnp.minimum(angles, 180.0)  # π in float32 is a little more


def gram_in_units(block: Float[Array, "M d"], mask: Bool[Array, " M"]) -> tuple[Float[Array, "M M"], Float[Array, ""]]:
    """`block_gram` in the square of the `unit` of the rows that count, and that unit."""
    scale = unit(jnp.where(mask[:, None], block, 0.0))
    return _gram(block, jnp.broadcast_to(scale, mask.shape)), scale


def two_norms(squares: Sequence[tuple[Array, Array]]) -> tuple[Array, Array]:
    """The Euclidean norm of what several `two_squares` are of, and the same in units of HUGE."""
    plain, scaled = (root(jnp.sum(jnp.stack(each), axis=0)) for each in zip(*squares, strict=True))
    return plain, scaled


def two_squares(leaf: Array) -> tuple[Array, Array]:
    """The sum of an array's squares, and in units of HUGE², where the first may overflow; in one pass."""
    values = leaf.astype(jnp.float32)
    return jnp.sum(jnp.square(values)), jnp.sum(jnp.square(values / HUGE))


def no_longer(leaf: Array, norms: tuple[Array, Array], limit: Array | float) -> Array:
    """A part of what has these norms, shortened as that is to be no longer than the limit."""
    plain, scaled = norms
    fits, longer = plain < jnp.inf, plain > limit
    near = jnp.where(longer, limit / jnp.where(longer, plain, 1.0), 1.0).astype(leaf.dtype)
    far = (limit / jnp.where(fits, 1.0, scaled)).astype(leaf.dtype)
    return jnp.where(fits, leaf * near, (leaf / jnp.asarray(HUGE, leaf.dtype)) * far)


def row_products(left: Float[Array, "M d"], right: Float[Array, "N d"]) -> Float[Array, "M N"]:
    """Inner products of the rows of two matrices."""
    return over_chunks(lambda a, b: matmul(a, b.T), left, right)


@jax.jit
def _gram(block: Array, scale: Array | None) -> Array:
    """Σ C Cᵀ over chunks C of the columns, each divided by the rows' scale."""

    def product(chunk: Array) -> Array:
        chunk = chunk.astype(jnp.float64 if chunk.dtype == jnp.float64 else jnp.float32)
        if scale is not None:
            chunk = chunk / scale[:, None]
        return matmul(chunk, chunk.T)

    return over_chunks(product, block)


def over_chunks(product: Callable[..., Array], *blocks: Array) -> Array:
    """The sum of `product(*chunks)` over chunks of the columns that all blocks have."""
    if blocks[0].shape[1] < _CHUNK:
        return product(*blocks)
    cpu, other = (partial(_in_chunks, product, size) for size in (_CHUNK, _ACCELERATOR_CHUNK))
    return lax.platform_dependent(*blocks, cpu=cpu, default=other)


def _in_chunks(product: Callable[..., Array], size: int, *blocks: Array) -> Array:
    num_chunks = blocks[0].shape[1] // size
    total = product(*(block[:, num_chunks * size :] for block in blocks))
    if num_chunks:

        def add(index: Array, total: Array) -> Array:
            return total + product(*(lax.dynamic_slice_in_dim(block, index * size, size, axis=1) for block in blocks))

        total = lax.fori_loop(0, num_chunks, add, total)
    return total


def cosine_similarity(updates: Float[ArrayLike, "M d"], mask: Mask = None) -> Float[Array, "M M"]:
    r"""Cosine of the angle between all pairs of clients' updates (CFL, Eqs. 13 and 44; FLAG, Eq. 2).

    .. math:: \alpha_{ij} = \frac{\langle \Delta_i, \Delta_j \rangle}{\|\Delta_i\| \|\Delta_j\|}

    Args:
      updates: one row per client, in any unit.
      mask: clients that count; None means all.

    Returns:
      In [-1, 1], symmetric with diagonal exactly 1; 0 in rows and columns of zero updates and masked-out clients.

    Raises:
      ValueError: wrong shapes, or non-finite updates of clients that count.

    >>> updates = jnp.array([[1.0, 0.0], [0.0, 2.0], [-3.0, 0.0], [0.0, 0.0]])
    >>> cosine_similarity(updates)[0].tolist()
    [1.0, 0.0, -1.0, 0.0]
    """
    updates = checks.floats(updates, "updates", 2)
    mask = checks.client_mask(mask, updates.shape[0])
    checks.finite(updates, "updates", mask)
    return _cosine_similarity(updates, mask)


@jax.jit
def _cosine_similarity(updates: Array, mask: Array) -> Array:
    # With its largest entry near 1 a row's norm neither overflows nor underflows.
    gram = _gram(updates, unit(updates, axis=1))
    squared_norm = jnp.diagonal(gram)
    counts = mask & (squared_norm > 0.0) & jnp.isfinite(squared_norm)
    inverse_norm = jnp.where(counts, lax.rsqrt(jnp.where(counts, squared_norm, 1.0)), 0.0)
    pairs = counts[:, None] & counts[None, :]
    cosine = jnp.where(pairs, gram, 0.0) * inverse_norm[:, None] * inverse_norm[None, :]
    row, column = jnp.indices(gram.shape, sparse=True)
    # A matrix product rounds ij and ji differently, and their mean would be contracted to unequal sums.
    cosine = jnp.clip(jnp.where(row > column, cosine, cosine.T), -1.0, 1.0)
    return jnp.where(row == column, counts.astype(cosine.dtype)[:, None], cosine)
