"""The work that suites share: clients of noise, and their local training as the simulator does it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_cluster import parallel
from fedjax_cluster.algorithms.round import contribute, init_clusters, train_client
from fedjax_cluster.types import ClientData, ClientMapping, DatasetInfo, Federation, LocalUpdate, Model, Variables

DIGITS = DatasetInfo("noise 28×28", (28, 28), 10)
CIFAR = DatasetInfo("noise 32×32×3", (32, 32, 3), 10)


def noise_clients(info: DatasetInfo, clients: int, rows: int, seed: int = 0) -> ClientData:
    """Images of noise as bytes, with random classes."""
    rng = np.random.default_rng(seed)
    return ClientData(
        rng.integers(0, 256, (clients, rows, *info.input_shape), np.uint8),
        rng.integers(0, info.num_classes, (clients, rows), np.int32),
        np.full(clients, rows, np.int32),
    )


def noise_texts(info: DatasetInfo, clients: int, rows: int, seed: int = 0) -> ClientData:
    """Sequences of random tokens, the target being the next one."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, info.num_classes, (clients, rows, info.input_shape[0] + 1), np.int32)
    return ClientData(tokens[..., :-1], tokens[..., 1:], np.full(clients, rows, np.int32))


def noise_federation(info: DatasetInfo, clients: int, rows: int, groups: int = 4) -> Federation:
    train = noise_clients(info, clients, rows)
    test = noise_clients(info, clients, 10, seed=1)
    return Federation(train, test, None, (np.arange(clients) % groups).astype(np.int32), info)


def local_training(
    model: Model, info: DatasetInfo, data: ClientData, own: LocalUpdate, mapping: ClientMapping | None = None
) -> Callable[[], Any]:
    """All clients' local training from one model and the sum of their changes, as one compiled call."""
    mapping = parallel.client_mapping() if mapping is None else mapping
    population = parallel.place_population(data, info, mapping)
    clusters = parallel.replicate(mapping, init_clusters(jax.random.key(0), model, info, 1))
    slot = jnp.zeros((), jnp.int32)

    @jax.jit
    def run(population, clusters):
        return parallel.for_each_client(
            lambda client: train_client(jax.random.key(1), own, model, clusters, slot, client),
            parallel.whole_population(population),
            reduce=lambda result: contribute(slot, result, "uniform"),
        ).reduced

    return lambda: run(population, clusters)


def start(model: Model, info: DatasetInfo) -> Variables:
    """The model from which `local_training` starts."""
    clusters = init_clusters(jax.random.key(0), model, info, 1)
    return jax.tree.map(lambda leaf: leaf[0], Variables(clusters.params, clusters.stats))
