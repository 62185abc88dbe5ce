"""The round loop: rounds run inside XLA until the next evaluation, event, or about one second has passed."""

from __future__ import annotations

import functools
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from fedjax_cluster import clustering, parallel
from fedjax_cluster.algorithms.round import labels
from fedjax_cluster.data import check_federation
from fedjax_cluster.simulation.churn import Schedule
from fedjax_cluster.simulation.metrics import (
    CLUSTERING_SECONDS,
    evaluate_clients,
    federation_figures,
    with_clustering_seconds,
)
from fedjax_cluster.simulation.progress import Interrupt, Progress, undisturbed
from fedjax_cluster.simulation.result import SimulationResult, summarize
from fedjax_cluster.simulation.run_directory import RunDirectory
from fedjax_cluster.types import (
    Churn,
    ClientData,
    ClientMapping,
    ClusteredAlgorithm,
    Costs,
    Event,
    Federation,
    Model,
    Population,
    RoundInfo,
    State,
)

# A segment's length follows the clock; this bounds the buffer of its reports.
LONGEST_SEGMENT = 1024
SEGMENT_SECONDS = 1.0
CHECKPOINT_SECONDS = 60.0
# The order of metrics.csv; XLA returns them by name.
REPORTED = (
    *("loss", "num_clients", "num_clusters", "num_changed", "num_rejected", "event", "adjusted_rand_index", "purity"),
    *(name for name in Costs._fields if name != CLUSTERING_SECONDS),  # that is no step's to tell
)


class RunKeys(NamedTuple):
    """Separate randomness for each purpose, all from one seed; the data have the scenario's own."""

    initialization: Array
    cohorts: Array
    local: Array
    evaluation: Array


class Evaluation(NamedTuple):
    """What a callback sees after each evaluation."""

    round: int  # rounds done
    state: State
    figures: Mapping[str, float]  # the federation's metrics and the last round's report


def run_keys(seed: int) -> RunKeys:
    """The random run_keys of one seed.

    >>> len(run_keys(0))
    4
    """
    return RunKeys(*jax.random.split(jax.random.key(seed), 4))


