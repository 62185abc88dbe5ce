"""Malformed calls of public functions, made from their annotations and options, or from what their arguments are."""

from __future__ import annotations

import dataclasses
import inspect
import typing
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_cluster import local, nn, optimizers
from fedjax_cluster.algorithms import REGISTRY, fedavg
from fedjax_cluster.data import by_name, check_federation, image_folders, local_files, sources
from fedjax_cluster.data.scenarios.registry import SCENARIOS
from fedjax_cluster.experiments import comparison
from fedjax_cluster.experiments import runs as running
from fedjax_cluster.experiments.config import RunConfig
from fedjax_cluster.options import Bound, Options, checked, described_options
from fedjax_cluster.simulation.arguments import check_arguments
from tests.federations import blobs

NAN, INF = float("nan"), float("inf")
KEY = jax.random.key(0)
NOTHING = object()
SGD = local.sgd(0.1, batch_size=8, steps=1)
# What no argument takes, and numbers that only some do.
OTHERS: dict[str, Any] = {
    "an object": NOTHING,
    "a complex number": 1j,
    "an uncalled class": fedavg,
    "an uncalled function": nn.mlp,
    "an optimiser": optax.sgd(0.1),
    "a ragged list": [[1.0], [1.0, 2.0]],
    "a dictionary of anything": {1: NOTHING},
    "bytes": b"x",
}
NUMBERS: dict[str, Any] = {
    "True": True,
    "text": "no-such-choice",
    "NaN": NAN,
    "inf": INF,
    "-1": -1,
    "0": 0,
    "2.5": 2.5,
    "1e39": 1e39,
    "26 digits": int("9" * 26),
    "None": None,
    "an array": np.ones((2, 3)),
}
MATRIX = np.eye(4, dtype=np.float32) * 0.5 + 0.5
LABELS = np.array([0, 0, 1, 1])
BAD_ARRAYS: dict[str, Any] = {
    "text": "x",
    "None": None,
    "complex": np.ones((4, 4), complex),
    "of objects": np.full((4, 4), NOTHING),
    "of one axis too many": np.ones((4,) * 6),
    "empty": np.zeros((0, 0)),
    "of NaN": np.full((4, 4), NAN),
    "infinite": np.full((4, 4), INF),
    "beyond float32": np.full((4, 4), 1e300),
    "ragged": [[1.0], [1.0, 2.0]],
}
ASYMMETRIC = np.triu(np.ones((4, 4)))
BAD_LABELS: dict[str, Any] = {
    "text": "x",
    "None": None,
    "floats": [0.0, 1.0, NAN, 1.0],
    "of two axes": np.zeros((4, 1), int),
    "of another length": np.zeros(3, int),
    "below -1": [0, 1, -2, 0],
    "of 64 bits": [0, 1, 2**40, 0],
    "truth values": [True, False, True, True],
}
BAD_MASKS: dict[str, Any] = {
    "text": "x",
    "whole numbers": [1, 0, 1, 1],
    "of another length": [True],
    "of nobody": NOTHING,
}
BAD_COUNTS: dict[str, Any] = {
    **{name: NUMBERS[name] for name in ("True", "text", "NaN", "-1", "2.5", "an array")},
    "an object": NOTHING,
}
BAD_KEYS: dict[str, Any] = {
    "a seed": 0,
    "text": "x",
    "None": None,
    "several": jax.random.split(KEY),
    "floats": np.ones(2),
}
BAD_SCALARS: dict[str, Any] = {
    "text": "x",
    "NaN": NAN,
    "-1": -1,
    "complex": 1j,
    "an array": np.ones(3),
    "an object": NOTHING,
}
BAD_CHOICES: dict[str, Any] = {"misspelt": "no-such-choice", "None": None, "a list": ["gap"], "an object": NOTHING}


class Call(NamedTuple):
    name: str  # function(argument=what)
    argument: str
    function: Callable[..., Any]
    given: dict[str, Any]


