"""What tells a run from another: all that is there or here, of whichever of the two."""

import functools
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_cluster import aggregation, faults, local, nn, optimizers
from fedjax_cluster.algorithms import fedavg
from fedjax_cluster.files import sealed, write_json
from fedjax_cluster.simulation import joint
from fedjax_cluster.simulation.host_code import code_digest
from fedjax_cluster.simulation.identity import identity_of
from fedjax_cluster.simulation.run_directory import VERSION, AnotherExperiment, RunDirectory
from fedjax_cluster.types import LocalResult
from tests.federations import blobs

fading = functools.partial(
    optimizers.schedule, "exponential_decay", init_value=0.1, transition_steps=4, decay_rate=0.01
)


class own_sgd(local.sgd):
    """A local update of one's own, whose options are those of the package's."""

    def run(self, *arguments, **options) -> LocalResult:
        result = super().run(*arguments, **options)
        return result._replace(delta=jax.tree.map(lambda leaf: -leaf, result.delta))


class fading_sgd(local.sgd):
    """A local update of one's own that is told the round."""

    decay = 1.0

    def run(self, *arguments, round=0, **options) -> LocalResult:
        result = super().run(*arguments, round=round, **options)
        return result._replace(
            delta=jax.tree.map(lambda leaf: leaf * self.decay ** jnp.asarray(round, jnp.float32), result.delta)
        )


class _Own(fedavg, abstract=True):
    """A method of one's own with the name of one of the package's."""

    def step(self, rng_key, state, cohort):
        state, info = super().step(rng_key, state, cohort)
        return state._replace(round=2 * state.round), info


_Own.__name__ = "fedavg"


class _Rule(aggregation.trimmed_mean):
    """A rule of one's own with such a name."""

    def combine(self, rows, num_slots):
        return jax.tree.map(lambda leaf: -leaf, super().combine(rows, num_slots))


_Rule.__name__ = "trimmed_mean"


def trained(update=None, cls=fedavg, rate=0.1, **options):
    update = local.sgd(rate, batch_size=8, steps=1) if update is None else update
    return cls(nn.linear(), local=update, **options)


def known(algorithm, federation=None, metrics=()):
    return identity_of(algorithm, blobs() if federation is None else federation, 0, 1, None, (), metrics=metrics)


def refuse(there, here, path, version=VERSION):
    path.mkdir(exist_ok=True)
    write_json(path / "config.json", sealed({"version": version, "identity": there, "experiment": None}))
    RunDirectory(path, there, None, 6)  # its own is taken
    with pytest.raises(AnotherExperiment) as refusal:
        RunDirectory(path, here, None, 6)
    return str(refusal.value)


@pytest.mark.parametrize(
    ("one", "other", "told"),
    [
        (
            trained(rate=optimizers.named("sgd", learning_rate=0.1)),
            trained(rate=optimizers.named("sgd", learning_rate=0.1, momentum=0.9)),
            "momentum is None there and 0.9 here",
        ),
        (trained(rate=fading()), trained(rate=fading(staircase=True)), "staircase is None there and True here"),
        (
            trained(server=optimizers.named("sgd", learning_rate=0.1)),
            trained(server=optimizers.named("sgd", learning_rate=0.1, momentum=0.9)),
            "server.momentum is None",
        ),
        (trained(), trained(own_sgd(0.1, batch_size=8, steps=1)), "some of it is code of one's own here alone"),
        (trained(), trained(cls=_Own), "code of one's own here"),
        (trained(aggregation=aggregation.trimmed_mean()), trained(aggregation=_Rule()), "code of one's own here"),
    ],
    ids=["optimiser", "schedule", "server", "local update", "method", "rule"],
)
def test_what_is_on_one_side_alone_is_another_experiment(one, other, told, tmp_path):
    """What was not there was not compared: the second run was given the first one's figures."""
    there, here = known(one), known(other)
    assert told in refuse(there, here, tmp_path / "run")
    refuse(here, there, tmp_path / "run")


def test_what_a_local_update_of_ones_own_does_in_later_rounds_is_part_of_it(tmp_path, monkeypatch):
    """It was traced at round 0, where two decays are one."""
    own = trained(fading_sgd(0.1, batch_size=8, steps=1))
    there = known(own)
    monkeypatch.setattr(fading_sgd, "decay", 0.1)
    assert "the local update of any round is another program" in refuse(there, known(own), tmp_path / "run")


