"""Each of the five methods as it is, on the data that its paper made for it, with seeds on which nothing was chosen.

    python -m benchmarks.home_ground [--seeds 100 101 …] [--datasets mnist fashion_mnist] [--methods flag …]

Every run is one command, `fedjax-cluster run METHOD --scenario … --dataset …`, in a process of its own; what ran is
kept in results/home-ground-cpu.json after every run, and is not run again.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

from benchmarks.on_disk import table_between
from fedjax_cluster.bench.measure import machine

RESULTS = pathlib.Path(__file__).parent / "results" / "home-ground-cpu.json"
GROUNDS = {
    "flag": ["label-groups", "label-groups --rho 0.3 --num-groups 3"],
    "fedgwc": ["domains"],
    "gradient-loss": ["class-overlap"],
    "cfl": ["label-swap", "label-permutation"],
    "cfl-gp": ["rotated"],
}
FOUND = 0.95  # the least ARI that counts as found


def run(method: str, ground: str, dataset: str, seed: int) -> dict[str, Any]:
    """One command's figures, its seconds from start to exit and those of all its processors."""
    command = ["run", method, "--scenario", *ground.split(), "--dataset", dataset]
    with tempfile.TemporaryDirectory() as folder:
        options = ["--seed", str(seed), "--run-dir", str(pathlib.Path(folder, "run"))]
        before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        subprocess.run(
            [sys.executable, "-m", "fedjax_cluster", *command, *options],
            check=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        seconds, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
        summary = json.loads((pathlib.Path(folder, "run", "summary.json")).read_text(encoding="utf-8"))
    return {
        "method": method,
        "ground": ground,
        "dataset": dataset,
        "seed": seed,
        "adjusted_rand_index": summary["adjusted_rand_index"],
        "num_clusters": summary["num_clusters"],
        "accuracy": summary["accuracy"],
        "rounds": summary["rounds"],
        "seconds": round(seconds, 1),
        "processor_seconds": round(after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime, 1),
    }


def table(runs: list[dict[str, Any]]) -> str:
    """A line for each command and data set."""
    lines = [
        f"| `fedjax-cluster run …` | data set | seeds | ARI ≥ {FOUND} | lowest ARI | clusters | accuracy, % | rounds "
        "| processor seconds |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for key in dict.fromkeys((row["method"], row["ground"], row["dataset"]) for row in runs):
        rows = [row for row in runs if (row["method"], row["ground"], row["dataset"]) == key]
        agreements = [row["adjusted_rand_index"] for row in rows]
        clusters = sorted({row["num_clusters"] for row in rows})
        accuracies = [100 * row["accuracy"] for row in rows]
        spread = f" ± {statistics.stdev(accuracies):.1f}" if len(rows) > 1 else ""
        method, ground, dataset = key
        lines.append(
            f"| `{method} --scenario {ground}` | {dataset} | {min(row['seed'] for row in rows)}–"
            f"{max(row['seed'] for row in rows)} | {sum(value >= FOUND for value in agreements)} of {len(rows)} "
            f"| {min(agreements):.2f} | {', '.join(map(str, clusters))} | {statistics.mean(accuracies):.1f}{spread} "
            f"| {statistics.median(row['rounds'] for row in rows):.0f} "
            f"| {statistics.median(row['processor_seconds'] for row in rows):.0f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--methods", nargs="*", choices=list(GROUNDS), default=list(GROUNDS))
    parser.add_argument("--datasets", nargs="*", default=["mnist", "fashion_mnist"])
    parser.add_argument("--seeds", type=int, nargs="*", default=list(range(100, 110)))
    parser.add_argument("--output", type=pathlib.Path, default=RESULTS)
    parser.add_argument("--table", action="store_true", help="only writes the table from the results")
    given = parser.parse_args()
    runs = json.loads(given.output.read_text(encoding="utf-8"))["runs"] if given.output.exists() else []
    done = {(row["method"], row["ground"], row["dataset"], row["seed"]) for row in runs}
    asked = [
        (method, ground, dataset, seed)
        for seed in given.seeds
        for method in given.methods
        for ground in GROUNDS[method]
        for dataset in given.datasets
    ]
    for each in asked if not given.table else ():
        if each in done:
            continue
        runs.append(run(*each))
        print(json.dumps(runs[-1]), file=sys.stderr, flush=True)
        report = json.dumps({**machine(), "runs": runs}, indent=2) + "\n"
        beside = given.output.with_suffix(".part")
        beside.write_text(report, encoding="utf-8")
        beside.replace(given.output)
    order = {key: rank for rank, key in enumerate(GROUNDS)}
    runs.sort(
        key=lambda row: (
            order[row["method"]],
            GROUNDS[row["method"]].index(row["ground"]),
            row["dataset"] != "mnist",
            row["seed"],
        )
    )
    table_between("home ground", table(runs))


if __name__ == "__main__":
    main()
