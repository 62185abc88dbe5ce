"""The experiments of FedGWC (Licciardi et al., ICML 2025) on MNIST and Fashion-MNIST: Tables 3, 4, 9, Fig. 6."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

from fedjax_cluster.clustering import scores
from fedjax_cluster.experiments.cells import Changes, changed, grid, headings, printed, shortened, varied
from fedjax_cluster.experiments.config import RunConfig
from fedjax_cluster.experiments.recipe import of_cells, table
from fedjax_cluster.recipes import figures
from fedjax_cluster.report.paper_rows import NAN
from fedjax_cluster.simulation.result import SimulationResult
from fedjax_cluster.types import Event, Federation

CLIENTS = (
    "100 clients of 500 training and 100 test images, one tenth of each cluster in a round, 7 steps of 64 at rate "
    "0.01, weight decay 4·10⁻⁴, a network with 32 hidden units."
)
TRAINING = f"{CLIENTS} The paper has CIFAR-100, a CNN and 20 000 rounds."
BASE = RunConfig(
    method="fedgwc",
    dataset="mnist",
    model="mlp",
    model_options={"hidden": (32,)},
    clients=100,
    clusters=4,
    rounds=1500,
    batch_size=64,
    learning_rate=0.01,
    local_steps=7,
    weight_decay=4e-4,
    participation=0.1,
    examples_per_client=600,
    test_fraction=1 / 6,
    eval_every=250,
)
CENTRED = "FedGWC, counted rate, centred (ours)"
COUNTED = "FedGWC, counted rate (ours)"
CONSTANT = "FedGWC, constant rate (paper)"
# FedGWC by its three estimators of the interactions.
ESTIMATORS = {
    CENTRED: {"method_options": {"rate": "count", "centre": True}},
    COUNTED: {"method_options": {"rate": "count", "centre": False}},
    CONSTANT: {"method_options": {"rate": "participation"}},
}
COLUMNS = "FedGWC, constant rate, by columns of P"
RELEASED = "FedGWC, as released"
# How the paper's constant rate is read: what tells clients apart, and where the public code differs.
READINGS = {
    COLUMNS: {"method_options": {"rate": "participation", "perceived": "columns"}},
    RELEASED: {"method_options": {"rate": "participation", "variant": "released"}},
}
LONG = 5000  # rounds; the paper has up to 20 000
DOMAINS = "Gaussian blur of 4 pixels, noise of twice the grey range."
CLUSTERS = headings(num_clusters="clusters")
BALANCED = headings(balanced_accuracy="balanced accuracy (%)")
RAND = headings(rand_index="Rand index")
DOMAIN_METRICS = {**RAND, **CLUSTERS, **headings(first_split="first split in round"), **BALANCED}


def class_counts(federation: Federation) -> np.ndarray:
    """Training examples of each class, i32[M, L]."""
    labels, sizes = np.asarray(federation.train.y), np.asarray(federation.train.num_examples)
    classes = federation.info.num_classes
    return np.stack([np.bincount(row[:size], minlength=classes) for row, size in zip(labels, sizes, strict=True)])


def cluster_scores(result: SimulationResult) -> Mapping[str, Any]:
    """Rand index against the true groups, and the Wasserstein-adjusted scores; NaN where there is one cluster."""
    labels, group = result.labels, result.federation.group
    counts = class_counts(result.federation)
    return {
        "rand_index": NAN if group is None else float(scores.rand_index(labels, group)),
        "was": float(scores.wasserstein_adjusted_silhouette(counts, labels)),
        "wadb": float(scores.wasserstein_adjusted_davies_bouldin(counts, labels)),
        "first_split": next((float(event.round + 1) for event in result.events if _divides(event)), NAN),
    }


def _divides(event: Event) -> bool:
    """Whether clients moved: the first refusal of a split is an event, too."""
    content = event.content
    return "previous" not in content or bool((content["labels"] != content["previous"]).any())


_table = functools.partial(table, measure=cluster_scores)
_domains = functools.partial(_table, metrics=DOMAIN_METRICS, figure=figures.bars("rand_index", "Rand index"))


def _blur_and_noise(dataset: str, name: str) -> dict[str, Changes]:
    """Half of the clients clean, the others blurred or noisy."""
    return {
        f"{name} {shift}": {"dataset": dataset, "scenario_options": {"shares": shares}}
        for shift, shares in (("blur", (50, 0, 50)), ("noise", (50, 50, 0)))
    }


def _rows(clusters: int) -> dict[str, Any]:
    """FedGWC, and the baselines with so many clusters."""
    # Each from its best published start: FeSEM's public code takes the centres from clients trained once.
    starts = {"IFCA": "random", "FeSEM": "clients"}
    baselines = {
        name: {"method": name.lower(), "clusters": clusters, "method_options": {"start": start}}
        for name, start in starts.items()
    }
    return {**ESTIMATORS, **READINGS, **baselines}


AMONG_DOMAINS = changed(BASE, scenario="domains", rounds=LONG, eval_every=LONG // 10)
DOMAINS_2 = _domains(
    "fedgwc-domains",
    "FedGWC, Table 4, rows 1 and 2: clean clients among blurred or noisy ones",
    f"{DOMAINS} {TRAINING} 5 000 rounds: a pair meets .009 times a round, and P with the paper's constant rate tells "
    "who met whom before it tells who is alike. Every day MNIST, with the constant rate, as the paper and its code "
    "have it, and FeSEM; --full all.",
    AMONG_DOMAINS,
    _rows(2),
    {**_blur_and_noise("mnist", "MNIST"), **_blur_and_noise("fashion_mnist", "Fashion-MNIST")},
    {
        CONSTANT: printed(rand_index="1±0 " * 4, num_clusters="2±0 " * 4),
        "IFCA": printed(rand_index="0.5±0 " * 4),
        "FeSEM": printed(rand_index="0.51±0.1 0.49±0.2 " * 2),
    },
    seeds=5,
    light=shortened(rows=(CONSTANT, RELEASED, "FeSEM"), columns=("MNIST blur", "MNIST noise"), paper=True),
    quick=shortened(rows=(CONSTANT,), columns=("MNIST noise",), rounds=900),
)
DOMAINS_CIFAR10 = _domains(
    "fedgwc-domains-cifar10",
    "FedGWC, Table 7, rows 1 and 2: clean clients among blurred or noisy ones, CIFAR-10",
    f"{DOMAINS} {CLIENTS} 5 000 rounds; the paper has a CNN and 10 000 rounds. Every day the constant rate, as the "
    "paper and its code have it; --full all.",
    AMONG_DOMAINS,
    _rows(2),
    _blur_and_noise("cifar10", "CIFAR-10"),
    {
        CONSTANT: printed(rand_index="1±0 1±0", num_clusters="2±0 2±0"),
        "IFCA": printed(rand_index="0.5±0 0.5±0"),
        "FeSEM": printed(rand_index="0.5±0.1 0.49±0.2"),
    },
    seeds=5,
    light=shortened(rows=(CONSTANT, RELEASED), paper=True),
    quick=shortened(rows=(CONSTANT,), columns=("CIFAR-10 noise",), rounds=300),
)
DOMAINS_3 = _domains(
    "fedgwc-three-domains",
    "FedGWC, Table 4, row 3: 40 clean, 30 noisy and 30 blurred clients",
    f"{DOMAINS} {TRAINING} The printed values are CIFAR-100's. Every day MNIST; --full Fashion-MNIST as well.",
    changed(AMONG_DOMAINS, scenario_options={"shares": (40, 30, 30)}),
    _rows(3),
    {"MNIST": {"dataset": "mnist"}, "Fashion-MNIST": {"dataset": "fashion_mnist"}},
    {
        CONSTANT: printed(rand_index="0.6±0 0.6±0", num_clusters="4±0 4±0"),
        "IFCA": printed(rand_index="0.33±0 0.33±0"),
        "FeSEM": printed(rand_index="0.55±0 0.55±0"),
    },
    seeds=3,
    light=shortened(columns=("MNIST",), paper=True),
    quick=shortened(rows=(CENTRED,), rounds=900),
)
DOMAINS_3_CIFAR10 = _domains(
    "fedgwc-three-domains-cifar10",
    "FedGWC, Table 7, row 3: 40 clean, 30 noisy and 30 blurred clients, CIFAR-10",
    f"{DOMAINS} {CLIENTS} 5 000 rounds; the paper has a CNN and 10 000 rounds. Every day the constant rate, as the "
    "paper and its code have it; --full all.",
    changed(AMONG_DOMAINS, dataset="cifar10", scenario_options={"shares": (40, 30, 30)}),
    _rows(3),
    {"CIFAR-10": {}},
    {
        CONSTANT: printed(rand_index="0.9±0", num_clusters="4±0"),
        "IFCA": printed(rand_index="0.33±0", num_clusters="1±0"),
        "FeSEM": printed(rand_index="0.34±0.1"),
    },
    seeds=5,
    light=shortened(rows=(CONSTANT, RELEASED), paper=True),
    quick=shortened(rows=(CONSTANT,), rounds=300),
)
HOMOGENEOUS = _table(
    "fedgwc-homogeneous",
    "FedGWC, Fig. 6: homogeneous clients are not split",
    f"MNIST, Dirichlet over classes with equal client sizes. {TRAINING}",
    changed(BASE, scenario="dirichlet", scenario_options={"client_sizes": "equal"}),
    ESTIMATORS,
    varied("alpha", "scenario_options.alpha", (100.0, 1000.0)),
    {CONSTANT: printed(num_clusters="1±0 1±0")},
    metrics={**CLUSTERS, **BALANCED},
    seeds=5,
    quick=shortened(rows=(CENTRED,), columns=("alpha=100",), rounds=900),
    figure=figures.bars("num_clusters", "Clusters"),
)
LEVELS = _table(
    "fedgwc-levels",
    "FedGWC, Table 3: clients of different heterogeneity, (homogeneous, heterogeneous, extreme)",
    f"Fashion-MNIST, α = 1000, 0.05 and 0; 400 training images a client. The paper's values are those "
    f"of its constant rate; WAS and WADB depend on the number of classes. {TRAINING}",
    changed(BASE, scenario="heterogeneity_levels", dataset="fashion_mnist", examples_per_client=480),
    _rows(3),
    {str(shares): {"scenario_options": {"shares": shares}} for shares in ((10, 0, 90), (10, 90, 0), (40, 30, 30))},
    {
        CONSTANT: printed(was="0.1±0.1 0.4±0.1 0.4±0.2", wadb="0.2±0.2 6.4±2.0 0.9±0.1"),
        "IFCA": printed(was="-0.9±0.0 -0.0±0.0 -0.2±0.0", wadb="1.8±0.0 5.6±1.5 1.0±0.0"),
        "FeSEM": printed(was="-0.8±0.2 0.2±0.1 -0.2±0.0", wadb="2.6±0.6 12.0±2.0 33.2±0.0"),
    },
    metrics={**headings(was="WAS", wadb="WADB"), **RAND, **CLUSTERS},
    seeds=3,
    quick=shortened(rows=(COUNTED,), columns=("(10, 90, 0)",), rounds=900),
    figure=figures.bars_of_columns("was", "WAS"),
)
UNEVEN = changed(
    BASE,
    scenario="dirichlet",
    dataset="fashion_mnist",
    scenario_options={"alpha": 0.05, "client_sizes": "equal"},
    examples_per_client=480,
)
# The paper's CNN of two convolutional blocks and three dense layers, on its data set, for its 10 000 rounds.
CNN = {"model": "cnn", "model_options": {"channels": [6, 16], "dense": [120, 84]}}
ON_CIFAR10: Changes = {"dataset": "cifar10", "rounds": 10_000, "eval_every": 500, **CNN}
FULL = "--full has CIFAR-10, a CNN and 10 000 rounds."


def _on_fashion(rounds: int, **rest: Any):
    """What two cores can do of a table on CIFAR-10."""
    small = {"dataset": "fashion_mnist", "model": "mlp", "model_options": {"hidden": (32,)}}
    return shortened(paper=True, rounds=rounds, eval_every=rounds // 5, **small, **rest)


TABLE_5 = _table(
    "fedgwc-table5",
    "FedGWC, Table 5: accuracy against β of the affinity, Dirichlet 0.05",
    "The paper's columns are of CIFAR-100, which is shown, Femnist, Landmarks and iNaturalist: it claims that β does "
    "not matter, and only the shape compares. Every "
    f"day Fashion-MNIST, 400 training images a client, 5 000 rounds with the constant rate alone. {FULL} {TRAINING}",
    changed(UNEVEN, **ON_CIFAR10),
    {name: ESTIMATORS[name] for name in (CONSTANT, COUNTED)},
    varied("β", "method_options.beta", (0.1, 0.5, 1.0, 2.0, 4.0)),
    {CONSTANT: printed(balanced_accuracy="49.9 53.4 49.5 50.9 52.6")},
    metrics={**BALANCED, **CLUSTERS, **headings(first_split="first split in round")},
    seeds=3,
    light=_on_fashion(LONG, rows=(CONSTANT,)),
    quick=shortened(columns=("β=0.5", "β=4"), rounds=200),
    figure=figures.sweep("balanced_accuracy", "β of the affinity", "Balanced accuracy (%)", 100.0, log_x=True),
)
LEVELS_10 = _table(
    "fedgwc-table6",
    "FedGWC, Table 6: clients of different heterogeneity, (homogeneous, heterogeneous, extreme)",
    "α = 100, 0.5 and 0; 400 training images a client. The paper's values are those of its constant rate on CIFAR-10. "
    f"Every day Fashion-MNIST and 2 000 rounds, of which the constant rate needs more. {FULL} {TRAINING}",
    changed(BASE, scenario="heterogeneity_levels", examples_per_client=480, **ON_CIFAR10),
    {name: rows for name, rows in _rows(3).items() if name in (CONSTANT, COUNTED, "IFCA", "FeSEM")},
    {
        str(shares): {"scenario_options": {"shares": shares, "alphas": (100.0, 0.5, 0.0)}}
        for shares in ((10, 0, 90), (10, 90, 0), (40, 30, 30))
    },
    {
        CONSTANT: printed(was="0.1±0.0 0.2±0.0 0.6±0.1", wadb="0.2±0.0 0.6±0.0 1.0±0.4", num_clusters="3 3 3"),
        "IFCA": printed(was="- - -0.2±0.0", wadb="- - 1.0±0.0", num_clusters="1 1 2"),
        "FeSEM": printed(was="0±0.1 0±0.0 0.1±0.1", wadb="12.0±2.0 12.0±2.0 20.6±7.1"),
    },
    metrics={**headings(was="WAS", wadb="WADB"), **RAND, **CLUSTERS},
    seeds=3,
    light=_on_fashion(2000, rows=(CONSTANT, "IFCA", "FeSEM")),
    quick=shortened(rows=(CONSTANT, "FeSEM"), columns=("(10, 90, 0)",), rounds=300),
    figure=figures.against_paper(headings(was="Wasserstein-adjusted silhouette")),
)
CLUSTER_NUMBERS = _table(
    "fedgwc-table8",
    "FedGWC, Table 8: IFCA and FeSEM against their number of clusters, Dirichlet 0.05",
    "The paper's values are those of CIFAR-100: only the shape compares. Every day Fashion-MNIST, 400 training images "
    f"a client, 1 500 rounds. {FULL} {TRAINING}",
    changed(UNEVEN, **ON_CIFAR10),
    {name: rows for name, rows in _rows(4).items() if name in ("IFCA", "FeSEM")},
    varied("C", "clusters", (2, 3, 4, 5)),
    {
        "IFCA": printed(balanced_accuracy="46.7±0.0 44.0±1.6 45.1±2.6 47.5±3.5"),
        "FeSEM": printed(balanced_accuracy="43.3±1.3 48.0±1.9 50.9±1.8 53.4±1.8"),
    },
    metrics={**BALANCED, **CLUSTERS},
    seeds=3,
    light=_on_fashion(1500),
    quick=shortened(rows=("FeSEM",), columns=("C=2", "C=4"), rounds=100),
    figure=figures.sweep("balanced_accuracy", "Number of clusters", "Balanced accuracy (%)", 100.0),
)
PROXIMAL = {"proximal": 0.01}
# Aggregation -> alone, inside FedGWC, and Table 9's two accuracies, which are CIFAR-100's: only the shape compares.
AGGREGATIONS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "FedAvg": ({"method": "fedavg"}, {}, "41.6±1.3 53.4±0.4"),
    "FedAvgM": ({"method": "fedavgm"}, {"server_momentum": 0.9}, "41.5±0.5 50.5±0.3"),
    "FedProx": ({"method": "fedprox", "method_options": PROXIMAL}, PROXIMAL, "41.8±1.0 49.1±1.0"),
}
AGGREGATION = of_cells(
    tuple(
        cell
        for name, (alone, options, accuracies) in AGGREGATIONS.items()
        for cell in grid(
            UNEVEN,
            {name: {}},
            {
                "No clusters": alone,
                "FedGWC": {"method_options": {"rate": "count", "centre": False, "tolerance": 3e-5, **options}},
            },
            {name: printed(balanced_accuracy=accuracies)},
        )
    ),
    "fedgwc-aggregations",
    "FedGWC, Table 9: aggregations alone and inside FedGWC",
    f"Fashion-MNIST, Dirichlet 0.05, 400 training images a client; the paper's is CIFAR-100. FedGWC has "
    "our counted rate, with ε = 3·10⁻⁵, and draws a tenth of each cluster by itself, where an aggregation alone draws "
    f"from all clients: they see other clients. {TRAINING}",
    metrics={**BALANCED, **CLUSTERS},
    seeds=3,
    quick=shortened(rows=("FedAvg",), rounds=900),
    measure=cluster_scores,
    figure=figures.bars("balanced_accuracy", "Balanced accuracy"),
)
