"""An accelerator in a few minutes, as they are lent: all is compiled beside one another, and then timed in turns.

    python -m benchmarks.device FOLDER                  # all parts; what is done is in FOLDER whenever it ends
    python -m benchmarks.device FOLDER --seconds 300    # nothing goes on after so many
    python -m benchmarks.device FOLDER --parts mlp "ifca mlp 1000" published
    python -m benchmarks.device FOLDER --tests tests/clustering tests/nn   # these beside the compilation

The parts are those of the suite `accelerator`, the suite `published` of `benchmarks.peers`, and rounds of methods
beside their plans. Each has a process, which compiles, waits for its turn and is timed while the others wait; those
that are not compiled by half of the time are timed as they become ready, beside the compilation of the others.
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
PARTS = (*ROUNDS, *accelerator.PARTS, "published")
SHARE = 0.5  # of the seconds, for the compilation at most
TOGETHER = 40  # processes that compile: each takes memory of the machine and of the device


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


def part(name: str, folder: pathlib.Path, *, smoke: bool) -> None:
    """One part, in a process of its own."""
    cli._prepare_jax()

    def turn() -> None:
        sign(folder, name, "ready").touch()
        while not sign(folder, name, "go").exists():
            time.sleep(0.05)

    if name in ROUNDS:
        method, model, clients = name.rsplit(" ", 2)
        accelerators.RECORD = folder / f"{file_of(name)}.json"
        return accelerators.measure([method], [model], [20 if smoke else int(clients)], turn)
    if name == "published":
        published.cifar("1", "50", "10", "0.1", "1000", "50")
        published.femnist("1", "10", "20", "0.1", "3400")
    else:
        accelerator.PARTS[name](Compiling(smoke=smoke))
    turn()
    bench = Bench(smoke=smoke)
    (published.run if name == "published" else accelerator.PARTS[name])(bench)
    write_json(folder / f"{name}.json", bench.report(name))


def file_of(name: str) -> str:
    return name.replace(",", "").replace(" ", "-")


def sign(folder: pathlib.Path, name: str, what: str) -> pathlib.Path:
    return folder / f"{file_of(name)}.{what}"


def started(name: str, folder: pathlib.Path, variables: Mapping[str, str], *options: str) -> subprocess.Popen:
    for what in ("ready", "go"):
        sign(folder, name, what).unlink(missing_ok=True)
    command = [sys.executable, "-m", "benchmarks.device", str(folder), "--part", name, *options]
    log = sign(folder, name, "log").open("w")
    return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, **variables})


def all_parts(names: list[str], folder: pathlib.Path, seconds: float, tests: list[str], *options: str) -> None:
    """Starts the parts, gives each a turn, and prints how it ended."""
    begin = time.monotonic()
    # Several processes share the device; what one compiles the suite `published` finds in others.
    variables = {
        "JAX_COMPILATION_CACHE_DIR": str(folder / "cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }
    running: dict[str, subprocess.Popen] = {}
    testing: dict[str, subprocess.Popen] = {}
    if tests:
        command = [sys.executable, "-m", "pytest", "-q", "-n", "8", "-p", "no:cacheprovider", "-p", "no:benchmark"]
        log = (folder / "tests.log").open("w")
        # As the tests' tolerances want it; on a GPU a product is in TF32 otherwise.
        precise = {**os.environ, **variables, "JAX_DEFAULT_MATMUL_PRECISION": "highest"}
        testing["tests"] = subprocess.Popen([*command, "-v", *tests], stdout=log, stderr=log, env=precise)
    waiting, ended = list(names), {}
    while (waiting or running) and time.monotonic() < begin + seconds:
        while waiting and len(running) < TOGETHER:
            running[waiting[0]] = started(waiting[0], folder, variables, *options)
            del waiting[0]
        ready = [name for name in running if sign(folder, name, "ready").exists()]
        late = time.monotonic() > begin + SHARE * seconds
        if ready and (late or len(ready) == len(running)):
            sign(folder, ready[0], "go").touch()
            while running[ready[0]].poll() is None and time.monotonic() < begin + seconds:
                time.sleep(0.05)
        for name, process in list(running.items()):
            if (code := process.poll()) is not None:
                ended[name] = "done" if code == 0 else f"failed ({code})"
                print(f"{time.monotonic() - begin:.0f} s: {name} {ended[name]}", flush=True)
                del running[name]
        time.sleep(0.2)
    for name, process in (running | testing).items():
        ended[name] = "done" if process.poll() == 0 else "late"
        process.kill()
        process.wait()
    write_json(folder / "ended.json", {**ended, **dict.fromkeys(waiting, "not begun")})
    print(json.dumps(ended), flush=True)


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--seconds", type=float, default=540.0)
    parser.add_argument("--parts", nargs="*", default=PARTS)
    parser.add_argument("--tests", nargs="*", default=[])
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    given.folder.mkdir(parents=True, exist_ok=True)
    if given.part:
        return part(given.part, given.folder, smoke=given.smoke)
    if unknown := [name for name in given.parts if name not in PARTS]:
        parser.error(f"unknown parts {unknown}; known: {', '.join(PARTS)}")
    all_parts(given.parts, given.folder, given.seconds, given.tests, *(["--smoke"] if given.smoke else []))


if __name__ == "__main__":
    main(sys.argv[1:])
