"""Files that are either whole or not there, and JSON."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import tempfile
from collections.abc import Iterator
from typing import Any

import numpy as np


@contextlib.contextmanager
def atomic_file(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """Gives a path beside `path` to write to, and renames it to `path` once all went well."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=path.suffix)
    os.close(descriptor)
    try:
        yield pathlib.Path(name)
        os.chmod(name, 0o644)
        os.replace(name, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)


def write_json(path: pathlib.Path, content: Any) -> None:
    """Writes JSON; numbers that are not finite become null, as JSON has none."""
    with atomic_file(path) as beside:
        beside.write_text(json.dumps(plain(content), indent=2, allow_nan=False) + "\n")


def plain(value: Any) -> Any:
    """What JSON would give back: lists for tuples and arrays, numbers of Python's types, None for NaN."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, np.ndarray):
        return plain(value.tolist())
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not np.isfinite(value):
        return None
    return value


def check_writable(directory: pathlib.Path) -> None:
    """Raises a ValueError where no file can be made in `directory`, before anything is computed for it.

    Leaves nothing behind: a directory that was not there is not there afterwards.
    """
    missing: list[pathlib.Path] = []
    try:
        missing = [path for path in (directory, *directory.parents) if not path.exists()]
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise ValueError(
            f"cannot write to the run directory {directory} ({error.strerror}); choose another one"
        ) from error
    finally:
        for path in missing:
            with contextlib.suppress(OSError):
                path.rmdir()
