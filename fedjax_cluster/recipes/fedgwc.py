"""Recipes: the tables of FedGWC (Licciardi et al., ICML 2025) on MNIST and Fashion-MNIST."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from fedjax_cluster.clustering import scores
from fedjax_cluster.experiments.config import RunConfig
from fedjax_cluster.experiments.recipe import Cell, Recipe, changed, grid
from fedjax_cluster.experiments.runs import Outcome
from fedjax_cluster.simulation.result import SimulationResult
from fedjax_cluster.types import Federation

NAN = float("nan")
ROUNDS = 1500
TRAINING = (
    "100 clients of 500 training and 100 test images, one tenth of each cluster in a round, 7 steps of 64 at rate "
    "0.01, weight decay 4·10⁻⁴, a network with 32 hidden units. The paper has CIFAR-100, a CNN and 20 000 rounds."
)
BASE = RunConfig(
    method="fedgwc",
    dataset="mnist",
    model="mlp",
    model_options={"hidden": (32,)},
    clients=100,
    clusters=4,
    rounds=ROUNDS,
    batch_size=64,
    learning_rate=0.01,
    local_steps=7,
    weight_decay=4e-4,
    participation=0.1,
    examples_per_client=600,
    test_fraction=1 / 6,
    eval_every=250,
)
CENTRED = {"rate": "count", "centre": True}


def class_counts(federation: Federation) -> np.ndarray:
    """Training examples of each class, i32[M, L]."""
    labels, number = np.asarray(federation.train.y), np.asarray(federation.train.num_examples)
    classes = federation.info.num_classes
    return np.stack([np.bincount(own[:count], minlength=classes) for own, count in zip(labels, number, strict=True)])


def cluster_scores(result: SimulationResult) -> Mapping[str, Any]:
    """Rand index against the true groups, and the Wasserstein-adjusted scores; NaN where there is one cluster."""
    labels, group = result.labels, result.federation.group
    counts = class_counts(result.federation)
    return {
        "rand_index": NAN if group is None else float(scores.rand_index(labels, group)),
        "was": float(scores.wasserstein_adjusted_silhouette(counts, labels)),
        "wadb": float(scores.wasserstein_adjusted_davies_bouldin(counts, labels)),
        "first_split": int(result.events[0].round) if result.events else NAN,
    }


def _bars(metric: str, label: str) -> Callable[..., Figure]:
    def figure(cells: Sequence[Cell], outcomes: Mapping[tuple[str, str], Outcome]) -> Figure:
        from fedjax_cluster.report import plots

        names = [f"{row}, {column}" if column else row for row, column in outcomes]
        means = [outcome.mean(metric) for outcome in outcomes.values()]
        return plots.bars(names, means, [outcome.std(metric) for outcome in outcomes.values()], label)

    return figure


def _rows(clusters: int) -> dict[str, dict[str, Any]]:
    """FedGWC by its three estimators of the interactions, and the baselines with the true number of clusters."""
    return {
        "FedGWC, counted rate, centred (ours)": {"method_options": CENTRED},
        "FedGWC, counted rate (ours)": {"method_options": {"rate": "count"}},
        "FedGWC, constant rate (paper)": {"method_options": {}},
        "IFCA": {"method": "ifca", "clusters": clusters},
        "FeSEM": {"method": "fesem", "clusters": clusters},
    }


def _only(cells: Sequence[Cell], rows: Sequence[str], columns: Sequence[str], changes: Mapping[str, Any]):
    return tuple(
        Cell(cell.row, cell.column, changed(cell.config, changes))
        for cell in cells
        if cell.row in rows and cell.column in columns
    )


def _domains() -> Recipe:
    base = changed(BASE, {"scenario": "domains", "rounds": 1200})
    columns = {}
    for dataset, name in (("mnist", "MNIST"), ("fashion_mnist", "Fashion-MNIST")):
        columns[f"{name} blur"] = {"dataset": dataset, "scenario_options": {"shares": (50, 0, 50)}}
        columns[f"{name} noise"] = {"dataset": dataset, "scenario_options": {"shares": (50, 50, 0)}}
    printed = {
        "FedGWC, constant rate (paper)": [{"rand_index": (1.0, 0.0), "num_clusters": (2, 0.0)}] * 4,
        "IFCA": [{"rand_index": (0.5, 0.0)}] * 4,
        "FeSEM": [{"rand_index": (0.51, 0.1)}, {"rand_index": (0.49, 0.2)}] * 2,
    }
    cells = grid(base, _rows(2), columns, printed)
    return Recipe(
        name="fedgwc-domains",
        title="FedGWC, Table 4, rows 1 and 2: clean clients among blurred or noisy ones",
        reading=f"Gaussian blur of 4 pixels, noise of twice the grey range. {TRAINING}",
        cells=cells,
        metrics=DOMAIN_METRICS,
        seeds=5,
        quick=_only(cells, tuple(_rows(2))[:1], ("MNIST blur",), {"rounds": 900}),
        measure=cluster_scores,
        figure=_bars("rand_index", "Rand index"),
    )


DOMAIN_METRICS = {
    "rand_index": ("Rand index", 1.0),
    "num_clusters": ("clusters", 1.0),
    "first_split": ("first split", 1.0),
    "balanced_accuracy": ("balanced accuracy (%)", 100.0),
}


def _three_domains() -> Recipe:
    base = changed(BASE, {"scenario": "domains", "scenario_options": {"shares": (40, 30, 30)}})
    columns = {"MNIST": {"dataset": "mnist"}, "Fashion-MNIST": {"dataset": "fashion_mnist"}}
    printed = {
        "FedGWC, constant rate (paper)": [{"rand_index": (0.6, 0.0), "num_clusters": (4, 0.0)}] * 2,
        "IFCA": [{"rand_index": (0.33, 0.0)}] * 2,
        "FeSEM": [{"rand_index": (0.55, 0.0)}] * 2,
    }
    cells = grid(base, _rows(3), columns, printed)
    return Recipe(
        name="fedgwc-three-domains",
        title="FedGWC, Table 4, row 3: 40 clean, 30 noisy and 30 blurred clients",
        reading=f"Gaussian blur of 4 pixels, noise of twice the grey range. {TRAINING}",
        cells=cells,
        metrics=DOMAIN_METRICS,
        seeds=3,
        quick=_only(cells, tuple(_rows(3))[:1], ("MNIST",), {}),
        measure=cluster_scores,
        figure=_bars("rand_index", "Rand index"),
    )


def _homogeneous() -> Recipe:
    base = changed(BASE, {"scenario": "dirichlet", "scenario_options": {"client_sizes": "equal"}})
    columns = {f"alpha={alpha}": {"scenario_options": {"alpha": float(alpha)}} for alpha in (100, 1000)}
    rows = {name: own for name, own in _rows(2).items() if name.startswith("FedGWC")}
    cells = grid(base, rows, columns, {"FedGWC, constant rate (paper)": [{"num_clusters": (1, 0.0)}] * 2})
    return Recipe(
        name="fedgwc-homogeneous",
        title="FedGWC, Fig. 6: homogeneous clients are not split",
        reading=f"MNIST, Dirichlet over classes with equal client sizes. {TRAINING}",
        cells=cells,
        metrics={"num_clusters": ("clusters", 1.0), "balanced_accuracy": ("balanced accuracy (%)", 100.0)},
        seeds=5,
        quick=_only(cells, tuple(rows)[:1], ("alpha=100",), {"rounds": 900}),
        measure=cluster_scores,
        figure=_bars("num_clusters", "Clusters"),
    )


def _levels() -> Recipe:
    base = changed(BASE, {"scenario": "heterogeneity_levels", "dataset": "fashion_mnist", "examples_per_client": 480})
    columns = {
        "(10, 90, 0)": {"scenario_options": {"shares": (10, 90, 0)}},
        "(40, 30, 30)": {"scenario_options": {"shares": (40, 30, 30)}},
    }
    printed = {
        "FedGWC, constant rate (paper)": _adjusted((0.4, 0.1, 6.4, 2.0), (0.4, 0.2, 0.9, 0.1)),
        "IFCA": _adjusted((-0.0, 0.0, 5.6, 1.5), (-0.2, 0.0, 1.0, 0.0)),
        "FeSEM": _adjusted((0.2, 0.1, 12.0, 2.0), (-0.2, 0.0, 33.2, 0.0)),
    }
    cells = grid(base, _rows(3), columns, printed)
    return Recipe(
        name="fedgwc-levels",
        title="FedGWC, Table 3: clients of different heterogeneity, (homogeneous, heterogeneous, extreme)",
        reading=f"Fashion-MNIST, α = 1000, 0.05 and 0; 400 training images a client. {TRAINING}",
        cells=cells,
        metrics={
            "was": ("WAS", 1.0),
            "wadb": ("WADB", 1.0),
            "rand_index": ("Rand index", 1.0),
            "num_clusters": ("clusters", 1.0),
        },
        seeds=3,
        quick=_only(cells, tuple(_rows(3))[1:2], ("(10, 90, 0)",), {"rounds": 900}),
        measure=cluster_scores,
        figure=_bars("was", "Wasserstein-adjusted silhouette"),
    )


def _adjusted(*columns: tuple[float, float, float, float]) -> list[dict[str, tuple[float, float]]]:
    return [{"was": (was, was_std), "wadb": (wadb, wadb_std)} for was, was_std, wadb, wadb_std in columns]


def _aggregations() -> Recipe:
    base = changed(
        BASE,
        {
            "scenario": "dirichlet",
            "dataset": "fashion_mnist",
            "scenario_options": {"alpha": 0.05, "client_sizes": "equal"},
        },
    )
    base = changed(base, {"examples_per_client": 480})
    methods = {
        "FedAvg": ({"method": "fedavg"}, {}),
        "FedAvgM": ({"method": "fedavgm"}, {"server_momentum": 0.9}),
        "FedProx": ({"method": "fedprox", "method_options": {"proximal": 0.01}}, {"proximal": 0.01}),
    }
    printed = {
        "FedAvg": ((41.6, 1.3), (53.4, 0.4)),
        "FedAvgM": ((41.5, 0.5), (50.5, 0.3)),
        "FedProx": ((41.8, 1.0), (49.1, 1.0)),
    }
    cells = []
    for name, (alone, inside) in methods.items():
        options = {**INSIDE, **inside}
        for column, changes, paper in zip(
            ("No clusters", "FedGWC"),
            (alone, {"method_options": options}),
            printed[name],
            strict=True,
        ):
            # Table 9 is on CIFAR-100: only its shape can be compared.
            cells.append(
                Cell(name, column, changed(base, changes), {"balanced_accuracy": (paper[0] / 100, paper[1] / 100)})
            )
    return Recipe(
        name="fedgwc-aggregations",
        title="FedGWC, Table 9: aggregations alone and inside FedGWC",
        reading=f"Fashion-MNIST, Dirichlet 0.05, 400 training images a client; the paper's is CIFAR-100. {TRAINING}",
        cells=tuple(cells),
        metrics={"balanced_accuracy": ("balanced accuracy (%)", 100.0), "num_clusters": ("clusters", 1.0)},
        seeds=3,
        quick=_only(cells, ("FedAvg",), ("No clusters", "FedGWC"), {"rounds": 900}),
        measure=cluster_scores,
        figure=_bars("balanced_accuracy", "Balanced accuracy"),
    )


INSIDE = {"rate": "count", "tolerance": 3e-5}
FEDGWC_RECIPES = (_domains(), _three_domains(), _homogeneous(), _levels(), _aggregations())
