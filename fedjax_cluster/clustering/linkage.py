"""Agglomerative clustering: the tree of merges is built once, every cut of it is cheap."""

from __future__ import annotations

from functools import partial
from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
import scipy
from jax import lax
from jax.core import Tracer
from jaxtyping import Array, ArrayLike, Bool, Float, Int

from fedjax_cluster.clustering import checks
from fedjax_cluster.clustering.checks import Mask, Scalar
from fedjax_cluster.options import checked

Linkage = Literal["average", "single", "complete", "ward"]
LINKAGES: tuple[Linkage, ...] = get_args(Linkage)
# Beyond this many clients SciPy takes over where the distances are known outside jit.
_DEVICE_LIMIT = 1024


class Dendrogram(NamedTuple):
    """The tree of merges; a cluster is named by its smallest client."""

    merges: Int[Array, "M-1 2"]  # the cluster that is kept and the one that joins it; M where there is none
    heights: Float[Array, " M-1"]  # distance of the two, ascending; infinite where there is none
    mask: Bool[Array, " M"]  # clients that count


def agglomerative(
    distance: Float[ArrayLike, "M M"],
    threshold: Scalar | None = None,
    num_clusters: int | None = None,
    linkage: Linkage = "average",
    mask: Mask = None,
) -> Int[Array, " M"]:
    r"""Merges the two closest clusters as long as their distance is at most a threshold (FLAG, Algorithm 3).

    .. math:: d(A, B) = \operatorname{mean}, \min \text{ or } \max \text{ of } d_{ij} \text{ over } i \in A, j \in B

    Args:
      distance: symmetric; the diagonal is ignored.
      threshold: merge while the distance is <= this; in the distances' unit.
      num_clusters: or merge until this many clusters are left. Give one of the two.
      linkage: d, static; "ward" as for `dendrogram`.
      mask: clients that count; None means all.

    Returns:
      Labels, numbered in the order of their first clients; -1 where masked out.

    Raises:
      ValueError: as for `dendrogram` and `cut_dendrogram`.

    >>> distance = jnp.array([[0.0, 1.0, 5.0], [1.0, 0.0, 4.0], [5.0, 4.0, 0.0]])
    >>> agglomerative(distance, threshold=1.0).tolist(), agglomerative(distance, threshold=4.5).tolist()
    ([0, 0, 1], [0, 0, 0])
    """
    return cut_dendrogram(dendrogram(distance, linkage, mask), threshold, num_clusters)


def dendrogram(distance: Float[ArrayLike, "M M"], linkage: Linkage = "average", mask: Mask = None) -> Dendrogram:
    r"""The whole tree of merges, from which `cut_dendrogram` reads the clusters at any threshold (FLAG, Section 3).

    .. math:: d(A \cup B, C) = \frac{|A| d(A, C) + |B| d(B, C)}{|A| + |B|}, \quad \min, \quad\text{or } \max

    .. math:: d(A \cup B, C)^2 = \frac{(|A| + |C|) d(A, C)^2 + (|B| + |C|) d(B, C)^2 - |C| d(A, B)^2}{|A| + |B| + |C|}
        \quad \text{with "ward"}

    Computed in JAX with nearest-neighbour bounds (Müllner 2011); known matrices of over 1024 clients go to SciPy.

    Args:
      distance: symmetric; the diagonal is ignored.
      linkage: d of a merged cluster: the mean, the minimum, the maximum, or "ward", which merges the two that add least
        to the squared distances from the clusters' means, where distances are Euclidean; static.
      mask: clients that count; None means all.

    Raises:
      ValueError: wrong shapes, an unknown linkage, or distances not finite or not symmetric.

    >>> distance = jnp.array([[0.0, 1.0, 5.0], [1.0, 0.0, 4.0], [5.0, 4.0, 0.0]])
    >>> [part.tolist() for part in dendrogram(distance)[:2]]
    [[[0, 1], [0, 2]], [1.0, 4.5]]
    """
    checks.choice(linkage, "linkage", LINKAGES)
    distance, mask = checks.client_matrix(distance, "distance", mask, diagonal=False)
    checks.symmetric_matrix(distance, "distance", mask, diagonal=False)
    if distance.shape[0] > _DEVICE_LIMIT and checks.is_concrete(distance, mask):
        return _host_dendrogram(np.asarray(distance), np.asarray(mask), linkage)
    return _dendrogram(distance, mask, linkage)


