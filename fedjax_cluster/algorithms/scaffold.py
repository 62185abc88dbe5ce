"""SCAFFOLD: control variates against the drift of clients (Karimireddy et al. 2020, Algorithm 1)."""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
import optax
from jax import Array

from fedjax_cluster import parallel, tree
from fedjax_cluster.algorithms.fedavg import fedavg
from fedjax_cluster.algorithms.personal import (
    admit_with_own,
    all_costs,
    global_model,
    keep_own,
    moved_to,
    starting_clients,
)
from fedjax_cluster.algorithms.round import Trained, cluster_round
from fedjax_cluster.inference import full_gradient
from fedjax_cluster.local import client_key, sgd, with_gradient_term
from fedjax_cluster.options import option
from fedjax_cluster.parallel import Client, Contribution
from fedjax_cluster.server import Weighting, combine, params_part
from fedjax_cluster.types import (
    ClientData,
    ClientMapping,
    Cohort,
    LocalResult,
    LocalUpdate,
    Population,
    PyTree,
    RoundInfo,
    State,
    Variables,
)

CORRECTED = "given control variates"


class scaffold(fedavg):
    """Federated averaging whose local steps are corrected by what the other clients' gradients are like.

    Client i steps y ← y − η·(∇f_i(y) + c − c_i) from y = θ, K times, and renews its control variate, c_i⁺ =
    c_i − c + (θ − y)/(K·η), or c_i⁺ = ∇f_i(θ). θ ← θ + mean of y − θ, and c ← c + Σ_i (c_i⁺ − c_i)/N, over the round's
    clients, of N in all; c and every c_i begin with 0.

    NOTE: with weighting "examples" θ moves by the weighted mean, but c stays the mean of all c_i alike, as the server
    does not know the sizes of those who are away: where the c_i have settled, all step along it, so that the objective
    is that of "uniform". With control "gradient" and batch norm, ∇f_i(θ) is that of the running statistics, the steps'
    that of their mini-batches.

    Returns:
      A method with one global model; memory grows with M·d for the control variates.

    Raises:
      ValueError: an option out of its bound, a local update that cannot follow another gradient, or an optimiser whose
        steps are not its rate times a gradient where control is "steps".

    >>> from fedjax_cluster import local, nn
    >>> scaffold(nn.linear(), local=local.sgd(0.1, batch_size=8, epochs=1)).control
    'steps'
    """

    not_private = "has clients send control variates too, of which no sensitivity is settled"

    local: LocalUpdate = option("the corrected steps: their rate η, mini-batches and number K")
    control: Literal["steps", "gradient"] = option(
        'c_i is renewed by the mean gradient of its "steps" (the paper\'s option II), or by the "gradient" of all its '
        "examples at the model that it was sent (option I)",
        default="steps",
    )
    weighting: Weighting = option(
        '"uniform" as in the paper, or "examples", of the change alone; the mean of c is uniform', default="uniform"
    )
    server: optax.GradientTransformation | None = option(
        "any optax transformation of minus the mean change; sgd(η_g) is the paper's, None is sgd(1.0)", default=None
    )

    def check(self) -> None:
        # Refused here rather than in the first round.
        _ = with_gradient_term(self.local, CORRECTED, lambda params: params)
        assert isinstance(self.local, sgd)
        if self.control == "steps" and isinstance(self.local.learning_rate, optax.GradientTransformation):
            raise ValueError(
                "control is 'steps', which divides the change by the rate of plain steps, but learning_rate of local "
                "is an optimiser, with momentum perhaps; give a number or a schedule, or control='gradient'"
            )

    def init(self, rng_key: Array, population: Population) -> tuple[State, RoundInfo]:
        state, info = super().init(rng_key, population)
        zero = jax.tree.map(jnp.zeros_like, global_model(state.clusters).params)
        return state._replace(clients=starting_clients(state.clients.present, zero), server=zero), info

    def step(self, rng_key: Array, state: State, cohort: Cohort) -> tuple[State, RoundInfo]:
        start, common = global_model(state.clusters), state.server

        def train(client: Client, own: PyTree) -> Trained:
            correction = jax.tree.map(jnp.subtract, common, own)
            update = with_gradient_term(self.local, CORRECTED, lambda params: correction)
            key = client_key(rng_key, client.index)
            result = update.run(key, self.model, start, client.data, round=state.round)
            renewed, more = self.renewed(start, common, own, result, client.data, state.round)
            renewed = self.limited(own, renewed)
            return Trained(jnp.zeros((), jnp.int32), result, (renewed, moved_to(renewed, more, renewed)))

        rows = parallel.gather_rows(cohort, state.clients.own)
        done = cluster_round(
            train,
            state.clusters,
            cohort,
            rows,
            optimizer=self.optimizer,
            weighting=self.weighting,
            aggregation=self.aggregation,
        )
        # Both kept: a step that is refused takes the control variates back with it.
        renewed, moved = done.extra
        difference = jax.tree.map(jnp.subtract, renewed, rows)
        difference = tree.where(done.accepted, difference, jax.tree.map(jnp.zeros_like, difference))
        count = jnp.maximum(jnp.sum(state.clients.present.astype(jnp.float32)), 1.0)
        total = self.total(difference, done.accepted, cohort.mapping)
        server = jax.tree.map(lambda leaf, change: leaf + change / count.astype(leaf.dtype), common, total)
        clients = keep_own(cohort, state.clients, tree.where(done.accepted, renewed, rows), done.accepted)
        costs = all_costs(done, moved, cohort.mask)
        # Of the model and of the control variate, which is one of parameters.
        sent = 1.0 + params_part(state.clusters)
        costs = costs._replace(models_down=sent * costs.models_down, models_up=sent * costs.models_up)
        return State(done.clusters, clients, server, state.round + 1), done.info(cohort.mask, costs=costs)

    @property
    def averages(self) -> bool:
        """Whether c is the mean of what clients keep: without a rule, and with one that limits each client's change."""
        return self.aggregation is None or self.aggregation.streams

    def limited(self, own: PyTree, renewed: PyTree) -> PyTree:
        """c_i⁺ as far as the server hears of it: a client that kept more would be pushed by the rest for ever."""
        if self.aggregation is None or not self.aggregation.streams:
            return renewed
        return jax.tree.map(jnp.add, own, self.aggregation.limit(jax.tree.map(jnp.subtract, renewed, own)))

    def total(self, difference: PyTree, accepted: Array, mapping: ClientMapping) -> PyTree:
        """Σ_i (c_i⁺ − c_i), leaves [C, ...] summed; with another rule than a mean, what it makes of them for each."""
        if self.aggregation is None or self.averages:
            return jax.tree.map(lambda change: change.sum(0), difference)
        # NOTE: c is then a sum of what the rule made of changes, and no mean of the clients' c_i: it keeps a distance.
        rows = Contribution(jnp.zeros_like(accepted, jnp.int32), jnp.ones(accepted.shape), difference)
        one = combine(self.aggregation, rows, accepted, 1, mapping).value
        return jax.tree.map(lambda change: change[0] * jnp.sum(accepted.astype(change.dtype)), one)

    def renewed(
        self, start: Variables, common: PyTree, own: PyTree, result: LocalResult, data: ClientData, round: Array
    ) -> tuple[PyTree, Array]:
        """c_i⁺, and how many mini-batch gradients it took beside the steps, i32[]."""
        assert isinstance(self.local, sgd)
        if self.control == "gradient":
            rows = self.local.batch_rows(data.x.shape[0])
            return full_gradient(self.model, start, data), (data.num_examples + rows - 1) // rows
        way = jnp.asarray(result.num_steps, jnp.float32) * self.local.rate_at(round)
        # A round of rate 0 tells nothing of the gradient.
        length = jnp.where(way > 0, way, 1.0)
        new = jax.tree.map(
            lambda mine, theirs, delta: jnp.where(way > 0, mine - theirs - delta / length.astype(delta.dtype), mine),
            own,
            common,
            result.delta,
        )
        return new, jnp.zeros((), jnp.int32)

    def admit(self, rng_key: Array, state: State, data: ClientData, index: Array) -> State:
        return self.recounted(admit_with_own(state, index, jax.tree.map(jnp.zeros_like, state.server)))

    def recounted(self, state: State) -> State:
        # NOTE: the paper's N clients stay. Where some leave or join, c is the mean of those who are there: moved by
        # changes alone, it would keep its distance from that mean, and all steps a constant push, for ever.
        if not self.averages:
            return state
        there = jnp.asarray(state.clients.present, jnp.float32)
        share = there / jnp.maximum(there.sum(), 1.0)
        mean = jax.tree.map(
            lambda own: jnp.tensordot(share.astype(own.dtype), own, 1, precision="highest"), state.clients.own
        )
        return state._replace(server=mean)
