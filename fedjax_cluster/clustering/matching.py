"""Renaming clusters so that they keep their labels from one clustering to the next."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Int

from fedjax_cluster.clustering import checks
from fedjax_cluster.clustering.checks import Labels, Mask
from fedjax_cluster.clustering.similarity import matmul


def match_labels(new: Labels, old: Labels, k: int, mask: Mask = None) -> Int[Array, " M"]:
    r"""Renames new clusters for the largest overlap with the old ones (CFL-GP, Algorithm 3, lines 3–4).

    .. math:: \hat\psi = \arg\max_\psi | \{ c : \psi(z_c) = k_c \} |

    over the permutations ψ of k labels (CFL-GP, Appendix B.2.2), an assignment problem. Among equal overlaps the one
    that keeps most labels wins, so equal clusterings are never renamed. This is exact for fewer than 2²⁴ / (k + 1)
    clients; among more, overlaps that differ by 10⁻⁷ of themselves may count as equal, and ties may be renamed.

    Args:
      new: in -1..k-1, the clustering to rename; -1 stays -1.
      old: in -1..k-1; a client that is -1 in either does not count.
      k: number of labels, static.
      mask: clients that count, the others get -1; None means all.

    Raises:
      ValueError: wrong shapes, k < 1, or labels outside -1..k-1.

    >>> old, new = jnp.array([0, 0, 1, 1, 2]), jnp.array([2, 2, 0, 0, 0])
    >>> match_labels(new, old, 3).tolist()
    [0, 0, 1, 1, 1]
    """
    new = checks.labels(new, "new")
    old = checks.labels(old, "old", new.shape[0])
    k = checks.count(k, "k")
    mask = checks.client_mask(mask, new.shape[0])
    for array, name in ((new, "new"), (old, "old")):
        if not checks.holds(lambda labels, mask: ((labels < k) & (labels >= -1) | ~mask).all(), array, mask):
            raise ValueError(f"{name} holds labels outside -1..{k - 1}; k is {k}: give a k above the largest label.")
    return _match_labels(new, old, mask, k)


@partial(jax.jit, static_argnames="k")
def _match_labels(new: Array, old: Array, mask: Array, k: int) -> Array:
    rows = jnp.where(mask[:, None], jax.nn.one_hot(new, k, dtype=jnp.float32), 0.0)
    overlap = matmul(rows.T, jax.nn.one_hot(old, k, dtype=jnp.float32))
    # Kept labels are worth k at most, one more client in agreement is worth k + 1.
    value = overlap * (k + 1.0) + jnp.eye(k, dtype=jnp.float32)
    row, column = optax.assignment.hungarian_algorithm(-value.astype(float))
    renamed = jnp.zeros(k, jnp.int32).at[row].set(column.astype(jnp.int32))
    return jnp.where(mask & (new >= 0), renamed[jnp.clip(new, 0, k - 1)], -1)