def cut_dendrogram(
    tree: Dendrogram, threshold: Scalar | None = None, num_clusters: int | Int[Array, ""] | None = None
) -> Int[Array, " M"]:
    r"""The clusters of a tree at one height, or where a given number is left (FLAG, Algorithm 3).

    Args:
      tree: a `Dendrogram` of M clients.
      threshold: all merges at distances <= this are made; it may be traced.
      num_clusters: or all merges but the last num_clusters - 1; it may be traced. Give one of the two.

    Returns:
      Labels, numbered in the order of their first clients; -1 where masked out.

    Raises:
      ValueError: both or neither given, a threshold that is NaN, or num_clusters outside 1..clients that count.

    >>> tree = dendrogram(jnp.array([[0.0, 1.0, 5.0], [1.0, 0.0, 4.0], [5.0, 4.0, 0.0]]))
    >>> [cut_dendrogram(tree, threshold).tolist() for threshold in (0.5, 1.0, 4.5)]
    [[0, 1, 2], [0, 0, 1], [0, 0, 0]]
    """
    checked("tree", tree, Dendrogram)
    if (threshold is None) == (num_clusters is None):
        raise ValueError(f"{threshold=} and {num_clusters=} decide where merging stops: give exactly one of them.")
    if threshold is not None:
        threshold = checks.floats(threshold, "threshold", 0, like=tree.heights)
        if not checks.holds(lambda threshold: threshold == threshold, threshold):
            raise ValueError("threshold is NaN; merging never stops at it: give a distance.")
        num_merges = (tree.heights <= threshold).sum(dtype=jnp.int32)
    else:
        if not isinstance(num_clusters, Tracer):
            num_clusters = checks.num_clusters(num_clusters, tree.mask, "num_clusters")
        num_merges = tree.mask.sum(dtype=jnp.int32) - jnp.asarray(num_clusters, jnp.int32)
    return _cut(tree, num_merges)


@jax.jit
def _cut(tree: Dendrogram, num_merges: Array) -> Array:
    num_clients = tree.mask.shape[0]
    made = jnp.arange(tree.heights.shape[0], dtype=jnp.int32) < num_merges
    joining = jnp.where(made, tree.merges[:, 1], num_clients)
    client = jnp.arange(num_clients, dtype=jnp.int32)
    parent = client.at[joining].set(tree.merges[:, 0], mode="drop")
    for _ in range(max(num_clients - 1, 1).bit_length()):
        parent = parent[parent]
    label = jnp.cumsum((parent == client) & tree.mask, dtype=jnp.int32) - 1
    return jnp.where(tree.mask, label[parent], -1)


class _Pair(NamedTuple):
    """The cluster with the lowest bound and the one nearest to it, read ahead."""

    cluster: Array  # i32[]
    other: Array  # i32[]
    nearest: Array  # f32[], their distance
    row: Array  # f32[M], distances of the first
    other_row: Array  # f32[M], distances of the second


class _Merging(NamedTuple):
    distance: Array  # f32[M, M] between clusters; infinite to clusters that have joined another
    bound: Array  # f32[M], no other cluster is nearer than this
    size: Array  # f32[M], clients in the cluster
    merges: Array  # i32[M, 2]; the last entry stays unused, so that a single client has an array too
    heights: Array  # f32[M]
    step: Array  # i32[], merges so far
    pair: _Pair


