"""pFedMe: personal models by Moreau envelopes of the clients' losses (Dinh, Tran, Nguyen 2020, Algorithm 1)."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax

from fedjax_cluster import parallel, tree
from fedjax_cluster.algorithms.fedavg import fedavg
from fedjax_cluster.algorithms.personal import (
    admit_with_own,
    all_costs,
    check_own_gradient,
    global_model,
    keep_own,
    moved_to,
    own_row,
    starting_clients,
)
from fedjax_cluster.algorithms.round import Trained, cluster_round
from fedjax_cluster.local import BatchGradientOf, client_key
from fedjax_cluster.options import POSITIVE, at_least, changed, option
from fedjax_cluster.parallel import Client
from fedjax_cluster.privacy.gaussian import ONE
from fedjax_cluster.server import Weighting
from fedjax_cluster.types import (
    BatchGradient,
    ClientData,
    Cohort,
    LocalUpdate,
    Model,
    Population,
    PyTree,
    RoundInfo,
    State,
    Variables,
)


class pfedme(fedavg):
    """A global model of which each client's personal one is the proximal point.

    θ̂_i(w) = argmin_θ f_i(θ) + λ/2·‖θ − w‖². In each of R local steps client i approximates it on a mini-batch by K
    steps θ ← θ − α·(∇f_i(θ) + λ(θ − w_i)), then moves w_i ← w_i − η·λ·(w_i − θ), from w_i = w;
    w ← (1 − β)·w + β · mean of w_i.

    NOTE: the cohort alone trains. In the paper and its code everybody does, and a sample sends its w_i: the global
    model is the same, but there everybody's θ is as new as it. The code has three things more than its paper: a weight
    decay of 0.001 in the inner steps (`weight_decay` of `local`), means by examples, and a test of w_i in place of θ.

    Returns:
      A method whose `personalize` gives the last θ, or w as long as the client never took part; memory grows with M·d.

    Raises:
      ValueError: an option out of its bound, inner steps that diverge, or a local update that cannot follow another
        gradient.

    >>> from fedjax_cluster import local, nn
    >>> pfedme(nn.linear(), local=local.sgd(0.1, batch_size=8, steps=4)).update.gradient
    MoreauGradient(strength=15.0, steps=5, rate=0.09, weight_decay=0.0)
    """

    sends = ONE

    local: LocalUpdate = option("the R steps of w_i: their rate η and mini-batches")
    regularization: float = option(
        "λ, how near the personal model stays to w_i; the paper's 15 is much where groups of clients contradict each "
        "other, which 1 with a learning rate of 1 serves better",
        default=15.0,
        bound=POSITIVE,
    )
    inner_steps: int = option("K, steps of the personal model on each mini-batch", default=5, bound=at_least(1))
    inner_learning_rate: float = option("α, of these", default=0.09, bound=POSITIVE)
    weighting: Weighting = option('"uniform" as in the paper, or "examples"', default="uniform")
    server: optax.GradientTransformation | None = option(
        "any optax transformation of minus the mean change; sgd(β) is the paper's, None is sgd(1.0)", default=None
    )

    def check(self) -> None:
        check_own_gradient(self.local, self.name)
        if self.inner_learning_rate * self.regularization > 2:
            raise ValueError(
                f"inner_learning_rate is {self.inner_learning_rate:g} and regularization {self.regularization:g}, "
                "whose product is above 2, so that the inner steps diverge; lower one of them"
            )
        # Refused here rather than in the first round.
        _ = self.update

    @property
    def update(self) -> LocalUpdate:
        decay = getattr(self.local, "weight_decay", 0.0)
        gradient = MoreauGradient(self.regularization, self.inner_steps, self.inner_learning_rate, decay)
        return changed(self.local, "given the gradient of a Moreau envelope", gradient=gradient, weight_decay=0.0)

    def init(self, rng_key: Array, population: Population) -> tuple[State, RoundInfo]:
        state, info = super().init(rng_key, population)
        own = global_model(state.clusters)
        return state._replace(clients=starting_clients(state.clients.present, own)), info

    def step(self, rng_key: Array, state: State, cohort: Cohort) -> tuple[State, RoundInfo]:
        start = global_model(state.clusters)

        def train(client: Client, own: Variables) -> Trained:
            # NOTE: the paper does not say where the inner steps begin: as in the public code with w in a round's first
            # local step, and in the others with the personal model of the one before.
            begin = Variables(start.params, Envelope(start.stats, start.params))
            key = client_key(rng_key, client.index)
            result = self.update.run(key, self.model, begin, client.data, round=state.round)
            envelope: Envelope = result.stats
            change = jax.tree.map(jnp.subtract, envelope.personal, start.params)
            steps = jnp.asarray(result.num_steps, jnp.int32) * (self.inner_steps - 1)
            renewed = Variables(envelope.personal, envelope.stats)
            result = result._replace(stats=envelope.stats)
            return Trained(jnp.zeros((), jnp.int32), result, moved_to(renewed, steps, change), renewed)

        done = cluster_round(
            train,
            state.clusters,
            cohort,
            own=parallel.gather_rows(cohort, state.clients.own),
            optimizer=self.optimizer,
            weighting=self.weighting,
            aggregation=self.aggregation,
            private=self.private(rng_key, state.clusters),
        )
        clients = keep_own(cohort, state.clients, done.own, done.extra.finite)
        state = State(done.clusters, clients, state.server, state.round + 1)
        return state, done.info(cohort.mask, costs=all_costs(done, done.extra, cohort.mask))

    def personalize(self, rng_key: Array, state: State, data: ClientData, index: Array) -> tuple[Variables, Array]:
        return tree.broadcast(own_row(state.clients, index, global_model(state.clusters)), 1), jnp.ones(1)

    def admit(self, rng_key: Array, state: State, data: ClientData, index: Array) -> State:
        return admit_with_own(state, index, global_model(state.clusters))


class Envelope(NamedTuple):
    """What goes from local step to local step beside w_i, in the place of the batch-norm statistics."""

    stats: PyTree  # of the personal model
    personal: PyTree  # θ, its parameters


class MoreauGradient(NamedTuple):
    """Gradient λ(w − θ̂(w)) of the Moreau envelope of f at w, with θ̂ approximated from `Envelope.personal` on."""

    strength: float  # λ
    steps: int  # K
    rate: float  # α
    weight_decay: float  # of f

    def __call__(
        self,
        batch_gradient: BatchGradientOf,
        keys: Array,
        model: Model,
        variables: Variables,
        data: ClientData,
        number: Array | int,
        /,
    ) -> BatchGradient:
        centre, envelope = variables
        assert isinstance(envelope, Envelope)

        def descend(carry: tuple[PyTree, PyTree], _: None) -> tuple[tuple[PyTree, PyTree], Array]:
            personal, stats = carry
            found = batch_gradient(keys, model, Variables(personal, stats), data, number)
            moved = jax.tree.map(
                lambda leaf, slope, middle: (
                    leaf - self.rate * (slope + self.weight_decay * leaf + self.strength * (leaf - middle))
                ),
                personal,
                found.gradient,
                centre,
            )
            return (moved, found.stats), found.loss

        (personal, stats), losses = lax.scan(descend, (envelope.personal, envelope.stats), length=self.steps)
        slope = jax.tree.map(lambda middle, leaf: self.strength * (middle - leaf), centre, personal)
        return BatchGradient(losses[0], slope, Envelope(stats, personal))
