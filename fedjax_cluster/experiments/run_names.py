"""What the directories of a comparison's runs are called."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Iterable

from fedjax_cluster.files import digest

LONGEST = 100  # characters


def run_name(label: str, seed: int) -> str:
    """What the directory of a run is called below the comparison's.

    >>> run_name("cfl-gp", 3), run_name("learning rate 0.1, every 2", 0)
    ('cfl-gp-seed3', 'learning-rate-0.1-every-2-seed0')
    """
    name = re.sub(r",? +", "-", label)
    if not re.fullmatch(r"[\w.+=-]+", name) or len(name) > LONGEST:
        # What no file may be called, such as a path, is told apart by its digest.
        name = f"{re.sub(r'[^a-zA-Z0-9_.+=-]+', '-', name)[:LONGEST]}-{digest(label)[:8]}"
    return f"{name}-seed{seed}"


def check_names(labels: Iterable[str], directory: pathlib.Path) -> None:
    """Raises a ValueError where the runs of two labels would have the same directory."""
    places: dict[str, str] = {}
    for label in labels:
        if (first := places.setdefault(run_name(label, 0), label)) != label:
            raise ValueError(f"{first!r} and {label!r} would have one directory below {directory}; call one otherwise")
