"""Rotation of images about their centre, for many images at once."""

from __future__ import annotations

import math

import numpy as np
import scipy

_IMAGES_AT_ONCE = 1024


def rotate(images: np.ndarray, angle: float) -> np.ndarray:
    """Images rotated counter-clockwise about their centre.

    Right angles move pixels exactly. Any other angle interpolates bilinearly between the four neighbouring pixels, with
    zeros outside of the image, and rounds where the dtype is an integer.

    Args:
      images: [N, H, W] or [N, H, W, channels], any real dtype.
      angle: degrees.

    Returns:
      A new array of the same shape and dtype.

    Raises:
      ValueError: no images, or images that are not square under 90 or 270 degrees.

    >>> rotate(np.array([[[1, 2], [3, 4]]], np.uint8), 90)
    array([[[2, 4],
            [1, 3]]], dtype=uint8)
    """
    if images.ndim not in (3, 4):
        raise ValueError(
            f"Arrays of shape {list(images.shape)} cannot be rotated: reshape them to images [N, H, W] or "
            f"[N, H, W, channels], or choose a scenario that does not rotate."
        )
    quarters, rest = divmod(angle % 360.0, 90.0)
    if rest == 0.0:
        if quarters % 2 and images.shape[1] != images.shape[2]:
            raise ValueError(
                f"Images of {images.shape[1]} × {images.shape[2]} pixels change their shape under {angle:g} degrees: "
                f"crop or pad them to squares, or use 0 and 180 degrees only."
            )
        return np.array(np.rot90(images, int(quarters), axes=(1, 2)), order="C")
    return _interpolate(images, angle)


def _interpolate(images: np.ndarray, angle: float) -> np.ndarray:
    count, height, width = images.shape[:3]
    operator = _rotation_matrix(height, width, angle)
    columns = images.reshape(count, height * width, math.prod(images.shape[3:]))
    rotated = np.empty(columns.shape, images.dtype)
    for start in range(0, count, _IMAGES_AT_ONCE):
        block = columns[start : start + _IMAGES_AT_ONCE].transpose(1, 0, 2)
        pixels_first = np.ascontiguousarray(block, dtype=np.float32)
        values = operator @ pixels_first.reshape(height * width, -1)
        if np.issubdtype(images.dtype, np.integer):
            np.rint(values, out=values)
        rotated[start : start + _IMAGES_AT_ONCE] = values.reshape(pixels_first.shape).transpose(1, 0, 2)
    return rotated.reshape(images.shape)


def _rotation_matrix(height: int, width: int, angle: float) -> scipy.sparse.csr_array:
    """[H·W, H·W]: each row holds the weights of the up to four pixels that an output pixel is interpolated from."""
    radians = math.radians(angle)
    row, column = np.mgrid[:height, :width].reshape(2, -1)
    down, right = row - (height - 1) / 2, column - (width - 1) / 2
    source_column = math.cos(radians) * right - math.sin(radians) * down + (width - 1) / 2
    source_row = math.sin(radians) * right + math.cos(radians) * down + (height - 1) / 2
    top, left = np.floor(source_row).astype(int), np.floor(source_column).astype(int)

    targets, sources, weights = [], [], []
    for corner_row in (top, top + 1):
        for corner_column in (left, left + 1):
            weight = (1 - np.abs(source_row - corner_row)) * (1 - np.abs(source_column - corner_column))
            inside = (corner_row >= 0) & (corner_row < height) & (corner_column >= 0) & (corner_column < width)
            targets.append(np.flatnonzero(inside))
            sources.append((corner_row * width + corner_column)[inside])
            weights.append(weight[inside].astype(np.float32))
    entries = (np.concatenate(weights), (np.concatenate(targets), np.concatenate(sources)))
    return scipy.sparse.csr_array(entries, shape=(height * width, height * width))
