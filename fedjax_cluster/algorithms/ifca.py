"""IFCA: every client trains the cluster model with the least training loss (Ghosh et al. 2020, Algorithm 1)."""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array

from fedjax_cluster import tree
from fedjax_cluster.algorithms.method import AveragingMethod, FirstProgram
from fedjax_cluster.algorithms.round import (
    HardClients,
    Trained,
    cluster_round,
    cluster_variables,
    first_state,
    least_loss_cluster,
    nearest_by_loss,
    one_hot,
    personalize_by_label_or_loss,
    reassign,
    start_models,
    tie_layers,
    train_client,
)
from fedjax_cluster.algorithms.starts import FROM_CLIENTS, START, START_LEAKS, Start, first_losses, models_of_clients
from fedjax_cluster.inference import dataset_loss
from fedjax_cluster.local import client_key, num_batches
from fedjax_cluster.marked_clients import shown_rows
from fedjax_cluster.options import COUNT, at_least, option
from fedjax_cluster.parallel import Client
from fedjax_cluster.privacy.gaussian import CHOSEN, gaussian
from fedjax_cluster.server import Weighting, shared_part
from fedjax_cluster.types import ClientData, Cohort, LocalUpdate, Population, RoundInfo, State, Variables


class ifca(AveragingMethod):
    """Iterative federated clustering.

    ĵ_i = argmin_k F_i(θ_k); then θ_k ← θ_k + mean of Δθ_i over the clients with ĵ_i = k.

    NOTE: option I of the paper divides a cluster's sum by all participants, here it is divided by the cluster's
    participants, as in option II; rates differ by their ratio.

    NOTE: the paper begins with random models; by default each is trained on a client here, see `start`.

    Returns:
      A method in which an empty cluster keeps its model.
    """

    sends = CHOSEN
    clusters_by = "shown"

    local: LocalUpdate = option(
        "one step gives the paper's gradient averaging (option I), several its model averaging (option II)"
    )
    clusters: int = option("K, number of clusters", bound=at_least(1))
    start: Start = option(START, default="clients")
    start_rounds: int = option(
        'rounds of each client whose model is a start; used with "clients"', default=20, bound=COUNT, used=FROM_CLIENTS
    )
    score_on: Literal["all", "batch"] = option(
        'F_i on "all" training rows of the client (the paper), or on the "batch" of its first local step', default="all"
    )
    estimate: Literal["evaluation", "participation"] = option(
        'the cluster that a client is evaluated in: of least loss on its training rows at the "evaluation" (the public '
        'code), for K forward passes over them, or that of its last "participation"',
        default="evaluation",
    )
    weighting: Weighting = option('"uniform" as in the paper, or "examples"', default="uniform")
    shared_layers: tuple[str, ...] = option(
        'parameter paths averaged over all clients, such as `["!output"]` (the paper\'s Sec. 5)', default=()
    )

    def unprotected(self, privacy: gaussian) -> str | None:
        return START_LEAKS if self.start == "clients" else None

    def init(self, rng_key: Array, population: Population) -> tuple[State, RoundInfo]:
        models, present = start_models(self.model, rng_key, population, self.clusters)
        costs = None
        if self.start == "clients":
            key = jax.random.fold_in(rng_key, self.clusters + 1)
            models, costs = models_of_clients(
                key, self.model, self.local, self.optimizer, models, population, present, self.start_rounds
            )
        clients = HardClients(jnp.zeros((len(present), self.clusters)), present)
        models = tie_layers(models, self.shared_layers, self.name)
        return first_state(models, clients, self.optimizer, costs=costs)

    def first_programs(self, rng_key: Array, state: State, population: Population) -> tuple[FirstProgram, ...]:
        return first_losses(self.model, state.clusters, population) if self.start == "clients" else ()

    def step(self, rng_key: Array, state: State, cohort: Cohort) -> tuple[State, RoundInfo]:
        def train(client: Client) -> Trained:
            slot, _ = least_loss_cluster(state.clusters, lambda variables: self.score(rng_key, variables, client))
            result = train_client(rng_key, self.local, self.model, state.clusters, slot, client, state.round)
            return Trained(slot, result)

        done = cluster_round(
            train,
            state.clusters,
            cohort,
            optimizer=self.optimizer,
            weighting=self.weighting,
            aggregation=self.aggregation,
            private=self.private(rng_key, state.clusters),
            shared_layers=self.shared_layers,
        )
        membership, changed = reassign(cohort, state.clients.membership, done.slot, done.accepted)
        clients = state.clients._replace(membership=membership)
        costs = done.costs(cohort.mask)
        passes = jnp.asarray(1.0) if self.score_on == "batch" else num_batches(self.local, cohort.data)
        # Shared layers are the same in all models, and sent once.
        sent = self.clusters - (self.clusters - 1) * shared_part(state.clusters, self.shared_layers)
        costs = costs._replace(
            models_down=sent * costs.models_up,
            loss_evaluations=self.clusters * jnp.sum(jnp.where(cohort.mask, passes, 0.0)),
        )
        state = State(done.clusters, clients, state.server, state.round + 1)
        return state, done.info(cohort.mask, changed, costs)

    def score(self, rng_key: Array, variables: Variables, client: Client) -> Array:
        """F_i f32[]."""
        shown = shown_rows(client.data)
        if self.score_on == "all":
            return dataset_loss(self.model, variables, shown)
        return self.local.first_loss(client_key(rng_key, client.index), self.model, variables, shown)

    def personalize(self, rng_key: Array, state: State, data: ClientData, index: Array) -> tuple[Variables, Array]:
        if self.estimate == "participation":
            return personalize_by_label_or_loss(self.model, state, data, index)
        slot = nearest_by_loss(self.model, state.clusters, data)
        return tree.broadcast(cluster_variables(state.clusters, slot), 1), jnp.ones(1)

    def admit(self, rng_key: Array, state: State, data: ClientData, index: Array) -> State:
        slot = nearest_by_loss(self.model, state.clusters, data)
        row = HardClients(one_hot(slot, self.clusters), jnp.asarray(True))
        return state._replace(clients=tree.scatter(state.clients, index, row))
