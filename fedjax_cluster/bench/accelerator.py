"""What is only worth running on a GPU or TPU; elsewhere the smallest sizes show that it works.

A step of a hundred thousand clients, the share of the product rate of MLP and CNN under each mapping and in bfloat16,
the forms of convolutions with weights of each client by layer and in a network, and CIFAR-size rounds.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_cluster import local, nn, parallel
from fedjax_cluster.algorithms import REGISTRY
from fedjax_cluster.bench.convolution import LAYERS, XlaCnn, all_at_once, gradient, network_data, one_by_one
from fedjax_cluster.bench.local import Case, in_bfloat16, training
from fedjax_cluster.bench.measure import Bench, Row
from fedjax_cluster.bench.workloads import CIFAR, DIGITS, local_training, noise_clients, noise_federation
from fedjax_cluster.nn.flops import gradient_flops
from fedjax_cluster.simulation.loop import simulate
from fedjax_cluster.types import Model

Form = Callable[..., Any]
SECONDS_FOR_ALL = 1.0
REPETITIONS = 5


def run(bench: Bench) -> None:
    if jax.default_backend() == "cpu" and not bench.smoke:
        bench.add(Row("accelerator suite", "", note="no accelerator here: the suite is for a GPU or TPU"))
        return
    for part in PARTS.values():
        part(bench)


def many_clients(bench: Bench) -> None:
    """100 000 clients × one MLP step (b = 64), in chunks."""
    clients, batch = (8, 4) if bench.smoke else (100_000, 64)
    data = noise_clients(DIGITS, clients, batch)
    step = local.sgd(0.1, batch_size=batch, steps=1)
    run = local_training(nn.mlp(), DIGITS, data, step, parallel.client_mapping("chunked"))
    flops, size = clients * gradient_flops(nn.mlp(), DIGITS, batch), f"{clients} clients × b={batch}"
    row = bench.row("MLP 784-200-10, one step of every client", size, run, flops=flops, repetitions=REPETITIONS)
    bench.rows[-1] = row.against("one second", SECONDS_FOR_ALL / row.seconds, 1.0)


def product_share(bench: Bench, name: str, case: Case) -> None:
    """The share of the product rate by mapping: a client at a time, chunks under `vmap`, all under `vmap`; bfloat16."""
    if bench.smoke:
        case = Case(nn.cnn((4,), dense=(8,)) if "CNN" in name else nn.mlp((8,)), DIGITS, 4, 2, 2)
    ways = {"a client at a time": parallel.client_mapping("scan"), "vmap": parallel.client_mapping("vmap")}
    for chunk in (2,) if bench.smoke else (8, 32, 128):
        ways[f"chunks of {chunk}"] = parallel.client_mapping("chunked", chunk)
    ways["chunks by memory"] = parallel.client_mapping("chunked")
    for way, mapping in ways.items():
        run = training(case, mapping=mapping)
        bench.row(f"{name}, {way}", case.size, run, flops=case.flops, repetitions=REPETITIONS)
    in_bfloat16(bench, name, case, ways["chunks by memory"])


def layer_forms(bench: Bench) -> None:
    """Forward and backward: this package's patches under `vmap`, XLA's grouped convolution, a client at a time."""
    clients, batch = _size_of_forms(bench)
    for layer in LAYERS[2:3] if bench.smoke else LAYERS:
        operands = layer.operands(clients, batch)

        def ours(x, kernel, strides=layer.strides):
            return jnp.sum(nn.convolution(x, kernel, strides=strides) ** 2)

        def xla(x, kernel, strides=layer.strides):
            dimensions = ("NHWC", "HWIO", "NHWC")
            out = jax.lax.conv_general_dilated(x, kernel, (strides, strides), "SAME", dimension_numbers=dimensions)
            return jnp.sum(out**2)

        run, peers = in_forms(jax.grad(ours, (0, 1)), jax.grad(xla, (0, 1)), operands, "XLA's")
        what = f"{layer.name}, weights of each client under vmap, forward and both gradients"
        flops, size = 3 * layer.flops(clients, batch), f"{clients} clients × b={batch}"
        bench.row(what, size, run, flops=flops, peers=peers, repetitions=REPETITIONS)


def in_forms(ours: Form, xla: Form, operands: tuple[Any, ...], xla_name: str) -> tuple[Form, dict[str, Form]]:
    """Ours for all clients under `vmap`, and its peers."""
    peers = {
        f"grouped: vmap of {xla_name}": all_at_once(xla),
        f"{xla_name}, a client at a time": one_by_one(xla),
        "this package's, a client at a time": one_by_one(ours),
    }
    return partial(all_at_once(ours), *operands), {name: partial(form, *operands) for name, form in peers.items()}


def network_forms(bench: Bench) -> None:
    """The same of a whole network, and in chunks."""
    clients, batch = _size_of_forms(bench)
    channels, dense = ((4,), 8) if bench.smoke else ((32, 64), 512)
    ours, xla = nn.cnn(channels, dense=(dense,)), nn.from_flax(XlaCnn(10, channels, dense))
    data = network_data(ours, clients, batch)
    chunk = 2 if bench.smoke else 16
    run, peers = in_forms(gradient(ours), gradient(xla), data, "XLA's convolution")
    peers[f"this package's, chunks of {chunk}"] = partial(one_by_one(gradient(ours), chunk), *data)
    what, size = "CNN 5×5 (32, 64), forward and backward, vmap of patches", f"{clients} clients × b={batch}"
    flops = clients * gradient_flops(ours, DIGITS, batch)
    bench.row(what, size, run, flops=flops, peers=peers, repetitions=REPETITIONS)


def cifar_rounds(bench: Bench, name: str, model: Model, small: Model) -> None:
    """FedGWC rounds on CIFAR-size images."""
    model = small if bench.smoke else model
    clients, rows, rounds = (8, 4, 2) if bench.smoke else (100, 500, 30)
    cohort, batch = (4, 4) if bench.smoke else (10, 64)
    fedgwc: Any = REGISTRY["fedgwc"]
    sgd = local.sgd(0.01, batch_size=batch, steps=7)
    algorithm = fedgwc(model, clusters=4, local=sgd, participation=cohort / clients)
    federation = noise_federation(CIFAR, clients, rows)
    result = simulate(algorithm, federation, rounds=rounds, eval_every=max(1, rounds // 5), progress=False)
    times = result.history["seconds"][1:]
    seconds = statistics.median(times)
    size = f"{clients} clients, {cohort} in a round, 7 steps, 32×32×3"
    bench.add(Row(f"FedGWC round, {name}", size, seconds, len(set(times)), note=f"{1 / seconds:.3g} rounds per second"))


def _size_of_forms(bench: Bench) -> tuple[int, int]:
    """Clients and rows of a mini-batch."""
    return (jax.device_count(), 2) if bench.smoke else (128, 32)


MLP, CNN = "MLP 784-200-10", "CNN 5×5 (32, 64)"
# Each can be compiled by itself, beside the others.
PARTS: dict[str, Callable[[Bench], None]] = {
    "many": many_clients,
    "mlp": partial(product_share, name=MLP, case=Case(nn.mlp(), DIGITS, 512, 10, 64)),
    "cnn": partial(product_share, name=CNN, case=Case(nn.cnn(), DIGITS, 256, 10, 32)),
    "layers": layer_forms,
    "network": network_forms,
    "cifar": partial(cifar_rounds, name="CNN", model=nn.cnn(), small=nn.cnn((8,), dense=(8,))),
    "resnet": partial(cifar_rounds, name="ResNet-18", model=nn.resnet18(), small=nn.resnet18(4, blocks=(1, 1))),
}
