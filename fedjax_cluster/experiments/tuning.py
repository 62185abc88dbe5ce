"""The learning rate of a method, chosen on rows for validation or held out of training: never on test rows."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import math
import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from fedjax_cluster.experiments import comparison
from fedjax_cluster.experiments.config import RunConfig, build_algorithm, settled
from fedjax_cluster.experiments.held_out import SHARE, VALIDATION, held_out
from fedjax_cluster.experiments.robustness import build_fault
from fedjax_cluster.experiments.runs import as_begun, known_config
from fedjax_cluster.experiments.shared_programs import shared_numbers, sharing
from fedjax_cluster.faults import afflicted, faulty_clients, with_fault
from fedjax_cluster.files import (
    Taken,
    check_run_directory,
    check_writable,
    digest,
    plain,
    read_json,
    sealed,
    taken,
    write_json,
)
from fedjax_cluster.report.names import counted, method_name
from fedjax_cluster.simulation.abstract import shape_of
from fedjax_cluster.simulation.differences import setting_differences
from fedjax_cluster.simulation.identity import fingerprint, identity_of
from fedjax_cluster.simulation.loop import simulate
from fedjax_cluster.simulation.run_directory import CONFIG, TUNING, listed
from fedjax_cluster.types import ClientMapping, ClusteredAlgorithm, Federation, Model

LOG = logging.getLogger(__name__)

FACTORS = (1 / 9, 1 / 3, 1.0, 3.0, 9.0)
FIGURES = {"accuracy": "accuracy", "accuracy_honest": "honest clients' accuracy", "test_loss": "loss"}
PART_OF_ROUNDS, FEWEST_ROUNDS, TIMES_FIRST = 5, 10, 2


def tuned(
    config: RunConfig,
    *,
    directory: str | pathlib.Path | None = None,
    federation: Federation | None = None,
    progress: bool | None = None,
    mapping: ClientMapping | None = None,
) -> RunConfig:
    """The configuration with that learning rate, of five around its own, which is best on rows held out of testing.

    The rates are the configuration's times 1/9, 1/3, 1, 3 and 9. For each a run of a fifth of the rounds, at least
    ten and twice those before the method's first clustering and before infiltrators join, but no more than the run
    has, trains on four fifths of each client's training rows and is evaluated on the last fifth, at least one row;
    clients with a single row are left out of it, and so are joins and leaves: everybody is there all the time. Faulty
    clients are the same as in the run, and do the same. Where the federation has validation rows it is evaluated on
    these and trains on all training rows, of the clients that have some. True groups are not looked at. The highest
    accuracy is taken, of the honest clients where there are others, or the lowest loss where there is no accuracy; of
    equals, to five digits, the rate nearest to the configuration's.

    The rates are run one after the other, with one program where the rate is a number of the method's.

    Args:
      config: the run. Its seed decides which rows are held out.
      directory: keeps what is known of each rate in tuning.json there, and goes on from it.
      federation: the configuration's, where it has been built already.
      progress, mapping: see `simulate`.

    Returns:
      The configuration; its `tuning` tells the rates, their figures and how these came about.

    Raises:
      ValueError: no client has two training rows, nor validation rows, or fewer than `clusters` asks for; the
        configuration cannot be run or is private, or no rate has a finite figure.
    """
    check_tuning(config)
    full, federation = settled(config, federation)
    fault, rates = build_fault(config), grid(config.learning_rate)
    # The faulty are drawn among all clients, as in the run, and not among those who are left here.
    data = held_out(federation if fault is None else afflicted(federation, fault, config.seed), config.seed)
    faulty = faulty_clients(data)
    arriving = () if fault is None else fault.arrivals(faulty)
    # What a rate does to clusters, too, is to be seen, and what attackers do who join later.
    built = build_algorithm(full)
    first = max(getattr(built, "first_clustering", 0), *(change.round for change in arriving), 0)
    least = max(FEWEST_ROUNDS, TIMES_FIRST * first)
    rounds = min(config.rounds, max(least, math.ceil(config.rounds / PART_OF_ROUNDS)))
    kept_in = None if directory is None else pathlib.Path(directory)
    figures, keep = _known(kept_in, full, federation, built)
    name, own = method_name(config.method), federation.validation is not None
    how = f"on training rows, and evaluated on {VALIDATION}" if own else "on training rows of which a fifth is held out"
    present, there = (len(each.train.num_examples) for each in (data, federation))
    some = f", which {present} of {there} clients have" if own and present < there else ""
    tried = full
    if isinstance(full.clusters, int) and present < full.clusters:
        if config.clusters is not None:
            raise ValueError(
                f"clusters is {full.clusters}, but only {present} of {there} clients have "
                f"{VALIDATION if own else 'two training rows'}, by which rates are compared; give the learning rate"
            )
        tried = dataclasses.replace(full, clusters=present)
    LOG.info(f"{name}: {len(rates)} learning rates are tried in turn, {counted(rounds, 'round')} each, {how}{some}")
    accurate = _measures_accuracy(built.model, federation)
    metric = ("accuracy_honest" if 0 < faulty.sum() < len(faulty) else "accuracy") if accurate else "test_loss"
    rated = {f"{rate:g}": dataclasses.replace(tried, learning_rate=rate) for rate in rates}
    numbers = shared_numbers(rated)
    with contextlib.nullcontext() if directory is None else _opened(pathlib.Path(directory)):
        for rate in rates:
            if (key := f"{rate:g}") in figures:
                continue
            options = {"rounds": rounds, "seed": config.seed, "eval_every": rounds}
            options |= {"progress": progress, "mapping": mapping}
            algorithm = build_algorithm(rated[key])
            algorithm = algorithm if fault is None else with_fault(algorithm, fault)
            run = functools.partial(simulate, algorithm, data, churn=arriving, **options)
            value = sharing(numbers[key], run).summary.get(metric)
            figures[key] = float(value) if value is not None and math.isfinite(value) else None
            keep(figures)
    chosen = _best(rates, [figures[f"{rate:g}"] for rate in rates], largest=accurate)
    figure = f"{FIGURES[metric]} on {VALIDATION if own else 'held-out training rows'}"
    _say(name, metric, figure, figures, chosen, rates)
    tuning = {
        **{"figures": figures, "figure": figure},
        **{"rounds": rounds, "held_out": VALIDATION if own else SHARE, "seed": config.seed},
    }
    return dataclasses.replace(config, learning_rate=chosen, tuning=tuning)


def _measures_accuracy(model: Model, federation: Federation) -> bool:
    """Whether a model's predictions have an accuracy, as those of a squared error have none."""
    shape = shape_of(federation)
    x = jax.ShapeDtypeStruct((1, *shape.info.input_shape), shape.dtype)
    y = jax.ShapeDtypeStruct((1, *shape.y_shape), shape.y_dtype)

    def figures(key: Array, x: Array, y: Array) -> Mapping[str, Array]:
        predictions, _ = model.apply(model.init(key, shape.info), x, train=False)
        return model.metrics(predictions, y, jnp.ones(1, bool))

    return "accuracy" in jax.eval_shape(figures, jax.random.key(0), x, y)


