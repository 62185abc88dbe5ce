"""What the server does with the clients' changes: one of each cluster's, optimiser step, shared layers, compression."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import optax
from jax import Array

from fedjax_cluster import tree
from fedjax_cluster.aggregation import Aggregation, Rows
from fedjax_cluster.clustering import checks
from fedjax_cluster.joined_leaves import JoinedLeaves
from fedjax_cluster.parallel.contributions import Contribution, Reduced
from fedjax_cluster.parallel.loop import Client, Mapped, for_each_client
from fedjax_cluster.privacy.gaussian import Release
from fedjax_cluster.types import ONE_DEVICE, ClientMapping, Clusters, Cohort, PyTree, Variables

LOG = logging.getLogger(__name__)
NO_STATISTICS = (
    "privacy is given, but the model has batch-norm statistics, which clients would send as they are; take a model "
    "without, such as mlp, cnn or lenet5"
)
Rounding = Literal["nearest", "zero"]
Weighting = Literal["examples", "uniform"]


class Aggregated(NamedTuple):
    """What a server makes of the values of each cluster's clients."""

    value: PyTree  # leaves [K, ...]; zeros, or anything, for a cluster without clients
    weight: Array  # f32[K]: Σ weight of the clients
    clip: Array | None = None  # f32[K, L], the next round's, where that follows a quantile


def client_weight(weighting: Weighting, num_examples: Array) -> Array:
    """f32[]: a client's weight in its cluster's mean."""
    return num_examples.astype(jnp.float32) if weighting == "examples" else jnp.ones(())


def weighted_mean(reduced: Reduced) -> PyTree:
    """Σ weight·value / Σ weight per cluster; zeros for a cluster without clients."""
    some = reduced.weight > 0
    return tree.scale_rows(reduced.total, jnp.where(some, 1 / jnp.where(some, reduced.weight, 1.0), 0.0))


def aggregate_clients(
    fn: Callable[..., Any],
    cohort: Cohort,
    *rows: PyTree,
    num_slots: int,
    contribute: Callable[..., Any],
    collect: Callable[..., PyTree],
    aggregation: Aggregation | None = None,
    private: Release | None = None,
    active: Array | None = None,
    parts: int | None = None,
    **own: Any,
) -> tuple[Aggregated, Mapped]:
    """`parallel.for_each_client` whose contributions are aggregated: averaged in a stream, or kept for another rule.

    Args:
      fn, cohort, rows, num_slots, collect, parts, own (with renew): as in `for_each_client`.
      contribute: `output -> Contribution`; of parts as `reduce` there, each to the slot of its number.
      aggregation: None is the mean weighted by the contributions; a rule that does not stream keeps all, [C, d].
      private: clips and noises the mean of {"delta": ..., "stats": ...}, in place of an aggregation.
      active: bool[K], the clusters that take a step where it is private; None is all.

    Returns:
      What is aggregated, and what was mapped.
    """
    streams = private is None and (aggregation is None or aggregation.streams)
    if parts is not None and not streams:
        # All of a client's at once: they are clipped together, and rules see them side by side.
        fn, contribute, collect, own = _at_once(fn, contribute, collect, parts, own)
        parts = None
    mapped = functools.partial(for_each_client, fn, cohort, *rows, num_slots=num_slots, **own)
    if private is not None:
        found = mapped(
            reduce=lambda output: _limited(private, contribute(output)),
            collect=lambda output: (contribute(output).slot, collect(output)),
        )
        slot, collected = found.collected
        means = _private_means(private, found.reduced, slot, cohort.mask, active)
        return means, found._replace(collected=collected)
    if aggregation is None or aggregation.streams:
        reduce = contribute if aggregation is None else _each_limited(aggregation, contribute)
        found = mapped(reduce=reduce, collect=collect, parts=parts)
        return Aggregated(weighted_mean(found.reduced), found.reduced.weight), found
    found = mapped(collect=lambda output: (contribute(output), collect(output)))
    sent, collected = found.collected
    combined = combine(aggregation, sent, found.accepted, num_slots, cohort.mapping)
    return combined, found._replace(collected=collected)


def _at_once(fn: Callable[..., Any], contribute: Any, collect: Any, parts: int, own: dict[str, Any]) -> Any:
    """The functions of clients whose contributions are made one after the other, as those of contributions to slots."""

    def whole(client: Client, *rows: PyTree) -> Any:
        output = fn(client, *rows)
        sent, further = jax.lax.map(
            lambda number: contribute(client, output, number), jnp.arange(parts, dtype=jnp.int32)
        )
        return output, sent, further

    if (renew := own.get("renew")) is not None:
        own = {**own, "renew": lambda found: renew(found[0])}
    return whole, lambda found: found[1], lambda found: collect(found[0], found[2]), own


