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
from benchmarks import h200
from fedjax_cluster import cli
from fedjax_cluster.bench.workloads import noise_clients
from fedjax_cluster.files import atomic_file
from fedjax_cluster.simulation.devices import target
from fedjax_cluster.types import DatasetInfo, Federation, Model

PAGE = pathlib.Path(__file__).with_suffix(".md")
RECORD = PAGE.parent / "results" / "accelerators.json"
GATES = PAGE.parents[1] / "tests" / "simulation" / "compiled_for_v5e.json"
SIZES = (1_000, 100_000, 1_000_000)
CHIPS = {"v5e:1x1": 1, "v5e:2x4": 8, "v5e:8x8": 64, "v5e:16x16": 256}
A_CHIP = 1_000  # clients, in the table of growing numbers of chips
ONE_CHIP, OF_ONE, AT_A_TIME = "v5e:1x1", 100_000, 32
DIGITS = DatasetInfo("28×28 bytes", (28, 28), 10)
SMALL = DatasetInfo("8×8 bytes", (8, 8), 4)
GATE_DEVICE, GATE_CLIENTS, GATE_CHUNK = "v5e:2x4", 64, 4
TOYS: dict[str, Model] = {
    "mlp": fc.nn.mlp(hidden=(16,)),
    "cnn": fc.nn.cnn((4, 20), kernel_size=3, dense=(16,)),
    "resnet18": fc.nn.resnet18(width=4, blocks=(1, 1)),
}
MODELS: dict[str, Model] = {"mlp": fc.nn.mlp(), "cnn": fc.nn.cnn()}
LANDMARKS = 256
# In the table of growing numbers of chips beside all methods: these compare nobody with all others.
BY_LANDMARKS: dict[str, tuple[str, dict[str, Any]]] = {
    f"{name}, {LANDMARKS} landmarks": (name, {"landmarks": LANDMARKS, **options})
    for name, options in {
        "cfl": {},
        "cfl_gp": {"profiles_of": "landmarks"},
        "fedgwc": {},
        "flag": {},
        "pacfl": {},
    }.items()
}
ROUNDS, TIMED = 5, 20  # of what is measured: before, and timed
TEXT = """# Compiled for accelerators

Written by `python -m benchmarks.accelerators` from `results/accelerators.json`: change these and not this page.

Figures of `fc.plan`: the whole program of a run's rounds, compiled by the device's own compiler for devices that were
not there. They are compiled, not timed, but for those of an H200. Every client has 64 rows of 28×28 bytes, none for
tests, and takes one step of 32 of them; all take part; four clusters where a method needs their number. Memory is that
of one device, at the round's peak; temporaries are all that is allocated beside the arguments, some of
it one after the other, and may be more than the peak; a round takes at least what its
products, its memory's traffic or its messages take at the rates of the data sheets, and likely several times that.

| device | method | model | clients | peak | temporaries | at a time | messages a round | at least | compilation |
|---|---|---|---|---|---|---|---|---|---|
"""

OF_DEVICE = """
## Every method on {device}

A device's memory at the round's peak, and what a round takes at least, with the clients at a time that `fc.plan`
chooses. {text}

| method | {columns} |
|---|{rules}|
"""
# Those whose rows have all methods: what they are, and what is said of them.
DEVICES = {
    "h100": (
        "one H100",
        "A model of each of a hundred thousand clients is 64 GB with this MLP, all pairs of them are 40 GB a matrix:\n"
        "methods that keep these do not fit, and where a cell is empty were not compiled. Of the CNN six methods were\n"
        "compiled.",
    ),
    "v5e:16x16": (
        "256 v5e",
        "They have 4.1 TB together. A model of each of a million clients is 640 GB with this MLP, all pairs of them\n"
        "are 4 TB a matrix: methods that compare all whom they hear, here everybody, take landmarks for so many.\n"
        "Where a cell is empty they were not compiled.",
    ),
}
OF_SCALING = """
## A thousand clients a chip

Messages of a round and their megabytes, of one device, on 1, 8, 64 and 256 v5e (an MLP, everybody takes part, so that
the clients grow with the chips). CFL, CFL-GP and FedGWC compare all pairs of clients in a round, FLAG and PACFL before
the first, FL+HC and FlexCFL in one, StoCFL all whom it hears for the first time, here everybody at once; by landmarks
nobody does. In FedGWC's rounds a tenth takes part: clients stay on the chip that has their rows, and 3 to 4 % of them
(25 of 800, 970 of 25,600), for whom it has no room, go to others, some at a time; one of these messages is counted.

| method | 1 chip | 8 chips | 64 chips | 256 chips |
|---|---|---|---|---|
"""
OF_CHUNKS = """
## A hundred thousand clients on one v5e, 32 at a time

Temporaries, over the 5.0 GB of all clients' rows, and seconds of compilation on two cores, beside other work. Methods
that keep a model, an update or similarities of every client do not fit. The CNN's temporaries are those of 32 clients
at a time, whatever the population's size; to these FedPer's and FedRep's add their clients' own layers once, 0.8 and
2.1 GB.

| method | MLP | CNN |
|---|---|---|
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
    table = json.loads(GATES.read_text()) if GATES.is_file() else {}
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


def measured_line(row: dict[str, Any]) -> str:
    """A row of the table of what was planned and measured."""
    peak = f"{row['measured_peak'] / 1e9:.2f} GB" if row["measured_peak"] else ""
    cells = [row["device"].removeprefix("measured: "), row["method"].replace("_", "-"), row["model"]]
    cells += [f"{row['clients']:,}", f"{row['peak'] / 1e9:.2f} GB", peak]
    least = row["roofline"]
    cells += ["" if least is None else f"{1e3 * least:,.1f} ms", f"{1e3 * row['seconds']:,.1f} ms"]
    return "| " + " | ".join(cells) + " |"


def line(row: dict[str, Any]) -> str:
    """A row of the page's table."""
    front = [row["device"], row["method"].replace("_", "-"), row["model"], f"{row['clients']:,}"]
    if "peak" not in row:
        seconds = f"{row['compile_seconds']} s" if "compile_seconds" in row else ""
        return "| " + " | ".join([*front, unavailable(row), "", "", "", "", seconds]) + " |"
    peak = f"{row['peak'] / 1e9:.2f} GB" + ("" if row["fits"] else ", does not fit")
    messages = f"{row['messages']}, {row['message_bytes'] / 1e6:,.1f} MB"
    temporaries = f"{row['temporaries'] / 1e9:.2f} GB"
    least = "" if row["roofline"] is None else f"{1e3 * row['roofline']:,.1f} ms"
    cells = [*front, peak, temporaries, str(row["chunk"]), messages, least]
    return "| " + " | ".join([*cells, f"{row['compile_seconds']} s"]) + " |"


