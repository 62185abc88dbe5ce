"""FedProto: clients share the mean embedding of each class, and no model (Tan et al. 2022, Algorithm 1)."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from fedjax_cluster import parallel, tree
from fedjax_cluster.algorithms.method import Method
from fedjax_cluster.algorithms.personal import (
    admit_with_own,
    global_model,
    keep_own,
    own_row,
    starting_clients,
    trained_own,
)
from fedjax_cluster.algorithms.round import Report, clients_info, first_state, report, start_models
from fedjax_cluster.inference import walk_rows
from fedjax_cluster.local import client_key, num_batches
from fedjax_cluster.nn.embedding import apply_with_embedding
from fedjax_cluster.options import NOT_NEGATIVE, option
from fedjax_cluster.parallel import Client, Contribution
from fedjax_cluster.server import Weighting, weighted_mean
from fedjax_cluster.types import ClientData, Cohort, Costs, Model, Population, PyTree, RoundInfo, State, Variables


class Prototypes(NamedTuple):
    """What the server keeps."""

    mean: Array  # f32[L, p], C̄_j
    known: Array  # bool[L], classes of which some client has sent one


class fedproto(Method):
    """Models of the clients' own, whose embeddings of a class are drawn together.

    Client i takes steps on f_i(θ_i) + λ · mean over its examples of ‖h(x; θ_i) − C̄_y‖²/p, where h is the input of the
    layer `output`, of p numbers, and sends C_ij, the mean of h over its examples of class j;
    C̄_j ← Σ_i n_ij C_ij / Σ_i n_ij.

    Returns:
      A method whose `personalize` gives the client's own model; memory grows with M·d.

    Raises:
      ValueError: an option out of its bound; from `init`, examples without classes, or a model without a layer
        `output`.

    >>> from fedjax_cluster import local, nn
    >>> fedproto(nn.mlp((8,)), local=local.sgd(0.1, batch_size=8, epochs=1)).prototype_weight
    1.0
    """

    not_private = "averages prototypes by class, of which no sensitivity is settled"

    prototype_weight: float = option(
        "λ, how much embeddings are drawn to the prototypes", default=1.0, bound=NOT_NEGATIVE
    )
    weighting: Weighting = option(
        '"examples" weights a client\'s prototype by n_ij, "uniform" all alike, as the public code does',
        default="examples",
    )

    def init(self, rng_key: Array, population: Population) -> tuple[State, RoundInfo]:
        info, data = population.info, population.data
        if info.num_classes < 1 or data.y.ndim != 2:
            raise ValueError(
                f"fedproto has a prototype of each class, but the examples of {info.name} have no class labels; use "
                "another method, such as ditto"
            )
        start, present = start_models(self.model, rng_key, population, 1)
        own = global_model(start)
        size = jax.eval_shape(lambda x: self.embed(own, x), data.x[0, :1]).shape[1]
        server = Prototypes(jnp.zeros((info.num_classes, size)), jnp.zeros(info.num_classes, bool))
        return first_state(start, starting_clients(present, own), server=server)

    def embed(self, variables: Variables, x: Array) -> Array:
        """h f32[N, p] of inputs [N, ...]."""
        return apply_with_embedding(self.model, variables, x, train=False)[0][1]

    def step(self, rng_key: Array, state: State, cohort: Cohort) -> tuple[State, RoundInfo]:
        prototypes: Prototypes = state.server
        classes, size = prototypes.mean.shape

        def train(client: Client, own: Variables) -> tuple[Array, Array, Report, Variables]:
            drawn = drawn_to(self.model, prototypes, self.prototype_weight)
            result = self.local.run(client_key(rng_key, client.index), drawn, own, client.data, round=state.round)
            moved = trained_own(own, result)
            mean, count = self.prototypes_of(moved, client.data, classes, size)
            told = report(result, mean)
            return mean, count, told, tree.where(tree.all_finite(told), moved, own)

        def contribute(output: tuple[Array, Array, Report, Variables]) -> Contribution:
            mean, count, *_ = output
            # NOTE: Eq. 6 divides by the number of clients with the class once more, which would shrink what is already
            # a mean.
            weight = count if self.weighting == "examples" else (count > 0).astype(jnp.float32)
            return Contribution(jnp.arange(classes), weight, mean)

        mapped = parallel.for_each_client(
            train,
            cohort,
            num_slots=classes,
            reduce=contribute,
            collect=lambda output: output[1:3],
            own=parallel.gather_rows(cohort, state.clients.own),
            renew=lambda output: output[3],
        )
        count, reports = mapped.collected
        sent = mapped.reduced.weight > 0
        server = Prototypes(
            jnp.where(sent[:, None], weighted_mean(mapped.reduced), prototypes.mean), prototypes.known | sent
        )
        clients = keep_own(cohort, state.clients, mapped.own, mapped.accepted)
        costs = self.costs(state, cohort, reports, count)
        slot = jnp.zeros_like(cohort.index)
        info = clients_info(slot, reports, cohort.mask, mapped.accepted, 1, 0, costs)
        return State(state.clusters, clients, server, state.round + 1), info

    def prototypes_of(self, variables: Variables, data: ClientData, classes: int, size: int) -> tuple[Array, Array]:
        """A client's C_ij f32[L, p], zero for a class that it lacks, and n_ij f32[L]."""
        # NOTE: of the model after the round's training, as Eq. 3 says; the public code averages the embeddings that
        # its last epoch met on the way.

        def add(carry: tuple[Array, Array], rows: tuple[Array, Array], fresh: Array, start: Array):
            x, y = rows
            members = jax.nn.one_hot(y, classes) * fresh.astype(jnp.float32)[:, None]
            embeddings = jnp.where(fresh[:, None], self.embed(variables, x), 0.0)
            return carry[0] + jnp.matmul(members.T, embeddings, precision="highest"), carry[1] + members.sum(0)

        empty = (jnp.zeros((classes, size)), jnp.zeros(classes))
        total, count = walk_rows(add, empty, (data.x, data.y), data.num_examples)
        return total / jnp.maximum(count, 1.0)[:, None], count

    def costs(self, state: State, cohort: Cohort, reports: Report, count: Array) -> Costs:
        """Prototypes down and up, in units of d; a pass over the data for the new ones."""
        one = tree.num_bytes(state.server.mean[0]) / tree.num_bytes(global_model(state.clusters))
        participants = jnp.sum(cohort.mask.astype(jnp.float32))
        held = jnp.where(cohort.mask[:, None], (count > 0).astype(jnp.float32), 0.0)
        return Costs(
            models_down=one * participants * jnp.sum(state.server.known.astype(jnp.float32)),
            models_up=one * held.sum(),
            gradient_evaluations=jnp.sum(reports.num_steps.astype(jnp.float32)),
            loss_evaluations=jnp.sum(jnp.where(cohort.mask, num_batches(self.local, cohort.data), 0.0)),
        )

    def personalize(self, rng_key: Array, state: State, data: ClientData, index: Array) -> tuple[Variables, Array]:
        # NOTE: predictions are those of the client's own classifier; the paper also takes the nearest prototype.
        return tree.broadcast(own_row(state.clients, index, global_model(state.clusters)), 1), jnp.ones(1)

    def admit(self, rng_key: Array, state: State, data: ClientData, index: Array) -> State:
        return admit_with_own(state, index, global_model(state.clusters))


def drawn_to(model: Model, prototypes: Prototypes, strength: float) -> Model:
    """The model with the gradient of λ‖h − C̄_y‖²/p added to its loss's, whose value stays the data's.

    NOTE: the paper measures the distance of the mini-batch's prototypes, summed over classes; here it is that of each
    example to the prototype of its class, as in the public code.
    """

    def apply(variables: Variables, x: Array, *, train: bool, rng_key: Array | None = None) -> tuple[Any, PyTree]:
        return apply_with_embedding(model, variables, x, train=train, rng_key=rng_key)

    def loss(outputs: tuple[Any, Array], y: Array) -> Array:
        # By products: gathering from what all devices share fails within the loop over their clients.
        members = jax.nn.one_hot(y, len(prototypes.known))
        centre = jnp.matmul(members, prototypes.mean, precision="highest")
        distance = jnp.mean(jnp.square(outputs[1].astype(jnp.float32) - centre), axis=1)
        penalty = strength * distance * jnp.matmul(members, prototypes.known.astype(jnp.float32))
        return model.loss(outputs[0], y) + penalty - jax.lax.stop_gradient(penalty)

    return model._replace(apply=apply, loss=loss)
