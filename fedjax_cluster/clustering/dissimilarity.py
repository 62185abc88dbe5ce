"""Dissimilarity of clients by the angles between their data, class by class, and between their gradients."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, ArrayLike, Float, Int

from fedjax_cluster.clustering import checks
from fedjax_cluster.clustering.checks import Mask, Scalar
from fedjax_cluster.clustering.similarity import cosine_similarity, degrees, root

Reduction = Literal["smallest", "sum"]

_BLOCK = 128  # clients compared at once
_BLOCK_COLUMNS = 4096  # of all clients of a block together: the products are a square of this size
_ROTATED = 4  # the largest matrices that Jacobi rotations serve
_SWEEPS = 5  # after which these have converged
_ROUNDING = 8  # units in the last place of a cosine or of an angle, as far as which equal ones may be apart
RADIAN = 180.0 / math.pi  # degrees


def classwise_angles(
    vectors: Float[ArrayLike, "M L f p"],
    counts: Int[ArrayLike, "M L"],
    reduction: Literal["smallest", "sum"] = "smallest",
) -> Float[Array, "M M L"]:
    r"""Angles between the clients' data of each class (FLAG, Section 4.1, Eqs. 1 and 3).

    .. math:: \mathcal{V}'_{ijc} = \begin{cases}
        \arccos \sigma_1(U_{ic}^\top U_{jc}) & \text{if both have class } c \\
        180° & \text{if one has it} \\ 0° & \text{if none has it} \end{cases}

    The choice of basis does not matter. Angles are exact to 0.05°, the digits of a float32 arccosine near 1.

    Args:
      vectors: orthonormal columns or zeros, as `principal_vectors` gives them.
      counts: examples of each class on each client.
      reduction: "smallest" angle, or the "sum" of all, which ranks only pairs of equal dimensions; static.

    Returns:
      Degrees, symmetric in the clients, 0 between a client and itself.

    Raises:
      ValueError: shapes that do not fit, an unknown reduction, or non-finite vectors.

    >>> vectors = jnp.array([[[[1.0], [0.0]]], [[[0.6], [0.8]]], [[[0.0], [0.0]]]])
    >>> angles = classwise_angles(vectors, jnp.array([[5], [9], [0]]))
    >>> [round(float(angle), 2) for angle in angles[0, :, 0]]
    [0.0, 53.13, 180.0]
    """
    vectors = checks.floats(vectors, "vectors", 4)
    counts = class_counts(counts, vectors.shape[:2])
    checks.choice(reduction, "reduction", ("smallest", "sum"))
    checks.finite(vectors, "vectors")
    return _classwise_angles(vectors, counts, reduction)


@partial(jax.jit, static_argnames="reduction")
def _classwise_angles(vectors: Array, counts: Array, reduction: str) -> Array:
    of_class = _angles_in_a_class(vectors, counts, reduction)
    return jnp.moveaxis(lax.map(of_class, jnp.arange(counts.shape[1], dtype=jnp.int32)), 0, 2)


def _angles_in_a_class(vectors: Array, counts: Array, reduction: str) -> Callable[[Array], Array]:
    """A function of a class i32[] that gives its angles f32[M, M] of all pairs."""
    num_clients, _, num_features, rank = vectors.shape
    dimension = _dimension(vectors)
    size = min(_BLOCK, num_clients, max(1, _BLOCK_COLUMNS // rank))
    # The last block ends with the last client, and shares some with the one before.
    starts = np.minimum(np.arange(0, num_clients, size), num_clients - size)
    firsts, seconds = (jnp.asarray(starts[index], jnp.int32) for index in np.triu_indices(len(starts)))

    def between_all(of_class: Array) -> Array:
        def part(start: Array) -> tuple[Array, Array]:
            first = jnp.int32(0)
            block = lax.dynamic_slice(vectors, (start, of_class, first, first), (size, 1, num_features, rank))
            return block[:, 0], lax.dynamic_slice(dimension, (start, of_class), (size, 1))[:, 0]

        def add_blocks(pair: Array, angles: Array) -> Array:
            between = _angles_of_bases(*part(firsts[pair]), *part(seconds[pair]), reduction)
            return lax.dynamic_update_slice(angles, between, (firsts[pair], seconds[pair]))

        zeros = jnp.zeros((num_clients, num_clients), vectors.dtype)
        angles = lax.fori_loop(0, len(firsts), add_blocks, zeros)
        first, second = jnp.indices(angles.shape, sparse=True)
        angles = jnp.where(first < second, angles, angles.T)
        angles = jnp.where(first == second, 0.0, angles)
        has = lax.dynamic_slice_in_dim(counts, of_class, 1, axis=1)
        return _where_both_have_the_class(angles[:, :, None], has, has)[:, :, 0]

    return between_all


def angles_between(vectors: Array, counts: Array, others: Array, other_counts: Array, reduction: Reduction) -> Array:
    """`classwise_angles` f32[B, m, L] of B clients' vectors with those of m others, without checks."""

    def of_class(data: tuple[Array, Array, Array, Array]) -> Array:
        first, rows, second, columns = data  # [B, f, p], [B], [m, f, p], [m]
        return _angles_of_bases(first, rows, second, columns, reduction)

    data = vectors, _dimension(vectors), others, _dimension(others)
    angles = lax.map(of_class, jax.tree.map(lambda leaf: jnp.swapaxes(leaf, 0, 1), data))
    return _where_both_have_the_class(jnp.moveaxis(angles, 0, 2), counts, other_counts)


