"""Compared with what people would write instead: a PyTorch loop over clients, torch.func.vmap, the published CFL-GP.

Both sides start from the same parameters and see the same batches; their losses are compared before anything is timed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import numpy as np
import optax
import torch  # pyright: ignore[reportMissingImports]

from benchmarks.peers import RATE, torch_loop
from benchmarks.peers.cfl_gp import PublishedCflGp, mlp
from benchmarks.peers.same_work import Run, batches_of, check_losses, first_model, models_of
from fedjax_cluster import local, nn
from fedjax_cluster.algorithms import REGISTRY
from fedjax_cluster.bench.local import CASES
from fedjax_cluster.bench.measure import Bench, in_turns
from fedjax_cluster.bench.workloads import DIGITS, local_training, noise_clients, trained_clients
from fedjax_cluster.nn.flops import gradient_flops
from fedjax_cluster.types import ClientData

METHODS: Mapping[str, Any] = REGISTRY
# Rounds of one call, where a round takes less than a second; `simulate` evaluates every ten rounds by default.
SEGMENT = 10
FORWARD = {
    "MLP 784-200-10": mlp,
    "MLP 3072-32-10": mlp,
    "CNN 5×5 (32, 64)": torch_loop.cnn,
    "CNN 5×5 (32, 64), b=10": torch_loop.cnn,
    "CNN 5×5 (32, 64), b=64": torch_loop.cnn,
    "ResNet-18": torch_loop.resnet18,
    "LSTM 200, 200": torch_loop.lstm,
    **{name: torch_loop.lenet5 for name in CASES if name.startswith("LeNet-5")},
}
ONE, TWO = "PyTorch loop, 1 thread", "PyTorch loop, 2 threads"
# Networks of which torch.func.vmap does one client after the other (an LSTM), or that were too slow to try.
ONE_BY_ONE = ("ResNet-18", "LSTM 200, 200")
TARGETS = {
    "LSTM 200, 200": 1.0,
    "MLP 784-200-10": 2.5,
    "MLP 3072-32-10": 2.5,
    "CNN 5×5 (32, 64)": 1.15,
    "ResNet-18": 1.0,
}
TARGETS |= {f"CNN 5×5 (32, 64), b={batch}": 2.0 for batch in (10, 64)}
TARGETS |= {name: 4.0 if name.endswith("b=10") else 2.5 for name in CASES if name.startswith("LeNet-5")}


def run(bench: Bench) -> None:
    bench.packages.append("torch")
    torch.manual_seed(0)
    for name in FORWARD:
        if not bench.smoke or name in ("MLP 784-200-10", "CNN 5×5 (32, 64)", "LeNet-5, b=10"):
            training(bench, name)
    fedgwc_rounds(bench)
    fedgwc_cohorts(bench)
    cfl_rounds(bench)
    ifca_rounds(bench)
    cfl_gp_rounds(bench)


def by_threads(function: Callable[..., Any], *arguments: Any) -> dict[str, Callable[[], Any]]:
    """The loop on one thread and on two."""
    return {ONE: partial(function, *arguments, 1), TWO: partial(function, *arguments, 2)}


def placed(data: ClientData, *more: np.ndarray) -> list[Any]:
    """PyTorch's tensors of the images and classes, and of further arrays."""
    arrays = (data.x, data.y.astype(np.int64), *more)
    return [torch.from_numpy(np.ascontiguousarray(array)) for array in arrays]


