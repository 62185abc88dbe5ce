"""What is only worth running on a GPU or TPU; elsewhere the smallest sizes show that it works.

A hundred thousand clients' step, the share of the product rate of MLP and CNN under each mapping and in bfloat16, the
forms of own-weight convolutions by layer and in a network, and CIFAR-size rounds.
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
from fedjax_cluster.bench.convolution import LAYERS, XlaCnn, gradient, normal
from fedjax_cluster.bench.local import Case, in_bfloat16, training
from fedjax_cluster.bench.measure import Bench, Row
from fedjax_cluster.bench.workloads import CIFAR, DIGITS, local_training, noise_clients, noise_federation
from fedjax_cluster.nn.flops import gradient_flops
from fedjax_cluster.simulation.loop import simulate

SECONDS_FOR_ALL = 1.0


def run(bench: Bench) -> None:
    if jax.default_backend() == "cpu" and not bench.smoke:
        bench.add(Row("accelerator suite", "", note="no accelerator here: the suite is for a GPU or TPU"))
        return
    many_clients(bench)
    product_share(bench)
    layer_forms(bench)
    network_forms(bench)
    for model in ("CNN", "ResNet-18"):
        cifar_rounds(bench, model)


def many_clients(bench: Bench) -> None:
    """100 000 clients × one MLP step (b = 64), in chunks."""
    clients, batch = (8, 4) if bench.smoke else (100_000, 64)
    data = noise_clients(DIGITS, clients, batch)
    row = bench.row(
        "MLP 784-200-10, one step of everybody",
        f"{clients} clients × b={batch}",
        local_training(
            nn.mlp(), DIGITS, data, local.sgd(0.1, batch_size=batch, steps=1), parallel.client_mapping("chunked")
        ),
        flops=clients * gradient_flops(nn.mlp(), DIGITS, batch),
        repetitions=5,
    )
    bench.rows[-1] = Row(
        **{**row.__dict__, "peer": "one second", "ratio": SECONDS_FOR_ALL / row.seconds, "at_least": 1.0}
    )


def product_share(bench: Bench) -> None:
    """The share of the product rate by mapping: a client at a time, chunks under `vmap`, all under `vmap`; bfloat16."""
    cases: dict[str, Case] = {
        "MLP 784-200-10": (nn.mlp(), DIGITS, 512, 10, 64),
        "CNN 5×5 (32, 64)": (nn.cnn(), DIGITS, 256, 10, 32),
    }
    if bench.smoke:
        cases = {"CNN": (nn.cnn((4,), dense=(8,)), DIGITS, 4, 2, 2)}
    for name, case in cases.items():
        model, _, clients, steps, batch = case
        ways = {"a client at a time": parallel.client_mapping("scan"), "vmap": parallel.client_mapping("vmap")}
        for chunk in (2,) if bench.smoke else (8, 32, 128):
            ways[f"chunks of {chunk}"] = parallel.client_mapping("chunked", chunk)
        ways["chunks by memory"] = parallel.client_mapping("chunked")
        for way, mapping in ways.items():
            bench.row(
                f"{name}, {way}",
                f"{clients} clients × {steps} steps × b={batch}",
                training(case, mapping=mapping),
                flops=clients * steps * gradient_flops(model, DIGITS, batch),
                repetitions=5,
            )
        in_bfloat16(bench, {name: case}, (name,), ways["chunks by memory"])


def layer_forms(bench: Bench) -> None:
    """Layers with own weights, forward and backward: this package's patches under `vmap`, XLA's grouped, one by one."""
    clients, batch = (2, 2) if bench.smoke else (128, 32)
    for layer in LAYERS[2:3] if bench.smoke else LAYERS:
        x = normal(clients, batch, layer.image, layer.image, layer.channels)
        kernel = normal(clients, layer.kernel, layer.kernel, layer.channels, layer.features)

        def own(x, kernel, strides=layer.strides):
            return jnp.sum(nn.convolution(x, kernel, strides=strides) ** 2)

        def xla(x, kernel, strides=layer.strides):
            out = jax.lax.conv_general_dilated(
                x, kernel, (strides, strides), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
            return jnp.sum(out**2)

        forms = {
            name: partial(over(jax.grad(loss, (0, 1))), x, kernel)
            for name, over, loss in (
                ("patches", vmapped, own),
                ("grouped: vmap of XLA's", vmapped, xla),
                ("XLA's, a client at a time", one_by_one, xla),
                ("this package's, a client at a time", one_by_one, own),
            )
        }
        outputs = clients * batch * (layer.image // layer.strides) ** 2 * layer.features
        bench.row(
            f"{layer.name}, own weights under vmap, forward and both gradients",
            f"{clients} clients × b={batch}",
            forms.pop("patches"),
            flops=3 * 2.0 * outputs * layer.kernel**2 * layer.channels,
            peers=forms,
            repetitions=5,
        )


def network_forms(bench: Bench) -> None:
    """The same of a whole network, and in chunks."""
    clients, batch = (2, 2) if bench.smoke else (128, 32)
    own, xla = nn.cnn(), nn.from_flax(XlaCnn(10))
    keys = jax.random.split(jax.random.key(0), clients)
    variables = jax.jit(jax.vmap(partial(own.init, info=DIGITS)))(keys)
    x = jax.random.randint(keys[0], (clients, batch, 28, 28), 0, 256, jnp.uint8)
    y = jax.random.randint(keys[1], (clients, batch), 0, 10)
    forms = {
        "grouped: vmap of XLA's convolution": vmapped(gradient(xla)),
        "XLA's convolution, a client at a time": one_by_one(gradient(xla)),
        "this package's, a client at a time": one_by_one(gradient(own)),
        "this package's, chunks of 16": one_by_one(gradient(own), 2 if bench.smoke else 16),
    }
    bench.row(
        "CNN 5×5 (32, 64), forward and backward, vmap of patches",
        f"{clients} clients × b={batch}",
        partial(vmapped(gradient(own)), variables, x, y),
        flops=clients * gradient_flops(own, DIGITS, batch),
        peers={name: partial(form, variables, x, y) for name, form in forms.items()},
        repetitions=5,
    )


def vmapped(fn: Callable[..., Any]) -> Callable[..., Any]:
    return jax.jit(jax.vmap(fn))


def one_by_one(fn: Callable[..., Any], chunk: int | None = None) -> Callable[..., Any]:
    return jax.jit(lambda *rows: jax.lax.map(lambda row: fn(*row), rows, batch_size=chunk))


def cifar_rounds(bench: Bench, name: str) -> None:
    """FedGWC rounds on CIFAR-size images."""
    clients, rows, rounds = (8, 4, 2) if bench.smoke else (100, 500, 30)
    federation = noise_federation(CIFAR, clients, rows)
    own = local.sgd(0.01, batch_size=4 if bench.smoke else 64, steps=7)
    small, large = {
        "CNN": (partial(nn.cnn, (8,), dense=(8,)), nn.cnn),
        "ResNet-18": (partial(nn.resnet18, 4, blocks=(1, 1)), nn.resnet18),
    }[name]
    model = small() if bench.smoke else large()
    algorithm = REGISTRY["fedgwc"](model, clusters=4, local=own, participation=0.5 if bench.smoke else 0.1)
    result = simulate(algorithm, federation, rounds=rounds, eval_every=rounds, progress=False)
    seconds = statistics.median(result.history["seconds"][1:])
    size = f"{clients} clients, {clients // (2 if bench.smoke else 10)} in a round, 7 steps, 32×32×3"
    bench.add(Row(f"FedGWC round, {name}", size, seconds, rounds - 1, note=f"{1 / seconds:.3g} rounds per second"))
