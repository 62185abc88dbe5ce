"""What privacy and robust aggregation cost a round: processor seconds over those of a plain one, on 1 000 clients.

    python -m benchmarks.private_rounds [--clients 1000] [--repetitions 7] [--steps 5] [--only FedAvg]

Each client has 32 rows of 64 features and takes some steps on mini-batches of 16 with an MLP of 64 hidden units, 4 810
parameters. A plain round and the others run in turns in one process, as in `fedjax-cluster bench`.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import fedjax_cluster as fc
from fedjax_cluster.bench.measure import in_turns, machine
from fedjax_cluster.types import ClientData, DatasetInfo, State

FEATURES, ROWS, CLASSES, GROUPS = 64, 32, 10, 4
PRIVATE: dict[str, Any] = {"clip": 1.0, "noise_multiplier": 1.0, "delta": 1e-6}
SHOWN: dict[str, Any] = {"clustering_clip": 1.0, "clustering_noise_multiplier": 1.0}


def population(clients: int) -> Any:
    """Each group labels its inputs by a linear map of its own."""
    rng = np.random.default_rng(0)
    maps = rng.standard_normal((GROUPS, FEATURES, CLASSES))
    x = rng.standard_normal((clients, ROWS, FEATURES)).astype(np.float32)
    y = np.einsum("crf,cfl->crl", x, maps[np.arange(clients) % GROUPS]).argmax(-1).astype(np.int32)
    data = ClientData(x, y, np.full(clients, ROWS, np.int32))
    return fc.parallel.place_population(data, DatasetInfo("maps", (FEATURES,), CLASSES), fc.parallel.client_mapping())


@functools.partial(jax.jit, static_argnames="method")
def _round(method: Any, everybody: Any, state: State) -> Any:
    cohort = fc.parallel.gather_cohort(everybody, method.select(jax.random.key(2), state))
    return method.step(jax.random.key(1), state, cohort)


def rounds(method: Any, everybody: Any, number: int) -> Callable[[], Any]:
    """A function that does one round of this number, from the start."""
    state, _ = method.init(jax.random.key(0), everybody)
    state = fc.parallel.place_state(state._replace(round=jnp.asarray(number, jnp.int32)), everybody.mapping)
    return lambda: _round(method, everybody, state)


def variants(clients: int, steps: int = 5) -> dict[str, tuple[Any, int, dict[str, Any]]]:
    """Name of a method and round -> it, the round's number, and its other versions."""
    local, model = fc.local.sgd(0.1, batch_size=16, steps=steps), fc.nn.mlp((64,))
    plain: dict[str, Any] = dict(fc.algorithms.REGISTRY)
    private = fc.privacy.gaussian(**PRIVATE)
    byzantine = clients // 10
    rules = {
        rule.__class__.__name__.replace("_", " "): {"aggregation": rule}
        for rule in (
            fc.aggregation.trimmed_mean(share=0.1),
            fc.aggregation.median(),
            fc.aggregation.krum(byzantine=byzantine),
            fc.aggregation.multi_krum(byzantine=byzantine),
            fc.aggregation.geometric_median(),
            fc.aggregation.norm_clipping(1.0),
            fc.aggregation.bulyan(byzantine=byzantine),
        )
    }
    of_privacy = {
        "private": {"privacy": private},
        "private, clip by layers after a quantile": {
            "privacy": fc.privacy.gaussian(**PRIVATE, clipping="layers", quantile=0.5)
        },
    }
    shown = {"private": {"privacy": dataclasses.replace(private, **SHOWN)}}
    common: dict[str, Any] = {"local": local}
    ifca = plain["ifca"](model, clusters=GROUPS, start="random", **common)
    profiles = plain["cfl_gp"](model, clusters=GROUPS, **common)
    return {
        "FedAvg": (plain["fedavg"](model, **common), 0, {**of_privacy, **rules}),
        "IFCA": (ifca, 0, of_privacy),
        "FedEM": (plain["fedem"](model, clusters=GROUPS, **common), 0, {"private": {"privacy": private}}),
        "CFL-GP, a round without clustering": (profiles, 0, shown),
        "CFL-GP, a round with clustering": (profiles, 1, shown),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--steps", type=int, default=5, help="of a client's training in a round")
    parser.add_argument("--only", help="the rounds of this method alone")
    given = parser.parse_args()
    fc.parallel.use_all_cores()
    everybody, found = population(given.clients), []
    for name, (plain, number, others) in variants(given.clients, given.steps).items():
        if given.only not in (None, name):
            continue
        methods = {"plain": plain, **{each: dataclasses.replace(plain, **more) for each, more in others.items()}}
        runs = {each: rounds(method, everybody, number) for each, method in methods.items()}
        seconds = in_turns(runs, given.repetitions, shortest=0.3)
        for each, timing in seconds.items():
            row = {"round": name, "version": each, "processor_seconds": timing.processor, "seconds": timing.wall}
            row |= {"ratio": timing.processor / seconds["plain"].processor}
            found.append(row)
            print(f"{name}, {each}: {timing.processor:.3f} s, {row['ratio']:.2f} ×", file=sys.stderr, flush=True)
    print(json.dumps({**machine(), "clients": given.clients, "steps": given.steps, "rows": found}, indent=1))


if __name__ == "__main__":
    main()
