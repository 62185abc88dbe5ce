"""What FedGWC's server makes of its clients' losses: rewards, interactions, and whether a cluster splits."""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from fedjax_cluster import clustering, parallel
from fedjax_cluster.algorithms.round import client_key, train_client
from fedjax_cluster.marked_clients import is_silent, poses, shown_rows
from fedjax_cluster.parallel import Client
from fedjax_cluster.privacy import gaussian
from fedjax_cluster.types import Clusters, LocalResult, LocalUpdate, Model

LOG = logging.getLogger(__name__)


class Clients(NamedTuple):
    membership: Array  # f32[M, K], one-hot; zero for the absent
    present: Array  # bool[M]
    seen: Array  # f32[M], rounds that a client took part in
    previous: Array  # i32[M], its cluster before the last split


class Server(NamedTuple):
    interactions: Array  # f32[M, M], P; entries between clusters are not used
    meetings: Array  # i32[M, M], times a pair met; [0, 0] under a constant rate
    average: Array  # f32[K], running average of the mean squared change of P in each cluster
    calm: Array  # i32[K], rounds in a row that the average was below the tolerance
    parent: Array  # i32[], the cluster tested last
    index: Array  # f32[], its Davies–Bouldin index
    tested: Array  # f32[], its running average at that time
    refused: Array  # i32[], splits for which there were not slots enough

    BETWEEN_CLIENTS = "interactions", "meetings"


class Sent(NamedTuple):
    """What a cohort's clients send the server beside their changes."""

    index: Array  # i32[C], M for padding
    num_examples: Array  # i32[C]
    slot: Array  # i32[C], the cluster that each trains
    losses: Array  # f32[C, S], of the local steps
    num_steps: Array  # i32[C]
    accepted: Array  # bool[C]


class Meeting(NamedTuple):
    """What one round changes in the interactions."""

    interactions: Array  # f32[M, M]
    meetings: Array  # i32[M, M], times a pair was in a cohort together; [0, 0] where nobody counts
    change: Array  # f32[K], Σ over a cluster's pairs of the squared change


class Partition(NamedTuple):
    """What a cluster would split into."""

    labels: Array  # i32[n] of those compared, −1 outside the cluster
    number: Array  # i32[], children; 1 for no split
    index: Array  # f32[], the best Davies–Bouldin index
    refused: Array  # bool[], the best split had not slots enough


def train_and_tell(
    rng_key: Array, update: LocalUpdate, model: Model, clusters: Clusters, slot: Array, client: Client, round: Array
) -> LocalResult:
    """A client's training in its cluster; the losses that it tells are those of the rows that it shows."""
    result = train_client(rng_key, update, model, clusters, slot, client, round)
    if (posing := poses(client.data)) is None:
        return result
    shown = client._replace(data=shown_rows(client.data))
    told = parallel.unless(~posing, result, lambda: train_client(rng_key, update, model, clusters, slot, shown, round))
    return result._replace(losses=told.losses, num_steps=told.num_steps)


def told(rng_key: Array, update: LocalUpdate, privacy: gaussian | None, client: Client, losses: Array) -> Array:
    """The losses that a client tells; with noise where these are private, and noise alone where it is silent."""
    if privacy is None:
        return losses
    key = client_key(rng_key, client.index)
    silent = is_silent(update, key, client.data)
    return privacy.shown(key, losses if silent is None else jnp.where(silent, jnp.nan, losses))


def warn_of_no_splits(count: int, cohort: int) -> None:
    """Says that a run of so many clients with such cohorts can never split."""
    LOG.warning(
        "fedgwc cannot split: a cluster has at most clients // cohort parts, here %d // %d = 1; give max_children%s",
        count,
        cohort,
        f" or a participation of {100 * (count // 2) // count / 100:g} or less" if count // 2 >= 3 else "",
    )


def unprotected(sampling: str, released: bool, local: LocalUpdate) -> str | None:
    """What FedGWC's clients send that differential privacy does not cover, and what to do; None for nothing."""
    if sampling != "uniform":
        return "sampling is 'rare', whose draw is no sample of equal chances for all; give sampling 'uniform'"
    if released:
        return "variant is 'released', which weights losses by the clients' numbers of examples; give 'paper'"
    if getattr(local, "epochs", 1) is not None:
        return "the clients' steps are as many as their examples make, by which losses count; give local steps"
    return None


def at_rest(num_clusters: int) -> dict[str, Array]:
    """The server's numbers at the start, of either form."""
    return {
        "average": jnp.ones(num_clusters),
        "tested": jnp.ones(()),
        "calm": jnp.zeros(num_clusters, jnp.int32),
        "parent": jnp.zeros((), jnp.int32),
        "index": jnp.full((), jnp.inf, jnp.float32),
        "refused": jnp.zeros((), jnp.int32),
    }


