"""Ctrl-C, SIGTERM and a closed terminal: noted where they come, obeyed where nothing is lost."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

CHECKPOINT_SECONDS = 30.0  # the most that a killed run loses
GRACE = 8.0  # seconds for what cannot be interrupted, such as a compilation, after a signal
SHOW_CURSOR = "\x1b[?25h"  # a progress bar hides it
HANGUP = getattr(signal, "SIGHUP", None)  # a closed terminal's; not on Windows


def _swallowed(frame: FrameType | None) -> bool:
    """Whether Python is inside JAX's callback of the garbage collection, which prints and forgets what is raised."""
    return any(each.f_code.co_name == "_xla_gc_callback" for each in _callers(frame))


def _callers(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


class Terminated(SystemExit):
    """A run ended by SIGTERM, or as its terminal was closed, after a checkpoint; uncaught, status 143 or 129."""

    def __init__(self, *directory: str, number: int = signal.SIGTERM):
        super().__init__(128 + number)
        self.directory = directory


class Interrupt(contextlib.AbstractContextManager):
    """Notes Ctrl-C, SIGTERM and SIGHUP in place of raising wherever the program is, such as inside the compiler.

    Only the main thread hears signals; elsewhere this does nothing. Inside another, it is that one. A SIGHUP that is
    ignored, as `nohup` has it, or that somebody else hears, stays as it is.

    Args:
      command: True on the command line: outside `patiently` the first signal raises, and where that is not heard, or
        at a second one, the process ends. False leaves both to Python, for notebooks and scripts.
    """

    active: Interrupt | None = None

    def __init__(self, *, command: bool = False):
        self.number: int | None = None
        self.noticed = False  # what is under way is what a signal asks for, or would: the last checkpoint
        self._command, self._patient, self._ended = command, 0, threading.Event()
        self._late: int | None = None  # a signal at the very end, which is whoever's comes next
        self._stack = contextlib.ExitStack()

    @property
    def wanted(self) -> bool:
        """Whether to stop at the next occasion."""
        return self.number is not None

    def __enter__(self) -> Interrupt:
        if Interrupt.active is not None or threading.current_thread() is not threading.main_thread():
            return Interrupt.active or self
        try:
            # The last to go is the handler of Ctrl-C, whose own one raises at once.
            for number in self._heard():
                self._stack.callback(signal.signal, number, signal.signal(number, self._note))
            Interrupt.active = self
            self._stack.callback(setattr, Interrupt, "active", None)
            self._listen()
        except BaseException:
            self._stack.close()
            raise
        if self.wanted and not self._command:
            self._stack.close()
            self.stop_if_wanted()
        return self

    def __exit__(self, *error: Any) -> None:
        if Interrupt.active is self:
            self._stack.close()
            if self._late is not None:
                signal.raise_signal(self._late)

    @staticmethod
    def _heard() -> list[int]:
        hangup = [HANGUP] if HANGUP is not None and signal.getsignal(HANGUP) == signal.SIG_DFL else []
        # What a program that Python is embedded in hears is None here, and cannot be given back to it.
        return [each for each in (signal.SIGINT, signal.SIGTERM, *hangup) if signal.getsignal(each) is not None]

    @contextlib.contextmanager
    def patiently(self) -> Iterator[None]:
        """Where a signal is only noted, as `wanted` is looked at."""
        self.stop_if_wanted()
        self._patient += 1
        try:
            yield
        finally:
            self._patient -= 1

    @contextlib.contextmanager
    def obeyed(self) -> Iterator[None]:
        """Where what a signal would ask for is under way in any case."""
        self.noticed = True
        try:
            yield
        finally:
            self.noticed = False

    def stop_if_wanted(self, *directory: str) -> None:
        """Ends what was to be ended."""
        self.noticed = False
        if self.number == signal.SIGINT:
            raise KeyboardInterrupt(*directory)
        if self.number is not None:
            raise Terminated(*directory, number=self.number)

    def _note(self, number: int, frame: FrameType | None) -> None:
        # Raised there it would leave the handlers as they are for good, as Python calls no `__exit__` then.
        own = [each.f_code for each in _callers(frame) if each.f_locals.get("self") is self]
        if Interrupt.__exit__.__code__ in own:
            self._late = number
            return
        if number == HANGUP and self.wanted:  # the shell and the system tell of one closed terminal each
            return
        again, self.number = self.wanted, self.number or number
        if Interrupt.__enter__.__code__ in own:
            return
        if again and not self._command:
            signal.default_int_handler(number, frame)
        elif not self._patient and not _swallowed(frame):
            self.stop_if_wanted()

    def _listen(self) -> None:
        """A thread hears the signals while the main one compiles."""
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        previous = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        if previous != -1:  # somebody else listens
            signal.set_wakeup_fd(previous)
            os.close(reading)
            os.close(writing)
            return
        listener = threading.Thread(target=self._hear, args=(reading,), daemon=True)
        listener.start()

        def end() -> None:
            signal.set_wakeup_fd(-1)
            self._ended.set()
            os.close(writing)
            listener.join()
            os.close(reading)

        self._stack.callback(end)

    def _hear(self, reading: int) -> None:
        first = None
        while heard := os.read(reading, 1):
            if heard[0] not in (signal.SIGINT, signal.SIGTERM, HANGUP):
                continue
            if first is not None and heard[0] == HANGUP:
                continue
            if first is not None and self._command:
                self._end(heard[0])
            if first is None and self._command and self._patient:
                with contextlib.suppress(OSError):  # a terminal that is gone
                    print("stopping after what is under way; again to stop at once", file=sys.stderr)
            if first is None and (heard[0] != signal.SIGINT or self._command):
                self._end_later(heard[0])
            first = heard[0]

    def _end_later(self, number: int) -> None:
        """Ends the process after `GRACE`; later where the signal has been noticed by then, and is being obeyed."""

        def end() -> None:
            (self._end_later if self.noticed else self._end)(number)

        timer = threading.Timer(GRACE, end)
        timer.daemon = True
        timer.start()

    def _end(self, number: int) -> None:
        """At once, as no file is ever half written; nothing where the end has come."""
        if not self._ended.is_set():
            with contextlib.suppress(OSError):
                os.write(2, (SHOW_CURSOR if sys.stderr.isatty() else "").encode() + b"stopped at once\n")
            for worker in multiprocessing.active_children():  # which would go on alone
                worker.kill()
            os._exit(128 + number)
