"""Command-line flags made from the registries: a new method, scenario or model brings its own."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import io
import itertools
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import tyro

from fedjax_cluster.algorithms import REGISTRY
from fedjax_cluster.data.scenarios.registry import SCENARIOS
from fedjax_cluster.experiments.config import (
    COMMON_METHOD,
    COMMON_SCENARIO,
    MODELS,
    RunConfig,
    known_name,
    own_options,
)
from fedjax_cluster.types import Membership

OPTION_FIELDS = ("method_options", "scenario_options", "model_options")
# Flags that concern the command, or that make another field of the configuration.
COMMAND_FLAGS = ("run_dir", "seeds", "join", "leave")


def parse_run(method: str, arguments: Sequence[str], prog: str) -> tuple[RunConfig, dict[str, Any]]:
    """A RunConfig from flags, and the flags that concern the command rather than the run.

    Raises:
      ValueError: a flag that cannot be; the message is one line.
    """
    method = known_name("method", method, REGISTRY)
    fields = _common_fields() + _command_fields(run_dir=True, seeds=False)
    fields += _options(method, REGISTRY[method], COMMON_METHOD, optional=False)
    taken = {name for name, _, _ in fields}
    fields += _union_of_options(SCENARIOS, COMMON_SCENARIO, taken) + _union_of_options(MODELS, (), taken)
    given = _parse(fields, arguments, prog, f"Runs {method.replace('_', '-')}. {_summary(REGISTRY[method])}")
    return _config(method, given), {"run_dir": given["run_dir"]}


def parse_compare(
    methods: Sequence[str], arguments: Sequence[str], prog: str
) -> tuple[dict[str, RunConfig], dict[str, Any]]:
    """A RunConfig per method, all with the same flags; a method's own flags go to the methods that have them."""
    if not methods:
        raise ValueError("compare needs one or more methods, such as: compare cfl-gp ifca fedavg")
    names = [known_name("method", method, REGISTRY) for method in methods]
    if len(set(names)) < len(names):
        raise ValueError(f"a method is named twice in {' '.join(methods)}; name each once")
    fields = _common_fields() + _command_fields(run_dir=True, seeds=True)
    taken = {name for name, _, _ in fields}
    fields += _union_of_options({name: REGISTRY[name] for name in names}, COMMON_METHOD, taken)
    fields += _union_of_options(SCENARIOS, COMMON_SCENARIO, taken) + _union_of_options(MODELS, (), taken)
    given = _parse(fields, arguments, prog, f"Compares {', '.join(names).replace('_', '-')}.")
    configs = {name.replace("_", "-"): _config(name, given) for name in names}
    return configs, {"run_dir": given["run_dir"], "seeds": given["seeds"]}


def parse_fields(cls: type, arguments: Sequence[str], prog: str, description: str) -> Any:
    """A plain dataclass from flags, with errors of one line."""
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            return tyro.cli(cls, args=list(arguments), prog=prog, description=description)
    except SystemExit as stop:
        if not stop.code:
            raise
        raise ValueError(_one_line(errors.getvalue())) from None


# ---------------------------------------------------------------------------------------- the dataclass

Field = tuple[str, Any, Any]  # name, annotated type, default


def _common_fields() -> list[Field]:
    hints = typing.get_type_hints(RunConfig)
    notes = _argument_notes(RunConfig, "Attributes:")
    return [
        (field.name, _noted(hints[field.name], notes.get(field.name)), field.default)
        for field in dataclasses.fields(RunConfig)
        if field.name not in (*OPTION_FIELDS, "method", "membership")
    ]


def _command_fields(*, run_dir: bool, seeds: bool) -> list[Field]:
    fields: list[Field] = []
    if run_dir:
        note = (
            "directory to leave; one that holds the same run is taken up where it stopped (default: a new one in runs/)"
        )
        fields.append(("run_dir", _noted(str | None, note), None))
    for name, note in (
        ("join", "clients who join before a round, and are absent until then, such as 30:18; counted from 0"),
        ("leave", "clients who leave before a round, such as 50:3"),
    ):
        hint = Annotated[
            tuple[tuple[str, ...], ...],
            tyro.conf.UseAppendAction,
            tyro.conf.arg(help=note, metavar="ROUND:CLIENT [...]"),
        ]
        fields.append((name, hint, ()))
    if seeds:
        fields.append(("seeds", _noted(int, "runs per method, with seeds counted up from --seed"), 1))
    return fields


def _options(name: str, factory: Callable, common: tuple[str, ...], *, optional: bool) -> list[Field]:
    hints = typing.get_type_hints(factory)
    notes = _argument_notes(factory, "Args:")
    fields = []
    for option, parameter in own_options(factory, common).items():
        hint = _parsable(hints.get(option, str))
        if hint is None:
            continue
        default = None if parameter.default is inspect.Parameter.empty else parameter.default
        note = notes.get(option, "")
        if optional:
            note = f"{name.replace('_', '-')}: {note}"
        if optional or default is None:
            hint, default = hint | None, None
        fields.append((option, _noted(hint, note), _as_tuple(default)))
    return fields


