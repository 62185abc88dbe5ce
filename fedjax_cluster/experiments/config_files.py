"""Configurations as files that people edit: a run's config.json, or YAML; settings over other settings."""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
import pathlib
import re
import typing
from collections.abc import Iterable, Mapping
from typing import Any

import yaml

from fedjax_cluster.algorithms import REGISTRY
from fedjax_cluster.data.by_name import READING
from fedjax_cluster.data.scenarios.registry import SCENARIOS, draws_examples
from fedjax_cluster.experiments.config import KINDS, MODEL_AVERAGING_ONLY, RunConfig, known_name, needed_options
from fedjax_cluster.experiments.on_disk import as_now
from fedjax_cluster.experiments.robustness import FAULT_FLAGS, RULE_FLAGS, with_infinity
from fedjax_cluster.files import unsealed
from fedjax_cluster.options import Bound, Options, as_json, as_path, checked, described_options, shown
from fedjax_cluster.simulation.arguments import checked_churn
from fedjax_cluster.simulation.run_directory import VERSION

# What config.json has beside the experiment, and what of a file concerns several runs.
OF_A_RUN = {"version", "versions", "machine", "identity", "seal"}
OPTIONS = tuple(f"{kind}_options" for kind in KINDS)
# Of these a file's gives way where another is given.
ALTERNATIVES = ("local_steps", "local_epochs")
# With others of these a learning rate is as well chosen as before.
UNTUNED = ("rounds", "seed", "eval_every", "eval_clients", "tuning")
MERGE = "tag:yaml.org,2002:merge"  # of a key << in YAML


class Several(tuple):
    """Several values of a setting that has one in a run: what a sweep goes through."""


def read(path: str | os.PathLike, *, several: bool = False, method: str | None = None) -> dict[str, Any]:
    """The settings in a file: those of the run that left this config.json, or any of `RunConfig`, by name.

    Args:
      path: ends in .json, .yaml or .yml. An edited config.json is taken, whatever its seal says.
      several: a list for what is no list is `Several` values.
      method: whose options those of a file are that names no method; None leaves them as they are.

    Returns:
      Those of the file alone, checked one by one; `RunConfig(**settings)` has the others' defaults.

    Raises:
      ValueError: no such file, damaged, of another version, or a setting that is unknown or of another type; says which
        and in which file.
    """
    path = as_path("config", path)
    content = _content(path)
    if not isinstance(content, dict):
        held = "nothing" if content is None else shown(content)
        raise ValueError(f"config {path} holds {held}; it must hold settings by name, such as rounds: 50")
    if "configs" in content:
        raise ValueError(
            f"config {path} is that of a comparison; give the config.json of one of its runs, or resume it"
        )
    version = content.get("version", VERSION)
    if isinstance(version, bool) or not isinstance(version, int) or not 1 <= version <= VERSION:
        raise ValueError(f"config {path} is of version {shown(version)}; this fedjax_cluster reads 1 to {VERSION}")
    untouched = _untouched(content)
    if isinstance(content.get("identity"), dict):
        if not isinstance(content.get("experiment"), dict):
            raise ValueError(f"config {path} is that of a run of simulate(), which has no settings; write them down")
        unknown, content = set(content) - OF_A_RUN - {"experiment"}, content["experiment"]
        if unknown:
            raise ValueError(f"config {path} has the unknown key {min(unknown)}; settings stand below experiment")
    # An edited file tells nothing of how its learning rate was chosen.
    others = ("version",) if untouched else ("version", "tuning")
    content = {name: value for name, value in as_now(content).items() if name not in others}
    content |= {name: with_infinity(content[name], float) for name in OPTIONS if name in content}
    try:
        return _checked(content, several, method)
    except ValueError as error:
        raise ValueError(f"{' '.join(str(error).split())} (in {path})") from None


