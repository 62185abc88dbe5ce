"""CFL: clusters split in two where their clients' updates disagree (Sattler, Müller, Samek 2020, Algorithm 5)."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax

from fedjax_cluster import cohorts, parallel, tree
from fedjax_cluster.algorithms import round as averaging
from fedjax_cluster.algorithms.cfl import privacy
from fedjax_cluster.algorithms.cfl.splits import (
    Clients,
    Division,
    Server,
    divide,
    empty_splits,
    inherit,
    lead_to_leaf,
    record_models,
    snapshot,
)
from fedjax_cluster.inference import full_gradient, score_rows
from fedjax_cluster.local import client_key, server_key
from fedjax_cluster.parallel.loop import Client, Reduced
from fedjax_cluster.server import Weighting, client_weight, init_optimizer, update_clusters
from fedjax_cluster.types import (
    ONE_DEVICE,
    ClientData,
    ClientMapping,
    ClusteredAlgorithm,
    Clusters,
    Cohort,
    Costs,
    LocalUpdate,
    Model,
    Population,
    PyTree,
    RoundInfo,
    Selection,
    State,
    Variables,
)


class Sent(NamedTuple):
    """What a client sends, and reports."""

    delta: Array  # f32[D]
    gradient: Array | None  # f32[D], where similarities are of gradients
    stats: PyTree
    weight: Array  # f32[]
    gain: Array  # f32[], accuracy of its cluster's model minus that of the parent's, on its held-out rows
    optimizer: PyTree  # after its training, where it is kept
    report: averaging.Report


def cfl(
    model: Model,
    *,
    clusters: int,
    local: LocalUpdate,
    server: optax.GradientTransformation | None = None,
    epsilon_1: float = 0.4,
    epsilon_2: float = 1.6,
    gamma_max: float = 0.0,
    min_size: int = 3,
    first_round: int = 20,
    similarity_of: Literal["updates", "gradients"] = "updates",
    weighting: Weighting = "uniform",
    keep_optimizer: bool = False,
    fall_back_after: int | None = None,
    held_out: float = 0.1,
    transform: privacy.Scheme | None = None,
    transform_seed: int = 0,
    edge_coordinates: int | None = 10_000,
    participation: float = 1.0,
) -> ClusteredAlgorithm:
    """Clustered Federated Learning by recursive bipartition.

    A cluster c with ‖mean Δθ_i‖ < ε₁ and max ‖Δθ_i‖ > ε₂ is divided so that the largest cosine across is smallest,
    and stays so if γ_max < √((1 − α_cross)/2). Both parts go on from θ* + the mean update of their own clients.

    Args:
      model: what is trained.
      clusters: K_max, slots for clusters; a split beyond is refused, and reported.
      local: a client's training.
      server: any optax transformation of minus the mean change; a part inherits its state.
      epsilon_1: ε₁, how near to stationary a cluster must be.
      epsilon_2: ε₂, how far from stationary one of its clients must be.
      gamma_max: γ_max in [0, 1), relative noise of the clients' updates that splits must bear; 0 keeps every split.
      min_size: fewest clients of a cluster that may be split.
      first_round: 0-based round from which on clusters may be split.
      similarity_of: criteria and cosines of the weight "updates", or of full "gradients" at the cluster's model.
      weighting: mean over clients, "uniform" (Algorithm 5) or by "examples" (Algorithm 2).
      keep_optimizer: a client goes on with its optimiser's state of its last round, momentum above all, as in the
        authors' code; M more models to keep. Otherwise it starts afresh (Algorithm 5 says nothing of it).
      fall_back_after: rounds after a split at which a part whose held-out accuracy is below that of its parent's
        model goes back to the latter for good (Sec. II-A); None never does.
      held_out: share of each client's training rows kept from training for that; used with fall_back_after only.
      transform: "permutation", "hadamard" or "householder": what clients apply to all they send (Sec. V-B).
      transform_seed: the clients' secret.
      edge_coordinates: r, random coordinates of the updates on the edges of the parameter tree; None keeps all.
      participation: share of the clients in a round, in (0, 1]. Criteria then hold for each member's latest update,
        once every member took part since the last split.

    Returns:
      A ClusteredAlgorithm. Splits, refused splits and fall-backs are events, kept with their similarities.

    Raises:
      ValueError: an argument out of its range.

    References:
      CFL, Secs. II-A, III and V, Algorithms 1, 4 and 5.
    """
    _check(clusters, epsilon_1, epsilon_2, gamma_max, min_size, first_round, fall_back_after, held_out)
    if similarity_of not in ("updates", "gradients"):
        raise ValueError(f"similarity_of is {similarity_of!r}; it must be 'updates' or 'gradients'")
    if transform is not None:
        privacy.check_scheme(transform)
    if edge_coordinates is not None and edge_coordinates < 1:
        raise ValueError(f"edge_coordinates is {edge_coordinates}; keep at least one, or None for all")
    start_optimizer = (local.init_optimizer if keep_optimizer else None) or (lambda params: ())
    if keep_optimizer and not jax.tree.leaves(start_optimizer(jnp.zeros(1))):
        raise ValueError("keep_optimizer is set, but the clients' optimiser keeps no state; give it a momentum, say")
    cohorts.cohort_size(participation, 1)
    optimizer = optax.sgd(1.0) if server is None else server
    num_splits = max(clusters - 1, 1)

    def init(rng_key: Array, population: Population) -> tuple[State, RoundInfo]:
        averaging.check_clusters(clusters, population)
        models = averaging.init_clusters(rng_key, model, population.info, clusters)
        models = models._replace(active=jnp.arange(clusters) == 0)
        present = averaging.present_clients(population)
        capacity, one = len(present), averaging.cluster_variables(models, jnp.asarray(0))
        width = secret_of(models).size
        kept = width if edge_coordinates is None else min(edge_coordinates, width)
        coordinates = jnp.zeros(0, jnp.int32)
        if kept < width:
            chosen = jax.random.choice(server_key(rng_key), width, (kept,), replace=False)
            coordinates = jnp.sort(chosen).astype(jnp.int32)
        clients = Clients(
            membership=averaging.one_hot(jnp.where(present, 0, -1), clusters),
            present=present,
            update=jnp.zeros((capacity, width)),
            share=jnp.zeros(capacity),
            seen=jnp.zeros(capacity, bool),
            valid=jnp.zeros(capacity, bool),
            side=jnp.full((capacity, num_splits), -1, jnp.int32),
            edges=jnp.zeros((capacity, num_splits, kept)),
            optimizer=tree.broadcast(start_optimizer(one.params), capacity),
        )
        never = jnp.full(clusters, -1, jnp.int32)
        own = Server(
            optimizer=init_optimizer(optimizer, models),
            splits=empty_splits(one, num_splits),
            origin=never,
            tested=never,
            mean_norm=jnp.full(clusters, jnp.nan),
            max_norm=jnp.full(clusters, jnp.nan),
            refused=never,
            fell_back=never,
            similarity=jnp.zeros((capacity, capacity)),
            coordinates=coordinates,
        )
        return State(models, clients, own, jnp.zeros((), jnp.int32)), averaging.initial_info(clusters)

    def secret_of(models: Clusters) -> privacy.OrthonormalTransform:
        size = tree.size(models.params) // clusters
        if transform is None:
            return privacy.OrthonormalTransform(lambda vector: vector, lambda vector: vector, size)
        return privacy.orthonormal_transform(transform, jax.random.key(transform_seed), size)

    def select(rng_key: Array, state: State) -> Selection:
        # A cluster that fell back keeps its parent's model; its clients have nothing to train.
        settled = state.clients.membership @ (state.server.fell_back >= 0).astype(jnp.float32)
        working = state.clients.present & (settled == 0)
        working = jnp.where(jnp.any(working), working, state.clients.present)
        return cohorts.uniform(rng_key, working, participation)

    # ----------------------------------------------------------------------------------------- a round

    def step(rng_key: Array, state: State, cohort: Cohort) -> tuple[State, RoundInfo]:
        secret = secret_of(state.clusters)
        slot = jnp.maximum(averaging.labels(parallel.gather_rows(cohort, state.clients.membership)), 0)
        due = on_probation(state)
        mapped = parallel.for_each_client(
            lambda client, slot, optimizer: send(rng_key, state, secret, slot, due[slot], optimizer, client),
            cohort,
            slot,
            parallel.gather_rows(cohort, state.clients.optimizer),
            collect=lambda sent: sent,
        )
        sent: Sent = mapped.collected
        usable = sent._replace(report=None)
        usable = tree.where(mapped.accepted, usable, jax.tree.map(jnp.zeros_like, usable))
        state = remember(state, cohort, usable, mapped.accepted)
        state, fallen = fall_back(state, slot, usable.gain, mapped.accepted, due)
        mean_norm, max_norm, qualified = criteria(state)
        state = state._replace(server=state.server._replace(mean_norm=mean_norm, max_norm=max_norm))

        old = averaging.labels(state.clients.membership)
        refused = state.server.refused
        state = parallel.run_if(jnp.any(qualified), lambda state: split(state, qualified, cohort.mapping), state)
        label = averaging.labels(state.clients.membership)
        refusing = jnp.any((refused < 0) & (state.server.refused >= 0))
        event = jnp.any(label != old) | refusing | jnp.any(fallen)
        state = train(state, cohort, secret, usable, mapped.accepted)

        info = averaging.round_info(
            slot,
            sent.report,
            cohort.mask,
            mapped.accepted,
            clusters,
            jnp.sum((label != old).astype(jnp.int32)),
            costs(cohort, sent.report)._replace(clusterings=jnp.sum(qualified.astype(jnp.float32))),
            event=event,
        )
        return state._replace(round=state.round + 1), info

    def send(rng_key: Array, state: State, secret, slot: Array, due: Array, optimizer: PyTree, client: Client) -> Sent:
        """A client's training; everything it sends is transformed, except batch-norm statistics."""
        start = averaging.cluster_variables(state.clusters, slot)
        data = training_rows(client.data)
        optimizer = optimizer if keep_optimizer else None
        result = local.run(client_key(rng_key, client.index), model, start, data, optimizer=optimizer)
        gain = jnp.zeros(())
        if fall_back_after is not None:
            rows = data.num_examples, client.data
            origin = jnp.maximum(state.server.origin[slot], 0)
            splits = state.server.splits
            before = jax.tree.map(lambda leaf: leaf[origin], Variables(splits.params, splits.stats))
            gain = lax.cond(
                due, lambda: score_rows(model, start, *rows) - score_rows(model, before, *rows), lambda: gain
            )
        return Sent(
            delta=secret.apply(tree.ravel(result.delta)),
            gradient=secret.apply(tree.ravel(full_gradient(model, start, data))) if of_gradients else None,
            stats=result.stats,
            weight=client_weight(weighting, result.num_examples),
            gain=gain,
            optimizer=result.optimizer if keep_optimizer else (),
            report=averaging.report(result),
        )

    def training_rows(data: ClientData) -> ClientData:
        """Without the last rows, which are held out; rows are in random order."""
        if fall_back_after is None:
            return data
        held = jnp.floor(held_out * data.num_examples.astype(jnp.float32)).astype(jnp.int32)
        held = jnp.clip(held, jnp.minimum(1, data.num_examples - 1), data.num_examples - 1)
        return data._replace(num_examples=data.num_examples - jnp.maximum(held, 0))

    def remember(state: State, cohort: Cohort, sent: Sent, accepted: Array) -> State:
        """Each participant's latest update; one that was not finite counts as seen, so that it holds up nobody."""
        old = state.clients
        vector = sent.delta if sent.gradient is None else sent.gradient
        rows = (vector, sent.weight, jnp.ones_like(accepted), accepted)
        kept = parallel.scatter_rows(cohort, (old.update, old.share, old.seen, old.valid), rows)
        names = ("update", "share", "seen", "valid")
        optimizer = parallel.scatter_rows(cohort, old.optimizer, sent.optimizer, cohort.mask & accepted)
        return state._replace(clients=old._replace(optimizer=optimizer, **dict(zip(names, kept, strict=True))))

    # ------------------------------------------------------------------------------------ when to split

    def criteria(state: State) -> tuple[Array, Array, Array]:
        """‖mean Δθ‖ f32[K], max ‖Δθ‖ f32[K], and which clusters may be split, bool[K] (Eqs. 32, 33)."""
        clients, own = state.clients, state.server
        members = clients.membership * clients.present.astype(jnp.float32)[:, None]
        valid = members * clients.valid.astype(jnp.float32)[:, None]
        share = valid * clients.share[:, None]
        total = jnp.sum(share, 0)
        mean = jnp.matmul(share.T, clients.update, precision="highest") / jnp.maximum(total, 1e-30)[:, None]
        mean_norm = jnp.where(total > 0, jnp.linalg.norm(mean, axis=1), jnp.nan)
        norms = jnp.linalg.norm(clients.update, axis=1)
        max_norm = jnp.where(total > 0, jnp.max(valid * norms[:, None], 0), jnp.nan)
        unseen = jnp.sum(members * (~clients.seen).astype(jnp.float32)[:, None], 0)
        ready = state.clusters.active & (own.fell_back < 0) & (state.round >= first_round)
        ready = ready & (jnp.sum(valid, 0) >= min_size) & (unseen == 0)
        return mean_norm, max_norm, ready & (mean_norm < epsilon_1) & (max_norm > epsilon_2)

    def find_splits(state: State, qualified: Array, mapping: ClientMapping) -> tuple[Division, Array]:
        """The server's clustering: cosines of all, and the best bipartition of every cluster that qualifies."""
        clients, own = state.clients, state.server
        norms = jnp.linalg.norm(clients.update, axis=1, keepdims=True)
        similarity = parallel.gram(clients.update / jnp.maximum(norms, 1e-30), mapping)
        rows = averaging.labels(clients.membership), clients.valid & clients.present, clients.side
        label, counted, side = parallel.replicate(mapping, rows)
        before = Division(label, state.clusters.active, side, own.splits, own.origin, own.refused)
        return divide(before, similarity, counted, qualified, gamma_max, state.round), similarity

    def cluster(rng_key: Array, state: State, mapping: ClientMapping = ONE_DEVICE) -> Array:
        """One test, of the largest cluster. Tests in the same round share the cosines, which is most of the work."""
        largest = jnp.argmax(state.clients.membership.sum(0))
        return find_splits(state, jnp.arange(clusters) == largest, mapping)[0].label

    def split(state: State, qualified: Array, mapping: ClientMapping) -> State:
        """Divides the clusters that qualify; their parts start as copies, with all that a parent has."""
        clients, own, number = state.clients, state.server, state.round
        after, similarity = find_splits(state, qualified, mapping)
        kept = clients.update[:, own.coordinates] if len(own.coordinates) else clients.update
        fresh = (after.splits.round == number)[None] & (after.side >= 0)
        models = Variables(state.clusters.params, state.clusters.stats)
        heirs, optimizer_state = inherit((models, own.optimizer), after, number)
        return state._replace(
            clusters=Clusters(heirs.params, heirs.stats, after.active),
            clients=clients._replace(
                weights=averaging.one_hot(after.label, clusters),
                side=after.side,
                edges=jnp.where(fresh[:, :, None], kept[:, None], clients.edges),
                seen=clients.seen & ~jnp.any(fresh, 1),
            ),
            server=own._replace(
                optimizer=optimizer_state,
                splits=record_models(after.splits, own.splits, models),
                origin=after.origin,
                refused=after.refused,
                similarity=similarity,
            ),
        )

    # --------------------------------------------------------------------------------------- the models

    def train(state: State, cohort: Cohort, secret, sent: Sent, accepted: Array) -> State:
        """θ_k ← θ_k + mean Δθ of its clients in the cohort; after a split these are each part's own, from θ*."""
        slot = averaging.labels(parallel.gather_rows(cohort, state.clients.membership))
        learns = accepted & (state.server.fell_back[jnp.maximum(slot, 0)] < 0)
        assignment = averaging.one_hot(slot, clusters) * jnp.where(learns, sent.weight, 0.0)[:, None]

        def sums(leaf: Array) -> Array:
            flat = leaf.reshape(leaf.shape[0], -1).astype(jnp.float32)
            return jnp.matmul(assignment.T, flat, precision="highest").reshape(clusters, *leaf.shape[1:])

        one = jax.tree.map(lambda leaf: leaf[0], state.clusters.params)
        delta = jax.vmap(lambda vector: tree.unravel(secret.invert(vector), one))(sums(sent.delta))
        total = {"delta": delta, "stats": jax.tree.map(sums, sent.stats)}
        counts = jnp.sum((assignment > 0).astype(jnp.int32), 0)
        reduced = Reduced(total, jnp.sum(assignment, 0), counts, jnp.zeros((), jnp.int32))
        models, optimizer_state = update_clusters(optimizer, state.server.optimizer, state.clusters, reduced)
        return state._replace(clusters=models, server=state.server._replace(optimizer=optimizer_state))

    def on_probation(state: State) -> Array:
        """bool[K]: clusters whose split is to be judged by now."""
        own = state.server
        if fall_back_after is None:
            return jnp.zeros(clusters, bool)
        since = own.splits.round[jnp.maximum(own.origin, 0)]
        return (own.origin >= 0) & (own.tested != own.origin) & (state.round >= since + fall_back_after)

    def fall_back(state: State, slot: Array, gain: Array, accepted: Array, due: Array) -> tuple[State, Array]:
        """Judges clusters by their participants; those that lost get their parent's model, for good."""
        own = state.server
        if fall_back_after is None:
            return state, jnp.zeros(clusters, bool)
        members = averaging.one_hot(jnp.where(accepted, slot, -1), clusters)
        judged = due & (jnp.sum(members, 0) > 0)
        fallen = judged & (gain @ members < 0)
        origin = jnp.maximum(own.origin, 0)
        before = tree.take(Variables(own.splits.params, own.splits.stats), origin)
        params = tree.where(fallen, before.params, state.clusters.params)
        stats = tree.where(fallen, before.stats, state.clusters.stats)
        own = own._replace(
            tested=jnp.where(judged, own.origin, own.tested),
            fell_back=jnp.where(fallen, state.round, own.fell_back),
        )
        return state._replace(clusters=Clusters(params, stats, state.clusters.active), server=own), fallen

    # -------------------------------------------------------------------------------- newcomers, reports

    def admit(rng_key: Array, state: State, client: ClientData, index: Array) -> State:
        clients, own = state.clients, state.server
        secret = secret_of(state.clusters)
        data = training_rows(client)

        def change(variables: Variables) -> Array:
            if of_gradients:
                sent = full_gradient(model, variables, data)
            else:
                sent = local.run(client_key(rng_key, index), model, variables, data).delta
            vector = secret.apply(tree.ravel(sent))
            return vector[own.coordinates] if len(own.coordinates) else vector

        slot = lead_to_leaf(own.splits, clients.side, clients.edges, change)
        new = {
            "membership": averaging.one_hot(slot, clusters),
            "present": jnp.asarray(True),
            "seen": jnp.asarray(False),
            "valid": jnp.asarray(False),
            "optimizer": start_optimizer(averaging.cluster_variables(state.clusters, slot).params),
        }
        rows = tree.scatter({name: getattr(clients, name) for name in new}, index, new)
        return state._replace(clients=clients._replace(**rows))

    def costs(cohort: Cohort, reports: averaging.Report) -> Costs:
        participants = jnp.sum(cohort.mask.astype(jnp.float32))
        steps = jnp.sum(reports.num_steps.astype(jnp.float32))
        if not of_gradients:
            return Costs(participants, participants, steps)
        size = local.config["batch_size"] or cohort.data.x.shape[1]
        passes = jnp.where(cohort.mask, (cohort.data.num_examples + size - 1) // size, 0)
        return Costs(participants, 2 * participants, steps + jnp.sum(passes.astype(jnp.float32)))

    of_gradients = similarity_of == "gradients"
    config: dict[str, Any] = averaging.describe(
        local,
        clusters=clusters,
        epsilon_1=epsilon_1,
        epsilon_2=epsilon_2,
        gamma_max=gamma_max,
        min_size=min_size,
        first_round=first_round,
        similarity_of=similarity_of,
        weighting=weighting,
        keep_optimizer=keep_optimizer,
        fall_back_after=fall_back_after,
        held_out=held_out if fall_back_after is not None else None,
        transform=transform,
        transform_seed=transform_seed,
        edge_coordinates=edge_coordinates,
        participation=participation,
    )
    personalize = averaging.personalize_by_label
    return ClusteredAlgorithm("cfl", config, model, init, select, step, personalize, admit, snapshot, cluster)


def _check(clusters, epsilon_1, epsilon_2, gamma_max, min_size, first_round, fall_back_after, held_out) -> None:
    smallest = {"clusters": (clusters, 1), "min_size": (min_size, 2), "first_round": (first_round, 0)}
    smallest["fall_back_after"] = (1 if fall_back_after is None else fall_back_after, 1)
    for name, (value, least) in smallest.items():
        if value < least:
            raise ValueError(f"{name} is {value}; it must be at least {least}")
    for name, value in (("epsilon_1", epsilon_1), ("epsilon_2", epsilon_2)):
        if not value >= 0:
            raise ValueError(f"{name} is {value}; it is compared with norms and must be 0 or more")
    if not 0 <= gamma_max < 1:
        raise ValueError(f"gamma_max is {gamma_max}; it must be at least 0 and below 1")
    if not 0 < held_out < 1:
        raise ValueError(f"held_out is {held_out}; it is a share of the training rows, between 0 and 1")
