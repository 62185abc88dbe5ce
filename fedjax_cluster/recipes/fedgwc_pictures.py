"""FedGWC's pictures: splits, convergence and classes (Figs. 3, 4, 7), two levels (Fig. 5), three domains (Fig. 8)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from matplotlib.figure import Figure

from fedjax_cluster.experiments.cells import changed
from fedjax_cluster.experiments.config import RunConfig
from fedjax_cluster.experiments.recipe import Figures, Kept, Study
from fedjax_cluster.experiments.runs import run
from fedjax_cluster.recipes.fedgwc import BASE, CENTRED, CONSTANT, DOMAINS, ESTIMATORS, LONG, TRAINING, cluster_scores
from fedjax_cluster.recipes.studies import of_seeds, rows_over_seeds
from fedjax_cluster.report.methods import fedgwc as pictures
from fedjax_cluster.report.panels import Cloud, feature_panels
from fedjax_cluster.report.paper_rows import PaperRow
from fedjax_cluster.simulation.evaluation import Evaluation
from fedjax_cluster.simulation.result import SimulationResult
from fedjax_cluster.types import Event, FinishedRun

Averages = dict[int, tuple[list[float], list[float]]]  # cluster -> rounds done, running averages
MOST_SHOWN = 4  # splits
BEYOND = 1.25  # times the last of which P's change is shown
ON_CIFAR10 = changed(BASE, dataset="cifar10", rounds=LONG, eval_every=LONG // 100, **ESTIMATORS[CONSTANT])
# Long enough for a split by the estimator that needs the fewest rounds.
SHORT = {"dataset": "mnist", "rounds": 800, "eval_every": 20, **ESTIMATORS[CENTRED]}


def _study(
    config: RunConfig, draw: Callable[[FinishedRun, Averages], Mapping[str, Figure]], paper: Mapping[str, float]
) -> Callable[[int, bool, Kept], tuple[list[PaperRow], Figures]]:
    """Runs of one setting; the pictures are those of the first seed."""

    def carried_out(seeds: int, quick: bool, kept: Kept) -> tuple[list[PaperRow], Figures]:
        drawn: dict[str, Figure] = {}
        base = changed(config, **SHORT) if quick else config

        def of_seed(seed: int) -> dict[str, float]:
            averages: Averages = {0: ([0.0], [1.0])}

            def watched(evaluation: Evaluation, averages: Averages = averages) -> None:
                average, active = jax.device_get((evaluation.state.server.average, evaluation.state.clusters.active))
                for cluster in np.flatnonzero(active).tolist():
                    rounds, values = averages.setdefault(cluster, ([], []))
                    rounds.append(float(evaluation.round))
                    values.append(float(average[cluster]))

            result = run(changed(base, seed=seed), callbacks=[watched])
            if seed == 0:
                drawn.update(draw(result, averages))
            return _figures(result)

        found = of_seeds(kept, seeds, of_seed)
        name = CENTRED if quick else CONSTANT
        return rows_over_seeds(name, "", found, base.dataset, None if quick else paper), drawn

    return carried_out


def _figures(result: SimulationResult) -> dict[str, float]:
    scores = cluster_scores(result)
    return {
        "clusters": float(result.history["num_clusters"][-1]),
        "first split in round": scores["first_split"],
        "Rand index": scores["rand_index"],
        "balanced accuracy (%)": 100 * result.summary["balanced_accuracy"],
    }


def _splits(result: FinishedRun, averages: Averages) -> Mapping[str, Figure]:
    """The clients at each of the first splits, P's change over the rounds, and the clusters' classes."""
    clouds, rounds = split_clouds(result.events), [event.round + 1 for event in result.events]
    # Once there is no room for more clusters, an average that has come to rest only begins anew.
    last = BEYOND * max(rounds, default=int(result.history["round"][-1]) + 1)
    shown = {}
    for cluster, (numbers, values) in averages.items():
        kept = sum(number <= last for number in numbers)
        if kept:
            shown[cluster] = numbers[:kept], values[:kept]
    drawn = {
        "convergence": pictures.convergence(shown, result.algorithm.tolerance, rounds),
        "classes": pictures.figures(result)["class_distributions"],
    }
    if not clouds:
        return {"": drawn.pop("convergence"), **drawn}
    names = [f"cluster {number}" for number in range(int(result.history["num_clusters"].max()))]
    return {"": feature_panels([clouds[:MOST_SHOWN]], names), **drawn}


def split_clouds(events: Sequence[Event]) -> list[Cloud]:
    """The clients of each cluster that was split, in the plane of its affinity's eigenvectors, by their new cluster."""
    clouds = []
    for event in events:
        content: Mapping[str, Any] = event.content
        labels, previous = np.asarray(content["labels"]), np.asarray(content["previous"])
        inside = previous == content["parent"]
        if (labels == previous).all() or inside.sum() < pictures.FEWEST_EMBEDDED:
            continue
        points = pictures.embedding(np.asarray(content["affinity"])[np.ix_(inside, inside)])
        clouds.append(Cloud(f"Cluster {content['parent']}, round {event.round + 1}", points, labels[inside]))
    return clouds


def _first_split(result: FinishedRun, averages: Averages) -> Mapping[str, Figure]:
    """P and W when they came to rest for the first time, and the clients in the plane of W's eigenvectors."""
    drawn = pictures.figures(result)
    return {"": drawn["interaction_matrices"], "embedding": drawn["spectral_embedding"]}


READING = (
    "The constant rate over rows of P, as the paper's; its data set is CIFAR-100 where ours is CIFAR-10 but for Figs. "
    f"4 and 5, and it runs 10 000 to 20 000 rounds where ours has 5 000. Pictures are the first seed's. {TRAINING}"
)
SPLITS = Study(
    name="fedgwc-splits",
    title="FedGWC, Figs. 3, 4 and 7: clients at each split, the change of P, and the clusters' classes",
    reading=f"CIFAR-10, Dirichlet 0.05, 400 training images a client. {READING}",
    seeds=3,
    minutes=15.0,
    run=_study(
        changed(
            ON_CIFAR10,
            scenario="dirichlet",
            scenario_options={"alpha": 0.05, "client_sizes": "equal"},
            examples_per_client=480,
        ),
        _splits,
        {},
    ),
)
TWO_LEVELS = Study(
    name="fedgwc-fig5",
    title="FedGWC, Fig. 5: interactions, affinity and embedding of homogeneous and heterogeneous clients",
    reading="CIFAR-10, one half of the clients with α = 100, the other with 0.05, as the shares are not given; 400 "
    f"training images a client. The paper says that the groups are apart. {READING}",
    seeds=3,
    minutes=15.0,
    run=_study(
        changed(
            ON_CIFAR10,
            scenario="heterogeneity_levels",
            scenario_options={"shares": (50, 50, 0), "alphas": (100.0, 0.05, 0.0)},
            examples_per_client=480,
        ),
        _first_split,
        {"Rand index": 1.0},
    ),
)
THREE_DOMAINS = Study(
    name="fedgwc-fig8",
    title="FedGWC, Fig. 8: interactions and affinity of 40 clean, 30 noisy and 30 blurred clients",
    reading=f"{DOMAINS} CIFAR-10, whose Rand index in the paper is 0.9, with four clusters (Table 7). {READING}",
    seeds=3,
    minutes=15.0,
    run=_study(
        changed(ON_CIFAR10, scenario="domains", scenario_options={"shares": (40, 30, 30)}),
        _first_split,
        {"Rand index": 0.9, "clusters": 4.0},
    ),
)
