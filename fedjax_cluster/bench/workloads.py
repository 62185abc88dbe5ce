"""The work that suites share: clients whose data are noise, and their local training as the simulator does it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_cluster import parallel
from fedjax_cluster.algorithms.round import init_clusters, train_client
from fedjax_cluster.types import ClientData, ClientMapping, DatasetInfo, Federation, LocalUpdate, Model

DIGITS = DatasetInfo("noise 28×28", (28, 28), 10)
CIFAR = DatasetInfo("noise 32×32×3", (32, 32, 3), 10)


def noise_clients(info: DatasetInfo, clients: int, rows: int, seed: int = 0) -> ClientData:
    """Images of noise as bytes with random classes, or sequences of random tokens whose targets are the next ones."""
    rng, count = np.random.default_rng(seed), np.full(clients, rows, np.int32)
    if info.task == "language":
        tokens = rng.integers(0, info.num_classes, (clients, rows, info.input_shape[0] + 1), np.int32)
        return ClientData(tokens[..., :-1], tokens[..., 1:], count)
    x = rng.integers(0, 256, (clients, rows, *info.input_shape), np.uint8)
    return ClientData(x, rng.integers(0, info.num_classes, (clients, rows), np.int32), count)


def noise_federation(info: DatasetInfo, clients: int, rows: int, groups: int = 4) -> Federation:
    train = noise_clients(info, clients, rows)
    test = noise_clients(info, clients, 10, seed=1)
    return Federation(train, test, None, (np.arange(clients) % groups).astype(np.int32), info)


def trained_clients(
    model: Model,
    info: DatasetInfo,
    data: ClientData,
    update: LocalUpdate,
    mapping: ClientMapping | None = None,
    **outputs: Any,
) -> Callable[[], parallel.Mapped]:
    """All clients' local training from one model as one compiled call; `outputs` as of `parallel.for_each_client`."""
    mapping = parallel.client_mapping() if mapping is None else mapping
    population = parallel.place_population(data, info, mapping)
    clusters = parallel.replicate(mapping, init_clusters(jax.random.key(0), model, info, 1))

    @jax.jit
    def run(population, clusters):
        def train(client):
            return train_client(jax.random.key(1), update, model, clusters, jnp.zeros((), jnp.int32), client, 0)

        return parallel.for_each_client(train, parallel.whole_population(population), **outputs)

    return partial(run, population, clusters)


def local_training(
    model: Model, info: DatasetInfo, data: ClientData, update: LocalUpdate, mapping: ClientMapping | None = None
) -> Callable[[], parallel.Mapped]:
    """All clients' local training and the sum of their changes."""

    def contribute(result):
        changes = {"delta": result.delta, "stats": result.stats}
        return parallel.Contribution(jnp.zeros((), jnp.int32), jnp.ones(()), changes)

    return trained_clients(model, info, data, update, mapping, reduce=contribute)
