"""What is only worth running on a GPU or TPU; elsewhere the smallest sizes show that it works.

A hundred thousand clients' step, the share of the product rate under `vmap`, the forms of own-weight convolutions,
and CIFAR-size rounds.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from fedjax_cluster import local, nn, parallel
from fedjax_cluster.algorithms import REGISTRY
from fedjax_cluster.benchmarks.convolution_suite import XlaCnn, gradient
from fedjax_cluster.benchmarks.measure import Bench, Row
from fedjax_cluster.benchmarks.workloads import CIFAR, DIGITS, local_training, noise_clients, noise_federation
from fedjax_cluster.flops import gradient_flops
from fedjax_cluster.simulation import simulate

SECONDS_FOR_ALL = 1.0


def run(bench: Bench) -> None:
    if jax.default_backend() == "cpu" and not bench.smoke:
        bench.add(Row("accelerator suite", "", note="no accelerator here: the suite is for a GPU or TPU"))
        return
    many_clients(bench)
    product_share(bench)
    convolution_forms(bench)
    cifar_rounds(bench)


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
    """The share of the product rate by the size of the chunk."""
    clients, steps = (4, 2) if bench.smoke else (512, 10)
    for name, model, batch in (("MLP 784-200-10", nn.mlp(), 64), ("CNN 5×5 (32, 64)", nn.cnn(), 32)):
        if bench.smoke:
            batch = 2
        data = noise_clients(DIGITS, clients, 2 * batch)
        own = local.sgd(0.1, batch_size=batch, steps=steps)
        for chunk in (2,) if bench.smoke else (8, 32, 128, 512):
            bench.row(
                f"{name}, chunks of {chunk}",
                f"{clients} clients × {steps} steps × b={batch}",
                local_training(model, DIGITS, data, own, parallel.client_mapping("chunked", chunk)),
                flops=clients * steps * gradient_flops(model, DIGITS, batch),
                repetitions=5,
            )


def convolution_forms(bench: Bench) -> None:
    """`vmap` of this package's convolution, of XLA's (grouped), a map over clients, and a map over chunks."""
    clients, batch = (2, 2) if bench.smoke else (128, 32)
    own, xla = nn.cnn(), nn.from_flax(XlaCnn(10))
    keys = jax.random.split(jax.random.key(0), clients)
    variables = jax.jit(jax.vmap(partial(own.init, info=DIGITS)))(keys)
    x = jax.random.randint(keys[0], (clients, batch, 28, 28), 0, 256, jnp.uint8)
    y = jax.random.randint(keys[1], (clients, batch), 0, 10)

    def mapped(model, chunk: int | None):
        one = lambda row: gradient(model)(*row)  # noqa: E731
        return jax.jit(lambda *rows: jax.lax.map(one, rows, batch_size=chunk))

    forms = {
        "grouped: vmap of XLA's convolution": jax.jit(jax.vmap(gradient(xla))),
        "XLA's convolution, a client at a time": mapped(xla, None),
        "this package's, a client at a time": mapped(own, None),
        "this package's, chunks of 16": mapped(own, 2 if bench.smoke else 16),
    }
    bench.row(
        "CNN 5×5 (32, 64), forward and backward, vmap of patches",
        f"{clients} clients × b={batch}",
        partial(jax.jit(jax.vmap(gradient(own))), variables, x, y),
        flops=clients * gradient_flops(own, DIGITS, batch),
        peers={name: partial(form, variables, x, y) for name, form in forms.items()},
        repetitions=5,
    )


def cifar_rounds(bench: Bench) -> None:
    """FedGWC rounds on CIFAR-size images."""
    clients, rows, rounds = (8, 4, 2) if bench.smoke else (100, 500, 30)
    federation = noise_federation(CIFAR, clients, rows)
    own = local.sgd(0.01, batch_size=4 if bench.smoke else 64, steps=7)
    model = nn.cnn((8,), dense=(8,)) if bench.smoke else nn.cnn()
    algorithm = REGISTRY["fedgwc"](model, clusters=4, local=own, participation=0.5 if bench.smoke else 0.1)
    result = simulate(algorithm, federation, rounds=rounds, eval_every=rounds, progress=False)
    seconds = sorted(result.history["seconds"][1:])
    size = f"{clients} clients, 7 steps, 32×32×3"
    bench.add(Row("FedGWC round, CNN", size, seconds[len(seconds) // 2], rounds - 1))
