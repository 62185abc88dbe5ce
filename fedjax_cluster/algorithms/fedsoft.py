"""FedSoft: every client belongs to all clusters, by shares of its data (Ruan & Joe-Wong 2022, Algorithm 1)."""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from fedjax_cluster import cohorts, parallel, tree
from fedjax_cluster.aggregation import Aggregation
from fedjax_cluster.algorithms.fedem import learner_losses
from fedjax_cluster.algorithms.method import AGGREGATION, Method
from fedjax_cluster.algorithms.round import (
    Report,
    clients_info,
    cluster_variables,
    cohort_labels,
    count_changed,
    first_state,
    labels,
    one_hot,
    report,
    start_models,
    training_costs,
)
from fedjax_cluster.local import client_key, num_batches, server_key, with_gradient_term
from fedjax_cluster.marked_clients import is_silent, shown_rows
from fedjax_cluster.options import INSIDE_UNIT, NOT_NEGATIVE, SHARE, at_least, option
from fedjax_cluster.parallel import Client, Contribution
from fedjax_cluster.server import aggregate_clients
from fedjax_cluster.types import (
    ClientData,
    Clusters,
    Cohort,
    LocalUpdate,
    Population,
    PyTree,
    RoundInfo,
    Selection,
    State,
    Variables,
)


class SoftClients(NamedTuple):
    """What FedSoft keeps of its clients."""

    membership: Array  # f32[M, K], shares of the examples on which centre k is best; zero before an estimate
    present: Array  # bool[M]
    num_examples: Array  # i32[M]
    trained: Array  # bool[M], whether the client's own model has been trained
    own: Variables  # leaves [M, ...], the clients' own models, which never leave them but in a mean


PULLED = "pulled towards several models"


