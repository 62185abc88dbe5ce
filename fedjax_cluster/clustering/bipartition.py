"""Splitting clients in two by their similarity, and when such a split can be trusted."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from fedjax_cluster.clustering import checks


class Bipartition(NamedTuple):
    """The split of clients whose largest similarity across is smallest."""

    labels: Array  # i32[M] in {0, 1}, -1 where masked out; the first client that counts has 0
    max_cross: Array  # f32[], the largest similarity between the two parts


def optimal_bipartition(similarity: Any, mask: Any = None) -> Bipartition:
    r"""Splits clients so that the largest similarity across the two parts is smallest.

    .. math:: c_1, c_2 = \arg\min_{c_1 \cup c_2 = c} \max_{i \in c_1, j \in c_2} \alpha_{ij}

    That is to drop the weakest edge of the maximum spanning tree, or single linkage cut at two clusters:
    O(M²) instead of the O(M³) of the paper's Algorithm 1.

    Args:
        similarity: f32[M, M], symmetric; the diagonal is ignored.
        mask: bool[M], clients that count; None means all.

    Returns:
        `Bipartition(labels i32[M], max_cross f32[])`. Label 0 is the part of the first client that counts;
        masked-out clients get -1. Where the mask is traced and holds fewer than two clients there is no
        second part and max_cross is infinite, the minimum over no split.

    Raises:
        ValueError: wrong shapes, fewer than two clients that count, or non-finite similarities.

    Example:
        >>> import jax.numpy as jnp
        >>> similarity = jnp.array([[1.0, 0.9, -0.5], [0.9, 1.0, -0.2], [-0.5, -0.2, 1.0]])
        >>> labels, max_cross = optimal_bipartition(similarity)
        >>> labels.tolist(), round(float(max_cross), 4)
        ([0, 0, 1], -0.2)

    References:
        CFL, Eqs. 25 and 35, Algorithm 1.
    """
    similarity = checks.square(similarity, "similarity")
    mask = checks.client_mask(mask, similarity.shape[0])
    if checks.is_concrete(mask) and (number := int(np.asarray(mask).sum())) < 2:
        raise ValueError(f"{number} clients count; a split needs at least two: do not split this cluster.")
    checks.finite_matrix(similarity, "similarity", mask)
    return _optimal_bipartition(similarity, mask)


@jax.jit
def _optimal_bipartition(similarity: Array, mask: Array) -> Bipartition:
    # Prim's algorithm. What it has reached and what it has not are at most as similar as the edge it takes
    # next, so the weakest edge it ever takes is the best split: reached before it, or not.
    num_clients = similarity.shape[0]
    index = jnp.arange(num_clients, dtype=jnp.int32)
    first = jnp.argmax(mask)
    unreached = num_clients
    step_reached = jnp.where(mask, unreached, -1).astype(jnp.int32).at[first].set(0)
    closest = jnp.where(step_reached == unreached, similarity[first], -jnp.inf)

    def reach(step: Array, state: tuple[Array, Array, Array, Array]) -> tuple[Array, Array, Array, Array]:
        closest, step_reached, weakest, split_step = state
        edge = closest.max()
        # Two plain reductions: an argmax is not vectorised on CPU and takes three times as long.
        client = jnp.where(closest == edge, index, num_clients).min()
        step_reached = step_reached.at[client].set(step)
        closest = jnp.where(step_reached == unreached, jnp.maximum(closest, similarity[client]), -jnp.inf)
        return (
            closest,
            step_reached,
            jnp.minimum(weakest, edge),
            jnp.where(edge < weakest, step, split_step),
        )

    state = (closest, step_reached, jnp.float32(jnp.inf), jnp.int32(unreached))
    _, step_reached, weakest, split_step = lax.fori_loop(1, mask.sum(dtype=jnp.int32), reach, state)
    labels = jnp.where(mask, (step_reached >= split_step).astype(jnp.int32), -1)
    return Bipartition(labels, weakest)


def separation_gap(similarity: Any, group: Any, mask: Any = None) -> Array:
    r"""By how much the true groups are separated; above 0 exactly when the best split cuts no group.

    .. math:: g(\alpha) = \min_{I(i) = I(j)} \alpha_{ij}
              - \min_{c_1 \cup c_2 = c} \max_{i \in c_1, j \in c_2} \alpha_{ij}

    Args:
        similarity: f32[M, M], symmetric; the diagonal is ignored.
        group: i32[M], the true group of each client; -1 leaves a client out.
        mask: bool[M], clients that count; None means all.

    Returns:
        f32[]. Where every group is a single client, its similarity 1 to itself is the minimum.

    Raises:
        ValueError: wrong shapes, fewer than two clients that count, or non-finite similarities.

    Example:
        >>> import jax.numpy as jnp
        >>> similarity = jnp.array([[1.0, 0.9, -0.5], [0.9, 1.0, -0.2], [-0.5, -0.2, 1.0]])
        >>> round(float(separation_gap(similarity, jnp.array([0, 0, 1]))), 4)
        1.1

    References:
        CFL, Definition 2 and Remark 2.
    """
    similarity = checks.square(similarity, "similarity")
    group = checks.labels(group, "group", similarity.shape[0])
    mask = checks.labelled(checks.client_mask(mask, similarity.shape[0]), group)
    max_cross = optimal_bipartition(similarity, mask).max_cross
    together = mask[:, None] & mask[None, :] & (group[:, None] == group[None, :])
    pairs = together & ~jnp.eye(similarity.shape[0], dtype=bool)
    return jnp.where(pairs, similarity, 1.0).min() - max_cross


def noise_alignment(noise: Any) -> Array:
    r"""How similar two gradients of one distribution are at least, given their relative noise.

    .. math:: H_{ij} = -\gamma_i \gamma_j + \sqrt{1 - \gamma_i^2} \sqrt{1 - \gamma_j^2}

    Args:
        noise: f32[M], γ_i = ‖∇R_{I(i)} − ∇r_i‖ / ‖∇R_{I(i)}‖ in [0, 1].

    Returns:
        f32[M, M] in [-1, 1], a cosine: the lower bound of Eq. 21 for pairs of one group.

    Raises:
        ValueError: wrong shape, or noise outside [0, 1].

    Example:
        >>> import jax.numpy as jnp
        >>> round(float(noise_alignment(jnp.array([0.0, 0.6]))[0, 1]), 4)
        0.8

    References:
        CFL, Eqs. 16, 20 and 21.
    """
    noise = checks.floats(noise, "noise", 1)
    if not checks.holds(lambda noise: ((noise >= 0.0) & (noise <= 1.0)).all(), noise):
        raise ValueError("noise holds values outside [0, 1]; the bound needs less noise than signal (Eq. 15).")
    signal = jnp.sqrt(1.0 - jnp.square(noise))
    return signal[:, None] * signal[None, :] - noise[:, None] * noise[None, :]


def cross_similarity_bound(alignment: Any, num_distributions: int) -> Array:
    r"""How similar two clients across the best split are at most.

    .. math:: \cos\!\Big(\frac{\pi}{k-1}\Big) H_{ij} + \sin\!\Big(\frac{\pi}{k-1}\Big) \sqrt{1 - H_{ij}^2}
              \quad\text{if } H_{ij} \ge \cos\!\Big(\frac{\pi}{k-1}\Big), \text{ else } 1

    Args:
        alignment: f32[...], H_ij as `noise_alignment` gives it.
        num_distributions: k, at least 2, static.

    Returns:
        f32[...] of the same shape. α_cross^max is at most the largest entry between the two parts.

    Raises:
        ValueError: k below 2, or alignments outside [-1, 1].

    Example:
        >>> import jax.numpy as jnp
        >>> round(float(cross_similarity_bound(jnp.float32(0.8), 2)), 4)
        -0.8

    References:
        CFL, Theorem 1, Eq. 19; Remark 1 for k = 2.
    """
    alignment = jnp.asarray(alignment, jnp.float32)
    k = checks.count(num_distributions, "num_distributions", minimum=2)
    if not checks.holds(lambda cosine: (abs(cosine) <= 1.0 + 1e-6).all(), alignment):
        raise ValueError("alignment holds values outside [-1, 1]; it is a cosine: take it from noise_alignment.")
    angle = math.pi / (k - 1)
    across = jnp.sqrt(jnp.maximum(1.0 - jnp.square(alignment), 0.0))
    bound = math.cos(angle) * alignment + math.sin(angle) * across
    return jnp.where(alignment >= math.cos(angle), bound, 1.0)


def largest_safe_noise(max_cross: Any) -> Array:
    r"""The relative noise below which a split with this similarity across it is correct.

    .. math:: \gamma_{max} < \sqrt{(1 - \alpha_{cross}^{max}) / 2}

    Args:
        max_cross: f32[...], the largest similarity between the two parts, in [-1, 1].

    Returns:
        f32[...] of the same shape, in [0, 1]: keep the split if γ_max lies below it. NaN where there is no
        split (`max_cross` infinite), which no γ_max lies below.

    Example:
        >>> float(largest_safe_noise(-1.0)), float(largest_safe_noise(1.0))
        (1.0, 0.0)

    References:
        CFL, Eqs. 37–39.
    """
    max_cross = jnp.asarray(max_cross, jnp.float32)
    return jnp.sqrt(0.5 * (1.0 - max_cross))
