"""What a person waits for before the first round: processor seconds of `fedjax-cluster run METHOD --rounds 2`.

    python -m benchmarks.starts [METHOD ...] [--turns 3]

Each run is a process of its own on the built-in digits. Two versions take turns, with full caches of their own: one has
programs that are kept whole, the other JAX's cache of compilations alone (`enable_compilation_cache(whole=False)`); the
run that fills the former tells what a start costs with nothing kept. The first row is the default job with its 200
rounds. Methods that are not named keep their rows. The table goes
into README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import resource
import statistics
import subprocess
import sys
import tempfile
from typing import Any

import fedjax_cluster as fc
from benchmarks.on_disk import publish
from fedjax_cluster.bench.measure import machine
from fedjax_cluster.files import write_json

RESULTS = pathlib.Path(__file__).parent / "results" / "starts-cpu.json"
DEFAULT = "the default job, 200 rounds"
CHILD = """
import fedjax_cluster.__main__  # as the command starts: what it settles before its imports
import functools, json, sys, time
import fedjax_cluster as fc
from fedjax_cluster import cli
whole, *arguments = json.loads(sys.argv[1])
fc.parallel.enable_compilation_cache = functools.partial(fc.parallel.enable_compilation_cache, whole=whole)
from fedjax_cluster.simulation import loop
from fedjax_cluster.simulation.run import Run
spent = {}
def timed(name, function):
    def call(*given, **more):
        started = time.process_time()
        found = function(*given, **more)
        spent.setdefault(name, time.process_time() - started)
        return found
    return call
loop.start_run = timed("start", loop.start_run)
Run.segment = timed("rounds", Run.segment)
evaluator = loop.evaluator
loop.evaluator = lambda *given, **more: timed("evaluation", evaluator(*given, **more))
sys.argv[1:] = arguments
status = cli.main()
print("SPENT " + json.dumps(sum(spent.values())), file=sys.stderr)
sys.exit(status)
"""


def run(name: str, cache: pathlib.Path, whole: bool) -> dict[str, float]:
    """Processor seconds of a process, and of what it did until the first round could begin."""
    method = [] if name == DEFAULT else [name.replace("_", "-"), "--rounds", "2"]
    with tempfile.TemporaryDirectory() as folder:
        arguments = json.dumps([whole, "run", *method, "--run-dir", str(pathlib.Path(folder, "run"))])
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(
            [sys.executable, "-c", CHILD, arguments],
            env={**os.environ, "FEDJAX_CLUSTER_CACHE": str(cache)},
            capture_output=True,
            text=True,
            check=True,
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = next(line for line in done.stderr.splitlines() if line.startswith("SPENT "))
    return {
        "process": after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime,
        "before the first round": float(spent.removeprefix("SPENT ")),
    }


def measured(name: str, turns: int) -> dict[str, Any]:
    """A row of the table: medians of both versions."""
    with tempfile.TemporaryDirectory() as folder:
        caches = {whole: pathlib.Path(folder, str(whole)) for whole in (False, True)}
        first = {whole: run(name, cache, whole) for whole, cache in caches.items()}
        found = [{whole: run(name, cache, whole) for whole, cache in caches.items()} for _ in range(turns)]
    row: dict[str, Any] = {"method": name, "turns": turns}
    for whole, version in ((False, "JAX's cache"), (True, "whole programs")):
        for what in ("process", "before the first round"):
            row[f"{what}, {version}"] = round(statistics.median(turn[whole][what] for turn in found), 2)
    row["before the first round, nothing kept"] = round(first[True]["before the first round"], 2)
    return row


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| method | before the first round: nothing kept | JAX's cache | whole programs | whole process: JAX's cache "
        "| whole programs | ratio |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        versions = [f"{what}, {kept}" for what in ("before the first round", "process") for kept in
                    ("JAX's cache", "whole programs")]  # fmt: skip
        cells = [row["before the first round, nothing kept"], *(row[version] for version in versions)]
        ratio = row["process, whole programs"] / row["process, JAX's cache"]
        name = row["method"] if row["method"] == DEFAULT else f"`{row['method'].replace('_', '-')}`"
        lines.append(f"| {name} | " + " | ".join(f"{cell:.2f}" for cell in cells) + f" | {ratio:.2f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("methods", nargs="*", default=[DEFAULT, *sorted(fc.algorithms.REGISTRY)])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--output", type=pathlib.Path, default=RESULTS)
    given = parser.parse_args()
    before = json.loads(given.output.read_text(encoding="utf-8"))["rows"] if given.output.exists() else []
    rows = {row["method"]: row for row in before}
    for name in given.methods:
        rows[name] = {**measured(name, given.turns), **machine()}
        print(json.dumps(rows[name]), file=sys.stderr, flush=True)
        write_json(given.output, {**machine(), "rows": list(rows.values())})
    publish("starts", table(list(rows.values())), given.output, RESULTS)


if __name__ == "__main__":
    main()
