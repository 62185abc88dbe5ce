"""What a recipe is: a named list of runs with a paper's values. `reproduction` carries it out."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, Union

from fedjax_cluster import algorithms
from fedjax_cluster.algorithms.per_fedavg import GRADIENTS_PER_STEP
from fedjax_cluster.data.scenarios.registry import draws_examples
from fedjax_cluster.experiments.cells import Cell, Changes, Printed, Shortening, grid
from fedjax_cluster.experiments.config import RunConfig, build_algorithm, build_federation, build_model
from fedjax_cluster.experiments.outcomes import Outcome
from fedjax_cluster.nn.flops import gradient_flops
from fedjax_cluster.report.paper_rows import NAN, PaperRow, Tolerance, usual_tolerance
from fedjax_cluster.simulation.evaluation import Evaluation
from fedjax_cluster.simulation.result import SimulationResult
from fedjax_cluster.types import DatasetInfo, Federation

if TYPE_CHECKING:  # drawing loads matplotlib, which stating a recipe does not need
    from matplotlib.figure import Figure

# Equal models are equal keys: each is traced once for all cells that have it.
_gradient_flops = functools.cache(gradient_flops)
# Local training on two cores, one model a client; recipes' minutes are stated at this rate.
FLOPS_PER_SECOND = 4.5e10
# Data set -> shape of an image, classes, images.
IMAGES = {
    "digits": ((8, 8), 10, 1797),
    **dict.fromkeys(("mnist", "fashion_mnist"), ((28, 28), 10, 70_000)),
    "cifar10": ((32, 32, 3), 10, 60_000),
}

Outcomes = Mapping[tuple[str, str], Outcome]
# One picture, or several by name: "" is the one that stands for them all.
Figures = Union["Figure", Mapping[str, "Figure"]]
Drawing = Callable[[Sequence[Cell], Outcomes], Figures]


@dataclasses.dataclass(frozen=True)
class Recipe:
    """An experiment of a paper.

    Attributes:
      name: on the command line.
      title: what it reproduces, with the table's or figure's number.
      reading: what the paper leaves open and how it was read; what differs.
      cells: the runs.
      metrics: name in the summary -> (heading, factor): what the table shows.
      seeds, first_seed: runs per cell, and the first one's; the reading says why where it is not 0.
      quick: the cells of the smaller version, run with one seed.
      figure: draws the cells and their outcomes, given by (row, column): one picture, or several by name.
      full: the cells nearer to the paper's size where `cells` are shortened or some of them, for an accelerator; the
        reading says how.
      measure: further figures of a run from its result, added to its summary.
      watch: further figures of each evaluation, put into the history; see `simulate`'s callbacks.
      tolerances: name in the summary -> how far ours may be from the paper's; by default `usual_tolerance`'s.
    """

    name: str
    title: str
    reading: str
    cells: tuple[Cell, ...]
    metrics: Mapping[str, tuple[str, float]]
    seeds: int
    quick: tuple[Cell, ...]
    figure: Drawing
    full: tuple[Cell, ...] = ()
    first_seed: int = 0
    measure: Callable[[SimulationResult], Mapping[str, Any]] = lambda result: {}
    watch: Callable[[Federation], Sequence[Callable[[Evaluation], Mapping[str, float] | None]]] = lambda federation: ()
    tolerances: Mapping[str, Tolerance] = dataclasses.field(default_factory=dict)

    @property
    def flops(self) -> float:
        """Floating-point operations of all training in the recipe."""
        return self.seeds * sum(run_flops(cell.config) for cell in self.cells)

    @property
    def minutes(self) -> float:
        """Expected minutes on two cores, ten seconds of compilation a cell included."""
        return round(self.flops / FLOPS_PER_SECOND / 60 + len(self.cells) / 6, 1)


class Kept(Protocol):
    """What a study has done, by name, as JSON has it; where a reproduction keeps it, an interruption loses no more than
    the part that was under way. A dict will do."""

    def __contains__(self, name: object, /) -> bool: ...

    def __getitem__(self, name: str, /) -> Any: ...

    def __setitem__(self, name: str, found: Any, /) -> None: ...


@dataclasses.dataclass(frozen=True)
class Study:
    """An experiment that is no table of runs: it carries itself out.

    Attributes:
      name, title, reading: as a recipe's.
      seeds, quick: draws or runs, and those of the smaller version.
      minutes: expected on two cores.
      run: (seeds, quick, kept) -> the table's rows and the figure, or several by name; what is in `kept` is not done
        again.
      cells: none.
    """

    name: str
    title: str
    reading: str
    seeds: int
    minutes: float
    run: Callable[[int, bool, Kept], tuple[list[PaperRow], Figures]]
    quick: int = 1
    cells: tuple[Cell, ...] = ()

    @property
    def flops(self) -> float:
        """Floating-point operations, from the expected time."""
        return self.minutes * 60 * FLOPS_PER_SECOND


def of_cells(
    cells: tuple[Cell, ...],
    name: str,
    title: str,
    reading: str,
    *,
    quick: Shortening,
    light: Shortening | None = None,
    **rest: Any,
) -> Recipe:
    """A recipe whose quick version, and with `light` everyday version, are shortenings of its cells.

    Args:
      cells: the table; with `light` that of --full.
      name, title, reading, **rest: see `Recipe`.
      quick: of the everyday version.
      light: of `cells`, where these take too long for every day.
    """
    everyday = light(cells) if light else cells
    return Recipe(name, title, reading, everyday, quick=quick(everyday), full=cells if light else (), **rest)


def table(
    name: str,
    title: str,
    reading: str,
    base: RunConfig,
    rows: Mapping[str, Changes],
    columns: Mapping[str, Changes],
    paper: Mapping[str, Sequence[Printed]] | None = None,
    **rest: Any,
) -> Recipe:
    """The recipe of a `grid`; **rest as `of_cells` takes it."""
    return of_cells(grid(base, rows, columns, paper), name, title, reading, **rest)


def run_flops(config: RunConfig) -> float:
    """Training FLOPs of a run: those of its mini-batch gradients, and the method's further passes.

    CFL-GP queries each client once more in every P-th round for as long as it clusters; IFCA adds K forward passes,
    a third of a step each; gradient-and-loss CFL K − 1 gradients; Per-FedAvg's steps take two gradients or
    four; CFL on full gradients passes over all examples once more; FLAG's and PACFL's clustering is left out.
    """
    shape, classes, total = IMAGES.get(config.dataset.split("+")[0], ((1,), 1, 0))
    info = _drawn_info(config) or DatasetInfo("", shape, classes)
    batch = _gradient_flops(build_model(config), info, config.batch_size)
    clients = config.clients or 1  # every recipe says how many
    rows = (1 - config.test_fraction) * (config.examples_per_client or total / clients)
    steps: float = config.local_steps or 1
    if config.local_epochs:
        steps = config.local_epochs * rows / config.batch_size
    visits = config.rounds * clients * config.participation
    training = visits * steps * batch
    match build_algorithm(config):
        case algorithms.cfl_gp(every=every, stop_after=stop):
            return training * (1 + (1.0 if stop is None else min(1.0, 1.5 * stop / config.rounds)) / every)
        case algorithms.ifca(clusters=clusters):
            return training * (1 + clusters / 3)
        case algorithms.gradient_loss(clusters=clusters):
            return training * (1 + (clusters - 1) / steps)
        case algorithms.cfl(similarity_of="gradients"):
            return training + visits * rows * batch / config.batch_size
        case algorithms.per_fedavg(variant=variant):
            return training * GRADIENTS_PER_STEP[variant]
    return training


def _drawn_info(config: RunConfig) -> DatasetInfo | None:
    """What a scenario that draws its examples makes; None where it divides a data set."""
    if not draws_examples(config.scenario):
        return None
    return build_federation(dataclasses.replace(config, examples_per_client=2)).info


def file_name(cell: Cell) -> str:
    """What the files of a cell are called, before the seed."""
    return f"{cell.row} {cell.column}".strip().replace(" ", "-").replace("/", "-")


def measured(
    cells: Sequence[Cell],
    outcomes: Outcomes,
    metrics: Mapping[str, tuple[str, float]],
    tolerances: Mapping[str, Tolerance] | None = None,
) -> list[PaperRow]:
    """The table of cells: a row for each of their metrics, name in the summary -> (heading, factor)."""
    rows = []
    for cell in cells:
        outcome = outcomes[cell.row, cell.column]
        dataset = "synthetic" if draws_examples(cell.config.scenario) else cell.config.dataset
        for name, (heading, factor) in metrics.items():
            ours = factor * outcome.mean(name), factor * outcome.std(name)
            paper = cell.paper.get(name, (NAN, NAN))
            seeds, valued = len(outcome.summaries), outcome.valued(name)
            some = valued if 0 < valued < seeds else None
            allowed = (tolerances or {}).get(name) or usual_tolerance(heading)
            rows.append(PaperRow(cell.row, cell.column, heading, *ours, *paper, seeds, dataset, some, allowed))
    return rows
