"""Runs as their directories tell of them: read without their state, and grouped into experiments."""

from __future__ import annotations

import json
import logging
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedjax_cluster.experiments.config import KINDS
from fedjax_cluster.files import quoted, read_json
from fedjax_cluster.report.names import method_name, setting_in_words
from fedjax_cluster.simulation.evaluation import usual_every
from fedjax_cluster.simulation.run_directory import CONFIG, UNEVALUATED, listed, read_config, read_history

OF_THE_SEED = ("seed", "data")  # what seeds of one experiment differ in; the data follow from the configuration
DATA = "identity.data"
THE_METHOD = ("identity.algorithm", "method")
ITS_OPTIONS = ("identity.algorithm_config.", "method_options.")
OF_SEED = re.compile(r"-seed\d+$")  # in a run's directory
MOST_NAMED, LONGEST = 4, 30  # settings in a label; characters of one
RECIPE = "recipe.json"  # in the directory of a reproduction

logger = logging.getLogger(__name__)


class SavedRun(NamedTuple):
    """What a run left, without its state."""

    path: pathlib.Path
    method: str
    seed: int
    identity: Mapping[str, Any]
    experiment: Mapping[str, Any]  # empty for a run of `simulate` without a configuration
    summary: Mapping[str, Any]
    history: dict[str, np.ndarray]

    @property
    def rounds(self) -> int:
        """Those done: a run may have been interrupted, or extended."""
        return len(self.history["round"])

    @property
    def interrupted(self) -> bool:
        """Whether it has fewer rounds than its configuration asks for, or has not been evaluated after them."""
        asked = self.experiment.get("rounds")
        return bool(self.summary.get(UNEVALUATED)) or (isinstance(asked, int) and self.rounds < asked)

    @property
    def is_evaluated_as_usual(self) -> bool:
        """Whether how often it was evaluated is what follows from its rounds."""
        return bool(self.experiment) and self.experiment.get("eval_every") == usual_every(self.experiment["rounds"])

    @property
    def told(self) -> dict[str, Any]:
        """Its summary; of one that was interrupted with `rounds_asked`, how many rounds it was to have."""
        asked = self.experiment.get("rounds", self.rounds)
        return {**self.summary, **({"rounds_asked": asked} if self.interrupted else {})}

    def settings(self, *, identity: bool) -> dict[str, Any]:
        """What seeds of one experiment share, by name; with or without what the identity adds to a configuration."""
        experiment, options = dict(self.experiment), self.identity.get("algorithm_config")
        if experiment and isinstance(options, Mapping):
            # A configuration may leave out what has its default.
            shared = KINDS["method"].common
            experiment["method_options"] = {name: value for name, value in options.items() if name not in shared}
        flat = _flat(experiment, but=("seed", "rounds", "tuning"))
        if identity or not self.experiment:
            flat |= _flat(self.identity, "identity.", but=OF_THE_SEED if self.experiment else ("seed",))
        return {**flat, "rounds": self.rounds}


def find_runs(paths: Sequence[str | pathlib.Path]) -> list[pathlib.Path]:
    """The run directories among and below `paths`, in their order, each once; a ValueError where a path holds none."""
    found: dict[pathlib.Path, pathlib.Path] = {}
    for path in map(pathlib.Path, paths):
        try:
            runs = sorted(config.parent for config in path.rglob("config.json")) if path.is_dir() else []
        except OSError as error:
            raise ValueError(f"cannot read {path}: {error.strerror}") from error
        if not runs and (path / RECIPE).is_file():
            raise ValueError(
                f"{path} is a recipe's; fedjax-cluster resume {quoted(path)} does what is missing, and draws"
            )
        if not runs:
            raise ValueError(f"{path} is not a run directory and holds none; give a directory that a run left")
        for run in runs:
            found.setdefault(run.resolve(), run)
    return list(found.values())


def read_run(path: pathlib.Path) -> SavedRun:
    """What the run of a directory left.

    Raises:
      ValueError: it has not ended, or a file is damaged; says which.
    """
    config, summary, history = read_config(path), _read_summary(path / "summary.json"), read_history(path)
    identity = config["identity"]
    method, seed = identity.get("algorithm"), identity.get("seed")
    if not isinstance(method, str) or not isinstance(seed, int):
        raise ValueError(f"{path / 'config.json'} is damaged, or no run's: it does not hold a method and a seed")
    if not np.shape(history.get("round", 0)):
        raise ValueError(f"the history of {path} is damaged: it has no rounds; run it anew")
    run = SavedRun(path, method, seed, identity, config["experiment"] or {}, summary, history)
    if summary.get("rounds", run.rounds) != run.rounds:
        raise ValueError(
            f"{path} has a summary of {summary['rounds']} rounds and a history of {run.rounds}; "
            "it was ended on the way: continue it with resume"
        )
    return run