class fedsoft(Method):
    """Soft clustering with proximal local updates.

    Every `every` rounds: u_ik = max(share of client i's examples with k = argmin_s ℓ(c_s; x), ε). Each round, per
    cluster k, clients are drawn with probability ∝ u_ik·n_i; a drawn client moves its model w_i towards
    argmin_w f_i(w) + λ/2 Σ_k u_ik ‖w − c_k‖²; c_k ← mean of w_i over the draws of cluster k.

    Returns:
      A method whose `membership` f32[M, K] are the shares, and whose `personalize` gives the client's model, or the
      centre of its largest share as long as it was never drawn.
    """

    clusters_by = "shown"
    not_private = "draws clients by shares of their data, which is no sample, and no sensitivity of it is settled"

    local: LocalUpdate = option("the steps that a client takes on its proximal problem")
    clusters: int = option("K, number of clusters", bound=at_least(1))
    every: int = option(
        "τ, rounds between two estimates of the importance; all clients take part in an estimate",
        default=2,
        bound=at_least(1),
    )
    proximal: float = option(
        "λ, weight of the pull of a client's model towards those of all clusters", default=0.1, bound=NOT_NEGATIVE
    )
    smallest_importance: float = option(
        "ε, the least weight of a cluster in a client's problem, so that none is lost for good",
        default=1e-4,
        bound=INSIDE_UNIT,
    )
    participation: float = option(
        "draws per round as a share of the clients, divided evenly among the clusters: ⌈participation · M / K⌉ "
        "for each",
        default=1.0,
        bound=SHARE,
    )
    aggregation: Aggregation | None = option(
        f"{AGGREGATION}. Of changes from the centre; other rules count a client once for each cluster that draws it",
        default=None,
    )

    def check(self) -> None:
        # Refused here rather than in the first round.
        _ = with_gradient_term(self.local, PULLED, lambda params: params)

    def importance(self, shares: Array) -> Array:
        """u_ik of shares [..., K]."""
        return jnp.maximum(shares, self.smallest_importance)

    def init(self, rng_key: Array, population: Population) -> tuple[State, RoundInfo]:
        models, present = start_models(self.model, rng_key, population, self.clusters)
        count = len(present)
        # NOTE: the paper does not say where the clients' models start. Means of models that started apart are no
        # models, so all start from one, the first centre's.
        own = tree.broadcast(cluster_variables(models, jnp.asarray(0)), count)
        num_examples = jnp.asarray(parallel.fetched(population.data.num_examples), jnp.int32)
        shares = jnp.zeros((count, self.clusters))
        return first_state(models, SoftClients(shares, present, num_examples, jnp.zeros(count, bool), own))

    def draws(self, rng_key: Array, clients: SoftClients) -> Array:
        """How often each cluster draws each client, f32[M, K]."""
        odds = self.importance(clients.membership) * clients.num_examples.astype(jnp.float32)[:, None]
        odds = jnp.where(clients.present[:, None], odds, 0.0)
        share = self.participation / self.clusters
        most = cohorts.cohort_size(share, len(clients.present))
        return draw_clients(rng_key, odds, most, cohorts.wanted_clients(share, clients.present))

    def clients_in_round(self, present: int) -> int:
        return math.ceil(self.participation * present / self.clusters - 1e-9)

    def estimating(self, state: State) -> Array:
        """bool[]: whether the shares are estimated anew in the coming round."""
        return state.round % self.every == 0

    def select(self, rng_key: Array, state: State) -> Selection:
        drawn = self.draws(rng_key, state.clients)
        # In a round with an estimate everybody takes part in it; who trains is then drawn by the new shares.
        mask = jnp.where(self.estimating(state), state.clients.present, drawn.sum(1) > 0)
        return cohorts.in_place(mask)._replace(weights=drawn)

    def step(self, rng_key: Array, state: State, cohort: Cohort) -> tuple[State, RoundInfo]:
        due = self.estimating(state)
        old = cohort_labels(state, cohort)
        shares, rejected = parallel.run_if(
            due,
            lambda carry: self.estimate(rng_key, state.clusters, carry[0], cohort),
            (state.clients.membership, jnp.zeros_like(cohort.mask)),
            cohort.mapping,
        )
        clients = state.clients._replace(membership=shares)
        assert cohort.weights is not None  # from `select`
        # Who told nothing is not drawn by what it told once.
        answered = parallel.scatter_rows(cohort, clients.num_examples, jnp.zeros_like(old), rejected)
        redrawn = self.draws(server_key(rng_key), clients._replace(num_examples=answered))
        redrawn = parallel.gather_rows(cohort, redrawn)
        drawn = jnp.where(rejected[:, None], 0.0, jnp.where(due, redrawn, cohort.weights))
        trained, info = self.train(rng_key, state._replace(clients=clients), cohort, drawn)
        new = labels(parallel.gather_rows(cohort, shares))
        estimated = jnp.where(due, jnp.sum(cohort.mask.astype(jnp.float32)), 0.0)
        passes = jnp.sum(jnp.where(cohort.mask & due, num_batches(self.local, cohort.data), 0.0))
        costs = info.costs._replace(
            # Who takes part in the estimate holds the centres already.
            models_down=self.clusters * jnp.where(due, estimated, info.costs.models_down),
            loss_evaluations=self.clusters * passes,
        )
        num_rejected = info.num_rejected + jnp.sum(rejected.astype(jnp.int32))
        changed = count_changed(cohort, old, new)
        return trained, info._replace(num_changed=changed, num_rejected=num_rejected, costs=costs)

    def estimate(self, rng_key: Array, centres: Clusters, shares: Array, cohort: Cohort) -> tuple[Array, Array]:
        """The shares f32[M, K] with those of the cohort anew, and who was rejected, bool[C]."""

        def told(client: Client) -> Array:
            shares = self.shares(centres, client.data)
            silent = is_silent(self.local, client_key(rng_key, client.index), client.data)
            return shares if silent is None else jnp.where(silent, jnp.nan, shares)

        mapped = parallel.for_each_client(told, cohort, collect=lambda shares: shares)
        shares = parallel.scatter_rows(cohort, shares, mapped.collected, mapped.accepted)
        return shares, cohort.mask & ~mapped.accepted

    def shares(self, centres: Clusters, data: ClientData) -> Array:
        """The shares f32[K] that one client tells."""
        shown = shown_rows(data)
        return best_shares(learner_losses(self.model, centres, shown), shown.num_examples)

    def train(self, rng_key: Array, state: State, cohort: Cohort, drawn: Array) -> tuple[State, RoundInfo]:
        """The drawn clients move their models; each centre becomes the mean of its draws."""
        mask = cohort.mask & (drawn.sum(1) > 0)
        cohort = dataclasses.replace(cohort, mask=mask, weights=drawn)
        own, shares = parallel.gather_rows(cohort, (state.clients.own, state.clients.membership))

        def train(client: Client, own: Variables, shares: Array) -> tuple[Array, Variables, Report]:
            assert client.weights is not None
            pull = self.importance(shares)
            centre = jax.tree.map(
                lambda leaf: jnp.tensordot((pull / pull.sum()).astype(leaf.dtype), leaf, 1, precision="highest"),
                state.clusters.params,
            )
            pulled = pulled_towards(self.local, centre, self.proximal * pull.sum())
            key = client_key(rng_key, client.index)
            result = pulled.run(key, self.model, own, client.data, round=state.round)
            moved = Variables(jax.tree.map(jnp.add, own.params, result.delta), result.stats)
            told = report(result)
            # Refused where its square is not finite, too, as sums are.
            squares = sum((jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(moved)), jnp.zeros(()))
            told = told._replace(size=jnp.where(jnp.isfinite(squares), told.size, jnp.inf))
            return client.weights, tree.where(tree.all_finite(told), moved, own), told

        def contribute(output: tuple[Array, Variables, Report]) -> Contribution:
            moved = tree.broadcast(output[1], self.clusters)
            if self.aggregation is None:
                return Contribution(jnp.arange(self.clusters), output[0], moved)
            # Rules measure how far models are from the centre, not from zero.
            delta = jax.tree.map(jnp.subtract, moved.params, state.clusters.params)
            return Contribution(jnp.arange(self.clusters), output[0], {"delta": delta, "stats": moved.stats})

        sent, mapped = aggregate_clients(
            train,
            cohort,
            shares,
            num_slots=self.clusters,
            contribute=contribute,
            collect=lambda output: output[2],
            aggregation=self.aggregation,
            own=own,
            renew=lambda output: output[1],
        )
        reports: Report = mapped.collected
        mean = sent.value
        if self.aggregation is not None:
            mean = Variables(jax.tree.map(jnp.add, state.clusters.params, mean["delta"]), mean["stats"])
        mean = tree.of_types(mean, Variables(state.clusters.params, state.clusters.stats))
        drawn_for = sent.weight > 0
        centres = state.clusters._replace(
            params=tree.where(drawn_for, mean.params, state.clusters.params),
            stats=tree.where(drawn_for, mean.stats, state.clusters.stats),
        )
        kept = state.clients
        clients = kept._replace(
            own=parallel.put_back(cohort, kept.own, mapped.own),
            trained=parallel.scatter_rows(cohort, kept.trained, jnp.ones_like(mask), mapped.accepted),
        )
        costs = training_costs(mask, reports.num_steps)
        info = clients_info(labels(shares), reports, mask, mapped.accepted, self.clusters, 0, costs)
        return State(centres, clients, state.server, state.round + 1), info

    def personalize(self, rng_key: Array, state: State, data: ClientData, index: Array) -> tuple[Variables, Array]:
        slot = jnp.maximum(labels(state.clients.membership[index]), 0)
        centre = cluster_variables(state.clusters, slot)
        own = jax.tree.map(lambda leaf: leaf[index], state.clients.own)
        trained = state.clients.trained[index]
        chosen = jax.tree.map(lambda mine, theirs: jnp.where(trained, mine, theirs), own, centre)
        return tree.broadcast(chosen, 1), jnp.ones(1)

    def admit(self, rng_key: Array, state: State, data: ClientData, index: Array) -> State:
        shares = self.shares(state.clusters, data)
        # One whose losses are not finite would take all draws.
        shares = jnp.where(jnp.isfinite(shares).all(), shares, 0.0)
        centre = cluster_variables(state.clusters, jnp.argmax(shares))
        # Who was there before goes on with its model.
        trained = state.clients.trained[index]
        own = jax.tree.map(lambda mine, theirs: jnp.where(trained, mine[index], theirs), state.clients.own, centre)
        row = SoftClients(shares, jnp.asarray(True), jnp.asarray(data.num_examples, jnp.int32), trained, own)
        return state._replace(clients=tree.scatter(state.clients, index, row))


