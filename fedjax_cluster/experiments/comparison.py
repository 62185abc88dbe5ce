"""Several configurations over seeds, on the same federations; one that fails does not keep the others from running."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from fedjax_cluster.experiments.cell_settings import other_settings
from fedjax_cluster.experiments.config import RunConfig, as_compared, build_algorithm, training_text, usual_clients
from fedjax_cluster.experiments.ended_runs import refuse_filled
from fedjax_cluster.experiments.outcomes import Outcome
from fedjax_cluster.experiments.robustness import with_infinity
from fedjax_cluster.experiments.run_names import check_names, run_name
from fedjax_cluster.experiments.runs import as_begun, run
from fedjax_cluster.experiments.shared_federations import (
    MOST_FEDERATIONS,
    data_settings,
    decides_data,
    shared_federation,
)
from fedjax_cluster.experiments.shared_programs import shared_numbers, sharing, side_by_side
from fedjax_cluster.files import (
    check_run_directory,
    check_writable,
    digest,
    read_json,
    remove_empty,
    sealed,
    taken,
    write_json,
)
from fedjax_cluster.interruption import CHECKPOINT_SECONDS, Interrupt
from fedjax_cluster.lifting import one_program
from fedjax_cluster.options import NOT_NEGATIVE, SEED, Bound, as_path, checked, with_checks
from fedjax_cluster.simulation import Evaluation, SimulationResult
from fedjax_cluster.simulation.many import checked_seeds
from fedjax_cluster.simulation.run_directory import CONFIG, SUMMARY, AnotherExperiment
from fedjax_cluster.types import ClientMapping, Federation

LOG = logging.getLogger(__name__)

RUNS = Bound(lambda value: 1 <= value <= 10_000, "from 1 to 10000 runs")
COMPARISON = "comparison.json"
LONGEST_REASON = 300  # characters


class Comparison(NamedTuple):
    """What a comparison's directory is for."""

    configs: dict[str, RunConfig]
    seeds: tuple[int, ...]
    failed: dict[str, dict[int, str]]  # label -> seed -> why
    cells: dict[str, dict[str, Any]]  # of a sweep: label -> option -> value, also of cells without a configuration
    clients: int | None = None  # how many there usually are for the first methods, and are then for all
    data: Mapping[str, str] = MappingProxyType({})  # what decides the data, beside the seed -> their name


