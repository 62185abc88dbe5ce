"""How a server makes one change of its clients' changes, cluster by cluster, when some of them may be faulty.

Every rule works on all clusters at once, under fixed shapes: rows are clients, `slot` tells whose cluster they are in,
and rows of no cluster have the slot K. A method takes one as `aggregation`; without, it averages.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from fedjax_cluster.clustering.similarity import no_longer, root, two_norms, two_squares
from fedjax_cluster.neighbours import (
    distances,
    nearest_again_and_again,
    nearest_sums,
    num_neighbours,
    rank_within,
    same_cluster,
)
from fedjax_cluster.options import COUNT, POSITIVE, Bound, Options, at_least, option, shown
from fedjax_cluster.order_statistics import Ranks, mean_of_nearest, mean_of_ranks
from fedjax_cluster.types import ONE_DEVICE, ClientMapping, PyTree

BELOW_HALF = Bound(lambda value: 0 <= value < 0.5, "at least 0 and below 0.5; half or more would leave nothing")
MEASURED = "delta"  # what distances and norms are of, where clients send batch-norm statistics beside it


class Rows(NamedTuple):
    """What the clients of all clusters sent."""

    value: PyTree  # leaves [R, ...], of which those under "delta" are measured, or all
    slot: Array  # i32[R], K for a row that does not count
    weight: Array  # f32[R]
    mapping: ClientMapping = ONE_DEVICE  # devices that may divide the work


class Aggregation(Options):
    """A rule that makes one value of those that a cluster's clients sent; a subclass gives `combine`."""

    streams = False  # whether it is the mean of values that are changed one by one, of which none need be kept

    def combine(self, rows: Rows, num_slots: int) -> PyTree:
        """Leaves [K, ...]: the clusters' values; anything for a cluster without clients."""
        raise NotImplementedError

    def limit(self, value: PyTree) -> PyTree:
        """One client's value before it is averaged; of a rule that `streams`."""
        return value

    def check_clients(self, count: int) -> None:
        """Raises a ValueError where `count` clients in a round are too few for the rule."""

    def to_json(self) -> dict[str, Any]:
        return {"rule": type(self).__name__, **super().to_json()}


