"""Estimating the number of clusters where it is not known."""

from __future__ import annotations

from functools import partial
from typing import Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, ArrayLike, Float, Int, PRNGKeyArray, Real

from fedjax_cluster.clustering import checks, scores
from fedjax_cluster.clustering.checks import Mask
from fedjax_cluster.clustering.kmeans import KMeans, kmeans_in_slots
from fedjax_cluster.clustering.similarity import matmul, unit

Method = Literal["gap", "elbow", "silhouette"]
_REFERENCES = 20  # sets of uniform points that the gap statistic averages over


def largest_gaps(singular_values: Float[ArrayLike, " n"], count: int) -> Int[Array, " {count}"]:
    r"""Candidate ranks, the one before the largest gap between singular values first (CFL-GP, Appendix G).

    .. math:: s_1 = \arg\max_s \, (\sigma_s - \sigma_{s+1})

    Args:
      singular_values: descending, in any unit.
      count: how many candidates, static; at most n - 1.

    Returns:
      Ranks s in 1..n-1 in the order of their gaps; of equal gaps the smaller rank comes first.

    Raises:
      ValueError: wrong shapes, count outside 1..n-1, or values not finite or not descending.

    >>> largest_gaps(jnp.array([9.0, 8.5, 4.0, 3.8, 1.0]), 2).tolist()
    [2, 4]
    """
    values = checks.floats(singular_values, "singular_values", 1)
    if values.shape[0] < 2:
        raise ValueError(f"singular_values holds {values.shape[0]} values; a gap needs two: give more.")
    count = checks.count(count, "count", maximum=values.shape[0] - 1, there_are="gaps exist")
    checks.finite(values, "singular_values")
    if not checks.holds(lambda values: (values[1:] <= values[:-1]).all(), values):
        raise ValueError("singular_values are not in descending order, so gaps have no meaning: sort them.")
    return jnp.argsort(values[1:] - values[:-1])[:count].astype(jnp.int32) + 1


def elbow(x: Real[ArrayLike, " n"], y: Real[ArrayLike, " n"]) -> Int[Array, ""]:
    r"""The point of a curve that is farthest from the chord between its ends (FLAG, Section 5.2; CFL-GP, Appendix G).

    .. math:: \arg\max_i \Big| y_i - y_1 - \frac{y_n - y_1}{x_n - x_1} (x_i - x_1) \Big|

    Args:
      x: from the simplest choice to the richest (numbers of clusters, falling thresholds).
      y: what it brings (inertia, accuracy), in any unit.

    Returns:
      Its index; of equally far points the first, so a straight line gives 0.

    Raises:
      ValueError: wrong shapes, no points, equal ends on the x axis, or non-finite values.

    >>> int(elbow(jnp.arange(1, 6), jnp.array([10.0, 4.0, 1.0, 0.8, 0.6])))
    2
    """
    x, y = checks.alike(checks.floats(x, "x", 1), checks.floats(y, "y", 1))
    if x.shape != y.shape or x.shape[0] == 0:
        raise ValueError(f"x has {x.shape[0]} points and y has {y.shape[0]}: give as many of both, at least one.")
    checks.finite(x, "x")
    checks.finite(y, "y")
    if x.shape[0] > 1 and not checks.holds(lambda x: x[0] != x[-1], x):
        raise ValueError(f"x begins and ends at {float(x[0])}, so the chord is vertical: give x in order.")
    return _elbow(x, y)


@jax.jit
def _elbow(x: Array, y: Array) -> Array:
    x, y = x / unit(x), y / unit(y)
    run = x[-1] - x[0]
    chord = y[0] + (y[-1] - y[0]) * (x - x[0]) / jnp.where(run == 0.0, 1.0, run)
    distance = jnp.abs(y - chord)
    # Points that differ only by rounding are equally far.
    rounding = 8 * jnp.finfo(y.dtype).eps * (y.max() - y.min() + jnp.abs(y).max())
    return jnp.argmax(distance >= distance.max() - rounding).astype(jnp.int32)


