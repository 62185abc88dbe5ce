"""What a command shows and leaves of what it ran: of one run, and of a comparison."""

from __future__ import annotations

import contextlib
import logging
import pathlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import fedjax_cluster as fc
from fedjax_cluster.endings import PROG, keeping
from fedjax_cluster.files import quoted
from fedjax_cluster.interruption import Interrupt
from fedjax_cluster.report.judged_by import HONEST, of_honest

LOG = logging.getLogger(__name__)
BEGUN = ("config.json", "comparison.json", "recipe.json")  # one of them is in a directory that `resume` takes


def show(result: Any, run_dir: pathlib.Path) -> None:
    """The pictures, page and table of a run; an OSError where the run itself could not be kept."""
    if (result := fc.experiments.several.to_show(result, run_dir)) is None:
        return fc.experiments.several.wait()
    outlying, kept = (), result.kept
    then = (
        f"the run is kept, and {PROG} report {quoted(run_dir)} draws them again"
        if kept
        else "nor could the run be kept"
    )
    try:
        if kept is None:
            raise OSError(
                f"{run_dir} was removed while the run went on, or is another's by now: only its table is left"
            )
        with keeping(f"not all pictures were written; {then}"):
            fc.experiments.saved_runs.leave_run(run_dir, result, result.summary)
            if fc.experiments.saved_runs.shows_clients(run_dir):
                outlying = tuple(result.outliers.reasons())
    finally:
        fc.report.tables.summary_table(result.summary, run_dir, outlying).print()
    fc.experiments.several.wait()
    if not kept:
        raise OSError(
            f"the end of the run could not be kept in {run_dir}, only its table and pictures; make room there"
        )


def compared(go_on: Callable[..., Any], directory: pathlib.Path) -> int:
    """Carries a comparison out and leaves its table and figure; 1 where a run has failed, or could not be kept."""
    waiting: list[str] = []  # failures before the first success: a mistake that all share is one line
    lost: list[str] = []  # runs that could not be kept

    def done(label: str, seed: int, result: Any) -> None:
        _say_all(waiting)
        announce(label, seed, result)
        path = directory / fc.experiments.comparison.run_name(label, seed)
        if not result.kept:
            lost.append(f"{label} seed {seed}")
        if result.kept is None:
            return
        try:
            fc.experiments.saved_runs.leave_run(path, result, result.summary, brief=True)
        except (OSError, ValueError) as error:  # the other runs are worth more than a page
            LOG.warning(f"no page of {path} was left ({error}); {PROG} report {quoted(path)} writes it")

    def failed(label: str, seed: int, reason: str) -> None:
        waiting.append(f"{label} seed {seed} failed: {reason}")

    with whole(directory):
        outcomes = go_on(done=done, failed=failed, time_clustering=True)
        _say_all(waiting)
        found = fc.experiments.comparison.read(directory)
        everything = fc.experiments.saved_runs.with_others(outcomes, directory)
        table = fc.report.tables.comparison_table(everything, found.cells)
        try:
            with keeping(
                f"not all was written; the runs are kept, and {PROG} report {quoted(directory)} compares them again"
            ):
                if any(outcome.histories for outcome in everything):
                    fc.experiments.saved_runs.leave_comparison(everything, table, directory)
        finally:
            table.print()
    print(f"left in {directory}")
    sys.stdout.flush()
    if without := [outcome for outcome in outcomes if outcome.failed]:
        seeds = [f" (seed {', '.join(map(str, each.failed))})" if each.summaries else "" for each in without]
        what, between = ("cells", "; ") if found.cells else ("methods", ", ")
        how = "failed" if any(each.label in found.configs for each in without) else "cannot be run"
        named = between.join(each.label + of for each, of in zip(without, seeds, strict=True))
        print(f"{PROG}: {len(without)} of {len(outcomes)} {what} {how}: {named}", file=sys.stderr)
    if lost:
        print(
            f"{PROG}: the end of {', '.join(lost)} could not be kept in {directory}; make room there", file=sys.stderr
        )
    # A cell of a sweep that is no configuration, such as more clusters than clients, is no failure.
    return 1 if lost or any(outcome.label in found.configs for outcome in without) else 0


@contextlib.contextmanager
def whole(directory: pathlib.Path) -> Iterator[None]:
    """An interruption names the directory of all that is done here, not of the run that was under way."""
    try:
        yield
    except BaseException as error:
        if (
            Interrupt.active is not None
            and Interrupt.active.wanted
            and any((directory / name).is_file() for name in BEGUN)
        ):
            raise KeyboardInterrupt(str(directory)) from error
        raise


def announce(label: str, seed: int, result: Any) -> None:
    """A line about a run of a comparison that has ended, by the figures that its table has."""
    accuracy, ari = (of_honest(name, [result.summary]) for name in ("accuracy", "adjusted_rand_index"))
    kinds = (("accuracy {:.1f} %", accuracy, 100), ("test loss {:.4f}", "test_loss", 1))
    found = ((text, fc.report.tables.quality(result.summary, name, factor)) for text, name, factor in kinds)
    shown = next((text.format(value) for text, value in found if value is not None), fc.report.tables.NOT_FINITE)
    agreement = fc.report.tables.figure(result.summary, ari)
    clusters = "" if agreement is None else f", ARI {agreement:.2f}"
    honest = " (of the honest clients)" if accuracy.endswith(HONEST) else ""
    print(f"{label} seed {seed}: {shown}{clusters}{honest}", file=sys.stderr)


def _say_all(lines: list[str]) -> None:
    while lines:
        print(lines.pop(0), file=sys.stderr)
