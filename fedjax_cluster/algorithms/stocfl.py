"""StoCFL: clusters that merge as clients are heard, beside one model of all (Zeng et al. 2023, arXiv:2303.00897)."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from fedjax_cluster import clustering, parallel, tree
from fedjax_cluster.algorithms.method import AveragingMethod, Defaults
from fedjax_cluster.algorithms.round import (
    Trained,
    check_memory,
    cluster_round,
    cluster_variables,
    cohort_labels,
    first_in_all_slots,
    first_state,
    labels,
    one_hot,
    size_of,
    start_models,
)
from fedjax_cluster.algorithms.threshold_search import ROUNDING
from fedjax_cluster.clustering.similarity import matmul
from fedjax_cluster.cohorts import cohort_size
from fedjax_cluster.local import client_key
from fedjax_cluster.marked_clients import run_beside, shown_rows
from fedjax_cluster.options import NOT_NEGATIVE, Bound, at_least, changed, option
from fedjax_cluster.parallel import Client
from fedjax_cluster.server import Weighting, params_part, with_optimizer
from fedjax_cluster.types import (
    ONE_DEVICE,
    ClientData,
    ClientMapping,
    Clusters,
    Cohort,
    LocalUpdate,
    Population,
    RoundInfo,
    State,
    Variables,
)

COSINE = Bound(lambda value: -1 <= value <= 1, "-1 to 1")


class Server(NamedTuple):
    """What StoCFL's server keeps beside the cluster models."""

    anchor: Variables  # ψ, from which every client moves once
    common: Clusters  # ω, in a single slot
    shown: Array  # f32[K, d], sum of the movements Ψ of a cluster's clients
    heard: Array  # f32[K], how many these are
    settled: Array  # bool[], no two clusters are to be united until somebody new is heard


class Clients(NamedTuple):
    """What StoCFL keeps of its clients."""

    membership: Array  # f32[M, K], one-hot; zero for the absent and for those who were not heard
    present: Array  # bool[M]
    counted: Array  # i32[M], 1 + the cluster in whose `shown` a client is, also while it is absent; 0: not heard


class Joined(NamedTuple):
    """Clusters after merging, of K before and C clients that are new."""

    shown: Array  # f32[K, d]
    heard: Array  # f32[K]
    moved: Array  # i32[K], where the clients of each former cluster are now
    slot: Array  # i32[C], where each new client is; −1 for who is not new
    source: Array  # i32[K], the former cluster whose model each has now, if not its own; −1: ω


