"""The machine: its devices, how clients are mapped over them, and where states and rows are placed.

On a CPU a client at a time per XLA device (one device per core); on an accelerator chunks of clients under `vmap`; on
several devices each strategy inside `shard_map` over a mesh with the single axis "clients".
"""

from __future__ import annotations

import contextlib
import functools
import math
import mmap
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
import scipy.linalg
import threadpoolctl
from jax import Array, lax
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from fedjax_cluster.options import COUNT, checked
from fedjax_cluster.parallel import processes
from fedjax_cluster.parallel.control_groups import memory_of_group
from fedjax_cluster.parallel.kept_programs import kept_program
from fedjax_cluster.types import ClientMapping, PyTree, State

AXIS = "clients"
# Seconds that a device waits for the others before XLA warns, and then ends the process; 20 and 40 if nothing is said.
# A device whose clients have more rows, or whose core has other work, may well be a minute late.
FLAGS = {
    "xla_cpu_multi_thread_eigen": "false",
    "xla_cpu_collective_call_warn_stuck_timeout_seconds": "3600",
    "xla_cpu_collective_call_terminate_timeout_seconds": "86400",
}
Strategy = Literal["auto", "scan", "vmap", "chunked"]


def use_all_cores(cores: int | None = None) -> None:
    """Asks for one XLA CPU device per core; to be called before JAX's first computation.

    Each device then works on a single thread, as every core has a device of its own. LAPACK, which XLA's eigenvalues
    and singular values are on a CPU, keeps to one thread too (NumPy's own products do not). Devices wait a day for one
    another, where XLA would end the process after a minute ("Termination timeout"). Where the environment variable
    XLA_FLAGS says otherwise, that holds. Whoever makes several CPU devices without this function puts `FLAGS` there.

    NOTE: on several CPU devices XLA (seen with jax 0.10) can come to a standstill when a loop of one's own starts more
    than thirty programs that hold collectives without awaiting any. Await some, with `jax.block_until_ready`, as
    `simulate` does; or set the environment variable NPROC to twice the cores beforehand, which gives XLA a second
    thread per core to start programs on, and makes local training 1.2 to 2 times as slow.

    Args:
      cores: number of devices; None for all cores that the process may use.

    Raises:
      RuntimeError: JAX has already started with another number of devices.
    """
    if cores is None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    given = os.environ.get("XLA_FLAGS", "")
    missing = [f"--{name}={value}" for name, value in FLAGS.items() if name not in given and _known_to_xla(name)]
    if missing:
        os.environ["XLA_FLAGS"] = " ".join([given, *missing]).strip()
    _keep_lapack_to_one_thread()
    try:
        jax.config.update("jax_num_cpu_devices", cores)
    except RuntimeError as error:
        if jax.default_backend() == "cpu" and jax.local_device_count() == cores:
            return
        raise RuntimeError(
            f"JAX has already started with {jax.device_count()} device(s), so the number of CPU devices cannot "
            f"become {cores}; call fedjax_cluster.parallel.use_all_cores() before the first computation"
        ) from error


def _known_to_xla(flag: str) -> bool:
    """Whether XLA has a flag: it ends the process over one that it does not know, and has no list of them."""
    with contextlib.suppress(OSError, ValueError):
        library = max(pathlib.Path(jaxlib.__file__).parent.iterdir(), key=lambda path: path.stat().st_size)
        with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return content.find(b"\0" + flag.encode() + b"\0") >= 0
    return False


def keep_compiled(folder: pathlib.Path, shortest: float) -> None:
    """Keeps compiled programs in a folder, unless another is set already or this one cannot be made.

    Args:
      folder: where.
      shortest: seconds; programs that compile faster are not kept.
    """
    if getattr(jax.config, "jax_compilation_cache_dir", None) is not None:
        return
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", shortest)
        # What was compiled before has settled that there is no folder.
        compilation_cache.reset_cache()


