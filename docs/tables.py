"""Tables of options and costs, from the registries."""

from __future__ import annotations

import dataclasses
import inspect
import json
import pathlib
import typing
from typing import Any

import docstring_parser

from docs.markdown import cell
from fedjax_cluster.algorithms import REGISTRY
from fedjax_cluster.data.scenarios.registry import SCENARIOS
from fedjax_cluster.options import described_options

COMMON = ("model", "local", "participation")
COSTS = pathlib.Path(__file__).with_name("costs.json")


def options(method: str) -> str:
    """The options of a method beyond those that all have, with their defaults."""
    rows = []
    for name, hint, doc, default in described_options(REGISTRY[method]):
        if name not in COMMON:
            shown = "must be given" if default is dataclasses.MISSING else f"`{default!r}`"
            rows.append(f"| `{name}` | {cell(_kind(hint))} | {shown} | {cell(doc)} |")
    if not rows:
        return "It has no options but the model, the local update and the participation."
    return "\n".join(["| option | type | default | what it is |", "|---|---|---|---|", *rows])


def costs(method: str | None = None) -> str:
    """What a client's round cost in a small run, for one method or for all."""
    measured = json.loads(COSTS.read_text(encoding="utf-8"))
    names = [method] if method else list(REGISTRY)
    first = [] if method else ["method"]
    head = [*first, "models down", "models up", "gradients", "losses", "clusterings in all"]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for name in names:
        values = [f"{value:g}" for value in measured[name].values()]
        link = [] if method else [f"[`{name.replace('_', '-')}`](#{name.replace('_', '-')})"]
        lines.append(f"| {' | '.join([*link, *values])} |")
    return "\n".join(lines)


def arguments(scenario: str) -> str:
    """The arguments of a scenario beyond those that all have."""
    build = SCENARIOS[scenario]
    notes = {
        name: " ".join((found.description or "").split())
        for found in docstring_parser.parse(inspect.getdoc(build) or "").params
        for name in found.arg_name.split(", ")
    }
    rows = []
    for name, parameter in inspect.signature(build).parameters.items():
        if name not in ("examples", "clients", "seed", "test_fraction", "examples_per_client"):
            rows.append(f"| `{name}` | `{parameter.default!r}` | {cell(notes.get(name, ''))} |")
    if not rows:
        return "It has no arguments but those that all scenarios take."
    return "\n".join(["| argument | default | what it is |", "|---|---|---|", *rows])


def _kind(hint: Any) -> str:
    """A type in words."""
    if typing.get_origin(hint) is typing.Literal:
        return " or ".join(f"`{choice!r}`" for choice in typing.get_args(hint))
    if hint is type(None):
        return "None"
    if len(parts := typing.get_args(hint)) > 1 and typing.get_origin(hint) is not tuple:
        return " or ".join(_kind(part) for part in parts)
    if parts := [part for part in parts if part is not Ellipsis]:
        return f"list of {_kind(parts[0])}"
    return {int: "whole number", float: "number", str: "text", bool: "True or False"}.get(
        hint, getattr(hint, "__name__", str(hint))
    )