def refuse_another(config: RunConfig, directory: pathlib.Path) -> None:
    """Raises a ValueError, before any rate is tried, where a directory holds a run that is another at any rate."""
    if not os.path.isfile(directory / CONFIG):
        check_run_directory(directory)
        if listed(directory):
            raise ValueError(f"the run directory {directory} is not empty and holds no run; choose another")
        return
    if (known := known_config(directory)) is None:
        return  # damaged, or of no configuration, as the run itself says
    named, same = f"the run directory {directory} belongs to another experiment", _tuned_alike(config, known)
    found = {name: value for name, value in same.to_json().items() if getattr(config, name) is not None}
    if different := setting_differences(plain(known.to_json()), found):
        raise ValueError(f"{named}: {'; '.join(different)}; choose another directory")
    if not known.tuning:
        rate = f"its learning rate is {known.learning_rate:g}, as it was given"
        raise ValueError(f"{named}: {rate}; choose another directory, or leave out --tune")


def _tuned_alike(config: RunConfig, known: RunConfig | None) -> RunConfig:
    """A configuration with the rate of one that is known, and evaluated as often."""
    if known is None:
        return config
    return dataclasses.replace(as_begun(config, known), learning_rate=known.learning_rate, tuning=known.tuning)


def check_tuning(config: RunConfig) -> None:
    """Raises a ValueError where no rate can be chosen for a run, which is a private one."""
    if config.privacy_clip is not None:
        raise ValueError(
            "tuning tries rates on the clients' rows without counting it in ε, but privacy_clip is "
            f"{config.privacy_clip:g}; give a learning_rate, or no privacy"
        )


