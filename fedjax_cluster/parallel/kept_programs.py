"""Compiled programs that a folder keeps whole: another process neither traces nor lowers nor compiles them again.

JAX's own cache of compilations is looked up by the lowered program, and to trace and lower one takes up to ten times as
long as to read it. Here a program is looked up by what decides it: the function, its static arguments by value, the
shapes and places of its arrays, this package's source, the versions of the libraries, JAX's settings and the processor.
Where one of these has no value, as a closure has none, nothing is kept, and JAX compiles as always.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import importlib.metadata
import inspect
import json
import logging
import operator
import os
import pathlib
import pickle
import platform
import re
import sys
import threading
import time
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from types import FunctionType, ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import serialize_executable
from jax.experimental.compilation_cache import compilation_cache
from jax.extend.core import get_opaque_trace_state
from jax.sharding import NamedSharding

from fedjax_cluster.described import ADDRESS, described
from fedjax_cluster.files import atomic_file

LOG = logging.getLogger(__name__)
LIBRARIES = ("jax", "jaxlib", "numpy", "scipy", "optax", "flax", "ml_dtypes")
VERSION = re.compile(r"^Version: *(.+)$", re.MULTILINE)
PACKAGE = pathlib.Path(__file__).parents[1]
STARTED = time.time()  # whatever of the package is younger may not be what was imported
PROCESSOR = pathlib.Path("/proc/cpuinfo")
MADE_BY = (PACKAGE.name, *LIBRARIES, "namedtuple_", "lazy_loader", "matplotlib")  # whose functions the package has
MOST_WRAPPED = 8  # decorators of one function
SUFFIX = ".program"
DIGEST_SIZE = 32
MOST_BYTES = 2**29  # of all programs in a folder; those that were not used for longest make room
# What a lowered program may call by name: XLA knows the first by itself, the second are ready once one was lowered.
BUILT_IN, LAPACK = re.compile(r"Sharding|SPMD\w+|xla\.sdy\.\w+|TopK"), re.compile(r"lapack_\w+")
CALLED = re.compile(r"custom_call @\"?([\w.$]+)")
# Settings that decide nothing of a program.
VOLATILE = re.compile("cache|log|dump|profil|explain")
SETTINGS = tuple(sorted(name for name in jax.config.values if not VOLATILE.search(name)))
# With these JAX itself is looked into, or left out.
WATCHING = (
    *("jax_disable_jit", "jax_debug_nans", "jax_debug_infs", "jax_check_tracer_leaks"),
    *("jax_log_compiles", "jax_explain_cache_misses", "jax_dump_ir_to"),
)
with jax.ensure_compile_time_eval():
    _OUTSIDE = get_opaque_trace_state()  # of all traces

_folder: pathlib.Path | None = None
_functions: weakref.WeakSet[KeptProgram] = weakref.WeakSet()
_compiling = threading.RLock()
_seen: dict[int, Any] = {}  # functions that are the package's, by their numbers, which stay theirs as they are kept
_whole: list[Any] = []  # all that was looked at when nobody had put something in


def keep_in(folder: pathlib.Path | None) -> None:
    """From now on programs of `KeptProgram` functions are kept in this folder; None keeps none."""
    global _folder
    _folder = folder


def forget_loaded() -> None:
    """Lets go of the programs that this process has; the folder still has them."""
    for function in list(_functions):
        function.loaded.clear()


class KeptProgram:
    """`jax.jit` of a function, whose programs on a CPU are kept where `keep_in` says."""

    def __init__(self, function: Callable[..., Any], static_argnames: Sequence[str] = (), **options: Any):
        functools.update_wrapper(self, function)
        self.jitted = jax.jit(function, static_argnames=static_argnames, **options)
        self.static, self.options = tuple(static_argnames), options
        self.parameters = inspect.signature(function)
        if any(each.kind is not each.POSITIONAL_OR_KEYWORD and each.kind is not each.KEYWORD_ONLY
               for each in self.parameters.parameters.values()):  # fmt: skip
            raise TypeError(f"{function.__qualname__} takes arguments without names; give each parameter one")
        self.loaded: dict[Hashable, Callable[..., Any]] = {}
        _functions.add(self)

    def __getattr__(self, name: str) -> Any:
        if name == "jitted":  # while it is copied
            raise AttributeError(name)
        return getattr(self.jitted, name)

    def __get__(self, owner: Any, _: type | None = None) -> Any:
        return self if owner is None else functools.partial(self, owner)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.prepared(*args, **kwargs)()

    def prepared(self, *args: Any, **kwargs: Any) -> Callable[[], Any]:
        """The call of the program for these arguments, found or compiled; nothing is computed yet."""
        plain = functools.partial(self.jitted, *args, **kwargs)
        folder = _folder
        if folder is None or not _kept_here():
            return plain
        given = self.parameters.bind(*args, **kwargs).arguments
        static = {name: given[name] for name in given if name in self.static}
        arrays = {name: given[name] for name in given if name not in self.static}
        leaves, structure = jax.tree.flatten(((), arrays))
        shapes, places = [_shape(leaf) for leaf in leaves], [_place(leaf) for leaf in leaves]
        values = tuple((name, type(value), value) for name, value in static.items())
        key = (values, structure, *shapes, *places, *_settings())
        if key not in self.loaded:
            texts = [str(structure), *map(_shape_text, shapes), *map(_place_text, places)]
            self.loaded[key] = self._program(folder, static, given, structure, texts) or self.jitted
        program = self.loaded[key]
        return plain if program is self.jitted else functools.partial(program, **arrays)

    def _program(
        self, folder: pathlib.Path, static: dict[str, Any], given: dict[str, Any], structure: Any, texts: list[str]
    ) -> Callable[..., Any] | None:
        """The program that is kept, or a new one, which is kept; None where it cannot be told apart from others."""
        surroundings = _surroundings() if _is_whole() else None
        try:
            values, known = described([self.__wrapped__, static, self.options], modules=True)
        except Exception:  # of a value whose description fails
            return None
        if surroundings is None or not known or ADDRESS.search(texts[0]):
            return None
        content = [values, texts, [str(value) for value in _settings()], surroundings]
        path = folder / (hashlib.blake2b(json.dumps(content).encode(), digest_size=16).hexdigest() + SUFFIX)
        with _compiling:
            return _read(path, structure) or self._compiled(path, given)

    def _compiled(self, path: pathlib.Path, given: dict[str, Any]) -> Callable[..., Any]:
        @functools.wraps(self.__wrapped__)
        def anew(*args: Any, **kwargs: Any) -> Any:
            return self.__wrapped__(*args, **kwargs)

        # Of a function of its own: what this process has compiled before may come from JAX's cache, and what that gives
        # back cannot be serialized again.
        lowered = jax.jit(anew, static_argnames=self.static, **self.options).lower(**given)
        called = set(CALLED.findall(lowered.as_text()))
        if not all(BUILT_IN.fullmatch(name) or LAPACK.fullmatch(name) for name in called):
            return self.jitted
        with _without_jax_cache():
            compiled = lowered.compile()
        _write(path, compiled)
        del lowered
        give_memory_back()  # else a run of FedGWC goes on with 942 MiB, of which it needs 562
        return compiled


def give_memory_back() -> None:
    """Returns to the system what glibc holds back of freed memory, as after compilations; other systems do so."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def kept_program(static_argnames: str | Sequence[str] = (), **options: Any) -> Callable[..., KeptProgram]:
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