def _dimension(vectors: Array) -> Array:
    """i32[M, L], the columns of each basis f32[M, L, f, p] that are not zero."""
    return (jnp.abs(vectors).max(axis=2, initial=0.0) > 0.0).sum(axis=2, dtype=jnp.int32)


def _angles_of_bases(bases: Array, dimension: Array, others: Array, columns: Array, reduction: str) -> Array:
    """Angles f32[A, B] in degrees between bases f32[A, f, p] and f32[B, f, p] of so many columns, i32[A] and i32[B]."""
    cross = jnp.einsum("afp,bfq->paqb", bases, others, precision="highest")
    cosines = _singular_values(jnp.moveaxis(cross, 2, 1))
    between = degrees(jnp.clip(cosines, 0.0, 1.0))  # [p, A, B], ascending
    if reduction == "smallest":
        return between[0]
    num_angles = jnp.minimum(dimension[:, None], columns[None, :])
    counted = jnp.arange(cross.shape[0], dtype=jnp.int32)[:, None, None] < num_angles[None]
    # An empty subspace is at a right angle to all, as for the smallest angle.
    return jnp.where(num_angles > 0, jnp.where(counted, between, 0.0).sum(axis=0), 90.0)


def _where_both_have_the_class(angles: Array, counts: Array, others: Array) -> Array:
    has, have = counts > 0, others > 0
    both, either = has[:, None, :] & have[None, :, :], has[:, None, :] | have[None, :, :]
    return jnp.where(both, angles, jnp.where(either, 180.0, 0.0))


