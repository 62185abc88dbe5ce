"""The experiments of CFL-GP (Kim, Kim, de Veciana, ICML 2024): Sec. 5, App. E, F, G."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from matplotlib.figure import Figure

from fedjax_cluster.algorithms.cfl_gp.profiles import client_features, estimate_clusters
from fedjax_cluster.experiments.config import RunConfig
from fedjax_cluster.experiments.recipe import Cell, Recipe, changed, grid
from fedjax_cluster.experiments.runs import Outcome
from fedjax_cluster.simulation.result import SimulationResult

NAN = float("nan")
ROUNDS = 200
EIGHT_ANGLES = (0, 15, 90, 105, 180, 195, 270, 285)
ACCURACY_AND_ARI = {"accuracy": ("accuracy (%)", 100.0), "adjusted_rand_index": ("ARI", 1.0)}

MNIST = RunConfig(
    method="cfl_gp",
    dataset="mnist",
    clients=32,
    clusters=4,
    rounds=ROUNDS,
    batch_size=64,
    learning_rate=0.1,
    eval_every=20,
    scenario_options={"angles": EIGHT_ANGLES, "groups": "pairs"},
)
METHODS: dict[str, dict[str, Any]] = {
    "CFL-GP": {"method": "cfl_gp", "method_options": {"every": 2, "stop_after": ROUNDS // 10}},
    "IFCA": {"method": "ifca", "method_options": {"score_on": "batch"}},
    "Global": {"method": "fedavg", "method_options": {"weighting": "uniform"}},
}
# NOTE: the paper sets no limit to the clusters of MADMO, which is CFL; ours has eight slots.
MADMO: dict[str, Any] = {
    "method": "cfl",
    "clusters": 8,
    "method_options": {"epsilon_1": 0.4, "epsilon_2": 1.6, "first_round": 5, "edge_coordinates": 1},
}
METHODS_AND_MADMO = {"CFL-GP": METHODS["CFL-GP"], "IFCA": METHODS["IFCA"], "MADMO": MADMO, "Global": METHODS["Global"]}
PROTOCOL = "Gradient averaging: one mini-batch gradient a round. IFCA chooses on the mini-batch that it then steps on."
WITH_MADMO = (
    "MADMO is CFL on these gradients, ε₁ 0.4, ε₂ 1.6, split after five rounds at the earliest, up to 8 clusters."
)
FULL_DATA = f"All 70 000 images are divided among the clients, as the table varies their number. {PROTOCOL}"


def _printed(values: Sequence[float], deviations: Sequence[float], agreement: float | None = None):
    """Accuracies as printed, and one ARI for all columns."""
    extra = {} if agreement is None else {"adjusted_rand_index": (agreement, 0.0)}
    return [{"accuracy": pair, **extra} for pair in zip(values, deviations, strict=True)]


def _sweep(x_label: str, metric: str, y_label: str, factor: float = 1.0, *, log_x: bool = False):
    """A figure of one metric against the columns, a line per row, the paper's values as hollow markers."""

    def figure(cells: Sequence[Cell], outcomes: Mapping[tuple[str, str], Outcome]) -> Figure:
        from fedjax_cluster.report import plots

        columns = list(dict.fromkeys(column for _, column in outcomes))
        rows = list(dict.fromkeys(row for row, _ in outcomes))
        x = [_number(column) for column in columns]
        series = {
            row: (
                [factor * outcomes[row, column].mean(metric) for column in columns],
                [factor * outcomes[row, column].std(metric) for column in columns],
            )
            for row in rows
        }
        printed = {row: values for row in rows if (values := _paper_values(cells, row, metric)) is not None}
        return plots.sweep(x, series, x_label=x_label, y_label=y_label, log_x=log_x, paper=printed)

    return figure


def _paper_values(cells: Sequence[Cell], row: str, metric: str) -> list[float] | None:
    """The paper's values of a row, NaN where it has none; None where it has none at all."""
    values = [cell.paper[metric][0] if metric in cell.paper else NAN for cell in cells if cell.row == row]
    return values if np.isfinite(values).any() else None


