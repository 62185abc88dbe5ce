"""Clients whose classes are directions, for FLAG and PACFL."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_cluster import local, nn, parallel
from fedjax_cluster.algorithms.flag.flag import flag
from fedjax_cluster.algorithms.pacfl import pacfl
from fedjax_cluster.simulation.segment import run_keys
from fedjax_cluster.types import ClientData, Federation
from tests.federations import INFO

SCAN = parallel.client_mapping("scan", devices=jax.devices()[:1])
FULL = local.sgd(0.3, batch_size=None, steps=2)
LIGHT = nn.linear()
EPOCHS, ROUNDS = 4, 3


def place(federation):
    return parallel.place_population(federation.train, federation.info, SCAN)


@functools.cache
def lines(clients=9, groups=3, rows=24, seed=0, permuted=False) -> Federation:
    """Classes are directions in ten dimensions with a little noise.

    Each group of clients has its own directions, or the same ones under other labels.
    """
    rng = np.random.default_rng(seed)
    basis = rng.normal(size=(groups, 3, 10))
    if permuted:
        basis = np.stack([np.roll(basis[0], shift, axis=0) for shift in range(groups)])
    group = np.arange(clients, dtype=np.int32) % groups
    count = rng.integers(rows // 2, rows + 1, clients).astype(np.int32)

    def draw(size, count):
        y = rng.integers(0, 3, (clients, size)).astype(np.int32)
        x = rng.normal(3, 1, (clients, size, 1)) * basis[group[:, None], y] + 0.2 * rng.normal(size=(clients, size, 10))
        padding = np.arange(size)[None] >= count[:, None]
        return ClientData(np.where(padding[..., None], 0, x).astype(np.float32), np.where(padding, 0, y), count)

    train, test = draw(rows, count), draw(12, np.full(clients, 12, np.int32))
    return Federation(train, test, None, group, INFO._replace(input_shape=(10,)))


@functools.cache
def at_threshold():
    """FLAG with α = 0.6 on nine clients in three groups, without the search."""
    algorithm = flag(nn.linear(), clusters=4, local=FULL, gradient_epochs=EPOCHS, max_vectors=2, threshold=0.6)
    return algorithm, *algorithm.init(run_keys(0).initialization, place(lines()))


def model_of(variables):
    params = variables.params["output"]
    return tuple(np.asarray(params[name], np.float64) for name in ("kernel", "bias"))


@functools.cache
def pacfl_started():
    algorithm = pacfl(nn.linear(), clusters=5, local=FULL, threshold=14.0, num_vectors=1)
    return algorithm, algorithm.init(run_keys(0).initialization, place(lines()))[0]


def true_class_probability(predictions, y, mask):
    """Stands for the accuracy, which a few held-out rows round."""
    own = jnp.take_along_axis(predictions, y[:, None], axis=1)[:, 0]
    return {"accuracy": jnp.sum(jnp.where(mask, own, 0.0)) / jnp.sum(mask.astype(jnp.float32))}
