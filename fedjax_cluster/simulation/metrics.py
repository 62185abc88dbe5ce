"""From numbers per client to numbers of the federation, and what a run has cost."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedjax_cluster import parallel, tree
from fedjax_cluster.local import rows_at_once
from fedjax_cluster.parallel.loop import Client
from fedjax_cluster.types import (
    ClientData,
    ClientMapping,
    ClusteredAlgorithm,
    Costs,
    Model,
    Population,
    State,
    Variables,
)


def evaluate_clients(
    model: Model,
    personalize: Callable[..., tuple[Variables, Array]],
    rng_key: Array,
    state: State,
    population: Population,
    test: ClientData,
) -> dict[str, Array]:
    """Metrics of every client's personal model on its own test rows, in inference mode.

    Args:
      model: the method's model.
      personalize: the method's; it sees training rows only.
      rng_key: the personalisation's randomness.
      state: current state.
      population: training data of M clients.
      test: test rows of the same clients, [M, N', ...].

    Returns:
      dict of f32[M], NaN for a client without test rows or absent.
    """

    def evaluate(client: Client, test: ClientData) -> dict[str, Array]:
        key = jax.random.fold_in(rng_key, client.index)
        predictions = predict(model, personalize, key, state, client.data, client.index, test.x)
        mask = jnp.arange(test.x.shape[0]) < test.num_examples
        return model.metrics(predictions, test.y, mask)

    cohort = parallel.whole_population(population)
    mapped = parallel.for_each_client(evaluate, cohort, test, collect=lambda metrics: metrics)
    return {name: jnp.where(cohort.mask, value, jnp.nan) for name, value in mapped.collected.items()}


def predict(
    model: Model,
    personalize: Callable[..., tuple[Variables, Array]],
    rng_key: Array,
    state: State,
    train: ClientData,
    index: Array,
    x: Array,
) -> Array:
    """One client's predictions for rows x [N, ...]: the mixture of its personal models' predictions."""
    variables, mixture = personalize(rng_key, state, train, index)

    def mixed(rows: Array) -> Array:
        def one(variables):
            outputs, _ = model.apply(variables, rows, train=False)
            return model.predict(outputs)

        if mixture.shape[0] == 1:
            return one(jax.tree.map(lambda leaf: leaf[0], variables))
        return jnp.tensordot(mixture, jax.lax.map(one, variables), axes=1)

    count, together = x.shape[0], rows_at_once()
    if count <= together:
        return mixed(x)
    # The last piece reaches back over rows that the one before has.
    starts = np.minimum(np.arange(0, count, together), count - together)
    pieces = jax.lax.map(lambda start: mixed(jax.lax.dynamic_slice_in_dim(x, start, together)), jnp.asarray(starts))
    fresh = pieces[-1, together * len(starts) - count :]
    return jnp.concatenate([pieces[:-1].reshape(-1, *pieces.shape[2:]), fresh])


def federation_figures(per_client: dict[str, np.ndarray], num_test: np.ndarray | None = None) -> dict[str, float]:
    """Mean, spread and worst decile over clients of each metric.

    Args:
      per_client: name -> f32[M], NaN where a client has none.
      num_test: i32[M] weighs the mean by test examples; None weighs clients equally.

    Returns:
      `accuracy`, `accuracy_std`, `accuracy_worst_decile`, `balanced_accuracy`, `test_loss` and whatever else the
      model measures.

    >>> federation_figures({"accuracy": np.asarray([0.5, 1.0])})["accuracy"]
    0.75
    """
    figures = {}
    for name, values in per_client.items():
        values = np.asarray(values, np.float64)
        valid = np.isfinite(values)
        name = "test_loss" if name == "loss" else name
        if not valid.any():
            figures[name] = float("nan")
            continue
        weights = None if num_test is None else np.asarray(num_test, np.float64)[valid]
        values = values[valid]
        figures[name] = float(np.average(values, weights=weights))
        if name == "accuracy":
            figures["accuracy_std"] = float(np.std(values))
            figures["accuracy_worst_decile"] = float(np.sort(values)[: max(1, round(len(values) / 10))].mean())
    return figures


def normalized_mean_squared_error(outputs: Array, targets: Array, mask: Array) -> Array:
    """NMSE in dB: 10·log₁₀ of the mean of ‖x − x̂‖²/‖x‖² over the valid rows.

    >>> float(normalized_mean_squared_error(jnp.zeros((1, 2)), jnp.ones((1, 2)), jnp.asarray([True])))
    0.0
    """
    rows = lambda array: array.reshape(array.shape[0], -1)  # noqa: E731
    error = jnp.sum((rows(outputs) - rows(targets)) ** 2, -1) / jnp.maximum(jnp.sum(rows(targets) ** 2, -1), 1e-30)
    mean = jnp.sum(jnp.where(mask, error, 0.0)) / jnp.sum(mask.astype(jnp.float32))
    return 10 * jnp.log10(mean)


def perplexity(negative_log_likelihood: Array, mask: Array) -> Array:
    """exp of the mean negative log-likelihood per valid token.

    >>> float(perplexity(jnp.zeros(3), jnp.ones(3, bool)))
    1.0
    """
    mean = jnp.sum(jnp.where(mask, negative_log_likelihood, 0.0)) / jnp.sum(mask.astype(jnp.float32))
    return jnp.exp(mean)


class Ledger(NamedTuple):
    """What a run has cost in all (Tables 5 and 6 of CFL-GP)."""

    models_down: float  # models sent to clients, in units of d
    models_up: float  # updates sent back, in units of d
    bytes_down: float
    bytes_up: float
    gradient_evaluations: float  # mini-batch gradients
    loss_evaluations: float  # mini-batch losses
    clusterings: float  # times that the server clustered
    clustering_seconds: float | None  # its time for them; None where nobody took it
    seconds_per_clustering: float | None


def ledger(history: dict[str, np.ndarray], state: State) -> Ledger:
    """Sums a history's costs; a model is its parameters and batch-norm statistics, four bytes each."""
    slots = state.clusters.active.shape[0]
    model = 4 * (tree.size(state.clusters.params) + tree.size(state.clusters.stats)) / slots
    total = {
        name: float(np.sum(history[name], dtype=np.float64)) for name in Costs._fields if name != "clustering_seconds"
    }
    down, up, clusterings = total["models_down"], total["models_up"], total["clusterings"]
    seconds = 0.0 if clusterings == 0 else None
    if CLUSTERING_SECONDS in history and clusterings > 0:
        seconds = float(np.sum(history[CLUSTERING_SECONDS]))
    return Ledger(
        down,
        up,
        down * model,
        up * model,
        total["gradient_evaluations"],
        total["loss_evaluations"],
        clusterings,
        seconds,
        seconds / clusterings if seconds is not None and clusterings > 0 else None,
    )


CLUSTERING_SECONDS = "clustering_seconds"
TIMED_CALLS = 5


def with_clustering_seconds(
    history: dict[str, np.ndarray],
    algorithm: ClusteredAlgorithm,
    rng_key: Array,
    state: State,
    mapping: ClientMapping,
    initial: float,
) -> dict[str, np.ndarray]:
    """The history with a column `clustering_seconds`, the server's time for the clustering of each round.

    Rounds run inside one compiled loop, where no clock can be read. So the method's `cluster` is timed by itself on
    the final state, and a round's time is its number of clusterings times the median of five calls: an estimate.

    Args:
      history: with a column `clusterings`.
      algorithm: the method.
      rng_key: the timed calls' randomness.
      state: final state.
      mapping: how its clients are mapped over the machine.
      initial: seconds of a method that clusters in `init`, which it measured there.

    Returns:
      The history as it is where the server never clustered, or nothing of it can be timed.
    """
    count = history["clusterings"]
    if not np.nansum(count) or (algorithm.cluster is None and not initial):
        return history
    if algorithm.cluster is None:
        seconds = np.zeros(len(count))
        seconds[0] = initial
    else:
        seconds = count * seconds_per_call(functools.partial(algorithm.cluster, mapping=mapping), rng_key, state)
    return {**history, CLUSTERING_SECONDS: seconds}


def seconds_per_call(fn: Callable[..., Any], *arguments: Any) -> float:
    """Median seconds of five calls of a jittable function, without its compilation."""
    compiled, seconds = jax.jit(fn), []
    jax.block_until_ready(compiled(*arguments))
    for _ in range(TIMED_CALLS):
        started = time.perf_counter()
        jax.block_until_ready(compiled(*arguments))
        seconds.append(time.perf_counter() - started)
    return float(np.median(seconds))
