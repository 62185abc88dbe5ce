"""Local training of many clients: share of the machine's matrix-product rate, and what a second device brings."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from fedjax_cluster import local, nn, parallel
from fedjax_cluster.bench.measure import Bench, Row, in_a_process
from fedjax_cluster.bench.workloads import CIFAR, DIGITS, local_training, noise_clients, noise_texts
from fedjax_cluster.nn.flops import gradient_flops
from fedjax_cluster.nn.precision import Precision
from fedjax_cluster.types import ClientMapping, DatasetInfo, Model

TEXT = DatasetInfo("noise of 30 tokens", (30,), 1000, "language")

Case = tuple[Model, DatasetInfo, int, int, int]  # model, data, clients, steps, batch size
# The sizes of the project's aims.
CASES: dict[str, Case] = {
    "MLP 784-200-10": (nn.mlp(), DIGITS, 32, 10, 64),
    "MLP 784-200-10, one step": (nn.mlp(), DIGITS, 32, 1, 64),
    "MLP 784-200-10, small batches": (nn.mlp(), DIGITS, 32, 10, 16),
    "CNN 5×5 (32, 64)": (nn.cnn(), DIGITS, 16, 2, 32),
    "ResNet-18": (nn.resnet18(), CIFAR, 8, 1, 16),
    "LSTM 200, 200": (nn.lstm(), TEXT, 8, 2, 16),
}
SMOKE: dict[str, Case] = {
    "MLP": (nn.mlp(hidden=(8,)), DIGITS, 4, 2, 8),
    "LSTM": (nn.lstm((8,), embedding=8), DatasetInfo("noise", (5,), 20, "language"), 2, 1, 4),
}
LEAST_FRACTION = {"MLP 784-200-10": 0.65}
# Measured with a second device beside them; a process of one device is started for each.
BESIDE_ONE_DEVICE = ("MLP 784-200-10", "CNN 5×5 (32, 64)")
SECOND_DEVICE = 1.4


def run(bench: Bench) -> None:
    for name, case in (SMOKE if bench.smoke else CASES).items():
        model, info, clients, steps, batch = case
        flops = clients * steps * gradient_flops(model, info, batch, sequence=info.task == "language")
        bench.row(
            f"{name}, local training",
            f"{clients} clients × {steps} steps × b={batch}",
            training(case),
            flops=flops,
            at_least=LEAST_FRACTION.get(name, float("nan")),
            repetitions=5 if "ResNet" in name else 9,
        )
    in_bfloat16(bench, SMOKE if bench.smoke else CASES, ("MLP",) if bench.smoke else BESIDE_ONE_DEVICE)
    if jax.default_backend() != "cpu" or jax.device_count() < 2 or bench.smoke:
        return
    for name in BESIDE_ONE_DEVICE:
        bench.add(second_device(name))


def training(case: Case, precision: Precision = "float32", mapping: ClientMapping | None = None) -> Callable[[], Any]:
    model, info, clients, steps, batch = case
    data = (noise_texts if info.task == "language" else noise_clients)(info, clients, 4 * batch)
    own = local.sgd(0.1, batch_size=batch, steps=steps, precision=precision)
    return local_training(model, info, data, own, mapping)


def in_bfloat16(
    bench: Bench, cases: Mapping[str, Case], names: Sequence[str], mapping: ClientMapping | None = None
) -> None:
    """Training in bfloat16 with float32 masters, beside float32: what the option brings on this machine."""
    for name in names:
        model, info, clients, steps, batch = cases[name]
        bench.row(
            f"{name}, local training in bfloat16",
            f"{clients} clients × {steps} steps × b={batch}",
            training(cases[name], "bfloat16", mapping),
            flops=clients * steps * gradient_flops(model, info, batch),
            peers={"the same in float32": training(cases[name], mapping=mapping)},
            repetitions=5,
        )


def second_device(name: str) -> Row:
    """One process with a device per core beside one with a single device, each timed by its own clock in turns.

    The single device has XLA's own threads, as it would have without this package's advice.
    """
    code = "import sys; from fedjax_cluster.bench import local_suite as own; own.timed_alone(*sys.argv[1:])"
    seconds: dict[int, list[float]] = {1: [], jax.device_count(): []}
    for _ in range(3):
        for devices, own in seconds.items():
            own += in_a_process(code, name, devices)["seconds"]
    medians = {devices: sorted(own)[len(own) // 2] for devices, own in seconds.items()}
    several = medians[jax.device_count()]
    _, _, clients, steps, batch = CASES[name]
    return Row(
        f"{name}, a device per core",
        f"{clients} clients × {steps} steps × b={batch}",
        several,
        len(seconds[1]),
        peer="one XLA device",
        peer_seconds=medians[1],
        ratio=medians[1] / several,
        at_least=SECOND_DEVICE,
    )


def timed_alone(name: str, devices: str) -> None:
    """In a process of its own: prints the seconds of five runs on so many devices."""
    if int(devices) > 1:
        parallel.use_all_cores(int(devices))
    run = training(CASES[name])
    jax.block_until_ready(run())
    seconds = []
    for _ in range(5):
        started = time.perf_counter()
        jax.block_until_ready(run())
        seconds.append(time.perf_counter() - started)
    print(json.dumps({"seconds": seconds}))
