"""The experiments of FLAG against its baselines: Tables 2 and 3 in several sizes; what its other recipes share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from fedjax_cluster.algorithms import REGISTRY
from fedjax_cluster.experiments.config import RunConfig
from fedjax_cluster.experiments.recipe import Cell, Recipe, Row, changed, grid
from fedjax_cluster.experiments.runs import Outcome
from fedjax_cluster.simulation.result import SimulationResult

NAN = float("nan")
ACCURACY = {"accuracy": ("accuracy (%)", 100.0)}
ACCURACY_AND_ARI = {**ACCURACY, "adjusted_rand_index": ("ARI", 1.0)}
ACCURACY_AND_CLUSTERS = {**ACCURACY_AND_ARI, "num_clusters": ("clusters", 1.0)}

FASHION = RunConfig(
    method="flag",
    scenario="label_groups",
    dataset="fashion_mnist",
    model="lenet5",
    clients=100,
    clusters=20,
    rounds=60,
    batch_size=10,
    learning_rate=0.01,
    momentum=0.5,
    local_epochs=5,
    participation=0.2,
    eval_every=10,
    scenario_options={"rho": 0.2, "alpha": 1.0},
)
READING = (
    "Fashion-MNIST: all 70 000 images are divided among 100 clients in five groups, 20 % of them a round; rates, "
    "momentum and the number of groups are not given: SGD 0.01 with momentum 0.5. 60 rounds of 5 local epochs where "
    "the paper has 200 of 10. FLAG's elbow is that of the accuracy over the logarithm of the number of clusters, ours."
)
# What fits minutes: 210 training rows a client, and a larger step for the fewer steps.
SHORT: dict[str, Any] = {
    "rounds": 20,
    "local_epochs": 2,
    "learning_rate": 0.03,
    "examples_per_client": 300,
    "eval_every": 5,
}
LIGHT: dict[str, Any] = {**SHORT, "rounds": 60, "eval_every": 20, "model": "mlp", "model_options": {"hidden": (64,)}}
LIGHT_READING = (
    "Shortened to a hidden layer of 64, 210 training rows a client, 60 rounds of 2 local epochs at rate 0.03, t_g = 5; "
    "--full has LeNet-5, all images, the paper's t_g and 5 local epochs."
)
# The search keeps the paper's ten local epochs where training has fewer: with two its curve is noisy.
FLAG: dict[str, Any] = {
    "method": "flag",
    "method_options": {"gradient_epochs": 20, "search_epochs": 10, "elbow": "log-clusters", "newcomers": False},
}


def table_rows() -> dict[str, dict[str, Any]]:
    """The tables' rows, those that there are; CFL, FLAG and PACFL find the number of clusters, the others are told."""
    every: dict[str, dict[str, Any]] = {
        "FedAvg": {"method": "fedavg"},
        "FedProx": {"method": "fedprox"},
        "Per-FedAvg": {"method": "per_fedavg"},
        "Per-FedAvg, 40 steps": {"method": "per_fedavg", "method_options": {"fine_tuning_steps": 40}},
        "FedSoft": {"method": "fedsoft", "clusters": 5},
        "PACFL": {"method": "pacfl", "clusters": 100, "method_options": {"threshold": PACFL_THRESHOLD}},
        "CFL": {"method": "cfl", "method_options": {"first_round": 4}},
        "IFCA": {"method": "ifca", "clusters": 5},
        "FLAG": FLAG,
    }
    return {label: changes for label, changes in every.items() if changes["method"] in REGISTRY}


# Degrees; PACFL's threshold depends on the data and is not given.
PACFL_THRESHOLD = 5.0


def _columns(cases: Sequence[tuple[int, float]]) -> dict[str, dict[str, Any]]:
    return {
        f"ρ={rho} %, α′={alpha:g}": {"scenario_options": {"rho": rho / 100, "alpha": alpha}} for rho, alpha in cases
    }


def accuracies(values: Sequence[float], deviations: Sequence[float] | None = None) -> list[dict[str, Any]]:
    spreads = [NAN] * len(values) if deviations is None else deviations
    return [{"accuracy": pair} for pair in zip(values, spreads, strict=True)]


def against_paper(metrics: Mapping[str, tuple[str, float]]) -> Callable[..., Figure]:
    """Ours beside the paper's: a panel per metric, a band per column, a colour per row."""

    def figure(cells: Sequence[Cell], outcomes: Mapping[tuple[str, str], Outcome]) -> Figure:
        from fedjax_cluster.report import plots

        rows = []
        for cell in cells:
            outcome = outcomes[cell.row, cell.column]
            for name, (heading, factor) in metrics.items():
                paper, spread = cell.paper.get(name, (NAN, NAN))
                ours = factor * outcome.mean(name), factor * outcome.std(name)
                rows.append(Row(cell.row, cell.column, heading, *ours, paper, spread))
        return plots.bars_against_paper(rows)

    return figure


