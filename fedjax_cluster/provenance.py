"""What a figure was computed with: commit, versions, machine."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import pathlib
import platform
import subprocess
from collections import Counter
from typing import Any

import jax


def commit(folder: str | pathlib.Path | None = None) -> str | None:
    """The commit of the checkout that a folder is in; "+" marks what is not committed, None is no checkout.

    Args:
      folder: by default the package's.
    """
    where = pathlib.Path(__file__).parent if folder is None else pathlib.Path(folder)
    git = ["git", "-C", str(where.resolve())]
    try:
        if folder is None:  # a package installed into an environment inside another checkout is not of that commit
            subprocess.run([*git, "ls-files", "--error-unmatch", "."], capture_output=True, check=True)
        found = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
        changed = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return found.stdout.strip() + ("+" if changed.stdout.strip() else "")


def processor() -> str:
    """The processor's name."""
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for text in cpuinfo.read_text().splitlines():
            if text.startswith("model name"):
                return text.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def cores() -> int | None:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def own_version() -> str:
    """The release that is installed; "0" where the sources are run without being installed.

    >>> own_version()[0]
    '0'
    """
    try:
        return importlib.metadata.version("fedjax-cluster")
    except importlib.metadata.PackageNotFoundError:
        return "0"


def provenance() -> dict[str, Any]:
    """Commit, date, versions and device of what is computed now.

    Returns:
      `commit` (see above), `date` (of UTC), `versions` (package -> version), `backend` (JAX's) and `device`, such as
      "NVIDIA H100 80GB HBM3" or, of a CPU, its name and the cores.

    >>> sorted(provenance())
    ['backend', 'commit', 'date', 'device', 'versions']
    """
    kinds = Counter(device.device_kind for device in jax.devices())
    device = ", ".join(kind if count == 1 else f"{count} × {kind}" for kind, count in kinds.items())
    number = cores()
    return {
        "commit": commit(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "versions": {"fedjax_cluster": own_version(), "jax": jax.__version__, "python": platform.python_version()},
        "backend": jax.default_backend(),
        "device": f"{processor()}, {number} core{'s' * (number != 1)}" if jax.default_backend() == "cpu" else device,
    }