def _kept_here() -> bool:
    """Whether programs can be kept as things are: outside of all traces and meshes, with nobody looking into JAX."""
    return (
        jax.default_backend() == "cpu"
        and jax.process_count() == 1
        and get_opaque_trace_state() == _OUTSIDE
        and jax.sharding.get_abstract_mesh().empty
        and not any(_settings(WATCHING))
    )


def _shape(leaf: Any) -> tuple:
    kind = jax.typeof(leaf)
    return kind.shape, kind.dtype, getattr(kind, "weak_type", False)


def _shape_text(shape: tuple) -> str:
    return " ".join(map(str, shape))


def _place(leaf: Any) -> Any:
    """Where an array has to stay; None for what goes where a program wants it."""
    return leaf.sharding if isinstance(leaf, jax.Array) and getattr(leaf, "committed", True) else None


def _place_text(place: Any) -> str:
    if place is None:
        return ""
    mesh = place.mesh.devices if isinstance(place, NamedSharding) else None
    devices = place.device_set if mesh is None else mesh.flat
    return f"{place} {[device.id for device in devices]}"


def _settings(names: Sequence[str] = SETTINGS) -> tuple:
    """JAX's settings, some of which a context manager changes for a while."""
    values = jax.config.values  # made anew each time
    return tuple(getattr(jax.config, name, values.get(name)) for name in names)


@functools.cache
def _surroundings() -> list[Any] | None:
    """The package's source, the libraries, the devices and the processor; None where one of them is not known."""
    source, versions = hashlib.blake2b(digest_size=16), []
    paths = sorted(PACKAGE.rglob("*.py"))
    for path in paths:
        source.update(str(path.relative_to(PACKAGE)).encode() + path.read_bytes())
    if not paths or any(path.stat().st_mtime > STARTED for path in paths) or not (processor := _processor()):
        return None
    for name in LIBRARIES:
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            return None
        if "editable" in (distribution.read_text("direct_url.json") or ""):
            return None  # its source may change within a version
        # Not `distribution.version`, which parses all the library says of itself.
        if (version := VERSION.search(distribution.read_text("METADATA") or "")) is None:
            return None
        versions.append((name, version[1]))
    devices = [(device.id, device.device_kind) for device in jax.devices()]
    flags = os.environ.get("XLA_FLAGS", "")
    return [source.hexdigest(), versions, platform.python_version(), devices, flags, platform.machine(), processor]