def in_minutes(
    cells: Sequence[Cell],
    columns: Sequence[str] | None = None,
    *,
    flag: Mapping[str, Any] | None = None,
    **changes: Any,
) -> tuple[Cell, ...]:
    """The chosen columns in minutes, the paper's values beside them; `flag` are options of FLAG alone."""

    def smaller(config: RunConfig) -> RunConfig:
        options = {"method_options": flag} if flag and config.method == "flag" else {}
        return changed(config, {**changes, **options})

    return tuple(
        Cell(cell.row, cell.column, smaller(cell.config), cell.paper)
        for cell in cells
        if columns is None or cell.column in columns
    )


# ------------------------------------------------------------------------------------------- Tables 2, 3


def _tables_2_3() -> Recipe:
    cases = ((20, 1.0), (30, 1.0), (20, 0.25), (30, 0.25))
    paper = {
        "FedAvg": accuracies((57.12, 77.56, 53.11, 72.86), (0.30, 0.24, 0.31, 0.40)),
        "FedProx": accuracies((56.81, 73.87, 53.61, 68.22), (0.16, 0.25, 0.20, 0.16)),
        "Per-FedAvg": accuracies((91.18, 94.74, 86.51, 89.77), (0.21, 0.17, 0.19, 0.15)),
        "FedSoft": accuracies((87.64, 89.56, 84.58, 85.15), (0.35, 0.37, 0.14, 0.17)),
        "PACFL": accuracies((94.41, 97.28, 91.90, 91.96), (0.31, 0.24, 0.47, 0.25)),
        "CFL": accuracies((86.97, 85.67, 81.90, 80.64), (0.23, 0.23, 0.10, 0.21)),
        "IFCA": accuracies((94.02, 96.61, 90.93, 91.50), (0.09, 0.14, 0.17, 0.11)),
        "FLAG": accuracies((96.36, 97.71, 93.19, 92.42), (0.13, 0.05, 0.20, 0.04)),
    }
    cells = grid(FASHION, table_rows(), _columns(cases), paper)
    return Recipe(
        name="flag-tables-2-3",
        title="FLAG, Tables 2 and 3: label groups with quantity shift, against the baselines",
        reading=(
            f"{READING} IFCA and FedSoft are told that there are five clusters; PACFL merges up to 5°, which fits the "
            "first column's true groups. Per-FedAvg's own paper personalises by one gradient step; 40 are shown too. "
            "At ρ = 30 % five disjoint groups do not fit ten labels: their sets are drawn at random and overlap, and "
            "with α′ = 0.25 some clients hold only labels that fit several groups. Which labels are drawn decides how "
            f"hard a column is. The search trains 10 local epochs. {LIGHT_READING}"
        ),
        cells=(light := in_minutes(cells, flag={"gradient_epochs": 5}, **LIGHT)),
        metrics=ACCURACY_AND_CLUSTERS,
        seeds=2,
        quick=in_minutes(light, ("ρ=20 %, α′=1",), rounds=20),
        full=cells,
        figure=against_paper(ACCURACY),
    )


def _disjoint() -> Recipe:
    columns = {
        name: {**changes, "scenario_options": {**changes["scenario_options"], "num_groups": 3}}
        for name, changes in _columns(((30, 1.0), (30, 0.25))).items()
    }
    told = {
        label: {**changes, "clusters": 3} if changes.get("clusters") == 5 else changes
        for label, changes in table_rows().items()
    }
    overlapping = {(cell.row, cell.column): cell.paper for cell in _tables_2_3().full}
    cells = grid(FASHION, told, columns, {row: [overlapping[row, column] for column in columns] for row in told})
    return Recipe(
        name="flag-disjoint",
        title="FLAG, Tables 2 and 3 at ρ = 30 % with three groups, whose labels do not overlap",
        reading=(
            "The paper gives neither the number of groups nor whether they share labels; with three groups of three "
            "labels there is, unlike with five, a right answer for every client. IFCA and FedSoft are told that there "
            f"are three clusters. {READING.replace('five groups', 'three groups')} {LIGHT_READING}"
        ),
        cells=(light := in_minutes(cells, flag={"gradient_epochs": 5}, **LIGHT)),
        metrics=ACCURACY_AND_CLUSTERS,
        seeds=2,
        quick=in_minutes(light, ("ρ=30 %, α′=1",), rounds=20),
        full=cells,
        figure=against_paper(ACCURACY),
    )


