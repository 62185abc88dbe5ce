"""FedAvg in Flower's simulation engine: the MLP 784-200-10 from given parameters, one epoch a round.

`write_work` leaves the work in a folder, `run_alone` does it in a separate process. Does not import JAX, so that the
engine's worker processes need not load it.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import pathlib
import time
from collections.abc import Iterable, Mapping
from typing import Any

import flwr.simulation  # pyright: ignore[reportMissingImports]
import numpy as np
import torch  # pyright: ignore[reportMissingImports]
import torch.nn.functional as F  # pyright: ignore[reportMissingImports]
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict  # pyright: ignore[reportMissingImports]
from flwr.clientapp import ClientApp  # pyright: ignore[reportMissingImports]
from flwr.serverapp import Grid, ServerApp  # pyright: ignore[reportMissingImports]
from flwr.serverapp.strategy import FedAvg  # pyright: ignore[reportMissingImports]


def write_work(folder: pathlib.Path, weights: Mapping[str, Any], x: np.ndarray, y: np.ndarray) -> None:
    """Leaves the start and every client's rows, in the order in which it goes through them."""
    np.savez(folder / "weights.npz", **{name: np.asarray(value) for name, value in weights.items()})  # pyright: ignore[reportArgumentType]
    np.save(folder / "x.npy", x)
    np.save(folder / "y.npy", y.astype(np.int64))


def train(message: Message, context: Context, folder: pathlib.Path, batch: int, rate: float, threads: int) -> Message:
    """One client's epoch."""
    torch.set_num_threads(threads)
    client = int(context.node_config["partition-id"])
    x, y = (torch.from_numpy(np.array(np.load(folder / f"{name}.npy", mmap_mode="r")[client])) for name in "xy")
    weights = {name: value.requires_grad_() for name, value in message.content["arrays"].to_torch_state_dict().items()}
    leaves = list(weights.values())
    for start in range(0, len(x), batch):
        images = x[start : start + batch].float().flatten(1) / 255
        hidden = F.relu(F.linear(images, weights["hidden_0/kernel"], weights["hidden_0/bias"]))
        outputs = F.linear(hidden, weights["output/kernel"], weights["output/bias"])
        gradient = torch.autograd.grad(F.cross_entropy(outputs, y[start : start + batch]), leaves)
        with torch.no_grad():
            torch._foreach_add_(leaves, gradient, alpha=-rate)
    content = {
        "arrays": ArrayRecord({name: value.detach() for name, value in weights.items()}),
        "metrics": MetricRecord({"num-examples": len(x)}),
    }
    return Message(content=RecordDict(content), reply_to=message)


class TimedFedAvg(FedAvg):
    """Flower's FedAvg, with the time from handing out the model to having averaged the replies."""

    def __init__(self, share: float) -> None:
        super().__init__(fraction_train=share, fraction_evaluate=0.0)
        self.seconds: list[float] = []

    def configure_train(self, *arguments: Any) -> Iterable[Message]:
        self.started = time.perf_counter()
        return super().configure_train(*arguments)

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
        found = super().aggregate_train(server_round, replies)
        self.seconds.append(time.perf_counter() - self.started)
        return found


def run_alone(folder: str, batch: str, rate: str, rounds: str, threads: str, cohort: str = "") -> None:
    """Leaves the parameters after the first round in the folder, and prints the seconds of every round."""
    logging.getLogger("flwr").setLevel(logging.ERROR)
    home = pathlib.Path(folder)
    clients = len(np.load(home / "y.npy", mmap_mode="r"))
    strategy = TimedFedAvg(int(cohort or clients) / clients)
    client_app, server_app = ClientApp(), ServerApp()
    client_app.train()(functools.partial(train, folder=home, batch=int(batch), rate=float(rate), threads=int(threads)))

    @server_app.main()
    def main(grid: Grid, context: Context) -> None:
        def keep(server_round: int, arrays: ArrayRecord) -> None:
            if server_round == 1:
                np.savez(home / "after.npz", **{name: value.numpy() for name, value in arrays.items()})

        start = ArrayRecord({name: torch.from_numpy(value) for name, value in np.load(home / "weights.npz").items()})
        strategy.start(grid, start, num_rounds=int(rounds), evaluate_fn=keep)

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    flwr.simulation.run_simulation(
        server_app,
        client_app,
        num_supernodes=clients,
        backend_config={
            "client_resources": {"num_cpus": int(threads), "num_gpus": 0.0},
            "init_args": {"num_cpus": cores, "log_to_driver": False, "include_dashboard": False},
        },
    )
    print(json.dumps({"seconds": strategy.seconds}))
