"""The commands `run` and `resume` in several processes: their flags, how they join, and what each does at the end."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import pathlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from fedjax_cluster import parallel
from fedjax_cluster.experiments.flag_groups import Field, noted, wants_help
from fedjax_cluster.experiments.runs import rounds_done
from fedjax_cluster.experiments.saved_runs import shows_clients
from fedjax_cluster.files import quoted
from fedjax_cluster.parallel.processes import AUTO, agreed_text, check_processes
from fedjax_cluster.simulation.result import SimulationResult

NOTES = {
    "coordinator": "where process 0 of several listens, as HOST:PORT; auto finds it, and the next two, from SLURM, "
    "Open MPI, Kubernetes or Cloud TPU",
    "num_processes": "how many processes carry out the run",
    "process_id": "which of them this is, from 0",
}
FLAGS: tuple[Field, ...] = (
    ("coordinator", noted(str | None, NOTES["coordinator"], "one process"), None),
    ("num_processes", noted(int | None, NOTES["num_processes"], "1"), None),
    ("process_id", noted(int | None, NOTES["process_id"], "0"), None),
)


class Given(NamedTuple):
    """What the flags say."""

    coordinator: str | None
    num_processes: int | None
    process_id: int | None


def given(arguments: Sequence[str]) -> Given | None:
    """The flags among others, which must be known before JAX starts; None where there are none of them.

    >>> given(["--coordinator", "node1:8476", "--num-processes=2", "--process-id", "1", "--rounds", "5"])
    Given(coordinator='node1:8476', num_processes=2, process_id=1)
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for name, kind in Given.__annotations__.items():
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(*{flag: 0, f"--{name}": 0}, dest=name, type=str if "str" in str(kind) else int)
    try:
        found, _ = parser.parse_known_args(list(arguments))
    except argparse.ArgumentError as error:
        raise ValueError(f"{error.argument_name}: {error.message}") from None
    flags = Given(**vars(found))
    return None if flags == (None, None, None) else flags


def start(command: str, arguments: Sequence[str]) -> None:
    """Joins the other processes of a run, where its flags say that there are some."""
    if wants_help(arguments) or (flags := given(arguments)) is None:
        return
    if command in ("compare", "sweep", "reproduce"):
        raise ValueError(
            f"{command} takes one process: several carry out `run` and `resume` alone, so start its runs one by one"
        )
    if command not in ("run", "resume"):
        return
    if "--tune" in arguments:
        raise ValueError("--tune takes one process; leave out --coordinator")
    check_processes(*flags)
    _without_gloo()
    parallel.start_processes(flags.coordinator or AUTO, flags.num_processes, flags.process_id)
    if not parallel.is_first():
        logging.getLogger("fedjax_cluster").setLevel(logging.ERROR)


def _without_gloo() -> None:
    """Gloo prints a line for each connection, where tables and results are to stand alone."""
    with contextlib.suppress(OSError, ValueError):  # what is printed goes elsewhere already
        if sys.stdout.fileno() != 1:
            return
        sys.stdout.flush()
        kept, encoding, errors = os.dup(1), sys.stdout.encoding, sys.stdout.errors
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        how: dict[str, Any] = {"buffering": 1 if os.isatty(kept) else -1, "encoding": encoding, "errors": errors}
        sys.stdout = open(kept, "w", **how)  # noqa: SIM115 - until the process ends


def same_directory(path: pathlib.Path) -> pathlib.Path:
    """The run directory that process 0 has chosen: the others would find that it is there already."""
    return pathlib.Path(agreed_text(str(path)))


def refuse(what: str) -> None:
    """Raises a ValueError in one of several processes."""
    if parallel.several():
        raise ValueError(f"{what} takes one process; leave out --coordinator")


@contextlib.contextmanager
def going_on(run_dir: pathlib.Path, program: str) -> Iterator[None]:
    """Where another process is lost, says how the run goes on."""
    hint = f"any number of processes can go on with: {program} resume {quoted(run_dir)}"
    with parallel.processes.hinting(f"once it has a checkpoint, {hint}"):
        try:
            with parallel.processes.losses():
                yield
        except parallel.ProcessLost as error:
            if rounds_done(run_dir):
                error.add_note(hint)
            raise


def to_show(result: SimulationResult, run_dir: pathlib.Path) -> SimulationResult | None:
    """A result that this process can draw and print alone; None where it is another's part to do so."""
    if not parallel.several():
        return result
    if shows_clients(run_dir):
        _ = result.per_client, result.outliers
    result = result.on_host()
    return result if parallel.is_first() else None


def wait() -> None:
    """Until all processes are here: JAX would have them wait for the first one's pictures for five minutes at most."""
    parallel.agreed(0)
