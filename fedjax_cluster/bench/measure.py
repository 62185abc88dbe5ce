"""How to measure: in turns, medians, FLOPs of the traced program, and the product rate in the same minutes."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_cluster import parallel, provenance

FEWEST_REPETITIONS = 5
# PyTorch's two threads took 41 to 47 ms for the first round after one of XLA's, and 34 for those that followed.
SHORTEST_TURN = 0.3  # seconds
SHORT_TURN = 0.03  # seconds, of an accelerator, which no threads have to come back to
Name = TypeVar("Name", bound=Hashable)


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of a suite; NaN where a figure was not measured."""

    what: str
    size: str
    seconds: float = math.nan  # of a run: the median over turns of the mean in a turn
    repetitions: int = 0  # turns in the median, without the first, which compiles
    flops: float = 0.0  # floating-point operations of the mathematics, in whatever form it was computed; 0: not counted
    fraction: float = math.nan  # of the rate of one large matrix product, measured in turn with it
    peer: str = ""  # what the ratio is to; empty without one
    peer_seconds: float = math.nan
    ratio: float = math.nan  # peer's over ours: how many times faster (or, for memory, smaller) ours is
    # The same of processor seconds over all threads, which other work on the machine disturbs less; where the peer has
    # one thread it is what would be left of the ratio if a second thread doubled the peer's speed.
    processor_ratio: float = math.nan
    at_least: float = math.nan  # the project's target for `ratio` (or else `fraction`)
    megabytes: float = math.nan  # peak resident memory
    note: str = ""  # what else must be known to read the line

    def against(self, peer: str, ratio: float, at_least: float) -> Row:
        """The row with a ratio to something that was not timed with it."""
        return dataclasses.replace(self, peer=peer, ratio=ratio, at_least=at_least)

    def __str__(self) -> str:
        parts = [f"{self.what}, {self.size}:"]
        if math.isfinite(self.seconds):
            parts.append(f"{self.seconds:.4g} s")
        if self.flops:
            parts.append(f"{self.flops / self.seconds / 1e9:.0f} GFLOP/s, {self.fraction:.2f} of the product")
        if math.isfinite(self.megabytes):
            parts.append(f"{self.megabytes:.0f} MB")
        if self.peer:
            parts.append(f"{self.ratio:.3g}× {self.peer}")
            if math.isfinite(self.processor_ratio):
                parts.append(f"[{self.processor_ratio:.3g}× in processor seconds]")
        if self.note:
            parts.append(f"({self.note})")
        return " ".join(parts)


class Bench:
    """Takes the rows of a suite: every measurement in turn with its peers and with a matrix product."""

    def __init__(self, *, smoke: bool, repetitions: int = 7):
        self.smoke = smoke
        self.repetitions = 1 if smoke else max(FEWEST_REPETITIONS, repetitions)
        self.rows: list[Row] = []
        self.rates: list[float] = []
        self.packages = ["jax", "numpy"]  # whose versions the report names; a suite adds what it compares with
        # An accelerator does 2048³ in less than it takes to start a program.
        self._product = matrix_product(64 if smoke else 2048 if jax.default_backend() == "cpu" else 8192)

    def row(
        self,
        what: str,
        size: str,
        run: Callable[[], Any],
        *,
        flops: float = 0.0,
        peers: Mapping[str, Callable[[], Any]] | None = None,
        at_least: float = math.nan,
        repetitions: int | None = None,
        rounds: float = 1,
    ) -> Row:
        """Times `run` and its peers in turn; the fastest peer gives the ratio.

        A call of `run` does `rounds` rounds in one program, as `simulate` does between two evaluations, and one of a
        peer does a single round, or a part of the work where all would take too long; all figures are of one round.
        """
        count = self.repetitions if repetitions is None or self.smoke else max(FEWEST_REPETITIONS, repetitions)
        product, product_flops = self._product
        peers, hopeless = _worth_timing(peers or {})
        runs = {"": run, **peers}
        shortest = 0.0 if self.smoke else SHORTEST_TURN if jax.default_backend() == "cpu" else SHORT_TURN
        seconds = in_turns({**runs, "product": product} if flops else runs, count, shortest=shortest)
        ours = Timing(seconds[""].wall / rounds, seconds[""].processor / rounds)
        fraction = math.nan
        if flops:
            self.rates.append(product_flops / seconds["product"].wall)
            fraction = flops / ours.wall / self.rates[-1]
        peer = min(peers, key=lambda name: seconds[name].wall) if peers else ""
        others = {name: seconds[name].wall for name in peers if name != peer} | hopeless
        theirs = seconds[peer] if peer else Timing(math.nan, math.nan)
        figures = (ours.wall, count, flops, fraction)
        ratios = (theirs.wall / ours.wall, theirs.processor / ours.processor)
        return self.add(Row(what, size, *figures, peer, theirs.wall, *ratios, at_least, note=each_seconds(others)))

    def add(self, row: Row) -> Row:
        self.rows.append(row)
        print(row, file=sys.stderr, flush=True)
        return row

    def report(self, suite: str) -> dict[str, Any]:
        """What goes into the results' JSON."""
        rate = statistics.median(self.rates) / 1e9 if self.rates else None
        rows = [{k: _plain(v) for k, v in dataclasses.asdict(row).items()} for row in self.rows]
        versions = {name: importlib.metadata.version(name) for name in self.packages}
        return {
            **{"suite": suite, "smoke": self.smoke, **machine(), "versions": versions},
            **{"product_gflop_per_second": rate, "rows": rows},
        }


