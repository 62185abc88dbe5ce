"""IFCA: every client trains the cluster model with the least training loss (Ghosh et al. 2020, Algorithm 1)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import jax.numpy as jnp
import optax
from jax import Array

from fedjax_cluster import cohorts, parallel, tree
from fedjax_cluster.algorithms import round as averaging
from fedjax_cluster.local import client_key, dataset_loss
from fedjax_cluster.parallel.loop import Client
from fedjax_cluster.server import Weighting, init_optimizer, share_layers, shared_part, update_clusters
from fedjax_cluster.types import (
    ClientData,
    ClusteredAlgorithm,
    Cohort,
    Costs,
    LocalUpdate,
    Model,
    Population,
    RoundInfo,
    Selection,
    State,
    Variables,
)


def ifca(
    model: Model,
    *,
    clusters: int,
    local: LocalUpdate,
    server: optax.GradientTransformation | None = None,
    score_on: Literal["all", "batch"] = "all",
    weighting: Weighting = "uniform",
    shared_layers: Sequence[str] = (),
    participation: float = 1.0,
) -> ClusteredAlgorithm:
    """Iterative federated clustering.

    ĵ_i = argmin_k F_i(θ_k); then θ_k ← θ_k + mean of Δθ_i over the clients with ĵ_i = k.

    Args:
      model: what is trained.
      clusters: K.
      local: one step gives the paper's gradient averaging (option I), several its model averaging (option II).
        NOTE: option I of the paper divides a cluster's sum by all participants, here it is divided by the cluster's
        own, as in option II; rates differ by their ratio.
      server: any optax transformation of minus the mean change; None is plain averaging.
      score_on: F_i on "all" training rows of the client (the paper), or on the "batch" of its first local step.
      weighting: "uniform" as in the paper, or "examples".
      shared_layers: parameter paths averaged over all clients, such as `["!output"]` (the paper's Sec. 5).
      participation: share of the clients in a round, in (0, 1].

    Returns:
      A ClusteredAlgorithm; an empty cluster keeps its model.

    Raises:
      ValueError: clusters below one, an unknown score, participation outside (0, 1].
    """
    if clusters < 1:
        raise ValueError(f"clusters is {clusters}; at least one cluster is needed")
    if score_on not in ("all", "batch"):
        raise ValueError(f"score_on is {score_on!r}; it must be 'all' or 'batch'")
    cohorts.cohort_size(participation, 1)
    optimizer = optax.sgd(1.0) if server is None else server

    def init(rng_key: Array, population: Population) -> tuple[State, RoundInfo]:
        averaging.check_clusters(clusters, population)
        models = averaging.init_clusters(rng_key, model, population.info, clusters)
        models = averaging.tie_layers(models, shared_layers)
        present = averaging.present_clients(population)
        clients = averaging.HardClients(jnp.zeros((len(present), clusters)), present)
        state = State(models, clients, init_optimizer(optimizer, models), jnp.zeros((), jnp.int32))
        return state, averaging.initial_info(clusters)

    def select(rng_key: Array, state: State) -> Selection:
        return cohorts.uniform(rng_key, state.clients.present, participation)

    def step(rng_key: Array, state: State, cohort: Cohort) -> tuple[State, RoundInfo]:
        def client_round(client: Client):
            key = client_key(rng_key, client.index)
            if score_on == "all":
                loss = lambda variables: dataset_loss(model, variables, client.data)  # noqa: E731
            else:
                loss = lambda variables: local.first_loss(key, model, variables, client.data)  # noqa: E731
            slot, _ = averaging.least_loss_cluster(state.clusters, loss)
            return slot, averaging.train_client(rng_key, local, model, state.clusters, slot, client)

        mapped = parallel.for_each_client(
            client_round,
            cohort,
            num_slots=clusters,
            reduce=lambda output: averaging.contribute(output[0], output[1], weighting),
            collect=lambda output: (output[0], averaging.report(output[1])),
        )
        slot, reports = mapped.collected
        models, optimizer_state = update_clusters(optimizer, state.server, state.clusters, mapped.reduced)
        if shared_layers:
            models = share_layers(models, shared_layers, mapped.reduced.weight)

        old = averaging.labels(parallel.gather_rows(cohort, state.clients.membership))
        weights = parallel.scatter_rows(cohort, state.clients.membership, averaging.one_hot(slot, clusters))
        participants = jnp.sum(cohort.mask.astype(jnp.float32))
        scores = jnp.asarray(1.0) if score_on == "batch" else batches(cohort.data)
        info = averaging.round_info(
            slot,
            reports,
            cohort.mask,
            mapped.accepted,
            clusters,
            jnp.sum((cohort.mask & (slot != old)).astype(jnp.int32)),
            Costs(
                # Shared layers are the same in all models, and sent once.
                models_down=(clusters - (clusters - 1) * shared_part(models.params, shared_layers)) * participants,
                models_up=participants,
                gradient_evaluations=jnp.sum(reports.num_steps.astype(jnp.float32)),
                loss_evaluations=clusters * jnp.sum(jnp.where(cohort.mask, scores, 0.0)),
            ),
        )
        clients = averaging.HardClients(weights, state.clients.present)
        return State(models, clients, optimizer_state, state.round + 1), info

    def batches(data: ClientData) -> Array:
        """f32[C]: a full pass counts as its mini-batches."""
        size = local.config["batch_size"] or data.x.shape[1]
        return ((data.num_examples + size - 1) // size).astype(jnp.float32)

    def personalize(rng_key: Array, state: State, client: ClientData, index: Array) -> tuple[Variables, Array]:
        return averaging.personalize_by_label_or_loss(model, state, client, index)

    def admit(rng_key: Array, state: State, client: ClientData, index: Array) -> State:
        slot, _ = averaging.least_loss_cluster(state.clusters, lambda v: dataset_loss(model, v, client))
        row = averaging.HardClients(averaging.one_hot(slot, clusters), jnp.asarray(True))
        return state._replace(clients=tree.scatter(state.clients, index, row))

    config: dict[str, Any] = averaging.describe(
        local,
        clusters=clusters,
        score_on=score_on,
        weighting=weighting,
        shared_layers=list(shared_layers),
        participation=participation,
    )
    return ClusteredAlgorithm("ifca", config, model, init, select, step, personalize, admit)
