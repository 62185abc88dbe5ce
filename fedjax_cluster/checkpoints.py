"""The one place that knows orbax; and files that are either whole or not there."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pathlib
import tempfile
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

KEPT = 2


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
    missing = [path for path in (directory, *directory.parents) if not path.exists()]
    try:
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


class Checkpoints:
    """The checkpoints of one run: the state and the history up to it, saved as one."""

    def __init__(self, directory: pathlib.Path):
        # Imported here: orbax takes a second, which a run without a directory need not wait for.
        import orbax.checkpoint as orbax

        logging.getLogger("absl").setLevel(logging.ERROR)
        self._orbax = orbax
        options = orbax.CheckpointManagerOptions(max_to_keep=KEPT, enable_async_checkpointing=False)
        self._manager = orbax.CheckpointManager(directory.absolute(), options=options)

    def latest(self) -> int | None:
        """The round of the newest complete checkpoint."""
        return self._manager.latest_step()

    def save(self, number: int, state: Any, history: dict[str, np.ndarray]) -> None:
        """Saves the state after `number` rounds; a checkpoint of that round that is there already stays."""
        if number in self._manager.all_steps():
            return
        args = self._orbax.args
        columns = {name: np.asarray(column, np.float64).tolist() for name, column in history.items()}
        self._manager.save(
            number, args=args.Composite(state=args.StandardSave(_filled(state)), history=args.JsonSave(columns))
        )
        self._manager.wait_until_finished()

    def restore(self, number: int, like: Any) -> tuple[Any, dict[str, np.ndarray]]:
        """The state and history after `number` rounds; `like` gives treedef, dtypes and shardings."""
        args = self._orbax.args
        target = args.StandardRestore(jax.tree.map(_abstract, _filled(like)))
        restored = self._manager.restore(number, args=args.Composite(state=target, history=args.JsonRestore()))
        leaves, treedef = jax.tree.flatten(like)
        state = [restored["state"].get(str(place), leaf) for place, leaf in enumerate(leaves)]
        history = {name: np.asarray(column, np.float64) for name, column in restored["history"].items()}
        return treedef.unflatten(state), history

    def close(self) -> None:
        self._manager.close()


def _filled(state: Any) -> dict[str, jax.Array]:
    """The leaves by their place, but for empty ones, which orbax refuses."""
    return {str(place): leaf for place, leaf in enumerate(jax.tree.leaves(state)) if leaf.size}


def _abstract(leaf: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
