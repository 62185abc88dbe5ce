"""FeSEM: k-means on the clients' trained models, with the cluster models as centres (Long et al. 2023, Algorithm 1)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from jax import Array

from fedjax_cluster import cohorts, parallel, tree
from fedjax_cluster.algorithms import round as averaging
from fedjax_cluster.algorithms.cfl_gp.cfl_gp import equal_groups
from fedjax_cluster.local import client_key, dataset_loss
from fedjax_cluster.parallel.loop import Client, Contribution
from fedjax_cluster.server import Weighting, init_optimizer, update_clusters, weighted_mean
from fedjax_cluster.types import (
    ONE_DEVICE,
    ClientData,
    ClientMapping,
    ClusteredAlgorithm,
    Clusters,
    Cohort,
    Costs,
    LocalResult,
    LocalUpdate,
    Model,
    Population,
    PyTree,
    RoundInfo,
    Selection,
    State,
    Variables,
)


def fesem(
    model: Model,
    *,
    clusters: int,
    local: LocalUpdate,
    server: optax.GradientTransformation | None = None,
    layers: Sequence[str] = (),
    start: Literal["random", "clients"] = "random",
    weighting: Weighting = "uniform",
    participation: float = 1.0,
) -> ClusteredAlgorithm:
    """Stochastic expectation maximisation over centres of models.

    w_i ← local training from the centre of client i's cluster; s_i ← argmin_k ‖w_i − c_k‖²; c_k ← mean of w_i over
    s_i = k.

    Args:
      model: what is trained.
      clusters: K.
      local: what a client does in a round.
      server: any optax transformation of minus the mean of w_i − c_k; None moves the centre to the mean.
      layers: parameter paths as in `tree.match` that the distance is measured on, such as `["output"]`; () is all.
      start: "random" centres are K independent models, and the clients begin in random clusters of equal size; models
        that start so far apart seldom let a client go. "clients": all train once from one model, K of the trained
        models, drawn at random, are the centres, and every client joins the nearest.
      weighting: "uniform" as in the paper, or "examples".
      participation: share of the clients in a round, in (0, 1].

    Returns:
      A ClusteredAlgorithm; a centre without clients stays.

    Raises:
      ValueError: clusters below one, an unknown start, participation outside (0, 1]; in `init`, a pattern that matches
        no layer.

    >>> from fedjax_cluster import local, nn
    >>> fesem(nn.linear(), clusters=2, local=local.sgd(0.1, batch_size=8, epochs=1)).name
    'fesem'
    """
    if clusters < 1:
        raise ValueError(f"clusters is {clusters}; at least one cluster is needed")
    if start not in ("random", "clients"):
        raise ValueError(f"start is {start!r}; it must be 'random' or 'clients'")
    cohorts.cohort_size(participation, 1)
    optimizer = optax.sgd(1.0) if server is None else server

    def init(rng_key: Array, population: Population) -> tuple[State, RoundInfo]:
        averaging.check_clusters(clusters, population)
        centres = averaging.init_clusters(rng_key, model, population.info, clusters)
        tree.match(centres.params, layers)
        present = averaging.present_clients(population)
        draw_key, train_key = jax.random.split(jax.random.fold_in(rng_key, clusters))
        costs = None
        if start == "random":
            slot = equal_groups(draw_key, present, clusters)
        else:
            drawn = _draw_distinct(draw_key, present, clusters)
            found = jax.jit(centres_from_clients)(train_key, centres, drawn, population)
            centres, slot, num_steps = jax.tree.map(jnp.asarray, jax.device_get(found))
            everyone = present.sum().astype(jnp.float32)
            costs = Costs(everyone, everyone, num_steps, clusterings=1.0)
        clients = averaging.HardClients(averaging.one_hot(slot, clusters), present)
        state = State(centres, clients, init_optimizer(optimizer, centres), jnp.zeros((), jnp.int32))
        return state, averaging.initial_info(clusters, costs)

    def centres_from_clients(
        rng_key: Array, models: Clusters, drawn: Array, population: Population
    ) -> tuple[Clusters, Array, Array]:
        """The models of the clients drawn[k] after training from the first model; every client's nearest; all steps."""
        first = averaging.cluster_variables(models, jnp.asarray(0))
        cohort = parallel.whole_population(population)

        def train(client: Client):
            return local.run(client_key(rng_key, client.index), model, first, client.data)

        def from_first(result: LocalResult) -> PyTree:
            return jax.tree.map(jnp.add, first.params, result.delta)

        def as_centre(client: Client):
            own = drawn == client.index
            result = train(client)
            return Contribution(
                jnp.argmax(own).astype(jnp.int32),
                jnp.any(own).astype(jnp.float32),
                {"params": from_first(result), "stats": result.stats},
            )

        def join(client: Client):
            result = train(client)
            return nearest_centre(centres, from_first(result), layers), result.num_steps

        reduced = parallel.for_each_client(as_centre, cohort, num_slots=clusters, reduce=lambda output: output).reduced
        mean = weighted_mean(reduced)
        # A client whose training diverged is no centre.
        drawn_models = Variables(mean["params"], mean["stats"])
        own = tree.where(reduced.weight > 0, drawn_models, Variables(models.params, models.stats))
        centres = models._replace(params=own.params, stats=own.stats)
        slot, num_steps = parallel.for_each_client(join, cohort, collect=lambda output: output).collected
        return centres, jnp.where(cohort.mask, slot, -1), jnp.sum(num_steps.astype(jnp.float32))

    def select(rng_key: Array, state: State) -> Selection:
        return cohorts.uniform(rng_key, state.clients.present, participation)

    def step(rng_key: Array, state: State, cohort: Cohort) -> tuple[State, RoundInfo]:
        centres = state.clusters

        def client_round(client: Client, old: Array):
            result = averaging.train_client(rng_key, local, model, centres, old, client)
            own = jax.tree.map(lambda centre, delta: centre[old] + delta, centres.params, result.delta)
            slot = nearest_centre(centres, own, layers)
            # Relative to the new centre, so that the mean of these takes it to the mean of the models.
            towards = jax.tree.map(lambda model, centre: model - centre[slot], own, centres.params)
            return slot, result._replace(delta=towards)

        old = jnp.maximum(averaging.labels(parallel.gather_rows(cohort, state.clients.membership)), 0)
        mapped = parallel.for_each_client(
            client_round,
            cohort,
            old,
            num_slots=clusters,
            reduce=lambda output: averaging.contribute(output[0], output[1], weighting),
            collect=lambda output: (output[0], averaging.report(output[1])),
        )
        slot, reports = mapped.collected
        models, optimizer_state = update_clusters(optimizer, state.server, centres, mapped.reduced)
        weights = averaging.one_hot(slot, clusters)
        clients = state.clients._replace(
            weights=parallel.scatter_rows(cohort, state.clients.membership, weights, mapped.accepted)
        )
        participants = jnp.sum(cohort.mask.astype(jnp.float32))
        info = averaging.round_info(
            slot,
            reports,
            cohort.mask,
            mapped.accepted,
            clusters,
            jnp.sum((mapped.accepted & (slot != old)).astype(jnp.int32)),
            Costs(participants, participants, jnp.sum(reports.num_steps.astype(jnp.float32)), clusterings=1.0),
        )
        return State(models, clients, optimizer_state, state.round + 1), info

    def cluster(rng_key: Array, state: State, mapping: ClientMapping = ONE_DEVICE) -> Array:
        """The E-step of one cohort. The clients' models are gone after a round; their centres stand for them."""
        old = averaging.labels(state.clients.membership)
        chosen, none = select(rng_key, state), jnp.zeros((len(old), 0))
        mask = jnp.zeros_like(state.clients.present).at[chosen.index].set(chosen.mask, mode="drop")
        cohort = Cohort(*cohorts.in_place(mask)[:2], ClientData(none, none, old), None, mapping, in_place=True)

        def nearest(client: Client, old: Array) -> Array:
            own = averaging.cluster_variables(state.clusters, jnp.maximum(old, 0))
            return nearest_centre(state.clusters, own.params, layers)

        found = parallel.for_each_client(nearest, cohort, old, collect=lambda slot: slot).collected
        return jnp.where(mask, found, old)

    def admit(rng_key: Array, state: State, client: ClientData, index: Array) -> State:
        # NOTE: the paper admits nobody later; a newcomer begins where its loss is least, and its first model moves it.
        slot, _ = averaging.least_loss_cluster(state.clusters, lambda v: dataset_loss(model, v, client))
        row = averaging.HardClients(averaging.one_hot(slot, clusters), jnp.asarray(True))
        return state._replace(clients=tree.scatter(state.clients, index, row))

    config: dict[str, Any] = averaging.describe(
        local, clusters=clusters, layers=list(layers), start=start, weighting=weighting, participation=participation
    )
    return ClusteredAlgorithm(
        "fesem", config, model, init, select, step, averaging.personalize_by_label, admit, cluster=cluster
    )


def nearest_centre(centres: Clusters, params: PyTree, layers: Sequence[str] = ()) -> Array:
    """The cluster i32[] whose model is nearest, argmin_k ‖w − c_k‖², over chosen layers.

    Args:
      centres: K models.
      params: one model's parameters.
      layers: parameter paths as in `tree.match`; () is all.
    """
    chosen = jax.tree.leaves(tree.match(params, layers))
    pairs = zip(jax.tree.leaves(centres.params), jax.tree.leaves(params), chosen, strict=True)
    parts = [
        jnp.sum(jnp.square(centre - own[None]).reshape(centre.shape[0], -1), 1) for centre, own, pick in pairs if pick
    ]
    distance = jnp.sum(jnp.stack(parts), 0)
    return jnp.argmin(jnp.where(centres.active & jnp.isfinite(distance), distance, jnp.inf)).astype(jnp.int32)


def _draw_distinct(rng_key: Array, present: Array, count: int) -> Array:
    """i32[count]: different present clients."""
    score = jnp.where(present, jax.random.uniform(rng_key, present.shape), -1.0)
    return jax.lax.top_k(score, count)[1]
