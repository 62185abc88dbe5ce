"""Calls whose arguments do not fit are answered in one line that names what is near and what is needed."""

import inspect
import pickle

import pytest

from fedjax_cluster import data, local, nn
from fedjax_cluster.algorithms import ifca
from fedjax_cluster.experiments.config import RunConfig
from fedjax_cluster.keywords import ArgumentsError
from fedjax_cluster.nn.precision import in_32_bits
from fedjax_cluster.simulation.loop import simulate

SGD = local.sgd(0.1, batch_size=4, steps=1)
NEEDS = "it needs model, local and clusters; it may have participation,"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: ifca(nn.linear(), clutsers=2, local=SGD),
            f"ifca has no argument 'clutsers'; did you mean clusters? {NEEDS}",
        ),
        (
            lambda: ifca(nn.linear(), clusters=2, lcoal=SGD),
            f"ifca has no argument 'lcoal'; did you mean local? {NEEDS}",
        ),
        (lambda: ifca(nn.linear(), clusters=2), "ifca lacks local (one step gives"),
        (lambda: ifca(), f"; {NEEDS}"),
        (
            lambda: ifca(nn.linear(), 2, SGD),
            "ifca takes only model by position, but 3 were given; give by name: local,",
        ),
        (lambda: ifca(nn.linear(), model=1, clusters=2, local=SGD), "given model twice"),
        (
            lambda: local.sgd(0.1, batchsize=4, zzz=1),
            "sgd has no arguments 'batchsize', 'zzz'; did you mean batch_size?",
        ),
        (lambda: RunConfig(methd="ifca"), "did you mean method? help(RunConfig) lists what it takes"),
        (lambda: nn.mlp(hiden=(3,)), "mlp has no argument 'hiden'; did you mean hidden?"),
        (lambda: simulate(ifca, None, rounds=1, eval_evry=2), "'eval_evry'; did you mean eval_every?"),
        (lambda: data.scenarios.rotated(data.digits()), "rotated lacks clients; it needs examples and clients;"),
    ],
)
def test_a_call_that_does_not_fit_says_what_would(call, message):
    with pytest.raises(ArgumentsError) as refused:
        call()
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)
    assert isinstance(refused.value, TypeError)
    assert isinstance(refused.value, ValueError)


def test_a_constructor_keeps_its_signature_and_its_values_can_be_copied():
    assert next(iter(inspect.signature(ifca).parameters.values())).name == "model"
    assert pickle.loads(pickle.dumps(SGD)) == SGD


def test_a_mistake_inside_a_call_that_fits_stays_as_it_is():
    with pytest.raises(TypeError, match="unsupported operand") as raised:
        in_32_bits(lambda a: a + None)(1)
    assert not isinstance(raised.value, ArgumentsError)
