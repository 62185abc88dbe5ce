"""Benchmarks: `fedjax-cluster bench [SUITE]`.

Every row states what was done, its size, the median seconds, the FLOPs counted, the fraction of the rate of a large
matrix product taken in the same minutes, and the ratio to a peer timed in turn with it.
"""

from __future__ import annotations

import importlib
import pathlib
from collections.abc import Sequence
from typing import Any

# name -> what it is about.
SUITES = {
    "local": "local training of many clients",
    "convolution": "own-weight convolutions in their forms",
    "clustering": "every clustering function over M, K, d",
    "rounds": "whole runs of every method",
    "scale": "a hundred to a hundred thousand clients, and memory",
    "accelerator": "what is only worth running on a GPU or TPU",
    "peers": "beside PyTorch and the published code (extra `peers`)",
    "frameworks": "beside the simulators pfl and Flower (extra `peers`)",
    "whole": "whole processes beside PyTorch's (extra `peers`)",
}
NEED_PEERS = ("peers", "frameworks", "whole")


def run_suite(name: str, *, smoke: bool = False, output: str | pathlib.Path | None = None) -> dict[str, Any]:
    """Runs one suite, prints its table, and writes it as JSON where `output` is a folder.

    Raises:
      ValueError: an unknown suite, or one that needs what is not installed.
    """
    from fedjax_cluster.bench import tables
    from fedjax_cluster.bench.measure import Bench
    from fedjax_cluster.files import write_json

    if name not in SUITES:
        raise ValueError(f"unknown suite {name!r}; suites: {', '.join(SUITES)}")
    suite = importlib.import_module(f"fedjax_cluster.benchmarks.{name}_suite")
    bench = Bench(smoke=smoke)
    suite.run(bench)
    report = bench.report(name)
    print(tables.as_text(report))
    if output is not None:
        path = pathlib.Path(output) / f"{name}-{report['backend']}.json"
        write_json(path, report)
        print(f"left in {path}")
    return report


def run_suites(names: Sequence[str], *, smoke: bool = False, output: str | pathlib.Path | None = None) -> None:
    """Runs several suites; without names, all that need nothing beyond what the package needs."""
    for name in names or [name for name in SUITES if name not in NEED_PEERS]:
        run_suite(name, smoke=smoke, output=output)
