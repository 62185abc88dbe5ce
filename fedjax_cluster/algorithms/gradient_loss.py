"""Gradient-and-loss CFL: clients choose the cluster that moves as they would, at little loss (Lin et al., Alg. 1)."""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax

from fedjax_cluster import cohorts, parallel, tree
from fedjax_cluster.algorithms import round as averaging
from fedjax_cluster.local import client_key, dataset_loss
from fedjax_cluster.parallel.loop import Client
from fedjax_cluster.server import Weighting, init_optimizer, update_clusters
from fedjax_cluster.types import (
    BatchGradient,
    ClientData,
    ClusteredAlgorithm,
    Cohort,
    Costs,
    LocalUpdate,
    Model,
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

    optimizer: PyTree  # leaves [K, ...]
    change: PyTree  # leaves [K, ...], wᵗ − wᵗ⁻¹; zeros before the first round and for a cluster that was empty


def gradient_loss(
    model: Model,
    *,
    clusters: int,
    local: LocalUpdate,
    server: optax.GradientTransformation | None = None,
    similarity_weight: float = 0.2,
    similarity: Similarity = "cosine",
    step_size: float | None = None,
    sign: Sign = "descent",
    reduction: Literal["mean", "sum"] = "mean",
    first_round: Literal["loss", "random"] = "loss",
    pin: bool = True,
    weighting: Weighting = "uniform",
    participation: float = 1.0,
) -> ClusteredAlgorithm:
    """Clustering by the direction of the gradient and by the loss.

    s_i = argmax_k λ·S_ik − (1 − λ)·L_ik with S_ik = cos(−∇L_ik, Δw_k); then w_k ← w_k + mean of Δw_i over the clients
    with s_i = k. L_ik is the loss of model k on the mini-batch of the client's first step, Δw_k the cluster's last
    change (Sec. II-B, Eq. 1–7).

    Args:
      model: what is trained.
      clusters: K.
      local: one step, as in the paper, or several; the first gradient is the one that scores.
      server: any optax transformation of minus the mean change; None is plain averaging.
      similarity_weight: λ in [0, 1]; 0 without `pin` is IFCA's rule on the mini-batch.
      similarity: "cosine", or "euclidean" for S_ik = −‖−η·∇L_ik − Δw_k‖.
      step_size: η of the Euclidean similarity, rate of a client's step times the server's; None takes the local
        update's where the server averages plainly.
      sign: "descent", or the paper's "printed" S_ik, which compares +∇L_ik with Δw_k.
      reduction: L_ik as "mean" over the mini-batch, or as Eq. 1's "sum", for which λ depends on the batch size.
      first_round: with no change to compare with, choose by "loss" alone (Algorithm 1), or at "random" (Sec. II-B).
      pin: draws K clients at the start and keeps one in each cluster for good, so that none is ever empty; with
        partial participation they are in every cohort (Sec. II-C). Up to K of them are in the wrong cluster; without,
        a cluster that is empty once has no change to be like, and stays empty.
      weighting: "uniform" as in the paper, or "examples".
      participation: share of the clients in a round, in (0, 1].

    Returns:
      A ClusteredAlgorithm; an empty cluster keeps its model.

    Raises:
      ValueError: clusters below one, λ outside [0, 1], an unknown option, no η for the Euclidean similarity, a local
        update that has no gradient, participation outside (0, 1]; in `init`, a cohort of pinned clients only.

    >>> from fedjax_cluster import local, nn
    >>> gradient_loss(nn.linear(), clusters=2, local=local.sgd(0.1, batch_size=8, steps=1)).config["similarity_weight"]
    0.2
    """
    if clusters < 1:
        raise ValueError(f"clusters is {clusters}; at least one cluster is needed")
    if not 0 <= similarity_weight <= 1:
        raise ValueError(f"similarity_weight is {similarity_weight}; λ must lie between 0 and 1")
    for name, value, known in (
        ("similarity", similarity, ("cosine", "euclidean")),
        ("sign", sign, ("descent", "printed")),
        ("reduction", reduction, ("mean", "sum")),
        ("first_round", first_round, ("loss", "random")),
    ):
        if value not in known:
            raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(known)}")
    if local.first_gradient is None:
        raise ValueError("the local update gives no gradient of its first mini-batch; use local.sgd")
    first_gradient = local.first_gradient
    if similarity == "euclidean" and sign == "descent":
        step_size = _step_size(step_size, local, server)
    cohorts.cohort_size(participation, 1)
    optimizer = optax.sgd(1.0) if server is None else server

    def init(rng_key: Array, population: Population) -> tuple[State, RoundInfo]:
        averaging.check_clusters(clusters, population)
        models = averaging.init_clusters(rng_key, model, population.info, clusters)
        present = averaging.present_clients(population)
        count = len(present)
        pinned = jnp.zeros((count, clusters), bool)
        if pin:
            _check_room(clusters, participation, int(present.sum()))
            pinned = _draw_pinned(jax.random.fold_in(rng_key, clusters), present, clusters)
        clients = GradientLossClients(jnp.zeros((count, clusters)), present, pinned, jnp.zeros(count, bool))
        own = GradientLossServer(init_optimizer(optimizer, models), jax.tree.map(jnp.zeros_like, models.params))
        return State(models, clients, own, jnp.zeros((), jnp.int32)), averaging.initial_info(clusters)

    def select(rng_key: Array, state: State) -> Selection:
        if pin:
            first = state.clients.pinned.any(-1)
            return cohorts.uniform(rng_key, state.clients.present, participation, first=first)
        return cohorts.uniform(rng_key, state.clients.present, participation)

    def step(rng_key: Array, state: State, cohort: Cohort) -> tuple[State, RoundInfo]:
        moves = _unit_rows(state.server.change) if similarity == "cosine" else state.server.change

        def client_round(client: Client, pinned: Array):
            key = client_key(rng_key, client.index)
            slot, first = choose(key, state, moves, client.data, pinned)
            variables = averaging.cluster_variables(state.clusters, slot)
            return slot, local.run(key, model, variables, client.data, first=first)

        mapped = parallel.for_each_client(
            client_round,
            cohort,
            parallel.gather_rows(cohort, state.clients.pinned),
            num_slots=clusters,
            reduce=lambda output: averaging.contribute(output[0], output[1], weighting),
            collect=lambda output: (output[0], averaging.report(output[1])),
        )
        slot, reports = mapped.collected
        models, optimizer_state = update_clusters(optimizer, state.server.optimizer, state.clusters, mapped.reduced)
        change = jax.tree.map(jnp.subtract, models.params, state.clusters.params)

        old = averaging.labels(parallel.gather_rows(cohort, state.clients.membership))
        info = averaging.round_info(
            slot,
            reports,
            cohort.mask,
            mapped.accepted,
            clusters,
            jnp.sum((cohort.mask & (slot != old)).astype(jnp.int32)),
            costs(state, cohort, reports.num_steps),
        )
        clients = state.clients._replace(
            weights=parallel.scatter_rows(cohort, state.clients.membership, averaging.one_hot(slot, clusters)),
            up_to_date=parallel.scatter_rows(cohort, jnp.zeros_like(state.clients.present), cohort.mask),
        )
        return State(models, clients, GradientLossServer(optimizer_state, change), state.round + 1), info

    def choose(
        key: Array, state: State, moves: PyTree, data: ClientData, pinned: Array
    ) -> tuple[Array, BatchGradient | None]:
        """The client's cluster, and the gradient of its model on the mini-batch; none where λ = 0 asks for none."""
        models = Variables(state.clusters.params, state.clusters.stats)
        rows = jnp.minimum(data.num_examples, local.config["batch_size"] or data.x.shape[0]).astype(jnp.float32)
        # Before the first round there is no change to compare with.
        weight = jnp.where(state.round > 0, similarity_weight, 0.0)
        ordered = pinned
        if first_round == "random":
            drawn = jax.random.randint(jax.random.fold_in(key, clusters), (), 0, clusters)
            anywhere = (state.round == 0) & ~pinned.any()
            ordered = pinned | (anywhere & (jnp.arange(clusters) == drawn))

        def evaluate(number: Array) -> tuple[Array, BatchGradient]:
            own, moved = jax.tree.map(lambda leaf: leaf[number], (models, moves))
            if similarity_weight == 0:
                found = BatchGradient(local.first_loss(key, model, own, data), None, None)
                likeness = jnp.zeros(())
            else:
                found = first_gradient(key, model, own, data)
                likeness = _similarity(found.gradient, moved, similarity, sign, step_size)
            # NOTE: with Eq. 1's sum, Eq. 5 would step on the sum's gradient; its rate is given for the mean's.
            loss = found.loss * rows if reduction == "sum" else found.loss
            score = weight * likeness - (1 - weight) * loss
            return jnp.where(ordered[number], jnp.inf, jnp.where(jnp.isfinite(score), score, -jnp.inf)), found

        def consider(number: Array, best: tuple[Array, Array, BatchGradient]):
            score, found = evaluate(number)
            # The first is taken whatever it is: a client without any finite score must not seem to stand still.
            better = (score > best[0]) | (number == 0)
            return jax.tree.map(lambda new, old: jnp.where(better, new, old), (score, number, found), best)

        blank = jax.tree.map(
            lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(evaluate, jnp.zeros((), jnp.int32))
        )
        start = (blank[0], jnp.zeros((), jnp.int32), blank[1])
        _, slot, found = lax.fori_loop(0, clusters, consider, start)
        return slot, None if similarity_weight == 0 else found

    def costs(state: State, cohort: Cohort, num_steps: Array) -> Costs:
        participants = jnp.sum(cohort.mask.astype(jnp.float32))
        steps = jnp.sum(num_steps.astype(jnp.float32))
        if similarity_weight == 0:
            return Costs(clusters * participants, participants, steps, clusters * participants)
        # NOTE: the paper's clients take part in every round and hold the models of the last; one that does not is
        # sent the changes too.
        held = parallel.gather_rows(cohort, state.clients.up_to_date)
        stale = jnp.sum((cohort.mask & ~held & (state.round > 0)).astype(jnp.float32))
        return Costs(
            models_down=clusters * (participants + stale),
            models_up=participants,
            gradient_evaluations=(clusters - 1) * participants + steps,
        )

    def personalize(rng_key: Array, state: State, client: ClientData, index: Array) -> tuple[Variables, Array]:
        return averaging.personalize_by_label_or_loss(model, state, client, index)

    def admit(rng_key: Array, state: State, client: ClientData, index: Array) -> State:
        slot, _ = averaging.least_loss_cluster(state.clusters, lambda v: dataset_loss(model, v, client))
        free = jnp.zeros(clusters, bool)
        row = GradientLossClients(averaging.one_hot(slot, clusters), jnp.asarray(True), free, jnp.asarray(False))
        return state._replace(clients=tree.scatter(state.clients, index, row))

    config: dict[str, Any] = averaging.describe(
        local,
        clusters=clusters,
        similarity_weight=similarity_weight,
        similarity=similarity,
        step_size=step_size,
        sign=sign,
        reduction=reduction,
        first_round=first_round,
        pin=pin,
        weighting=weighting,
        participation=participation,
    )
    return ClusteredAlgorithm("gradient_loss", config, model, init, select, step, personalize, admit)


