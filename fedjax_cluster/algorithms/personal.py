"""What methods share that keep something of each client's own beside one global model."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from fedjax_cluster import parallel, tree
from fedjax_cluster.algorithms.round import Round, cluster_variables, size_of
from fedjax_cluster.types import Clusters, Cohort, Costs, LocalResult, LocalUpdate, PyTree, State, Variables


class PersonalClients(NamedTuple):
    """What a method with personal models keeps of its clients."""

    membership: Array  # f32[M, 1]: all share the global model
    present: Array  # bool[M]
    trained: Array  # bool[M], whether the client has taken part since it came
    own: PyTree  # leaves [M, ...], which never leave the clients


class Moved(NamedTuple):
    """What is told of how a round moves what is a client's own."""

    num_steps: Array  # i32[], gradient steps that it took
    size: Array  # f32[], of its change, as in `size_of`: where it is infinite, the client is rejected
    finite: Array  # bool[], whether what it becomes is finite, and so is kept, whatever becomes of what is sent


def check_own_gradient(local: LocalUpdate, method: str) -> None:
    """Raises a ValueError where a local update is given a gradient that the method would put its own in place of."""
    if getattr(local, "gradient", None) is not None:
        raise ValueError(f"local follows a gradient of its own, but {method} gives its steps theirs; leave it out")


def global_model(clusters: Clusters) -> Variables:
    """The one model."""
    return cluster_variables(clusters, jnp.zeros((), jnp.int32))


def starting_clients(present: Array, own: PyTree) -> PersonalClients:
    """All M clients, of whom each begins with the same of its own."""
    count = len(present)
    membership = present[:, None].astype(jnp.float32)
    return PersonalClients(membership, present, jnp.zeros(count, bool), tree.broadcast(own, count))


def moved_to(own: PyTree, num_steps: Array | int, change: PyTree) -> Moved:
    """What is told of a client whose own became this by so many steps and a change."""
    return Moved(jnp.asarray(num_steps, jnp.int32), size_of(change), tree.all_finite(own))


def trained_own(start: Variables, result: LocalResult) -> Variables:
    """A client's own model after its training from `start`."""
    return Variables(optax.apply_updates(start.params, result.delta), result.stats)


def all_costs(done: Round, moved: Moved, mask: Array) -> Costs:
    """The costs of a round with the gradient steps that what is the clients' own took; mask bool[C]."""
    costs = done.costs(mask)
    more = jnp.sum(jnp.where(mask, moved.num_steps, 0).astype(jnp.float32))
    return costs._replace(gradient_evaluations=costs.gradient_evaluations + more)


def keep_own(cohort: Cohort, clients: PersonalClients, own: PyTree, renewed: Array) -> PersonalClients:
    """Clients with what is the cohort's own, leaves [C, ...], of whom some, bool[C], have it anew."""
    trained = parallel.scatter_rows(cohort, clients.trained, jnp.ones_like(cohort.mask), cohort.mask & renewed)
    return clients._replace(own=parallel.put_back(cohort, clients.own, own), trained=trained)


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