def _keep_lapack_to_one_thread() -> None:
    """XLA calls SciPy's LAPACK. Its threads wait by spinning, and every device's calls wait for the others' threads.

    A clustering round of CFL-GP on two cores took 0.19 s with one thread and 0.24 s with two (medians of four runs).
    """
    folder = pathlib.Path(scipy.linalg.__file__).parents[1]
    for library in threadpoolctl.ThreadpoolController().lib_controllers:
        path = pathlib.Path(library.filepath)
        if library.user_api == "blas" and (folder in path.parents or path.parent.name == "scipy.libs"):
            library.set_num_threads(1)


def client_mesh(devices: Sequence[Any] | None = None) -> jax.sharding.Mesh | None:
    """A mesh over `devices` (default: all) with the axis "clients"; None for a single device."""
    devices = jax.devices() if devices is None else list(devices)
    if len(devices) == 1 and devices[0] == jax.devices()[0]:
        return None
    return jax.make_mesh((len(devices),), (AXIS,), axis_types=(AxisType.Auto,), devices=devices)


def client_mapping(
    strategy: Strategy = "auto", chunk_size: int | None = None, devices: Sequence[Any] | None = None
) -> ClientMapping:
    """How clients are mapped over the devices.

    Args:
      strategy: "scan" one client at a time, "vmap" all at once, "chunked" `chunk_size` at a time, "auto" scan on
        CPU and chunks sized to memory elsewhere.
      chunk_size: clients per chunk and device under "chunked"; None sizes it to the device's memory.
      devices: default all devices of the default backend.

    Raises:
      ValueError: unknown strategy, or a chunk size below one.

    >>> client_mapping("scan").strategy
    'scan'
    """
    if strategy not in ("auto", "scan", "vmap", "chunked"):
        raise ValueError(f"strategy is {strategy!r}; it must be one of auto, scan, vmap, chunked")
    checked("chunk_size", chunk_size, int | None, COUNT)
    if strategy == "auto":
        platform = (jax.devices() if devices is None else list(devices))[0].platform
        strategy = "scan" if platform == "cpu" and chunk_size is None else "chunked"
    return ClientMapping(strategy, chunk_size, client_mesh(devices))


def platform(mapping: ClientMapping) -> str:
    """What the devices are: "cpu", "tpu" or "gpu"."""
    return (jax.devices()[0] if mapping.mesh is None else mapping.mesh.devices.flat[0]).platform


def device_memory() -> float:
    """Bytes of a device's memory; of a CPU, the machine's, or what a container or a scheduler gives of it.

    Infinite where the system does not tell.

    >>> device_memory() > 0
    True
    """
    found = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
    if found is None:
        try:
            found = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
            # Of several processes, which must find the same, groups may differ.
            found = found if processes.several() else min(found, memory_of_group()[0])
        except (AttributeError, ValueError, OSError):
            return math.inf
    return float(found)


def memory_left() -> float:
    """Bytes of a device's memory that are free; of a CPU, what the system, a container or a scheduler can still give.

    All it has where it does not tell, and of several processes, which must find the same.

    >>> 0 < memory_left() <= device_memory()
    True
    """
    if processes.several():
        return device_memory()
    found = jax.local_devices()[0].memory_stats() or {}
    if "bytes_limit" in found:
        return float(found["bytes_limit"] - found.get("bytes_in_use", 0))
    try:
        lines = pathlib.Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        found = float(next(line.split()[1] for line in lines if line.startswith("MemAvailable"))) * 1024
        return min(found, memory_of_group()[1])
    except (OSError, StopIteration):
        return device_memory()


def num_devices(mapping: ClientMapping) -> int:
    return 1 if mapping.mesh is None else mapping.mesh.size


