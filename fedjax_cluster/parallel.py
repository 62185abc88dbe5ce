"""Clients over the machine: one loop that maps a function over clients and reduces what it returns.

On CPU a client at a time per XLA device (one device per core); on an accelerator chunks of clients under
`vmap`; on several devices each strategy inside `shard_map` over a mesh with the single axis "clients".
"""

from __future__ import annotations

import functools
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import scipy.linalg
import threadpoolctl
from jax import Array, lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from fedjax_cluster import messages, tree
from fedjax_cluster.client_loop import Client, Contribution, Mapped, map_rows
from fedjax_cluster.clustering.similarity import row_products
from fedjax_cluster.types import ClientData, ClientMapping, Cohort, Population, PyTree, Selection, State

AXIS = "clients"
SHORT_ROW, JOINED_ROW = 32, 1024  # words of a client's row
TURN_BYTES = 2**21  # of a cohort's rows, gathered at a time
SINGLE_THREADED = "--xla_cpu_multi_thread_eigen=false"
Strategy = Literal["auto", "scan", "vmap", "chunked"]


# ------------------------------------------------------------------------------------------- machine


def use_all_cores(cores: int | None = None) -> None:
    """Asks for one XLA CPU device per core; to be called before JAX's first computation.

    Each device then works on a single thread, as every core has a device of its own. LAPACK, which XLA's eigenvalues
    and singular values are on a CPU, keeps to one thread too (NumPy's own products do not).

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
    if SINGLE_THREADED not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {SINGLE_THREADED}".strip()
    _keep_lapack_to_one_thread()
    try:
        jax.config.update("jax_num_cpu_devices", cores)
    except RuntimeError as error:
        if jax.default_backend() == "cpu" and jax.device_count() == cores:
            return
        raise RuntimeError(
            f"JAX has already started with {jax.device_count()} device(s), so the number of CPU devices cannot "
            f"become {cores}; call fedjax_cluster.parallel.use_all_cores() before the first computation"
        ) from error


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
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"chunk_size is {chunk_size}; at least one client must be in a chunk")
    if strategy == "auto":
        strategy = "scan" if jax.default_backend() == "cpu" and chunk_size is None else "chunked"
    return ClientMapping(strategy, chunk_size, client_mesh(devices))


def num_devices(mapping: ClientMapping) -> int:
    return 1 if mapping.mesh is None else mapping.mesh.size


def row_sharding(mapping: ClientMapping) -> NamedSharding | None:
    """Sharding of leaves [M, ...] over clients; None on a single device."""
    return None if mapping.mesh is None else NamedSharding(mapping.mesh, P(AXIS))


def place_rows(mapping: ClientMapping, rows: PyTree) -> PyTree:
    """Puts leaves [M, ...] on the devices, divided among them by client."""
    sharding = row_sharding(mapping)
    return jax.tree.map(lambda leaf: jax.device_put(leaf, sharding), rows)


def replicate(mapping: ClientMapping, values: PyTree) -> PyTree:
    """Puts a copy of every leaf on each device."""
    sharding = None if mapping.mesh is None else NamedSharding(mapping.mesh, P())
    return jax.tree.map(lambda leaf: jax.device_put(leaf, sharding), values)


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
    state = jax.tree.map(lambda leaf: jnp.copy(leaf).astype(leaf.dtype), state)
    shardings = state_shardings(state, mapping)
    return state if shardings is None else jax.device_put(state, shardings)


def constrain_state(state: State, mapping: ClientMapping) -> State:
    """Inside jit: keeps a state where `place_state` puts it, so that the next call finds the same program."""
    shardings = state_shardings(state, mapping)
    return state if shardings is None else lax.with_sharding_constraint(state, shardings)


# -------------------------------------------------------------------------------- rows of a population


def place_population(data: ClientData, info, mapping: ClientMapping) -> Population:
    """Puts the clients' data on the devices, with absent clients (no examples) up to a multiple of them."""
    missing = -len(data.num_examples) % num_devices(mapping)
    if missing:
        data = jax.tree.map(lambda leaf: np.concatenate([leaf, np.zeros((missing, *leaf.shape[1:]), leaf.dtype)]), data)
    return Population(place_rows(mapping, jax.tree.map(np.asarray, data)), info, mapping)


def everyone(population: Population) -> Cohort:
    """The whole population as a cohort; its data are not copied."""
    size = len(population.data.num_examples)
    mask = population.data.num_examples > 0
    index = jnp.where(mask, jnp.arange(size, dtype=jnp.int32), size)
    return Cohort(index, mask, population.data, None, population.mapping, in_place=True)


