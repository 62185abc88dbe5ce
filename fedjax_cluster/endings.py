"""How a command ends where it cannot do what it is asked to: one line, and an exit status."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

PROG = "fedjax-cluster"


def mistake(message: str) -> int:
    """Says what a user can put right; the exit status."""
    print(f"{PROG}: {' '.join(message.split())}", file=sys.stderr)
    return 2


def failure(error: Exception) -> int:
    """A full disk, a directory that cannot be written, a lost process and the like; its notes tell what is kept."""
    file = getattr(error, "filename", None)
    reason = f"{getattr(error, 'strerror', None) or error}{f': {file}' if file else ''}"
    message = "; ".join([reason, *getattr(error, "__notes__", ())])
    print(f"{PROG}: {' '.join(message.split())}", file=sys.stderr)
    return 1


@contextlib.contextmanager
def keeping(kept: str) -> Iterator[None]:
    """Adds to an error of the file system what is kept nevertheless."""
    try:
        yield
    except OSError as error:
        error.add_note(kept)
        raise


def end_of_several(status: int, error: BaseException | None = None) -> None:
    """Ends this process, where it is one of several: the others would wait for it, and it for them."""
    if (processes := sys.modules.get("fedjax_cluster.parallel.processes")) is not None:
        processes.end_at_once(status, error)
