"""Landmark clients: clusterings of pairs of clients, M × M, from the pairs of all clients with some of them, M × m.

Ours, of none of the papers whose clusterings it approximates: the landmarks are clustered exactly as these cluster
everybody, and every other client joins the landmarks' cluster to which it is nearest. With all clients as landmarks
nothing is approximated.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, ArrayLike, Bool, Float, Int, PRNGKeyArray

from fedjax_cluster.clustering import checks
from fedjax_cluster.clustering.checks import Mask, Scalar
from fedjax_cluster.clustering.dissimilarity import (
    RADIAN,
    Reduction,
    angles_between,
    checked_beta,
    checked_delta,
    class_counts,
    spread,
    weights_between,
)
from fedjax_cluster.clustering.similarity import degrees, matmul, of_length_one
from fedjax_cluster.clustering.spectral import Embedding
from fedjax_cluster.options import checked

Clients = Int[ArrayLike, " m"]
Linkage = Literal["average", "single", "complete"]

_CHUNK = 512  # clients compared with the landmarks at a time
_LEAST = 1e-6  # of the largest singular value; below it all is rounding, and what is divided by it no unit vector


def draw_landmarks(rng_key: PRNGKeyArray, number: int, mask: Bool[ArrayLike, " M"]) -> Int[Array, " m"]:
    """Draws landmark clients uniformly, without replacement.

    Args:
      rng_key: a JAX random key. Of one key, more landmarks are those of fewer and others; absent rows that follow
        change nothing (unless JAX's setting `threefry_partitionable` is off).
      number: m, static.
      mask: clients to draw from.

    Returns:
      Their indices, ascending.

    Raises:
      ValueError: `number` outside 1..clients that count, or a mask that is none.

    >>> draw_landmarks(jax.random.key(0), 2, jnp.array([True, False, True])).tolist()
    [0, 2]
    """
    checks.key(rng_key)
    mask = checks.as_array(mask, "mask")
    mask = checks.client_mask(mask, len(mask) if mask.ndim else 0)
    number = checks.num_clusters(number, mask, "number")
    return _draw_landmarks(rng_key, mask, number)


@partial(jax.jit, static_argnames="number")
def _draw_landmarks(rng_key: Array, mask: Array, number: int) -> Array:
    score = jnp.where(mask, jax.random.uniform(rng_key, mask.shape, jnp.float32), -1.0)
    return jnp.sort(lax.top_k(score, number)[1]).astype(jnp.int32)


def extend_labels(
    distance: Float[ArrayLike, "M m"],
    landmarks: Clients,
    labels: Int[ArrayLike, " m"],
    k: int,
    linkage: Linkage = "average",
    mask: Mask = None,
) -> Int[Array, " M"]:
    r"""Puts every client into the cluster of landmarks to which it is nearest. Ours.

    .. math:: z_i = \arg\min_k \operatorname{mean}, \min \text{ or } \max \text{ of } d_{il} \text{ over } l : z_l = k

    Args:
      distance: of each client to each landmark, in any unit.
      landmarks: which clients these are, each once.
      labels: clusters of the landmarks, in -1..k-1; -1 for one that does not count, as one that is masked out.
      k: number of clusters, static.
      linkage: which distance to a cluster, static.
      mask: clients that count; None means all.

    Returns:
      Labels; a landmark keeps its own, -1 where masked out, and everywhere where no landmark has one.

    Raises:
      ValueError: shapes that do not fit, labels outside -1..k-1, an unknown linkage, or non-finite distances of clients
        that count to landmarks that count.

    >>> distance = jnp.array([[0.0, 4.0], [1.0, 3.0], [4.0, 0.0], [3.0, 2.0]])
    >>> extend_labels(distance, jnp.array([0, 2]), jnp.array([1, 0]), 2).tolist()
    [1, 1, 0, 0]
    """
    distance = checks.floats(distance, "distance", 2)
    landmarks = _checked_landmarks(landmarks, *distance.shape)
    labels = checks.labels(labels, "labels", len(landmarks))
    k = checks.count(k, "k")
    if not checks.holds(lambda labels: (labels < k).all(), labels):
        raise ValueError(f"labels holds {labels.max()}, but k is {k}: give a k above the largest label.")
    checks.choice(linkage, "linkage", get_args(Linkage))
    mask = checks.client_mask(mask, len(distance))
    _check_finite(distance, "distance", landmarks, mask)
    return _extend_labels(distance, landmarks, labels, mask, k, linkage)


@partial(jax.jit, static_argnames=("k", "linkage"))
def _extend_labels(distance: Array, landmarks: Array, labels: Array, mask: Array, k: int, linkage: str) -> Array:
    labels = jnp.where(mask[landmarks], labels, -1)
    slot = jnp.where(labels < 0, k, labels)
    # Columns of landmarks that do not count may hold anything, and a matrix product spreads NaN.
    distance = jnp.where((slot < k)[None, :], distance, 0.0)
    count = jnp.zeros(k + 1, distance.dtype).at[slot].add(1.0)[:k]
    if linkage == "average":
        members = jax.nn.one_hot(labels, k, dtype=distance.dtype)
        apart = matmul(distance, members) / jnp.maximum(count, 1.0)[None, :]
    else:
        reduce = jax.ops.segment_min if linkage == "single" else jax.ops.segment_max
        apart = reduce(distance.T, slot, k + 1)[:k].T
    apart = jnp.where(count[None, :] > 0, apart, jnp.inf)
    joined = jnp.where(jnp.any(count > 0), jnp.argmin(apart, axis=1), -1).astype(jnp.int32)
    return jnp.where(mask, joined.at[landmarks].set(labels), -1)


def landmark_directions(profile: Float[ArrayLike, "m D"], embedding: Embedding) -> Float[Array, "D rank"]:
    r"""The leading right singular vectors of the landmarks' profiles, on which any client's profile is projected. Ours.

    .. math:: G_L = U \Sigma V^\top, \qquad V = G_L^\top (U \Sigma) \Sigma^{-2}, \qquad g' = V^\top g

    For a landmark that is its row of UΣ, and for all others the Nyström extension of it.

    Args:
      profile: one row per landmark.
      embedding: of these profiles, as `subspace_embedding` gives it.

    Returns:
      Orthonormal columns; 0 for a singular value below 10⁻⁶ of the largest, which is rounding.

    Raises:
      ValueError: shapes that do not fit, or profiles or features that are not finite.

    >>> profile = jnp.array([[3.0, 0.0], [0.0, 2.0], [3.0, 0.0]])
    >>> embedding = Embedding(jnp.array([[3.0], [0.0], [3.0]]), jnp.array([18.0**0.5]))
    >>> landmark_directions(profile, embedding).round(4).tolist()
    [[1.0], [0.0]]
    """
    profile = checks.floats(profile, "profile", 2)
    checked("embedding", embedding, Embedding)
    features = checks.floats(embedding.features, "embedding.features", 2, like=profile)
    values = checks.floats(embedding.singular_values, "embedding.singular_values", 1, like=profile)
    if features.shape != (len(profile), len(values)):
        raise ValueError(
            f"embedding.features has shape {features.shape} for {len(profile)} profiles and {len(values)} singular "
            "values: give the embedding of these profiles."
        )
    checks.finite(profile, "profile")
    checks.finite(features, "embedding.features")
    kept = values > _LEAST * values.max(initial=0.0)
    values = jnp.where(kept, values, 1.0)[None, :]
    return jnp.where(kept[None, :], matmul(profile.T, features / values) / values, 0.0)


def landmark_affinity(
    interactions: Float[ArrayLike, "M m"], landmarks: Clients, beta: Scalar, mask: Mask = None
) -> Float[Array, "M m"]:
    r"""`interaction_affinity` of all clients with the landmarks, from P's columns of the landmarks alone. Ours.

    .. math:: W_{kl} = \exp\!\Big( -\beta \frac{n - 2}{|J|} \sum_{j \in J} (P_{kj} - P_{lj})^2 \Big),
              \qquad J = \text{landmarks} \setminus \{k, l\}

    with n clients that count: the sum over their columns is estimated from those that are there, without bias where
    these were drawn uniformly.

    Args:
      interactions: P's columns of the landmarks.
      landmarks: which clients these are, each once.
      beta: β > 0, the spread of the kernel.
      mask: clients that count, such as those of one cluster; None means all.

    Returns:
      In [0, 1]; 1 between a landmark and itself, 0 in rows and columns of clients that do not count.

    Raises:
      ValueError: shapes that do not fit, β not positive, or non-finite interactions of clients that count with
        landmarks that count.

    >>> interactions = jnp.array([[9.0, 9.0, 1.0], [9.0, 9.0, 2.0], [0.0, 0.0, 9.0]])
    >>> round(float(landmark_affinity(interactions, jnp.arange(3), 1.0)[0, 1]), 4)  # exp(-(1 - 2)²)
    0.3679
    """
    interactions = checks.floats(interactions, "interactions", 2)
    landmarks = _checked_landmarks(landmarks, *interactions.shape)
    mask = checks.client_mask(mask, len(interactions))
    beta = checks.floats(beta, "beta", 0, like=interactions)
    if not checks.holds(lambda beta: (beta > 0.0) & (beta < float("inf")), beta):
        raise ValueError(f"beta is {float(beta)}; the kernel's spread must be positive and finite: choose another.")
    _check_finite(interactions, "interactions", landmarks, mask)
    return _landmark_affinity(interactions, landmarks, beta, mask)


@jax.jit
def _landmark_affinity(interactions: Array, landmarks: Array, beta: Array, mask: Array) -> Array:
    column = mask[landmarks]
    pairs = mask[:, None] & column[None, :]
    entries = jnp.where(pairs, interactions, 0.0)
    count = jnp.maximum(mask.sum(), 1).astype(entries.dtype)
    # As in `interaction_affinity`: the closer to 0, the less digits cancel.
    entries = jnp.where(pairs, entries - (entries.sum(axis=0) / count)[None, :], 0.0)
    own = entries[landmarks]  # [m, m]
    squared_norm, own_norm = jnp.square(entries).sum(axis=1), jnp.square(own).sum(axis=1)
    squared = squared_norm[:, None] + own_norm[None, :] - 2.0 * matmul(entries, own.T)
    squared -= jnp.square(entries - jnp.diagonal(own)[None, :])  # (P_kl − P_ll)²
    # (P_kk − P_lk)², which is there for a landmark k alone.
    squared = squared.at[landmarks].add(-jnp.square(jnp.diagonal(own)[:, None] - own.T))
    is_landmark = jnp.zeros(len(mask), entries.dtype).at[landmarks].set(1.0)
    left = jnp.maximum(column.sum().astype(entries.dtype) - 1.0 - is_landmark, 1.0)
    scale = jnp.maximum(count - 2.0, 1.0) / left
    affinity = jnp.exp(-beta * scale[:, None] * jnp.maximum(squared, 0.0))
    affinity = affinity.at[landmarks, jnp.arange(len(landmarks))].set(1.0)
    return jnp.where(pairs, affinity, 0.0)


def landmark_proximity(
    vectors: Float[ArrayLike, "M L f p"],
    counts: Int[ArrayLike, "M L"],
    updates: Float[ArrayLike, "M d"],
    landmarks: Clients,
    *,
    angles: Reduction = "smallest",
    delta: Scalar = 0.5,
    beta: Scalar = 0.5,
    mask: Mask = None,
) -> Float[Array, "M m"]:
    r"""FLAG's `proximity` of all clients to the landmarks, scaled as it is among the landmarks. Ours.

    .. math:: A_{il} = \beta \frac{V_{il} - \min V}{\max V - \min V} + (1 - \beta)
              \frac{G_{il} - \min G}{\max G - \min G}

    with the extrema over pairs of different landmarks, and those of the class sizes' weights as well. Where these pairs
    are equal up to rounding, V or G adds 0, as in `proximity`.

    Args:
      vectors, counts, updates: of all clients, as `classwise_angles`, `data_dissimilarity` and `gradient_angles` take
        them.
      landmarks: which clients these are, each once.
      angles: the reduction of `classwise_angles`, static.
      delta: δ in [0, 1], how far class sizes weigh.
      beta: β in [0, 1], the weight of the data.
      mask: clients that count; None means all.

    Returns:
      In [0, 1] and symmetric among the landmarks, perhaps beyond for others; 0 for a landmark to itself, and for
      clients that do not count.

    Raises:
      ValueError: shapes that do not fit, counts that are negative or no integers, δ or β outside [0, 1], or values that
        are not finite in clients that count.

    >>> vectors = jnp.array([[[[1.0], [0.0]]], [[[0.6], [0.8]]], [[[0.8], [0.6]]]])
    >>> far = landmark_proximity(vectors, jnp.full((3, 1), 9), jnp.eye(3), jnp.array([0, 1]), beta=1.0)
    >>> far.shape, float(far[0, 0])
    ((3, 2), 0.0)
    """
    vectors = checks.floats(vectors, "vectors", 4)
    counts = class_counts(counts, vectors.shape[:2])
    updates = checks.floats(updates, "updates", 2, like=vectors)
    if len(updates) != len(vectors):
        raise ValueError(f"vectors has shape {vectors.shape}, updates {updates.shape}: give those of the same clients.")
    landmarks = _checked_landmarks(landmarks, len(vectors))
    mask = checks.client_mask(mask, len(vectors))
    checks.choice(angles, "angles", get_args(Reduction))
    for array, name in ((vectors, "vectors"), (updates, "updates")):
        checks.finite(array, name, mask)
    options = checked_delta(delta, vectors), checked_beta(beta, vectors)
    return _landmark_proximity(vectors, counts, updates, landmarks, *options, mask, angles)


@partial(jax.jit, static_argnames="angles")
def _landmark_proximity(
    vectors: Array,
    counts: Array,
    updates: Array,
    landmarks: Array,
    delta: Array,
    beta: Array,
    mask: Array,
    angles: Reduction,
) -> Array:
    sent = Compared(vectors, counts, updates)
    scales = proximity_scales(jax.tree.map(lambda leaf: leaf[landmarks], sent), mask[landmarks], angles, delta)

    def one(client: tuple[Compared, Array]) -> Array:
        rows = jax.tree.map(lambda leaf: jnp.where(client[1], leaf, 0), client[0])
        return proximity_to(scales, jax.tree.map(lambda leaf: leaf[None], rows), angles, delta, beta)[0]

    found = lax.map(one, (sent, mask), batch_size=_CHUNK)
    # Rounding takes values between landmarks past the extrema, and ij past ji.
    row, column = jnp.indices((len(landmarks), len(landmarks)), sparse=True)
    own = jnp.clip(found[landmarks], 0.0, 1.0)
    own = jnp.where(row < column, own, own.T)
    found = found.at[landmarks].set(jnp.where(row == column, 0.0, own))
    return jnp.where(mask[:, None] & mask[landmarks][None, :], found, 0.0)


class Compared(NamedTuple):
    """What FLAG compares of clients."""

    vectors: Array  # f32[..., L, f, p]
    counts: Array  # i32[..., L]
    updates: Array  # f32[..., d]


class Scales(NamedTuple):
    """What landmarks sent, and the least and the extent of what is between them."""

    sent: Compared  # of the landmarks
    weights: tuple[Array, Array]  # of class sizes
    data: tuple[Array, Array]  # degrees, as V is
    gradient: tuple[Array, Array]  # degrees, as G is


def proximity_scales(sent: Compared, mask: Array, angles: Reduction, delta: Array) -> Scales:
    """The scales of `landmark_proximity` among the landmarks of mask bool[m], without checks."""
    sent = jax.tree.map(lambda leaf: jnp.where(mask.reshape(-1, *(1,) * (leaf.ndim - 1)), leaf, 0), sent)
    # Of each pair once: ij and ji are rounded differently, and two landmarks would differ by that alone.
    pairs = mask[:, None] & mask[None, :] & jnp.triu(jnp.ones((len(mask), len(mask)), bool), 1)

    def extent(values: Array, where: Array, radian: float = 0.0) -> tuple[Array, Array]:
        least = jnp.where(where, values, jnp.inf).min()
        most = jnp.where(where, values, -jnp.inf).max()
        return least, spread(least, most, radian)

    weights, both = weights_between(sent.counts, sent.counts, sent.vectors.dtype)
    of_weights = extent(weights, both & pairs[:, :, None])
    data, gradient = _degrees_between(sent, sent, of_weights, angles, delta)
    return Scales(sent, of_weights, extent(data, pairs, RADIAN), extent(gradient, pairs, RADIAN))


def proximity_to(scales: Scales, clients: Compared, angles: Reduction, delta: Array, beta: Array) -> Array:
    """`landmark_proximity` f32[B, m] of some clients, without checks; a landmark's to itself is not set to 0."""
    data, gradient = _degrees_between(clients, scales.sent, scales.weights, angles, delta)

    def scaled(values: Array, least: Array, width: Array) -> Array:
        return jnp.where(width > 0.0, (values - least) / jnp.where(width > 0.0, width, 1.0), 0.0)

    return beta * scaled(data, *scales.data) + (1.0 - beta) * scaled(gradient, *scales.gradient)


def _degrees_between(
    clients: Compared, landmarks: Compared, of_weights: tuple[Array, Array], angles: Reduction, delta: Array
) -> tuple[Array, Array]:
    """V and G f32[B, m] in degrees of clients to the landmarks."""
    lightest, width = of_weights
    between = angles_between(clients.vectors, clients.counts, landmarks.vectors, landmarks.counts, angles)
    weights, both = weights_between(clients.counts, landmarks.counts, clients.vectors.dtype)
    share = jnp.clip((weights - lightest) / jnp.where(width > 0.0, width, 1.0), 0.0, 1.0)
    weights = jnp.where(both & (width > 0.0), 1.0 - delta + 2.0 * delta * share, 1.0)
    return (between * weights).mean(axis=2), degrees_between(clients.updates, landmarks.updates)


def degrees_between(updates: Array, others: Array) -> Array:
    """Angles in degrees between the rows of two matrices; 90 to a row of zeros."""
    return degrees(matmul(of_length_one(updates), of_length_one(others).T))


def _checked_landmarks(landmarks: Clients, clients: int, number: int | None = None) -> Array:
    found = checks.labels(landmarks, "landmarks", number, least=0)
    if not checks.holds(lambda index: (index < clients).all() & (len(set(index.tolist())) == len(index)), found):
        raise ValueError(f"landmarks names clients twice, or others than 0..{clients - 1}: give each landmark once.")
    return found


def _check_finite(array: Array, name: str, landmarks: Array, mask: Array) -> None:
    """Raises where a pair of a client that counts and a landmark that counts holds NaN or infinity."""

    def known(array: Any, landmarks: Any, mask: Any) -> Any:
        return ((abs(array) < float("inf")) | ~mask[:, None] | ~mask[landmarks][None, :]).all()

    if not checks.holds(known, array, landmarks, mask):
        raise ValueError(
            f"{name} holds NaN or infinite values in clients that count: leave them out with mask or repair them."
        )
