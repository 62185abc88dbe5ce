"""Decoded data sets on disk, memory-mapped, so that a second start costs a tenth of a second.

An entry is two files: the images as `.npy`, which can be mapped, and an `.npz` with labels and the images' checksum,
each written to a temporary file and renamed, the `.npz` last; a pair that does not agree counts as absent. Failures are
silent: without a cache everything works, but slower.
"""

from __future__ import annotations

import contextlib
import os
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from fedjax_cluster.files import new_file

VARIABLE = "FEDJAX_CLUSTER_CACHE"
COMPILED = "compiled"  # the folder of compiled programs in the cache
_only_read: list[bool] = []


class Kept(NamedTuple):
    """What the cache holds of a kind."""

    kind: str
    files: int
    bytes: int


def directory() -> Path:
    """Where entries are kept: `FEDJAX_CLUSTER_CACHE`, else `XDG_CACHE_HOME` or `~/.cache`, read at call time.

    Raises:
      ValueError: `FEDJAX_CLUSTER_CACHE` begins with the home of somebody unknown.
    """
    chosen = os.environ.get(VARIABLE)
    try:
        if chosen:
            return Path(chosen).expanduser()
        return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "fedjax_cluster"
    except RuntimeError:  # nobody's home, as of a container's user without a name
        if chosen:
            raise ValueError(f"{VARIABLE} is {chosen}, but whose home that is is not known; give a path") from None
        return Path(os.devnull) / "fedjax_cluster"  # where nothing can be kept


def read(key: str) -> tuple[np.ndarray, np.ndarray] | None:
    """Memory-mapped read-only images and labels of `key`, a file name without suffix; None if absent or damaged."""
    images_file, labels_file = _files(key)
    try:
        images = np.load(images_file, mmap_mode="r", allow_pickle=False)
        with np.load(labels_file, allow_pickle=False) as kept:
            labels, checksum = kept["labels"], int(kept["checksum"])
        intact = len(images) == len(labels) and _checksum(images) == checksum
    except Exception:
        # A damaged file can raise nearly anything from zip and npy parsing; the remedy is always to decode again.
        return None
    labels.flags.writeable = False
    return (images, labels) if intact else None


def holds(key: str) -> bool:
    """Whether there is an entry of `key`, which `read` may yet find damaged."""
    return all(file.is_file() for file in _files(key))


def write(key: str, images: np.ndarray, labels: np.ndarray) -> bool:
    """Keeps images [N, ...] and labels [N] under `key`, completely or not at all; False where that fails."""
    if _only_read:
        return False
    images_file, labels_file = _files(key)
    checksum = _checksum(images)
    try:
        images_file.parent.mkdir(parents=True, exist_ok=True)
        _write_whole(images_file, lambda file: np.save(file, images))
        _write_whole(labels_file, lambda file: np.savez(file, labels=labels, checksum=checksum))
    except OSError:
        return False
    return True


@contextlib.contextmanager
def reading_only() -> Iterator[None]:
    """While it is entered nothing is written to the cache."""
    _only_read.append(True)
    try:
        yield
    finally:
        _only_read.pop()


def contents() -> list[Kept]:
    """What the cache holds, by kind: decoded data sets and compiled programs."""
    found = []
    for kind, paths in _kinds().items():
        sizes = []
        for path in paths:
            with contextlib.suppress(OSError):  # another process may have removed it
                sizes.append(path.stat().st_size)
        found.append(Kept(kind, len(sizes), sum(sizes)))
    return found


def empty() -> list[Kept]:
    """Removes all that the cache holds, and returns what that was; other files of the folder stay.

    Raises:
      OSError: a file that cannot be removed.
    """
    before = contents()
    for paths in _kinds().values():
        for path in paths:
            path.unlink(missing_ok=True)
    return before


def _kinds() -> dict[str, list[Path]]:
    folder = directory()
    pairs = [path for path in folder.glob("*.npz") if path.with_suffix(".npy").is_file()]  # others' files are theirs
    data = [*pairs, *(path.with_suffix(".npy") for path in pairs), *folder.glob("*.np[yz].*.part")]
    programs = [path for path in (folder / COMPILED).rglob("*") if path.is_file()]
    return {"data sets": data, "compiled programs": programs}


def _checksum(images: np.ndarray) -> int:
    return zlib.crc32(np.ascontiguousarray(images).data)


def _files(key: str) -> tuple[Path, Path]:
    return directory() / f"{key}.npy", directory() / f"{key}.npz"


def _write_whole(path: Path, save: Callable[[IO[bytes]], Any]) -> None:
    handle, temporary = new_file(path.parent, f"{path.name}.", ".part")
    try:
        with os.fdopen(handle, "wb") as file:
            save(file)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
