"""Clients that are hostile or unlucky, as a value given to a run: who they are, and what becomes of what they send.

`simulate(..., fault=faults.sign_flip(share=0.2))` draws the faulty clients by its seed, the same for every method.
Their training rows, or what their local training gives, are changed before the method sees them: no method knows.
Attacks on clusterings have other rows too: those that a client shows where clients are grouped by what they show, and
not by the changes that are averaged: `marked_clients.shown_rows`.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedjax_cluster.data.stored import made_anew
from fedjax_cluster.files import digest
from fedjax_cluster.lifting import is_zero
from fedjax_cluster.marked_clients import MarkedData, marked
from fedjax_cluster.options import COUNT, FINITE, POSITIVE, SHARE, UNIT, Options, at_least, option, shown
from fedjax_cluster.spoilt_rows import STREAM, copies, has_classes, with_reversed
from fedjax_cluster.types import Churn, ClientData, Federation, LocalResult

UNLIMITED = 1e9  # steps


class Fault(Options):
    """What is the matter with some clients; a subclass changes their rows, their steps, what they send or show."""

    shows: ClassVar[bool] = False  # whether clusterings are shown something that is not what is averaged
    late: ClassVar[bool] = False  # whether the faulty clients join during the run

    share: float = option("of the clients that are faulty, at least one", default=0.2, bound=SHARE, kw_only=False)

    def to_json(self) -> dict[str, Any]:
        return {"fault": type(self).__name__, **super().to_json()}

    def drawn(self, federation: Federation, seed: int) -> np.ndarray:
        """bool[M]: the faulty clients, drawn among those with examples."""
        return _some(np.asarray(federation.train.num_examples) > 0, self.share, seed)

    def spoilt_data(self, federation: Federation, faulty: np.ndarray, seed: int) -> Federation:
        """The federation with the training rows that the faulty clients, bool[M], have in truth."""
        return federation

    def shown_data(self, federation: Federation, faulty: np.ndarray, seed: int) -> ClientData | None:
        """The training rows [M, ...] that all clients show to clusterings; None for those that they have."""
        return None

    def arrivals(self, faulty: np.ndarray) -> tuple[Churn, ...]:
        """Who joins when, of the faulty clients bool[M]; of a fault that is `late`."""
        return ()

    def num_steps(self, usual: Array | int, faulty: Array) -> Array | int:
        """The local steps i32[] of one client."""
        return usual

    def sent(self, rng_key: Array, result: LocalResult, faulty: Array) -> LocalResult:
        """What one client sends, of what its training gave."""
        return result

    def silent(self, rng_key: Array, faulty: Array) -> Array | None:
        """Whether one client sends nothing in a round, bool[]; None where all send something."""
        return None

    @property
    def heard(self) -> Fault:
        """What of it is left in the rounds in which a client is not silent."""
        return self

    @property
    def in_training(self) -> Fault:
        """What of it a client's training knows: not how many are faulty, which compiled programs do not depend on."""
        return dataclasses.replace(self, share=1.0)  # pyright: ignore[reportArgumentType]


class spoilt(Fault):
    """What becomes of a faulty client's training under any fault of this module: one program serves all of them.

    >>> sign_flip(share=0.2).in_training == disguise(share=0.4).in_training
    True
    """

    share: float = option("of the clients that are marked", default=1.0, bound=SHARE)
    times: float = option("factor of what is sent", default=1.0, bound=FINITE)
    lost: float = option("chance that NaN is sent", default=0.0, bound=UNIT)
    most_steps: float = option("the most local steps", default=UNLIMITED, bound=POSITIVE)

    def num_steps(self, usual: Array | int, faulty: Array) -> Array | int:
        if isinstance(self.most_steps, float) and self.most_steps == UNLIMITED:
            return usual
        return jnp.where(faulty, jnp.minimum(usual, jnp.asarray(self.most_steps).astype(jnp.int32)), usual)

    def sent(self, rng_key: Array, result: LocalResult, faulty: Array) -> LocalResult:
        factor = jnp.where(faulty, self.times, 1.0)
        if (lost := self.silent(rng_key, faulty)) is not None:
            factor = jnp.where(lost, jnp.nan, factor)
        return result._replace(delta=jax.tree.map(lambda leaf: leaf * factor.astype(leaf.dtype), result.delta))

    def silent(self, rng_key: Array, faulty: Array) -> Array | None:
        key = jax.random.fold_in(rng_key, STREAM)
        return None if is_zero(self.lost) else faulty & jax.random.bernoulli(key, self.lost)

    @property
    def heard(self) -> Fault:
        return dataclasses.replace(self, lost=0.0)

    @property
    def in_training(self) -> Fault:
        return self


class _Spoiling(Fault):
    """A fault that is a case of `spoilt`."""

    def in_program(self) -> dict[str, float]:
        """The options of `spoilt`."""
        return {}

    def num_steps(self, usual: Array | int, faulty: Array) -> Array | int:
        return self.in_training.num_steps(usual, faulty)

    def sent(self, rng_key: Array, result: LocalResult, faulty: Array) -> LocalResult:
        return self.in_training.sent(rng_key, result, faulty)

    @property
    def in_training(self) -> Fault:
        return spoilt(**self.in_program())


