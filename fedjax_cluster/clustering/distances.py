"""Distances between clients' vectors."""

from __future__ import annotations

import math
from functools import partial
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, ArrayLike, Float

from fedjax_cluster.clustering import checks
from fedjax_cluster.clustering.checks import Mask
from fedjax_cluster.clustering.similarity import of_length_one, over_chunks, root, row_products, unit

Metric = Literal["euclidean", "manhattan", "cosine"]
METRICS: tuple[Metric, ...] = get_args(Metric)


def pairwise_distances(
    points: Float[ArrayLike, "M d"], others: Float[ArrayLike, "N d"] | None = None, metric: Metric = "euclidean"
) -> Float[Array, "M N"]:
    r"""Distances of the rows of one matrix to those of another, or to each other (FL+HC, Section III).

    .. math:: \|x - y\|_2, \qquad \|x - y\|_1, \qquad 1 - \frac{\langle x, y \rangle}{\|x\| \|y\|}

    Differences are summed directly, so that near rows far from the origin lose no digits. Squares are of numbers in the
    unit of the largest entry: what is less than 2⁻⁶³ of it, 1·10⁻¹⁹, counts as 0 in "euclidean".

    Args:
      points: one row per client.
      others: rows they are compared with; None is the points themselves.
      metric: static; the cosine of a row of zeros is 0, which is a distance of 1.

    Returns:
      In the unit of the points; "cosine" without unit, in [0, 2].

    Raises:
      ValueError: shapes that do not fit, an unknown metric, or entries that are not finite.

    >>> points = jnp.array([[0.0, 0.0], [3.0, 4.0]])
    >>> pairwise_distances(points)[0].tolist(), pairwise_distances(points, metric="manhattan")[0].tolist()
    ([0.0, 5.0], [0.0, 7.0])
    """
    checks.choice(metric, "metric", METRICS)
    points = checks.floats(points, "points", 2)
    others = points if others is None else checks.floats(others, "others", 2)
    if points.shape[1] != others.shape[1]:
        raise ValueError(
            f"points has {points.shape[1]} columns and others {others.shape[1]}: give rows of equal length."
        )
    for rows, name in ((points, "points"), (others, "others")):
        if not checks.holds(lambda rows: (abs(rows) < math.inf).all(), rows):
            raise ValueError(f"{name} holds NaN or infinite values: leave such rows out or repair them.")
    return _pairwise_distances(*checks.alike(points, others), metric)


@partial(jax.jit, static_argnames="metric")
def _pairwise_distances(points: Array, others: Array, metric: Metric) -> Array:
    if metric == "cosine":
        cosine = row_products(of_length_one(points), of_length_one(others))
        return 1.0 - jnp.clip(cosine, -1.0, 1.0)
    scale = jnp.maximum(unit(points), unit(others))
    squared = metric == "euclidean"

    def summed(points: Array, others: Array) -> Array:
        def to_all(row: Array) -> Array:
            apart = (row[None] - others) / scale
            return (jnp.square(apart) if squared else jnp.abs(apart)).sum(1)

        return lax.map(to_all, points)

    total = over_chunks(summed, points, others)
    return (root(total) if squared else total) * scale


def similarity_differences(similarity: Float[ArrayLike, "M M"], mask: Mask = None) -> Float[Array, "M M"]:
    r"""Mean absolute difference of two clients' similarities to all others (FlexCFL's MADC, of cosines).

    .. math:: D_{ij} = \frac{1}{M - 2} \sum_{z \ne i, j} |S_{iz} - S_{jz}|

    Args:
      similarity: symmetric, in any unit; the diagonal is ignored.
      mask: clients that count; None means all.

    Returns:
      In the unit of `similarity`, symmetric; 0 on the diagonal, for masked-out clients, and where two alone count.

    Raises:
      ValueError: a matrix not square, or off the diagonal not symmetric and finite among the clients that count.

    >>> similarity_differences(jnp.array([[1.0, 0.5, 0.25], [0.5, 1.0, 0.75], [0.25, 0.75, 1.0]]))[0].tolist()
    [0.0, 0.5, 0.25]
    """
    similarity, mask = checks.client_matrix(similarity, "similarity", mask, diagonal=False)
    checks.symmetric_matrix(similarity, "similarity", mask, diagonal=False)
    return _similarity_differences(similarity, mask)


@jax.jit
def _similarity_differences(similarity: Array, mask: Array) -> Array:
    own = jnp.eye(len(mask), dtype=bool)
    pairs = mask[:, None] & mask[None, :] & ~own
    similarity = jnp.where(pairs, similarity, 0.0)
    scale = unit(similarity)

    def to_all(client: tuple[Array, Array]) -> Array:
        row, itself = client
        apart = jnp.abs(row[None] / scale - similarity / scale)
        return jnp.where(own | itself[None], 0.0, apart).sum(1)

    others = jnp.maximum(mask.sum(dtype=similarity.dtype) - 2.0, 1.0)
    return jnp.where(pairs, lax.map(to_all, (similarity, own)) / others * scale, 0.0)