# ------------------------------------------------------------------------------------------------ parts


def _similarity(gradient: PyTree, moved: PyTree, similarity: Similarity, sign: Sign, step_size: float | None) -> Array:
    """S_ik f32[] of a client's gradient with a cluster's last change: its direction for "cosine", else itself."""
    if similarity == "cosine":
        # NOTE: Eq. 3 prints cos(∇L, Δw). Δw is a step of descent, so that would reward the cluster whose clients go the
        # other way.
        towards = -1.0 if sign == "descent" else 1.0
        return towards * _inner(gradient, moved) / jnp.maximum(_norm(gradient), 1e-30)
    # NOTE: the paper prints −‖∇L − Δw‖, in which neither sign nor scale agree: the matching cluster scores worse.
    factor = 1.0 if sign == "printed" else -float(step_size or 0.0)
    return -_norm(jax.tree.map(lambda g, m: factor * g - m, gradient, moved))


def _inner(a: PyTree, b: PyTree) -> Array:
    return sum((jnp.sum(x * y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)), jnp.zeros(()))


def _norm(values: PyTree) -> Array:
    return jnp.sqrt(_inner(values, values))


def _unit_rows(rows: PyTree) -> PyTree:
    """Leaves [K, ...] with each row scaled to norm 1 over all leaves; a row of zeros stays, and is like nothing."""
    norms = jax.vmap(_norm)(rows)
    return tree.scale_rows(rows, jnp.where(norms > 0, 1 / jnp.maximum(norms, 1e-30), 0.0))


