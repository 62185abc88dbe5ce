"""What messages hold: control variates, prototypes and profiles are of parameters, models of statistics too."""

import flax.linen as linen
import jax
import jax.numpy as jnp
import pytest

from fedjax_cluster import algorithms, local, nn, tree
from fedjax_cluster.algorithms import fedper, fedproto, flag, ifca, pacfl, scaffold, stocfl
from fedjax_cluster.simulation import simulate
from tests.federations import blobs

OWN = local.sgd(0.05, batch_size=8, steps=1)
ROUNDS, CLIENTS, HIDDEN = 3, 6, 5


class Normed(linen.Module):
    """Two layers, and batch norm with its statistics between them."""

    num_outputs: int

    @linen.compact
    def __call__(self, x, train=False):
        x = linen.Dense(HIDDEN, name="hidden")(x.reshape(len(x), -1))
        x = linen.BatchNorm(use_running_average=not train, name="norm")(x)
        return linen.Dense(self.num_outputs, name="output")(x)


NORMED = nn.from_flax(Normed)


def sent(method, **options):
    result = simulate(method, blobs(clients=CLIENTS), rounds=ROUNDS, progress=False, **options)
    variables = result.state.clusters
    slots = variables.active.shape[0]
    params, stats = (4 * tree.size(of) / slots for of in (variables.params, variables.stats))
    assert stats == 4 * 2 * HIDDEN
    return result, params, stats


def test_control_variates_have_no_statistics():
    result, params, stats = sent(scaffold(NORMED, local=OWN))
    each = ROUNDS * CLIENTS * (2 * params + stats)
    assert (result.summary["bytes_down"], result.summary["bytes_up"]) == pytest.approx((each, each))


def test_prototypes_are_of_the_embedding_alone():
    result, _, _ = sent(fedproto(NORMED, local=OWN))
    classes = sum(len(set(y[:count].tolist())) for _, y, count in zip(*result.federation.train, strict=True))
    assert result.summary["bytes_up"] == pytest.approx(ROUNDS * classes * 4 * HIDDEN)


def test_statistics_follow_their_layers():
    result, params, stats = sent(fedper(NORMED, local=OWN, shared_layers=("hidden", "norm")))
    own = 4 * (HIDDEN + 1) * result.federation.info.num_classes
    assert result.summary["bytes_up"] == pytest.approx(ROUNDS * CLIENTS * (params - own + stats))
    result, params, stats = sent(ifca(NORMED, clusters=3, local=OWN, start="random", shared_layers=("hidden", "norm")))
    assert result.summary["bytes_down"] == pytest.approx(ROUNDS * CLIENTS * (params - own + stats + 3 * own))


def test_what_clusters_compare_has_no_statistics():
    result, params, stats = sent(stocfl(NORMED, clusters=6, local=OWN))
    two = 2 * ROUNDS * CLIENTS * (params + stats)
    assert result.summary["bytes_up"] == pytest.approx(two + CLIENTS * params)
    result, params, stats = sent(flag(NORMED, clusters=6, local=OWN, threshold=0.5, gradient_epochs=1))
    rows = result.history["models_up"][0] * (params + stats) - CLIENTS * (params + stats) - CLIENTS * params
    assert rows % 4 == pytest.approx(0, abs=1e-2)
    assert 0 < rows < CLIENTS * 4 * 3 * 100


def test_a_model_is_as_large_as_its_numbers_are():
    half = nn.from_flax(linen.Dense(3, param_dtype=jnp.bfloat16))
    with jax.numpy_dtype_promotion("standard"):
        result = simulate(algorithms.fedavg(half, local=OWN), blobs(clients=CLIENTS), rounds=ROUNDS, progress=False)
    size = tree.size(result.state.clusters.params)
    assert result.summary["bytes_down"] == ROUNDS * CLIENTS * 2 * size


def test_gradients_of_a_clients_rows_have_no_statistics():
    method = algorithms.cfl(NORMED, clusters=2, local=OWN, similarity_of="gradients")
    result, params, stats = sent(method)
    assert result.summary["bytes_up"] == pytest.approx(ROUNDS * CLIENTS * (2 * params + stats))
    assert result.summary["bytes_down"] == pytest.approx(ROUNDS * CLIENTS * (params + stats))


def test_bases_are_of_float32_whatever_the_model_is():
    half = nn.from_flax(linen.Dense(3, param_dtype=jnp.bfloat16))
    given = {}
    for name, model in (("half", half), ("whole", nn.from_flax(linen.Dense(3)))):
        method = pacfl(model, clusters=3, local=OWN, threshold=10.0)
        with jax.numpy_dtype_promotion("standard"):
            result = simulate(method, blobs(clients=CLIENTS), rounds=1, progress=False)
        size = tree.num_bytes(result.state.clusters.params) / result.state.clusters.active.shape[0]
        given[name] = result.summary["bytes_up"] - CLIENTS * size
    assert given["half"] == pytest.approx(given["whole"])
    assert given["whole"] > 0
