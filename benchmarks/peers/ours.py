"""Our side of `whole` and `populations`, in separate processes, without PyTorch."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import numpy as np
import optax

from benchmarks.peers import RATE
from fedjax_cluster import cli, data, local, nn, parallel
from fedjax_cluster.algorithms import REGISTRY
from fedjax_cluster.bench.workloads import DIGITS
from fedjax_cluster.simulation.loop import simulate
from fedjax_cluster.types import ClientData, ClusteredAlgorithm, DatasetInfo, Federation

CLUSTERS, BATCH, EVERY = 4, 64, 2


def method() -> ClusteredAlgorithm:
    cfl_gp: Any = REGISTRY["cfl_gp"]
    update = local.sgd(1.0, batch_size=BATCH, steps=1)
    return cfl_gp(nn.mlp(), clusters=CLUSTERS, local=update, server=optax.sgd(RATE), every=EVERY)


def run_alone(folder: str, rounds: str) -> None:
    """`whole`: prints the losses and the accuracy of CFL-GP, as the command line runs it, on the data in a folder."""
    cli._prepare_jax()
    home = pathlib.Path(folder)
    parts = [
        ClientData(*(np.load(home / f"{part}_{name}.npy") for name in ClientData._fields)) for part in ("train", "test")
    ]
    train, test = (part._replace(y=part.y.astype(np.int32)) for part in parts)
    info = DatasetInfo(home.name, train.x.shape[2:], int(train.y.max()) + 1)
    federation = Federation(train, test, None, None, info)
    result = simulate(method(), federation, rounds=int(rounds), eval_every=int(rounds), progress=False)
    print(json.dumps({"losses": result.history["loss"].tolist(), "accuracy": result.summary["accuracy"]}))


def in_memory(folder: str, batch: str, rate: str, rounds: str, threads: str, cohort: str) -> None:
    """`populations`: prints the seconds of rounds whose clients' rows are all on the devices."""
    parallel.use_all_cores(int(threads))
    x, y = (np.load(pathlib.Path(folder) / f"{name}.npy") for name in "xy")
    train = ClientData(x, y.astype(np.int32), np.full(len(x), x.shape[1], np.int32))
    test = ClientData(train.x[:, :1], train.y[:, :1], np.ones(len(x), np.int32))
    _fedavg(Federation(train, test, None, None, DIGITS), batch, rate, rounds, cohort)


def on_disk(folder: str, batch: str, rate: str, rounds: str, threads: str, cohort: str) -> None:
    """`populations`: prints the seconds of rounds whose cohorts' rows are read while the one before computes."""
    parallel.use_all_cores(int(threads))
    _fedavg(data.open_population(pathlib.Path(folder) / "population"), batch, rate, rounds, cohort)


def _fedavg(federation: Any, batch: str, rate: str, rounds: str, cohort: str) -> None:
    update = local.sgd(float(rate), batch_size=int(batch), epochs=1)
    share, segment = int(cohort) / len(federation.train.num_examples), int(rounds)
    method = REGISTRY["fedavg"](nn.mlp(), local=update, participation=share)
    # The first segment compiles.
    result = simulate(
        *(method, federation),
        rounds=2 * segment,
        eval_every=max(1, segment // 5),
        eval_clients=int(cohort),
        progress=False,
    )
    print(json.dumps({"seconds": result.history["seconds"][segment:].tolist()}))
