"""Clients of whom some are marked, and the rows that they show to clusterings in place of their own; see `faults`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from fedjax_cluster.options import changed
from fedjax_cluster.types import ClientData, LocalUpdate, Model, Variables


@jax.tree_util.register_pytree_node_class
class MarkedData(ClientData):
    """Clients of whom some are marked as faulty (see `faults`); otherwise as others, and unpacked as they are."""

    faulty: Any = None  # bool[M]
    shown: ClientData | None = None  # what all, also the honest, show to clusterings; None for the rows that they have

    @classmethod
    def of(cls, data: ClientData, faulty: Any, shown: ClientData | None = None) -> MarkedData:
        found = cls(*data)
        found.faulty, found.shown = faulty, shown
        return found

    def _replace(self, **changes: Any) -> MarkedData:
        return MarkedData.of(ClientData(*self)._replace(**changes), self.faulty, self.shown)

    def tree_flatten(self) -> tuple[tuple[Any, ...], None]:
        return (*self, self.faulty, self.shown), None

    @classmethod
    def tree_unflatten(cls, _: None, leaves: Sequence[Any]) -> MarkedData:
        return cls.of(ClientData(*leaves[:3]), *leaves[3:])


def marked(data: ClientData) -> Any | None:
    """bool[...] of the clients that are faulty, None where nobody is marked."""
    return data.faulty if isinstance(data, MarkedData) else None


def shown_rows(data: ClientData) -> ClientData:
    """The rows of one client or more that a clustering sees, in honest work: what it compares clients by is of these.

    They have no marks where they are not the client's own, so that nothing is spoilt a second time.
    """
    return data.shown if isinstance(data, MarkedData) and data.shown is not None else data


def poses(data: ClientData) -> Any | None:
    """bool[...] of the clients that show a clustering other rows than they have; None where nobody does."""
    return data.faulty if isinstance(data, MarkedData) and data.shown is not None else None


def is_silent(update: LocalUpdate, rng_key: Array, data: ClientData) -> Array | None:
    """Whether a client sends nothing in the round in which it trains with this key, bool[]; None where all do."""
    fault, faulty = getattr(update, "fault", None), marked(data)
    return None if fault is None or faulty is None else fault.silent(rng_key, faulty)


def run_beside(
    update: LocalUpdate, rng_key: Array, model: Model, start: Variables, data: ClientData, **rest: Any
) -> Any:
    """A client's further training in a round, with mini-batches of its own; who is silent in it sends neither."""
    own_key, fault = jax.random.fold_in(rng_key, 1), getattr(update, "fault", None)
    if fault is None or marked(data) is None:
        return update.run(own_key, model, start, data, **rest)
    result = changed(update, "heard", fault=fault.heard).run(own_key, model, start, data, **rest)
    if (silent := is_silent(update, rng_key, data)) is None:
        return result
    return result._replace(delta=jax.tree.map(lambda leaf: jnp.where(silent, jnp.nan, leaf), result.delta))
