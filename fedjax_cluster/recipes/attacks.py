"""What hostile and unlucky clients do to the clusters and the accuracy of the others, method by method."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import multiprocessing
import sys
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure

from fedjax_cluster import aggregation, faults, lifting, provenance, tree
from fedjax_cluster.aggregation import Aggregation
from fedjax_cluster.experiments.cells import changed
from fedjax_cluster.experiments.config import RunConfig, build_algorithm, settled
from fedjax_cluster.experiments.recipe import Kept, Study
from fedjax_cluster.faults import Fault
from fedjax_cluster.report.names import method_name
from fedjax_cluster.report.paper_rows import NAN, PaperRow
from fedjax_cluster.report.share_panels import share_panels
from fedjax_cluster.simulation.loop import simulate
from fedjax_cluster.simulation.result import SimulationResult
from fedjax_cluster.types import Federation

BASE = RunConfig(
    method="fedavg",
    scenario="rotated",
    model="linear",
    clients=40,
    clusters=4,
    rounds=30,
    batch_size=16,
    averaging="models",
    learning_rate=0.5,
    local_steps=10,
    participation=1.0,
    eval_every=30,
)
QUICK_ROUNDS = 6
# The five first, then those that cluster in another way, then those of one model.
METHODS: dict[str, dict[str, Any]] = {
    **{name: {} for name in ("cfl", "cfl_gp", "fedgwc", "flag", "gradient_loss")},
    **{name: {} for name in ("ifca", "pacfl", "stocfl", "fl_hc", "flexcfl", "fesem", "fedsoft", "fedem")},
    **{name: {} for name in ("fedavg", "fedprox", "fairavg", "fedavgm", "scaffold", "per_fedavg")},
    **{name: {} for name in ("ditto", "fedper", "fedrep", "pfedme", "fedproto", "local_only")},
}
METHODS["flag"] = {"clusters": 20, "method_options": {"threshold": 0.5}}  # what its search finds
METHODS["fedem"] = {"learning_rate": 4 * BASE.learning_rate}  # whose learners move by a client's share in them
METHODS["fedgwc"] = {"participation": 0.25, "rounds": 60, "eval_every": 60}
METHODS["fedrep"] = METHODS["fedper"] = METHODS["fedproto"] = {"model": "mlp", "model_options": {"hidden": (32,)}}
QUICK_METHODS = ("ifca", "fedavg")
SHARES, MIDDLE = (0.1, 0.2, 0.3, 0.4), 0.2
RULES: dict[str, Aggregation | None] = {
    "mean": None,
    "median": aggregation.median(),
    "trimmed mean": aggregation.trimmed_mean(share=0.3),
    "clipping": aggregation.norm_clipping(1.0),
}
DRAWN = ("mean", "median")  # rules under which attackers are of every share
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
# Arguments of the programs: all faults of a method share one, and those in disguise a second.
SPOILT = {f"local.fault.{name}": 1.0 for name in ("times", "lost", "most_steps")}
Case = tuple[str, str, float]  # fault, rule, share


class nobody(faults.spoilt):
    """No fault, in the programs of runs with one."""

    def drawn(self, federation: Federation, seed: int) -> np.ndarray:
        return np.zeros(len(federation.train.num_examples), bool)

    @property
    def in_training(self) -> Fault:
        return faults.spoilt()


class Found(NamedTuple):
    """What a run has come to."""

    accuracy: float  # of the honest, in percent
    agreement: float  # ARI of the honest, NaN for a method of one model
    clusters: float  # that the honest are in
    finite: float  # 1.0 where all models are


def cases(quick: bool) -> list[Case]:
    """What every method is put through: all faults under all rules, and attackers of all shares under some."""
    every = {**ATTACKS, **BAD_LUCK}
    shares, rules = (SHARES[1:2], DRAWN) if quick else (SHARES, tuple(RULES))
    found: list[Case] = [("none", rule, 0.0) for rule in rules]
    found += [(name, rule, MIDDLE) for rule in rules for name in every]
    found += [(name, rule, share) for rule in DRAWN for name in ATTACKS for share in shares if share != MIDDLE]
    return found


def found_by(method: str, case: Case, seed: int, rounds: int | None = None) -> Found | None:
    """What a method's run has come to; None where the method has no place for the rule or the fault."""
    name, rule, share = case
    if (start := _start(method, rule, seed, rounds)) is None:
        return None
    algorithm, federation, config = start
    fault = nobody()
    if name in ATTACKS:
        fault = dataclasses.replace(ATTACKS[name], share=share)  # pyright: ignore[reportArgumentType]
    elif name in BAD_LUCK:
        fault = BAD_LUCK[name]
    if isinstance(fault, faults.infiltrators):
        fault = dataclasses.replace(fault, joins=config.rounds // 3)  # pyright: ignore[reportArgumentType]
    options: dict[str, Any] = {"seed": seed, "eval_every": config.rounds, "progress": False}
    if fault.shows and (algorithm.clusters_by == "nothing" or (algorithm.clusters_by == "changes" and not fault.late)):
        return None
    with lifting.one_program(SPOILT):
        result = simulate(algorithm, federation, rounds=config.rounds, fault=fault, **options)
    return _come_to(result)


@functools.lru_cache(maxsize=1)
def _start(method: str, rule: str, seed: int, rounds: int | None) -> tuple[Any, Federation, RunConfig] | None:
    """A method with a rule, its federation and its configuration; None where it has no place for the rule."""
    config = changed(BASE, method=method, seed=seed, **METHODS[method])
    config = config if rounds is None else changed(config, rounds=rounds, eval_every=rounds)
    config, federation = settled(config)
    algorithm: Any = build_algorithm(config)
    if RULES[rule] is None:
        return algorithm, federation, config
    if not any(field.name == "aggregation" and field.init for field in dataclasses.fields(algorithm)):
        return None
    return dataclasses.replace(algorithm, aggregation=RULES[rule]), federation, config


def _come_to(result: SimulationResult) -> Found:
    # Anybody may drop out.
    honest = np.ones_like(result.faulty) if result.faulty.all() else ~result.faulty
    of = "" if honest.all() else "_honest"
    single = getattr(result.algorithm, "clusters", 1) == 1
    agreement = NAN if single else float(result.history[f"adjusted_rand_index{of}"][-1])
    clusters = len(np.unique(result.labels[honest]))
    finite = bool(tree.all_finite(result.state.clusters.params))
    return Found(100 * float(result.history[f"accuracy{of}"][-1]), agreement, float(clusters), float(finite))


def _of_method(method: str, seeds: int, quick: bool) -> dict[Case, list[Found]]:
    """What a method comes to in each case, by seed; programs are compiled once, as the seeds follow one another."""
    found: dict[Case, list[Found]] = {}
    for case in sorted(cases(quick), key=lambda case: case[1]):
        of_seeds = [found_by(method, case, seed, QUICK_ROUNDS if quick else None) for seed in range(seeds)]
        found[case] = [each for each in of_seeds if each is not None]
    return {case: of_seeds for case, of_seeds in found.items() if of_seeds}


def _of_methods(methods: Sequence[str], seeds: int, quick: bool, kept: Kept) -> dict[str, dict[Case, list[Found]]]:
    """Methods side by side in processes of their own, as most of their time is compilation on a single core."""
    missing = [method for method in methods if _part(method, seeds) not in kept]
    found: Iterable[dict[Case, list[Found]]] = map(_of_method, missing, *map(itertools.repeat, (seeds, quick)))
    with contextlib.ExitStack() as stack:
        if not quick and missing:
            pool = stack.enter_context(ProcessPoolExecutor(provenance.cores(), multiprocessing.get_context("spawn")))
            found = pool.map(_of_method, missing, *map(itertools.repeat, (seeds, quick)))
        for done, (method, of_method) in enumerate(zip(missing, found, strict=True), len(methods) - len(missing) + 1):
            kept[_part(method, seeds)] = list(of_method.items())
            print(f"{done} of {len(methods)}: {method_name(method)}", file=sys.stderr, flush=True)
    return {
        method: {tuple(case): [Found(*each) for each in of_case] for case, of_case in kept[_part(method, seeds)]}
        for method in methods
    }


def _part(method: str, seeds: int) -> str:
    return f"{method}-seeds{seeds}"


def _attacks(seeds: int, quick: bool, kept: Kept) -> tuple[list[PaperRow], Mapping[str, Figure]]:
    methods = QUICK_METHODS if quick else tuple(METHODS)
    found = _of_methods(methods, seeds, quick, kept)
    rows: list[PaperRow] = []
    for method, of_method in found.items():
        for (name, rule, share), of_seeds in of_method.items():
            if not all(each.finite for each in of_seeds):
                raise RuntimeError(f"{method} under {name} with {rule} has left a model that is not finite")
            amount = f" {100 * share:.0f} %" if name in ATTACKS else ""
            rows += _rows(method_name(method), f"{name}{amount}, {rule}", of_seeds, seeds)
    return rows, pictures(found)


def _rows(method: str, column: str, of_seeds: list[Found], seeds: int) -> list[PaperRow]:
    table = np.array(of_seeds)
    mean = table.mean(0)
    deviation = table.std(0, ddof=1) if len(table) > 1 else np.full(table.shape[1], NAN)
    kinds = ("accuracy (%)", "ARI", "clusters")
    shared: dict[str, Any] = {"seeds": seeds, "dataset": BASE.dataset}
    return [
        PaperRow(method, column, kind, float(mean[place]), float(deviation[place]), **shared)
        for place, kind in enumerate(kinds)
        if not np.isnan(mean[place])
    ]


def pictures(found: Mapping[str, Mapping[Case, Sequence[Found]]]) -> dict[str, Figure]:
    """Accuracy and ARI of the honest by method, attack and share of attackers, and all faults under all rules."""

    def table(of: Sequence[str], columns: Sequence[Case], place: int) -> np.ndarray:
        nothing = [np.full(len(Found._fields), NAN)]
        return np.array([[np.mean(found[method].get(case, nothing), 0)[place] for case in columns] for method in of])

    grouped = [method for method, of in found.items() if not np.isnan(next(iter(of.values()))[0].agreement)]
    known = {share for of in found.values() for _, _, share in of} - {0.0}
    shares = sorted(known)
    percent = [0, *(round(100 * share) for share in shares)]
    drawn: dict[str, Figure] = {}
    for rule in DRAWN:
        columns = {name: [("none", rule, 0.0), *((name, rule, share) for share in shares)] for name in ATTACKS}
        for kind, place, of, limits in (("accuracy", 0, tuple(found), (0, 100)), ("ari", 1, tuple(grouped), (0, 1))):
            panels = {name: table(of, cases, place) for name, cases in columns.items()}
            label = f"{'Accuracy (%)' if kind == 'accuracy' else 'ARI'} of the honest; server: {rule}"
            drawn["" if (rule, kind) == ("mean", "accuracy") else f"{kind}-{rule}"] = share_panels(
                panels, [method_name(method) for method in of], percent, label, limits, below="Attackers (%)"
            )
    every = ("none", *BAD_LUCK, *ATTACKS)
    rules = [rule for rule in RULES if any(of == rule for cases in found.values() for _, of, _ in cases)]
    panels = {
        rule: table(tuple(found), [(name, rule, 0.0 if name == "none" else MIDDLE) for name in every], 0)
        for rule in rules
    }
    names, label = [method_name(method) for method in found], "Accuracy (%) of the honest, 20 % faulty"
    drawn["matrix"] = share_panels(panels, names, every, label, (0, 100), side=2)
    return drawn


ATTACKED = Study(
    name="attacks",
    title="What attackers do to clusters: every method, attack and share of attackers, with and without defence",
    reading="Ours; no paper has it. Digits at four rotations, 40 clients of about 31 training rows, a linear model (an "
    "MLP for FedPer, FedRep and FedProto), 30 rounds of ten local steps, all clients in each (FedGWC: 60 rounds of a "
    "quarter; FedEM: four times the others' rate). Attackers send -10 times their change, but those of label flip and "
    "schism, who send what they learn; those of the last four pass for the first group, divide it, or join it after a "
    "third of the rounds. Of drop-out all are honest, and each is absent in a fifth of the rounds. Crosses: the method "
    "has no such clustering, or no such server.",
    seeds=2,
    minutes=30.0,
    run=_attacks,
)
