"""What many runs return: each of them, and their means over the seeds as a table and pictures."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedjax_cluster import report
from fedjax_cluster.report.names import label_of, option_names
from fedjax_cluster.simulation.history import NOT_FINITE, REPORTED, TIMED
from fedjax_cluster.simulation.memory import Memory
from fedjax_cluster.simulation.result import SimulationResult

# What a data frame has of each combination, as far as there are values.
FIGURES = (
    *("accuracy", "accuracy_std", "accuracy_worst_decile", "balanced_accuracy", "test_loss", "train_loss"),
    *("adjusted_rand_index", "purity", "num_clusters", "first_round_of_final_clustering"),
)


class Combination(NamedTuple):
    """The runs of one combination of the options' values, over the seeds."""

    label: str
    values: dict[str, float]  # option -> value, as they were given
    summaries: tuple[dict[str, Any], ...]
    histories: tuple[dict[str, np.ndarray], ...]


@dataclasses.dataclass(frozen=True, repr=False)
class ManyResults(Sequence[SimulationResult]):
    """The runs of `simulate_many`, in the order of the combinations, and of the seeds in each.

    Attributes:
      results: a `SimulationResult` of each.
      seeds: of each combination's runs.
      combinations: option -> value, of each.
      together: whether they ran side by side in one program.
      memory: what that took of each device, by the compiler; None where they ran in turn.
    """

    results: tuple[SimulationResult, ...]
    seeds: tuple[int, ...]
    combinations: tuple[dict[str, float], ...]
    together: bool
    memory: Memory | None

    def __len__(self) -> int:
        return len(self.results)

    def __getitem__(self, place: Any) -> Any:
        return self.results[place]

    def __iter__(self) -> Iterator[SimulationResult]:
        return iter(self.results)

    @property
    def cells(self) -> tuple[Combination, ...]:
        """The runs of each combination."""
        count, found = len(self.seeds), []
        for place, values in enumerate(self.combinations):
            own = self.results[place * count : (place + 1) * count]
            label = label_of(values) or own[0].algorithm.name
            summaries, histories = tuple(each.summary for each in own), tuple(each.history for each in own)
            found.append(Combination(label, values, summaries, histories))
        return tuple(found)

    def to_pandas(self):
        """A row for each combination: mean and sample standard deviation of its figures over the seeds.

        In a run with a fault those of the honest clients are among them, and everywhere those of own metrics and
        callbacks. Columns such as `accuracy` and `accuracy_deviation`, and `seeds`; the options are the index.
        """
        import pandas  # slow to import

        rows = []
        for cell in self.cells:
            row: dict[str, Any] = {**cell.values, "seeds": len(cell.summaries)}
            named = {name: name for name in FIGURES} | _others(cell)
            for name, column in named.items():
                values = [summary.get(name) for summary in cell.summaries]
                known = np.asarray([value for value in values if value is not None and np.isfinite(value)])
                if any(value is not None for value in values):
                    row[column] = float(known.mean()) if len(known) else np.nan
                    row[f"{column}_deviation"] = float(known.std(ddof=1)) if len(known) > 1 else np.nan
            rows.append(row)
        frame = pandas.DataFrame(rows)
        options = list(self.combinations[0])
        return frame.set_index(options) if options else frame

    def table(self):
        """The table that a sweep prints: mean ± sample standard deviation, and each seed."""
        cells = self.cells
        varied = {cell.label: cell.values for cell in cells} if self.combinations[0] else None
        return report.tables.comparison_table(cells, varied)

    def plot(self, metric: str | None = None):
        """Draws accuracy (or another column) against rounds, and ARI too where there is room; returns the figure.

        Each combination is a line with a band of ± one sample standard deviation over the seeds. More than six of two
        options have a panel for each value of one of these.
        """
        cells = self.cells
        drawn, values = {cell.label: cell.histories for cell in cells}, {cell.label: cell.values for cell in cells}
        if len(cells) <= report.small_multiples.MOST_IN_ONE:
            return report.curves.learning_curves(drawn, metric=metric)
        if report.option_curves.can_be_drawn(values):
            return report.option_curves.option_curves(drawn, values, metric)
        return report.small_multiples.small_multiples(drawn, metric)

    def plot_sensitivity(self):
        """Draws the last accuracy and ARI against one option or two; returns the figure, None for more options.

        Raises:
          ValueError: no option has several values.
        """
        cells = self.cells
        if not cells[0].values:
            raise ValueError("no options were given, against which figures could be drawn; plot() has the curves")
        return report.sensitivity.sensitivity(cells, {cell.label: cell.values for cell in cells})

    def __repr__(self) -> str:
        kind = "together" if self.together else "in turn"
        options = ", ".join(option_names(self.combinations[0]).values()) or "no options"
        return (
            f"{len(self)} runs {kind}: {len(self.combinations)} combinations of {options}, {len(self.seeds)} seeds; "
            "also: results, cells, table(), to_pandas(), plot(), plot_sensitivity()"
        )


def _others(cell: Combination) -> dict[str, str]:
    """The figures beside the usual ones, of own metrics and callbacks and of honest clients -> their columns."""
    usual = {*FIGURES, *REPORTED, *TIMED, NOT_FINITE}
    names = [name for name in cell.histories[0] if name in cell.summaries[0] and name not in usual]
    taken = {*cell.values, "seeds", *(f"{name}_deviation" for name in (*FIGURES, *names))}
    return {name: f"{name} (metric)" if name in taken else name for name in names}
