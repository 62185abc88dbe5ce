"""A run between its start and its result: rounds, figures, snapshots and checkpoints."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jax import Array

from fedjax_cluster import parallel
from fedjax_cluster.algorithms.round import labels
from fedjax_cluster.data.stored import stored
from fedjax_cluster.faults import faulty_clients
from fedjax_cluster.interruption import CHECKPOINT_SECONDS
from fedjax_cluster.lifting import lifted
from fedjax_cluster.options import reason_of
from fedjax_cluster.simulation.arguments import further_figures
from fedjax_cluster.simulation.assignments import Kept, with_moves
from fedjax_cluster.simulation.checkpoints import Saved
from fedjax_cluster.simulation.churn import Schedule
from fedjax_cluster.simulation.evaluation import Callback, Evaluation, federation_figures, honest_figures
from fedjax_cluster.simulation.history import (
    History,
    append,
    diverged_since,
    fewest_rejections,
    has_figures,
    last_report,
    rows_of_rounds,
    summarize,
    warn_of_divergence,
    warn_of_growth,
    with_figures,
)
from fedjax_cluster.simulation.ledger import CLUSTERING_SECONDS, at_the_start, with_clustering_seconds
from fedjax_cluster.simulation.own_methods import check_heeded, checked_start
from fedjax_cluster.simulation.result import SimulationResult
from fedjax_cluster.simulation.run_directory import READING, UNEVALUATED, RunDirectory, check_rounds
from fedjax_cluster.simulation.segment import LABELS, MOST_COMPARED, RunKeys, placed_clients, run_keys, run_segment
from fedjax_cluster.simulation.streaming import Stream, check_cohorts
from fedjax_cluster.types import (
    ClientMapping,
    ClusteredAlgorithm,
    Event,
    Federation,
    Measure,
    Population,
    RoundInfo,
    State,
)

LOG = logging.getLogger(__name__)
SAVING_SHARE, FIRST_SAVING = 0.02, 0.1  # of the time, at most; and seconds, before one was measured


@dataclasses.dataclass
class Run:
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
    moves: Kept = dataclasses.field(default_factory=dict)
    kept: bool | None = True  # whether the run directory, if there is one, has all of it; None: it is not the run's now
    config: Mapping[str, Any] | None = None
    metrics: tuple[Measure, ...] = ()  # beside the model's
    evaluated: bool = True  # no evaluation is due that has not been done
    warned: bool = False  # that it has diverged
    grown: bool = False  # and that its loss has grown, which may come before
    timed: bool = False  # as `time_clustering` asks for
    compile_seconds: float = 0.0
    pause: float = CHECKPOINT_SECONDS
    saving: float = FIRST_SAVING  # seconds that the last checkpoint took
    saved_at: float = dataclasses.field(default_factory=time.monotonic)
    stream: Stream | None = None  # where the clients' rows are on disk

    @property
    def done(self) -> int:
        return int(self.state.round)

    @property
    def initial_seconds(self) -> float:
        """What a method that clusters in `init` measured there."""
        return float(self.info.costs.clustering_seconds)

    def ended(self, rounds: int) -> bool:
        """Whether nothing of so many rounds is left to be done; the last is evaluated, wherever a run was stopped."""
        check_rounds(self.done, rounds, self.directory)
        if self.done == rounds and not READING.get():
            self.evaluated = self.evaluated and has_figures(self.history)
        return self.done == rounds and self.evaluated

    def stream_rows(self, rounds: int, stack: contextlib.ExitStack) -> None:
        """Where the clients' rows are on disk, begins to read the cohorts of the rounds up to `rounds`."""
        if stored(self.train.data) and self.done < rounds:
            self.stream = Stream(self.algorithm, self.train, self.keys.cohorts, self.state, rounds)
            stack.callback(self.stream.close)

    def segment(self, stop: int, due: int) -> dict[str, Array]:
        """Rounds up to `stop` or an event, in one compiled program; where rows are read, up to the last that are.

        The next evaluation is after `due` rounds.
        """
        train, last = (self.train, stop) if self.stream is None else self.stream.cohorts(self.state)
        end, (algorithm, numbers) = np.int32(min(stop, last)), lifted(self.algorithm)
        compared = np.int32(due) if len(self.state.clients.present) > MOST_COMPARED else None
        self.state, reports = run_segment(
            self.keys, self.state, train, self.group, self.info, end, numbers, compared, algorithm=algorithm
        )
        return reports

    def rounds_until(self, stop: float, due: int) -> tuple[float, float]:
        """Rounds up to `stop` or an event into the history; their seconds, and client-rounds per second.

        The next evaluation is after `due` rounds.
        """
        start, started = self.done, time.perf_counter()
        reports = self.segment(int(stop), due)
        reached, elapsed = self.done, time.perf_counter() - started
        return elapsed, self.add_rounds(reports, start, reached, elapsed) / max(elapsed, 1e-9)

    def add_rounds(self, reports: Mapping[str, Any], start: int, reached: int, elapsed: float) -> float:
        """The reports of rounds into the history; how many times a client took part in them."""
        reports = parallel.fetched(reports)
        rows = rows_of_rounds(reports, start, reached, elapsed, self.info.costs if start == 0 else None)
        if rows["event"][-1]:
            self.take_snapshot(reached - 1)
            if self.stream is not None:
                self.stream.forget_after_event()
        if start == 0 and self.timed and self.algorithm.cluster is None and (seconds := self.initial_seconds):
            rows[CLUSTERING_SECONDS] = at_the_start(seconds, reached)  # which a run that is taken up cannot measure
        self.history = append(self.history, rows)
        if LABELS in reports:
            assigned = np.asarray(reports[LABELS])[: reached - start, : len(self.federation.train.num_examples)]
            self.moves = with_moves(self.moves, start, assigned)
        return float(np.sum(rows["num_clients"]))

    def add_figures(self, per_client: dict[str, np.ndarray], callbacks: Sequence[Callback]) -> dict[str, float]:
        """An evaluation's figures, and those of callbacks, into the history's last row."""
        num_clients = len(self.federation.train.num_examples)
        fewest = fewest_rejections(self.algorithm, num_clients)
        diverged = diverged_since(self.history, fewest) is not None
        figures = federation_figures(per_client, diverged=diverged)
        if (faulty := faulty_clients(self.federation)).any() and not faulty.all():
            assigned = parallel.fetched(labels(self.state.clients.membership))[:num_clients]
            figures |= honest_figures(per_client, assigned, self.federation.group, ~faulty, diverged)
        latest = {**figures, **last_report(self.history)}
        for callback in callbacks:
            found = callback(Evaluation(self.done, self.state, {**latest, **figures}))
            figures = figures if found is None else further_figures(figures, found, "a callback")
        self.history, self.evaluated = with_figures(self.history, figures), True
        self.warned = self.warned or warn_of_divergence(self.history, num_clients, fewest)
        self.grown = self.grown or self.warned or warn_of_growth(self.history)
        return figures

    def apply_churn(self) -> None:
        """Clients join and leave before the next round."""
        if self.schedule.due(self.done):
            state = self.schedule.apply(self.keys.evaluation, self.state, self.federation.train, self.done)
            self.state = parallel.place_state(state, self.mapping)
            if self.stream is not None:
                self.stream.forget()

    def take_snapshot(self, number: int) -> None:
        """What the method keeps after an event, in the run directory too; of clients' numbers only that is fetched."""
        if self.algorithm.snapshot is None:
            return
        clients = parallel.fetched(self.state.clients) if parallel.several() else self.state.clients
        content = self.algorithm.snapshot(parallel.fetched(self.state._replace(clients=()))._replace(clients=clients))
        event = Event(number, {name: np.asarray(value) for name, value in content.items()})
        if self.directory is not None:
            self.directory.write_event(event)
        self.events += (event,)

    def time_clustering(self) -> None:
        """Adds the column `clustering_seconds`; should that fail, the run is saved first."""
        timed = self.history, self.algorithm, self.keys.local, self.state, self.mapping
        try:
            self.history = with_clustering_seconds(*timed, self.initial_seconds)
        except BaseException:
            if not parallel.several():  # the others are at another step
                self.save()
            raise

    def save_in_time(self) -> None:
        """A checkpoint where one is due, or an evaluation, and it takes a small share of the time."""
        if parallel.agreed(int(self.saving_due)):
            self.save()

    @property
    def saving_due(self) -> bool:
        share = self.saving / SAVING_SHARE if self.pause else 0.0
        return time.monotonic() - self.saved_at >= max(share, self.pause if self.evaluated else 0.0)

    def save(self) -> bool:
        """A checkpoint, and whether it could be written; on a full disk the run goes on in memory."""
        if self.directory is None:
            return True
        started = time.monotonic()
        try:
            self.directory.save(Saved(self.state, self.history, self.evaluated), self.moves)
        except parallel.ProcessLost:
            raise
        except (OSError, ValueError, RuntimeError) as error:
            said = f"cannot save round {self.done} in {self.directory.named} ({reason_of(error)}); the one before stays"
            if parallel.several():  # the others would wait for this one
                hint = ": make room, and resume" if self.directory.is_ours() else ""
                raise OSError(f"{said}{hint}") from error
            LOG.warning(f"{said}, and the run goes on in memory")
            return False
        finally:
            self.saved_at = time.monotonic()
            self.saving = self.saved_at - started
        return True

    def begin(self) -> None:
        """Raises a ValueError where the run can be read but not be continued."""
        if self.directory is not None:
            self.directory.check_open_for_more()

    def read_back(self) -> SimulationResult:
        """The result of a run that has ended before; files that were lost are written again."""
        told = {} if self.directory is None else self.directory.read_summary() or {}
        summary, known = self.summarize(0.0), told.get("rounds") == self.done and not told.get(UNEVALUATED)
        if known:  # but JSON has no NaN
            summary = {name: summary.get(name) if value is None else value for name, value in told.items()}
        if self.directory is not None:
            self.directory.leave(summary, self.history, only_missing=known)
        return self.result(summary)

    def summarize(self, compile_seconds: float) -> dict[str, Any]:
        return summarize(
            self.algorithm, self.federation, self.state, self.history, self.seed, compile_seconds, self.config
        )

    def finish(self) -> SimulationResult:
        """Leaves what is to be left, as far as a run was interrupted."""
        summary = self.summarize(self.compile_seconds) if self.history else {}
        if self.directory is not None and self.history:
            self.kept = self.save() or (False if self.directory.is_ours() else None)
            self.directory.leave(summary if self.evaluated else {**summary, UNEVALUATED: True}, self.history)
        return self.result(summary)

    def result(self, summary: dict[str, Any]) -> SimulationResult:
        told = self.state, self.history, self.events, summary, self.keys.evaluation, self.mapping, self.moves
        return SimulationResult(self.algorithm, self.federation, *told, self.metrics, self.kept)


