"""FedAvgM: federated averaging with momentum on the server (Hsu et al. 2019)."""

from __future__ import annotations

import optax

from fedjax_cluster.algorithms.fedavg import fedavg
from fedjax_cluster.options import BELOW_ONE, option
from fedjax_cluster.privacy.gaussian import ONE


class fedavgm(fedavg):
    """Federated averaging whose server accumulates the mean changes.

    v ← β·v + mean Δθ, θ ← θ + v: the heavy ball.

    >>> from fedjax_cluster import local, nn
    >>> fedavgm(nn.linear(), local=local.sgd(0.1, batch_size=8, epochs=1)).server_momentum
    0.9
    """

    sends = ONE

    server: optax.GradientTransformation | None = option("what is done with −v; None adds v to θ", default=None)
    server_momentum: float = option("β, momentum of the mean change", default=0.9, bound=BELOW_ONE)

    @property
    def server_step(self) -> optax.GradientTransformation:
        return optax.chain(optax.trace(self.server_momentum), super().server_step)
