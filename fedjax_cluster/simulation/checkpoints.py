"""The one place that knows orbax: the checkpoints of a run."""

from __future__ import annotations

import logging
import pathlib
from typing import Any

import jax
import numpy as np

KEPT = 2


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
