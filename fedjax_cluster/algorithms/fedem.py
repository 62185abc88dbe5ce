"""FedEM: every client mixes the predictions of K models that all clients train (Marfoq et al. 2021, Algorithm 1)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from fedjax_cluster import parallel, tree
from fedjax_cluster.algorithms.method import AveragingMethod, Defaults
from fedjax_cluster.algorithms.round import (
    HardClients,
    Report,
    clients_info,
    cluster_variables,
    count_changed,
    first_state,
    labels,
    report,
    start_models,
)
from fedjax_cluster.inference import example_losses
from fedjax_cluster.local import client_key, num_batches
from fedjax_cluster.options import at_least, option
from fedjax_cluster.parallel import Client, Contribution
from fedjax_cluster.privacy.gaussian import ALL
from fedjax_cluster.server import Weighting, aggregate_clients, client_weight, step_clusters
from fedjax_cluster.types import (
    ClientData,
    Clusters,
    Cohort,
    Costs,
    LocalUpdate,
    Model,
    Population,
    RoundInfo,
    State,
    Variables,
)


class fedem(AveragingMethod):
    """Federated expectation-maximisation for a mixture of K learners.

    q_nk ∝ π_k · exp(−ℓ(θ_k; x_n, y_n)); π = mean_n q_n; then every client takes its local steps on each θ_k with
    example n weighted by q_nk, and θ_k ← θ_k + mean of the clients' Δθ_k, weighted by their examples.

    Returns:
      A method whose `membership` f32[M, K] are the mixtures π, zero for a client not yet seen, and whose `personalize`
      gives the K models with π: predictions are mixed, not parameters. Where a single cluster is asked of a client, it
      is the learner of the largest π.
    """

    sends = ALL

    # A learner has a share of every client, about 1/K at first, and moves by as much less.
    defaults = Defaults(learning_rate=0.4)

    local: LocalUpdate = option("what a client does with one learner")
    clusters: int = option("K, number of learners", bound=at_least(1))
    weighting: Weighting = option('"examples" as in the paper, or "uniform"', default="examples")

    def init(self, rng_key: Array, population: Population) -> tuple[State, RoundInfo]:
        models, present = start_models(self.model, rng_key, population, self.clusters)
        clients = HardClients(jnp.zeros((len(present), self.clusters)), present)
        return first_state(models, clients, self.optimizer)

    def step(self, rng_key: Array, state: State, cohort: Cohort) -> tuple[State, RoundInfo]:
        def mix(client: Client, prior: Array) -> tuple[Array, Array]:
            losses = learner_losses(self.model, state.clusters, client.data)
            return expectation(prior, losses, client.data.num_examples)

        def train(client: Client, output: tuple[Array, Array], learner: Array) -> tuple[Contribution, Report]:
            responsibility, _ = output
            weighted, rows = weigh_examples(self.model, client.data, responsibility[learner])
            key, start = client_key(rng_key, client.index), cluster_variables(state.clusters, learner)
            result = self.local.run(key, weighted, start, rows, round=state.round)
            weight = client_weight(self.weighting, result.num_examples)
            return Contribution(learner, weight, {"delta": result.delta, "stats": result.stats}), report(result)

        def collect(output: tuple[Array, Array], each: Report) -> tuple[Array, Report]:
            _, mixture = output
            # The learners' losses are weighted by q, whose sum over the learners is 1.
            return mixture, Report(each.loss.sum(), each.num_steps.sum(), each.size.sum())

        old = parallel.gather_rows(cohort, state.clients.membership)
        sent, mapped = aggregate_clients(
            mix,
            cohort,
            old,
            num_slots=self.clusters,
            contribute=train,
            collect=collect,
            parts=self.clusters,
            aggregation=self.aggregation,
            private=self.private(rng_key, state.clusters),
        )
        mixture, reports = mapped.collected
        models, refused = step_clusters(self.optimizer, state.clusters, sent)
        accepted = mapped.accepted & ~refused.any()
        membership = parallel.scatter_rows(cohort, state.clients.membership, mixture, accepted)
        slot = labels(mixture)
        info = clients_info(
            slot,
            reports,
            cohort.mask,
            accepted,
            self.clusters,
            count_changed(cohort, labels(old), slot, accepted),
            self.costs(cohort, reports),
        )
        clients = state.clients._replace(membership=membership)
        return State(models, clients, state.server, state.round + 1), info

    def costs(self, cohort: Cohort, reports: Report) -> Costs:
        """All learners to and from each participant, and a pass over its examples with each."""
        participants = jnp.sum(cohort.mask.astype(jnp.float32))
        passes = jnp.sum(jnp.where(cohort.mask, num_batches(self.local, cohort.data), 0.0))
        return Costs(
            models_down=self.clusters * participants,
            models_up=self.clusters * participants,
            gradient_evaluations=jnp.sum(reports.num_steps.astype(jnp.float32)),
            loss_evaluations=self.clusters * passes,
        )

    def estimate(self, state: State, data: ClientData, prior: Array) -> Array:
        """A client's mixture π f32[K]; zeros where its losses give none."""
        losses = learner_losses(self.model, state.clusters, data)
        mixture = expectation(prior, losses, data.num_examples)[1]
        return jnp.where(jnp.isfinite(mixture).all(), mixture, 0.0)

    def personalize(self, rng_key: Array, state: State, data: ClientData, index: Array) -> tuple[Variables, Array]:
        known = state.clients.membership[index]
        mixture = parallel.unless(known.sum() > 0, known, lambda: self.estimate(state, data, known))
        return Variables(state.clusters.params, state.clusters.stats), mixture

    def admit(self, rng_key: Array, state: State, data: ClientData, index: Array) -> State:
        row = HardClients(self.estimate(state, data, jnp.zeros(self.clusters)), jnp.asarray(True))
        return state._replace(clients=tree.scatter(state.clients, index, row))


