"""Flags in groups, read by tyro: the short help of what is mostly used, and all of them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import io
import re
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any

import docstring_parser
import tyro

from fedjax_cluster.algorithms import REGISTRY
from fedjax_cluster.data.by_name import READING
from fedjax_cluster.data.scenarios.registry import SCENARIOS
from fedjax_cluster.experiments.cluster_counts import estimates_clusters, own_clusters, takes_clusters
from fedjax_cluster.experiments.unknown import listed_seeds, unknown_words
from fedjax_cluster.options import COUNT, NOT_NEGATIVE, checked
from fedjax_cluster.report.names import value_text

Field = tuple[str, Any, Any]  # name, annotated type, default
Hints = Callable[[Sequence[str]], Iterable[str]]
NEEDED = "needed"
# Where help shows the fields of a configuration and of the command; what is not named comes last.
GROUPS = {
    "data": (*("scenario", "dataset", "population", "clients", "test_fraction", "examples_per_client"), *READING),
    "model": ("model",),
    "method": ("clusters",),
    "training": (
        *("rounds", "batch_size", "learning_rate", "learning_rate_decay", "averaging", "local_steps", "local_epochs"),
        *("optimizer", "momentum", "weight_decay", "precision", "server_learning_rate", "participation", "seed"),
    ),
    "robustness": (
        *("aggregation", "trim", "byzantine", "clip", "fault", "fault_share", "fault_scale", "fault_factor"),
        *("fault_rate", "fault_steps", "fault_group", "fault_joins"),
    ),
    "privacy": (
        *("privacy_clip", "privacy_noise", "privacy_delta", "privacy_clipping", "privacy_quantile"),
        *("privacy_clustering_clip", "privacy_clustering_noise", "privacy_accountant"),
    ),
    "run": (),
}
OWN = ("run_dir", "dry_run", "checkpoint_every", "chunk_size")  # of the command, whatever the run is
# Left to --help-all, by group.
LESS_USED = {
    "data": (*("population", "test_fraction", "examples_per_client"), *READING),
    "model": ("init", "loss", "normalize", "num_outputs"),
    "training": ("learning_rate_decay", "weight_decay", "precision", "server_learning_rate"),
    "robustness": GROUPS["robustness"],
    "privacy": GROUPS["privacy"],
    "run": (
        "eval_clients",
        "checkpoint_every",
        "chunk_size",
        "join",
        "leave",
        "coordinator",
        "num_processes",
        "process_id",
    ),
}
MOST_LINES, WIDTH = 100, 80  # of the short help; of a terminal
SHORTEST_SENTENCE = 12  # characters; what is shorter is a symbol
LONGEST_NOTES = (
    150,
    100,
    75,
    50,
    40,
)  # characters of a note in the short help: the first with which it is short enough


def own_flags(given: Mapping[str, Any], *more: str) -> dict[str, Any]:
    """The values of `OWN` and of more flags; a ValueError for a number that no run could take."""
    checked("checkpoint_every", given["checkpoint_every"], float, NOT_NEGATIVE)
    checked("chunk_size", given["chunk_size"], int | None, COUNT)
    return {name: given[name] for name in (*OWN, *more)}


def noted(hint: Any, note: str | None, default: str | None = None, **further: Any) -> Any:
    """A flag's type with its note, and its default as help shows it; None leaves that to tyro."""
    if default is not None:
        further["help_behavior_hint"] = f"({default})" if default == NEEDED else f"(default: {default})"
    if (word := metavar(hint)) is not None:
        further.setdefault("metavar", word)
    return Annotated[hint, tyro.conf.arg(help=note or "", prefix_name=False, **further)]


def noted_clusters(methods: Sequence[str], hint: Any, note: str, default: str) -> Any:
    """The type of --clusters with its note, of which these methods leave what means something to one of them.

    The note has a part for the methods that need the number, one for those that find it, and one on "auto". The default
    of a single method's own option stands in place of the usual one.
    """
    taking = [method for method in methods if takes_clusters(method)]
    if not taking:
        return noted(hint, "of no effect, as there are no clusters", default, metavar="INT")
    finds = {REGISTRY[method].defaults.finds_clusters for method in taking}
    auto, own = any(map(estimates_clusters, taking)), {own_clusters(method) for method in taking}
    parts = zip(note.split("; "), (False in finds, True in finds, auto), strict=True)
    note = "; ".join(part for part, wanted in parts if wanted)
    if dataclasses.MISSING not in own:
        note, default = "number of clusters, or the largest", default_text(*own) if len(own) == 1 else "each its own"
    return noted(hint, note, default, **({} if auto else {"metavar": "INT"}))


def default_text(value: Any) -> str:
    """A default as help shows it."""
    return NEEDED if value is dataclasses.MISSING else value_text(value)