class sign_flip(_Spoiling):
    """Hostile clients that send their change the other way, and larger: −scale · Δ.

    >>> sign_flip(share=0.2, scale=10)
    sign_flip(share=0.2, scale=10.0)
    """

    scale: float = option("how many times as large", default=10.0, bound=POSITIVE)

    def in_program(self) -> dict[str, float]:
        return {"times": -self.scale}


class scaled(_Spoiling):
    """Clients that send their change many times too large, as training that explodes does: factor · Δ.

    >>> scaled(factor=100).factor
    100.0
    """

    factor: float = option("how many times as large; negative turns it round", default=100.0, bound=FINITE)

    def in_program(self) -> dict[str, float]:
        return {"times": self.factor}


class nan_updates(_Spoiling):
    """Clients that send NaN, which every method leaves out, and counts as rejected."""

    def in_program(self) -> dict[str, float]:
        return {"lost": 1.0}


class drop_out(_Spoiling):
    """Clients of whom in each round some, drawn anew, send nothing; they are counted as rejected.

    NOTE: who drops out has been sent the model and has trained, and the costs of that are counted; so is its update, as
    one that is asked for.

    >>> drop_out(0.3).rate, drop_out(0.3).share
    (0.3, 1.0)
    """

    rate: float = option("chance of each that it sends nothing in a round", default=0.2, bound=SHARE, kw_only=False)
    share: float = option("of the clients that may drop out", default=1.0, bound=SHARE)

    def in_program(self) -> dict[str, float]:
        return {"lost": self.rate}


class stragglers(_Spoiling):
    """Clients that take no more than `steps` local steps a round, and send what they have.

    >>> int(stragglers(steps=2).num_steps(10, jnp.asarray(True))), int(stragglers().num_steps(10, jnp.asarray(False)))
    (2, 10)
    """

    steps: int = option("the most steps of theirs in a round", default=1, bound=COUNT)

    def in_program(self) -> dict[str, float]:
        return {"most_steps": float(self.steps)}


class label_flip(_Spoiling):
    """Hostile or careless clients whose training labels are reversed: y becomes L − 1 − y, of L classes."""

    def spoilt_data(self, federation: Federation, faulty: np.ndarray, seed: int) -> Federation:
        if not has_classes(federation):
            raise ValueError(
                f"fault is label_flip, but the examples of {federation.info.name} have no class labels; take another "
                "fault, such as sign_flip"
            )
        train = made_anew(
            federation.train,
            lambda clients, rows: rows._replace(y=with_reversed(rows.y, faulty[clients], federation)),
            told=["flipped", digest(faulty)],
        )
        return federation._replace(train=train)


class colluders(_Spoiling):
    """Hostile clients that pass for another group's: they hold copies of its rows, and send scale · Δ.

    The copies decide their gradients, losses and bases, so that clusterings take them for members; with a negative
    scale they then harm the cluster from within. They are drawn among the clients of the other groups; `group` in the
    federation stays what they are in truth.
    """

    group: int = option("the group that is copied", default=0, bound=at_least(0))
    scale: float = option("factor of what they send", default=1.0, bound=FINITE)

    def in_program(self) -> dict[str, float]:
        return {"times": self.scale}

    def drawn(self, federation: Federation, seed: int) -> np.ndarray:
        return _some_of(_members(federation, self, self.group, others=True), federation, self.share, seed)

    def spoilt_data(self, federation: Federation, faulty: np.ndarray, seed: int) -> Federation:
        return federation._replace(train=copies(federation, faulty, self.group, seed))


class disguise(colluders):
    """Hostile clients that show a clustering what another group would, and send scale · Δ of their own rows.

    The profiles, losses, gradients and bases by which a method groups clients are what honest work on copies of the
    group's rows gives; what is averaged is not. They are drawn as `colluders` are, who are the same attack where a
    method clusters by the very changes that it averages.

    >>> disguise(share=0.1, group=2)
    disguise(share=0.1, group=2, scale=-10.0)
    """

    shows = True

    scale: float = option("factor of what they send", default=-10.0, bound=FINITE)

    def spoilt_data(self, federation: Federation, faulty: np.ndarray, seed: int) -> Federation:
        return federation

    def shown_data(self, federation: Federation, faulty: np.ndarray, seed: int) -> ClientData | None:
        return copies(federation, faulty, self.group, seed)


class infiltrators(disguise):
    """Hostile clients that join a run in the `disguise` of another group, and poison the cluster that admits them.

    >>> [change.join for change in infiltrators(joins=3).arrivals(np.array([False, True, True]))]
    [(1, 2)]
    """

    late = True

    joins: int = option("round before which they join, counted from 0", default=5, bound=COUNT)

    def arrivals(self, faulty: np.ndarray) -> tuple[Churn, ...]:
        return (Churn(self.joins, join=tuple(np.flatnonzero(faulty).tolist())),)


