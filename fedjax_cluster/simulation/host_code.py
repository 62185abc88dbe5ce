"""What a function that runs on the host is, by its code and all that it holds."""

from __future__ import annotations

import contextlib
import hashlib
import pathlib
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from types import CodeType, ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_cluster.described import ADDRESS, is_known

LIBRARIES = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")} - {None}


def code_digest(functions: Iterable[Any]) -> str:
    """A digest of functions: of their code, their closures, and the functions of one's own that they call by name.

    The same in each process of one release of Python.

    >>> def adding(number):
    ...     return lambda value: value + number
    >>> code_digest([adding(1)]) == code_digest([adding(1)]), code_digest([adding(1)]) == code_digest([adding(2)])
    (True, False)
    """
    found = hashlib.blake2b(digest_size=8)
    seen: dict[int, Any] = {}
    for function in functions:
        for text in _told(function, seen):
            found.update(text + b"\n")
    return found.hexdigest()


def _told(value: Any, seen: dict[int, Any]) -> Iterator[bytes]:
    """What a value is; each function and what can be changed once, as some hold themselves."""
    if isinstance(value, jax.Array | np.ndarray):
        if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            value = jax.random.key_data(value)
        content = np.asarray(value)
        text = repr(content.tolist()).encode() if content.dtype.hasobject else content.tobytes()
        yield f"{content.dtype} {content.shape} {hashlib.blake2b(text).hexdigest()}".encode()
        return
    if isinstance(value, set | frozenset):  # in an order that is each process's own
        parts = sorted(b"".join(_told(each, dict(seen))) for each in value)
    elif isinstance(value, Mapping):
        parts = [each for item in value.items() for each in item]
    elif isinstance(value, list | tuple):
        parts = list(value)
    elif isinstance(value, CodeType):
        parts = [value.co_code, value.co_names, value.co_consts]
    elif isinstance(value, type | ModuleType) or is_known(value):
        parts = [str(getattr(value, "__qualname__", getattr(value, "__name__", "")))]
    elif isinstance(code := getattr(value, "__code__", None), CodeType):
        parts = [code, value.__defaults__, value.__kwdefaults__, *_held(value)]
        parts += _called(value, code) if _is_ones_own(code) else []
    elif callable(value):
        names = ("func", "args", "keywords", "__func__", "__self__", "__wrapped__", "__dict__")
        parts = [getattr(value, name, None) for name in names]
    else:
        yield ADDRESS.sub("", repr(value)).encode()
        return
    # Constants may be one object or two, as the compiler had it, and cannot hold themselves.
    if not isinstance(value, tuple | frozenset | CodeType):
        if id(value) in seen:
            return
        seen[id(value)] = value  # kept, as its number is its own for so long
    yield type(value).__name__.encode()
    for part in parts:
        yield from [part] if isinstance(part, bytes) else _told(part, seen)


def _is_ones_own(code: CodeType) -> bool:
    """Whether it is not a library's, whose functions call hundreds of others."""
    return not any(map(pathlib.Path(code.co_filename).is_relative_to, LIBRARIES))


def _held(function: Any) -> Iterator[Any]:
    """What is in its closure; nothing of what it does not have yet."""
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):
            yield cell.cell_contents


def _called(function: Any, code: CodeType) -> Iterator[Any]:
    """The functions of one's own, and the values, that it has from its module."""
    for name in code.co_names:
        if name in function.__globals__ and not isinstance(function.__globals__[name], ModuleType):
            yield function.__globals__[name]
