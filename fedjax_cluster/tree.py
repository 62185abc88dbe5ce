"""Arithmetic on stacked pytrees: leaves carry clients or clusters on their first axis."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

PyTree = Any


def size(tree: PyTree) -> int:
    """Number of scalars in a pytree of arrays or shapes: `size(params)` is d."""
    return sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(tree))


def num_bytes(tree: PyTree) -> int:
    """Bytes of a pytree of arrays or shapes, each leaf in its own format.

    >>> num_bytes({"a": jnp.ones(2), "b": jnp.ones(3, jnp.bfloat16)})
    14
    """
    return sum(int(np.prod(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def ravel(tree: PyTree) -> Array:
    """Flattens one pytree to a vector f32[d], leaves in tree order.

    >>> ravel({"a": jnp.ones((2,)), "b": jnp.zeros((1, 1))}).tolist()
    [1.0, 1.0, 0.0]
    """
    return jnp.concatenate([jnp.ravel(leaf) for leaf in jax.tree.leaves(tree)])


def unravel(vector: Array, like: PyTree) -> PyTree:
    """Inverse of `ravel`: the pytree shaped as `like` with the entries of `vector` [d]."""
    leaves, treedef = jax.tree.flatten(like)
    ends = np.cumsum([int(np.prod(leaf.shape)) for leaf in leaves])
    pieces = jnp.split(vector, ends[:-1])
    return treedef.unflatten([piece.reshape(leaf.shape) for piece, leaf in zip(pieces, leaves, strict=True)])


def take(tree: PyTree, index: Array) -> PyTree:
    """Rows `index` of every leaf; an index beyond either end, as −1 is, gathers zeros, never the last row.

    >>> take(jnp.asarray([5., 7.]), jnp.asarray([1, 2, -1])).tolist()
    [7.0, 0.0, 0.0]
    """

    def rows(leaf: Any) -> Array:
        return jnp.asarray(leaf).at[index].get(mode="fill", fill_value=0, wrap_negative_indices=False)

    return jax.tree.map(rows, tree)


def scatter(tree: PyTree, index: Array, values: PyTree) -> PyTree:
    """Writes `values` to rows `index`; an index beyond either end, as −1 is, is dropped."""

    def write(leaf: Array, value: Array) -> Array:
        return leaf.at[index].set(value, mode="drop", wrap_negative_indices=False)

    return jax.tree.map(write, tree, values)


def where(condition: Array, tree: PyTree, other: PyTree) -> PyTree:
    """Chooses whole rows: `condition` bool[K] against leaves [K, ...]."""

    def choose(a, b):
        return jnp.where(condition.reshape(condition.shape + (1,) * (a.ndim - condition.ndim)), a, b)

    return jax.tree.map(choose, tree, other)


def of_types(tree: PyTree, like: PyTree) -> PyTree:
    """The leaves in the types of those of `like`."""

    def one(leaf, other):
        return leaf if leaf.dtype == other.dtype else leaf.astype(other.dtype)

    return jax.tree.map(one, tree, like)


def scale_rows(tree: PyTree, factor: Array) -> PyTree:
    """Multiplies row k of every leaf [K, ...] by `factor[k]`."""
    return jax.tree.map(lambda leaf: leaf * factor.reshape((-1,) + (1,) * (leaf.ndim - 1)), tree)


def broadcast(tree: PyTree, count: int) -> PyTree:
    """Stacks `count` copies on a new first axis."""
    return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (count, *leaf.shape)), tree)


def all_finite(tree: PyTree) -> Array:
    """bool[]: no entry of the pytree is infinite or NaN."""
    checks = [jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    return jnp.all(jnp.stack(checks)) if checks else jnp.asarray(True)


def paths(tree: PyTree) -> list[str]:
    """Parameter paths in tree order, such as `hidden_0/kernel`."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves]


def match(tree: PyTree, patterns: Sequence[str], *, strict: bool = True) -> PyTree:
    """Marks the leaves whose path, or a folder of it, matches a shell pattern; `!pattern` excludes.

    A list of exclusions alone starts from everything: `["!output"]` is all but the output layer.

    Args:
      tree: parameters; their paths look like `hidden_0/kernel`.
      patterns: `output`, `conv_*`, `*/bias`, `!output` and the like.
      strict: whether a pattern that matches nothing is an error.

    Returns:
      The same pytree with a Python bool at each leaf.

    Raises:
      ValueError: a pattern matches no parameter.

    >>> match({"hidden_0": {"kernel": 0}, "output": {"kernel": 0}}, ["!output"])
    {'hidden_0': {'kernel': True}, 'output': {'kernel': False}}
    """
    names = paths(tree)
    chosen = [all(pattern.startswith("!") for pattern in patterns)] * len(names)
    for pattern in patterns:
        bare = pattern.removeprefix("!")
        hits = [fnmatch.fnmatch(name, bare) or fnmatch.fnmatch(name, f"{bare}/*") for name in names]
        if strict and not any(hits):
            raise ValueError(
                f"no parameter matches the layer pattern {bare!r}; the model's parameters are {', '.join(names)}"
            )
        include = not pattern.startswith("!")
        chosen = [include if hit else old for hit, old in zip(hits, chosen, strict=True)]
    return jax.tree.unflatten(jax.tree.structure(tree), chosen)


def pick(tree: PyTree, chosen: PyTree) -> dict[str, Any]:
    """The leaves that are marked, by their path.

    >>> pick({"hidden_0": 1, "output": 2}, {"hidden_0": False, "output": True})
    {'output': 2}
    """
    marks = jax.tree.leaves(chosen)
    return {name: leaf for name, leaf, mark in zip(paths(tree), jax.tree.leaves(tree), marks, strict=True) if mark}


def put(tree: PyTree, leaves: Mapping[str, Any]) -> PyTree:
    """The pytree with other leaves at some paths; what `pick` took goes back.

    >>> put({"hidden_0": {"kernel": 1}, "output": {"kernel": 2}}, {"output/kernel": 3})
    {'hidden_0': {'kernel': 1}, 'output': {'kernel': 3}}
    """
    old, treedef = jax.tree.flatten(tree)
    return treedef.unflatten([leaves.get(name, leaf) for name, leaf in zip(paths(tree), old, strict=True)])