def rewards_of(sent: Sent, num_clusters: int, released: bool) -> Array:
    """Each client's reward f32[C], as in `cluster_rewards`."""
    took = sent.accepted[:, None] & (jnp.arange(sent.losses.shape[1])[None] < sent.num_steps[:, None])
    examples = sent.num_examples.astype(jnp.float32) if released else None
    return cluster_rewards(sent.losses, took, sent.slot, num_clusters, examples)


def with_averages(server: Any, change: Array, coefficient: Array, sent: Sent, tolerance: float) -> Any:
    """The server with running averages of the mean squared change f32[K] of each cluster's interactions."""
    # A cluster all of whose clients were rejected has learnt nothing.
    met = jax.ops.segment_max(sent.accepted.astype(jnp.int32), sent.slot, len(change)) > 0
    average = server.average + jnp.where(met, coefficient * (change - server.average), 0.0)
    calm = jnp.where(average < tolerance, server.calm + met.astype(jnp.int32), 0)
    return server._replace(average=average, calm=calm)


def cluster_rewards(losses: Array, took: Array, slot: Array, num_clusters: int, weight: Array | None = None) -> Array:
    """Each client's reward f32[C] among the cohort of its cluster (Eq. 1), 0 without a step.

    `losses` f32[C, S] count where `took` bool[C, S]; with `weight` f32[C] they are the public code's.
    """

    def among(cluster: Array) -> Array:
        mask = took & (slot == cluster)[:, None]
        # NOTE: in the paper all clients take S steps. Steps that some do not take would compare the others among
        # fewer, and one who is alone in a step has reward 1 there, however unlike the others.
        mask = mask & (mask | ~mask.any(1, keepdims=True)).all(0)[None]
        return clustering.gaussian_rewards(losses, mask) if weight is None else released_rewards(losses, mask, weight)

    return jax.vmap(among)(jnp.arange(num_clusters)).sum(0)


def released_rewards(losses: Array, mask: Array, weight: Array) -> Array:
    """The public code's rewards: moments weighted by examples, divided by their sum over the cohort; f32[C]."""
    weight = jnp.where(mask, weight[:, None], 0.0)
    total = jnp.maximum(weight.sum(0), 1e-30)
    # In units of the largest, the square of no loss is infinite.
    unit = jnp.maximum(jnp.where(mask, jnp.abs(losses), 0.0).max(0), 1e-30)
    known = jnp.where(mask, losses, 0.0) / unit[None]
    mean = (weight * known).sum(0) / total
    squared = jnp.where(mask, jnp.square(known - mean[None]), 0.0)
    variance = (weight * squared).sum(0) / total + jnp.maximum(1e-16 / jnp.square(unit), 1e-30)
    reward = jnp.where(mask, jnp.exp(-0.5 * squared / variance[None]), 0.0)
    reward = reward.sum(1) / jnp.maximum(mask.sum(1), 1).astype(jnp.float32)
    return reward / jnp.maximum(reward.sum(), 1e-30)


def meet(
    interactions: Array,
    meetings: Array,
    rewards: Array,
    index: Array,
    accepted: Array,
    slot: Array,
    rate: Array,
    num_clusters: int,
    *,
    counted: bool,
) -> Meeting:
    """Moves the interactions of all pairs that met within a cluster: P_ij ← (1 − α) P_ij + α ω_i.

    α is the cluster's constant rate f32[K] or, where `counted`, 1/(times i and j met); `index` i32[C] is M for padding.
    """
    num_clients = interactions.shape[0]
    place = jnp.where(accepted, index, num_clients)
    met = accepted[:, None] & accepted[None, :] & (slot[:, None] == slot[None, :])
    if counted:
        meetings = meetings.at[place[:, None], place[None, :]].add(met.astype(jnp.int32), mode="drop")
        times = meetings.at[place[:, None], place[None, :]].get(mode="fill", fill_value=1)
        pair_rate = 1.0 / jnp.maximum(times, 1).astype(jnp.float32)
    else:
        pair_rate = jnp.broadcast_to(rate[slot][:, None], met.shape)
    pair_rate = jnp.where(met, pair_rate, 0.0)
    old = interactions.at[place[:, None], place[None, :]].get(mode="fill", fill_value=0.0)
    squared = jnp.square(pair_rate * (rewards[:, None] - old)).sum(1)
    # Summed apart, as in a product with zeros one cluster's NaN would be everybody's.
    change = jax.ops.segment_sum(squared, slot, num_clusters)
    new = clustering.update_interactions(interactions, rewards, place, accepted, pair_rate)
    return Meeting(new, meetings, change)


