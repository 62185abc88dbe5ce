"""FeSEM: k-means on the clients' trained models, with the cluster models as centres (Long et al. 2023, Algorithm 1)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array

from fedjax_cluster import cohorts, parallel, tree
from fedjax_cluster.algorithms.method import AveragingMethod, FirstProgram
from fedjax_cluster.algorithms.round import (
    HardClients,
    Report,
    Trained,
    cluster_round,
    cluster_variables,
    cohort_labels,
    count_changed,
    first_state,
    labels,
    nearest_by_loss,
    one_hot,
    report,
    start_models,
    train_client,
)
from fedjax_cluster.algorithms.starts import INSTEAD, equal_groups
from fedjax_cluster.local import client_key, num_batches
from fedjax_cluster.options import at_least, option
from fedjax_cluster.parallel import Client, Contribution
from fedjax_cluster.privacy.gaussian import CHOSEN, gaussian
from fedjax_cluster.server import Weighting, weighted_mean
from fedjax_cluster.types import (
    ONE_DEVICE,
    ClientData,
    ClientMapping,
    Clusters,
    Cohort,
    Costs,
    LocalResult,
    Population,
    PyTree,
    RoundInfo,
    State,
    Variables,
)


class fesem(AveragingMethod):
    """Stochastic expectation maximisation over centres of models.

    w_i ← local training from the centre of client i's cluster; s_i ← argmin_k ‖w_i − c_k‖²; c_k ← mean of w_i over
    s_i = k.

    Returns:
      A method in which a centre without clients stays.

    Raises:
      ValueError: an option out of its bound; in `init`, a pattern that matches no layer.

    >>> from fedjax_cluster import local, nn
    >>> fesem(nn.linear(), clusters=2, local=local.sgd(0.1, batch_size=8, epochs=1)).name
    'fesem'
    """

    sends = CHOSEN
    clusters_by = "changes"

    clusters: int = option("K, number of clusters", bound=at_least(1))
    layers: tuple[str, ...] = option(
        'parameter paths as in `tree.match` that the distance is measured on, such as `["output"]`; () is all',
        default=(),
    )
    start: Literal["random", "clients"] = option(
        '"random" centres are K independent models, and the clients begin in random clusters of equal size; models '
        'that start so far apart seldom let a client go. "clients": all train once from one model, K of the trained '
        "models, drawn at random, are the centres, and every client joins the nearest",
        default="clients",
    )
    weighting: Weighting = option('"uniform" as in the paper, or "examples"', default="uniform")

    def unprotected(self, privacy: gaussian) -> str | None:
        if self.start == "clients":
            return "start is 'clients', in which the first centres are single clients' models; give start 'random'"
        return None

    def init(self, rng_key: Array, population: Population) -> tuple[State, RoundInfo]:
        centres, present = start_models(self.model, rng_key, population, self.clusters)
        tree.match(centres.params, self.layers)
        draw_key, train_key = jax.random.split(jax.random.fold_in(rng_key, self.clusters))
        costs = None
        if self.start == "random":
            slot = equal_groups(draw_key, present, self.clusters)
        else:
            centres, slot, costs = self.start_at_clients(draw_key, train_key, centres, present, population)
        clients = HardClients(one_hot(slot, self.clusters), present)
        return first_state(centres, clients, self.optimizer, costs=costs)

    @property
    def reads_all(self) -> bool:
        return self.start != "random"

    def start_at_clients(
        self, draw_key: Array, train_key: Array, models: Clusters, present: Array, population: Population
    ) -> tuple[Clusters, Array, Costs]:
        """Centres that are models of K clients drawn, every client's cluster i32[M] (−1: absent), and the costs.

        Who sends nothing finite is no centre, and is where its loss is least; centres for want of a client stay.
        """

        def start(among: Array) -> tuple[Clusters, Array, Array, Array]:
            drawn = _draw_distinct(draw_key, among, self.clusters)
            found = self.centres_from_clients(train_key, models, drawn, population)
            return jax.device_put(parallel.fetched(found))

        centres, slot, num_steps, sent = start(present)
        participants = present.sum().astype(jnp.float32)
        costs = Costs(participants, participants, num_steps, clusterings=1.0)
        lost = present & ~sent
        if jnp.any(lost):
            # Who sends is known now: the same draw, among those alone.
            centres, slot, _, _ = start(sent)
            least = jax.tree.map(jnp.asarray, parallel.fetched(self.least_losses(centres, lost, population)))
            slot = jnp.where(lost, least, slot)
            tested = self.clusters * lost.astype(jnp.float32)
            batches = jnp.asarray(parallel.fetched(num_batches(self.local, population.data)))
            costs = costs._replace(models_down=participants + tested.sum(), loss_evaluations=jnp.sum(tested * batches))
        return centres, slot, costs

    @parallel.kept_program(static_argnames="self")
    def centres_from_clients(
        self, rng_key: Array, models: Clusters, drawn: Array, population: Population
    ) -> tuple[Clusters, Array, Array, Array]:
        """The models of the clients drawn[k] after training from the first model; every client's nearest, i32[M]; all
        steps; who sent something finite, bool[M].
        """
        first = cluster_variables(models, jnp.asarray(0))
        cohort = parallel.whole_population(population)

        def train(client: Client) -> LocalResult:
            return self.local.run(client_key(rng_key, client.index), self.model, first, client.data, round=0)

        def from_first(result: LocalResult) -> PyTree:
            return jax.tree.map(jnp.add, first.params, result.delta)

        def as_centre(client: Client) -> tuple[Contribution, Report]:
            chosen = drawn == client.index
            result = train(client)
            own = Contribution(
                jnp.argmax(chosen).astype(jnp.int32),
                jnp.any(chosen).astype(jnp.float32),
                {"params": from_first(result), "stats": result.stats},
            )
            return own, report(result)

        def join(client: Client) -> tuple[Array, Array]:
            result = train(client)
            return nearest_centre(centres, from_first(result), self.layers, jnp.zeros((), jnp.int32)), result.num_steps

        mapped = parallel.for_each_client(
            as_centre,
            cohort,
            num_slots=self.clusters,
            reduce=lambda output: output[0],
            collect=lambda output: output[1],
        )
        reduced = mapped.reduced
        mean = weighted_mean(reduced)
        # A client that sent nothing finite is no centre.
        before = Variables(models.params, models.stats)
        drawn_models = tree.of_types(Variables(mean["params"], mean["stats"]), before)
        kept = tree.where(reduced.weight > 0, drawn_models, before)
        centres = models._replace(params=kept.params, stats=kept.stats)
        slot, num_steps = parallel.for_each_client(join, cohort, collect=lambda output: output).collected
        return centres, jnp.where(cohort.mask, slot, -1), jnp.sum(num_steps.astype(jnp.float32)), mapped.accepted

    def first_programs(self, rng_key: Array, state: State, population: Population) -> tuple[FirstProgram, ...]:
        if self.start == "random":
            return ()
        given = (self, rng_key, state.clusters, jax.ShapeDtypeStruct((self.clusters,), jnp.int32), population)
        return (FirstProgram("every client's first training", fesem.centres_from_clients, given, instead=INSTEAD),)

    @parallel.kept_program(static_argnames="self")
    def least_losses(self, centres: Clusters, lost: Array, population: Population) -> Array:
        """The cluster i32[M] of least loss of those who are lost, bool[M]."""
        cohort = parallel.whole_population(population)
        cohort = dataclasses.replace(cohort, mask=cohort.mask & lost)
        return parallel.for_each_client(
            lambda client: nearest_by_loss(self.model, centres, client.data), cohort, collect=lambda slot: slot
        ).collected

    def step(self, rng_key: Array, state: State, cohort: Cohort) -> tuple[State, RoundInfo]:
        centres = state.clusters

        def train(client: Client, old: Array) -> Trained:
            result = train_client(rng_key, self.local, self.model, centres, old, client, state.round)
            trained = jax.tree.map(lambda centre, delta: centre[old] + delta, centres.params, result.delta)
            slot = nearest_centre(centres, trained, self.layers, old)
            # Relative to the new centre, so that the mean of these takes it to the mean of the models.
            towards = jax.tree.map(lambda model, centre: model - centre[slot], trained, centres.params)
            return Trained(slot, result._replace(delta=towards))

        old = jnp.maximum(cohort_labels(state, cohort), 0)
        done = cluster_round(
            train,
            centres,
            cohort,
            old,
            optimizer=self.optimizer,
            weighting=self.weighting,
            aggregation=self.aggregation,
            private=self.private(rng_key, centres),
        )
        membership = one_hot(done.slot, self.clusters)
        clients = state.clients._replace(
            membership=parallel.scatter_rows(cohort, state.clients.membership, membership, done.accepted)
        )
        changed = count_changed(cohort, old, done.slot, done.accepted)
        costs = done.costs(cohort.mask)._replace(clusterings=1.0)
        state = State(done.clusters, clients, state.server, state.round + 1)
        return state, done.info(cohort.mask, changed, costs)

    def cluster(self, rng_key: Array, state: State, mapping: ClientMapping = ONE_DEVICE) -> Array:
        """The E-step of one cohort. The clients' models are gone after a round; their centres stand for them."""
        old = labels(state.clients.membership)
        chosen, none = self.select(rng_key, state), jnp.zeros((len(old), 0))
        mask = jnp.zeros_like(state.clients.present).at[chosen.index].set(chosen.mask, mode="drop")
        cohort = Cohort(*cohorts.in_place(mask)[:2], ClientData(none, none, old), None, mapping, in_place=True)

        def nearest(client: Client, old: Array) -> Array:
            centre = cluster_variables(state.clusters, jnp.maximum(old, 0))
            return nearest_centre(state.clusters, centre.params, self.layers, jnp.maximum(old, 0))

        found = parallel.for_each_client(nearest, cohort, old, collect=lambda slot: slot).collected
        return jnp.where(mask, found, old)

    def admit(self, rng_key: Array, state: State, data: ClientData, index: Array) -> State:
        # NOTE: the paper admits nobody later; a newcomer begins where its loss is least, and its first model moves it.
        slot = nearest_by_loss(self.model, state.clusters, data)
        row = HardClients(one_hot(slot, self.clusters), jnp.asarray(True))
        return state._replace(clients=tree.scatter(state.clients, index, row))


def nearest_centre(centres: Clusters, params: PyTree, layers: Sequence[str], own: Array) -> Array:
    """The cluster i32[] whose model is nearest, argmin_k ‖w − c_k‖², over layers as in `tree.match`; () is all.

    A client whose model is not finite stays in its own, i32[].
    """
    chosen = jax.tree.leaves(tree.match(params, layers))
    pairs = zip(jax.tree.leaves(centres.params), jax.tree.leaves(params), chosen, strict=True)
    parts = [
        jnp.sum(jnp.square(centre - own[None]).reshape(centre.shape[0], -1), 1) for centre, own, pick in pairs if pick
    ]
    distance = jnp.sum(jnp.stack(parts), 0)
    known = centres.active & jnp.isfinite(distance)
    return jnp.where(known.any(), jnp.argmin(jnp.where(known, distance, jnp.inf)).astype(jnp.int32), own)


def _draw_distinct(rng_key: Array, present: Array, count: int) -> Array:
    """i32[count]: different present clients."""
    score = jnp.where(present, jax.random.uniform(rng_key, present.shape), -1.0)
    return jax.lax.top_k(score, count)[1]
