"""FedAvgM: federated averaging with momentum on the server (Hsu et al. 2019)."""

from __future__ import annotations

import optax

from fedjax_cluster.algorithms.fedavg import fedavg
from fedjax_cluster.server import Weighting
from fedjax_cluster.types import ClusteredAlgorithm, LocalUpdate, Model


def fedavgm(
    model: Model,
    *,
    local: LocalUpdate,
    server: optax.GradientTransformation | None = None,
    server_momentum: float = 0.9,
    weighting: Weighting = "examples",
    participation: float = 1.0,
) -> ClusteredAlgorithm:
    """Federated averaging whose server accumulates the mean changes.

    v ← β·v + mean Δθ, θ ← θ + v: the heavy ball.

    Args:
      model: what is trained.
      local: what a client does.
      server: what is done with −v; None adds v to θ.
      server_momentum: β in [0, 1).
      weighting, participation: as in `fedavg`.

    Returns:
      A ClusteredAlgorithm with one cluster.

    Raises:
      ValueError: β outside [0, 1).

    >>> from fedjax_cluster import local, nn
    >>> fedavgm(nn.linear(), local=local.sgd(0.1, batch_size=8, epochs=1)).config["server_momentum"]
    0.9
    """
    if not 0 <= server_momentum < 1:
        raise ValueError(f"server_momentum is {server_momentum}; it must be at least 0 and below 1")
    heavy = optax.chain(optax.trace(server_momentum), optax.sgd(1.0) if server is None else server)
    plain = fedavg(model, local=local, server=heavy, weighting=weighting, participation=participation)
    return plain._replace(name="fedavgm", config={**plain.config, "server_momentum": server_momentum})
