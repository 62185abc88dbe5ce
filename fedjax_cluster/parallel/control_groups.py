"""What a container, or a scheduler such as SLURM, leaves a process of the machine's memory: control groups of Linux."""

from __future__ import annotations

import contextlib
import math
import pathlib
from collections.abc import Iterator

OWN, MOUNTED = pathlib.Path("/proc/self/cgroup"), pathlib.Path("/sys/fs/cgroup")
# Files of the limit and of what is used, and what of this is copies of files that can go, in both versions.
OF_ONE = "memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")
OF_TWO = "memory.max", "memory.current", ("inactive_file", "active_file")


def memory_of_group() -> tuple[float, float]:
    """Bytes that the process's group may hold, and how many of them are left; infinite where nothing is limited."""
    limit = left = math.inf
    for folder, (most, used, cached) in _folders():
        with contextlib.suppress(OSError, ValueError):  # "max" is no limit
            number = float((folder / most).read_text(encoding="ascii"))
            stat = dict(line.split() for line in (folder / "memory.stat").read_text(encoding="ascii").splitlines())
            copies = sum(float(stat.get(name, 0)) for name in cached)
            held = float((folder / used).read_text(encoding="ascii")) - copies
            limit, left = min(limit, number), min(left, max(0.0, number - held))
    return limit, left


def _folders() -> Iterator[tuple[pathlib.Path, tuple[str, str, tuple[str, str]]]]:
    """Those of the process's group and of all that it is part of; in a container the first may be out of sight."""
    with contextlib.suppress(OSError):
        for line in OWN.read_text(encoding="utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                base, files = MOUNTED, OF_TWO
            elif "memory" in controllers.split(","):
                base, files = MOUNTED / "memory", OF_ONE
            else:
                continue
            parts = pathlib.PurePosixPath(path).parts[1:]
            for count in range(len(parts), -1, -1):
                yield base.joinpath(*parts[:count]), files
