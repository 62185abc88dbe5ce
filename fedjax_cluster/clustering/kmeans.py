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

    Args:
      rng_key: a JAX random key.
      points: one row per client, in any unit.
      k: number of clusters, static.
      num_restarts: how many seedings are tried, static.
      max_iterations: bound on Lloyd's iterations of one restart, static.
      mask: clients that count; None means all.

    Raises:
      ValueError: wrong shapes, k outside 1..number of clients that count, or non-finite points.

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
    origin = jnp.where(mask.any(), 0.5 * (lowest + highest), 0.0)
    centred = jnp.where(mask[:, None], points - origin[None, :], 0.0)
    extent = jnp.abs(centred).max(initial=0.0)
    scale = jnp.where(extent > 0.0, extent, 1.0)
    return centred / scale, origin, scale


def squared_distances(points: Array, centers: Array) -> Array:
    """f32[M, k], by direct differences: exact where |x|² + |c|² − 2xc cancels."""
    return jnp.square(points[:, None, :] - centers[None, :, :]).sum(axis=-1)


def _seeds(rng_key: Array, points: Array, mask: Array, k: Array | int, slots: int, num_restarts: int) -> Array:
    """Greedy k-means++, f32[restarts, slots, r]: of a few points drawn by squared distance the best is taken."""
    num_trials = 2 + int(math.log(slots))
    # The n-th point that counts takes the n-th row of draws, whatever stands between: a masked array is clustered like
    # the subset it stands for.
    position = jnp.maximum(jnp.cumsum(mask, dtype=jnp.int32) - 1, 0)

    def add(slot: Array, closest: Array, noise: Array) -> tuple[Array, Array]:
        # The first seed is any point that counts. So is one for which no point is left off the seeds.
        anywhere = (slot == 0) | (closest.max() == 0.0)
        weights = jnp.where(anywhere, mask.astype(points.dtype), closest)
        candidates = points[jnp.argmax(jnp.log(weights)[:, None] + noise[position], axis=0)]
        closer = jnp.minimum(closest[:, None], squared_distances(points, candidates))
        best = jnp.where(slot == 0, 0, jnp.argmin(closer.sum(axis=0)))
        return candidates[best], closer[:, best]

    def add_to_all(slot: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
        centers, closest = state
        # The points come first, so that more of them do not change the draws of these.
        shape = (points.shape[0], num_restarts, num_trials)
        noise = jax.random.gumbel(jax.random.fold_in(rng_key, slot), shape, jnp.float32).astype(points.dtype)
        seed, closest = jax.vmap(add, (None, 0, 1))(slot, closest, noise)
        return centers.at[:, slot].set(seed), closest

    centers = jnp.zeros((num_restarts, slots, points.shape[1]), points.dtype)
    farthest = jnp.where(mask, jnp.asarray(jnp.inf, points.dtype), 0.0)
    closest = jnp.broadcast_to(farthest[None, :], (num_restarts, points.shape[0]))
    return lax.fori_loop(0, k, add_to_all, (centers, closest))[0]


def _lloyd(points: Array, mask: Array, active: Array, centers: Array, max_iterations: int) -> KMeans:
    """Lloyd's iteration until no point changes its cluster."""
    slots = active.shape[0]

    def assign(centers: Array) -> Array:
        distances = jnp.where(active[None, :], squared_distances(points, centers), jnp.inf)
        nearest = jnp.argmin(distances, axis=1).astype(jnp.int32)
        return _fill_empty(jnp.where(mask, nearest, slots), distances.min(axis=1), mask, active)

    def means(labels: Array, centers: Array) -> Array:
        members = jax.nn.one_hot(labels, slots, dtype=points.dtype)
        size = members.sum(axis=0)
        total = matmul(members.T, points)
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

    def vacancies(labels: Array) -> tuple[Array, Array]:
        size = jax.nn.one_hot(labels, slots, dtype=jnp.int32).sum(axis=0, dtype=jnp.int32)
        return active & (size == 0), mask & (size[jnp.minimum(labels, slots - 1)] > 1)

    def unfilled(state: tuple[Array, Array]) -> Array:
        empty, movable = vacancies(state[0])
        return empty.any() & movable.any()

    def fill(state: tuple[Array, Array]) -> tuple[Array, Array]:
        labels, closest = state
        empty, movable = vacancies(labels)
        point = jnp.argmax(jnp.where(movable, closest, -1.0))
        return labels.at[point].set(jnp.argmax(empty).astype(jnp.int32)), closest.at[point].set(0.0)

    return lax.while_loop(unfilled, fill, (labels, closest))[0]
