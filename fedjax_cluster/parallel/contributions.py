"""What clients contribute to the sums over clusters: checked, weighted and added up, one by one or side by side."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from fedjax_cluster import tree
from fedjax_cluster.types import PyTree

# For so many clusters a TPU adds up a chunk's changes as it reads them; for a product XLA makes two copies of them all
# (compiled for a v5e, a round of FedAvg with the CNN writes and reads 0.6 of the bytes, of IFCA 0.5, of FedEM 0.35).
# Products are 4 to 12 times as fast on a CPU.
FEW_SLOTS = 4
ATTEMPTS = "sums_of_parts"  # a loop's name in compiled programs: of one turn, but for changes that are not finite


class Contribution(NamedTuple):
    """What one client adds to the sums over clusters: `weight · value` to row `slot`.

    A client may contribute to several slots: then all three carry a leading axis [S].
    """

    slot: Array  # i32[] or i32[S]
    weight: Array  # f32[] or f32[S]
    value: PyTree  # leaves [...] or [S, ...]


class Reduced(NamedTuple):
    """Sums over the clients of a cohort."""

    total: PyTree  # leaves [K, ...]: Σ weight · value
    weight: Array  # f32[K]: Σ weight
    count: Array  # i32[K]: contributions with a positive weight
    num_rejected: Array  # i32[]: clients left out for a value that is not finite, or whose square is not


def can_be_added(contribution: Contribution | None, collected: Any) -> Array:
    """bool[]: all of what a client sends is finite, and its contribution's square too.

    Reports have that square (`round.size_of`), which so is all that is read of an update as large as a model.
    """
    if contribution is None:
        return tree.all_finite(collected)
    floats = [leaf for leaf in contribution.value if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    squares = [jnp.sum(jnp.square(leaf.astype(jnp.float32))) for leaf in floats]
    return tree.all_finite((contribution._replace(value=squares), collected))


def add_one(reduced: Reduced, contribution: Contribution, mask: Array, finite: Array) -> Reduced:
    if contribution.slot.ndim:
        batched = jax.tree.map(lambda leaf: leaf[None], contribution)
        return add_many(reduced, batched, mask[None], finite[None])
    slot, weight, value = contribution
    weight = jnp.where(mask & finite, weight, 0.0)

    def add(total, value):
        # One row in place: adding weight · value to all K rows would move K times the memory.
        old = lax.dynamic_index_in_dim(total, slot, 0, keepdims=False)
        new = old + weight * jnp.where(finite, value, 0).astype(jnp.float32)
        return lax.dynamic_update_index_in_dim(total, new, slot, 0)

    return Reduced(
        jax.tree.map(add, reduced.total, value),
        reduced.weight.at[slot].add(weight),
        reduced.count.at[slot].add((weight > 0).astype(jnp.int32)),
        reduced.num_rejected + (mask & ~finite).astype(jnp.int32),
    )


def _product(assignment: Array, rows: Array) -> Array:
    """Sums [K, ...] of rows [n, ...], or [n, S, ...], with weights f32[n, K], or [n, S, K]; 0 leaves a row out."""
    counted = jnp.any(assignment != 0, axis=-1)
    rows = tree.where(counted, rows, jnp.zeros_like(rows)).astype(jnp.float32)
    weights, shape = assignment.reshape(-1, assignment.shape[-1]), rows.shape[counted.ndim :]
    sums = jnp.matmul(weights.T, rows.reshape(len(weights), math.prod(shape)), precision="highest")
    return sums.reshape(len(sums), *shape)


def _sums(assignment: Array, rows: Array) -> Array:
    """`_product` that reads the rows where they lie: what is left out is so as it is added, not in a copy."""
    summed = assignment.ndim - 1
    weights = jnp.moveaxis(assignment, -1, 0)
    weights = weights.reshape(*weights.shape, *(1 for _ in rows.shape[summed:]))
    parts = jnp.where(weights != 0, weights * rows[None].astype(jnp.float32), 0.0)
    return jnp.sum(parts, axis=tuple(range(1, 1 + summed)))


def add_many(reduced: Reduced, contribution: Contribution, mask: Array, finite: Array) -> Reduced:
    num_slots = len(reduced.weight)
    slot, weight, value = contribution
    keep = (mask & finite).reshape((-1,) + (1,) * (slot.ndim - 1))
    weight = jnp.where(keep, weight, 0.0)
    assignment = jax.nn.one_hot(slot, num_slots) * weight[..., None]  # [n, K] or [n, S, K]

    def add(total, leaf):
        if num_slots > FEW_SLOTS:
            return total + _product(assignment, leaf)
        return total + lax.platform_dependent(assignment, leaf, tpu=_sums, default=_product)

    assignment_of_all = assignment.reshape(-1, num_slots)
    return Reduced(
        jax.tree.map(add, reduced.total, value),
        reduced.weight + assignment_of_all.sum(0),
        reduced.count + (assignment_of_all > 0).astype(jnp.int32).sum(0),
        reduced.num_rejected + (mask & ~finite).astype(jnp.int32).sum(),
    )


def add_in_parts(
    parts: int,
    part_of: Callable[[Array], tuple[Contribution, PyTree]],
    add: Callable[..., Reduced],
    check: Callable[..., Array],
    whole: Callable[[PyTree], Array],
    mask: Array,
    reduced: Reduced,
) -> tuple[Reduced, Array, PyTree]:
    """The sums with several contributions of each client, of which one at a time is there.

    Who contributes anything infinite or NaN has no part in the sums, which are then made again without it: the work of
    all whose contributions are added up together is done twice.

    Args:
      parts: S, contributions of each.
      part_of: `number i32[] -> (contribution, further small arrays)` of one client, or of each of several.
      add, check: `add_one` and `can_be_added`, or for several clients.
      whole: whether what comes of the further arrays, leaves [S, ...], is finite, as the mask.
      mask: bool[] or bool[n], who takes part.
      reduced: the sums before.

    Returns:
      The sums, of whom all was finite (as the mask), and the further arrays, leaves [S, ...].
    """
    further = jax.eval_shape(part_of, jax.ShapeDtypeStruct((), jnp.int32))[1]
    nothing = jax.tree.map(lambda leaf: jnp.zeros((parts, *leaf.shape), leaf.dtype), further)

    def attempt(state: tuple[Array, Array, Array, Reduced, PyTree]) -> tuple[Array, Array, Array, Reduced, PyTree]:
        keep = state[1]

        def one(number: Array, carry: tuple[Reduced, Array, PyTree]) -> tuple[Reduced, Array, PyTree]:
            sums, finite, told = carry
            contribution, more = part_of(number)
            good = check(contribution, more)
            told = jax.tree.map(lambda all, new: lax.dynamic_update_index_in_dim(all, new, number, 0), told, more)
            return add(sums, contribution, keep, good), finite & good, told

        start = reduced, jnp.ones_like(mask), nothing
        sums, finite, told = lax.fori_loop(np.int32(0), np.int32(parts), one, start)
        finite &= whole(told)
        return jnp.any(keep & ~finite), keep & finite, finite, sums, told

    # Nothing is computed of who has no part.
    first = jnp.any(mask), mask, mask, reduced, nothing
    with jax.named_scope(ATTEMPTS):
        _, keep, finite, sums, told = lax.while_loop(lambda state: state[0], attempt, first)
    rejected = jnp.sum((mask & ~keep).astype(jnp.int32))
    return sums._replace(num_rejected=reduced.num_rejected + rejected), finite, told