def training(bench: Bench, name: str) -> None:
    case = CASES[name]
    if bench.smoke:
        case = case._replace(clients=2, steps=2, batch=4)
    data = noise_clients(case.info, case.clients, 4 * case.batch)
    work = (case.model, case.info, data, local.sgd(RATE, batch_size=case.batch, steps=case.steps))
    weights = torch_loop.parameters(first_model(case.model, case.info))
    order = batches_of(jax.random.key(1), data, case.steps, case.batch)
    arguments = (FORWARD[name], weights, *placed(data, order), RATE)
    losses = trained_clients(*work, collect=local.mean_of_steps)().collected
    peers = by_threads(torch_loop.loop, *arguments)
    check_losses(name, float(losses.mean()), peers[TWO]()[1])
    if name not in ONE_BY_ONE:
        peers["torch.func.vmap"] = partial(torch_loop.vmapped, *arguments, 2)
        if not bench.smoke:
            torch._dynamo.reset()  # it compiles anew a few times only
            compiled = torch.compile(torch_loop.gradients_of_all(FORWARD[name]), dynamic=False)
            peers["torch.func.vmap, torch.compile"] = partial(torch_loop.vmapped, *arguments, 2, compiled)
    bench.row(
        f"{name}, local training",
        case.size,
        local_training(*work),
        flops=case.flops,
        peers=peers,
        at_least=TARGETS[name],
        repetitions=5 if name == "ResNet-18" else 7,
    )


# -------------------------------------------------------------------------------------------- methods


def fedgwc_rounds(bench: Bench) -> None:
    """Ten clients in one cluster."""
    # Thresholds that are never met: every round is one of training and bookkeeping.
    method = partial(METHODS["fedgwc"], nn.mlp(), tolerance=1e-30, max_children=2)
    batch, steps, rounds = (4, 2, 1) if bench.smoke else (64, 7, SEGMENT)
    rounds_of_ten(bench, "FedGWC", "MLP 784-200-10", method, torch_loop.fedgwc_round, batch, steps, rounds)


def cfl_rounds(bench: Bench) -> None:
    method = partial(METHODS["cfl"], nn.cnn())
    batch, steps = (4, 2) if bench.smoke else (128, 4)
    rounds_of_ten(bench, "CFL", "CNN 5×5 (32, 64)", method, torch_loop.cfl_round, batch, steps, 1)


def rounds_of_ten(
    bench: Bench,
    name: str,
    network: str,
    method: Callable[..., Any],
    peer: Callable[..., Any],
    batch: int,
    steps: int,
    rounds: int,
) -> None:
    """A round of ten clients in one cluster: local training, averaging, and what the method makes of the updates."""
    clients = 4 if bench.smoke else 10
    data = noise_clients(DIGITS, clients, batch * steps)
    algorithm = method(clusters=4, local=local.sgd(RATE, batch_size=batch, epochs=1), participation=1.0)
    ours = Run(algorithm, data, DIGITS)
    weights = torch_loop.parameters(models_of(ours.start.clusters)[0])
    order = batches_of(jax.random.fold_in(ours.keys.local, 0), data, steps, batch)
    arguments = (FORWARD[network], weights, *placed(data, order), RATE)
    peers = by_threads(peer, *arguments)
    check_losses(name, ours.loss(), peers[TWO]()[1])
    bench.row(
        f"{name} round, {network}",
        f"{clients} clients × {steps} steps × b={batch}",
        partial(ours.advance, rounds),
        flops=clients * steps * gradient_flops(algorithm.model, DIGITS, batch),
        peers=peers,
        at_least=TARGETS[network],
        rounds=rounds,
    )


