"""The cluster round: every client trains one cluster's model, the server takes a step per cluster, and reports."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from fedjax_cluster import parallel, tree
from fedjax_cluster.aggregation import Aggregation
from fedjax_cluster.algorithms.planned import check_clusters, number_there
from fedjax_cluster.inference import dataset_loss
from fedjax_cluster.joined_leaves import JoinedLeaves
from fedjax_cluster.local import client_key, mean_of_steps
from fedjax_cluster.marked_clients import shown_rows
from fedjax_cluster.options import checked
from fedjax_cluster.parallel import Client, Contribution
from fedjax_cluster.privacy.gaussian import Release
from fedjax_cluster.server import (
    Weighting,
    aggregate_clients,
    client_weight,
    share_layers,
    step_clusters,
    warn_of_sharing,
    with_optimizer,
)
from fedjax_cluster.types import (
    ClientData,
    Clusters,
    Cohort,
    Costs,
    DatasetInfo,
    LocalResult,
    LocalUpdate,
    Model,
    Population,
    PyTree,
    RoundInfo,
    State,
    Variables,
)

# Squares of what clients send are summed over clients and blocks of profiles, and momentum adds up rounds.
HEADROOM = 1e6


class HardClients(NamedTuple):
    """What a hard-clustered method keeps of its clients."""

    membership: Array  # f32[M, K], one-hot; zero for the absent
    present: Array  # bool[M]


class Report(NamedTuple):
    """What every client reports of its local training."""

    loss: Array  # f32[], mean over its steps
    num_steps: Array  # i32[]
    size: Array  # f32[], of what it sends, as in `size_of`: where it is infinite, the client is rejected


class Trained(NamedTuple):
    """What one client's part of a round gives."""

    slot: Array  # i32[], the cluster that it trains; −1 for none
    result: LocalResult
    extra: PyTree = ()  # further small arrays, stacked over the clients
    own: PyTree = None  # its own row anew


class Round(NamedTuple):
    """What a cluster round gives."""

    clusters: Clusters  # after the server's step
    slot: Array  # i32[C]
    reports: Report  # leaves [C]
    accepted: Array  # bool[C]: took part, sent a finite update, and is in its cluster's new model
    extra: PyTree  # leaves [C, ...]
    own: PyTree  # leaves [C, ...], the clients' own rows anew

    def costs(self, mask: Array) -> Costs:
        """A model to each participant of mask bool[C] in a cluster and an update back; a gradient a step."""
        trained = mask & (self.slot >= 0)
        return training_costs(trained, jnp.where(trained, self.reports.num_steps, 0))

    def info(
        self, mask: Array, num_changed: Array | int = 0, costs: Costs | None = None, event: Array | bool = False
    ) -> RoundInfo:
        """The round's report; see `clients_info`."""
        slots, costs = self.clusters.active.shape[0], self.costs(mask) if costs is None else costs
        return clients_info(self.slot, self.reports, mask, self.accepted, slots, num_changed, costs, event)


def init_clusters(rng_key: Array, model: Model, info: DatasetInfo, num_clusters: int) -> Clusters:
    """K models initialised independently; model k is the same whatever K."""
    keys = jax.vmap(jax.random.fold_in, (None, 0))(rng_key, jnp.arange(num_clusters))
    variables = jax.vmap(lambda key: model.init(key, info))(keys)
    return Clusters(variables.params, variables.stats, jnp.ones(num_clusters, bool))


def first_model(rng_key: Array, model: Model, info: DatasetInfo) -> Variables:
    """One model in one program: layer by layer each process would lower some twenty anew."""
    return parallel.compile_quickly(_first_model, static_argnames=("model", "info"))(rng_key, model, info)


def _first_model(rng_key: Array, model: Model, info: DatasetInfo) -> Variables:
    return model.init(rng_key, info)


@parallel.kept_program()
def first_in_all_slots(models: Clusters) -> Clusters:
    """The first of K models in all slots, of which the first is in use."""
    models = jax.tree.map(lambda leaf: jnp.repeat(leaf[:1], len(leaf), 0), models)
    return models._replace(active=jnp.arange(len(models.active)) == 0)


