"""Local training: every client alone, from a common start."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from fedjax_cluster import cohorts, parallel, tree
from fedjax_cluster.algorithms import round as averaging
from fedjax_cluster.local import client_key
from fedjax_cluster.parallel.loop import Client
from fedjax_cluster.types import (
    ClientData,
    ClusteredAlgorithm,
    Cohort,
    Costs,
    LocalUpdate,
    Model,
    Population,
    PyTree,
    RoundInfo,
    Selection,
    State,
    Variables,
)


class LonelyClients(NamedTuple):
    """What local training keeps of its clients."""

    membership: Array  # f32[M, 1]: all start from the one model
    present: Array  # bool[M]
    models: Variables  # leaves [M, ...]
    optimizer: PyTree  # leaves [M, ...], of the step that a server would take


def local_only(
    model: Model,
    *,
    local: LocalUpdate,
    server: optax.GradientTransformation | None = None,
    participation: float = 1.0,
) -> ClusteredAlgorithm:
    """Every client trains a model of its own; nothing is sent.

    θ_i ← θ_i + Δθ_i.

    Args:
      model: what is trained.
      local: what a client does in a round.
      server: any optax transformation of minus Δθ_i, kept per client, so that the figures compare with those of a
        federation under the same protocol; None adds Δθ_i.
      participation: share of the clients that train in a round, in (0, 1].

    Returns:
      A ClusteredAlgorithm with one cluster, whose model is the common start; memory grows with M·d.

    Raises:
      ValueError: participation outside (0, 1].

    >>> from fedjax_cluster import local, nn
    >>> local_only(nn.linear(), local=local.sgd(0.1, batch_size=8, steps=1)).name
    'local_only'
    """
    cohorts.cohort_size(participation, 1)
    optimizer = optax.sgd(1.0) if server is None else server

    def init(rng_key: Array, population: Population) -> tuple[State, RoundInfo]:
        start = averaging.init_clusters(rng_key, model, population.info, 1)
        present = averaging.present_clients(population)
        count = len(present)
        own = averaging.cluster_variables(start, jnp.asarray(0))
        clients = LonelyClients(
            present[:, None].astype(jnp.float32),
            present,
            tree.broadcast(own, count),
            tree.broadcast(optimizer.init(own.params), count),
        )
        return State(start, clients, (), jnp.zeros((), jnp.int32)), averaging.initial_info(1)

    def select(rng_key: Array, state: State) -> Selection:
        return cohorts.uniform(rng_key, state.clients.present, participation)

    def step(rng_key: Array, state: State, cohort: Cohort) -> tuple[State, RoundInfo]:
        def client_round(client: Client, own: Variables, optimizer_state: PyTree):
            result = local.run(client_key(rng_key, client.index), model, own, client.data)
            updates, optimizer_state = optimizer.update(
                jax.tree.map(jnp.negative, result.delta), optimizer_state, own.params
            )
            trained = Variables(optax.apply_updates(own.params, updates), result.stats)
            return trained, optimizer_state, averaging.report(result)

        rows = (state.clients.models, state.clients.optimizer)
        mapped = parallel.for_each_client(
            client_round, cohort, *parallel.gather_rows(cohort, rows), collect=lambda output: output
        )
        *trained, reports = mapped.collected
        models, optimizer_state = parallel.scatter_rows(cohort, rows, tuple(trained), mapped.accepted)
        clients = state.clients._replace(models=models, optimizer=optimizer_state)
        info = averaging.round_info(
            jnp.zeros_like(cohort.index),
            reports,
            cohort.mask,
            mapped.accepted,
            1,
            jnp.zeros((), jnp.int32),
            Costs(gradient_evaluations=jnp.sum(reports.num_steps.astype(jnp.float32))),
        )
        return State(state.clusters, clients, state.server, state.round + 1), info

    def personalize(rng_key: Array, state: State, client: ClientData, index: Array) -> tuple[Variables, Array]:
        return jax.tree.map(lambda leaf: leaf[index][None], state.clients.models), jnp.ones(1)

    def admit(rng_key: Array, state: State, client: ClientData, index: Array) -> State:
        # Who was there before goes on with its own model; all others have the common start.
        models, optimizer_state = jax.tree.map(
            lambda leaf: leaf[index], (state.clients.models, state.clients.optimizer)
        )
        row = LonelyClients(jnp.ones(1), jnp.asarray(True), models, optimizer_state)
        return state._replace(clients=tree.scatter(state.clients, index, row))

    config = averaging.describe(local, participation=participation)
    return ClusteredAlgorithm("local_only", config, model, init, select, step, personalize, admit)
