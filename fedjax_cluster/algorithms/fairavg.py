"""FairAvg: federated averaging in which every client weighs the same (Michieli & Ozay 2021)."""

from __future__ import annotations

import optax

from fedjax_cluster.algorithms.fedavg import fedavg
from fedjax_cluster.types import ClusteredAlgorithm, LocalUpdate, Model


def fairavg(
    model: Model,
    *,
    local: LocalUpdate,
    server: optax.GradientTransformation | None = None,
    participation: float = 1.0,
) -> ClusteredAlgorithm:
    """Federated averaging with uniform weights.

    θ ← θ + (1/C) Σ_i Δθ_i over the round's C clients, whatever their numbers of examples.

    Args:
      model: what is trained.
      local, server, participation: as in `fedavg`.

    Returns:
      A ClusteredAlgorithm with one cluster.

    >>> from fedjax_cluster import local, nn
    >>> fairavg(nn.linear(), local=local.sgd(0.1, batch_size=8, epochs=1)).config["weighting"]
    'uniform'
    """
    plain = fedavg(model, local=local, server=server, weighting="uniform", participation=participation)
    return plain._replace(name="fairavg")
