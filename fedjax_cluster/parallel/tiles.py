"""Clients' rows as a TPU holds them best: each client's numbers in tiles of their own.

Of an array [M, N, ...] XLA makes the longest axis, the clients, the innermost one, to save padding; a loop over chunks
of clients then starts by copying the whole population into another layout, padded: 5.2 times its size for 28×28 bytes,
5.24 GB for 20 000 clients of 64 images. In [M, R, 128], R a multiple of a tile's rows, clients stay outermost and
nothing is copied but the chunk.

Examples are put so on a TPU alone, where they are placed. Clients' own layers of FedPer and FedRep are packed so
everywhere, so that a run goes on elsewhere; whole models, which would be padded less, are not: on a CPU to pack and
unpack them takes as long as a short training.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental.layout import Layout, with_layout_constraint

from fedjax_cluster import tree
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
    return _tiles_of(math.prod(leaf.shape[1:]), leaf.dtype.itemsize)


def _tiles_of(count: int, itemsize: int) -> tuple[int, int] | None:
    per_tile = TILE_BYTES // itemsize
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


def packed(own: PyTree) -> dict[str, Array]:
    """A few layers of one client: all numbers of a type in one array, in tiles [R, 128], or [d] where few.

    >>> {name: rows.shape for name, rows in packed({"kernel": jnp.ones((200, 10)), "count": jnp.arange(3)}).items()}
    {'int32': (3,), 'float32': (16, 128)}
    """
    arrays = {}
    for name, leaves in _by_type(own).items():
        count = tree.size(leaves)
        tiles = _tiles_of(count, leaves[0].dtype.itemsize)
        padding = [] if tiles is None else [jnp.zeros(math.prod(tiles) - count, leaves[0].dtype)]
        arrays[name] = tree.ravel([*leaves, *padding]).reshape(tiles or count)
    return arrays


def unpacked(rows: Mapping[str, Array], like: PyTree) -> PyTree:
    """What `packed` took, in the form of `like`, of which the shapes and types alone are read."""
    parts = {
        name: iter(tree.unravel(rows[name].reshape(-1)[: tree.size(leaves)], leaves))
        for name, leaves in _by_type(like).items()
    }
    leaves, structure = jax.tree.flatten(like)
    return structure.unflatten([next(parts[leaf.dtype.name]) for leaf in leaves])


def _by_type(own: PyTree) -> dict[str, list[Any]]:
    """The leaves of each type of numbers, in their order."""
    found: dict[str, list[Any]] = {}
    for leaf in jax.tree.leaves(own):
        found.setdefault(leaf.dtype.name, []).append(leaf)
    return found
