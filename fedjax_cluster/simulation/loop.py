"""The round loop: rounds run inside XLA until the next evaluation, event, or about one second has passed."""

from __future__ import annotations

import contextlib
import pathlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

from fedjax_cluster import parallel
from fedjax_cluster.faults import Fault, afflict
from fedjax_cluster.interruption import CHECKPOINT_SECONDS, Interrupt
from fedjax_cluster.nn.precision import in_32_bits
from fedjax_cluster.simulation.arguments import check_arguments
from fedjax_cluster.simulation.churn import Schedule
from fedjax_cluster.simulation.evaluation import Callback, chosen_clients, evaluator, with_metrics
from fedjax_cluster.simulation.history import last_report
from fedjax_cluster.simulation.joint import check_processes, heard, shown
from fedjax_cluster.simulation.progress import Progress
from fedjax_cluster.simulation.result import SimulationResult
from fedjax_cluster.simulation.run import start_run
from fedjax_cluster.simulation.run_directory import kept_in
from fedjax_cluster.simulation.segment import LONGEST_SEGMENT
from fedjax_cluster.simulation.streaming import waiting
from fedjax_cluster.types import Churn, ClientMapping, ClusteredAlgorithm, Federation, Measure

SEGMENT_SECONDS = 1.0


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
    options = {"rounds": rounds, "time_clustering": time_clustering, "kept": run_dir is not None}
    check_processes(algorithm, federation, *decided, metrics, mapping=mapping, options=options)
    with Interrupt() as interrupt, contextlib.ExitStack() as stack:
        run = start_run(algorithm, federation, seed, mapping, directory, schedule, stack)
        schedule.check_state(run.state)
        run.config, run.pause, run.metrics, run.timed = config, checkpoint_every, tuple(metrics), time_clustering
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
        heard(interrupt)  # meanwhile
        interrupt.stop_if_wanted(*([] if directory is None else [str(directory.named)]))
    return result
