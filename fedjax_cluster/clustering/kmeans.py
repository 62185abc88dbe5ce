"""K-means under fixed shapes: k-means++ seeding, several restarts in one program, no empty cluster."""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, ArrayLike, Float, Int, PRNGKeyArray

from fedjax_cluster.clustering import checks
from fedjax_cluster.clustering.checks import Mask
from fedjax_cluster.clustering.similarity import matmul

COLUMNS = 8  # of points, of which squared distances are summed at once: more are not vectorised by XLA on a CPU
MOST_GROUPS = 64  # of columns; rows as long as a model are summed one by one
ALIKE = 1e-5  # relative, of sums that rounding may tell apart


class KMeans(NamedTuple):
    """A clustering of points."""

    labels: Int[Array, " M"]  # -1 where masked out
    centers: Float[Array, "k r"]  # the mean of each cluster; arbitrary where a traced mask holds fewer than k clients
    inertia: Float[Array, ""]  # sum of squared distances of the points to their centres


def kmeans(
    rng_key: PRNGKeyArray,
    points: Float[ArrayLike, "M r"],
    k: int,
    num_restarts: int = 10,
    max_iterations: int = 100,
    mask: Mask = None,
) -> KMeans:
    r"""Clusters points around k means (CFL-GP, Algorithm 3, line 2, and Eq. 13).

    .. math:: \min_{z, h} \sum_c \| x_c - h_{z_c} \|^2

    Lloyd's iteration from greedy k-means++ seeds (Arthur and Vassilvitskii 2007); the restart with least inertia wins.
    An empty cluster takes the point farthest from its centre. Masked-out points do not change the result for others.
    Points are rounded to 6·10⁻⁸ of the extent of all: beside one that much farther away, others count as the same.

    Args:
      rng_key: a JAX random key.
      points: one row per client, in any unit.
      k: number of clusters, static.
      num_restarts: how many seedings are tried, static.
      max_iterations: bound on Lloyd's iterations of one restart, static.
      mask: clients that count; None means all.

    Raises:
      ValueError: wrong shapes, k outside 1..number of clients that count, or non-finite points; under `jit` points are
        not known, and one that is not finite leaves no centre finite.

    >>> labels, _, inertia = kmeans(jax.random.key(0), jnp.array([[0.0], [0.1], [5.0], [5.1]]), 2)
    >>> bool(labels[0] == labels[1] != labels[2]), round(float(inertia), 3)
    (True, 0.01)
    """
    checks.key(rng_key)
    points = checks.floats(points, "points", 2)
    mask = checks.client_mask(mask, points.shape[0])
    k = checks.num_clusters(k, mask)
    checks.count(num_restarts, "num_restarts")
    checks.count(max_iterations, "max_iterations")
    checks.finite(points, "points", mask)
    return kmeans_in_slots(rng_key, points, mask, k, slots=k, num_restarts=num_restarts, max_iterations=max_iterations)


@partial(jax.jit, static_argnames=("slots", "num_restarts", "max_iterations"))
def kmeans_in_slots(
    rng_key: Array, points: Array, mask: Array, k: Array | int, *, slots: int, num_restarts: int, max_iterations: int
) -> KMeans:
    """`kmeans` without checks, where k <= slots may be traced: one program for every number of clusters."""
    unit, origin, scale = bounding_box_units(points, mask)
    active = jnp.arange(slots, dtype=jnp.int32) < k
    seeds = _seeds(rng_key, unit, mask, k, slots, num_restarts)
    runs = jax.vmap(lambda centers: _lloyd(unit, mask, active, centers, max_iterations))(seeds)
    best = jax.tree.map(lambda leaf: leaf[jnp.argmin(runs.inertia)], runs)
    return KMeans(
        labels=jnp.where(mask, best.labels, -1),
        centers=best.centers * scale + origin[None, :],
        inertia=best.inertia * scale * scale,
    )


def bounding_box_units(points: Array, mask: Array) -> tuple[Array, Array, Array]:
    """Points from the centre of their bounding box in units of its extent, f32[M, r]; the centre f32[r]; the extent."""
    # Squared distances lose the last digits far from the origin and underflow for tiny points. The box does not depend
    # on the order of the points.
    lowest = jnp.where(mask[:, None], points, jnp.inf).min(axis=0)
    highest = jnp.where(mask[:, None], points, -jnp.inf).max(axis=0)
    # Near the largest number the sum is infinite, also of halves: XLA adds before it halves.
    both = lowest + highest
    middle = jnp.where(jnp.isinf(both), lowest + 0.5 * (highest - lowest), 0.5 * both)
    origin = jnp.where(mask.any(), middle, 0.0)
    centred = jnp.where(mask[:, None], points - origin[None, :], 0.0)
    extent = jnp.abs(centred).max(initial=0.0)
    scale = jnp.where(extent > 0.0, extent, 1.0)
    return centred / scale, origin, scale


def squared_distances(points: Array, centers: Array) -> Array:
    """f32[M, k], by direct differences: exact where |x|² + |c|² − 2xc cancels."""
    return jnp.square(points[:, None, :] - centers[None, :, :]).sum(axis=-1)


