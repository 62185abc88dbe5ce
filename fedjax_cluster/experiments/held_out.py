"""Training rows that are held out, of clients in memory or on disk, by which learning rates are compared."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedjax_cluster.algorithms.threshold_search import hold_out
from fedjax_cluster.data.stored import Rows, made_of, some_of, stored
from fedjax_cluster.local import client_key
from fedjax_cluster.marked_clients import MarkedData
from fedjax_cluster.nn.precision import in_32_bits
from fedjax_cluster.types import ClientData, Federation

SHARE, VALIDATION = 0.2, "validation rows"  # what decides: of each client's training rows, or those


def held_out(federation: Federation, seed: int, share: float = SHARE) -> Federation:
    """A federation whose test rows are the validation rows of another, or else training rows; without true groups.

    Args:
      federation: of M clients; its test rows are not looked at. Rows on disk stay there, and are divided as they are
        read.
      seed: decides which rows are held out.
      share: of each client's training rows, at least one.

    Returns:
      Of the clients with validation rows, `train`, and these as `test`. Where `validation` is None, of the clients with
      two training rows and more, `train` without the rows held out, these as `test`. Marks of faulty clients stay, and
      what these show to clusterings is divided as their own rows are.

    Raises:
      ValueError: no client has two training rows, or no row of `validation`; validation rows beside rows on disk.
    """
    own, train = federation.validation, federation.train
    if own is not None and stored(federation):
        raise ValueError(f"{VALIDATION} are of a federation in memory, but the training rows are on disk; give no such")
    index = np.flatnonzero(np.asarray(train.num_examples) > 1 if own is None else own.num_examples)
    if not len(index):
        lacks = "two training rows, of which one could be held out" if own is None else f"{VALIDATION}, which decide"
        raise ValueError(f"no client has {lacks}; give the learning rate")

    def part_of(data: ClientData, part: int) -> ClientData:
        if own is not None:
            return some_of((data, own)[part], index)
        return _part_of(data, part, _Division(index, seed, share, np.shape(data.x)[1]))

    kept, held = part_of(train, 0), part_of(train, 1)
    if isinstance(train, MarkedData):
        shown = None if train.shown is None else part_of(train.shown, 0)
        kept = MarkedData.of(kept, np.asarray(train.faulty)[index], shown)
    return Federation(kept, held, None, None, federation.info)


class _Division(NamedTuple):
    """How the rows [N] of the clients index i64[n] are divided."""

    index: np.ndarray
    seed: int
    share: float
    rows: int

    @in_32_bits  # also where a thread reads
    def places(self, some: np.ndarray, number: np.ndarray) -> list[np.ndarray]:
        """For the clients `some` i[C] of them, with so many rows i32[C], the places i32[C, n] of each part."""
        given = jax.random.key(self.seed), self.index[some].astype(np.int32), number.astype(np.int32)
        return [np.asarray(part.x) for part in _divided(*given, rows=self.rows, share=self.share)]

    @in_32_bits
    def counts(self, number: np.ndarray) -> list[np.ndarray]:
        """The rows i32[n] of each part, of clients with so many."""
        given = jax.random.key(self.seed), self.index.astype(np.int32), number.astype(np.int32)
        return [np.asarray(count) for count in _counts(*given, rows=self.rows, share=self.share)]


def _part_of(data: ClientData, part: int, division: _Division) -> ClientData:
    """Rows that are kept or held out, with zeros beyond, where dividing has left rows of the other part."""
    index, number = division.index, np.asarray(data.num_examples)
    counts = division.counts(number[index])[part]

    def made(clients: np.ndarray) -> ClientData:
        known = np.maximum(clients, 0)
        found = some_of(data, np.where(clients < 0, -1, index[known]))
        places = division.places(known, number[index[known]])[part]
        valid = np.arange(places.shape[1]) < counts[known][:, None]

        def taken(rows: np.ndarray) -> np.ndarray:
            rows = np.asarray(rows)[np.arange(len(places))[:, None], places]
            return np.where(valid.reshape(valid.shape + (1,) * (rows.ndim - 2)), rows, np.zeros((), rows.dtype))

        return ClientData(taken(found.x), taken(found.y), counts[known])

    if not isinstance(data.x, Rows):
        return made(np.arange(len(index)))
    longest = division.places(np.zeros(1, np.int64), np.ones(1, np.int32))[part].shape[1]
    return made_of(data.x, made, counts, longest=longest, told=[division.seed, division.share, part])


@functools.partial(jax.jit, static_argnames=("rows", "share"))
def _divided(rng_key: Array, client: Array, number: Array, *, rows: int, share: float) -> list[ClientData]:
    """Of each client the places i32[C, n] of rows that are kept and held out, as x, and how many count."""

    def one(client: Array, number: Array) -> list[ClientData]:
        places = jnp.arange(rows)
        return list(hold_out(client_key(rng_key, client), ClientData(places, places, number), share, least=1))

    return jax.vmap(one)(client, number)


@functools.partial(jax.jit, static_argnames=("rows", "share"))
def _counts(rng_key: Array, client: Array, number: Array, *, rows: int, share: float) -> list[Array]:
    """The counts alone: what compilers leave out is as large as all rows."""
    return [part.num_examples for part in _divided(rng_key, client, number, rows=rows, share=share)]
