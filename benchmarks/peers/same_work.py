"""What makes both sides do the same work: our start, our mini-batches, our rounds, and a comparison of the losses."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedjax_cluster import local, parallel
from fedjax_cluster.algorithms.round import cluster_variables, init_clusters
from fedjax_cluster.simulation.segment import run_keys, run_segment
from fedjax_cluster.types import ClientData, ClusteredAlgorithm, Clusters, DatasetInfo, Model, Variables

# The two sides sum in another order; after some steps of training the losses agree to so much.
LOSS_TOLERANCE = 2e-3


class Run:
    """A run of which some more rounds can be done, as `simulate` does them.

    Attributes:
      start: the state before the first round, on the host.
    """

    def __init__(self, algorithm: ClusteredAlgorithm, data: ClientData, info: DatasetInfo):
        self.algorithm, self.keys = algorithm, run_keys(0)
        self.population = parallel.place_population(data, info, parallel.client_mapping())
        state, self.info = algorithm.init(self.keys.initialization, self.population)
        self.start = jax.device_get(state)
        self.state = parallel.place_state(state, self.population.mapping)

    def advance(self, rounds: int = 1) -> Any:
        """The state after so many rounds more, or after an event."""
        stop = jnp.asarray(int(self.state.round) + rounds, jnp.int32)
        self.state, self.last = run_segment(
            self.keys, self.state, self.population, None, self.info, stop, algorithm=self.algorithm
        )
        return self.state

    def loss(self) -> float:
        """Of one round."""
        self.advance()
        return float(self.last["loss"][0])


def first_model(model: Model, info: DatasetInfo) -> Variables:
    """That from which `fedjax_cluster.bench.workloads.local_training` starts."""
    return cluster_variables(init_clusters(jax.random.key(0), model, info, 1), jnp.asarray(0))


def models_of(clusters: Clusters) -> list[Variables]:
    return [cluster_variables(clusters, jnp.asarray(k)) for k in range(len(clusters.active))]


def batches_of(
    round_key: Array, data: ClientData, steps: int, batch: int, clients: np.ndarray | None = None
) -> np.ndarray:
    """i64[M, S, b]: the rows of every mini-batch that `local.sgd` draws in a round.

    Args:
      round_key: of local training in that round.
      data: leaves [M, ...].
      steps, batch: S and b.
      clients: the clients to whom the rows of `data` belong; None where these are all.
    """
    rows = data._replace(x=np.tile(np.arange(data.x.shape[1], dtype=np.int32), (len(data.x), 1)))

    def of_client(index, one):
        key = jax.random.split(local.client_key(round_key, index))[0]
        return jnp.stack([local.mini_batch(key, one, batch, step)[0] for step in range(steps)])

    index = jnp.asarray(np.arange(len(data.x)) if clients is None else clients)
    return np.asarray(jax.vmap(of_client)(index, jax.tree.map(jnp.asarray, rows)), np.int64)


def check_losses(what: str, ours: float, theirs: float, tolerance: float = LOSS_TOLERANCE) -> None:
    if not math.isclose(ours, theirs, rel_tol=tolerance):
        raise RuntimeError(f"{what}: our mean loss is {ours} and the peer's {theirs}; they do not do the same work")
