"""The subspaces of clients' data, class by class."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, ArrayLike, Float, Int, Real

from fedjax_cluster.clustering import checks
from fedjax_cluster.clustering.similarity import matmul, unit
from fedjax_cluster.options import SHARE, checked, shown

# Subspace iteration: vectors beyond those wanted, and iterations. Spectra of data fall fast.
_OVERSAMPLING = 8
_ITERATIONS = 6
# Up to this many examples or features a whole SVD takes no longer.
_DIRECT = 64
# A class's examples, of which a client mostly has few, are gathered into the first of these that holds them.
_GATHERED = (32, 64, 128, 256, 512)
# Eigenvalues of a Gram matrix that are told from rounding, in units of the largest one's last place.
_GRAM_FLOOR = 100
# Singular values below this share of the largest are rounding noise of float32.
_NOISE_FLOOR = 1e-5
# Directions that stacked unit vectors share up to such rounding.
_DEPENDENT = 1e-4


def principal_vectors(
    x: Real[ArrayLike, "N f"],
    y: Int[ArrayLike, " N"],
    num_examples: Int[ArrayLike, ""],
    num_classes: int,
    rank: int,
    share: float | None = None,
) -> Float[Array, " {num_classes} f {rank}"]:
    r"""The leading left singular vectors of one client's data, class by class (FLAG, Section 4.1; PACFL).

    .. math:: D_c = U \Sigma V^\top \in \mathbb{R}^{f \times n_c}, \qquad U_c = [u_1, \dots, u_p]

    Args:
      x: the examples in rows, in any unit; not centred.
      y: their classes in 0..num_classes-1.
      num_examples: how many rows count; the rest is padding.
      num_classes: L, static.
      rank: the largest p, static; at most f.
      share: p as a share of the class's examples, rounded down but at least 1, static; None means `rank` for every
        class. The paper sends about 0.01.

    Returns:
      Orthonormal columns in the order of their singular values; 0 beyond p and beyond the rank of the class's data.

    Raises:
      ValueError: wrong shapes, num_examples outside 0..N, rank outside 1..f, share outside (0, 1], labels outside
        0..L-1, or non-finite examples.

    >>> x = jnp.array([[2.0, 0.0, 0.0], [0.0, 3.0, 0.0], [0.0, 1.0, 0.0], [9.0, 9.0, 9.0]])
    >>> vectors = principal_vectors(x, jnp.array([0, 1, 1, 0]), 3, 2, 1)
    >>> jnp.abs(vectors[:, :, 0]).tolist()
    [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]
    """
    x = checks.floats(x, "x", 2)
    y = checks.labels(y, "y", x.shape[0])
    num_examples = checks.as_array(num_examples, "num_examples")
    if num_examples.shape != () or not jnp.issubdtype(num_examples.dtype, jnp.integer):
        raise ValueError(f"num_examples is {shown(num_examples)}; it must be the whole number of rows that count.")
    num_examples = jnp.asarray(num_examples, jnp.int32)
    if not checks.holds(lambda number: (number >= 0) & (number <= x.shape[0]), num_examples):
        raise ValueError(f"num_examples is {shown(num_examples)} of {x.shape[0]} rows; give how many of them count.")
    num_classes = checks.count(num_classes, "num_classes")
    rank = checks.count(rank, "rank", maximum=x.shape[1], there_are="features exist")
    share = checked("share", share, float | None, SHARE)
    valid = jnp.arange(x.shape[0], dtype=jnp.int32) < num_examples
    checks.finite(x, "x", valid)
    if not checks.holds(lambda y, valid: ((y >= 0) & (y < num_classes) | ~valid).all(), y, valid):
        raise ValueError(f"y holds labels outside 0..{num_classes - 1}: raise num_classes or repair y.")
    return _principal_vectors(x, y, valid, num_classes, rank, share)


@partial(jax.jit, static_argnames=("num_classes", "rank", "share"))
def _principal_vectors(x: Array, y: Array, valid: Array, num_classes: int, rank: int, share: float | None) -> Array:
    x = jnp.where(valid[:, None], x, 0.0)
    # A LAPACK that is given NaN may never end, and what it makes of it may look like a client without rows.
    finite = jnp.isfinite(x).all()
    x = jnp.where(finite, x, 0.0)
    x = x / _unit_of_class(x, y, num_classes)
    width = min(rank, x.shape[0])
    leading = _leading_vectors_of(x, width)

    def of_class(label: Array) -> Array:
        members = valid & (y == label)
        count = members.sum(dtype=jnp.int32)
        vectors, singular_values = leading(members)
        column = jnp.arange(width, dtype=jnp.int32)
        kept = (column < count) & (singular_values > _floor(_NOISE_FLOOR, x) * singular_values[0])
        if share is not None:
            # Rounded on the host, as 0.53 · 100 in float32 is below 53.
            most = np.floor(np.round(share * np.arange(x.shape[0] + 1), 9)).astype(np.int32)
            kept &= column < jnp.maximum(jnp.asarray(most)[count], 1)
        return jnp.pad(jnp.where(kept[None, :], vectors, 0.0), ((0, 0), (0, rank - width)))

    def of_present_class(label: Array) -> Array:
        zeros = jnp.zeros((x.shape[1], rank), x.dtype)
        return lax.cond((valid & (y == label)).any(), of_class, lambda _: zeros, label)

    vectors = lax.map(of_present_class, jnp.arange(num_classes, dtype=jnp.int32))
    return jnp.where(finite, vectors, jnp.nan)


def _unit_of_class(x: Array, y: Array, num_classes: int) -> Array:
    """The `unit` f32[N, 1] of the rows of each row's class: one class's may be far smaller than another's."""
    largest = jax.ops.segment_max(jnp.abs(x).max(axis=1, initial=0.0), y, num_classes)
    units = jax.vmap(unit)(jnp.maximum(largest, 0.0))
    return units[jnp.clip(y, 0, num_classes - 1)][:, None]


