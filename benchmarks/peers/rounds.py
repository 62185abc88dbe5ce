"""Beside what people would use instead: a PyTorch loop over clients, torch.func.vmap, and the published CFL-GP.

Needs the extra `peers`. Both sides start from the same parameters and see the same batches; their losses are compared
before anything is timed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from fedjax_cluster import local, nn, parallel
from fedjax_cluster.algorithms import REGISTRY
from fedjax_cluster.algorithms import round as averaging
from fedjax_cluster.bench.local import CASES
from fedjax_cluster.bench.measure import Bench, in_turns
from fedjax_cluster.bench.workloads import DIGITS, local_training, noise_clients, start
from fedjax_cluster.nn.flops import gradient_flops
from fedjax_cluster.simulation.loop import _run_segment, streams
from fedjax_cluster.types import ClientData, ClusteredAlgorithm, DatasetInfo, LocalUpdate, Model, Variables

RATE = 0.1
# The two sides sum in another order; after some steps of training the losses agree to so much.
LOSS_TOLERANCE = 2e-3
# Rounds of one call, where a round takes less than a second; `simulate` evaluates every ten rounds by default.
SEGMENT = 10
AIMS = {"MLP 784-200-10": 2.5, "CNN 5×5 (32, 64)": 1.15, "ResNet-18": 1.0}


def run(bench: Bench) -> None:
    try:
        import torch  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ValueError("the suite peers needs PyTorch; install fedjax_cluster[peers]") from error
    torch.manual_seed(0)
    for name in ("MLP 784-200-10", "CNN 5×5 (32, 64)", "ResNet-18"):
        local_against_torch(bench, name)
    rounds_against_torch(bench, "fedgwc")
    cohorts_against_torch(bench)
    rounds_against_torch(bench, "cfl")
    ifca_against_torch(bench)
    cfl_gp_against_published(bench)


def local_against_torch(bench: Bench, name: str) -> None:
    from fedjax_cluster.bench import torch_peer

    model, info, clients, steps, batch = CASES[name]
    if bench.smoke:
        if name == "ResNet-18":
            return
        clients, steps, batch = 2, 2, 4
    data = noise_clients(info, clients, 4 * batch)
    own = local.sgd(RATE, batch_size=batch, steps=steps)
    forward = {"MLP": torch_peer.mlp, "CNN": torch_peer.cnn, "Res": torch_peer.resnet18}[name[:3]]
    weights = torch_peer.parameters(start(model, info))
    placed = torch_peer.tensors(
        {"x": data.x, "y": data.y.astype(np.int64), "b": batches_of(jax.random.key(1), data, steps, batch)}
    )
    arguments = (forward, weights, placed["x"], placed["y"], placed["b"], RATE)
    check_losses(name, mean_loss(model, info, data, own), torch_peer.loop(*arguments, 2)[1])
    peers: dict[str, Callable[[], Any]] = {
        f"PyTorch loop, {threads} thread{'s' * (threads > 1)}": partial(torch_peer.loop, *arguments, threads)
        for threads in (1, 2)
    }
    if name != "ResNet-18":
        peers["torch.func.vmap"] = partial(torch_peer.vmapped, *arguments, 2)
    bench.row(
        f"{name}, local training",
        f"{clients} clients × {steps} steps × b={batch}",
        local_training(model, info, data, own),
        flops=clients * steps * gradient_flops(model, info, batch),
        peers=peers,
        at_least=AIMS[name],
        repetitions=5 if name == "ResNet-18" else 7,
    )


def batches_of(
    round_key: Array, data: ClientData, steps: int, batch: int, clients: np.ndarray | None = None
) -> np.ndarray:
    """i64[M, S, b]: the rows of every mini-batch that `local.sgd` draws in a round; `clients` are those of the rows."""
    rows = data._replace(x=np.tile(np.arange(data.x.shape[1], dtype=np.int32), (len(data.x), 1)))

    def of_client(index, one):
        key = jax.random.split(local.client_key(round_key, index))[0]
        return jnp.stack([local.mini_batch(key, one, batch, step)[0] for step in range(steps)])

    index = jnp.asarray(np.arange(len(data.x)) if clients is None else clients)
    return np.asarray(jax.vmap(of_client)(index, jax.tree.map(jnp.asarray, rows)), np.int64)


def mean_loss(model: Model, info: DatasetInfo, data: ClientData, own: LocalUpdate) -> float:
    """Mean over clients and steps of the loss before each step."""
    population = parallel.place_population(data, info, parallel.client_mapping())
    clusters = parallel.replicate(population.mapping, averaging.init_clusters(jax.random.key(0), model, info, 1))
    slot = jnp.zeros((), jnp.int32)

    @jax.jit
    def losses(population, clusters):
        return parallel.for_each_client(
            lambda client: averaging.train_client(jax.random.key(1), own, model, clusters, slot, client),
            parallel.whole_population(population),
            collect=local.mean_of_steps,
        ).collected

    return float(losses(population, clusters).mean())


def check_losses(what: str, ours: float, theirs: float) -> None:
    if not math.isclose(ours, theirs, rel_tol=LOSS_TOLERANCE):
        raise RuntimeError(f"{what}: our mean loss is {ours} and the peer's {theirs}; they do not do the same work")


# -------------------------------------------------------------------------------------------- methods


def rounds_of(algorithm: ClusteredAlgorithm, data: ClientData, info: DatasetInfo):
    """The start of a run, and a function that does some more rounds of it as `simulate` would."""
    population = parallel.place_population(data, info, parallel.client_mapping())
    keys = streams(0)
    state, report = algorithm.init(keys.initialization, population)
    first = jax.device_get(state)
    held = [parallel.place_state(state, population.mapping)]
    last: list[dict[str, Any]] = [{}]

    def advance(rounds: int = 1) -> Any:
        stop = jnp.asarray(int(held[0].round) + rounds, jnp.int32)
        held[0], last[0] = _run_segment(
            keys, held[0], population, None, report, stop, select=algorithm.select, step=algorithm.step
        )
        return held[0]

    return first, advance, last


def models_of(state: Any) -> list[Variables]:
    count = len(state.clusters.active)
    return [averaging.cluster_variables(state.clusters, jnp.asarray(k)) for k in range(count)]


def rounds_against_torch(bench: Bench, name: str) -> None:
    """A round of ten clients in one cluster: local training, averaging, and what the method makes of the updates."""
    from fedjax_cluster.bench import torch_peer

    clients, batch, steps = (4, 4, 2) if bench.smoke else (10, *{"fedgwc": (64, 7), "cfl": (128, 4)}[name])
    rounds = 1 if bench.smoke or name == "cfl" else SEGMENT
    model, forward = {"fedgwc": (nn.mlp(), torch_peer.mlp), "cfl": (nn.cnn(), torch_peer.cnn)}[name]
    data = noise_clients(DIGITS, clients, batch * steps)
    own = local.sgd(RATE, batch_size=batch, epochs=1)
    # Thresholds that are never met: every round is one of training and bookkeeping.
    options = {"fedgwc": {"tolerance": 1e-30, "max_children": 2}, "cfl": {}}[name]
    algorithm = REGISTRY[name](model, clusters=4, local=own, participation=1.0, **options)
    first, advance, last = rounds_of(algorithm, data, DIGITS)
    weights = torch_peer.parameters(models_of(first)[0])
    order = batches_of(jax.random.fold_in(streams(0).local, 0), data, steps, batch)
    placed = torch_peer.tensors({"x": data.x, "y": data.y.astype(np.int64), "b": order})
    arguments = (forward, weights, placed["x"], placed["y"], placed["b"], RATE)
    round_of = {"fedgwc": torch_peer.fedgwc_round, "cfl": torch_peer.cfl_round}[name]
    advance()
    check_losses(name, float(last[0]["loss"][0]), round_of(*arguments, 2)[1])
    bench.row(
        {"fedgwc": "FedGWC round, MLP 784-200-10", "cfl": "CFL round, CNN 5×5 (32, 64)"}[name],
        f"{clients} clients × {steps} steps × b={batch}",
        partial(advance, rounds),
        flops=clients * steps * gradient_flops(model, DIGITS, batch),
        peers={
            f"PyTorch loop, {threads} thread{'s' * (threads > 1)}": partial(round_of, *arguments, threads)
            for threads in (1, 2)
        },
        at_least={"fedgwc": 2.5, "cfl": 1.15}[name],
        rounds=rounds,
    )


def cohorts_against_torch(bench: Bench) -> None:
    """FedGWC as it is run, cohorts of ten of a hundred clients; the peer's are those of the first round."""
    from fedjax_cluster.bench import torch_peer

    # 10 000 rounds in twenty turns, evaluated every 500, as FedGWC's experiments are long.
    clients, batch, steps, rounds = (40, 4, 2, 1) if bench.smoke else (100, 64, 7, 500)
    model, data = nn.mlp(), noise_clients(DIGITS, clients, batch * steps)
    own = local.sgd(RATE / 10, batch_size=batch, steps=steps)
    algorithm = REGISTRY["fedgwc"](model, clusters=4, local=own, participation=0.1, rate="count", centre=True)
    first, advance, last = rounds_of(algorithm, data, DIGITS)
    keys = streams(0)
    selection = algorithm.select(jax.random.fold_in(keys.cohorts, 0), jax.tree.map(jnp.asarray, first))
    cohort = np.asarray(selection.index)[np.asarray(selection.mask)]
    chosen = jax.tree.map(lambda leaf: leaf[cohort], data)
    order = batches_of(jax.random.fold_in(keys.local, 0), chosen, steps, batch, cohort)
    weights = torch_peer.parameters(models_of(first)[0])
    placed = torch_peer.tensors({"x": chosen.x, "y": chosen.y.astype(np.int64), "b": order})
    arguments = (torch_peer.mlp, weights, placed["x"], placed["y"], placed["b"], RATE / 10)
    advance()
    check_losses("FedGWC", float(last[0]["loss"][0]), torch_peer.fedgwc_round(*arguments, 2)[1])
    bench.row(
        "FedGWC round, a tenth of the clients, MLP 784-200-10",
        f"{len(cohort)} of {clients} clients × {steps} steps × b={batch}",
        partial(advance, rounds),
        flops=len(cohort) * steps * gradient_flops(model, DIGITS, batch),
        peers={
            f"PyTorch loop, {threads} thread{'s' * (threads > 1)}": partial(
                torch_peer.fedgwc_round, *arguments, threads
            )
            for threads in (1, 2)
        },
        at_least=2.5,
        repetitions=20,
        rounds=rounds,
    )
    # A split ends a call early, and divides the clients into other cohorts.
    if len(np.unique(np.argmax(jax.device_get(advance().clients.membership), 1))) > 1:
        raise RuntimeError("FedGWC has split noise into clusters: the rounds timed are not those of one cohort")


