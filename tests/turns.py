"""Rounds told so that a NumPy version can walk along: who took part, and the rows of every mini-batch."""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_cluster import parallel
from fedjax_cluster.local import client_key, mini_batch
from fedjax_cluster.simulation.segment import run_keys
from fedjax_cluster.types import RoundInfo, State
from tests.federations import as_lists, blobs, one_step

COUNTS = (3, 24, 9, 17, 5, 21, 12, 7, 15)


class Turn(NamedTuple):
    """One round."""

    before: State
    after: State
    info: RoundInfo
    clients: list[int]  # who took part
    rows: dict[int, list[np.ndarray]]  # of each of them, the rows of one mini-batch after the other


def uneven(groups=3, seed=0):
    """Nine clients with 3 to 24 examples: means by clients and by examples differ."""
    federation = blobs(clients=9, groups=groups, rows=24, seed=seed, ragged=False)
    x, y, _ = federation.train
    real = np.arange(24)[None] < np.asarray(COUNTS)[:, None]
    train = federation.train._replace(
        x=np.where(real[..., None], x, 0), y=np.where(real, y, 0), num_examples=np.asarray(COUNTS, np.int32)
    )
    return federation._replace(train=train)


@functools.partial(jax.jit, static_argnames="algorithm")
def _selection(rng_key, state, *, algorithm):
    return algorithm.select(rng_key, state)


@functools.partial(jax.jit, static_argnames=("size", "number"))
def _batches(rng_key, data, size, number):
    """Rows [M, number, size] of every client's mini-batches, and which of them count."""

    def of_client(index, data):
        key = jax.random.split(client_key(rng_key, index))[0]
        numbered = data._replace(y=jnp.arange(data.x.shape[0]))
        return jax.vmap(lambda step: mini_batch(key, numbered, size, step)[1:])(jnp.arange(number))

    return jax.vmap(of_client)(jnp.arange(data.x.shape[0]), data)


def turns(algorithm, federation, rounds, *, batches=None, state=None, seed=0):
    """Rounds as `simulate` does them, on one device; `batches` of each client if not one for each of its steps."""
    own = algorithm.local
    batches = batches or own.steps or own.epochs * math.ceil(federation.train.x.shape[1] / own.batch_size)
    passes = [own.epochs * math.ceil(n / own.batch_size) if own.epochs else batches for n in federation.train[2]]
    one = parallel.client_mapping("scan", devices=jax.devices()[:1])
    population = parallel.place_population(federation.train, federation.info, one)
    keys = run_keys(seed)
    state = algorithm.init(keys.initialization, population)[0] if state is None else state
    found = []
    for number in range(rounds):
        index, mask, _ = _selection(jax.random.fold_in(keys.cohorts, number), state, algorithm=algorithm)
        new, info = one_step(algorithm, population, state, number, seed)
        rows, real = map(
            np.asarray, _batches(jax.random.fold_in(keys.local, number), population.data, own.batch_size, batches)
        )
        clients = np.asarray(index)[np.asarray(mask)].tolist()
        drawn = {i: [rows[i, step][real[i, step]] for step in range(passes[i])] for i in clients}
        found.append(Turn(*jax.device_get((state, new, info)), clients, drawn))
        state = new
    return found


def drawn_batches(turn, federation):
    """{client: [(x, y)]}, its mini-batches of a round."""
    data = as_lists(federation)
    return {i: [(data[i][0][rows], data[i][1][rows]) for rows in batches] for i, batches in turn.rows.items()}


def linear_models(params):
    """[(kernel, bias)] of stacked linear models, in float64."""
    output = params["output"]
    return [
        (np.asarray(kernel, np.float64), np.asarray(bias, np.float64))
        for kernel, bias in zip(output["kernel"], output["bias"], strict=True)
    ]
