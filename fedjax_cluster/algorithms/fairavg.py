"""FairAvg: federated averaging in which every client has the same weight (Michieli & Ozay 2021)."""

from __future__ import annotations

from fedjax_cluster.algorithms.fedavg import fedavg
from fedjax_cluster.options import option
from fedjax_cluster.privacy.gaussian import ONE
from fedjax_cluster.server import Weighting


class fairavg(fedavg):
    """Federated averaging with uniform weights.

    θ ← θ + (1/C) Σ_i Δθ_i over the round's C clients, whatever their numbers of examples.

    >>> from fedjax_cluster import local, nn
    >>> fairavg(nn.linear(), local=local.sgd(0.1, batch_size=8, epochs=1)).weighting
    'uniform'
    """

    sends = ONE

    weighting: Weighting = option("fixed", default="uniform", init=False)