def _evaluation() -> Recipe:
    cases = ((20, 1.0), (30, 1.0), (30, 0.25))
    columns = {
        f"{name}, {tests}": {"scenario_options": {**changes["scenario_options"], **options}}
        for name, changes in _columns(cases).items()
        for tests, options in (("own", {}), ("by label", {"tests_per_label": 100}))
    }
    names = ("FedAvg", "Per-FedAvg", "Per-FedAvg, 40 steps", "PACFL", "IFCA", "FLAG")
    cells = grid(FASHION, {name: row for name, row in table_rows().items() if name in names}, columns)
    return Recipe(
        name="flag-evaluation",
        title="FLAG: local test accuracy on a client's own test rows, and on as many rows of each of its labels",
        reading=(
            "Ours. The paper does not say what a client is tested on. On its own rows labels are as rare as in its "
            "training, which favours methods that adapt to a client; PACFL's public code, whose setting the paper "
            "takes over, tests on all test images of a client's labels, here 100 of each. "
            f"{READING} {LIGHT_READING}"
        ),
        cells=(light := in_minutes(cells, flag={"gradient_epochs": 5}, **LIGHT)),
        metrics=ACCURACY_AND_ARI,
        seeds=1,
        quick=in_minutes(light, [column for column in columns if "30 %, α′=1," in column], rounds=20),
        full=cells,
        figure=against_paper(ACCURACY),
    )


def _lenet() -> Recipe:
    cells = (
        *(cell for cell in _tables_2_3().full if cell.column.startswith("ρ=20 %")),
        *_disjoint().full,
    )
    return Recipe(
        name="flag-lenet5",
        title="FLAG, Tables 2 and 3 with LeNet-5, shortened",
        reading=(
            f"{READING} At ρ = 30 % three groups, whose labels do not overlap, and of whose number IFCA and FedSoft "
            "are told. Shortened to 210 training rows a client, 20 rounds of 2 local epochs at rate 0.03, t_g = 5."
        ),
        cells=(light := in_minutes(cells, flag={"gradient_epochs": 5}, **SHORT)),
        full=cells,
        metrics=ACCURACY_AND_CLUSTERS,
        seeds=1,
        quick=in_minutes([cell for cell in light if cell.row in ("FedAvg", "FLAG")], ("ρ=20 %, α′=1",), rounds=10),
        figure=against_paper(ACCURACY),
    )


# Their papers take the plain mean of the clients; FedAvg, FedProx, PACFL and FLAG weigh by examples by themselves,
# and FedSoft draws by them.
PLAIN_MEANS = ("cfl", "ifca", "per_fedavg")
LATE, EVALUATED = 4, 5  # evaluations, and rounds from one to the next
LATE_ACCURACY = {"late_accuracy": (f"accuracy, mean of the last {LATE} evaluations (%)", 100.0)}


def _late_accuracy(result: SimulationResult) -> dict[str, float]:
    evaluated = np.flatnonzero((result.history["round"] + 1) % EVALUATED == 0)[-LATE:]
    return {"late_accuracy": float(np.mean(result.history["accuracy"][evaluated]))}


def _lenet_by_label() -> Recipe:
    rounds = {1.0: 60, 0.25: 100}

    def by_label(cell: Cell, **changes: Any) -> Cell:
        options: dict[str, Any] = {"tests_per_label": 100}
        changes = {**changes, "scenario_options": {**cell.config.scenario_options, **options}, "eval_every": EVALUATED}
        if cell.config.method in PLAIN_MEANS:
            changes["method_options"] = {"weighting": "examples"}
        elif cell.config.method == "flag":
            changes["method_options"] = {"search_rounds": 15}
        paper = {"late_accuracy": cell.paper["accuracy"]}
        return Cell(cell.row, cell.column, changed(cell.config, changes), paper)

    def longer(cell: Cell) -> Cell:
        return by_label(cell, rounds=rounds[float(str(cell.config.scenario_options["alpha"]))])

    base = _lenet()
    return Recipe(
        name="flag-lenet5-by-label",
        title="FLAG, Tables 2 and 3 with LeNet-5, tested on as many rows of each label",
        reading=(
            f"{READING} At ρ = 30 % three groups, as in flag-lenet5. Tested on 100 rows of each of a client's labels, "
            "as PACFL's public code does, whose setting the paper takes over: on a client's own rows, mostly of one "
            "or two labels at α′ = 0.25, methods that adapt to a client are ahead. Shortened to 210 training rows a "
            "client, 60 rounds (α′ = 1) and 100 (0.25) of 2 local epochs at rate 0.03, t_g = 5; the search has 15 "
            "rounds where the paper has 5, whose clients have three times the rows. All means are by examples, as "
            "FLAG's is (Eq. 8): IFCA, CFL and Per-FedAvg have plain ones of their own, CFL's in its test for a split "
            "too; FedSoft draws clients by examples. With clients of such different sizes accuracy moves by points "
            f"from round to round: the mean of the last {LATE} evaluations, one in five rounds, is shown (in --quick "
            "there are two). Per-FedAvg takes its paper's single step."
        ),
        cells=tuple(longer(cell) for cell in base.cells if "40 steps" not in cell.row),
        full=tuple(by_label(cell) for cell in base.full if "40 steps" not in cell.row),
        metrics={**LATE_ACCURACY, **ACCURACY_AND_CLUSTERS},
        measure=_late_accuracy,
        seeds=1,
        quick=tuple(map(by_label, base.quick)),
        figure=against_paper(LATE_ACCURACY),
    )


FLAG_RECIPES = (
    _tables_2_3(),
    _disjoint(),
    _evaluation(),
    _lenet(),
    _lenet_by_label(),
)