@with_checks(seeds=SEED, checkpoint_every=NOT_NEGATIVE)
def compare(
    configs: dict[str, RunConfig],
    *,
    seeds: Sequence[int] = (0,),
    run_dir: str | pathlib.Path | None = None,
    progress: bool | None = None,
    done: Callable[[str, int, SimulationResult], None] = lambda label, seed, result: None,
    failed: Callable[[str, int, str], None] | None = None,
    watch: Callable[[Federation], Sequence[Callable[[Evaluation], Mapping[str, float] | None]]] = lambda federation: (),
    time_clustering: bool = False,
    checkpoint_every: float = CHECKPOINT_SECONDS,
    mapping: ClientMapping | None = None,
    cells: Mapping[str, Mapping[str, Any]] | None = None,
    refused: Mapping[str, str] | None = None,
) -> list[Outcome]:
    """Runs several configurations over seeds; seed s means the same federation and initial models for all.

    Args:
      configs: label -> configuration; they may differ in anything.
      seeds: one run each.
      run_dir: keeps every run's directory below it, and comparison.json, from which `resume` goes on; takes up what is
        there. What it has of other methods, cells and seeds stays part of the comparison.
      progress, time_clustering, checkpoint_every, mapping: see `simulate`.
      done: called after each run.
      failed: called with label, seed and reason after each run that fails; the others go on. None raises its error.
      watch: the callbacks of `simulate` for a federation.
      cells: of a sweep, label -> option -> value in the order of the rows; see `experiments.sweeps`.
      refused: cell -> why it has no configuration.

    Returns:
      For each label its runs, and why others failed.

    Raises:
      ValueError: no seeds, or one twice; a directory of another comparison, or of another process's; a run that it has
        would be another experiment now; no configuration that can be run, or every run refused for the same reason.
      OSError: the directory was removed meanwhile, or is another comparison's by now.
    """
    seeds = checked_seeds(seeds)
    refusals = {label: ValueError(why) for label, why in (refused or {}).items()}
    for label, config in configs.items():
        try:
            config = checked(f"the configuration of {label}", config, RunConfig)
            # Any number will do for this check: the right one may depend on the data.
            build_algorithm(config if config.clusters else dataclasses.replace(config, clusters=1))
        except ValueError as error:
            if failed is None:
                raise
            refusals[label] = error
    labels = list(cells or configs)
    if labels and len(refusals) == len(labels):
        raise next(iter(refusals.values()))
    directory = None if run_dir is None else as_path("run_dir", run_dir)
    before = read(directory) if directory is not None and is_comparison(directory) else None
    if directory is not None:
        check_names((*(() if before is None else before.cells or before.configs), *labels), directory)
    known = {label: dict.fromkeys(seeds, why) for label, why in (refused or {}).items()}
    configs = {label: as_begun(each, before and before.configs.get(label)) for label, each in configs.items()}
    usual, of_cells = usual_number(configs, before), {label: dict(of) for label, of in (cells or {}).items()}
    asked = Comparison(configs, tuple(seeds), known, of_cells, usual)
    comparison = asked if before is None else _united(before, asked)
    errors, outcomes = list[Exception](), list[Outcome]()
    federations: dict[Any, Federation] = {}

    def federation_of(seeded: RunConfig) -> Federation:
        return shared_federation(seeded, federations, usual)

    def directory_of(label: str, seed: int) -> pathlib.Path | None:
        return None if directory is None else directory / run_name(label, seed)

    options = {"progress": progress, "time_clustering": time_clustering}
    options |= {"checkpoint_every": checkpoint_every, "mapping": mapping}
    usable = {label: config for label, config in configs.items() if label not in refusals}
    numbers = shared_numbers(usable)
    comparison = _with_data(comparison, usable, seeds[0], federation_of, directory)
    with _opened(directory, before, asked, comparison) as record:
        ready = side_by_side(usable, seeds, federation_of, directory_of, watch, **options)
        for label in labels:
            ended: list[SimulationResult] = []
            reasons: dict[int, str] = {}
            for seed in seeds:
                record(comparison)
                try:
                    if label in refusals:
                        raise refusals[label]
                    seeded = dataclasses.replace(configs[label], seed=seed)
                    result = ready.pop((label, seed), None)
                    if result is None:
                        given = {"federation": federation_of(seeded), "run_dir": directory_of(label, seed), **options}
                        given["callbacks"] = watch(given["federation"])
                        result = sharing(numbers[label], functools.partial(run, seeded, **given))
                except Exception as error:
                    _keep(directory, before, label, seed, error)
                    if failed is None or isinstance(error, BrokenPipeError) or _interrupted():
                        raise
                    errors.append(error)
                    reasons[seed] = _reason(error)
                    failed(label, seed, reasons[seed])
                else:
                    ended.append(result)
                    with one_program(numbers[label]):  # for what is evaluated then
                        done(label, seed, result)
            outcomes.append(_outcome(label, configs.get(label), ended, reasons))
            if reasons:
                comparison.failed[label] = {**comparison.failed.get(label, {}), **reasons}
        everywhere = len(errors) == len(labels) * len(seeds) and len(set(map(str, errors))) == 1
        if everywhere and isinstance(errors[0], ValueError):
            if before is not None:
                record(before)
            raise errors[0]
        record(comparison)
    _say_training({} if cells else configs)  # the rows of cells tell it
    return outcomes


def _outcome(
    label: str, config: RunConfig | None, ended: Sequence[SimulationResult], reasons: dict[int, str]
) -> Outcome:
    left = tuple(each.summary for each in ended), tuple(each.history for each in ended)
    return Outcome(label, *left, reasons, data={} if config is None else data_settings(config.to_json()))


def _say_training(configs: Mapping[str, RunConfig]) -> None:
    """Notes what clients and server did in each method, where these differ."""
    told: dict[str, list[str]] = {}
    for label, config in configs.items():
        told.setdefault(training_text(config), []).append(label)
    for text, whose in told.items():
        if len(told) > 1:
            LOG.info(f"{', '.join(whose)}: {text}")