def tie_layers(clusters: Clusters, patterns: Sequence[str], method: str) -> Clusters:
    """Starts the shared layers of every cluster from those of the first; warns where they are none, or all."""
    if not patterns:
        return clusters
    nothing, everything = "clusters have nothing in common", "all clusters are one model: this is FedAvg"
    warn_of_sharing(method, clusters.params, patterns, nothing, everything)
    first = jnp.zeros_like(clusters.active, jnp.float32).at[0].set(1.0)
    return share_layers(clusters, patterns, first)


def present_clients(population: Population) -> Array:
    """bool[M]: clients with examples, on one device.

    Fetched first: what `init` then makes of it operation by operation would, on arrays divided among devices, be many
    small programs with collectives at once, which on a CPU can wait for each other's threads.
    """
    return jax.device_put(np.asarray(population.data.num_examples) > 0)


def check_square(method: str, num_clients: int, matrices: int = 1, landmarks: bool = False) -> None:
    """Raises a ValueError where so many matrices of clients by clients do not fit into the free memory of a device.

    Args:
      method: whose matrices they are.
      num_clients: M.
      matrices: of 4 bytes for each pair, at the same time.
      landmarks: whether the method can do with landmark clients.

    >>> check_square("cfl", 10**8)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    ValueError: cfl takes 1 × 4 bytes for each pair of 100000000 clients, 4e+07 GB, but ... GB of this device are ...
    """
    most = math.isqrt(int(min(parallel.memory_left(), 2.0**62)) // (4 * matrices))
    other = "give landmarks=256, say, or take fewer clients" if landmarks else "take fewer clients"
    what = f"{matrices} × 4 bytes for each pair of {num_clients} clients"
    check_memory(method, 4.0 * matrices * num_clients**2, what, f"with these it takes at most {most} clients: {other}")


def check_memory(method: str, wanted: float, what: str, advice: str) -> None:
    """Raises a ValueError where `wanted` bytes do not fit into the free memory of a device; says `what` for."""
    memory = parallel.memory_left()
    if wanted > memory:
        raise ValueError(
            f"{method} takes {what}, {wanted / 1e9:.3g} GB, but {memory / 1e9:.3g} GB of this device are free; {advice}"
        )


def start_models(model: Model, rng_key: Array, population: Population, num_clusters: int) -> tuple[Clusters, Array]:
    """K models initialised independently, and the clients that are present, bool[M].

    Raises:
      ValueError: more clusters than clients.
    """
    present = present_clients(population)
    check_clusters(num_clusters, number_there(present))
    init = parallel.compile_quickly(init_clusters, static_argnames=("model", "info", "num_clusters"))
    return init(rng_key, model, population.info, num_clusters), present


def first_state(
    clusters: Clusters,
    clients: Any,
    optimizer: optax.GradientTransformation | None = None,
    server: Any = (),
    costs: Costs | None = None,
) -> tuple[State, RoundInfo]:
    """A state before the first round, with fresh optimiser states, and the report of an `init` that trained nothing."""
    if optimizer is not None:
        clusters = with_optimizer(clusters, optimizer)
    info = initial_info(clusters.active.shape[0], costs)
    return State(clusters, clients, server, jnp.zeros((), jnp.int32)), info


def cluster_round(
    train: Callable[..., Trained],
    clusters: Clusters,
    cohort: Cohort,
    *rows: PyTree,
    own: PyTree = None,
    optimizer: optax.GradientTransformation,
    weighting: Weighting,
    shared_layers: Sequence[str] = (),
    aggregation: Aggregation | None = None,
    private: Release | None = None,
) -> Round:
    """One round of hard clusters.

    θ_k ← θ_k + optimizer(Σ_i w_i Δθ_i / Σ_i w_i) over the cohort's clients i that train cluster k; another
    aggregation takes the place of that mean.

    Args:
      train: one client's part, `(client, *rows) -> Trained`, or `(client, own, *rows) -> Trained`.
      clusters: the K models, with the server's optimiser states.
      cohort: C clients.
      *rows: leaves [C, ...] of which `train` sees its client's row.
      own: leaves [C, ...] that are renewed by what `train` gives of them; a row that is not finite stays as it was.
      optimizer: the server's.
      weighting: w_i, the number of "examples", or "uniform".
      shared_layers: parameter paths that all clusters have in common, averaged over all clients, those of each
        cluster by the aggregation.
      aggregation: None is the mean.
      private: in place of an aggregation, the mean of clipped changes with noise, in which all clients count alike.
    """

    checked("weighting", weighting, Weighting)

    def contribute(output: Trained) -> Contribution:
        if not isinstance(output, Trained):
            raise ValueError(f"train returns a {type(output).__name__}; it must return rounds.Trained(slot, result)")
        if (output.own is None) != (own is None):
            raise ValueError("Trained.own and cluster_round's own go together: give both, or neither")
        weight = jnp.where(output.slot < 0, 0.0, client_weight(weighting, output.result.num_examples))
        return Contribution(output.slot, weight, {"delta": output.result.delta, "stats": output.result.stats})

    sent, mapped = aggregate_clients(
        train,
        cohort,
        *rows,
        num_slots=clusters.active.shape[0],
        contribute=contribute,
        collect=lambda output: (output.slot, report(output.result), output.extra),
        aggregation=aggregation,
        private=private,
        active=clusters.active,
        **({} if own is None else {"own": own, "renew": lambda output: output.own}),
    )
    slot, reports, extra = mapped.collected
    clusters, refused = step_clusters(optimizer, clusters, sent)
    if shared_layers:
        clusters = share_layers(clusters, shared_layers, jnp.where(refused, 0.0, sent.weight))
    accepted = mapped.accepted & ~((slot >= 0) & refused[slot])
    return Round(clusters, slot, reports, accepted, extra, mapped.own)


def train_in_cluster(
    rng_key: Array, update: LocalUpdate, model: Model, clusters: Clusters, round: Array
) -> Callable[[Client, Array], Trained]:
    """A client's part of a round in the cluster `slot` that it is in: local training from that model."""

    def train(client: Client, slot: Array) -> Trained:
        return Trained(slot, train_client(rng_key, update, model, clusters, slot, client, round))

    return train


def train_client(
    rng_key: Array,
    update: LocalUpdate,
    model: Model,
    clusters: Clusters,
    slot: Array,
    client: Client,
    round: Array | int,
) -> LocalResult:
    """One client's local training from the model of a cluster, in the round of this number."""
    start = cluster_variables(clusters, slot)
    return update.run(client_key(rng_key, client.index), model, start, client.data, round=round)


def report(result: LocalResult, *vectors: PyTree) -> Report:
    """The report of a client that sends what its training gave, and further vectors."""
    stats = JoinedLeaves(result.stats).join(result.stats)
    moved = sum((jnp.sum(jnp.abs(leaf)) for leaf in stats), jnp.zeros(()))
    size = size_of((result.delta, vectors)) + HEADROOM * moved.astype(jnp.float32)
    return Report(mean_of_steps(result), result.num_steps, size)


def size_of(vectors: PyTree) -> Array:
    """f32[]: `HEADROOM` times the sum of squares, infinite where the norm is above 10¹⁶.

    Such a vector is as unusable as one with NaN: sums, inner products and distances that it has part in would overflow.
    """
    squares = (jnp.sum(jnp.square(leaf)) for leaf in JoinedLeaves(vectors).join(vectors))
    return HEADROOM * sum(squares, jnp.zeros(())).astype(jnp.float32)


def training_costs(mask: Array, num_steps: Array) -> Costs:
    """A model to each participant and an update back; a gradient a step."""
    participants = jnp.sum(mask.astype(jnp.float32))
    return Costs(participants, participants, jnp.sum(num_steps.astype(jnp.float32)))


def clients_info(
    slot: Array,
    reports: Report,
    mask: Array,
    accepted: Array,
    num_clusters: int,
    num_changed: Array | int,
    costs: Costs,
    event: Array | bool = False,
) -> RoundInfo:
    """The report of a round: slot i32[C], reports [C], who took part (mask bool[C]), whose update was finite.

    `event` asks the round loop to stop after this round.
    """
    counted = mask & accepted
    members = one_hot(jnp.where(counted, slot, -1), num_clusters)
    count = members.sum(0)
    loss = jnp.sum(jnp.where(counted, reports.loss, 0.0)[:, None] * members, axis=0)
    return RoundInfo(
        loss=jnp.where(count > 0, loss / jnp.maximum(count, 1.0), jnp.nan),
        num_clients=count.astype(jnp.int32),
        num_changed=jnp.asarray(num_changed, jnp.int32),
        num_rejected=jnp.sum((mask & ~accepted).astype(jnp.int32)),
        costs=jax.tree.map(lambda cost: jnp.asarray(cost, jnp.float32), costs),
        event=jnp.asarray(event),
    )


def initial_info(num_clusters: int, costs: Costs | None = None) -> RoundInfo:
    """The report of an `init` that trained nothing."""
    return RoundInfo(
        # Brought to the device as they are: made there, each would be a small program.
        *jax.device_put((np.full(num_clusters, np.nan, np.float32), np.zeros(num_clusters, np.int32))),
        num_changed=jnp.zeros((), jnp.int32),
        num_rejected=jnp.zeros((), jnp.int32),
        costs=jax.tree.map(lambda cost: jnp.asarray(cost, jnp.float32), costs or Costs()),
        event=jnp.asarray(False),
    )


def count_changed(cohort: Cohort, old: Array, slot: Array, mask: Array | None = None) -> Array:
    """i32[]: the cohort's clients (or those of `mask`) whose cluster changed."""
    return jnp.sum(((cohort.mask if mask is None else mask) & (slot != old)).astype(jnp.int32))


def reassign(cohort: Cohort, membership: Array, slot: Array, accepted: Array) -> tuple[Array, Array]:
    """The membership f32[M, K] with who was accepted, bool[C], in `slot` i32[C], and how many changed, i32[]."""
    moved = cohort.mask & accepted & (slot != labels(parallel.gather_rows(cohort, membership)))
    # Written where it changed alone: a scatter that waits for what was gathered needs no copy of all rows.
    written = parallel.scatter_rows(cohort, membership, one_hot(slot, membership.shape[1]), moved)
    return written, jnp.sum(moved.astype(jnp.int32))


def cluster_variables(clusters: Clusters, slot: Array) -> Variables:
    """The model of one cluster."""
    return jax.tree.map(lambda leaf: leaf[slot], Variables(clusters.params, clusters.stats))


@parallel.kept_program()
def labels(membership: Array) -> Array:
    """i32[M]: the cluster of each client; −1 where it has none.

    >>> labels(jnp.asarray([[0., 1.], [0., 0.]])).tolist()
    [1, -1]
    """
    # Of a million clients and more: `argmax`, whose reduction carries two values, takes twice as long on a CPU.
    slots, most = jnp.arange(membership.shape[-1], dtype=jnp.int32), membership.max(-1)
    first = jnp.where(membership == most[..., None], slots, len(slots)).min(-1)
    return jnp.where(most > 0, first, -1).astype(jnp.int32)


def cohort_labels(state: State, cohort: Cohort) -> Array:
    """i32[C]: the cluster of each of the cohort's clients; −1 where it has none."""
    return labels(parallel.gather_rows(cohort, state.clients.membership))


def one_hot(label: Array, num_clusters: int) -> Array:
    """f32[..., K]; a row of zeros for label −1."""
    return jax.nn.one_hot(label, num_clusters)


def least_loss_cluster(clusters: Clusters, loss: Callable[[Variables], Array]) -> tuple[Array, Array]:
    """IFCA's rule: the active cluster i32[] of least loss, and all losses f32[K], infinite for a slot not in use."""
    losses = jax.lax.map(loss, Variables(clusters.params, clusters.stats))
    losses = jnp.where(clusters.active & jnp.isfinite(losses), losses, jnp.inf)
    return jnp.argmin(losses).astype(jnp.int32), losses


def nearest_by_loss(model: Model, clusters: Clusters, data: ClientData) -> Array:
    """i32[]: the active cluster whose model has the least loss on all of the training rows that a client shows."""
    shown = shown_rows(data)
    return least_loss_cluster(clusters, lambda variables: dataset_loss(model, variables, shown))[0]


def personalize_by_label(state: State, index: Array) -> tuple[Variables, Array]:
    """The model of the client's cluster, alone in its mixture."""
    slot = jnp.maximum(labels(state.clients.membership[index]), 0)
    return tree.broadcast(cluster_variables(state.clusters, slot), 1), jnp.ones(1)


def personalize_by_label_or_loss(model: Model, state: State, data: ClientData, index: Array) -> tuple[Variables, Array]:
    """The model of the client's cluster, or of least training loss for a client that has none yet."""
    own = state.clients.membership[index]
    seen = own.sum() > 0
    slot = parallel.unless(seen, labels(own), lambda: nearest_by_loss(model, state.clusters, data))
    return tree.broadcast(cluster_variables(state.clusters, slot), 1), jnp.ones(1)
