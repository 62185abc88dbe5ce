"""Evaluation: metrics of every client's personal model on its test rows, and the federation's figures."""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedjax_cluster import parallel
from fedjax_cluster.clustering.scores import adjusted_rand_index
from fedjax_cluster.data.stored import stored, streamed
from fedjax_cluster.inference import finite_rows, measure, mixed_predictions
from fedjax_cluster.lifting import Numbers, lifted, with_numbers
from fedjax_cluster.marked_clients import marked
from fedjax_cluster.parallel import Client
from fedjax_cluster.simulation.arguments import further_figures
from fedjax_cluster.simulation.history import NOT_FINITE
from fedjax_cluster.types import (
    ClientData,
    ClusteredAlgorithm,
    Cohort,
    Measure,
    Model,
    Population,
    Selection,
    State,
    Variables,
)

LOG = logging.getLogger(__name__)
EVALUATIONS = 30  # of a long run
PART = 8  # one in so many clients, at most, have their rows gathered to be evaluated


class Evaluation(NamedTuple):
    """What a callback sees after each evaluation.

    The state's arrays are given up to the rounds that follow: what is kept of them is copied, as by
    `jax.tree.map(np.asarray, evaluation.state.clusters.params)`.
    """

    round: int  # rounds done
    state: State
    figures: Mapping[str, float]  # the federation's metrics and the last round's report


Callback = Callable[[Evaluation], Mapping[str, float] | None]


class MoreMetrics(NamedTuple):
    """A model's metrics and others; equal where these are."""

    first: Measure
    others: tuple[Measure, ...]

    def __call__(self, predictions: Array, y: Array, mask: Array, /) -> dict[str, Array]:
        found = self.first(predictions, y, mask)
        # Of one number an example [N, 1] less [N] would be [N, N].
        alike = isinstance(predictions, jax.Array) and predictions.size == y.size
        predictions = predictions.reshape(y.shape) if alike else predictions
        for other in self.others:
            source = f"the metric {getattr(other, '__name__', type(other).__name__)}"
            try:
                figures = other(predictions, y, mask)
            except (jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError) as error:
                raise ValueError(
                    f"{source} makes numbers of arrays that have no values yet, as float(), if and NumPy do; metrics "
                    "are compiled: use jax.numpy, and jnp.where for if"
                ) from error
            found = further_figures(found, figures, source)
        return found


