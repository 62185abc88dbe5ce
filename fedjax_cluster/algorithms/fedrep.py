"""FedRep: a common representation, and each client's own head, trained in turns (Collins et al. 2021, Algorithm 1)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from fedjax_cluster import parallel, tree
from fedjax_cluster.algorithms.fedper import fedper, with_own
from fedjax_cluster.algorithms.personal import global_model
from fedjax_cluster.kept_training import honest
from fedjax_cluster.options import at_least, changed, option
from fedjax_cluster.privacy.gaussian import ONE
from fedjax_cluster.server import Weighting
from fedjax_cluster.types import ClientData, LocalResult, LocalUpdate, Model, PyTree, State, Variables

NO_EPOCHS = ("head_epochs left out", lambda method: method.head_epochs is None)


class fedrep(fedper):
    """A shared representation under heads that are fitted to it.

    In a round client i first takes τ steps of its head, h_i ← h_i − α·∇_h f_i(φ, h_i), from where it left it, then
    steps of the representation with that head, φ_i ← φ_i − α·∇_φ f_i(φ_i, h_i); φ ← mean of φ_i.

    NOTE: in Algorithm 1 who never took part has the first head. The public code averages heads as well for these, and
    fits everybody's head once more, for ten passes, after the last round.

    Returns:
      A method whose `personalize` joins the representation to the client's head; who never took part fits one to its
      training rows by τ steps; memory grows with M times the size of a head.

    Raises:
      ValueError: an option out of its bound, or a local update whose steps cannot be changed; from `init`, a pattern
        that no parameter matches.

    >>> from fedjax_cluster import local, nn
    >>> fedrep(nn.mlp((8,)), local=local.sgd(0.1, batch_size=8, epochs=1)).head_update.steps
    10
    """

    sends = ONE

    local: LocalUpdate = option("the steps of the representation; the head's have the same rate and mini-batches")
    head_steps: int = option(
        "τ, mini-batch steps of the head, which come first", default=10, bound=at_least(1), used=NO_EPOCHS
    )
    head_epochs: int | None = option(
        "passes of the head over its client's rows in place of `head_steps`; the paper's experiments have ten, and one "
        "or five of the representation",
        default=None,
        bound=at_least(1),
    )
    weighting: Weighting = option('"uniform" as in the paper, or "examples"', default="uniform")

    def check(self) -> None:
        super().check()
        # Refused here rather than in the first round.
        _ = self.head_update

    @property
    def head_update(self) -> LocalUpdate:
        """What fits a head to a fixed representation."""
        steps = self.head_steps if self.head_epochs is None else None
        return changed(honest(self.local), "given the steps of the head", steps=steps, epochs=self.head_epochs)

    def fit_head(self, key: Array, start: Variables, data: ClientData, round: Array) -> LocalResult:
        """The head's steps; its change is by path."""
        own = self.own_part(start).params
        model = part_of(self.model, start.params)
        return self.head_update.run(jax.random.fold_in(key, 1), model, Variables(own, start.stats), data, round=round)

    def train(self, key: Array, start: Variables, data: ClientData, round: Array) -> tuple[LocalResult, Array]:
        own = self.own_part(start).params
        head = self.fit_head(key, start, data, round)
        fitted = tree.put(start.params, {name: own[name] + head.delta[name] for name in own})
        common = tree.pick(fitted, tree.match(fitted, self.shared_layers))
        body = self.update.run(key, part_of(self.model, fitted), Variables(common, head.stats), data, round=round)
        delta = tree.put(fitted, {**head.delta, **body.delta})  # which are all of its parameters
        return body._replace(delta=delta), jnp.asarray(head.num_steps, jnp.int32)

    def personalize(self, rng_key: Array, state: State, data: ClientData, index: Array) -> tuple[Variables, Array]:
        common = global_model(state.clusters)

        row = jax.tree.map(lambda leaf: leaf[index], state.clients.own)
        of_its_own = with_own(common, parallel.unpacked(row, self.own_part(common)))

        def fitted() -> Variables:
            result = self.fit_head(rng_key, common, data, state.round)
            own = self.own_part(common).params
            moved = {name: own[name] + result.delta[name] for name in own}
            stats = self.own_part(Variables(common.params, result.stats)).stats
            return with_own(common, Variables(moved, stats))

        chosen = parallel.unless(state.clients.trained[index], of_its_own, fitted)
        return tree.broadcast(chosen, 1), jnp.ones(1)


def part_of(model: Model, fixed: PyTree) -> Model:
    """The model as a function of some of its parameters, given by path; the others stay as they are."""

    def apply(variables: Variables, x: Array, *, train: bool, rng_key: Array | None = None) -> tuple[Any, PyTree]:
        moving: dict[str, Array] = variables.params
        # The others are computed with in the format of those.
        dtype = next((leaf.dtype for leaf in moving.values()), jnp.float32)
        whole = tree.put(jax.tree.map(lambda leaf: leaf.astype(dtype), fixed), moving)
        return model.apply(Variables(whole, variables.stats), x, train=train, rng_key=rng_key)

    return model._replace(apply=apply)
