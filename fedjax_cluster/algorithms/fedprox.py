"""FedProx: local training that is held near the round's start model (Li et al. 2020, Algorithm 2)."""

from __future__ import annotations

import logging

import optax

from fedjax_cluster.algorithms.fedavg import fedavg
from fedjax_cluster.server import Weighting
from fedjax_cluster.types import ClusteredAlgorithm, LocalUpdate, Model

LOG = logging.getLogger(__name__)


def fedprox(
    model: Model,
    *,
    local: LocalUpdate,
    proximal: float = 0.01,
    server: optax.GradientTransformation | None = None,
    weighting: Weighting = "examples",
    participation: float = 1.0,
) -> ClusteredAlgorithm:
    """Federated averaging with a proximal term in every local step.

    Client i descends f_i(θ) + μ/2·‖θ − θᵗ‖², where θᵗ is the model that the round began with.

    Args:
      model: what is trained.
      local: what a client does, in several steps: in the first, and so with one step a round, the term is zero.
      proximal: μ; it replaces that of `local`.
      server, weighting, participation: as in `fedavg`.

    Returns:
      A ClusteredAlgorithm with one cluster.

    Raises:
      ValueError: a negative μ, or a local update that has no proximal term.

    >>> from fedjax_cluster import local, nn
    >>> fedprox(nn.linear(), local=local.sgd(0.1, batch_size=8, epochs=1)).config["local"]["proximal"]
    0.01
    """
    if local.rebuild is None:
        raise ValueError("the local update cannot be given a proximal term; use local.sgd")
    held = local.rebuild(proximal=proximal)
    single = (held.config.get("steps"), held.config.get("epochs"), held.config.get("batch_size"))
    if single[0] == 1 or single[1:] == (1, None):
        LOG.warning("fedprox is FedAvg with one local step a round: its term is zero there; give more steps or epochs")
    plain = fedavg(model, local=held, server=server, weighting=weighting, participation=participation)
    return plain._replace(name="fedprox", config={**plain.config, "proximal": proximal})
