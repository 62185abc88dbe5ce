"""FLAG with landmark clients: everybody else joins the cluster to whose landmarks it is nearest. Ours."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from fedjax_cluster.algorithms.flag.state import Measured, Sent
from fedjax_cluster.algorithms.one_shot import nearest_cluster
from fedjax_cluster.algorithms.one_shot_landmarks import Joined, numbers_sent
from fedjax_cluster.clustering.landmarks import Compared, Scales, proximity_scales, proximity_to


def placed(
    scales: Scales, comparison: Any, membership: Array, known: Array, linkage: str, measured: Measured
) -> Joined:
    """`Joined` [B] of what some clients sent: to which of the landmarks' clusters each is nearest.

    Args:
      scales: of the landmarks, as `scales_of` gives them.
      comparison: the options of `compare`.
      membership: f32[m, K], the landmarks' clusters, one-hot.
      known: bool[m], landmarks that count.
      linkage: which distance to a cluster.
      measured: of B clients.
    """
    distance = distances_to(scales, measured, comparison)
    slot = jax.vmap(nearest_cluster, (0, None, None, None))(distance, membership, known, linkage)
    return Joined(slot, numbers_sent(measured.vectors), measured.num_steps)


def scales_of(landmarks: Sent, comparison: Any) -> Scales:
    """What the landmarks sent, and the scales among them, by the options of `compare`."""
    sent = Compared(landmarks.vectors, landmarks.counts, landmarks.updates)
    return proximity_scales(sent, landmarks.known, comparison["angles"], jnp.float32(comparison["delta"]))


def distances_to(scales: Scales, measured: Measured, comparison: Any) -> Array:
    """f32[B, m], of what some clients sent to the landmarks."""
    delta, beta = (jnp.float32(comparison[name]) for name in ("delta", "beta"))
    return proximity_to(scales, Compared(*measured[:3]), comparison["angles"], delta, beta)