class Spec(NamedTuple):
    function: Callable[..., Any]
    given: dict[str, Any]  # a call that is good
    bad: dict[str, dict[str, Any]]  # argument -> values, by what they are

    def calls(self) -> Iterator[Call]:
        for argument, values in self.bad.items():
            for what, value in values.items():
                name = f"{self.function.__name__}({argument}={what})"
                yield Call(name, argument, self.function, {**self.given, argument: value})


def values_for(hint: Any, bound: Bound | None) -> dict[str, Any]:
    """Values for an argument by its annotation; no number that a stated bound allows, no value that is of the type."""

    def is_good(value: Any) -> bool:
        try:
            checked("argument", value, hint, bound)
        except ValueError:
            return False
        return bound is not None or value is None or not isinstance(value, int | float) or value is True

    return {name: value for name, value in {**OTHERS, **NUMBERS}.items() if not is_good(value)}


def annotated(function: Callable[..., Any], *, but: tuple[str, ...] = (), **given: Any) -> Spec:
    """All arguments of a function, or options of a value, by their annotations."""
    if isinstance(function, type) and issubclass(function, Options):
        hints = {option.name: option.hint for option in described_options(function)}
        bounds = {field.name: field.metadata["bound"] for field in dataclasses.fields(function)}
    else:
        found = typing.get_type_hints(function)
        hints = {name: found.get(name, Any) for name in inspect.signature(function).parameters}
        bounds = bounds_of(function)
    names = [name for name, hint in hints.items() if hint is not Any and name not in but]
    return Spec(function, given, {name: values_for(hints[name], bounds.get(name)) for name in names})


def bounds_of(function: Callable[..., Any]) -> dict[str, Bound]:
    """The bounds that its arguments are checked by, under whatever else is wrapped about it."""
    closure = inspect.getclosurevars(function).nonlocals
    if "bounds" in closure or not hasattr(function, "__wrapped__"):
        return closure.get("bounds", {})
    return bounds_of(function.__wrapped__)


def methods() -> Iterator[Spec]:
    for cls in REGISTRY.values():
        names = {option.name for option in described_options(cls)}
        yield annotated(cls, model=nn.linear(), local=SGD, **({"clusters": 2} if "clusters" in names else {}))


def models() -> Iterator[Spec]:
    for make in (nn.linear, nn.mlp, nn.cnn, nn.lenet5, nn.resnet18, nn.mobilenet_v2, nn.lstm, nn.csi_autoencoder):
        yield annotated(make)
    yield annotated(nn.from_flax, module=linen.Dense(2))
    yield annotated(nn.mixed_precision, model=nn.linear())
    yield from convolutions()


def data() -> Iterator[Spec]:
    digits = sources.digits()
    needed = {"mixed_datasets": {"examples": [digits, digits]}, "users": {"user_ids": np.arange(1797) % 24}}
    for name, build in SCENARIOS.items():
        own = typing.get_type_hints(build)["examples"] is type(None)
        yield annotated(build, clients=24, **({} if own else {"examples": digits, **needed.get(name, {})}))
    yield annotated(sources.tfds, but=("name",), name="no_such_set")
    yield annotated(by_name.load, but=("name",), name="no_such_set")
    yield annotated(local_files.npz, path="no-such-path")
    yield annotated(local_files.table, path="no-such-path")
    yield annotated(image_folders.image_folder, path="no-such-path")
    yield annotated(check_federation, federation=blobs())
    yield arrays()


