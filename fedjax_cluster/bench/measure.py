"""How a benchmark is taken: in turns, medians, FLOPs read off the program, and the product rate of the same minutes."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import math
import os
import pathlib
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

from fedjax_cluster import parallel
from fedjax_cluster.types import ClientMapping

FEWEST_REPETITIONS = 5
# PyTorch's two threads took 41 to 47 ms for the first round after one of XLA's, and 34 for those that followed.
SHORTEST_TURN = 0.3  # seconds
Name = TypeVar("Name", bound=Hashable)


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of a suite.

    Attributes:
      what: the work.
      size: how much of it.
      seconds: of a run: the median over turns of the mean in a turn; NaN where only memory was measured.
      repetitions: turns in the median, the first, which compiles, not counted.
      flops: floating-point operations of the mathematics, whatever form it was computed in; 0 where not counted.
      fraction: of the rate of one large matrix product, measured in turn with it; NaN where not taken.
      peer: what the ratio is to; empty without one.
      peer_seconds: the same of it.
      ratio: peer's over ours: how many times faster (or, for memory, smaller) ours is.
      processor_ratio: the same of processor seconds over all threads, which other work on the machine disturbs less;
        beside a peer on one thread it is what would be left of the ratio if a second thread doubled the peer's speed.
      at_least: what the project wants `ratio` (or else `fraction`) to be; NaN without such an aim.
      megabytes: peak resident memory, where that is what was measured.
      note: what else must be known to read the line.
    """

    what: str
    size: str
    seconds: float = math.nan
    repetitions: int = 0
    flops: float = 0.0
    fraction: float = math.nan
    peer: str = ""
    peer_seconds: float = math.nan
    ratio: float = math.nan
    processor_ratio: float = math.nan
    at_least: float = math.nan
    megabytes: float = math.nan
    note: str = ""


class Bench:
    """Takes the rows of a suite: every measurement in turn with its peers and with a matrix product."""

    def __init__(self, *, smoke: bool, repetitions: int = 7):
        self.smoke = smoke
        self.repetitions = 1 if smoke else max(FEWEST_REPETITIONS, repetitions)
        self.rows: list[Row] = []
        self.rates: list[float] = []
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
        note: str = "",
    ) -> Row:
        """Times `run` and its peers in turn; the fastest peer gives the ratio.

        A call of `run` does `rounds` rounds in one program, as `simulate` does between two evaluations, and one of a
        peer does a single round, or a part of the work where all would take too long; all figures are of one round.
        """
        count = self.repetitions if repetitions is None or self.smoke else max(FEWEST_REPETITIONS, repetitions)
        product, product_flops = self._product
        peers, hopeless = _worth_timing(peers or {})
        runs = {"": run, **peers}
        shortest = 0.0 if self.smoke else SHORTEST_TURN
        seconds = in_turns({**runs, "product": product} if flops else runs, count, shortest=shortest)
        seconds[""] = Timing(seconds[""].wall / rounds, seconds[""].processor / rounds)
        fraction = math.nan
        if flops:
            rate = product_flops / seconds["product"].wall
            self.rates.append(rate)
            fraction = flops / seconds[""].wall / rate
        peer = min(peers, key=lambda name: seconds[name].wall) if peers else ""
        others = {name: seconds[name].wall for name in peers if name != peer} | hopeless
        note = "; ".join([*(f"{name} {own:.3g} s" for name, own in others.items()), *([note] if note else [])])
        own, theirs = seconds[""], seconds[peer] if peer else Timing(math.nan, math.nan)
        return self.add(
            Row(
                *(what, size, own.wall, count, flops, fraction),
                *(peer, theirs.wall, theirs.wall / own.wall, theirs.processor / own.processor, at_least),
                note=note,
            )
        )

    def add(self, row: Row) -> Row:
        self.rows.append(row)
        print(line(row), file=sys.stderr, flush=True)
        return row

    def report(self, suite: str) -> dict[str, Any]:
        """What goes into the results' JSON."""
        rate = statistics.median(self.rates) / 1e9 if self.rates else None
        rows = [{k: _plain(v) for k, v in dataclasses.asdict(row).items()} for row in self.rows]
        return {"suite": suite, "smoke": self.smoke, **machine(), "product_gflop_per_second": rate, "rows": rows}


