"""What a run's other programs take of a device, before its first round and in evaluations, compiled from shapes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.sharding import SingleDeviceSharding

from fedjax_cluster.algorithms.method import FEWER_AT_A_TIME, FirstProgram
from fedjax_cluster.data.stored import streamed
from fedjax_cluster.parallel import num_devices
from fedjax_cluster.report.names import counted
from fedjax_cluster.simulation.abstract import PopulationShape, abstract_population
from fedjax_cluster.simulation.devices import Target
from fedjax_cluster.simulation.evaluation import evaluate_clients
from fedjax_cluster.simulation.memory import bytes_of, peak_of
from fedjax_cluster.types import ClientData, ClientMapping, ClusteredAlgorithm, Federation, Population

BEFORE, EVALUATION = "before round 1", "an evaluation"
LONGEST_MESSAGE = 200


class Other(NamedTuple):
    """A program besides that of the rounds."""

    when: str  # it runs
    what: str  # it computes
    peak: int | None  # bytes of a device; None where the compiler says that it does not fit
    instead: str  # what to change then


def other_programs(
    algorithm: ClusteredAlgorithm,
    federation: Federation | PopulationShape,
    shape: PopulationShape,
    arguments: tuple,
    aim: Target,
    test: int,
    eval_clients: int | None = None,
) -> tuple[Other, ...]:
    """What a method computes of all its clients before the first round, and its evaluation.

    Args:
      algorithm: the method.
      federation, shape: the clients, and what decides the programs of them.
      arguments: of the rounds' program, as shapes with their places.
      aim: devices.
      test: bytes of test rows on each device.
      eval_clients: who is evaluated; None is all.

    Raises:
      ValueError: the compiler fails, by a fault of its own.
    """
    keys, state, population, *_ = arguments
    if not isinstance(population, Population):  # rows on disk are read some at a time
        return ()
    found = []
    for each in getattr(algorithm, "first_programs", lambda *_: ())(keys.initialization, state, population):
        among = any(given is population for given in each.arguments)
        beside = test + (0 if among else bytes_of((population.data.x, population.data.y), len(aim.devices)))
        peak = _peak(each.what, lambda each=each: _compiled_first(each, keys.initialization, aim), aim)
        found.append(Other(BEFORE, each.what, None if peak is None else peak + beside, each.instead))
    tested, rows = _tested(federation, shape, population.mapping)
    if not rows:
        return tuple(found)
    given, who = (keys.evaluation, state, population, tested), "all clients"
    if eval_clients is not None and eval_clients < shape.clients:
        chosen = jax.ShapeDtypeStruct((eval_clients,), "int32", sharding=keys.evaluation.sharding)
        given, who = (*given, None, chosen), counted(eval_clients, "client")
    what, options = f"{who} on {counted(rows, 'test row')}", {"model": algorithm.model, "algorithm": algorithm}
    peak = _peak(f"an evaluation of {what}", lambda: _compiled(evaluate_clients, given, aim, **options), aim)
    return (*found, Other(EVALUATION, what, peak, FEWER_AT_A_TIME))


def tested_bytes(federation: Federation | PopulationShape, shape: PopulationShape, mapping: ClientMapping) -> int:
    """Bytes of the test rows on each device; those on disk are read some at a time."""
    if isinstance(federation, Federation) and streamed(federation.test):
        return 0
    data, rows = _tested(federation, shape, mapping)
    return bytes_of(data.num_examples, 1) + (bytes_of((data.x, data.y), num_devices(mapping)) if rows else 0)


def _tested(
    federation: Federation | PopulationShape, shape: PopulationShape, mapping: ClientMapping
) -> tuple[ClientData, int]:
    """The clients' test rows as shapes with their places, and how many each has."""
    rows = federation.test.x.shape[1] if isinstance(federation, Federation) else shape.tested_on
    return abstract_population(shape._replace(rows=max(rows, 1)), mapping).data, rows


def _peak(what: str, compiled: Callable[[], Any], aim: Target) -> int | None:
    try:
        return peak_of(compiled(), aim.platform)
    except jax.errors.JaxRuntimeError as error:  # a TPU's compiler refuses what does not fit
        failure = " ".join(str(error).split())
        if "RESOURCE_EXHAUSTED" in failure:
            return None
        what = f"the compiler for {aim.name} fails with {what} ({failure[:LONGEST_MESSAGE]})"
        raise ValueError(f"{what}; give another chunk_size (--chunk-size), or whole=False from Python") from error


def _compiled_first(first: FirstProgram, key: Any, aim: Target) -> Any:
    """The program for the devices; what has no place yet is everywhere, as the key is, or on one of them."""
    one = SingleDeviceSharding(aim.devices[0])

    def placed(leaf: Any) -> Any:
        if not isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf
        place = one if first.alone else leaf.sharding or key.sharding
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)

    return _compiled(first.program, jax.tree.map(placed, first.arguments), aim, **first.static)


def _compiled(program: Any, arguments: tuple, aim: Target, **static: Any) -> Any:
    lowered = program.trace(*arguments, **static).lower(lowering_platforms=(aim.platform,))
    return lowered.compile(compiler_options=aim.compiler_options or None)
