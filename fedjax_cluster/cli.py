"""The command line: `fedjax-cluster COMMAND`."""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import os
import pathlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import fedjax_cluster as fc
from fedjax_cluster import command_flags
from fedjax_cluster.command_flags import BenchFlags, CacheFlags, ReportFlags, ReproduceFlags, ResumeFlags
from fedjax_cluster.command_results import compared, show, whole
from fedjax_cluster.endings import PROG, about_to_end, end_of_several, failure, keeping, mistake
from fedjax_cluster.files import quoted
from fedjax_cluster.interruption import Interrupt, Terminated
from fedjax_cluster.options import as_path, checked

SHORTEST_COMPILATION_KEPT = 0.0  # seconds; to read a small program takes a fifth of compiling it
# Tracing makes very many objects that stay; with Python's 700 before each collection these took a tenth of a short run.
COLLECTIONS = (300_000, 50, 100)
USAGE = f"""usage: {PROG} COMMAND [...]

commands:
  run [METHOD] [flags]        one run (default: CFL-GP on rotated digits)
  compare METHOD... [flags]   several methods, over seeds, on the same federations; --all: every method
  sweep METHOD --FLAG A B ...  one method with several values of some flags, on a grid or drawn at random, over seeds
  resume RUN_DIR [--rounds N] take up an interrupted run, comparison, sweep or recipe, or extend a finished one
  report RUN_DIR...           the table and pictures of runs that were left, anew
  reproduce RECIPE [flags]    an experiment of a paper, our figures beside theirs
  plan [METHOD] --device NAME what a run needs of devices that need not be there
  bench [SUITE...] [--smoke]  how fast it is on this machine (default: every suite)
  list                        methods, scenarios, data sets, models and recipes
  cache [--empty]             what is kept of data sets and compiled programs, by size; empties it
  completion SHELL            the script that completes commands and flags in bash or zsh

`{PROG} COMMAND --help` lists a command's flags; `{PROG} --version` tells the version."""

COMPLETION = f"""Prints a script for the shell; to use it from now on:
  bash: {PROG} completion bash > ~/.local/share/bash-completion/completions/{PROG}
  zsh:  {PROG} completion zsh > ~/.zfunc/_{PROG}    (with ~/.zfunc in $fpath)"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit status.

    0 done, 2 a user's mistake, 130 interrupted by Ctrl-C, 141 nobody reads the output, 143 ended by SIGTERM, 129 by a
    closed terminal, 1 else.
    """
    if arguments is None:  # a process of its own
        gc.set_threshold(*COLLECTIONS)
        # Of orbax's threads, too, which outlive what they were begun for: what goes wrong is said by us.
        logging.getLogger("absl").setLevel(logging.CRITICAL)
    try:
        status = _main(arguments)
        if arguments is None:
            gc.freeze()  # or Python goes through all of it once more, half a second, before it ends
        sys.stdout.flush()
        if status:
            end_of_several(status)
        return status
    except BrokenPipeError:
        _say_no_more()  # as other programs do under `| head`
        status = 141
    except OSError as error:  # the last words to a full disk
        _say_no_more()
        status = failure(error)
    end_of_several(status)
    return status