class stocfl(AveragingMethod):
    r"""Stochastic clustered federated learning: clusters merge where their clients move an anchor model alike.

    Once, when it is first in a round, client i sends Ψ_i = ψ − (ψ trained on its data), and is a cluster of its own.
    Clusters whose mean Ψ have a cosine of at least τ become one. Then every client of the round moves its cluster's
    model by f_i(θ) + λ/2·‖θ − ω‖² and the common model ω by f_i(ω); the server takes the means.

    NOTE: every cluster may be compared with every other; in the public code those of the round's clients are, and a
    cluster's Ψ is the mean over these, for which it keeps every client's.

    NOTE: there are as many slots as `clusters`. Where clients that are heard would need more, those merge whose
    cosine is largest, although it is below τ; the paper has no such limit.

    Returns:
      A method in which a client that was not heard yet has no cluster, and is evaluated with ω.

    Raises:
      ValueError: an option out of its bound, or a local update that has no proximal term.

    >>> from fedjax_cluster import local, nn
    >>> stocfl(nn.linear(), clusters=8, local=local.sgd(0.1, batch_size=8, epochs=1)).cluster_update.proximal
    0.05
    """

    not_private = "sends a movement of the anchor and changes of two models, of which no budget is settled"
    clusters_by = "shown"
    defaults = Defaults(finds_clusters=True)

    local: LocalUpdate = option("the steps of the common model, and of the cluster's with λ in addition")
    clusters: int = option("the most clusters there can be; how many there are, τ decides", bound=at_least(1))
    tau: float = option("τ, cosine from which on clusters merge", default=0.5, bound=COSINE)
    proximal: float = option("λ, the pull of the common model on the clusters'", default=0.05, bound=NOT_NEGATIVE)
    anchor_epochs: int | None = option(
        "passes over its data in which a client moves the anchor; None: as it trains in a round",
        default=None,
        bound=at_least(1),
    )
    weighting: Weighting = option('"uniform" as in the public code, or "examples"', default="uniform")

    def check(self) -> None:
        # Refused here rather than in the first round.
        _ = self.cluster_update, self.anchor_update

    @property
    def cluster_update(self) -> LocalUpdate:
        """What a client does with its cluster's model."""
        return changed(self.local, "given a proximal term", proximal=self.proximal)

    @property
    def anchor_update(self) -> LocalUpdate:
        """What a client does with the anchor."""
        passes = {} if self.anchor_epochs is None else {"epochs": self.anchor_epochs, "steps": None}
        return changed(self.local, "given other epochs", **passes)

    def init(self, rng_key: Array, population: Population) -> tuple[State, RoundInfo]:
        models, present = start_models(self.model, rng_key, population, self.clusters)
        models = first_in_all_slots(models)
        anchor = cluster_variables(models, jnp.zeros((), jnp.int32))
        first = tree.broadcast(anchor, 1)
        common = Clusters(first.params, first.stats, jnp.ones(1, bool))
        size, heard = tree.size(anchor.params), cohort_size(self.participation, len(present))
        # Movements as they come and beside the clusters', and their cosines, merges and links.
        what = f"the movements of {heard} clients who are heard first"
        check_memory(self.name, 4.0 * heard * (2 * size + 3 * heard), what, "let fewer take part in a round")
        server = Server(
            anchor,
            with_optimizer(common, self.optimizer),
            jnp.zeros((self.clusters, size)),
            jnp.zeros(self.clusters),
            jnp.asarray(False),
        )
        clients = Clients(jnp.zeros((len(present), self.clusters)), present, jnp.zeros(len(present), jnp.int32))
        return first_state(models, clients, self.optimizer, server)

    # ----------------------------------------------------------------------------------------- clusters

    def movement(self, rng_key: Array, anchor: Variables, client: Client) -> tuple[Array, Array]:
        """Ψ f32[d] of one client, and the gradient steps i32[] that it took."""
        key, rows = client_key(rng_key, client.index), shown_rows(client.data)
        result = run_beside(self.anchor_update, key, self.model, anchor, rows, round=0)
        return -tree.ravel(result.delta).astype(jnp.float32), jnp.asarray(result.num_steps, jnp.int32)

    def hear(self, rng_key: Array, state: State, cohort: Cohort) -> tuple[State, Array, Array]:
        """The state with the cohort's new clients in clusters, how many moved, and the new ones' steps f32[]."""
        server, known = state.server, cohort_labels(state, cohort) >= 0
        nothing = jnp.zeros(server.shown.shape[1]), jnp.zeros((), jnp.int32)

        def told(client: Client, known: Array) -> tuple[Array, Array, Array]:
            shown, steps = parallel.unless(known, nothing, lambda: self.movement(rng_key, server.anchor, client))
            return shown, steps, size_of(shown)

        mapped = parallel.for_each_client(told, cohort, known, collect=lambda output: output)
        shown, steps, _ = mapped.collected
        new = cohort.mask & ~known & mapped.accepted
        state, number, slot = self.join(state, jnp.where(new[:, None], shown, 0.0), new, cohort.index)
        membership = one_hot(slot, self.clusters)
        membership = parallel.scatter_rows(cohort, state.clients.membership, membership, new)
        counted = parallel.scatter_rows(cohort, state.clients.counted, slot + 1, new)
        clients = Clients(membership, state.clients.present, counted)
        number += new.sum(dtype=jnp.int32)
        return state._replace(clients=clients), number, steps.sum().astype(jnp.float32)

    def join(self, state: State, arrived: Array, new: Array, index: Array) -> tuple[State, Array, Array]:
        """The state with clusters merged, how many clients that moves, and the slots i32[C] of the new ones.

        Those come with f32[C, d].
        """
        clients, server = state.clients, state.server
        members = clients.membership.sum(0)
        found = merge(server.shown, server.heard, members, arrived, new, index, self.tau)
        active = jnp.where(jnp.any(found.heard > 0), found.heard > 0, state.clusters.active)

        def taken(own: Array, common: Array) -> Array:
            known = (found.source >= 0).reshape((-1,) + (1,) * (own.ndim - 1))
            return jnp.where(known, own[jnp.maximum(found.source, 0)], common[:1])

        clusters = jax.tree.map(taken, state.clusters, server.common)._replace(active=active)
        membership = matmul(clients.membership, one_hot(found.moved, self.clusters))
        counted = jnp.where(clients.counted > 0, 1 + found.moved[clients.counted - 1], 0)
        moves = found.moved != jnp.arange(self.clusters)
        server = server._replace(shown=found.shown, heard=found.heard, settled=~jnp.any(moves) & ~jnp.any(new))
        state = State(clusters, Clients(membership, clients.present, counted), server, state.round)
        return state, jnp.sum(jnp.where(moves, members, 0.0)).astype(jnp.int32), found.slot

    # ----------------------------------------------------------------------------------------- a round

    def step(self, rng_key: Array, state: State, cohort: Cohort) -> tuple[State, RoundInfo]:
        before = cohort_labels(state, cohort)
        new = cohort.mask & (before < 0)
        arrives = jnp.any(new)
        unsettled = ~arrives & ~state.server.settled

        def hear(carry: tuple[State, Array, Array]) -> tuple[State, Array, Array]:
            return self.hear(rng_key, carry[0], cohort)

        def join(carry: tuple[State, Array, Array]) -> tuple[State, Array, Array]:
            return *self.join(carry[0], *nobody(state.server))[:2], carry[2]

        carry = parallel.run_if(arrives, hear, (state, jnp.zeros((), jnp.int32), jnp.zeros(())), cohort.mapping)
        state, moved, steps = parallel.run_if(unsettled, join, carry, cohort.mapping)
        slot, common = cohort_labels(state, cohort), cluster_variables(state.server.common, jnp.zeros((), jnp.int32))

        def train(client: Client, slot: Array) -> Trained:
            start = cluster_variables(state.clusters, jnp.maximum(slot, 0))
            key = client_key(rng_key, client.index)
            result = self.cluster_update.run(
                key, self.model, start, client.data, anchor=common.params, round=state.round
            )
            return Trained(slot, result)

        def train_common(client: Client) -> Trained:
            # NOTE: of the same mini-batches; the public code shuffles neither.
            key = client_key(rng_key, client.index)
            result = self.update.run(key, self.model, common, client.data, round=state.round)
            return Trained(jnp.zeros((), jnp.int32), result)

        usual: dict[str, Any] = {
            "optimizer": self.optimizer,
            "weighting": self.weighting,
            "aggregation": self.aggregation,
        }
        done = cluster_round(train, state.clusters, cohort, slot, **usual)
        of_all = cluster_round(train_common, state.server.common, cohort, **usual)
        costs = jax.tree.map(jnp.add, done.costs(cohort.mask), of_all.costs(cohort.mask))
        heard = new.sum().astype(jnp.float32)
        # The anchor too, Ψ back; who opens a cluster has its model, ω, already, and at the start ω is the anchor.
        opened = new & (one_hot(jnp.where(new, slot, -1), self.clusters).sum(0) == state.server.heard)[slot]
        held = jnp.sum((opened & (slot >= 0)).astype(jnp.float32)) + jnp.where(state.round == 0, heard, 0.0)
        costs = costs._replace(
            models_down=costs.models_down + heard - held,
            models_up=costs.models_up + params_part(state.clusters) * heard,
            gradient_evaluations=costs.gradient_evaluations + steps,
            clusterings=(arrives | unsettled).astype(jnp.float32),
        )
        done = done._replace(accepted=done.accepted & (slot >= 0))  # of others the movement is not finite
        server = state.server._replace(common=of_all.clusters)
        return State(done.clusters, state.clients, server, state.round + 1), done.info(cohort.mask, moved, costs)

    def personalize(self, rng_key: Array, state: State, data: ClientData, index: Array) -> tuple[Variables, Array]:
        slot = labels(state.clients.membership[index])
        own = cluster_variables(state.clusters, jnp.maximum(slot, 0))
        common = cluster_variables(state.server.common, jnp.zeros((), jnp.int32))
        return tree.broadcast(tree.where(slot >= 0, own, common), 1), jnp.ones(1)

    def admit(self, rng_key: Array, state: State, data: ClientData, index: Array) -> State:
        # Who has been heard before is counted already, and is where what it is counted with is.
        counted = state.clients.counted[index]
        row = Clients(one_hot(counted - 1, self.clusters), jnp.asarray(True), counted)
        back = state._replace(clients=tree.scatter(state.clients, index, row))
        return tree.where(counted > 0, back, self.welcomed(rng_key, state, data, index))

    def welcomed(self, rng_key: Array, state: State, data: ClientData, index: Array) -> State:
        """The state with a client that was not heard before."""
        client = Client(index, jnp.asarray(True), data, None)
        shown, _ = self.movement(rng_key, state.server.anchor, client)
        finite, server = jnp.isfinite(size_of(shown)), state.server
        shown = jnp.where(finite, shown, 0.0)
        there = jnp.append(server.heard > 0, finite)
        cosine = clustering.cosine_similarity(jnp.concatenate([server.shown, shown[None]]), there)[-1, :-1]
        cosine = jnp.where(there[:-1], cosine, -jnp.inf)
        # Whoever it links is united in the next round, which trains the clusters that come of it; nobody moves here.
        opens = (cosine.max() < self.tau) & ~there[:-1].all()
        slot = jnp.where(opens, jnp.argmin(there[:-1]), jnp.argmax(cosine))

        def started(own: Array, common: Array) -> Array:
            return own.at[slot].set(jnp.where(opens & finite, common[0], own[slot]))

        clusters = jax.tree.map(started, state.clusters, server.common)
        active = state.clusters.active & (there[:-1] | ~jnp.any(there)) | (jnp.arange(self.clusters) == slot) & finite
        server = server._replace(
            shown=server.shown.at[slot].add(shown),
            heard=server.heard.at[slot].add(finite.astype(jnp.float32)),
            settled=server.settled & ~finite,
        )
        slot = jnp.where(finite, slot, -1)
        row = Clients(one_hot(slot, self.clusters), jnp.asarray(True), (slot + 1).astype(jnp.int32))
        clients = tree.scatter(state.clients, index, row)
        return State(clusters._replace(active=active), clients, server, state.round)

    def cluster(self, rng_key: Array, state: State, mapping: ClientMapping = ONE_DEVICE) -> Array:
        """Clusters that are alike united; a client that was not heard has none."""
        return labels(self.join(state, *nobody(state.server))[0].clients.membership)


