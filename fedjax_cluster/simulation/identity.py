"""What makes a run this run: options by value, and what has no value by the program that it is traced to."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import platform
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.extend.core import ClosedJaxpr, Jaxpr

from fedjax_cluster import parallel, tree
from fedjax_cluster.aggregation import Aggregation
from fedjax_cluster.aggregation import Rows as SentRows
from fedjax_cluster.data.populations import in_memory
from fedjax_cluster.data.stored import Rows, stored
from fedjax_cluster.described import ADDRESS, described, is_known
from fedjax_cluster.faults import Fault
from fedjax_cluster.files import digest, plain
from fedjax_cluster.optimizers import rate_of
from fedjax_cluster.simulation.evaluation import with_metrics
from fedjax_cluster.simulation.host_code import code_digest
from fedjax_cluster.types import (
    Churn,
    ClientData,
    ClusteredAlgorithm,
    DatasetInfo,
    Federation,
    LocalResult,
    LocalUpdate,
    Measure,
    Model,
    Population,
    PyTree,
    RoundInfo,
    State,
    Variables,
)

USUAL_RANDOM = {"default_prng_impl": "threefry2x32", "threefry_partitionable": True}  # settings of JAX
OF_DATA = ("task", "num_classes", "input_shape")
MOST_READ = 8192  # clients of a population on disk


def identity_of(
    algorithm: ClusteredAlgorithm,
    federation: Federation,
    seed: int,
    eval_every: int,
    eval_clients: int | None,
    churn: Sequence[Churn],
    fault: Fault | None = None,
    metrics: Sequence[Measure] = (),
) -> dict[str, Any]:
    """All that decides a run's result, as JSON; `programs` where some of it has no value, such as a closure."""
    model, known = described(algorithm.model)
    identity = {
        "algorithm": algorithm.name,
        "algorithm_config": dict(algorithm.config),
        "model": model,
        "scenario": federation.info.name,
        "clients": len(federation.train.num_examples),
        "seed": seed,
        "eval_every": eval_every,
        "eval_clients": eval_clients,
        "data": fingerprint(federation),
        **{name: described(getattr(federation.info, name))[0] for name in OF_DATA},
        "churn": [change._asdict() for change in churn],
    }
    if own := {name: described(model)[0] for name, model in _other_models(algorithm)}:
        identity["options"] = own
    if fault is not None:
        identity["fault"] = fault.to_json()
    if metrics:
        identity["metrics"], own = described(list(metrics))
        known = known and own
    random = {name: jax.config.values[f"jax_{name}"] for name in USUAL_RANDOM}
    if random != USUAL_RANDOM:
        identity["random_numbers"] = random
    if not (known and described(algorithm)[1]):
        identity["programs"] = {"jax": jax.__version__, **programs(algorithm, federation, metrics)}
    return plain(identity)


def _other_models(algorithm: ClusteredAlgorithm) -> Iterator[tuple[str, Model]]:
    """The options of a method that are models, which its `config` does not tell apart."""
    for name in algorithm.config:
        if isinstance(own := getattr(algorithm, name, None), Model):
            yield name, own


def fingerprint(federation: Federation) -> int:
    """A checksum of all arrays of a federation."""
    total, others = 0, (federation.train, federation.test, federation.group)
    if stored(federation.train):
        store, test, group = federation.train.x.store, federation.test, federation.group
        total = zlib.crc32(store.digest.encode())
        # What the population itself has of them is told by its digest.
        same = isinstance(test.x, Rows) and test.x.store is store
        known = (group is None) == (store.group is None) and np.array_equal(np.asarray(group), np.asarray(store.group))
        others = None if same else test, None if known else group
    for leaf in jax.tree.leaves(others, is_leaf=lambda leaf: isinstance(leaf, Rows)):
        content = leaf.store.digest.encode() if isinstance(leaf, Rows) else np.ascontiguousarray(leaf).data
        total = zlib.crc32(content, total)
    return total


