"""The forms that convolutions with weights of each client take on TPUs and GPUs, their values on the CPU."""

import sys

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from fedjax_cluster.nn import convolution, windows
from fedjax_cluster.nn.convolution import convolve
from tests.nn.test_convolution import assert_close, normal, value_and_gradients, xla


@pytest.mark.parametrize(("backend", "channels", "loops"), [("tpu", 3, False), ("cuda", 3, True), ("cuda", 5, True)])
def test_vmap_on_an_accelerator(backend, channels, loops, monkeypatch):
    """Weights per client as the platform takes them, on the CPU: grouped convolutions on a TPU; on a GPU products for
    few channels and kernels' gradients, and no more than so many clients in a group."""
    # Unlike above, and in each case: JAX remembers batched programs.
    x, kernel = normal(3, 2, 7, 5, channels), normal(3, 3, 3, channels, 5 + len(backend), seed=1)
    run = jax.jit(jax.vmap(value_and_gradients(convolution)))
    lowered = {each: run.trace(x, kernel).lower(lowering_platforms=(each,)).as_text() for each in ("cpu", backend)}
    assert {each: "while" in text for each, text in lowered.items()} == {"cpu": True, backend: False}
    products = lowered[backend].count("dot_general")
    assert products == {("tpu", 3): 0, ("cuda", 3): 2, ("cuda", 5): 1}[backend, channels]
    monkeypatch.setattr(lax, "platform_dependent", lambda *given, default, **own: own.get(backend, default)(*given))
    monkeypatch.setattr(sys.modules[convolve.__module__], "MOST_GROUPS", 2)
    x = normal(3, 2, 7, 6, channels)
    expected = jax.jit(jax.vmap(value_and_gradients(xla)))(x, kernel)
    run = jax.jit(jax.vmap(value_and_gradients(convolution)))
    assert ("while" in run.lower(x, kernel).as_text()) == loops
    assert_close(run(x, kernel), expected)


@pytest.mark.parametrize("strides", [1, (2, 1)])
@pytest.mark.parametrize("dilation", [1, (1, 2)])
@pytest.mark.parametrize("padding", ["SAME", "VALID", ((2, 0), (-1, 3))])
def test_gathered_patches_are_those_of_slices(strides, dilation, padding):
    """Of a layer and of its kernel's gradient, where the output is in the kernel's place."""
    module = sys.modules[convolve.__module__]
    x, kernel = normal(2, 9, 8, 3), normal(3, 2, 3, 4, seed=1)
    steps, taps = windows.pair(strides, "strides"), windows.pair(dilation, "kernel_dilation")
    pads = windows.explicit_padding(padding, x.shape[1:3], windows.dilated(kernel.shape, taps), steps)
    forward = windows.Window(steps, pads, kernel_dilation=taps)
    out = module._matrix_product(x, kernel, window=forward)
    assert_close(module._gathered_product(x, kernel, window=forward), out)
    backward = windows.Window(taps, pads, kernel_dilation=steps)
    exchanged, cotangent = x.transpose(3, 1, 2, 0), out.transpose(1, 2, 0, 3)
    assert_close(
        module._gathered_product(exchanged, cotangent, window=backward),
        module._matrix_product(exchanged, cotangent, window=backward),
    )


def test_a_strided_pointwise_convolution_keeps_slice_and_product_apart():
    """Together they end the process on a GPU, in every ResNet."""
    run = jax.vmap(jax.grad(lambda x, kernel: jnp.sum(convolution(x, kernel, strides=2) ** 2), (0, 1)))
    lowered = jax.jit(run).trace(normal(3, 2, 8, 8, 4), normal(3, 1, 1, 4, 5)).lower(lowering_platforms=("cuda",))
    assert "optimization_barrier" in lowered.as_text()
