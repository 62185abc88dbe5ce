"""The one place that knows orbax: the checkpoints of a run, each sealed with digests of all that it holds."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import logging
import pathlib
import shutil
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_cluster import parallel
from fedjax_cluster.files import digest, file_digest, read_json, sealed, write_json
from fedjax_cluster.options import reason_of
from fedjax_cluster.quiet import absl_from
from fedjax_cluster.simulation.history import has_figures
from fedjax_cluster.types import State

# What fails in orbax's threads is raised as well, and told in one line.
quietly = functools.partial(absl_from, logging.CRITICAL)
with quietly():
    import orbax.checkpoint as orbax

KEPT = 2
HISTORY = "history/metadata"  # as orbax calls the file of a JSON item
PRESENT = "clients.present"
SEAL = "seal.json"  # digests of the other files
REPLACED = ".replaced-"  # before the number of a checkpoint that another of the same round is to replace
LOG = logging.getLogger(__name__)


class Damaged(ValueError):
    """A checkpoint that does not hold what was saved."""


class Unreadable(OSError):
    """A checkpoint that one process of several cannot read, where the others may."""


class Saved(NamedTuple):
    """What a checkpoint gives back."""

    state: State
    history: dict[str, np.ndarray]
    evaluated: bool = True  # whether the last row has its evaluation, where one was due
    events: Mapping[str, str] | None = None  # digests of the files of events up to here; None where none were kept


class Checkpoints:
    """The checkpoints of one run: the state of its M clients and the history up to it, saved as one."""

    @quietly()
    def __init__(self, directory: pathlib.Path, num_clients: int, *, run: str = "", read_only: bool = False):
        self._directory = directory.absolute()
        self._num_clients, self._run, self._read_only = num_clients, run, read_only
        if not read_only:
            # Before any process lists them.
            with parallel.processes.together():
                if parallel.is_first():
                    self._put_back()
        # Older ones are deleted here, once the newest is sealed.
        options = orbax.CheckpointManagerOptions(enable_async_checkpointing=False, read_only=read_only)
        self._manager = orbax.CheckpointManager(self._directory, options=options)

    @quietly()
    @parallel.processes.losses()
    def save(self, number: int, saved: Saved) -> None:
        """Saves what `number` rounds led to; a checkpoint of that round that is there already stays.

        Unless it was saved before its evaluation: then it gives way. Of several processes each writes what its own
        devices have, and the first seals it.
        """
        saved = saved._replace(state=_bits(saved.state))
        step = self._directory / str(number)
        if there := parallel.agreed(int(number in self._manager.all_steps())):
            there += not (step / SEAL).is_file() or _told(saved).items() <= _checked_seal(step).items()
        if (there := parallel.agreed(there)) == 2:
            return
        if there:
            self._give_way(number)
        columns = {name: np.asarray(column, np.float64).tolist() for name, column in saved.history.items()}
        held = saved.state if parallel.several() else of_clients(jax.device_get(saved.state), self._num_clients)
        leaves = _without_empty(_names(saved.state), jax.tree.leaves(held))
        args = orbax.args.Composite(state=orbax.args.StandardSave(leaves), history=orbax.args.JsonSave(columns))
        try:
            self._manager.save(number, args=args)
            self._manager.wait_until_finished()
            with parallel.processes.together():
                if parallel.is_first():
                    self._seal(number, saved)
        except Exception:
            # A full disk, above all: what is not whole goes, and what it was to replace comes back.
            if not parallel.several():
                with contextlib.suppress(OSError):
                    shutil.rmtree(step, ignore_errors=True)
                    self._put_back()
                    self._manager.reload()
            raise
        self._delete_older()

    def _seal(self, number: int, saved: Saved) -> None:
        step = self._directory / str(number)
        about = {"round": number, **_told(saved), "events": saved.events, "files": _digests(step)}
        write_json(step / SEAL, sealed({**about, "run": self._run}))
        shutil.rmtree(self._directory / f"{REPLACED}{number}", ignore_errors=True)

    def _delete_older(self) -> None:
        """Keeps the newest that are whole."""
        steps = sorted(self._manager.all_steps())
        kept = [number for number in steps if (self._directory / str(number) / SEAL).is_file()][-KEPT:]
        for number in steps:
            if parallel.agreed(int(number not in kept)):
                self._manager.delete(number)

    def _give_way(self, number: int) -> None:
        """Keeps the checkpoint of a round under another name until the one that replaces it is whole."""
        with parallel.processes.together():
            if parallel.is_first():
                shutil.rmtree(self._directory / f"{REPLACED}{number}", ignore_errors=True)
                (self._directory / str(number)).rename(self._directory / f"{REPLACED}{number}")
        self._manager.reload()

    def _put_back(self) -> None:
        """Checkpoints that gave way to others which never became whole."""
        for path in self._directory.glob(f"{REPLACED}*"):
            step = self._directory / path.name.removeprefix(REPLACED)
            if (step / SEAL).is_file():
                shutil.rmtree(path, ignore_errors=True)
            else:
                shutil.rmtree(step, ignore_errors=True)
                path.rename(step)

    @quietly()
    def restore(self, like: State, *, must_be_sealed: bool) -> Saved | None:
        """The newest checkpoint that is whole, on the devices of `like`; None where there is none.

        Damaged ones are moved aside, with a warning; so is the only one, if it was never sealed.

        Raises:
          Damaged: there are checkpoints, and none is whole.
        """
        reasons, unfinished = [], must_be_sealed and not self._read_only
        for number in sorted(self._manager.all_steps(), reverse=True):
            try:
                found = self._read(number, _bits(like), must_be_sealed)
            except (parallel.ProcessLost, Unreadable):
                raise
            except Exception as error:  # orbax and tensorstore raise what they like
                reasons.append(f"{number}: {reason_of(error)}")
                unfinished &= not parallel.agreed(int((self._directory / str(number) / SEAL).is_file()))
                continue
            for text in reasons:
                LOG.warning(f"damaged checkpoint of round {text}; going on from that of round {number}")
                self._set_aside(int(text.partition(":")[0]))
            return found._replace(state=jax.tree.map(_key_again, found.state, like))
        # An interrupted save leaves one without a seal; the ones before it had theirs.
        if len(reasons) > 1 or (reasons and not unfinished):
            raise Damaged("; ".join(reasons))
        for text in reasons:
            LOG.warning(f"checkpoint of round {text}; beginning anew")
            self._set_aside(int(text.partition(":")[0]))
        return None

    @quietly()
    def close(self) -> None:
        self._manager.close()

    def _read(self, number: int, like: State, must_be_sealed: bool) -> Saved:
        # Each step by all processes: one that fails alone is not to wait for the others at another.
        with parallel.processes.together():
            # Before orbax reads anything: what its threads meet in a damaged file, they print.
            seal = self._whole(self._directory / str(number), must_be_sealed)
        with parallel.processes.together():
            names = _names(like) if seal is not None else self._names_of_old(number, like)
            target = self._target(number, like) if seal is not None else _target_of_old(names, like)
        found, (leaves, treedef) = self._restored(number, target, strict=seal is None), jax.tree.flatten(like)
        if seal is None:  # of a version that kept no digests, and the rows that its devices added
            state = [found["state"].get(name, leaf) for name, leaf in zip(names, leaves, strict=True)]
            return Saved(treedef.unflatten(state), _columns(found["history"]))
        state = []
        for name, leaf, kept in zip(names, leaves, _shapes(like, self._num_clients), strict=True):
            state.append(_filled_up(found["state"][name], leaf, kept) if name in target else leaf)
        return Saved(treedef.unflatten(state), _columns(found["history"]), seal["evaluated"], seal["events"])

    def _restored(self, number: int, target: Mapping[str, Any], *, strict: bool) -> Any:
        """What orbax reads of a checkpoint.

        Raises:
          Unreadable: this process of several cannot; the others wait for it within orbax.
        """
        state = orbax.args.StandardRestore(target, strict=strict)
        wanted = orbax.args.Composite(state=state, history=orbax.args.JsonRestore())
        try:
            with parallel.processes.losses():
                return self._manager.restore(number, args=wanted)
        except parallel.ProcessLost:
            raise
        except Exception as error:
            if not parallel.several():
                raise
            raise Unreadable(f"cannot read the checkpoint of round {number} ({reason_of(error)})") from error

    def _whole(self, step: pathlib.Path, must_be_sealed: bool) -> dict[str, Any] | None:
        """The seal of a checkpoint that is what was saved; None of an old one that has none."""
        if not (step / SEAL).is_file():
            if must_be_sealed:
                raise Damaged("it has no seal, because saving was interrupted or the seal was lost")
            return None
        seal = _checked_seal(step)
        if seal.get("run", self._run) != self._run:
            raise Damaged("it is that of another run")
        if parallel.is_first() and seal["files"] != _digests(step):
            raise Damaged("its files are not those that were saved")
        return seal

    def _target(self, number: int, like: State) -> dict[str, Any]:
        """What orbax is to read, by name."""
        names, leaves = _names(like), jax.tree.leaves(like)
        saved = self._metadata(number)
        # Several processes save the rows that fill up their devices too.
        rows = saved[PRESENT].shape[0]
        there = dict(zip(names, _shapes(like, rows), strict=True))
        for name, leaf in zip(names, leaves, strict=True):
            own = saved.get(name, jax.ShapeDtypeStruct(there[name], leaf.dtype))
            if (tuple(own.shape), own.dtype) != (there[name], leaf.dtype) or rows < self._num_clients:
                raise Damaged(f"{name} is {own.dtype}{own.shape}, where the method has {leaf.dtype}{there[name]}")
        if parallel.several():
            return {name: _abstract(leaf) for name, leaf in zip(names, leaves, strict=True) if name in saved}
        return {name: np.empty(saved[name].shape, saved[name].dtype) for name in names if name in saved}

    def _names_of_old(self, number: int, like: State) -> list[str]:
        """The names of a state's leaves in a checkpoint of a version without seals."""
        return _places_in_version_0_1(like) if all(map(str.isdigit, map(str, self._metadata(number)))) else _names(like)

    def _metadata(self, number: int) -> Mapping[str, Any]:
        """Shapes and dtypes of what was saved, by name."""
        folder: Any = self._directory / str(number) / "state"
        return orbax.StandardCheckpointHandler().metadata(folder).tree

    def _set_aside(self, number: int) -> None:
        """Keeps a damaged checkpoint beside the others, where it is none of them."""
        if self._read_only:
            return
        with parallel.processes.together():
            if parallel.is_first():
                aside = self._directory.parent / "damaged"
                aside.mkdir(exist_ok=True)
                place = next(path for i in range(1000) if not (path := aside / f"{number}-{i}").exists())
                (self._directory / str(number)).rename(place)
        self._manager.reload()