class schism(_Spoiling):
    """Members of one group that show a clustering a distribution of their own, so that the group is divided.

    They show their rows with the features in another order, the same for all of them, and class labels y as L − 1 − y
    (images as their negatives, other targets as −y). With the scale 1 they send what honest training on their true rows
    gives: nothing but the clustering is attacked.
    """

    shows = True

    group: int = option("the group that divides itself", default=0, bound=at_least(0))
    scale: float = option("factor of what they send", default=1.0, bound=FINITE)

    def in_program(self) -> dict[str, float]:
        return {"times": self.scale}

    def drawn(self, federation: Federation, seed: int) -> np.ndarray:
        return _some_of(_members(federation, self, self.group), federation, self.share, seed)

    def shown_data(self, federation: Federation, faulty: np.ndarray, seed: int) -> ClientData | None:
        features = int(np.prod(np.shape(federation.train.x)[2:]))
        order = np.random.default_rng([seed, STREAM, 1]).permutation(features)

        def other(clients: np.ndarray, rows: ClientData) -> ClientData:
            those, x = faulty[clients], np.array(rows.x)
            x[those] = x[those].reshape(*x[those].shape[:2], features)[..., order].reshape(x[those].shape)
            return ClientData(x, with_reversed(rows.y, those, federation), rows.num_examples)

        return made_anew(federation.train, other, told=["schism", seed, digest(faulty)])


FAULTS: dict[str, type[Fault]] = {
    fault.__name__: fault
    for fault in (
        *(sign_flip, label_flip, drop_out, stragglers, scaled, nan_updates, colluders),
        *(disguise, schism, infiltrators),
    )
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
    return changed._replace(train=MarkedData.of(changed.train, faulty, fault.shown_data(federation, faulty, seed)))


def arrivals(federation: Federation, fault: Fault | None, seed: int) -> tuple[Churn, ...]:
    """The faulty clients that join during a run."""
    return fault.arrivals(fault.drawn(federation, seed)) if fault is not None and fault.late else ()


def afflict(algorithm: Any, federation: Federation, fault: Fault | None, seed: int) -> tuple[Any, Federation]:
    """A method and a federation with a fault, `with_fault` and `afflicted`; as they are without one."""
    if fault is None:
        return algorithm, federation
    return with_fault(algorithm, fault), afflicted(federation, fault, seed)


def with_fault(algorithm: Any, fault: Fault) -> Any:
    """The method whose clients' local update is that of the faulty where they are marked.

    Raises:
      ValueError: a local update of one's own, or nothing that such a fault could show to the method's clustering.
    """
    _check_shows(algorithm, fault)
    update = getattr(algorithm, "local", None)
    known = {field.name for field in dataclasses.fields(update)} if dataclasses.is_dataclass(update) else set()
    if "fault" not in known or not dataclasses.is_dataclass(algorithm):
        raise ValueError(f"fault is {fault}, but the local update is {shown(update)}; use local.sgd")
    faulty = dataclasses.replace(update, fault=fault.in_training)  # pyright: ignore[reportArgumentType]
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


def _check_shows(algorithm: Any, fault: Fault) -> None:
    """Raises a ValueError where a method's clustering is shown nothing that the fault could change."""
    if not fault.shows:
        return
    by, name = getattr(algorithm, "clusters_by", "nothing"), algorithm.name.replace("_", "-")
    if by == "nothing":
        raise ValueError(
            f"fault is {fault}, but the server of {name} groups nobody; take another fault, such as sign_flip, or a "
            "method that clusters, such as ifca"
        )
    if by == "changes" and not fault.late:
        raise ValueError(
            f"fault is {fault}, but {name} groups clients by the very changes that it averages; take the fault "
            "colluders, or a method such as ifca"
        )
    if fault.late and algorithm.admit is None:
        raise ValueError(f"fault is {fault}, but {name} admits no client during a run; take another fault")


def _members(federation: Federation, fault: Any, group: int, others: bool = False) -> np.ndarray:
    """bool[M]: clients with examples of a group, or of all others."""
    found = None if federation.group is None else np.asarray(federation.group)
    there = np.asarray(federation.train.num_examples) > 0
    if found is None or not (there & (found == group)).any() or not (there & (found != group)).any():
        known = "it has no groups" if found is None else f"its clients are of groups {sorted(set(found.tolist()))}"
        raise ValueError(
            f"fault is {type(fault).__name__} with group {group} of {federation.info.name}, but {known}; give a "
            "group beside which there is another"
        )
    return there & ((found != group) if others else (found == group))


def _some_of(among: np.ndarray, federation: Federation, share: float, seed: int) -> np.ndarray:
    """bool[M]: of `among` bool[M] as many as a share of all clients with examples, as far as there are."""
    there = (np.asarray(federation.train.num_examples) > 0).sum()
    return _some(among, min(1.0, share * there / among.sum()), seed)


def _some(among: np.ndarray, share: float, seed: int) -> np.ndarray:
    """bool[M]: a share of those of `among` bool[M], rounded, at least one."""
    count = min(int(among.sum()), max(1, int(share * among.sum() + 0.5)))
    score = np.where(among, np.random.default_rng([seed, STREAM]).random(len(among)), 2.0)
    first = np.argsort(score, kind="stable")[:count]
    return among & np.isin(np.arange(len(among)), first)