def on_devices(fn: Callable[..., Any], mapping: ClientMapping, in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """`fn` of what each of several devices has, by `jax.shard_map`.

    Args:
      fn: of parts of arrays.
      mapping: the devices, more than one.
      in_specs: P(AXIS) or P(), how the leaves of each argument are divided; one for all, or one for each.
      out_specs: likewise of what it gives, in any structure.
    """
    assert mapping.mesh is not None
    shard = functools.partial(jax.shard_map, mesh=mapping.mesh, out_specs=out_specs, check_vma=False)

    def of_arrays(*arrays: Any) -> Any:
        specs = in_specs if type(in_specs) is tuple else (in_specs,) * len(arrays)
        leaves, structure = jax.tree.flatten(arrays)
        of_leaf = [spec for spec, array in zip(specs, arrays, strict=True) for _ in jax.tree.leaves(array)]
        # XLA of JAX 0.11 does not survive compiling arrays of nothing that go in.
        some = [i for i, leaf in enumerate(leaves) if leaf.size]
        if len(some) == len(leaves):
            return shard(fn, in_specs=specs)(*arrays)

        def nothing(leaf: Any, spec: P) -> Array:
            rows = len(leaf) // num_devices(mapping) if spec == P(AXIS) else len(leaf)
            return jnp.zeros((rows, *leaf.shape[1:]), leaf.dtype)

        def of_some(*given: Array) -> Any:
            there = dict(zip(some, given, strict=True))
            parts = [
                there[i] if i in there else nothing(leaf, spec)
                for i, (leaf, spec) in enumerate(zip(leaves, of_leaf, strict=True))
            ]
            return fn(*jax.tree.unflatten(structure, parts))

        return shard(of_some, in_specs=tuple(of_leaf[i] for i in some))(*(leaves[i] for i in some))

    return of_arrays


def row_sharding(mapping: ClientMapping) -> NamedSharding | None:
    """Sharding of leaves [M, ...] over clients; None on a single device."""
    return None if mapping.mesh is None else NamedSharding(mapping.mesh, P(AXIS))


def place_rows(mapping: ClientMapping, rows: PyTree) -> PyTree:
    """Puts leaves [M, ...] on the devices, divided among them by client."""
    sharding = row_sharding(mapping)
    return jax.tree.map(lambda leaf: processes.put(leaf, sharding), rows)


def replicate(mapping: ClientMapping, values: PyTree) -> PyTree:
    """Puts a copy of every leaf on each device."""
    sharding = None if mapping.mesh is None else NamedSharding(mapping.mesh, P())
    return jax.tree.map(lambda leaf: processes.put(leaf, sharding), values)


def state_shardings(state: State, mapping: ClientMapping) -> State | None:
    """Clients' leaves divided among the devices, the rest on each; None on a single device."""
    if mapping.mesh is None:
        return None
    everywhere, rows = NamedSharding(mapping.mesh, P()), NamedSharding(mapping.mesh, P(AXIS))
    shardings = jax.tree.map(lambda _: everywhere, state)
    return shardings._replace(clients=jax.tree.map(lambda _: rows, state.clients))


def place_state(state: State, mapping: ClientMapping) -> State:
    """Puts a state on the devices, in buffers of its own that may be donated."""
    # A weak type, as of jnp.full(3, 0.0), would not come back from the first round: a second compilation.
    state = jax.tree.map(lambda leaf: leaf.astype(leaf.dtype) if getattr(leaf, "weak_type", False) else leaf, state)
    shardings = state_shardings(state, mapping)
    if processes.several() and shardings is not None:
        return jax.tree.map(processes.copied, jax.tree.map(processes.put, state, shardings), shardings)
    if shardings is None:
        return jax.device_put(state, may_alias=False)
    if all(not getattr(leaf, "committed", False) or len(leaf.devices()) > 1 for leaf in jax.tree.leaves(state)):
        # One program, where `device_put` compiles one for each shape, as the program's arguments would need: a CPU's
        # arrays are NumPy's as well, which it takes apart by itself.
        return _placed(jax.tree.map(_on_host, state), mapping=mapping)
    return jax.device_put(jax.device_put(state, may_alias=False), shardings)


def _on_host(leaf: Array) -> Array | np.ndarray:
    on_cpu = isinstance(leaf, Array) and not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.asarray(leaf) if on_cpu and {device.platform for device in leaf.devices()} == {"cpu"} else leaf


@kept_program(static_argnames="mapping")
def _placed(state: State, *, mapping: ClientMapping) -> State:
    return constrain_state(state, mapping)


def constrain_state(state: State, mapping: ClientMapping) -> State:
    """Inside jit: keeps a state where `place_state` puts it, so that the next call finds the same program."""
    shardings = state_shardings(state, mapping)
    return state if shardings is None else lax.with_sharding_constraint(state, shardings)