def _say_no_more() -> None:
    """What is still buffered goes nowhere, where Python would end with a status of its own."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _main(arguments: Sequence[str] | None) -> int:
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if not arguments or arguments[0] in ("-h", "--help", "--help-all"):
        print(USAGE)
        return 0 if arguments else 2
    if arguments[0] in ("-V", "--version"):
        print(f"{PROG} {fc.__version__}")
        return 0
    command = COMMANDS.get(arguments[0])
    if command is None:
        return mistake(f"unknown command {arguments[0]!r}; commands: {', '.join(COMMANDS)}")
    with Interrupt(command=True) as interrupt:
        try:
            interrupt.stop_if_wanted()
            if "--dry-run" not in arguments:  # which keeps no compiled programs either
                _prepare_jax()
                fc.experiments.several.start(arguments[0], arguments[1:])
            with _notices_on_stderr():
                status = command(arguments[1:]) or 0
            interrupt.stop_if_wanted()
        except BaseException as error:
            # Raised inside an import or a library's callback, an interruption can come out as anything.
            if interrupt.wanted:
                return _interrupted(error, interrupt.number or 0)
            if isinstance(error, ValueError):
                return mistake(str(error))
            if isinstance(error, MemoryError):
                return mistake(f"this does not fit into memory: {error}; ask for fewer clients, examples or parameters")
            if isinstance(error, SystemExit) and error.code:  # what rich makes of a broken pipe; --help ends with 0
                raise BrokenPipeError from None
            if isinstance(error, OSError | fc.parallel.ProcessLost) and not isinstance(error, BrokenPipeError):
                return failure(error)
            sys.stdout.flush()
            end_of_several(1, error)
            raise
    return status


def _interrupted(error: BaseException, number: int) -> int:
    # `simulate` says which directory it has left.
    left = error.directory if isinstance(error, Terminated) else error.args if type(error) is KeyboardInterrupt else ()
    hint = ""
    about_to_end()
    if left:
        hint = f"; go on with: {PROG} resume {quoted(left[0])}"
    with contextlib.suppress(OSError):  # a terminal that is gone
        print(f"interrupted{hint}", file=sys.stderr)
    return 128 + number


@contextlib.contextmanager
def _notices_on_stderr() -> Iterator[None]:
    """What the package has to say of a run, such as that a method can never split in it, as one line each."""
    log, handler = logging.getLogger("fedjax_cluster"), logging.StreamHandler()
    said: set[str] = set()
    # A comparison would say some of it for every seed.
    handler.addFilter(lambda record: not (record.getMessage() in said or said.add(record.getMessage())))
    before = log.level
    log.setLevel(before or logging.INFO)  # of several processes, who are silent stay so
    handler.setFormatter(logging.Formatter(f"{PROG}: %(message)s"))
    log.addHandler(handler)
    # Others' handlers would say it again.
    log.propagate = False
    try:
        yield
    finally:
        log.propagate = True
        log.setLevel(before)
        log.removeHandler(handler)


def _prepare_jax() -> None:
    """One CPU device per core, before JAX starts; compiled programs are kept in the user's cache folder."""
    fc.parallel.use_all_cores()
    fc.parallel.enable_compilation_cache(shortest=SHORTEST_COMPILATION_KEPT)


# ------------------------------------------------------------------------------------------- commands


def _run(arguments: list[str]) -> None:
    method, rest = _leading_names(arguments, at_most=1)
    config, own = fc.experiments.flags.parse_run(method[0] if method else None, rest, f"{PROG} run")
    with fc.experiments.places.place(
        own["run_dir"], f"{config.method}-{_of_data(config)}", kept=not own["dry_run"]
    ) as run_dir:
        if own["dry_run"]:
            if own["tune"]:
                fc.experiments.tuning.check_tuning(config)
                fc.experiments.tuning.refuse_another(config, run_dir)
            plan = fc.experiments.plans.plan(config, run_dir, tune=own["tune"])
            fc.experiments.plans.run_table(plan, run_dir, tune=own["tune"]).print()
            return
        if own["run_dir"] is None:
            _say_unfinished(config, run_dir)
        if own["tune"]:
            fc.experiments.several.refuse("--tune")
            fc.experiments.tuning.refuse_another(config, run_dir)
        options = _of_the_machine(own)
        if own["tune"]:
            config = fc.experiments.tuning.tuned(config, directory=run_dir, mapping=options["mapping"])
        with fc.experiments.several.going_on(run_dir, PROG):
            result = fc.experiments.runs.run(config, run_dir=run_dir, time_clustering=True, **options)
            with whole(run_dir):
                show(result, run_dir)


def _of_the_machine(own: Mapping[str, Any]) -> dict[str, Any]:
    """What a run takes that does not decide its results, of the command's own flags."""
    mapping = fc.parallel.client_mapping(chunk_size=own["chunk_size"])
    return {"checkpoint_every": own["checkpoint_every"], "mapping": mapping}


def _say_unfinished(config: fc.RunConfig, run_dir: pathlib.Path) -> None:
    """Names the run that would have been gone on with, had its directory been given."""
    for path in fc.experiments.places.numbered(
        run_dir.with_name(f"{config.method}-{_of_data(config)}".replace("_", "-"))
    ):
        if path == run_dir or not path.exists():
            return
        if done := fc.experiments.runs.unfinished(config, path):
            logging.getLogger("fedjax_cluster").info(
                f"this run begins anew; {path} has {done:,} of its {config.rounds:,} rounds, which "
                f"{PROG} resume {quoted(path)} goes on with"
            )
            return


def _of_data(config: fc.RunConfig) -> str:
    return config.scenario if config.population is None else pathlib.Path(config.population).resolve().name


