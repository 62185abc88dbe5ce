"""Convolution of few channels on a CPU, with the rows of a mini-batch innermost: images are [C, H, W, N].

With the channels innermost a vector of the processor holds the six numbers of a pixel, or less; here it holds sixteen
rows, in every step from the first convolution to the last pooling, and a patch is a copy of long runs, made for as many
output rows at a time as the caches hold. For a LeNet-5 a training step takes half the time at b = 10, and a fifth at
b = 64. From 32 features on `nn.convolution` is the faster.

A convolution y is one derivative of the trilinear form

    T = Σ y[f, i, j, n] · x[c, i + a, j + b, n] · kernel[a, b, c, f];

its gradients are the two others, and theirs again two of the three: gradients of any order keep to this layout
(`trilinear`).
"""

from __future__ import annotations

import math
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jaxtyping import Float

from fedjax_cluster.nn.sums import sums_in
from fedjax_cluster.nn.trilinear import ROLES, at_precision, check_dtypes, contract, differentiable, written_precision

MOST_FEATURES = 16
# Bytes of patches: up to the first all at once, which is faster by a tenth; then in pieces of the second, or one output
# row. Larger patches in one take several times as long (CIFAR's first layer at b = 100: 23 MB).
MOST_AT_ONCE, PIECE = 2**22, 2**18
ROWS_LAST = (3, 1, 2, 0)  # turns [N, H, W, C] into [C, H, W, N], and back

contraction_p = Primitive("rows_last_convolution")


def convolve(x: Float[Array, "C H W N"], kernel: Float[Array, "kh kw C F"]) -> Float[Array, "F H_out W_out N"]:
    """The convolution without padding, at stride 1, of one dtype, or a TypeError.

    >>> convolve(jnp.ones((1, 4, 4, 2)), jnp.ones((3, 3, 1, 5))).shape
    (5, 2, 2, 2)
    """
    check_dtypes(x, kernel)
    return contract(contraction_p, "y", {"x": x, "kernel": kernel}, precision=written_precision())


def _taps(x: Array, size: tuple[int, int]) -> list[Array]:
    """For every place of the kernel the pixels [C, H', W', N] that it meets, in row-major order."""
    channels, height, width, rows = x.shape
    down, across = height - size[0] + 1, width - size[1] + 1
    return [
        lax.slice(x, (0, a, b, 0), (channels, a + down, b + across, rows))
        for a in range(size[0])
        for b in range(size[1])
    ]


def _patches(x: Array, size: tuple[int, int]) -> Array:
    """[kh·kw·C, H'·W'·N]."""
    taps = jnp.concatenate(_taps(x, size))
    return taps.reshape(taps.shape[0], -1)


def _piece(x: Array, height: int, width: int, whole: bool) -> int:
    """Output rows whose patches stay in the caches: a divisor of all `height`, of output `width`; all where `whole`."""
    channels, rows = x.shape[0], x.shape[3]
    kh, kw = x.shape[1] - height + 1, x.shape[2] - width + 1
    bytes_of_row = kh * kw * channels * width * rows * x.dtype.itemsize
    if whole or height * bytes_of_row <= MOST_AT_ONCE:
        return height
    fitting = [count for count in range(1, height + 1) if height % count == 0 and count * bytes_of_row <= PIECE]
    return max(fitting, default=1)