def run_config(path: str | os.PathLike, **changes: Any) -> RunConfig:
    """The configuration in a file, with changes.

    Args:
      path: see `read`.
      **changes: settings of `RunConfig`; options in mappings are merged with the file's.

    Raises:
      ValueError: as `read` and `RunConfig` raise it.
    """
    settings = overridden(read(path, method=changes.get("method", RunConfig.method)), changes)
    try:
        return RunConfig(**settings)
    except ValueError as error:
        raise ValueError(f"{error} (in {path})") from None


def overridden(settings: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with changes: mappings of options are merged; what goes with the old ones alone is dropped.

    That is the options of another method, scenario or model, of local steps and epochs what is not given, and the
    learning rate and momentum where they were the server's and the new ones are the clients', or the other way round;
    options of another fault or aggregation; a data set that another scenario does not read, and momentum for adam.

    >>> overridden({"rounds": 9, "local_steps": 10}, {"local_epochs": 1})
    {'rounds': 9, 'local_epochs': 1}
    >>> overridden({"averaging": "gradients", "learning_rate": 0.3}, {"local_epochs": 1})
    {'local_epochs': 1}
    >>> overridden({"method": "cfl_gp", "method_options": {"every": 2}}, {"method": "fedavg"})
    {'method': 'fedavg'}
    >>> overridden({"method_options": {"weighting": "uniform"}}, {"method": "fedavg"})
    {'method_options': {'weighting': 'uniform'}, 'method': 'fedavg'}
    """
    merged = dict(settings)
    for kind, (registry, _) in KINDS.items():
        # Options without a name are those of whatever is chosen.
        old, new = merged.get(kind), changes.get(kind, merged.get(kind))
        if old is not None and known_name(kind, old, registry) != known_name(kind, new, registry):
            merged.pop(f"{kind}_options", None)
    if any(_differs(settings, name, value) for name, value in changes.items() if name not in UNTUNED):
        merged.pop("tuning", None)  # which was of another run
    if not {*ALTERNATIVES}.isdisjoint(changes) or changes.get("averaging") == "gradients":
        merged = {name: value for name, value in merged.items() if name not in (*ALTERNATIVES, "averaging")}
    for name, its in (("fault", FAULT_FLAGS), ("aggregation", RULE_FLAGS)):
        if name in changes and _spelled(changes[name]) != _spelled(settings.get(name)):
            merged = {other: value for other, value in merged.items() if other not in its}
    for name in _meant_otherwise(settings, changes):
        merged.pop(name, None)
    for name, value in changes.items():
        merged[name] = {**merged.get(name, {}), **value} if name in OPTIONS else value
    return merged


def _meant_otherwise(settings: Mapping[str, Any], changes: Mapping[str, Any]) -> set[str]:
    """Settings of a file that mean something else, or nothing, with the changes."""
    method = known_name("method", {**settings, **changes}.get("method", RunConfig.method), REGISTRY)
    old, new = settings.get("averaging") or _usual_averaging(settings), changes.get("averaging")
    if new is None and any(changes.get(name) is not None for name in ALTERNATIVES):
        new = "models"
    left: set[str] = {"momentum"} if changes.get("optimizer") == "adam" else set()
    # Of clients or of the server, as is averaged; some methods have no other rate than the clients'.
    if None not in (old, new) and old != new and method not in (*MODEL_AVERAGING_ONLY, "local_only"):
        left |= {"learning_rate", "momentum", "server_learning_rate"}
    if "scenario" in changes and draws_examples(known_name("scenario", changes["scenario"], SCENARIOS)):
        left |= {"dataset", *READING}
    return left


def _spelled(name: object) -> str:
    return str(name).replace("-", "_").lower()


def _usual_averaging(settings: Mapping[str, Any]) -> str | None:
    """What is averaged where a file does not say it; None where it names no method either."""
    if any(settings.get(name) is not None for name in ALTERNATIVES):
        return "models"
    if "method" not in settings:
        return None
    return REGISTRY[known_name("method", settings["method"], REGISTRY)].defaults.averaging


def _differs(settings: Mapping[str, Any], name: str, value: Any) -> bool:
    old = settings.get(name)
    return as_json({**(old or {}), **value} if name in OPTIONS else value) != as_json(
        (old or {}) if name in OPTIONS else old
    )


def options_for(settings: Mapping[str, Any], methods: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Method -> what of a file's settings it takes, where several methods are compared.

    The file's method options go to its method alone, and to all that have them where it names none: in a run's file
    they are what its method does by itself. So does its K, for whether methods are given it or find it.

    Raises:
      ValueError: an option that no method has.
    """
    methods, options = list(methods), dict(settings.get("method_options", {}))
    owner = known_name("method", settings["method"], KINDS["method"].registry) if "method" in settings else None
    if owner is not None and owner not in methods:
        options = {}
    known = {method: needed_options("method", method) for method in methods}
    for name in options:
        if not any(name in of for of in known.values()):
            raise ValueError(
                f"method_options.{name}: none of {', '.join(methods).replace('_', '-')} has such an option"
            )
    # How a rate was chosen was said of one method.
    shared = {name: value for name, value in settings.items() if name != "tuning"}
    return {
        method: {
            **(settings if owner in (None, method) else _without_another_k(shared, owner, method)),
            "method": method,
            "method_options": {n: v for n, v in options.items() if n in known[method] and owner in (None, method)},
        }
        for method in methods
    }


def _without_another_k(settings: Mapping[str, Any], owner: str, method: str) -> dict[str, Any]:
    """A file's settings for another method: K that is a number for one is the most that the other may find."""
    same = REGISTRY[owner].defaults.finds_clusters == REGISTRY[method].defaults.finds_clusters
    return {name: value for name, value in settings.items() if same or name != "clusters"}


def without_several(
    file: Mapping[str, Any], given: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, tuple[Any, ...]]]:
    """A file's settings of one value, and those of several by the name of their flag, which is among `given`."""
    one, several = {}, {}
    for name, value in file.items():
        kind = name.removesuffix("_options")
        if isinstance(value, Several):
            several[name] = tuple(value)
        elif kind in KINDS and name != kind:
            for option, values in value.items():
                if isinstance(values, Several):
                    several[f"{kind}_{option}" if f"{kind}_{option}" in given else option] = tuple(values)
            one[name] = {option: values for option, values in value.items() if not isinstance(values, Several)}
        else:
            one[name] = value
    return one, several


