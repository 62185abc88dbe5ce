"""The shapes that every part of the simulator agrees on.

Notation: M clients (a capacity), K cluster slots, C clients in a round's cohort, N rows per client,
d model parameters, S local steps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import jax
from jax import Array

Task = Literal["classification", "regression", "reconstruction", "language"]
PyTree = Any


class DatasetInfo(NamedTuple):
    """What a model and a report need to know of the data; hashable."""

    name: str
    input_shape: tuple[int, ...]
    num_classes: int  # 0 where there are no classes
    task: Task = "classification"
    group_names: tuple[str, ...] = ()


class Examples(NamedTuple):
    """A source before it is divided among clients."""

    x: Any  # numpy [N, ...], raw dtype
    y: Any  # numpy [N, ...]; i32 class labels in classification
    info: DatasetInfo


class ClientData(NamedTuple):
    """Stacked clients; rows beyond `num_examples` are padding."""

    x: Any  # [M, N, ...] in its raw dtype (uint8 images stay uint8), scaled by the model
    y: Any  # [M, N, ...]
    num_examples: Any  # i32[M]


class Federation(NamedTuple):
    """What a scenario returns: the same M clients in every part."""

    train: ClientData
    test: ClientData
    validation: ClientData | None
    group: Any | None  # i32[M], the true distribution of each client
    info: DatasetInfo


class Variables(NamedTuple):
    """One model: `params` are optimised, `stats` are batch-norm statistics (an empty dict without)."""

    params: PyTree
    stats: PyTree


class Model(NamedTuple):
    """Pure functions of one model.

    init:    (rng_key, info) -> Variables
    apply:   (variables, x, *, train, rng_key=None) -> (outputs, stats)
    loss:    (outputs, y) -> f32[N], per example
    predict: (outputs) -> what a mixture of models averages (class probabilities; the output itself)
    metrics: (predictions, y, mask) -> dict of f32[], over the valid rows
    """

    init: Callable[..., Variables]
    apply: Callable[..., tuple[Any, PyTree]]
    loss: Callable[[Any, Array], Array]
    predict: Callable[[Any], Any]
    metrics: Callable[[Any, Array, Array], dict[str, Array]]


class Clusters(NamedTuple):
    """The cluster models, in K slots."""

    params: PyTree  # leaves [K, ...]
    stats: PyTree  # leaves [K, ...]
    active: Array  # bool[K]; slots in use


class State(NamedTuple):
    """Everything that continues from round to round; treedef, shapes and dtypes never change.

    Every method's `clients` has at least `membership` f32[M, K] (one-hot when hard, zero for the absent) and
    `present` bool[M].
    """

    clusters: Clusters
    clients: Any  # leaves [M, ...]
    server: Any
    round: Array  # i32[]


class Costs(NamedTuple):
    """What one round cost, summed over its clients (Tables 5 and 6 of CFL-GP); f32[] each."""

    models_down: Array | float = 0.0  # models sent to clients, in units of d
    models_up: Array | float = 0.0  # updates sent back, in units of d (a compressed one counts its share)
    gradient_evaluations: Array | float = 0.0  # mini-batch gradients
    loss_evaluations: Array | float = 0.0  # mini-batch losses without a gradient
    clusterings: Array | float = 0.0  # times that the server clustered; 0 where the clients choose
    clustering_seconds: Array | float = 0.0  # by the server's clock, where it clusters in `init`; 0 from a step


class RoundInfo(NamedTuple):
    """What one round reports: O(K) numbers; larger things are harvested from the state at events."""

    loss: Array  # f32[K], mean local training loss of each cluster's clients (NaN without clients)
    num_clients: Array  # i32[K], clients that took part
    num_changed: Array  # i32[], clients whose cluster changed
    num_rejected: Array  # i32[], clients left out for a non-finite update
    costs: Costs
    event: Array  # bool[], asks the round loop to stop after this round and snapshot the state (a split, say)


class Event(NamedTuple):
    """What a method's `snapshot` gave after a round whose report asked for it."""

    round: int  # 0-based; −1 for `init`
    content: Mapping[str, Any]  # numpy arrays


class Churn(NamedTuple):
    """Clients who join or leave before a round."""

    round: int  # 0-based
    join: tuple[int, ...] = ()
    leave: tuple[int, ...] = ()