def _leading_vectors_of(x: Array, width: int) -> Callable[[Array], tuple[Array, Array]]:
    """The first right singular vectors f32[f, width] of some rows of x [N, f], and their singular values."""
    sampled = width + _OVERSAMPLING

    def directly(rows: Array) -> tuple[Array, Array]:
        _, singular_values, right = jnp.linalg.svd(rows, full_matrices=False)
        return right[:width].T, singular_values[:width]

    if min(x.shape) <= max(sampled, _DIRECT):
        return lambda members: directly(_rows(x, members))

    def within(rows: Array, basis: Array) -> tuple[Array, Array]:
        _, singular_values, right = jnp.linalg.svd(jnp.linalg.qr(matmul(rows, basis), mode="r"))
        return matmul(basis, right[:width].T), singular_values[:width]

    def of_few(rows: Array, count: Array) -> tuple[Array, Array]:
        eigenvalues, vectors = jnp.linalg.eigh(matmul(rows, rows.T))
        # Far below the largest, eigenvalues of a Gram matrix are rounding.
        least = eigenvalues[-jnp.minimum(width, count)]
        told = least > _GRAM_FLOOR * jnp.finfo(rows.dtype).eps * eigenvalues[-1]

        def among_leading() -> tuple[Array, Array]:
            return within(rows, jnp.linalg.qr(matmul(rows.T, vectors[:, -sampled:]))[0])

        return lax.cond(told, among_leading, lambda: directly(rows))

    def gathered(size: int, members: Array) -> tuple[Array, Array]:
        (index,) = jnp.nonzero(members, size=size, fill_value=0)
        count = members.sum(dtype=jnp.int32)
        rows = _rows(x[index], jnp.arange(size) < count)
        return of_few(rows, count) if size <= _DIRECT else within(rows, _leading_basis(rows, sampled))

    def whole(members: Array) -> tuple[Array, Array]:
        rows = _rows(x, members)
        return within(rows, _leading_basis(rows, sampled))

    sizes = [size for size in _GATHERED if sampled <= size < len(x)]
    branches = [*(partial(gathered, size) for size in sizes), whole]
    fits = jnp.array(sizes, jnp.int32)

    def by_size(members: Array) -> tuple[Array, Array]:
        return lax.switch((members.sum(dtype=jnp.int32) > fits).sum(), branches, members)

    # Of clients side by side, as accelerators have them, every branch would be computed.
    return lambda members: lax.platform_dependent(members, cpu=by_size, default=whole)


def _rows(x: Array, members: Array) -> Array:
    return jnp.where(members[:, None], x, 0.0)


def _leading_basis(rows: Array, sampled: int) -> Array:
    """An orthonormal basis f32[f, sampled] of the leading right singular vectors of rows [n, f], near enough."""
    num_rows, num_features = rows.shape
    if num_rows >= num_features:
        return _iterate(lambda basis: matmul(rows.T, matmul(rows, basis)), num_features, sampled, rows.dtype)
    gram = matmul(rows, rows.T)  # one of 784 features would cost ten times the iteration
    basis = _iterate(partial(matmul, gram), num_rows, sampled, rows.dtype)
    return jnp.linalg.qr(matmul(rows.T, basis))[0]


def _iterate(apply: Callable[[Array], Array], size: int, sampled: int, dtype: Any) -> Array:
    """An orthonormal basis [size, sampled] of the leading directions of `apply`, a symmetric operator."""
    start = jnp.linalg.qr(jax.random.normal(jax.random.key(0), (size, sampled), jnp.float32).astype(dtype))[0]
    return lax.fori_loop(0, _ITERATIONS, lambda _, basis: jnp.linalg.qr(apply(basis))[0], start)


def joint_basis(vectors: Float[ArrayLike, "L f p"]) -> Float[Array, "f min(L*p,f)"]:
    r"""An orthonormal basis of what the principal vectors of all classes span together (PACFL, Section 3).

    .. math:: [U_1, \dots, U_L] = Q S R^\top, \qquad Q \text{ without the columns of } s \approx 0

    Vectors of different classes are not orthogonal to each other, so their angles are not principal angles.

    Args:
      vectors: orthonormal columns or zeros, as `principal_vectors` gives them.

    Returns:
      Orthonormal columns; those beyond the span's dimension are 0.

    Raises:
      ValueError: wrong shapes, or non-finite vectors.

    >>> vectors = jnp.array([[[1.0], [0.0], [0.0]], [[0.6], [0.8], [0.0]]])
    >>> basis = joint_basis(vectors)
    >>> bool(jnp.allclose(basis @ basis.T, jnp.diag(jnp.array([1.0, 1.0, 0.0])), atol=1e-6))
    True
    """
    vectors = checks.floats(vectors, "vectors", 3)
    checks.finite(vectors, "vectors")
    stacked = jnp.swapaxes(vectors, 0, 1).reshape(vectors.shape[1], -1)
    left, singular_values, _ = jnp.linalg.svd(stacked, full_matrices=False)
    return jnp.where((singular_values > _floor(_DEPENDENT, vectors) * singular_values[0])[None, :], left, 0.0)


def _floor(share: float, x: Array) -> float:
    """A share that stands for the rounding of float32, for that of `x`."""
    return share * float(jnp.finfo(x.dtype).eps / jnp.finfo(jnp.float32).eps)
