"""Completion of the command line by a shell, by tyro: commands, names, flags and their choices; in bash also files."""

from __future__ import annotations

import contextlib
import functools
import io
import operator
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import tyro

SHELLS = ("bash", "zsh")
SPECIFICATION = "COMPLETION_SPEC = "  # how the line begins on which tyro's script has what it knows
# tyro completes no words that stand without a flag: each is a command of its own here, with the same flags.
MORE = """
NAMES, CHOICES = {names!r}, {choices!r}
for _command, _spec in COMPLETION_SPEC["subcommands"].items():
    for _option in _spec["options"]:
        _words = CHOICES.get(_option["flags"][0], _option.get("choices"))
        if _words:
            _option.update(type="choice", choices=[word for word in _words if word != "None"])
    _words, _several = NAMES.get(_command, ((), False))
    _next = {{}}
    for _word in _words:
        _next[_word] = dict(_spec, description=_word, subcommands=_next if _several else {{}})
    _spec["subcommands"] = _next
"""


class Names(NamedTuple):
    """Words that a command takes without a flag."""

    words: Sequence[str]
    several: bool = False


def script(
    shell: str,
    prog: str,
    commands: Mapping[str, type],
    names: Mapping[str, Names],
    choices: Mapping[str, Sequence[str]],
) -> str:
    """The script that completes commands, names and flags.

    Args:
      shell: bash or zsh.
      prog: the program's name.
      commands: name -> a dataclass whose fields are the command's flags.
      names: command -> the words that it takes without a flag.
      choices: flag -> the words that may follow it, where its type does not tell them.

    Raises:
      ValueError: another shell.
    """
    if shell not in SHELLS:
        raise ValueError(f"unknown shell {shell!r}; give one of {', '.join(SHELLS)}")
    parts: tuple[Any, ...] = tuple(
        Annotated[cls, tyro.conf.subcommand(name, prefix_name=False, description="")] for name, cls in commands.items()
    )
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
        tyro.cli(functools.reduce(operator.or_, parts), prog=prog, args=["--tyro-print-completion", shell])
    lines = text.getvalue().splitlines(keepends=True)
    known = next(number for number, line in enumerate(lines) if line.startswith(SPECIFICATION))
    plain = {command: (list(of.words), of.several) for command, of in names.items()}
    lines.insert(known + 1, MORE.format(names=plain, choices={flag: list(words) for flag, words in choices.items()}))
    return "".join(lines) if shell != "bash" else _with_files("".join(lines))


def _with_files(script: str) -> str:
    """Where tyro has no word, bash goes on as for any program: with names of files."""
    match = 'matches+=("$completion")'  # also of nothing, which bash would take for a word
    return script.replace(match, f'[[ -n "$completion" ]] && {match}').replace(
        "complete -F", "complete -o bashdefault -o default -F"
    )
