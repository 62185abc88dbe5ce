"""FedAvg in pfl, Apple's simulator: the MLP 784-200-10 from given parameters, one epoch a round."""

from __future__ import annotations

import contextlib
import json
import pathlib
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
from pfl.aggregate.simulate import SimulatedBackend  # pyright: ignore[reportMissingImports]
from pfl.algorithm.base import NNAlgorithmParams  # pyright: ignore[reportMissingImports]
from pfl.algorithm.federated_averaging import FederatedAveraging  # pyright: ignore[reportMissingImports]
from pfl.callback.base import TrainingProcessCallback  # pyright: ignore[reportMissingImports]
from pfl.data.dataset import Dataset  # pyright: ignore[reportMissingImports]
from pfl.data.federated_dataset import FederatedDataset  # pyright: ignore[reportMissingImports]
from pfl.hyperparam import NNTrainHyperParams  # pyright: ignore[reportMissingImports]
from pfl.metrics import Metrics  # pyright: ignore[reportMissingImports]
from pfl.model.pytorch import PyTorchModel  # pyright: ignore[reportMissingImports]

LAYERS = (("hidden", "hidden_0"), ("output", "output"))


class Mlp(torch.nn.Module):
    def __init__(self, weights: dict[str, Any]):
        super().__init__()
        self.hidden, self.output = torch.nn.Linear(784, 200), torch.nn.Linear(200, 10)
        with torch.no_grad():
            for layer, name in LAYERS:
                getattr(self, layer).weight.copy_(weights[f"{name}/kernel"])
                getattr(self, layer).bias.copy_(weights[f"{name}/bias"])

    def weights(self) -> dict[str, Any]:
        parts = {"kernel": "weight", "bias": "bias"}
        return {
            f"{name}/{part}": getattr(getattr(self, layer), theirs).detach().clone()
            for layer, name in LAYERS
            for part, theirs in parts.items()
        }

    def forward(self, x: Any) -> Any:
        return self.output(torch.relu(self.hidden(x.float().flatten(1) / 255)))

    def loss(self, x: Any, y: Any, eval: bool = False) -> Any:
        return torch.nn.functional.cross_entropy(self(x), y)

    def metrics(self, x: Any, y: Any, eval: bool = True) -> dict[str, Any]:
        return {}


class Clock(TrainingProcessCallback):
    """Notes when each round ends."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def after_central_iteration(self, aggregate_metrics: Metrics, model: Any, *, central_iteration: int):
        self.ends.append(time.perf_counter())
        return False, Metrics()


def fedavg(
    weights: dict[str, Any],
    x: np.ndarray,
    y: np.ndarray,
    batch: int,
    rate: float,
    rounds: int,
    threads: int,
    cohort: int | None = None,
) -> tuple[list[float], dict[str, Any]]:
    """Rounds in which every client of a cohort, or of all, goes once through its rows, in their order.

    Returns:
      The seconds of every round but the first, and the parameters after the last.
    """
    torch.set_num_threads(threads)
    draw, size = np.random.default_rng(0), len(x) if cohort is None else cohort

    def users() -> Iterator[int]:
        while True:
            yield from range(len(x)) if cohort is None else draw.choice(len(x), cohort, replace=False).tolist()

    def rows_of(user: int) -> Dataset:
        return Dataset([torch.from_numpy(np.array(part[user])) for part in (x, y)], user_id=str(user))

    order = users()
    module = Mlp(weights)
    seconds = train(module, FederatedDataset(rows_of, lambda: next(order)), size, batch, rate, rounds)
    return seconds, module.weights()


def train(
    module: torch.nn.Module, dataset: FederatedDataset, cohort: int, batch: int, rate: float, rounds: int
) -> list[float]:
    """FedAvg of one epoch a round, as pfl runs it; the seconds of every round but the first."""
    clock = Clock()
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=rounds,
            # The first round is evaluated whatever is asked for, and is not counted.
            evaluation_frequency=rounds + 1,
            train_cohort_size=cohort,
            val_cohort_size=0,
        ),
        backend=SimulatedBackend(training_data=dataset, val_data=dataset),
        model=PyTorchModel(module, torch.optim.SGD, torch.optim.SGD(module.parameters(), lr=1.0)),
        model_train_params=NNTrainHyperParams(
            local_learning_rate=rate, local_num_epochs=1, local_batch_size=batch, local_max_grad_norm=None
        ),
        model_eval_params=None,
        callbacks=[clock],
    )
    return [after - before for before, after in zip(clock.ends, clock.ends[1:], strict=False)]


def run_alone(folder: str, batch: str, rate: str, rounds: str, threads: str, cohort: str) -> None:
    """In a separate process: prints the seconds of every round; cohorts' rows are read from a file."""
    home = pathlib.Path(folder)
    weights = {name: torch.from_numpy(value) for name, value in np.load(home / "weights.npz").items()}
    x, y = (np.load(home / f"{name}.npy", mmap_mode="r") for name in "xy")
    with contextlib.redirect_stdout(sys.stderr):  # pfl prints its metrics
        seconds, _ = fedavg(weights, x, y, int(batch), float(rate), int(rounds) + 1, int(threads), int(cohort))
    print(json.dumps({"seconds": seconds}))
