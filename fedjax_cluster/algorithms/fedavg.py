"""FedAvg: one global model (McMahan et al. 2017, Algorithm 1)."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from fedjax_cluster import tree
from fedjax_cluster.algorithms.method import AveragingMethod
from fedjax_cluster.algorithms.round import HardClients, cluster_round, first_state, start_models, train_in_cluster
from fedjax_cluster.options import option
from fedjax_cluster.privacy.gaussian import ONE
from fedjax_cluster.server import Weighting
from fedjax_cluster.types import ClientData, Cohort, Population, RoundInfo, State


class fedavg(AveragingMethod):
    """Federated averaging of one model over all clients.

    θ ← θ + Σ_i n_i Δθ_i / Σ_i n_i over the round's clients.

    >>> from fedjax_cluster import local, nn
    >>> fedavg(nn.linear(), local=local.sgd(0.1, batch_size=8, steps=1)).name
    'fedavg'
    """

    sends = ONE

    weighting: Weighting = option('"examples" weights clients by n_i, "uniform" equally', default="examples")

    def init(self, rng_key: Array, population: Population) -> tuple[State, RoundInfo]:
        clusters, present = start_models(self.model, rng_key, population, 1)
        clients = HardClients(present[:, None].astype(jnp.float32), present)
        return first_state(clusters, clients, self.optimizer)

    def step(self, rng_key: Array, state: State, cohort: Cohort) -> tuple[State, RoundInfo]:
        done = cluster_round(
            train_in_cluster(rng_key, self.update, self.model, state.clusters, state.round),
            state.clusters,
            cohort,
            jnp.zeros_like(cohort.index),
            optimizer=self.optimizer,
            weighting=self.weighting,
            aggregation=self.aggregation,
            private=self.private(rng_key, state.clusters),
        )
        return state._replace(clusters=done.clusters, round=state.round + 1), done.info(cohort.mask)

    def admit(self, rng_key: Array, state: State, data: ClientData, index: Array) -> State:
        row = HardClients(jnp.ones(1), jnp.asarray(True))
        return state._replace(clients=tree.scatter(state.clients, index, row))