def _each_limited(aggregation: Aggregation, contribute: Callable[..., Any]) -> Callable[..., Any]:
    """`contribute` as a rule that streams has it, whether it gives a contribution alone or with something further."""

    def within(*given: Any) -> Any:
        found = contribute(*given)
        if isinstance(found, Contribution):
            return limited(aggregation, found)
        contribution, further = found
        return limited(aggregation, contribution), further

    return within


def limited(aggregation: Aggregation, contribution: Contribution) -> Contribution:
    """A client's contribution, to one cluster or several, as a rule that streams has it."""
    limit = jax.vmap(aggregation.limit) if contribution.slot.ndim else aggregation.limit
    return contribution._replace(value=limit(contribution.value))


def combine(
    aggregation: Aggregation, sent: Contribution, accepted: Array, num_slots: int, mapping: ClientMapping = ONE_DEVICE
) -> Aggregated:
    """What a rule makes of the contributions of C clients, leaves [C, ...], or [C, S, ...] to several clusters each.

    Those that are not accepted, bool[C], of no cluster (−1) or without weight are left out; 0 for a cluster of none.
    """
    kept = accepted.reshape((-1,) + (1,) * (sent.slot.ndim - 1)) & (sent.weight > 0) & (sent.slot >= 0)
    slot, weight = jnp.where(kept, sent.slot, num_slots), jnp.where(kept, sent.weight, 0.0)
    value = tree.where(kept, sent.value, jax.tree.map(jnp.zeros_like, sent.value))
    value = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[slot.ndim :]).astype(jnp.float32), value)
    rows = Rows(value, slot.reshape(-1).astype(jnp.int32), weight.reshape(-1), mapping)
    total = jnp.zeros(num_slots + 1, jnp.float32).at[rows.slot].add(rows.weight)[:num_slots]
    found = aggregation.combine(rows, num_slots)
    shapes = {jnp.shape(leaf)[:1] for leaf in jax.tree.leaves(found)}
    if shapes - {(num_slots,)} or jax.tree.structure(found) != jax.tree.structure(value):
        raise ValueError(
            f"combine of {type(aggregation).__name__} gives {jax.tree.structure(found)} with first axes "
            f"{sorted(shapes)}; it must give what it gets, {jax.tree.structure(value)}, with a row for each of "
            f"{num_slots} clusters"
        )
    # A rule may give anything there, NaN too, which nothing that it is multiplied with makes 0.
    return Aggregated(tree.where(total > 0, found, jax.tree.map(jnp.zeros_like, found)), total)


def _limited(private: Release, contribution: Contribution) -> Contribution:
    """A client's contribution as a private mean has it; all clients count alike."""
    if jax.tree.leaves(contribution.value["stats"]):
        raise ValueError(NO_STATISTICS)
    value = private.limit(contribution.slot, contribution.value["delta"])
    # Of no cluster (−1): sums would add it to the last one.
    return Contribution(contribution.slot, (contribution.slot >= 0).astype(jnp.float32), value)


def _private_means(
    private: Release, reduced: Reduced, slot: Array, mask: Array, active: Array | None = None
) -> Aggregated:
    """The noised means of sums; who is of no cluster (−1) counts in none, `slot` i32[C] or i32[C, S], mask bool[C]."""
    clusters = len(reduced.weight)
    counted = mask.reshape((-1,) + (1,) * (slot.ndim - 1))
    # Whether a client sent something finite would tell of it, so that all are counted.
    count = jax.nn.one_hot(jnp.where(counted, slot, -1).reshape(-1), clusters, dtype=jnp.float32).sum(0)
    active = jnp.ones(clusters, bool) if active is None else active
    delta, count, clip = private.means(reduced.total, count, active)
    return Aggregated({"delta": delta, "stats": {}}, count, clip)


