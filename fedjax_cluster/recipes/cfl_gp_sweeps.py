"""CFL-GP's sweeps: Fig. 1, three straight lines against clients, angles and mini-batches, and Fig. 13 against these."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from fedjax_cluster.experiments.cells import Cell, Changes, changed, headings, printed, shortened, varied
from fedjax_cluster.experiments.recipe import Outcomes, Recipe
from fedjax_cluster.recipes import figures
from fedjax_cluster.recipes.cfl_gp import (
    ACCURACY_AND_ARI,
    FOUR_ANGLES,
    FULL_DATA,
    HARD_AND_MADMO,
    LINEAR,
    LINEAR_LOSS,
    LINEAR_METHODS,
    LINEAR_READING,
    MADMO,
    MIXED,
    MNIST,
    STARTS,
    table_with_madmo,
)

ARI, LOSS = ("adjusted_rand_index", "Adjusted Rand index"), ("test_loss", "Test loss (mean squared error)")
BOTH_STARTS: dict[str, Changes] = {
    f"{name}, {start}": {**method, **options}
    for start, options in STARTS.items()
    for name, method in LINEAR_METHODS.items()
}


def _of_start(cells: Sequence[Cell], outcomes: Outcomes, start: str, metric: tuple[str, str], label: str) -> Figure:
    """One start's lines, which are called by their methods alone."""
    own = [dataclasses.replace(cell, row=cell.row.partition(", ")[0]) for cell in cells if cell.row.endswith(start)]
    found = {(row.partition(", ")[0], column): each for (row, column), each in outcomes.items() if row.endswith(start)}
    drawn: Any = figures.sweep(metric[0], label, metric[1])(own, found)
    return drawn


def _by_start(label: str, *, loss: bool = False):
    """A picture for each start, of the ARI and with `loss` of the loss as well."""

    def figure(cells: Sequence[Cell], outcomes: Outcomes) -> Mapping[str, Figure]:
        rows = {row for row, _ in outcomes}
        drawn = {}
        for start, name in zip(STARTS, ("", "start-ii"), strict=True):
            if any(row.endswith(start) for row in rows):
                drawn[name] = _of_start(cells, outcomes, start, ARI, label)
                if loss:
                    drawn["-".join(filter(None, [name, "loss"]))] = _of_start(cells, outcomes, start, LOSS, label)
        return drawn

    return figure


def _fig_1(
    letter: str, what: str, columns: Mapping[str, Changes], label: str, stated: str, quick: str, **options: Any
) -> Recipe:
    """One part of Fig. 1; `stated` are the ARIs of CFL-GP by column that the text states."""
    first = f"CFL-GP, {next(iter(STARTS))}"
    return table_with_madmo(
        f"cfl-gp-fig1{letter}",
        f"CFL-GP, Fig. 1 ({letter}): three straight lines against {what}",
        f"C = 12, φ = 20° and b = 10 where they are not varied; the values on the axes are ours, as none are printed. "
        f"{LINEAR_READING}",
        LINEAR,
        BOTH_STARTS,
        columns,
        {first: printed(adjusted_rand_index=stated), **options.pop("paper", {})},
        metrics=headings(adjusted_rand_index="ARI", test_loss="test loss"),
        tolerances=LINEAR_LOSS,
        seeds=20,
        quick=shortened(columns=(quick,), rounds=40),
        figure=_by_start(label, **options),
    )


FIG_1A = _fig_1(
    "a", "the number of clients", varied("C", "clients", (9, 12, 24, 48)), "Number of clients", "1 1 1 1", "C=12"
)
FIG_1B = _fig_1(
    "b",
    "the angle between them",
    varied("φ", "scenario_options.phi", (5, 10, 20, 40)),
    "Angle φ (degrees)",
    # Of 5° the text has "above 0.8", and 0 for the others.
    "0.8 - 1 -",
    "φ=20",
    paper={f"{name}, start (i)": printed(adjusted_rand_index="0 - - -") for name in ("IFCA", "MADMO")},
)
FIG_1C = _fig_1(
    "c",
    "the batch size, with the loss (d)",
    varied("b", "batch_size", (2, 5, 10, 20, 50)),
    "Batch size",
    "- - 1 - -",
    "b=10",
    loss=True,
)
FIG_13 = table_with_madmo(
    "cfl-gp-fig13",
    "CFL-GP, Fig. 13: rotated MNIST, four angles, C = 40, against the batch size",
    f"The batch sizes are ours, as none are printed. Against C it is cfl-gp-table9. {FULL_DATA} {MADMO}",
    changed(MNIST, **{**FOUR_ANGLES, "clients": 40}),
    HARD_AND_MADMO,
    varied("b", "batch_size", (25, 50, 100, 200)),
    {"CFL-GP": printed(adjusted_rand_index="1 1 1 1")},
    metrics=ACCURACY_AND_ARI,
    seeds=3,
    quick=shortened(columns=("b=100",), rounds=40, examples_per_client=300),
    figure=lambda cells, outcomes: {
        "": figures.sweep(ARI[0], "Batch size", ARI[1])(cells, outcomes),
        "accuracy": figures.sweep("accuracy", "Batch size", "Test accuracy (%)", 100.0)(cells, outcomes),
    },
)
TABLE_9_LARGEST = table_with_madmo(
    "cfl-gp-table9-largest",
    "CFL-GP, Table 9, C = 160: rotated MNIST, four angles, b = 100, K = 4",
    f"Three seeds where the smaller numbers of clients have five. {FULL_DATA} {MADMO}",
    changed(MNIST, **FOUR_ANGLES),
    HARD_AND_MADMO,
    varied("C", "clients", (160,)),
    {
        "CFL-GP": printed(accuracy="88.78±0.16", adjusted_rand_index="1±0"),
        "IFCA": printed(accuracy="84.29±2.27", adjusted_rand_index="0.77±0.12"),
        "MADMO": printed(accuracy="71.53±8.01", adjusted_rand_index="0.50±0.28"),
        "Global": printed(accuracy="61.37±0.37", adjusted_rand_index="0±0"),
    },
    metrics=ACCURACY_AND_ARI,
    seeds=3,
    quick=shortened(rounds=40, examples_per_client=300),
    figure=figures.bars(*ARI),
)
TABLE_11_LARGEST = table_with_madmo(
    "cfl-gp-table11-largest",
    "CFL-GP, Table 11, C = 128: MNIST under eight rotations and Fashion-MNIST, b = 256",
    f"As cfl-gp-table11, with three seeds: all 140 000 images are divided among the clients. {MADMO}",
    changed(MIXED, clients=128),
    HARD_AND_MADMO,
    {"C=128": {}},
    {
        "CFL-GP": printed(accuracy="82.8±0.18", adjusted_rand_index="1±0"),
        "IFCA": printed(accuracy="81.1±1.15", adjusted_rand_index="0.95±0.04"),
        "MADMO": printed(accuracy="68.8±5.43", adjusted_rand_index="0.59±0.16"),
        "Global": printed(accuracy="60.6±0.20", adjusted_rand_index="0±0"),
    },
    metrics=ACCURACY_AND_ARI,
    seeds=3,
    quick=shortened(rounds=40, examples_per_client=300, batch_size=64),
    figure=figures.bars(*ARI),
)
