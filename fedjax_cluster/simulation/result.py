"""What a simulation returns, and its one-page summary."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedjax_cluster import report
from fedjax_cluster.algorithms.round import labels
from fedjax_cluster.nn.precision import in_32_bits
from fedjax_cluster.simulation.evaluation import predict_client
from fedjax_cluster.types import ClientMapping, ClusteredAlgorithm, Event, Federation, State


@dataclasses.dataclass(frozen=True)
class SimulationResult:
    """A finished run.

    Attributes:
      algorithm: the method.
      federation: the data it ran on.
      state: final state.
      history: one row a round: `round` (0-based), `loss`, `num_clients`, `num_clusters`, `num_changed`,
        `num_rejected`, `event` (1 where the method reported one), `adjusted_rand_index`, `purity`, the costs,
        `clustering_seconds` where these were timed, `seconds`, and the metrics on test rows (NaN between evaluations).
      events: what the method kept of its splits and the like, in the order of their rounds.
      summary: what summary.json holds.
    """

    algorithm: ClusteredAlgorithm
    federation: Federation
    state: State
    history: dict[str, np.ndarray]
    events: tuple[Event, ...]
    summary: dict[str, Any]
    evaluation_key: Array
    mapping: ClientMapping

    @property
    def labels(self) -> np.ndarray:
        """i32[M]: the cluster of each client, −1 where it has none."""
        return np.asarray(labels(self.state.clients.membership))[: len(self.federation.train.num_examples)]

    @in_32_bits
    def predict(self, x: Any, client: int) -> np.ndarray:
        """Predictions of one client's personal model for rows x [N, ...].

        Raises:
          ValueError: no such client, no rows, or rows of another shape than the client's.
        """
        train = self.federation.train
        count = len(train.num_examples)
        if not 0 <= client < count:
            raise ValueError(f"client is {client}; the federation has clients 0 to {count - 1}")
        x = np.asarray(x)
        if x.shape[1:] != np.shape(train.x)[2:]:
            raise ValueError(f"x has rows of shape {x.shape[1:]}; the clients' have {np.shape(train.x)[2:]}")
        if not len(x):
            raise ValueError("x has no rows; give at least one")
        data = jax.tree.map(lambda leaf: jnp.asarray(leaf[client]), train)
        key = jax.random.fold_in(self.evaluation_key, client)
        return np.asarray(predict_client(key, self.state, data, jnp.asarray(client), x, algorithm=self.algorithm))

    def plot(self, metric: str | None = None):
        """Draws accuracy (or another column of the history) and ARI against rounds; returns the figure."""
        return report.curves.learning_curves({self.algorithm.name: self.history}, metric=metric)

    def to_pandas(self):
        """The history as a data frame indexed by round; needs pandas."""
        import pandas  # optional

        return pandas.DataFrame(self.history).set_index("round")
