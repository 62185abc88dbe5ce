"""Gradient-and-loss CFL: clients choose the cluster that moves as they would, at little loss (Lin et al., Alg. 1)."""

from __future__ import annotations

import functools
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from fedjax_cluster import cohorts, parallel, tree
from fedjax_cluster.algorithms.method import AveragingMethod, Defaults, FirstProgram
from fedjax_cluster.algorithms.planned import number_there
from fedjax_cluster.algorithms.round import (
    Trained,
    cluster_round,
    cluster_variables,
    first_state,
    nearest_by_loss,
    one_hot,
    personalize_by_label_or_loss,
    reassign,
    start_models,
    training_costs,
)
from fedjax_cluster.algorithms.starts import FROM_CLIENTS, START, START_LEAKS, Start, first_losses, models_of_clients
from fedjax_cluster.lifting import is_number
from fedjax_cluster.local import client_key
from fedjax_cluster.marked_clients import poses, shown_rows
from fedjax_cluster.options import COUNT, POSITIVE, UNIT, at_least, option
from fedjax_cluster.parallel import Client
from fedjax_cluster.privacy.gaussian import CHOSEN, gaussian
from fedjax_cluster.server import Weighting, params_part
from fedjax_cluster.types import (
    BatchGradient,
    ClientData,
    Cohort,
    Costs,
    LocalUpdate,
    Population,
    PyTree,
    RoundInfo,
    Selection,
    State,
    Variables,
)

Similarity = Literal["cosine", "euclidean"]
Sign = Literal["descent", "printed"]


class GradientLossClients(NamedTuple):
    """What the method keeps of its clients."""

    membership: Array  # f32[M, K], one-hot; zero for a client that has not taken part yet
    present: Array  # bool[M]
    pinned: Array  # bool[M, K], the cluster that a client may not leave; no entry for one that chooses
    up_to_date: Array  # bool[M], took part in the last round and so holds its models


class GradientLossServer(NamedTuple):
    """What the server keeps besides the models."""

    change: PyTree  # leaves [K, ...], wᵗ − wᵗ⁻¹; zeros before the first round and for a cluster that was empty


