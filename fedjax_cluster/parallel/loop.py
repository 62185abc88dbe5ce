"""The loop over clients: a function mapped over a cohort, its results folded into sums or stacked."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.core import eval_jaxpr
from jax.sharding import PartitionSpec as P

from fedjax_cluster import tree
from fedjax_cluster.joined_leaves import JoinedLeaves
from fedjax_cluster.parallel.chunks import chunk_size
from fedjax_cluster.parallel.mapping import AXIS, on_devices
from fedjax_cluster.parallel.rows import rows_in
from fedjax_cluster.parallel.tiles import kept, untiled
from fedjax_cluster.types import ONE_DEVICE, ClientData, ClientMapping, Cohort, PyTree

CLIENTS, BLOCKS = "clients_in_turn", "blocks_of_turns"  # the loops' names in compiled programs
BLOCK = 1024  # turns whose sums begin at 0
# For so many clusters a TPU adds up a chunk's changes as it reads them; for a product XLA makes two copies of them all
# (compiled for a v5e, a round of FedAvg with the CNN writes and reads 0.6 of the bytes, of IFCA 0.5, of FedEM 0.35).
# Products are 4 to 12 times as fast on a CPU.
FEW_SLOTS = 4


class Client(NamedTuple):
    """One row of a cohort, as a per-client function sees it."""

    index: Array  # i32[], client id
    mask: Array  # bool[]
    data: ClientData  # x [N, ...], y [N, ...], num_examples i32[]
    weights: Array | None  # f32[K]


class Contribution(NamedTuple):
    """What one client adds to the sums over clusters: `weight · value` to row `slot`.

    A client may contribute to several slots: then all three carry a leading axis [S].
    """

    slot: Array  # i32[] or i32[S]
    weight: Array  # f32[] or f32[S]
    value: PyTree  # leaves [...] or [S, ...]


class Reduced(NamedTuple):
    """Sums over the clients of a cohort."""

    total: PyTree  # leaves [K, ...]: Σ weight · value
    weight: Array  # f32[K]: Σ weight
    count: Array  # i32[K]: contributions with a positive weight
    num_rejected: Array  # i32[]: clients left out for a value that is not finite, or whose square is not


class Mapped(NamedTuple):
    """What `for_each_client` returns."""

    reduced: Any  # Reduced; None without `reduce`
    collected: Any  # leaves [C, ...]
    accepted: Array  # bool[C]: took part, and sent nothing infinite or NaN


def for_each_client(
    fn: Callable[..., Any],
    cohort: Cohort,
    *rows: PyTree,
    num_slots: int = 1,
    reduce: Callable[[Any], Contribution] | None = None,
    collect: Callable[[Any], PyTree] | None = None,
) -> Mapped:
    """Maps a function over a cohort's clients and folds what it returns, without keeping it.

    total_k = Σ_c [slot_c = k] · weight_c · value_c over the clients c whose value is finite, its square in float32 too.

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
    size = len(cohort.index)
    for leaf in jax.tree.leaves(rows):
        if (shape := jnp.shape(leaf))[:1] != (size,):
            raise ValueError(
                f"rows of a cohort of {size} clients have the shape {shape}; give a row for each client of the cohort, "
                "as parallel.gather_rows(cohort, rows) makes of rows of all clients"
            )

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

    of_all = on_devices(sharded, mapping, (P(AXIS), P(AXIS)), Mapped(P(), P(AXIS), P(AXIS)))  # pyright: ignore[reportArgumentType]
    if cohort.placement is None:
        return of_all(client_rows, rows)
    # What goes with x and y, which are large and stay where they lie, is brought there, and what comes of it back.
    x, y, _ = cohort.data
    numbers = cohort.data._replace(x=None, y=None)
    index, mask, numbers, weights, rows = rows_in(
        cohort, cohort.placement.client, (cohort.index, cohort.mask, numbers, cohort.weights, rows)
    )
    result = of_all(Client(index, mask, numbers._replace(x=x, y=y), weights), rows)
    collected, accepted = rows_in(cohort, cohort.placement.place, (result.collected, result.accepted))
    return Mapped(result.reduced, collected, accepted)