def runs() -> Iterator[Spec]:
    method = fedavg(nn.linear(), local=SGD)
    yield annotated(local.sgd, learning_rate=0.1, batch_size=8, steps=1)
    yield annotated(RunConfig)
    yield annotated(check_arguments, algorithm=method, federation=blobs(), rounds=2)
    yield annotated(running.run, config=RunConfig(method="fedavg"))
    yield annotated(running.resume, run_dir="no-such-directory")
    yield annotated(running.load_run, run_dir="no-such-directory")
    yield annotated(comparison.compare, but=("done", "failed", "watch"), configs={"a": RunConfig(method="fedavg")})
    rates = {**BAD_SCALARS, "0": 0, "inf": INF}
    bad = {"optimizer": {**OTHERS, **NUMBERS}, "learning_rate": rates, "no_such_number": {"1": 1}}
    yield Spec(optimizers.named, {"optimizer": "sgd", "learning_rate": 0.1}, bad)
    fading = {"name": "exponential_decay", "init_value": 0.1, "transition_steps": 1, "decay_rate": 0.5}
    bad = {"name": {**OTHERS, **NUMBERS}, "init_value": {"an object": NOTHING, "NaN": NAN, "text": "x", "-1": -1}}
    yield Spec(optimizers.schedule, fading, {**bad, "no_such_number": {"1": 1}})


def arrays() -> Spec:
    x, y = np.linspace(0, 1, 12).reshape(6, 2), np.arange(6) % 2
    arrays = {
        "text": "x",
        "None": None,
        "complex": x * 1j,
        "of NaN": x * NAN,
        "beyond float32": x * 1e300,
        "empty": x[:0],
        "of another length": x[:4],
        "ragged": [[1.0], [1.0, 2.0]],
        "of text": np.full((6, 2), "x"),
        "a number": 1.0,
    }
    labels = {
        **{name: value for name, value in arrays.items() if name != "of another length"},
        "whole floats": y.astype(float),
        "one-hot": np.eye(2, dtype=int)[y],
        "negative": y - 1,
        "of 64 bits": y + 2**40,
    }
    ids = {
        "NaN": np.array([0.0, 0.0, NAN, NAN, 1.0, 1.0]),
        "None": [None, None, 1, 1, 2, 2],
        "NaN among text": ["a", "a", NAN, NAN, "b", "b"],
        "text": "x",
        "of another length": [0, 0, 1, 1],
        "of two axes": np.zeros((6, 1)),
        "of several kinds": np.array([0, 0, "a", "a", (), ()], object),
        "each its own": np.arange(6),
        "an object": NOTHING,
    }
    numbers = {name: NUMBERS[name] for name in ("True", "text", "NaN", "-1", "0", "2.5", "an array")}
    bad = {
        "x": arrays,
        "y": labels,
        "client_ids": ids,
        "num_classes": numbers,
        "task": {"misspelt": "regresion", "1": 1},
    }
    bad |= {
        "test_fraction": {**numbers, "inf": INF},
        "seed": {k: v for k, v in numbers.items() if k != "0"},
        "name": {"1": 1},
    }
    return Spec(sources.from_arrays, {"x": x, "y": y, "client_ids": [0, 0, 0, 1, 1, 1]}, bad)


def convolutions() -> Iterator[Spec]:
    x, kernel = jnp.ones((1, 4, 4, 1)), jnp.ones((3, 3, 1, 2))
    sides = {name: NUMBERS[name] for name in ("text", "-1", "0", "2.5", "NaN", "an array")} | {"three": (1, 1, 1)}
    images = {"text": "x", "None": None, "of three axes": jnp.ones((4, 4, 1))}
    pads = {"misspelt": "FULL", "2.5": 2.5, "None": None, "one pair": ((1, 1),), "an object": NOTHING}
    bad = {"x": images, "kernel": images, "strides": sides, "kernel_dilation": sides, "padding": pads}
    yield Spec(nn.convolution, {"x": x, "kernel": kernel}, {**bad, "feature_group_count": BAD_COUNTS | {"0": 0}})
    for pool in (nn.max_pool, nn.avg_pool):
        yield Spec(
            pool, {"x": x, "window_shape": 2}, {"x": images, "window_shape": sides, "strides": sides, "padding": pads}
        )
    yield Spec(nn.Sized, {"module": linen.Dense}, {"module": OTHERS})
