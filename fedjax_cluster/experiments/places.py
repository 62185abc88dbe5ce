"""Where a command leaves what it runs."""

from __future__ import annotations

import contextlib
import itertools
import pathlib
from collections.abc import Iterator

from fedjax_cluster import parallel
from fedjax_cluster.experiments.several import same_directory
from fedjax_cluster.options import as_path


@contextlib.contextmanager
def place(given: str | None, name: str, *, kept: bool) -> Iterator[pathlib.Path]:
    """The directory that is named, or runs/NAME, or runs/NAME-2 and so on where there is one already.

    Where it is to be `kept`, it is made at once, so that no other command takes the same; empty it goes again.
    """
    if kept:
        parallel.processes.check_alike({"choice of a --run-dir or none": given is not None})
    if given is not None:
        yield as_path("run_dir", given)
        return
    base = pathlib.Path("runs") / name.replace("_", "-")
    if not kept:
        yield next(path for path in numbered(base) if not path.exists())
        return
    alone = not base.parent.exists()
    # Other processes of the same run would find that it is there already.
    path = same_directory(_made(base) if parallel.is_first() else base)
    try:
        yield path
    finally:
        with contextlib.suppress(OSError):  # it is not empty
            path.rmdir()
            if alone:
                path.parent.rmdir()


def _made(base: pathlib.Path) -> pathlib.Path:
    for path in numbered(base):
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            if path.parent.is_dir():
                continue
        except OSError:
            pass  # of which the run tells
        return path
    raise AssertionError


def numbered(base: pathlib.Path) -> Iterator[pathlib.Path]:
    yield base
    for number in itertools.count(2):
        yield base.with_name(f"{base.name}-{number}")
