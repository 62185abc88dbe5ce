"""Local training: every client alone, from a common start."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from fedjax_cluster import parallel, tree
from fedjax_cluster.algorithms.method import AveragingMethod
from fedjax_cluster.algorithms.round import Report, clients_info, cluster_variables, first_state, report, start_models
from fedjax_cluster.kept_training import honest
from fedjax_cluster.local import client_key
from fedjax_cluster.options import option
from fedjax_cluster.parallel import Client
from fedjax_cluster.types import ClientData, Cohort, Costs, Population, PyTree, RoundInfo, State, Variables


class LonelyClients(NamedTuple):
    """What local training keeps of its clients."""

    membership: Array  # f32[M, 1]: all start from the one model
    present: Array  # bool[M]
    models: Variables  # leaves [M, ...]
    optimizer: PyTree  # leaves [M, ...], of the step that a server would take


class local_only(AveragingMethod):
    """Every client trains a model of its own; nothing is sent.

    θ_i ← θ_i + Δθ_i.

    Returns:
      A method with one cluster, whose model is the common start; memory grows with M·d.

    >>> from fedjax_cluster import local, nn
    >>> local_only(nn.linear(), local=local.sgd(0.1, batch_size=8, steps=1)).name
    'local_only'
    """

    not_private = "sends nothing, so that there is nothing to protect"

    server: optax.GradientTransformation | None = option(
        "any optax transformation of minus Δθ_i, kept per client, so that the figures compare with those of a "
        "federation under the same protocol; None adds Δθ_i",
        default=None,
    )
    aggregation: None = option("fixed; there is no server mean", default=None, init=False)

    def init(self, rng_key: Array, population: Population) -> tuple[State, RoundInfo]:
        start, present = start_models(self.model, rng_key, population, 1)
        count = len(present)
        first = cluster_variables(start, jnp.asarray(0))
        clients = LonelyClients(
            present[:, None].astype(jnp.float32),
            present,
            tree.broadcast(first, count),
            tree.broadcast(self.optimizer.init(first.params), count),
        )
        return first_state(start, clients)

    def step(self, rng_key: Array, state: State, cohort: Cohort) -> tuple[State, RoundInfo]:
        def train(client: Client, own: tuple[Variables, PyTree]) -> tuple[tuple[Variables, PyTree], Report]:
            model, optimizer_state = own
            key = client_key(rng_key, client.index)
            result = honest(self.local).run(key, self.model, model, client.data, round=state.round)
            updates, optimizer_state = self.optimizer.update(
                jax.tree.map(jnp.negative, result.delta), optimizer_state, model.params
            )
            trained = Variables(optax.apply_updates(model.params, updates), result.stats)
            told = report(result)
            return tree.where(tree.all_finite(told), (trained, optimizer_state), own), told

        rows = (state.clients.models, state.clients.optimizer)
        mapped = parallel.for_each_client(
            train,
            cohort,
            collect=lambda output: output[1],
            own=parallel.gather_rows(cohort, rows),
            renew=lambda output: output[0],
        )
        reports: Report = mapped.collected
        models, optimizer_state = parallel.put_back(cohort, rows, mapped.own)
        clients = state.clients._replace(models=models, optimizer=optimizer_state)
        costs = Costs(gradient_evaluations=jnp.sum(reports.num_steps.astype(jnp.float32)))
        slot = jnp.zeros_like(cohort.index)
        info = clients_info(slot, reports, cohort.mask, mapped.accepted, 1, 0, costs)
        return state._replace(clients=clients, round=state.round + 1), info

    def personalize(self, rng_key: Array, state: State, data: ClientData, index: Array) -> tuple[Variables, Array]:
        return jax.tree.map(lambda leaf: leaf[index][None], state.clients.models), jnp.ones(1)

    def admit(self, rng_key: Array, state: State, data: ClientData, index: Array) -> State:
        # Who was there before goes on with its model; all others have the common start.
        models, optimizer_state = jax.tree.map(
            lambda leaf: leaf[index], (state.clients.models, state.clients.optimizer)
        )
        row = LonelyClients(jnp.ones(1), jnp.asarray(True), models, optimizer_state)
        return state._replace(clients=tree.scatter(state.clients, index, row))
