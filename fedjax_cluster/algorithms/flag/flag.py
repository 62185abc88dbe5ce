"""FLAG: clusters from the clients' data and gradients, found once before training (Algorithms 1–3)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedjax_cluster import clustering, parallel, tree
from fedjax_cluster.algorithms import one_shot_landmarks
from fedjax_cluster.algorithms.flag import landmarks as by_landmarks
from fedjax_cluster.algorithms.flag.state import (
    Clients,
    LandmarkMatrices,
    LandmarkServer,
    Matrices,
    Measured,
    Sent,
    Server,
    compare,
)
from fedjax_cluster.algorithms.method import Defaults, FirstProgram
from fedjax_cluster.algorithms.one_shot import (
    SearchingMethod,
    check_classes,
    check_found,
    clocked,
    clustering_info,
    heard,
    largest_cluster,
    model_bytes,
    nearest_cluster,
    progress_note,
    shapes_of,
    until_heard,
    vectors_sent,
    with_largest,
    without_silent,
)
from fedjax_cluster.algorithms.one_shot_landmarks import Joined, check_pairs, landmarks_among, with_joined
from fedjax_cluster.algorithms.round import (
    HardClients,
    first_model,
    first_state,
    initial_info,
    labels,
    one_hot,
    start_models,
)
from fedjax_cluster.algorithms.threshold_search import Effort, Search, cuts, given_threshold, no_search, threshold_grid
from fedjax_cluster.local import client_key
from fedjax_cluster.marked_clients import shown_rows
from fedjax_cluster.nn.precision import in_32_bits
from fedjax_cluster.options import UNIT, Bound, at_least, changed, option
from fedjax_cluster.parallel import Client, Mapped
from fedjax_cluster.server import params_part
from fedjax_cluster.types import ClientData, Clusters, Costs, LocalUpdate, Population, RoundInfo, State, Variables

COMPARED = 8  # arrays of 4 bytes a pair at the same time, by the compiler's figures: V, G, A and what makes them
PART = Bound(lambda value: 0 < value <= 1, "a part of a class's examples, above 0 and up to 1")


class flag(SearchingMethod):
    """Clustered federated learning combining data and gradient information.

    Before training every client sends principal vectors of each class and its change Δ_i after t_g local epochs from a
    common start; A = β·V̂ + (1−β)·Ĝ joins the classwise angles V between the data and the angles G between the
    changes; agglomerative clustering of A merges up to the distance α; then every cluster runs federated averaging.

    Returns:
      A method that clusters in `init`; V, G, A and the curve of α are in the snapshot before the first round.

    Raises:
      ValueError: an option out of its bound; in `init`, more clusters at a given threshold than `clusters`, or examples
        without classes.

    >>> from fedjax_cluster import local, nn
    >>> flag(nn.lenet5(), clusters=10, local=local.sgd(0.01, batch_size=10, epochs=10), participation=0.2).name
    'flag'
    """

    clusters_by = "shown"
    not_private = "clusters by bases, class sizes and changes together, and searches on held-out rows; none is settled"

    defaults = Defaults(
        learning_rate=0.03,
        local_steps=None,
        local_epochs=2,
        momentum=0.5,
        batch_size=20,
        participation=0.2,
        rounds=60,
        clients=100,
        finds_clusters=True,
    )

    local: LocalUpdate = option(
        "what a client does in a round; its optimiser and mini-batches also serve the t_g epochs and the search"
    )
    clusters: int = option(
        "the most clusters there can be; how many there are, FLAG finds. The search passes over thresholds with more, "
        "and warns where its elbow is one of them",
        bound=at_least(1),
    )
    beta: float = option("β, the part of the data in A", default=0.5, bound=UNIT)
    delta: float = option("δ: class sizes weight angles by 1 − δ to 1 + δ", default=0.5, bound=UNIT)
    gradient_epochs: int = option(
        "t_g, local epochs before Δ_i is sent. With 0 no gradient is compared: Ĝ = 0 and A = β·V̂, which reaches only "
        "up to β; for the data alone give β = 1 as well",
        default=20,
        bound=at_least(0),
    )
    max_vectors: int = option("the most principal vectors per class", default=3, bound=at_least(1))
    vector_share: float = option(
        "principal vectors per class as a share of its examples, at least 1 vector", default=0.01, bound=PART
    )
    angles: Literal["smallest", "sum"] = option(
        'per class the "smallest" principal angle, or the "sum" of all, which grows with the number of vectors: it '
        "compares only clients that send equally many",
        default="smallest",
    )
    share_class_counts: bool = option(
        "False keeps class sizes from the server, and weights all angles equally", default=True
    )
    threshold: float | None = option("α; None searches it (Algorithm 3)", default=None, bound=UNIT)
    landmarks: int | None = option(
        "(ours) m, landmark clients, drawn at random: these alone are compared pairwise and clustered, and every other "
        "client joins the cluster to whose landmarks it is nearest, as newcomers do. None compares all pairs, as the "
        "paper does",
        default=None,
        bound=at_least(2),
    )
    newcomers: bool = option(
        "keeps what clients sent, in memory and checkpoints, so that others can join later by proximity", default=True
    )

    def check(self) -> None:
        # Refused here rather than in `init`.
        _ = self.search_update, self.gradient_update

    @property
    def searches(self) -> bool:
        """Whether the threshold is searched for."""
        return self.threshold is None

    @property
    def gradient_update(self) -> LocalUpdate | None:
        """The t_g epochs before the clustering."""
        if not self.gradient_epochs:
            return None
        return changed(self.local, "given t_g epochs (or gradient_epochs=0)", steps=None, epochs=self.gradient_epochs)

    # ------------------------------------------------------------------------------ what a client sends

    def measure(self, rng_key: Array, start: Variables, num_classes: int, client: Client) -> Measured:
        x, y, number = data = shown_rows(client.data)
        rows = jnp.arange(y.shape[0]) < number
        counts = jnp.sum((jax.nn.one_hot(y, num_classes) > 0) & rows[:, None], axis=0, dtype=jnp.int32)
        flat = x.reshape(x.shape[0], -1).astype(jnp.float32)
        rank = min(self.max_vectors, flat.shape[1])
        vectors = clustering.principal_vectors(flat, y, number, num_classes, rank, self.vector_share)
        if not self.share_class_counts:
            counts = (counts > 0).astype(jnp.int32)
        if self.gradient_update is None:
            return Measured(vectors, counts, jnp.zeros_like(tree.ravel(start.params)), jnp.zeros((), jnp.int32))
        key = client_key(rng_key, client.index)
        result = self.gradient_update.run(key, self.model, start, data, round=0)
        return Measured(vectors, counts, tree.ravel(result.delta), jnp.asarray(result.num_steps, jnp.int32))

    @parallel.kept_program(static_argnames="self")
    def measure_all(
        self, rng_key: Array, population: Population, start: Variables, landmarks: Array | None = None
    ) -> Mapped:
        """What all clients send, or the landmarks i32[m] alone."""
        measure = functools.partial(self.measure, rng_key, start, population.info.num_classes)
        return one_shot_landmarks.measure_all(measure, population, landmarks)

    @parallel.kept_program(static_argnames="self")
    def join_all(
        self, rng_key: Array, population: Population, start: Variables, landmarks: Sent, membership: Array
    ) -> Mapped:
        """The cluster i32[M] to whose landmarks, one-hot in `membership` f32[m, K], each client is nearest."""
        # NOTE: ours. The paper compares all pairs of clients.
        measure = functools.partial(self.measure, rng_key, start, population.info.num_classes)
        scales = by_landmarks.scales_of(landmarks, self.comparison)
        given = scales, self.comparison, membership, landmarks.known, self.linkage
        numbers = tree.size(shapes_of(self.model, population)) + landmarks.vectors[0].size
        at_a_time = one_shot_landmarks.clients_at_a_time(numbers, population)
        return one_shot_landmarks.join(measure, population, functools.partial(by_landmarks.placed, *given), at_a_time)

    @property
    def comparison(self) -> dict[str, Any]:
        """The options of `compare`."""
        return {"angles": self.angles, "delta": self.delta, "beta": self.beta}

    # ------------------------------------------------------------------------------------------- init

    def init(self, rng_key: Array, population: Population) -> tuple[State, RoundInfo]:
        models, there = start_models(self.model, rng_key, population, self.clusters)
        check_classes("flag", population.info, population.data)
        check_pairs(self.name, self.landmarks, population, int(np.asarray(there).sum()), COMPARED)
        start_key, measure_key, search_key = jax.random.split(jax.random.fold_in(rng_key, 0), 3)
        present = np.asarray(there)
        start = jax.device_get(first_model(start_key, self.model, population.info))

        landmarks = landmarks_among(jax.random.fold_in(rng_key, 1), self.landmarks, there)
        compared, who = (present, "client") if landmarks is None else (present[np.asarray(landmarks)], "landmark")
        with progress_note(f"FLAG: principal vectors and local training of every {who}") as note:
            mapped, asked = heard(self.measure_all, measure_key, compared, population, start, landmarks)
            measured: Measured = without_silent(mapped)
            sent = Sent(measured.vectors, measured.counts, measured.update, jnp.asarray(mapped.accepted))
            note(f"FLAG: comparing all pairs of {who}s")
            matrices, comparing = clocked(compare, *sent, **self.comparison)
            grow = functools.partial(clustering.dendrogram, linkage=self.linkage)
            dendrogram, merging = clocked(grow, matrices.proximity, mask=sent.known)
            search, effort = self.find_threshold(search_key, population, dendrogram, note, landmarks)
            alpha = search.thresholds[int(search.chosen)]
            label = np.asarray(cuts(dendrogram, alpha[None])[0])
            check_found("flag", int(label.max(initial=-1)) + 1, self.clusters, f"α = {alpha:g}")
            if landmarks is None:
                each = vectors_sent(np.asarray(mapped.collected.vectors)), np.asarray(mapped.collected.num_steps)
            else:
                note("FLAG: local training of every client, and the landmarks to which it is nearest")
                membership = one_hot(jnp.asarray(label), self.clusters)
                first = asked
                mapped, asked = heard(self.join_all, measure_key, present, population, start, sent, membership)
                asked[np.asarray(landmarks)] = first
                joined: Joined = mapped.collected
                each = np.asarray(joined.numbers), np.asarray(joined.num_steps)
                label = with_joined(label, landmarks, mapped)
        known = label >= 0
        label = with_largest(label, present)

        models = models._replace(active=jnp.arange(self.clusters) <= int(label.max()))
        state = self.assemble(models, label, present, sent, start, matrices, search, landmarks)
        numbers, steps = (float(np.sum(asked * of_client, dtype=float)) for of_client in each)
        costs = self.initial_costs(population, numbers, steps, effort, float(asked.sum()))
        # What each client takes to compare itself with landmarks is not on the server's clock.
        costs = costs._replace(clustering_seconds=comparing + merging)
        return state, clustering_info(self.clusters, costs, present, known)

    def find_threshold(
        self,
        rng_key: Array,
        population: Population,
        dendrogram: clustering.Dendrogram,
        note: Callable[[str], Any],
        landmarks: Array | None = None,
    ) -> tuple[Search, Effort]:
        """Algorithm 3, or the given threshold; with landmarks, these alone take part in the search."""
        if self.threshold is not None:
            return given_threshold(dendrogram, self.threshold), Effort(0, 0, 0)
        thresholds = threshold_grid(self.interval)
        return self.search(rng_key, population, cuts(dendrogram, thresholds), thresholds, note, landmarks)

    def initial_costs(
        self, population: Population, numbers: float, steps: float, effort: Effort, asked: float
    ) -> Costs:
        """Of `numbers` in principal vectors and local `steps` each time a client is asked, and of the search."""
        size = model_bytes(self.model, population)
        light = effort.models * model_bytes(self.light, population) / size
        trained = asked if self.gradient_epochs else 0.0
        return Costs(
            models_down=trained + light,
            # What was trained shows its parameters alone.
            models_up=params_part(shapes_of(self.model, population)) * trained + light + 4 * numbers / size,
            gradient_evaluations=steps + effort.gradients,
            loss_evaluations=effort.evaluations,
            clusterings=1.0,
        )

    def assemble(
        self,
        models: Clusters,
        label: np.ndarray,
        present: Any,
        sent: Sent,
        start: Variables,
        matrices: Matrices,
        search: Search,
        landmarks: Array | None,
    ) -> State:
        """The state before the first round from what was measured and found."""
        membership, present = one_hot(jnp.asarray(label), self.clusters), jnp.asarray(present)
        clients = HardClients(membership, present)
        kept = jax.device_put(start) if self.newcomers else None
        found = jax.tree.map(jnp.asarray, search)
        server: Server | LandmarkServer = Server(kept, matrices, found)
        if landmarks is not None:
            among = LandmarkMatrices(*matrices)
            server = LandmarkServer(kept, among, found, landmarks, sent if self.newcomers else None)
        elif self.newcomers:
            clients = Clients(membership, present, *sent)
        return first_state(models, clients, self.optimizer, server)[0]

    def template(self, rng_key: Array, population: Population) -> tuple[State, RoundInfo]:
        start = first_model(rng_key, self.model, population.info)
        landmarks = None if self.landmarks is None else jnp.arange(self.landmarks)
        mapped = jax.eval_shape(lambda *arrays: self.measure_all(*arrays), rng_key, population, start, landmarks)
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), mapped)
        measured, known = zeros.collected, zeros.accepted
        many = len(known)
        matrices = Matrices(*[jnp.zeros((many, many))] * 3)
        tried = len(threshold_grid(self.interval)) if self.threshold is None else 1
        models, present = start_models(self.model, rng_key, population, self.clusters)
        label = np.where(np.asarray(present), 0, -1)  # rows that fill up devices stay as they are here
        sent = Sent(measured.vectors, measured.counts, measured.update, known)
        state = self.assemble(models, label, present, sent, start, matrices, no_search(tried), landmarks)
        return state, initial_info(self.clusters)

    def first_programs(self, rng_key: Array, state: State, population: Population) -> tuple[FirstProgram, ...]:
        start = jax.eval_shape(lambda key: self.model.init(key, population.info), rng_key)
        landmarks = None if self.landmarks is None else jax.ShapeDtypeStruct((self.landmarks,), jnp.int32)
        given = rng_key, population, start, landmarks
        mapped = jax.eval_shape(lambda *arrays: self.measure_all(*arrays), *given)
        vectors, counts, updates, _ = mapped.collected
        sent = Sent(vectors, counts, updates, mapped.accepted)
        instead = "landmarks, who alone are compared pairwise, or fewer of them"
        who, compared = ("client", "pairs") if landmarks is None else ("landmark", "pairs of landmarks")
        measuring = FirstProgram(f"what every {who} sends", flag.measure_all, (self, *given))
        comparing = FirstProgram(f"comparing all {compared}", compare, sent, self.comparison, instead, alone=True)
        if landmarks is None:
            return measuring, comparing
        membership = jax.ShapeDtypeStruct((self.landmarks, self.clusters), jnp.float32)
        what = "the landmarks to which every client is nearest"
        joining = FirstProgram(what, flag.join_all, (self, rng_key, population, start, sent, membership))
        return measuring, comparing, joining

    # ------------------------------------------------------------------------------------ newcomers, plots

    @property
    def admit(self):
        return self.join_by_proximity if self.newcomers else None

    @in_32_bits
    def join_by_proximity(self, rng_key: Array, state: State, data: ClientData, index: Array) -> State:
        """The state with a client that joins the cluster to which it is nearest."""
        clients, landmarks = state.clients, self.landmarks is not None
        row = Client(index, jnp.asarray(True), data, None)
        compared = state.server.sent if landmarks else clients

        def ask(key: Array) -> tuple[Measured, Array]:
            sent = self.measure(key, state.server.start, compared.counts.shape[1], row)
            return sent, tree.all_finite(sent)

        measured, finite = until_heard(ask, rng_key)
        measured = jax.tree.map(lambda leaf: jnp.where(finite, leaf, jnp.zeros_like(leaf)), measured)
        if landmarks:
            return self.join_by_landmarks(state, measured, finite, index)
        unassigned = Clients(
            jnp.zeros(self.clusters), jnp.asarray(True), measured.vectors, measured.counts, measured.update, finite
        )
        clients = tree.scatter(clients, index, unassigned)
        compared = clients.present & clients.known
        matrices = compare(clients.vectors, clients.counts, clients.updates, compared, **self.comparison)
        slot = nearest_cluster(matrices.proximity[index], clients.membership, compared, self.linkage)
        others = compared & (clients.membership > 0).any(1)
        slot = jnp.where(finite & others.any(), slot, largest_cluster(clients.membership))
        membership = tree.scatter(clients.membership, index, one_hot(slot, self.clusters))
        return state._replace(
            clients=clients._replace(membership=membership), server=state.server._replace(matrices=matrices)
        )

    def join_by_landmarks(self, state: State, measured: Measured, finite: Array, index: Array) -> State:
        """The state with a client that sent `measured`, in the cluster to whose landmarks it is nearest."""
        clients, server = state.clients, state.server
        known = server.sent.known & clients.present[server.landmarks]
        one = jax.tree.map(lambda leaf: leaf[None], measured)
        # Those of the clustering: among two landmarks that are left nothing is near or far.
        scales = by_landmarks.scales_of(server.sent, self.comparison)
        distance = by_landmarks.distances_to(scales, one, self.comparison)[0]
        slot = nearest_cluster(distance, clients.membership[server.landmarks], known, self.linkage)
        slot = jnp.where(finite & known.any(), slot, largest_cluster(clients.membership))
        row = HardClients(one_hot(slot, self.clusters), jnp.asarray(True))
        return state._replace(clients=tree.scatter(clients, index, row))

    def snapshot(self, state: State) -> Mapping[str, Any]:
        """V, G, A, of the landmarks where there are some, the curve of α and the clusters, for plots."""
        server, label = state.server, labels(state.clients.membership)
        which = {} if self.landmarks is None else {"landmarks": server.landmarks}
        return {**server.matrices._asdict(), **server.search._asdict(), **which, "labels": label}
