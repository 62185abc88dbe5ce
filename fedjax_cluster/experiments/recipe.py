"""What a recipe is: a named list of runs with a paper's values, and how it is carried out."""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from fedjax_cluster.experiments.config import MODELS, RunConfig
from fedjax_cluster.experiments.runs import Outcome, compare
from fedjax_cluster.files import write_json
from fedjax_cluster.nn.flops import gradient_flops
from fedjax_cluster.simulation.loop import Evaluation
from fedjax_cluster.simulation.result import SimulationResult
from fedjax_cluster.types import DatasetInfo, Federation

# Local steps of own-weight models on two cores; recipes' minutes are stated at this rate.
FLOPS_PER_SECOND = 4.5e10


@dataclasses.dataclass(frozen=True)
class Cell:
    """One entry of a paper's table: a configuration, run over the seeds, and the printed values.

    Attributes:
      row: usually the method.
      column: usually what varies.
      config: the run; its seed is replaced.
      paper: metric -> (mean, standard deviation or NaN) as printed; empty where the paper has no figure.
    """

    row: str
    column: str
    config: RunConfig
    paper: Mapping[str, tuple[float, float]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Recipe:
    """An experiment of a paper.

    Attributes:
      name: on the command line.
      title: what it reproduces, with the table's or figure's number.
      reading: what the paper leaves open and how it was read; what differs.
      cells: the runs.
      metrics: name in the summary -> (heading, factor): what the table shows.
      seeds: runs per cell.
      quick: the cells of the smaller version, run with one seed.
      first_seed: of the runs; the reading says why where it is not 0.
      full: the cells nearer to the paper's size where `cells` are shortened, for an accelerator; the reading says how.
      measure: further figures of a run from its result, added to its summary.
      watch: further figures of each evaluation, put into the history; see `simulate`'s callbacks.
      figure: draws the cells and their outcomes, given by (row, column).
    """

    name: str
    title: str
    reading: str
    cells: tuple[Cell, ...]
    metrics: Mapping[str, tuple[str, float]]
    seeds: int
    quick: tuple[Cell, ...]
    figure: Callable[[Sequence[Cell], Mapping[tuple[str, str], Outcome]], Figure]
    full: tuple[Cell, ...] = ()
    first_seed: int = 0
    measure: Callable[[SimulationResult], Mapping[str, Any]] = lambda result: {}
    watch: Callable[[Federation], Sequence[Callable[[Evaluation], Mapping[str, float] | None]]] = lambda federation: ()

    @property
    def flops(self) -> float:
        """Floating-point operations of all training in the recipe."""
        return self.seeds * sum(run_flops(cell.config) for cell in self.cells)

    @property
    def minutes(self) -> float:
        """Expected minutes on two cores, ten seconds of compilation a cell included."""
        return round(self.flops / FLOPS_PER_SECOND / 60 + len(self.cells) / 6, 1)


@dataclasses.dataclass(frozen=True)
class Study:
    """An experiment that is no table of runs: it carries itself out.

    Attributes:
      name, title, reading: as a recipe's.
      seeds: draws or runs.
      minutes: expected on two cores.
      run: (seeds, quick) -> the table's rows and the figure.
      quick: runs of the smaller version.
      cells: none; a study is no table of runs.
    """

    name: str
    title: str
    reading: str
    seeds: int
    minutes: float
    run: Callable[[int, bool], tuple[list[Row], Figure]]
    quick: int = 1
    cells: tuple[Cell, ...] = ()

    @property
    def flops(self) -> float:
        """Floating-point operations, from the expected time."""
        return self.minutes * 60 * FLOPS_PER_SECOND


@dataclasses.dataclass(frozen=True)
class Row:
    """One metric of one cell, ours beside the paper's."""

    row: str
    column: str
    metric: str
    ours: float
    ours_std: float
    paper: float
    paper_std: float


def run_flops(config: RunConfig) -> float:
    """Training FLOPs of a run: those of its mini-batch gradients, and the method's own passes.

    CFL-GP queries each client once more in every P-th round for as long as it clusters; IFCA adds K forward passes,
    a third of a step each; gradient-and-loss CFL K − 1 gradients; Per-FedAvg's steps take two gradients
    or four; CFL on full gradients passes over all examples once more; FLAG's and PACFL's clustering is left out.
    """
    shape, classes, total = {
        "digits": ((8, 8), 10, 1797),
        "mnist": ((28, 28), 10, 70_000),
        "fashion_mnist": ((28, 28), 10, 70_000),
    }.get(config.dataset.split("+")[0], ((1,), 1, 0))
    if config.scenario == "linear_regression":
        shape, classes = (1,), 0
    per_example = _gradient_flops(config.model, json.dumps(config.model_options), shape, classes, config.batch_size)
    rows = (1 - config.test_fraction) * (config.examples_per_client or total / config.clients)
    steps: float = config.local_steps or 1
    if config.local_epochs:
        steps = config.local_epochs * rows / config.batch_size
    taking_part = config.rounds * config.clients * config.participation
    own = taking_part * steps * config.batch_size * per_example
    if config.method == "cfl_gp":
        every = config.method_options.get("every", 2)
        stop = config.method_options.get("stop_after")
        share = 1.0 if stop is None else min(1.0, 1.5 * stop / config.rounds)
        return own * (1 + share / every)
    if config.method == "ifca":
        return own * (1 + int(config.clusters) / 3)
    if config.method == "gradient_loss":
        return own * (1 + (int(config.clusters) - 1) / steps)
    if config.method == "cfl" and config.method_options.get("similarity_of") == "gradients":
        return own + taking_part * rows * per_example
    if config.method == "per_fedavg":
        return own * (4 if config.method_options.get("variant") == "hessian-free" else 2)
    return own


@functools.cache
def _gradient_flops(model: str, options: str, shape: tuple[int, ...], classes: int, batch_size: int) -> float:
    """FLOPs of a mini-batch gradient per example; the model is traced once for all cells that have it."""
    info = DatasetInfo("", shape, classes, "classification" if classes else "regression")
    return gradient_flops(MODELS[model](**json.loads(options)), info, batch_size) / batch_size


def reproduce(
    recipe: Recipe | Study,
    *,
    quick: bool = False,
    full: bool = False,
    seeds: int | None = None,
    directory: pathlib.Path,
) -> tuple[list[Row], dict[tuple[str, str], Outcome]]:
    """Carries a recipe out: runs, table beside the paper's, figure; all left in `directory`.

    Raises:
      ValueError: fewer than one seed, a directory that holds other runs, or `full` where there is nothing fuller.
    """
    from fedjax_cluster.report import plots, tables

    if full:
        if quick or isinstance(recipe, Study) or not recipe.full:
            why = "quick and full exclude each other" if quick else "it has no fuller version"
            raise ValueError(f"recipe {recipe.name} cannot be carried out in full: {why}")
        recipe = dataclasses.replace(recipe, cells=recipe.full)
    least = recipe.quick if isinstance(recipe, Study) else 1
    count = seeds if seeds is not None else (least if quick else recipe.seeds)
    if count < 1:
        raise ValueError(f"seeds is {count}; at least one run is needed")
    print(f"{recipe.title}\n{recipe.reading}", file=sys.stderr)
    if not quick:
        print(f"{recipe.flops:.1e} FLOPs, about {recipe.minutes:g} minutes on two cores", file=sys.stderr)
    outcomes = {}
    if isinstance(recipe, Study):
        rows, figure = recipe.run(count, quick)
    else:
        cells = recipe.quick if quick else recipe.cells
        for cell in cells:
            outcomes[cell.row, cell.column] = _run_cell(recipe, cell, count, directory / "runs")
        rows = [row for cell in cells for row in _rows(recipe, cell, outcomes[cell.row, cell.column])]
        figure = recipe.figure(cells, outcomes)
    table = tables.recipe_table(recipe.title, rows)
    table.print()
    table.write(directory / "table.md", directory / "table.csv")
    write_json(directory / "table.json", [dataclasses.asdict(row) for row in rows])
    plots.save(figure, directory / "figure.png")
    print(f"left in {directory}")
    return rows, outcomes


def _run_cell(recipe: Recipe, cell: Cell, count: int, directory: pathlib.Path) -> Outcome:
    label = f"{cell.row} {cell.column}".strip()

    def note(label: str, seed: int, result: SimulationResult) -> None:
        result.summary.update(recipe.measure(result))
        figures = [
            f"{heading} {factor * value:.4g}"
            for name, (heading, factor) in recipe.metrics.items()
            if (value := result.summary.get(name)) is not None
        ]
        print(f"{label}, seed {seed}: {', '.join(figures)}", file=sys.stderr)

    seeds = range(recipe.first_seed, recipe.first_seed + count)
    (outcome,) = compare({label: cell.config}, seeds=seeds, done=note, watch=recipe.watch)
    for seed, summary in zip(seeds, outcome.summaries, strict=True):
        write_json(directory / f"{label.replace(' ', '-').replace('/', '-')}-seed{seed}.json", summary)
    return outcome


def _rows(recipe: Recipe, cell: Cell, outcome: Outcome) -> list[Row]:
    rows = []
    for name, (heading, factor) in recipe.metrics.items():
        paper, paper_std = cell.paper.get(name, (np.nan, np.nan))
        rows.append(
            Row(
                cell.row,
                cell.column,
                heading,
                factor * outcome.mean(name),
                factor * outcome.std(name),
                paper,
                paper_std,
            )
        )
    return rows


def grid(
    base: RunConfig,
    rows: Mapping[str, Mapping[str, Any]],
    columns: Mapping[str, Mapping[str, Any]],
    paper: Mapping[str, Sequence[Mapping[str, tuple[float, float]]]] | None = None,
) -> tuple[Cell, ...]:
    """Cells of a table: `base` with a row's and a column's changes; options are merged, not replaced."""
    cells = []
    for row, row_changes in rows.items():
        for number, (column, column_changes) in enumerate(columns.items()):
            config = changed(changed(base, row_changes), column_changes)
            printed = {} if paper is None or row not in paper else paper[row][number]
            cells.append(Cell(row, column, config, printed))
    return tuple(cells)


def changed(config: RunConfig, changes: Mapping[str, Any]) -> RunConfig:
    """A configuration with changes; mappings of options are merged."""
    merged = {
        name: {**getattr(config, name), **value} if name.endswith("_options") else value
        for name, value in changes.items()
    }
    for part in ("method", "model", "scenario"):
        if merged.get(part, getattr(config, part)) != getattr(config, part):
            # Another method's or model's options mean nothing to this one.
            merged[f"{part}_options"] = dict(changes.get(f"{part}_options", {}))
    return dataclasses.replace(config, **merged)
