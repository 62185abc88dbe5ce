"""How many clients a device takes at a time: as many as its free memory holds, by the compiler's own figures."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
from jax.core import eval_jaxpr
from jax.extend.core import jaxprs_in_params
from jax.sharding import AbstractMesh, SingleDeviceSharding, use_abstract_mesh

from fedjax_cluster.parallel import processes
from fedjax_cluster.types import ClientMapping, PyTree

# Clients, by platform: matrix units of a TPU are 128 wide; on an H200 ten steps of 512 clients' MLPs took 6.6 ms at
# once, 8.8 in chunks of 128 and 15 of 32; more were not tried.
MOST_AT_A_TIME = {"tpu": 128, "gpu": 512}
SHARE = 0.25  # of the free memory, for the clients that are computed together
UNKNOWN_MEMORY = 2**32  # bytes, of a device that does not tell
PROBES = (4, 8)  # clients: the compiler's figures for both tell what one more takes


def chunk_size(fn: Callable[..., Any], one: tuple, mapping: ClientMapping, count: int) -> int:
    """Clients at a time on each device.

    Args:
      fn: what is computed of one client; arrays it closes over are shared by all.
      one: shapes of its arguments.
      mapping: of clients to devices.
      count: clients of each device.
    """
    if mapping.strategy == "scan" or count == 1:
        return 1
    if mapping.strategy == "vmap":
        return count
    if mapping.chunk_size is not None:
        return min(mapping.chunk_size, count)
    if mapping.mesh is None:
        device = jax.local_devices()[0]
    else:  # one of this process, but where there is none, as it is only compiled for
        device = mapping.mesh.local_devices[0] if processes.several() else mapping.mesh.devices.flat[0]
    count = min(count, MOST_AT_A_TIME.get(device.platform, count))
    room, bound = SHARE * free_memory(device) / mapping.runs, max(1, bytes_per_client(fn, one))
    # The bound is up to six times too large, but nothing is compiled where it settles the matter.
    if count * bound <= room:
        return count
    return max(1, min(count, int(room) // min(bound, compiled_bytes(fn, one, device))))


def free_memory(device: Any) -> int:
    """Bytes that a device has left, as far as it tells; of several processes, which must find the same, all it has."""
    stats = device.memory_stats() or {}
    used = 0 if processes.several() else stats.get("bytes_in_use", 0)
    return max(0, stats.get("bytes_limit", UNKNOWN_MEMORY) - used)


def compiled_bytes(fn: Callable[..., Any], one: tuple, device: Any) -> int:
    """What one client more takes of a device's memory, by the compiler; JAX's compilation cache keeps the answer."""
    few, more = (_temporaries(fn, one, count, device) for count in PROBES)
    return max(1, -(-(more - few) // (PROBES[1] - PROBES[0])), more // (4 * PROBES[1]))


def _temporaries(fn: Callable[..., Any], one: tuple, count: int, device: Any) -> int:
    place = SingleDeviceSharding(device)

    def shape(leaf: Any, leading: tuple[int, ...] = ()) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((*leading, *leaf.shape), leaf.dtype, sharding=place)

    arguments: PyTree = jax.tree.map(functools.partial(shape, leading=(count,)), one)
    traced = jax.make_jaxpr(jax.vmap(fn))(*arguments)
    # Outside of the mesh whose devices the caller's program is being made for.
    with use_abstract_mesh(AbstractMesh((), ())):
        alone = jax.jit(lambda shared, *given: eval_jaxpr(traced.jaxpr, shared, *given))
        found = alone.lower([shape(leaf) for leaf in traced.consts], *jax.tree.leaves(arguments)).compile()
    figures = found.memory_analysis()
    return 0 if figures is None else figures.temp_size_in_bytes + figures.output_size_in_bytes


def bytes_per_client(fn: Callable[..., Any], arguments: tuple) -> int:
    """Upper bound of the memory one client's call holds: the sizes of all its intermediate results."""

    def total(jaxpr) -> int:
        own = sum(math.prod(v.aval.shape) * v.aval.dtype.itemsize for e in jaxpr.eqns for v in e.outvars if _sized(v))
        inner = [sub for equation in jaxpr.eqns for sub in jaxprs_in_params(equation.params)]
        return own + sum(total(sub) for sub in inner)

    return total(jax.make_jaxpr(fn)(*arguments).jaxpr)


def _sized(variable) -> bool:
    return hasattr(variable.aval, "shape") and hasattr(variable.aval.dtype, "itemsize")
