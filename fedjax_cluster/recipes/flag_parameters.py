"""The experiments of FLAG itself: its parameters (Tables 4, 6, 7, 8, Fig. 1), Table 5, and two shifts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from fedjax_cluster.experiments.recipe import Cell, Recipe, changed, grid
from fedjax_cluster.experiments.runs import Outcome
from fedjax_cluster.recipes.flag import (
    ACCURACY,
    ACCURACY_AND_CLUSTERS,
    FASHION,
    FLAG,
    LIGHT,
    LIGHT_READING,
    NAN,
    PACFL_THRESHOLD,
    READING,
    accuracies,
    against_paper,
    in_minutes,
    table_rows,
)
from fedjax_cluster.simulation.result import SimulationResult

ARI = {"adjusted_rand_index": ("ARI", 1.0)}


# -------------------------------------------------------------------------------------- Tables 4, 6, 7, 8


def _sweep(x_label: str) -> Callable[..., Figure]:
    """Accuracy against the columns' numbers, a line per row, the paper's values as hollow markers."""

    def figure(cells: Sequence[Cell], outcomes: Mapping[tuple[str, str], Outcome]) -> Figure:
        from fedjax_cluster.report import plots

        columns = list(dict.fromkeys(column for _, column in outcomes))
        rows = list(dict.fromkeys(row for row, _ in outcomes))
        printed = {(cell.row, cell.column): cell.paper.get("accuracy", (NAN,))[0] for cell in cells}

        def line(row: str, of: Callable[[Outcome], float]) -> list[float]:
            return [100 * of(outcomes[row, column]) for column in columns]

        return plots.sweep(
            [float(column.rpartition("=")[2]) for column in columns],
            {row: (line(row, lambda o: o.mean("accuracy")), line(row, lambda o: o.std("accuracy"))) for row in rows},
            x_label=x_label,
            y_label="Test accuracy (%)",
            paper={
                row: values for row in rows if np.isfinite(values := [printed[row, column] for column in columns]).any()
            },
        )

    return figure


def _table_6() -> Recipe:
    betas = tuple(round(0.1 * tenth, 1) for tenth in range(11))
    rows = {
        f"ρ={rho} %": _flag_with({"scenario_options": {"rho": rho / 100, "alpha": 1.0, "num_groups": groups}})
        for rho, groups in ((20, 5), (30, 3))
    }
    # t_g = 3 × 10 epochs and m′ = 25 (Sec. 10).
    columns = {
        f"β={beta:g}": {"method_options": {"beta": beta, "gradient_epochs": 30, "search_clients": 25}} for beta in betas
    }
    paper = {
        "ρ=20 %": accuracies((88.38, 91.44, 93.72, 95.34, *(96.36,) * 5, 95.21, 94.67)),
        "ρ=30 %": accuracies((92.68, 94.02, 95.67, 96.14, *(97.71,) * 4, 96.48, 95.21, 94.65)),
    }
    cells = grid(FASHION, rows, columns, paper)
    return Recipe(
        name="flag-table6",
        title="FLAG, Tables 4 and 6: the part β of the data in the proximity; β = 0 is gradients only, β = 1 data only",
        reading=(
            f"{READING} At ρ = 30 % three groups, whose labels do not overlap. t_g and m′ are those of Sec. 10; in "
            f"Table 4, of Sec. 5, they are 20 and 30. {LIGHT_READING}"
        ),
        cells=(light := in_minutes(cells, flag={"gradient_epochs": 5}, **LIGHT)),
        metrics=ACCURACY_AND_CLUSTERS,
        seeds=3,
        quick=in_minutes(light, ("β=0", "β=0.5", "β=1"), rounds=20),
        full=cells,
        figure=_sweep("Part β of the data"),
    )


def _table_7() -> Recipe:
    deltas = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
    rows = {f"α′={alpha:g}": _flag_with({"scenario_options": {"rho": 0.2, "alpha": alpha}}) for alpha in (1.0, 0.25)}
    columns = {f"δ={delta:g}": {"method_options": {"delta": delta}} for delta in deltas}
    paper = {
        "α′=1": accuracies((95.84, *(96.36,) * 5)),
        "α′=0.25": accuracies((91.97, 92.67, *(93.41,) * 4)),
    }
    cells = grid(FASHION, rows, columns, paper)
    return Recipe(
        name="flag-table7",
        title="FLAG, Table 7: the range δ of the weights by class sizes",
        reading=f"{READING} t_g and m′ are not given; ours are those of Sec. 5, 20 and 30. {LIGHT_READING}",
        cells=(light := in_minutes(cells, flag={"gradient_epochs": 5}, **LIGHT)),
        metrics=ACCURACY_AND_CLUSTERS,
        seeds=3,
        quick=in_minutes(light, ("δ=0", "δ=0.4", "δ=1"), rounds=20),
        full=cells,
        figure=_sweep("Range δ of the weights"),
    )


def _table_8() -> Recipe:
    epochs = (0, 5, 10, 15, 20, 25)
    columns = {
        f"t_g={number}": {"method_options": {"beta": 0.0, "gradient_epochs": number, "search_clients": 25}}
        for number in epochs
    }
    paper = {"gradients only": accuracies((57.12, 76.86, 83.51, 88.38, 88.38, 88.38))}
    cells = grid(FASHION, {"gradients only": FLAG}, columns, paper)
    return Recipe(
        name="flag-table8",
        title="FLAG, Table 8: local epochs t_g before the gradients are compared, β = 0",
        reading=f"{READING} {LIGHT_READING} Here t_g is as given.",
        cells=(light := in_minutes(cells, **LIGHT)),
        metrics=ACCURACY_AND_CLUSTERS,
        seeds=3,
        quick=in_minutes(light, ("t_g=0", "t_g=5", "t_g=20"), rounds=20),
        full=cells,
        figure=_sweep("Local epochs t_g"),
    )


def _flag_with(changes: Mapping[str, Any]) -> dict[str, Any]:
    """FLAG's row with further changes."""
    return {**FLAG, **changes}


