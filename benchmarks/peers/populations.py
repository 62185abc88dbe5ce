"""Seconds a round and peak memory of FedAvg as the population grows: ours in memory and on disk, pfl, and Flower.

A hundred clients train in each round. Every simulator draws its own cohorts, so that they do equal amounts of work and
not the same work. Each runs in a process of its own; its memory is the proportional set size of that process and of
all that it starts, looked at from outside. Linux only.
"""

from __future__ import annotations

import importlib.util
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any

import jax
import numpy as np

from benchmarks.peers import RATE
from benchmarks.peers.frameworks import SILENT
from benchmarks.peers.ours import in_memory, on_disk
from benchmarks.peers.torch_loop import parameters
from fedjax_cluster import data, nn
from fedjax_cluster.algorithms.round import cluster_variables, init_clusters
from fedjax_cluster.bench.measure import Bench, Row, calling
from fedjax_cluster.bench.workloads import DIGITS, noise_clients

SIZES, COHORT, ROWS, BATCH, ROUNDS = (1_000, 10_000, 100_000), 100, 20, 10, 20
LOOKED_EVERY = 0.2  # seconds
LONGEST = 1800.0


def run(bench: Bench) -> None:
    sizes, cohort, rounds = ((40,), 10, 3) if bench.smoke else (SIZES, COHORT, ROUNDS)
    systems = {"ours, in memory": (calling(in_memory), 2), "ours, on disk": (calling(on_disk), 2)}
    if importlib.util.find_spec("pfl") is not None:
        from benchmarks.peers import pfl_fedavg

        bench.packages += ["torch", "pfl"]
        systems["pfl, 2 threads"] = (calling(pfl_fedavg.run_alone), 2)
    if importlib.util.find_spec("flwr") is not None:
        from benchmarks.peers import flower_fedavg

        bench.packages += [name for name in ("torch", "flwr") if name not in bench.packages]
        systems["Flower, a process of 1 thread per core"] = (calling(flower_fedavg.run_alone), 1)
    for clients in sizes:
        size = f"M={clients}, {ROWS} images each, a cohort of {cohort}, one epoch of b={BATCH}"
        with tempfile.TemporaryDirectory() as folder:
            write_work(pathlib.Path(folder), clients)
            arguments = (folder, BATCH, RATE, rounds + 1)
            found = {name: watched(*how, *arguments, threads, cohort) for name, (how, threads) in systems.items()}
        for name, figures in found.items():
            bench.add(row(name, size, figures, {peer: each for peer, each in found.items() if peer != name}))


def row(name: str, size: str, figures: dict[str, Any], others: dict[str, Any]) -> Row:
    """The figures of one simulator; with a ratio where it is ours."""
    made = Row(
        f"FedAvg, {name}",
        size,
        figures["seconds"],
        figures["rounds"],
        megabytes=figures["megabytes"],
        note=f"{figures['whole']:.3g} s from start to end",
    )
    peers = {peer: each["seconds"] for peer, each in others.items() if not peer.startswith("ours")}
    if not (name.startswith("ours") and peers):
        return made
    best = min(peers, key=lambda peer: peers[peer])
    return made.against(best, peers[best] / figures["seconds"], float("nan"))


def write_work(folder: pathlib.Path, clients: int) -> None:
    """Leaves the clients' rows and the start, as PyTorch has it, and the population on disk."""
    rows = noise_clients(DIGITS, clients, ROWS)
    np.save(folder / "x.npy", rows.x)
    np.save(folder / "y.npy", rows.y.astype(np.int64))
    start = cluster_variables(init_clusters(jax.random.key(0), nn.mlp(), DIGITS, 1), jax.numpy.zeros((), int))
    np.savez(folder / "weights.npz", **{name: value.numpy() for name, value in parameters(start).items()})
    test = noise_clients(DIGITS, 1, 1, seed=1)
    each = (data.ClientRows(x, y, test.x[0], test.y[0]) for x, y in zip(rows.x, rows.y, strict=True))
    data.write_population(folder / "population", each)


def watched(*command: Any) -> dict[str, Any]:
    """What a separate Python prints on its last line, with its seconds and the most memory it and its children had."""
    kept = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    started, most, over = time.perf_counter(), 0.0, threading.Event()
    process = subprocess.Popen(
        [sys.executable, *map(str, command)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=kept | SILENT,
    )

    def look() -> None:
        nonlocal most
        while not over.wait(LOOKED_EVERY):
            most = max(most, megabytes_of_tree(process.pid))

    watcher = threading.Thread(target=look, daemon=True)
    watcher.start()
    try:
        out, error = process.communicate(timeout=LONGEST)
    finally:
        over.set()
        process.kill()
        watcher.join()
    if process.returncode:
        raise RuntimeError(f"a benchmark's process failed:\n{error[-2000:]}")
    seconds = json.loads(out.splitlines()[-1])["seconds"][1:]
    return {
        "seconds": statistics.median(seconds),
        "rounds": len(seconds),
        "megabytes": most,
        "whole": time.perf_counter() - started,
    }


def megabytes_of_tree(root: int) -> float:
    """Proportional set size of a process and all below it; what several share is divided among them. Linux only."""
    parents = {}
    for path in pathlib.Path("/proc").glob("[0-9]*/stat"):
        try:
            # The name, in brackets, may hold anything.
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
        except OSError:  # it has ended
            continue
    total, below = 0, {root}
    while new := {child for child, parent in parents.items() if parent in below} - below:
        below |= new
    for process in below:
        try:
            lines = pathlib.Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total * 1024 / 1e6
