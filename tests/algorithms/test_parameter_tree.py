"""The parameter tree: its shape, Algorithm 4, models on the path."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_cluster import local, nn
from fedjax_cluster.algorithms import cfl, fedavg
from fedjax_cluster.algorithms.cfl.parameter_tree import assign_client, ensemble, models_on_path, parameter_tree
from fedjax_cluster.algorithms.cfl.splits import Splits, lead_to_leaf
from fedjax_cluster.algorithms.round import cluster_variables
from fedjax_cluster.simulation.loop import simulate
from fedjax_cluster.types import Churn, ClientData
from tests.federations import as_lists, blobs
from tests.reference import cfl as reference
from tests.reference.federated import local_change


@functools.cache
def method(**options):
    own = local.sgd(0.3, batch_size=None, steps=2)
    settings = {"epsilon_1": 0.3, "epsilon_2": 0.3, "gamma_max": 0.5, "first_round": 4}
    return cfl(nn.linear(), clusters=4, local=own, **settings, **options)


@functools.cache
def grown():
    result = simulate(method(), blobs(clients=12, groups=3), rounds=14, eval_every=14)
    return result, parameter_tree(result)


def client_of(federation, number):
    return jax.tree.map(lambda leaf: leaf[number], federation.train)


@pytest.mark.slow
def test_nodes_are_the_clusters_that_were():
    result, tree = grown()
    assert len(tree.nodes) == 5
    assert tree.nodes[0].clients.tolist() == list(range(12))
    for number, node in enumerate(tree.nodes):
        if node.children:
            below = np.concatenate([tree.nodes[child].clients for child in node.children])
            assert sorted(below) == node.clients.tolist()
            assert all(tree.nodes[child].parent == number for child in node.children)
        else:
            assert node.clients.tolist() == np.flatnonzero(result.labels == node.slot).tolist()
    splits = [node for node in tree.nodes if node.children]
    assert sorted(tree.nodes[node.children[0]].since for node in splits) == [event.round for event in result.events]


def test_the_edges_are_the_updates_from_the_parents_model():
    """Retraining from θ* of a node gives what its edges keep."""
    result, tree = grown()
    federation = as_lists(result.federation)
    splits = tree.state.server.splits
    for row in np.flatnonzero(np.asarray(splits.parent) >= 0):
        model = tuple(np.asarray(splits.params["output"][name][row], np.float64) for name in ("kernel", "bias"))
        for client in np.flatnonzero(tree.state.clients.side[:, row] >= 0):
            change = local_change(model, *federation[client], 0.3, 2)
            expected = np.concatenate([change[1].ravel(), change[0].ravel()])
            np.testing.assert_allclose(tree.state.clients.edges[client, row], expected, rtol=1e-3, atol=1e-5)


def test_newcomers_take_the_path_of_algorithm_4():
    """Clients drawn anew from the same groups, against the NumPy walk over the same tree, and the truth."""
    result, tree = grown()
    others = blobs(clients=30, groups=3, rows=24)  # the same seed draws the same centres
    edges, splits = np.asarray(tree.state.clients.edges), tree.state.server.splits

    def nested(number):
        node = tree.nodes[number]
        if not node.children:
            return node.slot
        row = next(
            row
            for row in range(len(splits.parent))
            if splits.round[row] == tree.nodes[node.children[0]].since and splits.parent[row] == node.slot
        )
        sides = [edges[tree.nodes[child].clients, row] for child in node.children]
        return (node.variables, *sides, *(nested(child) for child in node.children))

    whole = nested(0)
    for number, (x, y) in enumerate(as_lists(others)):

        def change(variables, x=x, y=y):
            model = tuple(np.asarray(variables.params["output"][name], np.float64) for name in ("kernel", "bias"))
            kernel, bias = local_change(model, x, y, 0.3, 2)
            return np.concatenate([bias.ravel(), kernel.ravel()])

        found = assign_client(tree, client_of(others, number))
        assert found == reference.assign(whole, change)
        assert found == result.labels[number % 3]


@pytest.mark.slow
def test_few_coordinates_on_the_edges_are_those_of_the_updates():
    few = simulate(method(edge_coordinates=15), blobs(clients=12, groups=3), rounds=14, eval_every=14)
    whole, tree = grown()
    coordinates = np.asarray(few.state.server.coordinates)
    assert len(set(coordinates.tolist())) == 15
    np.testing.assert_allclose(few.state.clients.edges, tree.state.clients.edges[:, :, coordinates], atol=1e-6)
    own = parameter_tree(few)
    assert [assign_client(own, client_of(whole.federation, number)) for number in range(12)] == whole.labels.tolist()


def test_the_later_of_two_splits_is_met_on_the_path_only():
    """Slot 0 is split, then slot 1; a client of slot 0 must not be judged by the second."""
    params = {"w": jnp.zeros((2, 1))}
    parent, child = jnp.asarray([0, 1], jnp.int32), jnp.asarray([1, 2], jnp.int32)
    splits = Splits(params, {}, parent, child, jnp.asarray([3, 4], jnp.int32))
    side = jnp.asarray([[0, -1], [1, 0], [1, 1]], jnp.int32)
    edges = jnp.asarray([[[1.0, 0], [0, 0]], [[0, 1.0], [1, 0]], [[0, 1.0], [0, 1]]])
    for update, expected in (([1.0, 0.1], 0), ([0.2, 1.0], 2), ([-1.0, 0.0], 2)):
        found, heard = lead_to_leaf(splits, side, edges, lambda variables, update=update: jnp.asarray(update))
        assert (int(found), bool(heard)) == (expected, True)


def test_the_most_similar_update_decides_and_not_the_side_that_is_similar_on_the_whole():
    """Algorithm 4: one of side 0 is the newcomer's own, the other its opposite; both of side 1 are at 45°."""
    splits = Splits({"w": jnp.zeros((1, 1))}, {}, jnp.asarray([0]), jnp.asarray([1]), jnp.asarray([3]))
    side, edges = jnp.asarray([[0], [0], [1], [1]]), jnp.asarray([[[1.0, 0]], [[-1.0, 0]], [[1.0, 1]], [[1.0, -1]]])
    assert int(lead_to_leaf(splits, side, edges, lambda variables: jnp.asarray([2.0, 0.0]))[0]) == 0
    # Of what is not finite no side is told; it led to the second.
    for broken in ([jnp.nan, 0.0], [3e38, 3e38]):
        found = lead_to_leaf(splits, side, edges, lambda variables, broken=broken: jnp.asarray(broken))
        assert not found[1]