def run_if(condition: Array, fn: Callable[[Any], Any], carry: Any, mapping: ClientMapping = ONE_DEVICE) -> Any:
    """`fn(carry)` where `condition` bool[] holds, else `carry`, with large leaves changed in place.

    A loop of no or one turn: XLA lets a loop write into its carry, where a `lax.cond` copies every leaf that one of
    its branches hands through (37 ms a round for a 325 MB profile, measured).

    Of several runs side by side (`mapping.runs`), `fn` is computed for those whose condition holds, one after the
    other, or for all at once where it holds for half of them: a `vmap` of the loop would compute it for all as soon as
    it holds for one.
    """
    if mapping.runs > 1:
        return _run_where(condition, fn, carry)
    return lax.fori_loop(0, condition.astype(jnp.int32), lambda _, carry: fn(carry), carry)


def _run_where(condition: Array, fn: Callable[[Any], Any], carry: Any) -> Any:
    """`run_if` with a rule of its own for `jax.vmap`."""
    # What `fn` closes over differs from run to run, too.
    closed = jax.make_jaxpr(fn)(carry)
    structure = jax.tree.structure(carry)

    def apply(shared: list[Array], carry: PyTree) -> PyTree:
        return jax.tree.unflatten(structure, eval_jaxpr(closed.jaxpr, shared, *jax.tree.leaves(carry)))

    @jax.custom_batching.custom_vmap
    def run(condition: Array, shared: list[Array], carry: PyTree) -> PyTree:
        return lax.fori_loop(0, condition.astype(jnp.int32), lambda _, carry: apply(shared, carry), carry)

    @run.def_vmap
    def run_all(size: int, batched: Any, condition: Array, shared: list[Array], carry: PyTree) -> tuple[PyTree, PyTree]:
        varies, of_shared, of_carry = batched
        axes = [0 if each else None for each in of_shared]
        carry = jax.tree.map(
            lambda leaf, each: leaf if each else jnp.broadcast_to(leaf, (size, *jnp.shape(leaf))), carry, of_carry
        )
        everywhere = jax.tree.map(lambda _: True, carry)

        def all_at_once(carry: PyTree) -> PyTree:
            new = jax.vmap(apply, in_axes=(axes, 0))(shared, carry)
            return tree.where(condition, new, carry) if varies else new

        if not varies:
            return lax.fori_loop(0, condition.astype(jnp.int32), lambda _, carry: all_at_once(carry), carry), everywhere

        def one(number: Array, carry: PyTree) -> PyTree:
            take = functools.partial(lax.dynamic_index_in_dim, index=number, axis=0, keepdims=False)
            own = [take(leaf) if each else leaf for leaf, each in zip(shared, of_shared, strict=True)]
            new = run(take(condition), own, jax.tree.map(take, carry))
            return jax.tree.map(lambda leaf, row: lax.dynamic_update_index_in_dim(leaf, row, number, 0), carry, new)

        most = 2 * jnp.sum(condition.astype(jnp.int32)) >= size
        carry = lax.fori_loop(0, most.astype(jnp.int32), lambda _, carry: all_at_once(carry), carry)
        turns = jnp.where(most, 0, size).astype(jnp.int32)
        return lax.fori_loop(0, turns, one, carry), everywhere

    return run(condition, closed.consts, carry)


@jax.custom_batching.custom_vmap
def _most_of_runs(count: Array) -> Array:
    """The largest of several runs' numbers i32[], in all of them; of one run, its own."""
    return count


@_most_of_runs.def_vmap
def _(size: int, batched: list[bool], count: Array) -> tuple[Array, bool]:
    return (jnp.max(count) if batched[0] else count), False


