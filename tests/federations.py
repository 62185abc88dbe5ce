"""Small federations that tests share."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_cluster import parallel
from fedjax_cluster.simulation.segment import run_keys
from fedjax_cluster.types import ClientData, DatasetInfo, Federation

INFO = DatasetInfo("blobs", (6,), 3)


def blobs(clients=8, groups=2, rows=20, seed=0, ragged=True) -> Federation:
    """Three classes of points in six dimensions; each group of clients has its own class centres."""
    rng = np.random.default_rng(seed)
    centres = rng.normal(size=(groups, 3, 6)) * 2
    group = np.arange(clients) % groups
    y = rng.integers(0, 3, (clients, rows)).astype(np.int32)
    x = (centres[group[:, None], y] + rng.normal(size=(clients, rows, 6))).astype(np.float32)
    count = (rng.integers(rows // 2, rows + 1, clients) if ragged else np.full(clients, rows)).astype(np.int32)
    padding = np.arange(rows)[None] >= count[:, None]
    train = ClientData(np.where(padding[..., None], 0, x).astype(np.float32), np.where(padding, 0, y), count)
    test_y = rng.integers(0, 3, (clients, 12)).astype(np.int32)
    test_x = (centres[group[:, None], test_y] + rng.normal(size=(clients, 12, 6))).astype(np.float32)
    test = ClientData(test_x, test_y, np.full(clients, 12, np.int32))
    return Federation(train, test, None, group.astype(np.int32), INFO)


def as_lists(federation: Federation):
    """[(x, y)] per client without padding, in float64."""
    x, y, count = federation.train
    return [(x[i, :n].astype(np.float64), y[i, :n]) for i, n in enumerate(count)]


@functools.partial(jax.jit, static_argnames="algorithm")
def _one_step(algorithm, population, state, number, keys):
    selection = algorithm.select(jax.random.fold_in(keys.cohorts, number), state)
    cohort = parallel.gather_cohort(population, selection)
    return algorithm.step(jax.random.fold_in(keys.local, number), state, cohort)


def one_step(algorithm, population, state, number=0, seed=0):
    """A round as `simulate` does it, compiled once for all equal methods."""
    return _one_step(algorithm, population, state, jnp.asarray(number), run_keys(seed))


def play(algorithm, federation, rounds, seed=0):
    """State and reports after rounds on one device: what `simulate` does, without its evaluation."""
    one = parallel.client_mapping("scan", devices=jax.devices()[:1])
    population = parallel.place_population(federation.train, federation.info, one)
    reports = []
    state, _ = algorithm.init(run_keys(seed).initialization, population)
    for number in range(rounds):
        state, info = one_step(algorithm, population, state, number, seed)
        reports.append(jax.device_get(info))
    return jax.device_get(state), reports