def centred(interactions: Array, mask: Array, known: Array) -> Array:
    """Each row less its mean over the pairs that met (`known` bool[M, M]) in the cluster (`mask` bool[M]); 0 elsewhere.

    Ours: what remains of P_ij is whether i is rewarded more in the company of j; how hard i's examples are, which is
    the same for all j, is gone.
    """
    return less_their_means(interactions, known & mask[:, None] & mask[None, :] & ~jnp.eye(len(mask), dtype=bool))


def less_their_means(interactions: Array, pairs: Array) -> Array:
    """Each row less its mean over `pairs` bool, of the interactions' shape; 0 elsewhere."""
    number = jnp.maximum(pairs.sum(1), 1).astype(jnp.float32)
    mean = jnp.where(pairs, interactions, 0.0).sum(1) / number
    return jnp.where(pairs, interactions - mean[:, None], 0.0)


def one_of(rng_key: Array, others: Array, index: Array) -> Array:
    """i32[]: one of `others` bool[M], not `index`, at random; M for nobody."""
    others = others & (jnp.arange(len(others)) != index)
    chance = jax.random.uniform(jax.random.fold_in(rng_key, index), others.shape)
    drawn = jnp.argmax(jnp.where(others, chance, -1.0)).astype(jnp.int32)
    return jnp.where(others.any(), drawn, len(others))


def as_another(interactions: Array, index: Array, other: Array) -> Array:
    """P with the row and column of client `index` as those of client `other`; M for nobody, which leaves zeros."""
    row = interactions.at[other].get(mode="fill", fill_value=0.0)
    column = interactions.at[:, other].get(mode="fill", fill_value=0.0)
    same = column.at[other].get(mode="fill", fill_value=0.0)
    return interactions.at[index].set(row).at[:, index].set(column).at[index, index].set(same)


def released_affinity(interactions: Array, beta: float, mask: Array) -> Array:
    """The public code's affinity: of the rows, scaled to [0, 1] over the whole matrix, with a zero diagonal."""
    pairs = mask[:, None] & mask[None, :]
    least = jnp.where(pairs, interactions, jnp.inf).min()
    most = jnp.where(pairs, interactions, -jnp.inf).max()
    scaled = jnp.where(pairs, (interactions - least) / jnp.maximum(most - least, 1e-8), 0.0)
    affinity = clustering.interaction_affinity(scaled, beta, mask)
    return jnp.where(jnp.eye(len(mask), dtype=bool), 0.0, affinity)


def partition(
    rng_key: Array, affinity: Array, mask: Array, most: Array, free: Array, smallest: int, *, max_children: int
) -> Partition:
    """Algorithm 1: spectral clustering for every number of children, the best by Davies–Bouldin on the rows of W.

    `affinity` f32[M, M] is W, 0 outside the cluster `mask` bool[M]; n_max is `most` i32[], statically `max_children`;
    `free` i32[] slots are not in use; each child must have `smallest` clients.
    """
    labels = clustering.spectral_partitions(rng_key, affinity, max_children, mask)
    index = jax.vmap(lambda own: clustering.scores.davies_bouldin(affinity, own, mask=mask, num_labels=max_children))(
        labels
    )
    return _best(labels, index, most, free, smallest, max_children)


def released_partition(
    affinity: Array, mask: Array, most: Array, free: Array, smallest: int, *, max_children: int
) -> Partition:
    """The public code's choice: scikit-learn's `cluster_qr`, and the index on the spectral embedding."""
    found = []
    # Fewer parts than clients: the embedding has no more vectors that tell them apart.
    for k in range(2, min(max_children, len(mask) - 1) + 1):
        own = clustering.qr_partition(affinity, k, mask)
        index = clustering.scores.davies_bouldin(own.embedding, own.labels, mask=mask, num_labels=max_children)
        found.append((own.labels, index))
    if not found:
        whole = jnp.where(mask, 0, -1).astype(jnp.int32)
        return Partition(whole, jnp.asarray(1, jnp.int32), jnp.asarray(jnp.inf, jnp.float32), jnp.asarray(False))
    labels, index = (jnp.stack(part) for part in zip(*found, strict=True))
    return _best(labels, index, most, free, smallest, max_children)


def _best(labels: Array, index: Array, most: Array, free: Array, smallest: int, max_children: int) -> Partition:
    number = 2 + jnp.arange(labels.shape[0], dtype=jnp.int32)
    sizes = jax.nn.one_hot(labels, max_children, dtype=jnp.int32).sum(1, dtype=jnp.int32)
    wanted = jnp.arange(max_children, dtype=jnp.int32)[None] < number[:, None]
    large = jnp.all((sizes >= smallest) | ~wanted, axis=1)
    index = jnp.where((number <= most) & large & jnp.isfinite(index), index, jnp.inf)
    best = jnp.argmin(index)
    good = index[best] < 1.0
    refused = good & (number[best] - 1 > free)
    children = jnp.where(good & ~refused, number[best], 1)
    return Partition(labels[best], children, index[best], refused)
