"""What methods share that cluster their clients once, in training, by updates of one model (FL+HC, FlexCFL)."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
from jax import Array

from fedjax_cluster import clustering, parallel, tree
from fedjax_cluster.algorithms.method import AveragingMethod
from fedjax_cluster.algorithms.round import (
    HardClients,
    check_memory,
    cluster_round,
    cluster_variables,
    cohort_labels,
    first_in_all_slots,
    first_state,
    labels,
    one_hot,
    personalize_by_label_or_loss,
    size_of,
    start_models,
    train_in_cluster,
)
from fedjax_cluster.clustering.distances import Metric
from fedjax_cluster.clustering.similarity import matmul
from fedjax_cluster.local import client_key
from fedjax_cluster.marked_clients import run_beside, shown_rows
from fedjax_cluster.options import at_least, option
from fedjax_cluster.parallel import Client
from fedjax_cluster.server import Weighting
from fedjax_cluster.types import (
    ONE_DEVICE,
    ClientData,
    ClientMapping,
    Clusters,
    Cohort,
    LocalUpdate,
    Population,
    PyTree,
    RoundInfo,
    State,
    Variables,
)


class Server(NamedTuple):
    """What the server keeps beside the cluster models."""

    anchor: Variables  # w, the model of all at the clustering
    mean: Array  # f32[K, d], mean update of w of each cluster's clients that were compared
    distance: Any  # f32[M, M] between the clients; () where none is kept
    clustered: Array  # bool[]

    BETWEEN_CLIENTS = ("distance",)


class ClusteredOnce(AveragingMethod, abstract=True):
    """A method that compares its clients' updates of one model once; who is heard later joins the nearest cluster.

    A subclass says who is compared (`compares_all`, `compared_rows`, `select`), by which clients are in a cluster then
    (`group`, and `metric` for those who join), and where the clusters' models start (`start_clusters`).
    """

    clusters_by = "shown"

    clusters: int = option("K, clusters", bound=at_least(1))
    weighting: Weighting = option('"examples" weights clients by |D_i|, "uniform" equally', default="examples")

    alone: ClassVar[int] = 0  # the slot of clients before the clustering; −1: they have none
    moves_starts: ClassVar[bool] = False  # whether `start_clusters` gives other models than w
    keeps_distances: ClassVar[Any] = False  # whether `group` gives f32[M, M]

    @property
    def compares_all(self) -> bool:
        """Whether everybody is there at the clustering."""
        return self.participation == 1

    @property
    def metric(self) -> Metric:
        """Of an update and the clusters' mean updates, the nearest of which a client joins."""
        return "cosine"

    @property
    def shown_update(self) -> LocalUpdate:
        """How a client trains w where it is compared."""
        return self.local

    def compared_rows(self, capacity: int) -> tuple[int, str]:
        """How many clients are compared at most, and what makes them fewer."""
        raise NotImplementedError

    def compared(self, params: PyTree) -> PyTree:
        """What the clustering sees of a model's parameters, or of their changes."""
        return params

    def group(
        self, rng_key: Array, update: Array, index: Array, known: Array, mapping: ClientMapping
    ) -> tuple[Any, Array]:
        """Clusters i32[C] of clients index i32[C] that are known, by updates f32[C, d]; before them, what is kept."""
        raise NotImplementedError

    def start_clusters(self, clusters: Clusters, anchor: Variables, mean: Array) -> Clusters:
        """The models that clusters go on from; here all from w."""
        return clusters

    def finish_round(self, clusters: Clusters) -> Clusters:
        """What becomes of the clusters' models after a round."""
        return clusters

    def due(self, state: State) -> Array:
        """bool[]: whether clients are clustered in the coming round: once, and again where nobody was heard."""
        return (state.round >= self.first_clustering) & ~state.server.clustered

    def init(self, rng_key: Array, population: Population) -> tuple[State, RoundInfo]:
        models, present = start_models(self.model, rng_key, population, self.clusters)
        models, capacity = first_in_all_slots(models), len(present)
        anchor = cluster_variables(models, jnp.zeros((), jnp.int32))
        (rows, fewer), size = self.compared_rows(capacity), tree.size(self.compared(anchor.params))
        # The updates, a copy that is compared with them, the distances, and their tree.
        what = f"the updates of {rows} clients that are compared"
        check_memory(self.name, 4.0 * rows * (2 * size + 3 * rows), what, f"give {fewer}")
        distance = jnp.zeros((capacity, capacity)) if self.keeps_distances else ()
        server = Server(anchor, jnp.zeros((self.clusters, size)), distance, jnp.asarray(False))
        clients = HardClients(one_hot(jnp.where(present, self.alone, -1), self.clusters), present)
        return first_state(models, clients, self.optimizer, server)

    # ----------------------------------------------------------------------------------------- clusters

    def update_of_all(self, rng_key: Array, anchor: Variables, client: Client) -> tuple[Array, Array]:
        """Δ f32[d], a client's update of the model of all where it is compared, and the steps i32[] that it took."""
        key, rows = client_key(rng_key, client.index), shown_rows(client.data)
        result = run_beside(self.shown_update, key, self.model, anchor, rows, round=self.first_clustering)
        return tree.ravel(self.compared(result.delta)).astype(jnp.float32), jnp.asarray(result.num_steps, jnp.int32)

    def cluster_all(self, rng_key: Array, state: State, cohort: Cohort) -> tuple[State, Array]:
        """The state with the cohort's clients in clusters, and the steps f32[] that they took."""
        anchor = cluster_variables(state.clusters, jnp.zeros((), jnp.int32))

        def shown(client: Client) -> tuple[Array, Array, Array]:
            update, steps = self.update_of_all(rng_key, anchor, client)
            return update, steps, size_of(update)

        mapped = parallel.for_each_client(shown, cohort, collect=lambda output: output)
        update, steps, _ = mapped.collected
        update = jnp.where(mapped.accepted[:, None], update, 0.0)
        index, known = parallel.to_each_device((cohort.index, mapped.accepted), cohort.mapping)
        distance, label = self.group(rng_key, update, index, known, cohort.mapping)
        members, clustered = one_hot(label, self.clusters), known.any()
        mean = matmul(members.T, update) / jnp.maximum(members.sum(0), 1.0)[:, None]
        nobody = jnp.zeros_like(state.clients.membership)
        membership = parallel.scatter_rows(cohort, nobody, members, mapped.accepted)
        membership = jnp.where(clustered, membership, state.clients.membership)
        active = jnp.where(clustered, jnp.arange(self.clusters) <= label.max(), state.clusters.active)
        clusters = self.start_clusters(first_in_all_slots(state.clusters), anchor, mean)
        return state._replace(
            clusters=clusters._replace(active=active),
            clients=state.clients._replace(membership=membership),
            server=Server(anchor, mean, distance if self.keeps_distances else (), clustered),
        ), steps.sum().astype(jnp.float32)

    def nearest(self, rng_key: Array, state: State, client: Client) -> tuple[Array, Array, Array]:
        """The cluster i32[] of the mean update nearest to a client's; its steps; its update's `size_of`."""
        update, steps = self.update_of_all(rng_key, state.server.anchor, client)
        size = size_of(update)
        update = jnp.where(jnp.isfinite(size), update, 0.0)
        between = clustering.pairwise_distances(update[None], state.server.mean, self.metric)[0]
        slot = jnp.argmin(jnp.where(state.clusters.active & jnp.isfinite(between), between, jnp.inf))
        return slot.astype(jnp.int32), steps, size

    def join(self, rng_key: Array, state: State, cohort: Cohort, new: Array) -> tuple[State, Array]:
        """The state with the cohort's new clients, bool[C], in clusters, and the steps f32[] that they took."""

        def joined(client: Client, new: Array) -> tuple[Array, Array, Array]:
            nothing = jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32), jnp.zeros(())
            return parallel.unless(~new, nothing, lambda: self.nearest(rng_key, state, client))

        mapped = parallel.for_each_client(joined, cohort, new, collect=lambda output: output)
        slot, steps, _ = mapped.collected
        rows = one_hot(slot, self.clusters)
        membership = parallel.scatter_rows(cohort, state.clients.membership, rows, new & mapped.accepted)
        state = state._replace(clients=state.clients._replace(membership=membership))
        return state, steps.sum().astype(jnp.float32)

    # ----------------------------------------------------------------------------------------- a round

    def step(self, rng_key: Array, state: State, cohort: Cohort) -> tuple[State, RoundInfo]:
        before, due = cohort_labels(state, cohort), self.due(state)
        new = cohort.mask & (before < 0)

        def cluster(carry: tuple[State, Array]) -> tuple[State, Array]:
            return self.cluster_all(rng_key, carry[0], cohort)

        def join(carry: tuple[State, Array]) -> tuple[State, Array]:
            return self.join(rng_key, carry[0], cohort, new)

        carry = parallel.run_if(due, cluster, (state, jnp.zeros(())), cohort.mapping)
        state, steps = parallel.run_if(state.server.clustered & jnp.any(new), join, carry, cohort.mapping)
        slot = cohort_labels(state, cohort)
        done = cluster_round(
            train_in_cluster(rng_key, self.local, self.model, state.clusters, state.round),
            state.clusters,
            cohort,
            slot,
            optimizer=self.optimizer,
            weighting=self.weighting,
            aggregation=self.aggregation,
        )
        costs, heard, anchor = done.costs(cohort.mask), cohort.mask & (due | new), state.server.anchor
        part = tree.num_bytes(self.compared(anchor.params)) / tree.num_bytes(anchor)
        # w too, and what is compared back; where clusters start from w their members hold their model.
        again = heard if self.moves_starts else heard & ~(due & (slot >= 0))
        costs = costs._replace(
            models_down=costs.models_down + jnp.sum(again.astype(jnp.float32)),
            models_up=costs.models_up + part * jnp.sum(heard.astype(jnp.float32)),
            gradient_evaluations=costs.gradient_evaluations + steps,
            clusterings=due.astype(jnp.float32),
        )
        changed = jnp.sum(cohort.mask & (slot != before), dtype=jnp.int32)
        done = done._replace(accepted=done.accepted & (slot >= 0))  # of others what is compared is not finite
        return state._replace(clusters=self.finish_round(done.clusters), round=state.round + 1), done.info(
            cohort.mask, changed, costs, event=due & state.server.clustered
        )

    def personalize(self, rng_key: Array, state: State, data: ClientData, index: Array) -> tuple[Variables, Array]:
        return personalize_by_label_or_loss(self.model, state, data, index)

    def admit(self, rng_key: Array, state: State, data: ClientData, index: Array) -> State:
        slot, _, size = self.nearest(rng_key, state, Client(index, jnp.asarray(True), data, None))
        slot = jnp.where(state.server.clustered, jnp.where(jnp.isfinite(size), slot, -1), self.alone)
        row = HardClients(one_hot(slot, self.clusters), jnp.asarray(True))
        return state._replace(clients=tree.scatter(state.clients, index, row))

    def cluster(self, rng_key: Array, state: State, mapping: ClientMapping = ONE_DEVICE) -> Array:
        """One clustering. The clients' updates are gone after theirs; their clusters' means stand for them."""
        label, present = labels(state.clients.membership), state.clients.present
        if self.compares_all:
            index = jnp.arange(len(label), dtype=jnp.int32)
            return self.group(rng_key, state.server.mean[jnp.maximum(label, 0)], index, present, mapping)[1]
        index, mask, _ = self.select(rng_key, state)
        means = state.server.mean[jnp.maximum(label.at[index].get(mode="clip"), 0)]
        found = self.group(rng_key, means, index, mask, ONE_DEVICE)
        return jnp.full_like(label, -1).at[index].set(found[1], mode="drop")
