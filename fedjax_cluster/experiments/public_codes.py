"""Results that other programs have left: the authors' codes of CFL-GP, FedGWC, IFCA and PACFL, read beside our runs.

| code | file | what it holds |
|---|---|---|
| CFL-GP's (also its IFCA, MADMO and FedAvg) | `data_tracking/metrics.pickle` | accuracy and cluster of each client |
| FedGWC's | `results/tracking.json`, with the files beside it | losses, accuracies, the clusters at the end |
| IFCA's | `results.pickle` | accuracy, loss and clusters of each epoch |
| PACFL's (also its IFCA and others) | `TRIAL_init_tacc_pr.npy` | accuracy of each round's clients before they train |

Nothing of a file is run: of a pickle only numbers, lists, dictionaries and NumPy arrays are read.
"""

from __future__ import annotations

import io
import json
import pathlib
import pickle
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedjax_cluster.clustering.scores import adjusted_rand_index
from fedjax_cluster.experiments.outcomes import Outcome
from fedjax_cluster.files import read_json
from fedjax_cluster.options import as_path
from fedjax_cluster.simulation.history import History

METRICS, TRACKING = "metrics.pickle", "tracking.json"
ROUND_OF_CFL_GP = re.compile(r"c_round_(\d+)")
OF_PACFL = re.compile(r"(.*)_init_tacc_pr\.npy")
ALLOWED = {
    ("collections", "OrderedDict"),
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("_codecs", "encode"),  # of bytes in old pickles
    *((f"numpy.{core}.multiarray", name) for core in ("core", "_core") for name in ("_reconstruct", "scalar")),
    *((f"numpy.{core}.numeric", "_frombuffer") for core in ("core", "_core")),
}


