"""Libraries that log by absl, kept quiet and out of the user's own logging."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator

_CHANGING = threading.RLock()
_levels: list[int] = []  # of those who are inside, in whichever thread
_usual: list[int] = []  # the level before the first of them


@contextlib.contextmanager
def without_notices() -> Iterator[None]:
    """Where the package says nothing of what is made to look at alone."""
    log = logging.getLogger("fedjax_cluster")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)


@contextlib.contextmanager
def absl_from(level: int) -> Iterator[None]:
    """Where absl's logger tells nothing below a level; once nobody is inside any more all logging is as it was.

    absl gives the root logger a handler where that has none: a later `logging.basicConfig` of the user's would do
    nothing.

    >>> with absl_from(logging.CRITICAL):
    ...     logging.getLogger("absl").error("told to nobody")
    """
    logger, root = logging.getLogger("absl"), logging.getLogger()
    with _CHANGING:
        if not _levels:
            _usual[:] = [logger.level]
        _levels.append(level)
        logger.setLevel(max(_levels))
        none = not root.handlers
    try:
        yield
    finally:
        with _CHANGING:
            _levels.remove(level)
            logger.setLevel(max(_levels) if _levels else _usual[0])
            for handler in [each for each in root.handlers if none and _is_absls(each)]:
                root.removeHandler(handler)


def _is_absls(handler: logging.Handler) -> bool:
    """Whether it is what `logging.basicConfig` makes where it is told nothing."""
    written = getattr(handler.formatter, "_fmt", None)
    return type(handler) is logging.StreamHandler and written == logging.BASIC_FORMAT and handler.level == 0
