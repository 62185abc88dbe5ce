"""CFL-GP: clients grouped by their gradients on common models (Kim, Kim, de Veciana, ICML 2024)."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax

from fedjax_cluster import clustering, cohorts, parallel, tree
from fedjax_cluster.algorithms import round as averaging
from fedjax_cluster.algorithms.cfl_gp.profiles import Clients, embed, estimate_clusters
from fedjax_cluster.local import dataset_loss, server_key
from fedjax_cluster.parallel.loop import Client, Reduced
from fedjax_cluster.server import (
    Rounding,
    Weighting,
    init_optimizer,
    keep_decimals,
    share_layers,
    shared_part,
    update_clusters,
)
from fedjax_cluster.types import (
    ONE_DEVICE,
    ClientData,
    ClientMapping,
    ClusteredAlgorithm,
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

# Beyond this the M×M Gram matrices of K blocks outweigh the profiles; subspace iteration then works on those.
LARGEST_GRAM = 2048


class Server(NamedTuple):
    optimizer: PyTree
    grams: Array  # f32[K, M, M]: inner products of each block over clients; [K, 0, 0] for many clients
    block: Array  # i32[], the model to query in the next clustering round
    unchanged: Array  # i32[], rounds since the assignment last changed
    stopped: Array  # bool[], clustering has ended for good
    coordinates: Array  # i32[d̂], random coordinates of the profile; empty for all


def cfl_gp(
    model: Model,
    *,
    clusters: int | Literal["auto"],
    local: LocalUpdate,
    server: optax.GradientTransformation | None = None,
    every: int = 2,
    beta: float | Literal["mean"] = "mean",
    cluster_until: int | None = None,
    stop_after: int | None = None,
    compression: float = 1.0,
    profile_layers: Sequence[str] = (),
    decimals: int | None = None,
    rounding: Rounding = "nearest",
    shared_layers: Sequence[str] = (),
    weighting: Weighting = "uniform",
    participation: float = 1.0,
    cluster_cohort: bool = False,
    max_clusters: int = 8,
    pilot_rounds: int = 20,
) -> ClusteredAlgorithm:
    """Clustered federated learning by gradient-based partitioning (Algorithms 1, 4 and 5).

    Every P-th round one model k̃ (round robin) is queried by all clients: g_{c,k̃} ← (1−β) g_{c,k̃} + β Δθ_c(θ_k̃);
    the profiles [g_{c,1} … g_{c,K}] are projected on their top-K left singular vectors, grouped by k-means, and
    the groups named for the largest overlap with the old ones.

    Args:
      model: what is trained.
      clusters: K, or "auto": estimated from the profiles of a pilot of `pilot_rounds` rounds with `max_clusters`
        models (App. G).
      local: `sgd(1.0, batch_size=b, steps=1)` with `server=optax.sgd(γ)` is gradient averaging (Algorithm 1); more
        steps are model averaging (Algorithm 4).
      server: any optax transformation of minus the mean change; None is plain averaging.
      every: P; clustering happens in rounds t with t mod P = 1 mod P.
      beta: "mean" for the cumulative mean, β = 1/(earlier updates of the block + 1); or a constant (1.0 is the
        ablation of F.1).
      cluster_until: T_cl; no clustering from this round on.
      stop_after: clustering ends for good once the assignment has not changed for this many rounds.
      compression: d/d̂; above 1 the profile keeps d̂ random coordinates, drawn once (App. E.1).
      profile_layers: parameter paths that the profile is made of, such as `["output"]` (App. E.2).
      decimals: digits after the decimal point that a client sends (App. E.1, Table 7).
      rounding: to the "nearest" number with so many decimals, or towards "zero".
      shared_layers: parameter paths averaged over all clients after every update (F.6, F.7).
      weighting: "uniform" as in the paper's code, or "examples".
      participation: share of the clients in a round; clustering rounds take everybody all the same, unless
      cluster_cohort: only the cohort is embedded and clustered, the others keep their cluster.
      max_clusters: number of models of the pilot.
      pilot_rounds: length of the pilot.

    Returns:
      A ClusteredAlgorithm.

    Raises:
      ValueError: a parameter out of range.
    """
    clusters = clusters if clusters == "auto" else _whole("clusters", clusters)
    _check(every, beta, cluster_until, compression, decimals, rounding, stop_after, max_clusters, pilot_rounds)
    cohorts.cohort_size(participation, 1)
    optimizer = optax.sgd(1.0) if server is None else server

    # ------------------------------------------------------------------------------------- init

    def init(rng_key: Array, population: Population) -> tuple[State, RoundInfo]:
        if clusters != "auto":
            return init_with(rng_key, population, clusters), averaging.initial_info(clusters)
        pilot_key = jax.random.fold_in(rng_key, 1)
        most = min(max_clusters, int(averaging.present_clients(population).sum()))
        state = init_with(rng_key, population, most)
        costs = Costs()
        advance = jax.jit(step)
        for number in range(pilot_rounds):
            cohort = parallel.whole_population(population)
            # Awaited, as many rounds under way at once could block one another (`parallel.use_all_cores`).
            state, info = jax.block_until_ready(advance(jax.random.fold_in(pilot_key, number), state, cohort))
            costs = jax.tree.map(jnp.add, costs, info.costs)
        found = estimate_clusters(pilot_key, state, most).num_clusters
        return init_with(rng_key, population, found), averaging.initial_info(found, costs)

    def init_with(rng_key: Array, population: Population, num_clusters: int) -> State:
        averaging.check_clusters(num_clusters, population)
        models = averaging.init_clusters(rng_key, model, population.info, num_clusters)
        models = averaging.tie_layers(models, shared_layers)
        present = averaging.present_clients(population)
        assignment_key, coordinate_key = jax.random.split(jax.random.fold_in(rng_key, 0))
        coordinates = draw_coordinates(coordinate_key, models.params)
        width = len(coordinates) or profile_size(models.params)
        capacity, side = len(present), len(present) if len(present) <= LARGEST_GRAM else 0
        clients = Clients(
            averaging.one_hot(equal_groups(assignment_key, present, num_clusters), num_clusters),
            present,
            jnp.zeros((capacity, num_clusters, width)),
            jnp.zeros((capacity, num_clusters), jnp.int32),
        )
        own = Server(
            optimizer=init_optimizer(optimizer, models),
            grams=jnp.zeros((num_clusters, side, side)),
            block=jnp.zeros((), jnp.int32),
            unchanged=jnp.zeros((), jnp.int32),
            stopped=jnp.asarray(False),
            coordinates=coordinates,
        )
        return State(models, clients, own, jnp.zeros((), jnp.int32))

    def profile_leaves(params: PyTree) -> list:
        chosen = tree.match(params, profile_layers) if profile_layers else jax.tree.map(lambda _: True, params)
        return [leaf for leaf, pick in zip(jax.tree.leaves(params), jax.tree.leaves(chosen), strict=True) if pick]

    def profile_size(stacked_params: PyTree) -> int:
        return tree.size(profile_leaves(stacked_params)) // len(jax.tree.leaves(stacked_params)[0])

    def draw_coordinates(rng_key: Array, stacked_params: PyTree) -> Array:
        size = profile_size(stacked_params)
        kept = max(1, round(size / compression))
        if kept >= size:
            return jnp.zeros(0, jnp.int32)
        return jnp.sort(jax.random.choice(rng_key, size, (kept,), replace=False)).astype(jnp.int32)

    # ------------------------------------------------------------------------------------- rounds

    def clustering_round(state: State) -> Array:
        due = state.round % every == 1 % every
        if cluster_until is not None:
            due = due & (state.round < cluster_until)
        return due & ~state.server.stopped

    def select(rng_key: Array, state: State) -> Selection:
        present = state.clients.present
        if participation == 1 or cluster_cohort:
            return cohorts.uniform(rng_key, present, participation)
        part = cohorts.uniform(rng_key, present, participation)
        mask = jnp.zeros_like(present).at[part.index].set(part.mask, mode="drop")
        return cohorts.in_place(jnp.where(clustering_round(state), present, mask))

    def step(rng_key: Array, state: State, cohort: Cohort) -> tuple[State, RoundInfo]:
        num_clusters = state.clusters.active.shape[0]
        due = clustering_round(state)
        carry = (state, averaging.initial_info(num_clusters))
        carry = parallel.run_if(due, lambda carry: cluster_and_train(rng_key, carry[0], cohort), carry)
        state, info = parallel.run_if(~due, lambda carry: train(rng_key, carry[0], cohort), carry)
        own = state.server
        clustered = jnp.any(state.clients.updates > 0)
        unchanged = jnp.where((info.num_changed > 0) | ~clustered, 0, own.unchanged + 1)
        stopped = own.stopped if stop_after is None else own.stopped | (unchanged >= stop_after)
        own = own._replace(unchanged=unchanged, stopped=stopped)
        return state._replace(server=own, round=state.round + 1), info

    def train_one(rng_key: Array, state: State, slot: Array, client: Client):
        result = averaging.train_client(rng_key, local, model, state.clusters, slot, client)
        # NOTE: the text zeroes the digits beyond; its accuracy at two decimals (87.3 %) is that of rounding to the
        # nearest (87.1 % on MNIST), where zeroing reaches 77.7 %.
        return result._replace(delta=keep_decimals(result.delta, decimals, rounding))

    def update_models(state: State, reduced: Reduced) -> State:
        models, optimizer_state = update_clusters(optimizer, state.server.optimizer, state.clusters, reduced)
        if shared_layers:
            models = share_layers(models, shared_layers, reduced.weight)
        return state._replace(clusters=models, server=state.server._replace(optimizer=optimizer_state))

    def train(rng_key: Array, state: State, cohort: Cohort) -> tuple[State, RoundInfo]:
        num_clusters = state.clusters.active.shape[0]
        slot = slots(state, cohort)
        mapped = parallel.for_each_client(
            lambda client, slot: (slot, train_one(rng_key, state, slot, client)),
            cohort,
            slot,
            num_slots=num_clusters,
            reduce=lambda output: averaging.contribute(output[0], output[1], weighting),
            collect=lambda output: averaging.report(output[1]),
        )
        participants = jnp.sum(cohort.mask.astype(jnp.float32))
        steps = jnp.sum(mapped.collected.num_steps.astype(jnp.float32))
        info = averaging.round_info(
            slot,
            mapped.collected,
            cohort.mask,
            mapped.accepted,
            num_clusters,
            jnp.zeros((), jnp.int32),
            Costs(participants, participants, steps),
        )
        return update_models(state, mapped.reduced), info

    def cluster_and_train(rng_key: Array, state: State, cohort: Cohort) -> tuple[State, RoundInfo]:
        num_clusters = state.clusters.active.shape[0]
        block = state.server.block
        slot = slots(state, cohort)

        def client_round(client: Client, slot: Array):
            own = train_one(rng_key, state, slot, client)
            # Members of the queried cluster have computed this very update already.
            queried = lax.cond(slot == block, lambda: own.delta, lambda: train_one(rng_key, state, block, client).delta)
            return slot, own, compress(queried, state.server.coordinates)

        mapped = parallel.for_each_client(
            client_round,
            cohort,
            slot,
            num_slots=num_clusters,
            reduce=lambda output: averaging.contribute(output[0], output[1], weighting),
            collect=lambda output: (averaging.report(output[1]), output[2]),
        )
        reports, parts = mapped.collected
        columns = jnp.concatenate(parts, axis=1)
        clients = fold_in_block(state, cohort, columns, mapped.accepted)
        old = averaging.labels(clients.membership)
        clustered = clients.present
        if cluster_cohort:
            ones = jnp.ones_like(cohort.mask)
            clustered = parallel.scatter_rows(cohort, jnp.zeros_like(clients.present), ones)
        new, grams = regroup(server_key(rng_key), clients, state.server.grams, block, clustered, cohort.mapping)
        changed = jnp.sum((clients.present & (new != old)).astype(jnp.int32))

        participants = jnp.sum(cohort.mask.astype(jnp.float32))
        others = cohort.mask & (slot != block)
        steps = reports.num_steps.astype(jnp.float32)
        extra = jnp.sum(others.astype(jnp.float32))
        share = columns.shape[1] / (tree.size(state.clusters.params) / num_clusters)
        info = averaging.round_info(
            slot,
            reports,
            cohort.mask,
            mapped.accepted,
            num_clusters,
            changed,
            Costs(
                # Shared layers are in the client's own model already.
                models_down=participants + (1.0 - shared_part(state.clusters.params, shared_layers)) * extra,
                models_up=participants + share * extra,
                gradient_evaluations=jnp.sum(steps) + jnp.sum(jnp.where(others, steps, 0.0)),
                clusterings=1.0,
            ),
        )
        state = update_models(state, mapped.reduced)
        own = state.server._replace(grams=grams, block=(block + 1) % num_clusters)
        clients = clients._replace(membership=averaging.one_hot(new, num_clusters))
        return state._replace(clients=clients, server=own), info

    def slots(state: State, cohort: Cohort) -> Array:
        own = averaging.labels(parallel.gather_rows(cohort, state.clients.membership))
        return jnp.maximum(own, 0)

    def compress(delta: PyTree, coordinates: Array) -> list[Array]:
        leaves = profile_leaves(delta)
        # Leaf by leaf: inside the loop over clients, the copy into one vector was at times fifty times slower.
        return [tree.ravel(leaves)[coordinates]] if len(coordinates) else [leaf.reshape(-1) for leaf in leaves]

    def fold_in_block(state: State, cohort: Cohort, columns: Array, accepted: Array) -> Clients:
        """Updates block k̃ of the cohort's profiles."""
        clients, block = state.clients, state.server.block
        # Indexing with a traced number would be a gather and a scatter, row by row; the block is one slice.
        profile = lax.dynamic_index_in_dim(clients.profile, block, 1, keepdims=False)
        old = parallel.gather_rows(cohort, profile)
        earlier = parallel.gather_rows(cohort, clients.updates[:, block])
        rate = 1 / (earlier + 1).astype(jnp.float32) if beta == "mean" else jnp.full(earlier.shape, beta)
        # A client's very first update fills its block; there is nothing to keep of an empty one.
        rate = jnp.where(earlier == 0, 1.0, rate)[:, None]
        new = jnp.where(accepted[:, None], (1 - rate) * old + rate * columns, old)
        # Without the barrier the old block would be read again by all that follows, after the new one is in its place:
        # XLA would keep a copy of the whole profile to read it from.
        rows = lax.optimization_barrier(parallel.scatter_rows(cohort, profile, new))
        updates = parallel.scatter_rows(cohort, clients.updates[:, block], earlier + accepted.astype(jnp.int32))
        return clients._replace(
            profile=lax.dynamic_update_index_in_dim(clients.profile, rows, block, 1),
            updates=clients.updates.at[:, block].set(updates),
        )

    def regroup(
        rng_key: Array, clients: Clients, grams: Array, block: Array, mask: Array, mapping: ClientMapping
    ) -> tuple[Array, Array]:
        """The server's clustering: Gram matrix of the block that changed, embedding, k-means, names; i32[M], grams."""
        num_clusters, old = clients.membership.shape[1], averaging.labels(clients.membership)
        embed_key, kmeans_key = jax.random.split(rng_key)

        def features_of(clients: Clients, grams: Array, mask: Array) -> Array:
            return embed(embed_key, clients, grams, mask, num_clusters)[0]

        def group(features: Array, mask: Array, old: Array) -> Array:
            found = clustering.kmeans(kmeans_key, features, num_clusters, mask=mask).labels
            named = clustering.match_labels(found, jnp.where(mask, old, -1), num_clusters, mask=mask)
            return jnp.where(mask, named, old)

        if grams.shape[1]:
            # Read back, not handed over: XLA sees that it is what was written, and copies no profile.
            rows = lax.dynamic_index_in_dim(clients.profile, block, 1, keepdims=False)
            grams = grams.at[block].set(parallel.gram(rows, mapping))
            # The Gram matrices stand for the profiles, which stay where they are.
            clients = clients._replace(profile=jnp.zeros((len(mask), 0, 0)))
            features_of = parallel.on_each_device(features_of, mapping)
        return parallel.on_each_device(group, mapping)(features_of(clients, grams, mask), mask, old), grams

    def cluster(rng_key: Array, state: State, mapping: ClientMapping = ONE_DEVICE) -> Array:
        clients, own = state.clients, state.server
        return regroup(rng_key, clients, own.grams, own.block, clients.present, mapping)[0]

    # ------------------------------------------------------------------------------------- newcomers

    def admit(rng_key: Array, state: State, client: ClientData, index: Array) -> State:
        # Without a profile the newcomer starts where the least training loss is; the next clustering decides.
        slot, _ = averaging.least_loss_cluster(state.clusters, lambda v: dataset_loss(model, v, client))
        num_clusters, width = state.clients.profile.shape[1:]
        row = Clients(
            averaging.one_hot(slot, num_clusters),
            jnp.asarray(True),
            jnp.zeros((num_clusters, width)),
            jnp.zeros(num_clusters, jnp.int32),
        )
        own = state.server._replace(unchanged=jnp.zeros((), jnp.int32), stopped=jnp.asarray(False))
        return state._replace(clients=tree.scatter(state.clients, index, row), server=own)

    config: dict[str, Any] = averaging.describe(
        local,
        clusters=clusters,
        every=every,
        beta=beta,
        cluster_until=cluster_until,
        stop_after=stop_after,
        compression=compression,
        profile_layers=list(profile_layers),
        decimals=decimals,
        rounding=rounding,
        shared_layers=list(shared_layers),
        weighting=weighting,
        participation=participation,
        cluster_cohort=cluster_cohort,
        max_clusters=max_clusters if clusters == "auto" else None,
        pilot_rounds=pilot_rounds if clusters == "auto" else None,
    )
    return ClusteredAlgorithm(
        "cfl_gp", config, model, init, select, step, averaging.personalize_by_label, admit, cluster=cluster
    )