def _number(column: str) -> float:
    return float(column.rpartition("=")[2])


def _columns(name: str, field: str, values: Sequence[Any]) -> dict[str, dict[str, Any]]:
    return {f"{name}={value}": {field: value} for value in values}


def _quick(base: Mapping[str, Any], cells: tuple[Cell, ...], columns: Sequence[str]) -> tuple[Cell, ...]:
    """The chosen columns, shortened; no figures of the paper stand beside them."""
    return tuple(Cell(cell.row, cell.column, changed(cell.config, base)) for cell in cells if cell.column in columns)


def _table10() -> Recipe:
    cells = grid(
        MNIST,
        METHODS_AND_MADMO,
        _columns("C", "clients", (8, 16, 32, 64, 128)),
        {
            "CFL-GP": _printed((86.8, 87.2, 87.2, 87.2, 87.3), (0.35, 0.21, 0.18, 0.28, 0.24), 1.0),
            "IFCA": _printed((79.3, 82.8, 85.2, 85.4, 86.0), (2.62, 3.18, 2.85, 2.58, 2.28)),
            "MADMO": _printed((63.7, 69.6, 72.5, 76.4, 81.8), (4.02, 2.76, 2.17, 2.42, 2.20)),
            "Global": _printed((58.0, 58.3, 58.3, 58.3, 58.4), (0.45, 0.45, 0.37, 0.51, 0.38)),
        },
    )
    return Recipe(
        name="cfl-gp-table10",
        title="CFL-GP, Table 10: rotated MNIST, eight angles, K = 4, against the number of clients",
        reading=f"Neighbouring angles count as one group. {FULL_DATA} {WITH_MADMO}",
        cells=cells,
        metrics={**ACCURACY_AND_ARI, "first_round_of_ideal_agreement": ("first round at ARI 1", 1.0)},
        seeds=5,
        quick=_quick({"rounds": 40, "examples_per_client": 300}, cells, ("C=8", "C=32")),
        figure=_sweep("Number of clients", "accuracy", "Test accuracy (%)", 100.0),
    )


def _table9() -> Recipe:
    base = {"batch_size": 100, "scenario_options": {"angles": (0, 90, 180, 270), "groups": "angles"}}
    cells = grid(
        MNIST,
        {label: {**base, **changes} for label, changes in METHODS_AND_MADMO.items()},
        _columns("C", "clients", (20, 40, 80)),
        {
            "CFL-GP": _printed((88.81, 88.75, 88.67), (0.10, 0.16, 0.20), 1.0),
            "IFCA": [
                {"accuracy": pair, "adjusted_rand_index": agreement}
                for pair, agreement in (
                    ((86.44, 2.79), (0.87, 0.16)),
                    ((86.38, 2.84), (0.88, 0.15)),
                    ((86.16, 3.17), (0.88, 0.14)),
                )
            ],
            "MADMO": [
                {"accuracy": pair, "adjusted_rand_index": agreement}
                for pair, agreement in (
                    ((61.90, 1.42), (0.02, 0.07)),
                    ((65.64, 5.23), (0.20, 0.27)),
                    ((67.41, 6.54), (0.30, 0.26)),
                )
            ],
            "Global": _printed((61.20, 61.48, 61.23), (0.29, 0.09, 0.36), 0.0),
        },
    )
    return Recipe(
        name="cfl-gp-table9",
        title="CFL-GP, Table 9: rotated MNIST, four angles, b = 100, K = 4",
        reading=f"{FULL_DATA} {WITH_MADMO}",
        cells=cells,
        metrics=ACCURACY_AND_ARI,
        seeds=5,
        quick=_quick({"rounds": 40, "examples_per_client": 300}, cells, ("C=20",)),
        figure=_sweep("Number of clients", "accuracy", "Test accuracy (%)", 100.0),
    )


