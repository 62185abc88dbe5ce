"""Every method with local updates and parameters that nobody chose: optimisers with a state, narrow numbers."""

import functools
import inspect

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen

from fedjax_cluster import local, nn, optimizers, parallel
from fedjax_cluster.algorithms import REGISTRY, fedsoft
from fedjax_cluster.simulation.loop import simulate
from fedjax_cluster.simulation.segment import run_keys
from tests.federations import blobs, one_step

MOMENTUM = optimizers.named("sgd", learning_rate=0.1, momentum=0.9)


def build(name, model, own, **options):
    factory = REGISTRY[name]
    clusters = {"clusters": 2} if "clusters" in inspect.signature(factory).parameters else {}
    return factory(model, local=own, **clusters, **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [("ditto", {}), ("fedper", {}), ("fedrep", {}), ("pfedme", {}), ("scaffold", {"control": "gradient"})],
)
def test_an_optimiser_with_a_state_starts_on_each_device(name, options):
    """Its zeros were made in the place of the common model, which lies on all devices, and refused."""
    algorithm = build(name, nn.linear(), local.sgd(MOMENTUM, batch_size=4, steps=2), participation=0.5, **options)
    one, two = (
        simulate(
            algorithm,
            blobs(clients=6),
            rounds=2,
            mapping=parallel.client_mapping("scan", devices=jax.devices()[:count]),
            progress=False,
        )
        for count in (1, 2)
    )
    chex.assert_trees_all_close(one.state.clusters.params, two.state.clusters.params, rtol=1e-5, atol=1e-6)


class Narrow(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.Dense(4, name="output", param_dtype=jnp.bfloat16)(x)


FIRST = ("fedavgm", "fedsoft", "fesem", "ifca", "scaffold")
OTHERS = [pytest.param(name, marks=pytest.mark.slow) for name in sorted(set(REGISTRY) - set(FIRST))]


@pytest.mark.parametrize(
    "name", [*FIRST, *(pytest.param(n, marks=pytest.mark.slow) for n in sorted(set(REGISTRY) - set(FIRST)))]
)
def test_parameters_of_16_bits_stay_so(name):
    if name in ("fedproto", "flag", "pacfl"):
        pytest.skip("the model's last layer is its only one, or the start is of whole runs")
    algorithm = build(name, nn.from_flax(Narrow()), local.sgd(0.1, batch_size=4, steps=2))
    mapping = parallel.client_mapping("scan", devices=jax.devices()[:1])
    federation = blobs(clients=6)
    population = parallel.place_population(federation.train, federation.info, mapping)
    with jax.numpy_dtype_promotion("standard"):
        state, info = algorithm.init(run_keys(0).initialization, population)
        new, report = jax.eval_shape(functools.partial(one_step, algorithm), population, state)
    chex.assert_trees_all_equal_shapes_and_dtypes((new, report), (state, info))
    assert {leaf.dtype for leaf in jax.tree.leaves(new.clusters.params)} == {jnp.dtype(jnp.bfloat16)}


@pytest.mark.slow
def test_fedsofts_pull_is_of_the_parameters_as_they_are():
    """Of their bfloat16 values, in which gradients are computed here, a model at its centre was pulled away from it."""
    own = local.sgd(0.1, batch_size=None, steps=1, precision="bfloat16")
    federation = blobs(clients=4)
    free, pulled = (
        simulate(
            fedsoft(nn.linear(), local=own, clusters=1, proximal=weight), federation, rounds=1, progress=False
        ).state.clusters.params
        for weight in (0.0, 10.0)
    )
    # A GPU's compiler leaves out roundings to bfloat16 between two operations.
    tolerance = 0 if jax.default_backend() == "cpu" else 1e-2
    for a, b in zip(*map(jax.tree.leaves, (free, pulled)), strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance)


@pytest.mark.parametrize("name", ["fedsoft", "scaffold"])
def test_a_local_update_that_takes_no_further_term_is_refused_at_once(name):
    class Own:
        run = first_loss = first_gradient = init_optimizer = batch_rows = to_json = lambda self, *given: None

    with pytest.raises(ValueError, match=r"the local update cannot be .*; use local\.sgd"):
        build(name, nn.linear(), Own())
