"""FLAG with landmark clients: everybody else joins the cluster to whose landmarks it is nearest. Ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedjax_cluster import parallel, tree
from fedjax_cluster.algorithms.flag.state import Joined, Measured, Sent
from fedjax_cluster.algorithms.one_shot import model_size, nearest_cluster
from fedjax_cluster.clustering.landmarks import Compared, Scales, proximity_scales, proximity_to
from fedjax_cluster.parallel import Client, Mapped
from fedjax_cluster.types import Population, Selection

JOINED, MOST_JOINED = 2**28, 128  # bytes of what is compared with landmarks at a time on a device, and clients


def measure_some(measure: Callable[[Client], Measured], population: Population, who: Array) -> tuple[Array, Mapped]:
    """What some clients i32[B] send, M for nobody; with whose they are, as they may come in another order."""
    there = population.data.num_examples.at[who].get(mode="fill", fill_value=0) > 0
    cohort = parallel.gather_cohort(population, Selection(who, there))
    return cohort.index, parallel.for_each_client(measure, cohort, collect=lambda measured: measured)


def measure_landmarks(measure: Callable[[Client], Measured], population: Population, landmarks: Array) -> Mapped:
    """What the landmarks i32[m] send, in their order."""
    index, mapped = measure_some(measure, population, landmarks)
    order = jnp.argsort(index)[: len(landmarks)]  # behind them are rows that fill up devices
    return mapped._replace(collected=tree.take(mapped.collected, order), accepted=mapped.accepted[order])


def join(
    measure: Callable[[Client], Measured],
    population: Population,
    distances: Callable[[Measured], Array],
    membership: Array,
    known: Array,
    linkage: str,
    at_a_time: int,
) -> Mapped:
    """The cluster of each client, and what it sent in numbers: `Joined` [M].

    Some clients at a time are compared as soon as they have trained, so that nobody holds what all of them send.

    Args:
      measure: what one client sends.
      population: M clients.
      distances: f32[B, m] of what some clients sent to the landmarks.
      membership: f32[m, K], the landmarks' clusters, one-hot.
      known: bool[m], landmarks that count.
      linkage: which distance to a cluster.
      at_a_time: clients that are compared together.
    """
    size = len(population.data.num_examples)
    near = jax.vmap(nearest_cluster, (0, None, None, None))

    def some(found: tuple[Joined, Array], who: Array) -> tuple[tuple[Joined, Array], None]:
        index, mapped = measure_some(measure, population, who)
        zeros = jax.tree.map(jnp.zeros_like, mapped.collected)
        sent: Measured = tree.where(mapped.accepted, mapped.collected, zeros)
        numbers = (jnp.abs(sent.vectors).max(axis=2) > 0).sum((1, 2), dtype=jnp.int32) * sent.vectors.shape[2]
        slot = near(distances(sent), membership, known, linkage)
        return tree.scatter(found, index, (Joined(slot, numbers, sent.num_steps), mapped.accepted)), None

    nobody = Joined(*[jnp.zeros(size, jnp.int32)] * 3), jnp.zeros(size, bool)
    turns = np.minimum(np.arange(-(-size // at_a_time) * at_a_time), size).reshape(-1, at_a_time)
    found, _ = jax.lax.scan(some, nobody, jnp.asarray(turns, jnp.int32))
    return Mapped(None, *found)


def clients_at_a_time(model: Any, max_vectors: int, population: Population) -> int:
    """How many clients are compared with landmarks at a time, on all devices."""
    features = int(np.prod(population.info.input_shape))
    each = 4 * (model_size(model, population) + population.info.num_classes * features * max_vectors)
    on_a_device = max(1, min(JOINED // each, MOST_JOINED))
    return min(on_a_device * parallel.num_devices(population.mapping), len(population.data.num_examples))


def scales_of(landmarks: Sent, comparison: Any) -> Scales:
    """What the landmarks sent, and the scales among them, by the options of `compare`."""
    sent = Compared(landmarks.vectors, landmarks.counts, landmarks.updates)
    return proximity_scales(sent, landmarks.known, comparison["angles"], jnp.float32(comparison["delta"]))


def distances_to(scales: Scales, measured: Measured, comparison: Any) -> Array:
    """f32[B, m], of what some clients sent to the landmarks."""
    delta, beta = (jnp.float32(comparison[name]) for name in ("delta", "beta"))
    return proximity_to(scales, Compared(*measured[:3]), comparison["angles"], delta, beta)