def refuse_filled(directory: pathlib.Path) -> None:
    """Raises a ValueError where the directory of a comparison to be begun holds a run, or what is not a comparison's.

    One that has lost its comparison.json still holds its runs, and is taken up.
    """
    if (directory / CONFIG).is_file():
        raise ValueError(f"the run directory {directory} holds a run, not a comparison; choose another directory")
    there = listed(directory)
    if there and not any(OF_SEED.search(path.name) and (path / CONFIG).is_file() for path in there):
        raise ValueError(f"the run directory {directory} is not empty and holds no comparison; choose another")


def grouped(paths: Sequence[pathlib.Path]) -> dict[str, dict[int, SavedRun]]:
    """Label -> seed -> run, of the runs in these directories.

    Each group has one experiment's runs, which differ in their seed alone, and in their data where these too are of the
    seed: no two runs of one seed have others, and no two seeds the same.

    Raises:
      ValueError: as of `read_run`.
    """
    runs = [read_run(path) for path in paths]
    but = (DATA,) if (drawn := _of_the_seed(runs)) else ()
    if drawn:
        logger.info(f"the data of the seeds {', '.join(map(str, drawn))} differ: drawn by the seed, they make one row")
    groups: dict[str, dict[int, SavedRun]] = {}
    for run in runs:
        settings = {name: value for name, value in run.settings(identity=True).items() if name not in but}
        seeds = groups.setdefault(json.dumps(settings, sort_keys=True), {})
        first = seeds.setdefault(run.seed, run)
        if first is not run:
            logger.warning(
                f"{run.path} is not counted: {first.path} is a run of the same experiment and seed {run.seed}"
            )
    firsts = [next(iter(seeds.values())) for seeds in groups.values()]
    labels = _labels(firsts, [len(seeds) > 1 for seeds in groups.values()], but)
    return dict(zip(labels, groups.values(), strict=True))


def _of_the_seed(runs: Sequence[SavedRun]) -> list[int]:
    """The seeds of runs of `simulate` that have each their own data; [] where the data are not the seed's."""
    data: dict[tuple[str, int], set[str]] = {}
    for run in runs:
        if not run.experiment:
            # The faulty are marked in their data.
            fault, own = (json.dumps(run.identity.get(name), sort_keys=True) for name in ("fault", "data"))
            data.setdefault((fault, run.seed), set()).add(own)
    whose = {(each, seed) for (_, seed), of_seed in data.items() for each in of_seed}
    one_each = all(len(of_seed) == 1 for of_seed in data.values()) and len({each for each, _ in whose}) == len(whose)
    seeds = sorted({seed for _, seed in data})
    return seeds if one_each and len(seeds) > 1 else []


def _labels(runs: Sequence[SavedRun], several: Sequence[bool], but: Sequence[str]) -> list[str]:
    """A label for each group's first run, no two alike: its method, and the settings in which it differs from others.

    Options of a method are named only beside the same method's. Where too many differ, the directory tells.
    """
    names = [method_name(run.method) for run in runs]
    # Two groups in one place are told apart by their first seeds.
    pooled = [
        OF_SEED.sub("", str(run.path)) if many else str(run.path) for run, many in zip(runs, several, strict=True)
    ]
    paths = pooled if len(set(pooled)) == len(pooled) else [str(run.path) for run in runs]
    placed = [f"{name} ({path})" for name, path in zip(names, paths, strict=True)]
    for identity in (False, True):
        settings = [run.settings(identity=identity) for run in runs]
        if all(run.is_evaluated_as_usual for run in runs):  # which the rounds tell
            settings = [{name: value for name, value in of.items() if name != "eval_every"} for of in settings]
        labels = []
        for name, own, by_place in zip(names, settings, placed, strict=True):
            alike = [others for others, of in zip(settings, names, strict=True) if of == name]
            parts = [
                setting_in_words(key, value)
                for key, value in own.items()
                if key not in (*THE_METHOD, *but) and _varies(key, alike if key.startswith(ITS_OPTIONS) else settings)
            ]
            brief = len(parts) <= MOST_NAMED and all(len(part) <= LONGEST for part in parts)
            labels.append(", ".join([name, *parts]) if brief else by_place)
        if len(set(labels)) == len(labels):
            return labels
    return placed


def _varies(key: str, settings: Sequence[Mapping[str, Any]]) -> bool:
    return any(others.get(key) != settings[0].get(key) for others in settings)


def _flat(settings: Mapping[str, Any], prefix: str = "", *, but: Sequence[str] = ()) -> dict[str, Any]:
    """Nested settings by their names joined with dots, but for some of the outermost."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        if name in but:
            continue
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {prefix + name: value}
    return flat


def _read_summary(path: pathlib.Path) -> dict[str, Any]:
    try:
        summary = read_json(path)
    except FileNotFoundError:
        raise ValueError(f"{path.parent} has no summary.json yet; continue the run with resume") from None
    except ValueError as error:
        raise ValueError(f"{error}; or delete it, and resume writes it anew") from None
    if not isinstance(summary.get("algorithm", ""), str):
        raise ValueError(f"{path} is damaged: its algorithm is no name; delete it, and resume writes it anew")
    return summary
