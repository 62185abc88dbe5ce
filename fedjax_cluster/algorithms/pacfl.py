"""PACFL: clusters from the principal angles between the clients' data (Vahidian et al. 2023, Algorithm 1)."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedjax_cluster import clustering, parallel, tree
from fedjax_cluster.algorithms import one_shot_landmarks
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
    largest_cluster,
    model_bytes,
    nearest_cluster,
    progress_note,
    vectors_sent,
    with_largest,
)
from fedjax_cluster.algorithms.one_shot_landmarks import Joined, check_pairs, landmarks_among, numbers_sent, with_joined
from fedjax_cluster.algorithms.round import HardClients, first_state, initial_info, labels, one_hot, start_models
from fedjax_cluster.algorithms.threshold_search import ROUNDING, Effort, cuts, no_search, threshold_grid
from fedjax_cluster.clustering.dissimilarity import angles_between
from fedjax_cluster.local import client_key
from fedjax_cluster.marked_clients import shown_rows
from fedjax_cluster.options import NOT_NEGATIVE, at_least, option
from fedjax_cluster.parallel import Client, Mapped
from fedjax_cluster.privacy.gaussian import SHOWN, gaussian
from fedjax_cluster.types import ClientData, Clusters, Costs, Population, RoundInfo, State

LOG = logging.getLogger(__name__)
COMPARED = 10  # arrays of 4 bytes a pair at the same time: the angles, and SciPy's copies in 8 bytes
GAP, SMALLEST_ANGLE = 1.4, 0.1  # between two merges' angles, as a ratio; degrees, within which float32 is not exact


class Clients(NamedTuple):
    """What PACFL keeps of its clients, so that newcomers can be compared with them."""

    membership: Array  # f32[M, K], one-hot
    present: Array  # bool[M]
    vectors: Array  # f32[M, L, f, p], principal vectors of each class


class Server(NamedTuple):
    angles: Array  # f32[M, M], in degrees
    threshold: Array  # f32[], largest angle at which clusters merge
    search: Any  # Search, with thresholds in degrees; () where none was made

    BETWEEN_CLIENTS = ("angles",)


class LandmarkServer(NamedTuple):
    """What the server keeps with landmarks, so that newcomers can be compared with them."""

    angles: Array  # f32[m, m], of the landmarks
    threshold: Array  # f32[], as in `Server`
    search: Any  # as in `Server`
    landmarks: Array  # i32[m], ascending
    vectors: Array  # f32[m, L, f, p]
    known: Array  # bool[m], whose vectors were finite


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
        "two fifths, and which leaves at most `clusters`, and two clients a cluster on average",
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
    landmarks: int | None = option(
        "(ours) m, landmark clients, drawn at random: these alone are compared pairwise and clustered, and every other "
        "client joins the cluster to whose landmarks it is nearest, however far that is, as newcomers then do. None "
        "compares all pairs, as the paper does",
        default=None,
        bound=at_least(2),
    )

    @property
    def searches(self) -> bool:
        """Whether the threshold is searched for."""
        return self.threshold == "search"

    def check(self) -> None:
        if self.threshold == "search":
            # Refused here rather than in `init`.
            _ = self.search_update

    def unprotected(self, privacy: gaussian) -> str | None:
        if self.threshold == "search":
            return "threshold is 'search', which trains on the clients' rows without noise; give a number, or none"
        return None

    def times_shown(self, rounds: int) -> int:
        return 1

    # ------------------------------------------------------------------------------ what a client sends

    def measure(self, rng_key: Array, num_classes: int, client: Client) -> Array:
        """The principal vectors of one client's classes, f32[L, f, p]; under privacy what the server sees of them."""
        data = shown_rows(client.data)
        flat = data.x.reshape(data.x.shape[0], -1).astype(jnp.float32)
        vectors = clustering.principal_vectors(flat, data.y, data.num_examples, num_classes, self.num_vectors)
        return vectors if self.privacy is None else self.privacy.shown(client_key(rng_key, client.index), vectors)

    @parallel.kept_program(static_argnames="self")
    def measure_all(self, rng_key: Array, population: Population, landmarks: Array | None = None) -> Mapped:
        """What all clients send, or the landmarks i32[m] alone."""
        measure = functools.partial(self.measure, rng_key, population.info.num_classes)
        return one_shot_landmarks.measure_all(measure, population, landmarks)

    @parallel.kept_program(static_argnames="self")
    def join_all(
        self, rng_key: Array, population: Population, vectors: Array, known: Array, membership: Array
    ) -> Mapped:
        """The cluster i32[M] to whose landmarks, one-hot in `membership` f32[m, K], each client is nearest."""
        # NOTE: ours. The paper compares all pairs of clients.
        measure = functools.partial(self.measure, rng_key, population.info.num_classes)
        bases = bases_of(vectors)

        def placed(sent: Array) -> Joined:
            between = angles_between_bases(bases_of(sent), bases, self.angles)
            slot = jax.vmap(nearest_cluster, (0, None, None, None))(between, membership, known, self.linkage)
            return Joined(slot, numbers_sent(sent), jnp.zeros_like(slot))

        # Its vectors and their basis, and the products of the basis with the landmarks'.
        numbers = 2 * vectors[0].size + len(bases) * bases.shape[2] ** 2
        at_a_time = one_shot_landmarks.clients_at_a_time(numbers, population)
        return one_shot_landmarks.join(measure, population, placed, at_a_time)

    # ------------------------------------------------------------------------------------------- init

    def init(self, rng_key: Array, population: Population) -> tuple[State, RoundInfo]:
        models, there = start_models(self.model, rng_key, population, self.clusters)
        check_classes("pacfl", population.info, population.data)
        check_pairs(self.name, self.landmarks, population, int(np.asarray(there).sum()), COMPARED)
        present = np.asarray(there)
        features = int(np.prod(population.info.input_shape))
        if self.num_vectors > features:
            raise ValueError(
                f"num_vectors is {self.num_vectors}, but an example has {features} features; give at most {features}"
            )

        measure_key = jax.random.fold_in(rng_key, 1)
        landmarks = landmarks_among(jax.random.fold_in(rng_key, 2), self.landmarks, there)
        who = "client" if landmarks is None else "landmark"
        with progress_note(f"PACFL: principal vectors of every {who}") as note:
            mapped = parallel.fetched(self.measure_all(measure_key, population, landmarks))
            known = mapped.accepted
            vectors = jnp.where(known[:, None, None, None], mapped.collected, 0.0)
            note(f"PACFL: comparing all pairs of {who}s")
            between, comparing = clocked(compare, vectors, angles=self.angles)
            grow = functools.partial(clustering.dendrogram, linkage=self.linkage)
            merges, merging = clocked(lambda *arrays: grow(arrays[0], mask=arrays[1]), between, known)
            found = self.find_threshold(rng_key, population, merges, int(known.sum()), note, landmarks)
            threshold, search, effort = found
            label = np.asarray(clustering.cut_dendrogram(merges, threshold))
            check_found("pacfl", int(label.max()) + 1, self.clusters, f"{threshold:g}°")
            numbers = float(vectors_sent(np.asarray(vectors)).sum())
            if landmarks is not None:
                note("PACFL: the landmarks to which every client is nearest")
                membership = one_hot(jnp.asarray(label), self.clusters)
                mapped = parallel.fetched(self.join_all(measure_key, population, vectors, known, membership))
                label = with_joined(label, landmarks, mapped)
                numbers = float(np.sum(mapped.collected.numbers))
        heard = label >= 0
        label = with_largest(label, present)
        server = Server(between, jnp.asarray(threshold, jnp.float32), jax.tree.map(jnp.asarray, search))
        state = self.assemble(models, label, present, server, vectors, known, landmarks)
        size = model_bytes(self.model, population)
        light = effort.models * model_bytes(self.light, population) / size
        costs = Costs(
            models_down=light,
            models_up=light + 4 * numbers / size,
            gradient_evaluations=effort.gradients,
            loss_evaluations=effort.evaluations,
            clusterings=1.0,
            # What each client takes to compare itself with landmarks is not on the server's clock.
            clustering_seconds=comparing + merging,
        )
        return state, clustering_info(self.clusters, costs, present, heard)

    def assemble(
        self,
        models: Clusters,
        label: np.ndarray,
        present: Any,
        server: Server,
        vectors: Array,
        known: Any,
        landmarks: Array | None,
    ) -> State:
        """The state before the first round from what was measured and found."""
        models = models._replace(active=jnp.arange(self.clusters) <= int(label.max()))
        membership, present = one_hot(jnp.asarray(label), self.clusters), jnp.asarray(present)
        if landmarks is None:
            return first_state(models, Clients(membership, present, vectors), self.optimizer, server)[0]
        kept = LandmarkServer(*server, landmarks, vectors, jnp.asarray(known))
        return first_state(models, HardClients(membership, present), self.optimizer, kept)[0]

    def template(self, rng_key: Array, population: Population) -> tuple[State, RoundInfo]:
        models, present = start_models(self.model, rng_key, population, self.clusters)
        landmarks = None if self.landmarks is None else jnp.arange(self.landmarks)
        mapped = jax.eval_shape(lambda *arrays: self.measure_all(*arrays), rng_key, population, landmarks)
        vectors, known = (jnp.zeros(leaf.shape, leaf.dtype) for leaf in (mapped.collected, mapped.accepted))
        search = no_search(len(threshold_grid(self.interval))) if self.searches else ()
        server = Server(jnp.zeros((len(known), len(known))), jnp.zeros(()), jax.tree.map(jnp.asarray, search))
        label = np.where(np.asarray(present), 0, -1)  # rows that fill up devices stay as they are here
        return self.assemble(models, label, present, server, vectors, known, landmarks), initial_info(self.clusters)

    def first_programs(self, rng_key: Array, state: State, population: Population) -> tuple[FirstProgram, ...]:
        landmarks = None if self.landmarks is None else jax.ShapeDtypeStruct((self.landmarks,), jnp.int32)
        given = self, rng_key, population, landmarks
        mapped = jax.eval_shape(lambda *arrays: self.measure_all(*arrays), *given[1:])
        compared, who = {"angles": self.angles}, "client" if landmarks is None else "landmark"
        fewer = "landmarks, who alone are compared pairwise, or fewer of them; or fewer num_vectors"
        measuring = FirstProgram(f"every {who}'s vectors", pacfl.measure_all, given)
        comparing = FirstProgram(
            f"comparing all pairs of {who}s", compare, (mapped.collected,), compared, fewer, alone=True
        )
        if landmarks is None:
            return measuring, comparing
        membership = jax.ShapeDtypeStruct((self.landmarks, self.clusters), jnp.float32)
        what = "the landmarks to which every client is nearest"
        sent = mapped.collected, mapped.accepted
        return measuring, comparing, FirstProgram(what, pacfl.join_all, (*given[:3], *sent, membership))

    def find_threshold(
        self,
        rng_key: Array,
        population: Population,
        merges: clustering.Dendrogram,
        count: int,
        note: Callable,
        landmarks: Array | None,
    ) -> tuple[float, Any, Effort]:
        """The threshold in degrees, and what its search found, () without one; of the `count` clients compared."""
        heights = np.asarray(merges.heights)[: max(count - 1, 0)]
        if self.threshold is None:
            # Two clients a cluster at least: the first merges, of whoever is nearest, are far apart by chance.
            most = min(self.clusters, count // 2)
            threshold = first_gap(heights, most)
            if len(heights) and threshold == heights[-1]:
                LOG.warning(
                    "pacfl: no two merges that leave %d clusters or fewer are a factor of %g apart, so all clients are "
                    'one cluster; threshold="search" chooses on held-out rows',
                    most,
                    GAP,
                )
            return threshold, (), Effort(0, 0, 0)
        if self.threshold != "search":
            return self.threshold, (), Effort(0, 0, 0)
        last = np.float32(max(heights.max(initial=0.0), SMALLEST_ANGLE))
        grid = threshold_grid(self.interval)
        tried = cuts(merges._replace(heights=merges.heights / last), grid)
        search, effort = self.search(jax.random.fold_in(rng_key, 0), population, tried, grid, note, landmarks)
        search = search._replace(thresholds=(search.thresholds + np.float32(ROUNDING)) * last)
        return float(search.thresholds[int(search.chosen)]), search, effort

    # ------------------------------------------------------------------------------------ newcomers, plots

    def admit(self, rng_key: Array, state: State, data: ClientData, index: Array) -> State:
        compared = state.clients.vectors if self.landmarks is None else state.server.vectors
        vectors = self.measure(rng_key, compared.shape[1], Client(index, jnp.asarray(True), data, None))
        finite = tree.all_finite(vectors)
        vectors = jnp.where(finite, vectors, 0.0)
        if self.landmarks is not None:
            return self.join_by_landmarks(state, vectors, finite, index)
        row = Clients(jnp.zeros(self.clusters), jnp.asarray(True), vectors)
        clients = tree.scatter(state.clients, index, row)
        between = compare(clients.vectors, self.angles)
        # Who was never heard is in the largest cluster, at a right angle to all.
        heard = clients.present & (jnp.abs(clients.vectors).max((1, 2, 3)) > 0)
        to_clusters = cluster_distances(between[index], clients.membership, heard, self.linkage)
        # NOTE: PACFL clusters again; here nobody changes, and a newcomer farther away than clusters merge opens one, as
        # long as there are slots that nobody is in; those that all have left come last.
        active, empty = state.clusters.active, clients.membership.sum(0) == 0
        apart = (to_clusters.min() > state.server.threshold) & empty.any()
        free = jnp.argmax(jnp.where(empty, 2 - active.astype(jnp.int32), 0))
        slot = jnp.where(apart, free, jnp.argmin(to_clusters)).astype(jnp.int32)
        slot = jnp.where(finite, slot, largest_cluster(state.clients.membership))
        membership = tree.scatter(clients.membership, index, one_hot(slot, self.clusters))
        clusters = state.clusters._replace(active=active.at[slot].set(True))
        return State(
            clusters, clients._replace(membership=membership), state.server._replace(angles=between), state.round
        )

    def join_by_landmarks(self, state: State, vectors: Array, finite: Array, index: Array) -> State:
        """The state with a client of these vectors f32[L, f, p], in the cluster to whose landmarks it is nearest."""
        clients, server = state.clients, state.server
        known = server.known & clients.present[server.landmarks]
        between = angles_between_bases(bases_of(vectors[None]), bases_of(server.vectors), self.angles)[0]
        slot = nearest_cluster(between, clients.membership[server.landmarks], known, self.linkage)
        slot = jnp.where(finite & known.any(), slot, largest_cluster(clients.membership))
        row = HardClients(one_hot(slot, self.clusters), jnp.asarray(True))
        return state._replace(clients=tree.scatter(clients, index, row))

    def snapshot(self, state: State) -> Mapping[str, Any]:
        """The angles, of the landmarks where there are some, the clusters, the threshold and its search, for plots."""
        angles, threshold, search = state.server[:3]
        curve = search._asdict() if search else {}
        which = {} if self.landmarks is None else {"landmarks": state.server.landmarks}
        return {"angles": angles, "threshold": threshold, "labels": labels(state.clients.membership), **curve, **which}


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
    bases = bases_of(vectors)
    nonempty = jnp.ones((bases.shape[0], 1), jnp.int32)
    return clustering.classwise_angles(bases[:, None], nonempty, angles)[:, :, 0]


def bases_of(vectors: Array) -> Array:
    """Orthonormal bases f32[B, f, q] of what the clients' vectors f32[B, L, f, p] span."""
    # NOTE: the vectors of different classes are not orthogonal to each other. The public code measures angles between
    # them as they are; principal angles need an orthonormal basis of what they span.
    return jax.lax.map(clustering.joint_basis, vectors)


def angles_between_bases(bases: Array, others: Array, angles: Literal["smallest", "sum"]) -> Array:
    """Angles f32[B, m] in degrees between the spans of bases f32[B, f, q] and f32[m, f, q]."""
    one, other = (jnp.ones((len(rows), 1), jnp.int32) for rows in (bases, others))
    return angles_between(bases[:, None], one, others[:, None], other, angles)[:, :, 0]
