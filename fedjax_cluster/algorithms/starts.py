"""First models of clusters that are trained on clients far apart, in place of random ones."""

from __future__ import annotations

import functools
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from fedjax_cluster import parallel, tree
from fedjax_cluster.algorithms.method import FEWER_AT_A_TIME, FirstProgram
from fedjax_cluster.data.stored import Rows, streamed
from fedjax_cluster.inference import dataset_loss
from fedjax_cluster.lifting import Numbers, lifted, with_numbers
from fedjax_cluster.local import client_key, num_batches
from fedjax_cluster.marked_clients import shown_rows
from fedjax_cluster.parallel import Population
from fedjax_cluster.types import ClientData, Clusters, Cohort, Costs, LocalUpdate, Model, PyTree, Variables

Start = Literal["clients", "random"]
INSTEAD = f"start 'random', or {FEWER_AT_A_TIME}"
CANDIDATES = 2  # to each model wanted
MOST_ASKED = 2**14  # clients; of a group of a thousandth of all, sixteen are among them
LARGEST = 1e9  # a loss that is not finite counts as this
START_LEAKS = "start is 'clients', in which each first model is that of a single client as it is; give start 'random'"
FROM_CLIENTS = ('start="clients"', lambda method: method.start == "clients")
START = (
    '"clients" (ours): each first model is trained on a single client for `start_rounds` rounds, from the same initial '
    "model; the first client is drawn at random, each next one is that to which all models before suit least; of 2K "
    'those K stay that together suit all clients best. "random" (the paper): K independent models, of which some may '
    "suit nobody, and are never trained"
)


def models_of_clients(
    rng_key: Array,
    model: Model,
    local: LocalUpdate,
    optimizer: optax.GradientTransformation,
    models: Clusters,
    population: Population,
    present: Array,
    rounds: int,
) -> tuple[Clusters, Costs]:
    """First models of K clusters, by farthest-first traversal with the clients' losses as distances.

    Client i₁ is drawn at random; i_{k+1} = argmax_i min_{j≤k} F_i(θ_j), where θ_j is the first of `models` after
    `rounds` rounds on client i_j alone. A client whose data are hard for all models is far from them as well; so 2K are
    drawn, and those left out one by one without which Σ_i min_j F_i(θ_j) rises least. A round whose change or model is
    not finite is left out: the training goes on from the model before, and where it diverges for good that one stays.
    Without a single round that was finite, the model of its number, modulo K, in `models` takes its place. Of more than
    `MOST_ASKED` clients so many random ones are asked.

    Args:
      rng_key: decides the first client, who is asked, and the mini-batches.
      model, local, optimizer: what is trained, and how in a round.
      models: K initial models; the first is where all begin.
      population: the clients.
      present: bool[M], who can be drawn.
      rounds: of each single client.

    Returns:
      The models, and what finding them costs.
    """
    num_clusters = models.active.shape[0]
    draw_key, train_key = jax.random.split(rng_key)
    begun = Variables(models.params, models.stats)
    distance = np.asarray(jax.random.uniform(draw_key, present.shape))
    asked = np.flatnonzero(np.asarray(present))
    if len(asked) > MOST_ASKED:
        asked = np.sort(asked[np.argsort(-distance[asked])[:MOST_ASKED]])
    distance, there = distance[asked], np.ones(len(asked), bool)
    candidates = min(CANDIDATES * num_clusters, len(asked))
    (told_apart, of_local), (server, of_server) = lifted(local, "local."), lifted(optimizer, "server.")
    numbers = of_local, of_server
    found, losses, steps = [], [], 0.0
    for number in range(candidates):
        place = int(np.argmax(np.where(there, distance, -np.inf)))
        there[place], drawn = False, int(asked[place])
        data, index, other = _of_client(population, drawn), np.int32(drawn), np.int32(number % num_clusters)
        own, num_steps = _train_alone(train_key, begun, other, index, data, model, told_apart, server, rounds, numbers)
        found.append(own)
        steps += float(num_steps)
        suits = [
            parallel.fetched(_losses(own, cohort, model))[: len(clients)][np.isin(clients, asked)]
            for clients, cohort, _ in parallel.in_chunks(population, clients=asked)
        ]
        losses.append(np.nan_to_num(np.concatenate(suits).astype(float), nan=LARGEST, posinf=LARGEST))
        distance = np.min(losses, axis=0)
    params, stats = _stacked([found[number] for number in _best_together(np.array(losses), num_clusters)])
    costs = Costs(
        models_down=float(candidates * (rounds + len(asked))),
        models_up=float(rounds * candidates),
        gradient_evaluations=steps,
        loss_evaluations=float(candidates * np.sum(np.asarray(num_batches(local, population.data))[asked])),
    )
    return models._replace(params=params, stats=stats), costs


