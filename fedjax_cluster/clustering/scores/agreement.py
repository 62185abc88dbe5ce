"""Scores of a clustering against known groups.

Clients with label -1 in either clustering are left out. Labels may be any non-negative integers: pairs of labels are
counted as runs of a sorted list, in O(M log M).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, ArrayLike, Float, Int, Shaped

from fedjax_cluster.clustering import checks
from fedjax_cluster.clustering.checks import Labels, Mask

T = TypeVar("T")

# Above this many clients the number of pairs no longer fits into int32.
_EXACT_PAIRS_LIMIT = 46_340
# A million clients took 0.45 s to sort, in every round.
MANY, FEW_LABELS = 10_000, 64


class _Contingency(NamedTuple):
    """The cells of the contingency table that are not empty, at most one per client."""

    num_clients: Int[Array, ""]
    cells: Int[Array, " M"]  # sizes of C_k ∩ G_j; 0 beyond the last
    row: Int[Array, " M"]  # which C_k a cell belongs to
    column: Int[Array, " M"]  # which G_j
    rows: Int[Array, " M"]  # sizes of C_k
    columns: Int[Array, " M"]  # sizes of G_j
    exact: bool  # whether the number of pairs fits into int32


def adjusted_rand_index(labels_a: Labels, labels_b: Labels, *, mask: Mask = None) -> Float[Array, ""]:
    r"""Agreement of two clusterings on pairs of clients, 0 in expectation for random ones (Hubert and Arabie 1985).

    .. math:: \mathrm{ARI} = \frac{2 (P D - Q R)}{(P + Q)(Q + D) + (P + R)(R + D)}

    with the pairs together in both (P), in a alone (Q), in b alone (R), and apart in both (D). Each is counted by
    itself, so that few clients apart from very many are scored to the last digits of float32.

    Args:
      labels_a: a clustering; -1 leaves a client out.
      labels_b: the other one, or the true groups.
      mask: clients that count; None means all.

    Returns:
      In [-1, 1]; exactly 1 for equal partitions, less for all others; NaN without clients.

    Raises:
      ValueError: shapes or dtypes that are not labels.

    >>> float(adjusted_rand_index(jnp.array([0, 0, 1, 1]), jnp.array([5, 5, 3, 3])))
    1.0
    """
    return _adjusted_rand_index(*_two_labels(labels_a, labels_b, mask))


@jax.jit
def _adjusted_rand_index(labels_a: Array, labels_b: Array, mask: Array) -> Array:
    return _of_table(_adjusted_rand_of, labels_a, labels_b, mask)


def _adjusted_rand_of(table: _Contingency) -> Array:
    # In shares of all pairs, of which no product overflows. P D and Q R are at most half of what is below them: where
    # they cancel, the score is near 0, and off by a few roundings of 1.
    both, in_a, in_b, neither = (part / jnp.maximum(_all_pairs(table.num_clients), 1.0) for part in _kinds(table))
    spread = (both + in_a) * (in_a + neither) + (both + in_b) * (in_b + neither)
    score = 2.0 * (both * neither - in_a * in_b) / jnp.where(spread > 0.0, spread, 1.0)
    return _unless_equal(score, table)


def rand_index(labels_a: Labels, labels_b: Labels, *, mask: Mask = None) -> Float[Array, ""]:
    r"""Share of pairs of clients on which two clusterings agree (Rand 1971; FedGWC, Appendix E.2.1).

    .. math:: R = (a + b) / \binom{M}{2}, \quad a \text{ pairs together in both}, b \text{ apart in both}

    Args:
      labels_a: a clustering; -1 leaves a client out.
      labels_b: the other one, or the true groups.
      mask: clients that count; None means all.

    Returns:
      In [0, 1]; exactly 1 for equal partitions; NaN without clients.

    Raises:
      ValueError: shapes or dtypes that are not labels.

    >>> round(float(rand_index(jnp.array([0, 0, 1, 1]), jnp.array([0, 0, 0, 0]))), 4)
    0.3333
    """
    return _rand_index(*_two_labels(labels_a, labels_b, mask))


@jax.jit
def _rand_index(labels_a: Array, labels_b: Array, mask: Array) -> Array:
    table = _contingency(labels_a, labels_b, mask)
    _, in_a, in_b, _ = _kinds(table)
    score = 1.0 - (in_a + in_b) / jnp.maximum(_all_pairs(table.num_clients), 1.0)
    return _unless_equal(score, table)


def purity(labels: Labels, groups: Labels, *, mask: Mask = None) -> Float[Array, ""]:
    r"""Share of clients that are in the majority group of their cluster (Gradient-and-loss CFL, Section IV).

    .. math:: \frac{1}{M} \sum_k \max_j | C_k \cap G_j |

    Args:
      labels: the clustering C; -1 leaves a client out.
      groups: the true groups G.
      mask: clients that count; None means all.

    Returns:
      In (0, 1]; NaN without clients.

    Raises:
      ValueError: shapes or dtypes that are not labels.

    >>> float(purity(jnp.array([0, 0, 0, 1]), jnp.array([0, 0, 1, 1])))
    0.75
    """
    return _purity(*_two_labels(labels, groups, mask, ("labels", "groups")))


@jax.jit
def _purity(labels: Array, groups: Array, mask: Array) -> Array:
    return _of_table(_purity_of, labels, groups, mask)


def _purity_of(table: _Contingency) -> Array:
    majority = jax.ops.segment_max(table.cells, table.row, table.rows.shape[0])
    return jnp.maximum(majority, 0).sum().astype(jnp.float32) / table.num_clients.astype(jnp.float32)


@functools.partial(jax.jit, static_argnames="few")
def agreement(labels: Array, groups: Array, mask: Array, few: bool = False) -> tuple[Array, Array]:
    """The adjusted Rand index and the purity, of one table of the clients that `mask` has.

    Args:
      few: all labels are known to be below `FEW_LABELS`, so that no sort need be compiled.
    """
    return _of_table(lambda table: (_adjusted_rand_of(table), _purity_of(table)), labels, groups, mask, few)


def run_index(*columns: Shaped[Array, " M"]) -> Int[Array, " M"]:
    """0 for the first run of equal entries (in all columns) of a sorted list, 1 for the second, and so on."""
    starts = jnp.zeros(columns[0].shape[0] - 1, bool)
    for column in columns:
        starts |= column[1:] != column[:-1]
    return jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(starts, dtype=jnp.int32)])


def _two_labels(
    labels_a: ArrayLike, labels_b: ArrayLike, mask: ArrayLike | None, names: Sequence[str] = ("labels_a", "labels_b")
) -> tuple[Array, Array, Array]:
    labels_a = checks.labels(labels_a, names[0])
    labels_b = checks.labels(labels_b, names[1], labels_a.shape[0])
    mask = checks.client_mask(mask, labels_a.shape[0])
    if not len(labels_a):
        # No array of no rows has runs; a client that does not count is as good as none.
        return jnp.zeros(1, jnp.int32), jnp.zeros(1, jnp.int32), jnp.zeros(1, bool)
    return labels_a, labels_b, checks.labelled(checks.labelled(mask, labels_a), labels_b)


def _of_table(
    score: Callable[[_Contingency], T], labels_a: Array, labels_b: Array, mask: Array, known_few: bool = False
) -> T:
    """A score of the contingency table; that of many clients with few labels is counted, in O(M), not sorted."""
    if labels_a.shape[0] <= MANY:
        return score(_contingency(labels_a, labels_b, mask))
    if known_few:
        return score(_counted(labels_a, labels_b, mask))
    few = jnp.max(jnp.where(mask, jnp.maximum(labels_a, labels_b), 0)) < FEW_LABELS
    arguments = labels_a, labels_b, mask
    return lax.cond(few, lambda *given: score(_counted(*given)), lambda *given: score(_contingency(*given)), *arguments)


def _counted(labels_a: Array, labels_b: Array, mask: Array) -> _Contingency:
    """The table of labels below `FEW_LABELS`, a cell for each pair of them."""
    few = FEW_LABELS
    cell = jnp.where(mask, labels_a * few + labels_b, few * few)
    cells = jnp.zeros(few * few, jnp.int32).at[cell].add(1, mode="drop")
    table = cells.reshape(few, few)
    row, column = jnp.divmod(jnp.arange(few * few, dtype=jnp.int32), few)
    exact = labels_a.shape[0] <= _EXACT_PAIRS_LIMIT
    return _Contingency(cells.sum(), cells, row, column, table.sum(1), table.sum(0), exact)


def _contingency(labels_a: Array, labels_b: Array, mask: Array) -> _Contingency:
    """Counts equal pairs of labels as runs of the sorted list."""
    length = labels_a.shape[0]
    last = jnp.iinfo(jnp.int32).max
    keys = jnp.where(mask, labels_a, last), jnp.where(mask, labels_b, last)
    a, b, members = lax.sort((*keys, mask.astype(jnp.int32)), num_keys=2)
    b_alone, b_members, place = lax.sort((b, members, jnp.arange(length, dtype=jnp.int32)), num_keys=1)
    row, cell, b_column = run_index(a), run_index(a, b), run_index(b_alone)
    column = jnp.zeros(length, jnp.int32).at[place].set(b_column)
    return _Contingency(
        num_clients=members.sum(dtype=jnp.int32),
        cells=jax.ops.segment_sum(members, cell, length),
        row=jnp.zeros(length, jnp.int32).at[cell].set(row),
        column=jnp.zeros(length, jnp.int32).at[cell].set(column),
        rows=jax.ops.segment_sum(members, row, length),
        columns=jax.ops.segment_sum(b_members, b_column, length),
        exact=length <= _EXACT_PAIRS_LIMIT,
    )


def _kinds(table: _Contingency) -> tuple[Array, Array, Array, Array]:
    """Pairs together in both, in a alone, in b alone, apart in both: f32 sums of what is not negative.

    As differences of pairs together in either they would lose the clients apart from M²/2 pairs.
    """
    cells, rows, columns = table.cells, table.rows[table.row], table.columns[table.column]
    others = cells - 1, rows - cells, columns - cells, (table.num_clients - rows) - (columns - cells)

    def pairs(others: Array) -> Array:
        if table.exact:
            return (cells * others).sum().astype(jnp.float32)
        return (cells.astype(jnp.float32) * others.astype(jnp.float32)).sum()

    both, in_a, in_b, neither = (0.5 * pairs(each) for each in others)
    return both, in_a, in_b, neither


def _all_pairs(num_clients: Array) -> Array:
    count = num_clients.astype(jnp.float32)
    return 0.5 * count * (count - 1.0)


def _unless_equal(score: Array, table: _Contingency) -> Array:
    """Exactly 1 where no cell divides a row or a column, and less elsewhere, whatever rounding does."""
    num_cells, num_rows, num_columns = ((size > 0).sum() for size in (table.cells, table.rows, table.columns))
    equal = (num_cells == num_rows) & (num_cells == num_columns)
    below_one = jnp.float32(1.0) - jnp.finfo(jnp.float32).epsneg
    score = jnp.where(equal, 1.0, jnp.minimum(score, below_one))
    return jnp.where(table.num_clients > 0, score, jnp.nan)
