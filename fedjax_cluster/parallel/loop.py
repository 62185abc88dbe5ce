"""The loop over clients: a function mapped over a cohort, its results folded into sums or stacked."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.core import eval_jaxpr
from jax.sharding import PartitionSpec as P

from fedjax_cluster import tree
from fedjax_cluster.joined_leaves import JoinedLeaves
from fedjax_cluster.options import COUNT, checked
from fedjax_cluster.parallel.chunks import chunk_size
from fedjax_cluster.parallel.contributions import Reduced, add_in_parts, add_many, add_one, can_be_added
from fedjax_cluster.parallel.mapping import AXIS, on_devices
from fedjax_cluster.parallel.rows import rows_in
from fedjax_cluster.parallel.tiles import kept, untiled
from fedjax_cluster.types import ONE_DEVICE, ClientData, ClientMapping, Cohort, PyTree

# Names in compiled programs: of the loops over clients, of what is done in some rounds, and of who takes part.
CLIENTS, BLOCKS, IF_DUE, IF_THERE = "clients_in_turn", "blocks_of_turns", "if_due", "if_there"
IF_NOT_DUE = "if_not_due"
BLOCK = 1024  # turns whose sums begin at 0


class Client(NamedTuple):
    """One row of a cohort, as a per-client function sees it."""

    index: Array  # i32[], client id
    mask: Array  # bool[]
    data: ClientData  # x [N, ...], y [N, ...], num_examples i32[]
    weights: Array | None  # f32[K]


class Mapped(NamedTuple):
    """What `for_each_client` returns."""

    reduced: Any  # Reduced; None without `reduce`
    collected: Any  # leaves [C, ...]
    accepted: Array  # bool[C]: took part, and gave nothing infinite or NaN, of what it keeps as well
    own: Any = None  # leaves [C, ...]: what was `renew`ed


def for_each_client(
    fn: Callable[..., Any],
    cohort: Cohort,
    *rows: PyTree,
    num_slots: int = 1,
    reduce: Callable[..., Any] | None = None,
    collect: Callable[..., PyTree] | None = None,
    own: PyTree = None,
    renew: Callable[[Any], PyTree] | None = None,
    parts: int | None = None,
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
      own: leaves [C, ...] that are renewed where they lie: of a cohort in place no second array as large is made of
        models that clients keep. fn sees its client's row before `rows`, `fn(client, own, *rows)`.
      renew: `output -> own row`, of the same shapes; one with infinity or NaN is not written, and its client is left
        out of the sums; nor is one whose mask is off.
      parts: S contributions of each client to one slot each, of which one at a time is held: then it is
        `reduce(client, output, number) -> (Contribution, small pytree)` for each number i32[] below S, and
        `collect(output, further)`, which sees these small pytrees as leaves [S, ...].

    Returns:
      Mapped(reduced, collected, accepted, own).
    """
    mapping = cohort.mapping
    size = len(cohort.index)
    if (own is None) != (renew is None):
        raise ValueError("own and renew go together: give the rows that are renewed, and what becomes of each")
    if parts is not None:
        checked("parts", parts, int, COUNT)
        if reduce is None:
            raise ValueError(f"parts is {parts}, but there is no reduce, which gives them")
    for leaf in jax.tree.leaves((own, rows)):
        if (shape := jnp.shape(leaf))[:1] != (size,):
            raise ValueError(
                f"rows of a cohort of {size} clients have the shape {shape}; give a row for each client of the cohort, "
                "as parallel.gather_rows(cohort, rows) makes of rows of all clients"
            )

    def mapped(cohort_rows, own, rows):
        return map_rows(fn, cohort_rows, own, rows, mapping, num_slots, reduce, collect, renew, parts)

    client_rows = Client(cohort.index, cohort.mask, cohort.data, cohort.weights)
    if mapping.mesh is None:
        return mapped(client_rows, own, rows)
    if len(cohort.index) % mapping.mesh.size:
        raise ValueError(
            f"a cohort of {len(cohort.index)} rows cannot be divided among {mapping.mesh.size} devices; "
            "build cohorts with gather_cohort, which pads them"
        )

    def sharded(client_rows, own, rows):
        result = mapped(client_rows, own, rows)
        return result._replace(reduced=lax.psum(result.reduced, AXIS))

    here = P(AXIS)
    of_all = on_devices(sharded, mapping, (here, here, here), Mapped(P(), here, here, here))  # pyright: ignore[reportArgumentType]
    if cohort.placement is None:
        return of_all(client_rows, own, rows)
    # What goes with x and y, which are large and stay where they lie, is brought there, and what comes of it back.
    x, y, _ = cohort.data
    numbers = cohort.data._replace(x=None, y=None)
    index, mask, numbers, weights, own, rows = rows_in(
        cohort, cohort.placement.client, (cohort.index, cohort.mask, numbers, cohort.weights, own, rows)
    )
    result = of_all(Client(index, mask, numbers._replace(x=x, y=y), weights), own, rows)
    return Mapped(result.reduced, *rows_in(cohort, cohort.placement.place, tuple(result[1:])))


