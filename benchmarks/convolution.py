"""How fast convolutions run when every client has its own weights, beside this process's matrix products.

    python benchmarks/convolution.py [--smoke] [--devices 2] [--clients 16] [--batch 32] [--repeats 5]

Everything runs as the simulator runs it on a CPU: one XLA device per core, a client at a time on each; but the last
lines show `vmap` over the clients, on one device. Rates are those of the direct algorithm; the share is of the
matrix products' rate in the same run. On two cores (AMD EPYC, Zen 4, jax 0.10.2) with other work beside it,
16 clients with 32 images each, fastest of six runs in turn:

                                             ms  GFLOP/s  share
    matrix product 1024                   139.5    123.1   1.00
    cnn conv_0 forward                     16.6     38.6   0.31
    cnn conv_0 dkernel                     24.5     26.3   0.21
    cnn conv_1 forward                     61.3    167.7   1.36
    cnn conv_1 dx                          65.0    158.1   1.28
    cnn conv_1 dkernel                     62.5    164.3   1.33
    lenet5 conv_1 forward                   7.0     50.3   0.41
    lenet5 conv_1 dx                        7.3     48.5   0.39
    lenet5 conv_1 dkernel                   3.5    102.3   0.83
    resnet 64 forward                     332.4    116.3   0.94
    resnet 64 dx                          329.5    117.3   0.95
    resnet 64 dkernel                     382.1    101.2   0.82
    resnet 64-128/2 forward               212.1     91.1   0.74
    resnet 64-128/2 dx                    207.6     93.1   0.76
    resnet 64-128/2 dkernel               281.0     68.8   0.56
    cnn, own weights, loop                319.6    115.9   0.94
    cnn, own weights, vmap                470.2     78.8   0.64
    cnn of XLA's convolution, loop       3987.1      9.3   0.08
    cnn of XLA's convolution, vmap       2511.4     14.8   0.12

That is the whole forward and backward pass of McMahan's network, pooling included, at the rate of matrix products:
12 times as fast as XLA's convolution in the same loop, 8 times as fast as its `vmap`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import flax.linen as linen
import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from fedjax_cluster import nn
from fedjax_cluster.types import DatasetInfo, Model, Variables


class Layer(NamedTuple):
    name: str
    image: int
    channels: int
    kernel: int
    features: int
    strides: int = 1


LAYERS = (
    Layer("cnn conv_0", 28, 1, 5, 32),
    Layer("cnn conv_1", 14, 32, 5, 64),
    Layer("lenet5 conv_1", 12, 6, 5, 16),
    Layer("resnet 64", 32, 64, 3, 64),
    Layer("resnet 64-128/2", 32, 64, 3, 128, 2),
    Layer("pointwise", 16, 96, 1, 24),
)


class Case(NamedTuple):
    name: str
    flops: float
    run: Callable[[], Any]


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


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Own-weight convolutions against this machine's matrix products.")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes: does everything still run?")
    parser.add_argument("--devices", type=int, default=2, help="CPU devices to ask for: one per core")
    parser.add_argument("--clients", type=int, default=16, help="a multiple of the devices")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args(arguments)
    if args.smoke:
        args.clients, args.batch, args.repeats = args.devices, 2, 1
    if args.clients % args.devices:
        parser.error(f"{args.clients} clients do not divide among {args.devices} devices; give a multiple")
    jax.config.update("jax_num_cpu_devices", args.devices)

    product = matrix_product(64 if args.smoke else 1024)
    layers = [case for layer in LAYERS for case in layer_cases(layer, args.clients, args.batch)]
    models = model_cases(args.clients, args.batch)
    rate = report([product, *layers, *models], args.repeats)
    print(f"matrix products {rate:.0f} GFLOP/s on {args.devices} {jax.default_backend()} devices")


def report(cases: list[Case], repeats: int) -> float:
    """Prints a line per case; the first is the yardstick, whose rate is returned."""
    seconds = fastest(cases, repeats)
    rates = [case.flops / s / 1e9 for case, s in zip(cases, seconds, strict=True)]
    print(f"{'':34} {'ms':>8} {'GFLOP/s':>8} {'share':>6}")
    for case, s, rate in zip(cases, seconds, rates, strict=True):
        print(f"{case.name:34} {s * 1e3:8.1f} {rate:8.1f} {rate / rates[0]:6.2f}")
    return rates[0]


def fastest(cases: list[Case], repeats: int) -> list[float]:
    """Seconds of the fastest run of each, run in turn so that other work on the machine meets all alike."""
    best = [float("inf")] * len(cases)
    for round_ in range(repeats + 1):  # the first compiles
        for i, case in enumerate(cases):
            start = time.perf_counter()
            jax.block_until_ready(case.run())
            if round_:
                best[i] = min(best[i], time.perf_counter() - start)
    return best


def over_clients(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A client at a time on every device."""
    mesh = jax.make_mesh((jax.device_count(),), ("clients",), axis_types=(AxisType.Auto,))
    loop = lambda *rows: lax.map(lambda row: fn(*row), rows)  # noqa: E731
    return jax.jit(jax.shard_map(loop, mesh=mesh, in_specs=P("clients"), out_specs=P("clients")))


