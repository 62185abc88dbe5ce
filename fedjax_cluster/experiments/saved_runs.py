"""Runs read back from their directories, and compared."""

from __future__ import annotations

import contextlib
import logging
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedjax_cluster import report
from fedjax_cluster.data.waiting import working
from fedjax_cluster.experiments import comparison, public_codes
from fedjax_cluster.experiments.config import KINDS
from fedjax_cluster.experiments.ended_runs import SavedRun, find_runs, grouped, read_run
from fedjax_cluster.experiments.outcomes import Outcome
from fedjax_cluster.experiments.runs import load_run
from fedjax_cluster.experiments.shared_federations import data_settings
from fedjax_cluster.files import check_writable, quoted
from fedjax_cluster.simulation.result import SimulationResult
from fedjax_cluster.simulation.run_directory import CONFIG, SUMMARY, UNEVALUATED, read_config

CLIENTS = "clients.csv"
BESIDE = "comparison.html"  # of runs that are compared in the directory of one of them

logger = logging.getLogger(__name__)


def read_runs(paths: Sequence[str | pathlib.Path]) -> list[Outcome]:
    """The runs among and below `paths`, grouped where they differ in their seed alone, and in data that are the seed's.

    Each group is labelled with its method and whatever else tells it from the others. Of several runs of one experiment
    and one seed the first counts; the log names the others.

    Raises:
      ValueError: no run there, one that has not ended, or one with a damaged file.
    """
    return _outcomes(grouped(find_runs(paths)))


def _outcomes(groups: Mapping[str, Mapping[int, SavedRun]]) -> list[Outcome]:
    return [
        Outcome(
            label,
            tuple(dict(run.summary) for run in of.values()),
            tuple(run.history for run in of.values()),
            data=data_settings(next(iter(of.values())).experiment),
        )
        for label, of in groups.items()
    ]


def _background(groups: Mapping[str, Mapping[int, SavedRun]]) -> report.comparison_page.Background:
    first = {label: next(iter(of.values())) for label, of in groups.items()}
    return report.comparison_page.Background(
        {label: {seed: run.path for seed, run in of.items()} for label, of in groups.items()},
        {label: {**run.experiment, "rounds": run.rounds} for label, run in first.items()},
        _machine_of(next(iter(first.values())).path),
    )


def _told(path: pathlib.Path, summary: Mapping[str, Any]) -> report.run_page.Told:
    """What a run's config.json tells its page."""
    config = read_config(path)
    settings = dict(config["experiment"] or {})
    options = dict(config["identity"].get("algorithm_config") or {})
    if settings:
        # The method's options stand by themselves, with their defaults; the others are settings already.
        options = {name: value for name, value in options.items() if name not in KINDS["method"].common}
        settings.pop("method_options", None)
    return report.run_page.Told(summary, settings, options, _machine_of(path))


def _machine_of(path: pathlib.Path) -> dict[str, Any]:
    """Versions and devices with which a run was begun; nothing where it has left none."""
    with contextlib.suppress(ValueError):
        config = read_config(path)
        versions = config.get("versions", {})
        return {**versions, **config.get("machine", {})}
    return {}


def write_report(
    paths: Sequence[str | pathlib.Path],
    out: str | pathlib.Path | None = None,
    format: str = "png",
    beside: Mapping[str, Sequence[str | pathlib.Path]] | None = None,
) -> list[pathlib.Path]:
    """Prints the runs' table, and writes it, their pictures and a page of them; returns the files written.

    Of a single run it prints the summary and draws the pictures again, in the folder plots; of several it leaves
    comparison.md, comparison.csv, comparison.tex, learning_curves.png and small_multiples.png. The page is report.html,
    and comparison.html in the directory of a run, which has one.

    Args:
      paths: run directories, or directories that hold some; or that of a comparison, which may have been interrupted.
      out: where to leave them. None takes the run's own directory, and of several the first path, unless it is
        a comparison's; where that cannot be written, nothing is left, and the log says so.
      format: "pdf" or "svg" for pictures in that format as well; the page has them as PNG.
      beside: label -> what other programs have left, a file for each seed; see `public_codes`.

    Raises:
      ValueError: no run there, one that has not ended, a damaged file, an `out` that cannot be written, or a
        comparison's own report in the way.
    """
    first = pathlib.Path(paths[0]) if comparison.is_comparison(pathlib.Path(paths[0])) else None
    compared = first if len(paths) == 1 else None
    if out is None and first is not None and compared is None:
        raise ValueError(
            f"{quoted(paths[0])} has a report of its own runs, which this one would replace; leave it elsewhere, with "
            "--out DIR"
        )
    runs, others = find_runs(paths), public_codes.outcomes(beside or {})
    formats = tuple(dict.fromkeys(("png", format)))
    directory = (
        pathlib.Path(out) if out is not None else runs[0] if len(runs) == 1 and not compared else pathlib.Path(paths[0])
    )
    try:
        check_writable(directory)
        writable = True
    except ValueError:
        if out is not None:
            raise
        writable = False
        logger.warning(f"{directory} cannot be written: pictures are left nowhere; --out DIR leaves them elsewhere")
    if len(runs) == 1 and not compared and not others:
        run = read_run(runs[0])
        _warn_of_interrupted([run])
        report.tables.summary_table(run.told, run.path).print()
        return leave_run(directory, _drawable(run), run.told, source=run.path, formats=formats) if writable else []
    groups = {} if compared else grouped(runs)
    _warn_of_interrupted([run for of in groups.values() for run in of.values()])
    outcomes = read_comparison(compared) if compared else _outcomes(groups)
    if twice := {each.label for each in outcomes} & {each.label for each in others}:
        raise ValueError(f"{min(twice)} is what a run here is called already; call what stands beside it otherwise")
    background = background_of(compared) if compared else _background(groups)
    if others and background.cells:
        raise ValueError("a sweep's table is of its options; put other programs beside the runs of one of its cells")
    outcomes += others
    table = report.tables.comparison_table(outcomes, background.cells)
    table.print()
    if not writable:
        return []
    return leave_comparison(outcomes, table, directory, background, formats=formats)


