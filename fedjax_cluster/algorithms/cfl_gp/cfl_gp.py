"""CFL-GP: clients grouped by their gradients on common models (Kim, Kim, de Veciana, ICML 2024)."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array

from fedjax_cluster import cohorts, parallel, tree
from fedjax_cluster.algorithms.cfl_gp.joining import join_and_train, joined, slots_by_loss
from fedjax_cluster.algorithms.cfl_gp.landmarks import forget, group_all, group_cohort, landmarks_among
from fedjax_cluster.algorithms.cfl_gp.profiles import (
    Beta,
    Clients,
    check_profiles,
    estimate_clusters,
    fold_in_block,
    fold_in_rows,
    profiled,
    regroup,
)
from fedjax_cluster.algorithms.cfl_gp.start import Server, start_state
from fedjax_cluster.algorithms.heard_landmarks import check_landmarks
from fedjax_cluster.algorithms.method import AveragingMethod, Defaults
from fedjax_cluster.algorithms.planned import number_there, rows_there
from fedjax_cluster.algorithms.round import (
    Round,
    Trained,
    cluster_round,
    cohort_labels,
    initial_info,
    labels,
    nearest_by_loss,
    one_hot,
    personalize_by_label,
    personalize_by_label_or_loss,
    present_clients,
    size_of,
    start_models,
    train_client,
)
from fedjax_cluster.lifting import always, lifted
from fedjax_cluster.local import client_key, server_key
from fedjax_cluster.marked_clients import poses, shown_rows
from fedjax_cluster.options import SHARE, Bound, at_least, option
from fedjax_cluster.parallel import Client
from fedjax_cluster.privacy.gaussian import SHOWN, gaussian
from fedjax_cluster.server import Rounding, Weighting, keep_decimals, params_part, shared_part
from fedjax_cluster.types import (
    ONE_DEVICE,
    ClientData,
    ClientMapping,
    Cohort,
    Costs,
    LocalResult,
    LocalUpdate,
    Population,
    PyTree,
    RoundInfo,
    Selection,
    State,
    Variables,
)

# Beyond this the M×M Gram matrices of K blocks outweigh the profiles; subspace iteration then works on those.
LARGEST_GRAM = 2048
PILOT = ('clusters="auto"', lambda method: method.clusters == "auto")
DECIMALS = Bound(lambda value: 0 <= value <= 20, "from 0 to 20; float32 has no more")


class cfl_gp(AveragingMethod):
    """Clustered federated learning by gradient-based partitioning (Algorithms 1, 4 and 5).

    Every P-th round one model k̃ (round robin) is queried by all clients: g_{c,k̃} ← (1−β) g_{c,k̃} + β Δθ_c(θ_k̃);
    the profiles [g_{c,1} … g_{c,K}] are projected on their top-K left singular vectors, grouped by k-means, and
    the groups named for the largest overlap with the old ones.
    """

    sends = SHOWN
    clusters_by = "shown"

    defaults = Defaults(averaging="gradients", rounds=200)

    local: LocalUpdate = option(
        "`sgd(1.0, batch_size=b, steps=1)` with `server=optax.sgd(γ)` is gradient averaging (Algorithm 1); more steps "
        "are model averaging (Algorithm 4)"
    )
    clusters: int | Literal["auto"] = option(
        'K, or "auto": estimated from the profiles of a pilot of `pilot_rounds` rounds with `max_clusters` models '
        "(App. G)",
        bound=at_least(1),
    )
    every: int = option("P; clustering happens in rounds t with t mod P = 1 mod P", default=2, bound=at_least(1))
    beta: Beta = option(
        '"mean" for the cumulative mean, β = 1/(earlier updates of the block + 1); or a constant (1.0 is the ablation '
        "of F.1)",
        default="mean",
        bound=SHARE,
    )
    cluster_until: int | None = option("T_cl; no clustering from this round on", default=None, bound=at_least(0))
    stop_after: int | None = option(
        "clustering ends for good once the assignment has not changed for this many rounds",
        default=None,
        bound=at_least(1),
    )
    compression: float = option(
        "d/d̂; above 1 the profile keeps d̂ random coordinates, drawn once (App. E.1)",
        **{"default": 1.0, "bound": at_least(1), "shapes": always},
    )
    profile_layers: tuple[str, ...] = option(
        'parameter paths that the profile is made of, such as `["output"]` (App. E.2); () is all', default=()
    )
    decimals: int | None = option(
        "digits after the decimal point that a client sends (App. E.1, Table 7)", default=None, bound=DECIMALS
    )
    rounding: Rounding = option(
        'to the "nearest" number with so many decimals, or towards "zero"',
        default="nearest",
        used=("decimals", lambda method: method.decimals is not None),
    )
    shared_layers: tuple[str, ...] = option(
        "parameter paths averaged over all clients after every update (F.6, F.7)", default=()
    )
    weighting: Weighting = option('"uniform" as in the paper\'s code, or "examples"', default="uniform")
    cluster_cohort: bool = option(
        "only the cohort is embedded and clustered, the others keep their cluster; otherwise everybody takes part in "
        "clustering rounds, whatever the participation",
        default=False,
    )
    landmarks: int | None = option(
        "(ours) m, landmark clients: these alone are embedded and grouped by k-means, and every other client joins the "
        "group whose mean is nearest in their embedding, over the blocks that it has filled. With `cluster_cohort` "
        "they are in every clustering round; who has been in none yet trains no model and is evaluated by that of "
        "least training loss, whose cluster it joins when clustering has ended. None embeds everybody, as in the paper",
        default=None,
        bound=at_least(2),
    )
    profiles_of: Literal["everybody", "landmarks"] = option(
        '(ours) whose profiles the server keeps: of "everybody", M·K·d̂ numbers; or of the "landmarks" alone, m·K·d̂, '
        "and any other client joins by the update that it has just shown",
        default="everybody",
    )
    max_clusters: int = option("number of models of the pilot", default=8, bound=at_least(2), used=PILOT)
    pilot_rounds: int = option("length of the pilot", default=20, bound=at_least(2), used=PILOT)

    def __post_init__(self):
        super().__post_init__()
        if self.profiles_of == "landmarks" and self.landmarks is None:
            raise ValueError("profiles_of is 'landmarks', but there are none; give landmarks=256, say, or 'everybody'")

    def unprotected(self, privacy: gaussian) -> str | None:
        if self.clusters == "auto":
            return "clusters is 'auto', whose pilot is no part of the run's budget; give a number"
        if self.landmarks is not None and self.cluster_cohort:
            return "landmarks are in more rounds than others, so that no draw is of equal chances; give none"
        return None

    def times_shown(self, rounds: int) -> int:
        # Whether it stops earlier depends on what was shown, and takes nothing off.
        until = rounds if self.cluster_until is None else min(rounds, self.cluster_until)
        return len(range(1 % self.every, until, self.every))

    # ------------------------------------------------------------------------------------- init

    def init(self, rng_key: Array, population: Population) -> tuple[State, RoundInfo]:
        if self.clusters != "auto":
            return self.init_with(rng_key, population, self.clusters)
        pilot_key = jax.random.fold_in(rng_key, 1)
        present = int(present_clients(population).sum())
        # In a cohort there are to be clients for all clusters.
        most = min(self.max_clusters, cohorts.cohort_size(self.participation if self.cluster_cohort else 1.0, present))
        (state, _), cohort = self.init_with(rng_key, population, most), parallel.whole_population(population)
        costs = Costs()
        pilot = dataclasses.replace(self, cluster_until=None, stop_after=None)  # a profile of each model
        for number in range(self.pilot_rounds):
            # Awaited, as many rounds under way at once could block one another (`parallel.use_all_cores`).
            key = jax.random.fold_in(pilot_key, number)
            state, info = jax.block_until_ready(_step(key, state, cohort, method=pilot))
            costs = jax.tree.map(jnp.add, costs, info.costs)
        found = estimate_clusters(pilot_key, state, most).num_clusters
        state, _ = self.init_with(rng_key, population, found)
        return state, initial_info(found, costs)

    def init_with(self, rng_key: Array, population: Population, num_clusters: int) -> tuple[State, RoundInfo]:
        """The start with K clusters: clients in random groups of equal size, profiles empty."""
        models, present = start_models(self.model, rng_key, population, num_clusters)
        count, width = number_there(present), self.profile_width(models.params)
        most = cohorts.cohort_size(self.participation, count) if self.cluster_cohort else None
        check_landmarks(self.landmarks, count, num_clusters, most)
        side = self.gram_side(len(present))
        if self.landmarks is None:
            rows, copies, further = len(present), 1 if side else 3, "" if side else "landmarks=256, say"
        elif self.profiles_of == "everybody":
            rows, copies, further = len(present), 1, "profiles_of='landmarks'"
        else:
            rows, copies, further = self.landmarks, 1, ""
        check_profiles(rows, num_clusters, width, copies, population.mapping, further)
        start = parallel.compile_quickly(start_state, static_argnames=("method", "num_clusters", "side"))
        method, numbers = lifted(self)
        return start(rng_key, models, present, numbers, method=method, num_clusters=num_clusters, side=side)

    def gram_side(self, capacity: int) -> int:
        """Rows of the Gram matrices of so many clients; 0 where there are none."""
        return capacity if rows_there(capacity) <= LARGEST_GRAM and self.landmarks is None else 0

    def landmarks_of(self, present: Array) -> Array:
        assert self.landmarks is not None
        return landmarks_among(present, self.landmarks)

    @property
    def fewest_landmarks(self) -> int:
        """Of whom there are always to be so many."""
        return 2 if self.clusters == "auto" else self.clusters

    def profile_leaves(self, params: PyTree) -> list[Array]:
        chosen = tree.match(params, self.profile_layers)
        return [leaf for leaf, pick in zip(jax.tree.leaves(params), jax.tree.leaves(chosen), strict=True) if pick]

    def profile_size(self, stacked_params: PyTree) -> int:
        return tree.size(self.profile_leaves(stacked_params)) // len(jax.tree.leaves(stacked_params)[0])

    def profile_width(self, stacked_params: PyTree) -> int:
        """The coordinates of a profile that are kept."""
        size = self.profile_size(stacked_params)
        if self.compression > size:
            raise ValueError(
                f"compression is {self.compression:g}, but a profile has {size} coordinates; give at most {size}"
            )
        return min(size, max(1, round(size / self.compression)))

    def draw_coordinates(self, rng_key: Array, stacked_params: PyTree) -> Array:
        """Which these are, i32[d̂]; none is all."""
        size, kept = self.profile_size(stacked_params), self.profile_width(stacked_params)
        if kept == size:
            return jnp.zeros(0, jnp.int32)
        return jnp.sort(jax.random.choice(rng_key, size, (kept,), replace=False)).astype(jnp.int32)

    # ------------------------------------------------------------------------------------- rounds

    def clustering_round(self, state: State) -> Array:
        """bool[]: whether the server clusters in the coming round."""
        return self.clustering_due(state.round) & ~state.server.stopped

    def clustering_due(self, number: Array) -> Array:
        """bool[]: whether the server clusters in round `number` i32[], unless that has ended before."""
        due = number % self.every == 1 % self.every
        return due if self.cluster_until is None else due & (number < self.cluster_until)

    @property
    def draws_ahead(self) -> bool:
        return self.cluster_cohort

    @property
    def joined_late(self) -> bool:
        """Whether clients other than landmarks are in no cluster before their first clustering round, nor train one."""
        return self.landmarks is not None and self.cluster_cohort and self.participation < 1

    def select(self, rng_key: Array, state: State) -> Selection:
        present = state.clients.present
        part = cohorts.uniform(rng_key, present, self.participation)
        if self.joined_late:
            landmarks, due = state.server.landmarks, self.clustering_due(state.round)
            part = cohorts.with_these_first(part, landmarks, present[landmarks], len(present), due)
        if self.participation == 1 or self.cluster_cohort:
            return part
        return cohorts.everybody_when(self.clustering_round(state), present, part)

    def step(self, rng_key: Array, state: State, cohort: Cohort) -> tuple[State, RoundInfo]:
        due = self.clustering_round(state)
        carry = (state, initial_info(state.clusters.active.shape[0]))
        run_if = functools.partial(parallel.run_if, mapping=cohort.mapping)
        carry = run_if(due, lambda carry: self.cluster_and_train(rng_key, carry[0], cohort), carry)
        state, info = run_if(~due, lambda carry: self.train(rng_key, carry[0], cohort), carry, otherwise=True)
        server = state.server
        if self.stop_after is not None:
            clustered = jnp.any(profiled(state)[1].updates > 0)
            unchanged = jnp.where((info.num_changed > 0) | ~clustered, 0, server.unchanged + 1)
            server = server._replace(unchanged=unchanged, stopped=server.stopped | (unchanged >= self.stop_after))
        return state._replace(server=server, round=state.round + 1), info

    def train_one(self, rng_key: Array, state: State, slot: Array, client: Client) -> LocalResult:
        slot = jnp.maximum(slot, 0)
        result = train_client(rng_key, self.local, self.model, state.clusters, slot, client, state.round)
        # NOTE: the text zeroes the digits beyond; its accuracy at two decimals (87.3 %) is that of rounding to the
        # nearest (87.1 % on MNIST), where zeroing reaches 77.7 %.
        return result._replace(delta=keep_decimals(result.delta, self.decimals, self.rounding))

    def run_round(self, rng_key: Array, train: Any, state: State, cohort: Cohort, slot: Array) -> Round:
        return cluster_round(
            train,
            state.clusters,
            cohort,
            slot,
            optimizer=self.optimizer,
            weighting=self.weighting,
            aggregation=self.aggregation,
            private=self.private(rng_key, state.clusters),
            shared_layers=self.shared_layers,
        )

    def train(self, rng_key: Array, state: State, cohort: Cohort) -> tuple[State, RoundInfo]:
        """A round without clustering."""
        slot, late, further = slots_by_loss(self, state, cohort)

        def train(client: Client, slot: Array) -> Trained:
            return Trained(slot, self.train_one(rng_key, state, slot, client))

        done = self.run_round(rng_key, train, state, cohort, slot)
        info = done.info(cohort.mask, costs=jax.tree.map(jnp.add, done.costs(cohort.mask), further))
        return joined(state, cohort, late, done)._replace(clusters=done.clusters), info

    def query(
        self, rng_key: Array, state: State, client: Client, known: Array, own: PyTree
    ) -> tuple[list[Array], Array]:
        """What a client shows of its update of the queried model, and the update's size; `own` where that is known."""
        posing = poses(client.data)
        known = known if posing is None else known & ~posing
        asked, block = client._replace(data=shown_rows(client.data)), state.server.block
        queried = parallel.unless(known, own, lambda: self.train_one(rng_key, state, block, asked).delta)
        columns = self.compress(queried, state.server.coordinates)
        if self.privacy is not None:
            columns = self.privacy.shown(client_key(rng_key, client.index), columns)
        return columns, size_of(queried)

    def cluster_and_train(self, rng_key: Array, state: State, cohort: Cohort) -> tuple[State, RoundInfo]:
        """A round in which all clients query one model as well, and are grouped."""
        if self.profiles_of == "landmarks":
            return join_and_train(self, rng_key, state, cohort)
        block, slot = state.server.block, cohort_labels(state, cohort)

        def train(client: Client, slot: Array) -> Trained:
            result = self.train_one(rng_key, state, slot, client)
            # Members of the queried cluster have computed this very update already.
            return Trained(slot, result, self.query(rng_key, state, client, slot == block, result.delta))

        done = self.run_round(rng_key, train, state, cohort, slot)
        sent, _ = done.extra
        columns = jnp.concatenate(sent, axis=1)
        # Of what is shown under privacy nothing is left out: that would tell of a client.
        heard = done.accepted if self.privacy is None else cohort.mask
        fold_in = fold_in_block if self.landmarks is None or cohort.in_place else fold_in_rows
        state = state._replace(clients=fold_in(self.beta, state.clients, block, cohort, columns, heard))
        if self.landmarks is None:
            clients, grams, changed = self.group_anew(server_key(rng_key), state.clients, state.server, cohort)
            state = state._replace(server=state.server._replace(grams=grams))
        else:
            clients, changed = group_cohort(server_key(rng_key), state, cohort)
        return self.after_clustering(state._replace(clients=clients), cohort, done, changed, columns.shape[1])

    def after_clustering(
        self, state: State, cohort: Cohort, done: Round, changed: Array, width: int
    ) -> tuple[State, RoundInfo]:
        """The state with the models of the round, and what is told of it; a client has shown `width` numbers."""
        num_clusters = state.clusters.active.shape[0]
        share = width * num_clusters / tree.size(state.clusters.params) * params_part(state.clusters)
        info = done.info(cohort.mask, changed, self.costs(state, cohort, done, share))
        server = state.server._replace(block=(state.server.block + 1) % num_clusters)
        return state._replace(clusters=done.clusters, server=server), info

    def group_anew(self, rng_key: Array, clients: Clients, server: Server, cohort: Cohort):
        """The clients with new clusters, the Gram matrices, and how many clients changed theirs."""
        old, clustered = labels(clients.membership), clients.present
        if self.cluster_cohort:
            clustered = parallel.scatter_rows(cohort, jnp.zeros_like(clients.present), jnp.ones_like(cohort.mask))
        new, grams = regroup(rng_key, clients, server.grams, server.block, clustered, cohort.mapping)
        changed = jnp.sum((clients.present & (new != old)).astype(jnp.int32))
        return clients._replace(membership=one_hot(new, clients.membership.shape[1])), grams, changed

    def costs(self, state: State, cohort: Cohort, done: Round, share: float) -> Costs:
        """Of a clustering round: clients of other clusters get the queried model too, and send a share of an update."""
        others = cohort.mask & (done.slot != state.server.block)
        steps = done.reports.num_steps.astype(jnp.float32)
        extra = jnp.sum(others.astype(jnp.float32))
        # With privacy what is clustered is another message than what is averaged.
        show = extra if self.privacy is None else jnp.sum(cohort.mask.astype(jnp.float32))
        costs = done.costs(cohort.mask)
        return costs._replace(
            # Shared layers are in the client's model already.
            models_down=costs.models_down + (1.0 - shared_part(state.clusters, self.shared_layers)) * extra,
            models_up=costs.models_up + share * show,
            gradient_evaluations=costs.gradient_evaluations + jnp.sum(jnp.where(others, steps, 0.0)),
            clusterings=1.0,
        )

    def compress(self, delta: PyTree, coordinates: Array) -> list[Array]:
        """What a client sends of its queried update."""
        leaves = self.profile_leaves(delta)
        # Leaf by leaf: inside the loop over clients, the copy into one vector was at times fifty times slower.
        return [tree.ravel(leaves)[coordinates]] if len(coordinates) else [leaf.reshape(-1) for leaf in leaves]

    def cluster(self, rng_key: Array, state: State, mapping: ClientMapping = ONE_DEVICE) -> Array:
        if self.landmarks is not None:
            return group_all(rng_key, state, mapping)
        clients, server = state.clients, state.server
        return regroup(rng_key, clients, server.grams, server.block, clients.present, mapping)[0]

    def personalize(self, rng_key: Array, state: State, data: ClientData, index: Array) -> tuple[Variables, Array]:
        if not self.joined_late:
            return personalize_by_label(state, index)
        return personalize_by_label_or_loss(self.model, state, data, index)

    # ------------------------------------------------------------------------------------- newcomers

    def admit(self, rng_key: Array, state: State, data: ClientData, index: Array) -> State:
        # Without a profile the newcomer starts where the least training loss is; the next clustering decides.
        slot = nearest_by_loss(self.model, state.clusters, data)
        kept = state.clients.profile, state.clients.updates
        empty = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape[1:], leaf.dtype), kept)
        row = Clients(one_hot(slot, state.clients.membership.shape[1]), jnp.asarray(True), *empty)
        server = forget(state.server, index)._replace(unchanged=jnp.zeros((), jnp.int32), stopped=jnp.asarray(False))
        return state._replace(clients=tree.scatter(state.clients, index, row), server=server)


@parallel.kept_program(static_argnames="method")
def _step(rng_key: Array, state: State, cohort: Cohort, *, method: cfl_gp) -> tuple[State, RoundInfo]:
    return method.step(rng_key, state, cohort)
