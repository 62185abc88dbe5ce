"""`python -m benchmarks.peers [SUITE...] [--smoke] [--output DIR]`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from fedjax_cluster import bench, cli

SUITES = {
    "pytorch": "local training and rounds: a PyTorch loop, torch.func.vmap, the published code of CFL-GP",
    "frameworks": "a FedAvg round: pfl and Flower's simulation engine",
    "populations": "a FedAvg round and memory at 1 000 to 100 000 clients, a hundred a round: pfl and Flower",
    "published": "the benchmarks that pfl and FLUTE publish, on one device: pfl",
    "whole": "a whole process of CFL-GP: PyTorch and NumPy",
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.peers", description="Comparisons with other software.")
    parser.add_argument("suites", nargs="*", metavar="SUITE", help="; ".join(f"{k}: {v}" for k, v in SUITES.items()))
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, in seconds: does everything still run?")
    parser.add_argument("--output", help="a folder for the results as JSON, such as benchmarks/results")
    flags = parser.parse_args(arguments)
    cli._prepare_jax()
    try:
        bench.run_suites(
            flags.suites, smoke=flags.smoke, output=flags.output, suites=SUITES, package="benchmarks.peers"
        )
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "pfl", "flwr"):
            raise
        parser.error(f"{error.name} is not installed; pip install -e '.[peers]'")
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    sys.exit(main())
