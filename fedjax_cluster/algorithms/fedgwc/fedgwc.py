"""FedGWC: recursive splits by how clients' losses lie among their cohort's (Licciardi et al., ICML 2025)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from fedjax_cluster import cohorts, parallel
from fedjax_cluster.algorithms.fedgwc import all_pairs, landmark_pairs
from fedjax_cluster.algorithms.fedgwc import weighting as weigh
from fedjax_cluster.algorithms.fedgwc.weighting import Clients, Sent
from fedjax_cluster.algorithms.method import AveragingMethod, Defaults
from fedjax_cluster.algorithms.round import (
    Trained,
    cluster_round,
    first_in_all_slots,
    first_state,
    labels,
    nearest_by_loss,
    one_hot,
    reassign,
    start_models,
)
from fedjax_cluster.lifting import is_zero
from fedjax_cluster.local import server_key
from fedjax_cluster.options import BELOW_ONE, NOT_NEGATIVE, POSITIVE, SHARE, at_least, changed, option
from fedjax_cluster.parallel import Client
from fedjax_cluster.privacy.gaussian import SHOWN, gaussian
from fedjax_cluster.server import Weighting
from fedjax_cluster.types import (
    ONE_DEVICE,
    ClientData,
    ClientMapping,
    Cohort,
    LocalUpdate,
    Population,
    RoundInfo,
    Selection,
    State,
)

Rate = float | Literal["participation", "count"]
Variant = Literal["paper", "released"]
Perceived = Literal["rows", "columns"]
MOST_CHILDREN = 4
AS_IN_PAPER = ('variant="paper"', lambda method: method.variant == "paper")


class Standing(NamedTuple):
    """What the draws depend on, until a cluster is split."""

    clients: cohorts.Standing
    wanted: Array  # i32[K], clients of each cluster in a round
    first: tuple[Array, Array] | None  # landmarks, and how many of each cluster


class fedgwc(AveragingMethod):
    """Clustered federated learning by Gaussian weighting (Algorithms 1 and 2).

    ω_i = mean_s exp(−(l_{i,s} − m_s)²/2σ_s²) among the cohort of i's cluster; P_ij ← (1−α) P_ij + α ω_i for all pairs
    of the cohort. Once P has come to rest in a cluster, W_ij = exp(−β‖v_i − v_j‖²) of its rows is clustered spectrally
    for n = 2 … n_max; the n of least Davies–Bouldin index on the rows of W splits the cluster, if that is below 1.
    Losses count at the steps that the whole cohort of a cluster takes.

    Returns:
      A method; a split is an event, whose snapshot is P, W, the labels before and after, and the averages.

    >>> from fedjax_cluster import local, nn
    >>> fedgwc(nn.linear(), clusters=4, local=local.sgd(0.1, batch_size=8, steps=7)).rate
    'count'
    """

    sends = SHOWN
    clusters_by = "shown"
    fewest_landmarks = 2
    fewest_in_cohort: ClassVar[Any] = property(lambda self: 1 if self.released else 3)
    defaults = Defaults(local_steps=7, participation=0.1, rounds=1500, clients=100, finds_clusters=True)

    clusters: int = option("K_max, slots; a split that finds too few left is refused, and counted", bound=at_least(1))
    server: optax.GradientTransformation | None = option(
        "any optax transformation of minus the mean change; None is plain averaging. A child inherits its state",
        default=None,
    )
    rate: Rate = option(
        'α; "count" (ours) is 1/(times i and j met), so that P is the mean reward, and counts start again from 1 after '
        'a split; "participation" is the paper\'s, constant, the share of clients in a round, with which P shows for '
        "thousands of rounds who met whom",
        default="count",
        bound=SHARE,
        used=('variant="paper"', lambda method: method.variant == "paper" or method.rate == "participation"),
    )
    tolerance: float = option(
        "ε; a cluster is tested when the running average (from 1, with coefficient α or the participation) of its mean "
        "squared change of P has been below ε for `patience` rounds",
        default=1e-5,
        bound=POSITIVE,
    )
    beta: float = option("β of the affinity", default=0.5, bound=POSITIVE)
    patience: int | None = option("rounds; None is ⌈clients/cohort⌉ of the cluster", default=None, bound=at_least(1))
    max_children: int | None = option(
        "n_max; None is min(⌊clients/cohort⌋, 4) of the cluster, which never splits one whose clients all take part",
        default=None,
        bound=at_least(2),
    )
    smallest: int = option(
        "clients that each child of a split must have; ours, after Theorem A.5's K_min: else cohorts are everybody",
        default=3,
        bound=at_least(1),
        used=AS_IN_PAPER,
    )
    sampling: Literal["rare", "uniform"] = option(
        '"rare" draws clients with probability ∝ 1/(1 + times seen), "uniform" all alike',
        default="rare",
        used=AS_IN_PAPER,
    )
    centre: bool | None = option(
        "(ours) takes each row's mean off P before the affinity, so that only the company counts; None does where P "
        "has a counted rate",
        default=None,
    )
    perceived: Perceived | None = option(
        'what of P tells clients apart: its "rows" (the paper: how each is rewarded in the company of the others) or '
        '"columns" (the public code: how the others are in its company, in which a client\'s own difficulty is common '
        "to all and cancels); None is that of the variant",
        default=None,
    )
    variant: Variant = option(
        '"released" is the public code where it differs from the paper: P starts at 1/M², moments weighted by '
        "examples, rewards divided by their sum, affinity of min-max-scaled P with a zero diagonal, `cluster_qr`, "
        "index on the spectral embedding, change divided by cohort², α = cohort/|cluster|, cohorts of one size, "
        "uniform sampling, any size of a child",
        default="paper",
    )
    landmarks: int | None = option(
        "(ours) m, landmark clients: P keeps its columns of these alone, M × m numbers, a cluster's landmarks are "
        "clustered, and every other client joins the child whose landmarks are most like it, or, if it was in no "
        "cohort, the cluster of least loss when it first is; half of a cluster's landmarks, drawn anew, are in each of "
        "its cohorts. None keeps P of all pairs, as the paper does",
        default=None,
        bound=at_least(2),
    )
    weighting: Weighting = option('"examples" or "uniform": FairAvg inside FedGWC', default="examples")
    server_momentum: float = option("FedAvgM in FedGWC, as `fedavgm`", default=0.0, bound=BELOW_ONE, shapes=is_zero)
    proximal: float | None = option(
        "FedProx inside FedGWC, as in `fedprox`; None leaves `local` unchanged", default=None, bound=NOT_NEGATIVE
    )
    participation: float = option(
        "ρ; a cluster's cohort is max(⌈ρ·clients⌉, 3), all of a smaller cluster", default=0.1, bound=SHARE
    )

    def check(self) -> None:
        if self.landmarks is not None and self.by_columns:
            raise ValueError(
                "landmarks is given, but clients are told apart by the columns of P, which are those of the landmarks "
                "alone; give variant 'paper' and perceived 'rows', or no landmarks"
            )
        if self.centre and self.released:
            raise ValueError("centre is ours, but variant is 'released', the public code as it is; give one of them")
        _ = self.update  # refused here rather than in the first round

    @property
    def update(self) -> LocalUpdate:
        if self.proximal is None:
            return self.local
        return changed(self.local, "given a proximal term", proximal=self.proximal)

    @property
    def server_step(self) -> optax.GradientTransformation:
        plain = super().server_step
        return plain if is_zero(self.server_momentum) else optax.chain(optax.trace(self.server_momentum), plain)

    @property
    def released(self) -> bool:
        return self.variant == "released"

    @property
    def counted(self) -> bool:
        """Whether the rate of a pair falls with the times that it met."""
        return self.rate == "count" and not self.released

    @property
    def rows_centred(self) -> bool:
        """Whether each row's mean is taken off P."""
        return self.counted if self.centre is None else self.centre

    @property
    def by_columns(self) -> bool:
        """Whether clients are told apart by the columns of P."""
        return self.released if self.perceived is None else self.perceived == "columns"

    @property
    def children_bound(self) -> int:
        return MOST_CHILDREN if self.max_children is None else self.max_children

    @property
    def pairs(self):
        """The form of the interactions: a module with one function for each thing that is done with them."""
        return all_pairs if self.landmarks is None else landmark_pairs

    def init(self, rng_key: Array, population: Population) -> tuple[State, RoundInfo]:
        models, present = start_models(self.model, rng_key, population, self.clusters)
        models = first_in_all_slots(models)
        slot = jnp.where(present, 0, -1).astype(jnp.int32)
        first = Clients(one_hot(slot, self.clusters), present, jnp.zeros(len(present)), slot)
        clients, server = self.pairs.begin(self, rng_key, first)
        state, info = first_state(models, clients, self.optimizer, server)
        self.warn_of_no_splits(state)
        return state, info

    def warn_of_no_splits(self, state: State) -> None:
        if self.clusters == 1 or self.max_children is not None or int(self.most_children(state)[0]) >= 2:
            return
        weigh.warn_of_no_splits(*(int(number[0]) for number in self.sizes(state)))

    # ------------------------------------------------------------------------------------- cohorts

    def sizes(self, state: State) -> tuple[Array, Array]:
        """Clients of each cluster and of its cohort, i32[K]."""
        by_landmarks = self.landmarks is not None
        count = state.server.members if by_landmarks else landmark_pairs.members_of(state.clients.membership)
        if not self.released:
            most = len(state.clients.present)
            return count, cohorts.cluster_cohort_sizes(self.participation, count, most)
        return count, jnp.minimum(cohorts.wanted_clients(self.participation, state.clients.present), count)

    def standing(self, state: State) -> Standing:
        seen = state.clients.seen if self.sampling == "rare" and not self.released else None
        wanted = self.sizes(state)[1]
        first = None if self.landmarks is None else landmark_pairs.company(state, wanted)
        label = labels(state.clients.membership) if first is None else state.clients.drawn_with
        return Standing(cohorts.standing(label, seen), wanted, first)

    def draw(self, rng_key: Array, standing: Standing) -> tuple[Selection, Standing]:
        size = len(standing.clients.label)
        if self.released:
            capacity = min(size, cohorts.cohort_size(self.participation, size) * self.clusters)
        else:
            capacity = cohorts.largest_cluster_cohorts(self.participation, size, self.clusters)
        drawn = cohorts.per_cluster_of(rng_key, standing.clients, standing.wanted, capacity, first=standing.first)
        return drawn, standing._replace(clients=cohorts.seen_once_more(standing.clients, drawn))

    def recounted(self, state: State) -> State:
        return state if self.landmarks is None else landmark_pairs.drawn_anew(state)

    # ------------------------------------------------------------------------------------- rounds

    def step(self, rng_key: Array, state: State, cohort: Cohort) -> tuple[State, RoundInfo]:
        membership, seen = parallel.gather_rows(cohort, (state.clients.membership, state.clients.seen))
        choosing = None if self.landmarks is None else landmark_pairs.choosing(state, cohort, seen)
        now = None if choosing is None else choosing[0]
        anybody = jnp.asarray(False) if now is None else jnp.any(now)

        def train(client: Client, slot: Array, chooses: Array | None) -> Trained:
            if chooses is not None:
                slot = landmark_pairs.chosen(self, state, client.data, slot, chooses, anybody)
            result = weigh.train_and_tell(rng_key, self.update, self.model, state.clusters, slot, client, state.round)
            return Trained(slot, result, weigh.told(rng_key, self.update, self.privacy, client, result.losses))

        slot = jnp.maximum(labels(membership), 0)
        averaged = {"optimizer": self.optimizer, "weighting": self.weighting, "aggregation": self.aggregation}
        averaged |= {"private": self.private(rng_key, state.clusters)}
        done = cluster_round(train, state.clusters, cohort, slot, now, **averaged)
        clients = state.clients._replace(seen=parallel.scatter_rows(cohort, state.clients.seen, seen + 1.0))
        costs, came = done.costs(cohort.mask), jnp.int32(0)
        server, chosen = state.server, done.slot
        if choosing is not None:
            server = landmark_pairs.moved(server, cohort, slot, done.slot)
            chosen = landmark_pairs.chosen_after(self, done.clusters, cohort, done.slot, choosing[1])
            # Written once in a round: between two writes all clients' rows would be copied.
            membership, came = reassign(cohort, clients.membership, chosen, cohort.mask)
            clients = clients._replace(membership=membership)
            costs = landmark_pairs.choice_costs(self, done.clusters, cohort, *choosing, costs)
        state = State(done.clusters, clients, server, state.round + 1)
        # Of what is shown under privacy nothing is left out: that would tell of a client.
        heard = done.accepted if self.privacy is None else cohort.mask
        sent = (cohort.index, cohort.data.num_examples, done.slot, done.extra, done.reports.num_steps, heard)
        state = self.pairs.learn(self, state, cohort, Sent(*sent))
        if choosing is not None:
            state = state._replace(server=landmark_pairs.moved(state.server, cohort, done.slot, chosen))

        refused = state.server.refused
        resting = jnp.any(self.ready(state))

        def test(carry: tuple[State, Array]) -> tuple[State, Array]:
            return self.test(server_key(rng_key), carry[0], cohort.mapping)

        # Rows of landmarks stay divided among the devices.
        tested = parallel.on_each_device(test, cohort.mapping) if self.landmarks is None else test
        state, moved = parallel.run_if(resting, tested, (state, jnp.int32(0)), cohort.mapping)
        if self.landmarks is not None:
            state = state._replace(server=state.server._replace(alike=moved > 0))
        costs = costs._replace(clusterings=resting.astype(jnp.float32))
        # Only the first refusal stops the rounds: the same split is found again and again.
        event = (moved > 0) | ((refused == 0) & (state.server.refused > 0))
        return state, done.info(cohort.mask, came + moved, costs, event)

    def unprotected(self, privacy: gaussian) -> str | None:
        if self.landmarks is not None:
            return "landmarks are in more rounds than others, so that no draw is of equal chances; give none"
        return weigh.unprotected(self.sampling, self.released, self.local)

    def times_shown(self, rounds: int) -> int:
        return rounds

    def coefficient(self, count: Array, wanted: Array) -> Array:
        """A constant α of each cluster, f32[K], with `count` f32[K] clients and `wanted` f32[K] in its cohort."""
        constant = self.participation if isinstance(self.rate, str) else self.rate
        return wanted / jnp.maximum(count, 1.0) if self.released else jnp.full(self.clusters, constant)

    # ------------------------------------------------------------------------------------- splits

    def most_children(self, state: State) -> Array:
        """n_max of each cluster, i32[K]."""
        count, wanted = self.sizes(state)
        if self.max_children is None:
            return jnp.minimum(count // jnp.maximum(wanted, 1), MOST_CHILDREN)
        return jnp.minimum(count, self.max_children)

    def ready(self, state: State) -> Array:
        """bool[K]: clusters to test."""
        count, wanted = self.sizes(state)
        needed = (count + wanted - 1) // jnp.maximum(wanted, 1) if self.patience is None else self.patience
        return state.clusters.active & (state.server.calm >= needed) & (self.most_children(state) > 1)

    def find_split(self, rng_key: Array, state: State, mapping: ClientMapping) -> tuple[Array, weigh.Partition]:
        """FedGW_Cluster, the server's clustering, on the first cluster that has come to rest."""
        # NOTE: Algorithm 2 tests all that are ready in the same round; here the others follow in the next rounds, so
        # that every split is an event of its own.
        parent = jnp.argmax(self.ready(state)).astype(jnp.int32)
        most, free = self.most_children(state)[parent], jnp.sum((~state.clusters.active).astype(jnp.int32))
        return parent, self.pairs.divide(self, rng_key, state, parent, most, free, mapping)

    def cluster(self, rng_key: Array, state: State, mapping: ClientMapping = ONE_DEVICE) -> Array:
        parent, found = self.find_split(rng_key, state, mapping)
        together = jnp.where(labels(state.clients.membership) == parent, 0, -1).astype(jnp.int32)
        return jnp.where(found.number > 1, self.pairs.children(self, state, parent, found, mapping), together)

    def test(self, rng_key: Array, state: State, mapping: ClientMapping = ONE_DEVICE) -> tuple[State, Array]:
        """One cluster is tested, and split; how many clients that moves, i32[]."""
        parent, found = self.find_split(rng_key, state, mapping)
        server, first = state.server, found.refused & (state.server.refused == 0)
        server = server._replace(
            tested=server.average[parent],
            average=server.average.at[parent].set(1.0),
            calm=server.calm.at[parent].set(0),
            parent=parent,
            index=found.index,
            refused=server.refused + found.refused.astype(jnp.int32),
        )

        def remember(clients: Any) -> Any:
            return clients._replace(previous=labels(clients.membership))

        def split(carry: tuple[State, Array]) -> tuple[State, Array]:
            return self.split(carry[0]._replace(clients=remember(carry[0].clients)), parent, found, mapping)

        # Most tests split nothing, and go through no number of every client then.
        clients = parallel.run_if(first, remember, state.clients, mapping)
        state = state._replace(server=server, clients=clients)
        return parallel.run_if(found.number > 1, split, (state, jnp.int32(0)), mapping)

    def split(self, state: State, parent: Array, found: weigh.Partition, mapping: ClientMapping) -> tuple[State, Array]:
        """The largest child keeps its parent's slot, the others take free ones; all start from the parent's model."""
        models, label = state.clusters, state.clients.previous
        child = self.pairs.children(self, state, parent, found, mapping)
        children = jax.nn.one_hot(child, self.children_bound).sum(0)
        rank = jnp.argsort(jnp.argsort(-children, stable=True), stable=True)
        unused = jnp.argsort(models.active, stable=True)
        places = jnp.concatenate([parent[None], unused])[jnp.minimum(rank, self.clusters)]
        new = jnp.where(label == parent, places[child], label)

        slots = jnp.arange(self.clusters)
        born = jnp.any((slots[:, None] == places[None]) & (children > 0)[None], axis=1)
        source = jnp.where(born, parent, slots)
        heirs = jax.tree.map(lambda leaf: leaf[source], models)
        if self.counted:
            state = self.pairs.count_anew(state, label == parent)
        clients, server = state.clients, state.server
        state = state._replace(
            clusters=heirs._replace(active=models.active | born),
            clients=clients._replace(membership=one_hot(new, self.clusters)),
            server=server._replace(average=jnp.where(born, 1.0, server.average), calm=jnp.where(born, 0, server.calm)),
        )
        moved = jnp.sum((clients.present & (new != label)).astype(jnp.int32))
        return self.recounted(state), moved

    # ------------------------------------------------------------------------------ newcomers, snapshots

    def admit(self, rng_key: Array, state: State, data: ClientData, index: Array) -> State:
        # NOTE: the paper admits nobody later; a newcomer joins the cluster of least loss, and is taken for a random one
        # of its clients until it has met them: zeros, and means too, would tell newcomers apart as a cluster.
        slot = nearest_by_loss(self.model, state.clusters, data)
        alike = labels(state.clients.membership) == slot
        # Counted as seen as often as the least seen of its cluster, or it would be drawn in every round at first.
        seen = jnp.where(alike.any(), jnp.where(alike, state.clients.seen, jnp.inf).min(), 0.0)
        row = Clients(one_hot(slot, self.clusters), jnp.asarray(True), seen, slot)
        state = self.pairs.join(self, rng_key, state, index, row)
        server = state.server
        server = server._replace(average=server.average.at[slot].set(1.0), calm=server.calm.at[slot].set(0))
        return self.recounted(state._replace(server=server))

    def snapshot(self, state: State) -> Mapping[str, Any]:
        clients, server = state.clients, state.server
        tested = (np.asarray(clients.previous) == np.asarray(server.parent)) & np.asarray(clients.present)
        return {
            **self.pairs.shown(self, state._replace(server=jax.device_put(server)), tested),
            "previous": clients.previous,
            "labels": jax.jit(labels)(clients.membership),
            "parent": server.parent,
            "index": server.index,
            "average": server.tested,
        }
