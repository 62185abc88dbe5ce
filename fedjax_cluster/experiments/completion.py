"""Completion of the command line by a shell, by tyro: commands, flags and their choices; in bash also files."""

from __future__ import annotations

import contextlib
import functools
import io
import operator
from collections.abc import Mapping
from typing import Annotated, Any

import tyro

SHELLS = ("bash", "zsh")


def script(shell: str, prog: str, commands: Mapping[str, type]) -> str:
    """The script that completes commands and their flags.

    Args:
      shell: bash or zsh.
      prog: the program's name.
      commands: name -> a dataclass whose fields are the command's flags.

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
    return text.getvalue() if shell != "bash" else _with_files(text.getvalue())


def _with_files(script: str) -> str:
    """Where tyro has no word, bash goes on as for any program: with names of files."""
    match = 'matches+=("$completion")'  # also of nothing, which bash would take for a word
    return script.replace(match, f'[[ -n "$completion" ]] && {match}').replace(
        "complete -F", "complete -o bashdefault -o default -F"
    )