def _table11() -> Recipe:
    base = {
        "scenario": "mixed_datasets",
        "dataset": "mnist+fashion_mnist",
        "clusters": 5,
        "batch_size": 256,
        "scenario_options": {},
    }
    cells = grid(
        RunConfig(rounds=ROUNDS, learning_rate=0.1, eval_every=20, clients=32),
        {label: {**base, **changes} for label, changes in METHODS_AND_MADMO.items()},
        _columns("C", "clients", (32, 64)),
        {
            "CFL-GP": _printed((82.4, 82.8), (0.03, 0.30), 1.0),
            "IFCA": [
                {"accuracy": pair, "adjusted_rand_index": agreement}
                for pair, agreement in (
                    ((80.4, 1.12), (0.95, 0.04)),
                    ((78.2, 1.80), (0.84, 0.12)),
                )
            ],
            "MADMO": [
                {"accuracy": pair, "adjusted_rand_index": agreement}
                for pair, agreement in (
                    ((61.5, 1.68), (0.07, 0.10)),
                    ((67.9, 5.17), (0.36, 0.28)),
                )
            ],
            "Global": _printed((60.5, 60.8), (0.27, 0.23), 0.0),
        },
    )
    return Recipe(
        name="cfl-gp-table11",
        title="CFL-GP, Table 11: MNIST under eight rotations and Fashion-MNIST, b = 256",
        reading=(
            "The paper gives neither K nor the shares. Read as half of the clients MNIST, whose neighbouring angles "
            "count as one group, half Fashion-MNIST upright: five groups, K = 5; both data sets share ten outputs. "
            f"All 140 000 images are divided among the clients. {PROTOCOL} {WITH_MADMO}"
        ),
        cells=cells,
        metrics=ACCURACY_AND_ARI,
        seeds=3,
        quick=_quick({"rounds": 40, "examples_per_client": 300, "batch_size": 64}, cells, ("C=32",)),
        figure=_sweep("Number of clients", "accuracy", "Test accuracy (%)", 100.0),
    )


def _linear_regression() -> Recipe:
    base = RunConfig(
        scenario="linear_regression",
        model="linear",
        clients=12,
        clusters=3,
        rounds=ROUNDS,
        batch_size=10,
        learning_rate=0.1,
        eval_every=20,
        examples_per_client=500,
    )
    starts = {
        "start (i)": {"model_options": {"init_scale": 0.8, "zero_bias": True}},
        "start (ii)": {"model_options": {"init_scale": 1.6, "zero_bias": True}},
    }
    lines = {**MADMO, "method_options": {**MADMO["method_options"], "epsilon_1": 0.02, "epsilon_2": 0.6}}
    cells = grid(
        base,
        {**METHODS_AND_MADMO, "MADMO": lines},
        starts,
        {"CFL-GP": [{"test_loss": (0.04, NAN), "adjusted_rand_index": (1.0, NAN)}] * 2},
    )
    return Recipe(
        name="cfl-gp-linear-regression",
        title="CFL-GP, Fig. 1 and F.4: three straight lines at 20°, M = 12, b = 10",
        reading=(
            "The slope starts from U(±0.8) (i) or U(±1.6) (ii), the intercept from 0. The number of examples of a "
            "client is not given: 500. MADMO is CFL with ε₁ 0.02, ε₂ 0.6, split after five rounds at the earliest, up "
            "to 8 clusters. The paper shows curves; beside ours stand the values it states in the text."
        ),
        cells=cells,
        metrics={"adjusted_rand_index": ("ARI", 1.0), "test_loss": ("test loss", 1.0)},
        seeds=20,
        quick=_quick({}, cells, ("start (i)",)),
        figure=_bars("adjusted_rand_index", "ARI"),
    )


def _bars(metric: str, label: str) -> Callable[..., Figure]:
    def figure(cells: Sequence[Cell], outcomes: Mapping[tuple[str, str], Outcome]) -> Figure:
        from fedjax_cluster.report import plots

        rows = [
            (f"{row}, {column}", outcome.mean(metric), outcome.std(metric))
            for (row, column), outcome in outcomes.items()
        ]
        return plots.bars([row[0] for row in rows], [row[1] for row in rows], [row[2] for row in rows], label)

    return figure


