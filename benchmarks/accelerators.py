"""Writes accelerators.md, figures compiled for devices that are not there, from results/accelerators.json.

    python -m benchmarks.accelerators                             # the page anew
    python -m benchmarks.accelerators v5e:2x4 fedavg ifca         # first compiles these methods for a device
    python -m benchmarks.accelerators v5e:2x4 --models mlp --clients 100000
    python -m benchmarks.accelerators scaling [METHOD ...]        # a thousand clients a chip, on 1 to 256 chips
    python -m benchmarks.accelerators chunks [METHOD ...]         # 100 000 clients on one chip, 32 at a time
    python -m benchmarks.accelerators gates [METHOD ...]          # compiles the toy sizes whose table the tests hold
    python -m benchmarks.accelerators measured [METHOD ...]       # plans for the device that is here, and runs

What is on record already is left out, but for `gates`.

Needs `pip install "fedjax_cluster[tpu]"`, or `[cuda12]` for h100. Compiled, not timed, but for `measured`.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import itertools
import json
import math
import pathlib
import statistics
import sys
import time
from collections.abc import Mapping
from typing import Any

import jax

import fedjax_cluster as fc
from benchmarks.accelerators_page import (
    A_CHIP,
    AT_A_TIME,
    BY_LANDMARKS,
    CHIPS,
    OF_ONE,
    ONE_CHIP,
    SIZES,
    line,
    measured_line,
    page,
)
from fedjax_cluster import cli
from fedjax_cluster.bench.workloads import noise_clients
from fedjax_cluster.files import atomic_file
from fedjax_cluster.simulation.devices import target
from fedjax_cluster.types import DatasetInfo, Federation, Model

PAGE = pathlib.Path(__file__).with_suffix(".md")
RECORD = PAGE.parent / "results" / "accelerators.json"
GATES = PAGE.parents[1] / "tests" / "simulation" / "compiled_for_v5e.json"
DIGITS = DatasetInfo("28×28 bytes", (28, 28), 10)
SMALL = DatasetInfo("8×8 bytes", (8, 8), 4)
GATE_DEVICE, GATE_CLIENTS, GATE_CHUNK = "v5e:2x4", 64, 4
TOYS: dict[str, Model] = {
    "mlp": fc.nn.mlp(hidden=(16,)),
    "cnn": fc.nn.cnn((4, 20), kernel_size=3, dense=(16,)),
    "resnet18": fc.nn.resnet18(width=4, blocks=(1, 1)),
}
MODELS: dict[str, Model] = {"mlp": fc.nn.mlp(), "cnn": fc.nn.cnn()}
ROUNDS, TIMED = 5, 20  # of what is measured: before, and timed


def build(name: str, model: Model, batch: int) -> Any:
    """A method with four clusters where it takes their number, whose clients take one step."""
    registered, options = BY_LANDMARKS.get(name, (name, {}))
    method = fc.algorithms.REGISTRY[registered]
    taken = {field.name for field in dataclasses.fields(method)}
    clusters: dict[str, Any] = {"clusters": 4} if "clusters" in taken else {}
    return method(model, local=fc.local.sgd(0.1, batch_size=batch, steps=1), **clusters, **options)


def gate(name: str, model: str) -> dict[str, Any]:
    """What the tests hold of a method and a toy model compiled for eight v5e."""
    shape = fc.PopulationShape(GATE_CLIENTS, 8, SMALL, test_rows=0)
    started = time.perf_counter()
    found = fc.plan(build(name, TOYS[model], 4), shape, device=GATE_DEVICE, chunk_size=GATE_CHUNK, whole=False)
    assert found.memory is not None
    assert found.costs is not None
    return {
        "collectives": {kind: number for kind, (number, _) in sorted(found.costs.messages.items())},
        "largest_message": found.costs.largest_message,
        "temporaries": found.memory.temporaries,
        "seconds": round(time.perf_counter() - started, 1),
    }


def compile_gates(methods: list[str]) -> None:
    """Takes the toy sizes of some methods into the tests' table."""
    table: dict[str, Any] = json.loads(GATES.read_text()) if GATES.is_file() else {}
    version = importlib.metadata.version("libtpu")
    if table.get("libtpu") != version:  # another compiler's are no measure
        table = {"libtpu": version}
    for name in methods:
        for model in TOYS:
            table[f"{name} {model}"] = gate(name, model)
            print(f"{name} {model}", table[f"{name} {model}"], flush=True)
            GATES.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")
        jax.clear_caches()