@functools.cache
def argument_notes(documented: Any) -> dict[str, str]:
    """The notes on arguments in a docstring, by name; "as in `other`" stands for what the other says."""
    notes: dict[str, str] = {}
    for found in docstring_parser.parse(inspect.getdoc(documented) or "").params:
        note = " ".join((found.description or "").split())
        referred = re.match(r"as in `(\w+)`", note)
        other = referred and (inspect.unwrap(documented).__globals__.get(referred[1]) or SCENARIOS.get(referred[1]))
        elsewhere = argument_notes(other) if other else {}
        notes |= {name: elsewhere.get(name, note) for name in found.arg_name.split(", ")}
    return notes


def grouped(fields: Iterable[Field], method: str = "method") -> dict[str, list[Field]]:
    """Fields of a configuration or a command by the group that help shows them in."""
    of_name = {name: group for group, names in GROUPS.items() for name in names}
    groups: dict[str, list[Field]] = {group: [] for group in GROUPS}
    for field in fields:
        groups[of_name.get(field[0], "run")].append(field)
    return {method if group == "method" else group: of for group, of in groups.items()}


def show_help(groups: Mapping[str, list[Field]], prog: str, description: str, *, short: bool) -> None:
    """Prints all flags, or in short those that are mostly used, and ends the command."""
    if short:
        shorter = [_brief_groups(groups, longest) for longest in LONGEST_NOTES]
        # Of several methods the options may be too many.
        shorter += [{group: of[:1] if group == "method" else of for group, of in each.items()} for each in shorter]
        fitting = (each for each in shorter if _lines(each, prog, description) <= MOST_LINES)
        groups = next(fitting, shorter[-1])
    parse_groups(groups, ["--help"], prog, description)


