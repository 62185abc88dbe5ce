"""What pictures take from histories: a column, its label, and its values in the rounds that all seeds have."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from fedjax_cluster.report.judged_by import HONEST, of_honest, value_of

ARI = "adjusted_rand_index"
FULL = 1 - 1e-6  # an agreement that is one but for rounding

# Axis label of the history's columns, and factor to its unit; the others are labelled by their names.
COLUMNS: dict[str, tuple[str, float]] = {
    "accuracy": ("Test accuracy (%)", 100),
    "accuracy_std": ("Std of accuracy (%)", 100),
    "accuracy_worst_decile": ("Worst-decile accuracy (%)", 100),
    "balanced_accuracy": ("Balanced accuracy (%)", 100),
    "loss": ("Training loss", 1),
    "nmse": ("Normalized MSE (ratio)", 1),
    "perplexity": ("Test perplexity", 1),
    ARI: ("Adjusted Rand index", 1),
    f"accuracy{HONEST}": ("Honest clients' accuracy (%)", 100),
    f"{ARI}{HONEST}": ("Honest clients' ARI", 1),
    "num_clients": ("Participating clients", 1),
    "num_clusters": ("Clusters in use", 1),
    "num_changed": ("Clients changing cluster", 1),
    "num_rejected": ("Rejected updates", 1),
    "models_down": ("Models sent to clients", 1),
    "models_up": ("Updates sent back", 1),
    "clusterings": ("Clusterings on the server", 1),
    "clustering_seconds": ("Clustering time (s)", 1),
}

WIDE = 1e4  # times the (lower) median of the lines' ends

History = Mapping[str, np.ndarray]
Seeds = Mapping[str, Sequence[History]]


def column_label(name: str) -> tuple[str, float]:
    """Axis label of a column, and the factor that brings its values to the label's unit.

    >>> column_label("accuracy"), column_label("top_5")
    (('Test accuracy (%)', 100), ('Top 5', 1))
    """
    return COLUMNS.get(name, (name.replace("_", " ").capitalize(), 1))


def agreement_text(value: float) -> str:
    """An agreement with the groups in two digits, or in four where it is not quite one.

    >>> agreement_text(0.996), agreement_text(1.0)
    ('0.9960', '1.00')
    """
    return f"{value:.2f}" if value < 1 - 5e-3 or value >= FULL else f"{min(value, 0.9999):.4f}"


def by_seed(histories: Mapping[str, History | Sequence[History]]) -> dict[str, list[History]]:
    """Every method with the list of its seeds' histories; ValueError for no method, or one without a round."""
    seeds = {name: [runs] if isinstance(runs, Mapping) else list(runs) for name, runs in histories.items()}
    if not seeds:
        raise ValueError("histories is empty; give at least one method's history")
    for name, runs in seeds.items():
        if not runs or any("round" not in history or not len(history["round"]) for history in runs):
            raise ValueError(f"the history of {name} has no rounds; give a run of at least one round")
    return seeds


def has_values(seeds: Seeds, name: str) -> bool:
    """Whether any history has a finite value in this column."""
    columns = [value_of(history, name) for runs in seeds.values() for history in runs]
    return any(bool(np.isfinite(np.asarray(column, np.float64)).any()) for column in columns if column is not None)


def chosen_metric(seeds: Seeds, metric: str | None) -> str:
    """`metric`, or the first of accuracy, test loss and training loss that has values; ValueError for no such column.

    Where there are figures of the honest clients alone, these are taken. A column without a value is taken where no
    other has one: nothing of a run was finite.
    """
    every = [history for runs in seeds.values() for history in runs]
    wanted = (of_honest("accuracy", every), "test_loss", "loss") if metric is None else (metric,)
    columns = {name for runs in seeds.values() for history in runs for name in history}
    known = [name for name in wanted if has_values(seeds, name)] or [name for name in wanted if name in columns]
    if known:
        return known[0]
    if metric is None:
        raise ValueError("no history has an accuracy, a test loss or a training loss; name a column as `metric`")
    names = sorted({name for runs in seeds.values() for history in runs for name in history} - {"round"})
    known = [name for name in names if has_values(seeds, name)]
    raise ValueError(f"no history has a value of '{metric}'; choose one of {', '.join(known)}")


