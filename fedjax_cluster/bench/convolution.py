"""Convolutions with weights of each client, layer by layer and in whole networks: this package's forms and XLA's."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import flax.linen as linen
import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec as P

from fedjax_cluster import nn, parallel
from fedjax_cluster.bench.local import CASES, training
from fedjax_cluster.bench.measure import Bench
from fedjax_cluster.bench.workloads import DIGITS
from fedjax_cluster.types import ClientMapping, Model, Variables

REPETITIONS = 5


class Layer(NamedTuple):
    name: str
    image: int
    channels: int
    kernel: int
    features: int
    strides: int = 1

    def operands(self, clients: int, batch: int) -> tuple[Array, Array]:
        """Images and kernels of each client."""
        x = normal(clients, batch, self.image, self.image, self.channels)
        return x, normal(clients, self.kernel, self.kernel, self.channels, self.features)

    def flops(self, clients: int, batch: int) -> float:
        """Of one direction."""
        outputs = clients * batch * (self.image // self.strides) ** 2 * self.features
        return 2.0 * outputs * self.kernel**2 * self.channels


LAYERS = (
    Layer("CNN conv_0", 28, 1, 5, 32),
    Layer("CNN conv_1", 14, 32, 5, 64),
    Layer("LeNet-5 conv_1", 12, 6, 5, 16),
    Layer("ResNet 64", 32, 64, 3, 64),
    Layer("ResNet 64–128, stride 2", 32, 64, 3, 128, 2),
    Layer("pointwise", 16, 96, 1, 24),
)


class XlaCnn(linen.Module):
    """`nn.cnn(channels, dense=(dense,))` on Flax's layers, with the same parameters."""

    num_outputs: int
    channels: tuple[int, ...] = (32, 64)
    dense: int = 512

    @linen.compact
    def __call__(self, x: Array) -> Array:
        x = x[..., None]
        for i, features in enumerate(self.channels):
            x = linen.relu(linen.Conv(features, (5, 5), name=f"conv_{i}")(x))
            x = linen.max_pool(x, (2, 2), strides=(2, 2))
        x = linen.relu(linen.Dense(self.dense, name="hidden_0")(x.reshape(x.shape[0], -1)))
        return linen.Dense(self.num_outputs, name="output")(x)


def run(bench: Bench) -> None:
    clients, batch = (jax.device_count(), 2) if bench.smoke else (16, 32)
    for layer in LAYERS[2:3] if bench.smoke else LAYERS:
        layer_rows(bench, layer, clients, batch)
    if not bench.smoke:
        network_rows(bench)


def layer_rows(bench: Bench, layer: Layer, clients: int, batch: int) -> None:
    x, kernel = layer.operands(clients, batch)
    apply = partial(nn.convolution, strides=layer.strides)
    cotangent = normal(clients, *jax.eval_shape(apply, x[0], kernel[0]).shape)

    def to_x(x, kernel, cotangent):
        return jax.vjp(lambda x: apply(x, kernel), x)[1](cotangent)[0]

    def to_kernel(x, kernel, cotangent):
        return jax.vjp(lambda kernel: apply(x, kernel), kernel)[1](cotangent)[0]

    size, flops = f"{clients} clients × b={batch}", layer.flops(clients, batch)
    for part, fn, operands in (
        ("forward", apply, (x, kernel)),
        ("gradient of x", to_x, (x, kernel, cotangent)),
        ("gradient of the kernel", to_kernel, (x, kernel, cotangent)),
    ):
        run = partial(one_by_one(fn), *operands)
        bench.row(f"{layer.name}, {part}", size, run, flops=flops, repetitions=REPETITIONS)


def network_rows(bench: Bench) -> None:
    """McMahan's network in this package's form and in XLA's: one pass forward and backward, and local training."""
    case = CASES["CNN 5×5 (32, 64)"]
    ours, xla = case.model, nn.from_flax(XlaCnn(10))
    data = network_data(ours, case.clients, case.batch)
    row = partial(bench.row, flops=case.flops, repetitions=REPETITIONS)
    row(
        "CNN 5×5 (32, 64), forward and backward",
        f"{case.clients} clients × b={case.batch}",
        partial(one_by_one(gradient(ours)), *data),
        flops=case.flops / case.steps,
        peers={
            "`vmap` of XLA's convolution": partial(all_at_once(gradient(xla)), *data),
            "XLA's convolution, a client at a time": partial(one_by_one(gradient(xla)), *data),
        },
    )
    peer = training(case._replace(model=xla), mapping=ClientMapping("vmap", mesh=parallel.client_mesh()))
    peers = {"`vmap` of XLA's convolution": peer}
    row("CNN 5×5 (32, 64), local training", case.size, training(case), peers=peers, at_least=12.0)


def network_data(model: Model, clients: int, batch: int) -> tuple[Variables, Array, Array]:
    """Variables, a batch of images and classes of each client."""
    keys = jax.random.split(jax.random.key(0), clients)
    variables = jax.jit(jax.vmap(partial(model.init, info=DIGITS)))(keys)
    x = jax.random.randint(keys[0], (clients, batch, 28, 28), 0, 256, jnp.uint8)
    return variables, x, jax.random.randint(keys[1], (clients, batch), 0, 10)


def one_by_one(fn: Callable[..., Any], chunk: int | None = None) -> Callable[..., Any]:
    """A client, or a chunk of clients under `vmap`, at a time on every device."""
    return on_every_device(lambda *rows: lax.map(lambda row: fn(*row), rows, batch_size=chunk))


def all_at_once(fn: Callable[..., Any]) -> Callable[..., Any]:
    """All clients of a device under `vmap`."""
    return on_every_device(jax.vmap(fn))


def on_every_device(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Every device computes the clients that it holds; as many devices as divide them are used."""

    @functools.cache
    def program(clients: int) -> Callable[..., Any]:
        mesh = parallel.client_mesh(jax.devices()[: math.gcd(clients, jax.device_count())])
        if mesh is None:
            return jax.jit(fn)
        return jax.jit(jax.shard_map(fn, mesh=mesh, in_specs=P(parallel.AXIS), out_specs=P(parallel.AXIS)))

    return lambda *rows: program(len(jax.tree.leaves(rows)[0]))(*rows)


def gradient(model: Model) -> Callable[[Variables, Array, Array], Any]:
    """The gradient of one client's mean loss."""

    def of_one_client(variables: Variables, x: Array, y: Array) -> Any:
        def loss(params: Any) -> Array:
            outputs, _ = model.apply(variables._replace(params=params), x, train=True)
            return model.loss(outputs, y).mean()

        return jax.grad(loss)(variables.params)

    return of_one_client


def normal(*shape: int) -> Array:
    return jax.random.normal(jax.random.key(sum(shape)), shape, jnp.float32)