def _union_of_options(registry: Mapping[str, Callable], common: tuple[str, ...], taken: set[str]) -> list[Field]:
    found: dict[str, Field] = {}
    for name, factory in registry.items():
        for field in _options(name, factory, common, optional=True):
            if field[0] in taken:
                continue
            if field[0] in found:
                field = _either(found[field[0]], field)
            found[field[0]] = field
    taken |= set(found)
    return list(found.values())


def _either(first: Field, second: Field) -> Field:
    """One flag for an option that two factories share."""
    (one, note), (other, more) = (typing.get_args(field[1]) for field in (first, second))
    return first[0], _noted(one | other, f"{note.help}; {more.help}"), None


def _parsable(hint: Any) -> Any | None:
    """The type as the command line can give it: sequences as tuples; None for what it cannot give."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        parts = [part for part in map(_parsable, inner) if part is not None]
        return typing.Union[tuple(parts)] if parts else None  # noqa: UP007
    if isinstance(origin, type) and issubclass(origin, Sequence):
        item = _parsable(inner[0])
        nested = typing.get_origin(item) is tuple
        return None if item is None or nested else tuple[item, ...]
    if origin is typing.Literal or hint in (int, float, str, bool, type(None)):
        return hint
    return None


def _as_tuple(default: Any) -> Any:
    return tuple(default) if isinstance(default, list) else default


def _noted(hint: Any, note: str | None) -> Any:
    return Annotated[hint, tyro.conf.arg(help=note or "")]


def _parse(fields: list[Field], arguments: Sequence[str], prog: str, description: str) -> dict[str, Any]:
    flags = dataclasses.make_dataclass(
        "Flags",
        [(name, hint, dataclasses.field(default=default)) for name, hint, default in fields],
        namespace={"__doc__": description},
    )
    parsed = parse_fields(flags, arguments, prog, description)
    return {name: getattr(parsed, name) for name, _, _ in fields}


def _config(method: str, given: Mapping[str, Any]) -> RunConfig:
    own = {field.name for field in dataclasses.fields(RunConfig)}
    scenario = known_name("scenario", given["scenario"], SCENARIOS)
    model = known_name("model", given["model"], MODELS)
    options = {
        "method_options": own_options(REGISTRY[method], COMMON_METHOD),
        "scenario_options": own_options(SCENARIOS[scenario], COMMON_SCENARIO),
        "model_options": own_options(MODELS[model], ()),
    }
    chosen: dict[str, Any] = {kind: {} for kind in options}
    for name, value in given.items():
        if name in own or name in COMMAND_FLAGS or value is None:
            continue
        homes = [kind for kind, parameters in options.items() if name in parameters]
        # A method's flags always have a value; another method's, in a comparison, concern this one not.
        if not homes and not any(name in own_options(factory, COMMON_METHOD) for factory in REGISTRY.values()):
            raise ValueError(
                f"--{name.replace('_', '-')} belongs neither to scenario {scenario.replace('_', '-')} "
                f"nor to model {model}, but to {_owners(name)}"
            )
        for kind in homes[:1]:
            chosen[kind][name] = list(value) if isinstance(value, tuple) else value
    known = {name: given[name] for name in own if name in given}
    return RunConfig(method=method, membership=_membership(given), **known, **chosen)


def _membership(given: Mapping[str, Any]) -> tuple[Membership, ...]:
    """The changes of --join and --leave, one for each round that is named."""
    rounds: dict[int, dict[str, list[int]]] = {}
    for kind in ("join", "leave"):
        for word in itertools.chain.from_iterable(given[kind]):
            found = re.fullmatch(r"(\d+):(\d+)", word)
            if found is None:
                raise ValueError(f"--{kind} {word} is not ROUND:CLIENT, two whole numbers such as 30:18")
            number, client = map(int, found.groups())
            rounds.setdefault(number, {"join": [], "leave": []})[kind].append(client)
    return tuple(
        Membership(number, tuple(change["join"]), tuple(change["leave"])) for number, change in sorted(rounds.items())
    )


def _owners(option: str) -> str:
    owners = [name for name, factory in SCENARIOS.items() if option in own_options(factory, COMMON_SCENARIO)]
    owners += [name for name, factory in MODELS.items() if option in own_options(factory, ())]
    return ", ".join(owners).replace("_", "-")


# --------------------------------------------------------------------------------------------- the text


def _argument_notes(documented: Any, heading: str) -> dict[str, str]:
    """The notes on arguments in a docstring, by name."""
    text = inspect.getdoc(documented) or ""
    _, _, section = text.partition(heading)
    section = re.split(r"\n\s*\n(?=\S)", section)[0]
    notes = re.findall(r"^ {2}(\w+): (.*?)(?=^ {2}\w+: |\Z)", section, re.MULTILINE | re.DOTALL)
    return {name: " ".join(note.split()) for name, note in notes}


def _summary(documented: Any) -> str:
    return (inspect.getdoc(documented) or "").partition("\n")[0]


def _one_line(message: str) -> str:
    """tyro's boxed error as one line, without its title and its help text."""
    lines = [line.strip(" │╭╮╰╯─-") for line in message.splitlines()]
    text = " ".join(line for line in lines[1:] if line)
    return re.split(r"Argument helptext:|For full helptext", text)[0].strip()
