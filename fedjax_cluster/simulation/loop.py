"""The round loop: rounds run inside XLA until the next evaluation, event, or about one second has passed."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import pathlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jax import Array

from fedjax_cluster import parallel
from fedjax_cluster.algorithms.round import labels
from fedjax_cluster.data.stored import stored
from fedjax_cluster.faults import Fault, afflict, faulty_clients
from fedjax_cluster.interruption import CHECKPOINT_SECONDS, Interrupt
from fedjax_cluster.lifting import lifted
from fedjax_cluster.nn.precision import in_32_bits
from fedjax_cluster.simulation.arguments import check_arguments, further_figures
from fedjax_cluster.simulation.assignments import Kept, with_moves
from fedjax_cluster.simulation.checkpoints import Saved
from fedjax_cluster.simulation.churn import Schedule
from fedjax_cluster.simulation.evaluation import (
    Callback,
    Evaluation,
    chosen_clients,
    evaluator,
    federation_figures,
    honest_figures,
    with_metrics,
)
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
from fedjax_cluster.simulation.joint import check_processes, heard, shown
from fedjax_cluster.simulation.ledger import with_clustering_seconds
from fedjax_cluster.simulation.own_methods import check_heeded, checked_start
from fedjax_cluster.simulation.progress import Progress
from fedjax_cluster.simulation.result import SimulationResult
from fedjax_cluster.simulation.run_directory import READING, UNEVALUATED, RunDirectory, check_rounds, kept_in
from fedjax_cluster.simulation.segment import (
    LABELS,
    LONGEST_SEGMENT,
    MOST_COMPARED,
    RunKeys,
    placed_clients,
    run_keys,
    run_segment,
)
from fedjax_cluster.simulation.streaming import Stream, check_cohorts, waiting
from fedjax_cluster.types import (
    Churn,
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
SEGMENT_SECONDS = 1.0
SAVING_SHARE, FIRST_SAVING = 0.02, 0.1  # of the time, at most; and seconds, before one was measured


@in_32_bits
@parallel.processes.losses()
def simulate(
    algorithm: ClusteredAlgorithm,
    federation: Federation,
    *,
    rounds: int,
    seed: int = 0,
    eval_every: int = 10,
    eval_clients: int | None = None,
    metrics: Sequence[Measure] = (),
    callbacks: Sequence[Callback] = (),
    churn: Sequence[Churn] = (),
    run_dir: str | pathlib.Path | None = None,
    mapping: ClientMapping | None = None,
    time_clustering: bool = False,
    progress: bool | None = None,
    checkpoint_every: float = CHECKPOINT_SECONDS,
    config: Mapping[str, Any] | None = None,
    fault: Fault | None = None,
) -> SimulationResult:
    """Runs a method on a federation, in float32 and int32 whatever JAX is set to.

    Args:
      algorithm: from `fedjax_cluster.algorithms`.
      federation: from `fedjax_cluster.data`; the rows of one that `open_population` gives are read as rounds need them.
      rounds: communication rounds in all; more than a finished run had extends it.
      seed: initial models, cohorts and local training; equal seeds give equal initial models to all methods.
      eval_every: rounds between evaluations on the test rows; the last round is always evaluated.
      eval_clients: evaluate only this many clients, the same random ones each time; None evaluates all.
      metrics: more metrics, `(predictions, y, mask) -> dict of f32[]` for one client; numbers have y's shape.
      callbacks: called with an `Evaluation` after each evaluation; figures that one returns go into the history. They
        are no part of what a run directory is told apart by.
      churn: clients who join or leave before given rounds. One whose first entry is a join is absent until then; the
        method's `admit` gives it a cluster.
      run_dir: leaves config.json, metrics.csv, summary.json and checkpoints there; a directory of the same run is
        taken up where it stopped.
      mapping: how clients are mapped over the machine, default `parallel.client_mapping("auto")`.
      time_clustering: times the server's clustering after the last round, for a column `clustering_seconds` and the
        summary; see `ledger.with_clustering_seconds`. Who clusters at the start takes it then; an ended run, no more.
      progress: shows a progress bar; None shows it on a terminal.
      checkpoint_every: seconds between checkpoints, or 50 times what the last one took where that is longer; 0 saves
        after every segment of rounds, whatever that takes.
      config: the experiment's configuration, kept in config.json so that `resume` can rebuild it.
      fault: what is the matter with some clients, such as `faults.sign_flip(share=0.2)`; `seed` draws them, the same
        for all methods. Unless it is all, the history has `adjusted_rand_index_honest`, and `accuracy_honest` too.

    Returns:
      A SimulationResult with the final state and one row of history a round.

    Raises:
      ValueError: the federation cannot be used, a number is out of range, or run_dir holds another experiment.
      ProcessLost: another process of the run has gone; see `parallel.start_processes`.
      KeyboardInterrupt: on Ctrl-C, after a checkpoint where there is a run_dir and a round has been done.
      Terminated: on SIGTERM or a closed terminal, likewise; a SystemExit with status 143 or 129.
    """
    given = dict(locals())
    with parallel.processes.together():
        churn = check_arguments(**given)
        algorithm, federation = afflict(algorithm, federation, fault, seed)
        schedule = Schedule(churn, algorithm, federation.train.num_examples)
        decided = seed, eval_every, eval_clients, schedule.changes, fault
        directory = kept_in(run_dir, config, algorithm, federation, *decided, metrics)
        mapping = parallel.client_mapping() if mapping is None else mapping
    check_processes(algorithm, federation, *decided, metrics, mapping=mapping, rounds=rounds)
    with Interrupt() as interrupt, contextlib.ExitStack() as stack:
        run = start_run(algorithm, federation, seed, mapping, directory, schedule, stack)
        schedule.check_state(run.state)
        run.config, run.pause, run.metrics = config, checkpoint_every, tuple(metrics)
        if run.ended(rounds):
            return run.read_back()
        if run.done < rounds:  # what is evaluated alone can be told where nothing can be written
            run.begin()
        run.stream_rows(rounds, stack)
        chosen = chosen_clients(len(federation.test.num_examples), eval_clients, seed)
        model = with_metrics(algorithm.model, metrics)
        evaluate = evaluator(run.keys.evaluation, algorithm, model, run.train, federation.test, chosen)
        bar = stack.enter_context(Progress(algorithm.name, rounds, run.done, enabled=shown(progress)))
        stack.enter_context(interrupt.patiently())
        started, length, figures, speed = time.perf_counter(), 1, {}, 0.0
        if run.done < rounds:
            run.segment(0, 0)  # compiles, runs no round
        if not heard(interrupt):
            evaluate(run.state, warm_up=True)
        run.compile_seconds = time.perf_counter() - started
        while not (ended := heard(interrupt)) and (run.done < rounds or not run.evaluated):
            if run.evaluated:
                done = run.done
                run.apply_churn()
                due = min(rounds, (done // eval_every + 1) * eval_every)
                elapsed, speed = run.rounds_until(min(due, done + length, schedule.next_after(done)), due)
                length = int((run.done - done) * SEGMENT_SECONDS / max(elapsed, 1e-6))
                length = parallel.agreed(max(1, min(LONGEST_SEGMENT, length)))
                run.evaluated = run.done < due
            if run.done < rounds or not run.evaluated:
                run.save_in_time()
            if not run.evaluated and not heard(interrupt):
                figures = run.add_figures(evaluate(run.state), callbacks)
            bar.update(run.done, {**figures, **last_report(run.history), **waiting(run.stream, run.history)}, speed)
        with interrupt.obeyed():
            if time_clustering and not ended:
                run.time_clustering()
            result = run.finish()
        interrupt.stop_if_wanted(*([] if directory is None else [str(directory.named)]))
    return result


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
    compile_seconds: float = 0.0
    pause: float = CHECKPOINT_SECONDS
    saving: float = FIRST_SAVING  # seconds that the last checkpoint took
    saved_at: float = dataclasses.field(default_factory=time.monotonic)
    stream: Stream | None = None  # where the clients' rows are on disk

    @property
    def done(self) -> int:
        return int(self.state.round)

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
            self.history = with_clustering_seconds(*timed, float(self.info.costs.clustering_seconds))
        except BaseException:
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
        except (OSError, ValueError, RuntimeError) as error:
            reason = " ".join(str(error).split())[:150]
            said = f"cannot save round {self.done} in {self.directory.named} ({reason}); the checkpoint before it stays"
            if parallel.several():  # the others would wait for this one
                raise OSError(f"{said}: make room, and resume") from error
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
        told = self.state, self.history, self.events, summary
        keys, mapping, moves = self.keys.evaluation, self.mapping, self.moves
        return SimulationResult(self.algorithm, self.federation, *told, keys, mapping, moves, self.metrics, self.kept)


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
