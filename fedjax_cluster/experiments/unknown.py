"""What is said of names and flags that nothing here has: what they may stand for, and where they belong."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from fedjax_cluster.algorithms import REGISTRY
from fedjax_cluster.experiments.installed import GROUP
from fedjax_cluster.keywords import closest, listed
from fedjax_cluster.options import shown

# Flags that some commands have, and the others do not.
OF_COMMANDS = {
    "all": "compare",
    "defaults_of": "compare",
    "random": "sweep",
    "seeds": "compare and sweep",
    "tune": "run and compare",
}
MOST_OWNERS = 4
# What other libraries call a flag.
ELSEWHERE = {
    **{"lr": "learning-rate", "eta": "learning-rate", "bs": "batch-size", "batch": "batch-size", "wd": "weight-decay"},
    **{"k": "clusters", "num-clusters": "clusters", "num-clients": "clients", "num-rounds": "rounds", "t": "rounds"},
    **{"epochs": "local-epochs", "steps": "local-steps", "fraction": "participation", "frac": "participation"},
    **{"data": "dataset", "partition": "scenario", "net": "model", "arch": "model", "output": "run-dir"},
}


def unknown_name(kind: str, name: str, registry: Iterable[str], kinds: Mapping[str, Any]) -> str:
    """Why a name is none of a kind.

    Args:
      kind: "method", "scenario", "model" or "recipe".
      name: as it was given.
      registry: the names of this kind.
      kinds: those that other packages add to -> a value whose `registry` has the names.
    """
    spelled = str(name).replace("-", "_").lower()
    near = closest(spelled, registry)
    other = next((each for each, of in kinds.items() if spelled in of.registry), None)
    hint = found = ""
    if other is not None:
        called = _spoken(spelled)
        hint = f"{called} is a {other}, which {_place(other, called)}; "
    elif near is not None:
        hint = f"did you mean {_spoken(near)}? "
    elif kind in kinds:
        found = f"; that of another package is found once it is installed, by an entry point in {GROUP.format(kind)}"
    return f"unknown {kind} {shown(name)}; {hint}known: {_spoken(', '.join(sorted(registry)))}{found}"


def _place(kind: str, name: str) -> str:
    return "stands right after the command" if kind == "method" else f"goes with --{kind} {name}"


def unknown_option(kind: str, name: str, option: str, options: Iterable[str]) -> str:
    """Why a method, scenario or model has no such option."""
    near = closest(option, options)
    hint = f"did you mean {near}? " if near else ""
    return f"{kind} {_spoken(name)} has no option {option!r}; {hint}its options: {', '.join(sorted(options)) or 'none'}"


def unknown_words(words: Sequence[str], flags: Iterable[str], hints: Iterable[str] = ()) -> str:
    """Why a command line's words are refused.

    Args:
      words: those that no flag takes.
      flags: the names of the command's flags.
      hints: what is known of them otherwise.
    """
    told = [*hints]
    known = set(map(_spoken, flags))
    for flag in _flags(words):
        name = flag.lstrip("-").lower().replace("_", "-")
        near = called if (called := ELSEWHERE.get(name)) in known else closest(name, known)
        if near is not None and not any(hint.startswith(f"{flag} ") for hint in told):
            told.append(f"{flag}: did you mean --{near}?")
    return "; ".join([f"Unrecognized options: {', '.join(words)}", *told])


def of_methods(words: Sequence[str], options_of: Callable[[str, str], Iterable[str]]) -> Iterator[str]:
    """Hints on words that other methods or other commands would take.

    Args:
      words: those that no flag takes.
      options_of: the names of the options of a kind and a name of it.
    """
    methods = [word for word in words if word.replace("-", "_").lower() in REGISTRY]
    if methods:
        stand = "stands" if len(methods) == 1 else "stand"
        yield f"{listed(methods)} {stand} before the flags, which go to every method that has them"
    for flag in _flags(words):
        name = flag.lstrip("-").replace("-", "_")
        owners = [_spoken(method) for method in REGISTRY if name in options_of("method", method)]
        if owners:
            more = [f"{len(owners) - MOST_OWNERS} more"] if len(owners) > MOST_OWNERS else []
            many = "s" if len(owners) > 1 else ""
            yield f"{flag} is an option of the method{many} {listed([*owners[:MOST_OWNERS], *more])}"
        elif name in OF_COMMANDS:
            yield f"{flag} is a flag of {OF_COMMANDS[name]}"


def listed_seeds(arguments: Sequence[str], words: Sequence[str]) -> Iterator[str]:
    """A hint where words that no flag takes follow the value of --seeds, which from Python are a list.

    >>> list(listed_seeds(["--seeds", "0", "1"], ["1"]))
    ['--seeds is how many there are, from 0 on']
    """
    for flag, word in zip(arguments, arguments[2:], strict=False):
        if flag == "--seeds" and word in words and word.isdecimal():
            yield "--seeds is how many there are, from 0 on"


def _flags(words: Sequence[str]) -> Iterator[str]:
    return (word.partition("=")[0] for word in words if word.startswith("--"))


def _spoken(name: str) -> str:
    return name.replace("_", "-")