def _resume(arguments: list[str]) -> int:
    names, rest = _leading_names(arguments, at_most=1)
    if not names and not fc.experiments.flag_groups.wants_help(rest):
        raise ValueError(f"resume needs a run directory: {PROG} resume RUN_DIR")
    own = _flags(ResumeFlags, rest, "resume RUN_DIR", "Takes up an interrupted run, comparison, sweep or recipe.")
    options, path = _of_the_machine(vars(own)), as_path("run_dir", names[0])
    if fc.experiments.comparison.is_comparison(path):
        fc.experiments.several.refuse("a comparison")
        go_on = functools.partial(fc.experiments.comparison.resume, path, own.rounds, **options)
        return compared(go_on, path)
    if fc.experiments.reproduction.is_reproduction(path):
        fc.experiments.several.refuse("a recipe")
        if own != ResumeFlags():
            raise ValueError(f"{path} is a recipe's, which has rounds of its own; leave out all flags")
        with whole(path):
            fc.recipes.catalogue.resume(path)
        return 0
    with fc.experiments.several.going_on(path, PROG):
        result = fc.experiments.runs.resume(path, own.rounds, time_clustering=True, **options)
        with whole(path):
            show(result, path)
    return 0


def _compare(arguments: list[str]) -> int:
    methods, rest = _leading_names(arguments)
    fc.experiments.installed.load(fc.experiments.config.KINDS)
    if "--all" in rest:
        if methods:
            raise ValueError(f"compare --all takes every method; leave out {' '.join(methods)}, or --all")
        methods, rest = list(fc.algorithms.REGISTRY), [word for word in rest if word != "--all"]
    configs, own = fc.experiments.flags.parse_compare(methods, rest, f"{PROG} compare METHOD...")
    return _over_seeds(configs, own, "compare", tune=own["tune"])


def _sweep(arguments: list[str]) -> int:
    method, rest = _leading_names(arguments, at_most=1)
    cells, own = fc.experiments.flags.parse_sweep(method[0] if method else None, rest, f"{PROG} sweep METHOD")
    checked("seeds", own["seeds"], int, fc.experiments.comparison.RUNS)
    if not fc.experiments.comparison.RUNS.holds(count := len(cells) * own["seeds"]):
        raise ValueError(f"the sweep has {count} runs, {own['seeds']} of each of {len(cells)} cells; give fewer values")
    name = next(cell.config.method for cell in cells.values() if cell.config is not None)
    return _over_seeds(own=own, name=f"sweep-{name}", **fc.experiments.sweeps.compared(cells))


def _over_seeds(configs: Mapping[str, Any], own: Mapping[str, Any], name: str, tune: bool = False, **cells: Any) -> int:
    """Runs configurations over the seeds that the command's own flags ask for, in a directory that they may name."""
    checked("seeds", own["seeds"], int, fc.experiments.comparison.RUNS)
    first = next(iter(configs.values())).seed
    seeds = range(first, first + own["seeds"])
    if seeds[-1] >= 2**32:
        raise ValueError(f"seed is {first} and seeds is {own['seeds']}, but seeds have 32 bits; give a smaller seed")
    with fc.experiments.places.place(own["run_dir"], name, kept=not own["dry_run"]) as directory:
        fc.files.check_writable(directory)
        if not fc.experiments.comparison.is_comparison(directory):
            fc.experiments.ended_runs.refuse_filled(directory)
        if own["dry_run"]:
            for table in fc.experiments.plans.comparison_tables(configs, seeds, directory, tune=tune, **cells):
                table.print()
            return 0
        options = {**_of_the_machine(own), **cells}
        if tune:
            configs = fc.experiments.tuning.each_tuned(configs, directory=directory, mapping=options["mapping"])
        go_on = functools.partial(fc.experiments.comparison.compare, configs, seeds=seeds, run_dir=directory, **options)
        return compared(go_on, directory)


def _report(arguments: list[str]) -> None:
    names, rest = _leading_names(arguments)
    own = _flags(ReportFlags, rest, "report RUN_DIR...", "Tables and pictures of runs, anew.")
    if not names:
        raise ValueError(f"report needs a run directory or several: {PROG} report RUN_DIR...")
    names = [str(as_path("RUN_DIR", name)) for name in names]
    with keeping("not all was written; the runs are as they were, and --out DIR leaves it elsewhere"):
        beside = fc.experiments.public_codes.named(own.beside)
        for path in fc.experiments.saved_runs.write_report(names, _directory(own.out, "out"), own.format, beside):
            print(f"left {path}")


