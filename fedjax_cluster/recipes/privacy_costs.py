"""What differential privacy of whole clients costs the clusters and the accuracy, method by method."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from fedjax_cluster import privacy, report
from fedjax_cluster.algorithms import REGISTRY
from fedjax_cluster.experiments.cells import changed
from fedjax_cluster.experiments.config import RunConfig, build_algorithm, settled
from fedjax_cluster.experiments.recipe import Kept, Study
from fedjax_cluster.privacy.gaussian import SHOWN, gaussian
from fedjax_cluster.recipes.studies import once
from fedjax_cluster.report.names import method_name
from fedjax_cluster.report.paper_rows import PaperRow
from fedjax_cluster.simulation.loop import simulate

BUDGETS = (math.inf, 300.0, 100.0, 30.0, 10.0)
DELTA, CLIP, SHOWN_CLIP, QUICK_ROUNDS = 1e-3, 0.5, 0.5, 10
# First models may not be single clients'.
METHODS: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "fedem": {},
    "ifca": {"start": "random"},
    "gradient_loss": {"start": "random"},
    "cfl_gp": {"cluster_until": 20},
    "pacfl": {},
}
BASE = RunConfig(
    method="fedavg",
    scenario="rotated",
    model="linear",
    clients=100,
    clusters=4,
    rounds=40,
    batch_size=8,
    averaging="models",
    learning_rate=0.1,
    local_steps=5,
    eval_every=40,
)
# A learner moves by a client's share in it, 1/K at first.
RATES = {"fedem": 4 * BASE.learning_rate}


def mechanism(method: str, epsilon: float, clients: int, rounds: int, shown: int) -> gaussian:
    """The noise with which a run of a method spends ε; infinite for clipping alone."""
    shows = REGISTRY[method].sends == SHOWN
    own: dict[str, Any] = {"clustering_clip": SHOWN_CLIP, "clustering_noise_multiplier": 1.0} if shows else {}
    made = gaussian(clip=CLIP, noise_multiplier=1.0, delta=DELTA, **own)
    if math.isfinite(epsilon):
        return privacy.calibrated(made, epsilon, clients=clients, cohort=clients, rounds=rounds, shown=shown)
    none = {"clustering_noise_multiplier": 0.0} if own else {}
    return dataclasses.replace(made, noise_multiplier=0.0, **none)


def _costs(seeds: int, quick: bool, kept: Kept) -> tuple[list[PaperRow], Figure]:
    rows: list[PaperRow] = []
    budgets = BUDGETS[::2] if quick else BUDGETS
    lines: dict[str, tuple[list[float], None]] = {}
    for method, options in METHODS.items():
        of_seed = functools.partial(_figures, method, options, budgets, quick)
        found = np.array(
            [once(kept, f"{method}-seed{seed}", functools.partial(of_seed, seed)) for seed in range(seeds)]
        )
        for (column, accuracy, agreement), deviation in zip(
            [(_named(e), *found.mean(0)[n]) for n, e in enumerate((None, *budgets))],
            found.std(0, ddof=1) if seeds > 1 else np.full(found.shape[1:], np.nan),
            strict=True,
        ):
            shared = {"seeds": seeds, "dataset": BASE.dataset}
            name = method_name(method)
            rows.append(PaperRow(name, column, "accuracy (%)", accuracy, float(deviation[0]), **shared))
            rows.append(PaperRow(name, column, "ARI", agreement, float(deviation[1]), **shared))
        lines[method] = ([float(value) for value in found.mean(0)[2:, 0]], None)
    epsilon = [each for each in budgets if math.isfinite(each)]
    return rows, report.curves.sweep(epsilon, lines, "ε at δ = 10⁻³", "Accuracy (%)", log_x=True)


def _figures(
    method: str, options: dict[str, Any], budgets: tuple[float, ...], quick: bool, seed: int
) -> list[tuple[float, float]]:
    """Accuracy in percent and ARI of a method's plain run, and with each budget."""
    config = changed(BASE, method=method, seed=seed, method_options=options)
    rate, rounds = RATES.get(method, BASE.learning_rate), QUICK_ROUNDS if quick else BASE.rounds
    config = changed(config, learning_rate=rate, rounds=rounds)
    config, federation = settled(config)
    plain: Any = build_algorithm(config)
    figures = []
    for epsilon in (None, *budgets):
        algorithm = plain
        if epsilon is not None:
            shown = plain.times_shown(config.rounds)
            made = mechanism(method, epsilon, len(federation.train.num_examples), config.rounds, shown)
            algorithm = dataclasses.replace(plain, privacy=made)
        result = simulate(
            algorithm, federation, rounds=config.rounds, seed=seed, eval_every=config.rounds, progress=False
        )
        figures.append((100 * result.summary["accuracy"], result.summary["adjusted_rand_index"]))
    return figures


def _named(epsilon: float | None) -> str:
    return "plain" if epsilon is None else "clipped" if math.isinf(epsilon) else f"ε = {epsilon:g}"


COSTS = Study(
    name="privacy-costs",
    title="What ε costs: accuracy and ARI under differential privacy of whole clients",
    reading="Ours; no paper has it. Digits at four rotations, 100 clients of about 12 training rows, a linear model, "
    "40 rounds of five local steps, all clients in each; clip 0.5, and as much noise as spends ε at δ = 10⁻³ in the "
    "whole run (replace one client, RDP). CFL-GP shows its profiles ten times and PACFL its bases once, with the same "
    "multiplier; CFL-GP clusters in the first 20 rounds. FedEM, whose learners move by a client's share in them, has "
    "four times the others' rate. The first models are random, without and with privacy.",
    seeds=3,
    minutes=8.0,
    run=_costs,
)
