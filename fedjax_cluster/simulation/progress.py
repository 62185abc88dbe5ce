"""What a person sees while a run goes on: the progress bar, and lines where there is no terminal."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Mapping

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

LOG = logging.getLogger(__name__)
LINE_SECONDS = 30.0  # from one line to the next, such as in the log file of a job


class Progress(contextlib.AbstractContextManager):
    """A bar with the round, accuracy, ARI, clusters, client-rounds per second and time left.

    Where `enabled` is None and there is no terminal to draw it on, the log gets a line every half minute.
    """

    def __init__(self, name: str, rounds: int, done: int, *, enabled: bool | None):
        self._lines = enabled is None and not sys.stderr.isatty()
        self._name, self._rounds, self._said = name.replace("_", "-"), rounds, time.monotonic()
        enabled = sys.stderr.isatty() if enabled is None else enabled
        self._bar = RichProgress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            disable=not enabled,
        )
        self._task = self._bar.add_task(self._name, total=rounds, completed=done, figures="compiling")

    def __enter__(self):
        self._bar.__enter__()
        return self

    def __exit__(self, *error):
        with contextlib.suppress(OSError):  # a terminal that is gone
            self._bar.__exit__(*error)

    def update(self, done: int, figures: Mapping[str, float], client_rounds_per_second: float) -> None:
        """Shows the latest figures; those that there are none of stay away."""
        shown = [
            f"{label} {value:{form}}"
            for label, name, form in (
                ("accuracy", "accuracy", ".3f"),
                ("loss", "loss", ".3f"),
                ("ARI", "adjusted_rand_index", ".2f"),
                ("clusters", "num_clusters", ".0f"),
                ("waiting for rows", "waiting", ".0%"),
            )
            if (value := figures.get(name)) is not None and value == value
        ]
        shown.append(f"{client_rounds_per_second:,.0f} client-rounds/s")
        self._bar.update(self._task, completed=done, figures="  ".join(shown))
        if self._lines and time.monotonic() - self._said >= LINE_SECONDS:
            self._said = time.monotonic()
            LOG.info(f"{self._name}: round {done} of {self._rounds}, {', '.join(shown)}")
