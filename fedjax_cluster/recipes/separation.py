"""When CFL's bipartition is right: the separation gap watched in a run, and its chance for normal gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax
import numpy as np

from fedjax_cluster import clustering
from fedjax_cluster.simulation.evaluation import Evaluation
from fedjax_cluster.types import Federation


def separation(federation: Federation) -> list[Callable[[Evaluation], Mapping[str, float]]]:
    """Watches every cluster's separation gap g(α), and the norms that ε₁ and ε₂ are compared with.

    Columns `separation_gap_0` … (NaN for a cluster of fewer than two clients), `mean_norm` and `max_norm` of cluster 0.
    """
    group = np.asarray(federation.group)

    def watched(evaluation: Evaluation) -> dict[str, float]:
        clients, server = jax.device_get((evaluation.state.clients, evaluation.state.server))
        found = {"mean_norm": float(server.mean_norm[0]), "max_norm": float(server.max_norm[0])}
        for slot in range(clients.membership.shape[1]):
            members = np.flatnonzero(clients.membership[: len(group), slot] > 0)
            found[f"separation_gap_{slot}"] = np.nan
            if len(members) > 1:
                similarity = clustering.cosine_similarity(clients.update[members])
                found[f"separation_gap_{slot}"] = float(clustering.separation_gap(similarity, group[members]))
        return found

    return [watched]


def probability_of_correct_split(k: int, gamma: float, *, draws: int, seed: int = 0, dimension: int = 100) -> float:
    """P[g(α) > 0] for m = 3k clients whose gradients and noise are normal (CFL, Eq. 30).

    Args:
      k: number of distributions; their gradients sum to zero, as at a stationary point.
      gamma: γ, norm of each client's noise over that of its distribution's gradient.
      draws, seed: matrices drawn, and what decides them.
      dimension: d.
    """
    rng = np.random.default_rng(seed)
    group = np.repeat(np.arange(k), 3)
    right = 0
    for _ in range(draws):
        signal = rng.normal(size=(k, dimension))
        signal -= signal.mean(0)
        clean, noise = signal[group], rng.normal(size=(3 * k, dimension))
        scale = gamma * np.linalg.norm(clean, axis=1) / np.linalg.norm(noise, axis=1)
        similarity = clustering.cosine_similarity((clean + scale[:, None] * noise).astype(np.float32))
        right += float(clustering.separation_gap(similarity, group)) > 0
    return right / draws


def largest_guaranteed_noise(k: int) -> float:
    """The γ up to which Theorem 1 guarantees a correct split: where the bounds of Eqs. 19 and 21 meet."""
    gammas = np.linspace(0, 1, 2001)
    alignment = np.clip(1 - 2 * gammas**2, -1, 1)
    safe = alignment > np.asarray(clustering.cross_similarity_bound(alignment, k)) + 1e-6
    return float(gammas[safe].max()) if safe.any() else 0.0