def _singular_values(matrices: Array) -> Array:
    """Descending singular values of many small matrices, given the same entry of all side by side.

    >>> _singular_values(jnp.array([[3.0, 0.0], [0.0, -4.0]])).tolist()
    [4.0, 3.0]
    """
    rank = matrices.shape[0]
    if rank == 1:
        return jnp.abs(matrices[0])
    if rank > _ROTATED:
        # On a CPU one after the other: of many in one call, two devices wait for each other's threads and never end.
        of_one = partial(jnp.linalg.svd, compute_uv=False)
        flat = jnp.moveaxis(matrices.reshape(rank, rank, -1), 2, 0)
        values = lax.platform_dependent(flat, cpu=partial(lax.map, of_one), default=of_one)
        return values.T.reshape(rank, *matrices.shape[2:])

    # One-sided Jacobi rotations are arithmetic on whole arrays, where LAPACK takes a call per matrix.
    def rotate(x: Array, y: Array) -> tuple[Array, Array]:
        product = (x * y).sum(axis=0)
        slope = ((y * y).sum(axis=0) - (x * x).sum(axis=0)) / jnp.where(product == 0.0, 1.0, 2.0 * product)
        tangent = jnp.where(slope < 0.0, -1.0, 1.0) / (jnp.abs(slope) + jnp.sqrt(1.0 + slope * slope))
        tangent = jnp.where(product == 0.0, 0.0, tangent)
        cosine = lax.rsqrt(1.0 + tangent * tangent)[None]
        sine = cosine * tangent[None]
        return cosine * x - sine * y, sine * x + cosine * y

    def sweep(_: Array, columns: list[Array]) -> list[Array]:
        columns = list(columns)
        for i, j in itertools.combinations(range(rank), 2):
            columns[i], columns[j] = rotate(columns[i], columns[j])
        return columns

    columns = lax.fori_loop(0, _SWEEPS, sweep, [matrices[:, j] for j in range(rank)])
    lengths = root(jnp.stack([(column * column).sum(axis=0) for column in columns]))
    return -jnp.sort(-lengths, axis=0)


def data_dissimilarity(
    angles: Float[ArrayLike, "M M L"], counts: Int[ArrayLike, "M L"], delta: Scalar = 0.5, mask: Mask = None
) -> Float[Array, "M M"]:
    r"""Mean over classes of the angles, weighted by how much the clients' class sizes differ (FLAG, Eqs. 4–6).

    .. math:: W_{ijc} = \frac{\max(\ln n_{ic}, \ln n_{jc})}{\min(\ln n_{ic}, \ln n_{jc})}, \quad
              W'_{ijc} = 1 - \delta + 2 \delta \frac{W_{ijc} - w_{min}}{w_{max} - w_{min}}, \quad
              V_{ij} = \frac{1}{L} \sum_c \mathcal{V}'_{ijc} W'_{ijc}

    w_min and w_max are over pairs of different clients that both have the class; where these are equal, and for all
    other pairs, weights are 1.

    Args:
      angles: in degrees, as `classwise_angles` gives them.
      counts: examples of each class on each client.
      delta: δ in [0, 1], how far weights reach from 1.
      mask: clients that count; None means all.

    Returns:
      Degrees, symmetric; 0 for masked-out clients.

    Raises:
      ValueError: shapes that do not fit, δ outside [0, 1], or non-finite angles.

    >>> angles = jnp.array([[[0.0, 0.0], [30.0, 180.0]], [[30.0, 180.0], [0.0, 0.0]]])
    >>> float(data_dissimilarity(angles, jnp.array([[8, 5], [9, 0]]))[0, 1])
    105.0
    """
    angles = checks.floats(angles, "angles", 3)
    counts = class_counts(counts, angles.shape[1:])
    if angles.shape[0] != angles.shape[1]:
        raise ValueError(f"angles has shape {angles.shape}; it must be [M, M, L]: one entry per pair and class.")
    mask = checks.client_mask(mask, angles.shape[0])
    delta = checked_delta(delta, angles)
    checks.finite(jnp.where(checks.pairs(mask, diagonal=True)[:, :, None], angles, 0.0), "angles", mask)
    return _data_dissimilarity(angles, counts, delta, mask)


@jax.jit
def _data_dissimilarity(angles: Array, counts: Array, delta: Array, mask: Array) -> Array:
    return _mean_over_classes(jnp.moveaxis(angles, 2, 0), counts, lambda of_class: of_class, delta, mask)


@partial(jax.jit, static_argnames="reduction")
def dissimilarity_of_bases(vectors: Array, counts: Array, reduction: Reduction, delta: Array, mask: Array) -> Array:
    """`data_dissimilarity` of `classwise_angles`, without checks and without the angles f32[M, M, L] of all classes."""
    classes = jnp.arange(counts.shape[1], dtype=jnp.int32)
    return _mean_over_classes(classes, counts, _angles_in_a_class(vectors, counts, reduction), delta, mask)