@with_checks(checkpoint_every=NOT_NEGATIVE)
def resume(run_dir: str | pathlib.Path, rounds: int | None = None, **options: Any) -> list[Outcome]:
    """Takes an interrupted comparison up: what is done is read, what failed is tried again.

    Args:
      run_dir: the directory of the comparison.
      rounds: communication rounds in all; more than the comparison had extends every run.
      **options: `progress`, `done`, `failed`, `time_clustering`, `checkpoint_every` and `mapping` of `compare`.

    Raises:
      ValueError: not the directory of a comparison, or fewer rounds than it has.
    """
    path = as_path("run_dir", run_dir)
    configs, seeds, failed, cells = read(path)[:4]
    if rounds is not None:
        if any("rounds" in values for values in cells.values()):
            raise ValueError(f"rounds is {rounds}, but the sweep in {path} varies the rounds; leave --rounds out")
        configs = {label: dataclasses.replace(config, rounds=rounds) for label, config in configs.items()}
    refused = {label: next(iter(why.values())) for label, why in failed.items() if label not in configs}
    return compare(configs, seeds=seeds, run_dir=path, cells=cells, refused=refused, **options)


def is_comparison(path: pathlib.Path) -> bool:
    """Whether a comparison has left the directory."""
    return (path / COMPARISON).is_file()


def read(path: pathlib.Path) -> Comparison:
    """What the directory of a comparison is for.

    Raises:
      ValueError: it is none, or its comparison.json is damaged.
    """
    try:
        content = read_json(path / COMPARISON)
    except FileNotFoundError:
        raise ValueError(f"{path} is not the directory of a comparison: it has no {COMPARISON}") from None
    try:
        configs = {label: RunConfig.from_json(config) for label, config in content["configs"].items()}
        failed = {label: {int(seed): str(why) for seed, why in of.items()} for label, of in content["failed"].items()}
        cells = {name: with_infinity(values, float) for name, values in content.get("cells", {}).items()}
        clients, data = content.get("clients"), content.get("data", {})
        return Comparison(configs, tuple(map(int, content["seeds"])), failed, cells, clients, dict(data))
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path / COMPARISON} is damaged ({error}); delete it and compare anew") from None


@contextlib.contextmanager
def _opened(
    directory: pathlib.Path | None, before: Comparison | None, asked: Comparison, comparison: Comparison
) -> Iterator[Callable[[Comparison], None]]:
    """The directory of a comparison, kept from other processes, and what writes its record.

    Nothing is left where nothing could be run.
    """
    if directory is None:
        yield lambda comparison: None
        return
    (check_run_directory if before is None else check_writable)(directory)
    if before is not None:
        refuse_another(directory, before, asked)
    elif not is_comparison(directory):
        try:
            refuse_filled(directory)
        except ValueError:
            if not is_comparison(directory):  # another has begun one meanwhile
                raise
    directory.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        if before is None:
            stack.callback(remove_empty, directory)
        same = stack.enter_context(taken(directory))
        if (read(directory) if is_comparison(directory) else None) != before:
            raise ValueError(f"another command has changed {directory} since this one began; give it again")

        def record(comparison: Comparison) -> None:
            if not same():
                raise OSError(f"{directory} was removed, or is another's by now; what is not done yet is left undone")
            _write(directory, comparison)

        try:
            record(comparison)
            yield record
        except ValueError:
            ran = any((path / CONFIG).is_file() for path in directory.iterdir())
            if before is None and not ran and same():
                (directory / COMPARISON).unlink(missing_ok=True)
            raise


def _united(before: Comparison, now: Comparison) -> Comparison:
    """What a directory is for, and what it is to be for as well; what failed and is tried again counts no more."""

    def both(old: Iterable[Any], new: Iterable[Any]) -> list[Any]:
        # Who names all that there is gives its order, too.
        return list(new if set(old) <= set(new) else dict.fromkeys((*old, *new)))

    labels = both(before.cells or before.configs, now.cells or now.configs)
    configs, cells = ({**getattr(before, name), **getattr(now, name)} for name in ("configs", "cells"))
    failed: dict[str, dict[int, str]] = {}
    for label in labels:
        again = now.seeds if label in (now.cells or now.configs) else ()
        old = {seed: why for seed, why in before.failed.get(label, {}).items() if seed not in again}
        if found := {**old, **now.failed.get(label, {})}:
            failed[label] = found
    return Comparison(
        {label: configs[label] for label in labels if label in configs},
        tuple(both(before.seeds, now.seeds)),
        failed,
        {label: cells[label] for label in labels if label in cells},
        now.clients,
        before.data,
    )


def usual_number(configs: Mapping[str, RunConfig], before: Comparison | None) -> int | None:
    """How many clients there are where no configuration says it: as for the methods that a directory began with."""
    if before is not None and before.clients is not None:
        return before.clients
    those = configs if before is None or not before.configs else before.configs
    return usual_clients(those.values()) if those else None


