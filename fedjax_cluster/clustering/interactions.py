"""Interactions of clients from their losses: rewards, the interaction matrix, and its affinity."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Bool, Float, Int

from fedjax_cluster.clustering import checks
from fedjax_cluster.clustering.checks import Mask, Scalar
from fedjax_cluster.clustering.similarity import matmul, unit
from fedjax_cluster.options import LARGEST_WHOLE


def gaussian_rewards(
    losses: Float[ArrayLike, "C S"], mask: Bool[ArrayLike, " C"] | Bool[ArrayLike, "C S"] | None = None
) -> Float[Array, " C"]:
    r"""How close each client's losses are to the cohort's, on average over the local steps (FedGWC, Eq. 1).

    .. math:: \omega_k = \frac{1}{S} \sum_s \exp\!\Big( -\frac{(l_k^s - m^s)^2}{2 (\sigma^s)^2} \Big)

    with the cohort's mean m^s and (n-1)-variance (σ^s)² at each step. Equal losses, and a single client, give reward 1.

    Args:
      losses: the loss of each client at each local step.
      mask: clients that take part, or the steps that each client took; None means all.

    Returns:
      Rewards in (0, 1]; 0 for clients without a step.

    Raises:
      ValueError: wrong shapes, or non-finite losses that count.

    >>> [round(float(reward), 4) for reward in gaussian_rewards(jnp.array([[1.0], [2.0], [3.0]]))]
    [0.6065, 1.0, 0.6065]
    """
    losses = checks.floats(losses, "losses", 2)
    mask = np.ones(losses.shape, bool) if mask is None else checks.as_array(mask, "mask")
    if mask.shape == losses.shape[:1]:
        mask = jnp.broadcast_to(mask[:, None], losses.shape)
    if mask.shape != losses.shape or mask.dtype != bool:
        raise ValueError(f"mask has shape {mask.shape}, {mask.dtype}, losses {losses.shape}: give bools [C] or [C, S].")
    if not checks.holds(lambda losses, mask: ((abs(losses) < float("inf")) | ~mask).all(), losses, mask):
        raise ValueError("losses that count are NaN or infinite: leave those clients out with mask.")
    return _gaussian_rewards(losses, jnp.asarray(mask))


@jax.jit
def _gaussian_rewards(losses: Array, mask: Array) -> Array:
    # Measured from the least loss, equal losses are exactly 0, and so is their variance; in units of the largest, the
    # square of no loss is infinite.
    least = jnp.where(mask, losses, jnp.inf).min(axis=0)
    losses = jnp.where(mask, losses - least[None, :], 0.0)
    losses = losses / unit(losses, axis=0)[None, :]
    count = mask.sum(axis=0).astype(losses.dtype)
    mean = losses.sum(axis=0) / jnp.maximum(count, 1.0)
    squared = jnp.where(mask, jnp.square(losses - mean[None, :]), 0.0)
    variance = squared.sum(axis=0) / jnp.maximum(count - 1.0, 1.0)
    reward = jnp.where(mask, jnp.exp(-0.5 * squared / jnp.where(variance > 0.0, variance, 1.0)[None, :]), 0.0)
    return reward.sum(axis=1) / jnp.maximum(mask.sum(axis=1), 1).astype(losses.dtype)


def update_interactions(
    interactions: Float[ArrayLike, "M M"],
    rewards: Float[ArrayLike, " C"],
    index: Int[ArrayLike, " C"],
    mask: Bool[ArrayLike, " C"] | None,
    rate: Scalar | Float[ArrayLike, "C C"],
) -> Float[Array, "M M"]:
    r"""Moves the interactions of a cohort's pairs towards its rewards (FedGWC, Section 4.2, Eq. 3).

    .. math:: P_{kj} \leftarrow (1 - \alpha) P_{kj} + \alpha\, \omega_k \quad\text{for } k, j
              \text{ both in the cohort}

    Args:
      interactions: P.
      rewards: ω of the cohort's clients.
      index: which clients these are, each once; M (or any index outside 0..M-1) is padding.
      mask: clients of the cohort that count; None means all.
      rate: α in [0, 1], one for all or one per pair.

    Raises:
      ValueError: shapes that do not fit, a rate outside [0, 1], a client twice, or values not finite.

    >>> rewards, index = jnp.array([1.0, 0.5]), jnp.array([2, 0])
    >>> update_interactions(jnp.zeros((3, 3)), rewards, index, None, 0.5).tolist()
    [[0.25, 0.0, 0.25], [0.0, 0.0, 0.0], [0.5, 0.0, 0.5]]
    """
    interactions = checks.square(interactions, "interactions")
    rewards = checks.floats(rewards, "rewards", 1, like=interactions)
    index = checks.labels(index, "index", rewards.shape[0], least=-LARGEST_WHOLE)
    mask = checks.client_mask(mask, rewards.shape[0])
    if not checks.holds(functools.partial(_are_distinct, len(interactions)), index, mask):
        raise ValueError("index names a client twice: give each client of the cohort once.")
    checks.finite(interactions, "interactions")
    rate = checks.floats(rate, "rate", 0, 2, like=interactions)
    if rate.ndim == 2 and rate.shape != 2 * rewards.shape:
        raise ValueError(f"rate has shape {rate.shape}: give a scalar or a square matrix {2 * rewards.shape}.")
    if not checks.holds(lambda rate: ((rate >= 0.0) & (rate <= 1.0)).all(), rate):
        raise ValueError("rate holds values outside [0, 1]; the new P would leave the range of rewards: clip it.")
    checks.finite(rewards, "rewards", mask)
    return _update_interactions(interactions, rewards, index, mask, rate)


def _are_distinct(num_clients: int, index: np.ndarray, mask: np.ndarray) -> bool:
    known = index[mask & (index >= 0) & (index < num_clients)]
    return len(np.unique(known)) == len(known)


@jax.jit
def _update_interactions(interactions: Array, rewards: Array, index: Array, mask: Array, rate: Array) -> Array:
    num_clients = interactions.shape[0]
    known = mask & (index >= 0) & (index < num_clients)
    # A negative index would wrap around to the last clients; beyond the end it is dropped.
    index = jnp.where(known, index, num_clients)
    pairs = interactions.at[index[:, None], index[None, :]]
    old = pairs.get(mode="fill", fill_value=0.0)
    return pairs.set(old + rate * (jnp.where(known, rewards, 0.0)[:, None] - old), mode="drop")


def interaction_affinity(interactions: Float[ArrayLike, "M M"], beta: Scalar, mask: Mask = None) -> Float[Array, "M M"]:
    r"""Affinity of clients that are perceived alike by all others (FedGWC, Section 4.2, Eq. 4).

    .. math:: W_{kj} = \exp(-\beta \| v_k^j - v_j^k \|^2)

    where v_k^j is P's row k without entries k and j; the norm is ‖P_k − P_j‖² − (P_kk − P_jk)² − (P_kj − P_jj)².

    Args:
      interactions: P.
      beta: β > 0, the spread of the kernel.
      mask: clients that count, such as those of one cluster; the entries of the others take no part. None means all.

    Returns:
      In [0, 1], symmetric, with diagonal 1; rows and columns of masked-out clients are 0.

    Raises:
      ValueError: wrong shapes, β not positive, or non-finite interactions that count.

    >>> interactions = jnp.array([[9.0, 9.0, 1.0], [9.0, 9.0, 2.0], [0.0, 0.0, 9.0]])
    >>> round(float(interaction_affinity(interactions, 1.0)[0, 1]), 4)  # exp(-(1 - 2)²)
    0.3679
    """
    interactions, mask = checks.client_matrix(interactions, "interactions", mask)
    beta = checks.floats(beta, "beta", 0, like=interactions)
    if not checks.holds(lambda beta: (beta > 0.0) & (beta < float("inf")), beta):
        raise ValueError(f"beta is {float(beta)}; the kernel's spread must be positive and finite: choose another.")
    return _interaction_affinity(interactions, beta, mask)


@jax.jit
def _interaction_affinity(interactions: Array, beta: Array, mask: Array) -> Array:
    pairs = mask[:, None] & mask[None, :]
    entries = jnp.where(pairs, interactions, 0.0)
    # The distances do not change when a column moves, and the closer to 0 the less digits cancel in them.
    count = jnp.maximum(mask.sum(), 1).astype(entries.dtype)
    entries = jnp.where(pairs, entries - (entries.sum(axis=0) / count)[None, :], 0.0)
    squared_norm = jnp.square(entries).sum(axis=1)
    gram = matmul(entries, entries.T)
    at_k = jnp.square(jnp.diagonal(entries)[:, None] - entries.T)  # (P_kk − P_jk)², in row k and column j
    squared = squared_norm[:, None] + squared_norm[None, :] - 2.0 * gram - at_k - at_k.T
    affinity = jnp.exp(-beta * jnp.maximum(squared, 0.0))
    row, column = jnp.indices(gram.shape, sparse=True)
    # A matrix product rounds ij and ji differently.
    affinity = jnp.where(row > column, affinity, affinity.T)
    return jnp.where(pairs, jnp.where(row == column, 1.0, affinity), 0.0)
