"""Whole runs of every method: seconds a round, and the seconds of compilation."""

from __future__ import annotations

import inspect
import statistics
import time
from typing import Any

from fedjax_cluster import local, nn, parallel
from fedjax_cluster.algorithms import REGISTRY
from fedjax_cluster.bench.measure import Bench, Row
from fedjax_cluster.bench.workloads import DIGITS, noise_federation
from fedjax_cluster.simulation.loop import simulate


def run(bench: Bench) -> None:
    clients, rows, batch, rounds = (4, 8, 4, 2) if bench.smoke else (32, 256, 64, 40)
    model = nn.mlp(hidden=(8,)) if bench.smoke else nn.mlp()
    federation = noise_federation(DIGITS, clients, rows, groups=2)
    for name in ("fedavg", "ifca", "cfl_gp") if bench.smoke else sorted(REGISTRY):
        factory = REGISTRY[name]
        clusters: dict[str, Any] = {"clusters": 2} if "clusters" in inspect.signature(factory).parameters else {}
        algorithm = factory(model, local=local.sgd(0.1, batch_size=batch, steps=4), **clusters)
        mapping, started = parallel.client_mapping(), time.perf_counter()
        result = simulate(
            algorithm, federation, rounds=rounds, eval_every=max(1, rounds // 5), progress=False, mapping=mapping
        )
        whole = time.perf_counter() - started
        # The first segment, of one round, touches the data first; the others have a time each.
        seconds = float(statistics.median(result.history["seconds"][1:]))
        size = f"{clients} clients × 4 steps × b={batch}, MLP"
        note = f"compilation {result.summary['compile_seconds']:.1f} s, run of {rounds} rounds {whole:.1f} s"
        bench.add(Row(f"{name}, one round", size, seconds, len(set(result.history["seconds"][1:])), note=note))