def private_rows(private: Release, sent: Contribution, mask: Array, accepted: Array) -> Reduced:
    """`reduce_rows` with a private mean: as sums, of which each is a mean with the weight 1."""
    if jax.tree.leaves(sent.value["stats"]):
        raise ValueError(NO_STATISTICS)
    kept = sent._replace(weight=(sent.slot >= 0).astype(jnp.float32))
    value = jax.vmap(private.limit)(sent.slot, sent.value["delta"])
    sums = reduce_rows(None, kept._replace(value=value), accepted, len(private.clip))
    found = _private_means(private, sums, sent.slot, mask)
    some = found.weight > 0
    return Reduced(found.value, some.astype(jnp.float32), some.astype(jnp.int32), jnp.zeros((), jnp.int32))


def reduce_rows(
    aggregation: Aggregation | None,
    sent: Contribution,
    accepted: Array,
    num_slots: int,
    mapping: ClientMapping = ONE_DEVICE,
) -> Reduced:
    """Sums over contributions that were kept, leaves [C, ...]; of a rule, what it makes of them with weight 1.

    The others' values are finite: a sum takes them 0 times.
    """
    if aggregation is not None and not aggregation.streams:
        found = combine(aggregation, sent, accepted, num_slots, mapping)
        some = found.weight > 0
        return Reduced(found.value, some.astype(jnp.float32), some.astype(jnp.int32), jnp.zeros((), jnp.int32))
    value = sent.value if aggregation is None else jax.vmap(aggregation.limit)(sent.value)
    assignment = (
        jax.nn.one_hot(sent.slot, num_slots, dtype=jnp.float32) * jnp.where(accepted, sent.weight, 0.0)[:, None]
    )

    def sums(leaf: Array) -> Array:
        flat = leaf.reshape(leaf.shape[0], -1).astype(jnp.float32)
        return jnp.matmul(assignment.T, flat, precision="highest").reshape(num_slots, *leaf.shape[1:])

    counts = jnp.sum((assignment > 0).astype(jnp.int32), 0)
    return Reduced(jax.tree.map(sums, value), jnp.sum(assignment, 0), counts, jnp.zeros((), jnp.int32))


def with_optimizer(clusters: Clusters, optimizer: optax.GradientTransformation) -> Clusters:
    """Clusters with a fresh state of the server's optimiser each."""
    return clusters._replace(optimizer=jax.vmap(optimizer.init)(clusters.params))


def update_clusters(
    optimizer: optax.GradientTransformation, clusters: Clusters, reduced: Reduced
) -> tuple[Clusters, Array]:
    """Takes one optimiser step per cluster on minus its clients' mean change; clusters without clients stay.

    θ_k ← θ_k + optimizer(−mean_k Δθ); `optax.sgd(1.0)` is plain averaging. A step after which model or optimiser held
    NaN or infinity is not taken.

    Args:
      optimizer: any optax transformation.
      clusters: the K models, with its states.
      reduced: sums of {"delta": Δθ, "stats": batch-norm statistics} over the cohort.

    Returns:
      The clusters, and which of them, bool[K], did not take the step that their clients sent.
    """
    return step_clusters(optimizer, clusters, Aggregated(weighted_mean(reduced), reduced.weight))


def step_clusters(
    optimizer: optax.GradientTransformation, clusters: Clusters, sent: Aggregated
) -> tuple[Clusters, Array]:
    """`update_clusters` with what the server made of the clients' changes in another way than by their mean."""
    mean = sent.value
    updates, state = jax.vmap(optimizer.update)(
        jax.tree.map(jnp.negative, mean["delta"]), clusters.optimizer, clusters.params
    )
    old = (clusters.params, clusters.stats, clusters.optimizer)
    # Means of narrow numbers are float32.
    new = tree.of_types((optax.apply_updates(clusters.params, updates), mean["stats"], state), old)
    leaves = JoinedLeaves(old, leading=1)
    new, kept = leaves.join(new), leaves.join(old)
    occupied, finite = sent.weight > 0, _still_finite(new, kept)
    params, stats, state = leaves.split(tree.where(occupied & finite, new, kept))
    if sent.clip is not None:
        state = state._replace(clip=sent.clip)
    return clusters._replace(params=params, stats=stats, optimizer=state), occupied & ~finite


def _still_finite(new: PyTree, old: PyTree) -> Array:
    """bool[K]: rows of leaves [K, ...] in which nothing that was finite is NaN or infinite now."""

    def rows(new: Array, old: Array) -> Array:
        # An optimiser's state may begin with infinity, such as the best loss so far.
        return (jnp.isfinite(new) | ~jnp.isfinite(old)).reshape(len(new), -1).all(1)

    return functools.reduce(jnp.logical_and, jax.tree.leaves(jax.tree.map(rows, new, old)))


