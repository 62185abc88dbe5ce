"""What was measured on an H200, a section of accelerators.md, from results/h200.json."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable
from typing import Any

RECORD = pathlib.Path(__file__).parent / "results" / "h200.json"
TEXT = """
## Measured on one H200

The only accelerator that has been there, twice for a quarter of an hour: {device}, JAX {jax}, float32 (products in
TF32, {rate} TFLOP/s of one of 8192³, 440 the second time). Medians of five to seven runs; programs were compiled beside
other work, which XLA's choice of kernels may have suffered from. Of the fast tests those of numerics, methods, local
training, devices and runs were there, 1,546 without those that need two devices: of the 68 that failed one was of a
tolerance (vectors of length 1 − 1.6·10⁻⁵), one of a rounding to bfloat16 that the compiler leaves out, one of the last
digit; the others took a CPU's forms, a second device or an installed package for granted. On no GPU yet: FLUTE's
benchmark (`python -m benchmarks.peers published`), the other tests, several devices; and, since patches are gathered,
training steps of whole networks.

pfl's own benchmark, CIFAR-10's shape on 1,000 users, cohorts of 50, one epoch of b=10, one after the other on the same
machine, a round (ten processes of pfl were not tried):

| simulator | rounds | a round |
|---|---|---|
{peers}

| training | time | rate |
|---|---|---|
{training}

An MLP's weights are each client's own and are read and written in every step, some 4 MB: at 4.8 TB/s the ten steps
of 512 clients take 4.3 ms at least.

A step of all clients at once, forward, backward and update, with XLA's grouped convolutions and pooling everywhere, and
as it is since: kernels' gradients and convolutions of at most four channels as matrix products, 128 clients in a
group, LeNet-5's in products over rows. Where a number is missing it was not measured; ResNet-18's first
layer was not a product yet.

| one step | XLA's forms | now |
|---|---|---|
{steps}

Forward and both gradients of single layers, 128 clients × b=32, ms:

| layer | XLA's | products | kernel's gradient alone as a product |
|---|---|---|---|
{layers}

Patches of 25 or 9 joined slices took half of a round of the CNN: XLA's kernel for them branches for every number that
it writes. Since then one gather makes them; ms of the products with their patches:

| product | slices joined | gathered |
|---|---|---|
{patches}

What was planned and what was: rounds of a thousand clients as below, all at once. The least time is that of the
memory's traffic at 4.8 TB/s. The run's peak is the highest of its rounds', its start's and an evaluation's, planned
afterwards for an H200, of the code of then, which stacked what is the clients' own beside the state: FeSEM's is its
start's, gradient-and-loss CFL's was its evaluation's, which had a copy of all models for each client and takes 0.31 GB
now. Where no time stands the rounds were timed beside other processes, and are not told; memory that XLA takes to try
kernels is in what was measured. StoCFL's 0.27 GB more than planned are not
explained. Of 100,000 clients FedAvg took 5.32 GB (planned 5.23), IFCA 5.55 (5.52).

| method | rounds' peak, planned | the run's, planned | measured | a round, at least | measured |
|---|---|---|---|---|---|
{rounds}
"""


def section() -> str:
    """The section of the page."""
    found = json.loads(RECORD.read_text())

    def table(name: str, cells: Callable[[dict[str, Any]], list[str]]) -> str:
        return "\n".join("| " + " | ".join(cells(row)) + " |" for row in found[name])

    def milliseconds(value: float | None) -> str:
        return "" if value is None else f"{value:.1f} ms"

    def training_cells(row: dict[str, Any]) -> list[str]:
        return [row["what"], milliseconds(1e3 * row["seconds"]), f"{row['gflops'] / 1e3:.1f} TFLOP/s"]

    def round_cells(row: dict[str, Any]) -> list[str]:
        names = ("planned_peak", "planned_whole", "measured_peak")
        peaks = [f"{row[name] / 1e9:.2f} GB" if name in row else "" for name in names]
        seconds = None if row["seconds"] is None else 1e3 * row["seconds"]
        least = milliseconds(1e3 * row["bytes"] / 4.8e12)
        return [row["method"].replace("_", "-"), *peaks, least, milliseconds(seconds)]

    return TEXT.format(
        device=found["device"],
        jax=found["versions"]["jax"],
        rate=found["products"]["rate_tflops"],
        training=table("training", training_cells),
        steps=table("steps", lambda row: [row["what"], milliseconds(row["before"]), milliseconds(row["after"])]),
        layers=table(
            "layers", lambda row: [row["what"], *(f"{row[name]:.1f}" for name in ("xla", "product", "kernel_product"))]
        ),
        rounds=table("rounds", round_cells),
        peers=table("peers", lambda row: [row["what"], str(row["rounds"]), milliseconds(1e3 * row["seconds"])]),
        patches=table("patches", lambda row: [row["what"], f"{row['joined']:.2f}", f"{row['gathered']:.2f}"]),
    )
