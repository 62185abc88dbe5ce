"""Flax modules that are to know whether they are trained, and are not told: a line that says what to do."""

import flax.linen as linen
import jax
import jax.numpy as jnp
import pytest

from fedjax_cluster import nn
from fedjax_cluster.nn import wrapping
from fedjax_cluster.types import DatasetInfo

KEY = jax.random.key(0)
TABLE = DatasetInfo("table", (4,), 3)
X = jnp.ones((2, 4))


class Normed(linen.Module):
    """As other libraries call the flag."""

    @linen.compact
    def __call__(self, x, is_training=False):
        return linen.Dense(3)(linen.BatchNorm(use_running_average=not is_training)(x))


class ByField(linen.Module):
    train: bool = False

    @linen.compact
    def __call__(self, x):
        return linen.Dense(3)(linen.BatchNorm(use_running_average=not self.train)(x))


class ByAnything(linen.Module):
    @linen.compact
    def __call__(self, x, **options):
        return linen.Dropout(0.5, deterministic=not options.get("train", False))(linen.Dense(3)(x))


class AlwaysDropping(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.Dropout(0.5, deterministic=False)(linen.Dense(3)(x))


class Noisy(linen.Module):
    @linen.compact
    def __call__(self, x, train=False):
        x = linen.Dense(3)(x)
        return x + jax.random.normal(self.make_rng("noise"), x.shape) if train else x


class Asking(linen.Module):
    @linen.compact
    def __call__(self, x, temperature):
        return linen.Dense(3)(x) / temperature


def test_is_training_is_passed_on():
    model = nn.from_flax(Normed())
    variables = model.init(KEY, TABLE)
    stats = model.apply(variables, X, train=True)[1]
    assert float(stats["BatchNorm_0"]["mean"].sum()) > 0
    assert model.apply(variables, X, train=False)[1] is variables.stats


@pytest.mark.parametrize(
    ("module", "said"),
    [(ByField(), "its BatchNorm keeps its first statistics"), (ByAnything(), "its Dropout drops nothing")],
)
def test_a_module_that_is_not_told_is_warned_of_once(module, said, caplog):
    wrapping.TOLD.clear()
    for _ in range(2):
        nn.from_flax(module).init(KEY, TABLE)
    (record,) = caplog.records
    name = type(module).__name__
    assert record.getMessage() == (
        f"{name}.__call__ takes none of train, training, is_training, deterministic: {said} in training"
    )


class ByItself(linen.Module):
    """That finds out whether it is trained, and has a layer that never drops anything."""

    @linen.compact
    def __call__(self, x):
        x = linen.BatchNorm(use_running_average=not self.is_mutable_collection("batch_stats"))(x)
        x = linen.Dropout(0.0, deterministic=True)(linen.Dense(3)(x))
        return linen.Dropout(0.5, deterministic=not self.has_rng("dropout"))(x)


def test_modules_that_need_not_be_told_are_not_warned_of(caplog):
    for module in (linen.Dense(3), Normed(), ByItself()):
        nn.from_flax(module).init(KEY, TABLE)
    assert not caplog.records


@pytest.mark.parametrize(
    ("module", "train", "message"),
    [
        (AlwaysDropping(), False, "AlwaysDropping draws random numbers outside of training; let its __call__ take"),
        (Noisy(), True, 'Noisy draws random numbers of another stream than "dropout", the only one that'),
    ],
)
def test_random_numbers_that_there_are_not_are_a_line(module, train, message):
    model = nn.from_flax(module)
    variables = model.init(KEY, TABLE)
    with pytest.raises(ValueError, match=message):
        model.apply(variables, X, train=train, rng_key=KEY if train else None)


def test_what_a_module_needs_beside_its_inputs_is_named():
    with pytest.raises(ValueError, match=r"Asking.__call__ needs temperature; of a model it is given inputs, and"):
        nn.from_flax(Asking()).init(KEY, TABLE)