def share_layers(clusters: Clusters, patterns: Sequence[str], weight: Array) -> Clusters:
    """Averages chosen layers over all clients: over the clusters, weighted as their clients were.

    θ_shared = Σ_k n_k θ_k / Σ_k n_k over active clusters, written to every slot, so that one that becomes active later
    has them; statistics of a chosen layer follow it. Without a weight above 0 all stay.

    Args:
      clusters: the K models.
      patterns: parameter paths as in `tree.match`, such as `["!output"]`.
      weight: i32[K] or f32[K], sums of the clients' weights; their number where these are uniform.
    """
    weight = jnp.where(clusters.active, weight, 0).astype(jnp.float32)
    total = weight.sum()
    weight = weight / jnp.where(total > 0, total, 1.0)

    def share(leaf: Array) -> Array:
        # A model without clients may hold NaN, which no weight of 0 takes out of a sum.
        kind = leaf.dtype if leaf.dtype == jnp.float64 else jnp.float32
        kept = tree.where(weight > 0, leaf, jnp.zeros_like(leaf)).astype(kind)
        mean = jnp.tensordot(weight.astype(kind), kept, axes=1, precision="highest")
        return jnp.where(total > 0, jnp.broadcast_to(mean.astype(leaf.dtype), leaf.shape), leaf)

    def shared(leaves: PyTree, chosen: PyTree) -> PyTree:
        return jax.tree.map(lambda leaf, pick: share(leaf) if pick else leaf, leaves, chosen)

    params = shared(clusters.params, tree.match(clusters.params, patterns))
    stats = shared(clusters.stats, tree.match(clusters.stats, patterns, strict=False))
    return clusters._replace(params=params, stats=stats)


def shared_part(models: Clusters | Variables, patterns: Sequence[str]) -> float:
    """The share of a model's bytes that are in shared layers; statistics of a chosen layer follow it."""
    if not patterns:
        return 0.0
    numbers = models.params, models.stats
    chosen = tree.match(models.params, patterns), tree.match(models.stats, patterns, strict=False)
    pairs = zip(*map(jax.tree.leaves, (numbers, chosen)), strict=True)
    return tree.num_bytes([leaf for leaf, pick in pairs if pick]) / tree.num_bytes(numbers)


def params_part(models: Clusters | Variables) -> float:
    """The share of a model's bytes that are parameters; the others are statistics of batch norm."""
    return tree.num_bytes(models.params) / tree.num_bytes((models.params, models.stats))


def warn_of_sharing(method: str, params: PyTree, patterns: Sequence[str], none: str, everything: str) -> None:
    """Where layers that a method has in common are none of a model's, or all, another method is meant.

    Args:
      method: its name.
      params: of a model, or of K.
      patterns: parameter paths as in `tree.match`; without any nothing was asked for.
      none, everything: what follows from sharing nothing and all.
    """
    part = shared_part(Variables(params, {}), patterns)
    if patterns and part in (0.0, 1.0):
        what, then = ("every parameter", everything) if part else ("no parameter of this model", none)
        paths = ", ".join(patterns)
        LOG.warning("%s: shared_layers %s has %s, so that %s; give other paths", method, paths, what, then)


def keep_decimals(values: PyTree, decimals: int | None, rounding: Rounding = "nearest") -> PyTree:
    """Keeps `decimals` digits after the decimal point, ⌊10ⁿ v⌉ / 10ⁿ (CFL-GP, App. E.1).

    Args:
      values: any leaves, whose types they keep; whole numbers stay as they are.
      decimals: n; None keeps all.
      rounding: to the "nearest" such number, or towards "zero" (truncation).

    Raises:
      ValueError: an unknown rounding.

    >>> [f"{float(keep_decimals(jnp.asarray(0.129), 2, rounding)):.2f}" for rounding in ("nearest", "zero")]
    ['0.13', '0.12']
    """
    checks.choice(rounding, "rounding", get_args(Rounding))
    if decimals is None:
        return values
    whole, factor = jnp.round if rounding == "nearest" else jnp.trunc, 10.0**decimals

    def keep(leaf: Array) -> Array:
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return leaf
        wide = leaf.astype(jnp.float64 if leaf.dtype == jnp.float64 else jnp.float32)
        large = wide * factor
        # What overflows has no digit after the point.
        return jnp.where(jnp.isfinite(large), whole(large) / factor, wide).astype(leaf.dtype)

    return jax.tree.map(keep, values)