def map_rows(fn, clients: Client, rows, mapping: ClientMapping, num_slots, reduce, collect) -> Mapped:
    """`for_each_client` on one device: scanned, vmapped, or in chunks of clients."""
    count = clients.index.shape[0]

    # Traced once for all its uses.
    @functools.partial(jax.jit, inline=True)
    def outputs(client, rows):
        client, rows = untiled((client, rows))
        output = fn(client, *rows)
        contribution = None if reduce is None else reduce(output)
        return contribution, None if collect is None else collect(output)

    def joined(given):
        contribution, collected = given
        if contribution is not None:
            contribution = contribution._replace(value=leaves.join(contribution.value))
        return contribution, collected

    def row_at(position):
        return jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, position, 0, keepdims=False), (clients, rows))

    # Of the very rows that the loop takes: of plain shapes it would be traced for no mesh, and again for this one.
    shapes = jax.eval_shape(lambda: outputs(*row_at(0)))
    value, leading = ((), 0) if shapes[0] is None else (shapes[0].value, shapes[0].slot.ndim)
    leaves = JoinedLeaves(value, leading)
    shapes = jax.eval_shape(joined, shapes)
    one = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), (clients, rows))
    chunk = chunk_size(outputs, one, mapping, count)

    def zeros(shape, leading=()):
        return jax.tree.map(lambda leaf: jnp.zeros((*leading, *leaf.shape), leaf.dtype), shape)

    contribution, collected = shapes
    reduced = None
    if contribution is not None:
        # A leading axis of several slots is summed away.
        total = [jnp.zeros((num_slots, *leaf.shape[leading:]), jnp.float32) for leaf in contribution.value]
        reduced = Reduced(total, jnp.zeros(num_slots), jnp.zeros(num_slots, jnp.int32), jnp.zeros((), jnp.int32))
    carry = Mapped(reduced, zeros(collected, (count,)), jnp.zeros(count, bool))

    def single(position, carry: Mapped) -> Mapped:
        client, row = row_at(position)
        contribution, collected = lax.cond(client.mask, lambda: joined(outputs(client, row)), lambda: zeros(shapes))
        finite = _can_be_added(contribution, collected)
        reduced = carry.reduced if contribution is None else _add_one(carry.reduced, contribution, client.mask, finite)
        write = functools.partial(lax.dynamic_update_index_in_dim, index=position, axis=0)
        return Mapped(
            reduced, jax.tree.map(write, carry.collected, collected), write(carry.accepted, client.mask & finite)
        )

    def several(number, carry: Mapped) -> Mapped:
        # The last chunk reaches back over rows already done; they are masked, not counted twice.
        start = jnp.minimum(number * chunk, count - chunk)
        batch, row = jax.tree.map(lambda leaf: lax.dynamic_slice_in_dim(leaf, start, chunk), (clients, rows))
        batch, row = kept((batch, row))
        contribution, collected = joined(jax.vmap(outputs)(batch, row))
        finite = jax.vmap(_can_be_added)(contribution, collected)
        mask = batch.mask & (start + jnp.arange(chunk) >= number * chunk)
        reduced = carry.reduced if contribution is None else _add_many(carry.reduced, contribution, mask, finite)
        collected = tree.where(batch.mask, collected, jax.tree.map(jnp.zeros_like, collected))
        write = functools.partial(lax.dynamic_update_slice_in_dim, start_index=start, axis=0)
        return Mapped(
            reduced, jax.tree.map(write, carry.collected, collected), write(carry.accepted, batch.mask & finite)
        )

    def split(found: Mapped) -> Mapped:
        if found.reduced is None:
            return found
        return found._replace(reduced=found.reduced._replace(total=leaves.split(found.reduced.total)))

    if chunk == count and chunk > 1:
        return split(several(0, carry))
    # Valid rows come first, so a ragged cohort costs what it holds.
    last = jnp.max(jnp.where(clients.mask, jnp.arange(1, count + 1), 0))
    # The same number of turns in all runs, or each would copy the carry of those that have ended.
    last = _most_of_runs(last) if mapping.runs > 1 else last
    turn = single if chunk == 1 else several
    return split(_in_blocks((last + chunk - 1) // chunk, -(-count // chunk), turn, carry))


def _in_blocks(turns: Array, most: int, turn: Callable[[Any, Mapped], Mapped], carry: Mapped) -> Mapped:
    """Turns i32[], at most so many, of the loop; of very many clients the sums of a block are added to those before.

    Added up one by one in float32, a million equal weights came to 0.3 % less.
    """

    def loop(first: Any, end: Array, carry: Mapped) -> Mapped:
        with jax.named_scope(CLIENTS):
            return lax.fori_loop(first, end, turn, carry)

    sums = carry.reduced
    if sums is None or most <= BLOCK or len(sums.weight) > BLOCK:
        return loop(0, turns, carry)

    def block(number: Array, carry: Mapped) -> Mapped:
        first = number * BLOCK
        zeros = jax.tree.map(jnp.zeros_like, carry.reduced)
        found = loop(first, jnp.minimum(first + BLOCK, turns), carry._replace(reduced=zeros))
        return found._replace(reduced=jax.tree.map(jnp.add, carry.reduced, found.reduced))

    with jax.named_scope(BLOCKS):
        return lax.fori_loop(0, (turns + BLOCK - 1) // BLOCK, block, carry)


def _can_be_added(contribution: Contribution | None, collected: Any) -> Array:
    """bool[]: all of what a client sends is finite, and its contribution's square too.

    Reports have that square (`round.size_of`), which so is all that is read of an update as large as a model.
    """
    if contribution is None:
        return tree.all_finite(collected)
    floats = [leaf for leaf in contribution.value if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    squares = [jnp.sum(jnp.square(leaf.astype(jnp.float32))) for leaf in floats]
    return tree.all_finite((contribution._replace(value=squares), collected))


def _add_one(reduced: Reduced, contribution: Contribution, mask: Array, finite: Array) -> Reduced:
    if contribution.slot.ndim:
        batched = jax.tree.map(lambda leaf: leaf[None], contribution)
        return _add_many(reduced, batched, mask[None], finite[None])
    slot, weight, value = contribution
    weight = jnp.where(mask & finite, weight, 0.0)

    def add(total, value):
        # One row in place: adding weight · value to all K rows would move K times the memory.
        old = lax.dynamic_index_in_dim(total, slot, 0, keepdims=False)
        new = old + weight * jnp.where(finite, value, 0).astype(jnp.float32)
        return lax.dynamic_update_index_in_dim(total, new, slot, 0)

    return Reduced(
        jax.tree.map(add, reduced.total, value),
        reduced.weight.at[slot].add(weight),
        reduced.count.at[slot].add((weight > 0).astype(jnp.int32)),
        reduced.num_rejected + (mask & ~finite).astype(jnp.int32),
    )


def _product(assignment: Array, rows: Array) -> Array:
    """Sums [K, ...] of rows [n, ...] with weights f32[n, K]."""
    flat = rows.reshape(len(rows), math.prod(rows.shape[1:]))
    sums = jnp.matmul(assignment.T, flat, precision="highest")
    return sums.reshape(len(sums), *rows.shape[1:])


def _sums(assignment: Array, rows: Array) -> Array:
    weights = assignment.T.reshape(*assignment.T.shape, *(1 for _ in rows.shape[1:]))
    return jnp.sum(weights * rows[None], axis=1)


def _add_many(reduced: Reduced, contribution: Contribution, mask: Array, finite: Array) -> Reduced:
    num_slots = len(reduced.weight)
    slot, weight, value = contribution
    keep = (mask & finite).reshape((-1,) + (1,) * (slot.ndim - 1))
    weight = jnp.where(keep, weight, 0.0).reshape(-1)
    assignment = jax.nn.one_hot(slot.reshape(-1), num_slots) * weight[:, None]  # [rows, K]

    def add(total, leaf):
        leaf = tree.where(finite, leaf, jnp.zeros_like(leaf)).astype(jnp.float32)
        rows = leaf.reshape(assignment.shape[0], *total.shape[1:])
        if num_slots > FEW_SLOTS:
            return total + _product(assignment, rows)
        return total + lax.platform_dependent(assignment, rows, tpu=_sums, default=_product)

    return Reduced(
        jax.tree.map(add, reduced.total, value),
        reduced.weight + assignment.sum(0),
        reduced.count + (assignment > 0).astype(jnp.int32).sum(0),
        reduced.num_rejected + (mask & ~finite).astype(jnp.int32).sum(),
    )
