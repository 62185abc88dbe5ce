"""The learning rate of a method, chosen on training rows that are held out: never on test rows, nor by true groups."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import math
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_cluster.algorithms.threshold_search import hold_out
from fedjax_cluster.experiments.comparison import shared_federation
from fedjax_cluster.experiments.config import RunConfig, build_algorithm, settled, usual_clients
from fedjax_cluster.experiments.shared_programs import shared_numbers, sharing
from fedjax_cluster.files import check_writable, digest, read_json, sealed, taken, write_json
from fedjax_cluster.local import client_key
from fedjax_cluster.report.names import counted, method_name
from fedjax_cluster.simulation.loop import simulate
from fedjax_cluster.simulation.run_directory import TUNING
from fedjax_cluster.types import ClientData, Federation

LOG = logging.getLogger(__name__)

FACTORS = (1 / 9, 1 / 3, 1.0, 3.0, 9.0)
SHARE = 0.2  # of each client's training rows
PART_OF_ROUNDS, FEWEST_ROUNDS = 5, 10


def tuned(
    config: RunConfig,
    *,
    directory: str | pathlib.Path | None = None,
    federation: Federation | None = None,
    progress: bool | None = None,
) -> RunConfig:
    """The configuration with that learning rate, of five around its own, which is best on held-out training rows.

    The rates are the configuration's times 1/9, 1/3, 1, 3 and 9. For each a run of a fifth of the rounds, at least ten,
    trains on four fifths of each client's training rows and is evaluated on the last fifth; clients with a single row,
    and clients who join or leave, are left out of it. The highest accuracy is taken, or the lowest loss where there is
    no accuracy; of equals the rate nearest to the configuration's.

    The rates are run one after the other, with one program where the rate is a number of the method's.

    Args:
      config: the run. Its seed decides which rows are held out.
      directory: keeps what is known of each rate in tuning.json there, and goes on from it.
      federation: the configuration's, where it has been built already.
      progress: see `simulate`.

    Returns:
      The configuration; its `tuning` tells the rates, their figures and how these came about.

    Raises:
      ValueError: no client has two training rows, the configuration cannot be run, or no rate has a finite figure.
    """
    full, federation = settled(config, federation)
    data, rates = held_out(federation, config.seed), grid(config.learning_rate)
    rounds = min(config.rounds, max(FEWEST_ROUNDS, math.ceil(config.rounds / PART_OF_ROUNDS)))
    figures, keep = _known(None if directory is None else pathlib.Path(directory), full)
    name = method_name(config.method)
    LOG.info(
        f"{name}: {len(rates)} learning rates are tried in turn, {counted(rounds, 'round')} each, on training rows of "
        "which a fifth is held out"
    )
    metric = "accuracy" if federation.info.task == "classification" else "test_loss"
    rated = {f"{rate:g}": dataclasses.replace(full, learning_rate=rate) for rate in rates}
    numbers = shared_numbers(rated)
    with contextlib.nullcontext() if directory is None else _opened(pathlib.Path(directory)):
        for rate in rates:
            if (key := f"{rate:g}") in figures:
                continue
            options = {"rounds": rounds, "seed": config.seed, "eval_every": rounds, "progress": progress}
            run = functools.partial(simulate, build_algorithm(rated[key]), data, **options)
            value = sharing(numbers[key], run).summary.get(metric)
            figures[key] = float(value) if value is not None and math.isfinite(value) else None
            keep(figures)
    chosen = _best(rates, [figures[f"{rate:g}"] for rate in rates], largest=metric == "accuracy")
    _say(name, metric, figures, chosen, rates)
    tuning = {
        **{"figures": figures, "figure": f"{'accuracy' if metric == 'accuracy' else 'loss'} on held-out training rows"},
        **{"rounds": rounds, "held_out": SHARE, "seed": config.seed},
    }
    return dataclasses.replace(config, learning_rate=chosen, tuning=tuning)


def each_tuned(
    configs: Mapping[str, RunConfig], *, directory: str | pathlib.Path | None = None
) -> dict[str, RunConfig]:
    """Configurations of a comparison, each with its own rate; one that cannot be run stays as it is, and the log tells.

    All seeds of a comparison get the rate that was chosen with the configuration's.

    Args:
      configs: label -> configuration.
      directory: see `tuned`.
    """
    found: dict[str, RunConfig] = {}
    usual, known = usual_clients(configs.values()), {}
    for label, config in configs.items():
        try:
            found[label] = tuned(config, directory=directory, federation=shared_federation(config, known, usual))
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


def held_out(federation: Federation, seed: int, share: float = SHARE) -> Federation:
    """A federation whose test rows are training rows of another, without true groups.

    Args:
      federation: of M clients; its test rows are not looked at.
      seed: decides which rows are held out.
      share: of each client's training rows, at least one.

    Returns:
      Of the clients with two training rows and more: `train` without the rows held out, these as `test`.

    Raises:
      ValueError: no client has two training rows.
    """
    count = np.asarray(federation.train.num_examples)
    index = np.flatnonzero(count > 1)
    if not len(index):
        raise ValueError("no client has two training rows, of which one could be held out; give the learning rate")
    x, y, number = (np.asarray(part)[index] for part in federation.train)
    divide = jax.vmap(lambda key, x, y, n: hold_out(key, ClientData(x, y, n), share))
    keys = jax.vmap(functools.partial(client_key, jax.random.key(seed)))(jnp.asarray(index, jnp.int32))
    kept, held = jax.device_get(divide(keys, x, y, number.astype(np.int32)))
    return Federation(_without_padding(kept), _without_padding(held), None, None, federation.info)


def _without_padding(data: ClientData) -> ClientData:
    """Zeros beyond each client's rows, where dividing has left rows of the other part."""
    x, y, number = map(np.asarray, data)
    valid = np.arange(x.shape[1]) < number[:, None]

    def cleared(rows: np.ndarray) -> np.ndarray:
        return np.where(valid.reshape(valid.shape + (1,) * (rows.ndim - 2)), rows, np.zeros((), rows.dtype))

    return ClientData(cleared(x), cleared(y), number)


