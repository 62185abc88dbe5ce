"""Clients' rows in tiles, as a TPU holds them: what per-client functions and `init` see stays the same."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedjax_cluster as fc
from fedjax_cluster import nn, parallel
from fedjax_cluster.algorithms import fedper, fedrep, ifca
from fedjax_cluster.local import sgd
from fedjax_cluster.parallel import rows as rows_module
from fedjax_cluster.parallel import tiles as tiles_module
from fedjax_cluster.parallel.tiles import Tiled, packed, tiled, unpacked, untiled
from fedjax_cluster.simulation.segment import run_keys, run_segment
from fedjax_cluster.types import ClientData, DatasetInfo
from tests.federations import blobs


@pytest.mark.parametrize(
    ("shape", "dtype", "in_tiles"),
    [
        ((3, 4, 32, 32), np.uint8, (32, 128)),
        ((3, 5, 28, 28), np.uint8, (32, 128)),  # 3 920 bytes of 4 096
        ((3, 7, 33, 20), np.float32, (40, 128)),  # 4 620 numbers, 5 tiles of 1 024
        ((3, 64), np.int32, None),  # labels would be padded sixteen times
        ((3, 2, 1000), np.float32, (16, 128)),
    ],
)
def test_rows_come_back(shape, dtype, in_tiles):
    rows = np.arange(np.prod(shape)).reshape(shape).astype(dtype)
    held = tiled(rows)
    assert isinstance(held, Tiled) == (in_tiles is not None)
    assert held.shape == shape
    if isinstance(held, Tiled):
        assert held.tiles.shape == (3, *in_tiles)
        chex.assert_trees_all_equal(held[2], rows[2])
        chex.assert_trees_all_equal(held[2, 1:3], rows[2, 1:3])
        client = jax.tree.map(lambda leaf: jnp.asarray(leaf[1]), {"x": held})
        chex.assert_trees_all_equal(untiled(client)["x"], rows[1])


@pytest.mark.slow
@pytest.mark.parametrize(("count", "shape"), [(767, (767,)), (768, (8, 128)), (1024, (8, 128)), (1025, (1025,))])
def test_what_is_kept_of_a_client_comes_back(count, shape):
    """Types in turns, a scalar, nothing at all; tiles where at most a quarter of them is padding."""
    floats = np.random.default_rng(0).standard_normal(count).astype(np.float32)
    own = {
        "a": jnp.asarray(floats[: count - 7].reshape(-1, 1)),
        "b": jnp.arange(5),
        "c": {"d": jnp.asarray(floats[count - 7 :]), "e": jnp.asarray(True), "f": jnp.zeros((0, 3), jnp.bfloat16)},
        "g": jnp.arange(5, 7),
    }
    rows = packed(own)
    assert {name: row.shape for name, row in rows.items()}["float32"] == shape
    assert {name: row.dtype.name for name, row in rows.items()} == {name: name for name in rows}
    np.testing.assert_array_equal(rows["float32"].reshape(-1)[:count], floats)
    assert not rows["float32"].reshape(-1)[count:].any()
    found = unpacked(rows, jax.eval_shape(lambda: own))
    chex.assert_trees_all_equal(found, own)
    chex.assert_trees_all_equal_dtypes(found, own)
    assert unpacked(packed(()), ()) == ()


@pytest.mark.slow
@pytest.mark.parametrize("method", [fedper, pytest.param(fedrep, marks=pytest.mark.slow)])
def test_a_method_whose_clients_rows_lie_in_tiles_is_the_same(method, monkeypatch):
    """Half of the clients take part, some leave and come back, and of every one predictions are made."""
    churn = [fc.types.Churn(2, leave=(1, 4)), fc.types.Churn(3, join=(4,))]

    def found(rate):
        own = method(nn.mlp((5,)), local=sgd(rate, batch_size=8, epochs=1), participation=0.5)
        result = fc.simulate(own, blobs(), rounds=5, churn=churn, progress=False)
        rows = jax.tree.leaves(result.state.clients.own)
        predicted = [result.predict(blobs().test.x[client], client) for client in (0, 1, 4)]
        return result.state.clusters, predicted, rows[0].shape

    expected, told, shape = found(0.1)
    assert len(shape) == 2
    monkeypatch.setattr(tiles_module, "MOST_PADDING", 1.0)
    # Another rate to the last bit, so that no program is known.
    same, predicted, shape = found(float(np.nextafter(np.float32(0.1), np.float32(1))))
    assert shape[1:] == (8, 128)
    chex.assert_trees_all_close(same, expected, rtol=1e-4, atol=1e-5)
    chex.assert_trees_all_close(predicted, told, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_a_run_on_tiles_is_the_same(participation, monkeypatch):
    """First models of single clients, whole and drawn cohorts; the population lies in tiles."""
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 255, (6, 5, 28, 28)).astype(np.uint8), rng.integers(0, 10, (6, 5)).astype(np.int32)
    method = ifca(nn.linear(), clusters=2, local=sgd(0.1, batch_size=4, steps=2), participation=participation)
    info, mapping, keys = DatasetInfo("images", (28, 28), 10), parallel.client_mapping("chunked", 2), run_keys(0)

    def rounds():
        data = ClientData(x, y, np.full(6, 5, np.int32))
        train = parallel.place_population(data, info, mapping)
        state, report = method.init(keys.initialization, train)
        state = parallel.place_state(state, mapping)
        return train, run_segment(keys, state, train, None, report, jnp.asarray(2), algorithm=method)

    _, expected = rounds()
    monkeypatch.setattr(rows_module, "platform", lambda mapping: "tpu")
    train, found = rounds()
    assert isinstance(train.data.x, Tiled)
    chex.assert_trees_all_close(found, expected, rtol=1e-5, atol=1e-6)
