"""The benchmarks that pfl and FLUTE publish of themselves, ours beside pfl on the same device.

pfl's (arXiv:2404.06430, section 4.1): CIFAR-10 on 1 000 users of 50 images, cohorts of 50, one epoch of b = 10. pfl
takes as many processes as are fastest. FLUTE's (arXiv:2203.13789): FEMNIST's 3 400 writers, cohorts of 10, one epoch
of b = 20, 1 500 rounds; only ours is run, FLUTE has no release to install. Images are noise; every simulator draws its
own cohorts, and nothing is evaluated.
"""

from __future__ import annotations

import importlib.util
import json
import math
import statistics
import subprocess
import sys
from typing import Any

import flax.linen as linen
import jax
import numpy as np
from jax import Array

from benchmarks.peers import RATE
from fedjax_cluster import cli, local, nn
from fedjax_cluster.algorithms import REGISTRY
from fedjax_cluster.bench.measure import Bench, Row, calling, each_seconds, run_python
from fedjax_cluster.bench.workloads import CIFAR, noise_clients
from fedjax_cluster.simulation.loop import simulate
from fedjax_cluster.types import DatasetInfo, Federation, Model

PFL_TARGET, FLUTE_SECONDS, FLUTE_ROUNDS = 5.0, 60.0, 1500
FEMNIST = DatasetInfo("noise 28×28", (28, 28), 62)
WRITERS, MEAN_ROWS, DEVIATION, MOST_ROWS = 3400, 226.8, 88.9, 470  # FEMNIST's, by LEAF's table


class DropoutCnn(linen.Module):
    """The network of both benchmarks: two 3×3 convolutions, maxima, a dense layer of 128, and dropout."""

    num_outputs: int

    @linen.compact
    def __call__(self, x: Array, train: bool = False) -> Array:
        x = x if x.ndim == 4 else x[..., None]
        for i, features in enumerate((32, 64)):
            x = linen.relu(nn.Conv(features, 3, padding="VALID", name=f"conv_{i}")(x))
        x = linen.Dropout(0.25, deterministic=not train)(nn.max_pool(x, 2, 2))
        x = linen.relu(linen.Dense(128, name="hidden")(x.reshape(x.shape[0], -1)))
        return linen.Dense(self.num_outputs, name="output")(linen.Dropout(0.5, deterministic=not train)(x))


def network() -> Model:
    return nn.from_flax(nn.Sized(DropoutCnn))


def run(bench: Bench) -> None:
    against_pfl(bench)
    flute_shape(bench)


def against_pfl(bench: Bench) -> None:
    """pfl's benchmark: a round's seconds, ours before and after pfl's, which has its own loop."""
    on_cpu = jax.default_backend() == "cpu"
    clients, rows, cohort, rounds = (20, 20, 4, 2) if bench.smoke else (1000, 50, 50, 6 if on_cpu else 25)
    batch = 10
    given = (rounds, cohort, batch, RATE, clients, rows)
    ours, theirs, failed = [median_of(*calling(cifar), *given)], {}, []
    if importlib.util.find_spec("pfl") is not None:
        bench.packages += ["torch", "pfl"]
        for processes in (1, 2) if on_cpu else (1, 5, 10):
            start = ("-m", "torch.distributed.run", "--nproc-per-node", processes) if processes > 1 else ()
            name = f"pfl, {processes} process{'es' * (processes > 1)}"
            try:  # between processes of one machine
                theirs[name] = median_of(*start, "-m", "benchmarks.peers.pfl_cifar", *given, GLOO_SOCKET_IFNAME="lo")
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                failed.append(f"{name} failed")
                print(error, file=sys.stderr)
        ours.append(median_of(*calling(cifar), *given))
    best = min(theirs, key=lambda name: theirs[name], default="")
    others = {name: seconds for name, seconds in theirs.items() if name != best}
    before_and_after = f"ours before and after {' '.join(f'{seconds:.3g}' for seconds in ours)} s"
    seconds = statistics.median(ours)
    made = Row(
        "pfl's CIFAR-10 benchmark, FedAvg round",
        f"{clients} clients × {rows} images 32×32×3, {cohort} in a round, one epoch of b={batch}",
        *(seconds, len(ours) * rounds),
        note="; ".join(filter(None, [each_seconds(others), *failed, before_and_after if theirs else ""])),
    )
    target = math.nan if on_cpu else PFL_TARGET
    bench.add(made.against(best, theirs[best] / seconds, target) if best else made)


def flute_shape(bench: Bench) -> None:
    """FLUTE's FEMNIST: seconds of all rounds."""
    on_cpu = jax.default_backend() == "cpu"  # where all rounds would take an hour
    writers, rounds = (20, 2) if bench.smoke else (WRITERS, 10 if on_cpu else FLUTE_ROUNDS)
    found = run_python(*calling(femnist), rounds, min(10, writers), 20, RATE, writers)
    seconds = float(np.sum(found["seconds"]))
    size = f"{writers} clients of {MEAN_ROWS:.0f} ± {DEVIATION:.0f} images 28×28, 10 in a round, one epoch of b=20"
    made = Row(f"FLUTE's FEMNIST shape, {rounds} FedAvg rounds", size, seconds, 1)
    bench.add(made if on_cpu else made.against("sixty seconds", FLUTE_SECONDS / seconds, 1.0))


def median_of(*arguments: Any, **variables: Any) -> float:
    return statistics.median(run_python(*arguments, **variables)["seconds"])


def cifar(*given: str) -> None:
    """In a separate process: prints the seconds of our rounds of pfl's benchmark."""
    rounds, cohort, batch, rate, clients, rows = map(float, given)
    train = noise_clients(CIFAR, int(clients), int(rows))
    test = noise_clients(CIFAR, int(clients), 1, seed=1)
    _rounds(Federation(train, test, None, None, CIFAR), int(rounds), int(cohort), int(batch), rate)


def femnist(*given: str) -> None:
    """In a separate process: prints the seconds of our rounds of FLUTE's benchmark, without the compilation."""
    rounds, cohort, batch, rate, writers = map(float, given)
    drawn = np.random.default_rng(0).normal(MEAN_ROWS, DEVIATION, int(writers))
    train = noise_clients(FEMNIST, int(writers), MOST_ROWS)
    train = train._replace(num_examples=np.clip(drawn, 1, MOST_ROWS).astype(np.int32))
    test = noise_clients(FEMNIST, int(writers), 1, seed=1)
    _rounds(Federation(train, test, None, None, FEMNIST), int(rounds), int(cohort), int(batch), rate)


def _rounds(federation: Federation, rounds: int, cohort: int, batch: int, rate: float) -> None:
    cli._prepare_jax()
    update = local.sgd(rate, batch_size=batch, epochs=1)
    share = cohort / len(federation.train.num_examples)
    method = REGISTRY["fedavg"](network(), local=update, participation=share)
    # The first segment compiles; the clients that are evaluated are as few as there may be.
    segments = max(math.ceil(rounds / 500), min(5, rounds)) + 1
    each = math.ceil(rounds / (segments - 1))
    result = simulate(method, federation, rounds=segments * each, eval_every=each, eval_clients=cohort, progress=False)
    print(json.dumps({"seconds": result.history["seconds"][each:].tolist()}))