def test_models_on_the_path_go_from_general_to_special():
    result, tree = grown()
    deepest = max(tree.leaves, key=lambda slot: len(models_on_path(tree, slot)))
    path = models_on_path(tree, deepest)
    assert len(path) == 3
    last = cluster_variables(result.state.clusters, jnp.asarray(deepest))
    for own, other in zip(jax.tree.leaves(path[-1]), jax.tree.leaves(last), strict=True):
        np.testing.assert_array_equal(own, other)
    model, (x, y) = (
        result.algorithm.model,
        as_lists(result.federation)[int(np.flatnonzero(result.labels == deepest)[0])],
    )
    losses = [
        float(model.loss(model.apply(one, jnp.asarray(x, jnp.float32), train=False)[0], y).mean()) for one in path
    ]
    assert losses == sorted(losses, reverse=True)


def test_an_ensemble_mixes_predictions():
    result, tree = grown()
    slot, x = int(result.labels[0]), result.federation.test.x[0]
    np.testing.assert_allclose(ensemble(tree, slot, x, weights=[0] * (len(models_on_path(tree, slot)) - 1) + [1]),
                               result.predict(x, 0), rtol=1e-5, atol=1e-6)  # fmt: skip
    mixed = ensemble(tree, slot, x)
    np.testing.assert_allclose(mixed.sum(-1), 1, rtol=1e-5)
    singles = [ensemble(tree, slot, x, weights=row) for row in np.eye(len(models_on_path(tree, slot)))]
    np.testing.assert_allclose(mixed, np.mean(singles, 0), rtol=1e-5, atol=1e-6)


def test_it_comes_back_with_the_run_directory(tmp_path):
    federation = blobs(clients=12, groups=3)
    simulate(method(), federation, rounds=14, eval_every=14, run_dir=tmp_path / "run")
    again = parameter_tree(simulate(method(), federation, rounds=14, eval_every=14, run_dir=tmp_path / "run"))
    for own, other in zip(again.nodes, grown()[1].nodes, strict=True):
        assert own.clients.tolist() == other.clients.tolist()
        for a, b in zip(jax.tree.leaves(own.variables), jax.tree.leaves(other.variables), strict=True):
            np.testing.assert_array_equal(a, b)


def test_mistakes_are_named():
    _, tree = grown()
    with pytest.raises(ValueError, match="slot is 9, but no cluster is there"):
        models_on_path(tree, 9)
    with pytest.raises(ValueError, match="numbers, none negative"):
        ensemble(tree, 0, np.zeros((1, 6), np.float32), weights=[1.0])
    other = simulate(
        fedavg(nn.linear(), local=local.sgd(0.1, batch_size=None, steps=1)), blobs(), rounds=1, eval_every=1
    )
    with pytest.raises(ValueError, match="fedavg has no parameter tree"):
        parameter_tree(other)


def test_client_data_may_be_numpy():
    _, tree = grown()
    x, y = as_lists(blobs(clients=12, groups=3))[4]
    client = ClientData(x.astype(np.float32), y.astype(np.int32), np.int32(len(y)))
    assert assign_client(tree, client) in tree.leaves


@pytest.mark.slow
def test_nodes_have_those_who_were_there_when_they_were_split():
    own = local.sgd(0.3, batch_size=None, steps=2)
    splitting = cfl(nn.linear(), clusters=4, local=own, epsilon_1=1e9, epsilon_2=0.0, gamma_max=0.0, first_round=1)
    tree = parameter_tree(simulate(splitting, blobs(), rounds=6, eval_every=6, churn=[Churn(2, join=(3, 7))]))
    root, *inner = [node for node in tree.nodes if node.children]
    assert root.clients.tolist() == [0, 1, 2, 4, 5, 6]
    assert inner
    for node in inner:  # split after all had come
        assert sorted(np.concatenate([tree.nodes[child].clients for child in node.children])) == node.clients.tolist()
