"""Per-FedAvg: a global model that is good after a few steps of each client (Fallah et al. 2020, Algorithm 1)."""

from __future__ import annotations

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from fedjax_cluster import tree
from fedjax_cluster.algorithms.fedavg import fedavg
from fedjax_cluster.algorithms.personal import check_own_gradient
from fedjax_cluster.algorithms.round import cluster_variables
from fedjax_cluster.local import BatchGradientOf
from fedjax_cluster.nn.precision import precision_of
from fedjax_cluster.options import POSITIVE, at_least, changed, option
from fedjax_cluster.privacy.gaussian import ONE
from fedjax_cluster.server import Weighting
from fedjax_cluster.types import (
    BatchGradient,
    ClientData,
    Cohort,
    LocalUpdate,
    Model,
    PyTree,
    RoundInfo,
    State,
    Variables,
)

Variant = Literal["first-order", "hessian-free"]
GRADIENTS_PER_STEP = {"first-order": 2, "hessian-free": 4}


class per_fedavg(fedavg):
    """Personalised federated averaging.

    θ minimises Σ_i f_i(θ − α∇f_i(θ)): every local step follows (I − α∇²f_i(θ, D″)) ∇f_i(θ − α∇f_i(θ, D), D′) with
    three successive mini-batches D, D′, D″; the server averages. First-order leaves the Hessian out; Hessian-free
    takes ∇²f·g ≈ (∇f(θ + δg) − ∇f(θ − δg)) / 2δ.

    Returns:
      A method with one cluster, whose `personalize` fine-tunes on the client's training rows.

    Raises:
      ValueError: an option out of its bound, or a local update that cannot follow another gradient.

    >>> from fedjax_cluster import local, nn
    >>> per_fedavg(nn.linear(), local=local.sgd(0.1, batch_size=8, steps=1)).name
    'per_fedavg'
    """

    sends = ONE

    local: LocalUpdate = option("the outer steps: their rate (the paper's β), optimiser, mini-batches and number (τ)")
    variant: Variant = option('"first-order" (two gradients a step) or "hessian-free" (four)', default="first-order")
    inner_learning_rate: float = option(
        "α, of the step that adapts the model, in training and in `personalize`", default=0.01, bound=POSITIVE
    )
    difference: float = option("δ of the Hessian-free variant", default=1e-3, bound=POSITIVE)
    fine_tuning_steps: int = option(
        "plain gradient steps of rate α from the global model that personalise it; the paper's 1",
        default=1,
        bound=at_least(1),
    )
    weighting: Weighting = option('"uniform" as in the paper, or "examples"', default="uniform")

    def check(self) -> None:
        check_own_gradient(self.local, self.name)
        used = {getattr(self.local, "precision", "float32"), precision_of(self.model)} - {"float32"}
        if self.variant == "hessian-free" and used:
            raise ValueError(
                f"variant is 'hessian-free', but gradients in {used.pop()} do not tell its steps of "
                f"{self.difference:g} apart; give precision='float32', or variant='first-order'"
            )
        # Refused here rather than in the first round.
        _ = self.update, self.fine_tuning

    @property
    def update(self) -> LocalUpdate:
        gradient = MetaGradient(self.variant, self.inner_learning_rate, self.difference)
        return changed(self.local, "given the gradient of Per-FedAvg", gradient=gradient)

    @property
    def fine_tuning(self) -> LocalUpdate:
        """What adapts the global model to one client."""
        return changed(
            self.local,
            "given the steps that personalise",
            fault=None,
            learning_rate=self.inner_learning_rate,
            steps=self.fine_tuning_steps,
            epochs=None,
            proximal=0.0,
            weight_decay=0.0,
        )

    def step(self, rng_key: Array, state: State, cohort: Cohort) -> tuple[State, RoundInfo]:
        state, info = super().step(rng_key, state, cohort)
        gradients = info.costs.gradient_evaluations * GRADIENTS_PER_STEP[self.variant]
        return state, info._replace(costs=info.costs._replace(gradient_evaluations=gradients))

    def personalize(self, rng_key: Array, state: State, data: ClientData, index: Array) -> tuple[Variables, Array]:
        start = cluster_variables(state.clusters, jnp.zeros((), jnp.int32))
        result = self.fine_tuning.run(rng_key, self.model, start, data)
        tuned = Variables(optax.apply_updates(start.params, result.delta), result.stats)
        return tree.broadcast(tuned, 1), jnp.ones(1)


class MetaGradient(NamedTuple):
    """Gradient of f(θ − α∇f(θ)), as `local.sgd` takes it for its steps."""

    variant: Variant
    rate: float  # α
    difference: float  # δ

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
        def at(params: PyTree, stats: PyTree, batch: int) -> BatchGradient:
            return batch_gradient(keys, model, Variables(params, stats), data, 3 * number + batch)

        def moved(direction: PyTree, rate: float) -> PyTree:
            return jax.tree.map(lambda leaf, change: leaf + rate * change, variables.params, direction)

        inner = at(variables.params, variables.stats, 0)
        outer = at(moved(inner.gradient, -self.rate), inner.stats, 1)
        if self.variant == "first-order":
            return outer
        ahead = at(moved(outer.gradient, self.difference), outer.stats, 2)
        behind = at(moved(outer.gradient, -self.difference), outer.stats, 2)
        corrected = jax.tree.map(
            lambda own, plus, minus: own - self.rate * (plus - minus) / (2 * self.difference),
            outer.gradient,
            ahead.gradient,
            behind.gradient,
        )
        return outer._replace(gradient=corrected)
