"""Scores of a clustering by how far apart its clusters lie.

Clients with label -1 are left out. Labels may be any non-negative integers. Squares are of differences in the unit of
the largest: what is less than 2⁻⁶³ of it, 1·10⁻¹⁹, counts as 0; so do the distances of all from each other where one
client is that much farther away.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Real

from fedjax_cluster.clustering import checks
from fedjax_cluster.clustering.checks import Labels, Mask
from fedjax_cluster.clustering.kmeans import squared_distances
from fedjax_cluster.clustering.scores.agreement import run_index
from fedjax_cluster.clustering.similarity import root, unit


def silhouette(
    features: Float[ArrayLike, "M f"], labels: Labels, *, mask: Mask = None, num_labels: int | None = None
) -> Float[Array, ""]:
    r"""Mean over clients of how much closer their cluster is than the next one (Rousseeuw 1987; FedGWC, App. E.1).

    .. math:: s_i = \frac{b_i - a_i}{\max(a_i, b_i)}

    with a_i the mean distance to the others of client i's cluster and b_i the least mean distance to another cluster;
    s_i = 0 for a client alone in its cluster. Distances below 10⁻¹⁹ of the largest count as 0.

    Args:
      features: one row per client, in any unit.
      labels: the clustering; -1 leaves a client out.
      mask: clients that count; None means all.
      num_labels: upper bound on the number of different labels, static; None means M. A tight one saves time.

    Returns:
      In [-1, 1]; NaN for a single cluster.

    Raises:
      ValueError: wrong shapes, more different labels than `num_labels`, or non-finite features.

    >>> round(float(silhouette(jnp.array([[0.0], [1.0], [10.0], [11.0]]), jnp.array([0, 0, 1, 1]))), 4)
    0.8997
    """
    return _silhouette(*_features_and_labels(features, labels, mask, num_labels))


@partial(jax.jit, static_argnames="bound")
def _silhouette(features: Array, labels: Array, mask: Array, bound: int) -> Array:
    cluster, size = _dense_labels(labels, mask, bound)
    features = _in_units(features, mask)
    distances = jnp.where(mask[:, None] & mask[None, :], root(squared_distances(features, features)), 0.0)
    total = jax.ops.segment_sum(distances, cluster, bound)  # [L, M]; masked-out clients fall off the end
    size = size.astype(features.dtype)
    member = jnp.arange(bound, dtype=jnp.int32)[:, None] == cluster[None, :]
    num_members = jnp.where(member, size[:, None], 0.0).sum(axis=0)
    within = jnp.where(member, total, 0.0).sum(axis=0) / jnp.maximum(num_members - 1.0, 1.0)
    others = (size[:, None] > 0.0) & ~member
    between = jnp.where(others, total / jnp.maximum(size, 1.0)[:, None], jnp.inf).min(axis=0)
    larger = jnp.maximum(within, between)
    score = (between - within) / jnp.where(larger > 0.0, larger, 1.0)
    counted = mask & (num_members > 1.0)
    mean = jnp.where(counted, score, 0.0).sum() / jnp.maximum(mask.sum(), 1).astype(features.dtype)
    return jnp.where(((size > 0.0).sum() > 1) & jnp.isfinite(features).all(), mean, jnp.nan)


def davies_bouldin(
    features: Float[ArrayLike, "M f"], labels: Labels, *, mask: Mask = None, num_labels: int | None = None
) -> Float[Array, ""]:
    r"""Mean over clusters of the worst ratio of their widths to their distance (Davies and Bouldin 1979).

    .. math:: \frac{1}{n} \sum_i \max_{j \ne i} \frac{S_i + S_j}{\| c_i - c_j \|}

    with S_i the mean distance of cluster i to its centroid c_i; below 1 clusters are well separated (FedGWC, App. E.2).
    Distances below 10⁻¹⁹ of the largest count as 0.

    Args:
      features: one row per client, in any unit.
      labels, mask, num_labels: as for `silhouette`.

    Returns:
      At least 0; NaN for a single cluster, infinite where two centroids coincide.

    Raises:
      ValueError: wrong shapes, more different labels than `num_labels`, or non-finite features.

    >>> round(float(davies_bouldin(jnp.array([[0.0], [1.0], [10.0], [11.0]]), jnp.array([0, 0, 1, 1]))), 4)
    0.1
    """
    return _davies_bouldin(*_features_and_labels(features, labels, mask, num_labels))


@partial(jax.jit, static_argnames="bound")
def _davies_bouldin(features: Array, labels: Array, mask: Array, bound: int) -> Array:
    cluster, size = _dense_labels(labels, mask, bound)
    features = _in_units(features, mask)
    size = size.astype(features.dtype)
    safe_size = jnp.maximum(size, 1.0)
    # Each cluster is looked at from one of its own clients, so that one far away costs the others no digit.
    place, row = jnp.minimum(cluster, bound - 1), jnp.arange(len(features))
    first = jnp.full(bound, len(features) - 1).at[cluster].min(row, mode="drop")
    base = features[first]
    offset = jnp.where(mask[:, None], features - base[place], 0.0)
    centre = jax.ops.segment_sum(offset, cluster, bound) / safe_size[:, None]
    to_centroid = jnp.where(mask, root(jnp.square(offset - centre[place]).sum(axis=1)), 0.0)
    width = jax.ops.segment_sum(to_centroid, cluster, bound) / safe_size
    between = (base[:, None] - base[None, :]) + (centre[:, None] - centre[None, :])
    apart = root(jnp.square(between).sum(axis=-1))
    used = size > 0.0
    pairs = used[:, None] & used[None, :] & ~jnp.eye(bound, dtype=bool)
    # Centroids are rounded means: closer than this, for what they are means of, they are the same.
    extent = jax.ops.segment_max(jnp.abs(offset).max(axis=1, initial=0.0), cluster, bound)
    coincide = apart <= 8 * jnp.finfo(apart.dtype).eps * jnp.maximum(extent[:, None], extent[None, :])
    ratio = jnp.where(coincide, jnp.inf, (width[:, None] + width[None, :]) / jnp.where(coincide, 1.0, apart))
    worst = jnp.where(pairs, ratio, -jnp.inf).max(axis=1)
    num_clusters = used.sum()
    mean = jnp.where(used, worst, 0.0).sum() / jnp.maximum(num_clusters, 1).astype(features.dtype)
    return jnp.where((num_clusters > 1) & jnp.isfinite(features).all(), mean, jnp.nan)


def wasserstein_adjusted_silhouette(
    class_counts: Real[ArrayLike, "M L"], labels: Labels, *, mask: Mask = None, num_labels: int | None = None
) -> Float[Array, ""]:
    r"""Silhouette of the clients' class imbalance: which classes are frequent does not matter (FedGWC, Eq. 7).

    .. math:: d_{kj} = \frac{1}{C} \Big( \sum_i | x_{(i)}^k - x_{(i)}^j |^2 \Big)^{1/2}

    is the distance of class frequencies in descending order; the factor 1/C cancels in the score.

    Args:
      class_counts: examples of each class, or their frequencies: rows are normalised. Clients without any are left out.
      labels, mask, num_labels: as for `silhouette`.

    Returns:
      In [-1, 1]; NaN for a single cluster.

    Raises:
      ValueError: wrong shapes, negative or non-finite counts, more different labels than `num_labels`.

    >>> counts = jnp.array([[9, 0, 0], [0, 9, 0], [3, 3, 3], [1, 1, 1]])
    >>> round(float(wasserstein_adjusted_silhouette(counts, jnp.array([0, 0, 1, 1]))), 4)
    1.0
    """
    return _of_ranked_frequencies(_silhouette, *_counts_and_labels(class_counts, labels, mask, num_labels))


def wasserstein_adjusted_davies_bouldin(
    class_counts: Real[ArrayLike, "M L"], labels: Labels, *, mask: Mask = None, num_labels: int | None = None
) -> Float[Array, ""]:
    r"""Davies–Bouldin index of the clients' class imbalance: which classes are frequent does not matter.

    It is `davies_bouldin` of each client's class frequencies in descending order (FedGWC, Eq. 7 and Appendix E.2).

    Args:
      class_counts: examples of each class, or their frequencies: rows are normalised. Clients without any are left out.
      labels, mask, num_labels: as for `silhouette`.

    Returns:
      At least 0; NaN for a single cluster, infinite where two centroids coincide.

    Raises:
      ValueError: wrong shapes, negative or non-finite counts, more different labels than `num_labels`.

    >>> counts = jnp.array([[9, 0, 0], [0, 9, 0], [3, 3, 3], [1, 1, 1]])
    >>> round(float(wasserstein_adjusted_davies_bouldin(counts, jnp.array([0, 0, 1, 1]))), 4)
    0.0
    """
    return _of_ranked_frequencies(_davies_bouldin, *_counts_and_labels(class_counts, labels, mask, num_labels))


def _features_and_labels(
    features: ArrayLike, labels: ArrayLike, mask: ArrayLike | None, num_labels: int | None, name: str = "features"
) -> tuple[Array, Array, Array, int]:
    features = checks.floats(features, name, 2)
    labels = checks.labels(labels, "labels", features.shape[0])
    mask = checks.labelled(checks.client_mask(mask, features.shape[0]), labels)
    checks.finite(features, name, mask)
    if num_labels is None:
        return features, labels, mask, features.shape[0]
    bound = checks.count(num_labels, "num_labels")
    if checks.is_concrete(labels, mask) and (used := len(np.unique(np.asarray(labels)[np.asarray(mask)]))) > bound:
        raise ValueError(f"num_labels is {bound}, but there are {used} different labels: raise it or leave it out.")
    return features, labels, mask, bound


def _counts_and_labels(
    class_counts: ArrayLike, labels: ArrayLike, mask: ArrayLike | None, num_labels: int | None
) -> tuple[Array, Array, Array, int]:
    counts, labels, mask, bound = _features_and_labels(class_counts, labels, mask, num_labels, "class_counts")
    if not checks.holds(lambda counts, mask: ((counts >= 0.0) | ~mask[:, None]).all(), counts, mask):
        raise ValueError("class_counts holds negative values, which count no examples: give counts or frequencies.")
    return counts, labels, mask, bound


@partial(jax.jit, static_argnames=("score", "bound"))
def _of_ranked_frequencies(score: Callable[..., Array], counts: Array, labels: Array, mask: Array, bound: int) -> Array:
    """The score of the class frequencies in descending order of the clients that have examples."""
    counts = counts / unit(counts, axis=1, keepdims=True)
    total = counts.sum(axis=1)
    frequencies = counts / jnp.where(total > 0.0, total, 1.0)[:, None]
    # A client of NaN is not one without examples.
    return score(-jnp.sort(-frequencies, axis=1), labels, mask & ~(total <= 0.0), bound)


def _in_units(features: Array, mask: Array) -> Array:
    """In units of the largest distance from one of the clients, as powers of two, which changes no digit."""
    counted = jnp.where(mask[:, None], features, 0.0)
    scale = unit(jnp.where(mask[:, None], features - features[jnp.argmax(mask)][None], 0.0))
    return counted / scale


def _dense_labels(labels: Array, mask: Array, bound: int) -> tuple[Array, Array]:
    """Labels 0..bound-1 (bound where masked out) and the sizes of the clusters."""
    keys = jnp.where(mask, labels, jnp.iinfo(jnp.int32).max)
    order = jnp.argsort(keys)
    cluster = jnp.zeros(labels.shape[0], jnp.int32).at[order].set(run_index(keys[order]))
    cluster = jnp.where(mask, cluster, bound)
    return cluster, jax.ops.segment_sum(mask.astype(jnp.int32), cluster, bound)