def _mean_over_classes(classes: Array, counts: Array, angles: Callable, delta: Array, mask: Array) -> Array:
    """V f32[M, M], where `angles(classes[c])` f32[M, M] are those of class c: no array of all pairs and classes."""
    known = mask[:, None] & mask[None, :]
    pairs = known & ~jnp.eye(len(mask), dtype=bool)

    def weights(counts: Array) -> tuple[Array, Array]:
        weight, both = weights_between(counts[:, None], counts[:, None], jnp.result_type(delta))
        return weight[:, :, 0], both[:, :, 0] & pairs

    def extremes(counts: Array) -> tuple[Array, Array]:
        weight, both = weights(counts)
        return jnp.where(both, weight, jnp.inf).min(), jnp.where(both, weight, -jnp.inf).max()

    least, most = lax.map(extremes, counts.T)
    least = least.min()
    extent = spread(least, most.max())

    def add(total: Array, data: tuple[Array, Array]) -> tuple[Array, None]:
        of_class, counts = data
        weight, both = weights(counts)
        scaled = 1.0 - delta + 2.0 * delta * (weight - least) / jnp.where(extent > 0.0, extent, 1.0)
        weight = jnp.where(both & (extent > 0.0), scaled, 1.0)
        return total + jnp.where(known, angles(of_class), 0.0) * weight, None

    total, _ = lax.scan(add, jnp.zeros(known.shape, jnp.result_type(delta)), (classes, counts.T))
    return total / counts.shape[1]


def spread(least: Array, most: Array, radian: float = 0.0) -> Array:
    """most − least, and 0 where these are equal but for rounding; `radian` is in their unit, 0 of what is no angle."""
    largest = jnp.maximum(jnp.abs(most), jnp.abs(least))
    # An arccosine near 1 has half of a cosine's digits: 1 − cos θ ≈ θ²/2.
    rounding = _ROUNDING * jnp.finfo(most.dtype).eps * (jnp.square(largest) + radian**2)
    return jnp.where((most - least) * (jnp.abs(most) + jnp.abs(least)) > rounding, most - least, 0.0)


def weights_between(counts: Array, others: Array, dtype: Any = jnp.float32) -> tuple[Array, Array]:
    """W f32[A, B, L] of class sizes i32[A, L] and i32[B, L], and where both have the class."""
    # NOTE: the paper adds a small ε under the logarithm. One example against 600 then weighs 6·10⁶ and flattens all
    # other weights, so class sizes are clipped below at 2 instead.
    first, second = (jnp.log(jnp.maximum(sizes, 2).astype(dtype)) for sizes in (counts[:, None], others[None]))
    weight = jnp.maximum(first, second) / jnp.minimum(first, second)
    return weight, (counts > 0)[:, None] & (others > 0)[None]


def gradient_angles(updates: Float[ArrayLike, "M d"], mask: Mask = None) -> Float[Array, "M M"]:
    r"""Angles between all pairs of clients' updates (FLAG, Section 3, Eq. 2).

    .. math:: G_{ij} = \arccos \frac{\langle \Delta_i, \Delta_j \rangle}{\|\Delta_i\| \|\Delta_j\|}
              \cdot \frac{180°}{\pi}

    Args:
      updates: one row per client, in any unit.
      mask: clients that count; None means all.

    Returns:
      Degrees in [0, 180], symmetric with diagonal 0; 90 to a zero update, 0 for masked-out clients.

    Raises:
      ValueError: wrong shapes, or non-finite updates of clients that count.

    >>> gradient_angles(jnp.array([[1.0, 0.0], [0.0, 2.0], [-3.0, 0.0]]))[0].tolist()
    [0.0, 90.0, 180.0]
    """
    cosine = cosine_similarity(updates, mask)
    mask = checks.client_mask(mask, cosine.shape[0])
    pairs = mask[:, None] & mask[None, :] & ~jnp.eye(cosine.shape[0], dtype=bool)
    return jnp.where(pairs, degrees(cosine), 0.0)


