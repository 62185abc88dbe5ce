"""A recipe carried out in its directory: each run is kept once it is done, and what is done is not done again."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import pathlib
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from fedjax_cluster import report
from fedjax_cluster.experiments.comparison import RUNS, shared_federation
from fedjax_cluster.experiments.config import RunConfig, as_compared
from fedjax_cluster.experiments.ended_runs import RECIPE
from fedjax_cluster.experiments.outcomes import Outcome
from fedjax_cluster.experiments.recipe import FLOPS_PER_SECOND, Recipe, Study, file_name, measured, run_flops
from fedjax_cluster.experiments.runs import run
from fedjax_cluster.files import (
    LOCK,
    STRAY,
    check_run_directory,
    check_writable,
    plain,
    read_json,
    remove_empty,
    sealed,
    taken,
    unsealed,
    write_json,
)
from fedjax_cluster.interruption import CHECKPOINT_SECONDS
from fedjax_cluster.options import as_path, checked
from fedjax_cluster.provenance import provenance
from fedjax_cluster.report.names import counted
from fedjax_cluster.report.paper_rows import PaperRow
from fedjax_cluster.types import Federation

RAN, RUNS_FOLDER, FIGURE = "ran.json", "runs", "figure"
COMPILATION = 10 * FLOPS_PER_SECOND  # of a run, as work
Version = Literal["everyday", "quick", "full"]


def reproduce(
    recipe: Recipe | Study,
    *,
    quick: bool = False,
    full: bool = False,
    seeds: int | None = None,
    directory: str | pathlib.Path,
    expected: str = "",
) -> tuple[list[PaperRow], dict[tuple[str, str], Outcome]]:
    """Carries a recipe out: runs, a table of our values and the paper's, a figure.

    Interrupted at any moment and repeated, it does the missing runs only, and takes a long one up where its last
    checkpoint left it. Of a study, which is no table of runs, it does the missing parts.

    Args:
      recipe: what to carry out.
      quick: the smaller version, with one seed.
      full: the version nearer to the paper's size.
      seeds: runs per cell; None takes the recipe's. More than before adds runs.
      directory: gets table.md, table.csv, table.json (the rows, see `PaperRow`), figure.png and further ones such as
        figure.accuracy.png, ran.json (with what, on what and how long) and runs/ (settings, summary and history of
        each; what a study's parts gave).
      expected: how long it may take, for the person who waits.

    Returns:
      The table's rows, and the outcome of each cell by (row, column); a study has none.

    Raises:
      ValueError: fewer than one seed, `full` where there is nothing fuller, or a directory of something else: another
        recipe, another version of it, or runs with other settings.
    """
    if full:
        if quick or isinstance(recipe, Study) or not recipe.full:
            why = "quick and full exclude each other" if quick else "it has no fuller version"
            raise ValueError(f"recipe {recipe.name} cannot be carried out in full: {why}")
        recipe = dataclasses.replace(recipe, cells=recipe.full)
    least = recipe.quick if isinstance(recipe, Study) else 1
    count = checked("seeds", seeds, int | None, RUNS) or (least if quick else recipe.seeds)
    directory = as_path("directory", directory)
    version: Version = "quick" if quick else "full" if full else "everyday"
    with_what = provenance()  # of the code that was loaded, whatever is committed in the meantime
    wanted = {"recipe": recipe.name, "version": version, "seeds": count}
    with _opened(directory, wanted, check_writable if isinstance(recipe, Study) else check_run_directory):
        print("\n".join(filter(None, (recipe.title, recipe.reading, "" if quick else expected))), file=sys.stderr)
        if isinstance(recipe, Study):
            parts = _Parts(directory / RUNS_FOLDER, with_what)
            (rows, figure), outcomes = recipe.run(count, quick, parts), {}
            ran = parts.ran()
        else:
            cells = recipe.quick if quick else recipe.cells
            records = _records(recipe, cells, count, directory / RUNS_FOLDER, with_what)
            outcomes = {place: _outcome(place, of_cell) for place, of_cell in records.items()}
            rows, figure = measured(cells, outcomes, recipe.metrics, recipe.tolerances), recipe.figure(cells, outcomes)
            ran = [record for of_cell in records.values() for record in of_cell]
        shown = report.tables.recipe_table(recipe.title, rows)
        shown.print()
        # Of an earlier table; were this one stopped on its way, that would tell of both.
        (directory / RAN).unlink(missing_ok=True)
        shown.write(directory / "table.md", directory / "table.csv")
        # Before this word a table.json held the population's deviation.
        write_json(directory / "table.json", [{**dataclasses.asdict(row), "deviation": "sample"} for row in rows])
        for name, picture in figure.items() if isinstance(figure, Mapping) else [("", figure)]:
            report.style.save(picture, directory / f"{FIGURE}{name and f'.{name}'}.png")
        # A study is timed as a whole.
        whole = {"runs": 1, "timed_runs": 1} if isinstance(recipe, Study) else {}
        write_json(directory / RAN, sealed({**read_recipe(directory), **_together(ran), **whole}))
    print(f"left in {directory}")
    return rows, outcomes


def is_reproduction(path: pathlib.Path) -> bool:
    """Whether `reproduce` has left the directory."""
    return (path / RECIPE).is_file()


def read_recipe(path: pathlib.Path) -> dict[str, Any]:
    """What the directory of a reproduction is for: `recipe`, `version` and `seeds`.

    Raises:
      ValueError: it is none, or recipe.json is damaged.
    """
    try:
        content = read_json(path / RECIPE)
    except FileNotFoundError:
        raise ValueError(f"{path} is not what reproduce has left: it has no {RECIPE}") from None
    if not {"recipe", "version", "seeds"} <= content.keys():
        raise ValueError(f"{path / RECIPE} is damaged; delete it and choose another directory")
    return content


@contextlib.contextmanager
def _opened(
    directory: pathlib.Path, wanted: Mapping[str, Any], check: Callable[[pathlib.Path], None]
) -> Iterator[None]:
    """The recipe's directory, kept from other processes; nothing is left where nothing could be run."""
    check(directory)
    before = _wanted_before(directory, wanted)
    directory.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        if before is None:
            stack.callback(remove_empty, directory)
        stack.enter_context(taken(directory))
        if _wanted_before(directory, wanted) != before:
            raise ValueError(f"another command has changed {directory} since this one began; give it again")
        try:
            write_json(directory / RECIPE, sealed(wanted))
            yield
        except ValueError:
            # What a run has left is taken up as this recipe's.
            if before is None and not any((directory / RUNS_FOLDER).glob("*")):
                (directory / RECIPE).unlink(missing_ok=True)
            raise


def _wanted_before(directory: pathlib.Path, wanted: Mapping[str, Any]) -> dict[str, Any] | None:
    """What the directory is for already; None where it is empty.

    Raises:
      ValueError: something else than what is wanted.
    """
    if not is_reproduction(directory):
        filled = directory.is_dir() and any(
            not (path.name == LOCK or STRAY.fullmatch(path.name)) for path in directory.iterdir()
        )
        if filled and not is_reproduction(directory):  # nor has another begun one meanwhile
            raise ValueError(f"the directory {directory} is not empty and holds no reproduction; choose another")
        if not filled:
            return None
    before = read_recipe(directory)
    for name in ("recipe", "version"):
        if before[name] != wanted[name]:
            raise ValueError(
                f"the directory {directory} belongs to another reproduction: {name} is {before[name]} there and "
                f"{wanted[name]} here; choose another directory"
            )
    return before


def _records(
    recipe: Recipe, cells: Sequence[Any], count: int, folder: pathlib.Path, with_what: Mapping[str, Any]
) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """The records of all runs, by (row, column); those that are not there yet are made."""
    seeds = range(recipe.first_seed, recipe.first_seed + count)
    places = {
        (cell.row, cell.column, seed): (cell, folder / f"{file_name(cell)}-seed{seed}.json")
        for cell in cells
        for seed in seeds
    }
    configs = {place: dataclasses.replace(cell.config, seed=place[2]) for place, (cell, _) in places.items()}
    known = {place: _read(path, configs[place]) for place, (_, path) in places.items() if path.exists()}
    for place in known:  # of which a killed process has left the run's directory
        shutil.rmtree(_under_way(places[place][1]), ignore_errors=True)
    work = {place: run_flops(config) + COMPILATION for place, config in configs.items()}
    if known:
        others = sum(_code(record["ran"]) != _code(with_what) for record in known.values())
        by = f", {others} of them by another commit or version" if others else ""
        print(f"{len(known)} of {counted(len(places), 'run')} done before{by}", file=sys.stderr)
    federations: dict[Any, Federation] = {}
    missing, started, done = [place for place in places if place not in known], time.monotonic(), 0.0
    for number, place in enumerate(missing, 1):
        begun = time.monotonic()
        known[place] = _run(recipe, configs[place], places[place][1], federations, with_what)
        done += work[place]
        elapsed = time.monotonic() - started
        left = elapsed * sum(work[later] for later in missing[number:]) / done
        figures = _figures(recipe, known[place]["summary"])
        label = f"{place[0]} {place[1]}".strip()
        run_number = len(places) - len(missing) + number
        took = f"{time.monotonic() - begun:.0f} s" + (f", about {_time(left)} left" if left else "")
        print(f"[{run_number} of {len(places)}] {label}, seed {place[2]}: {figures} ({took})", file=sys.stderr)
    return {(cell.row, cell.column): [known[cell.row, cell.column, seed] for seed in seeds] for cell in cells}


def _run(
    recipe: Recipe,
    config: RunConfig,
    path: pathlib.Path,
    federations: dict[Any, Federation],
    with_what: Mapping[str, Any],
) -> dict[str, Any]:
    """One run and its record; while it is under way, a long one has a run directory beside it."""
    under_way = _under_way(path)
    begun_before = under_way.exists()
    long = begun_before or run_flops(config) / FLOPS_PER_SECOND > CHECKPOINT_SECONDS
    started = _now()
    federation = shared_federation(config, federations)
    callbacks = recipe.watch(federation)
    result = run(config, run_dir=under_way if long else None, federation=federation, callbacks=callbacks)
    record = {
        "config": config.to_json(),
        "summary": {**result.summary, **recipe.measure(result)},
        "history": dict(result.history),
        "ran": with_what,
        # Of a run that was taken up it is not known how long it had run before.
        **({} if begun_before else _since(started)),
    }
    write_json(path, sealed(record))
    shutil.rmtree(under_way, ignore_errors=True)
    # As it will be read, so that a figure does not depend on when it was drawn.
    return _read(path, config)


def _under_way(path: pathlib.Path) -> pathlib.Path:
    """The run directory of a run whose record is this file."""
    return path.with_name(path.name.removesuffix(".json"))


def _read(path: pathlib.Path, config: RunConfig) -> dict[str, Any]:
    """The record of a run that was done before.

    Raises:
      ValueError: one with other settings, or a damaged file.
    """
    record = read_json(path)
    try:
        there, here = map(as_compared, (RunConfig.from_json(record["config"]), config))
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is damaged ({error}); delete it, and the run is done again") from None
    # What has its usual value is left out, of either.
    for name in [*here, *there]:
        old, new = there.get(name), here.get(name)
        if old != new:
            raise ValueError(
                f"{path} was left by a run with other settings: {name} is {old} there and {new} here; "
                "choose another directory, or delete this one"
            )
    return record


class _Parts:
    """What the parts of a study gave, a file each, with the time since the one before; not those of other code.

    Raises:
      ValueError: a damaged file.
    """

    def __init__(self, folder: pathlib.Path, with_what: Mapping[str, Any]):
        self.folder, self.with_what, self.started = folder, with_what, _now()
        kept = {path.stem: _part(path) for path in sorted(folder.glob("*.json"))}
        self.records = {name: part for name, part in kept.items() if _code(part["ran"]) == _code(with_what)}
        self.taken: dict[str, Mapping[str, Any]] = {}
        if others := len(kept) - len(self.records):
            print(f"{counted(others, 'part')} of another commit or version: done again", file=sys.stderr)

    def __contains__(self, name: object) -> bool:
        return name in self.records

    def __getitem__(self, name: str) -> Any:
        if name not in self.taken:
            print(f"{name}: done before", file=sys.stderr)
        self.taken[name] = self.records[name]
        return _filled(self.records[name]["found"])

    def __setitem__(self, name: str, found: Any) -> None:
        record = sealed({"found": found, "ran": self.with_what, **_since(self.started)})
        write_json(self.folder / f"{name}.json", record)
        self.records[name] = self.taken[name] = unsealed(record)
        self.started = _now()

    def ran(self) -> list[Mapping[str, Any]]:
        """With what and how long each part of the table was, and what came after the last one."""
        return [*self.taken.values(), {"ran": self.with_what, **_since(self.started)}]


def _part(path: pathlib.Path) -> dict[str, Any]:
    try:
        record = read_json(path)
        if not {"found", "ran", "seconds", "processor_seconds"} <= record.keys():
            raise ValueError(f"{path} is no part of a study")
    except ValueError as error:
        raise ValueError(f"{error}; delete it, and the part is done again") from None
    return record


def _code(ran: Mapping[str, Any]) -> tuple[Any, Any]:
    return ran["commit"], plain(ran["versions"])


def _outcome(place: tuple[str, str], records: Sequence[Mapping[str, Any]]) -> Outcome:
    label = f"{place[0]} {place[1]}".strip()
    histories = [
        {name: np.asarray(column, np.float64) for name, column in record["history"].items()} for record in records
    ]
    summaries = [
        {name: _filled(value) if isinstance(value, list) else value for name, value in record["summary"].items()}
        for record in records
    ]
    return Outcome(label, tuple(summaries), tuple(histories))


def _filled(value: Any) -> Any:
    """What JSON holds, with NaN where that has null."""
    if isinstance(value, dict):
        return {name: _filled(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_filled(each) for each in value]
    return math.nan if value is None else value


def _figures(recipe: Recipe, summary: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{heading} {factor * value:.4g}"
        for name, (heading, factor) in recipe.metrics.items()
        if (value := summary.get(name)) is not None
    )


def _time(seconds: float) -> str:
    """A time to wait, in words.

    >>> _time(20), _time(100), _time(9000)
    ('20 s', '2 min', '2.5 h')
    """
    return (
        f"{seconds:.0f} s"
        if seconds < 90
        else f"{seconds / 60:.0f} min"
        if seconds < 5400
        else f"{seconds / 3600:.1f} h"
    )


def _now() -> tuple[float, float]:
    of = os.times()  # children's, once they have ended
    return time.perf_counter(), of.user + of.system + of.children_user + of.children_system


def _since(started: tuple[float, float]) -> dict[str, float]:
    """Seconds by the clock, and of the processor, summed over threads, which other work on the machine leaves alone."""
    return dict(zip(("seconds", "processor_seconds"), np.subtract(_now(), started).tolist(), strict=True))


def _together(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """With what, on what and how long the runs of a recipe were; what they do not share is listed."""
    ran = [record["ran"] for record in records]
    timed = [record for record in records if "processor_seconds" in record]

    def all_of(values: Sequence[Any]) -> str | None:
        return ", ".join(dict.fromkeys(str(value) for value in values if value is not None)) or None

    return {
        "commit": all_of([each["commit"] for each in ran]),
        "date": max(each["date"] for each in ran),
        "versions": {name: all_of([each["versions"].get(name) for each in ran]) for name in ran[0]["versions"]},
        "device": all_of([each["device"] for each in ran]),
        "runs": len(records),
        "backend": all_of([each["backend"] for each in ran if "backend" in each]),
        "timed_runs": len(timed),
        **{name: round(sum(record[name] for record in timed), 1) for name in ("seconds", "processor_seconds")},
    }
