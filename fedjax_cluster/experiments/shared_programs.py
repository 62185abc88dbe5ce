"""The runs of a comparison or sweep with fewer programs than runs: side by side where that pays, else in turn."""

from __future__ import annotations

import dataclasses
import logging
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from fedjax_cluster import lifting, parallel
from fedjax_cluster.experiments.cluster_counts import say_clusters
from fedjax_cluster.experiments.config import RunConfig, build_algorithm, settled
from fedjax_cluster.experiments.robustness import build_fault
from fedjax_cluster.interruption import Interrupt
from fedjax_cluster.options import reason_of
from fedjax_cluster.simulation.requests import DECIDES, Request, carry_out, pays
from fedjax_cluster.simulation.result import SimulationResult
from fedjax_cluster.types import ClientMapping, Federation

LOG = logging.getLogger(__name__)
T = TypeVar("T")


def request_of(
    config: RunConfig, federation: Federation | None, run_dir: Any = None, callbacks: Sequence[Any] = ()
) -> tuple[RunConfig, Request]:
    """A configuration with nothing left open, and its run."""
    config, federation = settled(config, federation)
    request = Request(
        build_algorithm(config),
        federation,
        rounds=config.rounds,
        seed=config.seed,
        eval_every=config.eval_every,
        eval_clients=config.eval_clients,
        callbacks=tuple(callbacks),
        churn=tuple(config.churn),
        run_dir=run_dir,
        config=config.to_json(),
        fault=build_fault(config),
    )
    return config, request


def shared_numbers(configs: Mapping[str, RunConfig]) -> dict[str, dict[str, float]]:
    """Label -> the numbers that are arguments of a configuration's programs, as others differ from it in them alone.

    >>> rates = {"a": RunConfig(method="fedavg"), "b": RunConfig(method="fedavg", learning_rate=0.3)}
    >>> shared_numbers(rates)["b"]
    {'local.learning_rate': 0.1}
    """
    methods: dict[str, Any] = {}
    for label, config in configs.items():
        try:
            # Any number will do: how many there are may depend on the data.
            methods[label] = build_algorithm(config if config.clusters else dataclasses.replace(config, clusters=1))
        except ValueError:
            continue  # its run says why
    labels = list(methods)
    found: dict[str, dict[str, float]] = {label: {} for label in configs}
    for members, numbers in lifting.differing(list(methods.values())):
        found |= {labels[index]: numbers for index in members}
    return found


def sharing(numbers: dict[str, float], run: Callable[[], T]) -> T:
    """What `run` gives with these numbers as arguments of its programs; where they cannot be, without, and so after."""
    try:
        with lifting.one_program(numbers):
            return run()
    except DECIDES:
        if not numbers:
            raise
        LOG.info(f"{' or '.join(numbers)} decides what the programs are: one is compiled for each value")
        numbers.clear()  # for all that share it
        return run()


def side_by_side(
    configs: Mapping[str, RunConfig],
    seeds: Sequence[int],
    federation_of: Callable[[RunConfig], Federation],
    directory_of: Callable[[str, int], pathlib.Path | None],
    watch: Callable[[Federation], Sequence[Any]],
    mapping: ClientMapping | None = None,
    **options: Any,
) -> dict[tuple[str, int], SimulationResult]:
    """(label, seed) -> result, of the runs that are faster side by side; none on a CPU.

    What cannot be run so is left to be run in turn, and to say why it fails if it does.

    Args:
      configs, seeds, watch: as of `comparison.compare`.
      federation_of: of a configuration with its seed.
      directory_of: of the run with a label and a seed.
      mapping, **options: of `requests.carry_out`.
    """
    mapping = parallel.client_mapping() if mapping is None else mapping
    if not pays(mapping) or len(configs) * len(seeds) == 1:
        return {}
    wanted: dict[tuple[str, int], Request] = {}
    told: dict[tuple[str, int], tuple[RunConfig, RunConfig, Federation]] = {}
    for label, config in configs.items():
        for seed in seeds:
            try:
                seeded = dataclasses.replace(config, seed=seed)
                federation = federation_of(seeded)
                whole, request = request_of(seeded, federation, directory_of(label, seed), watch(federation))
                wanted[label, seed], told[label, seed] = request, (seeded, whole, request.federation)
            except ValueError:
                continue
    found: dict[tuple[str, int], SimulationResult] = {}
    runs = list(wanted)
    for members, _ in lifting.differing([request.algorithm for request in wanted.values()]):
        own = [runs[index] for index in members]
        try:
            results, *_ = carry_out([wanted[run] for run in own], together=True, mapping=mapping, **options)
        except Exception as error:
            if Interrupt.active is not None and Interrupt.active.wanted:
                raise
            LOG.info(f"{own[0][0]} is run in turn: {reason_of(error)}")
        else:
            found |= dict(zip(own, results, strict=True))
            for run in own:
                say_clusters(*told[run])
    return found
