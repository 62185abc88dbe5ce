"""Writes accelerators.md, figures compiled for devices that are not there, from results/accelerators.json.

    python benchmarks/accelerators.py                          # the page anew
    python benchmarks/accelerators.py v5e:2x4 fedavg ifca      # first compiles these methods for a device, at all sizes
    python benchmarks/accelerators.py gates [METHOD ...]       # compiles the toy sizes whose table the tests hold

Needs `pip install "fedjax_cluster[tpu]"`, or `[cuda12]` for h100. Compiled, not timed: no such device was there.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import sys
import time
from typing import Any

import jax

import fedjax_cluster as fc
from fedjax_cluster.types import DatasetInfo, Model

PAGE = pathlib.Path(__file__).with_suffix(".md")
RECORD = PAGE.parent / "results" / "accelerators.json"
GATES = PAGE.parents[1] / "tests" / "simulation" / "compiled_for_v5e.json"
SIZES = (1_000, 100_000, 1_000_000)
DIGITS = DatasetInfo("28×28 bytes", (28, 28), 10)
SMALL = DatasetInfo("8×8 bytes", (8, 8), 4)
GATE_DEVICE, GATE_CLIENTS, GATE_CHUNK = "v5e:2x4", 64, 4
TOYS: dict[str, Model] = {
    "mlp": fc.nn.mlp(hidden=(16,)),
    "cnn": fc.nn.cnn((4, 20), kernel_size=3, dense=(16,)),
    "resnet18": fc.nn.resnet18(width=4, blocks=(1, 1)),
}
TEXT = """# Compiled for accelerators

Written by `python benchmarks/accelerators.py` from `results/accelerators.json`: change these and not this page.

Figures of `fc.plan`: the whole program of a run's rounds, compiled by the device's own compiler for devices that were
not there. They are compiled, not timed. Every client has 64 rows of 28×28 bytes and takes one step of 32 of them; all
take part; four clusters where a method needs their number. Memory is that of one device, at the round's peak;
temporaries are its part beside the arguments; a round takes at least what its products, its memory's traffic or its
messages take at the rates of the data sheets, and likely several times that.

| device | method | model | clients | peak | temporaries | at a time | messages a round | at least | compilation |
|---|---|---|---|---|---|---|---|---|---|
"""

OF_GATES = """
## Every method, compiled for eight v5e

What `pytest -m tpu` holds: all methods with three small networks on 64 clients of 8 rows, compiled for `v5e:2x4`. Of
every program of rounds the collectives (gathers, reductions, permutations), the largest message of one and a device's
temporaries. No message is larger than the clusters' models, the updates of a device's share of the cohort (CFL), or
those rows of personal models that have eight numbers at most, which every device has of all clients (ResNet-18's
normalisations in this small form), but CFL-GP's: where the Gram matrices lose a direction in float32, and there alone,
it sends what its subspace iteration makes of the profiles, K models × 12.

| method | collectives | largest message, kB: MLP | CNN | ResNet-18 | temporaries, MB: MLP | CNN | ResNet-18 |
|---|---|---:|---:|---:|---:|---:|---:|
"""


def build(name: str, model: Model, batch: int) -> Any:
    """A method with four clusters where it takes their number, whose clients take one step."""
    method = fc.algorithms.REGISTRY[name]
    taken = {field.name for field in dataclasses.fields(method)}
    clusters: dict[str, Any] = {"clusters": 4} if "clusters" in taken else {}
    return method(model, local=fc.local.sgd(0.1, batch_size=batch, steps=1), **clusters)


def gate(name: str, model: str) -> dict[str, Any]:
    """What the tests hold of a method and a toy model compiled for eight v5e."""
    shape = fc.PopulationShape(GATE_CLIENTS, 8, SMALL)
    started = time.perf_counter()
    found = fc.plan(build(name, TOYS[model], 4), shape, device=GATE_DEVICE, chunk_size=GATE_CHUNK)
    assert found.memory is not None
    assert found.costs is not None
    return {
        "collectives": {kind: number for kind, (number, _) in sorted(found.costs.messages.items())},
        "largest_message": found.costs.largest_message,
        "temporaries": found.memory.temporaries,
        "seconds": round(time.perf_counter() - started, 1),
    }


def compile_gates(methods: list[str]) -> None:
    """Takes the toy sizes of some methods, or all, into the tests' table."""
    table = json.loads(GATES.read_text()) if GATES.is_file() else {}
    for name in methods or sorted(fc.algorithms.REGISTRY):
        for model in TOYS:
            table[f"{name} {model}"] = gate(name, model)
            print(f"{name} {model}", table[f"{name} {model}"], flush=True)
            GATES.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")
        jax.clear_caches()