def start_run(
    algorithm: ClusteredAlgorithm,
    federation: Federation,
    seed: int,
    mapping: ClientMapping,
    directory: RunDirectory | None,
    schedule: Schedule,
    stack: contextlib.ExitStack,
    placed: tuple[Population, Array | None] | None = None,  # the federation's clients, where they are on the devices
) -> Run:
    """A run before its next round: fresh, or as the run directory's newest checkpoint left it."""
    keys = run_keys(seed)
    parallel.release_programs()
    train, group = placed_clients(algorithm, federation, mapping) if placed is None else placed
    population = schedule.start(train)

    def initial(*, template: bool) -> tuple[State, RoundInfo]:
        # A template spares the work of a state that is only to be replaced.
        start = algorithm.template if template and algorithm.template is not None else algorithm.init
        state, info = checked_start(algorithm, start(keys.initialization, population), population)
        return parallel.place_state(state, mapping), info

    saved = directory is not None and bool(parallel.agreed(int(directory.has_checkpoint())))
    state, info = initial(template=saved)
    check_heeded(algorithm, keys.local, state, population)
    check_cohorts(algorithm, train, keys.cohorts, state)
    run = Run(algorithm, federation, seed, mapping, directory, schedule, keys, train, group, state, info)
    if directory is not None:
        stack.push(lambda kind, *_: directory.close(failed=kind is not None))
        directory.open()
        if (restored := directory.restore(state)) is not None:
            run.state, run.history, run.evaluated = restored[:3]
            run.events, run.moves = directory.read_events(restored), directory.read_moves(run.done)
        elif saved:  # a checkpoint that is none after all
            run.state, run.info = initial(template=False)
    if run.done == 0 and bool(run.info.event):
        run.take_snapshot(-1)
    return run
