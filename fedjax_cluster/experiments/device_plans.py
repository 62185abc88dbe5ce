"""`fedjax-cluster plan`: a run's configuration compiled for devices that need not be there."""

from __future__ import annotations

import dataclasses
import logging
import math
import re
from collections.abc import Sequence

import jax
import tyro

from fedjax_cluster.data.by_name import READING
from fedjax_cluster.experiments import several
from fedjax_cluster.experiments.cluster_counts import usual_clusters
from fedjax_cluster.experiments.config import RunConfig, build_algorithm, settled
from fedjax_cluster.experiments.flag_groups import Field, noted, parse_fields, wants_help
from fedjax_cluster.experiments.flags import parse_run
from fedjax_cluster.options import shown
from fedjax_cluster.simulation.abstract import PopulationShape
from fedjax_cluster.simulation.devices import KNOWN
from fedjax_cluster.simulation.planning import Plan, plan
from fedjax_cluster.types import DatasetInfo, Federation

LOG = logging.getLogger(__name__)
FLAGS: tuple[Field, ...] = (
    ("device", noted(str, f"what to compile for: {KNOWN}"), "local"),
    ("rows", noted(int | None, "training rows of each client: a population of this shape, without its data"), None),
    ("input", noted(tuple[int, ...], "shape of one input, with --rows"), (28, 28)),
    ("test_rows", noted(int | None, "of each client, with --rows", "as --test-fraction has it"), None),
    ("classes", noted(int, "with --rows"), 10),
    ("dtype", noted(str, "of the inputs, with --rows"), "uint8"),
    ("chunk_size", noted(int | None, "clients at a time on each device; the compiler's memory figures decide"), None),
    ("runs", noted(int, "so many runs of the method side by side on the same clients, as of a sweep"), 1),
)
OF_SHAPES = ("input", "test_rows", "classes", "dtype")  # of a population without data
OF_A_RUN = ("--run-dir", "--dry-run", "--checkpoint-every", "--tune", "--no-tune")
# In whose place it stands.
OF_DATA = {
    f"--{word}"
    for name in ("dataset", "scenario", "examples_per_client", *READING)
    for word in (name, name.replace("_", "-"))
}
NAMED = re.compile(
    r'\b(profiles_of|landmarks|cluster_cohort|chunk_size|batch_size|participation|compression)\b(?:="?(\w+)"?)?'
)
DESCRIPTION = (
    "Compiles a run's start, rounds and evaluation for a device that need not be there, and prints memory, work and "
    "messages. With --rows it "
    "takes no data. METHOD and all flags of `run` that decide the program, such as --clients, --model and --batch-size."
)


def command(arguments: Sequence[str], prog: str) -> int:
    """Prints the plan of a configuration: 0 where it fits, 1 where it does not.

    Raises:
      ValueError: a wrong flag, an unknown device, or a compiler that is not installed.
    """
    names = [*arguments[:1]] if arguments and not arguments[0].startswith("-") else []
    own, others = _divided(arguments[len(names) :])
    flags = dataclasses.make_dataclass("Plan", [(name, hint, default) for name, hint, default in FLAGS])
    if several.given(others) is not None:
        raise ValueError("a plan takes one process: leave out --coordinator, and name all devices, as --device v5e:4x4")
    given = parse_fields(tyro.conf.configure()(flags), own, f"{prog} [METHOD]", DESCRIPTION)
    config, _ = parse_run(names[0] if names else None, others, prog)
    for word in others:
        if (flag := word.partition("=")[0]) in OF_A_RUN:
            raise ValueError(f"{flag} is for a run, but a plan runs nothing: leave it out")
    if getattr(given, "rows", None) is not None:
        for word in others:
            if (flag := word.partition("=")[0]) in OF_DATA:
                raise ValueError(f"{flag} names data, but --rows plans a population without any: leave one of them out")
    without = {"the fault": config.fault, "clients who join and leave": config.churn}
    if left_out := [what for what, value in without.items() if value]:
        LOG.warning("planned is a run without %s", " or ".join(left_out))
    if given.device != "local":
        # What is small is computed here; a TPU's compiler would have its backend look for one.
        jax.config.update("jax_platforms", "cpu")
    found = planned(config, given)
    found._replace(advice=tuple(NAMED.sub(_flag, each) for each in found.advice)).table().print()
    return 0 if found.fits else 1


def _flag(named: re.Match) -> str:
    """An option in an advice as the command line has it."""
    value = "" if named[2] in (None, "True") else f" {named[2]}"
    return f"--{named[1].replace('_', '-')}{value}"


def planned(config: RunConfig, given: object) -> Plan:
    """The plan of a configuration; `given` has the values of `FLAGS`."""
    rows = getattr(given, "rows", None)
    federation: Federation | PopulationShape
    if rows is None:
        for name, _, default in FLAGS:
            if name in OF_SHAPES and (value := getattr(given, name, default)) != default:
                raise ValueError(f"{name} is {shown(value)}, but describes a population without data; give rows too")
        config, federation = settled(config)
    else:
        federation = shape = _shape(config, given)
        clusters = usual_clusters(config.method, shape.clients) if config.clusters is None else config.clusters
        config = dataclasses.replace(config, clients=shape.clients, clusters=clusters)
    return plan(
        build_algorithm(config),
        federation,
        device=getattr(given, "device", "local"),
        chunk_size=getattr(given, "chunk_size", None),
        runs=getattr(given, "runs", 1),
        eval_clients=config.eval_clients,
    )


def _shape(config: RunConfig, given: object) -> PopulationShape:
    values = {name: getattr(given, name) for name, _, _ in FLAGS}
    if config.population is not None:
        raise ValueError(
            f"rows is {values['rows']}, but the clients are those of the population {config.population}; give one of "
            "the two"
        )
    if config.clients is None:
        raise ValueError("--rows gives a population without data, of which --clients must say how many there are")
    inputs, test_rows = tuple(values["input"]), values["test_rows"]
    if test_rows is None:
        test_rows = math.ceil(values["rows"] * config.test_fraction / (1 - config.test_fraction) - 1e-9)
    of_rows = {"test_rows": test_rows, "groups": True}  # as the scenarios of `run` have them
    if not inputs:
        raise ValueError("input has no numbers; give the shape of one input, such as --input 28 28")
    if config.model == "lstm":  # tokens, each the label of the one before
        info = DatasetInfo("shapes", inputs, values["classes"], "language")
        return PopulationShape(config.clients, values["rows"], info, "int32", inputs, **of_rows)
    if config.model == "csi_autoencoder":  # which gives back its input
        info, of_rows = DatasetInfo("shapes", inputs, 0, "reconstruction"), {**of_rows, "y_dtype": "float32"}
        return PopulationShape(config.clients, values["rows"], info, "float32", inputs, **of_rows)
    info = DatasetInfo("shapes", inputs, values["classes"])
    return PopulationShape(config.clients, values["rows"], info, values["dtype"], **of_rows)


def _divided(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words of the plan's own flags, and those of `run`."""
    mine = {f"--{word}" for name, _, _ in FLAGS for word in (name, name.replace("_", "-"))}
    own: list[str] = []
    others: list[str] = []
    if wants_help(arguments):
        return ["--help"], []
    current = others
    for word in arguments:
        if word.startswith("--"):
            current = own if word.partition("=")[0] in mine else others
        current.append(word)
    return own, others