# ----------------------------------------------------------------------------------------- Sec. 9, Fig. 1


def _table_5() -> Recipe:
    base = changed(FASHION, {"method": "fedavg", "scenario": "dirichlet"})
    columns = {"α′=0.25": {"scenario_options": {"alpha": 0.25, "client_sizes": "equal"}}}
    paper = {
        "FedAvg": [{"accuracy": (79.52, 0.24)}],
        "FedSoft": [{"accuracy": (82.24, 0.29)}],
        "PACFL": [{"accuracy": (87.12, 0.14)}],
        "CFL": [{"accuracy": (81.85, 0.31)}],
        "IFCA": [{"accuracy": (85.23, 0.41)}],
        "FLAG": [{"accuracy": (89.83, 0.13)}],
    }
    rows = {label: changes for label, changes in table_rows().items() if label in paper}
    rows["every client alone"] = {"method": "local_only"}
    # m′ = 25 and steps of 0.01 (Sec. 9); without groups there is no right number of clusters.
    rows["FLAG"] = {
        "method": "flag",
        "clusters": 100,
        "method_options": {
            **FLAG["method_options"],
            "gradient_epochs": 30,
            "search_clients": 25,
            "interval": 0.01,
        },
    }
    cells = grid(base, rows, columns, paper)
    return Recipe(
        name="flag-table5",
        title="FLAG, Table 5 (Sec. 9): Dirichlet distribution over categories, α′ = 0.25",
        reading=(
            f"{READING} There are no groups. Many clients have little more than one label, and no need of others: a "
            "client alone does better than any cluster, and FedSoft, whose clients keep a model of their own, as well. "
            f"{LIGHT_READING} α in steps of 0.1."
        ),
        cells=(light := in_minutes(cells, flag={"gradient_epochs": 5, "interval": 0.1}, **LIGHT)),
        metrics={**ACCURACY, "num_clusters": ("clusters", 1.0)},
        seeds=3,
        quick=in_minutes(light, rounds=20),
        full=cells,
        figure=against_paper(ACCURACY),
    )