def expectation(prior: Array, losses: Array, num_examples: Array) -> tuple[Array, Array]:
    """The E-step of one client: q_nk ∝ π_k · exp(−ℓ_kn), and its mean over the examples.

    From π f32[K], all zeros for the uniform mixture, and the learners' losses f32[K, N] on each row: responsibilities
    f32[K, N], zero on padding, and the mixture f32[K].

    >>> losses = jnp.asarray([[0.0, 0.0, 9.0], [jnp.inf, 0.0, 0.0]])
    >>> responsibility, mixture = expectation(jnp.zeros(2), losses, jnp.asarray(2))
    >>> responsibility.tolist(), mixture.tolist()
    ([[1.0, 0.5, 0.0], [0.0, 0.5, 0.0]], [0.75, 0.25])
    """
    prior = jnp.where(prior.sum() > 0, prior, 1.0)
    valid = jnp.arange(losses.shape[1]) < num_examples
    # A share that is 0 after rounding may grow again.
    prior = jnp.maximum(prior, jnp.finfo(prior.dtype).tiny)
    responsibility = jax.nn.softmax(jnp.log(prior)[:, None] - losses, axis=0)
    responsibility = jnp.where(valid[None], responsibility, 0.0)
    return responsibility, responsibility.sum(1) / jnp.maximum(num_examples, 1).astype(jnp.float32)


def learner_losses(model: Model, clusters: Clusters, data: ClientData) -> Array:
    """f32[K, N]: the loss of each of K models on each row of one client."""
    return jax.lax.map(
        lambda variables: example_losses(model, variables, data), Variables(clusters.params, clusters.stats)
    )


def weigh_examples(model: Model, data: ClientData, weights: Array) -> tuple[Model, ClientData]:
    """A model whose loss on row n counts `weights[n]` times, f32[N], and the data of one client to train it on.

    Targets become row numbers, by which the loss finds the true target and its weight: so any local update can shuffle
    and cut weighted examples as it does others.
    """

    def loss(outputs: Any, row: Array) -> Array:
        return weights[row] * model.loss(outputs, data.y[row])

    return model._replace(loss=loss), data._replace(y=jnp.arange(data.x.shape[0]))