class trimmed_mean(Aggregation):
    """The mean of each coordinate without its largest and smallest values (Yin et al. 2018, Definition 2).

    Of a cluster's n clients in the round ⌈share·n⌉ are left out at either end, as far as one is left. Every client
    counts once, whatever its weight.

    NOTE: the paper has share·n whole. Rounded up, a cluster of four still loses one at either end with 0.2; rounded
    down, it would be the plain mean.

    >>> trimmed_mean(share=0.2).cuts(5).tolist()
    [0, 0, 0, 1, 1, 1]
    >>> trimmed_mean(share=0.5)
    Traceback (most recent call last):
    ...
    ValueError: share is 0.5; it must be a number, at least 0 and below 0.5; half or more would leave nothing
    """

    share: float = option("β, share of the clients left out at either end", default=0.2, bound=BELOW_HALF)

    def cuts(self, most: int) -> np.ndarray:
        """i32[most + 1]: how many of n clients are left out at either end."""
        count = np.arange(most + 1)
        # 0.14 · 50 is above 7 in floating point.
        wanted = np.ceil(np.round(self.share * count, 9)).astype(np.int32)
        return np.minimum(wanted, np.maximum(count - 1, 0) // 2).astype(np.int32)

    def combine(self, rows: Rows, num_slots: int) -> PyTree:
        count = sizes(rows.slot, num_slots)
        cut = jnp.asarray(self.cuts(len(rows.slot)))[count]
        return by_ranks(rows, Ranks(cut, count - cut))


class median(Aggregation):
    """The median of each coordinate (Yin et al. 2018, Definition 1); of an even number the mean of the middle two.

    Every client counts once, whatever its weight.

    >>> median()
    median()
    """

    def combine(self, rows: Rows, num_slots: int) -> PyTree:
        count = sizes(rows.slot, num_slots)
        middle = Ranks((count - 1) // 2, jnp.where(count > 0, count // 2 + 1, 0))
        return by_ranks(rows, middle, two_at_most=True)


class krum(Aggregation):
    """The update nearest to its neighbours (Blanchard et al. 2017, Sec. 3): s_i = Σ_{j→i} ‖v_i − v_j‖², least s_i.

    The sum is over the n − f − 2 nearest of the cluster's n clients in the round; weights do not count.

    NOTE: the paper asks for n ≥ 2f + 3, which the round's clients are checked for. Clusters come and go: in one with
    fewer, the nearest neighbour alone decides, without the paper's guarantee.

    >>> krum(byzantine=3).check_clients(8)
    Traceback (most recent call last):
    ...
    ValueError: krum with byzantine 3 needs 9 clients in a round, 2·3 + 3, but 8 take part; byzantine can be at most 2
    """

    byzantine: int = option("f, the most faulty clients in a cluster", default=1, bound=at_least(0))

    def check_clients(self, count: int) -> None:
        check_enough(self, 2, count)

    def kept(self, count: Array) -> Array:
        """i32[K]: how many of the best are averaged."""
        return jnp.ones_like(count)

    def combine(self, rows: Rows, num_slots: int) -> PyTree:
        count = sizes(rows.slot, num_slots)
        together = same_cluster(rows.slot, num_slots)
        near = num_neighbours(count, self.byzantine)[_place(rows.slot, num_slots)]
        score = nearest_sums(distances(_measured(rows.value), together, rows.mapping), together, near, rows.mapping)
        chosen = rank_within(score, together) < self.kept(count)[_place(rows.slot, num_slots)]
        return mean_of(rows, chosen & (rows.slot < num_slots), num_slots)


class multi_krum(krum):
    """The mean of the m updates of least score in `krum` (Blanchard et al. 2017, Sec. 4), n − f of n by default.

    >>> multi_krum(byzantine=2, selected=3).selected
    3
    """

    selected: int | None = option(
        "m, how many are averaged, as far as there are so many; None: n − f", default=None, bound=COUNT
    )

    def kept(self, count: Array) -> Array:
        if self.selected is not None:
            return jnp.full_like(count, self.selected)
        return jnp.maximum(count - self.byzantine, 1)


class bulyan(Aggregation):
    """Krum again and again, then a trimmed mean about the median (El Mhamdi et al. 2018, Sec. 4).

    θ = n − 2f clients are chosen, each by Krum among those that are left; each coordinate is the mean of its θ − 2f
    values nearest to its median, the lower of two in the middle. Weights do not count; the work grows with n³.

    NOTE: the paper asks for n ≥ 4f + 3, which the round's clients are checked for. In a cluster with fewer, θ and
    θ − 2f are at least 1.

    >>> bulyan(byzantine=1).check_clients(6)
    Traceback (most recent call last):
    ...
    ValueError: bulyan with byzantine 1 needs 7 clients in a round, 4·1 + 3, but 6 take part; byzantine can be at most 0
    """

    byzantine: int = option("f, the most faulty clients in a cluster", default=1, bound=at_least(0))

    def check_clients(self, count: int) -> None:
        check_enough(self, 4, count)

    def combine(self, rows: Rows, num_slots: int) -> PyTree:
        count = sizes(rows.slot, num_slots)
        wanted = jnp.where(count > 0, jnp.maximum(count - 2 * self.byzantine, 1), 0)
        together = same_cluster(rows.slot, num_slots)
        distance = distances(_measured(rows.value), together, rows.mapping)
        chosen = nearest_again_and_again(distance, rows.slot, wanted, count, self.byzantine, num_slots, rows.mapping)
        slot = jnp.where(chosen, rows.slot, num_slots)
        middle = (wanted - 1) // 2
        left = rows._replace(slot=slot)
        centre = by_ranks(left, Ranks(middle, jnp.where(wanted > 0, middle + 1, 0)), two_at_most=True)
        around = jnp.where(wanted > 0, jnp.maximum(wanted - 2 * self.byzantine, 1), 0)
        return _by_rows(
            rows.value, lambda leaf, middle: mean_of_nearest(leaf, middle, slot, around, rows.mapping), centre
        )


class geometric_median(Aggregation):
    """The point of least sum of weighted distances, by smoothed Weiszfeld steps (Pillutla et al. 2022, Algorithm 2).

    v ← Σ β_i v_i / Σ β_i with β_i = w_i / max(ν, ‖v − v_i‖), from the weighted mean of the v_i · min(1, m / ‖v_i‖), m
    the weighted median of the lengths ‖v_i‖. The w_i are the method's weights.

    NOTE: the start is ours. Steps from no change hardly leave it where some clients send none, from which the distance
    is 0; those from the plain mean do not come back from where one client may take it.

    NOTE: what clients send beside their change, batch-norm statistics, is averaged by the last β.

    >>> geometric_median(iterations=5).smoothing
    1e-06
    """

    iterations: int = option("steps of Weiszfeld's algorithm", default=10, bound=COUNT)
    smoothing: float = option("ν, distances below which are taken for it", default=1e-6, bound=POSITIVE)

    def combine(self, rows: Rows, num_slots: int) -> PyTree:
        counts = (rows.slot < num_slots)[:, None]
        place, leaves = _place(rows.slot, num_slots), [jnp.where(counts, leaf, 0) for leaf in _measured(rows.value)]
        weight = jnp.where(counts[:, 0], rows.weight, 0)
        members = jax.nn.one_hot(rows.slot, num_slots, axis=0, dtype=jnp.float32) * weight[None]

        def lengths(centres: list[Array] | None) -> Array:
            each = leaves if centres is None else [leaf - c[place] for leaf, c in zip(leaves, centres, strict=True)]
            return root(sum((jnp.sum(jnp.square(leaf), 1) for leaf in each), jnp.zeros(len(rows.slot), jnp.float32)))

        def step(_: Array, share: Array) -> Array:
            distance = lengths([jnp.matmul(share, leaf, precision="highest") for leaf in leaves])
            return _shares(members / jnp.maximum(distance, self.smoothing)[None])

        length = lengths(None)
        longest = _weighted_medians(length, members)[place]
        far = length > longest
        share = _shares(members) * jnp.where(far, longest / jnp.where(far, length, 1.0), 1.0)[None]
        share = lax.fori_loop(0, self.iterations, step, share)
        return _by_rows(rows.value, lambda leaf: jnp.matmul(share, jnp.where(counts, leaf, 0), precision="highest"))


class norm_clipping(Aggregation):
    """The weighted mean of changes of which none is longer than `norm`: v_i · min(1, norm / ‖v_i‖).

    What clients send beside their change, batch-norm statistics, is averaged as it is.

    >>> norm_clipping(norm=0)
    Traceback (most recent call last):
    ...
    ValueError: norm is 0; it must be a number, positive and finite
    """

    norm: float = option("the largest Euclidean norm of a change", bound=POSITIVE, kw_only=False)

    streams = True

    def limit(self, value: PyTree) -> PyTree:
        whole = not _has_delta(value)
        change = value if whole else value[MEASURED]
        norms = two_norms([two_squares(leaf) for leaf in jax.tree.leaves(change)])
        clipped = jax.tree.map(lambda leaf: no_longer(leaf, norms, self.norm), change)
        return clipped if whole else {**value, MEASURED: clipped}


RULES: dict[str, type[Aggregation]] = {
    rule.__name__: rule for rule in (trimmed_mean, median, krum, multi_krum, geometric_median, norm_clipping, bulyan)
}


def named(rule: str, **options: Any) -> Aggregation | None:
    """A rule by its name, None for the mean.

    Raises:
      ValueError: no such rule, an option that it does not have, or one that it needs and was not given.

    >>> named("trimmed-mean", share=0.1), named("mean")
    (trimmed_mean(share=0.1), None)
    """
    spelled = rule.replace("-", "_").lower() if isinstance(rule, str) else rule
    if spelled != "mean" and (not isinstance(spelled, str) or spelled not in RULES):
        known = ", ".join(["mean", *RULES]).replace("_", "-")
        raise ValueError(f"unknown aggregation {shown(rule)}; known: {known}")
    own = set() if spelled == "mean" else set(RULES[spelled].__dataclass_fields__)  # pyright: ignore
    for name in options.keys() - own:
        raise ValueError(f"aggregation {spelled.replace('_', '-')} has no {name}; give none, or another aggregation")
    if spelled == "mean":
        return None
    if spelled == "norm_clipping" and "norm" not in options:
        raise ValueError("aggregation norm-clipping needs the largest norm of a change; give norm_clipping(norm=1.0)")
    return RULES[spelled](**options)


# ---------------------------------------------------------------------------------------------- parts of the rules


def check_enough(rule: krum | bulyan, times: int, count: int) -> None:
    """Raises a ValueError where `count` clients are fewer than times·f + 3."""
    name, most = type(rule).__name__, max((count - 3) // times, 0)
    least = times * rule.byzantine + 3
    if count < least:
        advice = f"byzantine can be at most {most}" if count >= 3 else "take another rule"
        raise ValueError(
            f"{name} with byzantine {rule.byzantine} needs {least} clients in a round, {times}·{rule.byzantine} + 3, "
            f"but {count} take part; {advice}"
        )


def sizes(slot: Array, num_slots: int) -> Array:
    """i32[K]: the rows of each cluster."""
    return jnp.zeros(num_slots + 1, jnp.int32).at[slot].add(1)[:num_slots]


def by_ranks(rows: Rows, ranks: Ranks, *, two_at_most: bool = False) -> PyTree:
    """The mean of some ranks of each coordinate among its cluster's rows; 0 for a cluster with none."""
    return _by_rows(
        rows.value, lambda leaf: mean_of_ranks(leaf, rows.slot, ranks, rows.mapping, two_at_most=two_at_most)
    )


def _shares(weights: Array) -> Array:
    """f32[K, R] that add up to 1 in each cluster."""
    total = weights.sum(1, keepdims=True)
    return weights / jnp.where(total > 0.0, total, 1.0)


def _weighted_medians(values: Array, weights: Array) -> Array:
    """f32[K]: the least of the values f32[R] that, with the smaller ones, have half of a cluster's weight f32[K, R]."""
    order = jnp.argsort(values)
    below = jnp.cumsum(weights[:, order], 1)
    return values[order][jnp.argmax(2 * below >= below[:, -1:], 1)]


def mean_of(rows: Rows, chosen: Array, num_slots: int) -> PyTree:
    """The unweighted mean of the chosen rows, bool[R], of each cluster."""
    members = jax.nn.one_hot(rows.slot, num_slots, axis=0, dtype=jnp.float32) * chosen.astype(jnp.float32)[None]
    share = members / jnp.maximum(members.sum(1, keepdims=True), 1.0)
    # What is not chosen may be NaN, which 0 times it would still be.
    return _by_rows(
        rows.value, lambda leaf: jnp.matmul(share, jnp.where(chosen[:, None], leaf, 0), precision="highest")
    )


def _has_delta(value: PyTree) -> bool:
    return isinstance(value, dict) and MEASURED in value


def _measured(value: PyTree) -> list[Array]:
    """What distances are of, leaves [R, -1]."""
    leaves = jax.tree.leaves(value[MEASURED] if _has_delta(value) else value)
    return [leaf.reshape(len(leaf), -1).astype(jnp.float32) for leaf in leaves]


def _place(slot: Array, num_slots: int) -> Array:
    """The slots as an index: those of no cluster are the last."""
    return jnp.minimum(slot, num_slots - 1)


def _by_rows(value: PyTree, fn: Callable[..., Array], *others: PyTree | None) -> PyTree:
    """`fn` of each leaf as [R, -1], and of the same leaf of others as [K, -1]; its [K, -1] in the leaf's shape."""

    def of_leaf(leaf: Array, *more: Array) -> Array:
        flat = [each.reshape(len(each), -1).astype(jnp.float32) for each in (leaf, *more)]
        found = fn(*flat)
        return found.reshape(len(found), *leaf.shape[1:])

    return jax.tree.map(of_leaf, value, *(other for other in others if other is not None))