def _compression() -> Recipe:
    ratios = (1, 10, 100, 1000, 10_000, 100_000)
    base = {
        "method": "cfl_gp",
        "clients": 80,
        "rounds": 21,
        "eval_every": 21,
        "batch_size": 100,
        "examples_per_client": 500,
        "scenario_options": {"angles": (0, 90, 180, 270), "groups": "angles"},
    }
    columns = {f"CR={ratio}": {"method_options": {"compression": ratio, "every": 1}} for ratio in ratios}
    times = (1, 10, 20)
    paper = [{f"ari_{time}": (1.0, NAN) for time in times} if ratio <= 1000 else {} for ratio in ratios]
    cells = grid(MNIST, {"CFL-GP": base}, columns, {"CFL-GP": paper})

    def measure(result: SimulationResult) -> dict[str, float]:
        return {f"ari_{time}": float(result.history["adjusted_rand_index"][time]) for time in times}

    def figure(cells: Sequence[Cell], outcomes: Mapping[tuple[str, str], Outcome]) -> Figure:
        from fedjax_cluster.report import plots

        series = {
            f"t = {time}": (
                [outcome.mean(f"ari_{time}") for outcome in outcomes.values()],
                [outcome.std(f"ari_{time}") for outcome in outcomes.values()],
            )
            for time in times
        }
        x = [_number(column) for _, column in outcomes]
        return plots.sweep(x, series, x_label="Compression ratio d/d̂", y_label="Adjusted Rand index", log_x=True)

    return Recipe(
        name="cfl-gp-compression",
        title="CFL-GP, Fig. 4: ARI against the compression of the profile",
        reading=(
            "80 clients, four angles, b = 100, 500 examples per client, clustering every round, so that the profiles "
            "after t = 1, 10 and 20 are the figure's; the paper states 1.0 up to a ratio of 10³."
        ),
        cells=cells,
        metrics={f"ari_{time}": (f"ARI at t={time}", 1.0) for time in times},
        seeds=5,
        quick=_quick({"clients": 20, "examples_per_client": 200}, cells, ("CR=1", "CR=1000")),
        measure=measure,
        figure=figure,
    )