def gather_cohort(population: Population, selection: Selection) -> Cohort:
    """Brings the selected clients' data together.

    A selection as large as the population stays in place, uncopied. A smaller one is padded to a multiple of the
    devices and dealt out among them like cards, so that each has as many valid rows as the others.
    """
    mapping, size = population.mapping, len(population.data.num_examples)
    index, mask, weights = selection
    in_place = len(index) == size
    if not in_place:
        devices = num_devices(mapping)
        missing = -len(index) % devices
        order = np.arange(len(index) + missing).reshape(-1, devices).T.reshape(-1)
        index = jnp.pad(index, (0, missing), constant_values=size)[order]
        mask = jnp.pad(mask, (0, missing))[order]
        if weights is not None:
            weights = jnp.pad(weights, ((0, missing), (0, 0)))[order]
    cohort = Cohort(index, mask, population.data, weights, mapping, in_place)
    data = gather_rows(cohort, population.data)
    data = data._replace(num_examples=jnp.where(mask, data.num_examples, 0))
    return Cohort(index, mask, data, weights, mapping, in_place)


def gather_rows(cohort: Cohort, rows: PyTree) -> PyTree:
    """Rows [C, ...] of the cohort's clients out of leaves [M, ...]; padding gathers zeros."""
    if cohort.in_place or not jax.tree.leaves(rows):
        return rows
    if cohort.mapping.mesh is None:
        return tree.take(rows, cohort.index)

    # A plain take would all-reduce the cohort to every device; each device needs its own part only.
    def local(shard: PyTree, index: Array) -> PyTree:
        leaves, structure = jax.tree.flatten(shard)
        here, devices = leaves[0].shape[0], num_devices(cohort.mapping)
        # Zeros on all devices but one, so that their sum is the row, bit by bit.
        own_part = functools.partial(lax.psum_scatter, axis_name=AXIS, tiled=True)

        def gather(position: Array) -> list[Array]:
            return messages.send(own_part, tree.take(leaves, position.reshape(-1)), JOINED_ROW)

        position = _local_position(index, here).reshape(devices, -1)
        valid = (index.reshape(devices, -1) < devices * here).any(0)
        return jax.tree.unflatten(structure, messages.in_turns(gather, position, valid, leaves, TURN_BYTES))

    return jax.shard_map(local, mesh=cohort.mapping.mesh, in_specs=(P(AXIS), P()), out_specs=P(AXIS), check_vma=False)(
        rows, cohort.index
    )


def scatter_rows(cohort: Cohort, rows: PyTree, values: PyTree, mask: Array | None = None) -> PyTree:
    """Writes values [C, ...] back to the cohort's clients in leaves [M, ...]; padding is dropped.

    Args:
      cohort: whose rows the values are.
      rows: leaves [M, ...].
      values: leaves [C, ...].
      mask: bool[C], default the cohort's; rows to leave as they are.
    """
    mask = cohort.mask if mask is None else mask
    if not jax.tree.leaves(rows):
        return rows
    if cohort.in_place:
        return tree.where(mask, values, rows)
    capacity = jax.tree.leaves(rows)[0].shape[0]
    index = jnp.where(mask, cohort.index, capacity)
    if cohort.mapping.mesh is None:
        return tree.scatter(rows, index, values)

    def local(shard: PyTree, index: Array, values: PyTree) -> PyTree:
        index, values = lax.all_gather((index, values), AXIS, tiled=True)
        return tree.scatter(shard, _local_position(index, jax.tree.leaves(shard)[0].shape[0]), values)

    return jax.shard_map(
        local,
        mesh=cohort.mapping.mesh,
        in_specs=(P(AXIS), P(AXIS), P(AXIS)),
        out_specs=P(AXIS),
        check_vma=False,
    )(rows, index, values)


def _local_position(index: Array, rows_per_device: int) -> Array:
    position = index - lax.axis_index(AXIS) * rows_per_device
    # A negative index would count from the end.
    return jnp.where(position < 0, rows_per_device, position)


def gram(rows: Array, mapping: ClientMapping) -> Array:
    """Inner products f32[M, M] of the rows of [M, d]; on several devices each multiplies its rows with all in turn."""
    if mapping.mesh is None:
        return row_products(rows, rows)
    devices = num_devices(mapping)

    def local(rows: Array) -> Array:
        own, count = lax.axis_index(AXIS), rows.shape[0]
        products, visiting = jnp.zeros((count, devices * count)), rows
        # Whole rows go round: to exchange columns would copy the rows four times over before anything is sent.
        for turn in range(devices):
            if turn:
                visiting = lax.ppermute(visiting, AXIS, [(i, (i + 1) % devices) for i in range(devices)])
            product = row_products(rows, visiting)
            products = lax.dynamic_update_slice_in_dim(products, product, (own - turn) % devices * count, 1)
        return lax.all_gather(products, AXIS, tiled=True)

    return jax.shard_map(local, mesh=mapping.mesh, in_specs=P(AXIS), out_specs=P(), check_vma=False)(rows)


