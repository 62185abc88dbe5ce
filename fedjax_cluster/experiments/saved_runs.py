"""Runs read back from their directories, and compared."""

from __future__ import annotations

import contextlib
import json
import logging
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedjax_cluster import report
from fedjax_cluster.data.waiting import working
from fedjax_cluster.experiments import comparison
from fedjax_cluster.experiments.comparison import Outcome
from fedjax_cluster.experiments.config import KINDS
from fedjax_cluster.experiments.runs import load_run
from fedjax_cluster.files import check_writable, read_json
from fedjax_cluster.report.names import method_name, setting_in_words
from fedjax_cluster.simulation.result import SimulationResult
from fedjax_cluster.simulation.run_directory import SUMMARY, read_config, read_history

OF_THE_SEED = ("seed", "data")  # what seeds of one experiment differ in; the data follow from the configuration
THE_METHOD = ("identity.algorithm", "method")
ITS_OPTIONS = ("identity.algorithm_config.", "method_options.")
CLIENTS = "clients.csv"
OF_SEED = re.compile(r"-seed\d+$")  # in a run's directory
MOST_NAMED, LONGEST = 4, 30  # settings in a label; characters of one

logger = logging.getLogger(__name__)


class SavedRun(NamedTuple):
    """What a run left, without its state."""

    path: pathlib.Path
    method: str
    seed: int
    identity: Mapping[str, Any]
    experiment: Mapping[str, Any]  # empty for a run of `simulate` without a configuration
    summary: Mapping[str, Any]
    history: dict[str, np.ndarray]

    @property
    def rounds(self) -> int:
        """Those done: a run may have been interrupted, or extended."""
        return len(self.history["round"])

    def settings(self, *, identity: bool) -> dict[str, Any]:
        """What seeds of one experiment share, by name; with or without what the identity adds to a configuration."""
        experiment, options = dict(self.experiment), self.identity.get("algorithm_config")
        if experiment and isinstance(options, Mapping):
            # A configuration may leave out what has its default.
            shared = KINDS["method"].common
            experiment["method_options"] = {name: value for name, value in options.items() if name not in shared}
        flat = _flat(experiment, but=("seed", "rounds", "tuning"))
        if identity or not self.experiment:
            flat |= _flat(self.identity, "identity.", but=OF_THE_SEED if self.experiment else ("seed",))
        return {**flat, "rounds": self.rounds}


def find_runs(paths: Sequence[str | pathlib.Path]) -> list[pathlib.Path]:
    """The run directories among and below `paths`, in their order, each once; a ValueError where a path holds none."""
    found: dict[pathlib.Path, pathlib.Path] = {}
    for path in map(pathlib.Path, paths):
        try:
            runs = sorted(config.parent for config in path.rglob("config.json")) if path.is_dir() else []
        except OSError as error:
            raise ValueError(f"cannot read {path}: {error.strerror}") from error
        if not runs:
            raise ValueError(f"{path} is not a run directory and holds none; give a directory that a run left")
        for run in runs:
            found.setdefault(run.resolve(), run)
    return list(found.values())


def read_runs(paths: Sequence[str | pathlib.Path]) -> list[Outcome]:
    """The runs among and below `paths`, grouped where they differ in their seed alone.

    Each group is labelled with its method and whatever else tells it from the others. Of several runs of one experiment
    and one seed the first counts; the log names the others.

    Raises:
      ValueError: no run there, one that has not ended, or one with a damaged file.
    """
    return _outcomes(_grouped(find_runs(paths)))


def _grouped(paths: Sequence[pathlib.Path]) -> dict[str, dict[int, SavedRun]]:
    """Label -> seed -> run."""
    groups: dict[str, dict[int, SavedRun]] = {}
    for run in map(read_run, paths):
        seeds = groups.setdefault(json.dumps(run.settings(identity=True), sort_keys=True), {})
        first = seeds.setdefault(run.seed, run)
        if first is not run:
            logger.warning(
                f"{run.path} is not counted: {first.path} is a run of the same experiment and seed {run.seed}"
            )
    firsts = [next(iter(seeds.values())) for seeds in groups.values()]
    labels = _labels(firsts, [len(seeds) > 1 for seeds in groups.values()])
    return dict(zip(labels, groups.values(), strict=True))


