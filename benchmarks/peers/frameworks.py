"""A round of FedAvg beside two other simulators, pfl and Flower's engine.

Needs the extra `peers`. All start from the same parameters, and every client walks through its rows in the order of our
first round; the losses of the models after that round are compared before anything is timed.
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

from benchmarks.peers.rounds import RATE, batches_of, check_losses, models_of, rounds_of
from fedjax_cluster import local, nn
from fedjax_cluster.algorithms import REGISTRY
from fedjax_cluster.bench.measure import Bench, Row, in_a_process, in_turns
from fedjax_cluster.bench.workloads import DIGITS, noise_clients
from fedjax_cluster.simulation.loop import streams

PFL, FLOWER = 1.3, 4.0
# Neither reports where it is to Flower's or Ray's makers.
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
    missing = [name for name in ("torch", "pfl", "flwr") if importlib.util.find_spec(name) is None]
    if "torch" in missing or len(missing) == 2:
        raise ValueError(f"the suite frameworks needs {', '.join(missing)}; install fedjax_cluster[peers]")
    work = fedavg_work(bench)
    if "pfl" not in missing:
        against_pfl(bench, work)
    if "flwr" not in missing:
        against_flower(bench, work)


def fedavg_work(bench: Bench) -> Work:
    from fedjax_cluster.bench import torch_peer

    clients, rows, batch = (4, 20, 10) if bench.smoke else (32, 1000, 50)
    data = noise_clients(DIGITS, clients, rows)
    algorithm = REGISTRY["fedavg"](nn.mlp(), local=local.sgd(RATE, batch_size=batch, epochs=1))
    first, one_round, _ = rounds_of(algorithm, data, DIGITS)
    order = batches_of(jax.random.fold_in(streams(0).local, 0), data, rows // batch, batch).reshape(clients, rows)
    taken = (np.arange(clients)[:, None], order)
    x, y = data.x[taken], data.y[taken].astype(np.int64)
    (after,) = models_of(jax.device_get(one_round()))
    loss = loss_of_everything(torch_peer.parameters(after), x, y)
    size = f"{clients} clients × {rows} examples, one epoch of b={batch}"
    return Work(size, x, y, batch, torch_peer.parameters(models_of(first)[0]), loss, one_round)


def loss_of_everything(weights: Mapping[str, Any], x: np.ndarray, y: np.ndarray) -> float:
    """Mean loss of a model in PyTorch's layout over all clients' rows."""
    import torch  # pyright: ignore[reportMissingImports]

    from fedjax_cluster.bench import torch_peer

    with torch.no_grad():
        outputs = torch_peer.mlp(dict(weights), torch.from_numpy(x.reshape(-1, 28, 28)).float() / 255)
        return float(torch.nn.functional.cross_entropy(outputs, torch.from_numpy(y.ravel())))


def against_pfl(bench: Bench, work: Work) -> None:
    """pfl in this process, in its own loop."""
    from fedjax_cluster.bench import pfl_peer

    data = (dict(work.start), work.x, work.y, work.batch, RATE)

    def seconds(rounds: int, threads: int) -> tuple[list[float], dict[str, Any]]:
        with contextlib.redirect_stdout(sys.stderr):  # pfl prints its metrics
            return pfl_peer.fedavg(*data, rounds, threads)

    check_losses("pfl", work.loss, loss_of_everything(seconds(1, 1)[1], work.x, work.y))
    peers = {f"pfl, {n} thread{'s' * (n > 1)}": lambda n=n: seconds(bench.repetitions + 1, n)[0] for n in (1, 2)}
    beside(bench, work, peers, PFL)


def against_flower(bench: Bench, work: Work) -> None:
    """Flower's engine in a process of its own, which starts processes of its own for the clients.

    Its first round starts these processes, and is left out.
    """
    code = "import sys; from fedjax_cluster.bench import flower_peer; flower_peer.alone(*sys.argv[1:])"

    def seconds(threads: int) -> list[float]:
        found = in_a_process(code, folder, work.batch, RATE, bench.repetitions + 1, threads, **SILENT)["seconds"]
        with np.load(pathlib.Path(folder) / "after.npz") as after:
            weights = {name: torch.from_numpy(after[name]) for name in after}
        check_losses("Flower", work.loss, loss_of_everything(weights, work.x, work.y))
        return found[1:]

    import torch  # pyright: ignore[reportMissingImports]

    from fedjax_cluster.bench import flower_peer

    with tempfile.TemporaryDirectory() as folder:
        flower_peer.write_work(pathlib.Path(folder), work.start, work.x, work.y)
        ways = {"Flower, a process of 1 thread per core": 1, "Flower, one process of 2 threads": 2}
        kept = dict(list(ways.items())[: 1 if bench.smoke else 2])
        beside(bench, work, {name: lambda threads=threads: seconds(threads) for name, threads in kept.items()}, FLOWER)


def beside(bench: Bench, work: Work, peers: Mapping[str, Callable[[], list[float]]], at_least: float) -> None:
    """Adds the row; a simulator has its own loop, so that ours is timed before and after it instead of in turns."""
    ours, theirs = [in_turns({"": work.one_round}, bench.repetitions)[""].wall], {}
    for name, peer in peers.items():
        theirs[name] = statistics.median(peer())
        ours.append(in_turns({"": work.one_round}, bench.repetitions)[""].wall)
    best = min(theirs, key=lambda name: theirs[name])
    own = statistics.median(ours)
    notes = [f"{name} {seconds:.3g} s" for name, seconds in theirs.items() if name != best]
    bench.add(
        Row(
            "FedAvg round, MLP 784-200-10",
            work.size,
            own,
            len(ours) * bench.repetitions,
            peer=best,
            peer_seconds=theirs[best],
            ratio=theirs[best] / own,
            at_least=at_least,
            note="; ".join([*notes, f"ours before and after {' '.join(f'{seconds:.3g}' for seconds in ours)} s"]),
        )
    )
