"""Malformed command lines, made from the flags themselves: a new option is among them without further ado."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator
from typing import Any, NamedTuple

from fedjax_cluster import cli
from fedjax_cluster.algorithms import REGISTRY
from fedjax_cluster.experiments import flags
from fedjax_cluster.experiments.config import KINDS

LONG = "9" * 26
# What no flag of a type should take without a word; of several types all.
WORDS: dict[Any, tuple[str, ...]] = {
    int: ("-1", "0", "1.5", "nan", "x", "", LONG),
    float: ("nan", "inf", "-1", "0", "1e39", "1e-50", "x"),
    str: ("", "no-such-thing", "a" * 300, "\0"),
    bool: ("maybe",),
    type(None): (),
}


class Line(NamedTuple):
    before: tuple[str, ...]  # the command and what the flag needs
    flag: str
    word: str

    @property
    def words(self) -> list[str]:
        return [*self.before, self.flag, self.word]

    @property
    def name(self) -> str:
        """How the tables of accepted lines call it."""
        shown = {LONG: "26 digits", "a" * 300: "300 characters", "\0": "NUL", "": "''"}.get(self.word, self.word)
        return f"{' '.join(self.before)} {self.flag} {shown}"


def words_of(hint: Any) -> tuple[str, ...]:
    """Words for a flag of a type."""
    if typing.get_origin(hint) is typing.Annotated:
        return words_of(typing.get_args(hint)[0])
    if typing.get_origin(hint) is typing.Literal:
        return ("no-such-choice", "")
    if hint in WORDS:
        return WORDS[hint]
    inner = [part for part in typing.get_args(hint) if part is not Ellipsis]
    return tuple(dict.fromkeys(word for part in inner for word in words_of(part)))


def of_fields(before: tuple[str, ...], fields: Iterator[tuple[str, Any, Any]]) -> Iterator[Line]:
    for name, hint, _ in fields:
        for word in words_of(hint):
            yield Line(before, f"--{name.replace('_', '-')}", word)


def lines() -> Iterator[Line]:
    yield from of_fields(("run",), flags._common_fields())
    yield from of_fields(("run",), flags._command_fields())
    for method in REGISTRY:
        yield from of_fields(("run", method), flags._options(method))
    taken = [*flags._common_fields(), *flags._command_fields()]
    for kind in ("scenario", "model"):
        for name in sorted(set(KINDS[kind].registry) - {"users", "lstm"}):  # the digits have no users, and are no text
            fields = flags._union_of_options(kind, [name], taken)
            needed = ("--dataset", "digits+digits") if name == "mixed_datasets" else ()
            yield from of_fields(("run", "fedavg", *needed, f"--{kind}", name), fields)
    yield from of_fields(
        ("compare", "fedavg", "ifca"),
        [("seeds", int, 1), ("run_dir", str, None), ("checkpoint_every", float, 30.0), ("chunk_size", int, None)],
    )
    yield from of_fields(
        ("sweep", "fedavg", "--learning-rate", "0.1", "1"),
        [("random", int, None), ("rounds", int, 1), ("model", str, "")],
    )
    commands = {
        ("resume", "left"): cli.ResumeFlags,
        ("report", "left"): cli.ReportFlags,
        ("bench",): cli.BenchFlags,
        ("reproduce", "cfl-gp-linear-regression"): cli.ReproduceFlags,
    }
    for before, cls in commands.items():
        hints = typing.get_type_hints(cls)
        yield from of_fields(before, ((field.name, hints[field.name], None) for field in dataclasses.fields(cls)))