def equal_groups(rng_key: Array, present: Array, num_groups: int) -> Array:
    """i32[M]: a random division of the present clients into groups of equal size; −1 for the absent."""
    score = jnp.where(present, jax.random.uniform(rng_key, present.shape), jnp.inf)
    rank = jnp.argsort(jnp.argsort(score)).astype(jnp.int32)
    return jnp.where(present, rank % num_groups, -1)


def _whole(name: str, value: Any) -> int:
    """A whole number of any type, NumPy's too, as Python's."""
    if isinstance(value, (bool, str)) or not hasattr(value, "__index__") or operator.index(value) < 1:
        raise ValueError(f"{name} is {value!r}; it must be a whole number, 1 or more, or 'auto'")
    return operator.index(value)


def _check(every, beta, cluster_until, compression, decimals, rounding, stop_after, max_clusters, pilot_rounds) -> None:
    smallest = {"every": (every, 1), "max_clusters": (max_clusters, 2), "pilot_rounds": (pilot_rounds, 2)}
    smallest["stop_after"] = (1 if stop_after is None else stop_after, 1)
    smallest["cluster_until"] = (0 if cluster_until is None else cluster_until, 0)
    smallest["decimals"] = (0 if decimals is None else decimals, 0)
    smallest["compression"] = (compression, 1)
    for name, (value, least) in smallest.items():
        if not least <= value < math.inf:
            raise ValueError(f"{name} is {value}; it must be finite and at least {least}")
    if rounding not in ("nearest", "zero"):
        raise ValueError(f"rounding is {rounding!r}; it must be 'nearest' or 'zero'")
    if beta != "mean" and not 0 < beta <= 1:
        raise ValueError(f"beta is {beta!r}; it must be 'mean' or a number above 0 and up to 1")
