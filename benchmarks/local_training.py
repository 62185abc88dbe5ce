"""Local training of many clients: the fraction of the machine's matrix-product rate that it reaches.

    python -m benchmarks.local_training [--smoke] [--output FILE]

Each line: what, size, median seconds of several repetitions, GFLOP/s counted from the matrix products alone, and the
fraction of the rate of one large product measured in the same process.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import platform
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_cluster import local, nn, parallel
from fedjax_cluster.algorithms.averaging import contribute, init_clusters
from fedjax_cluster.types import ClientData, DatasetInfo, Variables


def median_seconds(run: Callable[[], object], repetitions: int) -> float:
    jax.block_until_ready(run())
    seconds = []
    for _ in range(repetitions):
        started = time.perf_counter()
        jax.block_until_ready(run())
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def gemm_rate(size: int, repetitions: int) -> float:
    """FLOP/s of one product of two square matrices, on all devices at once."""
    mapping = parallel.client_mapping()
    devices = parallel.num_devices(mapping)
    rows = parallel.place_rows(mapping, np.ones((size * devices, size), np.float32))
    other = parallel.replicate(mapping, np.ones((size, size), np.float32))
    product = jax.jit(jnp.matmul)
    return 2 * size**3 * devices / median_seconds(lambda: product(rows, other), repetitions)


def mlp_training(clients: int, steps: int, batch_size: int, repetitions: int) -> tuple[float, float]:
    """Seconds and FLOPs of local training of the MLP 784-200-10 by all clients, sums over one cluster included."""
    info = DatasetInfo("noise", (28, 28), 10)
    rng = np.random.default_rng(0)
    rows = 4 * batch_size
    data = ClientData(
        rng.integers(0, 256, (clients, rows, 28, 28)).astype(np.uint8),
        rng.integers(0, 10, (clients, rows)).astype(np.int32),
        np.full(clients, rows, np.int32),
    )
    population = parallel.place_population(data, info, parallel.client_mapping())
    model, own = nn.mlp(), local.sgd(0.1, batch_size=batch_size, steps=steps)
    clusters = init_clusters(jax.random.key(0), model, info, 1)
    variables = jax.tree.map(lambda leaf: leaf[0], Variables(clusters.params, clusters.stats))

    @jax.jit
    def run(population, variables):
        return parallel.for_each_client(
            lambda client: own.run(local.client_key(jax.random.key(1), client.index), model, variables, client.data),
            parallel.everyone(population),
            reduce=lambda result: contribute(jnp.zeros((), jnp.int32), result, "uniform"),
        ).reduced

    # Forward 2, backward 4 FLOPs per weight and example; no gradient is taken of the input.
    flops = clients * steps * batch_size * (6 * (784 * 200 + 200 * 10) - 2 * 784 * 200)
    return median_seconds(lambda: run(population, variables), repetitions), flops


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, to see that it runs")
    parser.add_argument("--output", help="writes the lines as JSON")
    arguments = parser.parse_args()
    parallel.use_all_cores()
    repetitions = 2 if arguments.smoke else 9
    rate = gemm_rate(256 if arguments.smoke else 2048, repetitions)
    device = f"{jax.device_count()} × {jax.devices()[0].device_kind}"
    print(f"{platform.machine()}, {device}: {rate / 1e9:.0f} GFLOP/s in one product")
    lines = []
    for clients, steps, batch_size in [(4, 2, 8)] if arguments.smoke else [(32, 10, 64), (32, 1, 64), (32, 10, 16)]:
        seconds, flops = mlp_training(clients, steps, batch_size, repetitions)
        line = {
            "what": "MLP 784-200-10 local training",
            "size": f"{clients} clients × {steps} steps × b={batch_size}",
            "seconds": seconds,
            "gflop_per_second": flops / seconds / 1e9,
            "fraction_of_gemm": flops / seconds / rate,
        }
        lines.append(line)
        print("{what}, {size}: {seconds:.4f} s, {gflop_per_second:.0f} GFLOP/s, {fraction_of_gemm:.2f}".format(**line))
    if arguments.output:
        content = {"device": device, "gemm_gflop_per_second": rate / 1e9, "lines": lines}
        pathlib.Path(arguments.output).write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
