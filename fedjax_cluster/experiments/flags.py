"""Command-line flags made from the registries: a new method, scenario or model brings its own."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import re
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any

import tyro

from fedjax_cluster.algorithms import REGISTRY
from fedjax_cluster.experiments import several, sweeps
from fedjax_cluster.experiments.config import KINDS, OF_METHOD, RunConfig, known_name, needed_options
from fedjax_cluster.experiments.config_files import (
    ALTERNATIVES,
    Several,
    options_for,
    overridden,
    read,
    without_several,
)
from fedjax_cluster.experiments.flag_groups import (
    OWN,
    Field,
    argument_notes,
    default_text,
    grouped,
    noted,
    noted_clusters,
    own_flags,
    parse_groups,
    show_help,
    takes_one_word,
    wants_help,
    widened,
)
from fedjax_cluster.experiments.unknown import of_methods
from fedjax_cluster.interruption import CHECKPOINT_SECONDS
from fedjax_cluster.options import Described, Options, as_json, described_options
from fedjax_cluster.types import Churn

CHECKPOINT_NOTE = "seconds between checkpoints, or 50 times what one takes where that is longer; 0: after every segment"
CHUNK_NOTE = "clients that each device trains at a time, which changes results by no more than rounding"
# Flags that concern the command, or that make another field of the configuration.
COMMAND_FLAGS = (*OWN, "config", "tune", "seeds", "random", "defaults_of", "join", "leave", *several.Given._fields)
SEEDS: Field = ("seeds", noted(int, "runs per method, with seeds counted up from --seed"), 1)
DEFAULTS_OF: Field = (
    "defaults_of",
    noted(str | None, "method whose defaults all take, such as fedavg, where flags say nothing", "each its own"),
    None,
)
TUNE: Field = (
    "tune",
    noted(
        tyro.conf.FlagCreatePairsOff[bool],
        "first choose the learning rate, of five by factors of 3, in short runs, by validation or held-out rows",
    ),
    False,
)
RANDOM: Field = (
    "random",
    noted(
        int | None,
        "so many draws in place of the grid: two positive values of a decimal number are the ends of a log-uniform "
        "distribution, other two numbers those of a uniform one, and of anything else each is equally likely",
        "the grid",
    ),
    None,
)
DEFAULT_METHOD = "cfl_gp"
DECIDING = (*OF_METHOD, "optimizer")
MOST_WITH_OPTIONS = 3  # methods in a comparison whose own options the short help has


def parse_run(method: str | None, arguments: Sequence[str], prog: str) -> tuple[RunConfig, dict[str, Any]]:
    """A RunConfig from flags, and the flags that concern the command; a ValueError of one line for a wrong flag.

    Args:
      method: by name; None is that of the file that --config names, or the default.
      arguments: the flags. They come before what the file says.
      prog: the command, for its help.
    """
    typed = None if method is None else known_name("method", method, REGISTRY)
    file = _file(arguments, method=typed or DEFAULT_METHOD)
    method = typed or known_name("method", file.get("method", DEFAULT_METHOD), REGISTRY)
    summary = (inspect.getdoc(REGISTRY[method]) or "").partition("\n")[0]
    groups = grouped([*_common_fields(method), *_command_fields(), TUNE, *several.FLAGS], method)
    groups[method] += _options(method)
    given = _parse(groups, arguments, prog, f"Runs {method.replace('_', '-')}. {summary}")
    config = _config(method, [method], _explicit(given, arguments, file), file)
    return config, own_flags(given, "tune")


def parse_sweep(
    method: str | None, arguments: Sequence[str], prog: str
) -> tuple[dict[str, sweeps.Cell], dict[str, Any]]:
    """The cells of a sweep from flags of which some have several values, and the flags that concern the command."""
    typed = None if method is None else known_name("method", method, REGISTRY)
    file = _file(arguments, several=True, method=typed)
    method = typed or known_name("method", file.get("method", DEFAULT_METHOD), REGISTRY)
    file = overridden(file, {"method": method}) if file else file
    groups = grouped([*_common_fields(method), *_command_fields(), SEEDS, RANDOM], method)
    groups[method] += _options(method)
    groups["run"] = [*groups["run"][-2:], *groups["run"][:-2]]
    usual = {name: default for of in groups.values() for name, _, default in of}
    about = f"Runs {method.replace('_', '-')} with every combination of the options that have several values, such as "
    about += "--learning-rate 0.01 0.03 0.1, over seeds. A list of numbers, such as --angles takes, is one value."
    given = _parse(groups, arguments, prog, about, several=True)
    given = {name: usual.get(name) if value is None else value for name, value in given.items()}
    given = _explicit(given, arguments, file)
    axes: dict[str, Any] = {}
    for name, value in given.items():
        if isinstance(value, Several):
            axes |= {name: tuple(value)} if len(value) > 1 else {}
            given[name] = value[0] if value else True  # a flag that needs no word
    order = [word.partition("=")[0].lstrip("-").replace("-", "_") for word in arguments]
    axes = {name: axes[name] for name in sorted(axes, key=order.index)}
    file, in_file = without_several(file, given)
    named = any(name in axes or given.get(name) is not None for name in ALTERNATIVES)
    replaced = ALTERNATIVES if named or given.get("averaging") == "gradients" else ()
    axes |= {name: of for name, of in in_file.items() if given.get(name) is None and name not in replaced}
    seed = file.get("seed", 0) if given["seed"] is None else given["seed"]
    chosen = sweeps.combinations(axes, given["random"], seed)
    cells = sweeps.cells(chosen, lambda values: _config(method, [method], {**given, **values}, file))
    return cells, own_flags(given, "seeds")


def parse_compare(
    methods: Sequence[str], arguments: Sequence[str], prog: str
) -> tuple[dict[str, RunConfig], dict[str, Any]]:
    """A RunConfig per method, all with the same flags; a method's own flags go to the methods that have them."""
    if not methods and not wants_help(arguments):
        raise ValueError("compare needs one or more methods, such as: compare cfl-gp ifca fedavg; or --all")
    names = [known_name("method", method, REGISTRY) for method in methods]
    if len(set(names)) < len(names):
        raise ValueError(f"a method is named twice in {' '.join(methods)}; name each once")
    fields = [*_common_fields(*names, *names[:1]), *_command_fields(), TUNE, SEEDS, DEFAULTS_OF]
    groups = grouped(fields)
    groups["run"].insert(0, groups["run"].pop())
    few = 0 < len(names) <= MOST_WITH_OPTIONS
    if few or "--help" not in arguments:
        groups["method"] += _union_of_options("method", names or list(REGISTRY), fields)
    file = _file(arguments)
    given = _explicit(_parse(groups, arguments, prog, _what_is_compared(names)), arguments, file)
    if given["defaults_of"] is not None:
        # Of what is given the others' defaults follow.
        in_file, by_flag = ({name: of[name] for name in DECIDING if of.get(name) is not None} for of in (file, given))
        try:
            one = RunConfig(**overridden(in_file, {**by_flag, "method": given["defaults_of"]}))
        except ValueError as error:
            raise ValueError(f"--defaults-of: {error}") from None
        given |= {name: getattr(one, name) for name in OF_METHOD}
    files = options_for(file, names) if file else {}
    configs = {name.replace("_", "-"): _config(name, names, given, files.get(name, {})) for name in names}
    return configs, own_flags(given, "seeds", "tune")


