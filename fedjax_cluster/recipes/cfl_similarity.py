"""What CFL's similarities can tell (Sattler, Müller, Samek 2020): Figs. 3 and 5–7."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from matplotlib.figure import Figure

from fedjax_cluster import clustering
from fedjax_cluster.experiments.config import RunConfig
from fedjax_cluster.experiments.recipe import Cell, Recipe, Row, Study, changed, grid
from fedjax_cluster.experiments.runs import Outcome
from fedjax_cluster.simulation.loop import Evaluation
from fedjax_cluster.simulation.result import SimulationResult
from fedjax_cluster.types import Federation

NAN = float("nan")
NEVER = 1_000_000
SMALL_CNN = {"model": "cnn", "model_options": {"channels": [8, 16], "dense": [64]}}
SETTING = (
    "Not given: the network (ours a CNN of 8 and 16 channels and 64 hidden units), the learning rate (0.1, plain SGD) "
    "and in Sec. VI-A the batch size (20)."
)

LABEL_SWAP = RunConfig(
    method="cfl",
    scenario="label_swap",
    dataset="mnist",
    clients=20,
    clusters=4,
    rounds=50,
    batch_size=20,
    learning_rate=0.1,
    local_epochs=3,
    examples_per_client=200,
    test_fraction=0.5,
    eval_every=50,
    method_options={"first_round": NEVER},
    **SMALL_CNN,
)
SIMILARITIES: dict[str, dict[str, Any]] = {
    "weight updates": {},
    "gradients": {"method_options": {"similarity_of": "gradients"}},
}


def separation(federation: Federation) -> list[Callable[[Evaluation], Mapping[str, float]]]:
    """Watches every cluster's separation gap g(α), and the norms that ε₁ and ε₂ are compared with.

    Columns `separation_gap_0` … (NaN for a cluster of fewer than two clients), `mean_norm` and `max_norm` of cluster 0.
    """
    group = np.asarray(federation.group)

    def figures(evaluation: Evaluation) -> dict[str, float]:
        clients, own = jax.device_get((evaluation.state.clients, evaluation.state.server))
        found = {"mean_norm": float(own.mean_norm[0]), "max_norm": float(own.max_norm[0])}
        for slot in range(clients.membership.shape[1]):
            members = np.flatnonzero(clients.membership[: len(group), slot] > 0)
            found[f"separation_gap_{slot}"] = NAN
            if len(members) > 1:
                similarity = clustering.cosine_similarity(clients.update[members])
                found[f"separation_gap_{slot}"] = float(clustering.separation_gap(similarity, group[members]))
        return found

    return [figures]


# ------------------------------------------------------------------------------- Fig. 3: normal gradients


def probability_of_correct_split(k: int, gamma: float, *, draws: int, seed: int = 0, dimension: int = 100) -> float:
    """P[g(α) > 0] for m = 3k clients whose gradients and noise are normal (CFL, Eq. 30).

    Args:
      k: number of distributions; their gradients sum to zero, as at a stationary point.
      gamma: γ, norm of each client's noise over that of its distribution's gradient.
      draws: matrices drawn.
      seed: decides them.
      dimension: d.
    """
    rng = np.random.default_rng(seed)
    group = np.repeat(np.arange(k), 3)
    right = 0
    for _ in range(draws):
        signal = rng.normal(size=(k, dimension))
        signal -= signal.mean(0)
        clean, noise = signal[group], rng.normal(size=(3 * k, dimension))
        scale = gamma * np.linalg.norm(clean, axis=1) / np.linalg.norm(noise, axis=1)
        similarity = clustering.cosine_similarity((clean + scale[:, None] * noise).astype(np.float32))
        right += float(clustering.separation_gap(similarity, group)) > 0
    return right / draws


def largest_guaranteed_noise(k: int) -> float:
    """The γ up to which Theorem 1 guarantees a correct split: where the bounds of Eqs. 19 and 21 meet."""
    gammas = np.linspace(0, 1, 2001)
    alignment = np.clip(1 - 2 * gammas**2, -1, 1)
    safe = alignment > np.asarray(clustering.cross_similarity_bound(alignment, k)) + 1e-6
    return float(gammas[safe].max()) if safe.any() else 0.0


def _fig3() -> Study:
    def carry_out(seeds: int, quick: bool) -> tuple[list[Row], Figure]:
        from fedjax_cluster.report.methods import cfl as split_plots

        counts = (2, 5, 10) if quick else (2, 3, 4, 5, 6, 8, 10, 12, 15)
        gammas = (0.5, 1.0, 1.5) if quick else tuple(np.round(np.arange(0.0, 2.41, 0.2), 1).tolist())
        chance = np.asarray([[probability_of_correct_split(k, gamma, draws=seeds) for gamma in gammas] for k in counts])
        rows = [
            Row(f"γ={gamma}", f"k={k}", "P[g > 0]", float(chance[i, j]), NAN, 1.0 if gamma <= 1 else NAN, NAN)
            for i, k in enumerate(counts)
            for j, gamma in enumerate(gammas)
        ]
        bound = [largest_guaranteed_noise(k) for k in counts]
        return rows, split_plots.split_probability(counts, gammas, chance, bound)

    return Study(
        name="cfl-fig3",
        title="CFL, Fig. 3: the chance of a correct split against the number of distributions and the noise",
        reading=(
            "d = 100, m = 3k. Gradients and noise are normal; the gradients are centred, since they sum to zero at a "
            "stationary point, and every client's noise is scaled to γ. Eq. 30 states about 1 up to k > 10, γ > 1."
        ),
        seeds=50,
        quick=10,
        minutes=1.5,
        run=carry_out,
    )


# --------------------------------------------------------------------------- Figs. 5 and 6: label swap


def _last(name: str) -> Callable[[SimulationResult], float]:
    return lambda result: float(result.history[name][-1])


def _curves(
    outcomes: Mapping[tuple[str, str], Outcome], names: Mapping[str, Sequence[str]], y_label: str, log_y: bool = False
) -> Figure:
    """Columns of the histories against rounds: {legend: (row, column, history column)}."""
    from fedjax_cluster.report.methods import cfl as split_plots

    series = {}
    for label, (row, column, name) in names.items():
        histories = outcomes[row, column].histories
        known = np.isfinite(histories[0][name])
        series[label] = (histories[0]["round"][known] + 1, np.mean([history[name][known] for history in histories], 0))
    return split_plots.round_curves(series, y_label, log_y=log_y)


def _fig5() -> Recipe:
    sizes = (10, 20, 50, 100)
    draws = {"each label equally often": {"scenario_options": {"balanced": True}}, "random examples": {}}
    rows = {f"{kind}, {draw}": {**of, **how} for draw, how in draws.items() for kind, of in SIMILARITIES.items()}
    cells = grid(LABEL_SWAP, rows, {f"n={size}": {"examples_per_client": 2 * size} for size in sizes})

    def figure(cells: Sequence[Cell], outcomes: Mapping[tuple[str, str], Outcome]) -> Figure:
        from fedjax_cluster.report import plots

        columns = list(dict.fromkeys(column for _, column in outcomes))
        series = {
            row: (
                [outcomes[row, column].mean("gap") for column in columns],
                [outcomes[row, column].std("gap") for column in columns],
            )
            for row in dict.fromkeys(row for row, _ in outcomes)
        }
        x = [float(column.partition("=")[2]) for column in columns]
        gap = plots.sweep(x, series, x_label="Training examples per client", y_label="Separation gap g(α)", log_x=True)
        gap.axes[0].axhline(0, color="black", linewidth=0.6)  # above it the best split is correct
        return gap

    return Recipe(
        name="cfl-fig5",
        title="CFL, Fig. 5: separation gap against the examples per client, label-swap MNIST, after 50 rounds",
        reading=(
            "20 clients in 4 groups, 3 local epochs; as many test as training examples. The paper's gap is above 0 "
            "from 20 examples on, and so is ours where every client has each label equally often. Of 20 examples "
            "drawn at random none is of one of the two swapped labels with probability 0.23. Such a client is like "
            f"nobody, and the gap comes between 20 and 50. {SETTING}"
        ),
        cells=cells,
        metrics={"gap": ("separation gap", 1.0), "accuracy": ("accuracy (%)", 100.0)},
        seeds=1,
        quick=tuple(Cell(cell.row, cell.column, cell.config) for cell in cells if cell.column == "n=20"),
        measure=lambda result: {"gap": _last("separation_gap_0")(result)},
        watch=separation,
        figure=figure,
    )


def _fig6() -> Recipe:
    cells = grid(changed(LABEL_SWAP, {"eval_every": 1}), SIMILARITIES, {"n=100": {}})

    def measure(result: SimulationResult) -> dict[str, float]:
        gap = result.history["separation_gap_0"]
        wrong = np.flatnonzero(gap <= 0)
        return {"correct_from": float(wrong[-1] + 2) if len(wrong) else 1.0, "gap": float(gap[-1])}

    def figure(cells: Sequence[Cell], outcomes: Mapping[tuple[str, str], Outcome]) -> Figure:
        names = {row: (row, column, "separation_gap_0") for row, column in outcomes}
        return _curves(outcomes, names, "Separation gap g(α)")

    return Recipe(
        name="cfl-fig6",
        title="CFL, Fig. 6: separation gap against the rounds, label-swap MNIST, 100 examples per client",
        reading=f"20 clients in 4 groups, 3 local epochs. The paper: correct after about ten rounds. {SETTING}",
        cells=tuple(
            dataclasses.replace(cell, paper={"correct_from": (10.0, NAN)}) if cell.row == "weight updates" else cell
            for cell in cells
        ),
        metrics={"correct_from": ("correct for good from round", 1.0), "gap": ("final separation gap", 1.0)},
        seeds=1,
        quick=tuple(Cell(cell.row, cell.column, changed(cell.config, {"rounds": 12})) for cell in cells),
        measure=measure,
        watch=separation,
        figure=figure,
    )


def _fig7() -> Recipe:
    base = changed(
        LABEL_SWAP,
        {
            "clients": 2,
            "clusters": 2,
            "rounds": 60,
            "eval_every": 2,
            "examples_per_client": 2500,
            "test_fraction": 0.2,
            "method_options": {"min_size": 2},
        },
    )
    kinds = {
        "incongruent": {"scenario_options": {"num_groups": 2}},
        "congruent": {"scenario": "label_groups", "scenario_options": {"rho": 0.5, "num_groups": 2, "alpha": 1000.0}},
    }
    cells = grid(base, kinds, {"": {}})

    def measure(result: SimulationResult) -> dict[str, float]:
        history = result.history
        mean, largest = (history[name][np.isfinite(history[name])] for name in ("mean_norm", "max_norm"))
        return {
            "mean_norm": float(mean[-5:].mean()),
            "max_norm": float(largest[-5:].mean()),
            "max_norm_early": float(largest[:5].mean()),
        }

    def figure(cells: Sequence[Cell], outcomes: Mapping[tuple[str, str], Outcome]) -> Figure:
        names = {
            f"{row}: {text}": (row, column, name)
            for row, column in outcomes
            for name, text in (("mean_norm", "mean update (ε₁)"), ("max_norm", "largest update (ε₂)"))
        }
        return _curves(outcomes, names, "Norm of updates", log_y=True)

    return Recipe(
        name="cfl-fig7",
        title="CFL, Fig. 7: the norms behind ε₁ and ε₂ for two congruent and two incongruent clients, MNIST",
        reading=(
            "Incongruent: each client swaps two labels of its own. Congruent: one client has five of the digits, the "
            "other the other five (drawn; in the paper 0–4 and 5–9). 2000 examples per client and 60 rounds, where "
            "the paper has all of MNIST and 1 000 rounds. With 100 examples the network learns even the contradictory "
            f"labels by heart within 200 rounds, and all norms vanish. {SETTING}"
        ),
        cells=cells,
        metrics={
            "mean_norm": ("norm of the mean update, end", 1.0),
            "max_norm": ("largest norm, end", 1.0),
            "max_norm_early": ("largest norm, start", 1.0),
        },
        seeds=1,
        quick=tuple(
            Cell(cell.row, cell.column, changed(cell.config, {"rounds": 20, "examples_per_client": 625}))
            for cell in cells
        ),
        measure=measure,
        watch=separation,
        figure=figure,
    )


CFL_SIMILARITY_RECIPES: tuple[Recipe | Study, ...] = (_fig3(), _fig5(), _fig6(), _fig7())