def evaluated(runs: Sequence[History], name: str, method: str) -> tuple[np.ndarray, np.ndarray]:
    """The rounds [n] at which all seeds with any value have one, and the values [seeds, n]; n is 0 without values.

    ValueError where the seeds have values, but no round in common.

    >>> history = {"round": np.arange(3.0), "accuracy": np.asarray([np.nan, 0.5, 0.75])}
    >>> evaluated([history], "accuracy", "ifca")
    (array([1., 2.]), array([[0.5 , 0.75]]))
    """
    known = []
    for history in runs:
        values = value_of(history, name)
        column = np.asarray(() if values is None else values, np.float64)
        finite = np.isfinite(column)
        if finite.any():
            known.append((np.asarray(history["round"], np.float64)[finite], column[finite]))
    if not known:
        return np.zeros(0), np.zeros((1, 0))
    rounds = functools.reduce(np.intersect1d, [seed[0] for seed in known])
    if not len(rounds):
        raise ValueError(f"the seeds of {method} have '{name}' in no common round; run them with the same `eval_every`")
    return rounds, np.stack([values[np.isin(at, rounds)] for at, values in known])


def is_wide(lines: Iterable[np.ndarray]) -> bool:
    """Whether an axis must be logarithmic for lines to be told apart: of one that grows beyond all measure, say.

    >>> is_wide([np.asarray([0.5, 0.1]), np.asarray([3.0, 4e9])]), is_wide([np.asarray([2.3, 0.01])])
    (True, False)
    """
    finite = [line[np.isfinite(line)] for line in lines]
    ends = sorted(line[-1] for line in finite if line.size)
    values = np.concatenate([*finite, np.zeros(0)])
    return bool(ends) and bool(values.min() > 0 and values.max() > WIDE * ends[(len(ends) - 1) // 2])


def not_finite(history: History) -> np.ndarray:
    """bool[rounds]: whose training loss was not finite, other than because nobody took part."""
    lost = ~np.isfinite(np.asarray(history.get("loss", np.zeros(len(history["round"]))), np.float64))
    if "num_clients" in history and "num_rejected" in history:
        lost &= np.asarray(history["num_clients"]) + np.asarray(history["num_rejected"]) > 0
    return lost


def not_finite_from(history: History) -> int | None:
    """The round, counted from 1, from which on a run was not finite to its end; None where it ended well.

    Whose last cohorts sent nothing ended well: its last evaluation has figures.

    >>> history = {"round": np.arange(4.0), "loss": np.asarray([2.0, np.nan, 3.0, np.nan])}
    >>> not_finite_from(history)
    4
    """
    lost = not_finite(history)
    if not lost[-1]:
        return None
    if any(np.isfinite(history[name][-1]) for name in ("accuracy", "test_loss") if name in history):
        return None
    return 1 if lost.all() else len(lost) - int(np.argmin(lost[::-1])) + 1


def end_not_finite(runs: Iterable[History], name: str) -> bool:
    """Whether a run that has a value in this column was not finite at its end."""
    return any(not_finite_from(run) and has_values({"": [finite_part(run)]}, name) for run in runs)


def finite_part(history: History) -> History:
    """A history up to where the run was not finite any more."""
    since = not_finite_from(history)
    return history if since is None else {name: column[: since - 1] for name, column in history.items()}


def with_gaps(
    runs: Sequence[History], rounds: np.ndarray, mean: np.ndarray, deviation: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rounds, counted from 1, and their values [n] with a NaN between neighbours where a run was not finite."""
    lost = 1 + np.unique(np.concatenate([np.asarray(run["round"])[not_finite(run)] for run in runs]))
    between = np.searchsorted(lost, rounds[1:]) > np.searchsorted(lost, rounds[:-1], side="right")
    after = 1 + np.flatnonzero(between)
    at = np.insert(rounds, after, rounds[after] - 0.5)
    return at, np.insert(mean, after, np.nan), np.insert(deviation, after, np.nan)
