"""Rows of several leaves sent between devices in few messages, as words of 32 bits."""

from __future__ import annotations

import math
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

MOST_TURNS = 256


def send(collective: Callable[[Array], Array], leaves: list[Array], longest: int) -> list[Array]:
    """Rows [C, ...] of several leaves through a collective along the rows, bit by bit.

    The short ones, of at most `longest` words, go in one message, bytes as words, a quarter of the numbers. A
    collective that sums sees each row with zeros only.
    """
    words = {i: _words(leaf) for i, leaf in enumerate(leaves) if _width(leaf) is not None}
    short = [i for i, leaf in enumerate(leaves) if is_short(leaf, longest)]
    sent = {i: collective(part) for i, part in words.items() if i not in short}
    if short:
        ends = np.cumsum([words[i].shape[1] for i in short])[:-1].tolist()
        joined = collective(jnp.concatenate([words[i] for i in short], axis=1))
        sent |= dict(zip(short, jnp.split(joined, ends, axis=1), strict=True))
    return [_from_words(sent[i], leaf) if i in sent else _alone(collective, leaf) for i, leaf in enumerate(leaves)]


def in_turns(
    send: Callable[[Array, list[Array]], list[Array]], chosen: Array, target: list[Array], turn_bytes: int
) -> list[Array]:
    """Sends the chosen of a cohort's rows some at a time: there may be none, or all of them.

    Args:
      send: of numbers i32[T] of rows, C where there are no more, and of the leaves; gives the leaves with these rows.
      chosen: bool[C], the same on every device.
      target: leaves [n, ...] that rows are written to.
      turn_bytes: as many rows as have so many are sent at a time, or a part of the cohort where that is more.
    """
    count = len(chosen)
    turn = min(count, max(1, turn_bytes // max(1, row_bytes(target)), -(-count // MOST_TURNS)))
    which = jnp.nonzero(chosen, size=-(-count // turn) * turn, fill_value=count)[0].astype(jnp.int32)

    def one(number: Array, target: list[Array]) -> list[Array]:
        return send(lax.dynamic_slice_in_dim(which, number * turn, turn), target)

    return lax.fori_loop(0, (jnp.sum(chosen.astype(jnp.int32)) + turn - 1) // turn, one, target)


def row_bytes(leaves: list[Array]) -> int:
    """Bytes of a row of leaves [n, ...]."""
    return sum(leaf.dtype.itemsize * math.prod(leaf.shape[1:]) for leaf in leaves)


def is_short(leaf: Array, longest: int) -> bool:
    """Whether a row is sent as words, and takes at most so many."""
    return (_width(leaf) or math.inf) <= longest


def _width(leaf: Array) -> int | None:
    """Words that a row takes; None for what is not sent as words."""
    count = math.prod(leaf.shape[1:])
    if not leaf.size:
        return None
    if leaf.dtype in (jnp.bool_, jnp.float32, jnp.int32, jnp.uint32):
        return count
    return count // 4 if leaf.dtype == jnp.uint8 and count % 4 == 0 else None


def _alone(collective: Callable[[Array], Array], leaf: Array) -> Array:
    """A leaf that is not sent as words: as whole numbers, since -0.0 and 0.0 add up to 0.0."""
    numbers = leaf.astype(jnp.uint8) if leaf.dtype == jnp.bool_ else leaf  # there is nothing in it
    if jnp.issubdtype(leaf.dtype, jnp.floating):
        numbers = lax.bitcast_convert_type(leaf, f"uint{8 * leaf.dtype.itemsize}")
    sent = collective(numbers)
    return sent.astype(bool) if leaf.dtype == jnp.bool_ else lax.bitcast_convert_type(sent, leaf.dtype)


def _words(leaf: Array) -> Array:
    """u32[C, width]."""
    if leaf.dtype == jnp.bool_:
        leaf = leaf.astype(jnp.uint32)
    rows = leaf.reshape(leaf.shape[0], -1, 4) if leaf.dtype == jnp.uint8 else leaf.reshape(leaf.shape[0], -1)
    return lax.bitcast_convert_type(rows, jnp.uint32)


def _from_words(words: Array, like: Array) -> Array:
    """The rows of which `words` u32[C, width] were made, in the type and shape of `like`."""
    rows = words.astype(bool) if like.dtype == jnp.bool_ else lax.bitcast_convert_type(words, like.dtype)
    return rows.reshape(words.shape[0], *like.shape[1:])
