"""A model that is one's own functions: each mistake is one line before anything is computed."""

import dataclasses
import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_cluster import local, nn
from fedjax_cluster.algorithms import fedavg, flag, ifca, pacfl
from fedjax_cluster.algorithms.per_fedavg import MetaGradient
from fedjax_cluster.nn.losses import objective
from fedjax_cluster.simulation.identity import identity_of
from fedjax_cluster.simulation.loop import simulate
from fedjax_cluster.simulation.own_models import check_model
from fedjax_cluster.types import Model, Variables
from tests.federations import INFO, blobs

UPDATE = local.sgd(0.1, batch_size=4, steps=1)
TASK = objective("cross_entropy")
INPUTS, CLASSES = int(np.prod(INFO.input_shape)), INFO.num_classes


def init(rng_key, info):
    return Variables({"w": jnp.zeros((INPUTS, info.num_classes))}, {})


def outputs_of(variables, x):
    return x.reshape(len(x), -1) @ variables.params["w"]


def apply(variables, x, *, train, rng_key=None):
    return outputs_of(variables, x), variables.stats


def run(**spoilt):
    model = Model(init, apply, TASK.loss, TASK.predict, TASK.metrics)._replace(**spoilt)
    method = ifca(model, clusters=2, local=local.sgd(0.1, batch_size=4, steps=1), start="random")
    return simulate(method, blobs(clients=4), rounds=1, progress=False)


@pytest.mark.parametrize(
    ("spoilt", "message"),
    [
        ({"init": lambda key, info: {"w": 0}}, r"model's init returns a dict; it must return fc.types.Variables\("),
        (
            {"init": lambda key, info: 1 / 0},
            "model's init fails on a key and the data's description: ZeroDivisionError",
        ),
        (
            {"init": lambda key, info: Variables({"w": jnp.zeros((INPUTS, CLASSES - 1))}, {})},
            f"apply gives {CLASSES - 1} outputs, but .* has {CLASSES} classes; give as many outputs",
        ),
        (
            {"init": lambda key, info: Variables({"w": jnp.zeros((INPUTS + 1, CLASSES))}, {})},
            r"model's apply fails on x of shape \(2, .*, float32: TypeError: dot_general requires",
        ),
        (
            {"apply": lambda variables, x: x},
            r"apply takes \(variables, x\), and is called as apply\(variables, x, train=",
        ),
        (
            {"apply": lambda variables, x, *, train, rng_key=None: outputs_of(variables, x)},
            rf"apply returns an array of shape \(2, {CLASSES}\); it must return two: outputs, and variables.stats",
        ),
        (
            {"apply": lambda variables, x, *, train, rng_key=None: (outputs_of(variables, x), {"a": 1.0})},
            "apply returns stats .*, of which its init had .*; return variables.stats where there are none",
        ),
        (
            {
                "apply": lambda variables, x, *, train, rng_key=None: (
                    outputs_of(variables, x),
                    {"n": 1} if train else {},
                )
            },
            r"apply returns stats PyTreeDef\({'n': \*}\) in training, of which its init had PyTreeDef\({}\)",
        ),
        (
            {
                "init": lambda key, info: Variables(
                    {"w": jnp.zeros((INPUTS, CLASSES))}, {"n": jnp.zeros((), jnp.int32)}
                ),
                "apply": lambda variables, x, *, train, rng_key=None: (
                    outputs_of(variables, x),
                    {"n": jnp.ones(()) if train else variables.stats["n"]},
                ),
            },
            r"apply returns float32\[\] in training in its stats, which is int32\[\] in init; keep that",
        ),
        (
            {"apply": lambda variables, x, *, train, rng_key=None: (outputs_of(variables, x), 1 / 0 if train else {})},
            "apply fails on x of shape .*, in training: ZeroDivisionError",
        ),
        (
            {"metrics": lambda predictions, y, mask: {"loss": jnp.ones(()), "purity": jnp.ones(())}},
            "metrics gives 'purity', which a run has already; give it another name",
        ),
        (
            {"loss": lambda outputs, y: outputs.sum()},
            r"loss gives an array of shape \(\) for 2 examples; it must give one",
        ),
    ],
)
def test_a_models_mistake_is_named(spoilt, message):
    with pytest.raises(ValueError, match=message):
        run(**spoilt)


