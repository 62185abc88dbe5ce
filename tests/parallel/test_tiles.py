"""Clients' rows in tiles, as a TPU holds them: what per-client functions and `init` see stays the same."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_cluster import nn, parallel
from fedjax_cluster.algorithms import ifca
from fedjax_cluster.local import sgd
from fedjax_cluster.parallel import rows as rows_module
from fedjax_cluster.parallel.tiles import Tiled, tiled, untiled
from fedjax_cluster.simulation.segment import run_keys, run_segment
from fedjax_cluster.types import ClientData, DatasetInfo


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