def record(device: str, methods: list[str], models: list[str], sizes: list[int], chunk_size: int | None = None) -> None:
    """Compiles methods that are not on record yet, and keeps the figures."""
    target(device)  # or its compiler is missing, which is no refusal of a method's
    for name in methods:
        for model in models:
            for clients in sizes:
                row = {"device": device, "method": name, "model": model, "clients": clients}
                row |= {} if chunk_size is None else {"chunk_size": chunk_size}
                # Read anew each time: other processes may compile for other devices.
                kept = json.loads(RECORD.read_text()) if RECORD.is_file() else []
                if any(all(each.get(key) == row.get(key) for key in {*row, "chunk_size"}) for each in kept):
                    continue
                row |= compiled(name, MODELS[model], clients, device, chunk_size)
                kept = json.loads(RECORD.read_text()) if RECORD.is_file() else []
                _keep([*kept, row])
                print(line(row), flush=True)
        jax.clear_caches()


def _keep(rows: list[dict[str, Any]]) -> None:
    with atomic_file(RECORD) as beside:
        beside.write_text(json.dumps(rows, indent=1) + "\n")


def compiled(
    name: str, model: Model, clients: int, device: str, chunk_size: int | None, data: Any = None
) -> dict[str, Any]:
    """The figures of one method, model and number of clients; `refused` where the method takes no such number."""
    try:
        shape = fc.PopulationShape(clients, 64, DIGITS, test_rows=0) if data is None else data
        whole = data is not None
        found = fc.plan(build(name, model, 32), shape, device=device, chunk_size=chunk_size, whole=whole)
    except ValueError as error:
        return {"refused": str(error)}
    costs, memory = found.costs, found.memory
    row = {"fits": found.fits, "chunk": found.chunk, "compile_seconds": round(found.compile_seconds, 1)}
    if costs is not None and memory is not None:
        row |= {"peak": found.peak or memory.peak, "temporaries": memory.temporaries, "roofline": found.roofline}
        row |= {"messages": sum(number for number, _ in costs.messages.values())}
        row |= {"message_bytes": costs.message_bytes(), "flops": costs.flops, "bytes": costs.bytes}
        row |= {"largest_message": costs.largest_message, "collectives": costs.messages}
    return row


def measure(methods: list[str], models: list[str], sizes: list[int], known: Mapping[str, Any] | None = None) -> None:
    """Plans runs for the device that is here, then runs them, the smallest first: a device tells its highest peak.

    Args:
      known: an earlier record of such a row, which is timed anew and not planned.
    """
    planned, here = [], f"measured: {jax.devices()[0].device_kind}"
    data = {}
    for each in sizes:
        train, test = noise_clients(DIGITS, each, 64), noise_clients(DIGITS, each, 1)
        data[each] = Federation(train, test, None, None, DIGITS)
    for name, model, clients in itertools.product(methods, models, sizes):
        row = {"device": here, "method": name, "model": model, "clients": clients}
        network, federation = MODELS[model], data[clients]
        found = dict(known or {}) or compiled(name, network, clients, "local", None, federation)
        planned.append((found.get("peak", math.inf), row | found, build(name, network, 32), federation))
        print(line(planned[-1][1]), flush=True)
    for _, row, method, federation in sorted(planned, key=lambda each: each[0]):
        if not row.get("fits"):
            continue
        before = (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0)
        mapping = fc.parallel.client_mapping("auto", row["chunk"] if jax.default_backend() != "cpu" else None)
        rounds = ROUNDS + TIMED
        result = fc.simulate(method, federation, rounds=rounds, eval_every=ROUNDS, progress=False, mapping=mapping)
        peak = (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0)
        row |= {"seconds": statistics.median(result.history["seconds"][ROUNDS:])}
        if known is None:
            row |= {"measured_peak": peak if peak > before else None}  # else an earlier run's
        kept = json.loads(RECORD.read_text()) if RECORD.is_file() else []
        names = ("device", "method", "model", "clients")
        kept = [each for each in kept if any(each[name] != row[name] for name in names)]
        _keep([*kept, row])
        print(measured_line(row), flush=True)
        del result


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("device", nargs="?", help='such as v5e:2x4, or "scaling", "chunks", "gates"')
    parser.add_argument("methods", nargs="*", help="default: all")
    parser.add_argument("--models", nargs="*", default=["mlp", "cnn"])
    parser.add_argument("--clients", nargs="*", type=int, default=SIZES)
    given = parser.parse_args(arguments)
    methods = given.methods or sorted(fc.algorithms.REGISTRY)
    if given.device == "measured":
        cli._prepare_jax()
        measure(methods, given.models, given.clients)
    else:
        jax.config.update("jax_platforms", "cpu")
    if given.device == "gates":
        return compile_gates(methods)
    if given.device == "scaling":
        growing = given.methods or [*methods, *BY_LANDMARKS]
        for device, chips in CHIPS.items():
            record(device, growing, ["mlp"], [A_CHIP * chips], AT_A_TIME)
    elif given.device == "chunks":
        record(ONE_CHIP, methods, given.models, [OF_ONE], AT_A_TIME)
    elif given.device not in (None, "measured"):
        record(given.device, methods, given.models, given.clients)
    PAGE.write_text(page(json.loads(RECORD.read_text()), json.loads(GATES.read_text())), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
