"""Completion of the command line by a shell, by tyro: commands, flags and their choices, no positional words."""

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
    return text.getvalue()
