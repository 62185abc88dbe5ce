"""Local training of many clients: share of the machine's matrix-product rate, and what a second device brings."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax

from fedjax_cluster import local, nn, parallel
from fedjax_cluster.bench.measure import Bench, Row, calling, run_python, timed
from fedjax_cluster.bench.workloads import CIFAR, DIGITS, local_training, noise_clients
from fedjax_cluster.nn.flops import gradient_flops
from fedjax_cluster.nn.precision import Precision
from fedjax_cluster.types import ClientMapping, DatasetInfo, Model

TEXT = DatasetInfo("noise of 30 tokens", (30,), 1000, "language")


class Case(NamedTuple):
    model: Model
    info: DatasetInfo
    clients: int
    steps: int
    batch: int

    @property
    def size(self) -> str:
        return f"{self.clients} clients × {self.steps} steps × b={self.batch}"

    @property
    def flops(self) -> float:
        return self.clients * self.steps * gradient_flops(self.model, self.info, self.batch)


LENET_BATCHES = (10, 16, 20, 32, 64, 100)
# The sizes of the project's targets.
CASES = {
    "MLP 784-200-10": Case(nn.mlp(), DIGITS, 32, 10, 64),
    "MLP 784-200-10, one step": Case(nn.mlp(), DIGITS, 32, 1, 64),
    "MLP 784-200-10, small batches": Case(nn.mlp(), DIGITS, 32, 10, 16),
    "MLP 3072-32-10": Case(nn.mlp((32,)), CIFAR, 10, 7, 64),
    "CNN 5×5 (32, 64)": Case(nn.cnn(), DIGITS, 16, 2, 32),
    "CNN 5×5 (32, 64), b=10": Case(nn.cnn(), DIGITS, 16, 6, 10),
    "CNN 5×5 (32, 64), b=64": Case(nn.cnn(), DIGITS, 16, 1, 64),
    "ResNet-18": Case(nn.resnet18(), CIFAR, 8, 1, 16),
    # An epoch of 360 rows.
    **{f"LeNet-5, b={batch}": Case(nn.lenet5(), DIGITS, 10, -(-360 // batch), batch) for batch in LENET_BATCHES},
    **{f"LeNet-5, CIFAR, b={batch}": Case(nn.lenet5(), CIFAR, 10, -(-360 // batch), batch) for batch in (10, 50)},
    "LSTM 200, 200": Case(nn.lstm(), TEXT, 8, 2, 16),
}
SMOKE = {
    "MLP": Case(nn.mlp(hidden=(8,)), DIGITS, 4, 2, 8),
    "LSTM": Case(nn.lstm((8,), embedding=8), DatasetInfo("noise", (5,), 20, "language"), 2, 1, 4),
}
LEAST_FRACTION = {"MLP 784-200-10": 0.65, **{f"LeNet-5, b={b}": 0.3 if b >= 32 else 0.2 for b in LENET_BATCHES}}
# Measured in bfloat16 too, and in a process with a single device.
MAIN_CASES = ("MLP 784-200-10", "CNN 5×5 (32, 64)")
SECOND_DEVICE = 1.4


def run(bench: Bench) -> None:
    cases = SMOKE if bench.smoke else CASES
    for name, case in cases.items():
        least, repetitions = LEAST_FRACTION.get(name, float("nan")), 5 if "ResNet" in name else 9
        row = partial(bench.row, flops=case.flops, at_least=least, repetitions=repetitions)
        row(f"{name}, local training", case.size, training(case))
    for name in ("MLP",) if bench.smoke else MAIN_CASES:
        in_bfloat16(bench, name, cases[name])
    if jax.default_backend() == "cpu" and jax.device_count() > 1 and not bench.smoke:
        for name in MAIN_CASES:
            bench.add(second_device(name))


def training(case: Case, precision: Precision = "float32", mapping: ClientMapping | None = None) -> Callable[[], Any]:
    data = noise_clients(case.info, case.clients, 4 * case.batch)
    update = local.sgd(0.1, batch_size=case.batch, steps=case.steps, precision=precision)
    return local_training(case.model, case.info, data, update, mapping)


def in_bfloat16(bench: Bench, name: str, case: Case, mapping: ClientMapping | None = None) -> None:
    """Training in bfloat16 with float32 masters against float32: what the option brings on this machine."""
    run, peers = training(case, "bfloat16", mapping), {"the same in float32": training(case, mapping=mapping)}
    bench.row(f"{name}, local training in bfloat16", case.size, run, flops=case.flops, peers=peers, repetitions=5)


def second_device(name: str) -> Row:
    """A process with a device per core against one with a single device, in turns, each timed by its own clock.

    The single device has XLA's default threads, as it would without this package's advice.
    """
    seconds: dict[int, list[float]] = {1: [], jax.device_count(): []}
    for _ in range(3):
        for devices, taken in seconds.items():
            taken += run_python(*calling(time_alone), name, devices)["seconds"]
    one, several = (statistics.median(taken) for taken in seconds.values())
    row = Row(f"{name}, a device per core", CASES[name].size, several, len(seconds[1]), peer_seconds=one)
    return row.against("one XLA device", one / several, SECOND_DEVICE)


def time_alone(name: str, devices: str) -> None:
    """In a separate process: prints the seconds of five runs on so many devices."""
    if int(devices) > 1:
        parallel.use_all_cores(int(devices))
    run = training(CASES[name])
    jax.block_until_ready(run())
    print(json.dumps({"seconds": [timed(run) for _ in range(5)]}))