def every_flag(*more: Field) -> type:
    """A dataclass of the flags that some method, scenario or model has, for completion."""
    fields = list({field[0]: field for field in (*_common_fields(), *_command_fields(), *more)}.values())
    for kind in KINDS:
        fields += _union_of_options(kind, KINDS[kind].registry, fields)
    return dataclasses.make_dataclass("EveryFlag", fields, namespace={"__doc__": " "})


def _what_is_compared(names: Sequence[str]) -> str:
    """The methods that are compared, or that can be."""
    listed = ", ".join(names or REGISTRY).replace("_", "-")
    if names:
        return f"Compares {listed} on the same federations over seeds, each seed with the same initial models."
    return (
        "Compares methods on the same federations over seeds, each seed with the same initial models. "
        f"Methods: {listed}; --all takes every one. Their own options: run METHOD --help."
    )


def _common_fields(*methods: str) -> Iterator[Field]:
    """The settings that every run has, with the defaults of the method, or of none where there are several or none."""
    method = methods[0] if len(methods) == 1 else None
    own = None if method is None else RunConfig(method=method)
    for name, hint, doc, default in described_options(RunConfig):
        if name in ("method", "churn", "tuning", *(f"{kind}_options" for kind in KINDS)):
            continue
        text = default_text(default)
        if name in OF_METHOD:
            text = "the method's own" if own is None else default_text(getattr(own, name))
        elif name == "clients":
            text = "the method's own" if method is None else str(REGISTRY[method].defaults.clients)
        elif name == "clusters" and methods:
            yield name, noted_clusters(methods, hint, doc, text), default
            continue
        yield name, noted(hint, doc, text), default


