"""Sums over very many clients are those of their numbers, whatever their order and the blocks they are added up in."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_cluster import parallel
from fedjax_cluster.parallel import loop
from fedjax_cluster.parallel.contributions import Contribution
from fedjax_cluster.types import ClientData, DatasetInfo


def population(clients, chunk):
    mapping = parallel.client_mapping("chunked" if chunk else "scan", chunk, jax.devices()[:1])
    values = jnp.arange(clients, dtype=jnp.float32)[:, None, None]
    data = ClientData(values, jnp.zeros((clients, 1), jnp.int32), jnp.ones(clients, jnp.int32))
    return parallel.place_population(data, DatasetInfo("numbers", (1,), 2), mapping)


def summed(population, value, slots=3):
    """Sums by client number modulo the slots, and each value."""

    def fn(client):
        return client.index % slots, value(client)

    @jax.jit
    def run(population):
        return parallel.for_each_client(
            fn,
            parallel.whole_population(population),
            num_slots=slots,
            reduce=lambda found: Contribution(found[0].astype(jnp.int32), jnp.float32(0.37), found[1]),
            collect=lambda found: found[1],
        )

    return run(population)


@pytest.mark.parametrize("chunk", [None, 8])
def test_sums_of_a_hundred_thousand_equal_clients_lose_nothing(chunk):
    """Added up one by one, weights came to 2.6e-4 less, and of a million to 3e-3: the mean of their changes to more."""
    clients = 100_000
    found = summed(population(clients, chunk), lambda client: jnp.float32([1.7])).reduced
    expected = np.bincount(np.arange(clients) % 3)
    np.testing.assert_array_equal(found.count, expected)
    np.testing.assert_allclose(found.weight, expected * 0.37, rtol=2e-5)
    np.testing.assert_allclose(found.total[:, 0], expected * 0.37 * 1.7, rtol=2e-5)


@pytest.mark.parametrize("chunk", [None, 3])
@pytest.mark.parametrize("clients", [12, 23, 24, 25])
def test_blocks_take_every_client_once(chunk, clients, monkeypatch):
    """Faults: a last block that goes on to its end, a first one left out, sums that begin anew."""

    def value(client):  # of client 5 nothing can be added
        return jnp.where(client.index == 5, jnp.nan, client.data.x[0])

    whole = summed(population(clients, chunk), value)
    monkeypatch.setattr(loop, "BLOCK", 4)
    blocks = summed(population(clients, chunk), value)
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-6), blocks, whole)
    there = np.setdiff1d(np.arange(clients), 5)
    sums = np.bincount(there % 3, weights=0.37 * there)
    np.testing.assert_allclose(blocks.reduced.total[:, 0], sums, rtol=1e-5)
    assert (int(blocks.reduced.num_rejected), blocks.accepted.sum()) == (1, clients - 1)