def _target_of_old(names: list[str], like: State) -> dict[str, Any]:
    return jax.tree.map(_abstract, _without_empty(names, jax.tree.leaves(like)))


def of_clients(state: State, rows: int) -> State:
    """A state on the host without the rows that fill up the devices: any number of devices can take it up."""
    leaves, treedef = jax.tree.flatten(state)
    shapes = _shapes(state, rows)
    return treedef.unflatten(leaf[_within(shape)] for leaf, shape in zip(leaves, shapes, strict=True))


def with_clients(state: State, like: State) -> State:
    """A state on the host with the rows beyond its own that `like`, of more clients, has."""
    leaves, treedef = jax.tree.flatten(state)
    shapes = _shapes(state, len(like.clients.present))

    def filled(leaf: Any, shape: tuple[int, ...], other: Any) -> np.ndarray:
        whole = np.array(other) if other.shape == shape else np.zeros(shape, leaf.dtype)
        whole[_within(leaf.shape)] = leaf
        return whole

    return treedef.unflatten(map(filled, leaves, shapes, jax.tree.leaves(like)))


def newest_history(directory: pathlib.Path) -> dict[str, np.ndarray] | None:
    """The history of the newest checkpoint whose history is whole, without its state; None where there is none."""
    steps = [path for path in directory.glob("*") if path.name.isdigit()]
    for path in sorted(steps, key=lambda step: int(step.name), reverse=True):
        with contextlib.suppress(OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError):
            content = (path / HISTORY).read_bytes()
            if not (path / SEAL).exists() or _checked_seal(path)["files"][HISTORY] == digest(content):
                return _columns(json.loads(content))
    return None


