"""An accelerator in a few minutes, as they are lent: what is timed is compiled first, all parts beside one another.

    python -m benchmarks.device FOLDER                  # all parts; what is done is in FOLDER whenever it ends
    python -m benchmarks.device FOLDER --seconds 300    # no part is begun, and none goes on, after so many
    python -m benchmarks.device FOLDER --parts mlp "ifca mlp 1000" published
    python -m benchmarks.device FOLDER --tests tests/clustering tests/nn   # these beside the compilation

The parts are those of the suite `accelerator`, the suite `published` of `benchmarks.peers`, and rounds of methods
beside their plans. As many processes compile as there are cores. Each ends before anything is timed: some forty that
only waited made rounds on an H200 ten times as long. The rounds are then timed in one process, every other part in one
of its own, from the compiled programs in FOLDER/cache, which a second call on the same machine finds too.
On a machine with other work or few cores XLA may choose other kernels than alone.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax

from benchmarks import accelerators
from benchmarks.peers import published
from fedjax_cluster import cli
from fedjax_cluster.algorithms import REGISTRY
from fedjax_cluster.bench import accelerator
from fedjax_cluster.bench.measure import Bench, Row
from fedjax_cluster.files import write_json

MORE = (
    *("fedavg mlp 100000", "ifca mlp 100000", "fedavg cnn 1000", "ifca cnn 1000"),
    *("pacfl, 256 landmarks mlp 100000", "flag, 256 landmarks mlp 100000"),
)
ROUNDS = (*(f"{name} mlp 1000" for name in sorted(REGISTRY)), *MORE)
PARTS = ("published", *ROUNDS, *accelerator.PARTS)
SHARE = 0.4  # of the seconds, for the compilation at most


class Compiling(Bench):
    """Runs everything once and times nothing."""

    def row(self, what: str, size: str, run: Callable[[], Any], *, peers: Any = None, **options: Any) -> Row:
        for name, each in {"": run, **(peers or {})}.items():
            started = time.perf_counter()
            jax.block_until_ready(each())
            print(what, name, f"{time.perf_counter() - started:.1f} s", flush=True)
        return self.add(Row(what, size, 1.0))

    def add(self, row: Row) -> Row:
        self.rows.append(row)
        return row


def compile_part(name: str, folder: pathlib.Path, *, smoke: bool) -> None:
    """In a process of its own: runs a part once. Of rounds the plan and the memory are kept."""
    if name in ROUNDS:
        method, model, clients = name.rsplit(" ", 2)
        accelerators.RECORD = folder / f"{file_of(name)}.json"
        accelerators.measure([method], [model], [20 if smoke else int(clients)])
    elif name == "published":
        clients, rows, cohort = ("20", "20", "4") if smoke else ("1000", "50", "50")
        published.cifar("1", cohort, "10", "0.1", clients, rows)
        published.femnist("1", "10", "20", "0.1", "20" if smoke else "3400")
    else:
        accelerator.PARTS[name](Compiling(smoke=smoke))


def time_part(name: str, folder: pathlib.Path, *, smoke: bool) -> None:
    """In a process of its own: a part, or the rounds of all methods that were compiled."""
    if name != "rounds":
        bench = Bench(smoke=smoke)
        (published.run if name == "published" else accelerator.PARTS[name])(bench)
        return write_json(folder / f"{name}.json", bench.report(name))
    for each in ROUNDS:
        accelerators.RECORD = folder / f"{file_of(each)}.json"
        rows = json.loads(accelerators.RECORD.read_text()) if accelerators.RECORD.is_file() else []
        for row in rows:
            accelerators.measure([row["method"]], [row["model"]], [row["clients"]], row)
            jax.clear_caches()


def file_of(name: str) -> str:
    return name.replace(",", "").replace(" ", "-")


def started(name: str, folder: pathlib.Path, variables: Mapping[str, str], *options: str) -> subprocess.Popen:
    log = (folder / f"{file_of(name)}{''.join(options)}.log").open("w")
    command = [sys.executable, "-m", "benchmarks.device", str(folder), "--part", name, *options]
    return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, **variables})


def wait(process: subprocess.Popen, until: float) -> str:
    """How the process ended, ended here where it is not done by then."""
    try:
        code = process.wait(max(0.1, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return "late"
    return "done" if code == 0 else f"failed ({code})"


def compile_parts(
    names: list[str], folder: pathlib.Path, variables: Mapping[str, str], until: float, *options: str
) -> dict[str, str]:
    """How the parts' compilations ended, as many at a time as there are cores."""
    running: dict[str, subprocess.Popen] = {}
    ended = {}
    while running or (names and time.monotonic() < until):
        while names and len(running) < (os.cpu_count() or 1) and time.monotonic() < until:
            running[names[0]] = started(names[0], folder, variables, "--compile", *options)
            names = names[1:]
        for name, process in list(running.items()):
            if process.poll() is not None or time.monotonic() > until:
                ended[f"{name}, compiled"] = wait(running.pop(name), until)
        time.sleep(0.1)
    return ended | dict.fromkeys([f"{name}, compiled" for name in names], "not begun")


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--seconds", type=float, default=540.0)
    parser.add_argument("--parts", nargs="*", default=PARTS)
    parser.add_argument("--tests", nargs="*", default=[])
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--compile", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    given.folder.mkdir(parents=True, exist_ok=True)
    if given.part:
        cli._prepare_jax()
        return (compile_part if given.compile else time_part)(given.part, given.folder, smoke=given.smoke)
    if unknown := [name for name in given.parts if name not in PARTS]:
        parser.error(f"unknown parts {unknown}; known: {', '.join(PARTS)}")
    begin = time.monotonic()
    end, smoke = begin + given.seconds, ["--smoke"] if given.smoke else []
    # Several processes share the device while they compile.
    cache = {
        "JAX_COMPILATION_CACHE_DIR": str(given.folder / "cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    sharing = {**cache, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    testing = []
    if given.tests:
        command = [sys.executable, "-m", "pytest", "-q", "-n", "8", "-p", "no:cacheprovider", "-p", "no:benchmark"]
        log = (given.folder / "tests.log").open("w")
        # As the tests' tolerances want it; on a GPU a product is in TF32 otherwise.
        variables = {**os.environ, **sharing, "JAX_DEFAULT_MATMUL_PRECISION": "highest"}
        testing = [subprocess.Popen([*command, "-v", *given.tests], stdout=log, stderr=log, env=variables)]
    ended = compile_parts(given.parts, given.folder, sharing, begin + SHARE * given.seconds, *smoke)
    for each in testing:
        ended["tests"] = wait(each, begin + SHARE * given.seconds)
    print(json.dumps(ended), flush=True)
    rounds = ["rounds"] if any(name in ROUNDS for name in given.parts) else []
    others = [name for name in given.parts if name not in ROUNDS]
    for name in [*others[:1], *rounds, *others[1:]]:
        if time.monotonic() < end:
            ended[name] = wait(started(name, given.folder, cache, *smoke), end)
            print(f"{time.monotonic() - begin:.0f} s: {name} {ended[name]}", flush=True)
    write_json(given.folder / "ended.json", ended)


if __name__ == "__main__":
    main(sys.argv[1:])