def first_losses(model: Model, models: Clusters, population: Population) -> tuple[FirstProgram, ...]:
    """What `models_of_clients` computes of all clients for each model that it finds."""
    own = jax.eval_shape(lambda all: jax.tree.map(lambda leaf: leaf[0], all), Variables(models.params, models.stats))
    return (FirstProgram("every client's loss", _losses_of_all, (own, population, model), instead=INSTEAD),)


def _best_together(losses: np.ndarray, wanted: int) -> list[int]:
    """Rows of losses [candidates, clients] that remain when those are left out by which Σ min rises least."""
    kept = list(range(len(losses)))
    while len(kept) > wanted:
        without = [losses[[other for other in kept if other != one]].min(0).sum() for one in kept]
        del kept[int(np.argmin(without))]
    return kept


def _of_client(population: Population, index: int) -> ClientData:
    """One client's data, wherever they are."""
    if streamed(population.data):
        return jax.tree.map(
            lambda leaf: jnp.asarray((leaf if isinstance(leaf, Rows) else parallel.fetched(leaf))[index]),
            population.data,
            is_leaf=lambda leaf: isinstance(leaf, Rows),
        )
    x, y, _ = population.data
    row = index if population.placement is None else int(population.placement.place[index])
    own = _row(population.data._replace(x=None, y=None), np.int32(index))
    if isinstance(x, Array) and isinstance(y, Array):
        x, y = _row((x, y), np.int32(row))
    else:  # tiles
        x, y = x[row], y[row]
    return jax.tree.map(jnp.asarray, parallel.fetched(own._replace(x=x, y=y)))


# These are no programs for each leaf, which would be lowered anew in every process.
@parallel.kept_program()
def _row(leaves: PyTree, index: Array) -> PyTree:
    return jax.tree.map(lambda leaf: leaf[index], leaves)


@parallel.kept_program()
def _stacked(variables: list[Variables]) -> Variables:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *variables)


@parallel.kept_program(static_argnames=("model", "local", "optimizer", "rounds"))
def _train_alone(
    rng_key: Array,
    begun: Variables,
    other: Array,
    index: Array,
    data: ClientData,
    model: Model,
    local: LocalUpdate,
    optimizer: optax.GradientTransformation,
    rounds: int,
    numbers: tuple[Numbers, Numbers],
) -> tuple[Variables, Array]:
    """The first of models [K, ...] after so many rounds of one client alone, and its mini-batch steps.

    It is the one numbered `other` where no round was finite.
    """
    first, instead = (tree.take(begun, jnp.asarray(slot)) for slot in (0, other))
    local, optimizer = with_numbers(local, numbers[0]), with_numbers(optimizer, numbers[1])

    def one_round(number: Array, carry: tuple[Variables, optax.OptState, Array, Array]):
        variables, server, done, steps = carry
        key = client_key(jax.random.fold_in(rng_key, number), index)
        result = local.run(key, model, variables, data, round=number)
        minus = jax.tree.map(jnp.negative, result.delta)
        updates, after = optimizer.update(minus, server, variables.params)
        trained = Variables(optax.apply_updates(variables.params, updates), result.stats)
        # A round in which nothing comes, as under drop-out, is one without a step.
        sent = tree.all_finite((result.delta, trained))
        variables, server = tree.where(sent, (trained, after), (variables, server))
        return variables, server, done + sent.astype(jnp.int32), steps + result.num_steps

    nothing = jnp.zeros((), jnp.int32)
    start = (first, optimizer.init(first.params), nothing, nothing)
    variables, _, done, steps = jax.lax.fori_loop(0, rounds, one_round, start)
    return tree.where(done > 0, variables, instead), steps


@parallel.kept_program(static_argnames="model")
def _losses(variables: Variables, cohort: Cohort, model: Model) -> Array:
    """Every client's mean loss f32[C]."""
    return parallel.for_each_client(
        lambda client: dataset_loss(model, variables, shown_rows(client.data)), cohort, collect=lambda loss: loss
    ).collected


@functools.partial(jax.jit, static_argnames="model")
def _losses_of_all(variables: Variables, population: Population, model: Model) -> Array:
    return _losses(variables, parallel.whole_population(population), model)


@functools.partial(jax.jit, static_argnames="num_groups")
def equal_groups(rng_key: Array, present: Array, num_groups: int) -> Array:
    """i32[M]: a random division of the present clients into groups of equal size; −1 for the absent."""
    score = jnp.where(present, jax.random.uniform(rng_key, present.shape), jnp.inf)
    rank = jnp.argsort(jnp.argsort(score)).astype(jnp.int32)
    return jnp.where(present, rank % num_groups, -1)
