"""A choice that each client makes for itself, whether clients go one after the other or side by side."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.core import eval_jaxpr

from fedjax_cluster import tree
from fedjax_cluster.types import PyTree

T = TypeVar("T")


def unless(known: Array, value: T, compute: Callable[[], T]) -> T:
    """`value` where it is `known` bool[], else what `compute()` gives, of the same shapes and types.

    As with `lax.cond`, nothing is computed where it is known. Of several clients side by side, as in a `vmap`, nothing
    is computed where it is known of all, and else for all of them; and what `compute` closes over is not copied where
    all have the same. A `vmap` of `lax.cond` computes always, and has one copy a client of all that: of four models of
    160 000 parameters and a thousand clients 2.5 GB.

    >>> known, x = jnp.asarray([True, False]), jnp.asarray([1, 2])
    >>> jax.vmap(lambda known, x: unless(known, x, lambda: 10 * x))(known, x).tolist()
    [1, 20]
    """
    closed, shapes = jax.make_jaxpr(compute, return_shape=True)()
    structure = jax.tree.structure(shapes)

    def computed(shared: list[Array]) -> Any:
        return jax.tree.unflatten(structure, eval_jaxpr(closed.jaxpr, shared))

    @jax.custom_batching.custom_vmap
    def choose(known: Array, value: PyTree, shared: list[Array]) -> PyTree:
        return lax.cond(known, lambda: value, lambda: computed(shared))

    @choose.def_vmap
    def choose_all(size: int, batched: Any, known: Array, value: PyTree, shared: list[Array]) -> tuple[PyTree, PyTree]:
        varies, of_value, of_shared = batched
        value = jax.tree.map(
            lambda leaf, each: leaf if each else jnp.broadcast_to(leaf, (size, *jnp.shape(leaf))), value, of_value
        )

        def all_of_them() -> PyTree:
            axes = [0 if each else None for each in of_shared]
            if any(of_shared):
                found = jax.vmap(computed, in_axes=(axes,))(shared)
            else:
                found = tree.broadcast(computed(shared), size)
            return tree.where(known, value, found) if varies else found

        return unless(jnp.all(known), value, all_of_them), jax.tree.map(lambda _: True, value)

    return choose(known, value, closed.consts)