def programs(algorithm: ClusteredAlgorithm, federation: Federation, metrics: Sequence[Measure] = ()) -> dict[str, str]:
    """Digests of what a run's parts are traced to; the same on any number of devices."""
    model, info = algorithm.model, federation.info
    some = in_memory(federation, [0, 1]) if stored(federation.train) else federation  # for their shapes
    data = jax.tree.map(jnp.asarray, some.train)
    client = jax.tree.map(lambda leaf: leaf[0], data)
    key = jax.random.key(0)
    variables = jax.eval_shape(lambda: model.init(key, info))

    digests = _Digests()
    local: LocalUpdate = getattr(algorithm, "local")  # noqa: B009  a method of the user's own need not have one
    traced = functools.partial(_of_a_model, digests, local, key, info, client)
    own = traced(model, metrics)
    names = ("the model's initialisation", "the model", "the local update", "the metrics")
    found: dict[str, str] = dict(zip(names, own, strict=True))
    for name, other in _other_models(algorithm):
        found |= {f"its {name}": digest(traced(other, ()))}
    if not is_known(type(local)):

        def in_a_round(variables: Variables, round: Array) -> LocalResult:
            return local.run(key, model, variables, client, round=round)

        # Of a number a program has what is made of it alone.
        found["the local update of any round"] = digests.of(in_a_round, variables, jnp.zeros((), jnp.int32))
    schedule = getattr(local, "schedule", None)
    if schedule is not None:
        found["the learning rate"] = digests.of(functools.partial(rate_of, schedule), jnp.zeros((), jnp.int32))
    server = getattr(algorithm, "server", None)
    if isinstance(server, optax.GradientTransformation):
        found["the server's optimiser"] = digests.of(lambda p: server.update(p, server.init(p), p), variables.params)
    rule = getattr(algorithm, "aggregation", None)
    if rule is not None and not is_known(type(rule)):
        found["the aggregation"] = digests.of(functools.partial(_aggregated, rule), variables.params)
    if not is_known(type(algorithm)):
        population, state = _started(algorithm, federation, Population(data, info), key)

        def one_round(state: State) -> tuple[State, RoundInfo]:
            return algorithm.step(key, state, parallel.gather_cohort(population, algorithm.select(key, state)))

        index = jnp.zeros((), jnp.int32)
        found["the method"] = digests.of(one_round, state)
        found["the method's start"] = _start_digest(algorithm, state)
        found["its models of a client"] = digests.of(lambda own: algorithm.personalize(key, own, client, index), state)
        if (admit := algorithm.admit) is not None:
            found["its newcomers"] = digests.of(lambda own: admit(key, own, client, index), state)
    if digests.on_the_host:
        # By their code, which each release of Python has in its own way.
        release = ".".join(platform.python_version_tuple()[:2])
        found[f"what it calls on the host, by Python {release}"] = code_digest(digests.on_the_host)
    return found


def _of_a_model(
    digests: _Digests,
    local: LocalUpdate,
    key: Array,
    info: DatasetInfo,
    client: ClientData,
    model: Model,
    metrics: Sequence[Measure],
) -> list[str]:
    """Digests of a model's initialisation, predictions, training and metrics."""
    variables = jax.eval_shape(lambda: model.init(key, info))

    def prediction(variables: Variables) -> PyTree:
        return model.predict(model.apply(variables, client.x, train=False)[0])

    def training(variables: Variables) -> LocalResult:
        return local.run(key, model, variables, client, round=0)

    def measured(predictions: PyTree) -> PyTree:
        return with_metrics(model, metrics).metrics(predictions, client.y, jnp.ones(len(client.y), bool))

    return [
        digests.of(lambda: model.init(key, info)),
        digests.of(prediction, variables),
        digests.of(training, variables),
        digests.of(measured, jax.eval_shape(prediction, variables)),
    ]


