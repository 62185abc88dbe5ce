"""CFL's two toy figures: problems that one linear model cannot solve (Fig. 1), and paths of two clients (Fig. 2)."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from fedjax_cluster import data, local, nn
from fedjax_cluster.algorithms import cfl
from fedjax_cluster.experiments.cells import changed
from fedjax_cluster.experiments.config import RunConfig, build_federation
from fedjax_cluster.experiments.recipe import Figures, Kept, Study
from fedjax_cluster.experiments.runs import run
from fedjax_cluster.recipes.studies import of_seeds, rows_over_seeds
from fedjax_cluster.report.methods.cfl_toys import Path, Problem, optimisation_paths, toy_problems
from fedjax_cluster.report.paper_rows import NAN, PaperRow, Tolerance
from fedjax_cluster.simulation.evaluation import Evaluation
from fedjax_cluster.simulation.loop import simulate
from fedjax_cluster.types import Federation

CLIENTS, EXAMPLES = 10, 200
LINEAR = RunConfig(
    method="cfl",
    scenario="xor",
    model="linear",
    clients=CLIENTS,
    clusters=4,
    rounds=60,
    batch_size=20,
    learning_rate=0.1,
    local_epochs=1,
    examples_per_client=EXAMPLES,
    eval_every=60,
)


def _diverging(seed: int) -> Federation:
    """Points around four corners, which one half of the clients labels by their left and right, the other by up and
    down."""
    rng = np.random.default_rng(seed)
    corners = rng.choice([-1.0, 1.0], (CLIENTS * EXAMPLES, 2))
    of_client = np.repeat(np.arange(CLIENTS), EXAMPLES)
    group = (np.arange(CLIENTS) >= CLIENTS // 2).astype(np.int32)
    y = (np.where(group[of_client] == 0, corners[:, 0], corners[:, 1]) > 0).astype(np.int32)
    x = (corners + 0.25 * rng.standard_normal(corners.shape)).astype(np.float32)
    made = data.from_arrays(x, y, of_client, num_classes=2, seed=seed, name="diverging")
    assert isinstance(made, Federation)
    return made._replace(group=group)


def _line(params: Any, slot: int) -> np.ndarray:
    """w₁, w₂, w₃ of w₁x₁ + w₂x₂ + w₃ = 0, where the two outputs of a linear model are equal."""
    kernel, bias = (np.asarray(params["output"][name])[slot] for name in ("kernel", "bias"))
    return np.append(kernel[:, 1] - kernel[:, 0], bias[1] - bias[0])


def _solved(config: RunConfig, federation: Federation) -> tuple[dict[str, dict[str, float]], Problem]:
    single = run(changed(config, method="fedavg"), federation=federation, progress=False)
    split = run(config, federation=federation, progress=False)
    group, count = np.asarray(federation.group), federation.train.num_examples
    of_group = {
        int(value): _line(split.state.clusters.params, int(np.bincount(split.labels[group == value]).argmax()))
        for value in np.unique(group)
    }
    rows = [np.asarray(part)[client, : count[client]] for part in federation.train[:2] for client in range(CLIENTS)]
    problem = Problem(
        np.concatenate(rows[:CLIENTS]),
        np.concatenate(rows[CLIENTS:]),
        np.repeat(group, count),
        _line(single.state.clusters.params, 0),
        of_group,
    )
    figures = {
        "one model": {"accuracy (%)": 100 * single.summary["accuracy"]},
        "CFL": {
            "accuracy (%)": 100 * split.summary["accuracy"],
            "ARI": split.summary["adjusted_rand_index"],
            "splits": float(split.history["num_clusters"][-1] - 1),
        },
    }
    return figures, problem


def _toy_problems(seeds: int, quick: bool, kept: Kept) -> tuple[list[PaperRow], Figures]:
    config = changed(LINEAR, rounds=40, eval_every=40) if quick else LINEAR
    problems: dict[str, Problem] = {}

    def of_seed(seed: int) -> dict[str, dict[str, dict[str, float]]]:
        of_this = changed(config, seed=seed)
        federations = {"Federated XOR": build_federation(of_this), "Diverging labels": _diverging(seed)}
        solved = {title: _solved(of_this, federation) for title, federation in federations.items()}
        if seed == 0:
            problems.update({title: problem for title, (_, problem) in solved.items()})
        return {title: figures for title, (figures, _) in solved.items()}

    found, rows = of_seeds(kept, seeds, of_seed), []
    for title, methods in found[0].items():
        for method in methods:
            paper = {"ARI": 1.0, "splits": 1.0} if method == "CFL" else {}
            rows += rows_over_seeds(method, title, [each[title][method] for each in found], "synthetic", paper)
    return rows, toy_problems(problems)


ROUNDS, RATE, POINTS = 40, 0.4, 30
MEAN, LARGEST, COSINE = "norm of the mean update, end", "largest norm, end", "cosine of the two updates, end"


class Toy(NamedTuple):
    """Two clients whose points lie in a cone of directions each."""

    start: tuple[float, float]
    cones: tuple[tuple[float, float], tuple[float, float]]  # degrees
    labels: tuple[float, float]


TOYS = {
    "Incongruent": Toy((-1.2, 2.2), ((-45, 45), (-20, 70)), (1.0, -1.0)),
    "Congruent": Toy((-1.4, -1.0), ((-20, 10), (65, 95)), (1.0, 1.0)),
}


def squared_hinge(outputs: Array, y: Array) -> Array:
    """max(0, 1 − y f(x))² per example, for y of ±1: it vanishes in a whole area of parameters."""
    return jnp.square(jnp.maximum(0.0, 1.0 - y.reshape(-1) * outputs.reshape(-1)))


def _two_clients(toy: Toy, seed: int) -> tuple[Path, dict[str, float]]:
    def start(rng_key: Array, shape: tuple[int, ...], dtype: Any = jnp.float32) -> Array:
        return jnp.asarray(toy.start, dtype).reshape(shape)

    rng = np.random.default_rng(seed)
    angles = np.deg2rad([rng.uniform(*cone, POINTS) for cone in toy.cones]).reshape(-1)
    x, y = np.stack([np.cos(angles), np.sin(angles)], 1).astype(np.float32), np.repeat(toy.labels, POINTS)
    federation = data.from_arrays(
        x, y.astype(np.float32), np.repeat(np.arange(2), POINTS), task="regression", seed=seed
    )
    assert isinstance(federation, Federation)
    rows = int(federation.train.num_examples.max())
    method = cfl(
        nn.linear(use_bias=False, kernel_init=start)._replace(loss=squared_hinge),
        clusters=2,
        local=local.sgd(1.0, steps=1, batch_size=rows),
        server=optax.sgd(RATE),
        min_size=2,
        first_round=ROUNDS,  # both stay together
    )
    steps, updates = [np.asarray(toy.start)], []

    def watched(evaluation: Evaluation) -> None:
        state = jax.device_get(evaluation.state)
        steps.append(state.clusters.params["output"]["kernel"][0, :, 0])
        updates.append(state.clients.update[:2])

    simulate(method, federation, rounds=ROUNDS, seed=seed, eval_every=1, callbacks=[watched], progress=False)
    last = updates[-1]
    norms = np.linalg.norm(last, axis=1)
    figures = {
        MEAN: float(np.linalg.norm(last.mean(0))),
        LARGEST: float(norms.max()),
        COSINE: float(last[0] @ last[1] / norms.prod()) if norms.all() else NAN,
    }
    axis = np.linspace(-2.2, 2.6, 321)
    theta = np.stack(np.meshgrid(axis, axis), -1)
    risks = []
    for client in range(2):
        points, labels = federation.train.x[client, :rows], federation.train.y[client, :rows]
        risks.append(np.square(np.maximum(0, 1 - labels * (theta @ points.T))).mean(-1))
    return Path((axis, axis), risks, np.asarray(steps[:-1]), np.asarray(updates)), figures


def _paths(seeds: int, quick: bool, kept: Kept) -> tuple[list[PaperRow], Figures]:
    paths: dict[str, Path] = {}

    def of_seed(seed: int) -> dict[str, dict[str, float]]:
        walked = {title: _two_clients(toy, seed) for title, toy in TOYS.items()}
        if seed == 0:
            paths.update({title: path for title, (path, _) in walked.items()})
        return {title: figures for title, (_, figures) in walked.items()}

    found = of_seeds(kept, seeds, of_seed)
    near: dict[str, Tolerance] = dict.fromkeys((MEAN, LARGEST, COSINE), Tolerance(0.05, "lower"))
    printed = {"Incongruent": {MEAN: 0.0, COSINE: -1.0}, "Congruent": {MEAN: 0.0, LARGEST: 0.0}}
    rows = []
    for title in TOYS:
        rows += rows_over_seeds(
            title, "two clients", [each[title] for each in found], "synthetic", printed[title], near
        )
    return rows, optimisation_paths(paths)


FIG_1 = Study(
    name="cfl-fig1",
    title="CFL, Fig. 1: two toy problems that one linear model cannot solve, and each group's own can",
    reading="Ours: the paper draws points. Ten clients with 140 training examples per client. XOR: one group has the "
    "upper corners, the other the lower ones. Diverging labels: the same points, labelled by left and right or by up "
    "and down. A linear model, ε₁ and ε₂ as parts of the norms (our defaults); compared is what the text says, that "
    "CFL's one split separates the groups.",
    seeds=5,
    minutes=1.0,
    run=_toy_problems,
)
FIG_2 = Study(
    name="cfl-fig2",
    title="CFL, Fig. 2: paths of two clients' optimisation, incongruent and congruent",
    reading="Ours: the paper names neither risk. Two parameters, squared hinge losses max(0, 1 − yθx)², which vanish "
    "in an area; 21 training examples per client, in a cone of directions; the other's cone overlaps with the other "
    f"label (incongruent) or lies beside it (congruent). {ROUNDS} rounds of full gradients at a rate of {RATE}. "
    "Compared are the limits of Eqs. 11–13: norms of 0, and a cosine of −1 where the clients disagree.",
    seeds=3,
    minutes=0.3,
    run=_paths,
)