def _shapes(state: State, rows: int) -> list[tuple[int, ...]]:
    """The shapes of a state's leaves with so many rows of clients, and columns of what `BETWEEN_CLIENTS` names."""
    padded = len(state.clients.present)

    def between(leaf: Any) -> _Shape:
        return _Shape((*leaf.shape[:-2], rows, rows) if leaf.shape[-2:] == (padded, padded) else leaf.shape)

    def of_server(node: Any) -> Any:
        if not _has_pairs(node):
            return _Shape(node.shape)
        pairs = {name: jax.tree.map(between, getattr(node, name)) for name in node.BETWEEN_CLIENTS}
        return jax.tree.map(lambda leaf: _Shape(leaf.shape), node)._replace(**pairs)

    shapes = jax.tree.map(lambda leaf: _Shape(leaf.shape), state)._replace(
        clients=jax.tree.map(lambda leaf: _Shape((rows, *leaf.shape[1:])), state.clients),
        server=jax.tree.map(of_server, state.server, is_leaf=_has_pairs),
    )
    return [shape.sides for shape in jax.tree.leaves(shapes)]


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _bits(state: State) -> State:
    """The state with numbers in place of JAX's typed keys, which orbax would not read back."""
    return jax.tree.map(lambda leaf: jax.random.key_data(leaf) if _is_key(leaf) else leaf, state)


