"""Results that other programs have left: the authors' codes of CFL-GP, FedGWC, IFCA and PACFL, read beside our runs.

| code | file | what it holds |
|---|---|---|
| CFL-GP's (also its IFCA, MADMO and FedAvg) | `data_tracking/metrics.pickle` | accuracy and cluster of each client |
| FedGWC's | `results/tracking.json`, with the files beside it | losses, accuracies, the clusters at the end |
| IFCA's | `results.pickle` | accuracy, loss and clusters of each epoch |
| PACFL's baselines | `TRIAL_init_tacc_pr.npy` | accuracy of each round's clients before they train |

The last are IFCA, CFL, LG and Per-FedAvg; PACFL's own program leaves it once its lines that save are no comments. Of a
pickle numbers, texts, lists, dictionaries and arrays of numbers are read, and nothing else.
"""

from __future__ import annotations

import json
import pathlib
import pickle
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedjax_cluster.clustering.scores import adjusted_rand_index
from fedjax_cluster.experiments.outcomes import Outcome
from fedjax_cluster.files import UNREADABLE, read_json
from fedjax_cluster.options import as_path
from fedjax_cluster.simulation.history import History

METRICS, TRACKING, RESULTS = "metrics.pickle", "tracking.json", "results.pickle"
OF_A_FOLDER = (f"data_tracking/{METRICS}", METRICS, f"results/{TRACKING}", TRACKING)
ROUND_OF_CFL_GP = re.compile(r"c_round_(\d+)")
OF_PACFL = re.compile(r"(.*)_init_tacc_pr\.npy")
NUMBERS = re.compile(r"[<>|=]?[biuf]\d{1,2}")
# What the figure is that CFL-GP's code calls accuracy, by its task; compression has dB.
OF_TASK = {"classification": "accuracy", "regression": "test_loss"}
DAMAGED = (*UNREADABLE, pickle.UnpicklingError, LookupError, TypeError, AttributeError)


class Read(NamedTuple):
    """A run of another program."""

    code: str
    history: History  # columns as `simulate` has them, NaN where a round has no value
    last: dict[str, float]  # each column's last value, which may be NaN
    clusters: np.ndarray | None  # i[M] of the clients at the end, where that is known


def read(path: str | pathlib.Path) -> Read:
    """What a run of another program has left.

    Args:
      path: one of the files above, or a folder that holds one.

    Returns:
      Its rounds, with accuracies as shares. CFL-GP's and PACFL's evaluate before a round: that stands with the round
      before.

    Raises:
      ValueError: nothing there that is known, or a damaged file.
    """
    path = _file(as_path("path", path))
    try:
        if path.suffix == ".json":
            return _fedgwc(path)
        if path.suffix == ".npy":
            return _pacfl(path)
        with path.open("rb") as file:
            content = _plain(_Numbers(file).load(), {})
        if isinstance(content, dict) and content and all(ROUND_OF_CFL_GP.fullmatch(str(name)) for name in content):
            return _cfl_gp(content, path.parent.parent / "config.json")
        if isinstance(content, list) and content and all("epoch" in epoch for epoch in content):
            return _ifca(content)
    except OSError as error:
        raise ValueError(f"{error.filename or path} cannot be read: {error.strerror or error}") from None
    except DAMAGED as error:
        raise ValueError(f"{path} is damaged, or no public code's results: {error}") from error
    raise ValueError(f"{path} holds no results of a public code that is known: of CFL-GP, FedGWC, IFCA or PACFL")


def outcomes(
    paths: Mapping[str, Sequence[str | pathlib.Path]], group: Sequence[int] | np.ndarray | None = None
) -> list[Outcome]:
    """Runs of other programs as rows of a comparison: label -> the files of its seeds, in their order.

    Args:
      paths: see `read`; seeds are numbered from 0.
      group: i[M], true groups of the clients, with which the last clusters are compared; −1 where none is known.

    Raises:
      ValueError: as of `read`, or other clients than `group` has.
    """
    found = []
    for label, files in paths.items():
        runs = [read(file) for file in files]
        summaries = [_summary(run, seed, group, label) for seed, run in enumerate(runs)]
        histories, codes = tuple(run.history for run in runs), " and ".join(dict.fromkeys(run.code for run in runs))
        # Nothing tells whether their data and ours are the same, so that they are not ranked.
        found.append(Outcome(label, tuple(summaries), histories, data={"program": codes}))
    return found


def named(words: Sequence[str]) -> dict[str, list[str]]:
    """Label -> paths, of words NAME=PATH.

    >>> named(["IFCA, its code=a/results.pickle", "IFCA, its code=b/results.pickle"])
    {'IFCA, its code': ['a/results.pickle', 'b/results.pickle']}
    """
    found: dict[str, list[str]] = {}
    for word in words:
        name, _, path = word.partition("=")
        if not name.strip() or not path:
            raise ValueError(f"beside is {word!r}; give a name and a path, such as 'IFCA, its code=results.pickle'")
        found.setdefault(name.strip(), []).append(path)
    return found


