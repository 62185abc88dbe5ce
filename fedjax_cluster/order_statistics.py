"""Values of given ranks, column by column, without sorting: by counting how many values are below a guess.

A sort of each coordinate of a thousand clients' changes takes fifteen times as long as their training. Here each column
keeps the smallest and the largest value that its wanted one can still be; a guess between them is counted, and one of
the two becomes the nearest value on its side: they meet after some ten passes, in the value itself. Blocks of columns
stay in a processor's cache meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

BLOCK_BYTES = 2**18  # of a block of columns, which a core's cache should hold
HALVE_EVERY = 4  # guesses, of which one halves the values that can be represented, however they are spread
SMALLEST, LARGEST_SMALL = 2.0**-126, 0x00800000  # of normal numbers, and its bits; what is smaller counts as 0


def ranked_mean(x: Array, slot: Array, first: Array, stop: Array, *, block: int | None = None) -> Array:
    """The mean of ranks first ≤ r < stop of each column among the rows of its slot, by size.

    Args:
      x: f32[R, d], finite.
      slot: i32[R]; rows of a slot that is not below K do not count.
      first, stop: i32[K], at least 0 and at most the slot's rows; where they are equal the result is 0.
      block: columns at a time; None takes what suits the platform that the program is lowered for.

    Returns:
      f32[K, d].

    >>> x = jnp.asarray([[3.0], [1.0], [8.0], [2.0], [9.0]])
    >>> ranked_mean(x, jnp.asarray([0, 0, 0, 1, 1]), jnp.asarray([1, 0]), jnp.asarray([2, 2])).tolist()
    [[3.0], [5.5]]
    """
    return _in_blocks(lambda columns: _of_slots(columns, slot, first, stop), (x,), len(first), block)


def nearest_mean(x: Array, centre: Array, slot: Array, wanted: Array, *, block: int | None = None) -> Array:
    """The mean of the values nearest to a centre of each column and slot; of two equally near the smaller is first.

    Args:
      x, slot, block: as of `ranked_mean`.
      centre: f32[K, d].
      wanted: i32[K], how many values; where it is 0 the result is 0.

    Returns:
      f32[K, d].

    >>> x = jnp.asarray([[3.0], [1.0], [8.0], [2.0]])
    >>> nearest_mean(x, jnp.asarray([[2.0]]), jnp.zeros(4, jnp.int32), jnp.asarray([2])).tolist()
    [[1.5]]
    """

    def of_block(columns: Array, centre: Array) -> Array:
        return lax.map(lambda of: _nearest(columns, slot == of[0], *of[1:]), (jnp.arange(len(wanted)), centre, wanted))

    return _in_blocks(of_block, (x, centre), len(wanted), block)


def smallest_sum(x: Array, count: Array) -> Array:
    """The sum of the `count` i32[d] smallest values of each column of x f32[R, d]; those that are infinite count not.

    >>> smallest_sum(jnp.asarray([[3.0, 1.0], [1.0, jnp.inf], [2.0, 5.0]]), jnp.asarray([2, 1])).tolist()
    [3.0, 1.0]
    """

    def of_block(x: Array, count: Array) -> Array:
        edge = value_of_rank(x, jnp.maximum(count[0] - 1, 0))
        below = x < edge[None]
        rest = (count[0] - _count(below)).astype(jnp.float32)
        total = jnp.sum(jnp.where(below, x, 0.0), 0) + rest * edge
        return jnp.where(count[0] > 0, total, 0.0)[None]

    return _in_blocks(of_block, (x, count[None]), 1, None)[0]


def value_of_rank(x: Array, rank: Array) -> Array:
    """The value f32[d] of a rank i32[d] or i32[], from 0 on, among those of each column of x f32[R, d] not infinite.

    Infinite where there is none.

    >>> value_of_rank(jnp.asarray([[3.0, 1.0], [1.0, jnp.inf], [2.0, 5.0]]), jnp.asarray([2, 0])).tolist()
    [3.0, 1.0]
    """
    x = jnp.where(jnp.abs(x) < SMALLEST, 0.0, x)
    there = jnp.isfinite(x)
    number = jnp.maximum(_count(there), 1).astype(jnp.float32)
    target = jnp.broadcast_to(rank, x.shape[1:]).astype(jnp.float32) + 0.5
    mean = jnp.sum(jnp.where(there, x, 0.0), 0) / number
    deviation = jnp.sqrt(jnp.sum(jnp.where(there, jnp.square(x - mean[None]), 0.0), 0) / number)
    # As if the values were normal, which many are nearly.
    guess = mean + deviation * jax.scipy.special.ndtri(jnp.clip(target / number, 1e-4, 1 - 1e-4))
    start = _Bracket(
        jnp.min(x, 0), jnp.max(jnp.where(there, x, -jnp.inf), 0), -target, number - target, jnp.zeros(x.shape[1:])
    )

    def narrow(carry: tuple[Array, _Bracket]) -> tuple[Array, _Bracket]:
        turn, bracket = carry
        low, high, below, above, _ = bracket
        crossing = low + below / (below - above) * (high - low)
        wanted = jnp.where(turn == 0, guess, jnp.where(turn % HALVE_EVERY == HALVE_EVERY - 1, jnp.nan, crossing))
        return turn + 1, _narrowed(x, target, bracket, _between(wanted, low, high))

    _, found = lax.while_loop(
        lambda carry: jnp.any(carry[1].low < carry[1].high), narrow, (jnp.zeros((), jnp.int32), start)
    )
    return found.low


class _Bracket(NamedTuple):
    """Where the wanted values of columns f32[d] are: from `low` to `high`, which are values of the column."""

    low: Array
    high: Array
    below: Array  # rank of the last value below `low`, less that of the wanted one; halved as in the Illinois method
    above: Array  # the same of `high`
    side: Array  # 1.0 where `high` moved last, −1.0 where `low` did


def _narrowed(x: Array, target: Array, bracket: _Bracket, guess: Array) -> _Bracket:
    low, high, below, above, side = bracket
    at_most = x <= guess[None]
    missing = _count(at_most).astype(jnp.float32) - target
    fall, unsettled = missing > 0, low < high
    # The Illinois method: an end that stays twice is given less weight, or the other would creep towards it.
    below = jnp.where(fall, jnp.where(side > 0, below / 2, below), missing)
    above = jnp.where(fall, missing, jnp.where(side < 0, above / 2, above))
    low = jnp.where(unsettled & ~fall, jnp.min(jnp.where(at_most, jnp.inf, x), 0), low)
    high = jnp.where(unsettled & fall, jnp.max(jnp.where(at_most, x, -jnp.inf), 0), high)
    return _Bracket(low, high, below, above, jnp.where(fall, 1.0, -1.0))


def _between(guess: Array, low: Array, high: Array) -> Array:
    """The guess, where it is at least `low` and below `high`; else the nearest such, or for NaN the middle by bits."""
    least, most = _bits(low), _bits(high) - 1
    middle = (least >> 1) + (most >> 1) + (least & most & 1)
    bits = jnp.clip(jnp.where(jnp.isnan(guess), middle, _bits(guess)), least, most)
    # Between the two smallest normal numbers there is 0 alone.
    bits = jnp.where((bits < 0) & (bits > -LARGEST_SMALL - 1), -LARGEST_SMALL - 1, bits)
    bits = jnp.where((bits > 0) & (bits < LARGEST_SMALL), 0, bits)
    return lax.bitcast_convert_type(jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits), jnp.float32)


def _bits(x: Array) -> Array:
    """i32, in the order of the numbers; of both zeros 0."""
    bits = lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.int32)
    return jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def _count(mask: Array) -> Array:
    return jnp.sum(mask, 0, dtype=jnp.int32)


def _of_slots(x: Array, slot: Array, first: Array, stop: Array) -> Array:
    """`ranked_mean` of a block."""

    def of_slot(given: tuple[Array, Array, Array]) -> Array:
        number, first, stop = given
        own = jnp.where((slot == number)[:, None], x, jnp.inf)
        low = value_of_rank(own, first)
        at_most = own <= low[None]
        further = _count(at_most)
        # Medians want the next value at most, which is at hand.
        following = jnp.where(further >= stop, low, jnp.min(jnp.where(at_most, jnp.inf, own), 0))
        high = lax.cond(stop - first <= 2, lambda: following, lambda: value_of_rank(own, stop - 1))
        inside = (own > low[None]) & (own < high[None])
        at_low = (jnp.minimum(further, stop) - first).astype(jnp.float32)
        at_high = (stop - first).astype(jnp.float32) - at_low - _count(inside).astype(jnp.float32)
        total = jnp.sum(jnp.where(inside, own, 0.0), 0) + at_low * low + jnp.where(at_high > 0, at_high * high, 0.0)
        return jnp.where(stop > first, total / jnp.maximum(stop - first, 1).astype(jnp.float32), 0.0)

    return lax.map(of_slot, (jnp.arange(len(first)), first, stop))


def _nearest(x: Array, members: Array, centre: Array, wanted: Array) -> Array:
    """`nearest_mean` of a block and a slot."""
    away = jnp.where(members[:, None], jnp.abs(x - centre[None]), jnp.inf)
    edge = value_of_rank(away, jnp.maximum(wanted - 1, 0))
    nearer, level = away < edge[None], (away == edge[None]) & members[:, None]
    smaller, larger = level & (x < centre[None]), level & (x >= centre[None])
    rest = wanted - _count(nearer)
    of_smaller = jnp.minimum(rest, _count(smaller))
    total = jnp.sum(jnp.where(nearer, x, 0.0), 0) + _share(x, smaller, of_smaller)
    total += _share(x, larger, rest - of_smaller)
    return jnp.where(wanted > 0, total / jnp.maximum(wanted, 1).astype(jnp.float32), 0.0)


def _share(x: Array, mask: Array, count: Array) -> Array:
    """The sum of `count` of those values, which are equal but for rounding."""
    mean = jnp.sum(jnp.where(mask, x, 0.0), 0) / jnp.maximum(_count(mask), 1).astype(jnp.float32)
    return mean * count.astype(jnp.float32)


def _in_blocks(fn: Callable[..., Array], arrays: tuple[Array, ...], slots: int, block: int | None) -> Array:
    """`fn` of blocks of columns of arrays [..., d], f32[K, block] each, in turn; on accelerators of all at once."""
    rows, width = arrays[0].shape
    size = block or max(16, BLOCK_BYTES // 4 // max(rows, 1) // 16 * 16)
    if width <= size:
        return fn(*arrays)

    def visit(number: Array, found: Array) -> Array:
        # The last block reaches back over columns that are done.
        start = jnp.minimum(number * size, width - size)
        parts = [lax.dynamic_slice_in_dim(each, start, size, 1) for each in arrays]
        return lax.dynamic_update_slice_in_dim(found, fn(*parts), start, 1)

    def in_turns(*arrays: Array) -> Array:
        return lax.fori_loop(0, -(-width // size), visit, jnp.zeros((slots, width)))

    if block is not None:
        return in_turns(*arrays)
    return lax.platform_dependent(*arrays, cpu=in_turns, default=fn)