def nobody(server: Server) -> tuple[Array, Array, Array]:
    """No new client, as `join` takes them."""
    return jnp.zeros((0, server.shown.shape[1])), jnp.zeros(0, bool), jnp.zeros(0, jnp.int32)


def merge(shown: Array, heard: Array, members: Array, arrived: Array, new: Array, index: Array, tau: float) -> Joined:
    """Clusters united as long as two have a cosine of τ, and as there are more than K.

    All pairs of today are compared once: what is linked by a chain of pairs becomes one.

    Args:
      shown: f32[K, d], sums of movements; heard f32[K], of how many clients; members f32[K], how many these are now.
      arrived: f32[C, d], movements of the clients index i32[C], of whom new bool[C] count.
      tau: the least cosine.

    >>> two = jnp.asarray([[2.0, 0.0], [0.0, 1.0]])
    >>> sizes, one = jnp.asarray([2.0, 1.0]), jnp.ones(1, jnp.int32)
    >>> found = merge(two, sizes, sizes, two[:1], one > 0, one, 0.5)
    >>> found.slot.tolist(), found.shown.tolist()
    ([0], [[4.0, 0.0], [0.0, 1.0]])
    """
    slots = len(heard)
    there = jnp.concatenate([heard > 0, new])
    vectors = jnp.concatenate([shown, arrived])
    links = clustering.dendrogram(1 - clustering.cosine_similarity(vectors, there), "single", there)
    left = there.sum(dtype=jnp.int32) - (links.heights <= 1 - tau + ROUNDING).sum(dtype=jnp.int32)
    label = clustering.cut_dendrogram(links, num_clusters=jnp.minimum(left, slots))

    of_former = jnp.where(label[:slots] < 0, slots, label[:slots])
    every = jnp.arange(slots, dtype=jnp.int32)
    # A united cluster stays in the first slot of its parts, one of new clients alone takes a slot that is free.
    first = jnp.full(slots, slots, jnp.int32).at[of_former].min(every, mode="drop")
    is_kept = jnp.zeros(slots, bool).at[first].set(True, mode="drop")
    free = jnp.argsort(is_kept, stable=True).astype(jnp.int32)
    # By their smallest clients, whatever the order in which devices have these.
    who = jnp.full(slots, jnp.iinfo(jnp.int32).max).at[jnp.where(label[slots:] < 0, slots, label[slots:])]
    rank = jnp.argsort(jnp.argsort(jnp.where(first < slots, -1, who.min(index, mode="drop")))) - (first < slots).sum()
    target = jnp.where(first < slots, first, free[jnp.maximum(rank, 0)])
    size = jnp.where(of_former[None] == every[:, None], members[None] + 1.0, 0.0)  # united cluster by former one
    largest = jnp.where(first < slots, jnp.argmax(size, 1), -1).astype(jnp.int32)

    place = jnp.where(label < 0, -1, target[jnp.maximum(label, 0)])
    into = jnp.where(place < 0, slots, place)
    counts = jnp.concatenate([heard, new.astype(jnp.float32)])
    in_use = every <= label.max()
    return Joined(
        shown=jnp.zeros_like(shown).at[into].add(vectors, mode="drop"),
        heard=jnp.zeros_like(heard).at[into].add(counts, mode="drop"),
        moved=jnp.where(place[:slots] < 0, every, place[:slots]),
        slot=place[slots:],
        source=every.at[jnp.where(in_use, target, slots)].set(largest, mode="drop"),
    )
