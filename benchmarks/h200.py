"""What was measured on an H200, a section of accelerators.md, from results/h200.json."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable
from typing import Any

RECORD = pathlib.Path(__file__).parent / "results" / "h200.json"
TEXT = """
## Measured on one H200

The only accelerator that has been there, for a quarter of an hour: {device}, JAX {jax}, float32 (products in
TF32, {rate} TFLOP/s of one of 8192³). Medians of five to seven runs; programs were compiled beside other work, which
XLA's choice of kernels may have suffered from. On no GPU yet: the benchmarks of pfl and FLUTE
(`python -m benchmarks.peers published`), the whole test suite, several devices.

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

What was planned and what was: rounds of a thousand clients as below, all at once. The least time is that of the
memory's traffic at 4.8 TB/s. The run's peak is the highest of its rounds', its start's and an evaluation's, planned
afterwards for an H200: FeSEM's is its start's, gradient-and-loss CFL's was its evaluation's, which had a copy of all
models for each client and takes 0.31 GB now.

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
        peaks = [f"{row[name] / 1e9:.2f} GB" for name in ("planned_peak", "planned_whole", "measured_peak")]
        return [
            row["method"].replace("_", "-"),
            *peaks,
            *(f"{1e3 * s:.1f} ms" for s in (row["bytes"] / 4.8e12, row["seconds"])),
        ]

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
    )