def _is_whole() -> bool:
    """Whether nobody has put functions of their own into this package, as to try a variant in a notebook."""
    global _whole
    parts = _parts()
    if len(parts) == len(_whole) and all(map(operator.is_, parts, _whole)):
        return True
    for part in parts:
        if id(part) not in _seen and (callable(part) or hasattr(type(part), "__get__")):
            if not _is_of_the_package(part):
                return False
            _seen[id(part)] = part
    _whole = parts
    return True


def _parts() -> list[Any]:
    """What the names in the package's modules stand for, and those in the classes that they make."""
    parts = []
    for name, module in list(sys.modules.items()):  # to which another thread may add some
        if name.partition(".")[0] == PACKAGE.name and name != __name__ and isinstance(module, ModuleType):
            for value in list(vars(module).values()):
                own = isinstance(value, type) and value.__module__ == name
                parts += list(vars(value).values()) if own else [value]
    return parts


def _is_of_the_package(value: Any) -> bool:
    """Whether a function, or one that it is made of, is not somebody else's; so is all that is no function."""
    if isinstance(value, property):
        value = value.fget
    if isinstance(value, staticmethod | classmethod):
        value = value.__func__
    for _ in range(MOST_WRAPPED):
        if isinstance(value, FunctionType):
            module = str(value.__globals__.get("__name__")).partition(".")[0]
            if not (module in sys.stdlib_module_names or module.startswith(MADE_BY)):
                return False
        elif isinstance(value, type | ModuleType) or not callable(value):
            return True
        value = getattr(value, "__wrapped__", None)
    return True


def _processor() -> str:
    """What tells one kind of processor from another, as a program is made for all that this one has; "" if unknown."""
    with contextlib.suppress(OSError):
        first = PROCESSOR.read_text(encoding="utf-8", errors="replace").partition("\n\n")[0]
        return "\n".join(re.findall(r"^(?:vendor_id|cpu family|model|stepping|flags|Features|CPU \w+).*", first, re.M))
    return ""


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
        payload, results, order = pickle.loads(content)
        _prepare_lapack()
        devices = {device.id: device for device in jax.devices()}
        places = [devices[number] for number in order]
        found = serialize_executable.deserialize_and_load(payload, structure, results, execution_devices=places)
    except Exception as error:  # nearly anything can come of a file of another release; the remedy is to compile
        if not isinstance(error, FileNotFoundError):
            LOG.debug(f"{path} is compiled anew: {error}")
        return None
    with contextlib.suppress(OSError):
        os.utime(path)
    return found


def _write(path: pathlib.Path, compiled: Any) -> None:
    """Keeps a program, where it can be kept."""
    try:
        payload, _, results = serialize_executable.serialize(compiled)
        order = [device.id for device in compiled.runtime_executable().local_devices()]
        content = pickle.dumps((payload, results, order))
        with atomic_file(path) as beside:
            beside.write_bytes(hashlib.blake2b(content, digest_size=DIGEST_SIZE).digest() + content)
        _make_room(path.parent)
    except Exception as error:  # no room, no right to write, or something that cannot be pickled
        LOG.debug(f"{path} is not kept: {error}")


def _make_room(folder: pathlib.Path) -> None:
    """Removes what was not used for longest, where there is more than `MOST_BYTES`."""
    files = {}
    for path in folder.glob(f"[!.]*{SUFFIX}"):
        with contextlib.suppress(OSError):  # another process may have removed it
            files[path] = path.stat()
    total = sum(status.st_size for status in files.values())
    for path in sorted(files, key=lambda path: files[path].st_mtime):
        if total <= MOST_BYTES:
            break
        path.unlink(missing_ok=True)
        total -= files[path].st_size


@functools.cache
def _prepare_lapack() -> None:
    """XLA's calls of LAPACK are ready once one was lowered in this process; before, they end it."""
    jax.jit(jax.lax.linalg.eigh).lower(jax.ShapeDtypeStruct((1, 1), jnp.float32))


@contextlib.contextmanager
def _without_jax_cache() -> Iterator[None]:
    """JAX neither reads nor writes compiled programs meanwhile, in whichever thread."""
    enabled = jax.config.values["jax_enable_compilation_cache"]
    try:
        jax.config.update("jax_enable_compilation_cache", False)
        compilation_cache.reset_cache()
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", enabled)
        compilation_cache.reset_cache()
