"""Benchmarks: `fedjax-cluster bench [SUITE...]`; comparisons with other software: `python -m benchmarks.peers`.

Every row states the work, its size, the median seconds, the FLOPs counted, the fraction of the rate of a large matrix
product timed in turn with it, and the ratio to a peer timed in turn with it.
"""

from __future__ import annotations

import importlib
import pathlib
from collections.abc import Mapping, Sequence

from fedjax_cluster.bench import tables
from fedjax_cluster.bench.measure import Bench
from fedjax_cluster.files import check_writable, write_json
from fedjax_cluster.options import as_path

# Name of a module in this folder -> what its `run` measures.
SUITES = {
    "local": "local training of many clients",
    "convolution": "convolutions whose weights differ between clients, in their forms",
    "clustering": "every clustering function over M, K, d",
    "rounds": "whole runs of every method",
    "scale": "a hundred to a hundred thousand clients, and memory",
    "accelerator": "what is only worth running on a GPU or TPU",
}


def overview() -> str:
    """The suites, and where the others are, for the command's help."""
    suites = "; ".join(f"{name}: {about}" for name, about in SUITES.items())
    return (
        f"Suites: {suites}. Comparisons with PyTorch, pfl and Flower are not in the package: in a checkout, "
        "pip install -e '.[peers]' and python -m benchmarks.peers."
    )


def run_suites(
    names: Sequence[str] = (),
    *,
    smoke: bool = False,
    output: str | pathlib.Path | None = None,
    suites: Mapping[str, str] = SUITES,
    package: str = __name__,
) -> None:
    """Runs suites, prints their tables, and writes each as JSON where `output` is a folder.

    Args:
      names: of suites; all without any.
      smoke: tiny sizes, once each.
      output: where to write SUITE-BACKEND.json.
      suites: those there are.
      package: where their modules lie.

    Raises:
      ValueError: an unknown suite.
    """
    for name in names:
        if name not in suites:
            raise ValueError(f"unknown suite {name!r}; suites: {', '.join(suites)}")
    if output is not None:
        check_writable(as_path("output", output))
    for name in names or suites:
        bench = Bench(smoke=smoke)
        # Imported here: processes whose memory and start are measured must not load the libraries of other suites.
        importlib.import_module(f"{package}.{name}").run(bench)
        report = bench.report(name)
        print(tables.as_text(report))
        if output is not None:
            path = pathlib.Path(output) / f"{name}-{report['backend']}.json"
            write_json(path, report)
            print(f"left in {path}")