class gradient_loss(AveragingMethod):
    """Clustering by the direction of the gradient and by the loss.

    s_i = argmax_k λ·S_ik − (1 − λ)·L_ik with S_ik = cos(−∇L_ik, Δw_k); then w_k ← w_k + mean of Δw_i over the clients
    with s_i = k. L_ik is the loss of model k on the mini-batch of the client's first step, Δw_k the cluster's last
    change (Sec. II-B, Eq. 1–7).

    Returns:
      A method in which an empty cluster keeps its model.

    Raises:
      ValueError: an option out of its bound, no η for the Euclidean similarity; in `init`, a cohort of pinned clients
        only.

    >>> from fedjax_cluster import local, nn
    >>> gradient_loss(nn.linear(), clusters=2, local=local.sgd(0.1, batch_size=8, steps=1)).similarity_weight
    0.2
    """

    sends = CHOSEN
    clusters_by = "shown"

    defaults = Defaults(averaging="gradients", rounds=200, clients=80)

    local: LocalUpdate = option("one step, as in the paper, or several; the first gradient is the one that scores")
    clusters: int = option("K, number of clusters", bound=at_least(1))
    start: Start = option(START, default="clients")
    start_rounds: int = option(
        'rounds of each client whose model is a start; used with "clients"', default=20, bound=COUNT, used=FROM_CLIENTS
    )
    similarity_weight: float = option("λ; 0 without `pin` is IFCA's rule on the mini-batch", default=0.2, bound=UNIT)
    similarity: Similarity = option('"cosine", or "euclidean" for S_ik = −‖−η·∇L_ik − Δw_k‖', default="cosine")
    step_size: float | None = option(
        "η of the Euclidean similarity, rate of a client's step times the server's; None takes the local update's "
        "where the server averages plainly, which several steps go farther than: give their number times it",
        default=None,
        bound=POSITIVE,
        used=('similarity="euclidean"', lambda method: method.similarity == "euclidean"),
    )
    sign: Sign = option('"descent", or the paper\'s "printed" S_ik, which compares +∇L_ik with Δw_k', default="descent")
    reduction: Literal["mean", "sum"] = option(
        'L_ik as "mean" over the mini-batch, or as Eq. 1\'s "sum", for which λ depends on the batch size',
        default="mean",
    )
    first_round: Literal["loss", "random"] = option(
        'with no change to compare with, choose by "loss" alone (Algorithm 1), or at "random" (Sec. II-B)',
        default="loss",
    )
    pin: bool = option(
        "draws K clients at the start and keeps one in each cluster while it is there, so that none is empty; with "
        "partial participation they are in every cohort (Sec. II-C). Up to K of them are in the wrong cluster; "
        "without, a cluster that is empty once has no change to be like, and stays empty",
        default=False,
    )
    weighting: Weighting = option('"uniform" as in the paper, or "examples"', default="uniform")

    def check_present(self, state: State, present: np.ndarray, stayed: np.ndarray) -> None:
        """Raises a ValueError where cohorts of those who are present, bool[M], would be pinned clients only.

        Who has left and come back is pinned no more: of those who `stayed`, bool[M], some are.
        """
        if self.pin:
            pinned = np.asarray(parallel.fetched(state.clients.pinned))[: len(present)].any(axis=-1) & stayed
            _check_room(int(pinned.sum()), self.participation, int(present.sum()))

    def check(self) -> None:
        if self.similarity == "euclidean" and self.sign == "descent":
            _ = self.rate

    def unprotected(self, privacy: gaussian) -> str | None:
        return START_LEAKS if self.start == "clients" else None

    @property
    def rate(self) -> float:
        """η of the Euclidean similarity."""
        if self.step_size is not None:
            return self.step_size
        rate = getattr(self.local, "learning_rate", None)
        if self.server is not None or not is_number(rate):
            raise ValueError(
                "the Euclidean similarity compares −η·∇L with a cluster's change, and the optimisers do not tell η; "
                "give step_size, the clients' learning rate times the server's"
            )
        return rate

    def init(self, rng_key: Array, population: Population) -> tuple[State, RoundInfo]:
        models, present = start_models(self.model, rng_key, population, self.clusters)
        count = len(present)
        pinned = jnp.zeros((count, self.clusters), bool)
        if self.pin:
            _check_room(self.clusters, self.participation, number_there(present))
            pinned = _draw_pinned(jax.random.fold_in(rng_key, self.clusters), present, self.clusters)
        clients = GradientLossClients(jnp.zeros((count, self.clusters)), present, pinned, jnp.zeros(count, bool))
        costs = None
        if self.start == "clients":
            key = jax.random.fold_in(rng_key, self.clusters + 1)
            models, costs = models_of_clients(
                key, self.model, self.local, self.optimizer, models, population, present, self.start_rounds
            )
        server = GradientLossServer(jax.tree.map(jnp.zeros_like, models.params))
        return first_state(models, clients, self.optimizer, server, costs)

    def first_programs(self, rng_key: Array, state: State, population: Population) -> tuple[FirstProgram, ...]:
        return first_losses(self.model, state.clusters, population) if self.start == "clients" else ()

    @property
    def draws_ahead(self) -> bool:
        return not self.pin

    def select(self, rng_key: Array, state: State) -> Selection:
        first = state.clients.pinned.any(-1) if self.pin else None
        return cohorts.uniform(rng_key, state.clients.present, self.participation, first=first)

    def step(self, rng_key: Array, state: State, cohort: Cohort) -> tuple[State, RoundInfo]:
        moves = _unit_rows(state.server.change) if self.similarity == "cosine" else state.server.change

        def train(client: Client, pinned: Array) -> Trained:
            key = client_key(rng_key, client.index)
            slot, first = self.choose(key, state, moves, shown_rows(client.data), pinned)
            # The gradient that was shown is not of the rows that are trained on.
            first = first if poses(client.data) is None else None
            variables = cluster_variables(state.clusters, slot)
            result = self.local.run(key, self.model, variables, client.data, first=first, round=state.round)
            return Trained(slot, result)

        pinned = parallel.gather_rows(cohort, state.clients.pinned)
        done = cluster_round(
            train,
            state.clusters,
            cohort,
            pinned,
            optimizer=self.optimizer,
            weighting=self.weighting,
            aggregation=self.aggregation,
            private=self.private(rng_key, state.clusters),
        )
        change = jax.tree.map(jnp.subtract, done.clusters.params, state.clusters.params)
        membership, changed = reassign(cohort, state.clients.membership, done.slot, done.accepted)
        info = done.info(cohort.mask, changed, self.costs(state, cohort, done.reports.num_steps))
        clients = state.clients._replace(
            membership=membership,
            up_to_date=parallel.scatter_rows(cohort, jnp.zeros_like(state.clients.present), cohort.mask),
        )
        return State(done.clusters, clients, GradientLossServer(change), state.round + 1), info

    def choose(
        self, key: Array, state: State, moves: PyTree, data: ClientData, pinned: Array
    ) -> tuple[Array, BatchGradient | None]:
        """The client's cluster, and the gradient of its model on the mini-batch; none where λ = 0 asks for none."""
        models = Variables(state.clusters.params, state.clusters.stats)
        rows = jnp.minimum(data.num_examples, self.local.batch_rows(data.x.shape[0])).astype(jnp.float32)
        # Before the first round there is no change to compare with.
        weight = jnp.where(state.round > 0, self.similarity_weight, 0.0)
        ordered = pinned
        if self.first_round == "random":
            drawn = jax.random.randint(jax.random.fold_in(key, self.clusters), (), 0, self.clusters)
            anywhere = (state.round == 0) & ~pinned.any()
            ordered = pinned | (anywhere & (jnp.arange(self.clusters) == drawn))

        def evaluate(number: Array) -> tuple[Array, BatchGradient]:
            own, moved = jax.tree.map(lambda leaf: leaf[number], (models, moves))
            if self.similarity_weight == 0:
                found = BatchGradient(self.local.first_loss(key, self.model, own, data), None, None)
                likeness = jnp.zeros(())
            else:
                found = self.local.first_gradient(key, self.model, own, data)
                likeness = self.likeness(found.gradient, moved)
            # NOTE: with Eq. 1's sum, Eq. 5 would step on the sum's gradient; its rate is given for the mean's.
            loss = found.loss * rows if self.reduction == "sum" else found.loss
            score = weight * likeness - (1 - weight) * loss
            return jnp.where(ordered[number], jnp.inf, jnp.where(jnp.isfinite(score), score, -jnp.inf)), found

        def consider(number: Array, best: tuple[Array, Array, BatchGradient]):
            score, found = evaluate(number)
            # The first is taken whatever it is: a client without any finite score must not seem to stand still.
            better = (score > best[0]) | (number == 0)
            return jax.tree.map(lambda new, old: jnp.where(better, new, old), (score, number, found), best)

        shapes = jax.eval_shape(evaluate, jnp.zeros((), jnp.int32))
        score, found = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
        start = (score, jnp.zeros((), jnp.int32), found)
        _, slot, found = lax.fori_loop(0, self.clusters, consider, start)
        return slot, None if self.similarity_weight == 0 else found

    def likeness(self, gradient: PyTree, moved: PyTree) -> Array:
        """S_ik f32[] of a client's gradient with a cluster's last change: its direction for "cosine", else itself."""
        if self.similarity == "cosine":
            # NOTE: Eq. 3 prints cos(∇L, Δw). Δw is a step of descent, so that would reward the cluster whose clients go
            # the other way.
            towards = -1.0 if self.sign == "descent" else 1.0
            return towards * _inner(gradient, moved) / jnp.maximum(_norm(gradient), 1e-30)
        # NOTE: the paper prints −‖∇L − Δw‖, in which neither sign nor scale agree: the matching cluster scores worse.
        factor = 1.0 if self.sign == "printed" else -self.rate
        return -_norm(jax.tree.map(lambda g, m: factor * g - m, gradient, moved))

    def costs(self, state: State, cohort: Cohort, num_steps: Array) -> Costs:
        costs = training_costs(cohort.mask, num_steps)
        participants = costs.models_up
        if self.similarity_weight == 0:
            return costs._replace(
                models_down=self.clusters * participants, loss_evaluations=self.clusters * participants
            )
        # NOTE: the paper's clients take part in every round and hold the models of the last; one that does not is
        # sent the changes too.
        held = parallel.gather_rows(cohort, state.clients.up_to_date)
        stale = jnp.sum((cohort.mask & ~held & (state.round > 0)).astype(jnp.float32))
        return costs._replace(
            models_down=self.clusters * (participants + params_part(state.clusters) * stale),
            gradient_evaluations=(self.clusters - 1) * participants + costs.gradient_evaluations,
        )

    def personalize(self, rng_key: Array, state: State, data: ClientData, index: Array) -> tuple[Variables, Array]:
        return personalize_by_label_or_loss(self.model, state, data, index)

    def admit(self, rng_key: Array, state: State, data: ClientData, index: Array) -> State:
        slot = nearest_by_loss(self.model, state.clusters, data)
        free = jnp.zeros(self.clusters, bool)
        row = GradientLossClients(one_hot(slot, self.clusters), jnp.asarray(True), free, jnp.asarray(False))
        return state._replace(clients=tree.scatter(state.clients, index, row))