class Read(NamedTuple):
    """A run of another program."""

    code: str
    history: History  # columns as `simulate` has them, NaN where a round has no value
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
            content = _Plain(file).load()
        if isinstance(content, dict) and content and all(ROUND_OF_CFL_GP.fullmatch(str(name)) for name in content):
            return _cfl_gp(content)
        if isinstance(content, list) and content and all("epoch" in epoch for epoch in content):
            return _ifca(content)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except (pickle.UnpicklingError, EOFError, KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
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
    last = {name: known[-1] for name, column in run.history.items() if len(known := column[np.isfinite(column)])}
    summary = {"algorithm": run.code, "seed": seed, "rounds": len(run.history["round"])}
    names = {"accuracy": "accuracy", "test_loss": "test_loss", "train_loss": "loss", "num_clusters": "num_clusters"}
    summary |= {name: float(last[column]) for name, column in names.items() if column in last}
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
    known = (*(f"data_tracking/{METRICS}", METRICS, f"results/{TRACKING}", TRACKING), "results.pickle")
    found = [path / name for name in known if (path / name).is_file()]
    found += sorted(each for each in path.glob("*.npy") if OF_PACFL.fullmatch(each.name))
    if not found:
        raise ValueError(f"{path} holds no results of a public code: give the file, such as results.pickle")
    if len(found) > 1:
        raise ValueError(f"{path} holds several results: {', '.join(each.name for each in found)}; give one")
    return found[0]


class _Plain(pickle.Unpickler):
    """Reads numbers and what holds them, and runs nothing."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ALLOWED:
            raise pickle.UnpicklingError(f"it holds {module}.{name}, which is not read")
        return super().find_class(module, name)


def _columns(rounds: int, **columns: np.ndarray) -> History:
    return {"round": np.arange(rounds, dtype=float), **{name: np.asarray(of, float) for name, of in columns.items()}}


def _cfl_gp(content: Mapping[str, Mapping[str, Any]]) -> Read:
    rounds = [content[name] for name in sorted(content, key=_number)]
    accuracy, clusters = np.full(len(rounds), np.nan), np.full(len(rounds), np.nan)
    before = None
    for number, of in enumerate(rounds):
        # Between evaluations the same array stands there again.
        if (found := of["client_accuracy"]) is not None and found is not before and number:
            accuracy[number - 1] = np.mean(found)
        before = found
        if (own := of["estimated_cluster_ids"]) is not None:
            clusters[number] = len(np.unique(own))
    last = rounds[-1]["estimated_cluster_ids"]
    ids = None if last is None else np.asarray(last, int)
    # Of regression and compression it is the squared error that is called so.
    name = "test_loss" if np.nanmax([0, *accuracy]) > 1 else "accuracy"
    return Read("CFL-GP's code", _columns(len(rounds), **{name: accuracy}, num_clusters=clusters), ids)


def _number(name: str) -> int:
    found = ROUND_OF_CFL_GP.fullmatch(name)
    assert found is not None
    return int(found[1])


def _ifca(content: Sequence[Mapping[str, Any]]) -> Read:
    epochs = [epoch for epoch in content if epoch["epoch"] >= 0]
    if not epochs:
        raise ValueError("it has no epoch")
    train, test = ([epoch[part] for epoch in epochs] for part in ("train", "test"))
    ids = [np.asarray(each["cluster_assign"], int) for each in train]
    columns = {
        "accuracy": [each["acc"] for each in test],
        "test_loss": [each["loss"] for each in test],
        "loss": [each["loss"] for each in train],
        "num_clusters": [len(np.unique(each)) for each in ids],
    }
    return Read("IFCA's code", _columns(len(epochs), **columns), ids[-1])


def _fedgwc(path: pathlib.Path) -> Read:
    content = read_json(path)
    loss, every = content["train_track"]["loss"], int(content["test_evaluation_step"])
    rounds, tracked = len(loss), content["test_track"]
    columns = {"loss": loss}
    for name, own in (("accuracy", "accuracy"), ("balanced_accuracy", "balanced_accuracy"), ("test_loss", "loss")):
        columns[name] = np.full(rounds, np.nan)
        if every:
            columns[name][every - 1 :: every] = tracked[own]
    if (last := path.with_name("evaluation.json")).is_file():
        whole = read_json(last)["global"]
        for name, own in (("accuracy", "accuracy"), ("balanced_accuracy", "balanced_accuracy"), ("test_loss", "loss")):
            columns[name][-1] = whole[own]
    clusters = _clusters_of_fedgwc(path.parent.parent / "clusters")
    if clusters is not None:
        columns["num_clusters"] = np.full(rounds, np.nan)
        columns["num_clusters"][-1] = len(np.unique(clusters))
    return Read("FedGWC's code", _columns(rounds, **columns), clusters)


def _clusters_of_fedgwc(folder: pathlib.Path) -> np.ndarray | None:
    """The clients' clusters at the end, in the order of the clients' names as numbers, or else as text."""
    if not (folder / "clusters_ids.json").is_file():
        return None
    whose: dict[str, int] = {}
    for number, cluster in enumerate(json.loads((folder / "clusters_ids.json").read_text(encoding="utf-8"))):
        members = json.loads((folder / str(cluster) / "clients_ids.json").read_text(encoding="utf-8"))
        whose |= {str(client): number for client in members}
    names = sorted(whose, key=lambda name: (not name.isdigit(), int(name) if name.isdigit() else 0, name))
    return np.array([whose[name] for name in names])


def _pacfl(path: pathlib.Path) -> Read:
    found = OF_PACFL.fullmatch(path.name)
    if found is None:
        raise ValueError("its name is not that of accuracies before training, TRIAL_init_tacc_pr.npy")
    # In percent.
    accuracy = np.load(io.BytesIO(path.read_bytes()), allow_pickle=False).astype(float).reshape(-1) / 100
    columns = {"accuracy": np.append(accuracy[1:], np.nan)}
    for name, file in (("test_loss", "init_tloss_pr"), ("loss", "loss_train")):
        if (beside := path.with_name(f"{found[1]}_{file}.npy")).is_file():
            values = np.load(io.BytesIO(beside.read_bytes()), allow_pickle=False).astype(float).reshape(-1)
            columns[name] = values if name == "loss" else np.append(values[1:], np.nan)
    return Read("PACFL's code", _columns(len(accuracy), **columns), None)
