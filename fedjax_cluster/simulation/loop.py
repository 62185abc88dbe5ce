"""The round loop: rounds run inside XLA until the next evaluation, event, or about one second has passed."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from fedjax_cluster import parallel
from fedjax_cluster.data import check_federation
from fedjax_cluster.simulation.churn import Schedule
from fedjax_cluster.simulation.evaluation import evaluate_clients, federation_figures, with_metrics
from fedjax_cluster.simulation.history import (
    History,
    add_figures,
    append,
    last_report,
    report_round,
    rows_of_rounds,
    summarize,
)
from fedjax_cluster.simulation.ledger import with_clustering_seconds
from fedjax_cluster.simulation.progress import Interrupt, Progress, undisturbed
from fedjax_cluster.simulation.result import SimulationResult
from fedjax_cluster.simulation.run_directory import RunDirectory
from fedjax_cluster.types import (
    Churn,
    ClientData,
    ClientMapping,
    ClusteredAlgorithm,
    Event,
    Federation,
    Measure,
    Population,
    RoundInfo,
    State,
)

# A segment's length follows the clock; this bounds the buffer of its reports.
LONGEST_SEGMENT = 1024
SEGMENT_SECONDS = 1.0
CHECKPOINT_SECONDS = 60.0


class RunKeys(NamedTuple):
    """Separate randomness for each purpose, all from one seed; the data have the scenario's."""

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
    """The keys of one seed.

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
    metrics: Sequence[Measure] = (),
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
      churn: clients who join or leave before given rounds. One whose first entry is a join is absent until then; the
        method's `admit` gives it a cluster.
      run_dir: leaves config.json, metrics.csv, summary.json and checkpoints there; a directory of the same run is
        taken up where it stopped.
      mapping: how clients are mapped over the machine, default `parallel.client_mapping("auto")`.
      time_clustering: times the server's clustering after the last round, for a column `clustering_seconds` and the
        summary; see `ledger.with_clustering_seconds`. A resumed run takes the time anew.
      progress: shows a progress bar; None shows it on a terminal.
      config: the experiment's configuration, kept in config.json so that `resume` can rebuild it.

    Returns:
      A SimulationResult with the final state and one row of history a round.

    Raises:
      ValueError: the federation cannot be used, a number is out of range, or run_dir holds another experiment.
      KeyboardInterrupt: after a checkpoint, where there is a run_dir and a round has been done.
    """
    _check_numbers(rounds=rounds, eval_every=eval_every, eval_clients=eval_clients)
    clusters = getattr(algorithm, "clusters", None)
    check_federation(federation, num_clusters=clusters if isinstance(clusters, int) else None)
    schedule = Schedule(churn, algorithm, federation.train.num_examples)
    directory = None
    if run_dir is not None:
        directory = RunDirectory(run_dir, algorithm, federation, seed, eval_every, config, schedule.changes)
    mapping = parallel.client_mapping() if mapping is None else mapping
    run = _start(algorithm, federation, seed, mapping, directory, schedule)
    run.config = config
    if run.done > rounds:
        run.close()
        raise ValueError(f"{run_dir} has {run.done} rounds already, but rounds is {rounds}; give at least {run.done}")
    if run.done == rounds:
        assert directory is not None
        summary = directory.read_summary() or run.summarize(0.0)
        run.close()
        return run.result(summary)

    test = parallel.place_population(_evaluated(federation.test, eval_clients, seed), federation.info, mapping).data
    evaluate = functools.partial(evaluate_clients, model=with_metrics(algorithm.model, metrics), algorithm=algorithm)
    saved_at, length, figures = time.monotonic(), 1, {}
    # A Ctrl-C during compilation is noted as well: raised inside the compiler, it can be swallowed there.
    with Progress(algorithm.name, rounds, run.done, enabled=progress) as bar, Interrupt() as interrupt:
        started = time.perf_counter()
        run.segment(0)  # compiles, runs no round
        if not interrupt.wanted:
            jax.block_until_ready(evaluate(run.keys.evaluation, run.state, run.train, test))
        compile_seconds = time.perf_counter() - started
        while run.done < rounds and not interrupt.wanted:
            done = run.done
            run.apply_churn()
            stop = int(min(rounds, done + length, (done // eval_every + 1) * eval_every, schedule.next_after(done)))
            rows, elapsed = run.rounds_until(stop)
            length = max(1, min(LONGEST_SEGMENT, int((run.done - done) * SEGMENT_SECONDS / max(elapsed, 1e-6))))
            if run.done % eval_every == 0 or run.done == rounds:
                found = evaluate(run.keys.evaluation, run.state, run.train, test)
                figures = federation_figures(jax.device_get(found))
                latest = {**figures, **last_report(rows)}
                for callback in callbacks:
                    figures = {**figures, **(callback(Evaluation(run.done, run.state, latest)) or {})}
                rows = add_figures(rows, figures)
            run.history = append(run.history, rows)
            speed = float(np.sum(rows["num_clients"])) / max(elapsed, 1e-9)
            bar.update(run.done, {**figures, **last_report(run.history)}, speed)
            if run.done < rounds and time.monotonic() - saved_at > CHECKPOINT_SECONDS:
                run.save()
                saved_at = time.monotonic()
        if time_clustering and not interrupt.wanted:
            run.time_clustering()
    return run.finish(compile_seconds, interrupted=interrupt.wanted)


@dataclasses.dataclass
class _Run:
    """A run between its start and its result."""

    algorithm: ClusteredAlgorithm
    federation: Federation
    seed: int
    mapping: ClientMapping
    directory: RunDirectory | None
    schedule: Schedule
    keys: RunKeys
    train: Population
    group: Array | None
    state: State
    info: RoundInfo  # of `init`
    history: History = dataclasses.field(default_factory=dict)
    events: tuple[Event, ...] = ()
    config: Mapping[str, Any] | None = None

    @property
    def done(self) -> int:
        return int(self.state.round)

    def segment(self, stop: int) -> dict[str, Array]:
        """Rounds up to `stop` or an event, in one compiled program."""
        self.state, reports = _run_segment(
            self.keys,
            self.state,
            self.train,
            self.group,
            self.info,
            jnp.asarray(stop, jnp.int32),
            algorithm=self.algorithm,
        )
        return reports

    def rounds_until(self, stop: int) -> tuple[History, float]:
        """The rows of the rounds up to `stop` or an event, and their seconds."""
        start, started = self.done, time.perf_counter()
        reports = self.segment(stop)
        reached = self.done
        elapsed = time.perf_counter() - started
        rows = rows_of_rounds(reports, start, reached, elapsed, self.info.costs if start == 0 else None)
        if rows["event"][-1]:
            self.take_snapshot(reached - 1)
        return rows, elapsed

    def apply_churn(self) -> None:
        """Clients join and leave before the next round."""
        if self.schedule.due(self.done):
            state = self.schedule.apply(self.keys.evaluation, self.state, self.federation.train, self.done)
            self.state = parallel.place_state(state, self.mapping)

    def take_snapshot(self, number: int) -> None:
        """What the method keeps of the state after an event, in the run directory too."""
        if self.algorithm.snapshot is None:
            return
        content = self.algorithm.snapshot(jax.device_get(self.state))
        event = Event(number, {name: np.asarray(value) for name, value in content.items()})
        if self.directory is not None:
            self.directory.write_event(event)
        self.events += (event,)

    def time_clustering(self) -> None:
        """Adds the column `clustering_seconds`; should that fail, the run is saved first."""
        initial = float(self.info.costs.clustering_seconds)
        try:
            self.history = with_clustering_seconds(
                self.history, self.algorithm, self.keys.local, self.state, self.mapping, initial
            )
        except BaseException:
            self.save()
            raise

    def save(self) -> None:
        if self.directory is not None:
            self.directory.save(self.state, self.history)

    def close(self) -> None:
        if self.directory is not None:
            self.directory.close()

    def summarize(self, compile_seconds: float) -> dict[str, Any]:
        return summarize(
            self.algorithm, self.federation, self.state, self.history, self.seed, compile_seconds, self.config
        )

    def finish(self, compile_seconds: float, *, interrupted: bool) -> SimulationResult:
        """Leaves what is to be left; an interrupted run ends with a KeyboardInterrupt that names its directory."""
        if interrupted and not self.history:
            self.close()
            raise KeyboardInterrupt
        summary = self.summarize(compile_seconds)
        if self.directory is not None:
            with undisturbed():
                self.save()
                self.directory.write_summary(summary)
                self.close()
        if interrupted:
            raise KeyboardInterrupt(*([] if self.directory is None else [str(self.directory.path)]))
        return self.result(summary)

    def result(self, summary: dict[str, Any]) -> SimulationResult:
        return SimulationResult(
            self.algorithm,
            self.federation,
            self.state,
            self.history,
            self.events,
            summary,
            self.keys.evaluation,
            self.mapping,
        )


def _start(
    algorithm: ClusteredAlgorithm,
    federation: Federation,
    seed: int,
    mapping: ClientMapping,
    directory: RunDirectory | None,
    schedule: Schedule,
) -> _Run:
    """A run before its next round: fresh, or as the run directory's newest checkpoint left it."""
    keys = run_keys(seed)
    train = parallel.place_population(federation.train, federation.info, mapping)
    population = schedule.start(train)

    def initial(*, template: bool) -> tuple[State, RoundInfo]:
        # A template spares the work of a state that is only to be replaced.
        start = algorithm.template if template and algorithm.template is not None else algorithm.init
        state, info = start(keys.initialization, population)
        return parallel.place_state(state, mapping), info

    saved = directory is not None and directory.has_checkpoint()
    state, info = initial(template=saved)
    group = _groups(federation, train)
    run = _Run(algorithm, federation, seed, mapping, directory, schedule, keys, train, group, state, info)
    if directory is not None:
        directory.open()
        if (restored := directory.restore(state)) is not None:
            run.state, run.history = restored
            run.events = directory.read_events(run.done)
        elif saved:  # a checkpoint that is none after all
            run.state, run.info = initial(template=False)
    if run.done == 0 and bool(run.info.event):
        run.take_snapshot(-1)
    return run


@functools.partial(jax.jit, static_argnames="algorithm", donate_argnames="state")
def _run_segment(
    keys: RunKeys,
    state: State,
    train: Population,
    group: Array | None,
    initial: RoundInfo,
    stop: Array,
    *,
    algorithm: ClusteredAlgorithm,
) -> tuple[State, dict[str, Array]]:
    """Rounds from `state.round` up to `stop` or an event: one program whatever the length, bit-identical when split."""
    start = state.round

    def one_round(state: State) -> tuple[State, dict[str, Array]]:
        number = state.round
        state = with_numbers_everywhere(state)
        selection = algorithm.select(jax.random.fold_in(keys.cohorts, number), state)
        cohort = parallel.gather_cohort(train, selection)
        state, info = algorithm.step(jax.random.fold_in(keys.local, number), state, cohort)
        return state, report(info, state)

    def report(info: RoundInfo, state: State) -> dict[str, Array]:
        return report_round(info, with_numbers_everywhere(state), group)

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

    row = report(initial, state)
    buffer = jax.tree.map(lambda leaf: jnp.zeros((LONGEST_SEGMENT, *leaf.shape), leaf.dtype), row)
    state, buffer, _ = lax.while_loop(unfinished, advance, (state, buffer, jnp.asarray(False)))
    return parallel.constrain_state(state, train.mapping), buffer


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


def _check_numbers(*, rounds: int, eval_every: int, eval_clients: int | None) -> None:
    for name, value in (("rounds", rounds), ("eval_every", eval_every), ("eval_clients", eval_clients)):
        if value is not None and value < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1")
