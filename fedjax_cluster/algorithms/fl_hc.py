"""FL+HC: one hierarchical clustering of the clients' updates, in training (Briggs, Fan, Andras 2020, Algorithm 1)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import jax.numpy as jnp
from jax import Array

from fedjax_cluster import clustering, cohorts, parallel, tree
from fedjax_cluster.algorithms.clustered_once import ClusteredOnce
from fedjax_cluster.algorithms.round import labels
from fedjax_cluster.clustering.distances import Metric
from fedjax_cluster.clustering.linkage import Linkage
from fedjax_cluster.options import NOT_NEGATIVE, at_least, option
from fedjax_cluster.types import ClientMapping, PyTree, Selection, State


class fl_hc(ClusteredOnce):
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

    keeps_distances: ClassVar[Any] = compares_all

    @property
    def metric(self) -> Metric:
        return self.distance

    def compared_rows(self, capacity: int) -> tuple[int, str]:
        if self.compares_all:
            return capacity, "cluster_cohort=True and a smaller participation"
        return cohorts.cohort_size(self.participation, capacity), "a smaller participation"

    def compared(self, params: PyTree) -> PyTree:
        return tree.pick(params, tree.match(params, self.layers)) if self.layers else params

    def select(self, rng_key: Array, state: State) -> Selection:
        present = state.clients.present
        part = cohorts.uniform(rng_key, present, self.participation)
        if self.participation == 1 or self.cluster_cohort:
            return part
        return cohorts.everybody_when(self.due(state), present, part)

    def group(
        self, rng_key: Array, update: Array, index: Array, known: Array, mapping: ClientMapping
    ) -> tuple[Array, Array]:
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

    def snapshot(self, state: State) -> Mapping[str, Any]:
        """The clusters, and where everybody was compared the distances, for plots."""
        distance = {"distance": state.server.distance} if self.compares_all else {}
        return {**distance, "labels": labels(state.clients.membership)}
