"""FedAvg: one global model (McMahan et al. 2017, Algorithm 1)."""

from __future__ import annotations

import jax.numpy as jnp
import optax
from jax import Array

from fedjax_cluster import cohorts, tree
from fedjax_cluster.algorithms import round as averaging
from fedjax_cluster.parallel import for_each_client
from fedjax_cluster.server import Weighting, init_optimizer, update_clusters
from fedjax_cluster.types import (
    ClusteredAlgorithm,
    Cohort,
    Costs,
    LocalUpdate,
    Model,
    Population,
    RoundInfo,
    Selection,
    State,
)


def fedavg(
    model: Model,
    *,
    local: LocalUpdate,
    server: optax.GradientTransformation | None = None,
    weighting: Weighting = "examples",
    participation: float = 1.0,
) -> ClusteredAlgorithm:
    """Federated averaging of one model over all clients.

    θ ← θ + Σ_i n_i Δθ_i / Σ_i n_i over the round's clients.

    Args:
      model: what is trained.
      local: what a client does, such as `sgd(0.1, batch_size=64, epochs=1)`.
      server: any optax transformation of minus the mean change; None is plain averaging, `sgd(1.0)`.
      weighting: "examples" weighs clients by n_i, "uniform" equally.
      participation: share of the clients in a round, in (0, 1].

    Returns:
      A ClusteredAlgorithm with one cluster.

    >>> from fedjax_cluster import local, nn
    >>> fedavg(nn.linear(), local=local.sgd(0.1, batch_size=8, steps=1)).name
    'fedavg'
    """
    cohorts.cohort_size(participation, 1)
    optimizer = optax.sgd(1.0) if server is None else server

    def init(rng_key: Array, population: Population) -> tuple[State, RoundInfo]:
        clusters = averaging.init_clusters(rng_key, model, population.info, 1)
        present = averaging.present_clients(population)
        clients = averaging.HardClients(present[:, None].astype(jnp.float32), present)
        state = State(clusters, clients, init_optimizer(optimizer, clusters), jnp.zeros((), jnp.int32))
        return state, averaging.initial_info(1)

    def select(rng_key: Array, state: State) -> Selection:
        return cohorts.uniform(rng_key, state.clients.present, participation)

    def step(rng_key: Array, state: State, cohort: Cohort) -> tuple[State, RoundInfo]:
        slot = jnp.zeros((), jnp.int32)
        mapped = for_each_client(
            lambda client: averaging.train_client(rng_key, local, model, state.clusters, slot, client),
            cohort,
            reduce=lambda result: averaging.contribute(slot, result, weighting),
            collect=averaging.report,
        )
        clusters, optimizer_state = update_clusters(optimizer, state.server, state.clusters, mapped.reduced)
        participants = jnp.sum(cohort.mask.astype(jnp.float32))
        info = averaging.round_info(
            jnp.zeros_like(cohort.index),
            mapped.collected,
            cohort.mask,
            mapped.accepted,
            1,
            jnp.zeros((), jnp.int32),
            Costs(participants, participants, jnp.sum(mapped.collected.num_steps.astype(jnp.float32))),
        )
        return State(clusters, state.clients, optimizer_state, state.round + 1), info

    def admit(rng_key: Array, state: State, client, index: Array) -> State:
        clients = tree.scatter(state.clients, index, averaging.HardClients(jnp.ones(1), jnp.asarray(True)))
        return state._replace(clients=clients)

    config = averaging.describe(local, weighting=weighting, participation=participation)
    return ClusteredAlgorithm("fedavg", config, model, init, select, step, averaging.personalize_by_label, admit)
