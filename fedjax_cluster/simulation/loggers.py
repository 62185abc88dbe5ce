"""Callbacks for `simulate` that hand each evaluation to a logger: JSON lines, TensorBoard, Weights & Biases, MLflow.

    fc.simulate(method, federation, rounds=100, callbacks=[fc.simulation.loggers.json_lines("log.jsonl")])

Figures that are not finite are left out. One logger is for one run: the lines do not tell whose they are. A resumed run
goes on with the rounds that are still to do; where it was killed after its last checkpoint, or in a callback, those
since then are done again, and logged again: of two lines of one round the later holds, and both are the same.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from typing import Any, Protocol

from fedjax_cluster import parallel
from fedjax_cluster.options import as_path
from fedjax_cluster.simulation.evaluation import Evaluation


class Log(Protocol):
    def __call__(self, evaluation: Evaluation, /) -> None:
        """Logs the figures of an evaluation under the number of rounds done."""
        ...


def json_lines(path: str | os.PathLike) -> Log:
    """Appends a line of JSON to a file after each evaluation: `round` (rounds done), and every figure by its name.

    Args:
      path: the file; folders that are missing are made.

    Raises:
      ValueError: it cannot be written.
    """
    path = as_path("path", path).absolute()  # a run may change the working directory
    if not parallel.is_first():
        return _nothing
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("a", encoding="utf-8").close()
    except OSError as error:
        raise ValueError(f"cannot write the log {path} ({error.strerror}); choose another file") from error

    def log(evaluation: Evaluation) -> None:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"round": evaluation.round, **_finite(evaluation)}) + "\n")

    return log


def tensorboard(folder: str | os.PathLike) -> Log:
    """Scalars for TensorBoard in event files below a folder; needs `pip install "fedjax_cluster[tensorboard]"`.

    Raises:
      ValueError: there is no tensorboardX, or the folder cannot be written.
    """
    try:
        from tensorboardX import SummaryWriter  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise _missing("TensorBoard's event files", "tensorboardX", "tensorboard") from None
    if not parallel.is_first():
        return _nothing
    try:
        writer = SummaryWriter(str(as_path("folder", folder).absolute()))
    except OSError as error:
        raise ValueError(f"cannot write the log {folder} ({error.strerror}); choose another folder") from error

    def log(evaluation: Evaluation) -> None:
        for name, value in _finite(evaluation).items():
            writer.add_scalar(name, value, evaluation.round)
        writer.flush()

    return log


def wandb(**options: Any) -> Log:
    """A run of Weights & Biases; needs `pip install "fedjax_cluster[wandb]"`.

    Args:
      **options: of `wandb.init`, such as project, name and config.

    Raises:
      ValueError: there is no wandb.
    """
    try:
        import wandb as library  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise _missing("Weights & Biases", "wandb", "wandb") from None
    if not parallel.is_first():
        return _nothing
    run = library.init(**options)

    def log(evaluation: Evaluation) -> None:
        run.log(_finite(evaluation), step=evaluation.round)

    return log


def mlflow(experiment: str | None = None) -> Log:
    """Metrics of MLflow's active run, which is begun where there is none; needs `pip install "fedjax_cluster[mlflow]"`.

    Args:
      experiment: its name; None leaves MLflow's own choice.

    Raises:
      ValueError: there is no mlflow.
    """
    try:
        import mlflow as library  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise _missing("MLflow", "mlflow", "mlflow") from None
    if not parallel.is_first():
        return _nothing
    if experiment is not None:
        library.set_experiment(experiment)

    def log(evaluation: Evaluation) -> None:
        library.log_metrics(_finite(evaluation), step=evaluation.round)

    return log


def _nothing(evaluation: Evaluation) -> None:
    """The log of any process but the first, which alone keeps one: in the others nothing is begun."""


def _finite(evaluation: Evaluation) -> Mapping[str, float]:
    figures = {name: float(value) for name, value in evaluation.figures.items()}
    return {name: value for name, value in figures.items() if math.isfinite(value)}


def _missing(what: str, package: str, extra: str) -> ValueError:
    return ValueError(f'there is no {package}, which {what} need; pip install "fedjax_cluster[{extra}]"')