def _worth_timing(peers: Mapping[str, Callable[[], Any]]) -> tuple[dict[str, Callable[[], Any]], dict[str, float]]:
    """The peers within five times the fastest in their second run, and the seconds of the others."""
    if len(peers) < 2:
        return dict(peers), {}
    seconds = {}
    for name, peer in peers.items():
        jax.block_until_ready(peer())
        started = time.perf_counter()
        jax.block_until_ready(peer())
        seconds[name] = time.perf_counter() - started
    best = min(seconds.values(), default=0.0)
    kept = {name: peer for name, peer in peers.items() if seconds[name] <= 5 * best}
    return kept, {name: own for name, own in seconds.items() if name not in kept}


def _plain(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def line(row: Row) -> str:
    """One row as a line of text."""
    parts = [f"{row.what}, {row.size}:"]
    if math.isfinite(row.seconds):
        parts.append(f"{row.seconds:.4g} s")
    if row.flops:
        parts.append(f"{row.flops / row.seconds / 1e9:.0f} GFLOP/s, {row.fraction:.2f} of the product")
    if math.isfinite(row.megabytes):
        parts.append(f"{row.megabytes:.0f} MB")
    if row.peer:
        parts.append(f"{row.ratio:.3g}× {row.peer}")
        if math.isfinite(row.processor_ratio):
            parts.append(f"[{row.processor_ratio:.3g}× in processor seconds]")
    if row.note:
        parts.append(f"({row.note})")
    return " ".join(parts)


class Timing(NamedTuple):
    """Medians over the repetitions."""

    wall: float  # seconds
    processor: float  # seconds, summed over threads


def in_turns(runs: Mapping[Name, Callable[[], Any]], repetitions: int, *, shortest: float = 0.0) -> dict[Name, Timing]:
    """Times each, run one after the other in every repetition, so that a busy machine meets all alike.

    A run is repeated within its turn until `shortest` seconds have passed: the first finds the other's threads and
    caches.
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
    """The device and the versions that a result holds for."""
    peers = [name for name in ("torch", "pfl", "flwr", "ray") if name in sys.modules]
    versions = {name: importlib.metadata.version(name) for name in ("jax", "numpy", *peers)}
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    devices = jax.devices()
    return {
        "device": f"{len(devices)} × {devices[0].device_kind}",
        "backend": jax.default_backend(),
        "processor": _processor(),
        "cores": cores,
        "python": platform.python_version(),
        "versions": versions,
    }


def _processor() -> str:
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for text in cpuinfo.read_text().splitlines():
            if text.startswith("model name"):
                return text.partition(":")[2].strip()
    return platform.processor() or platform.machine()


# ------------------------------------------------------------------------------------- other processes


def in_a_process(code: str, *arguments: Any, timeout: float = 900, **variables: str) -> dict[str, Any]:
    """Runs code that prints one JSON object last, in a Python of its own, and returns the object.

    A process of its own has a peak memory of its own, and its own number of XLA devices. `variables` are added to its
    environment.
    """
    return run_python("-c", code, *arguments, timeout=timeout, **variables)


def run_python(*arguments: Any, timeout: float = 900, **variables: str) -> dict[str, Any]:
    """Runs a Python that prints one JSON object last, and returns the object.

    Raises:
      RuntimeError: it failed; the message ends with what it wrote.
    """
    # Without what `parallel.use_all_cores` left for this process.
    kept = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    done = subprocess.run(
        [sys.executable, *(str(argument) for argument in arguments)],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=kept | variables,
    )
    if done.returncode:
        raise RuntimeError(f"a benchmark's own process failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def one_device_mapping() -> ClientMapping:
    return parallel.client_mapping(devices=jax.devices()[:1])