def _best(rates: list[float], figures: list[float | None], *, largest: bool) -> float:
    # Beyond five digits it is rounding that tells means over clients apart.
    known = [(place, round(value, 5)) for place, value in enumerate(figures) if value is not None]
    if not known:
        listed = ", ".join(f"{rate:g}" for rate in rates)
        raise ValueError(f"no learning rate of {listed} has a finite figure on held-out rows; give a smaller one")
    middle = len(rates) // 2
    place, _ = min(known, key=lambda pair: (-pair[1] if largest else pair[1], abs(pair[0] - middle)))
    return rates[place]


def _say(name: str, metric: str, figures: dict[str, float | None], chosen: float, rates: list[float]) -> None:
    texts = {
        key: "not finite" if value is None else f"{100 * value:.1f} %" if metric == "accuracy" else f"{value:.4g}"
        for key, value in figures.items()
    }
    listed = ", ".join(f"{key}: {texts[key]}" for key in (f"{rate:g}" for rate in rates))
    what = "accuracy" if metric == "accuracy" else "loss"
    end = " (the end of what was tried: others may be better)" if chosen in (rates[0], rates[-1]) else ""
    LOG.info(f"{name}: learning rate {chosen:g}{end}; {what} on held-out training rows: {listed}")


def _opened(directory: pathlib.Path) -> contextlib.AbstractContextManager[None]:
    check_writable(directory)
    directory.mkdir(parents=True, exist_ok=True)
    return taken(directory)


def _known(
    directory: pathlib.Path | None, config: RunConfig
) -> tuple[dict[str, float | None], Callable[[dict[str, float | None]], Any]]:
    """What a directory knows of a configuration's rates, and the function that keeps more of them."""
    if directory is None:
        return {}, lambda figures: None
    path, settings = directory / TUNING, digest(config.to_json())
    content: dict[str, Any] = read_json(path) if path.is_file() else {}

    def keep(figures: dict[str, float | None]) -> None:
        write_json(path, sealed({**content, settings: {"method": config.method, "figures": figures}}))
        content[settings] = {"method": config.method, "figures": figures}

    return dict(content.get(settings, {}).get("figures", {})), keep
