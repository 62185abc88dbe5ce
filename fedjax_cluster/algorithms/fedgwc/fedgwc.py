"""FedGWC: recursive splits by how clients' losses lie among their cohort's (Licciardi et al., ICML 2025)."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from fedjax_cluster import clustering, cohorts, parallel, tree
from fedjax_cluster.algorithms import round as averaging
from fedjax_cluster.algorithms.fedgwc import weighting as weighting_of
from fedjax_cluster.local import dataset_loss, server_key
from fedjax_cluster.parallel.loop import Client
from fedjax_cluster.server import Weighting, init_optimizer, update_clusters
from fedjax_cluster.types import (
    ONE_DEVICE,
    ClientData,
    ClientMapping,
    ClusteredAlgorithm,
    Clusters,
    Cohort,
    Costs,
    LocalUpdate,
    Model,
    Population,
    PyTree,
    RoundInfo,
    Selection,
    State,
)

Rate = float | Literal["participation", "count"]
Variant = Literal["paper", "released"]
MOST_CHILDREN = 4
LOG = logging.getLogger(__name__)


class Clients(NamedTuple):
    membership: Array  # f32[M, K], one-hot; zero for the absent
    present: Array  # bool[M]
    seen: Array  # f32[M], rounds that a client took part in
    previous: Array  # i32[M], its cluster before the last split


class Server(NamedTuple):
    optimizer: PyTree
    interactions: Array  # f32[M, M], P; entries between clusters are not used
    meetings: Array  # i32[M, M], times a pair met; [0, 0] under a constant rate
    average: Array  # f32[K], running average of the mean squared change of P in each cluster
    calm: Array  # i32[K], rounds in a row that the average was below the tolerance
    parent: Array  # i32[], the cluster tested last
    index: Array  # f32[], its Davies–Bouldin index
    tested: Array  # f32[], its running average at that time
    refused: Array  # i32[], splits for which there were not slots enough


def fedgwc(
    model: Model,
    *,
    clusters: int,
    local: LocalUpdate,
    server: optax.GradientTransformation | None = None,
    rate: Rate = "participation",
    tolerance: float = 1e-5,
    beta: float = 0.5,
    patience: int | None = None,
    max_children: int | None = None,
    smallest: int = 3,
    sampling: Literal["rare", "uniform"] = "rare",
    centre: bool = False,
    variant: Variant = "paper",
    weighting: Weighting = "examples",
    server_momentum: float = 0.0,
    proximal: float | None = None,
    participation: float = 0.1,
) -> ClusteredAlgorithm:
    """Clustered federated learning by Gaussian weighting (Algorithms 1 and 2).

    ω_i = mean_s exp(−(l_{i,s} − m_s)²/2σ_s²) among the cohort of i's cluster; P_ij ← (1−α) P_ij + α ω_i for all pairs
    of the cohort. Once P has come to rest in a cluster, W_ij = exp(−β‖v_i − v_j‖²) of its rows is clustered spectrally
    for n = 2 … n_max; the n of least Davies–Bouldin index on the rows of W splits the cluster, if that is below 1.

    Args:
      model: what is trained.
      clusters: K_max, slots for clusters; a split that finds too few left is refused, and counted in the state.
      local: what a client does.
      server: any optax transformation of minus the mean change; None is plain averaging. A child inherits its state.
      rate: α, constant; "participation" is the paper's, the share of clients in a round; "count" (ours) is 1/(times i
        and j met), so that P is the mean reward; counts start again from 1 after a split.
      tolerance: ε; a cluster is tested when the running average (from 1, with coefficient α or the participation) of
        its mean squared change of P has been below ε for `patience` rounds.
      beta: β of the affinity.
      patience: rounds; None is ⌈clients/cohort⌉ of the cluster.
      max_children: n_max; None is min(⌊clients/cohort⌋, 4) of the cluster, which never splits one whose clients all
        take part.
      smallest: clients that each child of a split must have; ours, after the K_min of Theorem A.5: with fewer, a
        cohort of a cluster would be everybody.
      sampling: "rare" draws clients with probability ∝ 1/(1 + times seen), "uniform" all alike.
      centre: (ours) takes each row's mean off P before the affinity, so that only the company counts.
      variant: "released" is the public code where it differs from the paper: P starts at 1/M², moments weighted by
        examples, rewards divided by their sum, affinity of min-max-scaled Pᵀ with a zero diagonal, `cluster_qr`,
        index on the spectral embedding, change divided by cohort², α = cohort/|cluster|, cohorts of one size, uniform
        sampling, any size of a child.
      weighting: "examples" or "uniform": FairAvg inside FedGWC.
      server_momentum: FedAvgM inside FedGWC, as in `fedavgm`.
      proximal: FedProx inside FedGWC, as in `fedprox`; None leaves `local` as it is.
      participation: ρ; a cluster's cohort is max(⌈ρ·clients⌉, 3), all of a smaller cluster.

    Returns:
      A ClusteredAlgorithm; a split is an event, whose content is P, W, the labels before and after, and the averages.

    Raises:
      ValueError: a parameter out of range.

    >>> from fedjax_cluster import local, nn
    >>> fedgwc(nn.linear(), clusters=4, local=local.sgd(0.1, batch_size=8, steps=7)).config["rate"]
    'participation'
    """
    _check(clusters, rate, tolerance, beta, patience, max_children, smallest, sampling, variant)
    cohorts.cohort_size(participation, 1)
    if not 0 <= server_momentum < 1:
        raise ValueError(f"server_momentum is {server_momentum}; it must be at least 0 and below 1")
    if proximal is not None:
        if local.rebuild is None:
            raise ValueError("the local update cannot be given a proximal term; use local.sgd")
        local = local.rebuild(proximal=proximal)
    optimizer = optax.sgd(1.0) if server is None else server
    if server_momentum:
        optimizer = optax.chain(optax.trace(server_momentum), optimizer)
    if centre and variant == "released":
        raise ValueError("centre is ours, but variant is 'released', the public code as it is; give one of them")
    released = variant == "released"
    counted = rate == "count" and not released
    children_bound = MOST_CHILDREN if max_children is None else max_children
    smallest_child = 1 if released else smallest

    def init(rng_key: Array, population: Population) -> tuple[State, RoundInfo]:
        averaging.check_clusters(clusters, population)
        first = averaging.init_clusters(rng_key, model, population.info, 1)
        copies = jax.tree.map(lambda leaf: jnp.repeat(leaf, clusters, 0), first)
        models = Clusters(copies.params, copies.stats, jnp.arange(clusters) == 0)
        present = averaging.present_clients(population)
        size = len(present)
        slot = jnp.where(present, 0, -1)
        start = 1.0 / float(jnp.sum(present)) ** 2 if released else 0.0
        own = Server(
            optimizer=init_optimizer(optimizer, models),
            interactions=jnp.full((size, size), start, jnp.float32),
            meetings=jnp.zeros((size, size) if counted else (0, 0), jnp.int32),
            average=jnp.ones(clusters),
            tested=jnp.ones(()),
            calm=jnp.zeros(clusters, jnp.int32),
            parent=jnp.zeros((), jnp.int32),
            index=jnp.full((), jnp.inf, jnp.float32),
            refused=jnp.zeros((), jnp.int32),
        )
        clients = Clients(averaging.one_hot(slot, clusters), present, jnp.zeros(size), slot.astype(jnp.int32))
        state = State(models, clients, own, jnp.zeros((), jnp.int32))
        if clusters > 1 and max_children is None and int(most_children(state)[0]) < 2:
            count, cohort = (int(number[0]) for number in sizes(state))
            LOG.warning(
                "fedgwc cannot split: a cluster has at most clients // cohort parts, here %d // %d = 1; "
                "give max_children%s",
                count,
                cohort,
                f" or a participation of {100 * (count // 2) // count / 100:g} or less" if count // 2 >= 3 else "",
            )
        return state, averaging.initial_info(clusters)

    # ------------------------------------------------------------------------------------- cohorts

    def sizes(state: State) -> tuple[Array, Array]:
        """Clients of each cluster and of its cohort, i32[K]."""
        count = state.clients.membership.sum(0).astype(jnp.int32)
        if not released:
            return count, cohorts.cluster_cohort_sizes(participation, count)
        fixed = jnp.ceil(participation * state.clients.present.sum().astype(jnp.float32) - 1e-4)
        return count, jnp.minimum(fixed.astype(jnp.int32), count)

    def select(rng_key: Array, state: State) -> Selection:
        size = state.clients.present.shape[0]
        if released:
            capacity = min(size, cohorts.cohort_size(participation, size) * clusters)
        else:
            capacity = cohorts.largest_cluster_cohorts(participation, size, clusters)
        seen = state.clients.seen if sampling == "rare" and not released else None
        label = averaging.labels(state.clients.membership)
        return cohorts.per_cluster(rng_key, label, sizes(state)[1], capacity, seen=seen)

    # ------------------------------------------------------------------------------------- rounds

    def step(rng_key: Array, state: State, cohort: Cohort) -> tuple[State, RoundInfo]:
        weights, seen = parallel.gather_rows(cohort, (state.clients.membership, state.clients.seen))
        slot = jnp.maximum(averaging.labels(weights), 0)
        mapped = parallel.for_each_client(
            lambda client, slot: train(rng_key, state.clusters, slot, client),
            cohort,
            slot,
            num_slots=clusters,
            reduce=lambda output: averaging.contribute(output[0], output[1], weighting),
            collect=lambda output: (averaging.report(output[1]), output[1].losses),
        )
        reports, losses = mapped.collected
        models, optimizer_state = update_clusters(optimizer, state.server.optimizer, state.clusters, mapped.reduced)
        clients = state.clients._replace(seen=parallel.scatter_rows(cohort, state.clients.seen, seen + 1.0))
        own = state.server._replace(optimizer=optimizer_state)
        sent = (cohort.index, cohort.data.num_examples, slot, losses, reports.num_steps, mapped.accepted)
        sent = parallel.to_each_device(sent, cohort.mapping)
        own = parallel.on_each_device(weigh, cohort.mapping)(own, sizes(state), *sent)
        state = State(models, clients, own, state.round + 1)

        before, refused = averaging.labels(clients.membership), own.refused
        resting = jnp.any(ready(state))
        test_all = parallel.on_each_device(lambda state: test(server_key(rng_key), state), cohort.mapping)
        state = parallel.run_if(resting, test_all, state)
        changed = jnp.sum((clients.present & (averaging.labels(state.clients.membership) != before)).astype(jnp.int32))
        participants = jnp.sum(cohort.mask.astype(jnp.float32))
        info = averaging.round_info(
            slot,
            reports,
            cohort.mask,
            mapped.accepted,
            clusters,
            changed,
            Costs(
                participants,
                participants,
                jnp.sum(reports.num_steps.astype(jnp.float32)),
                clusterings=resting.astype(jnp.float32),
            ),
            # Only the first refusal stops the rounds: the same split is found again and again.
            event=(changed > 0) | ((refused == 0) & (state.server.refused > 0)),
        )
        return state, info

    def train(rng_key: Array, models: Clusters, slot: Array, client: Client):
        return slot, averaging.train_client(rng_key, local, model, models, slot, client)

    def weigh(
        own: Server,
        counts: tuple[Array, Array],
        index: Array,
        num_examples: Array,
        slot: Array,
        losses: Array,
        num_steps: Array,
        accepted: Array,
    ) -> Server:
        """Rewards, interactions, and how much these still change."""
        count, wanted = (number.astype(jnp.float32) for number in counts)
        took = accepted[:, None] & (jnp.arange(losses.shape[1])[None] < num_steps[:, None])
        examples = num_examples.astype(jnp.float32) if released else None
        rewards = weighting_of.cluster_rewards(losses, took, slot, clusters, examples)
        coefficient = jnp.full(clusters, rate if isinstance(rate, float | int) else participation)
        if released:
            coefficient = wanted / jnp.maximum(count, 1.0)
        meeting = weighting_of.meet(
            own.interactions,
            own.meetings,
            rewards,
            index,
            accepted,
            slot,
            coefficient,
            clusters,
            counted=counted,
        )
        pairs = jnp.square(jnp.maximum(wanted if released else count, 1.0))
        # A cluster all of whose clients were rejected has learnt nothing.
        met = jax.ops.segment_max(accepted.astype(jnp.int32), slot, clusters) > 0
        average = own.average + jnp.where(met, coefficient * (meeting.change / pairs - own.average), 0.0)
        return own._replace(
            interactions=meeting.interactions,
            meetings=meeting.meetings,
            average=average,
            calm=jnp.where(average < tolerance, own.calm + met.astype(jnp.int32), 0),
        )

    # ------------------------------------------------------------------------------------- splits

    def most_children(state: State) -> Array:
        """n_max of each cluster, i32[K]."""
        count, wanted = sizes(state)
        if max_children is None:
            return jnp.minimum(count // jnp.maximum(wanted, 1), MOST_CHILDREN)
        return jnp.minimum(count, max_children)

    def ready(state: State) -> Array:
        """bool[K]: clusters to test."""
        count, wanted = sizes(state)
        needed = (count + wanted - 1) // jnp.maximum(wanted, 1) if patience is None else patience
        return state.clusters.active & (state.server.calm >= needed) & (most_children(state) > 1)

    def affinity(own: Server, mask: Array) -> Array:
        if released:
            return weighting_of.released_affinity(own.interactions, beta, mask)
        known = own.meetings > 0 if counted else own.interactions != 0
        kept = weighting_of.centred(own.interactions, mask, known) if centre else own.interactions
        return clustering.interaction_affinity(kept, beta, mask)

    def find_split(rng_key: Array, state: State) -> tuple[Array, weighting_of.Partition]:
        """FedGW_Cluster, the server's clustering, on the first cluster that has come to rest."""
        # NOTE: Algorithm 2 tests all that are ready in the same round; here the others follow in the next rounds, so
        # that every split is an event of its own.
        parent = jnp.argmax(ready(state)).astype(jnp.int32)
        mask = averaging.labels(state.clients.membership) == parent
        most, free = most_children(state)[parent], jnp.sum((~state.clusters.active).astype(jnp.int32))
        graph = affinity(state.server, mask)
        if released:
            found = weighting_of.released_partition(
                graph, mask, most, free, smallest_child, max_children=children_bound
            )
        else:
            found = weighting_of.partition(
                rng_key, graph, mask, most, free, smallest_child, max_children=children_bound
            )
        return parent, found

    def cluster(rng_key: Array, state: State, mapping: ClientMapping = ONE_DEVICE) -> Array:
        _, found = find_split(rng_key, state)
        return jnp.where(found.number > 1, found.labels, jnp.minimum(found.labels, 0))

    def test(rng_key: Array, state: State) -> State:
        """One cluster is tested, and split."""
        parent, found = find_split(rng_key, state)
        label, own = averaging.labels(state.clients.membership), state.server
        own = own._replace(
            tested=own.average[parent],
            average=own.average.at[parent].set(1.0),
            calm=own.calm.at[parent].set(0),
            parent=parent,
            index=found.index,
            refused=own.refused + found.refused.astype(jnp.int32),
        )
        return split(state._replace(server=own), found, parent, label)

    def split(state: State, found: weighting_of.Partition, parent: Array, label: Array) -> State:
        """The largest child keeps its parent's slot, the others take free ones; all start from the parent's model."""
        models, own, clients = state.clusters, state.server, state.clients
        children = jax.nn.one_hot(found.labels, children_bound).sum(0)
        rank = jnp.argsort(jnp.argsort(-children, stable=True), stable=True)
        unused = jnp.argsort(models.active, stable=True)
        places = jnp.concatenate([parent[None], unused])[jnp.minimum(rank, clusters)]
        apart = found.number > 1
        new = jnp.where(apart & (label == parent), places[found.labels], label)

        slots = jnp.arange(clusters)
        born = apart & jnp.any((slots[:, None] == places[None]) & (children > 0)[None], axis=1)
        source = jnp.where(born, parent, slots)
        inherit = lambda leaf: leaf[source]  # noqa: E731
        params, stats, optimizer_state = jax.tree.map(inherit, (models.params, models.stats, own.optimizer))
        if counted:
            family = (label == parent)[:, None] & (label == parent)[None, :] & apart
            own = own._replace(meetings=jnp.where(family, jnp.minimum(own.meetings, 1), own.meetings))
        return state._replace(
            clusters=Clusters(params, stats, models.active | born),
            clients=clients._replace(
                weights=averaging.one_hot(new, clusters),
                previous=jnp.where(apart | found.refused, label, clients.previous),
            ),
            server=own._replace(
                optimizer=optimizer_state,
                average=jnp.where(born, 1.0, own.average),
                calm=jnp.where(born, 0, own.calm),
            ),
        )

    # ------------------------------------------------------------------------------------- the rest

    def admit(rng_key: Array, state: State, client: ClientData, index: Array) -> State:
        # NOTE: the paper admits nobody later; a newcomer joins the cluster of least loss, and is taken for a random one
        # of its clients until it has met them: zeros, and means too, would tell newcomers apart as a cluster.
        slot, _ = averaging.least_loss_cluster(state.clusters, lambda v: dataset_loss(model, v, client))
        alike = averaging.labels(state.clients.membership) == slot
        # Counted as seen as often as the least seen of its cluster, or it would be drawn in every round at first.
        seen = jnp.where(alike.any(), jnp.where(alike, state.clients.seen, jnp.inf).min(), 0.0)
        row = Clients(averaging.one_hot(slot, clusters), jnp.asarray(True), seen, slot)
        own = state.server
        met = (own.meetings > 0 if counted else own.interactions != 0).any(1)
        others = alike & met & (jnp.arange(len(alike)) != index)
        chance = jax.random.uniform(jax.random.fold_in(rng_key, index), others.shape)
        drawn = jnp.argmax(jnp.where(others, chance, -1.0)).astype(jnp.int32)
        drawn = jnp.where(others.any(), drawn, len(others))
        own = own._replace(
            interactions=weighting_of.as_another(own.interactions, index, drawn),
            average=own.average.at[slot].set(1.0),
            calm=own.calm.at[slot].set(0),
        )
        if counted:
            own = own._replace(meetings=own.meetings.at[index].set(0).at[:, index].set(0))
        return state._replace(clients=tree.scatter(state.clients, index, row), server=own)

    def snapshot(state: State) -> Mapping[str, Any]:
        clients, own = state.clients, state.server
        return {
            "interactions": own.interactions,
            "affinity": affinity(jax.tree.map(jnp.asarray, own), jnp.asarray(clients.previous == own.parent)),
            "previous": clients.previous,
            "labels": averaging.labels(jnp.asarray(clients.membership)),
            "parent": own.parent,
            "index": own.index,
            "average": own.tested,
        }

    config = averaging.describe(
        local,
        clusters=clusters,
        rate=rate,
        tolerance=tolerance,
        beta=beta,
        patience=patience,
        max_children=max_children,
        smallest=smallest,
        sampling=sampling,
        centre=centre,
        variant=variant,
        weighting=weighting,
        server_momentum=server_momentum,
        proximal=proximal,
        participation=participation,
    )
    return ClusteredAlgorithm(
        "fedgwc", config, model, init, select, step, averaging.personalize_by_label, admit, snapshot, cluster
    )


def _check(clusters, rate, tolerance, beta, patience, max_children, smallest, sampling, variant) -> None:
    if clusters < 1:
        raise ValueError(f"clusters is {clusters}; at least one cluster is needed")
    if rate not in ("participation", "count") and not (isinstance(rate, float | int) and 0 < rate <= 1):
        raise ValueError(f"rate is {rate!r}; it must be 'participation', 'count', or a number above 0 and up to 1")
    for name, value in (("tolerance", tolerance), ("beta", beta)):
        if not (value > 0 and math.isfinite(value)):
            raise ValueError(f"{name} is {value}; it must be positive and finite")
    for name, value, least in (("patience", patience, 1), ("max_children", max_children, 2), ("smallest", smallest, 1)):
        if value is not None and value < least:
            raise ValueError(f"{name} is {value}; it must be at least {least}")
    for name, value, known in (
        ("sampling", sampling, ("rare", "uniform")),
        ("variant", variant, ("paper", "released")),
    ):
        if value not in known:
            raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(known)}")
