"""`python -m fedjax_cluster COMMAND` is `fedjax-cluster COMMAND`."""

import atexit
import contextlib
import gc
import os
import signal
import sys

from fedjax_cluster.endings import open_outputs, quieten_xla

_status: int | None = None  # with which the command has ended


def _end_at_once() -> None:
    """What Python would yet take down piece by piece, for a tenth of a second, the system lets go at once."""
    if _status is not None:
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.flush()
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            os._exit(_status)


# Of the command, not of a program that calls it; before all others, so that it is done after them.
if __name__ == "__main__" or os.path.basename(sys.argv[0]).partition(".")[0] == "fedjax-cluster":
    atexit.register(_end_at_once)


def _end_quietly(number: int, _: object) -> None:
    os._exit(128 + number)


# Until `main` has its own: the imports below take more than a second, in which a Ctrl-C would be a traceback.
for _number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(_number, _end_quietly)

open_outputs()

# Nor shall a person who has typed a command see nothing meanwhile; whatever is said next takes the place of this.
if sys.stderr.isatty() and sys.argv[1:2] and sys.argv[1] in ("run", "compare", "sweep", "resume", "reproduce"):
    print("fedjax-cluster starts", end="\r", file=sys.stderr, flush=True)

# NumPy's and SciPy's OpenBLAS start threads that wait by spinning, a tenth of a short run's processor time; the work is
# XLA's, which has threads of its own. In benchmarks others are compared with, and have all theirs.
if sys.argv[1:2] != ["bench"] and "OMP_NUM_THREADS" not in os.environ:
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

quieten_xla(sys.argv)  # which is loaded with what follows

# What is imported stays: to look through it for what can be let go is a tenth of the imports.
gc.disable()

from fedjax_cluster import cli  # noqa: E402 - after what decides how NumPy and XLA are loaded

gc.freeze()
gc.enable()


def main() -> int:
    """The command of this process; its exit status."""
    global _status
    _status = cli.main()
    return _status


if __name__ == "__main__":
    sys.exit(main())