def _reproduce(arguments: list[str]) -> None:
    page = [word for word in arguments if word == "--page"]
    names, rest = _leading_names([word for word in arguments if word != "--page"], at_most=None if page else 1)
    own = _flags(ReproduceFlags, [*rest, *page], "reproduce RECIPE", fc.recipes.catalogue.overview())
    if own.page:
        if len(rest):
            raise ValueError(f"--page writes what was reproduced before; leave out {' '.join(rest)}")
        for path in fc.recipes.page.write(names):
            print(f"left {path}")
        return
    if not names:
        raise ValueError(f"reproduce needs a recipe; recipes: {', '.join(fc.recipes.catalogue.RECIPES)}")
    options = {"quick": own.quick, "full": own.full, "seeds": own.seeds}
    chosen = fc.recipes.catalogue.chosen_recipe(names[0]).name
    directory = _directory(own.run_dir) or fc.recipes.catalogue.place_of(chosen, quick=own.quick, full=own.full)
    with whole(directory), keeping(f"not all was written; what was done is kept in {directory}"):
        fc.recipes.catalogue.reproduce(chosen, **options, directory=directory)


def _bench(arguments: list[str]) -> None:
    names, rest = _leading_names(arguments)
    own = _flags(BenchFlags, rest, "bench [SUITE...]", fc.bench.overview())
    fc.bench.run_suites(names, smoke=own.smoke, output=own.output, record=own.record, check=own.check)


def _plan(arguments: list[str]) -> int:
    return fc.experiments.device_plans.command(arguments, f"{PROG} plan")


def _list(arguments: list[str]) -> None:
    if fc.experiments.flag_groups.wants_help(arguments):
        print(f"usage: {PROG} list\n\nPrints the methods, scenarios, data sets, models and recipes by name.")
        return
    if arguments:
        raise ValueError(f"list takes no arguments, but got {' '.join(arguments)}")
    fc.recipes.catalogue.show()


def _cache(arguments: list[str]) -> None:
    own = _flags(CacheFlags, arguments, "cache", "What is kept of data sets and compiled programs, by kind and size.")
    cache = fc.data.cache
    kept = cache.empty() if own.empty else cache.contents()
    rows = [(each.kind, f"{each.files:,}", f"{each.bytes / 1e6:,.1f}") for each in kept]
    title = f"{'Removed from' if own.empty else 'Kept in'} {cache.directory()}"
    fc.report.tables.Table(title, tuple(map(fc.report.tables.Column, ("kind", "files", "MB"))), tuple(rows)).print()


def _completion(arguments: list[str]) -> None:
    names, rest = _leading_names(arguments, at_most=1)
    make = fc.experiments.completion
    if fc.experiments.flag_groups.wants_help(rest):
        print(f"usage: {PROG} completion {{{','.join(make.SHELLS)}}}\n\n{COMPLETION}")
        return
    if not names or rest:
        raise ValueError(f"completion needs a shell and nothing else, one of {', '.join(make.SHELLS)}")
    fc.experiments.installed.load(fc.experiments.config.KINDS)
    known = command_flags.completed(), command_flags.completed_names(), command_flags.completed_choices()
    print(make.script(names[0], PROG, *known), end="")


COMMANDS: dict[str, Callable[[list[str]], int | None]] = {
    "run": _run,
    "compare": _compare,
    "sweep": _sweep,
    "resume": _resume,
    "report": _report,
    "reproduce": _reproduce,
    "plan": _plan,
    "bench": _bench,
    "list": _list,
    "cache": _cache,
    "completion": _completion,
}


def _flags(cls: type, arguments: list[str], usage: str, description: str) -> Any:
    return fc.experiments.flag_groups.parse_fields(cls, arguments, f"{PROG} {usage}", description)


def _leading_names(arguments: list[str], at_most: int | None = None) -> tuple[list[str], list[str]]:
    """The words before the first flag, and the rest."""
    count = next((i for i, word in enumerate(arguments) if word.startswith("-")), len(arguments))
    if at_most is not None and count > at_most:
        raise ValueError(f"unexpected {arguments[at_most]!r}; flags start with --")
    return arguments[:count], arguments[count:]


def _directory(given: str | None, flag: str = "run_dir") -> pathlib.Path | None:
    return None if given is None else as_path(flag, given)


if __name__ == "__main__":
    sys.exit(main())