def _command_fields() -> Iterator[Field]:
    note = "directory to leave; one that holds the same run is taken up where it stopped"
    yield "run_dir", noted(str | None, note, "a new one in runs/"), None
    yield (
        "dry_run",
        noted(tyro.conf.FlagCreatePairsOff[bool], "print the configuration and what would be done, and do nothing"),
        False,
    )
    note = "file of settings, which flags come before: a run's config.json, or YAML"
    yield "config", noted(str | None, note, "none"), None
    yield "checkpoint_every", noted(float, CHECKPOINT_NOTE), CHECKPOINT_SECONDS
    yield "chunk_size", noted(int | None, CHUNK_NOTE, "one on a CPU, elsewhere what memory holds"), None
    for name, note in (
        ("join", "clients, counted from 0, who join after so many rounds, and are absent until then, such as 30:18"),
        ("leave", "clients who leave after so many rounds, such as 50:3"),
    ):
        hint = Annotated[tuple[tuple[str, ...], ...], tyro.conf.UseAppendAction]
        yield name, noted(hint, note, metavar="ROUND:CLIENT [...]"), ()


def _options(method: str) -> Iterator[Field]:
    """A method's options, with their defaults."""
    for name, hint, doc, default in _parsable_options("method", method):
        text = default_text(default)
        default = None if default is dataclasses.MISSING else default
        yield name, noted(hint | None if default is None else hint, doc, text), default


def _parsable_options(kind: str, name: str) -> Iterator[Described]:
    """The options beyond the common ones that the command line can give."""
    registry, common = KINDS[kind]
    for found in _described(registry[name]):
        if found.name not in common and (hint := _parsable(found.hint)) is not None:
            yield found._replace(hint=hint)


def _described(factory: Callable[..., Any]) -> Iterator[Described]:
    """The options of a method, from its fields; of a scenario or model, from its signature and docstring."""
    if isinstance(factory, type) and issubclass(factory, Options):
        yield from described_options(factory)
        return
    hints, notes = typing.get_type_hints(factory), argument_notes(factory)
    for name, parameter in inspect.signature(factory).parameters.items():
        default = dataclasses.MISSING if parameter.default is inspect.Parameter.empty else parameter.default
        yield Described(name, hints.get(name, str), notes.get(name, ""), default)


def _union_of_options(kind: str, names: Iterable[str], before: Sequence[Field]) -> list[Field]:
    """The options of several of a kind; one whose name another flag has already is called --KIND-NAME.

    Their defaults are None, which stands for that of each; help shows those.
    """
    taken, names = {name for name, _, _ in before}, list(names)
    hints: dict[str, list[Any]] = {}
    notes: dict[str, dict[str, list[str]]] = {}  # flag -> note -> whose it is
    defaults: dict[str, dict[str, list[str]]] = {}  # flag -> default -> whose it is
    for name in names:
        for option, hint, note, default in _parsable_options(kind, name):
            flag = f"{kind}_{option}" if option in taken else option
            hints.setdefault(flag, []).append(hint)
            for kept, text in ((notes, note.removesuffix(".")), (defaults, default_text(default))):
                kept.setdefault(flag, {}).setdefault(text, []).append(name.replace("_", "-"))
    alone = len(names) == 1
    return [
        (flag, noted(_either(given), _told(notes[flag], alone), _told(defaults[flag], len(defaults[flag]) == 1)), None)
        for flag, given in hints.items()
    ]


