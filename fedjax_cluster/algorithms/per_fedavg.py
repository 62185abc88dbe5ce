"""Per-FedAvg: a global model that is good after a few steps of each client (Fallah et al. 2020, Algorithm 1)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
import optax
from jax import Array

from fedjax_cluster import tree
from fedjax_cluster.algorithms import round as averaging
from fedjax_cluster.algorithms.fedavg import fedavg
from fedjax_cluster.server import Weighting
from fedjax_cluster.types import (
    BatchGradient,
    ClientData,
    ClusteredAlgorithm,
    Cohort,
    LocalUpdate,
    Model,
    RoundInfo,
    State,
    Variables,
)

Variant = Literal["first-order", "hessian-free"]
GRADIENTS_PER_STEP = {"first-order": 2, "hessian-free": 4}


def per_fedavg(
    model: Model,
    *,
    local: LocalUpdate,
    server: optax.GradientTransformation | None = None,
    variant: Variant = "first-order",
    inner_learning_rate: float = 0.01,
    difference: float = 1e-3,
    fine_tuning_steps: int = 1,
    weighting: Weighting = "uniform",
    participation: float = 1.0,
) -> ClusteredAlgorithm:
    """Personalised federated averaging.

    θ minimises Σ_i f_i(θ − α∇f_i(θ)): every local step follows (I − α∇²f_i(θ, D″)) ∇f_i(θ − α∇f_i(θ, D), D′) with
    three successive mini-batches D, D′, D″; the server averages. First-order leaves the Hessian out; Hessian-free
    takes ∇²f·g ≈ (∇f(θ + δg) − ∇f(θ − δg)) / 2δ.

    Args:
      model: what is trained.
      local: the outer steps: their rate (the paper's β), optimiser, mini-batches and number (τ).
      server: any optax transformation of minus the mean change; None is plain averaging.
      variant: "first-order" (two gradients a step) or "hessian-free" (four).
      inner_learning_rate: α, of the step that adapts the model, in training and in `personalize`.
      difference: δ of the Hessian-free variant.
      fine_tuning_steps: plain gradient steps of rate α from the global model that personalise it; the paper's 1.
      weighting: "uniform" as in the paper, or "examples".
      participation: share of the clients in a round, in (0, 1].

    Returns:
      A ClusteredAlgorithm with one cluster, whose `personalize` fine-tunes on the client's training rows.

    Raises:
      ValueError: an unknown variant, a rate, difference or number out of range, or a local update that cannot be
        rebuilt with another gradient.

    >>> from fedjax_cluster import local, nn
    >>> per_fedavg(nn.linear(), local=local.sgd(0.1, batch_size=8, steps=1)).name
    'per_fedavg'
    """
    if variant not in GRADIENTS_PER_STEP:
        raise ValueError(f"variant is {variant!r}; it must be 'first-order' or 'hessian-free'")
    for name, value in (("inner_learning_rate", inner_learning_rate), ("difference", difference)):
        if not (value > 0 and math.isfinite(value)):
            raise ValueError(f"{name} is {value}; it must be positive and finite")
    if fine_tuning_steps < 1:
        raise ValueError(f"fine_tuning_steps is {fine_tuning_steps}; personalisation takes at least one step")
    if variant == "hessian-free" and local.config.get("precision", "float32") != "float32":
        raise ValueError(
            f"variant is 'hessian-free', but gradients in {local.config['precision']} do not tell its steps of "
            f"{difference:g} apart; give precision='float32', or variant='first-order'"
        )
    if local.rebuild is None:
        raise ValueError("local cannot be rebuilt with the gradient of Per-FedAvg; give local.sgd(...)")

    step_gradient = meta_gradient(variant, inner_learning_rate, difference)
    fine_tuning = local.rebuild(
        learning_rate=inner_learning_rate, steps=fine_tuning_steps, epochs=None, proximal=0.0, weight_decay=0.0
    )
    averaged = fedavg(
        model,
        local=local.rebuild(gradient=step_gradient),
        server=server,
        weighting=weighting,
        participation=participation,
    )

    def step(rng_key: Array, state: State, cohort: Cohort) -> tuple[State, RoundInfo]:
        state, info = averaged.step(rng_key, state, cohort)
        gradients = info.costs.gradient_evaluations * GRADIENTS_PER_STEP[variant]
        return state, info._replace(costs=info.costs._replace(gradient_evaluations=gradients))

    def personalize(rng_key: Array, state: State, client: ClientData, index: Array) -> tuple[Variables, Array]:
        start = averaging.cluster_variables(state.clusters, jnp.zeros((), jnp.int32))
        result = fine_tuning.run(rng_key, model, start, client)
        tuned = Variables(optax.apply_updates(start.params, result.delta), result.stats)
        return tree.broadcast(tuned, 1), jnp.ones(1)

    config = averaging.describe(
        local,
        variant=variant,
        inner_learning_rate=inner_learning_rate,
        difference=difference,
        fine_tuning_steps=fine_tuning_steps,
        weighting=weighting,
        participation=participation,
    )
    return averaged._replace(name="per_fedavg", config=config, step=step, personalize=personalize)


def meta_gradient(variant: Variant, rate: float, difference: float) -> Callable[..., BatchGradient]:
    """Gradient of f(θ − α∇f(θ)), as `local.sgd` takes it for its steps.

    Args:
      variant: "first-order" or "hessian-free".
      rate: α.
      difference: δ.
    """

    def gradient(
        batch_gradient: Callable[..., BatchGradient],
        keys: Array,
        model: Model,
        variables: Variables,
        data: ClientData,
        number: Array | int,
    ) -> BatchGradient:
        def at(params, stats, batch: int) -> BatchGradient:
            return batch_gradient(keys, model, Variables(params, stats), data, 3 * number + batch)

        inner = at(variables.params, variables.stats, 0)
        outer = at(_moved(variables.params, inner.gradient, -rate), inner.stats, 1)
        if variant == "first-order":
            return outer
        ahead = at(_moved(variables.params, outer.gradient, difference), outer.stats, 2)
        behind = at(_moved(variables.params, outer.gradient, -difference), outer.stats, 2)
        corrected = jax.tree.map(
            lambda own, plus, minus: own - rate * (plus - minus) / (2 * difference),
            outer.gradient,
            ahead.gradient,
            behind.gradient,
        )
        return outer._replace(gradient=corrected)

    return gradient


def _moved(params, direction, rate: float):
    return jax.tree.map(lambda leaf, change: leaf + rate * change, params, direction)
