"""An accelerator in a few minutes, as they are lent: what is timed is compiled first, all parts beside one another.

    python -m benchmarks.device FOLDER                  # all parts; what is done is in FOLDER whenever it ends
    python -m benchmarks.device FOLDER --seconds 300    # no part is begun, and none goes on, after so many
    python -m benchmarks.device FOLDER --tests tests/clustering tests/nn   # these beside the compilation

The parts are those of the suite `accelerator`, the suite `published` of `benchmarks.peers`, and rounds of methods
beside their plans. Compiled programs are kept in FOLDER/cache, so that a second call on the same machine only times.
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
from fedjax_cluster.bench import accelerator
from fedjax_cluster.bench.measure import Bench, Row
from fedjax_cluster.files import write_json

METHODS = ("fedavg", "ifca", "fesem", "gradient_loss", "pacfl", "flag")
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


def part(name: str, folder: pathlib.Path, *, compiling: bool, smoke: bool) -> None:
    """One part, in a process of its own."""
    cli._prepare_jax()
    bench = Compiling(smoke=smoke) if compiling else Bench(smoke=smoke)
    if name == "published":
        if compiling:
            published.cifar("1", "50", "10", "0.1", "1000", "50")
            published.femnist("1", "10", "20", "0.1", "3400")
            return
        published.run(bench)
    elif name in METHODS:
        accelerators.RECORD = folder / f"{'compiled' if compiling else 'measured'}-{name}.json"
        accelerators.measure([name], ["mlp"], [20 if smoke else 1000])
        return
    else:
        accelerator.PARTS[name](bench)
    if not compiling:
        write_json(folder / f"{name}.json", bench.report(name))


def started(name: str, folder: pathlib.Path, variables: Mapping[str, str], *options: str) -> subprocess.Popen:
    log = (folder / f"{name}{''.join(options)}.log").open("w")
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


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--seconds", type=float, default=540.0)
    parser.add_argument("--parts", nargs="*", default=[*METHODS, *accelerator.PARTS, "published"])
    parser.add_argument("--tests", nargs="*", default=[])
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--compile", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    given.folder.mkdir(parents=True, exist_ok=True)
    if given.part:
        return part(given.part, given.folder, compiling=given.compile, smoke=given.smoke)
    known = [*METHODS, *accelerator.PARTS, "published"]
    if unknown := [name for name in given.parts if name not in known]:
        parser.error(f"unknown parts {unknown}; known: {', '.join(known)}")
    begin = time.monotonic()
    end, smoke = begin + given.seconds, ["--smoke"] if given.smoke else []
    # Several processes share the device while they compile.
    cache = {
        "JAX_COMPILATION_CACHE_DIR": str(given.folder / "cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    sharing = {**cache, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    running = {name: started(name, given.folder, sharing, "--compile", *smoke) for name in given.parts}
    if given.tests:
        command = [sys.executable, "-m", "pytest", "-q", "-n", "8", "-p", "no:cacheprovider", "-p", "no:benchmark"]
        log = (given.folder / "tests.log").open("w")
        # As the tests' tolerances want it; on a GPU a product is in TF32 otherwise.
        variables = {**os.environ, **sharing, "JAX_DEFAULT_MATMUL_PRECISION": "highest"}
        running["tests"] = subprocess.Popen([*command, "-v", *given.tests], stdout=log, stderr=log, env=variables)
    ended = {f"{name}, compiled": wait(each, begin + SHARE * given.seconds) for name, each in running.items()}
    print(json.dumps(ended), flush=True)
    for name in given.parts:
        if time.monotonic() < end:
            ended[name] = wait(started(name, given.folder, cache, *smoke), end)
            print(f"{time.monotonic() - begin:.0f} s: {name} {ended[name]}", flush=True)
    write_json(given.folder / "ended.json", ended)


if __name__ == "__main__":
    main(sys.argv[1:])
