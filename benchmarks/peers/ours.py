"""Our side of the suite `whole`, in a separate process: CFL-GP as the command line runs it, without PyTorch."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import numpy as np
import optax

from benchmarks.peers import RATE
from fedjax_cluster import cli, local, nn
from fedjax_cluster.algorithms import REGISTRY
from fedjax_cluster.simulation.loop import simulate
from fedjax_cluster.types import ClientData, ClusteredAlgorithm, DatasetInfo, Federation

CLUSTERS, BATCH, EVERY = 4, 64, 2


def method() -> ClusteredAlgorithm:
    cfl_gp: Any = REGISTRY["cfl_gp"]
    update = local.sgd(1.0, batch_size=BATCH, steps=1)
    return cfl_gp(nn.mlp(), clusters=CLUSTERS, local=update, server=optax.sgd(RATE), every=EVERY)


def run_alone(folder: str, rounds: str) -> None:
    """Prints the losses and the accuracy of a run on the data in a folder."""
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
