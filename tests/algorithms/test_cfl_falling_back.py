"""CFL's parts that lost by their split go back to their parent's model, by rows that clients hold out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_cluster.algorithms.cfl.splits import in_own_order
from fedjax_cluster.types import ClientData
from tests.algorithms.test_cfl import build, labels, runner, start_of
from tests.federations import blobs


def own_order(client, count):
    """The rows of a client in the order of which the last are held out."""
    rows = ClientData(*(jnp.arange(20) for _ in range(2)), jnp.asarray(count))
    return np.asarray(in_own_order(rows, jnp.asarray(client)).x)[:count]


@pytest.mark.slow
def test_a_cluster_that_lost_by_its_split_goes_back_to_the_parents_model():
    """Held-out rows of the new cluster get the labels that the parent's model gives them, its other rows never do."""
    algorithm = build(epsilon_1=0.6, fall_back_after=3, held_out=0.3, clusters=2)
    federation = blobs(clients=12, groups=3)
    population, state = start_of(algorithm, federation)
    one_round = runner(algorithm)
    while len(set(labels(state))) == 1 and int(state.round) < 15:
        state, _ = one_round(population, state)
    assert len(set(labels(state))) == 2
    before = jax.tree.map(lambda leaf: np.asarray(leaf[0]), state.server.splits.params)
    x, y, count = federation.train
    named = np.argmax(x @ before["output"]["kernel"] + before["output"]["bias"], -1)
    trained, y = count - np.floor(np.float32(0.3) * count).astype(int), y.copy()
    for client in np.flatnonzero(np.asarray(labels(state)) == 1):
        order = own_order(client, count[client])
        held_out, learnt = order[trained[client] :], order[: trained[client]]
        y[client, held_out], y[client, learnt] = named[client, held_out], (named[client, learnt] + 1) % 3
    population, _ = start_of(algorithm, federation._replace(train=federation.train._replace(y=y)))
    fell = []
    for _ in range(6):
        state, info = one_round(population, state)
        if bool(info.event) and 1 in algorithm.snapshot(jax.device_get(state))["fell_back"]:
            fell.append(int(state.round) - 1)
    assert fell == [int(state.server.splits.round[0]) + 3]
    assert (np.asarray(state.server.fell_back) >= 0).tolist() == [False, True]
    for leaf, expected in zip(jax.tree.leaves(state.clusters.params), jax.tree.leaves(before), strict=True):
        np.testing.assert_array_equal(leaf[1], expected)
        assert not np.allclose(leaf[0], expected)
    assert info.num_clients.tolist() == [8, 0]


@pytest.mark.slow
def test_held_out_rows_are_not_trained_on():
    federation = blobs(clients=6, groups=2, ragged=False)
    algorithm = build(fall_back_after=50, held_out=0.2)
    one_round = runner(algorithm)
    orders = [own_order(client, 20) for client in range(6)]
    assert all(sorted(order) == list(range(20)) for order in orders)
    assert len({tuple(order) for order in orders} | {tuple(range(20))}) == 7
    ends = []
    for last in (None, 16, 15):
        x = federation.train.x.copy()
        if last is not None:
            for client, order in enumerate(orders):
                x[client, order[last:]] += 3.0
        population, state = start_of(algorithm, federation._replace(train=federation.train._replace(x=x)))
        ends.append(one_round(population, state)[0].clusters.params["output"]["kernel"])
    np.testing.assert_array_equal(ends[0], ends[1])
    assert not np.array_equal(ends[0], ends[2])