def usual_every(rounds: int) -> int:
    """How many rounds lie between evaluations where nothing is said of it: a curve has four points at least.

    >>> [usual_every(rounds) for rounds in (1, 3, 8, 20, 40, 100, 300)]
    [1, 1, 2, 5, 10, 10, 10]
    """
    return max(1, min(10, rounds // 4), rounds // EVALUATIONS)


def with_metrics(model: Model, metrics: Sequence[Measure]) -> Model:
    """A model with further metrics."""
    return model._replace(metrics=MoreMetrics(model.metrics, tuple(metrics))) if metrics else model


@parallel.kept_program(static_argnames=("model", "algorithm"))
def evaluate_clients(
    rng_key: Array,
    state: State,
    population: Population,
    test: ClientData,
    numbers: Numbers | None = None,
    chosen: Array | None = None,
    *,
    model: Model,
    algorithm: ClusteredAlgorithm,
) -> dict[str, Array]:
    """Metrics f32[M] of every client's personal model on its test rows [M, N', ...], in inference mode.

    NaN for a client without test rows or absent, or whose predictions are not finite (`NOT_FINITE`), and for all but
    those `chosen`, i32[n]; where these are at most an eighth, nothing is computed of others. `model` is the method's,
    with the metrics to take; `numbers` are as in `run_segment`.
    """
    return evaluated_of(rng_key, state, population, test, chosen, model, with_numbers(algorithm, numbers or {}))


@parallel.kept_program(static_argnames=("model", "algorithm"))
def evaluate_cohort(
    rng_key: Array,
    state: State,
    cohort: Cohort,
    test: ClientData,
    numbers: Numbers | None = None,
    *,
    model: Model,
    algorithm: ClusteredAlgorithm,
) -> dict[str, Array]:
    """Metrics f32[C] of a cohort's clients on their test rows [C, N', ...]; otherwise as `evaluate_clients`."""
    return evaluated(rng_key, state, cohort, test, model, with_numbers(algorithm, numbers or {}))


def personal_models(
    algorithm: ClusteredAlgorithm, rng_key: Array, state: State, data: ClientData, index: Array
) -> tuple[Variables, Array]:
    """What the method's `personalize` gives of a client: models, leaves [P, ...], and their weights f32[P].

    Raises:
      ValueError: it gives something else.
    """
    given = algorithm.personalize(rng_key, state, data, index)
    what = f"personalize of {algorithm.name}"
    if type(given) is not tuple or len(given) != 2 or not isinstance(given[0], Variables):
        raise ValueError(
            f"{what} returns a {type(given).__name__}; it must return (Variables [P, ...], weights f32[P])"
        )
    variables, mixture = given
    shapes = {jnp.shape(leaf)[:1] for leaf in jax.tree.leaves(variables)}
    if jnp.ndim(mixture) != 1 or shapes - {jnp.shape(mixture)}:
        raise ValueError(
            f"{what} returns weights {jnp.shape(mixture)} and models whose first axes are "
            f"{sorted(shapes)}; both need an axis of P models in front, of one model P = 1"
        )
    return variables, mixture


def evaluated(
    rng_key: Array, state: State, cohort: Cohort, test: ClientData, model: Model, algorithm: ClusteredAlgorithm
) -> dict[str, Array]:
    """Metrics f32[C] of a cohort's clients, inside a program; as `evaluate_clients` has them."""

    def evaluate(client: Client, test: ClientData, row: Any) -> dict[str, Array]:
        key = jax.random.fold_in(rng_key, client.index)
        # Of its own row alone: all rows would be brought to every device.
        own = state._replace(clients=jax.tree.map(lambda leaf: leaf[None], row))
        variables, mixture = personal_models(algorithm, key, own, client.data, jnp.zeros((), jnp.int32))
        predictions = mixed_predictions(model, variables, mixture, test.x)
        mask = jnp.arange(test.x.shape[0]) < test.num_examples
        spoilt = jnp.where(test.num_examples > 0, (~finite_rows(predictions, mask)).astype(jnp.float32), jnp.nan)
        return {**measure(model, predictions, test.y, mask), NOT_FINITE: spoilt}

    rows = parallel.gather_rows(cohort, state.clients)
    mapped = parallel.for_each_client(evaluate, cohort, test, rows, collect=lambda metrics: metrics)
    # A metric may have a number for no rows.
    counted = cohort.mask & rows.present & (test.num_examples > 0)
    return {name: jnp.where(counted, value, jnp.nan) for name, value in mapped.collected.items()}


def evaluated_of(
    rng_key: Array,
    state: State,
    population: Population,
    test: ClientData,
    chosen: Array | None,
    model: Model,
    algorithm: ClusteredAlgorithm,
) -> dict[str, Array]:
    """Metrics f32[M] of all clients or those chosen, inside a program; as `evaluate_clients` has them."""
    count = len(population.data.num_examples)
    if chosen is not None and PART * len(chosen) > count:  # whose rows would be held twice
        kept = jnp.zeros(count, bool).at[chosen].set(True)
        test, chosen = test._replace(num_examples=jnp.where(kept, test.num_examples, 0)), None
    if chosen is None:
        return evaluated(rng_key, state, parallel.whole_population(population), test, model, algorithm)
    there = population.data.num_examples[chosen] > 0
    order = jnp.argsort(~there, stable=True)
    selection = Selection(jnp.where(there, chosen, count)[order], there[order])
    cohort = parallel.gather_cohort(population, selection)
    x, y = parallel.gather_rows(cohort, (test.x, test.y))
    rows = ClientData(x, y, test.num_examples.at[cohort.index].get(mode="fill", fill_value=0))
    found = evaluated(rng_key, state, cohort, rows, model, algorithm)
    return {
        name: jnp.full(count, jnp.nan, value.dtype).at[cohort.index].set(value, mode="drop")
        for name, value in found.items()
    }


def evaluate_in_chunks(
    rng_key: Array,
    state: State,
    population: Population,
    test: ClientData,
    clients: np.ndarray | None = None,
    *,
    model: Model,
    algorithm: ClusteredAlgorithm,
) -> Iterator[tuple[np.ndarray, dict[str, np.ndarray]]]:
    """Clients' numbers i64[n] and metrics f32[n], a chunk at a time, of a population and test rows that may be on disk.

    Args:
      rng_key, state, model, algorithm: as of `evaluate_clients`.
      population: all clients, placed.
      test: of the same clients; placed where the population is on the devices.
      clients: i[n] of those to evaluate, ascending, where it is on disk; None is all.
    """
    algorithm, given = lifted(algorithm)
    options = {"model": model, "algorithm": algorithm}
    if not stored(population.data):
        found = evaluate_clients(rng_key, state, population, test, given, **options)
        yield np.arange(len(population.data.num_examples)), parallel.fetched(found)
        return
    for numbers, cohort, (rows,) in parallel.in_chunks(population, test, clients=clients):
        found = parallel.fetched(evaluate_cohort(rng_key, state, cohort, rows, given, **options))
        yield numbers, {name: value[: len(numbers)] for name, value in found.items()}


def evaluator(
    rng_key: Array,
    algorithm: ClusteredAlgorithm,
    model: Model,
    population: Population,
    test: ClientData,
    clients: np.ndarray | None = None,
) -> Callable[..., dict[str, np.ndarray]]:
    """A function of a state: metrics of the clients that are evaluated; with `warm_up` it only has to be compiled.

    Args:
      rng_key, algorithm, model: as of `evaluate_clients`.
      population: all clients, placed.
      test: of the same clients, not placed.
      clients: i[n] of those to evaluate, ascending; None is all. The others' metrics are NaN, or left out where the
        rows are on disk.
    """
    if streamed(test):
        count = len(test.num_examples)

        def evaluate(state: State, warm_up: bool = False) -> dict[str, np.ndarray]:
            options = {"model": model, "algorithm": algorithm}
            chunks = evaluate_in_chunks(rng_key, state, population, test, clients, **options)
            numbers, found = zip(*itertools.islice(chunks, 1 if warm_up else None), strict=True)
            metrics = {name: np.concatenate([each[name] for each in found]) for name in found[0]}
            # Who is honest is told of all clients.
            return metrics if marked(population.data) is None else _of_all(np.concatenate(numbers), metrics, count)

        return evaluate
    chosen = None if clients is None else parallel.replicate(population.mapping, clients.astype(np.int32))
    placed = parallel.place_population(test, population.info, population.mapping).data
    told_apart, given = lifted(algorithm)
    options = {"model": model, "algorithm": told_apart}
    return lambda state, warm_up=False: parallel.fetched(
        evaluate_clients(rng_key, state, population, placed, given, chosen, **options)
    )


def _of_all(numbers: np.ndarray, metrics: Mapping[str, np.ndarray], count: int) -> dict[str, np.ndarray]:
    """Metrics f32[count] of all clients, NaN but for those with these numbers i[n]."""
    found = {name: np.full(count, np.nan, np.float32) for name in metrics}
    for name, values in metrics.items():
        found[name][numbers] = values
    return found


@functools.partial(jax.jit, static_argnames="algorithm")
def predict_client(
    rng_key: Array, state: State, data: ClientData, index: Array, x: Array, *, algorithm: ClusteredAlgorithm
) -> Array:
    """One client's predictions for rows x [N, ...]: the mixture of its personal models' predictions."""
    variables, mixture = personal_models(algorithm, rng_key, state, data, index)
    return mixed_predictions(algorithm.model, variables, mixture, x)


def chosen_clients(count: int, eval_clients: int | None, seed: int) -> np.ndarray | None:
    """The clients i[n] that evaluations look at, ascending; None is all of `count`."""
    if eval_clients is None or eval_clients >= count:
        if eval_clients is not None and eval_clients > count:
            LOG.warning(f"eval_clients is {eval_clients}, but there are only {count} clients: all are evaluated")
        return None
    return np.sort(np.random.default_rng(seed).choice(count, eval_clients, replace=False))


def federation_figures(per_client: dict[str, np.ndarray], diverged: bool = False) -> dict[str, float]:
    """Mean, spread and worst decile over clients of each metric.

    Args:
      per_client: name -> f32[M], NaN where a client has none, as one without test rows.
      diverged: the models are not those of the last rounds, whose updates were all rejected.

    Returns:
      `accuracy`, `accuracy_std`, `accuracy_worst_decile`, `balanced_accuracy`, `test_loss` and whatever else the
      model measures; all NaN after divergence, or where a client's predictions or its loss are not finite: the others'
      mean would pass for that of all. `num_not_finite` counts those clients. Another figure that is infinite for a
      client is NaN alone.

    >>> federation_figures({"accuracy": np.asarray([0.5, 1.0])})["accuracy"]
    0.75
    """
    spoilt = (np.asarray(per_client.get(NOT_FINITE, 0.0)) > 0) | np.isinf(np.asarray(per_client.get("loss", 0.0)))
    figures = {NOT_FINITE: float(np.sum(spoilt))}
    for name, values in per_client.items():
        if name == NOT_FINITE:
            continue
        values = np.asarray(values, np.float64)
        valid = np.isfinite(values)
        name = "test_loss" if name == "loss" else name
        none = diverged or figures[NOT_FINITE] > 0 or np.isinf(values).any() or not valid.any()
        values = np.asarray([np.nan]) if none else values[valid]
        figures[name] = float(np.average(values))
        if name == "accuracy":
            figures["accuracy_std"] = float(np.std(values))
            figures["accuracy_worst_decile"] = float(np.sort(values)[: max(1, round(len(values) / 10))].mean())
    return figures


def honest_figures(
    per_client: dict[str, np.ndarray], label: np.ndarray, group: Any | None, honest: np.ndarray, diverged: bool = False
) -> dict[str, float]:
    """The figures of the honest clients, bool[M], alone.

    Args:
      per_client: as in `federation_figures`.
      label: i32[M], the clusters, −1 for none.
      group: i32[M], the true groups, −1 where unknown, or None.

    Returns:
      `accuracy_honest`, where accuracy is measured, and `adjusted_rand_index_honest`; NaN where there are none.
    """
    count = len(honest)
    found = federation_figures({name: np.asarray(of)[:count][honest] for name, of in per_client.items()}, diverged)
    figures = {"accuracy_honest": found["accuracy"]} if "accuracy" in found else {}
    known = honest & (label >= 0) & (np.asarray(-1 if group is None else group) >= 0)
    agreement = adjusted_rand_index(label, np.asarray(group), mask=known) if known.any() else np.nan
    return {**figures, "adjusted_rand_index_honest": float(agreement)}