def _with_data(
    comparison: Comparison,
    configs: Mapping[str, RunConfig],
    seed: int,
    federation_of: Callable[[RunConfig], Federation],
    directory: pathlib.Path | None,
) -> Comparison:
    """A comparison that knows what its data are called, where that tells what they hold; refuses others than it had."""
    known = dict(comparison.data)
    for config in configs.values():
        key = digest(decides_data(dataclasses.replace(config, seed=0)))
        if len(known) >= MOST_FEDERATIONS and key not in known:  # of a sweep over data
            continue
        try:
            name = federation_of(dataclasses.replace(config, seed=seed)).info.name
        except Exception:
            continue  # its run says why
        if known.setdefault(key, name) != name:
            raise ValueError(
                f"the run directory {directory} belongs to another comparison: its data are {known[key]} there and "
                f"{name} here; choose another directory"
            )
    return comparison._replace(data=known)


def refuse_another(directory: pathlib.Path, before: Comparison, now: Comparison) -> None:
    """A comparison may get more methods, cells, seeds and rounds."""
    kinds = [_kind(each) for each in (before, now)]
    if kinds[0] != kinds[1]:
        again = "choose another directory"
        if sorted(kinds[0].split()) == sorted(kinds[1].split()):
            again = f"give the flags in that order, or {again}"
        raise ValueError(f"the run directory {directory} belongs to {kinds[0]}, not to {kinds[1]}; {again}")
    swept = [option for of in (before, now) for values in of.cells.values() for option in values]
    if swept and (different := other_settings(before.configs.values(), now.configs.values(), swept)):
        raise ValueError(
            f"the run directory {directory} belongs to another sweep: {'; '.join(different)}; choose another directory"
        )
    for label in filter(before.configs.__contains__, now.configs):
        old, new = (as_compared(each.configs[label]) for each in (before, now))
        # What has its usual value is left out.
        pairs = {name: (old.get(name), new.get(name)) for name in (*old, *new)}
        different = [f"{name} is {one} there and {other} here" for name, (one, other) in pairs.items() if one != other]
        different = [each for each in different if not each.startswith(("seed ", "rounds "))]
        if different:
            raise ValueError(
                f"the run directory {directory} belongs to another comparison: for {label} {'; '.join(different)}; "
                "choose another directory"
            )
        if new["rounds"] < old["rounds"]:
            raise ValueError(
                f"rounds is {new['rounds']}, but the comparison in {directory} has {old['rounds']} already; "
                f"ask for at least {old['rounds']}"
            )


def _kind(of: Comparison) -> str:
    options = dict.fromkeys(option for values in of.cells.values() for option in values)
    return f"a sweep of {' and '.join(options)}" if options else "a comparison"


def _keep(directory: pathlib.Path | None, before: Comparison | None, label: str, seed: int, error: Exception) -> None:
    """Refuses all where a run that the tables have is refused now: its figures would be lost to them."""
    if directory is None or before is None or not isinstance(error, AnotherExperiment):
        return
    ended = (directory / run_name(label, seed) / SUMMARY).is_file()
    if ended and label in before.configs and seed not in before.failed.get(label, {}):
        _write(directory, before)
        run_dir, left = directory / run_name(label, seed), f"what {directory} has is left as it is"
        if not (run_dir / CONFIG).is_file():
            lost = f"{run_dir} has lost its {CONFIG}: put it back, or delete {run_dir}, and that run is done again"
            raise ValueError(f"{lost}; {left}") from error
        raise ValueError(f"{error} for the comparison; {left}") from error


def _write(directory: pathlib.Path, comparison: Comparison) -> None:
    configs = {label: config.to_json() for label, config in comparison.configs.items()}
    content: dict[str, Any] = {"configs": configs, "seeds": comparison.seeds, "failed": comparison.failed}
    if comparison.cells:
        content["cells"] = with_infinity(comparison.cells, str)
    content |= {"clients": comparison.clients, "data": dict(comparison.data)}
    write_json(directory / COMPARISON, sealed(content))


def _interrupted() -> bool:
    """Inside a library an interruption can come out as anything."""
    return Interrupt.active is not None and Interrupt.active.wanted


def _reason(error: Exception) -> str:
    """An error as one line."""
    text = " ".join(str(error).split())
    text = text if isinstance(error, ValueError | OSError) else f"{type(error).__name__}: {text}"
    return text if len(text) <= LONGEST_REASON else f"{text[: LONGEST_REASON - 1]}…"
