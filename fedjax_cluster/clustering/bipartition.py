"""Splitting clients in two by their similarity, and when such a split can be trusted."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import dtypes, lax
from jaxtyping import Array, ArrayLike, Float, Int

from fedjax_cluster.clustering import checks
from fedjax_cluster.clustering.checks import Labels, Mask


class Bipartition(NamedTuple):
    """The split of clients whose largest similarity across is smallest."""

    labels: Int[Array, " M"]  # 0 or 1, -1 where masked out; the first client that counts has 0
    max_cross: Float[Array, ""]  # the largest similarity between the two parts; infinite without a second part


def optimal_bipartition(similarity: Float[ArrayLike, "M M"], mask: Mask = None) -> Bipartition:
    r"""Splits clients so that the largest similarity across the two parts is smallest.

    .. math:: c_1, c_2 = \arg\min_{c_1 \cup c_2 = c} \max_{i \in c_1, j \in c_2} \alpha_{ij}

    Drops the weakest edge of the maximum spanning tree in O(M²), not the O(M³) of CFL's Algorithm 1 (Eqs. 25 and 35).

    Args:
      similarity: symmetric; the diagonal is ignored.
      mask: clients that count, at least two unless it is traced; None means all.

    Raises:
      ValueError: wrong shapes, fewer than two clients that count, or similarities not finite or not symmetric.

    >>> similarity = jnp.array([[1.0, 0.9, -0.5], [0.9, 1.0, -0.2], [-0.5, -0.2, 1.0]])
    >>> labels, max_cross = optimal_bipartition(similarity)
    >>> labels.tolist(), round(float(max_cross), 4)
    ([0, 0, 1], -0.2)
    """
    similarity, mask = checks.client_matrix(similarity, "similarity", mask, diagonal=False)
    checks.symmetric_matrix(similarity, "similarity", mask, diagonal=False)
    if checks.is_concrete(mask) and (count := int(np.asarray(mask).sum())) < 2:
        raise ValueError(f"{count} clients count; a split needs at least two: do not split this cluster.")
    return _optimal_bipartition(similarity, mask)


@jax.jit
def _optimal_bipartition(similarity: Array, mask: Array) -> Bipartition:
    return Bipartition(*_weakest_edge_dropped(similarity, mask))


@jax.custom_jvp
def _weakest_edge_dropped(similarity: Array, mask: Array) -> tuple[Array, Array]:
    """The labels, and the edge dropped; infinite where there is none."""
    # Prim's algorithm. The clients reached and those not reached are at most as similar as the edge it takes next, so
    # the weakest edge it ever takes is the best split: reached before it, or not.
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
        return (closest, step_reached, jnp.minimum(weakest, edge), jnp.where(edge < weakest, step, split_step))

    state = (closest, step_reached, jnp.asarray(jnp.inf, closest.dtype), jnp.int32(unreached))
    _, step_reached, weakest, split_step = lax.fori_loop(1, mask.sum(dtype=jnp.int32), reach, state)
    return jnp.where(mask, (step_reached >= split_step).astype(jnp.int32), -1), weakest


@_weakest_edge_dropped.defjvp
def _change_of_weakest(primals: tuple[Array, Array], tangents: tuple[Array, Any]) -> tuple[Any, Any]:
    similarity, mask = primals
    labels, weakest = _weakest_edge_dropped(similarity, mask)
    edges = (labels[:, None] == 0) & (labels[None, :] == 1) & (similarity == weakest)
    change = jnp.where(edges, tangents[0], 0.0).sum() / jnp.maximum(edges.sum(), 1).astype(similarity.dtype)
    return (labels, weakest), (np.zeros(labels.shape, dtypes.float0), change)


def separation_gap(similarity: Float[ArrayLike, "M M"], group: Labels, mask: Mask = None) -> Float[Array, ""]:
    r"""How far the true groups are separated: above 0 exactly when the best split cuts no group (CFL, Definition 2).

    .. math:: g(\alpha) = \min_{I(i) = I(j)} \alpha_{ij}
              - \min_{c_1 \cup c_2 = c} \max_{i \in c_1, j \in c_2} \alpha_{ij}

    Args:
      similarity: symmetric; the diagonal is ignored.
      group: the true group of each client; -1 leaves a client out.
      mask: clients that count; None means all.

    Returns:
      The gap. Where every group is a single client, its similarity 1 to itself is the minimum.

    Raises:
      ValueError: wrong shapes, fewer than two clients that count, or similarities not finite or not symmetric.

    >>> similarity = jnp.array([[1.0, 0.9, -0.5], [0.9, 1.0, -0.2], [-0.5, -0.2, 1.0]])
    >>> round(float(separation_gap(similarity, jnp.array([0, 0, 1]))), 4)
    1.1
    """
    similarity = checks.square(similarity, "similarity")
    group = checks.labels(group, "group", similarity.shape[0])
    mask = checks.labelled(checks.client_mask(mask, similarity.shape[0]), group)
    return _gap(similarity, group, mask, optimal_bipartition(similarity, mask).max_cross)


@jax.jit
def _gap(similarity: Array, group: Array, mask: Array, max_cross: Array) -> Array:
    pairs = mask[:, None] & mask[None, :] & ~jnp.eye(similarity.shape[0], dtype=bool)
    within = jnp.where(pairs & (group[:, None] == group[None, :]), similarity, jnp.inf).min()
    return jnp.where(jnp.isfinite(within), within, 1.0) - max_cross


def cross_similarity_bound(alignment: Float[ArrayLike, ...], num_distributions: int) -> Float[Array, ...]:
    r"""Upper bound on the similarity across the best split (CFL, Theorem 1, Eq. 19; Remark 1 for k = 2).

    .. math:: \cos\!\Big(\frac{\pi}{k-1}\Big) H_{ij} + \sin\!\Big(\frac{\pi}{k-1}\Big) \sqrt{1 - H_{ij}^2}
              \quad\text{if } H_{ij} \ge \cos\!\Big(\frac{\pi}{k-1}\Big), \text{ else } 1

    Args:
      alignment: H_ij, the least cosine of two gradients of one distribution (CFL, Eqs. 20 and 21).
      num_distributions: k, at least 2, static.

    Returns:
      The bound for each entry; α_cross^max is at most the largest entry between the two parts.

    Raises:
      ValueError: k below 2, or alignments outside [-1, 1].

    >>> round(float(cross_similarity_bound(jnp.float32(0.8), 2)), 4)
    -0.8
    """
    alignment = checks.floats(alignment, "alignment")
    k = checks.count(num_distributions, "num_distributions", minimum=2)
    if not checks.holds(lambda cosine: (abs(cosine) <= 1.0 + 1e-6).all(), alignment):
        raise ValueError("alignment holds values outside [-1, 1]; it is a cosine: clip it.")
    angle = math.pi / (k - 1)
    bound = math.cos(angle) * alignment
    if k > 2:  # sin π is not quite 0, and the root has no slope at 1
        bound += math.sin(angle) * jnp.sqrt(jnp.maximum(1.0 - jnp.square(alignment), 0.0))
    return jnp.where(alignment >= math.cos(angle), bound, 1.0)


def largest_safe_noise(max_cross: Float[ArrayLike, ...]) -> Float[Array, ...]:
    r"""The relative noise below which a split with this similarity across it is correct (CFL, Eqs. 37–39).

    .. math:: \gamma_{max} < \sqrt{(1 - \alpha_{cross}^{max}) / 2}

    Args:
      max_cross: the largest similarity between the two parts, in [-1, 1].

    Returns:
      In [0, 1]: keep the split if γ_max is smaller. NaN where there is no split (`max_cross` infinite).

    Raises:
      ValueError: similarities outside [-1, 1].

    >>> float(largest_safe_noise(-1.0)), float(largest_safe_noise(1.0))
    (1.0, 0.0)
    """
    max_cross = checks.floats(max_cross, "max_cross")
    if not checks.holds(lambda cosine: ((abs(cosine) <= 1.0 + 1e-6) | (cosine == math.inf)).all(), max_cross):
        raise ValueError("max_cross holds values outside [-1, 1]; it is a cosine: clip it.")
    noise = jnp.sqrt(0.5 * (1.0 - jnp.clip(max_cross, -1.0, 1.0)))
    return jnp.where(max_cross == jnp.inf, jnp.nan, noise)
