"""Compiled programs that a folder keeps whole: another process neither traces nor lowers nor compiles them again.

JAX's own cache of compilations is looked up by the lowered program, and to trace and lower one takes up to ten times as
long as to read it. Here a program is looked up by what decides it: the function, its static arguments by value, the
shapes and places of its arrays, this package's source, the versions of the libraries, JAX's settings and the processor.
Where one of these has no value, as a closure has none, nothing is kept, and JAX compiles as always.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import inspect
import json
import logging
import os
import pathlib
import pickle
import platform
import re
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.experimental import serialize_executable
from jax.experimental.compilation_cache import compilation_cache

from fedjax_cluster.described import ADDRESS, described
from fedjax_cluster.files import atomic_file

LOG = logging.getLogger(__name__)
LIBRARIES = ("jax", "jaxlib", "numpy", "scipy", "optax", "flax", "ml_dtypes")
PACKAGE = pathlib.Path(__file__).parents[1]
PROCESSOR = pathlib.Path("/proc/cpuinfo")
SUFFIX = ".program"
DIGEST_SIZE = 32
MOST_BYTES = 2**29  # of all programs in a folder; those that were not used for longest make room
# What a lowered program may call by name: XLA knows the first by itself, the second are ready once one was lowered.
BUILT_IN, LAPACK = re.compile(r"Sharding|SPMD\w+|xla\.sdy\.\w+|TopK"), re.compile(r"lapack_\w+")
# Settings that decide nothing of a program, and those that are for looking into one, with which JAX compiles by itself.
VOLATILE = re.compile("cache|log|dump|profil")
WATCHING = ("jax_disable_jit", "jax_debug_nans", "jax_debug_infs", "jax_check_tracer_leaks")
CALLED = re.compile(r"custom_call @\"?([\w.$]+)")

_folders: list[pathlib.Path] = []
_loaded: dict[Hashable, Callable[..., Any]] = {}


def keep_in(folder: pathlib.Path | None) -> None:
    """From now on programs of `KeptProgram` functions are kept in this folder; None keeps none."""
    _folders[:] = [] if folder is None else [folder]


def forget_loaded() -> None:
    """Lets go of the programs that this process has; the folder still has them."""
    _loaded.clear()


class KeptProgram:
    """`jax.jit` of a function of a module, whose programs on a CPU are kept where `keep_in` says."""

    def __init__(self, function: Callable[..., Any], static_argnames: Sequence[str] = (), **options: Any):
        functools.update_wrapper(self, function)
        self.jitted = jax.jit(function, static_argnames=static_argnames, **options)
        self.static, self.options = frozenset(static_argnames), tuple(sorted(map(repr, options.items())))
        self.parameters = inspect.signature(function)
        self.name = f"{function.__module__}.{function.__qualname__}"

    def __getattr__(self, name: str) -> Any:
        if name == "jitted":  # while it is copied
            raise AttributeError(name)
        return getattr(self.jitted, name)

    def __get__(self, owner: Any, _: type | None = None) -> Any:
        return self if owner is None else functools.partial(self, owner)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not _folders or jax.default_backend() != "cpu" or jax.process_count() > 1 or _watched():
            return self.jitted(*args, **kwargs)
        given = self.parameters.bind(*args, **kwargs).arguments
        static = {name: value for name, value in given.items() if name in self.static}
        arrays = {name: value for name, value in given.items() if name not in self.static}
        leaves, structure = jax.tree.flatten(((), arrays))
        if any(isinstance(leaf, Tracer) for leaf in leaves):
            return self.jitted(*args, **kwargs)
        places = tuple(map(_shape_and_place, leaves))
        key = (self.name, self.options, tuple(static.items()), structure, places, _settings())
        program = _loaded.get(key)
        if program is None:
            program = self._program(static, given, structure, places) or self.jitted
            _loaded[key] = program
        return program(*args, **kwargs) if program is self.jitted else program(**arrays)

    def _program(
        self, static: dict[str, Any], given: dict[str, Any], structure: Any, places: tuple
    ) -> Callable[..., Any] | None:
        """The program that is kept, or a new one, which is kept; None where it cannot be told apart from others."""
        values, known = described((self.__wrapped__, static), modules=True)
        if not known or ADDRESS.search(shape := str(structure)):
            return None
        content = [self.options, values, shape, places, _settings(), _surroundings()]
        digest = hashlib.blake2b(json.dumps(content, default=str).encode(), digest_size=16).hexdigest()
        path = _folders[0] / (digest + SUFFIX)
        found = _read(path, structure)
        if found is not None:
            return found
        lowered = self.jitted.lower(**given)
        called = set(CALLED.findall(lowered.as_text()))
        if not all(BUILT_IN.fullmatch(name) or LAPACK.fullmatch(name) for name in called):
            return lowered.compile()
        # What JAX's cache gives back cannot be serialized again.
        with _without_jax_cache():
            compiled = lowered.compile()
        _write(path, compiled)
        return compiled


def kept_program(static_argnames: Sequence[str] = (), **options: Any) -> Callable[[Callable[..., Any]], KeptProgram]:
    """A decorator: `KeptProgram` with these options of `jax.jit`.

    >>> @kept_program(static_argnames="times")
    ... def scaled(x, *, times):
    ...     return x * times
    >>> float(scaled(2.0, times=3)), scaled.__name__
    (6.0, 'scaled')
    """
    names = (static_argnames,) if isinstance(static_argnames, str) else tuple(static_argnames)
    return lambda function: KeptProgram(function, names, **options)


# ---------------------------------------------------------------------------------------- what decides a program


def _shape_and_place(leaf: Any) -> tuple:
    """Of an argument: what a program for it is also good for."""
    kind = jax.typeof(leaf)
    found = (kind.shape, str(kind.dtype), getattr(kind, "weak_type", False))
    if not isinstance(leaf, jax.Array) or not getattr(leaf, "committed", True):
        return found
    place = leaf.sharding
    return (*found, str(place), tuple(sorted(device.id for device in place.device_set)))


def _watched() -> bool:
    return any(getattr(jax.config, name) for name in WATCHING)


def _settings() -> tuple:
    """JAX's settings, some of which a context manager changes for a while."""
    values = jax.config.values
    return tuple(str(getattr(jax.config, name, values[name])) for name in values if not VOLATILE.search(name))