class Selection(NamedTuple):
    """Who takes part: unique indices, valid first, padding = M.

    A selection as large as the population stays in place: row i is client i where it takes part.
    """

    index: Array  # i32[C]
    mask: Array  # bool[C]
    weights: Array | None = None  # f32[C, K]


class ClientMapping(NamedTuple):
    """How clients are mapped over the machine; hashable, decided before tracing (see `parallel`)."""

    strategy: Literal["scan", "vmap", "chunked"]
    chunk_size: int | None = None  # None: sized to memory
    mesh: jax.sharding.Mesh | None = None


ONE_DEVICE = ClientMapping("scan")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cohort:
    """A round's clients with their data."""

    index: Array  # i32[C], client ids; M for padding
    mask: Array  # bool[C]
    data: ClientData  # [C, N, ...]; num_examples is 0 on padding
    weights: Array | None = None  # f32[C, K]
    mapping: ClientMapping = dataclasses.field(default=ONE_DEVICE, metadata={"static": True})
    in_place: bool = dataclasses.field(default=False, metadata={"static": True})  # row i is client i


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Population:
    """All clients: M rows, of which those without examples are absent."""

    data: ClientData  # [M, N, ...]
    info: DatasetInfo = dataclasses.field(metadata={"static": True})
    mapping: ClientMapping = dataclasses.field(default=ONE_DEVICE, metadata={"static": True})


class LocalResult(NamedTuple):
    """What a client sends back."""

    delta: PyTree  # local parameters minus the parameters it started from
    stats: PyTree  # batch-norm statistics after training
    losses: Array  # f32[S], mini-batch loss of each local step, before the step; 0 beyond num_steps
    num_steps: Array  # i32[]
    num_examples: Array  # i32[]
    optimizer: PyTree = ()  # the optimiser's state after training


class BatchGradient(NamedTuple):
    """What a model's pass forth and back over a mini-batch gives."""

    loss: Array  # f32[], mean over the mini-batch
    gradient: PyTree  # of that mean, with respect to the parameters
    stats: PyTree  # batch-norm statistics after the pass


class LocalUpdate(NamedTuple):
    """What one client does.

    run:            (rng_key, model, variables, data, anchor=None, first=None, optimizer=None) -> LocalResult
    first_loss:     (rng_key, model, variables, data) -> f32[], on the mini-batch of run's first step
    first_gradient: (rng_key, model, variables, data) -> BatchGradient of run's first step, which takes it as `first`
    rebuild:        (**changes) -> LocalUpdate, with other arguments of its factory
    init_optimizer: (params) -> the optimiser's state before any training, which `run` starts from unless given one
    """

    run: Callable[..., LocalResult]
    first_loss: Callable[..., Array]
    config: Mapping[str, Any]
    first_gradient: Callable[..., BatchGradient] | None = None
    rebuild: Callable[..., LocalUpdate] | None = None
    init_optimizer: Callable[[PyTree], PyTree] | None = None


class ClusteredAlgorithm(NamedTuple):
    """A method: pure functions, composed by its factory.

    init:        (rng_key, population) -> (State, RoundInfo); outside jit, may train and cluster
    select:      (rng_key, state) -> Selection
    step:        (rng_key, state, cohort) -> (State, RoundInfo)
    personalize: (rng_key, state, client, index) -> (variables [P, ...], mixture f32[P]); training rows only
    admit:       (rng_key, state, client, index) -> State, for a client that joins; or None
    snapshot:     (state) -> mapping of arrays to keep of a state after an event; or None
    cluster:     (rng_key, state, mapping) -> i32[M] labels: what the server computes of what it holds in one clustering
                 of a round, and no more, as `step` does; `simulate` times it. None where the clients choose, or `init`
                 clusters once and measures that itself
    blank:       (rng_key, population) -> (State, RoundInfo) of the shapes of `init`'s, without its work, for a state
                 that is read back; None where `init` is quick
    """

    name: str
    config: Mapping[str, Any]
    model: Model
    init: Callable[..., tuple[State, RoundInfo]]
    select: Callable[[Array, State], Selection]
    step: Callable[[Array, State, Cohort], tuple[State, RoundInfo]]
    personalize: Callable[..., tuple[Variables, Array]]
    admit: Callable[..., State] | None = None
    snapshot: Callable[[State], Mapping[str, Any]] | None = None
    cluster: Callable[..., Array] | None = None
    blank: Callable[..., tuple[State, RoundInfo]] | None = None