def _from_centers(points: Array, centers: Array) -> Array:
    """f32[k, M]: `squared_distances`, the points innermost, along which a processor computes several at once."""
    size, dimensions = points.shape
    groups = -(-dimensions // COLUMNS)
    if groups > MOST_GROUPS:
        return squared_distances(points, centers).T
    if groups == 1:
        return _sum_of_squares(points.T, centers.T)
    rest = groups * COLUMNS - dimensions
    columns = [jnp.pad(rows.T, ((0, rest), (0, 0))).reshape(groups, COLUMNS, -1) for rows in (points, centers)]
    start = jnp.zeros((len(centers), size), points.dtype)
    return lax.fori_loop(0, groups, lambda g, total: total + _sum_of_squares(columns[0][g], columns[1][g]), start)


def _sum_of_squares(of_points: Array, of_centers: Array) -> Array:
    """f32[k, M], of the differences in a few columns, f32[c, M] and f32[c, k]."""
    squares = [jnp.square(x[None, :] - y[:, None]) for x, y in zip(of_points, of_centers, strict=True)]
    return sum(squares[1:], squares[0])


def _seeds(rng_key: Array, points: Array, mask: Array, k: Array | int, slots: int, num_restarts: int) -> Array:
    """Greedy k-means++, f32[restarts, slots, r]: of a few points drawn by squared distance the best is taken."""
    num_trials = 2 + int(math.log(slots))

    def add(slot: Array, closest: Array, share: Array) -> tuple[Array, Array]:
        # The first seed is any point that counts. So is one for which no point is left off the seeds.
        anywhere = (slot == 0) | (closest.max() == 0.0)
        weights = jnp.where(anywhere, mask.astype(points.dtype), closest)
        # Masked-out points have no weight: a masked array is clustered like the subset it stands for. Rounded sums may
        # pass a share at a point of no weight.
        upto = jnp.cumsum(weights)
        reached = (upto[None, :] > share[:, None] * upto[-1]) & (weights > 0.0)[None, :]
        candidates = points[jnp.argmax(reached, axis=1)]
        closer = jnp.minimum(closest[None, :], _from_centers(points, candidates))
        # Of two points that are each other's nearest either leaves the same, but for rounding: the first drawn is it.
        left = closer.sum(axis=1)
        best = jnp.where(slot == 0, 0, jnp.argmax(left <= left.min() * (1 + ALIKE)))
        return candidates[best], closer[best]

    def add_to_all(slot: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
        centers, closest = state
        shares = jax.random.uniform(jax.random.fold_in(rng_key, slot), (num_restarts, num_trials), jnp.float32)
        seed, closest = jax.vmap(add, (None, 0, 0))(slot, closest, shares.astype(points.dtype))
        return centers.at[:, slot].set(seed), closest

    centers = jnp.zeros((num_restarts, slots, points.shape[1]), points.dtype)
    farthest = jnp.where(mask, jnp.asarray(jnp.inf, points.dtype), 0.0)
    closest = jnp.broadcast_to(farthest[None, :], (num_restarts, points.shape[0]))
    return lax.fori_loop(0, k, add_to_all, (centers, closest))[0]


def _lloyd(points: Array, mask: Array, active: Array, centers: Array, max_iterations: int) -> KMeans:
    """Lloyd's iteration until no point changes its cluster."""
    slots = active.shape[0]

    def assign(centers: Array) -> Array:
        distances = jnp.where(active[:, None], _from_centers(points, centers), jnp.inf)
        nearest = jnp.argmin(distances, axis=0).astype(jnp.int32)
        return _fill_empty(jnp.where(mask, nearest, slots), distances.min(axis=0), mask, active)

    def means(labels: Array, centers: Array) -> Array:
        members = (labels[None, :] == jnp.arange(slots, dtype=jnp.int32)[:, None]).astype(points.dtype)
        size = members.sum(axis=1)
        total = matmul(members, points)
        return jnp.where(size[:, None] > 0.0, total / jnp.maximum(size, 1.0)[:, None], centers)

    def unfinished(state: tuple[Array, Array, Array, Array]) -> Array:
        return state[3] & (state[2] < max_iterations)

    def iterate(state: tuple[Array, Array, Array, Array]) -> tuple[Array, Array, Array, Array]:
        old_labels, centers, iteration, _ = state
        labels = assign(centers)
        return labels, means(labels, centers), iteration + 1, (labels != old_labels).any()

    state = (jnp.full(points.shape[0], -1, jnp.int32), centers, jnp.int32(0), jnp.bool_(True))
    labels, centers, _, _ = lax.while_loop(unfinished, iterate, state)
    squared = jnp.square(points - centers[jnp.minimum(labels, slots - 1)]).sum(axis=1)
    return KMeans(labels, centers, jnp.where(mask, squared, 0.0).sum())


def _fill_empty(labels: Array, closest: Array, mask: Array, active: Array) -> Array:
    """Gives each empty cluster the point farthest from its centre, out of a cluster with two or more."""
    slots = active.shape[0]

    def sizes(labels: Array) -> Array:
        return (labels[None, :] == jnp.arange(slots, dtype=jnp.int32)[:, None]).sum(axis=1, dtype=jnp.int32)

    def unfilled(state: tuple[Array, Array]) -> Array:
        size = sizes(state[0])
        return (active & (size == 0)).any() & (size > 1).any()

    def fill(state: tuple[Array, Array]) -> tuple[Array, Array]:
        labels, closest = state
        size = sizes(labels)
        movable = mask & (size[jnp.minimum(labels, slots - 1)] > 1)
        point = jnp.argmax(jnp.where(movable, closest, -1.0))
        empty = active & (size == 0)
        return labels.at[point].set(jnp.argmax(empty).astype(jnp.int32)), closest.at[point].set(0.0)

    return lax.while_loop(unfilled, fill, (labels, closest))[0]
