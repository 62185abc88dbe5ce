"""What a person sees and does while a run goes on: the progress bar, and Ctrl-C."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator, Mapping

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress


class Progress(contextlib.AbstractContextManager):
    """A bar with the round, accuracy, ARI, clusters, client-rounds per second and time left."""

    def __init__(self, name: str, rounds: int, done: int, *, enabled: bool | None):
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
        self._task = self._bar.add_task(name.replace("_", "-"), total=rounds, completed=done, figures="compiling")

    def __enter__(self):
        self._bar.__enter__()
        return self

    def __exit__(self, *error):
        return self._bar.__exit__(*error)

    def update(self, done: int, figures: Mapping[str, float], client_rounds_per_second: float) -> None:
        """Shows the latest figures; those that there are none of stay away."""
        shown = [
            f"{label} {value:{form}}"
            for label, name, form in (
                ("accuracy", "accuracy", ".3f"),
                ("loss", "loss", ".3f"),
                ("ARI", "adjusted_rand_index", ".2f"),
                ("clusters", "num_clusters", ".0f"),
            )
            if (value := figures.get(name)) is not None and value == value
        ]
        shown.append(f"{client_rounds_per_second:,.0f} client-rounds/s")
        self._bar.update(self._task, completed=done, figures="  ".join(shown))


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Ignores Ctrl-C, so that what is being saved is saved."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


class Interrupt(contextlib.AbstractContextManager):
    """Turns the first Ctrl-C into a wish to stop after the rounds under way; a second one stops at once."""

    def __init__(self):
        self.wanted = False
        self._previous = None

    def __enter__(self):
        # Signals reach the main thread only; elsewhere Ctrl-C is somebody else's business.
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *error):
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)

    def _note(self, number, frame):
        self.wanted = True
        signal.signal(signal.SIGINT, signal.default_int_handler)