def proximity(
    data: Float[ArrayLike, "M M"], gradient: Float[ArrayLike, "M M"], beta: Scalar = 0.5, mask: Mask = None
) -> Float[Array, "M M"]:
    r"""Weighted mean of the two dissimilarities, each scaled to [0, 1] over the pairs of clients (FLAG, Section 4.2).

    .. math:: A = \beta \hat V + (1 - \beta) \hat G, \qquad
              \hat X_{ij} = \frac{X_{ij} - \min X}{\max X - \min X} \text{ for } i \ne j, \quad \hat X_{ii} = 0

    Args:
      data: V in degrees, as `data_dissimilarity` gives it; the diagonal is ignored.
      gradient: G in degrees, as `gradient_angles` gives it; likewise.
      beta: β in [0, 1], the weight of the data.
      mask: clients that count; None means all.

    Returns:
      In [0, 1], symmetric; 0 on the diagonal, for masked-out clients, and for a matrix whose pairs are all equal
      but for rounding of an arccosine: in float32 one of angles of less than 0.06°, or of 60° ± 0.00003°.

    Raises:
      ValueError: shapes that do not fit, β outside [0, 1], or values not finite or not symmetric.

    >>> data = jnp.array([[0.0, 10.0, 30.0], [10.0, 0.0, 20.0], [30.0, 20.0, 0.0]])
    >>> proximity(data, 90.0 * (1.0 - jnp.eye(3)))[0].tolist()
    [0.0, 0.0, 0.5]
    """
    data, known = checks.client_matrix(data, "data", mask, diagonal=False)
    gradient, _ = checks.client_matrix(gradient, "gradient", mask, diagonal=False)
    if data.shape != gradient.shape:
        raise ValueError(f"data has shape {data.shape} and gradient {gradient.shape}: give both of the same clients.")
    checks.symmetric_matrix(data, "data", known, diagonal=False)
    checks.symmetric_matrix(gradient, "gradient", known, diagonal=False)
    data, gradient = checks.alike(data, gradient)
    beta = checked_beta(beta, data)
    return _proximity(data, gradient, beta, known)


@jax.jit
def _proximity(data: Array, gradient: Array, beta: Array, mask: Array) -> Array:
    pairs = checks.pairs(mask, diagonal=False)
    upper = jnp.triu(pairs)  # each pair once, as the others are these but for rounding

    def scaled(matrix: Array) -> Array:
        least = jnp.where(upper, matrix, jnp.inf).min()
        extent = spread(least, jnp.where(upper, matrix, -jnp.inf).max(), RADIAN)
        return jnp.where(pairs & (extent > 0.0), matrix - least, 0.0) / jnp.where(extent > 0.0, extent, 1.0)

    # A fused product and sum may round to just below 0.
    return jnp.clip(beta * scaled(data) + (1.0 - beta) * scaled(gradient), 0.0, 1.0)


def checked_delta(delta: Scalar, like: Array) -> Array:
    delta = checks.floats(delta, "delta", 0, like=like)
    if not checks.holds(lambda delta: (delta >= 0.0) & (delta <= 1.0), delta):
        raise ValueError(f"delta is {float(delta)}; weights lie in [1 - delta, 1 + delta]: choose it in [0, 1].")
    return delta


def checked_beta(beta: Scalar, like: Array) -> Array:
    beta = checks.floats(beta, "beta", 0, like=like)
    if not checks.holds(lambda beta: (beta >= 0.0) & (beta <= 1.0), beta):
        raise ValueError(f"beta is {float(beta)}; it is the weight of the data: choose it in [0, 1].")
    return beta


def class_counts(counts: ArrayLike, shape: tuple[int, ...]) -> Array:
    counts = checks.as_array(counts, "counts")
    if counts.shape != shape or not jnp.issubdtype(counts.dtype, jnp.integer):
        raise ValueError(f"counts has shape {counts.shape}, {counts.dtype}: give integers {shape}, one per class.")
    if not checks.holds(lambda counts: (counts >= 0).all(), counts):
        raise ValueError("counts holds negative numbers, which count no examples: correct them.")
    return jnp.asarray(counts)
