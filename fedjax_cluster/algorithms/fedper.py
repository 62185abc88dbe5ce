"""FedPer: common layers below, each client's own ones above (Arivazhagan et al. 2019, Algorithms 1 and 2)."""

from __future__ import annotations

import jax
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
)
from fedjax_cluster.algorithms.round import Trained, cluster_round
from fedjax_cluster.local import client_key
from fedjax_cluster.options import option
from fedjax_cluster.parallel import Client
from fedjax_cluster.privacy.gaussian import ONE
from fedjax_cluster.server import shared_part, warn_of_sharing
from fedjax_cluster.types import (
    ClientData,
    Cohort,
    LocalResult,
    LocalUpdate,
    Population,
    PyTree,
    RoundInfo,
    State,
    Variables,
)


class fedper(fedavg):
    """Federated averaging of some layers; the others are each client's own.

    Client i trains base and personal layers together, (B, P_i) ← (B, P_i) − η·∇f_i(B, P_i); the server averages the
    base alone, B ← Σ_i n_i B_i / Σ_i n_i.

    Returns:
      A method whose `personalize` joins the base to the client's own layers, which are those of the start as long as
      the client never took part; memory grows with M times the size of these.

    Raises:
      ValueError: an option out of its bound; from `init`, a pattern that no parameter matches.

    >>> from fedjax_cluster import local, nn
    >>> fedper(nn.mlp((8,)), local=local.sgd(0.1, batch_size=8, epochs=1)).shared_layers
    ('!output',)
    """

    sends = ONE

    local: LocalUpdate = option("the steps of all layers")
    shared_layers: tuple[str, ...] = option(
        "parameter paths of the base, averaged over all clients; the others, with their statistics, are personal",
        default=("!output",),
    )

    def check(self) -> None:
        if not self.shared_layers:
            raise ValueError("shared_layers is empty, so that nothing would be shared; give paths, or use local-only")

    def own_part(self, variables: Variables) -> Variables:
        """The personal layers by their paths, and the statistics of these."""
        params, stats = variables
        shared = tree.match(params, self.shared_layers), tree.match(stats, self.shared_layers, strict=False)
        personal = jax.tree.map(lambda mark: not mark, shared)
        return Variables(tree.pick(params, personal[0]), tree.pick(stats, personal[1]))

    def init(self, rng_key: Array, population: Population) -> tuple[State, RoundInfo]:
        state, info = super().init(rng_key, population)
        # NOTE: the paper lets each client draw its personal layers; here all begin with the same, so that methods can
        # be compared from equal starts.
        own = self.own_part(global_model(state.clusters))
        nothing, everything = "nothing is sent: each client trains alone", "nothing is a client's own: this is FedAvg"
        warn_of_sharing(self.name, state.clusters.params, self.shared_layers, nothing, everything)
        return state._replace(clients=starting_clients(state.clients.present, parallel.packed(own))), info

    def train(self, key: Array, start: Variables, data: ClientData, round: Array) -> tuple[LocalResult, Array]:
        """A client's training of all layers, and how many steps were the personal ones' alone, i32[]."""
        return self.update.run(key, self.model, start, data, round=round), jnp.zeros((), jnp.int32)

    def step(self, rng_key: Array, state: State, cohort: Cohort) -> tuple[State, RoundInfo]:
        common = global_model(state.clusters)
        initial = self.own_part(common)

        def train(client: Client, row: PyTree) -> Trained:
            own: Variables = parallel.unpacked(row, initial)
            start = with_own(common, own)
            result, own_steps = self.train(client_key(rng_key, client.index), start, client.data, state.round)
            change = self.own_part(Variables(result.delta, result.stats))
            params = {name: own.params[name] + change.params[name] for name in own.params}
            kept = parallel.packed(Variables(params, change.stats))
            moved = moved_to(kept, own_steps, change.params)
            still = jax.tree.map(jnp.zeros_like, change.params)
            stats = tree.put(result.stats, initial.stats)
            result = result._replace(delta=tree.put(result.delta, still), stats=stats)
            return Trained(jnp.zeros((), jnp.int32), result, moved, kept)

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
        # What nobody sends is no place for noise, nor for a server's weight decay.
        still = self.own_part(Variables(state.clusters.params, {})).params
        clusters = done.clusters._replace(params=tree.put(done.clusters.params, still))
        sent = shared_part(state.clusters, self.shared_layers)
        costs = all_costs(done, done.extra, cohort.mask)
        costs = costs._replace(models_down=sent * costs.models_down, models_up=sent * costs.models_up)
        return State(clusters, clients, state.server, state.round + 1), done.info(cohort.mask, costs=costs)

    def personalize(self, rng_key: Array, state: State, data: ClientData, index: Array) -> tuple[Variables, Array]:
        common = global_model(state.clusters)
        initial = self.own_part(common)
        own = own_row(state.clients, index, parallel.packed(initial))
        return tree.broadcast(with_own(common, parallel.unpacked(own, initial)), 1), jnp.ones(1)

    def admit(self, rng_key: Array, state: State, data: ClientData, index: Array) -> State:
        # The global model's personal layers are never trained, and so still those of the start.
        return admit_with_own(state, index, parallel.packed(self.own_part(global_model(state.clusters))))


def with_own(variables: Variables, own: Variables) -> Variables:
    """A model with a client's own layers and their statistics."""
    return Variables(tree.put(variables.params, own.params), tree.put(variables.stats, own.stats))