def matrix_product(size: int, count: int = 8) -> Case:
    count = max(1, count // jax.device_count()) * jax.device_count()
    a, b = normal(count, size, size), normal(count, size, size)
    return Case(f"matrix product {size}", 2.0 * count * size**3, partial(over_clients(jnp.matmul), a, b))


def layer_cases(layer: Layer, clients: int, batch: int) -> list[Case]:
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

    return [
        Case(f"{layer.name} forward", flops, partial(over_clients(apply), x, kernel)),
        Case(f"{layer.name} dx", flops, partial(over_clients(to_x), x, kernel, cotangent)),
        Case(f"{layer.name} dkernel", flops, partial(over_clients(to_kernel), x, kernel, cotangent)),
    ]


def model_cases(clients: int, batch: int) -> list[Case]:
    """Forward and backward of McMahan's network, in this package's form and in XLA's own."""
    info = DatasetInfo("images", (28, 28), 10)
    own, xla = nn.cnn(), nn.from_flax(XlaCnn(10))
    keys = jax.random.split(jax.random.key(0), clients)
    variables = jax.jit(jax.vmap(partial(own.init, info=info)))(keys)
    x = jax.random.randint(keys[0], (clients, batch, 28, 28), 0, 256, jnp.uint8)
    y = jax.random.randint(keys[1], (clients, batch), 0, 10)
    data = (variables, x, y)
    first = 2.0 * batch * 28 * 28 * 25 * 32
    others = 2.0 * batch * (14 * 14 * 25 * 32 * 64 + 3136 * 512 + 512 * 10)
    flops = clients * (2 * first + 3 * others)  # the first layer needs no gradient of its input
    return [
        Case("cnn, own weights, loop", flops, partial(over_clients(gradient(own)), *data)),
        Case("cnn, own weights, vmap", flops, partial(jax.jit(jax.vmap(gradient(own))), *data)),
        Case("cnn of XLA's convolution, loop", flops, partial(over_clients(gradient(xla)), *data)),
        Case("cnn of XLA's convolution, vmap", flops, partial(jax.jit(jax.vmap(gradient(xla))), *data)),
    ]


def gradient(model: Model) -> Callable[[Variables, Array, Array], Any]:
    def of_one_client(variables: Variables, x: Array, y: Array) -> Any:
        def loss(params: Any) -> Array:
            outputs, _ = model.apply(variables._replace(params=params), x, train=True)
            return model.loss(outputs, y).mean()

        return jax.grad(loss)(variables.params)

    return of_one_client


def normal(*shape: int) -> Array:
    return jax.random.normal(jax.random.key(sum(shape)), shape, jnp.float32)


if __name__ == "__main__":
    main()
