"""Clients that are hostile or unlucky, as a value given to a run: who they are, and what becomes of what they send.

`simulate(..., fault=faults.sign_flip(share=0.2))` draws the faulty clients by its seed, the same for every method.
Their training rows, or what their local training gives, are changed before the method sees them: no method knows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedjax_cluster.data.stored import stored
from fedjax_cluster.options import COUNT, FINITE, POSITIVE, SHARE, Options, at_least, option, shown
from fedjax_cluster.types import ClientData, Federation, LocalResult

STREAM = 0xFA17  # of the seed, so that who is faulty depends on nothing else that is drawn


@jax.tree_util.register_pytree_node_class
class MarkedData(ClientData):
    """Clients of whom some are marked as faulty (see `faults`); otherwise as others, and unpacked as they are."""

    faulty: Any = None  # bool[M]

    @classmethod
    def of(cls, data: ClientData, faulty: Any) -> MarkedData:
        found = cls(*data)
        found.faulty = faulty
        return found

    def _replace(self, **changes: Any) -> MarkedData:
        return MarkedData.of(ClientData(*self)._replace(**changes), self.faulty)

    def tree_flatten(self) -> tuple[tuple[Any, ...], None]:
        return (*self, self.faulty), None

    @classmethod
    def tree_unflatten(cls, _: None, leaves: Sequence[Any]) -> MarkedData:
        return cls.of(ClientData(*leaves[:3]), leaves[3])


class Fault(Options):
    """What is the matter with some clients; a subclass changes their rows, their steps or what they send."""

    share: float = option("of the clients that are faulty, at least one", default=0.2, bound=SHARE, kw_only=False)

    def to_json(self) -> dict[str, Any]:
        return {"fault": type(self).__name__, **super().to_json()}

    def drawn(self, federation: Federation, seed: int) -> np.ndarray:
        """bool[M]: the faulty clients, drawn among those with examples."""
        return _some(np.asarray(federation.train.num_examples) > 0, self.share, seed)

    def spoilt_data(self, federation: Federation, faulty: np.ndarray, seed: int) -> Federation:
        """The federation with the training rows that the faulty clients, bool[M], have in truth."""
        return federation

    def num_steps(self, usual: Array | int, faulty: Array) -> Array | int:
        """The local steps i32[] of one client."""
        return usual

    def sent(self, rng_key: Array, result: LocalResult, faulty: Array) -> LocalResult:
        """What one client sends, of what its training gave."""
        return result


class sign_flip(Fault):
    """Hostile clients that send their change the other way, and larger: −scale · Δ.

    >>> sign_flip(share=0.2, scale=10)
    sign_flip(share=0.2, scale=10.0)
    """

    scale: float = option("how many times as large", default=10.0, bound=POSITIVE)

    def sent(self, rng_key: Array, result: LocalResult, faulty: Array) -> LocalResult:
        return _times(result, jnp.where(faulty, -self.scale, 1.0))


class scaled(Fault):
    """Clients that send their change many times too large, as training that explodes does: factor · Δ.

    >>> scaled(factor=100).factor
    100.0
    """

    factor: float = option("how many times as large; negative turns it round", default=100.0, bound=FINITE)

    def sent(self, rng_key: Array, result: LocalResult, faulty: Array) -> LocalResult:
        return _times(result, jnp.where(faulty, self.factor, 1.0))


class nan_updates(Fault):
    """Clients that send NaN, which every method leaves out, and counts as rejected."""

    def sent(self, rng_key: Array, result: LocalResult, faulty: Array) -> LocalResult:
        return _times(result, jnp.where(faulty, jnp.nan, 1.0))


class drop_out(Fault):
    """Clients of whom in each round some, drawn anew, send nothing; they are counted as rejected.

    NOTE: who drops out has been sent the model and has trained, and the costs of that are counted.

    >>> drop_out(0.3).rate, drop_out(0.3).share
    (0.3, 1.0)
    """

    rate: float = option("chance of each that it sends nothing in a round", default=0.2, bound=SHARE, kw_only=False)
    share: float = option("of the clients that may drop out", default=1.0, bound=SHARE)

    def sent(self, rng_key: Array, result: LocalResult, faulty: Array) -> LocalResult:
        lost = faulty & jax.random.bernoulli(jax.random.fold_in(rng_key, STREAM), self.rate)
        return _times(result, jnp.where(lost, jnp.nan, 1.0))


class stragglers(Fault):
    """Clients that take no more than `steps` local steps a round, and send what they have.

    >>> int(stragglers(steps=2).num_steps(10, jnp.asarray(True))), int(stragglers().num_steps(10, jnp.asarray(False)))
    (2, 10)
    """

    steps: int = option("the most steps of theirs in a round", default=1, bound=COUNT)

    def num_steps(self, usual: Array | int, faulty: Array) -> Array | int:
        return jnp.where(faulty, jnp.minimum(usual, self.steps), usual)


class label_flip(Fault):
    """Hostile or careless clients whose training labels are reversed: y becomes L − 1 − y, of L classes."""

    def spoilt_data(self, federation: Federation, faulty: np.ndarray, seed: int) -> Federation:
        classes, train = federation.info.num_classes, federation.train
        if classes < 2 or not np.issubdtype(np.asarray(train.y).dtype, np.integer):
            raise ValueError(
                f"fault is label_flip, but the examples of {federation.info.name} have no class labels; take another "
                "fault, such as sign_flip"
            )
        y = np.array(train.y)
        y[faulty] = classes - 1 - y[faulty]
        return federation._replace(train=train._replace(y=y))


class colluders(Fault):
    """Hostile clients that pass for another group's: they hold copies of its rows, and send scale · Δ.

    The copies decide their gradients, losses and bases, so that clusterings take them for members; with a negative
    scale they then harm the cluster from within. They are drawn among the clients of the other groups; `group` in the
    federation stays what they are in truth.
    """

    group: int = option("the group that is copied", default=0, bound=at_least(0))
    scale: float = option("factor of what they send", default=1.0, bound=FINITE)

    def drawn(self, federation: Federation, seed: int) -> np.ndarray:
        group = None if federation.group is None else np.asarray(federation.group)
        there = np.asarray(federation.train.num_examples) > 0
        if group is None or not (there & (group == self.group)).any() or not (there & (group != self.group)).any():
            known = "it has no groups" if group is None else f"its clients are of groups {sorted(set(group.tolist()))}"
            raise ValueError(
                f"fault is colluders that copy group {self.group} of {federation.info.name}, but {known}; give a "
                "group beside which there is another"
            )
        others = there & (group != self.group)
        return _some(others, min(1.0, self.share * there.sum() / others.sum()), seed)

    def spoilt_data(self, federation: Federation, faulty: np.ndarray, seed: int) -> Federation:
        group, there = np.asarray(federation.group), np.asarray(federation.train.num_examples) > 0
        victims = np.random.default_rng([seed, STREAM]).permutation(np.flatnonzero(there & (group == self.group)))
        source = np.arange(len(group))
        source[faulty] = np.resize(victims, int(faulty.sum()))
        return federation._replace(train=jax.tree.map(lambda leaf: np.asarray(leaf)[source], federation.train))

    def sent(self, rng_key: Array, result: LocalResult, faulty: Array) -> LocalResult:
        return _times(result, jnp.where(faulty, self.scale, 1.0))


FAULTS: dict[str, type[Fault]] = {
    fault.__name__: fault for fault in (sign_flip, label_flip, drop_out, stragglers, scaled, nan_updates, colluders)
}


def named(fault: str, **options: Any) -> Fault:
    """A fault by its name.

    Raises:
      ValueError: no such fault, or an option that it does not have.

    >>> named("sign-flip", share=0.1)
    sign_flip(share=0.1, scale=10.0)
    """
    spelled = fault.replace("-", "_").lower() if isinstance(fault, str) else fault
    if not isinstance(spelled, str) or spelled not in FAULTS:
        raise ValueError(f"unknown fault {shown(fault)}; known: {', '.join(FAULTS).replace('_', '-')}")
    known = [field.name for field in dataclasses.fields(FAULTS[spelled])]  # pyright: ignore[reportArgumentType]
    for name in options:
        if name not in known:
            raise ValueError(f"fault {spelled.replace('_', '-')} has no {name}; it has {', '.join(known)}")
    return FAULTS[spelled](**options)


def afflicted(federation: Federation, fault: Fault, seed: int) -> Federation:
    """The federation whose faulty clients have what they have in truth, and are marked in its training part."""
    faulty = fault.drawn(federation, seed)
    changed = fault.spoilt_data(federation, faulty, seed)
    return changed._replace(train=MarkedData.of(changed.train, faulty))


def afflict(algorithm: Any, federation: Federation, fault: Fault | None, seed: int) -> tuple[Any, Federation]:
    """A method and a federation with a fault, `with_fault` and `afflicted`; as they are without one."""
    if fault is None:
        return algorithm, federation
    if stored(federation.train):
        raise ValueError(f"fault is {fault}, but the clients' rows are on disk; give a federation that is in memory")
    return with_fault(algorithm, fault), afflicted(federation, fault, seed)


def with_fault(algorithm: Any, fault: Fault) -> Any:
    """The method whose clients' local update is that of the faulty where they are marked.

    Raises:
      ValueError: a local update of one's own.
    """
    update = getattr(algorithm, "local", None)
    known = {field.name for field in dataclasses.fields(update)} if dataclasses.is_dataclass(update) else set()
    if "fault" not in known or not dataclasses.is_dataclass(algorithm):
        raise ValueError(f"fault is {fault}, but the local update is {shown(update)}; use local.sgd")
    faulty = dataclasses.replace(update, fault=fault)  # pyright: ignore[reportArgumentType]
    return dataclasses.replace(algorithm, local=faulty)  # pyright: ignore[reportArgumentType]


def faulty_clients(federation: Federation) -> np.ndarray:
    """bool[M]: the clients that are marked as faulty.

    >>> from fedjax_cluster import data
    >>> federation = data.scenarios.rotated(data.digits(), clients=8)
    >>> int(faulty_clients(afflicted(federation, sign_flip(share=0.25), seed=0)).sum())
    2
    """
    mark = marked(federation.train)
    return np.zeros(len(federation.train.num_examples), bool) if mark is None else np.asarray(mark)


def marked(data: ClientData) -> Any | None:
    """bool[...] of the clients that are faulty, None where nobody is marked."""
    return data.faulty if isinstance(data, MarkedData) else None


def _some(among: np.ndarray, share: float, seed: int) -> np.ndarray:
    """bool[M]: a share of those of `among` bool[M], rounded, at least one."""
    count = min(int(among.sum()), max(1, int(share * among.sum() + 0.5)))
    score = np.where(among, np.random.default_rng([seed, STREAM]).random(len(among)), 2.0)
    found = np.zeros(len(among), bool)
    found[np.argsort(score, kind="stable")[:count]] = True
    return found & among


def _times(result: LocalResult, factor: Array) -> LocalResult:
    return result._replace(delta=jax.tree.map(lambda leaf: leaf * factor.astype(leaf.dtype), result.delta))