def _step_size(given: float | None, local: LocalUpdate, server: optax.GradientTransformation | None) -> float:
    if given is not None:
        if not (given > 0 and math.isfinite(given)):
            raise ValueError(f"step_size is {given}; it must be positive and finite")
        return given
    rate = local.config["learning_rate"]
    if server is not None or not isinstance(rate, float):
        raise ValueError(
            "the Euclidean similarity compares −η·∇L with a cluster's change, and the optimisers do not tell η; "
            "give step_size, the clients' learning rate times the server's"
        )
    return rate


def _check_room(clusters: int, participation: float, num_clients: int) -> None:
    size = cohorts.cohort_size(participation, num_clients)
    if size <= clusters and size < num_clients:
        raise ValueError(
            f"participation {participation} of {num_clients} clients is a cohort of {size}, but {clusters} pinned "
            "clients take part in every round; raise participation, or give pin=False"
        )


def _draw_pinned(rng_key: Array, present: Array, clusters: int) -> Array:
    """bool[M, K]: one random present client for each cluster."""
    score = jnp.where(present, jax.random.uniform(rng_key, present.shape), -1.0)
    _, chosen = lax.top_k(score, clusters)
    return jnp.zeros((present.shape[0], clusters), bool).at[chosen, jnp.arange(clusters)].set(True)
