"""Which rows of a cluster lie nearest to their neighbours: Krum's scores, once and again and again.

All clusters are looked at together, under fixed shapes: `together` bool[R, R] tells which rows are of one cluster.
"""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec as P

from fedjax_cluster.clustering.similarity import matmul, row_products
from fedjax_cluster.order_statistics import Ranks, mean_of_ranks
from fedjax_cluster.parallel.mapping import AXIS, num_devices
from fedjax_cluster.types import ONE_DEVICE, ClientMapping

CLOSE = 1e-3  # of two squares, below which the square of their difference has lost its digits


def distances(leaves: list[Array], together: Array, mapping: ClientMapping = ONE_DEVICE) -> Array:
    """f32[R, R]: squared Euclidean distances of rows that lie in leaves [R, d]; no sum of R of them overflows.

    Squares of numbers above 1e19 are not finite in float32, and nobody may come nearer by sending such. Of rows that
    share nearly all they have |x|² + |y|² − 2xy keeps no digit: where a cluster's majority is such, the row that is
    nearest to half of its cluster is subtracted first. It is not the mean, which a single row moves as far as it wants.
    Of several groups of such rows in a cluster, only that one's distances within are exact.
    """
    products = _products(leaves, mapping)
    squares = jnp.diagonal(products)
    distance = _differences(products)
    close = _others(together) & (distance < CLOSE * (squares[:, None] + squares[None]))
    size = together.sum(1, dtype=jnp.int32)
    pairs = _within(together, close.sum(1, dtype=jnp.int32))
    # Of two halves of n rows, one that is close makes n/2 · (n/2 − 1) pairs, both ways.
    members = size.astype(jnp.float32)
    lost = jnp.any((pairs > 0) & (4 * pairs.astype(jnp.float32) >= members * (members - 2)))

    def from_the_middle() -> Array:
        score = nearest_sums(distance, together, jnp.maximum(size // 2, 1), mapping)
        middle = jnp.argmin(jnp.where(together, score[None], jnp.inf), 1)
        return _differences(_products([leaf - leaf[middle] for leaf in leaves], mapping))

    return lax.cond(lost, from_the_middle, lambda: distance)


def _within(together: Array, number: Array) -> Array:
    """i32[R]: the sum of a number over each row's cluster."""
    return jnp.sum(jnp.where(together, number[None], 0), 1, dtype=jnp.int32)


def _differences(products: Array) -> Array:
    """f32[R, R]: squared distances from inner products."""
    squares = jnp.diagonal(products)
    distance = squares[:, None] + squares[None] - 2 * products
    farthest = jnp.float32(jnp.finfo(jnp.float32).max / (2 * len(distance)))
    distance = jnp.where(distance < farthest, jnp.maximum(distance, 0.0), farthest)
    # To the bit the same both ways, so that two who are each other's nearest have equal scores.
    return jnp.maximum(distance, distance.T)


def _products(leaves: list[Array], mapping: ClientMapping) -> Array:
    """f32[R, R]: each device multiplies its share of the columns."""

    def of_columns(leaves: list[Array]) -> Array:
        return jnp.sum(jnp.stack([row_products(leaf, leaf) for leaf in leaves]), 0)

    if mapping.mesh is None:
        return of_columns(leaves)
    padded = [jnp.pad(leaf, ((0, 0), (0, -leaf.shape[1] % num_devices(mapping)))) for leaf in leaves]
    divided = jax.shard_map(
        lambda leaves: lax.psum(of_columns(leaves), AXIS), mesh=mapping.mesh, in_specs=P(None, AXIS), out_specs=P()
    )
    return divided(padded)


def same_cluster(slot: Array, num_slots: int) -> Array:
    """bool[R, R]: which rows are of one cluster."""
    return (slot[:, None] == slot[None]) & (slot < num_slots)[:, None]


def num_neighbours(count: Array, byzantine: int) -> Array:
    """i32[K]: n − f − 2, at least 1."""
    return jnp.maximum(count - byzantine - 2, 1)


def nearest_sums(distance: Array, together: Array, neighbours: Array, mapping: ClientMapping = ONE_DEVICE) -> Array:
    """f32[R]: Krum's sum of distances to the `neighbours` i32[R] nearest of a row's cluster, or to all it has."""
    others = _others(together)
    number = jnp.minimum(neighbours, jnp.sum(others, 0, dtype=jnp.int32))[None]
    ranks = Ranks(jnp.zeros_like(number), number)
    columns = jnp.where(others, distance, jnp.inf)
    return (mean_of_ranks(columns, jnp.zeros(len(distance), jnp.int32), ranks, mapping) * number.astype(jnp.float32))[0]


def rank_within(score: Array, together: Array) -> Array:
    """i32[R]: how many rows of the cluster have a smaller score, or an equal one and come before."""
    row = jnp.arange(len(score), dtype=jnp.int32)
    before = (score[None] < score[:, None]) | ((score[None] == score[:, None]) & (row[None] < row[:, None]))
    return jnp.sum(together & before, 1, dtype=jnp.int32)


class Nearest(NamedTuple):
    """Each row's others of its cluster, nearest first, in blocks of about √R, and what is left of each block.

    With the blocks' sums a score looks into one block, and so does the loss of a neighbour. Nothing is ever subtracted:
    of sums in which somebody far away was, nothing exact would be left.
    """

    distance: Array  # f32[R, B, √R], infinite where nobody is left
    number: Array  # i32[R, B]
    total: Array  # f32[R, B]


def nearest_again_and_again(
    distance: Array,
    slot: Array,
    wanted: Array,
    count: Array,
    byzantine: int,
    num_slots: int,
    mapping: ClientMapping = ONE_DEVICE,
) -> Array:
    """bool[R]: of each cluster `wanted` i32[K] rows of `count` i32[K], each the best by Krum of those that are left.

    What follows from what cannot be divided: the first device does it, and the others wait for it.
    """
    choose = partial(_one_after_the_other, byzantine=byzantine, num_slots=num_slots)
    if mapping.mesh is None:
        return choose(distance, slot, wanted, count)

    def on_the_first(*given: Array) -> Array:
        chosen = lax.cond(lax.axis_index(AXIS) == 0, choose, lambda *_: jnp.zeros(len(slot), bool), *given)
        return lax.psum(chosen.astype(jnp.int32), AXIS) > 0

    everywhere = jax.shard_map(on_the_first, mesh=mapping.mesh, in_specs=P(), out_specs=P(), check_vma=False)
    return everywhere(distance, slot, wanted, count)


def _one_after_the_other(
    distance: Array, slot: Array, wanted: Array, count: Array, *, byzantine: int, num_slots: int
) -> Array:
    size, row = len(slot), jnp.arange(len(slot), dtype=jnp.int32)
    place = jnp.minimum(slot, num_slots - 1)
    nearest, position = _nearest(distance, same_cluster(slot, num_slots))
    width = nearest.distance.shape[2]

    def pick(number: Array, carried: tuple[Array, Nearest]) -> tuple[Array, Nearest]:
        chosen, nearest = carried
        score = _scores(nearest, num_neighbours(count - number, byzantine)[place])
        left = ~chosen & (slot < num_slots)
        least = jnp.full(num_slots, jnp.inf, distance.dtype).at[slot].min(jnp.where(left, score, jnp.inf), mode="drop")
        first = jnp.where(left & (score == least[place]), row, size)
        best = jnp.full(num_slots, size, jnp.int32).at[slot].min(first, mode="drop")
        best = jnp.where(number < wanted, best, size)
        # Who leaves each row's list; nobody from one whose cluster has its number.
        gone = best[place]
        block, within = jnp.divmod(position[row, jnp.minimum(gone, size - 1)], width)
        block = jnp.where(gone < size, block, nearest.number.shape[1])
        return chosen.at[best].set(True, mode="drop"), _without(nearest, row, block, within)

    return lax.fori_loop(0, jnp.max(wanted), pick, (jnp.zeros(size, bool), nearest))[0]


def _nearest(distance: Array, together: Array) -> tuple[Nearest, Array]:
    """And where in a row's list each other row is, i32[R, R]."""
    size, others = len(distance), _others(together)
    width = math.isqrt(size - 1) + 1
    blocks = -(-size // width)
    rows = jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32), (size, size))
    ranked, order = lax.sort((jnp.where(others, distance, jnp.inf), rows), dimension=1, num_keys=1, is_stable=True)
    position = jnp.zeros((size, size), jnp.int32).at[rows.T, order].set(rows)
    blank = ((0, 0), (0, blocks * width - size))
    ranked = jnp.pad(ranked, blank, constant_values=jnp.inf).reshape(size, blocks, width)
    return Nearest(ranked, *_number_and_total(ranked)), position


def _scores(nearest: Nearest, neighbours: Array) -> Array:
    """f32[R]: the sum of distances to the `neighbours` i32[R] nearest of those that are left, or to all."""
    row = jnp.arange(len(neighbours), dtype=jnp.int32)
    until = _cumulative(nearest.number)
    whole = until <= neighbours[:, None]
    total = jnp.sum(jnp.where(whole, nearest.total, 0.0), 1)
    # The block in which the last of them is; none where all blocks are whole.
    last = whole.sum(1, dtype=jnp.int32)
    further = neighbours - jnp.max(jnp.where(whole, until, 0), 1)
    distance = nearest.distance.at[row, last].get(mode="fill", fill_value=jnp.inf)
    counted = jnp.isfinite(distance) & (_cumulative(jnp.isfinite(distance)) <= further[:, None])
    return total + jnp.sum(jnp.where(counted, distance, 0.0), 1)


def _without(nearest: Nearest, row: Array, block: Array, within: Array) -> Nearest:
    """Without one neighbour of each row; none where there is no such block."""
    distance = nearest.distance.at[row, block, within].set(jnp.inf, mode="drop")
    number, total = _number_and_total(distance.at[row, block].get(mode="fill", fill_value=jnp.inf))
    return Nearest(
        distance,
        nearest.number.at[row, block].set(number, mode="drop"),
        nearest.total.at[row, block].set(total, mode="drop"),
    )


def _number_and_total(distance: Array) -> tuple[Array, Array]:
    """Over the last axis, how many are left and the sum of their distances."""
    left = jnp.isfinite(distance)
    return left.sum(-1, dtype=jnp.int32), jnp.sum(jnp.where(left, distance, 0.0), -1)


def _cumulative(number: Array) -> Array:
    """Sums along the rows by a product, exact below 2²⁴: XLA's own took five times as long on a CPU."""
    below = jnp.triu(jnp.ones((number.shape[1],) * 2, jnp.float32))
    return matmul(number.astype(jnp.float32), below).astype(jnp.int32)


def _others(together: Array) -> Array:
    return together & ~jnp.eye(len(together), dtype=bool)
