"""Folders of images as data sets, by class or by user and class."""

from __future__ import annotations

import collections
import logging
import os
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from fedjax_cluster.data.own_examples import PARTS, listed, named_examples
from fedjax_cluster.data.waiting import working
from fedjax_cluster.options import COUNT, as_path, with_checks
from fedjax_cluster.types import Examples

LOG = logging.getLogger(__name__)
GREY, WIDE = ("1", "L", "LA"), "IF"  # Pillow's modes; the first letters of those with more than 8 bits
IMAGES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp")
DEEPEST = 3  # folders that are looked into; a link may lead back to one above it
DAMAGED = (OSError, SyntaxError, ValueError, EOFError, struct.error, zlib.error, Image.DecompressionBombError)


@with_checks(size=COUNT)
def image_folder(path: str | os.PathLike, *, size: Sequence[int] | None = None) -> Examples:
    """A folder of images, by class or by user and class: `folder/class/*.png`, or `folder/user/class/*.png`.

    Args:
      path: the folder; images are `.png`, `.jpg`, `.bmp`, `.gif`, `.tif` or `.webp`. The log tells of other files, but
        for those whose names, or whose folders', begin with a dot.
      size: (height, width) to bring the images to; default is their own, which must be one.

    Returns:
      Examples with x uint8 [N, H, W, 3], or [N, H, W, 1] where none has colours, classes numbered in the order of their
      names (of numbers, where all are numbers), and `user_ids` where there are users.

    Raises:
      ValueError: no such folder, no images one or two folders down, an unreadable one, or images that differ in size.
    """
    folder = as_path("path", path)
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder: give one that holds images by class, such as {folder}/cat/1.png.")
    if size is not None and len(size) != 2:
        raise ValueError(f"size is {list(size)}; give height and width")
    found = _images(folder)
    parts = [file.relative_to(folder).parts[:-1] for file in found]
    depths = sorted({len(above) for above in parts})
    if depths not in ([1], [2]):
        what = f"images {' and '.join(map(str, depths))} folders down" if depths else "no images"
        raise ValueError(
            f"{folder} holds {what}: place all as {folder}/CLASS/*.png, or all as {folder}/USER/CLASS/*.png."
        )
    users = np.array([above[0] for above in parts]) if depths == [2] else None
    if users is not None and {user.lower() for user in users.tolist()} <= PARTS.keys():
        raise ValueError(
            f"{folder} holds {listed(sorted(set(users.tolist())))}, which are parts of the data and no users: give a "
            "folder of images by class, which scenarios divide, or a .parquet table with a column of the split."
        )
    with working(f"reading {len(found)} images"):
        x = _read_images(found, size)
    return named_examples(folder, x, np.array([above[-1] for above in parts]), users, named=True)


def has_images(folder: Path) -> bool:
    """Whether there are images where `image_folder` looks for them."""
    places = (file for pattern in ("[!.]*/[!.]*", "[!.]*/[!.]*/[!.]*") for file in folder.glob(pattern))
    return any(file.suffix.lower() in IMAGES for file in places)


def _images(folder: Path) -> list[Path]:
    """The images below a folder, sorted; the log names what is left out."""
    found: list[Path] = []
    others: collections.Counter[str] = collections.Counter()
    empty = set()
    for where, folders, files in os.walk(folder, followlinks=True):
        place = Path(where)
        depth = len(place.relative_to(folder).parts)
        folders[:] = [name for name in folders if name[0] != "." and depth < DEEPEST]
        here = [place / name for name in files if name[0] != "."]
        images = [file for file in here if file.suffix.lower() in IMAGES]
        found += images
        others.update(file.suffix.lower() or file.name for file in here if depth and file not in images)
        if depth and not images and not folders:
            empty.add(str(place.relative_to(folder)))
    left = [f"{count} {suffix}" for suffix, count in others.most_common()]
    left += [f"{name}, which has no images" for name in sorted(empty)]
    if left and found:
        LOG.warning(f"{folder}: left out are {listed(left)}")
    return sorted(found)


def pixels(image: Any) -> np.ndarray:
    """uint8 [H, W] of a grey image of Pillow, [H, W, 3] of any other; an array as it is.

    Raises:
      ValueError: more than 8 bits a pixel, of which Pillow would cut all beyond 255 down to it.
    """
    if not isinstance(image, Image.Image):
        return np.asarray(image)
    if image.mode[0] in WIDE:
        raise ValueError("an image has more than 8 bits a pixel: convert it to 8 bits, or use fc.data.from_arrays")
    return np.asarray(image.convert("L" if image.mode in GREY else "RGB"))


def in_colour(images: list[np.ndarray]) -> list[np.ndarray]:
    """Images [..., H, W] and [..., H, W, 3], all of the second form where some are."""
    most = max(image.ndim for image in images)
    return [image if image.ndim == most else np.repeat(image[..., None], 3, -1) for image in images]


def _read_images(files: Sequence[Path], size: Sequence[int] | None) -> np.ndarray:
    """uint8 [N, H, W, channels]."""
    looks = []
    for file in files:
        try:
            with Image.open(file) as image:
                looks.append((image.size, image.mode))
                wide = image.mode[0] in WIDE
        except DAMAGED as error:
            raise ValueError(f"{file} is no image that can be read: remove or replace it.") from error
        if wide:  # Pillow would cut all beyond 255 down to it.
            raise ValueError(
                f"{file} has more than 8 bits a pixel: convert the images to 8 bits, or give arrays in an .npz file."
            )
    width, height = looks[0][0] if size is None else (size[1], size[0])
    other = next((index for index, (own, _) in enumerate(looks) if own != (width, height)), None)
    if size is None and other is not None:
        own = looks[other][0]
        raise ValueError(
            f"the images differ in size: {files[0]} is {height} × {width} and {files[other]} {own[1]} × {own[0]}; give "
            "a size to bring them to"
        )
    grey = all(mode in GREY for _, mode in looks)
    x = np.empty((len(files), height, width, 1 if grey else 3), np.uint8)
    for row, file in enumerate(files):
        try:
            with Image.open(file) as image:
                shown = image.convert("L" if grey else "RGB")
        except DAMAGED as error:
            raise ValueError(f"the image {file} is damaged ({error}): remove or replace it.") from error
        if shown.size != (width, height):
            shown = shown.resize((width, height), Image.Resampling.BILINEAR)
        x[row] = np.asarray(shown).reshape(height, width, -1)
    return x