def _content(path: pathlib.Path) -> Any:
    if path.suffix not in (".json", ".yaml", ".yml"):
        raise ValueError(f"config is {shown(str(path))}; its name must end in .json, .yaml or .yml")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ValueError(f"cannot read the config {path}: {reason}") from None
    try:
        if path.suffix == ".json":
            return json.loads(text, object_pairs_hook=_once)
        found = yaml.load(text, Loader=_Loader)
        json.dumps(found, skipkeys=True, default=str)  # refuses what refers to itself
        return found
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        place = getattr(error, "problem_mark", None)
        said = getattr(error, "problem", None) or str(error)
        where = f" in line {place.line + 1}" if place else ""
        raise ValueError(f"config {path} cannot be read{where}: {' '.join(said.split())}") from None


def _untouched(content: Mapping[str, Any]) -> bool:
    """Whether the content of a config.json is what a run left there."""
    try:
        return "seal" in content and bool(unsealed(content))
    except ValueError:
        return False


class _Loader(yaml.SafeLoader):
    """YAML with numbers of its version 1.2, to which 1e-3 is one and 1:30 none, and without keys that stand twice."""

    def flatten_mapping(self, node: Any) -> None:
        # Before others' settings are merged in (<<), which come first and give way.
        own = [key for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.tag != MERGE]
        if not getattr(node, "looked_at", False):
            names = [self.construct_object(key) for key in own]
            for place, name in enumerate(names):
                if name in names[:place]:
                    problem = f"{name} stands there twice"
                    raise yaml.constructor.ConstructorError(None, None, problem, own[place].start_mark)
        node.looked_at = True
        super().flatten_mapping(node)


