"""Clients whose rows are on disk: cohorts read ahead of their rounds, and all clients in chunks."""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from fedjax_cluster.data.stored import Rows, on_disk, streamed
from fedjax_cluster.parallel import processes
from fedjax_cluster.parallel.mapping import AXIS, num_devices, place_rows, row_sharding
from fedjax_cluster.parallel.rows import whole_population
from fedjax_cluster.types import ClientData, ClientMapping, Cohort, Population

CHUNK_BYTES = 2**25  # of clients' rows brought to the devices at a time
MOST_IN_CHUNK = 4096  # clients, whose metrics come back together
T = TypeVar("T")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CohortsAhead:
    """The cohorts of the rounds from `start` on, on the devices."""

    start: Array  # i32[]
    cohorts: Cohort  # leaves [R, C, ...]

    @property
    def mapping(self) -> ClientMapping:
        return self.cohorts.mapping

    def of_round(self, number: Array) -> Cohort:
        """The cohort of round `number` i32[]."""
        place = number - self.start
        return jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, place, keepdims=False), self.cohorts)


def read_cohorts(population: Population, start: int, index: Any, mask: Any, weights: Any) -> CohortsAhead:
    """The cohorts of rounds from `start` on, of clients index i32[R, C] where mask bool[R, C] holds."""
    mapping = population.mapping
    sharding = None if mapping.mesh is None else NamedSharding(mapping.mesh, P(None, AXIS))
    # Who joins later has rows on disk, but none yet.
    data = _training_rows(population, np.where(mask, index, -1), sharding)
    numbers = jax.tree.map(functools.partial(processes.put, sharding=sharding), (index, mask, weights))
    cohorts = Cohort(numbers[0], numbers[1], data, numbers[2], mapping)
    return CohortsAhead(jnp.asarray(start, jnp.int32), cohorts)


def _training_rows(population: Population, wanted: np.ndarray, sharding: NamedSharding | None) -> ClientData:
    """The training rows of clients i[..., C] on the devices, and what else the population knows of each."""

    def placed(leaf: Any) -> Any:
        if on_disk(leaf):
            return _read_placed(leaf.x, wanted, sharding)
        # Of a number that no client has, another's: the cohort's mask leaves it out.
        return processes.put(np.asarray(leaf).take(wanted, mode="clip"), sharding)

    others = population.data._replace(x=None, y=None, num_examples=None)
    others = jax.tree.map(placed, others, is_leaf=on_disk)
    return others._replace(**_read_placed(population.data.x, wanted, sharding)._asdict())


def _read_placed(rows: Any, wanted: np.ndarray, sharding: NamedSharding | None) -> ClientData:
    """All of clients i[..., C] whose x are `rows`, on the devices; a process reads those that its own devices have."""
    lead, store, part = wanted.ndim, rows.store, rows.part

    def read(clients: np.ndarray) -> ClientData:
        found = store.read(part, clients.reshape(-1))
        return ClientData(*(leaf.reshape(*clients.shape, *leaf.shape[1:]) for leaf in found))

    if sharding is None or sharding.is_fully_addressable:
        return jax.tree.map(lambda leaf: jax.device_put(leaf, sharding), read(wanted))
    blocks: dict[tuple, ClientData] = {}
    for places in sharding.addressable_devices_indices_map(wanted.shape).values():
        assert places is not None
        if (key := _ends(places)) not in blocks:
            blocks[key] = read(wanted[places])

    def placed(which: int, shape: tuple[int, ...]) -> jax.Array:
        return jax.make_array_from_callback(
            (*wanted.shape, *shape), sharding, lambda index: blocks[_ends((index or ())[:lead])][which]
        )

    return ClientData(placed(0, store.shape(part, "x")[1:]), placed(1, store.shape(part, "y")[1:]), placed(2, ()))


def _ends(places: tuple[slice, ...]) -> tuple:
    return tuple((place.start, place.stop) for place in places)


def in_chunks(
    population: Population, *others: ClientData, clients: np.ndarray | None = None
) -> Iterator[tuple[np.ndarray, Cohort, tuple[ClientData, ...]]]:
    """Clients some at a time, with their numbers i64[n]; the rows of a chunk are read while the one before is used.

    Args:
      population: on disk; one on the devices is a single chunk.
      *others: further parts of the same clients, as `open_population` gives them.
      clients: i[n] of those to go through, ascending; None is all.

    Returns:
      For each chunk the numbers, a cohort of C ≥ n rows of which the first n are these clients, and the others' rows.
    """
    if not streamed(population.data):
        cohort = whole_population(population)
        yield np.arange(len(cohort.index)), cohort, others
        return
    mapping, size = population.mapping, len(population.data.num_examples)
    clients = np.arange(len(population.data.x)) if clients is None else clients
    each = sum(row_bytes(part) for part in (population.data, *others))
    devices = num_devices(mapping)
    rows = max(1, min(CHUNK_BYTES // each, MOST_IN_CHUNK, -(-len(clients) // devices) * devices) // devices) * devices
    held = np.asarray(population.data.num_examples)

    def read(numbers: np.ndarray) -> tuple[np.ndarray, Cohort, tuple[ClientData, ...]]:
        wanted = np.pad(numbers, (0, rows - len(numbers)), constant_values=size).astype(np.int32)
        mask = np.pad(held[numbers] > 0, (0, rows - len(numbers)))
        there, sharding = np.where(mask, wanted, -1), row_sharding(mapping)
        data = _training_rows(population, there, sharding)
        found = tuple(_read_placed(other.x, there, sharding) for other in others)
        index, mask = place_rows(mapping, (np.where(mask, wanted, size), mask))
        return numbers, Cohort(index, mask, data, None, mapping), found

    yield from read_ahead(read, (clients[first : first + rows] for first in range(0, len(clients), rows)))


def row_bytes(data: ClientData) -> int:
    """What the rows of a client on disk take on a device, with those that it shows to clusterings."""
    leaves = jax.tree.leaves(data, is_leaf=lambda leaf: isinstance(leaf, Rows))
    return sum(int(np.prod(rows.shape[1:])) * rows.dtype.itemsize for rows in leaves if isinstance(rows, Rows))


def read_ahead(read: Callable[..., T], arguments: Iterable[np.ndarray]) -> Iterator[T]:
    """`read(argument)` for each in turn, in a thread of its own, one ahead of what is asked for."""
    under_way: collections.deque[Future[T]] = collections.deque()
    with ThreadPoolExecutor(1) as reader:
        for argument in arguments:
            under_way.append(reader.submit(read, argument))
            if len(under_way) > 1:
                yield under_way.popleft().result()
        while under_way:
            yield under_way.popleft().result()
