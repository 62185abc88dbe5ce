"""Data sets that LEAF's scripts leave: examples by user, as JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_cluster.data.image_folders import has_images
from fedjax_cluster.data.own_examples import named_examples
from fedjax_cluster.data.waiting import working
from fedjax_cluster.options import as_path, with_checks
from fedjax_cluster.types import Examples

# NOTE: LEAF's own alphabet has 80 characters; this is all of ASCII's, and what is none of them counts as a space.
ALPHABET = "\n" + "".join(map(chr, range(32, 127)))
FEMNIST_PIXELS, FEMNIST_CLASSES = 28 * 28, 62


@with_checks()
def leaf(folder: str | os.PathLike) -> Examples:
    """A data set of LEAF (Caldas et al. 2018) by user: FEMNIST by writer, Shakespeare by role, Synthetic by device.

    Args:
      folder: holds LEAF's `.json` files, or folders `train` and `test` of them, whose examples are joined: a scenario
        splits them anew. Texts of users who are in both stay divided as they are.

    Returns:
      Examples with `user_ids`, for the scenario `users`. Rows of 784 pixels in [0, 1] become uint8 [N, 28, 28, 1] of 62
      classes; text x of T characters and the character y that follows become tokens x i32 [N, T] and y i32 [N, T], each
      the next one, for `nn.lstm`; other numbers stay f32 [N, features].

    Raises:
      ValueError: no such folder, no LEAF files, or examples that cannot be read as one of these kinds.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     users = {"romeo": {"x": ["But, so"], "y": ["f"]}, "juliet": {"x": ["O Romeo"], "y": [","]}}
    ...     _ = Path(f"{folder}/all.json").write_text(json.dumps({"users": list(users), "user_data": users}))
    ...     found = leaf(folder)
    >>> found.x.shape, "".join(ALPHABET[token] for token in found.y[0]), found.user_ids.tolist()
    ((2, 7), 'ut, sof', ['romeo', 'juliet'])
    """
    place = as_path("folder", folder)
    if not place.is_dir():
        raise ValueError(f"{place} is no folder: give one that holds LEAF's .json files, or train and test")
    files = leaf_files(place)
    if not files:
        raise ValueError(f"{place} holds no .json files of LEAF, nor do its train and test: run LEAF's preprocess.sh")
    x: list[Any] = []
    y: list[Any] = []
    users: list[str] = []
    parts: list[str] = []
    with working(f"reading {len(files)} files of LEAF"):
        for part, user, data in _users(files):
            x += data["x"]
            y += data["y"]
            users += [user] * len(data["x"])
            parts += [part] * len(data["x"])
        try:
            return _arranged(place, x, y, np.array(users), np.array(parts))
        except (TypeError, ValueError, OverflowError) as error:
            raise ValueError(str(error) if str(place) in str(error) else f"{place}: {error}") from error


def is_leaf(folder: Path) -> bool:
    """Whether LEAF's files are in a folder, or other `.json` files beside folders of images."""
    files = leaf_files(folder)
    return bool(files) and (files[0].parent != folder or not has_images(folder))


def leaf_files(folder: Path) -> list[Path]:
    """LEAF's files in a folder, or in its train and test."""
    places = [folder / part for part in ("train", "test") if (folder / part).is_dir()] or [folder]
    return sorted(file for place in places for file in place.glob("*.json") if file.is_file())


def _users(files: list[Path]) -> Iterator[tuple[str, str, dict[str, list[Any]]]]:
    for file in files:
        try:
            data = json.loads(file.read_text(encoding="utf-8-sig"))["user_data"]
            pairs = [(user, {"x": own["x"], "y": own["y"]}) for user, own in data.items()]
            fits = all(isinstance(own["x"], list) and len(own["x"]) == len(own["y"]) for _, own in pairs)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(
                f"{file} is no file of LEAF, with user_data of x and y for each user ({type(error).__name__}: {error})"
            ) from error
        if not fits:
            raise ValueError(f"{file} has users with other than one y for each x: make it anew")
        for user, own in pairs:
            yield file.parent.name, user, own


def _arranged(place: Path, x: list[Any], y: list[Any], users: np.ndarray, parts: np.ndarray) -> Examples:
    if not x:
        raise ValueError("the files hold no examples")
    if all(isinstance(text, str) for text in x):
        if len({len(text) for text in x}) > 1 or not all(isinstance(text, str) and len(text) == 1 for text in y):
            raise ValueError(
                "the texts differ in length, or are not followed by one character each; of LEAF's texts, only "
                "Shakespeare is read"
            )
        tokens = _tokens([text + following for text, following in zip(x, y, strict=True)])
        options = {"task": "language", "num_classes": len(ALPHABET)}
        # NOTE: LEAF predicts and scores the character after the text alone; the model here learns from each of them.
        # Texts overlap: a window that is drawn for the tests would be in those before and after it, which train.
        trained, tested = (set(users[parts == part].tolist()) for part in ("train", "test"))
        told = parts if trained & tested else None
        return named_examples(place, tokens[:, :-1], tokens[:, 1:], users, split=told, **options)
    try:
        pixels = np.asarray(x, np.float32)
    except (TypeError, ValueError) as error:
        raise ValueError(
            "x is neither texts of one length nor rows of as many numbers; of LEAF's texts, only Shakespeare is read"
        ) from error
    if pixels.shape[1:] == (FEMNIST_PIXELS,) and pixels.min() >= 0 and pixels.max() <= 1:
        images = np.rint(pixels * 255).astype(np.uint8).reshape(-1, 28, 28, 1)
        return named_examples(place, images, np.asarray(y), users, num_classes=FEMNIST_CLASSES)
    return named_examples(place, pixels, np.asarray(y), users)


def _tokens(texts: list[str]) -> np.ndarray:
    """i32[N, T]: the places of characters in the alphabet."""
    table = np.full(128, ALPHABET.index(" "), np.int32)
    table[[ord(character) for character in ALPHABET]] = np.arange(len(ALPHABET))
    codes = np.array([list(map(ord, text)) for text in texts])
    return table[np.where(codes < 128, codes, ord(" "))]
