"""Three small rows beside code that stays as it is, in seconds: for the history of speeds (`bench.history`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from fedjax_cluster import clustering, nn
from fedjax_cluster.bench.local import Case, training
from fedjax_cluster.bench.measure import Bench
from fedjax_cluster.bench.workloads import DIGITS, noise_clients
from fedjax_cluster.types import PyTree

PLAIN = "plain JAX"
TURNS = 9


def run(bench: Bench) -> None:
    few = bench.smoke
    mlp = Case(nn.mlp(), DIGITS, 2 if few else 8, 1 if few else 5, 8 if few else 64)
    lenet = Case(nn.lenet5(), DIGITS, 2 if few else 4, 1 if few else 4, 8 if few else 32)
    # LeNet-5 written out runs on XLA's convolutions, which differ more from run to run than what is to be seen.
    peers = {PLAIN: plain_training(mlp)}
    for name, case in (("MLP 784-200-10", mlp), ("LeNet-5", lenet)):
        bench.row(f"{name}, local training", case.size, training(case), peers=peers, repetitions=TURNS)
    count = 40 if few else 3000
    points = np.random.default_rng(0).normal(size=(count, 8)).astype(np.float32)
    key, x = jax.random.key(0), jnp.asarray(points)
    bench.row(
        "k-means, 8 clusters",
        f"M={count}, r=8",
        lambda: clustering.kmeans(key, x, 8, num_restarts=5),
        peers={PLAIN: plain_kmeans(x, 8, 5, 20)},
        repetitions=TURNS,
    )


def plain_training(case: Case) -> Callable[[], Any]:
    """The MLP's mini-batch descent, a client after another on one device, written out as JAX's examples have it."""
    data = noise_clients(case.info, case.clients, 4 * case.batch)
    x, y = jnp.asarray(data.x), jnp.asarray(data.y)
    draws = np.random.default_rng(0)
    start = [jnp.asarray(draws.normal(0, 0.05, shape), jnp.float32) for shape in ((784, 200), (200, 10))]

    def loss(params: PyTree, x: Array, y: Array) -> Array:
        hidden = jax.nn.relu(x.reshape(len(x), -1).astype(jnp.float32) / 255 @ params[0] + 0.1)
        logits = jax.nn.log_softmax(hidden @ params[1])
        return -jnp.mean(jnp.take_along_axis(logits, y[:, None], 1))

    def one_client(total: PyTree, rows: tuple[Array, Array]) -> tuple[PyTree, None]:
        def step(number: Array, params: PyTree) -> PyTree:
            first = (number % 4) * case.batch
            batch = [lax.dynamic_slice_in_dim(part, first, case.batch) for part in rows]
            return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params, *batch))

        params = lax.fori_loop(0, case.steps, step, start)
        return jax.tree.map(lambda t, p, s: t + p - s, total, params, start), None

    @jax.jit
    def train(x: Array, y: Array) -> PyTree:
        return lax.scan(one_client, jax.tree.map(jnp.zeros_like, start), (x, y))[0]

    return lambda: train(x, y)


def plain_kmeans(points: Array, clusters: int, restarts: int, iterations: int) -> Callable[[], Any]:
    """Lloyd's iteration so many times from so many starts."""
    starts = jnp.stack([points[i * clusters : (i + 1) * clusters] for i in range(restarts)])

    def lloyd(centers: Array) -> Array:
        def iterate(_: Any, centers: Array) -> Array:
            nearest = jnp.argmin(jnp.square(points[:, None] - centers[None]).sum(-1), 1)
            members = jax.nn.one_hot(nearest, clusters)
            return members.T @ points / jnp.maximum(members.sum(0), 1)[:, None]

        return lax.fori_loop(0, iterations, iterate, centers)

    train = jax.jit(jax.vmap(lloyd))
    return lambda: train(starts)