def run_if(
    condition: Array, fn: Callable[[Any], Any], carry: Any, mapping: ClientMapping = ONE_DEVICE, otherwise: bool = False
) -> Any:
    """`fn(carry)` where `condition` bool[] holds, else `carry`, with large leaves changed in place.

    A loop of no or one turn: XLA lets a loop write into its carry, where a `lax.cond` copies every leaf that one of
    its branches hands through (37 ms a round for a 325 MB profile, measured).

    Of several runs side by side (`mapping.runs`), `fn` is computed for those whose condition holds, one after the
    other, or for all at once where it holds for half of them: a `vmap` of the loop would compute it for all as soon as
    it holds for one.

    `otherwise` tells plans that it stands for another `run_if`, of the opposite condition, which does as much and more.
    """
    with jax.named_scope(IF_NOT_DUE if otherwise else IF_DUE):
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


def map_rows(
    fn, clients: Client, own, rows, mapping: ClientMapping, num_slots, reduce, collect, renew, parts
) -> Mapped:
    """`for_each_client` on one device: scanned, vmapped, or in chunks of clients."""
    count = clients.index.shape[0]

    def begin(client, mine, rows):
        client, rows = untiled((client, rows))
        return client, fn(client, *rows) if own is None else fn(client, mine, *rows)

    work = (_Whole if parts is None else _InParts)(begin, reduce, collect, renew, parts)

    def row_at(position, own):
        row = functools.partial(lax.dynamic_index_in_dim, index=position, axis=0, keepdims=False)
        client, mine, others = jax.tree.map(row, (clients, own, rows))
        return client, mine, others

    # Of the very rows that the loop takes: of plain shapes it would be traced for no mesh, and again for this one.
    contribution, collected, renewed = jax.eval_shape(lambda: work.outputs(*row_at(0, own)))
    _check_renewed(jax.eval_shape(lambda: row_at(0, own)[1]), renewed)
    value, leading = ((), 0) if contribution is None else (contribution.value, contribution.slot.ndim)
    work.leaves = JoinedLeaves(value, leading)
    one = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), (clients, own, rows))
    chunk = chunk_size(work.outputs, one, mapping, count)

    reduced = None
    if contribution is not None:
        # A leading axis of several slots is summed away.
        value = jax.eval_shape(work.leaves.join, value)
        total = [jnp.zeros((num_slots, *leaf.shape[leading:]), jnp.float32) for leaf in value]
        reduced = Reduced(total, jnp.zeros(num_slots), jnp.zeros(num_slots, jnp.int32), jnp.zeros((), jnp.int32))
    carry = Mapped(reduced, _zeros(collected, (count,)), jnp.zeros(count, bool), own)

    def single(position, carry: Mapped) -> Mapped:
        client, mine, row = row_at(position, carry.own)
        reduced, finite, collected, renewed = work.of_one(client, mine, row, carry.reduced)
        whole = tree.all_finite(renewed)
        renewed = tree.where(client.mask & whole, tree.of_types(renewed, mine), mine)
        found = collected, client.mask & finite, renewed
        write = functools.partial(lax.dynamic_update_index_in_dim, index=position, axis=0)
        return Mapped(reduced, *jax.tree.map(write, tuple(carry[1:]), found))

    def several(number, carry: Mapped) -> Mapped:
        # The last chunk reaches back over rows already done; they are masked, not counted twice.
        start = jnp.minimum(number * chunk, count - chunk)
        there = functools.partial(lax.dynamic_slice_in_dim, start_index=start, slice_size=chunk)
        batch, mine, row = jax.tree.map(there, (clients, carry.own, rows))
        batch, row = kept((batch, row))
        fresh = start + jnp.arange(chunk) >= number * chunk
        reduced, finite, collected, renewed = work.of_many(batch, mine, row, batch.mask & fresh, carry.reduced)
        whole = jax.vmap(tree.all_finite, axis_size=chunk)(renewed)
        collected = tree.where(batch.mask, collected, jax.tree.map(jnp.zeros_like, collected))
        found = collected, batch.mask & finite
        if own is not None or parts is not None:
            # What was done again went out from a renewed row; where no fresh row takes part there are no parts.
            found = tree.where(fresh, found, jax.tree.map(there, (carry.collected, carry.accepted)))
        found = *found, tree.where(batch.mask & fresh & whole, tree.of_types(renewed, mine), mine)
        write = functools.partial(lax.dynamic_update_slice_in_dim, start_index=start, axis=0)
        return Mapped(reduced, *jax.tree.map(write, tuple(carry[1:]), found))

    def split(found: Mapped) -> Mapped:
        if found.reduced is None:
            return found
        return found._replace(reduced=found.reduced._replace(total=work.leaves.split(found.reduced.total)))

    if chunk == count and chunk > 1:
        return split(several(0, carry))
    # Valid rows come first, so a ragged cohort costs what it holds.
    last = jnp.max(jnp.where(clients.mask, jnp.arange(1, count + 1), 0))
    # The same number of turns in all runs, or each would copy the carry of those that have ended.
    last = _most_of_runs(last) if mapping.runs > 1 else last
    turn = single if chunk == 1 else several
    return split(_in_blocks((last + chunk - 1) // chunk, -(-count // chunk), turn, carry))


def _check_renewed(row: PyTree, renewed: PyTree) -> None:
    """Raises a ValueError where a row anew, given as shapes, is not as one that is there."""
    (old, form), (new, other) = jax.tree.flatten(row), jax.tree.flatten(renewed)
    if form != other:
        raise ValueError(f"renew gives {other}, but a row of own is {form}; give the row itself, as it becomes")
    for before, after in zip(old, new, strict=True):
        if before.shape != after.shape:
            raise ValueError(
                f"renew gives an array of shape {after.shape} in the place of {before.shape} in a row of own"
            )


def _zeros(shapes: PyTree, leading: tuple[int, ...] = ()) -> PyTree:
    return jax.tree.map(lambda leaf: jnp.zeros((*leading, *leaf.shape), leaf.dtype), shapes)


class _Whole:
    """A client's work whose contribution comes at once: the sums with it, whether all was finite, what is kept."""

    leaves: JoinedLeaves  # of a contribution's value; known once its shapes are

    def __init__(self, begin, reduce, collect, renew, parts):
        def outputs(client, mine, rows):
            _, output = begin(client, mine, rows)
            return tuple(None if read is None else read(output) for read in (reduce, collect, renew))

        # Traced once for all its uses.
        self.outputs = jax.jit(outputs, inline=True)

    def joined(self, given):
        contribution, *others = given
        if contribution is not None:
            contribution = contribution._replace(value=self.leaves.join(contribution.value))
        return contribution, *others

    def of_one(self, client, mine, row, reduced):
        def outputs():
            return self.joined(self.outputs(client, mine, row))

        shapes = jax.eval_shape(outputs)
        with jax.named_scope(IF_THERE):
            contribution, collected, renewed = lax.cond(client.mask, outputs, lambda: _zeros(shapes))
        finite = can_be_added(contribution, collected) & tree.all_finite(renewed)
        reduced = None if contribution is None else add_one(reduced, contribution, client.mask, finite)
        return reduced, finite, collected, renewed

    def of_many(self, batch, mine, row, mask, reduced):
        contribution, collected, renewed = self.joined(jax.vmap(self.outputs)(batch, mine, row))
        count = len(batch.index)
        finite = jax.vmap(can_be_added, axis_size=count)(contribution, collected)
        finite &= jax.vmap(tree.all_finite, axis_size=count)(renewed)
        reduced = None if contribution is None else add_many(reduced, contribution, mask, finite)
        return reduced, finite, collected, renewed


class _InParts:
    """A client's work whose contributions come one after the other, and are gone before the next."""

    leaves: JoinedLeaves

    def __init__(self, begin, reduce, collect, renew, parts):
        self.parts, inline = parts, functools.partial(jax.jit, inline=True)

        @inline
        def part(client, output, number):
            contribution, told = reduce(untiled(client), output, number)
            return contribution._replace(value=self.leaves.join(contribution.value)), told

        @inline
        def ended(output, told):
            return None if collect is None else collect(output, told), None if renew is None else renew(output)

        @inline
        def outputs(client, mine, rows):
            client, output = begin(client, mine, rows)
            contribution, told = reduce(client, output, jnp.zeros((), jnp.int32))
            return contribution, *ended(output, tree.broadcast(told, parts))

        self.begin = inline(lambda client, mine, rows: begin(client, mine, rows)[1])
        self.part, self.ended, self.outputs = part, ended, outputs

    def of_one(self, client, mine, row, reduced):
        def begin():
            return self.begin(client, mine, row)

        shapes = jax.eval_shape(begin)
        with jax.named_scope(IF_THERE):
            output = lax.cond(client.mask, begin, lambda: _zeros(shapes))
        part = functools.partial(self.part, client, output)

        def whole(told):
            return tree.all_finite(self.ended(output, told))

        reduced, finite, told = add_in_parts(self.parts, part, add_one, can_be_added, whole, client.mask, reduced)
        collected, renewed = self.ended(output, told)
        collected = tree.where(client.mask, collected, jax.tree.map(jnp.zeros_like, collected))
        return reduced, finite, collected, renewed

    def of_many(self, batch, mine, row, mask, reduced):
        output = jax.vmap(self.begin)(batch, mine, row)

        def part(number):
            return jax.vmap(self.part, (0, 0, None))(batch, output, number)

        def ended(told):
            return jax.vmap(self.ended, (0, 1), axis_size=len(mask))(output, told)

        def whole(told):
            return jax.vmap(tree.all_finite, axis_size=len(mask))(ended(told))

        reduced, finite, told = add_in_parts(self.parts, part, add_many, jax.vmap(can_be_added), whole, mask, reduced)
        return reduced, finite, *ended(told)


def _in_blocks(turns: Array, most: int, turn: Callable[[Any, Mapped], Mapped], carry: Mapped) -> Mapped:
    """Turns i32[], at most so many, of the loop; of very many clients the sums of a block are added to those before.

    Added up one by one in float32, a million equal weights came to 0.3 % less.
    """

    def loop(first: Any, end: Array, carry: Mapped) -> Mapped:
        with jax.named_scope(f"{CLIENTS}_{most}"):
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