def ifca_against_torch(bench: Bench) -> None:
    from fedjax_cluster.bench import torch_peer

    clients, rows, steps, clusters = (4, 8, 2, 2) if bench.smoke else (2400, 100, 10, 4)
    model, data = nn.mlp(), noise_clients(DIGITS, clients, rows)
    algorithm = REGISTRY["ifca"](model, clusters=clusters, local=local.sgd(RATE, batch_size=None, steps=steps))
    first, advance, last = rounds_of(algorithm, data, DIGITS)
    weights = [torch_peer.parameters(variables) for variables in models_of(first)]
    placed = torch_peer.tensors({"x": data.x, "y": data.y.astype(np.int64)})
    arguments = (torch_peer.mlp, weights, placed["x"], placed["y"], steps, RATE)
    advance()
    check_losses("IFCA", float(last[0]["loss"][0]), torch_peer.ifca_round(*arguments, 2)[1])
    # A round of all takes the peer half a minute: a few clients tell which number of threads suits it.
    few = [*arguments[:2], *(part[: max(2, clients // 20)] for part in arguments[2:4]), *arguments[4:]]
    trials = in_turns({n: partial(torch_peer.ifca_round, *few, n) for n in (1, 2)}, 2)
    threads = min(trials, key=lambda n: trials[n].wall)
    gradient = gradient_flops(model, DIGITS, rows)
    forward = 2.0 * rows * (784 * 200 + 200 * 10)
    bench.row(
        "IFCA round, MLP 784-200-10",
        f"{clients} clients × {steps} full-batch steps of {rows}, K={clusters}",
        advance,
        flops=clients * (steps * gradient + clusters * forward),
        peers={
            f"PyTorch loop, {threads} thread{'s' * (threads > 1)}": partial(torch_peer.ifca_round, *arguments, threads)
        },
        at_least=2.5,
        repetitions=5,
    )


def cfl_gp_against_published(bench: Bench) -> None:
    from benchmarks.peers.cfl_gp import PublishedCflGp
    from fedjax_cluster.bench import torch_peer

    clients, rows, clusters, rounds = (6, 8, 2, 1) if bench.smoke else (128, 64, 4, SEGMENT)
    model = nn.mlp(hidden=(8,)) if bench.smoke else nn.mlp()
    data = noise_clients(DIGITS, clients, rows)
    algorithm = REGISTRY["cfl_gp"](
        model, clusters=clusters, local=local.sgd(1.0, batch_size=None, steps=1), server=optax.sgd(RATE), every=1
    )
    first, advance, last = rounds_of(algorithm, data, DIGITS)
    weights = [torch_peer.parameters(variables) for variables in models_of(first)]
    assignment = np.argmax(first.clients.membership, -1)[:clients]
    peer = PublishedCflGp(torch_peer.mlp, weights, assignment, 2)
    placed = torch_peer.tensors({"x": data.x, "y": data.y.astype(np.int64)})
    whole = [slice(None)] * clients
    advance()
    check_losses("CFL-GP", float(last[0]["loss"][0]), peer.train(placed["x"], placed["y"], whole, RATE, cluster=True))
    bench.row(
        "CFL-GP clustering round, MLP 784-200-10",
        f"M={clients}, K={clusters}, d={sum(value.numel() for value in weights[0].values())}",
        partial(advance, rounds),
        flops=clients * 2 * gradient_flops(model, DIGITS, rows),
        peers={
            "PyTorch and NumPy's full SVD": partial(peer.train, placed["x"], placed["y"], whole, RATE, cluster=True)
        },
        at_least=40.0,
        repetitions=5,
        rounds=rounds,
    )