def _warn_of_interrupted(runs: Sequence[SavedRun]) -> None:
    for run in filter(lambda run: run.interrupted, runs):
        done = report.tables.rounds_text({**run.told, "rounds": run.rounds})
        how = f"with: fedjax-cluster resume {quoted(run.path)}" if run.experiment else "by the same call of simulate"
        logger.warning(f"{run.path} was {done}; go on {how}")


@working("pictures and report.html")
def leave_run(
    directory: pathlib.Path,
    run: SimulationResult | Mapping[str, dict[str, np.ndarray]],
    summary: Mapping[str, Any],
    *,
    source: pathlib.Path | None = None,
    formats: Sequence[str] = ("png",),
    brief: bool = False,
) -> list[pathlib.Path]:
    """Leaves a run's pictures, the figures of its clients and its report.html; returns the files written.

    Args:
      directory: where to leave them.
      run: the run, or {method: history}.
      summary: what summary.json holds.
      source: the run's directory, where it is another.
      formats: "png", and "pdf" or "svg" if wanted as well.
      brief: only the pictures over the rounds, where there are no others; a page that is there already, and not older
        than the run, stays.
    """
    source = directory if source is None else source
    page = directory / report.run_page.PAGE
    if brief and page.is_file() and page.stat().st_mtime >= (source / SUMMARY).stat().st_mtime:
        return []
    # What the command report has left there would stay, of fewer rounds.
    brief = brief and not (directory / CLIENTS).is_file() and not any((directory / "plots").glob("client_labels.*"))
    plots = report.pages.write_plots(directory, run, formats=formats, brief=brief)
    more = "Pictures of the clients and of the method are added by the command report." if brief else ""
    finished, told = None if isinstance(run, Mapping) else run, _told(source, summary)
    written = []
    if finished is not None and not brief and shows_clients(source):
        outliers = finished.outliers
        told = told._replace(per_client=finished.per_client, outliers=outliers.reasons())
        told = told._replace(not_compared=outliers.not_compared)
        written = [finished.write_clients(directory / CLIENTS)]
    return [*written, *plots, report.run_page.write_run_page(directory, finished, plots, told, more=more)]


def shows_clients(path: pathlib.Path) -> bool:
    """Whether a run's page has a table of its clients, for which all of them are evaluated."""
    return (read_config(path)["experiment"] or {}).get("eval_clients") is None


