"""FedEM: every client mixes the predictions of K models that all clients train (Marfoq et al. 2021, Algorithm 1)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array

from fedjax_cluster import cohorts, parallel, tree
from fedjax_cluster.algorithms import round as averaging
from fedjax_cluster.local import client_key, example_losses
from fedjax_cluster.server import Weighting, client_weight, init_optimizer, update_clusters
from fedjax_cluster.types import (
    ClientData,
    ClusteredAlgorithm,
    Clusters,
    Cohort,
    Costs,
    LocalResult,
    LocalUpdate,
    Model,
    Population,
    RoundInfo,
    Selection,
    State,
    Variables,
)


def fedem(
    model: Model,
    *,
    clusters: int,
    local: LocalUpdate,
    server: optax.GradientTransformation | None = None,
    weighting: Weighting = "examples",
    participation: float = 1.0,
) -> ClusteredAlgorithm:
    """Federated expectation-maximisation for a mixture of K learners.

    q_nk ∝ π_k · exp(−ℓ(θ_k; x_n, y_n)); π = mean_n q_n; then every client takes its local steps on each θ_k with
    example n weighted by q_nk, and θ_k ← θ_k + mean of the clients' Δθ_k, weighted by their examples.

    Args:
      model: what is trained, K times.
      clusters: K, number of learners.
      local: what a client does with one learner.
      server: any optax transformation of minus the mean change; None is plain averaging.
      weighting: "examples" as in the paper, or "uniform".
      participation: share of the clients in a round, in (0, 1].

    Returns:
      A ClusteredAlgorithm whose `membership` f32[M, K] are the mixtures π, zero for a client not yet seen, and whose
      `personalize` gives the K models with π: predictions are mixed, not parameters. Where a single cluster is asked
      of a client, it is the learner of the largest π.

    Raises:
      ValueError: clusters below one, participation outside (0, 1].
    """
    if clusters < 1:
        raise ValueError(f"clusters is {clusters}; at least one learner is needed")
    cohorts.cohort_size(participation, 1)
    optimizer = optax.sgd(1.0) if server is None else server

    def init(rng_key: Array, population: Population) -> tuple[State, RoundInfo]:
        averaging.check_clusters(clusters, population)
        models = averaging.init_clusters(rng_key, model, population.info, clusters)
        present = averaging.present_clients(population)
        clients = averaging.HardClients(jnp.zeros((len(present), clusters)), present)
        state = State(models, clients, init_optimizer(optimizer, models), jnp.zeros((), jnp.int32))
        return state, averaging.initial_info(clusters)

    def select(rng_key: Array, state: State) -> Selection:
        return cohorts.uniform(rng_key, state.clients.present, participation)

    def step(rng_key: Array, state: State, cohort: Cohort) -> tuple[State, RoundInfo]:
        def client_round(client: parallel.Client, prior: Array) -> tuple[Array, LocalResult]:
            losses = learner_losses(model, state.clusters, client.data)
            responsibility, mixture = expectation(prior, losses, client.data.num_examples)
            key = client_key(rng_key, client.index)

            def train(learner: tuple[Variables, Array]) -> LocalResult:
                variables, weights = learner
                weighted, rows = weigh_examples(model, client.data, weights)
                return local.run(key, weighted, variables, rows)

            models = Variables(state.clusters.params, state.clusters.stats)
            return mixture, jax.lax.map(train, (models, responsibility))

        def contribute(output: tuple[Array, LocalResult]) -> parallel.Contribution:
            _, result = output
            weight = jax.vmap(lambda count: client_weight(weighting, count))(result.num_examples)
            return parallel.Contribution(jnp.arange(clusters), weight, {"delta": result.delta, "stats": result.stats})

        def collect(output: tuple[Array, LocalResult]) -> tuple[Array, averaging.Report]:
            mixture, result = output
            # The learners' losses are weighted by q, whose sum over the learners is 1.
            each = jax.vmap(averaging.report)(result)
            return mixture, averaging.Report(each.loss.sum(), each.num_steps.sum())

        old = parallel.gather_rows(cohort, state.clients.membership)
        mapped = parallel.for_each_client(
            client_round, cohort, old, num_slots=clusters, reduce=contribute, collect=collect
        )
        mixture, reports = mapped.collected
        models, optimizer_state = update_clusters(optimizer, state.server, state.clusters, mapped.reduced)
        weights = parallel.scatter_rows(cohort, state.clients.membership, mixture, mapped.accepted)

        slot = averaging.labels(mixture)
        participants = jnp.sum(cohort.mask.astype(jnp.float32))
        passes = jnp.sum(jnp.where(cohort.mask, full_passes(local, cohort.data), 0.0))
        info = averaging.round_info(
            slot,
            reports,
            cohort.mask,
            mapped.accepted,
            clusters,
            jnp.sum((mapped.accepted & (slot != averaging.labels(old))).astype(jnp.int32)),
            Costs(
                models_down=clusters * participants,
                models_up=clusters * participants,
                gradient_evaluations=jnp.sum(reports.num_steps.astype(jnp.float32)),
                loss_evaluations=clusters * passes,
            ),
        )
        clients = averaging.HardClients(weights, state.clients.present)
        return State(models, clients, optimizer_state, state.round + 1), info

    def estimate(state: State, client: ClientData, prior: Array) -> Array:
        losses = learner_losses(model, state.clusters, client)
        return expectation(prior, losses, client.num_examples)[1]

    def personalize(rng_key: Array, state: State, client: ClientData, index: Array) -> tuple[Variables, Array]:
        own = state.clients.membership[index]
        mixture = jax.lax.cond(own.sum() > 0, lambda: own, lambda: estimate(state, client, own))
        return Variables(state.clusters.params, state.clusters.stats), mixture

    def admit(rng_key: Array, state: State, client: ClientData, index: Array) -> State:
        row = averaging.HardClients(estimate(state, client, jnp.zeros(clusters)), jnp.asarray(True))
        return state._replace(clients=tree.scatter(state.clients, index, row))

    config: dict[str, Any] = averaging.describe(
        local, clusters=clusters, weighting=weighting, participation=participation
    )
    return ClusteredAlgorithm("fedem", config, model, init, select, step, personalize, admit)


def expectation(prior: Array, losses: Array, num_examples: Array) -> tuple[Array, Array]:
    """The E-step of one client: q_nk ∝ π_k · exp(−ℓ_kn), and its mean over the examples.

    Args:
      prior: f32[K], π; all zeros stand for the uniform mixture.
      losses: f32[K, N], of each learner on each row.
      num_examples: i32[], rows beyond it are padding.

    Returns:
      (responsibilities f32[K, N], zero on padding; mixture f32[K]).

    >>> losses = jnp.asarray([[0.0, 0.0, 9.0], [jnp.inf, 0.0, 0.0]])
    >>> responsibility, mixture = expectation(jnp.zeros(2), losses, jnp.asarray(2))
    >>> responsibility.tolist(), mixture.tolist()
    ([[1.0, 0.5, 0.0], [0.0, 0.5, 0.0]], [0.75, 0.25])
    """
    prior = jnp.where(prior.sum() > 0, prior, 1.0)
    valid = jnp.arange(losses.shape[1]) < num_examples
    responsibility = jax.nn.softmax(jnp.log(prior)[:, None] - losses, axis=0)
    responsibility = jnp.where(valid[None], responsibility, 0.0)
    return responsibility, responsibility.sum(1) / jnp.maximum(num_examples, 1).astype(jnp.float32)


def learner_losses(model: Model, clusters: Clusters, data: ClientData) -> Array:
    """f32[K, N]: the loss of each of K models on each row of one client."""
    return jax.lax.map(
        lambda variables: example_losses(model, variables, data), Variables(clusters.params, clusters.stats)
    )


def weigh_examples(model: Model, data: ClientData, weights: Array) -> tuple[Model, ClientData]:
    """A model whose loss on row n counts `weights[n]` times, and the data to train it on.

    Targets become row numbers, by which the loss finds the true target and its weight: so any local update can
    shuffle and cut weighted examples as it does others.

    Args:
      model: what is trained.
      data: one client: x [N, ...], y [N, ...].
      weights: f32[N].
    """

    def loss(outputs: Any, row: Array) -> Array:
        return weights[row] * model.loss(outputs, data.y[row])

    return model._replace(loss=loss), data._replace(y=jnp.arange(data.x.shape[0]))


def full_passes(local: LocalUpdate, data: ClientData) -> Array:
    """f32[C]: mini-batches in one pass over each client's examples."""
    size = local.config["batch_size"] or data.x.shape[1]
    return ((data.num_examples + size - 1) // size).astype(jnp.float32)