@jax.tree_util.register_pytree_node_class
class Held:
    """Statistics in a node that prints its address."""

    def __init__(self, value):
        self.value = value

    def tree_flatten(self):
        return (self.value,), None

    @classmethod
    def tree_unflatten(cls, _, values):
        return cls(*values)


def in_groups(variables, x, *, train, rng_key=None):
    """As a ghost batch norm has it: of whole batches alone."""
    if train:
        x = x.reshape(-1, 4, INPUTS).reshape(-1, INPUTS)
    return outputs_of(variables, x), variables.stats


@pytest.mark.parametrize(
    "own",
    [
        {},
        {
            "init": lambda key, info: Variables(
                {"w": jnp.zeros((INPUTS, CLASSES))}, [Held(jnp.ones(2)), Held(jnp.ones(3))]
            )
        },
        {"apply": in_groups},
    ],
)
def test_a_model_that_fits_runs(own):
    assert run(**own).history["round"].tolist() == [0.0]


def test_our_own_models_are_not_traced_for_it(monkeypatch):
    model = nn.linear()
    monkeypatch.setattr("jax.eval_shape", lambda *_: pytest.fail("it was"))
    check_model(model, blobs(clients=4))


def test_a_loss_that_is_not_the_one_reported_is_said(caplog):
    """Under one name there was a hinge loss of training rows and a cross entropy of test rows."""

    def hinge(outputs, y):
        return jnp.maximum(0.0, 1.0 - outputs[jnp.arange(len(y)), y])

    model, federation = nn.linear(), blobs(clients=4)
    check_model(model, federation)
    assert not caplog.text
    check_model(model._replace(loss=hinge), federation)
    assert "the model's loss, hinge, but the loss on test rows is that of its metrics" in caplog.text
    caplog.clear()
    check_model(model._replace(loss=hinge, metrics=lambda predictions, y, mask: {"loss": y.mean()}), federation)
    assert not caplog.text


def scaled(function, times, *arguments):
    return jax.tree.map(lambda leaf: times * leaf, function(*arguments))


def test_an_edited_part_of_a_method_that_is_not_started_again_is_another_method():
    """A hook of one's own was not looked at where a template spares the start."""

    def own(degrees):
        return type("own", (pacfl,), {"find_threshold": lambda *arguments: (degrees, (), None)}, abstract=True)

    federation, sources = blobs(clients=3), []
    original = inspect.getsource
    with pytest.MonkeyPatch.context() as patched:
        for degrees in (90.0, 0.01):
            cls = own(degrees)
            patched.setattr(inspect, "getsource", lambda of, cls=cls, d=degrees: str(d) if of is cls else original(of))
            sources.append(identity_of(cls(nn.linear(), clusters=3, local=UPDATE), federation, 0, 10, None, ()))
    assert sources[0]["programs"]["the method's start"] != sources[1]["programs"]["the method's start"]


def test_second_models_and_what_a_step_follows_are_part_of_the_experiment():
    """Both were "custom" or left out, so that a run directory gave another experiment's result."""
    federation = blobs(clients=3)

    def identity(algorithm):
        return identity_of(algorithm, federation, 0, 10, None, ())

    def light(model):
        return identity(flag(nn.linear(), clusters=2, light_model=model, local=UPDATE))

    small, own = nn.mlp((8,)), nn.linear()
    assert light(small) == light(nn.mlp((8,)))
    assert light(small) != light(nn.mlp((16,)))
    first, second = (light(own._replace(predict=lambda outputs, times=times: times * outputs)) for times in (1.0, 2.0))
    assert first["programs"] != second["programs"]
    for part in ("loss", "metrics"):  # which decide the search alone
        theirs = [own._replace(**{part: functools.partial(scaled, getattr(own, part), times)}) for times in (1.0, 2.0)]
        first, second = map(light, theirs)
        assert first["programs"] != second["programs"], part
    assert "options" not in light(None)

    def following(gradient):
        return identity(fedavg(nn.linear(), local=dataclasses.replace(UPDATE, gradient=gradient)))

    gradients = [None, MetaGradient("first-order", 0.5, 1e-3), MetaGradient("first-order", 0.1, 1e-3)]
    assert len({str(following(gradient)) for gradient in gradients}) == 3