def simulate(
    algorithm: ClusteredAlgorithm,
    federation: Federation,
    *,
    rounds: int,
    seed: int = 0,
    eval_every: int = 10,
    eval_clients: int | None = None,
    metrics: Sequence[Callable[..., dict[str, Array]]] = (),
    callbacks: Sequence[Callable[[Evaluation], Mapping[str, float] | None]] = (),
    churn: Sequence[Churn] = (),
    run_dir: str | pathlib.Path | None = None,
    mapping: ClientMapping | None = None,
    time_clustering: bool = False,
    progress: bool | None = None,
    config: Mapping[str, Any] | None = None,
) -> SimulationResult:
    """Runs a method on a federation.

    Args:
      algorithm: from `fedjax_cluster.algorithms`.
      federation: from `fedjax_cluster.data`.
      rounds: communication rounds in all; more than a finished run had extends it.
      seed: initial models, cohorts and local training; equal seeds give equal initial models to all methods.
      eval_every: rounds between evaluations on the test rows; the last round is always evaluated.
      eval_clients: evaluate only this many clients, the same random ones each time; None evaluates all.
      metrics: more metrics, `(predictions, y, mask) -> dict of f32[]` for one client.
      callbacks: called with an `Evaluation` after each evaluation; figures that one returns go into the history.
      churn: clients who join or leave before given rounds. One whose first entry is a join is absent until then;
        the method's `admit` gives it a cluster.
      run_dir: leaves config.json, metrics.csv, summary.json and checkpoints there; a directory of the same run is
        taken up where it stopped.
      mapping: how clients are mapped over the machine, default `parallel.client_mapping("auto")`.
      time_clustering: times the server's clustering after the last round, for a column `clustering_seconds` and the
        summary; see `metrics.with_clustering_seconds`. A resumed run takes the time anew.
      progress: shows a progress bar; None shows it on a terminal.
      config: the experiment's configuration, kept in config.json so that `resume` can rebuild it.

    Returns:
      A SimulationResult with the final state and one row of history a round.

    Raises:
      ValueError: the federation cannot be used, a number is out of range, or run_dir holds another experiment.
      KeyboardInterrupt: after a checkpoint, where there is a run_dir and a round has been done.
    """
    _check_numbers(rounds=rounds, eval_every=eval_every, eval_clients=eval_clients)
    clusters = algorithm.config.get("clusters")
    check_federation(federation, num_clusters=clusters if isinstance(clusters, int) else None)
    algorithm = _with_metrics(algorithm, metrics)
    schedule = Schedule(churn, algorithm, federation.train.num_examples)
    directory = None
    if run_dir is not None:
        directory = RunDirectory(run_dir, algorithm, federation, seed, eval_every, config, schedule.changes)
    mapping = parallel.client_mapping() if mapping is None else mapping
    keys = run_keys(seed)

    train = parallel.place_population(federation.train, federation.info, mapping)
    test = parallel.place_population(_evaluated(federation.test, eval_clients, seed), federation.info, mapping)
    group = _groups(federation, train)
    init = functools.partial(_initial_state, algorithm, keys.initialization, schedule.start(train), mapping)
    saved = directory is not None and directory.has_checkpoint()
    state, info = init(blank=saved)
    history: dict[str, np.ndarray] = {}
    events: tuple[Event, ...] = ()
    if directory is not None:
        directory.open()
        if (restored := directory.restore(state)) is not None:
            state, history = restored
            events = directory.read_events(int(state.round))
        elif saved:  # a checkpoint that is none after all
            state, info = init(blank=False)
    done = int(state.round)
    if done == 0 and bool(info.event):
        events = _harvest(algorithm, state, -1, directory)
    if done > rounds:
        assert directory is not None
        directory.close()
        raise ValueError(f"{run_dir} has {done} rounds already, but rounds is {rounds}; give at least {done}")
    if done == rounds:
        assert directory is not None
        summary = directory.read_summary() or summarize(algorithm, federation, state, history, seed, 0.0, config)
        directory.close()
        return SimulationResult(algorithm, federation, state, history, events, summary, keys.evaluation, mapping)

    run_segment = functools.partial(_run_segment, select=algorithm.select, step=algorithm.step)
    evaluate = functools.partial(_evaluate, model=algorithm.model, personalize=algorithm.personalize)
    saved_at, length, figures = time.monotonic(), 1, {}
    # A Ctrl-C during compilation is noted as well: raised inside the compiler, it can be swallowed there.
    with Progress(algorithm.name, rounds, done, enabled=progress) as bar, Interrupt() as interrupt:
        started = time.perf_counter()
        state, _ = run_segment(keys, state, train, group, info, jnp.asarray(0, jnp.int32))  # compiles, runs no round
        if not interrupt.wanted:
            jax.block_until_ready(evaluate(keys.evaluation, state, train, test.data))
        compile_seconds = time.perf_counter() - started
        while done < rounds and not interrupt.wanted:
            if schedule.due(done):
                state = schedule.apply(keys.evaluation, state, federation.train, done)
                state = parallel.place_state(state, mapping)
            stop = int(min(rounds, done + length, (done // eval_every + 1) * eval_every, schedule.next_after(done)))
            started = time.perf_counter()
            state, reports = run_segment(keys, state, train, group, info, jnp.asarray(stop, jnp.int32))
            reached = int(state.round)
            elapsed = time.perf_counter() - started
            rows = _history_rows(reports, done, reached, elapsed)
            if done == 0:
                rows = _add_initial_costs(rows, info)
            length = max(1, min(LONGEST_SEGMENT, int((reached - done) * SEGMENT_SECONDS / max(elapsed, 1e-6))))
            done = reached
            if rows["event"][-1]:
                events += _harvest(algorithm, state, done - 1, directory)
            evaluated = done % eval_every == 0 or done == rounds
            if evaluated:
                figures = federation_figures(jax.device_get(evaluate(keys.evaluation, state, train, test.data)))
                latest = {**figures, **_last(rows)}
                for callback in callbacks:
                    figures = {**figures, **(callback(Evaluation(done, state, latest)) or {})}
                rows = _add_figures(rows, figures)
            history = _append(history, rows)
            bar.update(done, {**figures, **_last(history)}, float(np.sum(rows["num_clients"])) / max(elapsed, 1e-9))
            if directory is not None and done < rounds and time.monotonic() - saved_at > CHECKPOINT_SECONDS:
                directory.save(state, history)
                saved_at = time.monotonic()
        if time_clustering and not interrupt.wanted:
            initial = float(info.costs.clustering_seconds)
            try:
                history = with_clustering_seconds(history, algorithm, keys.local, state, mapping, initial)
            except BaseException:
                if directory is not None:
                    directory.save(state, history)
                raise
    if interrupt.wanted and not history:
        if directory is not None:
            directory.close()
        raise KeyboardInterrupt
    summary = summarize(algorithm, federation, state, history, seed, compile_seconds, config)
    if directory is not None:
        with undisturbed():
            directory.save(state, history)
            directory.write_summary(summary)
            directory.close()
    if interrupt.wanted:
        raise KeyboardInterrupt(*([] if directory is None else [str(directory.path)]))
    return SimulationResult(algorithm, federation, state, history, events, summary, keys.evaluation, mapping)


def _initial_state(
    algorithm: ClusteredAlgorithm, rng_key: Array, population: Population, mapping: ClientMapping, *, blank: bool
) -> tuple[State, RoundInfo]:
    """The state before the first round; `blank` spares the work where it is only to be replaced."""
    start = algorithm.blank if blank and algorithm.blank is not None else algorithm.init
    state, info = start(rng_key, population)
    return parallel.place_state(state, mapping), info


def _harvest(
    algorithm: ClusteredAlgorithm, state: State, number: int, directory: RunDirectory | None
) -> tuple[Event, ...]:
    """What the method keeps of the state after an event, in the run directory too."""
    if algorithm.snapshot is None:
        return ()
    event = Event(
        number, {name: np.asarray(value) for name, value in algorithm.snapshot(jax.device_get(state)).items()}
    )
    if directory is not None:
        directory.write_event(event)
    return (event,)


# --------------------------------------------------------------------------------------- compiled parts


@functools.partial(jax.jit, static_argnames=("select", "step"), donate_argnames="state")
def _run_segment(
    keys: RunKeys,
    state: State,
    train: Population,
    group: Array | None,
    blank: RoundInfo,
    stop: Array,
    *,
    select: Callable,
    step: Callable,
) -> tuple[State, dict[str, Array]]:
    """Rounds from `state.round` up to `stop` or an event: one program whatever the length, bit-identical when split."""
    start = state.round

    def one_round(state: State) -> tuple[State, dict[str, Array]]:
        number = state.round
        state = with_numbers_everywhere(state)
        selection = select(jax.random.fold_in(keys.cohorts, number), state)
        cohort = parallel.gather_cohort(train, selection)
        state, info = step(jax.random.fold_in(keys.local, number), state, cohort)
        return state, report(info, state)

    def report(info: RoundInfo, state: State) -> dict[str, Array]:
        state = with_numbers_everywhere(state)
        return _report(info, state, _agreement(state, group))

    def with_numbers_everywhere(state: State) -> State:
        # Who is drawn, and what is reported, depends on numbers of all clients.
        return state._replace(clients=parallel.to_each_device(state.clients, train.mapping))

    def unfinished(carry):
        state, _, event = carry
        return (state.round < stop) & ~event

    def advance(carry):
        state, buffer, _ = carry
        position = state.round - start
        state, row = one_round(state)
        buffer = jax.tree.map(lambda all, one: all.at[position].set(one), buffer, row)
        return state, buffer, row["event"]

    row = report(blank, state)
    buffer = jax.tree.map(lambda leaf: jnp.zeros((LONGEST_SEGMENT, *leaf.shape), leaf.dtype), row)
    state, buffer, _ = lax.while_loop(unfinished, advance, (state, buffer, jnp.asarray(False)))
    return parallel.constrain_state(state, train.mapping), buffer


@functools.partial(jax.jit, static_argnames=("model", "personalize"))
def _evaluate(
    key: Array, state: State, train: Population, test: ClientData, *, model: Model, personalize: Callable
) -> dict[str, Array]:
    figures = evaluate_clients(model, personalize, key, state, train, test)
    return {name: jnp.where(state.clients.present, value, jnp.nan) for name, value in figures.items()}


def _agreement(state: State, group: Array | None) -> dict[str, Array]:
    """How well the clusters agree with the true groups; NaN where there are none."""
    scores = {
        "adjusted_rand_index": clustering.scores.adjusted_rand_index,
        "purity": clustering.scores.purity,
    }
    if group is None:
        return {name: jnp.asarray(jnp.nan) for name in scores}
    assigned = labels(state.clients.membership)
    valid = state.clients.present & (assigned >= 0) & (group >= 0)
    return {
        name: jnp.where(jnp.any(valid), score(assigned, group, mask=valid), jnp.nan) for name, score in scores.items()
    }


def _report(info: RoundInfo, state: State, agreement: dict[str, Array]) -> dict[str, Array]:
    """The scalars of a round that go into the history."""
    count = info.num_clients.astype(jnp.float32)
    # NaN where every update was rejected: 0 would look like a perfect fit.
    loss = jnp.sum(jnp.where(count > 0, info.loss * count, 0.0)) / jnp.sum(count)
    return {
        "loss": loss,
        "num_clients": jnp.sum(info.num_clients),
        "num_clusters": jnp.sum((_occupied(state) & state.clusters.active).astype(jnp.int32)),
        "num_changed": info.num_changed,
        "num_rejected": info.num_rejected,
        **agreement,
        **info.costs._asdict(),
        "event": info.event,
    }


def _occupied(state: State) -> Array:
    """bool[K]: clusters that hold a client."""
    assigned = labels(state.clients.membership)
    slots = state.clusters.active.shape[0]
    return jnp.zeros(slots + 1, bool).at[jnp.where(assigned < 0, slots, assigned)].set(True)[:slots]


# ------------------------------------------------------------------------------------------- placement


def _groups(federation: Federation, train: Population) -> Array | None:
    if federation.group is None:
        return None
    padded = np.full(len(train.data.num_examples), -1, np.int32)
    padded[: len(federation.group)] = federation.group
    return parallel.replicate(train.mapping, jnp.asarray(padded))


def _evaluated(test: ClientData, eval_clients: int | None, seed: int) -> ClientData:
    """The test rows of the clients to evaluate; the others' are masked."""
    count = len(test.num_examples)
    if eval_clients is None or eval_clients >= count:
        return test
    chosen = np.random.default_rng(seed).choice(count, eval_clients, replace=False)
    keep = np.isin(np.arange(count), chosen)
    return test._replace(num_examples=np.where(keep, test.num_examples, 0).astype(np.int32))


# --------------------------------------------------------------------------------------------- history


def _history_rows(reports: dict[str, Array], start: int, stop: int, seconds: float) -> dict[str, np.ndarray]:
    rows = {name: np.asarray(reports[name])[: stop - start].astype(np.float64) for name in REPORTED}
    rows = {"round": np.arange(start, stop, dtype=np.float64), **rows}
    rows["seconds"] = np.full(stop - start, seconds / (stop - start))
    return rows


def _add_initial_costs(rows: dict[str, np.ndarray], info: RoundInfo) -> dict[str, np.ndarray]:
    """What `init` cost, a pilot say, is counted in the first round."""
    for name, cost in info.costs._asdict().items():
        if name in rows:
            rows[name][0] += float(cost)
    return rows


def _add_figures(rows: dict[str, np.ndarray], figures: dict[str, float]) -> dict[str, np.ndarray]:
    """Puts an evaluation's figures on the last row; the rows before it have none."""
    for name, value in figures.items():
        rows[name] = np.full(len(rows["round"]), np.nan)
        rows[name][-1] = value
    return rows


def _append(history: dict[str, np.ndarray], rows: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    before, after = (len(part.get("round", ())) for part in (history, rows))
    blank = functools.partial(np.full, fill_value=np.nan)
    names = [*history, *(name for name in rows if name not in history)]
    return {name: np.concatenate([history.get(name, blank(before)), rows.get(name, blank(after))]) for name in names}


def _last(history: dict[str, np.ndarray]) -> dict[str, float]:
    return {name: float(history[name][-1]) for name in ("loss", "adjusted_rand_index", "num_clusters")}


# ---------------------------------------------------------------------------------------------- checks


def _check_numbers(*, rounds: int, eval_every: int, eval_clients: int | None) -> None:
    for name, value in (("rounds", rounds), ("eval_every", eval_every), ("eval_clients", eval_clients)):
        if value is not None and value < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1")


def _with_metrics(algorithm: ClusteredAlgorithm, extra: Sequence[Callable]) -> ClusteredAlgorithm:
    if not extra:
        return algorithm
    own = algorithm.model.metrics

    def measure(predictions, y, mask):
        return functools.reduce(
            lambda found, fn: {**found, **fn(predictions, y, mask)}, extra, own(predictions, y, mask)
        )

    return algorithm._replace(model=algorithm.model._replace(metrics=measure))