def each_seconds(seconds: Mapping[str, float]) -> str:
    """The seconds of several runs as a row's note."""
    return "; ".join(f"{name} {value:.3g} s" for name, value in seconds.items())


def _worth_timing(peers: Mapping[str, Callable[[], Any]]) -> tuple[dict[str, Callable[[], Any]], dict[str, float]]:
    """The peers within five times the fastest in their second run, and the seconds of the others."""
    if len(peers) < 2:
        return dict(peers), {}
    seconds = {}
    for name, peer in peers.items():
        jax.block_until_ready(peer())
        seconds[name] = timed(peer)
    best = min(seconds.values())
    kept = {name: peer for name, peer in peers.items() if seconds[name] <= 5 * best}
    return kept, {name: value for name, value in seconds.items() if name not in kept}


def _plain(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def timed(run: Callable[[], Any]) -> float:
    """Seconds of one run."""
    started = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - started


class Timing(NamedTuple):
    """Medians over the repetitions, in seconds."""

    wall: float
    processor: float  # summed over threads


def in_turns(runs: Mapping[Name, Callable[[], Any]], repetitions: int, *, shortest: float = 0.0) -> dict[Name, Timing]:
    """Times each, run one after the other in every repetition, so that other work on the machine slows all alike.

    A run is repeated within its turn until `shortest` seconds have passed: the first finds the threads and caches as
    the previous one left them.
    """
    wall: dict[Name, list[float]] = {name: [] for name in runs}
    processor: dict[Name, list[float]] = {name: [] for name in runs}
    for repetition in range(repetitions + 1):  # the first compiles
        for name, run in runs.items():
            started, spent, count, elapsed = time.perf_counter(), time.process_time(), 0, 0.0
            while not count or elapsed < shortest:
                jax.block_until_ready(run())
                elapsed, count = time.perf_counter() - started, count + 1
            if repetition:
                wall[name].append(elapsed / count)
                processor[name].append(max(time.process_time() - spent, 1e-9) / count)
    return {name: Timing(statistics.median(wall[name]), statistics.median(processor[name])) for name in runs}


def matrix_product(size: int) -> tuple[Callable[[], Any], float]:
    """One product of two square matrices on each device at once, and its FLOPs: the yardstick."""
    mapping = parallel.client_mapping()
    devices = parallel.num_devices(mapping)
    rows = parallel.place_rows(mapping, np.ones((size * devices, size), np.float32))
    other = parallel.replicate(mapping, np.ones((size, size), np.float32))
    product = jax.jit(jnp.matmul)
    return lambda: product(rows, other), 2.0 * size**3 * devices


def machine() -> dict[str, Any]:
    """The device that a result holds for."""
    devices = jax.devices()
    return {
        "device": f"{len(devices)} × {devices[0].device_kind}",
        "backend": jax.default_backend(),
        "processor": provenance.processor(),
        "cores": provenance.cores(),
        "python": platform.python_version(),
    }


def calling(function: Callable[..., None]) -> tuple[str, str]:
    """Python's arguments that call a module's function with the further arguments, as strings."""
    name = function.__name__
    return "-c", f"import sys; from {function.__module__} import {name}; {name}(*sys.argv[1:])"


def run_python(*arguments: Any, timeout: float = 900, **variables: str) -> dict[str, Any]:
    """The JSON object that a separate Python, with `variables` added to its environment, prints on its last line."""
    # Without what `parallel.use_all_cores` left for this process.
    kept = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=kept | variables)
    if done.returncode:
        raise RuntimeError(f"a benchmark's process failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])
