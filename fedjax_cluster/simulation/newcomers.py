"""Clients who come after a run: a state with rows for them, and the method's own word on where they belong."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from fedjax_cluster import parallel
from fedjax_cluster.data.populations import in_memory
from fedjax_cluster.data.stored import Rows, dtype_of, made_of, some_of, stored
from fedjax_cluster.data.validation import check_federation
from fedjax_cluster.files import digest
from fedjax_cluster.marked_clients import MarkedData
from fedjax_cluster.nn.precision import in_32_bits
from fedjax_cluster.simulation.checkpoints import with_clients
from fedjax_cluster.simulation.segment import run_keys
from fedjax_cluster.types import (
    ClientData,
    ClientMapping,
    ClusteredAlgorithm,
    DatasetInfo,
    Event,
    Federation,
    State,
    UserFederation,
)

LOG = logging.getLogger(__name__)

COMPARED = ("input_shape", "num_classes", "task")


def check_newcomers(algorithm: ClusteredAlgorithm, federation: Federation, newcomers: Any) -> None:
    """Raises a ValueError where a run cannot admit these clients."""
    if not isinstance(newcomers, Federation):
        raise ValueError(
            f"newcomers is a {type(newcomers).__name__}; give a Federation, as fc.data.from_arrays makes of ids"
        )
    if algorithm.admit is None:
        raise ValueError(f"{algorithm.name} admits no client, so that nothing tells where one who comes later belongs")
    if getattr(algorithm, "privacy", None) is not None:
        raise ValueError("the run's privacy is that of its own clients; what a newcomer shows would not be covered")
    if parallel.several():
        raise ValueError("several processes hold the clients; load the run in one, and admit the newcomers there")
    check_federation(newcomers)
    for name in COMPARED:
        own, new = getattr(federation.info, name), getattr(newcomers.info, name)
        if own != new:
            raise ValueError(f"the newcomers' {name} is {new}, but the federation's is {own}; bring them to the same")
    own, new = (tuple(each.info.class_names) for each in (federation, newcomers))
    if own != new and own and new:
        place = next(place for place, names in enumerate(zip(own, new, strict=True)) if len({*names}) > 1)
        raise ValueError(
            f"class {place} of the newcomers is {new[place]!r}, but the federation's is {own[place]!r}; number their "
            "labels as the federation's are"
        )
    if own != new:
        LOG.warning(f"the classes of the {'newcomers' if own else 'federation'} have no names: they may be others")
    pairs = ("train", "x"), ("train", "y"), ("test", "x"), ("test", "y")
    for whole, part in pairs:
        own, new = (dtype_of(getattr(getattr(each, whole), part)) for each in (federation, newcomers))
        if own != new:
            part = f"{'test ' * (whole == 'test')}{part}"
            raise ValueError(f"the newcomers' {part} is {new}, but the federation's is {own}; convert it")
    known, new = (getattr(each, "user_ids", None) for each in (federation, newcomers))
    if known is not None and new is not None:
        twice = np.intersect1d(np.asarray(known).astype(str), np.asarray(new).astype(str))
        if len(twice):
            raise ValueError(f"the federation has a client {str(twice[0])!r} already; give the newcomers other ids")


def with_newcomers(federation: Federation, newcomers: Federation) -> Federation:
    """The clients of both, the newcomers last; on disk where the federation is, with these in memory beside it."""
    newcomers = in_memory(newcomers) if stored(newcomers) else newcomers
    validation = None
    if federation.validation is not None and newcomers.validation is not None:
        validation = _joined(federation.validation, newcomers.validation)
    elif federation.validation is not None:
        LOG.warning("validation rows are left out, as the newcomers have none: give the newcomers some as well")
    group, info = None, federation.info
    if federation.group is not None:
        group, info = _groups(federation, newcomers)
    train, test = _joined(federation.train, newcomers.train), _joined(federation.test, newcomers.test)
    both = Federation(train, test, validation, group, info)
    known, new = (getattr(each, "user_ids", None) for each in (federation, newcomers))
    if known is None and new is not None:
        LOG.warning(
            "the newcomers' own ids are left out, as the clients of the run have none: run a types.UserFederation to "
            "have the ids of both"
        )
    if known is not None and new is None:
        LOG.warning(
            "the clients' own ids are left out, as the newcomers have none: admit a types.UserFederation to have the "
            "ids of both"
        )
    if known is None or new is None:
        return both
    return UserFederation.of(both, np.concatenate([np.asarray(known).astype(str), np.asarray(new).astype(str)]))


def _groups(federation: Federation, newcomers: Federation) -> tuple[np.ndarray, DatasetInfo]:
    """The groups of both, by name where both have names; and the description with the names of all."""
    new, names = newcomers.group, federation.info.group_names
    new = np.full(len(newcomers.train.num_examples), -1, np.int32) if new is None else np.asarray(new)
    if names and newcomers.info.group_names:
        names = tuple(dict.fromkeys((*names, *newcomers.info.group_names)))
        number = np.asarray([names.index(name) for name in newcomers.info.group_names])
        there = (new >= 0) & (new < len(number))
        new = np.where(there, number[np.where(there, new, 0)], -1)
    return np.concatenate([np.asarray(federation.group), new]), federation.info._replace(group_names=names)


def _joined(old: ClientData, new: ClientData) -> ClientData:
    """Clients of both, with as many rows as the larger has."""
    rows, known = max(np.shape(old.x)[1], np.shape(new.x)[1]), len(old.num_examples)
    counts = np.concatenate([np.asarray(old.num_examples), np.asarray(new.num_examples)])

    def filled(leaf: Any) -> np.ndarray:
        leaf = np.asarray(leaf)
        if leaf.shape[1] == rows:
            return leaf
        return np.pad(leaf, ((0, 0), (0, rows - leaf.shape[1]), *((0, 0),) * (leaf.ndim - 2)))

    def made(clients: np.ndarray) -> ClientData:
        later = clients >= known
        found, own = some_of(old, np.where(later, -1, clients)), some_of(new, clients[later] - known)
        x, y = filled(found.x), filled(found.y)
        if later.any():
            x[later], y[later] = filled(own.x), filled(own.y)
        return ClientData(x, y, counts[np.maximum(clients, 0)])

    if isinstance(old.x, Rows):
        both = made_of(
            old.x, made, counts, longest=rows, told=["newcomers", *(digest(np.asarray(leaf)) for leaf in new)]
        )
    else:
        x, y = (np.concatenate([filled(one), filled(other)]) for one, other in ((old.x, new.x), (old.y, new.y)))
        both = ClientData(x, y, counts)
    if not isinstance(old, MarkedData):
        return both
    honest = np.zeros(len(new.num_examples), bool)
    shown = None if old.shown is None else _joined(old.shown, new)
    return MarkedData.of(both, np.concatenate([np.asarray(old.faulty), honest]), shown)


def admitted(
    rng_key: Array,
    algorithm: ClusteredAlgorithm,
    state: State,
    federation: Federation,
    mapping: ClientMapping,
    known: int,
    seed: int,
) -> State:
    """The state of `known` clients, on the host, with those of the federation that come after them.

    Args:
      rng_key: of what the method draws for a newcomer.
      algorithm: the method, whose `admit` decides.
      state: after the run, without rows that fill up devices.
      federation: all clients, the newcomers last.
      mapping: of one device.
      known: how many were in the run.
      seed: of the run, whose first models newcomers have where nobody has trained theirs.
    """
    train = federation.train
    number, counts = len(train.num_examples) - known, np.array(train.num_examples, np.int32)
    counts[known:] = 0
    # What is kept of clients who are not there yet is as the method begins it, and as those who join a run have it.
    start = algorithm.init if algorithm.template is None else algorithm.template
    population = parallel.place_population(ClientData(train.x, train.y, counts), federation.info, mapping)
    like, _ = start(run_keys(seed).initialization, population)
    new = ClientData(*(jnp.asarray(leaf[known:]) for leaf in train))
    indices = jnp.arange(known, known + number, dtype=jnp.int32)
    whole = with_clients(state, jax.device_get(like))
    return _admit_all(jax.random.split(rng_key, number), whole, new, indices, algorithm=algorithm)


@parallel.kept_program(static_argnames="algorithm")
@in_32_bits
def _admit_all(keys: Array, state: State, data: ClientData, indices: Array, *, algorithm: ClusteredAlgorithm) -> State:
    """One newcomer after the other, each among all before it."""
    assert algorithm.admit is not None  # by `check_newcomers`

    def admit(state: State, newcomer: tuple[Array, ClientData, Array]) -> tuple[State, None]:
        key, rows, index = newcomer
        found = algorithm.admit(key, state, rows, index)  # pyright: ignore[reportOptionalCall]
        return jax.tree.map(lambda new, old: jnp.asarray(new, old.dtype), found, state), None

    return lax.scan(admit, state, (keys, data, indices))[0]


def before_admission(kept: Mapping[int, np.ndarray], events: tuple[Event, ...], known: int, number: int) -> Any:
    """Assignments and events of the run, in which the newcomers were in no cluster."""

    def longer(clusters: Any) -> np.ndarray:
        return np.concatenate([np.asarray(clusters)[:known], np.full(number, -1, np.int32)]).astype(np.int32)

    of_events = (
        event._replace(content={**event.content, "labels": longer(event.content["labels"])})
        if "labels" in event.content
        else event
        for event in events
    )
    return {rounds: longer(clusters) for rounds, clusters in kept.items()}, tuple(of_events)
