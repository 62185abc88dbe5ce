"""Windows that move over images: their arguments, their sizes, and the slices of an image that they cover."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, cast

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from fedjax_cluster.options import COUNT, checked

Pair = tuple[int, int]
Sides = int | Sequence[int]  # one of a square, or (height, width)
Padding = str | int | Sequence[int | Sequence[int]]
Extents = tuple[int, int, int]  # of image, kernel and output along an axis


class Window(NamedTuple):
    """How a kernel moves over the image, height first; all static."""

    strides: Pair = (1, 1)
    padding: tuple[Pair, Pair] = ((0, 0), (0, 0))  # may be negative: a crop
    input_dilation: Pair = (1, 1)
    kernel_dilation: Pair = (1, 1)


def pair(value: Sides, name: str) -> Pair:
    """A positive integer or two of them, as a pair; ValueError for anything else."""
    return checked(name, (value, value) if isinstance(value, int) else value, tuple[int, int], COUNT)


def explicit_padding(padding: Padding, size: Sequence[int], span: Pair, strides: Pair) -> tuple[Pair, Pair]:
    """Rows and columns to add, as ((top, bottom), (left, right)); ValueError for an unknown padding."""
    choices = "'SAME', 'VALID', an integer, or an integer or (low, high) per dimension"
    padding = checked("padding", padding, Padding)
    if isinstance(padding, str):
        if padding.upper() not in ("SAME", "VALID"):
            raise ValueError(f"padding is {padding!r}; choose {choices}")
        padding = lax.padtype_to_pads(size, span, strides, padding.upper())
    sides = (padding, padding) if isinstance(padding, int) else tuple(padding)
    pads = tuple((p, p) if isinstance(p, int) else tuple(p) for p in sides)
    if len(pads) != 2 or any(len(p) != 2 for p in pads):
        raise ValueError(f"padding is {padding!r}; choose {choices}")
    return cast(tuple[Pair, Pair], pads)


def check_fit(size: Sequence[int], span: Sequence[int], padding: tuple[Pair, Pair]) -> None:
    """Raises a ValueError for a window larger than the padded image."""
    if any(image + sum(ends) < side for image, ends, side in zip(size, padding, span, strict=True)):
        raise ValueError(
            f"a window of {tuple(span)} does not fit into an image of {tuple(size)} with padding {padding};"
            " use a larger image, a smaller kernel or padding='SAME'"
        )


def output_size(size: Sequence[int], kernel: Sequence[int], window: Window) -> Pair:
    """Height and width of the output."""
    image, span = dilated(size, window.input_dilation), dilated(kernel, window.kernel_dilation)
    room = [image[axis] + sum(window.padding[axis]) - span[axis] for axis in (0, 1)]
    return room[0] // window.strides[0] + 1, room[1] // window.strides[1] + 1


def dilated(size: Sequence[int], step: Pair) -> Pair:
    """Height and width that `size` pixels span when they lie `step` apart."""
    return (size[0] - 1) * step[0] + 1, (size[1] - 1) * step[1] + 1


def extents(size: Sequence[int], kernel: Sequence[int], out: Sequence[int], window: Window) -> list[Extents]:
    """Per axis, the extents of image, kernel and output, each counted with its dilation or stride."""
    image, span = dilated(size, window.input_dilation), dilated(kernel, window.kernel_dilation)
    return list(zip(image, span, dilated(out, window.strides), strict=True))


def fitted(low: Sequence[int], axes: Sequence[Extents]) -> tuple[Pair, Pair]:
    """Padding with `low` in front of each axis under which extents (image, kernel, output) fit together."""
    rows, columns = [(at, out + span - 1 - image - at) for at, (image, span, out) in zip(low, axes, strict=True)]
    return rows, columns


def slices_by_tap(x: Array, kernel: Sequence[int], window: Window, fill: float = 0.0) -> list[Array]:
    """For every position of the window, in row-major order, the inputs [N, H', W', C] at that position."""
    outputs = output_size(x.shape[1:3], kernel, window)
    return slices(padded(x, window, fill), kernel, window.kernel_dilation, outputs, window.strides)


def slices_by_output(x: Array, kernel: Sequence[int], window: Window) -> list[Array]:
    """For every output position, the inputs [N, kh, kw, C] it sees."""
    outputs = output_size(x.shape[1:3], kernel, window)
    return slices(padded(x, window), outputs, window.strides, kernel, window.kernel_dilation)


def positions(image: Sequence[int], outputs: Sequence[int], kernel: Sequence[int], window: Window) -> np.ndarray:
    """i32[outputs, taps]: which pixels, in row-major order, of a padded image each output sees."""
    rows, columns = (
        np.arange(outputs[axis])[:, None] * window.strides[axis]
        + np.arange(kernel[axis]) * window.kernel_dilation[axis]
        for axis in (0, 1)
    )
    found = rows[:, None, :, None] * image[1] + columns[None, :, None, :]
    return found.reshape(math.prod(outputs), math.prod(kernel)).astype(np.int32)


def padded(x: Array, window: Window, fill: float = 0.0) -> Array:
    """x with the window's padding and input dilation."""
    (top, bottom), (left, right) = window.padding
    rows, columns = window.input_dilation
    edges = ((0, 0, 0), (top, bottom, rows - 1), (left, right, columns - 1), (0, 0, 0))
    return lax.pad(x, jnp.asarray(fill, x.dtype), edges)


def slices(x: Array, starts: Sequence[int], step: Pair, shape: Sequence[int], stride: Pair) -> list[Array]:
    """One strided slice [N, *shape, C] of x for each of `starts` positions, `step` apart, in row-major order."""
    rows, columns = dilated(shape, stride)

    def at(row: int, column: int) -> Array:
        end = (x.shape[0], row + rows, column + columns, x.shape[3])
        return lax.slice(x, (0, row, column, 0), end, (1, *stride, 1))

    return [at(i * step[0], j * step[1]) for i in range(starts[0]) for j in range(starts[1])]
