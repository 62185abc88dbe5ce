"""Ditto: each client's own model is pulled towards the global one (Li et al. 2021, Algorithms 1 and 2)."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from fedjax_cluster import parallel, tree
from fedjax_cluster.algorithms.fedavg import fedavg
from fedjax_cluster.algorithms.personal import (
    admit_with_own,
    all_costs,
    global_model,
    keep_own,
    moved_to,
    own_row,
    starting_clients,
    trained_own,
)
from fedjax_cluster.algorithms.round import Trained, cluster_round
from fedjax_cluster.kept_training import honest
from fedjax_cluster.local import client_key
from fedjax_cluster.options import NOT_NEGATIVE, at_least, changed, option
from fedjax_cluster.parallel import Client
from fedjax_cluster.privacy.gaussian import ONE
from fedjax_cluster.server import Weighting
from fedjax_cluster.types import ClientData, Cohort, LocalUpdate, Population, RoundInfo, State, Variables


class ditto(fedavg):
    """A personal model of each client that is held near the global one.

    θ as in federated averaging; beside it client i moves v_i towards argmin_v f_i(v) + λ/2·‖v − θᵗ‖², where θᵗ is the
    model that the round began with: v_i ← v_i − η·(∇f_i(v_i) + λ(v_i − θᵗ)).

    NOTE: the public code tests who never took part with the first model, where `personalize` gives today's θ; it also
    draws clients by their sizes, where ours are drawn alike (weighting "examples" has its objective), and runs with
    λ = 1.

    Returns:
      A method whose `personalize` gives v_i, or θ as long as the client never took part; memory grows with M·d.

    Raises:
      ValueError: an option out of its bound, or a local update that has no proximal term.

    >>> from fedjax_cluster import local, nn
    >>> ditto(nn.linear(), local=local.sgd(0.1, batch_size=8, epochs=1)).personal_update.proximal
    0.1
    """

    sends = ONE

    local: LocalUpdate = option(
        "the steps of the global model, and of the personal one with λ in place of its `proximal`"
    )
    proximal: float = option(
        "λ, the pull of the global model on the personal one; the public code tries 0.1, 1 and 2",
        default=0.1,
        bound=NOT_NEGATIVE,
    )
    personal_steps: int | None = option(
        "s, mini-batch steps of the personal model a round; None takes as many as the global one",
        default=None,
        bound=at_least(1),
    )
    weighting: Weighting = option('"uniform" as in the paper, or "examples"', default="uniform")

    def check(self) -> None:
        # Refused here rather than in the first round.
        _ = self.personal_update

    @property
    def personal_update(self) -> LocalUpdate:
        """What moves a client's own model."""
        steps = {} if self.personal_steps is None else {"steps": self.personal_steps, "epochs": None}
        return changed(honest(self.local), "given a proximal term", proximal=self.proximal, **steps)

    def init(self, rng_key: Array, population: Population) -> tuple[State, RoundInfo]:
        state, info = super().init(rng_key, population)
        own = global_model(state.clusters)
        return state._replace(clients=starting_clients(state.clients.present, own)), info

    def step(self, rng_key: Array, state: State, cohort: Cohort) -> tuple[State, RoundInfo]:
        start = global_model(state.clusters)

        def train(client: Client, own: Variables) -> Trained:
            # NOTE: both models take the same mini-batches, of which Algorithm 1 says nothing; the public code's do.
            key = client_key(rng_key, client.index)
            result = self.update.run(key, self.model, start, client.data, round=state.round)
            personal = self.personal_update.run(
                key, self.model, own, client.data, anchor=start.params, round=state.round
            )
            renewed = trained_own(own, personal)
            moved = moved_to(renewed, personal.num_steps, personal.delta)
            return Trained(jnp.zeros((), jnp.int32), result, moved, renewed)

        done = cluster_round(
            train,
            state.clusters,
            cohort,
            own=parallel.gather_rows(cohort, state.clients.own),
            optimizer=self.optimizer,
            weighting=self.weighting,
            aggregation=self.aggregation,
            private=self.private(rng_key, state.clusters),
        )
        clients = keep_own(cohort, state.clients, done.own, done.extra.finite)
        state = State(done.clusters, clients, state.server, state.round + 1)
        return state, done.info(cohort.mask, costs=all_costs(done, done.extra, cohort.mask))

    def personalize(self, rng_key: Array, state: State, data: ClientData, index: Array) -> tuple[Variables, Array]:
        return tree.broadcast(own_row(state.clients, index, global_model(state.clusters)), 1), jnp.ones(1)

    def admit(self, rng_key: Array, state: State, data: ClientData, index: Array) -> State:
        # NOTE: the paper has all clients from the start; who joins later begins with the global model of the day.
        return admit_with_own(state, index, global_model(state.clusters))
