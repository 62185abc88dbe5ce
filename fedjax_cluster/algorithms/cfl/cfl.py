"""CFL: clusters split in two where their clients' updates disagree (Sattler, Müller, Samek 2020, Algorithm 5)."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import optax
from jax import Array

from fedjax_cluster import cohorts, parallel, tree
from fedjax_cluster.algorithms.cfl import landmarks as by_landmarks
from fedjax_cluster.algorithms.cfl import newcomers
from fedjax_cluster.algorithms.cfl.privacy import OrthonormalTransform, Scheme, orthonormal_transform, unprotected
from fedjax_cluster.algorithms.cfl.splits import (
    Division,
    Sent,
    Server,
    divide,
    fall_back,
    gain_over_parent,
    inherit,
    norms_of_updates,
    on_probation,
    record_models,
    remember,
    snapshot_of_splits,
    without_held_out,
)
from fedjax_cluster.algorithms.cfl.start import start_state
from fedjax_cluster.algorithms.heard_landmarks import check_landmarks
from fedjax_cluster.algorithms.method import AveragingMethod, Defaults
from fedjax_cluster.algorithms.planned import number_there
from fedjax_cluster.algorithms.round import (
    Report,
    check_square,
    clients_info,
    cluster_variables,
    cohort_labels,
    labels,
    one_hot,
    report,
    start_models,
    training_costs,
)
from fedjax_cluster.inference import full_gradient
from fedjax_cluster.local import client_key, num_batches
from fedjax_cluster.marked_clients import shown_rows
from fedjax_cluster.options import BELOW_ONE, INSIDE_UNIT, NOT_NEGATIVE, SEED, SHARE, at_least, option
from fedjax_cluster.parallel import Client, Contribution
from fedjax_cluster.privacy.gaussian import SHOWN, gaussian
from fedjax_cluster.server import Weighting, client_weight, params_part, private_rows, reduce_rows, update_clusters
from fedjax_cluster.types import (
    ONE_DEVICE,
    ClientData,
    ClientMapping,
    Clusters,
    Cohort,
    Costs,
    LocalUpdate,
    Population,
    PyTree,
    RoundInfo,
    Selection,
    State,
    Variables,
)

NEAR = ("epsilon_1 left out", lambda method: method.epsilon_1 is None)
FAR = ("epsilon_2 left out", lambda method: method.epsilon_2 is None)


class cfl(AveragingMethod):
    """Clustered Federated Learning by recursive bipartition.

    A cluster c with ‖mean Δθ_i‖ < ε₁ and max ‖Δθ_i‖ > ε₂ is divided so that the largest cosine across is smallest,
    and stays so if γ_max < √((1 − α_cross)/2). Both parts go on from θ* + the mean update of their clients.

    Returns:
      A method. Splits, refused splits and fall-backs are events, kept with their similarities.

    References:
      CFL, Secs. II-A, III and V, Algorithms 1, 4 and 5.
    """

    sends, defaults = SHOWN, Defaults(rounds=40, finds_clusters=True)
    clusters_by: ClassVar[Any] = property(lambda self: "shown" if self.of_gradients else "changes")
    first_clustering: ClassVar[Any] = property(lambda self: self.first_round)

    local: LocalUpdate = option("a client's training")
    clusters: int = option("K_max, slots for clusters; a split beyond is refused, and reported", bound=at_least(1))
    server: optax.GradientTransformation | None = option(
        "any optax transformation of minus the mean change; a part inherits its state", default=None
    )
    epsilon_1: float | None = option(
        "ε₁, norm of the mean update below which clients may split; None: by `near`", default=None, bound=NOT_NEGATIVE
    )
    epsilon_2: float | None = option(
        "ε₂, norm that one of their updates must exceed; None: by `far`", default=None, bound=NOT_NEGATIVE
    )
    near: float = option(
        "(ours) ε₁ as a part of the root mean square of the clients' norms", default=0.5, bound=SHARE, used=NEAR
    )
    far: float = option(
        "(ours) ε₂ as a part of the largest norm of the run so far", default=0.475, bound=SHARE, used=FAR
    )
    gamma_max: float = option(
        "γ_max, relative noise of the clients' updates that splits must bear; 0 keeps every split, 0.71 those alone "
        "whose parts disagree (a cosine below 0)",
        default=0.67,
        bound=BELOW_ONE,
    )
    min_size: int = option("fewest clients, or landmarks, of a cluster that may be split", default=3, bound=at_least(2))
    first_round: int = option("0-based round from which on clusters may be split", default=5, bound=at_least(0))
    similarity_of: Literal["updates", "gradients"] = option(
        'criteria and cosines of the weight "updates", or of full "gradients" at the cluster\'s model',
        default="updates",
    )
    weighting: Weighting = option(
        'mean over clients, "uniform" (Algorithm 5) or by "examples" (Algorithm 2)', default="uniform"
    )
    keep_optimizer: bool = option(
        "a client goes on with its optimiser's state of its last round, momentum above all, as in the authors' code; M "
        "more models to keep. Otherwise it starts afresh (Algorithm 5 says nothing of it)",
        default=False,
    )
    fall_back_after: int | None = option(
        "rounds after a split at which a part whose held-out accuracy is below that of its parent's model goes back to "
        "the latter for good (Sec. II-A); None never does",
        default=None,
        bound=at_least(1),
    )
    held_out: float = option(
        "share of each client's training rows kept from training for that; used with fall_back_after only",
        default=0.1,
        bound=INSIDE_UNIT,
        used=("fall_back_after", lambda method: method.fall_back_after is not None),
    )
    transform: Scheme | None = option(
        '"permutation", "hadamard" or "householder": what clients apply to all they send (Sec. V-B)', default=None
    )
    transform_seed: int = option(
        "the clients' secret", default=0, bound=SEED, used=("transform", lambda method: method.transform is not None)
    )
    edge_coordinates: int | None = option(
        "r, random coordinates of the updates on the edges of the parameter tree; None keeps all",
        default=10_000,
        bound=at_least(1),
    )
    participation: float = option(
        "share of the clients in a round. Criteria then hold for each member's latest update, once every member took "
        "part since the last split",
        default=1.0,
        bound=SHARE,
    )

    landmarks: int | None = option(
        "(ours) m, landmark clients, in every round beside a share of the others: these alone are judged, compared and "
        "divided, and every other client joins the side with the landmark whose update is most like its own, in the "
        "same round or when it next takes part. None divides all, as the paper does",
        default=None,
        bound=at_least(2),
    )

    def check(self) -> None:
        by_landmarks.check_options(self)
        if self.keep_optimizer and not jax.tree.leaves(self.local.init_optimizer(jnp.zeros(1))):
            raise ValueError("keep_optimizer is set, but the clients' optimiser keeps no state; give it a momentum")

    def unprotected(self, privacy: gaussian) -> str | None:
        if self.landmarks is not None:
            return "landmarks are in more rounds than others, so that no draw is of equal chances; give none"
        return unprotected(privacy, self.of_gradients, self.fall_back_after)

    def times_shown(self, rounds: int) -> int:
        return rounds

    @property
    def num_splits(self) -> int:
        """S, the most splits there can be."""
        return max(self.clusters - 1, 1)

    @property
    def of_gradients(self) -> bool:
        return self.similarity_of == "gradients"

    def init(self, rng_key: Array, population: Population) -> tuple[State, RoundInfo]:
        capacity = len(population.data.num_examples)
        # Kept, passed on, new, and cut in two.
        check_square(self.name, capacity if self.landmarks is None else self.landmarks, 4, landmarks=True)
        models, present = start_models(self.model, rng_key, population, self.clusters)
        if self.landmarks is not None:
            check_landmarks(self.landmarks, number_there(present), 1, None)
        # One program in place of one for each array, which would be lowered anew in every process.
        start = parallel.compile_quickly(start_state, static_argnames=("method",))
        return start(rng_key, models, present, method=self)

    def start_optimizer(self, params: PyTree) -> PyTree:
        """A client's optimiser state before its first round, where it is kept."""
        return self.local.init_optimizer(params) if self.keep_optimizer else ()

    def secret(self, models: Clusters) -> OrthonormalTransform:
        """What clients apply to all they send."""
        size = tree.size(models.params) // self.clusters
        if self.transform is None:
            return OrthonormalTransform(lambda vector: vector, lambda vector: vector, size)
        return orthonormal_transform(self.transform, jax.random.key(self.transform_seed), size)

    @property
    def fewest_landmarks(self) -> int:
        """How many of them must be there."""
        return self.min_size

    def clients_in_round(self, present: int) -> int:
        others = max(present - (self.landmarks or 0), 0)
        return present - others + AveragingMethod.clients_in_round(self, others) if others else present

    @property
    def draws_ahead(self) -> bool:
        return self.landmarks is not None

    def select(self, rng_key: Array, state: State) -> Selection:
        if self.landmarks is not None:
            return by_landmarks.select(self, rng_key, state)
        # A cluster that fell back keeps its parent's model; its clients have nothing to train.
        settled = jnp.sum(jnp.where(state.server.fell_back[None] >= 0, state.clients.membership, 0.0), axis=1)
        working = state.clients.present & (settled == 0)
        working = jnp.where(jnp.any(working), working, state.clients.present)
        return cohorts.uniform(rng_key, working, self.participation)

    # ----------------------------------------------------------------------------------------- a round

    def step(self, rng_key: Array, state: State, cohort: Cohort) -> tuple[State, RoundInfo]:
        if self.landmarks is not None:
            return by_landmarks.step(self, rng_key, state, cohort)
        secret = self.secret(state.clusters)
        slot = jnp.maximum(cohort_labels(state, cohort), 0)
        due = on_probation(state, self.fall_back_after)
        before = state
        mapped = parallel.for_each_client(
            lambda client, slot, optimizer: self.send(rng_key, before, secret, slot, due[slot], optimizer, client),
            cohort,
            slot,
            parallel.gather_rows(cohort, state.clients.optimizer),
            collect=lambda sent: sent,
        )
        sent: Sent = mapped.collected
        usable = sent._replace(report=None)
        usable = tree.where(mapped.accepted, usable, jax.tree.map(jnp.zeros_like, usable))
        heard = mapped.accepted
        if self.privacy is not None:
            # Of what is shown nothing is left out: that would tell of a client.
            usable, heard = usable._replace(gradient=sent.gradient, weight=sent.weight), cohort.mask
        state = remember(state, cohort, usable, heard, mapped.accepted)
        fallen = jnp.zeros(self.clusters, bool)
        if self.fall_back_after is not None:
            state, fallen = fall_back(state, slot, usable.gain, mapped.accepted, due)
        server, qualified = self.criteria(state)
        state = state._replace(server=server)
        old, refused = labels(state.clients.membership), state.server.refused
        split = functools.partial(self.split, qualified=qualified, mapping=cohort.mapping)
        state = parallel.run_if(jnp.any(qualified), split, state, cohort.mapping)
        label = labels(state.clients.membership)
        refusing = jnp.any((refused < 0) & (state.server.refused >= 0))
        event = jnp.any(label != old) | refusing | jnp.any(fallen)
        state, accepted = self.train(rng_key, state, cohort, secret, usable, mapped.accepted)
        costs = self.costs(state.clusters, cohort, sent.report)
        info = clients_info(
            slot,
            sent.report,
            cohort.mask,
            accepted,
            self.clusters,
            jnp.sum((label != old).astype(jnp.int32)),
            costs._replace(clusterings=jnp.sum(qualified.astype(jnp.float32))),
            event=event,
        )
        return state._replace(round=state.round + 1), info

    def send(
        self,
        rng_key: Array,
        state: State,
        secret: OrthonormalTransform,
        slot: Array,
        due: Array,
        optimizer: PyTree,
        client: Client,
    ) -> Sent:
        """A client's training; everything it sends is transformed, except batch-norm statistics."""
        start = cluster_variables(state.clusters, slot)
        data, key = self.training_rows(client.data, client.index), client_key(rng_key, client.index)
        kept = optimizer if self.keep_optimizer else None
        result = self.local.run(key, self.model, start, data, optimizer=kept, round=state.round)
        shown = self.training_rows(shown_rows(client.data), client.index) if self.of_gradients else None
        gradient = None if shown is None else full_gradient(self.model, start, shown)
        delta = secret.apply(tree.ravel(result.delta))
        compared = None if gradient is None else secret.apply(tree.ravel(gradient))
        if self.privacy is not None:
            compared = self.privacy.shown(key, delta)
        return Sent(
            delta=delta,
            gradient=compared,
            stats=result.stats,
            weight=client_weight("uniform" if self.privacy else self.weighting, result.num_examples),
            gain=self.gain(state, start, slot, due, data.num_examples, client),
            optimizer=result.optimizer if self.keep_optimizer else (),
            report=report(result, gradient),
        )

    def gain(self, state: State, start: Variables, slot: Array, due: Array, first: Array, client: Client) -> Array:
        """As `splits.gain_over_parent`; 0 if not due."""
        if self.fall_back_after is None:
            return jnp.zeros(())
        gained = functools.partial(gain_over_parent, self.model, state.server, slot, start, first, client)
        return parallel.unless(~due, jnp.zeros(()), gained)

    def training_rows(self, data: ClientData, index: Array) -> ClientData:
        """Without those of a client's rows that are held out."""
        return data if self.fall_back_after is None else without_held_out(data, index, self.held_out)

    # ------------------------------------------------------------------------------------ when to split

    def criteria(self, state: State) -> tuple[Server, Array]:
        """The norms of the updates, and which clusters may be split, bool[K] (Eqs. 32, 33)."""
        server, norms = state.server, norms_of_updates(state)
        largest = jnp.max(jnp.where(jnp.isfinite(norms.largest), norms.largest, 0.0), initial=server.largest)
        # NOTE: the paper leaves ε₁ and ε₂ to the user; their right values depend on network, rate and number of steps.
        # Without the second, clients that know their few examples by heart are divided.
        near = self.near * norms.typical if self.epsilon_1 is None else self.epsilon_1
        far = self.far * largest if self.epsilon_2 is None else self.epsilon_2
        ready = state.clusters.active & (server.fell_back < 0) & (state.round >= self.first_round)
        ready = ready & (norms.count >= self.min_size) & (norms.unseen == 0)
        server = server._replace(mean_norm=norms.mean, max_norm=norms.largest, largest=largest)
        return server, ready & (norms.mean < near) & (norms.largest > far)

    def find_splits(self, state: State, qualified: Array, mapping: ClientMapping) -> tuple[Division, Array]:
        """The server's clustering: cosines of all, and the best bipartition of every cluster that qualifies."""
        clients, server = state.clients, state.server
        norms = jnp.linalg.norm(clients.update, axis=1, keepdims=True)
        similarity = parallel.gram(clients.update / jnp.maximum(norms, 1e-30), mapping)
        rows = labels(clients.membership), clients.valid & clients.present, clients.share > 0, clients.side
        label, counted, known, side = parallel.replicate(mapping, rows)
        before = Division(label, state.clusters.active, side, server.splits, server.origin, server.refused)
        # Divided among the devices, each merge would be a wait for the others.
        divided = parallel.on_each_device(functools.partial(divide, gamma_max=self.gamma_max), mapping)
        return divided(before, similarity, counted, known, qualified, state.round), similarity

    def cluster(self, rng_key: Array, state: State, mapping: ClientMapping = ONE_DEVICE) -> Array:
        """One test, of the largest cluster. Tests in the same round share the cosines, which is most of the work."""
        if self.landmarks is not None:
            state, mapping = by_landmarks.of_landmarks(state), ONE_DEVICE
        largest = jnp.argmax(state.clients.membership.sum(0))
        return self.find_splits(state, jnp.arange(self.clusters) == largest, mapping)[0].label

    def split(self, state: State, qualified: Array, mapping: ClientMapping) -> State:
        """Divides the clusters that qualify; their parts start as copies, with all that a parent has."""
        clients, server, number = state.clients, state.server, state.round
        after, similarity = self.find_splits(state, qualified, mapping)
        kept = clients.update[:, server.coordinates] if len(server.coordinates) else clients.update
        fresh = (after.splits.round == number)[None] & (after.side >= 0)
        models = Variables(state.clusters.params, state.clusters.stats)
        return state._replace(
            clusters=inherit(state.clusters, after, number)._replace(active=after.active),
            clients=clients._replace(
                membership=one_hot(after.label, self.clusters),
                side=after.side,
                edges=jnp.where(fresh[:, :, None], kept[:, None], clients.edges),
                seen=clients.seen & ~jnp.any(fresh, 1),
            ),
            server=server._replace(
                splits=record_models(after.splits, server.splits, models),
                origin=after.origin,
                refused=after.refused,
                similarity=similarity,
            ),
        )

    # --------------------------------------------------------------------------------------- the models

    def train(
        self, rng_key: Array, state: State, cohort: Cohort, secret: OrthonormalTransform, sent: Sent, accepted: Array
    ) -> tuple[State, Array]:
        """θ_k ← θ_k + mean Δθ of its clients in the cohort; after a split these are each part's, from θ*.

        Of those accepted, bool[C], the ones whose cluster could not take the step are not any more.
        """
        slot = cohort_labels(state, cohort)
        learns = accepted & (state.server.fell_back[jnp.maximum(slot, 0)] < 0)
        rows = Contribution(slot, sent.weight, {"delta": sent.delta, "stats": sent.stats})
        reduced = reduce_rows(self.aggregation, rows, learns, self.clusters, cohort.mapping)
        if (private := self.private(rng_key, state.clusters)) is not None:
            reduced = private_rows(private, rows, cohort.mask, learns)
        one = jax.tree.map(lambda leaf: leaf[0], state.clusters.params)
        delta = jax.vmap(lambda vector: tree.unravel(secret.invert(vector), one))(reduced.total["delta"])
        reduced = reduced._replace(total={**reduced.total, "delta": delta})
        clusters, refused = update_clusters(self.optimizer, state.clusters, reduced)
        return state._replace(clusters=clusters), accepted & ~(learns & refused[slot])

    def costs(self, models: Clusters, cohort: Cohort, reports: Report) -> Costs:
        costs = training_costs(cohort.mask, reports.num_steps)
        if not self.of_gradients:  # with privacy what is clustered is another message than what is averaged
            return costs if self.privacy is None else costs._replace(models_up=2 * costs.models_up)
        passes = jnp.sum(jnp.where(cohort.mask, num_batches(self.local, cohort.data), 0.0))
        up, steps = (1.0 + params_part(models)) * costs.models_up, costs.gradient_evaluations + passes
        return costs._replace(models_up=up, gradient_evaluations=steps)

    # ------------------------------------------------------------------------------ newcomers, snapshots

    def admit(self, rng_key: Array, state: State, data: ClientData, index: Array) -> State:
        return newcomers.admit(self, rng_key, state, data, index)

    def snapshot(self, state: State) -> Mapping[str, Any]:
        compared = state if self.landmarks is None else by_landmarks.of_landmarks(state)
        whose = {} if self.landmarks is None else {"landmarks": state.server.landmarks}
        previous = {} if self.landmarks is None else {"previous_labels": state.clients.previous}
        return {**snapshot_of_splits(compared, state.clients.membership), **previous, **whose}
