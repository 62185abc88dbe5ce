"""Populations larger than memory: seconds a round and peak memory of runs whose clients' rows are on disk.

    python -m benchmarks.on_disk --clients 10000 100000 1000000 --rounds 100 --turns 3

writes each population once (20 training and 5 test rows of 32 features a client, 5 and 1 from ten million clients on;
four groups of clients, who name eight classes differently; FedGWC's, which tells groups apart by how hard their rows
are, has a quarter of clients who name them at random), and runs FedAvg, IFCA, and CFL-GP and FedGWC by landmarks with
cohorts of 1 000, each in a process of its own; with `--turns` all of it several times, in turns. Programs are kept in
the folder, as the command line does: the first turn compiles them where they are not there yet.
`--against-memory` also runs 1 000 clients streamed and in memory, in turn, and compares the two. The table goes into
README.md.
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
from fedjax_cluster.files import write_json

FEATURES, CLASSES, TRAIN, TEST, GROUPS = 32, 8, 20, 5, 4
MANY, FEW_TRAIN, FEW_TEST = 10_000_000, 5, 1
COHORT, EVALUATED = 1000, 2000
METHODS = ("fedavg", "ifca", "cfl_gp", "fedgwc")
LANDMARKS = {"cfl_gp": 200, "fedgwc": 32}
HARD = ("fedgwc",)  # run on clients of whom a quarter are hard
SPENT = "seconds_a_round", "processor_seconds_a_round"
FOLDER = pathlib.Path(__file__).parent
RESULTS = FOLDER / "results" / "on-disk-cpu.json"


def clients(count: int, hard: bool = False) -> Iterator[fc.data.ClientRows]:
    """Normal inputs around a centre for each class, and each group has other names for the classes.

    Where some are `hard`, the first group of four names classes at random, the others rightly: two groups.
    """
    train, test = (FEW_TRAIN, FEW_TEST) if count >= MANY else (TRAIN, TEST)
    centres = np.random.default_rng(0).standard_normal((CLASSES, FEATURES), np.float32)
    for first in range(0, count, 1000):
        group = groups(np.arange(first, min(first + 1000, count)), hard)
        x, y = drawn(np.random.default_rng([1, first]), centres, group, train + test, hard)
        for client, rows, labels in zip(group.tolist(), x, y, strict=True):
            parts = rows[:train], labels[:train], rows[train:], labels[train:]
            yield fc.data.ClientRows(*parts, client)


def drawn(
    rng: np.random.Generator, centres: np.ndarray, group: np.ndarray, rows: int, hard: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Inputs f32[n, rows, features] and classes i32[n, rows] of clients of these groups i[n]."""
    kind = rng.integers(CLASSES, size=(len(group), rows))
    x = centres[kind] + rng.standard_normal((*kind.shape, FEATURES), np.float32)
    y = (kind + CLASSES // GROUPS * group[:, None]) % CLASSES
    if hard:
        y = np.where(group[:, None] > 0, kind, rng.integers(CLASSES, size=kind.shape))
    return x, y.astype(np.int32)


def groups(client: np.ndarray, hard: bool) -> np.ndarray:
    """The group i[n] of clients i[n]."""
    return np.minimum(client % GROUPS, 1) if hard else client % GROUPS


def written(folder: pathlib.Path, count: int, hard: bool = False) -> pathlib.Path:
    """A folder with so many clients, written where it is not there yet."""
    path = folder / f"{'hard-and-easy' if hard else 'clients'}-{count}"
    if not path.exists():
        started = time.perf_counter()
        fc.data.write_population(path, clients(count, hard))
        seconds, peak = time.perf_counter() - started, peak_megabytes()
        print(f"wrote {count} clients in {seconds:.0f} s, peak memory {peak:.0f} MB", file=sys.stderr, flush=True)
    return path


def algorithm(name: str, count: int) -> Any:
    further: dict[str, Any] = {
        "fedavg": {},
        "ifca": {"clusters": GROUPS, "start_rounds": 30},
        "cfl_gp": {"clusters": GROUPS, "every": 1, "cluster_cohort": True, "profiles_of": "landmarks"},
        "fedgwc": {
            "clusters": 2,
            # Nearly everybody is heard once: the last reward is the mean, and needs no count of each pair's meetings.
            "rate": 1.0,
            # After so few rounds that most choose their cluster by its model's loss; the landmarks met in each of them.
            "tolerance": 1.0,
            "patience": 12,
            "max_children": 2,
            "smallest": 1,
            "beta": 50 / count,  # the paper's, of its 100 clients' columns
            "server_momentum": 0.5,
        },
    }[name]
    if name in LANDMARKS:
        # At ten million, as many columns as leave room.
        further["landmarks"] = LANDMARKS[name] if name == "cfl_gp" or count < MANY else 4
    # Of a model that fits, only the rows that it has wrong say what a client is like: CFL-GP's train slowly, and
    # FedGWC's take few steps.
    rate, steps = {"cfl_gp": (0.1, 5), "fedgwc": (0.5, 2)}.get(name, (0.5, 5))
    update = fc.local.sgd(rate, batch_size=TRAIN, steps=steps)
    return fc.algorithms.REGISTRY[name](fc.nn.linear(), local=update, participation=min(1, COHORT / count), **further)


def run(name: str, folder: pathlib.Path, rounds: int) -> dict[str, Any]:
    """A run of one method in this process."""
    kept = folder.parent / "compiled"
    fc.enable_compilation_cache(kept)
    before = len(list(kept.rglob("*.program")))
    population = fc.data.open_population(folder)
    count = len(population.train.num_examples)
    resident: list[float] = []
    spent: list[tuple[int, float]] = []

    def remember(evaluation: Any) -> None:
        spent.append((evaluation.round, time.process_time()))
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
    seen, seconds = part(result), result.history["seconds"]
    return {
        "method": name,
        "clients": count,
        "landmarks": getattr(result.algorithm, "landmarks", None),
        # Rounds are of two kinds, with and without the reader beside them, and starts and splits are in the first ones.
        "seconds_a_round": float(np.mean(seconds[rounds * 2 // 5 :])),
        "mean_seconds_of_all_rounds": float(np.mean(seconds)),
        "processor_seconds_a_round": (spent[-1][1] - spent[0][1]) / max(1, spent[-1][0] - spent[0][0]),
        "seconds": time.perf_counter() - started,
        "peak_megabytes": peak_megabytes(),
        "programs_compiled": len(list(kept.rglob("*.program"))) - before,
        "megabytes_at_evaluations": [round(each) for each in resident],
        "accuracy": result.summary["accuracy"],
        "clients_in_a_cluster": int(seen.sum()),
        "adjusted_rand_index": float(
            fc.clustering.scores.adjusted_rand_index(result.labels, groups(np.arange(count), name in HARD), mask=seen)
        ),
    }


def part(result: Any) -> np.ndarray:
    """bool[M]: the clients that are in a cluster because they took part."""
    count = len(result.federation.train.num_examples)
    seen = np.asarray(result.labels) >= 0
    if hasattr(result.state.clients, "seen"):
        seen &= np.asarray(result.state.clients.seen)[:count] > 0
    return seen


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


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for each method and number of clients: medians over turns, and of the turns' ratios to the fewest."""
    found = []
    for method in dict.fromkeys(row["method"] for row in rows):
        fewest = min(row["clients"] for row in rows if row["method"] == method)
        first = [row for row in rows if row["method"] == method and row["clients"] == fewest]
        for count in dict.fromkeys(row["clients"] for row in rows if row["method"] == method):
            own = [row for row in rows if (row["method"], row["clients"]) == (method, count)]
            middle = {name: statistics.median(row[name] for row in own) for name in (*SPENT, "adjusted_rand_index")}
            ratios = {
                f"{name} to the fewest": statistics.median(
                    a[name] / b[name] for a, b in zip(own, first[: len(own)], strict=False)
                )
                for name in SPENT
            }
            peaks = {
                name: max(
                    (row["peak_megabytes"] for row in own if bool(row["programs_compiled"]) == anew), default=None
                )
                for name, anew in (("peak_megabytes", False), ("peak_megabytes_compiling", True))
            }
            found.append({**own[-1], **middle, **ratios, **peaks, "turns": len(own)})
    return found


def table(report: dict[str, Any]) -> str:
    """The results as Markdown."""
    lines = [
        "| method | clients on disk | landmarks | turns | seconds a round | processor seconds | peak memory, MB | with "
        "compilation | at evaluations, MB | in a cluster | ARI of these |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---|---:|---:|",
    ]
    for row in summary(report["rows"]):
        grouped = row["method"] != "fedavg"
        cells = (
            row["method"],
            row["clients"],
            row.get("landmarks") or "",
            row["turns"],
            *(f"{row[name]:.3f} ({row[f'{name} to the fewest']:.2f} ×)" for name in SPENT),
            *(
                "" if row[name] is None else f"{row[name]:.0f}"
                for name in ("peak_megabytes", "peak_megabytes_compiling")
            ),
            ", ".join(map(str, row["megabytes_at_evaluations"])),
            row["clients_in_a_cluster"] if grouped else "",
            f"{row['adjusted_rand_index']:.3f}" if grouped else "",
        )
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def table_between(name: str, text: str) -> None:
    """Puts a table between the marks of its name in README.md, or tells it where there are none."""
    readme = FOLDER / "README.md"
    marks = [f"<!-- {name}: {end} -->" for end in ("begin", "end")]
    whole = readme.read_text(encoding="utf-8")
    before, begin, rest = whole.partition(marks[0])
    _, end, after = rest.partition(marks[1])
    if begin and end:
        readme.write_text(f"{before}{begin}\n\n{text}\n\n{end}{after}", encoding="utf-8")
    print(text)


def publish(name: str, text: str, output: pathlib.Path, usual: pathlib.Path) -> None:
    """Puts the table of the usual results into README.md, and only tells that of others."""
    if output.resolve() == usual.resolve():
        table_between(name, text)
    else:
        print(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", type=pathlib.Path, default=pathlib.Path("populations"), help="where they are kept")
    parser.add_argument("--clients", type=int, nargs="*", default=[10_000, 100_000])
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--methods", nargs="*", default=METHODS)
    parser.add_argument("--turns", type=int, default=1, help="how often everything is run, one after the other")
    parser.add_argument("--against-memory", action="store_true")
    parser.add_argument("--output", type=pathlib.Path, default=RESULTS)
    parser.add_argument("--more", action="store_true", help="adds to the results that are there")
    parser.add_argument("--table", action="store_true", help="only writes the table from the results")
    parser.add_argument("--alone", help="one method on one population, in this process")
    given = parser.parse_args()
    if given.table:
        text = table(json.loads(given.output.read_text(encoding="utf-8")))
        return publish("on disk", text, given.output, RESULTS)
    if given.alone:
        fc.parallel.use_all_cores()  # before the first computation
        folder = written(given.folder, given.clients[0], given.alone in HARD)
        print(json.dumps(run(given.alone, folder, given.rounds)))
        return
    report = json.loads(given.output.read_text(encoding="utf-8")) if given.more else {}
    found = report.get("rows", [])
    report |= {**machine(), "rounds": given.rounds, "cohort": COHORT, "rows": found}
    for count in given.clients:
        for hard in {name in HARD for name in given.methods}:
            written(given.folder, count, hard)
    for name in given.methods:
        for _ in range(given.turns):
            for count in given.clients:
                arguments = ("--alone", name, "--folder", given.folder, "--clients", count, "--rounds", given.rounds)
                found.append(run_python("-m", "benchmarks.on_disk", *arguments, timeout=7200))
                print(json.dumps(found[-1]), file=sys.stderr, flush=True)
                write_json(given.output, report)
    if given.against_memory:
        report["against_memory"] = against_memory(given.folder, given.rounds)
        write_json(given.output, report)
    publish("on disk", table(report), given.output, RESULTS)


if __name__ == "__main__":
    main()