@functools.cache
def _surroundings() -> list[Any]:
    """This package's source, the libraries' versions, the devices and the processor."""
    source = hashlib.blake2b(digest_size=16)
    for path in sorted(PACKAGE.rglob("*.py")):
        source.update(path.read_bytes())
    versions = {name: importlib.metadata.version(name) for name in LIBRARIES}
    devices = [(device.id, device.device_kind) for device in jax.devices()]
    flags = os.environ.get("XLA_FLAGS", "")
    return [source.hexdigest(), versions, platform.python_version(), devices, flags, platform.machine(), _processor()]


def _processor() -> str:
    """What tells one kind of processor from another: a program is made for all that this one has."""
    with contextlib.suppress(OSError):
        lines = PROCESSOR.read_text(encoding="utf-8", errors="replace").partition("\n\n")[0].splitlines()
        wanted = ("vendor_id", "cpu family", "model", "model name", "stepping", "flags", "Features")
        return "\n".join(line for line in lines if line.partition(":")[0].strip() in wanted)
    return platform.processor()


# ---------------------------------------------------------------------------------------- the folder


def _read(path: pathlib.Path, structure: Any) -> Callable[..., Any] | None:
    """The program in a file; None where there is none of this user's, or it is damaged."""
    try:
        # A program is code: what somebody else has put there is not run.
        if hasattr(os, "getuid") and path.stat().st_uid != os.getuid():
            return None
        whole = path.read_bytes()
        content = whole[DIGEST_SIZE:]
        if hashlib.blake2b(content, digest_size=DIGEST_SIZE).digest() != whole[:DIGEST_SIZE]:
            return None
        payload, results, devices = pickle.loads(content)
        _prepare_lapack()
        places = [device for device in jax.devices() if device.id in devices]
        found = serialize_executable.deserialize_and_load(payload, structure, results, execution_devices=places)
        os.utime(path)
    except Exception as error:  # nearly anything can come of a file of another release; the remedy is to compile
        if not isinstance(error, FileNotFoundError):
            LOG.debug(f"{path} is compiled anew: {error}")
        return None
    return found


def _write(path: pathlib.Path, compiled: Any) -> None:
    """Keeps a program, where it can be kept."""
    try:
        payload, _, results = serialize_executable.serialize(compiled)
        devices = [device.id for device in compiled.runtime_executable().local_devices()]
        content = pickle.dumps((payload, results, devices))
        with atomic_file(path) as beside:
            beside.write_bytes(hashlib.blake2b(content, digest_size=DIGEST_SIZE).digest() + content)
        _make_room(path.parent)
    except Exception as error:  # no room, no right to write, or something that cannot be pickled
        LOG.debug(f"{path} is not kept: {error}")


def _make_room(folder: pathlib.Path) -> None:
    """Removes what was not used for longest, where there is more than `MOST_BYTES`."""
    status = {path: path.stat() for path in folder.glob(f"*{SUFFIX}")}
    total = sum(of.st_size for of in status.values())
    for path in sorted(status, key=lambda path: status[path].st_mtime):
        if total <= MOST_BYTES:
            break
        path.unlink(missing_ok=True)
        total -= status[path].st_size


@functools.cache
def _prepare_lapack() -> None:
    """XLA's calls of LAPACK are ready once one was lowered in this process; before, they end it."""
    jax.jit(jax.lax.linalg.eigh).lower(jax.ShapeDtypeStruct((1, 1), jnp.float32))


@contextlib.contextmanager
def _without_jax_cache() -> Iterator[None]:
    before = jax.config.jax_enable_compilation_cache  # pyright: ignore[reportAttributeAccessIssue]
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
        compilation_cache.reset_cache()
