"""Clipping and Gaussian noise: on the means of clusters, and on what a client shows to a clustering.

Neighbouring populations differ in all the data of one client. Each mechanism's noise is stated as a multiple z of its
sensitivity, the largest Euclidean distance between what two neighbours would have without noise.
"""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from fedjax_cluster import tree
from fedjax_cluster.clustering.similarity import HUGE, no_longer, two_norms, two_squares
from fedjax_cluster.options import INSIDE_UNIT, NOT_NEGATIVE, POSITIVE, Options, option
from fedjax_cluster.types import PyTree

Clipping = Literal["flat", "layers"]
Accountant = Literal["rdp", "pld"]
# What a method's clients send, which decides the sensitivity.
ONE: Literal["one"] = "one"  # a change of the only model
CHOSEN: Literal["chosen"] = "chosen"  # a change of the cluster that the client itself chooses
ALL: Literal["all"] = "all"  # a change of every cluster's model
SHOWN: Literal["shown"] = "shown"  # a change of the cluster that the server puts it in, by what it shows
Sends = Literal["one", "chosen", "all", "shown"]

STREAM = 0x6A755  # of a key, so that noise depends on nothing else that is drawn
SUMS, COUNTS, QUANTILES = range(3)  # of that stream
QUANTILE_SHARE = 0.05  # of 1/z², which the estimates of the quantile take


class gaussian(Options):
    """Clipped changes, and Gaussian noise on their sum: differential privacy of every client as a whole.

    Client i adds v_i · min(1, C/‖v_i‖) to its cluster's sum; every coordinate of the sum gets noise of standard
    deviation z·2C, since replacing a client moves all sums together by at most 2C; the sum is divided by the number of
    the cluster's clients in the round. Clients count alike, whatever a method's weighting.

    NOTE: where clients choose their clusters themselves the counts are secret too; they get noise of 2z, which costs
    nothing: a client that goes from one cluster to another moves the sums by √2·C alone.

    Raises:
      ValueError: an option of another type or out of its bound, no δ, or half of what clusterings need.

    >>> gaussian(clip=1.0, noise_multiplier=1.0, delta=1e-5).accountant
    'rdp'
    >>> gaussian(clip=1.0, noise_multiplier=1.0)
    Traceback (most recent call last):
    ...
    ValueError: noise_multiplier is 1.0, but no delta is given, without which noise has no epsilon; give delta, far \
below 1 in the number of clients, such as 1e-5

    References:
      McMahan et al. 2018; of the quantile Andrew et al. 2021, Algorithm 1.
    """

    clip: float = option(
        "C, the largest Euclidean norm of what a client adds to the sums; of the quantile where it starts",
        bound=POSITIVE,
    )
    noise_multiplier: float = option(
        "z, standard deviation of the noise over the sensitivity 2C; 0 is clipping alone, with an infinite ε",
        bound=NOT_NEGATIVE,
    )
    delta: float | None = option(
        "δ, at which the budget ε holds; needed without noise too", default=None, bound=INSIDE_UNIT
    )
    clipping: Clipping = option(
        '"flat" clips a change as a whole, "layers" each of its L layers to C/√L', default="flat"
    )
    quantile: float | None = option(
        "γ: C follows this quantile of the norms, in each cluster by itself, by noised counts of those below it, for "
        "which z is divided; None keeps C",
        default=None,
        bound=INSIDE_UNIT,
    )
    quantile_rate: float = option("η of C ← C·exp(−η(share below C − γ))", default=0.2, bound=POSITIVE)
    clustering_clip: float | None = option(
        "the largest norm of what a client shows to a clustering: a profile, an update, losses, bases; needed where "
        "the server clusters by it",
        default=None,
        bound=POSITIVE,
    )
    clustering_noise_multiplier: float | None = option(
        "standard deviation of the noise that a client adds to that itself, over its sensitivity, twice the clip",
        default=None,
        bound=NOT_NEGATIVE,
    )
    accountant: Accountant = option(
        'of dp-accounting: "rdp", or "pld", which is tighter and takes no cohorts of some clients', default="rdp"
    )

    def check(self) -> None:
        if self.delta is None:
            raise ValueError(
                f"noise_multiplier is {self.noise_multiplier}, but no delta is given, without which noise has no "
                "epsilon; give delta, far below 1 in the number of clients, such as 1e-5"
            )
        if (self.clustering_clip is None) != (self.clustering_noise_multiplier is None):
            given, other = "clustering_clip", "clustering_noise_multiplier"
            given, other = (given, other) if self.clustering_clip is not None else (other, given)
            raise ValueError(f"{given} is {getattr(self, given)}, but no {other} is given; give both, or none")

    @property
    def shows(self) -> bool:
        """Whether there is a mechanism for what a client shows to a clustering."""
        return self.clustering_clip is not None

    @property
    def sums_multiplier(self) -> float:
        """z of the sums, a little above that of all that a round releases where a quantile takes its share."""
        return self.noise_multiplier / math.sqrt(1 - (QUANTILE_SHARE if self.quantile is not None else 0.0))

    def start_clip(self, delta: PyTree) -> Array:
        """f32[L]: the largest norms of a change's layers, or f32[1] of it as a whole."""
        layers = len(set(self.layers(delta)))
        return jnp.full(layers, self.clip / math.sqrt(layers), jnp.float32)

    def layers(self, delta: PyTree) -> list[int]:
        """Which norm each leaf of a change counts in: kernel and bias of a layer in one."""
        paths = [path[:-1] for path, _ in jax.tree_util.tree_flatten_with_path(delta)[0]]
        order = {path: number for number, path in enumerate(dict.fromkeys(paths))}
        return [0 if self.clipping == "flat" else order[path] for path in paths]

    def clipped(self, delta: PyTree, clip: Array) -> tuple[PyTree, Array]:
        """One client's change no longer than `clip` f32[L], and its norms before, f32[L]."""
        # Of halves the length itself would be rounded, and beyond the clip.
        leaves, structure = jax.tree.flatten(jax.tree.map(lambda leaf: leaf.astype(jnp.float32), delta))
        cut, norms = _cut(leaves, self.layers(delta), clip)
        return jax.tree.unflatten(structure, cut), norms

    def shown(self, rng_key: Array, message: PyTree) -> PyTree:
        """What one client shows to a clustering: clipped as a whole, with noise on every number.

        Args:
          rng_key: the client's of the round.
          message: any leaves; NaN or infinity anywhere makes zeros of all before the noise, as who is left out for it
            would be told apart.
        """
        assert self.clustering_clip is not None
        assert self.clustering_noise_multiplier is not None
        leaves, structure = jax.tree.flatten(jax.tree.map(lambda leaf: leaf.astype(jnp.float32), message))
        finite = tree.all_finite(leaves)
        cut, _ = _cut(leaves, [0] * len(leaves), jnp.full(1, self.clustering_clip, jnp.float32))
        scale = self.clustering_noise_multiplier * 2.0 * self.clustering_clip
        key = jax.random.fold_in(rng_key, STREAM)
        noise = [jax.random.normal(jax.random.fold_in(key, n), leaf.shape, leaf.dtype) for n, leaf in enumerate(cut)]
        noised = [jnp.where(finite, leaf, 0.0) + scale * each for leaf, each in zip(cut, noise, strict=True)]
        return jax.tree.unflatten(structure, noised)