def _told(texts: Mapping[str, Sequence[str]], alone: bool) -> str:
    """Texts, and where there is not only one whose they are."""
    return "; ".join(text if alone else f"{', '.join(names)}: {text}" for text, names in texts.items())


def _either(hints: Sequence[Any]) -> Any:
    """None or any of the types, each named once."""
    parts = dict.fromkeys(part for hint in hints for part in typing.get_args(hint | None))
    choices = dict.fromkeys(
        choice for part in parts if typing.get_origin(part) is typing.Literal for choice in typing.get_args(part)
    )
    others = [part for part in parts if typing.get_origin(part) is not typing.Literal]
    return typing.Union[(*others, *([typing.Literal[tuple(choices)]] if choices else []))]


def _parsable(hint: Any) -> Any | None:
    """The type as the command line can give it: sequences as tuples; None for what it cannot give."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        parts = [part for part in map(_parsable, inner) if part is not None]
        return typing.Union[tuple(parts)] if set(parts) - {type(None)} else None  # noqa: UP007
    if origin is tuple and Ellipsis not in inner:
        # A flag's words can be told apart where every part takes one of them.
        parts = [_one_word(part) for part in inner]
        return None if None in parts else tuple[tuple(parts)]
    if isinstance(origin, type) and issubclass(origin, Sequence):
        item = _parsable(inner[0])
        return None if item is None or Ellipsis in typing.get_args(item) else tuple[item, ...]
    if origin is typing.Literal or hint in (int, float, str, bool, type(None)):
        return hint
    return None


def _one_word(hint: Any) -> type | None:
    """The type, or that among alternatives, which a single word of the command line gives."""
    return next((kind for kind in (hint, *typing.get_args(hint)) if kind in (int, float, str)), None)


def _parse(
    groups: dict[str, list[Field]], arguments: Sequence[str], prog: str, description: str, several: bool = False
) -> dict[str, Any]:
    """The values of the fields, and of the options of every scenario and model, by name.

    The short help has the options of the scenario and the model that are chosen; help looks at nothing else. With
    `several`, a flag of one word takes more, and its value is `Several`, or None where it is not given.
    """
    short = wants_help(arguments) and "--help-all" not in arguments
    for kind, group in (("scenario", "data"), ("model", "model")):
        before = [field for of in groups.values() for field in of]
        names = [_chosen(kind, arguments)] if short else KINDS[kind].registry
        groups[group] += _union_of_options(kind, names, before)
    unswept = {*COMMAND_FLAGS, *(["seed"] if wants_help(arguments) else [])}
    every = itertools.chain(*groups.values())
    single = {name for name, hint, _ in every if several and name not in unswept and takes_one_word(hint)}
    if several:
        groups = {
            group: [widened(field) if field[0] in single else field for field in of] for group, of in groups.items()
        }
    if not wants_help(arguments):
        given = parse_groups(groups, arguments, prog, description, lambda words: of_methods(words, needed_options))
        return {name: Several(of) if name in single and of is not None else of for name, of in given.items()}
    more = "Options of other scenarios and models, and what is seldom needed: --help-all." if short else ""
    show_help(groups, prog, f"{description} {more}".strip(), short=short)
    raise SystemExit(0)


def _chosen(kind: str, arguments: Sequence[str]) -> str:
    """The scenario or model that the arguments name, or the default."""
    default = next(found.default for found in described_options(RunConfig) if found.name == kind)
    return known_name(kind, _word_after(f"--{kind}", arguments) or default, KINDS[kind].registry)


def _word_after(flag: str, arguments: Sequence[str]) -> str | None:
    """What the arguments give a flag, the last where it stands there several times."""
    words = [word for word in arguments if word.startswith(f"{flag}=")]
    words += [f"{flag}={after}" for word, after in itertools.pairwise(arguments) if word == flag]
    return words[-1].partition("=")[2] if words else None


def _file(arguments: Sequence[str], **how: Any) -> dict[str, Any]:
    """The settings of the file that the arguments name; nothing without one, or where help is asked for."""
    path = None if wants_help(arguments) else _word_after("--config", arguments)
    return {} if path is None else read(path, **how)


def _explicit(given: dict[str, Any], arguments: Sequence[str], file: Mapping[str, Any]) -> dict[str, Any]:
    """Where there is a file, what the arguments name, and None for the rest, which it may say."""
    if not file:
        return given
    flags = {word.partition("=")[0].lstrip("-").replace("-", "_") for word in arguments if word.startswith("--")}
    flags |= {flag.removeprefix("no_") for flag in flags} | set(COMMAND_FLAGS)
    return {name: value if name in flags else None for name, value in given.items()}


def _config(
    method: str, methods: Sequence[str], given: Mapping[str, Any], file: Mapping[str, Any] | None = None
) -> RunConfig:
    """One method's configuration; flags of the other `methods` of a comparison are theirs."""
    settings, file = {field.name: field.default for field in dataclasses.fields(RunConfig)}, file or {}
    scenario, model = (
        known_name(kind, given[kind] or file.get(kind, settings[kind]), KINDS[kind].registry)
        for kind in ("scenario", "model")
    )
    of_methods = {option for other in methods for option in needed_options("method", other)}
    used = of_methods | set(settings) | set(COMMAND_FLAGS)
    options: dict[str, Any] = {}
    for kind, name in (("method", method), ("scenario", scenario), ("model", model)):
        chosen = options[f"{kind}_options"] = {}
        parsable = {found.name for found in _parsable_options(kind, name)}
        for option, needed in needed_options(kind, name).items():
            flag = f"{kind}_{option}" if f"{kind}_{option}" in given else option
            value = None if kind != "method" and flag in of_methods else given.get(flag)
            needed = needed and option not in file.get(f"{kind}_options", {})
            if option not in parsable and (needed or value is not None):
                shown = name.replace("_", "-")
                raise ValueError(f"{option} of {kind} {shown} cannot be given on the command line; use Python")
            if value is not None:
                chosen[option] = as_json(value)
                used.add(flag)
    for flag, value in given.items():
        if value is not None and flag not in used:
            raise ValueError(
                f"--{flag.replace('_', '-')} belongs neither to scenario {scenario.replace('_', '-')} "
                f"nor to model {model.replace('_', '-')}, but to {_owners(flag)}"
            )
    known: dict[str, Any] = {name: given[name] for name in settings if given.get(name) is not None}
    if churn := _churn(given):
        known["churn"] = churn
    return RunConfig(**overridden(file, {"method": method, **known, **options}))


def _owners(flag: str) -> str:
    owners = [
        name
        for kind in ("scenario", "model")
        for name in KINDS[kind].registry
        if flag.removeprefix(f"{kind}_") in needed_options(kind, name)
    ]
    return ", ".join(owners).replace("_", "-")


def _churn(given: Mapping[str, Any]) -> tuple[Churn, ...]:
    """The changes of --join and --leave, one for each round that is named."""
    rounds: dict[int, dict[str, tuple[int, ...]]] = {}
    for kind in ("join", "leave"):
        for word in itertools.chain.from_iterable(given[kind]):
            found = re.fullmatch(r"(\d+):(\d+)", word)
            if found is None:
                raise ValueError(f"--{kind} {word} is not ROUND:CLIENT, two whole numbers such as 30:18")
            before, client = map(int, found.groups())
            rounds.setdefault(before, {"join": (), "leave": ()})[kind] += (client,)
    return tuple(Churn(before, **change) for before, change in sorted(rounds.items()))
