"""A round of FedAvg compared with two other simulators, pfl and Flower's engine; one of the two is enough.

All start from the same parameters, and every client goes through its rows in the order of our first round; the losses
of the models after that round are compared before anything is timed.
"""

from __future__ import annotations

import contextlib
import importlib.util
import pathlib
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
import torch  # pyright: ignore[reportMissingImports]

from benchmarks.peers import RATE, torch_loop
from benchmarks.peers.cfl_gp import mlp
from benchmarks.peers.same_work import Run, batches_of, check_losses, models_of
from fedjax_cluster import local, nn
from fedjax_cluster.algorithms import REGISTRY
from fedjax_cluster.bench.measure import Bench, Row, calling, each_seconds, in_turns, run_python
from fedjax_cluster.bench.workloads import DIGITS, noise_clients

PFL_TARGET, FLOWER_TARGET = 1.3, 4.0
# Nothing is reported to Flower's or Ray's makers.
SILENT: dict[str, Any] = {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0"}


class Work(NamedTuple):
    size: str
    x: np.ndarray  # u8[M, N, 28, 28], in the order of our first round
    y: np.ndarray  # i64[M, N]
    batch: int
    start: Mapping[str, Any]  # PyTorch's parameters
    loss: float  # of all clients' rows, after our first round
    one_round: Callable[[], Any]


def run(bench: Bench) -> None:
    found = [name for name in ("pfl", "flwr") if importlib.util.find_spec(name) is not None]
    if not found:
        raise ValueError("the suite frameworks needs pfl or flwr; pip install -e '.[peers]'")
    bench.packages += ["torch", *found]
    work = fedavg_work(bench)
    if "pfl" in found:
        against_pfl(bench, work)
    if "flwr" in found:
        against_flower(bench, work)


def fedavg_work(bench: Bench) -> Work:
    clients, rows, batch = (4, 20, 10) if bench.smoke else (32, 1000, 50)
    data, update = noise_clients(DIGITS, clients, rows), local.sgd(RATE, batch_size=batch, epochs=1)
    ours = Run(REGISTRY["fedavg"](nn.mlp(), local=update), data, DIGITS)
    round_key = jax.random.fold_in(ours.keys.local, 0)
    order = batches_of(round_key, data, rows // batch, batch).reshape(clients, rows)
    taken = (np.arange(clients)[:, None], order)
    x, y = data.x[taken], data.y[taken].astype(np.int64)
    (after,) = models_of(jax.device_get(ours.advance()).clusters)
    (before,) = models_of(ours.start.clusters)
    return Work(
        f"{clients} clients × {rows} examples, one epoch of b={batch}",
        *(x, y, batch, torch_loop.parameters(before)),
        loss=loss_of_everything(torch_loop.parameters(after), x, y),
        one_round=ours.advance,
    )


def loss_of_everything(weights: Mapping[str, Any], x: np.ndarray, y: np.ndarray) -> float:
    """Mean loss of a model in PyTorch's layout over all clients' rows."""
    with torch.no_grad():
        outputs = mlp(dict(weights), torch.from_numpy(x.reshape(-1, 28, 28)).float() / 255)
        return float(torch.nn.functional.cross_entropy(outputs, torch.from_numpy(y.ravel())))


def against_pfl(bench: Bench, work: Work) -> None:
    """pfl in this process, in its own loop."""
    from benchmarks.peers import pfl_fedavg  # pfl is optional

    data = (dict(work.start), work.x, work.y, work.batch, RATE)

    def seconds(rounds: int, threads: int) -> tuple[list[float], dict[str, Any]]:
        with contextlib.redirect_stdout(sys.stderr):  # pfl prints its metrics
            return pfl_fedavg.fedavg(*data, rounds, threads)

    check_losses("pfl", work.loss, loss_of_everything(seconds(1, 1)[1], work.x, work.y))
    peers = {f"pfl, {n} thread{'s' * (n > 1)}": lambda n=n: seconds(bench.repetitions + 1, n)[0] for n in (1, 2)}
    compare(bench, work, peers, PFL_TARGET)


def against_flower(bench: Bench, work: Work) -> None:
    """Flower's engine in a separate process, which starts one for each group of clients.

    Its first round starts these processes, and is left out.
    """
    from benchmarks.peers import flower_fedavg  # flwr is optional

    def seconds(threads: int) -> list[float]:
        arguments = (folder, work.batch, RATE, bench.repetitions + 1, threads)
        found = run_python(*calling(flower_fedavg.run_alone), *arguments, **SILENT)["seconds"]
        with np.load(pathlib.Path(folder) / "after.npz") as after:
            weights = {name: torch.from_numpy(after[name]) for name in after}
        check_losses("Flower", work.loss, loss_of_everything(weights, work.x, work.y))
        return found[1:]

    with tempfile.TemporaryDirectory() as folder:
        flower_fedavg.write_work(pathlib.Path(folder), work.start, work.x, work.y)
        ways = {"Flower, a process of 1 thread per core": lambda: seconds(1)}
        if not bench.smoke:
            ways["Flower, one process of 2 threads"] = lambda: seconds(2)
        compare(bench, work, ways, FLOWER_TARGET)


def compare(bench: Bench, work: Work, peers: Mapping[str, Callable[[], list[float]]], at_least: float) -> None:
    """Adds the row; a simulator has its own loop, so that ours is timed before and after it instead of in turns."""
    ours, theirs = [in_turns({"": work.one_round}, bench.repetitions)[""].wall], {}
    for name, peer in peers.items():
        theirs[name] = statistics.median(peer())
        ours.append(in_turns({"": work.one_round}, bench.repetitions)[""].wall)
    best = min(theirs, key=lambda name: theirs[name])
    others = {name: seconds for name, seconds in theirs.items() if name != best}
    before_and_after = f"ours before and after {' '.join(f'{seconds:.3g}' for seconds in ours)} s"
    bench.add(
        Row(
            "FedAvg round, MLP 784-200-10",
            work.size,
            statistics.median(ours),
            len(ours) * bench.repetitions,
            peer=best,
            peer_seconds=theirs[best],
            ratio=theirs[best] / statistics.median(ours),
            at_least=at_least,
            note="; ".join(filter(None, [each_seconds(others), before_and_after])),
        )
    )
