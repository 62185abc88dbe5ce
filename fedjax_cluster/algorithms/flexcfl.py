"""FlexCFL: clients grouped once by the directions of their first updates (Duan et al. 2022, arXiv:2108.09749)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import optax
from jax import Array

from fedjax_cluster import clustering, cohorts, parallel, tree
from fedjax_cluster.algorithms.clustered_once import ClusteredOnce
from fedjax_cluster.algorithms.round import labels
from fedjax_cluster.clustering.kmeans import kmeans_in_slots
from fedjax_cluster.clustering.similarity import unit
from fedjax_cluster.local import server_key
from fedjax_cluster.options import NOT_NEGATIVE, at_least, changed, option
from fedjax_cluster.types import ClientMapping, Clusters, LocalUpdate, PyTree, Selection, State, Variables

Measure = Literal["edc", "madc"]


class flexcfl(ClusteredOnce):
    r"""Flexible clustered federated learning; without migration and mixing it is FedGroup (arXiv:2010.06870).

    Before its first round every client i of the first cohort trains the initial model w₀ for an update Δ_i. With u_k
    the K leading singular directions of all updates, clients are grouped by k-means of their cosines ⟨Δ_i, u_k⟩/‖Δ_i‖.
    A cluster's model starts at w₀ plus the mean update of its clients; who comes later trains w₀ likewise, and joins
    the cluster to whose mean update its own has the least angle. Then each cluster goes on by federated averaging, and
    after each round its model moves to the others': θ_k ← (θ_k + η Σ_l θ_l/‖θ_l‖) / (1 + η Σ_l 1/‖θ_l‖), l ≠ k.

    NOTE: where the paper and its public code differ, this is the code: the sum is divided by its weights.

    NOTE: the clients that are compared are the first round's cohort, and train on in it. In the public code others
    may be drawn for that round.

    NOTE: clients whose data change are sent to another cluster by the paper; the data of these clients do not.

    NOTE: u_k are found from inner products in float32, and directions with a singular value below about 3·10⁻⁴ of the
    largest are noise. Where updates of some clients are 3000 times longer than all others, or more, the others are
    grouped at random by "edc"; "madc" compares cosines, whatever the lengths.

    NOTE: batch-norm statistics of a cluster start from those of w₀, and are not mixed.

    Returns:
      A method whose grouping is an event; a client not heard yet is evaluated with the model of least training loss.

    Raises:
      ValueError: an option out of its bound, or a local update whose steps cannot be changed.

    >>> from fedjax_cluster import local, nn
    >>> flexcfl(nn.linear(), clusters=4, local=local.sgd(0.1, batch_size=10, epochs=2)).shown_update.steps
    50
    """

    not_private = "sends an update for its clustering, of which no budget is settled"
    alone: ClassVar[int] = -1
    moves_starts: ClassVar[bool] = True

    measure: Measure = option(
        '"edc" groups by k-means of cosines with the leading directions; "madc" merges, by complete linkage, those '
        "whose cosines with all others differ least",
        default="edc",
    )
    first_clients: int = option(
        "α, clients for each cluster that the first round has at least, all of whom are compared",
        default=20,
        bound=at_least(1),
    )
    first_steps: int | None = option(
        "steps in which a client trains w₀, 50 in the public code; None: as it trains in a round",
        default=50,
        bound=at_least(1),
    )
    mixing: float = option(
        "η, how far each cluster's model moves to the others' after a round", default=0.0, bound=NOT_NEGATIVE
    )

    def check(self) -> None:
        _ = self.shown_update  # refused here rather than in the first round

    @property
    def shown_update(self) -> LocalUpdate:
        if self.first_steps is None:
            return self.local
        return changed(self.local, "given other steps", steps=self.first_steps, epochs=None)

    def first_cohort(self, capacity: int) -> int:
        """How many clients the first round has at most."""
        most = min(self.first_clients * self.clusters, capacity)
        return max(most, cohorts.cohort_size(self.participation, capacity))

    def compared_rows(self, capacity: int) -> tuple[int, str]:
        return self.first_cohort(capacity), "a smaller participation, or fewer first_clients"

    def select(self, rng_key: Array, state: State) -> Selection:
        present = state.clients.present
        if self.participation == 1:
            return cohorts.in_place(present)
        wanted = cohorts.wanted_clients(self.participation, present)
        least = jnp.minimum(self.first_clients * self.clusters, jnp.sum(present, dtype=jnp.int32))
        wanted = jnp.where(state.round == 0, jnp.maximum(wanted, least), wanted)
        return cohorts.drawn(rng_key, present, wanted, self.first_cohort(len(present)))

    @property
    def draws_ahead(self) -> bool:
        return True

    # ----------------------------------------------------------------------------------------- clusters

    def group(
        self, rng_key: Array, update: Array, index: Array, known: Array, mapping: ClientMapping
    ) -> tuple[Any, Array]:
        if self.measure == "edc":
            grouped, compared = self.by_directions, parallel.gram(update / unit(update), mapping)
        else:
            grouped, compared = self.by_differences, parallel.gram(update, mapping, cosines)
        return (), parallel.on_each_device(grouped, mapping)(server_key(rng_key), compared, index, known)

    def by_directions(self, rng_key: Array, gram: Array, index: Array, known: Array) -> Array:
        """Clusters i32[C] by k-means of cosines with the leading directions of updates with this Gram matrix."""
        gram, known, order = in_order(gram, index, known)
        features = clustering.decomposed_cosines(gram, min(self.clusters, len(gram)), known)
        number = jnp.clip(known.sum(dtype=jnp.int32), 1, self.clusters)
        found = kmeans_in_slots(
            rng_key, features, known, number, slots=self.clusters, num_restarts=10, max_iterations=100
        )
        return jnp.zeros_like(index).at[order].set(by_first(found.labels, self.clusters))

    def by_differences(self, rng_key: Array, similarity: Array, index: Array, known: Array) -> Array:
        """Clusters i32[C] by complete linkage of how much cosines f32[C, C] with all others differ."""
        similarity, known, order = in_order(similarity, index, known)
        merges = clustering.dendrogram(clustering.similarity_differences(similarity, known), "complete", known)
        left = jnp.minimum(known.sum(dtype=jnp.int32), self.clusters)
        return jnp.zeros_like(index).at[order].set(clustering.cut_dendrogram(merges, num_clusters=left))

    def start_clusters(self, clusters: Clusters, anchor: Variables, mean: Array) -> Clusters:
        moved = jax.vmap(lambda delta: tree.unravel(delta, anchor.params))(mean)
        return clusters._replace(params=optax.apply_updates(clusters.params, moved))

    def finish_round(self, clusters: Clusters) -> Clusters:
        return (
            clusters._replace(params=mixed(clusters.params, clusters.active, self.mixing)) if self.mixing else clusters
        )

    def snapshot(self, state: State) -> Mapping[str, Any]:
        """The clusters, and the cosines of their first mean updates, for plots."""
        cosines = clustering.cosine_similarity(state.server.mean, state.clusters.active)
        return {"similarity": cosines, "labels": labels(state.clients.membership)}


def cosines(some: Array, others: Array) -> Array:
    """f32[M, N] of the rows of two matrices."""
    return 1.0 - clustering.pairwise_distances(some, others, "cosine")


def in_order(matrix: Array, index: Array, known: Array) -> tuple[Array, Array, Array]:
    """A symmetric f32[C, C] of clients by their numbers, 0 for who is not known; known bool[C] so, and the order."""
    order = jnp.argsort(jnp.where(known, index, jnp.iinfo(jnp.int32).max), stable=True)
    matrix = jnp.where(known[:, None] & known[None], 0.5 * (matrix + matrix.T), 0.0)
    return matrix[order][:, order], known[order], order


def by_first(label: Array, slots: int) -> Array:
    """Labels i32[C] renamed in the order in which they first appear; −1 stays.

    >>> by_first(jnp.asarray([2, -1, 0, 2, 1]), 3).tolist()
    [0, -1, 1, 0, 2]
    """
    place = jnp.arange(len(label), dtype=jnp.int32)
    first = jnp.full(slots, len(label), jnp.int32).at[jnp.where(label < 0, slots, label)].min(place, mode="drop")
    rank = jnp.argsort(jnp.argsort(first)).astype(jnp.int32)
    return jnp.where(label < 0, -1, rank[jnp.maximum(label, 0)])


def mixed(params: PyTree, active: Array, rate: float) -> PyTree:
    """Each cluster's parameters, leaves [K, ...], averaged with `rate` times those of the others, at length one.

    >>> mixed({"w": jnp.asarray([[2.0, 0.0], [0.0, 4.0]])}, jnp.ones(2, bool), 1.0)["w"].tolist()
    [[1.600000023841858, 0.800000011920929], [0.6666666865348816, 2.6666667461395264]]
    """
    squares = [jnp.square(leaf.astype(jnp.float32)).reshape(len(leaf), -1).sum(1) for leaf in jax.tree.leaves(params)]
    length = jnp.sqrt(jnp.sum(jnp.stack(squares), 0))
    counts = active & (length > 0.0)
    weight = jnp.where(counts, rate / jnp.where(counts, length, 1.0), 0.0)
    own = jnp.eye(len(active), dtype=bool)
    weights = jnp.where(own, 1.0, jnp.where(active[:, None], weight[None], 0.0))
    weights = weights / weights.sum(1, keepdims=True)
    return jax.tree.map(lambda leaf: jnp.tensordot(weights.astype(leaf.dtype), leaf, 1, precision="highest"), params)