def _inner(a: PyTree, b: PyTree) -> Array:
    return sum((jnp.sum(x * y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)), jnp.zeros(()))


def _norm(values: PyTree) -> Array:
    return jnp.sqrt(_inner(values, values))


def _unit_rows(rows: PyTree) -> PyTree:
    """Leaves [K, ...] with each row scaled to norm 1 over all leaves; a row of zeros stays, and is like nothing."""
    norms = jax.vmap(_norm)(rows)
    return tree.scale_rows(rows, jnp.where(norms > 0, 1 / jnp.maximum(norms, 1e-30), 0.0))


def _check_room(pinned: int, participation: float, num_clients: int) -> None:
    size = cohorts.cohort_size(participation, num_clients)
    if size <= pinned and size < num_clients:
        raise ValueError(
            f"participation {participation} of {num_clients} clients is a cohort of {size}, but {pinned} pinned "
            "clients take part in every round; raise participation, or give pin=False"
        )


@functools.partial(jax.jit, static_argnames="clusters")
def _draw_pinned(rng_key: Array, present: Array, clusters: int) -> Array:
    """bool[M, K]: one random present client for each cluster."""
    score = jnp.where(present, jax.random.uniform(rng_key, present.shape), -1.0)
    _, chosen = lax.top_k(score, clusters)
    return jnp.zeros((present.shape[0], clusters), bool).at[chosen, jnp.arange(clusters)].set(True)
