"""How a command ends where it cannot do what it is asked to: one line, and an exit status."""

from __future__ import annotations

import codecs
import contextlib
import io
import os
import sys
from collections.abc import Iterator, Sequence

PROG = "fedjax-cluster"
LEVEL = "TF_CPP_MIN_LOG_LEVEL"
PROCESSES = "fedjax_cluster.parallel.processes"  # which is not loaded for a line alone


def mistake(message: str) -> int:
    """Says what a user can put right; the exit status."""
    _say(message)
    return 2


def failure(error: Exception) -> int:
    """A full disk, a directory that cannot be written, a lost process and the like; its notes tell what is kept."""
    file = getattr(error, "filename", None) or ("the working directory" if _is_lost() else None)
    reason = f"{getattr(error, 'strerror', None) or error}{f': {file}' if file else ''}"
    _say("; ".join([reason, *getattr(error, "__notes__", ())]))
    return 1


def _is_lost() -> bool:
    """Whether the working directory has been removed, which errors do not name."""
    try:
        return not os.getcwd()
    except OSError:
        return True


def about_to_end() -> None:
    """Of several processes, from now on this one says itself why it ends."""
    if (processes := sys.modules.get(PROCESSES)) is not None:
        processes.ENDING.acquire(blocking=False)


def _say(message: str) -> None:
    about_to_end()
    print(f"{PROG}: {' '.join(message.split())}", file=sys.stderr)


@contextlib.contextmanager
def keeping(kept: str) -> Iterator[None]:
    """Adds to an error of the file system what is kept nevertheless."""
    try:
        yield
    except OSError as error:
        error.add_note(kept)
        raise


def open_outputs() -> None:
    """Gives a process whose output or errors were closed, which Python calls None, somewhere to write them to.

    What an output's encoding has no sign for is "?".
    """
    for name in ("stdout", "stderr"):
        output = getattr(sys, name)
        narrow = isinstance(output, io.TextIOWrapper) and codecs.lookup(output.encoding).name != "utf-8"
        if narrow and output.errors in ("strict", "surrogateescape"):  # and nobody has chosen another way
            output.reconfigure(errors="replace")
        if output is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - until the process ends


def quieten_xla(arguments: Sequence[str]) -> None:
    """Of several processes, where XLA would fill pages about one that is lost; before it is loaded."""
    # JAX leaves a 1 there, which a process that it starts inherits.
    if any(word.startswith("--coordinator") for word in arguments) and os.environ.get(LEVEL, "1") == "1":
        os.environ[LEVEL] = "4"


def end_of_several(status: int, error: BaseException | None = None) -> None:
    """Ends this process, where it is one of several: the others would wait for it, and it for them."""
    if (processes := sys.modules.get(PROCESSES)) is not None:
        processes.end_at_once(status, error)