@working("tables, pictures and report.html")
def leave_comparison(
    outcomes: Sequence[Outcome],
    table: report.tables.Table,
    directory: pathlib.Path,
    background: report.comparison_page.Background | None = None,
    *,
    formats: Sequence[str] = ("png",),
) -> list[pathlib.Path]:
    """Writes a comparison's table, learning curves and report.html; returns the files written.

    `background` is by default that of the comparison in `directory`.
    """
    written = [directory / f"comparison.{kind}" for kind in ("md", "csv", "tex")]
    drawn_before = any(path.is_file() for path in written)
    table.write(*written)
    known = background_of(directory) if background is None else background
    drawn = {outcome.label: outcome.histories for outcome in outcomes if outcome.histories}
    figures = (
        {} if (figure := report.sensitivity.sensitivity(outcomes, known.cells)) is None else {"sensitivity": figure}
    )
    # The names of cells are too long for small multiples.
    if not known.cells or len(drawn) <= report.small_multiples.MOST_IN_ONE:
        figures["learning_curves"] = report.small_multiples.comparison_figure(drawn)
    elif report.option_curves.can_be_drawn(known.cells):
        figures["learning_curves"] = report.option_curves.option_curves(drawn, known.cells)
    if not known.cells and 1 < len(drawn) <= report.small_multiples.MOST_IN_ONE:
        figures["small_multiples"] = report.small_multiples.small_multiples(drawn)
    plots = []
    for name in report.comparison_page.PICTURES:
        # What was drawn of fewer runs, or in another format, is drawn anew or goes.
        there = [kind for kind in ("png", "pdf", "svg") if (directory / f"{name}.{kind}").is_file()]
        for kind in dict.fromkeys((*formats, *there)):
            if (figure := figures.get(name)) is not None:
                plots.append(report.style.save(figure, directory / f"{name}.{kind}"))
            elif kind in there and drawn_before:  # else somebody else's
                (directory / f"{name}.{kind}").unlink()
    # A run's own page stays.
    page = BESIDE if (directory / CONFIG).is_file() else report.run_page.PAGE
    page = report.comparison_page.write_comparison_page(directory, outcomes, table, plots, known, page)
    return [*written, *plots, page]


def background_of(path: pathlib.Path) -> report.comparison_page.Background:
    """Where the runs of a comparison are, and their settings.

    Raises:
      ValueError: not the directory of a comparison.
    """
    configs, seeds, _, cells = comparison.read(path)[:4]
    runs = {label: {seed: path / comparison.run_name(label, seed) for seed in seeds} for label in configs}
    settings = {label: config.to_json() for label, config in configs.items()}
    begun = [run for of in runs.values() for run in of.values() if run.is_dir()]
    return report.comparison_page.Background(runs, settings, _machine_of(begun[0]) if begun else {}, cells)


def read_comparison(path: pathlib.Path) -> list[Outcome]:
    """The outcomes of a comparison's directory; a run that failed, or has not ended, counts as failed.

    Raises:
      ValueError: not such a directory, or no run of it has ended.
    """
    found = comparison.read(path)
    outcomes = [_outcome_of(path, found, label) for label in found.cells or found.configs]
    if not any(outcome.summaries for outcome in outcomes):
        raise ValueError(f"no run of the comparison {path} has ended; continue it with resume")
    return outcomes


def with_others(outcomes: Sequence[Outcome], path: pathlib.Path) -> list[Outcome]:
    """The outcomes of a comparison, and what its directory has of other methods, cells and seeds.

    Raises:
      ValueError: not the directory of a comparison.
    """
    found, given = comparison.read(path), {outcome.label: outcome for outcome in outcomes}
    whole = {label for label, each in given.items() if len(each.summaries) + len(each.failed) == len(found.seeds)}
    labels = found.cells or found.configs
    return [given[label] if label in whole else _outcome_of(path, found, label) for label in labels]


def _outcome_of(path: pathlib.Path, found: comparison.Comparison, label: str) -> Outcome:
    """What the runs of a method or cell have left."""
    why = found.failed.get(label, {})
    if (config := found.configs.get(label)) is None:
        return Outcome(label, (), (), {seed: next(iter(why.values())) for seed in found.seeds})
    ended, failed, not_ended = [], {}, set()
    for seed in found.seeds:
        if seed in why:  # what is there is of another experiment, or shorter
            failed[seed] = why[seed]
            continue
        with contextlib.suppress(ValueError):
            run = read_run(path / comparison.run_name(label, seed))
            # Whatever its own configuration says: somebody may have begun to extend it.
            if run.rounds == config.rounds and not run.summary.get(UNEVALUATED):
                ended.append(run)
                continue
            if run.rounds > config.rounds:
                not_ended.add(seed)
                failed[seed] = f"has {run.rounds} rounds, where the comparison has {config.rounds}; extend all of them"
                continue
        not_ended.add(seed)
        failed[seed] = "has not ended; continue the comparison with resume"
    summaries, histories = tuple(dict(run.summary) for run in ended), tuple(run.history for run in ended)
    return Outcome(label, summaries, histories, failed, frozenset(not_ended), data_settings(config.to_json()))


def _drawable(run: SavedRun) -> SimulationResult | dict[str, dict[str, np.ndarray]]:
    """The run with its state where its configuration can rebuild it; else its history alone."""
    if run.experiment:
        try:
            return load_run(run.path)
        except (ValueError, OSError) as error:
            logger.warning(f"only the curves of {run.path} are drawn, as its state cannot be read: {error}")
    return {run.method: run.history}