def test_of_older_versions_what_they_did_not_keep_is_not_compared(tmp_path):
    there, here = (
        known(trained(rate=optimizers.named("sgd", learning_rate=0.1, **more))) for more in ({}, {"momentum": 0.0})
    )
    write_json(tmp_path / "config.json", sealed({"version": 3, "identity": there, "experiment": None}))
    RunDirectory(tmp_path, here, None, 6)


def test_the_task_and_the_shape_of_the_rows_are_part_of_it(tmp_path):
    federation = blobs()
    there = known(trained(), federation)
    for change in ({"task": "regression"}, {"num_classes": 20}):
        here = known(trained(), federation._replace(info=federation.info._replace(**change)))
        assert f"{next(iter(change))} is " in refuse(there, here, tmp_path / "run")
    assert there["input_shape"] == list(federation.info.input_shape)


def _on_the_host(constant):
    def host(predictions):
        return np.float32(constant)

    def figures(predictions, y, mask):
        shape = jax.ShapeDtypeStruct((), jnp.float32)
        return {"own": jax.pure_callback(host, shape, predictions.sum(), vmap_method="sequential")}

    return figures


def test_functions_on_the_host_are_told_apart_by_what_they_hold(tmp_path):
    """Of them a program has the name alone, and a metric of scikit-learn's is one."""
    one, same, other = (known(trained(), metrics=(_on_the_host(each),)) for each in (1, 1, 2))
    assert one == same
    assert "what it calls on the host, by Python 3" in refuse(one, other, tmp_path / "run")


def _helper(value):
    return value * FACTOR


FACTOR = 1.0
HELD = {
    "set": lambda: {"a", "b", "c"},
    "dictionary": lambda: {"of": {"a", "b"}, "rows": np.arange(2000)},
    "generator": lambda: np.random.default_rng(0),
    "key": lambda: jax.random.key(0),
}


def _holding(held):
    return lambda value: (value, held)


def _waiting():
    def function(value):
        return later(value)

    return function
    later = _helper  # never reached: its cell stays empty


@pytest.mark.parametrize("held", HELD)
def test_what_a_function_on_the_host_holds_is_the_same_in_another_process(held):
    """Addresses, the order of sets, and keys, of which NumPy has no array."""
    code = "import sys; sys.path.insert(0, '.'); from tests.simulation import test_identity as t; " + (
        f"print(t.code_digest([t._holding(t.HELD[{held!r}]())]))"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [code_digest([_holding(HELD[held]())])]


def test_functions_on_the_host_are_told_by_whom_they_call_and_all_that_they_hold(monkeypatch):
    rows = np.arange(2000)
    one = [code_digest([each]) for each in (_helper, _holding(rows), _holding({"a": rows}), _waiting())]
    monkeypatch.setitem(globals(), "FACTOR", 2.0)
    rows = np.where(rows == 1000, 0, rows)
    other = [code_digest([each]) for each in (_helper, _holding(rows), _holding({"a": rows}), _waiting())]
    assert [a == b for a, b in zip(one, other, strict=True)] == [False, False, False, True]
    nested = _helper
    for _ in range(40):
        nested = (lambda inner: lambda value, again=inner: inner(again))(nested)
    assert code_digest([nested])


def test_processes_are_asked_for_all_that_tells_a_run_from_another():
    """Fault: with other metrics, or other settings of random numbers, two processes compiled different programs."""

    def confidence(predictions, y, mask):
        return {"confidence": jnp.max(predictions)}

    with jax.threefry_partitionable(False):
        options = {"fault": faults.sign_flip(), "metrics": [confidence]}
        told = identity_of(
            _Own(nn.linear(), local=own_sgd(0.1, batch_size=8, steps=1)), blobs(), 0, 1, None, (), **options
        )
    assert {"metrics", "random_numbers"} <= set(told) <= set(joint.COMPARED)


def test_arrays_that_have_no_buffer_are_told_apart_too():
    """bfloat16, which NumPy does not know by itself."""

    def identity(value):
        held = jnp.full(3, value, jnp.bfloat16)
        model = nn.linear()
        own = model._replace(apply=lambda v, x, **o: model.apply(v, x + held.sum().astype(jnp.float32), **o))
        return known(fedavg(own, local=local.sgd(0.1, batch_size=8, steps=1)))

    assert identity(1.0)["programs"] != identity(2.0)["programs"]
    assert identity(1.0)["programs"] == identity(1.0)["programs"]
    held = jnp.ones(2, jnp.bfloat16)
    assert code_digest([lambda: held])