def each_tuned(
    configs: Mapping[str, RunConfig],
    *,
    directory: str | pathlib.Path | None = None,
    mapping: ClientMapping | None = None,
) -> dict[str, RunConfig]:
    """Configurations of a comparison, each with its own rate; one that cannot be run stays as it is, and the log tells.

    All seeds of a comparison get the rate that was chosen with the configuration's.

    Args:
      configs: label -> configuration.
      directory, mapping: see `tuned`.
    """
    found: dict[str, RunConfig] = {}
    path = None if directory is None else pathlib.Path(directory)
    before = None if path is None or not comparison.is_comparison(path) else comparison.read(path)
    usual, known = comparison.usual_number(configs, before), {}
    if path is not None:
        _read(path)  # what is damaged is no reason to keep a rate
    if path is not None and before is not None:
        alike = {label: _tuned_alike(config, before.configs.get(label)) for label, config in configs.items()}
        comparison.refuse_another(path, before, comparison.Comparison(alike, (), {}, {}, usual))
    for label, config in configs.items():
        try:
            federation = comparison.shared_federation(config, known, usual)
            found[label] = tuned(config, directory=directory, federation=federation, mapping=mapping)
        except Taken:
            raise
        except ValueError as error:
            LOG.warning(f"{label} keeps the learning rate {config.learning_rate:g}: {error}")
            found[label] = config
    return found


def grid(rate: float) -> list[float]:
    """The rates that are tried, to three digits.

    >>> grid(0.1)
    [0.0111, 0.0333, 0.1, 0.3, 0.9]
    """
    return [rate if factor == 1 else float(f"{rate * factor:.3g}") for factor in FACTORS]


def _best(rates: list[float], figures: list[float | None], *, largest: bool) -> float:
    # Beyond five digits, of a loss of any size, it is rounding that tells means over clients apart.
    known = [(place, float(f"{value:.4e}")) for place, value in enumerate(figures) if value is not None]
    if not known:
        listed = ", ".join(f"{rate:g}" for rate in rates)
        raise ValueError(f"no learning rate of {listed} has a finite figure on held-out rows; give a smaller one")
    middle = len(rates) // 2
    place, _ = min(known, key=lambda pair: (-pair[1] if largest else pair[1], abs(pair[0] - middle)))
    return rates[place]


def _say(
    name: str, metric: str, figure: str, figures: dict[str, float | None], chosen: float, rates: list[float]
) -> None:
    texts = {
        key: "not finite" if value is None else f"{value:.4g}" if metric == "test_loss" else f"{100 * value:.1f} %"
        for key, value in figures.items()
    }
    listed = ", ".join(f"{key}: {texts[key]}" for key in (f"{rate:g}" for rate in rates))
    end = " (the end of what was tried: others may be better)" if chosen in (rates[0], rates[-1]) else ""
    LOG.info(f"{name}: learning rate {chosen:g}{end}; {figure}: {listed}")


def _opened(directory: pathlib.Path) -> contextlib.AbstractContextManager[Any]:
    check_writable(directory)
    directory.mkdir(parents=True, exist_ok=True)
    return taken(directory)


def _known(
    directory: pathlib.Path | None, config: RunConfig, federation: Federation, algorithm: ClusteredAlgorithm
) -> tuple[dict[str, float | None], Callable[[dict[str, float | None]], Any]]:
    """What a directory knows of a configuration's rates on its data, and the function that keeps more of them."""
    if directory is None:
        return {}, lambda figures: None
    # A file of one's own may hold other rows than it did.
    told = {**config.to_json(), "data": fingerprint(federation)}
    # And a method or model of one's own other code; of the package's this is nothing.
    if code := identity_of(algorithm, federation, 0, 1, None, ()).get("programs"):
        told["programs"] = code
    if (own := federation.validation) is not None:
        told["validation"] = fingerprint(federation._replace(test=own))
    path, settings, content = directory / TUNING, digest(told), _read(directory)

    def keep(figures: dict[str, float | None]) -> None:
        write_json(path, sealed({**_read(directory), settings: {"method": config.method, "figures": figures}}))
        content[settings] = {"method": config.method, "figures": figures}

    return dict(content.get(settings, {}).get("figures", {})), keep


def _read(directory: pathlib.Path) -> dict[str, Any]:
    return read_json(directory / TUNING) if (directory / TUNING).is_file() else {}
