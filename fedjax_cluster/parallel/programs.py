"""Compiled programs: a process may hold only so many, and a folder can keep them for others."""

from __future__ import annotations

import functools
import gc
import pathlib
from collections.abc import Callable, Sequence
from typing import TypeVar

import jax

from fedjax_cluster.data import cache
from fedjax_cluster.options import as_path
from fedjax_cluster.parallel.kept_programs import KeptProgram, forget_loaded, give_memory_back, keep_in
from fedjax_cluster.parallel.mapping import keep_compiled

R = TypeVar("R")

WHOLE = "whole"  # the folder in it of programs that are kept whole
MAPPINGS = pathlib.Path("/proc/self/maps")
MOST_MAPPINGS = pathlib.Path("/proc/sys/vm/max_map_count")
SHARE = 2 / 3  # the rest is for what is compiled before the next count, and for others


def compile_quickly(function: Callable[..., R], static_argnames: Sequence[str] = ()) -> Callable[..., R]:
    """`jax.jit` for what runs once, called from outside any other: of LLVM's optimisations on a CPU only the first.

    The initialisation of LeNet-5 compiles in 1.5 in place of 5.6 s of processor time, to the same bits.
    """
    return _quick(function, tuple(static_argnames), jax.default_backend() == "cpu")


@functools.cache
def _quick(function: Callable[..., R], static_argnames: tuple[str, ...], on_cpu: bool) -> Callable[..., R]:
    options = {"xla_backend_optimization_level": 1} if on_cpu else None
    return KeptProgram(function, static_argnames, compiler_options=options)


def enable_compilation_cache(
    folder: str | pathlib.Path | None = None, *, shortest: float = 0.0, whole: bool = True
) -> pathlib.Path | None:
    """Keeps compiled programs in a folder, so that another process need not compile them, as the command line does.

    A folder that JAX has been given already, such as by `JAX_COMPILATION_CACHE_DIR`, stays. `fedjax-cluster cache`
    shows and empties the default one.

    Args:
      folder: None is `compiled` in the package's cache folder: `FEDJAX_CLUSTER_CACHE`, or fedjax_cluster in
        `XDG_CACHE_HOME` or ~/.cache.
      shortest: seconds; programs that compile faster are not kept.
      whole: a run's largest programs are kept as they are loaded, so that they need not be traced first; on a CPU.
        They are code: give a folder in which nobody else can write.

    Returns:
      The folder in use; None where it cannot be made, and programs are compiled anew as before.

    >>> import tempfile
    >>> from jax.experimental.compilation_cache import compilation_cache
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     before = jax.config.jax_compilation_cache_dir
    ...     used = enable_compilation_cache(folder)
    ...     jax.config.update("jax_compilation_cache_dir", before)
    ...     compilation_cache.reset_cache()
    >>> used is not None
    True
    """
    wanted = cache.directory() / cache.COMPILED if folder is None else as_path("folder", folder)
    keep_compiled(wanted, shortest)
    used = getattr(jax.config, "jax_compilation_cache_dir", None)
    if used == str(wanted):
        keep_in(wanted / WHOLE if whole else None)
    return None if used is None else pathlib.Path(used)


def release_programs(most: int | None = None) -> bool:
    """Lets go of all compiled programs where the process has more than `most` memory mappings.

    A method's programs take some 500 to 1 500. Linux allows a process 65 530 unless it is set otherwise; beyond, XLA
    ends it ("Unable to allocate section memory"). What is called again is compiled again. Nothing is counted, and
    nothing let go, on systems other than Linux, which have no such limit.

    Args:
      most: None is two thirds of what the system allows.

    Returns:
      Whether programs were let go.
    """
    try:
        most = int(SHARE * int(MOST_MAPPINGS.read_bytes())) if most is None else most
        if memory_mappings() <= most:
            return False
    except OSError:
        return False
    forget_loaded()
    jax.clear_caches()
    gc.collect()  # some executables are part of cycles
    give_memory_back()  # glibc kept half of it: 574 MB, and 284 after this
    return True


def memory_mappings() -> int:
    """Memory mappings of this process.

    Raises:
      OSError: the system does not tell.
    """
    with MAPPINGS.open("rb") as lines:
        return sum(1 for _ in lines)
