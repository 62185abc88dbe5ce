"""The round that hard-clustered methods share: every client trains its cluster's model, the server averages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedjax_cluster import tree
from fedjax_cluster.local import client_key, dataset_loss, mean_of_steps
from fedjax_cluster.parallel.loop import Client, Contribution
from fedjax_cluster.server import Weighting, client_weight, share_layers
from fedjax_cluster.types import (
    ClientData,
    Clusters,
    Costs,
    DatasetInfo,
    LocalResult,
    LocalUpdate,
    Model,
    Population,
    RoundInfo,
    State,
    Variables,
)


class HardClients(NamedTuple):
    """What a hard-clustered method keeps of its clients."""

    membership: Array  # f32[M, K], one-hot; zero for the absent
    present: Array  # bool[M]


class Report(NamedTuple):
    """What every client reports of its local training, besides its contribution."""

    loss: Array  # f32[], mean over its steps
    num_steps: Array  # i32[]


def init_clusters(rng_key: Array, model: Model, info: DatasetInfo, num_clusters: int) -> Clusters:
    """K models initialised independently; model k is the same whatever K."""
    keys = jax.vmap(jax.random.fold_in, (None, 0))(rng_key, jnp.arange(num_clusters))
    variables = jax.vmap(lambda key: model.init(key, info))(keys)
    return Clusters(variables.params, variables.stats, jnp.ones(num_clusters, bool))


def tie_layers(clusters: Clusters, patterns: Sequence[str]) -> Clusters:
    """Starts the shared layers of every cluster from those of the first."""
    if not patterns:
        return clusters
    first = jnp.zeros_like(clusters.active, jnp.float32).at[0].set(1.0)
    return share_layers(clusters, patterns, first)


def cluster_variables(clusters: Clusters, slot: Array) -> Variables:
    """The model of one cluster."""
    return jax.tree.map(lambda leaf: leaf[slot], Variables(clusters.params, clusters.stats))


def labels(weights: Array) -> Array:
    """i32[M]: the cluster of each client; −1 where it has none.

    >>> labels(jnp.asarray([[0., 1.], [0., 0.]])).tolist()
    [1, -1]
    """
    return jnp.where(weights.sum(-1) > 0, jnp.argmax(weights, -1), -1).astype(jnp.int32)


def one_hot(label: Array, num_clusters: int) -> Array:
    """f32[..., K]; a row of zeros for label −1."""
    return jax.nn.one_hot(label, num_clusters)


def contribute(slot: Array, result: LocalResult, weighting: Weighting) -> Contribution:
    """A client's change and batch-norm statistics, to be averaged in its cluster."""
    weight = client_weight(weighting, result.num_examples)
    return Contribution(slot, weight, {"delta": result.delta, "stats": result.stats})


def report(result: LocalResult) -> Report:
    return Report(mean_of_steps(result), result.num_steps)


def train_client(
    rng_key: Array, local: LocalUpdate, model: Model, clusters: Clusters, slot: Array, client: Client
) -> LocalResult:
    """One client's local training from the model of its cluster."""
    return local.run(client_key(rng_key, client.index), model, cluster_variables(clusters, slot), client.data)


def round_info(
    slot: Array,
    reports: Report,
    mask: Array,
    accepted: Array,
    num_clusters: int,
    num_changed: Array,
    costs: Costs,
    event: Array | bool = False,
) -> RoundInfo:
    """The report of a round of hard clusters.

    Args:
      slot: i32[C], each client's cluster in this round.
      reports: leaves [C].
      mask: bool[C], who took part.
      accepted: bool[C], whose update was finite.
      num_clusters: K.
      num_changed: i32[].
      costs: the round's.
      event: whether the round loop should stop after this round.
    """
    counted = mask & accepted
    members = one_hot(jnp.where(counted, slot, -1), num_clusters)
    count = members.sum(0)
    loss = jnp.where(counted, reports.loss, 0.0) @ members
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
        loss=jnp.full(num_clusters, jnp.nan),
        num_clients=jnp.zeros(num_clusters, jnp.int32),
        num_changed=jnp.zeros((), jnp.int32),
        num_rejected=jnp.zeros((), jnp.int32),
        costs=jax.tree.map(lambda cost: jnp.asarray(cost, jnp.float32), costs or Costs()),
        event=jnp.asarray(False),
    )


def personalize_by_label(rng_key: Array, state: State, client: ClientData, index: Array) -> tuple[Variables, Array]:
    """The model of the client's own cluster, alone in its mixture."""
    slot = jnp.maximum(labels(state.clients.membership[index]), 0)
    return tree.broadcast(cluster_variables(state.clusters, slot), 1), jnp.ones(1)


def personalize_by_label_or_loss(
    model: Model, state: State, client: ClientData, index: Array
) -> tuple[Variables, Array]:
    """The model of the client's own cluster, or of least training loss for a client that has none yet."""
    seen = state.clients.membership[index].sum() > 0
    least, _ = jax.lax.cond(
        seen,
        lambda: (jnp.zeros((), jnp.int32), jnp.zeros_like(state.clients.membership[index])),
        lambda: least_loss_cluster(state.clusters, lambda variables: dataset_loss(model, variables, client)),
    )
    slot = jnp.where(seen, labels(state.clients.membership[index]), least)
    return tree.broadcast(cluster_variables(state.clusters, slot), 1), jnp.ones(1)


def least_loss_cluster(clusters: Clusters, loss: Callable[[Variables], Array]) -> tuple[Array, Array]:
    """IFCA's rule: the active cluster whose model has the least loss.

    Args:
      clusters: K models.
      loss: variables -> f32[], on the client's training rows.

    Returns:
      (slot i32[], losses f32[K], infinite for a slot not in use).
    """
    losses = jax.lax.map(loss, Variables(clusters.params, clusters.stats))
    losses = jnp.where(clusters.active & jnp.isfinite(losses), losses, jnp.inf)
    return jnp.argmin(losses).astype(jnp.int32), losses


def present_clients(population: Population) -> Array:
    """bool[M]: clients with examples, on one device.

    Fetched first: what `init` then makes of it operation by operation would, on arrays divided among devices, be many
    small programs with collectives at once, which on a CPU can wait for each other's threads.
    """
    return jnp.asarray(np.asarray(population.data.num_examples) > 0)


def check_clusters(num_clusters: int, population: Population) -> None:
    """Raises a ValueError where K clusters cannot be made of the clients there are."""
    num_clients = int(np.sum(np.asarray(population.data.num_examples) > 0))
    if num_clusters < 1:
        raise ValueError(f"clusters is {num_clusters}; at least one cluster is needed")
    if num_clusters > num_clients:
        raise ValueError(
            f"clusters is {num_clusters} but there are only {num_clients} clients; ask for at most {num_clients}"
        )


def describe(local: LocalUpdate, **own: Any) -> dict[str, Any]:
    """A method's configuration as it goes into `config.json`."""
    return {**own, "local": dict(local.config)}
