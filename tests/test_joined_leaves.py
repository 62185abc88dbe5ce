"""Small leaves as one vector: the same sums, the same checks, and every leaf in its place."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_cluster import joined_leaves, parallel, tree
from fedjax_cluster.joined_leaves import JoinedLeaves
from fedjax_cluster.parallel import Contribution, for_each_client
from fedjax_cluster.server import Aggregated, step_clusters, with_optimizer
from fedjax_cluster.types import ClientData, Clusters, Cohort

SHAPES = [(), (3,), (2, 2), (1, 2, 1), (70, 80), (5,)] * 4  # (70, 80) is too large to be joined


def tree_of(seed, leading=()):
    rng = np.random.default_rng(seed)
    leaves = {f"leaf{n:02}": rng.normal(size=(*leading, *shape)).astype(np.float32) for n, shape in enumerate(SHAPES)}
    return {
        **leaves,
        "half": rng.normal(size=(*leading, 3)).astype(np.float16),
        "whole": np.zeros((*leading, 2), np.int8),
    }


@pytest.mark.parametrize("leading", [(), (4,), (4, 2)])
def test_what_is_joined_comes_apart(leading):
    given = tree_of(0, leading)
    leaves = JoinedLeaves(given, len(leading))
    joined = leaves.join(given)
    assert len(joined) == 4 + 2 + 1  # the large ones, those of other types, and the vector
    assert joined[-1].shape == (*leading, sum(int(np.prod(shape)) for shape in SHAPES if shape != (70, 80)))
    chex.assert_trees_all_equal(leaves.split(joined), given)
    # Other leading axes than those it was made for, as sums have them.
    more = jax.tree.map(lambda leaf: np.stack([leaf, leaf]), given)
    chex.assert_trees_all_equal(leaves.split(leaves.join(more)), more)


def test_few_leaves_stay_as_they_are():
    few = {f"leaf{n}": np.ones(3, np.float32) for n in range(joined_leaves.FEWEST - 1)}
    assert all(one is other for one, other in zip(JoinedLeaves(few).join(few), jax.tree.leaves(few), strict=True))
    assert JoinedLeaves(()).split(JoinedLeaves(()).join(())) == ()


def cohort_of(mapping):
    none = jnp.zeros((6, 1))
    data = ClientData(none, none, jnp.ones(6, jnp.int32))
    return Cohort(jnp.arange(6), jnp.asarray([True] * 5 + [False]), data, None, mapping)


@pytest.mark.parametrize("strategy", ["scan", "vmap", "chunked"])
@pytest.mark.parametrize("several", [False, True])
def test_sums_of_many_leaves_are_those_of_each(strategy, several):
    """Six clients, of whom one is masked and one sends a NaN in a single small leaf; to one cluster or to two each."""
    mapping = parallel.client_mapping(strategy, 2 if strategy == "chunked" else None, jax.devices()[:1])
    slots = (2,) if several else ()
    values = [tree_of(seed, slots) for seed in range(6)]
    values[3]["leaf07"][..., 1] = np.nan
    rows = jax.tree.map(lambda *leaves: np.stack(leaves), *values)
    slot = np.asarray([[0, 2], [1, 0], [2, 1], [0, 1], [1, 2], [0, 0]]) if several else np.asarray([0, 1, 1, 0, 2, 0])
    weight = np.asarray([1.0, 2.0, 0.5, 1.0, 3.0, 1.0], np.float32)
    weight = np.stack([weight, 2 * weight], 1) if several else weight

    def contribute(client, value, slot, weight):
        return Contribution(slot, weight, value)

    given = (jnp.asarray(slot, jnp.int32), jnp.asarray(weight))
    mapped = for_each_client(
        contribute, cohort_of(mapping), rows, *given, num_slots=3, reduce=lambda sent: sent, collect=lambda _: ()
    )
    assert mapped.accepted.tolist() == [True, True, True, False, True, False]
    for name in values[0]:
        expected = np.zeros((3, *np.shape(values[0][name])[len(slots) :]), np.float32)
        for client in (0, 1, 2, 4):
            for part in range(2) if several else [()]:
                expected[slot[client][part]] += weight[client][part] * values[client][name][part].astype(np.float32)
        np.testing.assert_allclose(mapped.reduced.total[name], expected, rtol=1e-5, atol=1e-6, err_msg=name)


def test_a_cluster_with_infinity_in_one_small_leaf_alone_does_not_step():
    params = jax.tree.map(jnp.asarray, tree_of(0, (3,)))
    params = {name: leaf for name, leaf in params.items() if name.startswith("leaf")}
    clusters = with_optimizer(Clusters(params, {}, jnp.ones(3, bool)), optax.sgd(1.0))
    change = jax.tree.map(jnp.ones_like, params)
    change["leaf08"] = change["leaf08"].at[1, 0, 1].set(jnp.inf)
    stepped, refused = step_clusters(optax.sgd(1.0), clusters, Aggregated({"delta": change, "stats": {}}, jnp.ones(3)))
    assert refused.tolist() == [False, True, False]
    expected = tree.where(jnp.asarray([True, False, True]), jax.tree.map(lambda leaf: leaf + 1, params), params)
    chex.assert_trees_all_close(stepped.params, expected, rtol=1e-6)
