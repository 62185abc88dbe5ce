"""The help of the commands, as a terminal of 100 characters shows it."""

from __future__ import annotations

import contextlib
import io
import os

from fedjax_cluster import cli

WIDTH = "100"


def shown(command: str | None = None) -> str:
    """A command's help, or without a command the list of all; `run`, `compare` and `sweep` with every flag."""
    arguments = [command] if command else []
    arguments.append("--help-all" if command in ("run", "compare", "sweep") else "--help")
    before = {name: os.environ.get(name) for name in ("COLUMNS", "NO_COLOR")}
    os.environ.update(COLUMNS=WIDTH, NO_COLOR="1")
    try:
        with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.suppress(SystemExit):
            if command:
                cli.COMMANDS[command](arguments[1:])
            else:
                cli.main(arguments)
    finally:
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})
    typed = " ".join(["fedjax-cluster", *arguments])
    return f"```text\n$ {typed}\n\n{printed.getvalue().strip()}\n```"
