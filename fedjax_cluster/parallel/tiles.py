"""Clients' rows as a TPU holds them best: each client's numbers in tiles of their own.

Of an array [M, N, ...] XLA makes the longest axis, the clients, the innermost one, to save padding; a loop over chunks
of clients then starts by copying the whole population into another layout, padded: 5.2 times its size for 28×28 bytes,
5.24 GB for 20 000 clients of 64 images. In [M, R, 128], R a multiple of a tile's rows, clients stay outermost and
nothing is copied but the chunk.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Layout, with_layout_constraint

from fedjax_cluster.types import PyTree

LANES, TILE_BYTES = 128, 4096  # of a tile's row; of a whole tile
MOST_PADDING = 0.25  # of what is held; clients with fewer numbers stay as they are


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tiled:
    """An array [M, N, ...] in tiles [M, R, 128]; per-client functions see it as [N, ...] again.

    >>> rows = tiled(np.zeros((2, 4, 1000), np.uint8))
    >>> rows.tiles.shape, rows.shape, rows[1, :2].shape
    ((2, 32, 128), (2, 4, 1000), (2, 1000))
    """

    tiles: Any  # [M, R, 128]
    row: tuple[int, ...] = dataclasses.field(metadata={"static": True})  # [N, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the array [M, N, ...]."""
        return (*self.tiles.shape[:-2], *self.row)

    @property
    def dtype(self) -> Any:
        """That of the array."""
        return self.tiles.dtype

    def __getitem__(self, place: Any) -> Any:
        """One client's rows, by its number; or some of them."""
        client, *rest = place if isinstance(place, tuple) else (place,)
        rows = self.tiles[client].reshape(-1)[: math.prod(self.row)].reshape(self.row)
        return rows[tuple(rest)] if rest else rows


def tiled(leaf: Any) -> Any:
    """Rows [M, N, ...] in tiles, or as they are where that would pad them too much."""
    if not (shape := tiles_of(leaf)):
        return leaf
    flat = np.asarray(leaf).reshape(leaf.shape[0], -1)
    padded = np.zeros((leaf.shape[0], math.prod(shape)), leaf.dtype)
    padded[:, : flat.shape[1]] = flat
    return Tiled(padded.reshape(-1, *shape), tuple(leaf.shape[1:]))


def tiles_of(leaf: Any) -> tuple[int, int] | None:
    """(R, 128), the tiles of one client's rows [N, ...] of an array or its shape; None where it stays as it is."""
    per_tile, count = TILE_BYTES // leaf.dtype.itemsize, math.prod(leaf.shape[1:])
    tiles = -(-count // per_tile)
    if count < (1 - MOST_PADDING) * tiles * per_tile:
        return None
    return tiles * per_tile // LANES, LANES


def kept(rows: PyTree) -> PyTree:
    """Leaves [chunk, ...] of which those in tiles stay as they lie.

    XLA would give a chunk the layout that the work on it wants, and for that the whole population first.
    """

    def constrained(leaf: Any) -> Any:
        if not isinstance(leaf, Tiled):
            return leaf
        return dataclasses.replace(leaf, tiles=with_layout_constraint(leaf.tiles, Layout((0, 1, 2))))

    return jax.tree.map(constrained, rows, is_leaf=_is_tiled)


def untiled(rows: PyTree) -> PyTree:
    """One client's leaves, those in tiles as they were."""

    def restored(leaf: Any) -> Any:
        if not isinstance(leaf, Tiled):
            return leaf
        return jnp.reshape(leaf.tiles.reshape(-1)[: math.prod(leaf.row)], leaf.row)

    return jax.tree.map(restored, rows, is_leaf=_is_tiled)


def _is_tiled(leaf: Any) -> bool:
    return isinstance(leaf, Tiled)
