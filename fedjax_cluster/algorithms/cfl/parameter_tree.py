"""The parameter tree that CFL leaves: every split a node, its clients' updates on the edges (CFL, Sec. V-C).

A run's state holds the splits; `parameter_tree(result)` is the tree of a run, `assign_client` leads a newcomer to a
leaf, `models_on_path` and `ensemble` give it models from general to special.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedjax_cluster import parallel
from fedjax_cluster.algorithms.cfl.splits import Splits
from fedjax_cluster.algorithms.round import cluster_variables, labels
from fedjax_cluster.nn.precision import in_32_bits
from fedjax_cluster.types import ClientData, ClusteredAlgorithm, FinishedRun, State, Variables


@dataclasses.dataclass(frozen=True)
class Node:
    """A cluster that was there for a while.

    Attributes:
      parent: number of the node above; None for the root.
      children: numbers of the two below; empty for a leaf.
      slot: the cluster's slot.
      since: 0-based round whose end made it; −1 for the root.
      clients: i32[n], its members when it was split (by landmarks: these alone), or now.
      variables: the model on which it was split, or the cluster's present one.
    """

    parent: int | None
    children: tuple[int, ...]
    slot: int
    since: int
    clients: np.ndarray
    variables: Variables


@dataclasses.dataclass(frozen=True)
class ParameterTree:
    """The tree of a CFL run; node 0 is the root, children come after their parents."""

    nodes: tuple[Node, ...]
    algorithm: ClusteredAlgorithm
    state: State

    @property
    def leaves(self) -> dict[int, int]:
        """The node of each cluster that there is now, by its slot."""
        return {node.slot: number for number, node in enumerate(self.nodes) if not node.children}


@in_32_bits
def parameter_tree(result: FinishedRun) -> ParameterTree:
    """The parameter tree of a finished run of `cfl`; of a saved one with `parameter_tree(fc.load_run(run_dir))`.

    Raises:
      ValueError: a run of another method.
    """
    state = parallel.fetched(result.state)
    splits = getattr(state.server, "splits", None)
    if not isinstance(splits, Splits):
        raise ValueError(f"a run of {result.algorithm.name} has no parameter tree; only cfl splits clusters")
    count = len(result.federation.train.num_examples)
    now = np.asarray(labels(state.clients.membership))
    kept = getattr(state.server, "kept", None)
    side = np.full((count, len(splits.parent)), -1)
    if kept is None:
        side = np.asarray(state.clients.side)[:count]
    else:  # nodes within have the landmarks alone
        side[np.asarray(state.server.landmarks)] = np.asarray(kept.side)
    present = np.asarray(state.clients.present)
    nodes: list[Node] = []

    def grow(parent: int | None, slot: int, since: int, first: int) -> int:
        number = len(nodes)
        rows = [row for row in range(first, len(splits.parent)) if splits.parent[row] == slot]
        if not rows:
            own = np.flatnonzero(present & (now == slot)).astype(np.int32)
            nodes.append(Node(parent, (), slot, since, own, cluster_variables(state.clusters, jnp.asarray(slot))))
            return number
        row = rows[0]
        params, stats = jax.tree.map(lambda leaf: leaf[row], (splits.params, splits.stats))
        # Who came or left since the split above is not of its sides.
        members = np.flatnonzero(side[:, row] >= 0).astype(np.int32)
        nodes.append(Node(parent, (), slot, since, members, Variables(params, stats)))
        ends = []
        for below in (slot, int(splits.child[row])):
            ends.append(grow(number, below, int(splits.round[row]), row + 1))
        nodes[number] = dataclasses.replace(nodes[number], children=tuple(ends))
        return number

    grow(None, 0, -1, 0)
    return ParameterTree(tuple(nodes), result.algorithm, state)


@in_32_bits
def assign_client(parameters: ParameterTree, client: ClientData, *, rng_key: Array | None = None) -> int:
    """Leads a newcomer to the leaf of the most similar clients (Algorithm 4), by one local training a level.

    Args:
      parameters: the tree.
      client: its training rows, x [N, ...], y [N, ...], num_examples i32[].
      rng_key: of its local training; None takes a fixed one.

    Returns:
      The slot of its cluster: `tree.nodes[tree.leaves[slot]]` is the leaf.
    """
    rng_key = jax.random.key(0) if rng_key is None else rng_key
    client = jax.tree.map(jnp.asarray, client)
    return int(_assign(rng_key, parameters.state, client, algorithm=parameters.algorithm))


@functools.partial(jax.jit, static_argnames="algorithm")
def _assign(rng_key: Array, state: State, client: ClientData, *, algorithm: ClusteredAlgorithm) -> Array:
    assert algorithm.admit is not None  # `cfl` has it
    # Which row the newcomer would take has no say in where it is led; the state itself is not changed.
    index = jnp.zeros((), jnp.int32)
    return labels(algorithm.admit(rng_key, state, client, index).clients.membership[:1])[0]


def models_on_path(parameters: ParameterTree, slot: int) -> tuple[Variables, ...]:
    """The models from the root to a leaf, general to special: the Federated Learning solution first.

    Args:
      parameters: the tree.
      slot: of the leaf's cluster, a client's label.

    Raises:
      ValueError: no such leaf.
    """
    number: int | None = parameters.leaves.get(int(slot))
    if number is None:
        known = ", ".join(map(str, sorted(parameters.leaves)))
        raise ValueError(f"slot is {slot}, but no cluster is there; the leaves' slots are {known}")
    path = []
    while number is not None:
        path.append(parameters.nodes[number].variables)
        number = parameters.nodes[number].parent
    return tuple(reversed(path))


@in_32_bits
def ensemble(parameters: ParameterTree, slot: int, x: Any, *, weights: Sequence[float] | None = None) -> np.ndarray:
    """The mixed predictions of all models on the path to a leaf.

    Σ_v w_v · predict(f(x; θ_v)) / Σ_v w_v

    Args:
      parameters: the tree.
      slot: of the leaf's cluster.
      x: [N, ...], raw inputs.
      weights: one of each model, general to special; None weighs them equally.

    Returns:
      [N, ...], class probabilities in classification.

    Raises:
      ValueError: no such leaf, or another number of weights than models.
    """
    path = models_on_path(parameters, slot)
    share = np.ones(len(path)) if weights is None else np.asarray(weights, np.float64)
    if share.shape != (len(path),) or not (share >= 0).all() or share.sum() <= 0:
        raise ValueError(f"weights is {weights}; give {len(path)} numbers, none negative, for the models on the path")
    model = parameters.algorithm.model
    predictions = [model.predict(model.apply(variables, jnp.asarray(x), train=False)[0]) for variables in path]
    stacked = jnp.stack(predictions)
    share = jnp.asarray(share / share.sum(), stacked.dtype)
    return np.asarray(jnp.tensordot(share, stacked, axes=1, precision="highest"))
