"""The one place that knows orbax: the checkpoints of a run."""

from __future__ import annotations

import logging
import pathlib
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as orbax

from fedjax_cluster.types import State

KEPT = 2


class Checkpoints:
    """The checkpoints of one run: the state and the history up to it, saved as one."""

    def __init__(self, directory: pathlib.Path):
        logging.getLogger("absl").setLevel(logging.ERROR)
        self._directory = directory.absolute()
        options = orbax.CheckpointManagerOptions(max_to_keep=KEPT, enable_async_checkpointing=False)
        self._manager = orbax.CheckpointManager(self._directory, options=options)

    def latest(self) -> int | None:
        """The round of the newest complete checkpoint."""
        return self._manager.latest_step()

    def save(self, number: int, state: State, history: dict[str, np.ndarray]) -> None:
        """Saves the state after `number` rounds; a checkpoint of that round that is there already stays."""
        if number in self._manager.all_steps():
            return
        columns = {name: np.asarray(column, np.float64).tolist() for name, column in history.items()}
        leaves = _without_empty(_names(state), state)
        args = orbax.args.Composite(state=orbax.args.StandardSave(leaves), history=orbax.args.JsonSave(columns))
        self._manager.save(number, args=args)
        self._manager.wait_until_finished()

    def restore(self, number: int, like: State) -> tuple[State, dict[str, np.ndarray]]:
        """The state and history after `number` rounds; `like` gives treedef, dtypes and shardings."""
        names = _names(like)
        folder: Any = self._directory / str(number) / "state"
        saved = orbax.StandardCheckpointHandler().metadata(folder).tree
        if all(str(name).isdigit() for name in saved):
            names = _places_in_version_0_1(like)
        target = jax.tree.map(_abstract, _without_empty(names, like))
        wanted = orbax.args.Composite(state=orbax.args.StandardRestore(target), history=orbax.args.JsonRestore())
        restored = self._manager.restore(number, args=wanted)
        leaves, treedef = jax.tree.flatten(like)
        state = [restored["state"].get(name, leaf) for name, leaf in zip(names, leaves, strict=True)]
        history = {name: np.asarray(column, np.float64) for name, column in restored["history"].items()}
        return treedef.unflatten(state), history

    def close(self) -> None:
        self._manager.close()


def _names(state: State) -> list[str]:
    """The names of the leaves, in tree order: `clusters.params.output.kernel` and the like."""
    paths, _ = jax.tree.flatten_with_path(state)
    return [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in paths]


def _places_in_version_0_1(state: State) -> list[str]:
    """What version 0.1 called the leaves: their places, where the server's optimiser stood before its other parts."""
    leaves, treedef = jax.tree.flatten(state)
    order: State = treedef.unflatten(range(len(leaves)))
    models = order.clusters._replace(optimizer=())
    parts = (models, order.clients, order.clusters.optimizer, order.server, order.round)
    places = {leaf: str(place) for place, leaf in enumerate(jax.tree.leaves(parts))}
    return [places[leaf] for leaf in range(len(leaves))]


def _without_empty(names: Iterable[str], state: State) -> dict[str, jax.Array]:
    """The leaves by name, but for empty ones, which orbax refuses."""
    return {name: leaf for name, leaf in zip(names, jax.tree.leaves(state), strict=True) if leaf.size}


def _abstract(leaf: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