def _lines(groups: Mapping[str, list[Field]], prog: str, description: str) -> int:
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
        parse_groups(groups, ["--help"], prog, description)
    return sum(-(-max(1, len(line)) // WIDTH) for line in text.getvalue().splitlines())


def _brief_groups(groups: Mapping[str, list[Field]], longest: int) -> dict[str, list[Field]]:
    """The groups without what is little used, and the beginning of each note."""
    return {
        group: [
            (name, _brief(hint, longest), default) for name, hint, default in of if name not in LESS_USED.get(group, ())
        ]
        for group, of in groups.items()
    }


def wants_help(arguments: Sequence[str]) -> bool:
    """Whether help is asked for, short or whole."""
    return not {"-h", "--help", "--help-all"}.isdisjoint(arguments)


def takes_one_word(hint: Any) -> bool:
    """Whether a flag's value is one word, and no list."""
    kind = typing.get_args(hint)[0]
    return not any(typing.get_origin(part) in (tuple, Sequence) for part in (kind, *typing.get_args(kind)))


def widened(field: Field) -> Field:
    """A flag that takes several words, of which each is a value."""
    name, hint, _ = field
    kind, *others = typing.get_args(hint)
    # A lone flag that is on or off takes no word.
    usual = "{True,False}" if kind in (bool, bool | None) else metavar(kind | None)
    others = [
        dataclasses.replace(each, metavar=f"{each.metavar or usual} ...")
        if usual and hasattr(each, "metavar")
        else each
        for each in others
    ]
    parts = tuple(part for part in typing.get_args(kind | None) if part is not type(None))
    return name, Annotated[(tuple[typing.Union[parts], ...] | None, *others)], None  # noqa: UP007


def parse_groups(
    groups: Mapping[str, list[Field]], arguments: Sequence[str], prog: str, description: str, hints: Hints | None = None
) -> dict[str, Any]:
    """The values of all fields by name; help shows the groups one after the other."""
    parts: list[Any] = []
    every = {name: default for of in groups.values() for name, _, default in of}
    # tyro takes a quarter of a second for the flags that a run has, most of which are not typed.
    wanted = set(every) if wants_help(arguments) else _typed(every, arguments)
    for group, fields in groups.items():
        if shown := [(name, hint, _default(default)) for name, hint, default in fields if name in wanted]:
            part = dataclasses.make_dataclass(group.replace("-", "_"), shown, namespace={"__doc__": " "})
            # With no help of its own tyro would look for one in the source.
            silent = Annotated[part, tyro.conf.arg(help="")]
            parts.append((group.replace("-", "_"), silent, dataclasses.field(default_factory=part)))
    flags = dataclasses.make_dataclass("Flags", parts, namespace={"__doc__": description})
    parsed = parse_fields(flags, arguments, prog, description, hints, every)
    return every | {name: value for part in vars(parsed).values() for name, value in vars(part).items()}


def _typed(every: Mapping[str, Any], arguments: Sequence[str]) -> set[str]:
    """The fields that arguments may name, and those that must be given."""
    words = {word.partition("=")[0].lstrip("-").replace("-", "_") for word in arguments}
    return {
        name
        for name, default in every.items()
        if default is dataclasses.MISSING or not words.isdisjoint((name, f"no_{name}"))
    }


def parse_fields(
    cls: type,
    arguments: Sequence[str],
    prog: str,
    description: str,
    hints: Hints | None = None,
    known: Iterable[str] | None = None,
) -> Any:
    """A plain dataclass from flags, with errors of one line.

    Args:
      cls: the dataclass, perhaps with groups that are dataclasses.
      arguments: the words.
      prog, description: of the command, for its help.
      hints: tell where words belong that it does not have.
      known: the names of all flags that can be meant; those of `cls` if not given.
    """
    errors = io.StringIO()
    words = ["--help" if word == "--help-all" else word for word in arguments]
    try:
        with contextlib.redirect_stderr(errors):
            made, left = tyro.cli(cls, args=words, prog=prog, description=description, return_unknown_args=True)
    except SystemExit as stop:
        if not stop.code:
            raise
        raise ValueError(_one_line(errors.getvalue())) from None
    if left:
        names = [field.name for field in dataclasses.fields(cls)] if known is None else known
        told = [*(hints(left) if hints else ())] or [*listed_seeds(arguments, left)]
        raise ValueError(unknown_words(left, names, told))
    return made


def _default(value: Any) -> Any:
    return dataclasses.field(default_factory=lambda: value) if isinstance(value, list | dict) else value


def metavar(hint: Any) -> str | None:
    """What stands for the words of a flag that may be left out: INT for `int | None`; None leaves it to tyro."""
    inner = typing.get_args(hint)
    parts = [part for part in inner if part is not type(None)]
    if len(parts) == len(inner) or typing.get_origin(hint) is Annotated:
        return None
    names = [*map(_word, parts)]
    return "|".join(filter(None, names)) if names and all(names) else None


def _word(kind: Any) -> str | None:
    inner = typing.get_args(kind)
    if typing.get_origin(kind) is typing.Literal:
        return "{" + ",".join(map(str, inner)) + "}"
    if typing.get_origin(kind) is tuple:
        words = [_word(part) for part in inner if part is not Ellipsis]
        return None if None in words else " ".join([*filter(None, words), *(["..."] if Ellipsis in inner else [])])
    if typing.get_origin(kind) is Sequence:
        word = _word(inner[0])
        return None if word is None else f"{word} ..."
    return {int: "INT", float: "FLOAT", str: "STR"}.get(kind)


def _brief(hint: Any, longest: int) -> Any:
    """A flag's type with the beginning of its note."""
    kind, *others = typing.get_args(hint)
    shortened = [
        dataclasses.replace(each, help=_beginning(each.help, longest)) if getattr(each, "help", None) else each
        for each in others
    ]
    return Annotated[(kind, *shortened)]


def _beginning(note: str, longest: int) -> str:
    """A note's first sentence, or less where that is longer than `longest` characters.

    >>> _beginning("mini-batch steps of a client per round: model averaging. Without it each client sends one", 150)
    'mini-batch steps of a client per round: model averaging'
    >>> _beginning("T_cl; no clustering from this round on (App. E)", 25)
    'T_cl; no clustering from …'
    """
    ends = (found.start() for found in re.finditer(r"(?<!App)[.;] ", note))
    first = note[: next((end for end in ends if end >= SHORTEST_SENTENCE), None)]
    return first if len(first) <= longest else first[: longest + 1].rpartition(" ")[0] + " …"


def _one_line(message: str) -> str:
    """tyro's boxed error as one line, without its title and its help text."""
    lines = [line.strip(" │╭╮╰╯─-") for line in message.splitlines()]
    text = " ".join(line for line in lines[1:] if line)
    text = re.split(r"Argument helptext:|For full helptext", text)[0].strip()
    # What stands for a flag that was not given is no choice.
    text = re.sub(r"(?<=Expected one of \()(.*)(?=\))", lambda found: re.sub(r"'None', |, 'None'", "", found[1]), text)
    several = r"Error parsing (\S+): no type matching (.*?) could be instantiated from \[(.*?)\]\. Got errors: .*"
    return re.sub(several, lambda found: f"{found[1]} is {found[3]}; it must be {_plain(found[2])}", text)


def _plain(kind: str) -> str:
    """tyro's word for what a flag takes, for a person.

    >>> _plain("{None}|FLOAT"), _plain("{None}|{[INT [INT ...]]}")
    ('FLOAT', 'INT, or several with spaces between')
    """
    several = r"\{\[(\w+|\{[\w,]+\}) \[\1 \.\.\.\]\]\}"
    return re.sub(several, r"\1, or several with spaces between", kind.removeprefix("{None}|"))
