"""Own-weight convolutions, layer by layer and in whole networks: this package's forms beside XLA's."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import flax.linen as linen
import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec as P

from fedjax_cluster import nn, parallel
from fedjax_cluster.bench.local import training
from fedjax_cluster.bench.measure import Bench
from fedjax_cluster.bench.workloads import DIGITS
from fedjax_cluster.nn.flops import gradient_flops
from fedjax_cluster.types import ClientMapping, Model, Variables


class Layer(NamedTuple):
    name: str
    image: int
    channels: int
    kernel: int
    features: int
    strides: int = 1


LAYERS = (
    Layer("CNN conv_0", 28, 1, 5, 32),
    Layer("CNN conv_1", 14, 32, 5, 64),
    Layer("LeNet-5 conv_1", 12, 6, 5, 16),
    Layer("ResNet 64", 32, 64, 3, 64),
    Layer("ResNet 64–128, stride 2", 32, 64, 3, 128, 2),
    Layer("pointwise", 16, 96, 1, 24),
)


class XlaCnn(linen.Module):
    """`nn.cnn()` on Flax's own layers, with the same parameters."""

    num_outputs: int

    @linen.compact
    def __call__(self, x: Array) -> Array:
        x = x[..., None]
        for i, features in enumerate((32, 64)):
            x = linen.relu(linen.Conv(features, (5, 5), name=f"conv_{i}")(x))
            x = linen.max_pool(x, (2, 2), strides=(2, 2))
        x = linen.relu(linen.Dense(512, name="hidden_0")(x.reshape(x.shape[0], -1)))
        return linen.Dense(self.num_outputs, name="output")(x)


def run(bench: Bench) -> None:
    clients, batch = (jax.device_count(), 2) if bench.smoke else (16, 32)
    for layer in LAYERS[2:3] if bench.smoke else LAYERS:
        layer_rows(bench, layer, clients, batch)
    if not bench.smoke:
        network_rows(bench, clients, batch)


def layer_rows(bench: Bench, layer: Layer, clients: int, batch: int) -> None:
    x = normal(clients, batch, layer.image, layer.image, layer.channels)
    kernel = normal(clients, layer.kernel, layer.kernel, layer.channels, layer.features)
    apply = partial(nn.convolution, strides=layer.strides)
    dy = jax.eval_shape(apply, x[0], kernel[0])
    cotangent = normal(clients, *dy.shape)
    flops = 2.0 * clients * dy.size * layer.kernel**2 * layer.channels

    def to_x(x, kernel, cotangent):
        return jax.vjp(lambda x: apply(x, kernel), x)[1](cotangent)[0]

    def to_kernel(x, kernel, cotangent):
        return jax.vjp(lambda kernel: apply(x, kernel), kernel)[1](cotangent)[0]

    size = f"{clients} clients × b={batch}"
    for part, fn, operands in (
        ("forward", apply, (x, kernel)),
        ("gradient of x", to_x, (x, kernel, cotangent)),
        ("gradient of the kernel", to_kernel, (x, kernel, cotangent)),
    ):
        bench.row(f"{layer.name}, {part}", size, partial(over_clients(fn), *operands), flops=flops, repetitions=5)


def network_rows(bench: Bench, clients: int, batch: int) -> None:
    """McMahan's network in this package's form and in XLA's own: a pass forth and back, and local training."""
    own, xla = nn.cnn(), nn.from_flax(XlaCnn(10))
    keys = jax.random.split(jax.random.key(0), clients)
    variables = jax.jit(jax.vmap(partial(own.init, info=DIGITS)))(keys)
    x = jax.random.randint(keys[0], (clients, batch, 28, 28), 0, 256, jnp.uint8)
    y = jax.random.randint(keys[1], (clients, batch), 0, 10)
    data = (variables, x, y)
    bench.row(
        "CNN 5×5 (32, 64), forward and backward",
        f"{clients} clients × b={batch}",
        partial(over_clients(gradient(own)), *data),
        flops=clients * gradient_flops(own, DIGITS, batch),
        peers={
            "`vmap` of XLA's convolution": partial(on_every_device(jax.vmap(gradient(xla))), *data),
            "XLA's convolution, a client at a time": partial(over_clients(gradient(xla)), *data),
        },
        repetitions=5,
    )
    steps, mapping = 2, ClientMapping("vmap", mesh=parallel.client_mesh())
    bench.row(
        "CNN 5×5 (32, 64), local training",
        f"{clients} clients × {steps} steps × b={batch}",
        training((own, DIGITS, clients, steps, batch)),
        flops=clients * steps * gradient_flops(own, DIGITS, batch),
        peers={"`vmap` of XLA's convolution": training((xla, DIGITS, clients, steps, batch), mapping=mapping)},
        at_least=12.0,
        repetitions=5,
    )


def over_clients(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A client at a time on every device."""
    return on_every_device(lambda *rows: lax.map(lambda row: fn(*row), rows))


def on_every_device(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Every device computes its own clients."""
    mesh = parallel.client_mesh()
    if mesh is None:
        return jax.jit(fn)
    return jax.jit(jax.shard_map(fn, mesh=mesh, in_specs=P(parallel.AXIS), out_specs=P(parallel.AXIS)))


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