def fedgwc_cohorts(bench: Bench) -> None:
    """FedGWC in cohorts of ten of a hundred clients, like its experiments; the peer's are those of the first round."""
    # 10 000 rounds in twenty turns, evaluated every 500, as FedGWC's experiments are long.
    clients, batch, steps, rounds = (40, 4, 2, 1) if bench.smoke else (100, 64, 7, 500)
    model, data = nn.mlp(), noise_clients(DIGITS, clients, batch * steps)
    update = local.sgd(RATE / 10, batch_size=batch, steps=steps)
    algorithm = METHODS["fedgwc"](model, clusters=4, local=update, participation=0.1, rate="count", centre=True)
    ours = Run(algorithm, data, DIGITS)
    selection = algorithm.select(jax.random.fold_in(ours.keys.cohorts, 0), jax.tree.map(jax.numpy.asarray, ours.start))
    cohort = np.asarray(selection.index)[np.asarray(selection.mask)]
    chosen = jax.tree.map(lambda leaf: leaf[cohort], data)
    order = batches_of(jax.random.fold_in(ours.keys.local, 0), chosen, steps, batch, cohort)
    weights = torch_loop.parameters(models_of(ours.start.clusters)[0])
    arguments = (mlp, weights, *placed(chosen, order), RATE / 10)
    peers = by_threads(torch_loop.fedgwc_round, *arguments)
    check_losses("FedGWC", ours.loss(), peers[TWO]()[1])
    bench.row(
        "FedGWC round, a tenth of the clients, MLP 784-200-10",
        f"{len(cohort)} of {clients} clients × {steps} steps × b={batch}",
        partial(ours.advance, rounds),
        flops=len(cohort) * steps * gradient_flops(model, DIGITS, batch),
        peers=peers,
        at_least=TARGETS["MLP 784-200-10"],
        repetitions=20,
        rounds=rounds,
    )
    # A split ends a call early, and divides the clients into other cohorts.
    if len(np.unique(np.argmax(jax.device_get(ours.advance().clients.membership), 1))) > 1:
        raise RuntimeError("FedGWC has split noise into clusters: the rounds timed are not those of one cohort")


def ifca_rounds(bench: Bench) -> None:
    clients, rows, steps, clusters = (4, 8, 2, 2) if bench.smoke else (2400, 100, 10, 4)
    model, data = nn.mlp(), noise_clients(DIGITS, clients, rows)
    update = local.sgd(RATE, batch_size=None, steps=steps)
    ours = Run(METHODS["ifca"](model, clusters=clusters, local=update), data, DIGITS)
    weights = [torch_loop.parameters(variables) for variables in models_of(ours.start.clusters)]
    x, y = placed(data)
    peers = by_threads(torch_loop.ifca_round, mlp, weights, x, y, steps, RATE)
    check_losses("IFCA", ours.loss(), peers[TWO]()[1])
    # A round of all takes the peer half a minute: a few clients show how many threads suit it.
    few = max(2, clients // 20)
    trials = in_turns(by_threads(torch_loop.ifca_round, mlp, weights, x[:few], y[:few], steps, RATE), 2)
    best = min(trials, key=lambda name: trials[name].wall)
    forward = 2.0 * rows * (784 * 200 + 200 * 10)
    bench.row(
        "IFCA round, MLP 784-200-10",
        f"{clients} clients × {steps} full-batch steps of {rows}, K={clusters}",
        ours.advance,
        flops=clients * (steps * gradient_flops(model, DIGITS, rows) + clusters * forward),
        peers={best: peers[best]},
        at_least=TARGETS["MLP 784-200-10"],
        repetitions=5,
    )


def cfl_gp_rounds(bench: Bench) -> None:
    clients, rows, clusters, rounds = (6, 8, 2, 1) if bench.smoke else (128, 64, 4, SEGMENT)
    model = nn.mlp(hidden=(8,)) if bench.smoke else nn.mlp()
    data = noise_clients(DIGITS, clients, rows)
    update = local.sgd(1.0, batch_size=None, steps=1)
    algorithm = METHODS["cfl_gp"](model, clusters=clusters, local=update, server=optax.sgd(RATE), every=1)
    ours = Run(algorithm, data, DIGITS)
    weights = [torch_loop.parameters(variables) for variables in models_of(ours.start.clusters)]
    assignment = np.argmax(ours.start.clients.membership, -1)[:clients]
    peer = PublishedCflGp(mlp, weights, assignment, 2)
    their_round = partial(peer.train, *placed(data), [slice(None)] * clients, RATE, cluster=True)
    check_losses("CFL-GP", ours.loss(), their_round())
    bench.row(
        "CFL-GP clustering round, MLP 784-200-10",
        f"M={clients}, K={clusters}, d={sum(value.numel() for value in weights[0].values())}",
        partial(ours.advance, rounds),
        flops=clients * 2 * gradient_flops(model, DIGITS, rows),
        peers={"PyTorch and NumPy's full SVD": their_round},
        at_least=40.0,
        repetitions=5,
        rounds=rounds,
    )