def _figure_1() -> Recipe:
    columns = {
        f"{groups} groups": {"scenario_options": {"rho": 0.3, "alpha": 1.0, "num_groups": groups}} for groups in (3, 5)
    }
    cells = grid(changed(FASHION, {"rounds": 1, "eval_every": 1}), {"FLAG": FLAG}, columns)

    def measure(result: SimulationResult) -> dict[str, Any]:
        content = result.events[0].content
        return {name: np.asarray(content[name]).tolist() for name in ("thresholds", "num_clusters", "chosen")} | {
            "search_accuracy": np.asarray(content["accuracy"], np.float64).tolist(),
            "alpha": float(content["thresholds"][int(content["chosen"])]),
            "clusters_found": int(content["num_clusters"][int(content["chosen"])]),
        }

    def figure(cells: Sequence[Cell], outcomes: Mapping[tuple[str, str], Outcome]) -> Figure:
        from fedjax_cluster.report.methods import flag as flag_plots

        first = next(iter(outcomes.values())).summaries[0]
        return flag_plots.threshold_search(
            first["thresholds"], first["search_accuracy"], first["num_clusters"], first["chosen"]
        )

    return Recipe(
        name="flag-figure1",
        title="FLAG, Fig. 1: held-out accuracy and number of clusters against α, ρ = 30 %, α′ = 1",
        reading=(
            f"{READING} The clustering alone: a single round. Three groups whose labels do not overlap, which the "
            "picture shows, and five that share labels. The paper reads an elbow of 0.6 from its Fig. 1(a)."
        ),
        cells=cells,
        metrics={"alpha": ("α at the elbow", 1.0), "clusters_found": ("clusters", 1.0), **ARI},
        seeds=3,
        quick=in_minutes(cells, flag={"gradient_epochs": 5}, **{**LIGHT, "rounds": 1, "eval_every": 1}),
        measure=measure,
        figure=figure,
    )


# ---------------------------------------------------------------------------------------- two other shifts


def _shifts() -> Recipe:
    base = changed(FASHION, {"clients": 40, "rounds": 10, "eval_every": 10, "examples_per_client": 300})
    columns = {
        "permuted labels": {"scenario": "label_permutation", "scenario_options": {"num_groups": 4}},
        "strong quantity skew": {"scenario": "label_groups", "scenario_options": {"rho": 0.2, "alpha": 0.1}},
    }
    rows = {
        "FLAG": {**FLAG, "clusters": 40},
        "FLAG, gradients only": {
            "method": "flag",
            "clusters": 40,
            "method_options": {**FLAG["method_options"], "beta": 0.0},
        },
        "PACFL": {"method": "pacfl", "clusters": 40, "method_options": {"threshold": PACFL_THRESHOLD}},
    }
    cells = grid(base, rows, columns)
    return Recipe(
        name="flag-shifts",
        title="FLAG: a concept shift that the data alone do not show, and quantities that blur the gradients",
        reading=(
            "Ours; the paper claims both (Secs. 1 and 4) without a table. Fashion-MNIST, 40 clients. Permuted labels: "
            "four groups hold the same images under different labels. Strong quantity skew: label groups with α′ = 0.1."
        ),
        cells=cells,
        metrics=ACCURACY_AND_CLUSTERS,
        seeds=3,
        quick=in_minutes(cells, flag={"gradient_epochs": 10}, **{**LIGHT, "rounds": 20, "eval_every": 20}),
        figure=against_paper(ARI),
    )


FLAG_PARAMETER_RECIPES = (
    _table_6(),
    _table_7(),
    _table_8(),
    _table_5(),
    _figure_1(),
    _shifts(),
)
