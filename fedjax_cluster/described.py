"""What a value is, as JSON: options by their values, functions and classes by their names where these tell all."""

from __future__ import annotations

import dataclasses
import functools
import re
import sys
from collections.abc import Mapping
from typing import Any

from jax.sharding import Mesh

from fedjax_cluster.options import Options

# Their functions and classes are known by name; those of others may be edited between two runs.
KNOWN_PACKAGES = ("fedjax_cluster", "flax", "optax", "jax", "builtins", "numpy", "ml_dtypes")
ADDRESS = re.compile(r"0x[0-9a-fA-F]+")


def described(value: Any, *, modules: bool = False) -> tuple[Any, bool]:
    """A value as JSON, and whether that tells all: not of closures, or of functions and classes of the user's own.

    Args:
      value: anything.
      modules: tells apart what only has the same name, by its module, or is equal, by its type.

    >>> described((1, [None, "a"])), described(lambda x: x)[1]
    (([1, [None, 'a']], True), False)
    >>> described(described), described(described, modules=True)
    (('described', True), ('fedjax_cluster.described.described', True))
    """
    of = functools.partial(described, modules=modules)
    if value is None or isinstance(value, (bool, int, float, str)):
        same = not modules or value is None or type(value) in (bool, int, float, str)
        return (value, True) if same else ([type(value).__name__, repr(value)], True)
    if isinstance(value, Mapping):
        items, known = of(list(value.values()))
        if modules:
            return [of(list(value))[0], items], known
        return dict(zip(map(str, value), items, strict=True)), known
    names, to_json, called = (getattr(value, name, None) for name in ("_fields", "to_json", "__qualname__"))
    if isinstance(value, (list, tuple)) and names is None:
        items = [of(item) for item in value]
        return [item for item, _ in items], all(known for _, known in items)
    if isinstance(value, functools.partial):
        return of((value.func, value.args, value.keywords))
    if called and not hasattr(value, "__self__"):
        known = is_known(value)
        return called if known and not modules else f"{getattr(value, '__module__', None)}.{called}", known
    if isinstance(value, Mesh):
        return of([str(value), [device.id for device in value.devices.flat]])
    if to_json and not isinstance(value, Options):
        content, known = of(to_json())
        return content, known and is_known(type(value))
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value) if field.name != "parent"]  # of a Flax module
    elif names is None:
        return ADDRESS.sub("", repr(value)), False
    kind, named = of(type(value))
    items, known = of({name: getattr(value, name) for name in names})
    if modules:
        return [kind, items], named and known
    return {"type": kind, **items}, named and known


def is_known(value: Any) -> bool:
    """Whether a function or class is what its name stands for in a package whose release tells what that is.

    >>> is_known(is_known), is_known(functools.wraps(is_known)(lambda value: True))
    (True, False)
    """
    module, name = getattr(value, "__module__", None) or "", getattr(value, "__qualname__", "")
    if module.partition(".")[0] not in KNOWN_PACKAGES or "<" in name:
        return False
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    # Not what only has a copy of the name, as a wrapper or a derivative has; of a jitted function its own is meant.
    return found is value or getattr(found, "__wrapped__", None) is value
