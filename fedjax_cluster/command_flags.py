"""The flags of commands that have few; those of run and compare come from `experiments.flags`."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import tyro

import fedjax_cluster as fc
from fedjax_cluster.interruption import CHECKPOINT_SECONDS


@dataclasses.dataclass(frozen=True)
class CacheFlags:
    empty: tyro.conf.FlagCreatePairsOff[bool] = False
    """remove all of it"""


@dataclasses.dataclass(frozen=True)
class ResumeFlags:
    rounds: int | None = None
    """communication rounds in all; more than the run had extends it"""
    checkpoint_every: float = CHECKPOINT_SECONDS
    """seconds between checkpoints, or 50 times what one takes where that is longer; 0: after every segment"""
    chunk_size: int | None = None
    """clients that each device trains at a time (default: one on a CPU, elsewhere what memory holds)"""
    coordinator: str | None = None
    """where process 0 of several listens, as HOST:PORT, or auto; any number of processes can take up a run"""
    num_processes: int | None = None
    """how many processes carry out the run (default: 1)"""
    process_id: int | None = None
    """which of them this is, from 0"""


@dataclasses.dataclass(frozen=True)
class ReportFlags:
    out: str | None = None
    """where to leave the pictures and, of several runs, the table; none is the first directory"""
    format: Literal["png", "pdf", "svg"] = "png"
    """pdf or svg: the pictures in that format as well, for a paper"""
    beside: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """NAME=PATH: results of a public code (CFL-GP, FedGWC, IFCA, PACFL) as a row; the same NAME: another seed"""


@dataclasses.dataclass(frozen=True)
class BenchFlags:
    smoke: bool = False
    """tiny sizes, in seconds: does everything still run?"""
    output: str | None = None
    """a folder for the results as JSON, such as benchmarks/results"""
    record: str | None = None
    """a file to append the ratios to, with commit and machine, such as benchmarks/history.json"""
    check: str | None = None
    """such a file: is anything slower than in its last records of this machine?"""


@dataclasses.dataclass(frozen=True)
class ReproduceFlags:
    quick: bool = False
    """a smaller version, in a minute or two"""
    full: bool = False
    """nearer to the paper's size where the recipe is shortened; for an accelerator"""
    seeds: int | None = None
    """runs per cell (default: the recipe's)"""
    run_dir: str | None = None
    """where to leave the runs, table and figure (default: runs/reproduce/RECIPE)"""
    page: tyro.conf.FlagCreatePairsOff[bool] = False
    """write benchmarks/reproduction.md, with what was left of the recipes (or directories) that are named"""


def completed_names() -> dict[str, Any]:
    """Every command with the words that it takes without a flag."""
    names = fc.experiments.completion.Names
    methods = [name.replace("_", "-") for name in fc.experiments.config.KINDS["method"].registry]
    one, several = names(methods), names(methods, several=True)
    return {
        "run": one,
        "compare": several,
        "sweep": one,
        "plan": one,
        "reproduce": names(list(fc.recipes.catalogue.RECIPES)),
        "bench": names(list(fc.bench.SUITES), several=True),
        "completion": names(fc.experiments.completion.SHELLS),
    }


def completed_choices() -> dict[str, list[str]]:
    """Flags whose values have names, with these."""
    known = {kind: sorted(registry) for kind, (registry, _) in fc.experiments.config.KINDS.items()}
    known |= {"fault": sorted(fc.faults.FAULTS), "aggregation": ["mean", *fc.aggregation.RULES]}
    words = {f"--{flag}": [name.replace("_", "-") for name in names] for flag, names in known.items()}
    words["--defaults-of"] = words["--method"]
    return words | {"--dataset": ["digits", *fc.recipes.catalogue.OPENML]}


def completed() -> dict[str, type]:
    """Every command with the flags that a shell completes."""
    nothing, flags = dataclasses.make_dataclass("Nothing", ()), fc.experiments.flags
    all_methods = "all", fc.experiments.flag_groups.noted(tyro.conf.FlagCreatePairsOff[bool], "every method"), False
    return {
        "run": flags.every_flag(flags.TUNE, *fc.experiments.several.FLAGS),
        "compare": flags.every_flag(flags.TUNE, flags.SEEDS, flags.DEFAULTS_OF, all_methods),
        "sweep": flags.every_flag(flags.SEEDS, flags.RANDOM),
        "resume": ResumeFlags,
        "report": ReportFlags,
        "reproduce": ReproduceFlags,
        "plan": fc.experiments.flags.every_flag(*fc.experiments.device_plans.FLAGS),
        "bench": BenchFlags,
        "list": nothing,
        "cache": CacheFlags,
        "completion": nothing,
    }