def _key_again(found: Any, like: Any) -> Any:
    return jax.random.wrap_key_data(found, impl=jax.random.key_impl(like)) if _is_key(like) else found


def _has_pairs(node: Any) -> bool:
    return hasattr(type(node), "BETWEEN_CLIENTS")


@dataclasses.dataclass
class _Shape:
    """A leaf, as a tuple is none."""

    sides: tuple[int, ...]


def _within(shape: tuple[int, ...]) -> tuple[Any, ...]:
    return (*map(slice, shape), ...)


def _filled_up(saved: Any, leaf: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """What was saved within a shape, and a leaf's own rows beyond it, where the leaf lies."""
    if isinstance(saved, jax.Array):
        return jax.jit(_chosen, static_argnums=2, out_shardings=leaf.sharding)(saved, leaf, shape)
    whole = saved
    # Other devices may have filled up what these need not.
    if shape != leaf.shape or shape != saved.shape:
        whole = np.array(leaf)
        whole[_within(shape)] = saved[_within(shape)]
    return jax.device_put(whole, leaf.sharding)


def _chosen(saved: jax.Array, leaf: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    inside = jnp.ones(leaf.shape, bool)
    for axis, length in enumerate(shape):
        inside &= jax.lax.broadcasted_iota(jnp.int32, leaf.shape, axis) < length
    return jnp.where(inside, saved, leaf)


def _told(saved: Saved) -> dict[str, bool]:
    """What tells apart the checkpoints of one round: whether an evaluation is due, and whether there is one."""
    return {"evaluated": saved.evaluated, "figures": has_figures(saved.history)}


def _checked_seal(step: pathlib.Path) -> dict[str, Any]:
    seal = read_json(step / SEAL)
    if seal["round"] != int(step.name):
        raise Damaged(f"it is that of round {seal['round']}")
    return seal


def _digests(step: pathlib.Path) -> dict[str, str]:
    """Of a checkpoint's files, by name."""
    found = sorted(path for path in step.rglob("*") if path.is_file() and path.name != SEAL)
    return {path.relative_to(step).as_posix(): file_digest(path) for path in found}


def _columns(history: dict[str, list[float]]) -> dict[str, np.ndarray]:
    return {name: np.asarray(column, np.float64) for name, column in history.items()}


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


def _without_empty(names: Iterable[str], leaves: Iterable[Any]) -> dict[str, Any]:
    """The leaves by name, but for empty ones, which orbax refuses."""
    return {name: leaf for name, leaf in zip(names, leaves, strict=True) if leaf.size}


def _abstract(leaf: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
