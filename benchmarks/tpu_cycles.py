"""Cycles that the compiler estimates for a TPU v5e: convolutions with weights of each client, and a training step.

    python -m benchmarks.tpu_cycles

Of each layer the output and both gradients, in this package's form over XLA's own under `vmap`; of `nn.cnn` a step of
64 clients, over the same network on Flax's layers, and over convolutions as matrix products of patches. Needs
`pip install "fedjax_cluster[tpu]"`. Compiled, not timed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import SingleDeviceSharding

from fedjax_cluster import nn
from fedjax_cluster.bench.convolution import XlaCnn, gradient
from fedjax_cluster.bench.workloads import DIGITS
from fedjax_cluster.simulation.devices import target
from fedjax_cluster.simulation.program_costs import program_costs
from fedjax_cluster.types import Model

CLIENTS, BATCH = 64, 32
# Clients and rows, image, kernel.
LAYERS = {
    "28×28, 5×5, 1 → 32": (CLIENTS, BATCH, (28, 28), (5, 5), 1, 32),
    "14×14, 5×5, 32 → 64": (CLIENTS, BATCH, (14, 14), (5, 5), 32, 64),
    "32×32, 3×3, 64 → 64": (16, 16, (32, 32), (3, 3), 64, 64),
    "8×8, 1×1, 64 → 64": (CLIENTS, BATCH, (8, 8), (1, 1), 64, 64),
}


def cycles(fn: Callable[..., Any], *arguments: Any) -> tuple[float, float]:
    """Estimated cycles of a program for one v5e, and bytes of its temporaries."""
    place = SingleDeviceSharding(target("v5e:1x1").devices[0])
    given = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), arguments)
    compiled: Any = jax.jit(fn).trace(*given).lower(lowering_platforms=("tpu",)).compile()
    return program_costs(compiled.as_text()).cycles, compiled.memory_analysis().temp_size_in_bytes


def layer(apply: Callable[[Array, Array], Array]) -> Callable[..., Any]:
    def of_a_client(x: Array, kernel: Array, cotangent: Array) -> Any:
        out, back = jax.vjp(apply, x, kernel)
        return out, *back(cotangent)

    return jax.vmap(of_a_client)


def xla(x: Array, kernel: Array) -> Array:
    return lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def step(model: Model) -> tuple[float, float]:
    """Of the gradient of each client's loss on a mini-batch."""
    keys = jax.random.split(jax.random.key(0), CLIENTS)
    variables = jax.eval_shape(jax.vmap(partial(model.init, info=DIGITS)), keys)
    x = jax.ShapeDtypeStruct((CLIENTS, BATCH, 28, 28), jnp.uint8)
    return cycles(jax.vmap(gradient(model)), variables, x, jax.ShapeDtypeStruct((CLIENTS, BATCH), jnp.int32))


def main() -> None:
    print("| what | cycles | over XLA's | over patches' | temporaries, GB |\n|---|---:|---:|---:|---:|")
    for name, (clients, rows, image, size, channels, features) in LAYERS.items():
        shapes = ((rows, *image, channels), (*size, channels, features), (rows, *image, features))
        given = [jax.ShapeDtypeStruct((clients, *shape), jnp.float32) for shape in shapes]
        (ours, memory), (theirs, _) = (cycles(layer(form), *given) for form in (nn.convolution, xla))
        what = f"{name}, {clients} clients × b={rows}"
        print(f"| {what} | {ours / 1e6:.2f} M | {ours / theirs:.2f} | | {memory / 1e9:.2f} |", flush=True)
    (ours, memory), (theirs, _) = step(nn.cnn()), step(nn.from_flax(XlaCnn(10)))
    module: Any = sys.modules[nn.convolution.__module__]
    module._xla_at_once = lambda x, kernel, *, window: jax.vmap(partial(module._matrix_product, window=window))(
        x, kernel
    )
    jax.clear_caches()
    patches, _ = step(nn.cnn())
    share = f"{ours / theirs:.2f} | {ours / patches:.2f}"
    print(f"| step of `nn.cnn`, {CLIENTS} clients × b={BATCH} | {ours / 1e6:.2f} M | {share} | {memory / 1e9:.2f} |")


if __name__ == "__main__":
    main()
