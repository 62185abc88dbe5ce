"""PACFL: clusters from the principal angles between the clients' data (Vahidian et al. 2023, Algorithm 1)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedjax_cluster import clustering, parallel, tree
from fedjax_cluster.algorithms.method import FirstProgram
from fedjax_cluster.algorithms.one_shot import (
    SEARCHED,
    STEP,
    SearchingMethod,
    check_classes,
    check_found,
    clocked,
    cluster_distances,
    clustering_info,
    model_size,
    progress_note,
    vectors_sent,
    with_largest,
)
from fedjax_cluster.algorithms.round import check_square, first_state, labels, one_hot, start_models
from fedjax_cluster.algorithms.threshold_search import ROUNDING, Effort, cuts, threshold_grid
from fedjax_cluster.local import client_key
from fedjax_cluster.marked_clients import shown_rows
from fedjax_cluster.options import NOT_NEGATIVE, at_least, option
from fedjax_cluster.parallel import Mapped
from fedjax_cluster.privacy.gaussian import SHOWN, gaussian
from fedjax_cluster.types import ClientData, Costs, Population, RoundInfo, State

COMPARED = 10  # arrays of 4 bytes a pair at the same time: the angles, and SciPy's copies in 8 bytes
GAP, SMALLEST_ANGLE = 1.4, 1e-3  # between two merges' angles, as a ratio; degrees, within which float32 is not exact


class Clients(NamedTuple):
    """What PACFL keeps of its clients, so that newcomers can be compared with them."""

    membership: Array  # f32[M, K], one-hot
    present: Array  # bool[M]
    vectors: Array  # f32[M, L, f, p], principal vectors of each class


class Server(NamedTuple):
    angles: Array  # f32[M, M], in degrees
    threshold: Array  # f32[], largest angle at which clusters merge
    search: Any  # Search, with thresholds in degrees; () where none was made


class pacfl(SearchingMethod):
    """Principal-angle clustered federated learning.

    Before training every client sends the first p left singular vectors of each class's data; agglomerative
    clustering merges by the principal angles between the clients' spans of all of them, as long as these are at most
    the threshold; then every cluster runs federated averaging.

    NOTE: the paper leaves the threshold to the user; `threshold="search"` and the one by default are ours.

    Returns:
      A method that clusters in `init`; the angles are in the snapshot before the first round.

    Raises:
      ValueError: an option out of its bound; in `init`, more clusters found than `clusters`, or examples without
        classes.

    >>> from fedjax_cluster import local, nn
    >>> pacfl(nn.linear(), clusters=5, local=local.sgd(0.1, batch_size=10, epochs=1)).num_vectors
    1
    """

    sends = SHOWN
    clusters_by = "shown"

    clusters: int = option(
        "the most clusters there can be; how many there are, the threshold decides", bound=at_least(1)
    )
    threshold: float | Literal["search"] | None = option(
        'largest distance at which clusters merge, in degrees, which depends on the data; "search" chooses it on '
        "held-out training rows, as FLAG does; None (ours) takes the smallest after which the next merge is farther by "
        "two fifths, and which leaves at most `clusters`",
        default=None,
        bound=NOT_NEGATIVE,
    )
    interval: float = option(
        "step of the searched threshold as a part of the last merge's, from 1 down to 0",
        default=0.05,
        bound=STEP,
        used=SEARCHED,
    )
    num_vectors: int = option(
        "p, principal vectors per class; where they are many for the features, all clients span the same",
        default=1,
        bound=at_least(1),
    )
    angles: Literal["smallest", "sum"] = option(
        'the "smallest" principal angle between two spans, or the "sum" of all, which grows with their dimensions: it '
        "compares only clients that have equally many classes. (The paper's Eq. 4 is neither)",
        default="smallest",
    )

    @property
    def searches(self) -> bool:
        """Whether the threshold is searched for."""
        return self.threshold == "search"

    def check(self) -> None:
        if self.threshold == "search":
            # Refused here rather than in `init`.
            _ = self.search_update

    def measure(self, data: ClientData, num_classes: int) -> Array:
        """The principal vectors of one client's classes, f32[L, f, p]."""
        data = shown_rows(data)
        flat = data.x.reshape(data.x.shape[0], -1).astype(jnp.float32)
        return clustering.principal_vectors(flat, data.y, data.num_examples, num_classes, self.num_vectors)

    @parallel.kept_program(static_argnames="self")
    def shown_vectors(self, rng_key: Array, vectors: Array, present: Array) -> Array:
        """What the server sees of the clients' vectors f32[M, L, f, p] under privacy; zeros of the absent."""
        assert self.privacy is not None
        keys = jax.vmap(client_key, (None, 0))(rng_key, jnp.arange(len(vectors)))
        shown = jax.lax.map(lambda row: self.privacy.shown(*row), (keys, vectors))  # pyright: ignore
        return jnp.where(present[:, None, None, None], shown, 0.0)

    def unprotected(self, privacy: gaussian) -> str | None:
        if self.threshold == "search":
            return "threshold is 'search', which trains on the clients' rows without noise; give a number, or none"
        return None

    def times_shown(self, rounds: int) -> int:
        return 1

    @parallel.kept_program(static_argnames="self")
    def measure_all(self, population: Population) -> Mapped:
        return parallel.for_each_client(
            lambda client: self.measure(client.data, population.info.num_classes),
            parallel.whole_population(population),
            collect=lambda vectors: vectors,
        )

    def init(self, rng_key: Array, population: Population) -> tuple[State, RoundInfo]:
        models, there = start_models(self.model, rng_key, population, self.clusters)
        check_classes("pacfl", population.info, population.data)
        check_square(self.name, len(there), COMPARED)
        present = np.asarray(there)
        features = int(np.prod(population.info.input_shape))
        if self.num_vectors > features:
            raise ValueError(
                f"num_vectors is {self.num_vectors}, but an example has {features} features; give at most {features}"
            )

        with progress_note("PACFL: principal vectors of every client") as note:
            mapped = parallel.fetched(self.measure_all(population))
            known = mapped.accepted
            vectors = jnp.where(known[:, None, None, None], mapped.collected, 0.0)
            if self.privacy is not None:
                # Whose vectors were not finite shows noise, as who is left out would be told apart.
                known, vectors = present, self.shown_vectors(jax.random.fold_in(rng_key, 1), vectors, there)
            note("PACFL: comparing all pairs of clients")
            between, comparing = clocked(compare, vectors, angles=self.angles)
            grow = functools.partial(clustering.dendrogram, linkage=self.linkage)
            merges, merging = clocked(lambda *arrays: grow(arrays[0], mask=arrays[1]), between, known)
            threshold, search, effort = self.find_threshold(rng_key, population, merges, int(known.sum()), note)
        label = with_largest(np.asarray(clustering.cut_dendrogram(merges, threshold)), present)
        number = int(label.max()) + 1
        check_found("pacfl", number, self.clusters, f"{threshold:g}°")
        models = models._replace(active=jnp.arange(self.clusters) < number)
        clients = Clients(one_hot(jnp.asarray(label), self.clusters), jnp.asarray(present), vectors)
        size = model_size(self.model, population)
        light = effort.models * model_size(self.light, population) / size
        costs = Costs(
            models_down=light,
            models_up=light + vectors_sent(np.asarray(vectors)) / size,
            gradient_evaluations=effort.gradients,
            loss_evaluations=effort.evaluations,
            clusterings=1.0,
            clustering_seconds=comparing + merging,
        )
        server = Server(between, jnp.asarray(threshold, jnp.float32), jax.tree.map(jnp.asarray, search))
        state, _ = first_state(models, clients, self.optimizer, server)
        return state, clustering_info(self.clusters, costs, present, known)

    def first_programs(self, rng_key: Array, state: State, population: Population) -> tuple[FirstProgram, ...]:
        mapped = jax.eval_shape(lambda of: self.measure_all(of), population)
        compared, fewer = {"angles": self.angles}, "fewer clients, or fewer num_vectors"
        return (
            FirstProgram("every client's vectors", pacfl.measure_all, (self, population)),
            FirstProgram("comparing all pairs", compare, (mapped.collected,), compared, fewer, alone=True),
        )

    def find_threshold(
        self, rng_key: Array, population: Population, merges: clustering.Dendrogram, count: int, note: Callable
    ) -> tuple[float, Any, Effort]:
        """The threshold in degrees, and what its search found, () without one; of the `count` clients compared."""
        heights = np.asarray(merges.heights)[: max(count - 1, 0)]
        if self.threshold is None:
            # Two clients a cluster at least: the first merges, of whoever is nearest, are far apart by chance.
            return first_gap(heights, min(self.clusters, count // 2)), (), Effort(0, 0, 0)
        if self.threshold != "search":
            return self.threshold, (), Effort(0, 0, 0)
        last = np.float32(max(heights.max(initial=0.0), SMALLEST_ANGLE))
        grid = threshold_grid(self.interval)
        tried = cuts(merges._replace(heights=merges.heights / last), grid)
        search, effort = self.search(jax.random.fold_in(rng_key, 0), population, tried, grid, note)
        search = search._replace(thresholds=(search.thresholds + np.float32(ROUNDING)) * last)
        return float(search.thresholds[int(search.chosen)]), search, effort

    def admit(self, rng_key: Array, state: State, data: ClientData, index: Array) -> State:
        clients = state.clients
        vectors = self.measure(data, clients.vectors.shape[1])
        vectors = jnp.where(tree.all_finite(vectors), vectors, 0.0)
        row = Clients(jnp.zeros(self.clusters), jnp.asarray(True), vectors)
        clients = tree.scatter(clients, index, row)
        between = compare(clients.vectors, self.angles)
        to_clusters = cluster_distances(between[index], clients.membership, clients.present, self.linkage)
        # NOTE: PACFL clusters again; here nobody changes, and a newcomer farther away than clusters merge opens one, as
        # long as there are slots.
        active = state.clusters.active
        apart = (to_clusters.min() > state.server.threshold) & ~active.all()
        slot = jnp.where(apart, jnp.argmin(active), jnp.argmin(to_clusters)).astype(jnp.int32)
        membership = tree.scatter(clients.membership, index, one_hot(slot, self.clusters))
        clusters = state.clusters._replace(active=active.at[slot].set(True))
        return State(
            clusters, clients._replace(membership=membership), state.server._replace(angles=between), state.round
        )

    def snapshot(self, state: State) -> Mapping[str, Any]:
        """The angles, the clusters, and the threshold with its search, for plots."""
        angles, threshold, search = state.server
        curve = search._asdict() if search else {}
        return {"angles": angles, "threshold": threshold, "labels": labels(state.clients.membership), **curve}


def first_gap(heights: np.ndarray, most: int) -> float:
    """The smallest merge distance after which the next is farther by GAP, and which leaves at most `most` clusters.

    Args:
      heights: distances of the merges, ascending.
      most: clusters; where no gap leaves so few, all merge.

    >>> first_gap(np.array([1.0, 1.1, 1.2, 5.0, 6.0]), most=5)
    1.2
    >>> first_gap(np.array([1.0, 1.1, 1.2, 1.3]), most=5)
    1.3
    """
    gaps = np.flatnonzero(heights[1:] > GAP * np.maximum(heights[:-1], SMALLEST_ANGLE))
    fine = gaps[len(heights) - gaps <= most]
    return float(heights[fine[0]]) if len(fine) else float(heights[-1]) if len(heights) else 0.0


@parallel.kept_program(static_argnames="angles")
def compare(vectors: Array, angles: Literal["smallest", "sum"]) -> Array:
    """Angles f32[M, M] in degrees between the spans of the clients' vectors f32[M, L, f, p]."""
    # NOTE: "sum" is not the paper's Eq. 4, which is the trace of arccos(UᵢᵀUⱼ), the angles between vectors of the same
    # place in both clients' lists: these depend on the bases, principal angles on the spans alone.
    # NOTE: the vectors of different classes are not orthogonal to each other. The public code measures angles between
    # them as they are; principal angles need an orthonormal basis of what they span.
    bases = jax.lax.map(clustering.joint_basis, vectors)
    nonempty = jnp.ones((bases.shape[0], 1), jnp.int32)
    return clustering.classwise_angles(bases[:, None], nonempty, angles)[:, :, 0]