def _summary(run: Read, seed: int, group: Any, label: str) -> dict[str, Any]:
    rounds = len(run.history["round"])
    summary: dict[str, Any] = {"algorithm": run.code, "seed": seed, "rounds": rounds}
    names = {"accuracy": "accuracy", "test_loss": "test_loss", "train_loss": "loss", "num_clusters": "num_clusters"}
    summary |= {name: run.last[column] for name, column in names.items() if column in run.last}
    if not np.isfinite([*run.last.values()]).all():
        summary["first_round_not_finite"] = rounds - 1  # or before
    if run.clusters is None:
        return summary
    summary["clients"] = len(run.clusters)
    if group is not None:
        if len(group) != len(run.clusters):
            raise ValueError(f"{label} has {len(run.clusters)} clients, but group has {len(group)}")
        summary["adjusted_rand_index"] = float(adjusted_rand_index(run.clusters, np.asarray(group)))
    return summary


def _file(path: pathlib.Path) -> pathlib.Path:
    """The file of results that is meant by a path, which may be a folder."""
    if not path.is_dir():
        return path
    found = [path / name for name in OF_A_FOLDER if (path / name).is_file()]
    found += sorted(path.glob("results*.pickle"))
    found += sorted(each for each in path.glob("*.npy") if OF_PACFL.fullmatch(each.name))
    if not found:
        raise ValueError(f"{path} holds no results of a public code: give the file, such as {RESULTS}")
    if len(found) > 1:
        raise ValueError(f"{path} holds several results: {', '.join(each.name for each in found)}; give one")
    return found[0]


def _run(code: str, rounds: int, columns: Mapping[str, Mapping[int, float]], clusters: np.ndarray | None) -> Read:
    """A run of so many rounds with columns of values by round."""
    if not rounds:
        raise ValueError("it has no rounds")
    history, last = {"round": np.arange(rounds, dtype=float)}, {}
    for name, values in columns.items():
        if values:
            history[name] = np.full(rounds, np.nan)
            history[name][list(values)] = list(values.values())
            last[name] = float(values[max(values)])
    return Read(code, history, last, clusters)


# ---------------------------------------------------------------------------------------------- pickles


class _Numbers(pickle.Unpickler):
    """Reads numbers and what holds them. What NumPy's objects are made by is stood for by functions of our own."""

    def find_class(self, module: str, name: str) -> Any:
        stand_ins: dict[tuple[str, str], Callable[..., Any]] = {
            ("collections", "OrderedDict"): lambda *given: dict(*given),
            ("numpy", "ndarray"): lambda: None,  # named by what follows, and not made
            ("numpy", "dtype"): lambda kind, *_: _Dtype(kind),
            ("_codecs", "encode"): _bytes_of,
        }
        for core in ("numpy.core", "numpy._core"):
            stand_ins[f"{core}.multiarray", "_reconstruct"] = lambda *_: _Array()
            stand_ins[f"{core}.multiarray", "scalar"] = lambda dtype, data: _array(dtype, data, ())[()]
            stand_ins[f"{core}.numeric", "_frombuffer"] = lambda data, dtype, shape, order: _array(
                dtype, data, shape, order
            )
        if (module, name) not in stand_ins:
            raise pickle.UnpicklingError(f"it holds {module}.{name}, which is not read")
        return stand_ins[module, name]


class _Dtype:
    """A type of numbers."""

    def __init__(self, kind: str):
        if not (isinstance(kind, str) and NUMBERS.fullmatch(kind)):
            raise pickle.UnpicklingError(f"it holds values of the type {kind!r}, and not only numbers")
        self.dtype = np.dtype(kind)

    def __setstate__(self, state: tuple) -> None:
        if state[1] in ("<", ">"):
            self.dtype = self.dtype.newbyteorder(state[1])


class _Array:
    """An array until its values have been read."""

    def __setstate__(self, state: tuple) -> None:
        _, shape, dtype, fortran, data = state
        self.values = _array(dtype, data, shape, "F" if fortran else "C")


def _array(dtype: Any, data: Any, shape: Any, order: str = "C") -> np.ndarray:
    if not isinstance(dtype, _Dtype):
        raise pickle.UnpicklingError("it holds an array of something else than numbers")
    return np.frombuffer(bytes(data), dtype.dtype).reshape(shape, order="F" if order == "F" else "C")


def _bytes_of(text: str, encoding: str) -> bytes:
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"it holds bytes as {encoding!r}")
    return text.encode(encoding)


def _plain(value: Any, known: dict[int, Any]) -> Any:
    """A value with its arrays in place of what stands for them; what was one object stays one."""
    if id(value) not in known:
        if isinstance(value, _Array):
            known[id(value)] = value.values
        elif isinstance(value, dict):
            known[id(value)] = {_plain(name, known): _plain(of, known) for name, of in value.items()}
        elif isinstance(value, list | tuple):
            known[id(value)] = type(value)(_plain(of, known) for of in value)
        else:
            return value
    return known[id(value)]


