"""FL+HC: one hierarchical clustering of the clients' updates, in training (Briggs, Fan, Andras 2020, Algorithm 1)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from fedjax_cluster import clustering, cohorts, parallel, tree
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
from fedjax_cluster.clustering.linkage import Linkage
from fedjax_cluster.local import client_key, honest
from fedjax_cluster.marked_clients import shown_rows
from fedjax_cluster.options import NOT_NEGATIVE, at_least, option
from fedjax_cluster.parallel import Client
from fedjax_cluster.server import Weighting, shared_part
from fedjax_cluster.types import (
    ONE_DEVICE,
    ClientData,
    ClientMapping,
    Cohort,
    Population,
    PyTree,
    RoundInfo,
    Selection,
    State,
    Variables,
)


class Server(NamedTuple):
    """What FL+HC's server keeps beside the cluster models."""

    anchor: Variables  # w, the model of all at the clustering
    mean: Array  # f32[K, d], mean update of w of each cluster's clients that were compared
    distance: Any  # f32[M, M] between the clients; () where a cohort alone was compared
    clustered: Array  # bool[]

    BETWEEN_CLIENTS = ("distance",)


class fl_hc(AveragingMethod):
    r"""Federated learning with hierarchical clustering of local updates.

    For `warm_up` rounds all clients train one model w by federated averaging. Then every client trains w once more for
    its update Δ_i, the updates are merged by agglomerative clustering, and every cluster goes on from w by federated
    averaging of its own clients.

    With `layers=("output",)`, no warm-up and a threshold it is FedClust in form (Islam et al. 2024, Algorithm 1), which
    clusters by the last layer's weights after a training from the initial model: they differ as the updates do.

    NOTE: the training for the clustering is in the first round of the clusters, before theirs; costs count both.

    NOTE: the paper has no way for those who were away at the clustering. Here a client trains w when it first takes
    part, and joins the cluster of the nearest mean update; so do newcomers.

    Returns:
      A method whose clustering is an event, kept with its distances.

    Raises:
      ValueError: an option out of its bound; "ward" with distances that are not Euclidean.

    >>> from fedjax_cluster import local, nn
    >>> fl_hc(nn.linear(), clusters=4, local=local.sgd(0.1, batch_size=10, epochs=1)).warm_up
    10
    """

    not_private = "sends an update for its clustering, of which no budget is settled"
    clusters_by = "shown"
    first_clustering: ClassVar[Any] = property(lambda self: self.warm_up)

    clusters: int = option("K, clusters that are left; with a threshold the most there can be", bound=at_least(1))
    warm_up: int = option("n, rounds of one model for all before the clustering", default=10, bound=at_least(0))
    distance: Metric = option(
        '"euclidean", "manhattan" or "cosine" distance between updates, which the paper compares', default="euclidean"
    )
    layers: tuple[str, ...] = option(
        '(FedClust) parameter paths that updates are compared and sent of, such as `["output"]`; () is all', default=()
    )
    linkage: Linkage = option('"average", "single", "complete", or with Euclidean distances "ward"', default="complete")
    threshold: float | None = option(
        "largest distance at which clusters merge, in the unit of the updates, which depends on model, data and "
        "training; None merges until `clusters` are left",
        default=None,
        bound=NOT_NEGATIVE,
    )
    cluster_cohort: bool = option(
        "(ours) the cohort of the clustering round alone is compared, the others join when they first take part; "
        "otherwise everybody takes part in that round, whatever the participation",
        default=False,
    )
    weighting: Weighting = option('"examples" weights clients by |D_i|, "uniform" equally', default="examples")

    def check(self) -> None:
        if self.linkage == "ward" and self.distance != "euclidean":
            raise ValueError(
                f"linkage is 'ward', which is of Euclidean distances, but distance is {self.distance!r}; give another "
                "linkage, such as 'average', or distance 'euclidean'"
            )

    @property
    def draws_ahead(self) -> bool:
        return self.cluster_cohort

    @property
    def compares_all(self) -> bool:
        """Whether everybody is there at the clustering."""
        return not self.cluster_cohort or self.participation == 1

    def init(self, rng_key: Array, population: Population) -> tuple[State, RoundInfo]:
        models, present = start_models(self.model, rng_key, population, self.clusters)
        models, capacity = first_in_all_slots(models), len(present)
        anchor = cluster_variables(models, jnp.zeros((), jnp.int32))
        rows = capacity if self.compares_all else cohorts.cohort_size(self.participation, capacity)
        size = tree.size(self.compared(anchor.params))
        # The updates, a copy that is compared with them, the distances, and their tree.
        what = f"the updates of {rows} clients that are compared"
        fewer = "cluster_cohort=True and a smaller participation" if self.compares_all else "a smaller participation"
        check_memory(self.name, 4.0 * rows * (2 * size + 3 * rows), what, f"give {fewer}")
        distance = jnp.zeros((capacity, capacity)) if self.compares_all else ()
        server = Server(anchor, jnp.zeros((self.clusters, size)), distance, jnp.asarray(False))
        clients = HardClients(one_hot(jnp.where(present, 0, -1), self.clusters), present)
        return first_state(models, clients, self.optimizer, server)

    def compared(self, params: PyTree) -> PyTree:
        """What the clustering sees of a model's parameters, or of their changes."""
        return tree.pick(params, tree.match(params, self.layers)) if self.layers else params

    def due(self, state: State) -> Array:
        """bool[]: whether clients are clustered in the coming round: once, and again where nobody was heard."""
        return (state.round >= self.warm_up) & ~state.server.clustered

    def select(self, rng_key: Array, state: State) -> Selection:
        present = state.clients.present
        part = cohorts.uniform(rng_key, present, self.participation)
        if self.participation == 1 or self.cluster_cohort:
            return part
        return cohorts.everybody_when(self.due(state), present, part)

    # ----------------------------------------------------------------------------------------- clusters

    def update_of_all(self, rng_key: Array, anchor: Variables, client: Client) -> tuple[Array, Array]:
        """Δ f32[d], a client's update of the model of all where it is compared, and the steps i32[] that it took."""
        key = jax.random.fold_in(client_key(rng_key, client.index), 1)
        result = honest(self.local).run(key, self.model, anchor, shown_rows(client.data), round=self.warm_up)
        return tree.ravel(self.compared(result.delta)).astype(jnp.float32), jnp.asarray(result.num_steps, jnp.int32)

    def cluster_all(self, rng_key: Array, state: State, cohort: Cohort) -> tuple[State, Array]:
        """The state with the cohort's clients in clusters, all of the first one's model; the steps f32[] they took."""
        anchor = cluster_variables(state.clusters, jnp.zeros((), jnp.int32))

        def shown(client: Client) -> tuple[Array, Array, Array]:
            update, steps = self.update_of_all(rng_key, anchor, client)
            return update, steps, size_of(update)

        mapped = parallel.for_each_client(shown, cohort, collect=lambda output: output)
        update, steps, _ = mapped.collected
        update = jnp.where(mapped.accepted[:, None], update, 0.0)
        index, known = parallel.to_each_device((cohort.index, mapped.accepted), cohort.mapping)
        distance, label = self.group(update, index, known, cohort.mapping)
        members, clustered = one_hot(label, self.clusters), known.any()
        mean = members.T @ update / jnp.maximum(members.sum(0), 1.0)[:, None]
        nobody = jnp.zeros_like(state.clients.membership)
        membership = parallel.scatter_rows(cohort, nobody, members, mapped.accepted)
        membership = jnp.where(clustered, membership, state.clients.membership)
        active = jnp.where(clustered, jnp.arange(self.clusters) <= label.max(), state.clusters.active)
        server = Server(anchor, mean, distance if self.compares_all else (), clustered)
        return state._replace(
            clusters=first_in_all_slots(state.clusters)._replace(active=active),
            clients=state.clients._replace(membership=membership),
            server=server,
        ), steps.sum().astype(jnp.float32)

    def group(self, update: Array, index: Array, known: Array, mapping: ClientMapping) -> tuple[Array, Array]:
        """Distances f32[C, C] of updates f32[C, d], and clusters i32[C] of the clients index i32[C] that are known."""
        distance = parallel.gram(
            update, mapping, lambda some, others: clustering.pairwise_distances(some, others, self.distance)
        )
        return parallel.on_each_device(self.merge, mapping)(distance, index, known)

    def merge(self, distance: Array, index: Array, known: Array) -> tuple[Array, Array]:
        """The same of distances as they were summed, named by each cluster's smallest client."""
        distance = jnp.where(known[:, None] & known[None], 0.5 * (distance + distance.T), 0.0)
        order = jnp.argsort(index, stable=True)
        merges = clustering.dendrogram(distance[order][:, order], self.linkage, known[order])
        count = known.sum(dtype=jnp.int32)
        left = jnp.minimum(count, self.clusters)
        if self.threshold is not None:
            left = jnp.minimum(count - (merges.heights <= self.threshold).sum(dtype=jnp.int32), left)
        return distance, jnp.zeros_like(index).at[order].set(clustering.cut_dendrogram(merges, num_clusters=left))

    def nearest(self, rng_key: Array, state: State, client: Client) -> tuple[Array, Array, Array]:
        """The cluster i32[] of the mean update nearest to a client's; its steps; its update's `size_of`."""
        update, steps = self.update_of_all(rng_key, state.server.anchor, client)
        size = size_of(update)
        update = jnp.where(jnp.isfinite(size), update, 0.0)
        between = clustering.pairwise_distances(update[None], state.server.mean, self.distance)[0]
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
        costs, heard = done.costs(cohort.mask), jnp.sum(cohort.mask & (due | new)).astype(jnp.float32)
        part = shared_part(state.server.anchor.params, self.layers) if self.layers else 1.0
        costs = costs._replace(
            models_down=costs.models_down + heard,
            models_up=costs.models_up + part * heard,
            gradient_evaluations=costs.gradient_evaluations + steps,
            clusterings=due.astype(jnp.float32),
        )
        changed = jnp.sum(cohort.mask & (slot != before), dtype=jnp.int32)
        return state._replace(clusters=done.clusters, round=state.round + 1), done.info(
            cohort.mask, changed, costs, event=due & state.server.clustered
        )

    def personalize(self, rng_key: Array, state: State, data: ClientData, index: Array) -> tuple[Variables, Array]:
        return personalize_by_label_or_loss(self.model, state, data, index)

    def admit(self, rng_key: Array, state: State, data: ClientData, index: Array) -> State:
        slot, _, size = self.nearest(rng_key, state, Client(index, jnp.asarray(True), data, None))
        slot = jnp.where(state.server.clustered, jnp.where(jnp.isfinite(size), slot, -1), 0)
        row = HardClients(one_hot(slot, self.clusters), jnp.asarray(True))
        return state._replace(clients=tree.scatter(state.clients, index, row))

    def cluster(self, rng_key: Array, state: State, mapping: ClientMapping = ONE_DEVICE) -> Array:
        """One clustering. The clients' updates are gone after theirs; their clusters' means stand for them."""
        label, present = labels(state.clients.membership), state.clients.present
        if self.compares_all:
            index = jnp.arange(len(label), dtype=jnp.int32)
            return self.group(state.server.mean[jnp.maximum(label, 0)], index, present, mapping)[1]
        index, mask, _ = self.select(rng_key, state)
        found = self.group(state.server.mean[jnp.maximum(label.at[index].get(mode="clip"), 0)], index, mask, ONE_DEVICE)
        return jnp.full_like(label, -1).at[index].set(found[1], mode="drop")

    def snapshot(self, state: State) -> Mapping[str, Any]:
        """The clusters, and where everybody was compared the distances, for plots."""
        distance = {"distance": state.server.distance} if self.compares_all else {}
        return {**distance, "labels": labels(state.clients.membership)}