def _started(algorithm: ClusteredAlgorithm, federation: Federation, few: Population, key: Array) -> tuple:
    """Clients and a state before the first round: of a population on disk more than a few only where it takes more."""
    start = algorithm.init if algorithm.template is None else algorithm.template
    there = len(federation.train.num_examples)
    while True:
        try:
            return few, start(key, few)[0]
        except ValueError:  # such as that of more clusters than clients
            count = len(few.data.num_examples)
            if count >= min(there, MOST_READ):
                raise
        some = in_memory(federation, range(min(there, 16 * count)))
        few = Population(jax.tree.map(jnp.asarray, some.train), few.info)


def _start_digest(algorithm: ClusteredAlgorithm, state: State) -> str:
    """Of the state that `init` gives, as far as other devices would give it too; where a run needs none, of the text of
    the classes that are one's own.

    Whole numbers, such as labels, are told apart one by one, others by the size that they have in the mean.
    """
    if algorithm.template is not None:
        with contextlib.suppress(OSError, TypeError):  # what was typed into an interpreter has none
            return digest([inspect.getsource(cls) for cls in type(algorithm).__mro__ if not is_known(cls)])
        return ""
    told = []
    for leaf in jax.tree.leaves(state):
        key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        values = np.asarray(jax.random.key_data(leaf) if key else leaf)
        whole = not values.size or bool((values == np.round(values)).all())
        told.append(
            [list(values.shape), digest(values.astype(np.float64)) if whole else f"{np.abs(values).mean():.2g}"]
        )
    return digest(told)


def _aggregated(rule: Aggregation, params: PyTree) -> PyTree:
    """What a rule of the user's own makes of three changes."""
    if rule.streams:
        return rule.limit({"delta": params})
    return rule.combine(SentRows({"delta": tree.broadcast(params, 3)}, jnp.zeros(3, jnp.int32), jnp.ones(3)), 1)


class _Digests:
    """Digests of programs, and of the functions on the host that these call."""

    def __init__(self):
        self.on_the_host: list[Any] = []

    def of(self, function: Callable[..., Any], *arguments: PyTree) -> str:
        """Of the program that a function is traced to, and of the arrays that it holds."""
        traced = jax.make_jaxpr(function)(*arguments)
        # In a terminal or a notebook its text would have colours.
        text = traced.jaxpr.pretty_print(use_color=False)
        digest = hashlib.blake2b(ADDRESS.sub("", text).encode(), digest_size=8)
        for constant in _constants(traced):
            value = jax.random.key_data(constant) if jnp.issubdtype(constant.dtype, jax.dtypes.prng_key) else constant
            digest.update(np.asarray(value).tobytes())  # bfloat16 has no buffer that Python can read
        self.on_the_host.extend(_called_on_the_host(traced))
        return digest.hexdigest()


def _constants(traced: ClosedJaxpr) -> Iterator[Any]:
    """The arrays that a traced program holds, those of functions inside it that are jitted themselves too."""
    yield from traced.consts
    for _, part in _parts(traced):
        if isinstance(part, ClosedJaxpr):
            yield from _constants(part)


def _called_on_the_host(traced: ClosedJaxpr) -> Iterator[Any]:
    """The functions of `jax.pure_callback` and its like in a traced program."""
    for name, part in _parts(traced):
        if isinstance(part, ClosedJaxpr):
            yield from _called_on_the_host(part)
        elif name == "callback":
            yield getattr(part, "callback_func", part)


def _parts(traced: ClosedJaxpr) -> Iterator[tuple[str, Any]]:
    """The parameters of its operations, and their names."""
    for equation in traced.jaxpr.eqns:
        for name, parameter in equation.params.items():
            for part in jax.tree.leaves(parameter, is_leaf=lambda value: isinstance(value, ClosedJaxpr | Jaxpr)):
                yield name, ClosedJaxpr(part, ()) if isinstance(part, Jaxpr) else part