def _of_y(x: Array, kernel: Array, *, whole: bool = False) -> Array:
    kh, kw, _, features = kernel.shape
    height, width, rows = x.shape[1] - kh + 1, x.shape[2] - kw + 1, x.shape[3]
    weights, count = kernel.reshape(-1, features).T, _piece(x, height, width, whole)

    def piece(number: Array | int) -> Array:
        met = lax.dynamic_slice_in_dim(x, number * count, count + kh - 1, 1)
        return (weights @ _patches(met, (kh, kw))).reshape(features, count, width, rows)

    if count == height:
        return piece(0)
    return jnp.moveaxis(lax.map(piece, jnp.arange(height // count)), 0, 1).reshape(features, height, width, rows)


def _of_kernel(x: Array, y: Array, *, whole: bool = False) -> Array:
    features, height, width, _ = y.shape
    kh, kw, count = x.shape[1] - height + 1, x.shape[2] - width + 1, _piece(x, height, width, whole)

    def piece(number: Array | int) -> Array:
        met = lax.dynamic_slice_in_dim(x, number * count, count + kh - 1, 1)
        own = lax.dynamic_slice_in_dim(y, number * count, count, 1)
        return _patches(met, (kh, kw)) @ own.reshape(features, -1).T

    total = piece(0) if count == height else lax.map(piece, jnp.arange(height // count)).sum(0)
    return total.reshape(kh, kw, x.shape[0], features)


def _of_x(kernel: Array, y: Array) -> Array:
    kh, kw, channels, features = kernel.shape
    dtype = sums_in(y.dtype)
    zero, flat = jnp.zeros((), dtype), y.reshape(features, math.prod(y.shape[1:]))

    # A row of the kernel at a time: the products of all its places are 25 times the image.
    def of_row(a: int) -> Array:
        products = lax.dot(kernel[a].reshape(-1, features), flat, preferred_element_type=dtype)
        parts = products.reshape(kw, channels, *y.shape[1:])
        edges = [((0, 0, 0), (0, 0, 0), (b, kw - 1 - b, 0), (0, 0, 0)) for b in range(kw)]
        row = reduce(lax.add, [lax.pad(part, zero, edge) for part, edge in zip(parts, edges, strict=True)])
        return lax.pad(row, zero, ((0, 0, 0), (a, kh - 1 - a, 0), (0, 0, 0), (0, 0, 0)))

    return reduce(lax.add, [of_row(a) for a in range(kh)]).astype(y.dtype)


def _xla_y(x: Array, kernel: Array) -> Array:
    return lax.conv_general_dilated(x, kernel, (1, 1), "VALID", dimension_numbers=("CHWN", "HWIO", "CHWN"))


def _xla_x(kernel: Array, y: Array) -> Array:
    edges = [(size - 1, size - 1) for size in kernel.shape[:2]]
    turned = lax.rev(kernel, (0, 1))
    return lax.conv_general_dilated(y, turned, (1, 1), edges, dimension_numbers=("CHWN", "HWOI", "CHWN"))


def _xla_kernel(x: Array, y: Array) -> Array:
    return lax.conv_general_dilated(x, y, (1, 1), "VALID", dimension_numbers=("NHWC", "OHWI", "HWNC"))


FORMS = {"x": _of_x, "kernel": _of_kernel, "y": _of_y}
# Training steps of 128 clients of a LeNet-5 × b = 32 took 1.8 ms on an H200 so, and 13.7 ms with XLA's convolutions.
GPU_FORMS = FORMS | {name: partial(FORMS[name], whole=True) for name in ("kernel", "y")}
# A TPU's compiler chooses the layouts itself.
XLA_FORMS = {"x": _xla_x, "kernel": _xla_kernel, "y": _xla_y}


@at_precision
def _evaluate(first: Array, second: Array, *, wanted: str) -> Array:
    return FORMS[wanted](first, second)


@at_precision
def _on_gpu(first: Array, second: Array, *, wanted: str) -> Array:
    return GPU_FORMS[wanted](first, second)


@at_precision
def _on_accelerator(first: Array, second: Array, *, wanted: str) -> Array:
    return XLA_FORMS[wanted](first, second)


@contraction_p.def_abstract_eval
def _abstract_eval(first, second, *, wanted: str, precision: Any):
    return jax.make_jaxpr(FORMS[wanted])(first, second).out_avals[0]


def _batch(operands, axes, *, wanted: str, precision: Any) -> tuple[Array, int]:
    roles = [role for role in ROLES if role != wanted]
    sizes = [operand.shape[axis] for operand, axis in zip(operands, axes, strict=True) if axis is not None]
    if "kernel" in roles and axes[roles.index("kernel")] is None:  # one model, many clients' rows
        kernel, other = roles.index("kernel"), 1 - roles.index("kernel")
        images = jnp.moveaxis(operands[other], axes[other], 3)
        clients, rows = images.shape[3:]
        given = {"kernel": operands[kernel], roles[other]: images.reshape(*images.shape[:3], clients * rows)}
        out = contract(contraction_p, wanted, given, precision=precision)
        return out.reshape(*out.shape[:3], clients, rows), 3
    first, second = (
        jnp.broadcast_to(operand, (sizes[0], *operand.shape)) if axis is None else jnp.moveaxis(operand, axis, 0)
        for operand, axis in zip(operands, axes, strict=True)
    )

    def one_by_one(first: Array, second: Array) -> Array:
        return lax.map(lambda pair: contraction_p.bind(*pair, wanted=wanted, precision=precision), (first, second))

    gpu, other = (jax.vmap(partial(form, wanted=wanted, precision=precision)) for form in (_on_gpu, _on_accelerator))
    return lax.platform_dependent(first, second, cpu=one_by_one, cuda=gpu, rocm=gpu, default=other), 0


contraction_p.def_impl(jax.jit(_evaluate, static_argnames=("wanted", "precision")))
differentiable(contraction_p)
batching.primitive_batchers[contraction_p] = _batch
mlir.register_lowering(contraction_p, mlir.lower_fun(_on_accelerator, multiple_results=False))
mlir.register_lowering(contraction_p, mlir.lower_fun(_evaluate, multiple_results=False), platform="cpu")