@partial(jax.jit, static_argnames="linkage")
def _dendrogram(distance: Array, mask: Array, linkage: str) -> Dendrogram:
    """Merges by lower bounds on each cluster's nearest distance, which a merge can only raise."""
    num_clients = distance.shape[0]
    index = jnp.arange(num_clients, dtype=jnp.int32)
    pairs = mask[:, None] & mask[None, :] & (index[:, None] != index[None, :])
    distance = jnp.where(pairs, distance, jnp.inf)
    num_merges = jnp.maximum(mask.sum(dtype=jnp.int32) - 1, 0)

    def first_minimum(values: Array) -> tuple[Array, Array]:
        least = values.min()
        return least, jnp.where(values == least, index, num_clients).min()

    def look(distance: Array, bound: Array) -> _Pair:
        _, cluster = first_minimum(bound)
        nearest, other = first_minimum(distance[cluster])
        return _Pair(cluster, other, nearest, distance[cluster], distance[other])

    def advance(state: _Merging) -> _Merging:
        pair = state.pair
        holds = pair.nearest <= state.bound[pair.cluster]
        size, other_size = state.size[pair.cluster], state.size[pair.other]
        if linkage == "average":
            merged = (size * pair.row + other_size * pair.other_row) / (size + other_size)
            # Means of equal distances are rounded to others, past a threshold that is equal to all.
            merged = jnp.clip(merged, jnp.minimum(pair.row, pair.other_row), jnp.maximum(pair.row, pair.other_row))
        elif linkage == "ward":
            merged = _ward(pair, size, other_size, state.size)
        else:
            merged = (jnp.minimum if linkage == "single" else jnp.maximum)(pair.row, pair.other_row)
        merged = jnp.where((index == pair.cluster) | (index == pair.other), jnp.inf, merged)
        keep, join = jnp.minimum(pair.cluster, pair.other), jnp.maximum(pair.cluster, pair.other)
        # Where the bound was too low it is raised, and the matrix is rewritten unchanged: under a conditional it would
        # be copied at every step, as it would if the rows were read where they are written.
        keep_row = jnp.where(keep == pair.cluster, pair.row, pair.other_row)
        join_row = jnp.where(keep == pair.cluster, pair.other_row, pair.row)
        distance = state.distance
        for client, row in ((join, jnp.where(holds, jnp.inf, join_row)), (keep, jnp.where(holds, merged, keep_row))):
            distance = lax.dynamic_update_slice(distance, row[None, :], (client, jnp.int32(0)))
            distance = lax.dynamic_update_slice(distance, row[:, None], (jnp.int32(0), client))
        merged_bound = state.bound.at[join].set(jnp.inf).at[keep].set(merged.min())
        bound = jnp.where(holds, merged_bound, state.bound.at[pair.cluster].set(pair.nearest))
        step = jnp.where(holds, state.step, num_clients)
        return _Merging(
            distance=distance,
            bound=bound,
            size=state.size.at[keep].set(jnp.where(holds, size + other_size, state.size[keep])),
            merges=state.merges.at[step].set(jnp.stack([keep, join]), mode="drop"),
            heights=state.heights.at[step].set(pair.nearest, mode="drop"),
            step=state.step + holds.astype(jnp.int32),
            pair=look(distance, bound),
        )

    bound = distance.min(axis=1)
    state = _Merging(
        distance=distance,
        bound=bound,
        size=jnp.ones(num_clients, distance.dtype),
        merges=jnp.full((num_clients, 2), num_clients, jnp.int32),
        heights=jnp.full(num_clients, jnp.inf, distance.dtype),
        step=jnp.int32(0),
        pair=look(distance, bound),
    )
    state = lax.while_loop(lambda state: state.step < num_merges, advance, state)
    # Means can round below the last height; a cut needs ascending heights.
    return Dendrogram(state.merges[:-1], lax.cummax(state.heights)[:-1], mask)


def _ward(pair: _Pair, size: Array, other_size: Array, sizes: Array) -> Array:
    """f32[M]: distances of two merged clusters of these sizes to all others, of `sizes` f32[M]."""
    near, far = jnp.minimum(pair.row, pair.other_row), jnp.maximum(pair.row, pair.other_row)
    scale = jnp.where((far > 0.0) & jnp.isfinite(far), far, 1.0)  # no square overflows
    row, other, apart = (jnp.square(distance / scale) for distance in (pair.row, pair.other_row, pair.nearest))
    total = (size + sizes) * row + (other_size + sizes) * other - sizes * apart
    merged = scale * jnp.sqrt(jnp.maximum(total, 0.0) / (size + other_size + sizes))
    # As near as the nearer at least, which rounding must not undo: bounds rely on it.
    return jnp.where(jnp.isfinite(far), jnp.maximum(merged, near), jnp.inf)


def _host_dendrogram(distance: np.ndarray, mask: np.ndarray, linkage: str) -> Dendrogram:
    clients = np.flatnonzero(mask)
    merges = np.full((len(mask) - 1, 2), len(mask), np.int32)
    heights = np.full(len(mask) - 1, np.inf, distance.dtype)
    if len(clients) > 1:
        square = distance[np.ix_(clients, clients)].astype(np.float64)
        square = 0.5 * (square + square.T)
        np.fill_diagonal(square, 0.0)
        tree = scipy.cluster.hierarchy.linkage(scipy.spatial.distance.squareform(square, checks=False), linkage)
        smallest = list(clients)
        for step, (a, b) in enumerate(tree[:, :2].astype(int)):
            merges[step] = sorted((smallest[a], smallest[b]))
            smallest.append(merges[step, 0])
        heights[: len(tree)] = tree[:, 2]
    return Dendrogram(jnp.asarray(merges), jnp.asarray(heights), jnp.asarray(mask))