def _outcomes(groups: Mapping[str, Mapping[int, SavedRun]]) -> list[Outcome]:
    return [
        Outcome(label, tuple(dict(run.summary) for run in of.values()), tuple(run.history for run in of.values()))
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


def read_run(path: pathlib.Path) -> SavedRun:
    """What the run of a directory left.

    Raises:
      ValueError: it has not ended, or a file is damaged; says which.
    """
    config, summary, history = read_config(path), _read_summary(path / "summary.json"), read_history(path)
    identity = config["identity"]
    method, seed = identity.get("algorithm"), identity.get("seed")
    if not isinstance(method, str) or not isinstance(seed, int):
        raise ValueError(f"{path / 'config.json'} is damaged, or no run's: it does not hold a method and a seed")
    if not np.shape(history.get("round", 0)):
        raise ValueError(f"the history of {path} is damaged: it has no rounds; run it anew")
    run = SavedRun(path, method, seed, identity, config["experiment"] or {}, summary, history)
    if summary.get("rounds", run.rounds) != run.rounds:
        raise ValueError(
            f"{path} has a summary of {summary['rounds']} rounds and a history of {run.rounds}; "
            "it was ended on the way: continue it with resume"
        )
    return run


def write_report(
    paths: Sequence[str | pathlib.Path], out: str | pathlib.Path | None = None, format: str = "png"
) -> list[pathlib.Path]:
    """Prints the runs' table, and writes it, their pictures and a page of them; returns the files written.

    Of a single run it prints the summary and draws the pictures again, in the folder plots; of several it leaves
    comparison.md, comparison.csv, comparison.tex, learning_curves.png and small_multiples.png. The page is report.html.

    Args:
      paths: run directories, or directories that hold some; or that of a comparison, which may have been interrupted.
      out: where to leave them. None takes the run's own directory, and of several the first path; where that cannot be
        written, nothing is left, and the log says so.
      format: "pdf" or "svg" for pictures in that format as well; the page has them as PNG.

    Raises:
      ValueError: no run there, one that has not ended, a damaged file, or an `out` that cannot be written.
    """
    compared = pathlib.Path(paths[0]) if len(paths) == 1 and comparison.is_comparison(pathlib.Path(paths[0])) else None
    runs = find_runs(paths)
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
    if len(runs) == 1 and not compared:
        run = read_run(runs[0])
        report.tables.summary_table(run.summary, run.path).print()
        return leave_run(directory, _drawable(run), run.summary, source=run.path, formats=formats) if writable else []
    groups = {} if compared else _grouped(runs)
    outcomes = read_comparison(compared) if compared else _outcomes(groups)
    background = background_of(compared) if compared else _background(groups)
    table = report.tables.comparison_table(outcomes, background.cells)
    table.print()
    if not writable:
        return []
    return leave_comparison(outcomes, table, directory, background, formats=formats)


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
      brief: only the pictures over the rounds; a page that is there already, and not older than the run, stays.
    """
    source = directory if source is None else source
    page = directory / report.run_page.PAGE
    if brief and page.is_file() and page.stat().st_mtime >= (source / SUMMARY).stat().st_mtime:
        return []
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
            elif kind in there:
                (directory / f"{name}.{kind}").unlink()
    page = report.comparison_page.write_comparison_page(directory, outcomes, table, plots, known)
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
    ended, failed = [], {}
    for seed in found.seeds:
        if seed in why:  # what is there is of another experiment, or shorter
            failed[seed] = why[seed]
            continue
        with contextlib.suppress(ValueError):
            run = read_run(path / comparison.run_name(label, seed))
            if run.rounds == config.rounds:
                ended.append(run)
                continue
            if run.rounds > config.rounds:
                failed[seed] = f"has {run.rounds} rounds, where the comparison has {config.rounds}; extend all of them"
                continue
        failed[seed] = "has not ended; continue the comparison with resume"
    summaries, histories = tuple(dict(run.summary) for run in ended), tuple(run.history for run in ended)
    return Outcome(label, summaries, histories, failed)


def _drawable(run: SavedRun) -> SimulationResult | dict[str, dict[str, np.ndarray]]:
    """The run with its state where its configuration can rebuild it; else its history alone."""
    if run.experiment:
        try:
            return load_run(run.path)
        except (ValueError, OSError) as error:
            logger.warning(f"only the curves of {run.path} are drawn, as its state cannot be read: {error}")
    return {run.method: run.history}


def _labels(runs: Sequence[SavedRun], several: Sequence[bool]) -> list[str]:
    """A label for each group's first run, no two alike: its method, and the settings in which it differs from others.

    Options of a method are named only beside the same method's. Where too many differ, the directory tells.
    """
    names = [method_name(run.method) for run in runs]
    # Two groups in one place are told apart by their first seeds.
    pooled = [
        OF_SEED.sub("", str(run.path)) if many else str(run.path) for run, many in zip(runs, several, strict=True)
    ]
    paths = pooled if len(set(pooled)) == len(pooled) else [str(run.path) for run in runs]
    placed = [f"{name} ({path})" for name, path in zip(names, paths, strict=True)]
    for identity in (False, True):
        settings = [run.settings(identity=identity) for run in runs]
        labels = []
        for name, own, by_place in zip(names, settings, placed, strict=True):
            alike = [others for others, of in zip(settings, names, strict=True) if of == name]
            parts = [
                setting_in_words(key, value)
                for key, value in own.items()
                if key not in THE_METHOD and _varies(key, alike if key.startswith(ITS_OPTIONS) else settings)
            ]
            brief = len(parts) <= MOST_NAMED and all(len(part) <= LONGEST for part in parts)
            labels.append(", ".join([name, *parts]) if brief else by_place)
        if len(set(labels)) == len(labels):
            return labels
    return placed


def _varies(key: str, settings: Sequence[Mapping[str, Any]]) -> bool:
    return any(others.get(key) != settings[0].get(key) for others in settings)


def _flat(settings: Mapping[str, Any], prefix: str = "", *, but: Sequence[str] = ()) -> dict[str, Any]:
    """Nested settings by their names joined with dots, but for some of the outermost."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{name}.")
        elif name not in but:
            flat[prefix + name] = value
    return flat


def _read_summary(path: pathlib.Path) -> dict[str, Any]:
    try:
        summary = read_json(path)
    except FileNotFoundError:
        raise ValueError(f"{path.parent} has no summary.json yet; continue the run with resume") from None
    except ValueError as error:
        raise ValueError(f"{error}; or delete it, and resume writes it anew") from None
    if not isinstance(summary.get("algorithm", ""), str):
        raise ValueError(f"{path} is damaged: its algorithm is no name; delete it, and resume writes it anew")
    return summary
