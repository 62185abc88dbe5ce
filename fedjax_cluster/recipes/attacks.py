"""What hostile and unlucky clients do to the clusters and the accuracy of the others, method by method."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure

from fedjax_cluster import aggregation, faults, lifting, tree
from fedjax_cluster.aggregation import Aggregation
from fedjax_cluster.algorithms import REGISTRY
from fedjax_cluster.experiments.cells import changed
from fedjax_cluster.experiments.config import RunConfig, build_algorithm, settled
from fedjax_cluster.faults import Fault
from fedjax_cluster.report.names import method_name
from fedjax_cluster.report.paper_rows import NAN, PaperRow
from fedjax_cluster.report.share_panels import share_panels
from fedjax_cluster.simulation.loop import simulate
from fedjax_cluster.simulation.result import SimulationResult

BASE = RunConfig(
    method="fedavg",
    scenario="rotated",
    model="linear",
    clients=40,
    clusters=4,
    rounds=30,
    batch_size=16,
    averaging="models",
    learning_rate=0.1,
    local_steps=5,
    participation=1.0,
    eval_every=30,
)
QUICK_ROUNDS = 6
# The five first, then those that cluster in another way, then those of one model.
METHODS: dict[str, dict[str, Any]] = {
    "cfl": {},
    "cfl_gp": {},
    "fedgwc": {},
    "flag": {},
    "gradient_loss": {},
    **{name: {} for name in ("ifca", "pacfl", "fesem", "fedsoft", "fedem")},
    **{name: {} for name in ("fedavg", "fedprox", "fairavg", "fedavgm", "scaffold", "per_fedavg")},
    **{name: {} for name in ("ditto", "fedper", "fedrep", "pfedme", "fedproto", "local_only")},
}
QUICK_METHODS = ("cfl", "ifca", "fedavg")
SHARES = (0.1, 0.2, 0.3, 0.4)
RULES: dict[str, Aggregation | None] = {
    "mean": None,
    "trimmed mean": aggregation.trimmed_mean(share=0.4),
    "median": aggregation.median(),
    "clipping": aggregation.norm_clipping(0.5),
}
ATTACKS: dict[str, Fault] = {
    "sign flip": faults.sign_flip(),
    "label flip": faults.label_flip(),
    "colluders": faults.colluders(scale=-10),
    "disguise": faults.disguise(scale=-10),
    "schism": faults.schism(),
    "infiltrators": faults.infiltrators(scale=-10, joins=10),
}
BAD_LUCK: dict[str, Fault] = {
    "scaled": faults.scaled(),
    "NaN": faults.nan_updates(),
    "drop-out": faults.drop_out(),
    "stragglers": faults.stragglers(),
}
FACTOR = {"local.fault.factor": 1.0}  # an argument of the programs, which the faults then share


class Found(NamedTuple):
    """What a run has come to."""

    accuracy: float  # of the honest, in percent
    agreement: float  # ARI of the honest, NaN for a method of one model
    clusters: int  # that the honest are in
    finite: bool  # all models


NOTHING = Found(NAN, NAN, 0, True)


def found_by(method: str, rule: str, fault: Fault | None, seed: int, rounds: int | None = None) -> Found | None:
    """What a method's run has come to; None where the method has no place for the rule or the fault."""
    if (case := _case(method, rule, seed, rounds)) is None:
        return None
    algorithm, federation, config = case
    # A fault during the run comes at a third of it, however short.
    if isinstance(fault, faults.infiltrators):
        fault = dataclasses.replace(fault, joins=config.rounds // 3)
    options: Mapping[str, Any] = {"seed": seed, "eval_every": config.rounds, "progress": False}
    try:
        with lifting.one_program(FACTOR):
            result = simulate(algorithm, federation, rounds=config.rounds, fault=fault, **options)
    except ValueError as error:
        if fault is None or not str(error).startswith("fault is"):
            raise
        return None
    return _come_to(result)


@functools.lru_cache(maxsize=4)
def _case(method: str, rule: str, seed: int, rounds: int | None) -> tuple[Any, Any, RunConfig] | None:
    """A method with a rule, its federation and its configuration; None where it has no place for the rule."""
    config = changed(BASE, method=method, seed=seed, **METHODS[method])
    config = config if rounds is None else changed(config, rounds=rounds, eval_every=rounds)
    config, federation = settled(config)
    algorithm: Any = build_algorithm(config)
    if RULES[rule] is None:
        return algorithm, federation, config
    if "aggregation" not in {field.name for field in dataclasses.fields(algorithm)}:
        return None
    return dataclasses.replace(algorithm, aggregation=RULES[rule]), federation, config


def _come_to(result: SimulationResult) -> Found:
    of = "_honest" if result.faulty.any() else ""
    honest = np.flatnonzero(~result.faulty)
    single = getattr(result.algorithm, "clusters", 1) == 1
    last = {name: float(column[-1]) for name, column in result.history.items() if np.ndim(column) == 1}
    return Found(
        100 * last[f"accuracy{of}"],
        NAN if single else last[f"adjusted_rand_index{of}"],
        len(np.unique(result.labels[honest])),
        bool(tree.all_finite(result.state.clusters.params)),
    )


def _mean_of(found: Iterable[Found | None]) -> tuple[Found, Found] | None:
    """The means over the seeds, and the sample's deviations."""
    of_seeds = [each for each in found if each is not None]
    if not of_seeds:
        return None
    table = np.array(of_seeds, float)
    deviation = table.std(0, ddof=1) if len(table) > 1 else np.full(table.shape[1], NAN)
    return Found(*table.mean(0)), Found(*deviation)


def _rows(method: str, column: str, found: tuple[Found, Found], seeds: int) -> list[PaperRow]:
    mean, deviation = found
    kinds = {"accuracy (%)": 0, "ARI": 1, "clusters": 2}
    shared: dict[str, Any] = {"seeds": seeds, "dataset": BASE.dataset, "tolerance": None}
    return [
        PaperRow(method_name(method), column, kind, float(mean[place]), float(deviation[place]), **shared)
        for kind, place in kinds.items()
        if not math.isnan(mean[place])
    ]


def _attacks(seeds: int, quick: bool) -> tuple[list[PaperRow], Mapping[str, Figure]]:
    rows: list[PaperRow] = []
    methods = QUICK_METHODS if quick else tuple(METHODS)
    shares, rounds = (SHARES[1::2], QUICK_ROUNDS) if quick else (SHARES, None)
    rules = ("mean", "median")
    shape = (len(methods), 1 + len(shares))
    accuracy = {rule: {attack: np.full(shape, NAN) for attack in ATTACKS} for rule in rules}
    agreement = {rule: {attack: np.full(shape, NAN) for attack in ATTACKS} for rule in rules}
    for place, method in enumerate(methods):
        for rule in rules:
            cases = [("none", 0.0, None)]
            cases += [
                (name, share, dataclasses.replace(fault, share=share))
                for name, fault in ATTACKS.items()
                for share in shares
            ]
            for attack, share, fault in cases:
                found = _mean_of(found_by(method, rule, fault, seed, rounds) for seed in range(seeds))
                if found is None:
                    continue
                column = 0 if fault is None else 1 + shares.index(share)
                for name in ATTACKS if fault is None else (attack,):
                    accuracy[rule][name][place, column] = found[0].accuracy
                    agreement[rule][name][place, column] = found[0].agreement
                rows += _rows(
                    method, f"{attack} {100 * share:.0f} %, {rule}" if fault else f"none, {rule}", found, seeds
                )
    names, percent = [method_name(method) for method in methods], (0, *(round(100 * share) for share in shares))
    clustered = [place for place, method in enumerate(methods) if "clusters" in _options_of(method)]
    pictures = {}
    for rule in rules:
        pictures["" if rule == "mean" else rule] = share_panels(
            accuracy[rule], names, percent, f"accuracy of the honest (%), {rule}", (0, 100)
        )
        of_clusters = {attack: values[clustered] for attack, values in agreement[rule].items()}
        label = f"ARI of the honest, {rule}"
        pictures[f"ari {rule}"] = share_panels(of_clusters, [names[i] for i in clustered], percent, label, (0, 1))
    return rows, pictures


def _options_of(method: str) -> set[str]:
    return {field.name for field in dataclasses.fields(REGISTRY[method])}  # pyright: ignore[reportArgumentType]


def _matrix(seeds: int, quick: bool) -> tuple[list[PaperRow], Figure]:
    rows: list[PaperRow] = []
    methods, rounds = (QUICK_METHODS, QUICK_ROUNDS) if quick else (tuple(METHODS), None)
    every: dict[str, Fault] = {**BAD_LUCK, **ATTACKS}
    values = {rule: np.full((len(methods), 1 + len(every)), NAN) for rule in RULES}
    for place, method in enumerate(methods):
        for rule in RULES:
            for column, (name, fault) in enumerate({"none": None, **every}.items()):
                found = _mean_of(found_by(method, rule, fault, seed, rounds) for seed in range(seeds))
                if found is None:
                    continue
                if found[0].finite < 1:
                    raise RuntimeError(f"{method} under {name} with {rule} left a model that is not finite")
                values[rule][place, column] = found[0].accuracy
                rows += _rows(method, f"{name}, {rule}", found, seeds)
    names = [method_name(method) for method in methods]
    label = "accuracy of the honest (%)"
    return rows, share_panels(values, names, ("none", *every), label, (0, 100), columns=2)