def _cut(leaves: list[Array], layers: list[int], clip: Array) -> tuple[list[Array], Array]:
    """Leaves whose layers' norms are at most `clip` f32[L], and those norms before, f32[L]."""
    # Each layer in its own units: beside a huge one, squares of all others would be lost, and the others not clipped.
    squares = [two_squares(leaf) for leaf in leaves]
    by_layer = [
        two_norms([own for own, layer in zip(squares, layers, strict=True) if layer == number])
        for number in range(len(clip))
    ]
    cut = [no_longer(leaf, by_layer[layer], clip[layer]) for leaf, layer in zip(leaves, layers, strict=True)]
    norms = jnp.stack([jnp.where(plain < jnp.inf, plain, scaled * HUGE) for plain, scaled in by_layer])
    return cut, norms


class Release(NamedTuple):
    """A round's means of the clusters, as differential privacy has them made."""

    privacy: gaussian
    sends: Sends
    key: Array  # the server's of the round
    clip: Array  # f32[K, L]

    def limit(self, slot: Array, delta: PyTree) -> dict[str, PyTree]:
        """What one client adds to its cluster's sum, or to all clusters' (`slot` i32[K], leaves [K, ...])."""
        # To all of them a client adds one long change; then C is the same everywhere.
        clip = self.clip[0] if slot.ndim else self.clip[slot]
        cut, norms = self.privacy.clipped(delta, clip)
        if self.privacy.quantile is None:
            return {"delta": cut}
        return {"delta": cut, "below": jnp.where(norms <= clip, 0.5, -0.5)}

    def means(self, total: dict[str, PyTree], count: Array, active: Array) -> tuple[PyTree, Array, Array | None]:
        """The noised means of sums of what `limit` gives.

        Args:
          total: leaves [K, ...].
          count: f32[K], clients of each cluster in the round, those that sent nothing finite among them.
          active: bool[K].

        Returns:
          (leaves [K, ...], number of clients f32[K], zero for a cluster that takes no step, the next C or None).
        """
        multiplier = self.privacy.sums_multiplier
        scale = 2.0 * multiplier * jnp.sqrt(jnp.sum(jnp.square(self.clip), 1))
        if self.sends == CHOSEN:
            count = count + 2.0 * multiplier * self.normal(COUNTS, 0, count.shape)
        clip = self.next_clip(total, count, active)
        count = jnp.where(active & (count >= 1.0), count, 0.0)
        share = 1.0 / jnp.maximum(count, 1.0)
        leaves, structure = jax.tree.flatten(total["delta"])
        noised = []
        for number, leaf in enumerate(leaves):
            rows = (-1, *[1] * (leaf.ndim - 1))
            noise = scale.reshape(rows) * self.normal(SUMS, number, leaf.shape)
            noised.append((leaf + noise) * share.reshape(rows))
        return jax.tree.unflatten(structure, noised), count, clip

    def next_clip(self, total: dict[str, PyTree], count: Array, active: Array) -> Array | None:
        """C ← C·exp(−η(b − γ)), where b is the noised share of norms below C; as it is where nobody can be.

        NOTE: the paper does not bound b − γ, which leaps where a cluster is small for the noise. It is bounded about 0,
        and less than four deviations of a noised count are taken for as many clients: so its mean keeps its sign. With
        b cut to [0, 1], divided by a noised count, or left out where that is below 1, C grew or shrank without end.
        """
        quantile = self.privacy.quantile
        if quantile is None:
            return None
        # Of one client L bits of ±½ change, each by 1.
        scale = self.privacy.noise_multiplier * math.sqrt(self.clip.shape[1] / QUANTILE_SHARE)
        most_noise = 4.0 * 2.0 * self.privacy.sums_multiplier  # of a count
        above = total["below"] + scale * self.normal(QUANTILES, 0, self.clip.shape) + (0.5 - quantile) * count[:, None]
        above = above / jnp.maximum(count, jnp.maximum(1.0, most_noise))[:, None]
        moved = self.clip * jnp.exp(-self.privacy.quantile_rate * jnp.clip(above, -1.0, 1.0))
        told = active & ((count > 0) | (self.sends == CHOSEN))  # a noised count tells nobody's absence
        return jnp.where(told[:, None], moved, self.clip)

    def normal(self, what: int, number: int, shape: tuple[int, ...]) -> Array:
        key = jax.random.fold_in(jax.random.fold_in(self.key, STREAM), what)
        return jax.random.normal(jax.random.fold_in(key, number), shape, jnp.float32)


