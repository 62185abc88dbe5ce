"""What methods share that keep something of each client's own beside one global model."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from fedjax_cluster import parallel, tree
from fedjax_cluster.algorithms.round import Round, cluster_variables, size_of
from fedjax_cluster.types import Clusters, Cohort, Costs, LocalResult, PyTree, State, Variables


class PersonalClients(NamedTuple):
    """What a method with personal models keeps of its clients."""

    membership: Array  # f32[M, 1]: all share the global model
    present: Array  # bool[M]
    trained: Array  # bool[M], whether the client has taken part since it came
    own: PyTree  # leaves [M, ...], which never leave the clients


class Moved(NamedTuple):
    """What a round makes of what is a client's own."""

    own: PyTree  # after the round
    num_steps: Array  # i32[], gradient steps that it took
    size: Array  # f32[], of its change, as in `size_of`: where it is infinite, the client is rejected


def global_model(clusters: Clusters) -> Variables:
    """The one model."""
    return cluster_variables(clusters, jnp.zeros((), jnp.int32))


def starting_clients(present: Array, own: PyTree) -> PersonalClients:
    """All M clients, of whom each begins with the same of its own."""
    count = len(present)
    membership = present[:, None].astype(jnp.float32)
    return PersonalClients(membership, present, jnp.zeros(count, bool), tree.broadcast(own, count))


def moved_by(start: Variables, result: LocalResult) -> Moved:
    """A client's own model after its training from `start`."""
    own = Variables(optax.apply_updates(start.params, result.delta), result.stats)
    return Moved(own, jnp.asarray(result.num_steps, jnp.int32), size_of(result.delta))


def all_costs(done: Round, moved: Moved, mask: Array) -> Costs:
    """The costs of a round with the gradient steps that what is the clients' own took; mask bool[C]."""
    costs = done.costs(mask)
    more = jnp.sum(jnp.where(mask, moved.num_steps, 0).astype(jnp.float32))
    return costs._replace(gradient_evaluations=costs.gradient_evaluations + more)


def keep_own(cohort: Cohort, clients: PersonalClients, own: PyTree, accepted: Array) -> PersonalClients:
    """Clients of whom the cohort's accepted ones, bool[C], have what is their own, leaves [C, ...], anew."""
    kept, trained = parallel.scatter_rows(
        cohort, (clients.own, clients.trained), (own, jnp.ones_like(cohort.mask)), accepted
    )
    return clients._replace(own=kept, trained=trained)


def finite_own(cohort: Cohort, own: PyTree) -> Array:
    """bool[C]: who took part and has something finite of its own, leaves [C, ...], whatever became of what it sent."""
    return cohort.mask & jax.vmap(tree.all_finite)(own)


def own_row(clients: PersonalClients, index: Array, otherwise: PyTree) -> PyTree:
    """What is the own of client `index` i32[]; as long as it never took part, `otherwise`."""
    trained = clients.trained[index]
    return jax.tree.map(lambda own, other: jnp.where(trained, own[index], other), clients.own, otherwise)


def admit_with_own(state: State, index: Array, otherwise: PyTree) -> State:
    """The state with client `index` i32[]: with what it had of its own when it left, or with `otherwise`."""
    clients = state.clients
    own, trained = own_row(clients, index, otherwise), clients.trained[index]
    row = PersonalClients(jnp.ones(1), jnp.asarray(True), trained, own)
    return state._replace(clients=tree.scatter(clients, index, row))