def _table7() -> Recipe:
    base = {
        "method": "cfl_gp",
        "clients": 80,
        "batch_size": 100,
        "examples_per_client": 500,
        "scenario_options": {"angles": (0, 90, 180, 270), "groups": "angles"},
    }
    columns = {
        f"n_d={decimals}": {"method_options": {"decimals": decimals, "every": 2, "stop_after": ROUNDS // 10}}
        for decimals in (0, 1, 2, 3, 4)
    }
    paper = [
        {"accuracy": (accuracy, NAN), "adjusted_rand_index": (agreement, NAN)}
        for accuracy, agreement in ((10.0, 0.0), (16.8, 0.034), (87.3, 1.0), (88.7, 1.0), (88.7, 1.0))
    ]
    cells = grid(MNIST, {"CFL-GP": base}, columns, {"CFL-GP": paper})
    return Recipe(
        name="cfl-gp-table7",
        title="CFL-GP, Table 7: gradients rounded to n_d decimals",
        reading=(
            "All that a client sends is rounded to the nearest, as the accuracies show: zeroing the digits beyond, as "
            "the text has it, reaches 77.7 % at n_d = 2. 80 clients, four angles, b = 100; "
            "500 examples per client where the paper has 875."
        ),
        cells=cells,
        metrics=ACCURACY_AND_ARI,
        seeds=2,
        quick=_quick({"rounds": 40, "clients": 20}, cells, ("n_d=0", "n_d=2")),
        figure=_sweep("Decimals kept $n_d$", "adjusted_rand_index", "Adjusted Rand index"),
    )


def _unknown_clusters() -> Recipe:
    base = {"method": "cfl_gp", "rounds": 20, "eval_every": 20, "method_options": {"every": 1}}
    columns = {f"C={clients}": {"clients": clients} for clients in (16, 32, 64, 128)}
    cells = grid(
        MNIST,
        {"CFL-GP": base},
        columns,
        {"CFL-GP": [{"first_gap": (4, NAN), "second_gap": (8, NAN), "estimate": (4, NAN)}] * 4},
    )

    def measure(result: SimulationResult) -> dict[str, Any]:
        found = estimate_clusters(jax.random.key(result.summary["seed"]), result.state, 10)
        first, second = found.candidates[:2]
        return {
            "first_gap": first,
            "second_gap": second,
            "estimate": found.num_clusters,
            "singular_values": np.asarray(client_features(result.state, 16)[1]).tolist(),
        }

    def figure(cells: Sequence[Cell], outcomes: Mapping[tuple[str, str], Outcome]) -> Figure:
        from fedjax_cluster.report import plots

        outcome = list(outcomes.values())[-1]
        return plots.singular_values(np.asarray([summary["singular_values"] for summary in outcome.summaries]).mean(0))

    return Recipe(
        name="cfl-gp-unknown-k",
        title="CFL-GP, App. G, Figs. 19 and 20: the number of clusters from the profiles' singular values",
        reading=(
            "Eight angles, 20 rounds with K = 4 models, all 70 000 images divided among the clients; profiles are "
            "updated every round (with P = 2 the eight directions have not risen from the noise by then). The largest "
            "gap gives s, the largest beyond it the next s; features in s dimensions give K."
        ),
        cells=cells,
        metrics={
            "first_gap": ("largest gap after", 1.0),
            "second_gap": ("next gap after", 1.0),
            "estimate": ("estimated K", 1.0),
        },
        seeds=3,
        quick=_quick({"examples_per_client": 300}, cells, ("C=16",)),
        measure=measure,
        figure=figure,
    )


def _batch_size() -> Recipe:
    cells = grid(
        MNIST,
        METHODS,
        _columns("b", "batch_size", (32, 64, 128, 256)),
        {"CFL-GP": [{"adjusted_rand_index": (1.0, NAN)}] * 4},
    )
    return Recipe(
        name="cfl-gp-batch-size",
        title="CFL-GP, Figs. 2 and 11, Table 3: rotated MNIST, C = 32, against the batch size",
        reading=f"Neighbouring angles count as one group. {FULL_DATA}",
        cells=cells,
        metrics={**ACCURACY_AND_ARI, "first_round_of_ideal_agreement": ("first round at ARI 1", 1.0)},
        seeds=2,
        quick=_quick({"rounds": 40, "examples_per_client": 300}, cells, ("b=64",)),
        figure=_sweep("Batch size", "adjusted_rand_index", "Adjusted Rand index"),
    )


def _mixture() -> Recipe:
    base = {
        "scenario": "mixture",
        "clients": 12,
        "clusters": 3,
        "rounds": 400,
        "examples_per_client": 500,
        "scenario_options": {},
    }
    methods = {label: {**base, **changes} for label, changes in METHODS.items()}
    methods["CFL-GP"]["method_options"] = {"every": 2}
    cells = grid(
        RunConfig(dataset="mnist", batch_size=64, learning_rate=0.1, eval_every=40, clients=12, clusters=3),
        methods,
        {f"κ={kappa}": {"scenario_options": {"kappa": kappa}} for kappa in (0.1, 0.3, 0.5, 0.7, 0.9)},
    )
    return Recipe(
        name="cfl-gp-mixture",
        title="CFL-GP, Fig. 3: two rotations and their mixture, against the mixture ratio",
        reading="M = 12, K = 3, T = 400, clustering throughout (F.5.2); 500 examples per client.",
        cells=cells,
        metrics=ACCURACY_AND_ARI,
        seeds=3,
        quick=_quick({"rounds": 40}, cells, ("κ=0.5",)),
        figure=_sweep("Mixture ratio κ", "adjusted_rand_index", "Adjusted Rand index"),
    )


CFL_GP_RECIPES = (
    _table10(),
    _table9(),
    _table11(),
    _linear_regression(),
    _compression(),
    _table7(),
    _unknown_clusters(),
    _batch_size(),
    _mixture(),
)
