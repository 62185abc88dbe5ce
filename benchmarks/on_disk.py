"""Populations larger than memory: seconds a round and peak memory of runs whose clients' rows are on disk.

    python -m benchmarks.on_disk --clients 10000 100000 1000000 --rounds 100

writes each population once (20 training and 5 test rows of 32 features a client, four groups of clients), and runs
FedAvg and IFCA with cohorts of 1 000, each in a process of its own. `--against-memory` also runs 1 000 clients streamed
and in memory, in turn, and compares the two.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

import fedjax_cluster as fc
from fedjax_cluster.bench.measure import machine, run_python
from fedjax_cluster.bench.scale import peak_megabytes

FEATURES, TRAIN, TEST, GROUPS = 32, 20, 5, 4
COHORT, EVALUATED = 1000, 2000
METHODS = ("fedavg", "ifca")


def clients(count: int) -> Iterator[fc.data.ClientRows]:
    """Each group labels its inputs by a plane of its own."""
    planes = np.random.default_rng(0).standard_normal((GROUPS, FEATURES))
    for first in range(0, count, 1000):
        rng = np.random.default_rng([1, first])
        some = np.arange(first, min(first + 1000, count))
        x = rng.standard_normal((len(some), TRAIN + TEST, FEATURES), np.float32)
        y = (np.einsum("crf,cf->cr", x, planes[some % GROUPS]) > 0).astype(np.int32)
        for client, rows, labels in zip(some.tolist(), x, y, strict=True):
            parts = rows[:TRAIN], labels[:TRAIN], rows[TRAIN:], labels[TRAIN:]
            yield fc.data.ClientRows(*parts, client % GROUPS)


def written(folder: pathlib.Path, count: int) -> pathlib.Path:
    """A folder with so many clients, written where it is not there yet."""
    path = folder / f"clients-{count}"
    if not path.exists():
        started = time.perf_counter()
        fc.data.write_population(path, clients(count))
        seconds, peak = time.perf_counter() - started, peak_megabytes()
        print(f"wrote {count} clients in {seconds:.0f} s, peak memory {peak:.0f} MB", file=sys.stderr, flush=True)
    return path


def algorithm(name: str, count: int) -> Any:
    further: dict[str, Any] = {"clusters": GROUPS, "start_rounds": 30} if name == "ifca" else {}
    update = fc.local.sgd(0.5, batch_size=TRAIN, steps=5)
    return fc.algorithms.REGISTRY[name](fc.nn.linear(), local=update, participation=min(1, COHORT / count), **further)


def run(name: str, folder: pathlib.Path, rounds: int) -> dict[str, Any]:
    """A run of one method in this process."""
    population = fc.data.open_population(folder)
    count = len(population.train.num_examples)
    resident: list[float] = []
    spent: list[float] = []

    def remember(_: Any) -> None:
        spent.append(time.process_time())
        lines = pathlib.Path("/proc/self/status").read_text().splitlines()
        resident.append(next(int(line.split()[1]) * 1024 / 1e6 for line in lines if line.startswith("VmRSS")))

    started = time.perf_counter()
    every = max(1, rounds // 5)
    result = fc.simulate(
        algorithm(name, count),
        population,
        rounds=rounds,
        eval_every=every,
        eval_clients=EVALUATED,
        callbacks=[remember],
        progress=False,
    )
    return {
        "method": name,
        "clients": count,
        "seconds_a_round": float(statistics.median(result.history["seconds"][1:])),
        "processor_seconds_a_round": (spent[-1] - spent[0]) / (every * (len(spent) - 1)),
        "seconds": time.perf_counter() - started,
        "peak_megabytes": peak_megabytes(),
        "megabytes_at_evaluations": [round(each) for each in resident],
        "accuracy": result.summary["accuracy"],
        "adjusted_rand_index": result.summary["adjusted_rand_index"],
    }


def against_memory(folder: pathlib.Path, rounds: int, repetitions: int = 3) -> dict[str, Any]:
    """1 000 clients streamed and in memory, in turn: whether the runs are the same, and the ratio of their times."""
    population = fc.data.open_population(written(folder, 1000))
    federations = {"streamed": population, "in memory": fc.data.in_memory(population)}
    method = fc.algorithms.ifca(
        fc.nn.linear(),
        local=fc.local.sgd(0.5, batch_size=10, steps=5),
        clusters=GROUPS,
        participation=0.1,
        start="random",
    )
    seconds: dict[str, list[float]] = {name: [] for name in federations}
    results = {}
    for _ in range(repetitions):
        for name, federation in federations.items():
            results[name] = fc.simulate(method, federation, rounds=rounds, eval_every=rounds, progress=False)
            seconds[name].append(float(np.sum(results[name].history["seconds"])))
    one, other = (results[name].history for name in federations)
    same = all(np.array_equal(one[name], other[name], equal_nan=True) for name in one if name != "seconds")
    ratios = [a / b for a, b in zip(seconds["streamed"], seconds["in memory"], strict=True)]
    return {"same": same, "ratio_of_times": statistics.median(ratios), "seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", type=pathlib.Path, default=pathlib.Path("populations"), help="where they are kept")
    parser.add_argument("--clients", type=int, nargs="*", default=[10_000, 100_000])
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--methods", nargs="*", default=METHODS)
    parser.add_argument("--against-memory", action="store_true")
    parser.add_argument("--alone", help="one method on one population, in this process")
    given = parser.parse_args()
    fc.parallel.use_all_cores()  # before the first computation
    if given.alone:
        print(json.dumps(run(given.alone, written(given.folder, given.clients[0]), given.rounds)))
        return
    found = []
    for count in given.clients:
        written(given.folder, count)
        for name in given.methods:
            arguments = ("--alone", name, "--folder", given.folder, "--clients", count, "--rounds", given.rounds)
            found.append(run_python("-m", "benchmarks.on_disk", *arguments, timeout=7200))
            print(json.dumps(found[-1]), file=sys.stderr, flush=True)
    report = {**machine(), "rounds": given.rounds, "cohort": COHORT, "rows": found}
    if given.against_memory:
        report["against_memory"] = against_memory(given.folder, given.rounds)
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