class WithClip(NamedTuple):
    """A server's optimiser state beside the C that follows a quantile."""

    own: Any
    clip: Array  # f32[L]


def carrying_clip(optimizer: optax.GradientTransformation, privacy: gaussian | None) -> optax.GradientTransformation:
    """The optimiser whose state has the clip beside its own, where that follows a quantile."""
    return optimizer if privacy is None or privacy.quantile is None else _carrying(optimizer, privacy)


def _carrying(optimizer: optax.GradientTransformation, privacy: gaussian) -> optax.GradientTransformation:
    def init(params: PyTree) -> WithClip:
        return WithClip(optimizer.init(params), privacy.start_clip(params))

    def update(updates: PyTree, state: WithClip, params: PyTree | None = None) -> tuple[PyTree, WithClip]:
        updates, own = optimizer.update(updates, state.own, params)
        return updates, state._replace(own=own)

    return optax.GradientTransformation(init, update)  # pyright: ignore[reportArgumentType]


def release(privacy: gaussian, sends: Sends, rng_key: Array, clusters: Any) -> Release:
    """What makes the means of a round, of its server's key."""
    if privacy.quantile is not None:
        return Release(privacy, sends, rng_key, clusters.optimizer.clip)
    one = privacy.start_clip(clusters.params)
    return Release(privacy, sends, rng_key, jnp.broadcast_to(one, (len(clusters.active), *one.shape)))
