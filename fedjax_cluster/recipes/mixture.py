"""Clients that belong to several models at once, where groups are clear: CFL-GP beside FedEM (its App. F.2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from fedjax_cluster.experiments.config import RunConfig
from fedjax_cluster.experiments.recipe import Cell, Recipe, changed, grid
from fedjax_cluster.experiments.runs import Outcome
from fedjax_cluster.simulation.result import SimulationResult

ROUNDS = 200
EXAMPLES = 1000

MNIST = RunConfig(
    method="cfl_gp",
    dataset="mnist",
    clients=20,
    clusters=4,
    rounds=ROUNDS,
    batch_size=100,
    learning_rate=0.1,
    eval_every=10,
    examples_per_client=EXAMPLES,
    scenario_options={"angles": (0, 90, 180, 270), "groups": "angles"},
)
METHODS: dict[str, dict[str, Any]] = {
    "CFL-GP": {"method": "cfl_gp", "method_options": {"every": 2, "stop_after": ROUNDS // 10}},
    "IFCA": {"method": "ifca", "method_options": {"score_on": "batch"}},
    "FedEM": {"method": "fedem"},
    "FedSoft": {"method": "fedsoft", "local_steps": 1},
    "Global": {"method": "fedavg", "method_options": {"weighting": "uniform"}},
}


def _table8() -> Recipe:
    cells = grid(
        MNIST,
        METHODS,
        {"C=20": {"clients": 20}},
        {
            "CFL-GP": [{"accuracy": (88.81, 0.10), "adjusted_rand_index": (1.0, 0.0)}],
            "IFCA": [{"accuracy": (86.44, 2.79), "adjusted_rand_index": (0.87, 0.16)}],
            "FedEM": [{"accuracy": (76.94, 3.47), "adjusted_rand_index": (0.0, 0.01)}],
            "Global": [{"accuracy": (61.20, 0.29), "adjusted_rand_index": (0.0, 0.0)}],
        },
    )
    return Recipe(
        name="mixture-weights",
        title="CFL-GP, Tables 8 and 9: do mixture weights find the groups? Rotated MNIST, four angles, b = 100, K = 4",
        reading=(
            "Clients belong to the model of their largest weight, as in the paper. Every method sends one mini-batch "
            "gradient a round, FedEM one for each of its models, weighted by the responsibilities of a whole pass over "
            "the client's data; FedSoft, which is not in the paper's table, takes one step on each client's own model. "
            f"{EXAMPLES} examples per client in place of 3 500."
        ),
        cells=cells,
        metrics={
            "accuracy": ("accuracy (%)", 100.0),
            "adjusted_rand_index": ("ARI", 1.0),
            "best_agreement": ("best ARI of any round", 1.0),
            "largest_weight": ("mean largest weight", 1.0),
        },
        seeds=3,
        quick=tuple(
            Cell(cell.row, cell.column, changed(cell.config, {"rounds": 60, "examples_per_client": 200}))
            for cell in cells
            if cell.row != "Global"
        ),
        measure=_measure,
        figure=_learning_curves,
    )


def _measure(result: SimulationResult) -> Mapping[str, Any]:
    weights = np.asarray(result.state.clients.membership)[np.asarray(result.state.clients.present)]
    return {
        "best_agreement": float(np.nanmax(result.history["adjusted_rand_index"])),
        "largest_weight": float(weights.max(1).mean()),
    }


def _learning_curves(cells: Sequence[Cell], outcomes: Mapping[tuple[str, str], Outcome]) -> Figure:
    from fedjax_cluster.report import plots

    return plots.learning_curves({row: outcome.histories for (row, _), outcome in outcomes.items()})


MIXTURE_RECIPES = (_table8(),)