NUMBERS = {
    "tag:yaml.org,2002:int": r"[-+]?(0|[1-9][0-9_]*|0x[0-9a-fA-F]+)$",
    "tag:yaml.org,2002:float": r"[-+]?((\d+\.\d*|\.\d+)([eE][-+]?\d+)?|\d+[eE][-+]?\d+|\.inf)$|\.nan$",
}
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in found if tag not in NUMBERS]
    for first, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _tag, _pattern in NUMBERS.items():
    _Loader.add_implicit_resolver(_tag, re.compile(_pattern, re.IGNORECASE), list("-+0123456789."))


def _once(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    names = [name for name, _ in pairs]
    if twice := [name for place, name in enumerate(names) if name in names[:place]]:
        raise ValueError(f"{twice[0]} stands there twice")
    return dict(pairs)


def _checked(content: Mapping[str, Any], several: bool, method: str | None) -> dict[str, Any]:
    """Settings in their types."""
    fields = {field.name: field for field in dataclasses.fields(RunConfig)}
    hints = {found.name: found.hint for found in described_options(RunConfig)}
    named = content if method is None else {"method": method, **content}
    kinds = {kind: named.get(kind, fields[kind].default) for kind in KINDS}
    for kind, (registry, _) in KINDS.items():
        checked(kind, kinds[kind], str)
        kinds[kind] = known_name(kind, kinds[kind], registry)
    for name in content:
        if name not in fields:
            raise ValueError(_unknown(str(name), list(fields), kinds))
    found: dict[str, Any] = {}
    for name, value in content.items():
        if name == "churn":
            found[name] = checked_churn(value)
        elif name in KINDS:
            found[name] = kinds[name]
        elif value is not None or fields[name].default is not None:
            found[name] = _each(several, name, value, hints[name], fields[name].metadata["bound"])
    for kind in KINDS:
        found |= {f"{kind}_options": dict(found[f"{kind}_options"])} if f"{kind}_options" in found else {}
        for option in found.get(f"{kind}_options", {}):
            allowed = needed_options(kind, kinds[kind])
            # What several methods are to have is known once these are.
            if option not in allowed and (kind != "method" or "method" in named):
                of = f"{kind} {kinds[kind].replace('_', '-')}"
                listed = ", ".join(sorted(allowed)) or "none"
                raise ValueError(f"{kind}_options.{option}: {of} has no such option; its options: {listed}")
            if option in allowed and (kind != "method" or "method" in named):
                value, (hint, bound) = found[f"{kind}_options"][option], _type_of(kind, kinds[kind], option)
                found[f"{kind}_options"][option] = _each(several, f"{kind}_options.{option}", value, hint, bound)
    return found


def _each(several: bool, name: str, value: Any, hint: Any, bound: Bound | None) -> Any:
    """A value in its type; of a list for what is none, each."""
    if several and isinstance(value, list):
        try:
            return as_json(checked(name, value, hint, bound))
        except ValueError:
            return Several(as_json(checked(name, each, hint, bound)) for each in value)
    return as_json(checked(name, value, hint, bound))


def _type_of(kind: str, name: str, option: str) -> tuple[Any, Bound | None]:
    """The type of an option, and the bound of its numbers."""
    factory = KINDS[kind].registry[name]
    if isinstance(factory, type) and issubclass(factory, Options):
        hint = next(found.hint for found in described_options(factory) if found.name == option)
        return hint, next(
            field.metadata.get("bound")
            for field in dataclasses.fields(typing.cast(Any, factory))
            if field.name == option
        )
    return typing.get_type_hints(factory).get(option, Any), None


def _unknown(name: str, fields: list[str], kinds: Mapping[str, Any]) -> str:
    for kind, part in kinds.items():
        if part in KINDS[kind].registry and name in needed_options(kind, part):
            return f"{name} is an option of the {kind}; put it below {kind}_options"
    close = difflib.get_close_matches(name, fields, 1)
    hint = f"did you mean {close[0]}?" if close else f"settings: {', '.join(fields)}"
    return f"{name} is no setting; {hint}"