def best_shares(losses: Array, num_examples: Array) -> Array:
    """f32[K]: share of the examples on which each centre has the least loss; NaN where a loss is NaN.

    >>> best_shares(jnp.asarray([[0.0, 3.0, 0.0], [1.0, 2.0, 9.0]]), jnp.asarray(2)).tolist()
    [0.5, 0.5]
    """
    count, rows = losses.shape
    best = jnp.where(jnp.arange(rows) < num_examples, jnp.argmin(losses, 0), -1)
    shares = one_hot(best, count).sum(0) / jnp.maximum(num_examples, 1).astype(jnp.float32)
    return jnp.where(jnp.any(jnp.isnan(losses)), jnp.nan, shares)


def draw_clients(rng_key: Array, odds: Array, most: int, wanted: Array) -> Array:
    """How often each cluster draws each client f32[M, K]: `wanted` i32[] ≤ `most` draws each, by odds f32[M, K].

    NOTE: drawn with replacement, so that a uniform mean over the draws is in expectation the mean weighted by u·n, as
    the paper's analysis has it; without, a cluster smaller than its draws would have to take in others' clients. Draws
    do not depend on absent clients (odds of zero) after the last present one.
    """
    num_clients, num_clusters = odds.shape

    def of_cluster(number: Array, odds: Array) -> Array:
        point = jax.random.uniform(jax.random.fold_in(rng_key, number), (most,))
        # Where no odds are added sums may differ by rounding, and fall: a point there is the client's before.
        upper = lax.cummax(jnp.cumsum(odds))
        place = jnp.searchsorted(upper, point * upper[-1], side="right")
        before = lax.cummax(jnp.where(odds > 0, jnp.arange(num_clients), -1))[jnp.minimum(place, num_clients - 1)]
        place = jnp.where(before < 0, jnp.argmax(odds > 0), before)
        counted = (jnp.arange(most) < wanted).astype(jnp.float32)
        return jnp.zeros(num_clients).at[place].add(counted)

    return jax.vmap(of_cluster, out_axes=1)(jnp.arange(num_clusters), odds.T)


def pulled_towards(update: LocalUpdate, centre: PyTree, strength: Array) -> LocalUpdate:
    """The local update whose steps follow the gradient of strength/2 · ‖θ − centre‖² too.

    λ/2 Σ_k u_k ‖w − c_k‖² has the gradient of λ·U/2 · ‖w − c̄‖² with U = Σ u_k and c̄ = Σ u_k c_k / U.
    """

    def pull(params: PyTree) -> PyTree:
        return jax.tree.map(lambda leaf, other: strength.astype(leaf.dtype) * (leaf - other), params, centre)

    return with_gradient_term(update, PULLED, pull)