def estimate_num_clusters(
    rng_key: PRNGKeyArray,
    values: Float[ArrayLike, " n"] | Float[ArrayLike, "M s"],
    max_clusters: int,
    method: Method = "gap",
    mask: Mask = None,
) -> int:
    r"""Number of clusters from singular values or from features.

    Singular values give the rank before their largest gap, σ_s − σ_{s+1} (method "gap" only). It is the number of
    directions; the number of clusters is then found on features of that rank. Features give

    - "gap": the gap statistic, the least k with Gap(k) >= Gap(k*) − s_{k*} where k* has the largest gap, against
      uniform points in the box of the principal axes,
    - "elbow": the k whose inertia lies farthest from the chord of the curve over 1..max_clusters, which is none of its
      ends; 1 where it has no elbow, as with fewer than three points,
    - "silhouette": the k >= 2 with the largest mean silhouette.

    See CFL-GP, Appendix G; Tibshirani, Walther and Hastie (2001), whose comparison with k + 1
    often stops at 1 where two clusters explain no more than one; Dudoit and Fridlyand (2002) for that with k*.

    Args:
      rng_key: a JAX random key, for k-means and the reference points.
      values: n singular values in descending order, or features of M clients; in any unit.
      max_clusters: the largest answer ("elbow" needs one more than it may answer); for features at most the clients
        that count. n singular values have n - 1 gaps: n - 1 is their largest answer, however large this is.
      method: how features are read, see above.
      mask: clients that count, for features; None means all.

    Raises:
      ValueError: wrong shapes, an unknown method, fewer than two singular values, max_clusters below 1 or, for
        features, above the clients that count, non-finite or traced values.

    >>> estimate_num_clusters(jax.random.key(0), jnp.array([9.0, 8.8, 8.5, 2.0, 1.8]), 4)
    3
    >>> features = jnp.array([[0.0], [0.1], [0.2], [5.0], [5.1], [5.2]])
    >>> estimate_num_clusters(jax.random.key(0), features, 4, method="silhouette")
    2
    """
    checks.key(rng_key)
    checks.choice(method, "method", get_args(Method))
    values = checks.floats(values, "values", 1, 2)
    if not checks.is_concrete(values):
        raise ValueError("values are traced, but the answer is a Python int: call this function outside jit.")
    if values.ndim == 1:
        if method != "gap":
            raise ValueError(f"method is {method!r}, but singular values only have gaps: give features [M, s].")
        if mask is not None:
            raise ValueError("mask is given with singular values, which are no clients': leave it out.")
        limit = checks.count(max_clusters, "max_clusters")
        return int(largest_gaps(values[: limit + 1], 1)[0])
    mask = checks.client_mask(mask, values.shape[0])
    limit = checks.num_clusters(max_clusters, mask, "max_clusters")
    checks.finite(values, "values", mask)
    if limit == 1:
        return 1
    values = values / unit(jnp.where(mask[:, None], values, 0.0))
    if method == "gap":
        return _gap_statistic(*jax.device_get(_gap_curves(rng_key, values, mask, limit)))
    runs = _kmeans_curve(rng_key, values, mask, limit, 10)
    if method == "elbow":
        return 1 + int(elbow(jnp.arange(1, limit + 1), runs.inertia))
    return 2 + int(_silhouette_curve(values, runs.labels, mask, limit).argmax())


@partial(jax.jit, static_argnames=("limit", "num_restarts"))
def _kmeans_curve(rng_key: Array, points: Array, mask: Array, limit: int, num_restarts: int) -> KMeans:
    """k-means for k = 1..limit, stacked."""

    def cluster(k: Array) -> KMeans:
        key = jax.random.fold_in(rng_key, k)
        return kmeans_in_slots(key, points, mask, k, slots=limit, num_restarts=num_restarts, max_iterations=100)

    return lax.map(cluster, jnp.arange(1, limit + 1, dtype=jnp.int32))


@partial(jax.jit, static_argnames="limit")
def _silhouette_curve(points: Array, labels: Array, mask: Array, limit: int) -> Array:
    return lax.map(lambda row: scores.silhouette(points, row, mask=mask, num_labels=limit), labels[1:])


@partial(jax.jit, static_argnames="limit")
def _gap_curves(rng_key: Array, points: Array, mask: Array, limit: int) -> tuple[Array, Array]:
    """Inertia for k = 1..limit of the points, f32[limit], and of reference points, f32[B, limit]."""
    count = jnp.maximum(mask.sum(), 1).astype(points.dtype)
    centre = jnp.where(mask[:, None], points, 0.0).sum(axis=0) / count
    centred = jnp.where(mask[:, None], points - centre[None, :], 0.0)
    rotated = matmul(centred, jnp.linalg.svd(centred, full_matrices=False)[2].T)
    lowest = jnp.where(mask[:, None], rotated, jnp.inf).min(axis=0)
    highest = jnp.where(mask[:, None], rotated, -jnp.inf).max(axis=0)

    def reference(key: Array) -> Array:
        share = jax.random.uniform(key, rotated.shape, jnp.float32).astype(points.dtype)
        return lowest[None, :] + share * (highest - lowest)[None, :]

    keys = jax.random.split(rng_key, _REFERENCES + 1)
    sets = jnp.concatenate([rotated[None], jax.vmap(reference)(keys[1:])])
    curves = lax.map(lambda args: _kmeans_curve(*args, mask, limit, 5).inertia, (keys, sets))
    return curves[0], curves[1:]


def _gap_statistic(inertia: np.ndarray, references: np.ndarray) -> int:
    """The least k whose Gap(k) = mean log W*_k − log W_k is within a standard error of the largest."""
    if inertia[0] <= 0.0:
        return 1
    # Points that coincide have inertia 0; rounding leaves no smaller share of the whole than this.
    reference = np.log(np.maximum(references, 1e-10 * references[:, :1]))
    gap = reference.mean(axis=0) - np.log(np.maximum(inertia, 1e-10 * inertia[0]))
    error = reference.std(axis=0) * np.sqrt(1.0 + 1.0 / len(references))
    best = np.argmax(gap)
    return int(np.argmax(gap >= gap[best] - error[best])) + 1
