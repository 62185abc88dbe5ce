"""From a hundred to a hundred thousand clients: seconds a round and peak memory, each size in a separate process."""

from __future__ import annotations

import json
import pathlib
import resource
import sys
from typing import Any

import jax
import numpy as np

from fedjax_cluster import local, nn, parallel
from fedjax_cluster.algorithms import REGISTRY
from fedjax_cluster.bench.measure import Bench, Row, calling, run_python
from fedjax_cluster.bench.workloads import CIFAR, noise_federation
from fedjax_cluster.simulation.loop import simulate
from fedjax_cluster.types import DatasetInfo

TINY = DatasetInfo("noise 8×8", (8, 8), 10)
# name -> (data, examples of a client, model, method, strategy, chunk)
WORK: dict[str, tuple[DatasetInfo, int, str, str, str, int | None]] = {
    "CNN on 32×32×3": (CIFAR, 100, "cnn", "fedavg", "auto", None),
    "MLP on 8×8, chunks of 50": (TINY, 20, "mlp", "fedavg", "chunked", 50),
    "MLP on 8×8": (TINY, 20, "mlp", "fedavg", "auto", None),
    "IFCA, K=4, MLP on 8×8": (TINY, 20, "mlp", "ifca", "auto", None),
}
MOST_MEGABYTES = 1500.0
LEAST_GROWTH = 1.10


def run(bench: Bench) -> None:
    if bench.smoke:
        bench.add(_row("MLP on 8×8", 20)[0])
        return
    first, _ = _row("CNN on 32×32×3", 500)
    bench.add(first.against("1500 MB", MOST_MEGABYTES / first.megabytes, 1.0))
    (small, less), (large, more) = (_row("MLP on 8×8, chunks of 50", clients) for clients in (1000, 10_000))
    bench.add(small)
    bench.add(large.against("beyond the data, M=1000", less / more, 1 / LEAST_GROWTH))
    for name in ("MLP on 8×8", "IFCA, K=4, MLP on 8×8"):
        for clients in (100, 1000, 10_000, 100_000):
            bench.add(_row(name, clients)[0])


def _row(name: str, clients: int) -> tuple[Row, float]:
    """The row, and the peak memory beyond the data, in MB."""
    found = run_python(*calling(run_alone), name, clients)
    size = f"M={clients}, {WORK[name][1]} examples each, a step of 20"
    note = f"data {found['data_megabytes']:.0f} MB, before them {found['before_megabytes']:.0f} MB"
    row = Row(name, size, found["seconds"], found["rounds"], megabytes=found["megabytes"], note=note)
    return row, found["megabytes"] - found["data_megabytes"]


def run_alone(name: str, clients: str) -> None:
    """In a separate process: prints the seconds of a round and the peak memory of a run, evaluation included."""
    parallel.use_all_cores()
    info, rows, model, method, strategy, chunk = WORK[name]
    factory: Any = REGISTRY[method]
    clusters = {"clusters": 4} if method == "ifca" else {}
    built = {"cnn": nn.cnn, "mlp": nn.mlp}[model]()
    algorithm = factory(built, local=local.sgd(0.1, batch_size=20, steps=1), **clusters)
    mapping = parallel.client_mapping(strategy, chunk)  # pyright: ignore[reportArgumentType]
    jax.block_until_ready(jax.numpy.zeros(1))
    before = peak_megabytes()
    federation = noise_federation(info, int(clients), rows)
    size = sum(leaf.nbytes for part in (federation.train, federation.test) for leaf in part) / 1e6
    rounds = 3 if model == "cnn" else 6
    result = simulate(algorithm, federation, rounds=rounds, eval_every=rounds, progress=False, mapping=mapping)
    found = {
        "seconds": float(np.median(result.history["seconds"][1:])),
        "rounds": len(np.unique(result.history["seconds"][1:])),  # those that were timed apart
        "megabytes": peak_megabytes(),
        "before_megabytes": before,
        "data_megabytes": size,
    }
    print(json.dumps(found))


def peak_megabytes() -> float:
    """Largest resident memory of this process so far."""
    status = pathlib.Path("/proc/self/status")
    if status.exists():
        # Linux hands getrusage's figure on to the processes that one starts.
        (line,) = (line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024 / 1e6
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e6
