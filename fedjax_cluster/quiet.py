"""Libraries that log by absl, kept quiet and out of the user's own logging."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator


@contextlib.contextmanager
def absl_from(level: int) -> Iterator[None]:
    """Where absl's logger tells nothing below a level; afterwards all logging is as it was.

    absl gives the root logger a handler where that has none: a later `logging.basicConfig` of the user's would do
    nothing.

    >>> with absl_from(logging.CRITICAL):
    ...     logging.getLogger("absl").error("told to nobody")
    """
    logger, root = logging.getLogger("absl"), logging.getLogger()
    before, handlers = logger.level, list(root.handlers)
    logger.setLevel(level)
    try:
        yield
    finally:
        logger.setLevel(before)
        for handler in [each for each in root.handlers if each not in handlers]:
            root.removeHandler(handler)
