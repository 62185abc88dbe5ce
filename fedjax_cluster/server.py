"""What the server does with the clients' changes: mean per cluster, optimiser step, shared layers, compression."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import optax
from jax import Array

from fedjax_cluster import tree
from fedjax_cluster.parallel.loop import Reduced
from fedjax_cluster.types import Clusters, PyTree

Rounding = Literal["nearest", "zero"]
Weighting = Literal["examples", "uniform"]


def client_weight(weighting: Weighting, num_examples: Array) -> Array:
    """f32[]: a client's weight in its cluster's mean."""
    return num_examples.astype(jnp.float32) if weighting == "examples" else jnp.ones(())


def weighted_mean(reduced: Reduced) -> PyTree:
    """Σ weight·value / Σ weight per cluster; zeros for a cluster without clients."""
    return tree.scale_rows(reduced.total, jnp.where(reduced.weight > 0, 1 / jnp.maximum(reduced.weight, 1e-30), 0.0))


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
    mean = weighted_mean(reduced)
    updates, state = jax.vmap(optimizer.update)(
        jax.tree.map(jnp.negative, mean["delta"]), clusters.optimizer, clusters.params
    )
    old = (clusters.params, clusters.stats, clusters.optimizer)
    new = (optax.apply_updates(clusters.params, updates), mean["stats"], state)
    occupied, finite = reduced.weight > 0, _still_finite(new, old)
    params, stats, state = tree.where(occupied & finite, new, old)
    return clusters._replace(params=params, stats=stats, optimizer=state), occupied & ~finite


def _still_finite(new: PyTree, old: PyTree) -> Array:
    """bool[K]: rows of leaves [K, ...] in which nothing that was finite is NaN or infinite now."""

    def rows(new: Array, old: Array) -> Array:
        # An optimiser's state may begin with infinity, such as the best loss so far.
        return (jnp.isfinite(new) | ~jnp.isfinite(old)).reshape(len(new), -1).all(1)

    return functools.reduce(jnp.logical_and, jax.tree.leaves(jax.tree.map(rows, new, old)))


def share_layers(clusters: Clusters, patterns: Sequence[str], weight: Array) -> Clusters:
    """Averages chosen layers over all clients: over the clusters, weighted as their clients were.

    θ_shared = Σ_k n_k θ_k / Σ_k n_k, written to every active cluster; statistics of a chosen layer follow it.

    Args:
      clusters: the K models.
      patterns: parameter paths as in `tree.match`, such as `["!output"]`.
      weight: i32[K] or f32[K], sums of the clients' weights; their number where these are uniform.
    """
    weight = weight.astype(jnp.float32)
    weight = weight / jnp.maximum(weight.sum(), 1.0)

    def share(leaf: Array) -> Array:
        mean = jnp.tensordot(weight, leaf, axes=1, precision="highest")
        return jnp.where(weight.sum() > 0, jnp.broadcast_to(mean, leaf.shape), leaf)

    def shared(leaves: PyTree, chosen: PyTree) -> PyTree:
        return jax.tree.map(lambda leaf, pick: share(leaf) if pick else leaf, leaves, chosen)

    params = shared(clusters.params, tree.match(clusters.params, patterns))
    stats = shared(clusters.stats, tree.match(clusters.stats, patterns, strict=False))
    return clusters._replace(params=params, stats=stats)


def shared_part(params: PyTree, patterns: Sequence[str]) -> float:
    """The share of the parameters that are in shared layers."""
    if not patterns:
        return 0.0
    leaves, chosen = jax.tree.leaves(params), jax.tree.leaves(tree.match(params, patterns))
    return sum(leaf.size for leaf, pick in zip(leaves, chosen, strict=True) if pick) / tree.size(params)


def keep_decimals(values: PyTree, decimals: int | None, rounding: Rounding = "nearest") -> PyTree:
    """Keeps `decimals` digits after the decimal point, ⌊10ⁿ v⌉ / 10ⁿ (CFL-GP, App. E.1).

    Args:
      values: any leaves.
      decimals: n; None keeps all.
      rounding: to the "nearest" such number, or towards "zero" (truncation).

    >>> [f"{float(keep_decimals(jnp.asarray(0.129), 2, rounding)):.2f}" for rounding in ("nearest", "zero")]
    ['0.13', '0.12']
    """
    if decimals is None:
        return values
    whole = jnp.round if rounding == "nearest" else jnp.trunc
    return jax.tree.map(lambda leaf: whole(leaf * 10.0**decimals) / 10.0**decimals, values)