def unavailable(row: dict[str, Any]) -> str:
    """Why a row has no figures; "" where it was not compiled."""
    return "refused" if "refused" in row else "does not fit" if row else ""


def device_lines(rows: list[dict[str, Any]], device: str) -> list[str]:
    """For each method its peak and its least time on one kind of device, by model and clients; a heading with it."""
    found = {
        (row["method"], row["model"], row["clients"]): row
        for row in rows
        if row["device"] == device and "chunk_size" not in row
    }
    columns = sorted({key[1:] for key in found}, key=lambda column: (column[0] != "mlp", column[1]))

    def cell(row: dict[str, Any]) -> str:
        if "peak" not in row or not row["fits"]:
            return unavailable(row)
        return f"{row['peak'] / 1e9:.2f} GB, {1e3 * row['roofline']:,.1f} ms"

    names = [f"{model.upper()}, {clients:,}" for model, clients in columns]
    called, text = DEVICES[device]
    heading = OF_DEVICE.format(
        device=called, text=text, columns=" | ".join(names), rules="|".join("---" for _ in names)
    )
    methods = sorted({method for method, *_ in found})
    lines = [
        "| "
        + " | ".join([method.replace("_", "-"), *(cell(found.get((method, *each), {})) for each in columns)])
        + " |"
        for method in methods
    ]
    return [heading + "\n".join(lines)] if lines else []


def scaling_lines(rows: list[dict[str, Any]]) -> list[str]:
    """For each method its messages, and megabytes of them, on a growing number of chips."""
    found = {}
    for row in rows:
        size = A_CHIP * CHIPS.get(row["device"], 0)
        if row.get("chunk_size") == AT_A_TIME and row["clients"] == size and row["model"] == "mlp":
            found[row["method"], row["device"]] = row
    lines = []
    for method in sorted({method for method, _ in found}):
        own = [found.get((method, device), {}) for device in CHIPS]
        cells = [
            f"{row['messages']}, {row['message_bytes'] / 1e6:,.2f}"
            if row.get("peak") and row["fits"]
            else unavailable(row)
            for row in own
        ]
        lines.append("| " + " | ".join([method.replace("_", "-"), *cells]) + " |")
    return lines


def chunk_lines(rows: list[dict[str, Any]]) -> list[str]:
    """For each method the temporaries of 100 000 clients on one chip, over the bytes of their rows."""
    population = OF_ONE * 64 * (28 * 28 + 4)
    found = {
        (row["method"], row["model"]): row
        for row in rows
        if row.get("chunk_size") == AT_A_TIME and (row["device"], row["clients"]) == (ONE_CHIP, OF_ONE)
    }

    def cell(row: dict[str, Any]) -> str:
        if "temporaries" not in row:
            return unavailable(row)
        part = row["temporaries"] / population
        seconds = f", {row['compile_seconds']} s" if "compile_seconds" in row else ""
        return f"{row['temporaries'] / 1e9:.2f} GB, {part:.2f}{seconds}"

    return [
        "| "
        + " | ".join([method.replace("_", "-"), *(cell(found.get((method, model), {})) for model in ("mlp", "cnn"))])
        + " |"
        for method in sorted({method for method, _ in found})
    ]


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


def page(rows: list[dict[str, Any]], gates: dict[str, Any]) -> str:
    """The page of the rows on record, and of the tests' table."""
    rows = sorted(rows, key=lambda row: (row["device"], row["method"], row["model"], row["clients"]))
    own = [
        line(row) for row in rows if row["clients"] in SIZES and "chunk_size" not in row and row["method"] == "fedavg"
    ]
    of_devices = [text for device in DEVICES for text in device_lines(rows, device)]
    of_gates = [gate_line(method, gates) for method in sorted(fc.algorithms.REGISTRY)]
    parts = [
        (TEXT, own),
        (h200.section(), [""]),
        ("", of_devices),
        (OF_SCALING, scaling_lines(rows)),
        (OF_CHUNKS, chunk_lines(rows)),
        (OF_GATES, of_gates),
    ]
    return "".join(text + "\n".join(lines) + "\n" for text, lines in parts if lines)


if __name__ == "__main__":
    main(sys.argv[1:])
