"""Landmark clients of methods that cluster once, ours: they alone are compared pairwise, others join the nearest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedjax_cluster import clustering, parallel, tree
from fedjax_cluster.algorithms.round import check_memory, check_square
from fedjax_cluster.parallel import Client, Mapped
from fedjax_cluster.types import Population, Selection

JOINED, MOST_JOINED = 2**28, 128  # bytes of what is compared with landmarks at a time on a device, and clients


class Joined(NamedTuple):
    """What is kept of a client that was compared with the landmarks."""

    slot: Array  # i32[], its cluster
    numbers: Array  # i32[], in its principal vectors
    num_steps: Array  # i32[], of its training before


def check_pairs(method: str, landmarks: int | None, population: Population, there: int, matrices: int) -> None:
    """Raises a ValueError where what is compared does not fit into memory, or landmarks are more than clients.

    Args:
      method: whose name is told.
      landmarks: how many, or None where all pairs of clients are compared.
      population: M clients, of whom so many are `there`.
      matrices: of 4 bytes for each pair that is compared, at the same time.
    """
    if landmarks is None:
        return check_square(method, len(population.data.num_examples), matrices, landmarks=True)
    if landmarks > there:
        raise ValueError(f"landmarks is {landmarks}, but there are only {there} clients; give at most {there}, or None")
    what = f"for each pair of {landmarks} landmarks"
    return check_memory(method, 4.0 * landmarks**2 * matrices, what, "give fewer landmarks")


def landmarks_among(rng_key: Array, number: int | None, present: Array) -> Array | None:
    """i32[m], ascending: landmarks drawn of the clients that are present, bool[M]; None for no number."""
    return None if number is None else clustering.draw_landmarks(rng_key, number, present)


def measure_some(measure: Callable[[Client], Any], population: Population, who: Array) -> tuple[Array, Mapped]:
    """What some clients i32[B] send, M for nobody; with whose they are, as they may come in another order."""
    there = population.data.num_examples.at[who].get(mode="fill", fill_value=0) > 0
    cohort = parallel.gather_cohort(population, Selection(who, there))
    return cohort.index, parallel.for_each_client(measure, cohort, collect=lambda measured: measured)


def measure_all(measure: Callable[[Client], Any], population: Population, landmarks: Array | None) -> Mapped:
    """What all clients send, or the landmarks i32[m] alone, in their order."""
    if landmarks is None:
        return parallel.for_each_client(measure, parallel.whole_population(population), collect=lambda sent: sent)
    index, mapped = measure_some(measure, population, landmarks)
    order = jnp.argsort(index)[: len(landmarks)]  # behind them are rows that fill up devices
    return mapped._replace(collected=tree.take(mapped.collected, order), accepted=mapped.accepted[order])


def join(
    measure: Callable[[Client], Any], population: Population, placed: Callable[[Any], Joined], at_a_time: int
) -> Mapped:
    """The cluster of each client, and what it sent in numbers: `Joined` [M].

    Some clients at a time are compared as soon as they have answered, so that nobody holds what all of them send.

    Args:
      measure: what one client sends.
      population: M clients.
      placed: `Joined` [B] of what some clients sent, or would have sent.
      at_a_time: clients that are compared together.
    """
    size = len(population.data.num_examples)

    def some(found: tuple[Joined, Array], who: Array) -> tuple[tuple[Joined, Array], None]:
        index, mapped = measure_some(measure, population, who)
        return tree.scatter(found, index, (placed(mapped.collected), mapped.accepted)), None

    nobody = Joined(*[jnp.zeros(size, jnp.int32)] * 3), jnp.zeros(size, bool)
    turns = np.minimum(np.arange(-(-size // at_a_time) * at_a_time), size).reshape(-1, at_a_time)
    found, _ = jax.lax.scan(some, nobody, jnp.asarray(turns, jnp.int32))
    return Mapped(None, *found)


def clients_at_a_time(numbers: int, population: Population) -> int:
    """How many clients, of so many numbers each, are compared with landmarks at a time, on all devices."""
    on_a_device = max(1, min(JOINED // (4 * numbers), MOST_JOINED))
    return min(on_a_device * parallel.num_devices(population.mapping), len(population.data.num_examples))


def numbers_sent(vectors: Array) -> Array:
    """i32[B], numbers in the principal vectors f32[B, L, f, p] that are not zero throughout."""
    return (jnp.abs(vectors).max(axis=2) > 0).sum((1, 2), dtype=jnp.int32) * vectors.shape[2]


def with_joined(label: np.ndarray, landmarks: Array, mapped: Mapped) -> np.ndarray:
    """i32[M], the clusters of all: of the landmarks their own i32[m], where these are not −1; −1 for who was silent.

    >>> joined = Joined(*[np.array([1, 1, 1, 0])] * 3)
    >>> mapped = Mapped(None, joined, np.array([True, True, False, True]))
    >>> with_joined(np.array([0, -1]), np.array([0, 3]), mapped).tolist()
    [0, 1, -1, 0]
    """
    found = np.where(mapped.accepted, mapped.collected.slot, -1)
    found[np.asarray(landmarks)[label >= 0]] = label[label >= 0]
    return found
