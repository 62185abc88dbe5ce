"""FedProx: local training that is held near the round's start model (Li et al. 2020, Algorithm 2)."""

from __future__ import annotations

import logging

from fedjax_cluster.algorithms.fedavg import fedavg
from fedjax_cluster.options import NOT_NEGATIVE, changed, option
from fedjax_cluster.privacy.gaussian import ONE
from fedjax_cluster.types import LocalUpdate

LOG = logging.getLogger(__name__)


class fedprox(fedavg):
    """Federated averaging with a proximal term in every local step.

    Client i descends f_i(θ) + μ/2·‖θ − θᵗ‖², where θᵗ is the model that the round began with.

    Raises:
      ValueError: a negative μ, or a local update that has no proximal term.

    >>> from fedjax_cluster import local, nn
    >>> fedprox(nn.linear(), local=local.sgd(0.1, batch_size=8, epochs=1)).update.proximal
    0.01
    """

    sends = ONE

    local: LocalUpdate = option(
        "what a client does, in several steps: in the first, and so with one step a round, the term is zero"
    )
    proximal: float = option("μ; it replaces that of `local`", default=0.01, bound=NOT_NEGATIVE)

    def check(self) -> None:
        steps, epochs = (getattr(self.update, name, None) for name in ("steps", "epochs"))
        if steps == 1 or (epochs == 1 and getattr(self.update, "batch_size", 0) is None):
            LOG.warning(
                "fedprox is FedAvg with one local step a round: its term is zero there; give more steps or epochs"
            )

    @property
    def update(self) -> LocalUpdate:
        return changed(self.local, "given a proximal term", proximal=self.proximal)