def record(device: str, methods: list[str]) -> None:
    """Compiles methods at all sizes, and keeps the figures."""
    kept = json.loads(RECORD.read_text()) if RECORD.is_file() else []
    for name in methods:
        for model in ("mlp", "cnn"):
            for clients in SIZES:
                shape = fc.PopulationShape(clients, 64, DIGITS)
                made = fc.nn.mlp() if model == "mlp" else fc.nn.cnn()
                row = {"device": device, "method": name, "model": model, "clients": clients}
                found = fc.plan(build(name, made, 32), shape, device=device)
                costs, memory = found.costs, found.memory
                row |= {"fits": found.fits, "chunk": found.chunk, "compile_seconds": round(found.compile_seconds, 1)}
                if costs is not None and memory is not None:
                    row |= {"peak": memory.peak, "temporaries": memory.temporaries, "roofline": found.roofline}
                    row |= {"messages": sum(number for number, _ in costs.messages.values())}
                    row |= {"message_bytes": costs.message_bytes(), "flops": costs.flops, "bytes": costs.bytes}
                same = ("device", "method", "model", "clients")
                kept = [each for each in kept if any(each[key] != row[key] for key in same)] + [row]
                RECORD.write_text(json.dumps(kept, indent=1) + "\n")
                print(line(row), flush=True)


def line(row: dict[str, Any]) -> str:
    """A row of the page's table."""
    front = [row["device"], row["method"].replace("_", "-"), row["model"], f"{row['clients']:,}"]
    if "peak" not in row:
        return "| " + " | ".join([*front, "does not fit", "", "", "", "", f"{row['compile_seconds']} s"]) + " |"
    peak = f"{row['peak'] / 1e9:.2f} GB" + ("" if row["fits"] else ", does not fit")
    messages = f"{row['messages']}, {row['message_bytes'] / 1e6:,.1f} MB"
    temporaries = f"{row['temporaries'] / 1e9:.2f} GB"
    cells = [*front, peak, temporaries, str(row["chunk"]), messages, f"{1e3 * row['roofline']:,.1f} ms"]
    return "| " + " | ".join([*cells, f"{row['compile_seconds']} s"]) + " |"


def gate_line(method: str, table: dict[str, Any]) -> str:
    """A method's row of the gates' table."""
    rows = [table[f"{method} {model}"] for model in TOYS]
    counts = rows[0]["collectives"]
    assert all(row["collectives"] == counts for row in rows)
    kinds = " + ".join(str(counts.get(kind, 0)) for kind in ("all-gather", "all-reduce", "collective-permute"))
    cells = [f"{row['largest_message'] / 1e3:.1f}" for row in rows]
    cells += [f"{row['temporaries'] / 1e6:.1f}" for row in rows]
    return f"| {method.replace('_', '-')} | {kinds} | " + " | ".join(cells) + " |"


def main(arguments: list[str]) -> None:
    jax.config.update("jax_platforms", "cpu")
    if arguments[:1] == ["gates"]:
        compile_gates(arguments[1:])
        return
    if arguments:
        record(arguments[0], arguments[1:] or sorted(fc.algorithms.REGISTRY))
    rows = json.loads(RECORD.read_text())
    rows.sort(key=lambda row: (row["device"], row["method"], row["model"], row["clients"]))
    table = json.loads(GATES.read_text())
    gates = [gate_line(method, table) for method in sorted(fc.algorithms.REGISTRY)]
    PAGE.write_text(TEXT + "\n".join(map(line, rows)) + "\n" + OF_GATES + "\n".join(gates) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