def on_each_device(fn: Callable[..., Any], mapping: ClientMapping) -> Callable[..., Any]:
    """`fn` of whole arrays, computed by every device for itself.

    For the server's small work on numbers per client: divided among the devices by client, every sum of it, such as
    those of each k-means iteration, would be a wait for the other devices.

    Args:
      fn: of pytrees that are small, or on every device already.
    """
    if mapping.mesh is None:
        return fn
    return jax.shard_map(fn, mesh=mapping.mesh, in_specs=P(), out_specs=P(), check_vma=False)


def to_each_device(rows: PyTree, mapping: ClientMapping) -> PyTree:
    """The whole of leaves [C, ...] on every device, sent in one message; leaves with many numbers a row stay divided.

    For numbers per client of which the server's small work is made: each message is a wait for the other devices, some
    0.06 ms on two cores whatever its size.

    Args:
      rows: bool, or 32 bits wide where they are to be sent.
      mapping: how the rows are divided.
    """
    leaves, structure = jax.tree.flatten(rows)
    short = [i for i, leaf in enumerate(leaves) if messages.is_short(leaf, SHORT_ROW)]
    if mapping.mesh is None or not short:
        return rows

    def local(*rows: Array) -> list[Array]:
        everywhere = functools.partial(lax.all_gather, axis_name=AXIS, tiled=True)
        return messages.send(everywhere, list(rows), SHORT_ROW)

    gathered = jax.shard_map(local, mesh=mapping.mesh, in_specs=P(AXIS), out_specs=P(), check_vma=False)
    for i, leaf in zip(short, gathered(*(leaves[i] for i in short)), strict=True):
        leaves[i] = leaf
    return jax.tree.unflatten(structure, leaves)


def run_if(condition: Array, fn: Callable[[Any], Any], carry: Any) -> Any:
    """`fn(carry)` where `condition` bool[] holds, else `carry`, with large leaves changed in place.

    A loop of no or one turn: XLA lets a loop write into its carry, where a `lax.cond` copies every leaf that one of
    its branches hands through (37 ms a round for a 325 MB profile, measured).
    """
    return lax.fori_loop(0, condition.astype(jnp.int32), lambda _, carry: fn(carry), carry)


# ------------------------------------------------------------------------------------- map and reduce


def for_each_client(
    fn: Callable[..., Any],
    cohort: Cohort,
    *rows: PyTree,
    num_slots: int = 1,
    reduce: Callable[[Any], Contribution] | None = None,
    collect: Callable[[Any], PyTree] | None = None,
) -> Mapped:
    """Maps a function over a cohort's clients and folds what it returns, without keeping it.

    total_k = Σ_c [slot_c = k] · weight_c · value_c over the clients c whose value is finite.

    Args:
      fn: written for one client, `fn(client, *rows) -> output`; arrays it closes over are shared by all clients.
      cohort: C clients; a row whose mask is off is not computed (under "scan") or not counted.
      *rows: leaves [C, ...] of which fn sees its client's row.
      num_slots: K, rows of the sums.
      reduce: `output -> Contribution`, folded into sums [K, ...] inside the loop.
      collect: `output -> small pytree`, stacked [C, ...]; zeros where the mask is off.

    Returns:
      Mapped(reduced, collected, accepted).
    """
    mapping = cohort.mapping

    def mapped(cohort_rows, rows):
        return map_rows(fn, cohort_rows, rows, mapping, num_slots, reduce, collect)

    client_rows = Client(cohort.index, cohort.mask, cohort.data, cohort.weights)
    if mapping.mesh is None:
        return mapped(client_rows, rows)
    if len(cohort.index) % mapping.mesh.size:
        raise ValueError(
            f"a cohort of {len(cohort.index)} rows cannot be divided among {mapping.mesh.size} devices; "
            "build cohorts with gather_cohort, which pads them"
        )

    def sharded(client_rows, rows):
        result = mapped(client_rows, rows)
        return result._replace(reduced=lax.psum(result.reduced, AXIS))

    return jax.shard_map(
        sharded,
        mesh=mapping.mesh,
        in_specs=(P(AXIS), P(AXIS)),
        out_specs=Mapped(P(), P(AXIS), P(AXIS)),  # pyright: ignore[reportArgumentType]
        check_vma=False,
    )(client_rows, rows)