# ------------------------------------------------------------------------------------------------ codes


def _cfl_gp(content: Mapping[str, Mapping[str, Any]], config: pathlib.Path) -> Read:
    rounds = [content[name] for name in sorted(content, key=lambda name: int(name.rpartition("_")[2]))]
    figures: dict[int, float] = {}
    clusters: dict[int, float] = {}
    before = None
    for number, of in enumerate(rounds):
        # Between evaluations the same array stands there again.
        if (found := of["client_accuracy"]) is not None and found is not before and number:
            figures[number - 1] = float(np.mean(found))
        before = found
        if (own := of["estimated_cluster_ids"]) is not None:
            clusters[number] = len(np.unique(own))
    last = rounds[-1]["estimated_cluster_ids"]
    task = read_json(config).get("task") if config.is_file() else None
    name = OF_TASK.get(task, "figure") if task else "accuracy"
    if name == "accuracy" and any(value < 0 or value > 1 for value in figures.values()):
        name = "figure"
    ids = None if last is None else np.asarray(last, int)
    return _run("CFL-GP's code", len(rounds), {name: figures, "num_clusters": clusters}, ids)


def _ifca(content: Sequence[Mapping[str, Any]]) -> Read:
    epochs = [epoch for epoch in content if epoch["epoch"] >= 0]  # before the first stands −1

    def column(part: str, name: str) -> dict[int, float]:
        return {row: float(epoch[part][name]) for row, epoch in enumerate(epochs) if name in epoch.get(part, {})}

    trained = {row: epoch.get("train", {}) for row, epoch in enumerate(epochs)}
    columns = {"accuracy": column("test", "acc"), "test_loss": column("test", "loss"), "loss": column("train", "loss")}
    columns["num_clusters"] = {row: int(np.count_nonzero(of["cl_ct"])) for row, of in trained.items() if "cl_ct" in of}
    ids = np.asarray(epochs[-1]["train"].get("cluster_assign", ()) if epochs else (), int)
    return _run("IFCA's code", len(epochs), columns, ids if len(ids) and (ids >= 0).all() else None)


def _fedgwc(path: pathlib.Path) -> Read:
    content = read_json(path)
    loss, every, tracked = content["train_track"]["loss"], int(content["test_evaluation_step"]), content["test_track"]
    columns: dict[str, dict[int, float]] = {"loss": dict(enumerate(loss))}
    last = read_json(end)["global"] if (end := path.with_name("evaluation.json")).is_file() else {}
    for name, own in (("accuracy", "accuracy"), ("balanced_accuracy", "balanced_accuracy"), ("test_loss", "loss")):
        columns[name] = {every * (place + 1) - 1: value for place, value in enumerate(tracked[own])}
        columns[name] |= {len(loss) - 1: last[own]} if own in last else {}
    clusters = _clusters_of_fedgwc(path.parent.parent / "clusters")
    columns["num_clusters"] = {} if clusters is None else {len(loss) - 1: len(np.unique(clusters))}
    return _run("FedGWC's code", len(loss), columns, clusters)


def _clusters_of_fedgwc(folder: pathlib.Path) -> np.ndarray | None:
    """The clients' clusters at the end, in the order of the numbers that their names begin with, as in 10.blur."""
    if not (folder / "clusters_ids.json").is_file():
        return None
    whose: dict[int, int] = {}
    for number, cluster in enumerate(_listed(folder / "clusters_ids.json")):
        members = _listed(folder / str(cluster) / "clients_ids.json")
        whose |= {int(str(client).partition(".")[0]): number for client in members}
    return np.array([whose[client] for client in sorted(whose)])


def _listed(path: pathlib.Path) -> list[Any]:
    found = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(found, list):
        raise ValueError(f"{path.name} holds no list")
    return found


def _pacfl(path: pathlib.Path) -> Read:
    named = OF_PACFL.fullmatch(path.name)
    if named is None:
        raise ValueError("its name is not that of accuracies before training, TRIAL_init_tacc_pr.npy")

    def values(kind: str) -> np.ndarray | None:
        if not (file := path.with_name(f"{named[1]}_{kind}.npy")).is_file():
            return None
        with file.open("rb") as content:
            found = np.lib.format.read_array(content, allow_pickle=False)
        if found.ndim != 1 or found.dtype.kind not in "biuf":
            raise ValueError(f"{file.name} holds no list of numbers")
        return found.astype(float)

    accuracy = values("init_tacc_pr")
    assert accuracy is not None
    rounds = len(accuracy)
    columns = {"accuracy": dict(enumerate(accuracy[1:] / 100))}  # in percent
    for name, kind, first in (("test_loss", "init_tloss_pr", 1), ("loss", "loss_train", 0)):
        if (found := values(kind)) is not None:
            if len(found) != rounds:
                raise ValueError(f"{named[1]}_{kind}.npy has {len(found)} rounds, and the accuracies have {rounds}")
            columns[name] = dict(enumerate(found[first:]))
    return _run("PACFL's code", rounds, columns, None)
