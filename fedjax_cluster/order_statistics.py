"""Means over ranks of columns, cluster by cluster, without sorting: thresholds are found by counting what is below.

A threshold is guessed from the values between which the rank is known to lie, and one count of what is up to it makes
them closer; a float's bits, taken for an integer, are ordered as the floats are, and halve what guesses do not. Of a
thousand values that is some fourteen passes of comparisons over columns that stay in a processor's cache, where sorting
takes longer than all else in a round.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec as P

from fedjax_cluster.parallel.mapping import AXIS, num_devices, platform
from fedjax_cluster.types import ONE_DEVICE, ClientMapping

# Columns whose passes stay in a processor's cache; an accelerator takes them all at once.
BLOCK = 64
GREATEST = 2**31 - 1
GUESSES = 8  # before every other turn halves


class Ranks(NamedTuple):
    """The ranks first ≤ r < stop, from 0, that are averaged in each cluster; none where stop is 0, or at most first."""

    first: Array  # i32[K] or i32[K, P]
    stop: Array


def mean_of_ranks(
    values: Array, slot: Array, ranks: Ranks, mapping: ClientMapping = ONE_DEVICE, *, two_at_most: bool = False
) -> Array:
    """The mean of some ranks of each column among its cluster's rows, f32[K, P]; 0 where it is of none.

    Args:
      values: [R, P], taken as f32; finite but for rows that do not count and ranks that are not asked for.
      slot: i32[R], K for a row that does not count.
      ranks: as far as a cluster has rows.
      mapping: devices that divide the columns among them.
      two_at_most: that no cluster has more than two ranks, for which half of the passes are enough.
    """
    values = values.astype(jnp.float32)
    first, stop = (_for_each_column(jnp.maximum(each, 0), values) for each in ranks)
    stop = jnp.minimum(stop, _rows(slot, len(stop)))
    return _over_columns(partial(_mean_of_ranks, two_at_most), mapping, slot, values, first, stop)


def mean_of_nearest(
    values: Array, centre: Array, slot: Array, number: Array, mapping: ClientMapping = ONE_DEVICE
) -> Array:
    """The mean of the `number` i32[K] values nearest to `centre` f32[K, P]; of two as near, first the smaller.

    As far as a cluster has rows; 0 where it is of none.
    Values on one side of which float32 finds the distance equal count with their mean.
    """
    values = values.astype(jnp.float32)
    number = jnp.minimum(_for_each_column(number, values), _rows(slot, len(number)))
    return _over_columns(_mean_of_nearest, mapping, slot, values, centre.astype(jnp.float32), number)


def _rows(slot: Array, clusters: int) -> Array:
    """i32[K, 1]: the rows of each cluster."""
    return jax.ops.segment_sum(jnp.ones_like(slot), slot, clusters)[:, None]


def _for_each_column(each: Array, values: Array) -> Array:
    return jnp.broadcast_to(each.reshape(len(each), -1), (len(each), values.shape[1]))


def _over_columns(fn: Callable[..., Array], mapping: ClientMapping, slot: Array, *columns: Array) -> Array:
    """`fn(slot, *columns)` of arrays [., P], their columns divided among the devices and taken in blocks."""
    width, devices = columns[0].shape[1], num_devices(mapping)
    block = BLOCK if platform(mapping) == "cpu" else max(1, -(-width // devices))
    padding = -width % (block * devices)

    def of_blocks(slot: Array, *columns: Array) -> Array:
        def of_block(number: Array) -> Array:  # a slice of the rows: to lay blocks out one by one takes as long again
            return fn(slot, *(lax.dynamic_slice_in_dim(leaf, number * block, block, 1) for leaf in columns))

        found = lax.map(of_block, jnp.arange(columns[0].shape[1] // block))
        return found.swapaxes(0, 1).reshape(found.shape[1], -1)

    if mapping.mesh is not None:
        places = (P(), *(P(None, AXIS) for _ in columns))
        of_blocks = jax.shard_map(
            of_blocks, mesh=mapping.mesh, in_specs=places, out_specs=P(None, AXIS), check_vma=False
        )
    return of_blocks(slot, *(jnp.pad(leaf, ((0, 0), (0, padding))) for leaf in columns))[:, :width]


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _mean_of_ranks(two_at_most: bool, slot: Array, values: Array, first: Array, stop: Array) -> Array:
    """Of one block of columns: what lies between two thresholds, and as many of their equals as have ranks."""
    keys, clusters, number = _keys(values), len(first), stop - first
    low, high = _ends(two_at_most, keys, slot, first, stop)
    if two_at_most:  # halves, as the sum of two may overflow, which compilers else make of them
        half = lax.optimization_barrier(0.5 * _values(low))
        return jnp.where(number > 0, half + 0.5 * _values(high), 0.0)
    total = _sums(jnp.where(_between(keys, slot, low, high), values, 0.0), slot, clusters)
    # Some that equal a threshold may have ranks outside.
    lows = _sums(keys <= _of(low, slot), slot, clusters) - first
    highs = stop - _sums(keys < _of(high, slot), slot, clusters)
    total += _float(lows) * _values(low) + _float(highs) * _values(high)
    mean = jnp.where(low == high, _values(low), total / _float(jnp.maximum(number, 1)))
    return jnp.where(number > 0, mean, 0.0)


@_mean_of_ranks.defjvp
def _change_of_mean(two_at_most: bool, primals: tuple[Array, ...], tangents: tuple[Array, ...]) -> tuple[Array, Array]:
    """That of the rows which have the ranks; those that equal a threshold share its ranks."""
    slot, values, first, stop = primals
    keys, clusters = _keys(values), len(first)
    low, high = _ends(two_at_most, keys, slot, first, stop)
    share = _between(keys, slot, low, high).astype(values.dtype)
    for key in (low, high):
        equal = keys == _of(key, slot)
        below, as_many = (_sums(flags, slot, clusters) for flags in (keys < _of(key, slot), equal))
        ranks = jnp.minimum(stop, below + as_many) - jnp.maximum(first, below)
        share = jnp.where(equal, _of(_float(ranks) / _float(jnp.maximum(as_many, 1)), slot), share)
    share = jnp.where(_of(stop > first, slot), share, 0.0)
    change = _sums(share * tangents[1], slot, clusters) / _float(jnp.maximum(stop - first, 1))
    return _mean_of_ranks(two_at_most, *primals), change


def _ends(two_at_most: bool, keys: Array, slot: Array, first: Array, stop: Array) -> tuple[Array, ...]:
    """The keys of the first and of the last rank."""
    if not two_at_most:
        return _at_ranks(keys, slot, first, stop - 1)
    (low,) = _at_ranks(keys, slot, first)
    # The second rank has the first's value, or the least that is larger.
    larger = jax.ops.segment_min(jnp.where(keys > _of(low, slot), keys, GREATEST), slot, len(first))
    return low, jnp.where(_sums(keys <= _of(low, slot), slot, len(first)) >= stop, low, larger)


def _between(keys: Array, slot: Array, low: Array, high: Array) -> Array:
    return (keys > _of(low, slot)) & (keys < _of(high, slot))


def _mean_of_nearest(slot: Array, values: Array, centre: Array, number: Array) -> Array:
    """Of one block of columns, by the distance from a centre."""
    keys, clusters = _keys(jnp.abs(values - _of(centre, slot))), len(centre)
    (farthest,) = _at_ranks(keys, slot, number - 1)
    nearer, as_far = keys < _of(farthest, slot), keys == _of(farthest, slot)
    wanted = number - _sums(nearer, slot, clusters)
    total = _sums(jnp.where(nearer, values, 0.0), slot, clusters)
    for side in (values < _of(centre, slot), values >= _of(centre, slot)):
        there = _sums(as_far & side, slot, clusters)
        taken = jnp.minimum(wanted, there)
        value = _sums(jnp.where(as_far & side, values, 0.0), slot, clusters) / _float(jnp.maximum(there, 1))
        total, wanted = total + _float(taken) * value, wanted - taken
    return jnp.where(number > 0, total / _float(jnp.maximum(number, 1)), 0.0)


class _Search(NamedTuple):
    """Of one rank in each column: no more keys than it are up to `low`, and more of them up to `high`."""

    low: Array  # i32[K, B]
    high: Array
    below: Array  # i32[K, B]: keys up to `low`
    within: Array  # up to `high`
    moved: Array  # 1 or −1 where `low` or `high` did last, 2 or −2 where it did twice


def _at_ranks(keys: Array, slot: Array, *ranks: Array) -> tuple[Array, ...]:
    """The keys of some ranks i32[K, B] in each column of i32[R, B]; any where a cluster has no such rank."""
    clusters = len(ranks[0])
    count = jnp.broadcast_to(_rows(slot, clusters), ranks[0].shape)
    least, greatest = (of(keys, slot, clusters) for of in (jax.ops.segment_min, jax.ops.segment_max))

    def sought(search: _Search, rank: Array) -> Array:
        there = (rank >= 0) & (rank < count)
        return there & (search.below < rank) & (search.high - search.low != 1)

    def narrower(search: _Search, rank: Array, turn: Array) -> _Search:
        middle = (search.low >> 1) + (search.high >> 1) + (search.low & search.high & 1)
        # Where the rank would be if the values in between lay evenly; from time to time the middle, whatever they are.
        low, high = _values(search.low), _values(search.high)
        before, after = _float(rank - search.below) + 0.5, _float(search.within - rank) - 0.5
        # An end that has stayed twice draws the guess to it (the Illinois rule).
        before, after = (
            jnp.where(search.moved == twice, 0.5 * each, each) for twice, each in ((-2, before), (2, after))
        )
        guess = low + (high - low) * (before / (before + after))
        evenly = jnp.isfinite(guess) & ((turn < GUESSES) | (turn % 2 == 0))
        tried = jnp.clip(jnp.where(evenly, _keys(guess), middle), search.low + 1, search.high - 1)
        found = _sums(keys <= _of(tried, slot), slot, clusters)
        up, active = found <= rank, sought(search, rank)
        return _Search(
            jnp.where(active & up, tried, search.low),
            jnp.where(active & ~up, tried, search.high),
            jnp.where(active & up, found, search.below),
            jnp.where(active & ~up, found, search.within),
            jnp.where(up, 1 + (search.moved > 0).astype(jnp.int32), -1 - (search.moved < 0).astype(jnp.int32)),
        )

    def turn(carry: tuple[Array, list[_Search]]) -> tuple[Array, list[_Search]]:
        number, searches = carry
        return number + 1, [narrower(search, rank, number) for search, rank in zip(searches, ranks, strict=True)]

    def unfinished(carry: tuple[Array, list[_Search]]) -> Array:
        return jnp.stack([sought(*each).any() for each in zip(carry[1], ranks, strict=True)]).any()

    start = _Search(least - 1, greatest, jnp.zeros_like(count), count, jnp.zeros_like(count))
    _, found = lax.while_loop(unfinished, turn, (jnp.zeros((), jnp.int32), [start] * len(ranks)))
    above = (jnp.where(keys > _of(each.low, slot), keys, GREATEST) for each in found)
    return tuple(jax.ops.segment_min(each, slot, clusters) for each in above)


def _of(each: Array, slot: Array) -> Array:
    """Of each row its cluster's row [K, B]; a row of no cluster has the last."""
    return each[jnp.minimum(slot, len(each) - 1)]


def _sums(values: Array, slot: Array, clusters: int) -> Array:
    """[K, B]: the sums over each cluster's rows; of flags, their number."""
    counted = values.astype(jnp.int32) if values.dtype == bool else values
    return jax.ops.segment_sum(counted, slot, clusters)


def _float(number: Array) -> Array:
    return number.astype(jnp.float32)


def _keys(values: Array) -> Array:
    """i32, ordered as the floats are."""
    bits = lax.bitcast_convert_type(values, jnp.int32)
    return bits ^ (lax.shift_right_arithmetic(bits, jnp.int32(31)) & 0x7FFFFFFF)


def _values(keys: Array) -> Array:
    return lax.bitcast_convert_type(keys ^ (lax.shift_right_arithmetic(keys, jnp.int32(31)) & 0x7FFFFFFF), jnp.float32)
