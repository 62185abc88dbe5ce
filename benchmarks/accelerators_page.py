"""The page of compiled figures: its words, and the rows of its tables."""

from __future__ import annotations

from typing import Any

import fedjax_cluster as fc
from benchmarks import h200

SIZES = (1_000, 100_000, 1_000_000)
CHIPS = {"v5e:1x1": 1, "v5e:2x4": 8, "v5e:8x8": 64, "v5e:16x16": 256}
A_CHIP = 1_000  # clients, in the table of growing numbers of chips
ONE_CHIP, OF_ONE, AT_A_TIME = "v5e:1x1", 100_000, 32
NETWORKS = ("mlp", "cnn", "resnet18")  # of the table of toy sizes
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
        "methods that keep more than one such do not fit. What takes more than 60 GB needs\n"
        "`XLA_PYTHON_CLIENT_MEM_FRACTION=.95`, as JAX by itself takes three quarters of a GPU. Where a cell is empty\n"
        "they were not compiled. A GPU's compiler tells less of loops: those over clusters and steps count once in\n"
        "the least times.",
    ),
    "v5e:2x4": (
        "eight v5e",
        "They have 137 GB together, and a million clients' rows are 50 GB: methods that keep a model or an update of\n"
        "each beside other large ones, or compare all pairs, do not fit. Where a cell is empty they were not compiled.",
    ),
    "v5e:16x16": (
        "256 v5e",
        "They have 4.4 TB together. A model of each of a million clients is 640 GB with this MLP, all pairs of them\n"
        "are 4 TB a matrix: methods that compare all whom they hear, here everybody, take landmarks for so many.\n"
        "Where a cell is empty they were not compiled.",
    ),
}
OF_SCALING = """
## A thousand clients a chip

Messages of a round and their megabytes, of one device, on 1, 8, 64 and 256 v5e (an MLP, everybody takes part, so that
the clients grow with the chips). CFL and FedGWC compare all pairs of clients in a round, FLAG and PACFL before the
first, FL+HC and FlexCFL in one, StoCFL all whom it hears for the first time, here everybody at once; by landmarks
nobody does, nor does CFL-GP beyond 2,048 clients: the K models × 96 that its subspace iteration adds up a clustering
are most of what it sends (those of 64 and 256 chips have the three messages of a plain round in them as well). In
FedGWC's rounds a tenth takes part: clients stay on the chip that has their rows, and 3 to
4 % of them (25 of 800, 970 of 25,600), for whom it has no room, go to others, some at a time; one of these messages is
counted. Every device has a few numbers of all clients, such as their clusters: 8 bytes a client in most methods, 2 MB
of 256,000. That grows with the clients, here with the chips; what is summed up does not.

| method | 1 chip | 8 chips | 64 chips | 256 chips |
|---|---|---|---|---|
"""
OF_CHUNKS = """
## A hundred thousand clients on one v5e, 32 at a time

Temporaries, over the 5.0 GB of all clients' rows, and seconds of compilation on two cores, without true groups (with at
most 64 of them FedAvg's takes 15 s for 9 on a slow machine, with more 37). Methods that keep a model, an update or
similarities of every client do not fit. The CNN's temporaries are those of 32 clients at a time, whatever the
population's size; what is the clients' own is renewed where it lies.

| method | MLP | CNN |
|---|---|---|
"""
OF_GATES = """
## Every method, compiled for eight v5e

What `pytest -m accelerators` holds: all methods with three small networks on 64 clients of 8 rows, compiled for
`v5e:2x4`, and lowered for CUDA. Of every program of rounds the collectives (gathers, reductions, permutations), the
largest message of one and a device's temporaries. No message is larger than the clusters' models, the updates of a
device's share of the cohort (CFL and CFL-GP), or a few numbers of each client, such as its cluster; StoCFL, to which
each client begins as a cluster, sends its models too. Where the Gram matrices of CFL-GP lose a direction in float32,
and there alone, its subspace iteration adds up K models × 12 and at the end × 48, in messages of K models.

| method | collectives | largest message, kB: MLP | CNN | ResNet-18 | temporaries, MB: MLP | CNN | ResNet-18 |
|---|---|---:|---:|---:|---:|---:|---:|
"""


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
    rows = [table[f"{method} {model}"] for model in NETWORKS]
    counts = rows[0]["collectives"]
    assert all(row["collectives"] == counts for row in rows)
    kinds = " + ".join(str(counts.get(kind, 0)) for kind in ("all-gather", "all-reduce", "collective-permute"))
    cells = [f"{row['largest_message'] / 1e3:.1f}" for row in rows]
    cells += [f"{row['temporaries'] / 1e6:.1f}" for row in rows]
    return f"| {method.replace('_', '-')} | {kinds} | " + " | ".join(cells) + " |"


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
