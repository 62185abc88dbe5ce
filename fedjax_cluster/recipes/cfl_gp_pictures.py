"""CFL-GP's pictures of clients at their features: Fig. 5, under compression, and Fig. 12, over the rounds."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import numpy as np

from fedjax_cluster.algorithms.cfl_gp.profiles import client_features
from fedjax_cluster.clustering import scores
from fedjax_cluster.data.scenarios.registry import draws_examples
from fedjax_cluster.experiments.cells import Changes, changed, varied
from fedjax_cluster.experiments.config import RunConfig, build_federation
from fedjax_cluster.experiments.recipe import Figures, Kept, Study
from fedjax_cluster.experiments.runs import run
from fedjax_cluster.recipes.cfl_gp import EIGHTY_CLIENTS, MNIST
from fedjax_cluster.recipes.studies import of_seeds, rows_over_seeds
from fedjax_cluster.report.panels import Cloud, feature_panels
from fedjax_cluster.report.paper_rows import PaperRow
from fedjax_cluster.simulation.evaluation import Evaluation
from fedjax_cluster.types import Federation

COMPRESSED = changed(EIGHTY_CLIENTS, method_options={"every": 2})
RATIOS = varied("CR", "method_options.compression", (1, 100, 1000, 10_000))
GROWING = changed(MNIST, method_options={"every": 2})
SIZES: dict[str, Changes] = {"C=64": {"clients": 64}, "C=128": {"clients": 128}}
NAMES = ("0°", "90°", "180°", "270°"), ("0°/15°", "90°/105°", "180°/195°", "270°/285°")


def _features_at(
    config: RunConfig, times: Sequence[int], federation: Federation
) -> dict[int, tuple[np.ndarray, float]]:
    """t -> the clients' features [M, K] and their ARI right after round t, counted from 0."""
    seen, group = {}, np.asarray(federation.group)

    def watched(evaluation: Evaluation) -> None:
        if (time := evaluation.round - 1) in times:
            features, _ = client_features(evaluation.state, int(config.clusters or 1))
            labels = np.asarray(evaluation.state.clients.membership).argmax(1)[: len(group)]
            seen[time] = np.asarray(features)[: len(group)], float(scores.adjusted_rand_index(labels, group))

    run(config, federation=federation, callbacks=[watched], progress=False)
    return seen


def features_over_time(
    config: RunConfig,
    settings: Mapping[str, Changes],
    times: Sequence[int],
    seeds: int,
    kept: Kept,
    paper: Mapping[tuple[str, int], float],
) -> tuple[list[PaperRow], dict[tuple[str, int], Cloud]]:
    """By setting and t: rows with the ARI over the seeds, and the clients of the first seed."""
    clouds: dict[tuple[str, int], Cloud] = {}

    def of_seed(seed: int) -> dict[str, list[float]]:
        agreement = {}
        for name, changes in settings.items():
            config_of_seed = changed(changed(config, **changes), seed=seed, rounds=max(times) + 1, eval_every=1)
            federation = build_federation(config_of_seed)
            seen = _features_at(config_of_seed, times, federation)
            agreement[name] = [seen[time][1] for time in times]
            if seed == 0:
                group = np.asarray(federation.group)
                clouds.update({(name, time): Cloud(f"{name}, t={time}", seen[time][0], group) for time in times})
        return agreement

    of_each = of_seeds(kept, seeds, of_seed)
    rows = []
    for name, (place, time) in itertools.product(settings, enumerate(times)):
        found = [{"ARI": agreement[name][place]} for agreement in of_each]
        printed = {"ARI": paper[name, time]} if (name, time) in paper else {}
        dataset = "synthetic" if draws_examples(config.scenario) else config.dataset
        rows += rows_over_seeds("CFL-GP", f"{name}, t={time}", found, dataset, printed)
    return rows, clouds


def _under_compression(seeds: int, quick: bool, kept: Kept) -> tuple[list[PaperRow], Figures]:
    config = changed(COMPRESSED, clients=40, examples_per_client=200) if quick else COMPRESSED
    times = 1, 10
    printed = {(name, time): 1.0 for name in RATIOS for time in times if name != "CR=10000"} | {("CR=10000", 10): 0.9}
    ratios = {name: RATIOS[name] for name in ("CR=1", "CR=1000")} if quick else RATIOS
    rows, clouds = features_over_time(config, ratios, times, seeds, kept, printed)
    return rows, feature_panels([[clouds[name, time] for name in ratios] for time in times], NAMES[0])


def _over_rounds(seeds: int, quick: bool, kept: Kept) -> tuple[list[PaperRow], Figures]:
    config = changed(GROWING, examples_per_client=200) if quick else GROWING
    sizes = {"C=32": {"clients": 32}} if quick else SIZES
    times = 1, 5, 9, 13
    printed = {(name, time): 1.0 for name in sizes for time in times}
    rows, clouds = features_over_time(config, sizes, times, seeds, kept, printed)
    return rows, feature_panels([[clouds[name, time] for time in times] for name in sizes], NAMES[1])


FIG_5 = Study(
    name="cfl-gp-fig5",
    title="CFL-GP, Fig. 5: the clients' features under compression, after t = 1 and 10",
    reading="80 clients, four angles, b = 100, 500 examples per client where the paper has 875, P = 2: one model was "
    "queried by t = 1, five by t = 10. Shown is the plane in which the K = 4 features vary most, where the paper has "
    "a random projection to three dimensions; the first seed's. The text states that up to a ratio of 10³ the four "
    "groups are apart, and an ARI of 0.9 at 10⁴ and t = 10.",
    seeds=5,
    minutes=3.0,
    run=_under_compression,
)
FIG_12 = Study(
    name="cfl-gp-fig12",
    title="CFL-GP, Fig. 12: the clients' features at t = 1, 5, 9 and 13, C = 64 and 128",
    reading="Eight angles, neighbours in one group, b = 64, P = 2, K = 4; all 70 000 images are divided among the "
    "clients. Shown is the plane in which the K features vary most, where the paper has a random projection to three "
    "dimensions; the first seed's.",
    seeds=3,
    minutes=3.0,
    run=_over_rounds,
)
