"""Products of what methods make of changes, models and figures are of whole float32 numbers on every device.

Accelerators round the factors of a product to 8 or 11 bits where nothing is asked for; averages of models are no place
for that. Training and predictions follow the model, which says its precision itself.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import ClosedJaxpr, Jaxpr

from fedjax_cluster import local, nn
from fedjax_cluster.algorithms import cfl, fedgwc, flexcfl
from fedjax_cluster.inference import mixed_predictions
from fedjax_cluster.simulation.segment import run_keys
from tests.algorithms.test_protocol import CLIENTS, METHODS, build, place
from tests.federations import blobs, one_step

HIGHEST = jax.lax.Precision.HIGHEST


def apply(variables, x, *, train, rng_key=None):
    """A hidden layer, without a product."""

    def dense(x, layer):
        return (x[:, :, None] * layer["kernel"][None]).sum(1) + layer["bias"][None]

    layers = variables.params
    hidden = jax.nn.relu(dense(x.reshape(len(x), -1).astype(jnp.float32), layers["hidden_0"]))
    return dense(hidden, layers["output"]), variables.stats


MODEL = nn.mlp(hidden=(5,))._replace(apply=apply)
UPDATE = local.sgd(0.2, batch_size=4, epochs=1)
OTHERS = {
    "cfl of gradients": cfl(MODEL, clusters=3, similarity_of="gradients", local=UPDATE),
    "fedgwc by columns": fedgwc(MODEL, clusters=3, perceived="columns", local=UPDATE),
    "flexcfl that mixes": flexcfl(MODEL, clusters=3, mixing=0.1, participation=0.4, local=UPDATE),
    "flexcfl of differences": flexcfl(MODEL, clusters=3, measure="madc", local=UPDATE),
}


def products(program):
    """The precision of every product in a traced program."""
    for equation in program.eqns:
        if equation.primitive.name == "dot_general":
            yield equation.params["precision"], str(equation.source_info.traceback)
        for part in jax.tree.leaves(equation.params, is_leaf=lambda value: isinstance(value, ClosedJaxpr | Jaxpr)):
            if isinstance(part, ClosedJaxpr | Jaxpr):
                yield from products(part.jaxpr if isinstance(part, ClosedJaxpr) else part)


# FedProto's embeddings are those of a Flax module.
ALL = [name for name in (*METHODS, *OTHERS) if name != "fedproto"]
FEW = ("ifca", "fedavg", "flexcfl that mixes")


@pytest.mark.parametrize("name", [name if name in FEW else pytest.param(name, marks=pytest.mark.slow) for name in ALL])
def test_no_product_of_a_method_is_rounded(name):
    algorithm = OTHERS[name] if name in OTHERS else dataclasses.replace(build(name), model=MODEL)
    population, index = place(blobs(clients=CLIENTS)), jnp.asarray(2)
    state, _ = algorithm.init(run_keys(0).initialization, population)
    client = jax.tree.map(lambda leaf: leaf[2], population.data)
    key = jax.random.key(0)
    parts = [
        jax.make_jaxpr(functools.partial(one_step, algorithm))(population, state),
        jax.make_jaxpr(lambda state: algorithm.personalize(key, state, client, index))(state),
    ]
    if algorithm.admit is not None:
        parts.append(jax.make_jaxpr(lambda state: algorithm.admit(key, state, client, index))(state))
    if algorithm.cluster is not None:
        parts.append(jax.make_jaxpr(lambda state: algorithm.cluster(key, state))(state))
    found = [product for part in parts for product in products(part.jaxpr)]
    rounded = [where for precision, where in found if precision != (HIGHEST, HIGHEST)]
    assert not rounded, rounded[0]


def test_mixed_predictions_are_not_rounded():
    info, key = blobs(clients=2).info, jax.random.key(0)
    variables = jax.vmap(lambda key: MODEL.init(key, info))(jax.random.split(key, 2))
    mixed = functools.partial(mixed_predictions, MODEL)
    program = jax.make_jaxpr(mixed)(variables, jnp.full(2, 0.5), jnp.ones((3, *info.input_shape)))
    assert {precision for precision, _ in products(program.jaxpr)} == {(HIGHEST, HIGHEST)}
