"""Many runs of one method: seeds and values of numeric options, in one program or in turn from one compilation."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedjax_cluster import lifting, parallel
from fedjax_cluster.data.stored import stored
from fedjax_cluster.faults import Fault
from fedjax_cluster.nn.precision import in_32_bits
from fedjax_cluster.options import SEED, checked, shown
from fedjax_cluster.simulation.arguments import check_arguments
from fedjax_cluster.simulation.many_results import ManyResults
from fedjax_cluster.simulation.requests import Request, carry_out
from fedjax_cluster.types import ClientData, ClientMapping, ClusteredAlgorithm, Federation, Measure

MOST_RUNS = 10_000


@in_32_bits
def simulate_many(
    algorithm: ClusteredAlgorithm,
    federation: Federation | Sequence[Federation],
    *,
    rounds: int,
    seeds: Sequence[int] = range(8),
    options: Mapping[str, Sequence[float]] | None = None,
    eval_every: int = 10,
    eval_clients: int | None = None,
    metrics: Sequence[Measure] = (),
    fault: Fault | None = None,
    together: bool | None = None,
    mapping: ClientMapping | None = None,
    progress: bool | None = None,
) -> ManyResults:
    """Runs a method over seeds and values of numeric options: one trace and one compilation for all of them.

    Each run is the `simulate` of its method and seed, up to the rounding of an option that is an argument of the
    program where it was a constant. Side by side, all runs are at the same round. One in which some of them cluster or
    split does that work for those alone, one after the other, or for all at once where it is half of them;
    elsewhere a `lax.cond` computes both of its branches. In turn, each run is what it is alone.

    Args:
      algorithm: from `fedjax_cluster.algorithms`.
      federation: one that all runs share, or one for each seed. Those whose clients have fewer rows are padded to the
        rows of the others; those of other numbers of clients have a program of their own. Of a model with batch
        statistics whose mini-batches are all of a client's rows, the padding counts rows again, unevenly.
      rounds, eval_every, eval_clients, metrics, fault, mapping, progress: see `simulate`.
      seeds: of the runs of each combination.
      options: option -> its values; all combinations are run. An option of the method by its name, one of its local
        update as `learning_rate` or `local.learning_rate`, one of its server's named optimiser as
        `server.learning_rate`. Whole numbers, names and what decides shapes, loops or branches of Python, such as
        `clusters`, `batch_size` and `participation`, are refused: they need programs of their own.
      together: True for all runs side by side in one program, as many at a time as the device has room for; False for
        one after the other; None chooses the first on accelerators and the second on a CPU, where nothing is gained
        side by side.

    Returns:
      The runs, with their table and pictures.

    Raises:
      ValueError: as `simulate` raises it; no or equal seeds or values, or an option that cannot vary in a program.

    >>> from fedjax_cluster import algorithms, data, local, nn
    >>> federation = data.scenarios.rotated(data.digits(), clients=4)
    >>> method = algorithms.fedavg(nn.linear(), local=local.sgd(0.1, batch_size=32, steps=1))
    >>> found = simulate_many(method, federation, rounds=2, seeds=(0, 1), options={"learning_rate": (0.1, 0.3)})
    >>> len(found), found.combinations
    (4, ({'learning_rate': 0.1}, {'learning_rate': 0.3}))
    """
    if parallel.several():
        raise ValueError("simulate_many has all runs in one process; in several give each run to simulate")
    seeds = checked_seeds(seeds)
    federations = _federations(federation, len(seeds))
    combinations, methods = _methods(algorithm, {} if options is None else options)
    if len(methods) * len(seeds) > MOST_RUNS:
        raise ValueError(f"options and seeds make {len(methods) * len(seeds)} runs; give at most {MOST_RUNS}")
    shared = {"rounds": rounds, "eval_every": eval_every, "eval_clients": eval_clients, "metrics": metrics}
    for number, method in enumerate(methods):
        for each in {id(each): each for each in federations}.values() if number == 0 else federations[:1]:
            check_arguments(method, each, **shared, mapping=mapping, progress=progress, fault=fault)
    together = checked("together", together, bool | None)
    padded = _padded(federations)
    shared["metrics"] = tuple(metrics)
    requests = [
        Request(method, own, seed=seed, fault=fault, **shared)
        for method in methods
        for own, seed in zip(padded, seeds, strict=True)
    ]
    found, used, memory = carry_out(requests, together=together, mapping=mapping, progress=progress)
    if fault is None:
        found = [
            dataclasses.replace(result, federation=federations[place % len(seeds)])
            for place, result in enumerate(found)
        ]
    return ManyResults(tuple(found), seeds, combinations, used, memory)


def checked_seeds(seeds: Any) -> tuple[int, ...]:
    """Seeds, each once.

    Raises:
      ValueError: none, one twice, or something else.
    """
    found = checked("seeds", seeds, Sequence[int], SEED)
    if not found:
        raise ValueError("seeds has no seed; give at least one")
    if len(set(found)) < len(found):
        twice = next(seed for place, seed in enumerate(found) if seed in found[:place])
        raise ValueError(f"seeds has {twice} twice; give each once")
    return found


def _federations(given: Any, count: int) -> list[Federation]:
    """The federation of each seed."""
    if isinstance(given, Federation) or not isinstance(given, Sequence):
        return [given] * count
    if len(given) != count:
        raise ValueError(f"federation is a list of {len(given)}, for {count} seeds; give one for each seed, or one")
    return list(given)


def _methods(algorithm: Any, options: Any) -> tuple[tuple[dict[str, float], ...], list[Any]]:
    """The combinations of the options' values, and the method of each."""
    checked("algorithm", algorithm, ClusteredAlgorithm)
    if not isinstance(options, Mapping):
        raise ValueError(f"options is {shown(options)}; give a dictionary of options and lists of their values")
    axes = {}
    for name, values in options.items():
        path = lifting.path_of(algorithm, name)
        if path in (known := {place: other for other, (place, _) in axes.items()}):
            raise ValueError(f"options has {known[path]} and {name}, which are the same; give one of them")
        axes[name] = path, lifting.checked_values(path, values)
    combinations = [
        dict(zip(axes, of, strict=True)) for of in itertools.product(*(values for _, values in axes.values()))
    ]

    def with_values(values: Mapping[str, float]) -> Any:
        changes = [(axes[name][0], number) for name, number in values.items()]
        return functools.reduce(lambda method, change: lifting.with_number(method, *change), changes, algorithm)

    methods = [with_values(values) for values in combinations]
    if len(lifting.differing(methods)) > 1:
        raise ValueError(f"{' or '.join(axes)} has values that decide the shapes of a program: {lifting.ELSEWHERE}")
    return tuple(combinations), methods


def _padded(federations: Sequence[Federation]) -> list[Federation]:
    """Federations with rows for as many as a client has in any of them, which the programs are shaped by."""
    if len({id(each) for each in federations}) == 1 or any(stored(each.train) for each in federations):
        return list(federations)
    train = max(np.shape(each.train.x)[1] for each in federations)
    test = max(np.shape(each.test.x)[1] for each in federations)

    def longer(data: ClientData, rows: int) -> ClientData:
        missing = rows - np.shape(data.x)[1]
        if not missing:
            return data
        x, y = (np.pad(leaf, [(0, 0), (0, missing)] + [(0, 0)] * (np.ndim(leaf) - 2)) for leaf in (data.x, data.y))
        return data._replace(x=x, y=y)

    made = {
        id(each): each._replace(train=longer(each.train, train), test=longer(each.test, test)) for each in federations
    }
    return [made[id(each)] for each in federations]
