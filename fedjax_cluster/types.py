"""The shapes that every part of the simulator agrees on.

Notation: M clients (a capacity), K cluster slots, C clients in a round's cohort, N rows per client,
d model parameters, S local steps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

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
    class_names: tuple[str, ...] = ()  # where they are more than numbers


class Examples(NamedTuple):
    """A source before it is divided among clients."""

    x: Any  # numpy [N, ...], raw dtype
    y: Any  # numpy [N, ...]; i32 class labels in classification
    info: DatasetInfo


class UserExamples(Examples):
    """Examples of which each belongs to a user, or is for training or testing; `_replace` makes plain ones of them."""

    user_ids: Any = None  # numpy [N], numbers or text
    group_ids: Any = None  # the same of the users' true groups; None where they are not known
    split: Any = None  # numpy [N], "train", "test" or "validation"; None where rows are divided at random

    @classmethod
    def of(cls, examples: Examples, user_ids: Any, group_ids: Any = None, split: Any = None) -> UserExamples:
        found = cls(*examples)
        found.user_ids, found.group_ids, found.split = user_ids, group_ids, split
        return found


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


class UserFederation(Federation):
    """A federation whose clients are users with ids of their own; `_replace` keeps them."""

    user_ids: Any = None  # numpy [M], numbers or text

    @classmethod
    def of(cls, federation: Federation, user_ids: Any) -> UserFederation:
        found = cls(*federation)
        found.user_ids = user_ids
        return found

    def _replace(self, **changes: Any) -> UserFederation:
        return self.of(super()._replace(**changes), self.user_ids)


class Variables(NamedTuple):
    """One model: `params` are optimised, `stats` are batch-norm statistics (an empty dict without)."""

    params: PyTree
    stats: PyTree


class InitModel(Protocol):
    def __call__(self, rng_key: Array, info: DatasetInfo) -> Variables:
        """The model's variables before any training."""
        ...


class ApplyModel(Protocol):
    def __call__(
        self, variables: Variables, x: Array, *, train: bool, rng_key: Array | None = None
    ) -> tuple[Any, PyTree]:
        """Outputs [N, ...] for raw inputs x [N, ...], and the batch-norm statistics after them."""
        ...


class ExampleLoss(Protocol):
    def __call__(self, outputs: Any, y: Array, /) -> Array:
        """The loss of each example, f32[N], of outputs [N, ...] and targets y [N, ...]."""
        ...


class Predict(Protocol):
    def __call__(self, outputs: Any, /) -> Any:
        """What a mixture of models averages: class probabilities, or the outputs themselves; [N, ...]."""
        ...


@runtime_checkable
class Measure(Protocol):
    def __call__(self, predictions: Any, y: Array, mask: Array, /) -> dict[str, Array]:
        """Metrics f32[] of predictions [N, ...] for targets y [N, ...], over the rows of mask bool[N]."""
        ...


class Model(NamedTuple):
    """Pure functions of one model; equal, and sharing programs, where they are; the test loss is that of `metrics`."""

    init: InitModel
    apply: ApplyModel
    loss: ExampleLoss
    predict: Predict
    metrics: Measure


class Clusters(NamedTuple):
    """The cluster models, in K slots."""

    params: PyTree  # leaves [K, ...]
    stats: PyTree  # leaves [K, ...]
    active: Array  # bool[K]; slots in use
    optimizer: PyTree = ()  # the server's optimiser state, leaves [K, ...]; nothing where the server takes no step


class State(NamedTuple):
    """Everything that continues from round to round; treedef, shapes and dtypes never change.

    Every method's `clients` has at least `membership` f32[M, K] (each client's share in each cluster: one-hot when
    hard, zero for the absent) and `present` bool[M].
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
    """What one round reports: O(K) numbers; larger things are in the snapshots of the state at events."""

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
    weights: Array | None = None  # f32[C, K], how often each cluster drew the client


class ClientMapping(NamedTuple):
    """How clients are mapped over the machine; hashable, decided before tracing (see `parallel`)."""

    strategy: Literal["scan", "vmap", "chunked"]
    chunk_size: int | None = None  # None: sized to memory
    mesh: jax.sharding.Mesh | None = None
    runs: int = 1  # side by side in one program: they share the memory, and events happen to some of them


ONE_DEVICE = ClientMapping("scan")


class Placement(NamedTuple):
    """Where clients' x and y lie when they are dealt to the devices by work; all else is in the clients' order."""

    client: Array  # i32[M], whose rows lie at each place
    place: Array  # i32[M], where each client's rows lie


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
    placement: Placement | None = None  # of x and y, where row i is client i


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Population:
    """All clients: M rows, of which those without examples are absent."""

    data: ClientData  # [M, N, ...]
    info: DatasetInfo = dataclasses.field(metadata={"static": True})
    mapping: ClientMapping = dataclasses.field(default=ONE_DEVICE, metadata={"static": True})
    work: Array | None = None  # f32[M], what each client's part of a round costs; None: equal
    placement: Placement | None = None  # of x and y; None: row i is client i


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


@runtime_checkable
class LocalUpdate(Protocol):
    """What one client does in a round: a hashable value, such as `local.sgd(0.1, batch_size=64, epochs=1)`."""

    def run(
        self,
        rng_key: Array,
        model: Model,
        variables: Variables,
        data: ClientData,
        anchor: PyTree | None = None,
        first: BatchGradient | None = None,
        optimizer: PyTree | None = None,
        round: Array | int | None = None,
    ) -> LocalResult:
        """The client's training.

        Args:
          rng_key: the client's key of this round.
          model: what is trained.
          variables: where it starts.
          data: the client's rows, x [N, ...], y [N, ...], num_examples i32[].
          anchor: parameters that a proximal term pulls towards; None is the start.
          first: the gradient of the first step, where the caller has it already.
          optimizer: the state that the client's optimiser had at the end of its last round; None starts afresh.
          round: i32[], the round's number from 0 on, of which a learning rate may be a function.
        """
        ...

    def first_loss(self, rng_key: Array, model: Model, variables: Variables, data: ClientData) -> Array:
        """The loss f32[] on the mini-batch of the first step of `run`, in inference mode."""
        ...

    def first_gradient(self, rng_key: Array, model: Model, variables: Variables, data: ClientData) -> BatchGradient:
        """The gradient of the first step of `run`, which takes it as `first`."""
        ...

    def init_optimizer(self, params: PyTree) -> PyTree:
        """The optimiser's state before any training."""
        ...

    def batch_rows(self, rows: int) -> int:
        """The rows of a full mini-batch of a client with room for `rows`."""
        ...

    def to_json(self) -> dict[str, Any]:
        """The options, for config.json."""
        ...


@runtime_checkable
class ClusteredAlgorithm(Protocol):
    """A method: a hashable value with pure functions; those that a method may lack are None.

    `algorithms.method.Method` has what most share; M clients, K slots, C rows of a cohort, P models of a mixture.
    """

    @property
    def name(self) -> str: ...

    @property
    def model(self) -> Model: ...

    @property
    def config(self) -> Mapping[str, Any]: ...  # the options as JSON has them; for config.json, never for control flow

    def init(self, rng_key: Array, population: Population) -> tuple[State, RoundInfo]:
        """The state before the first round; outside jit, may train and cluster, and reports what that cost."""
        ...

    def select(self, rng_key: Array, state: State) -> Selection:
        """Who takes part in the next round."""
        ...

    def step(self, rng_key: Array, state: State, cohort: Cohort) -> tuple[State, RoundInfo]:
        """One round; the new state has the old one's structure, shapes and dtypes."""
        ...

    def personalize(self, rng_key: Array, state: State, data: ClientData, index: Array) -> tuple[Variables, Array]:
        """A client's models, leaves [P, ...], and how their predictions are mixed, f32[P]; sees training rows only.

        `index` i32[] is its place in `state.clients`, which at evaluations has no other rows.
        """
        ...

    @property
    def admit(self) -> AdmitClient | None: ...

    @property
    def snapshot(self) -> TakeSnapshot | None: ...

    @property
    def cluster(self) -> ClusterClients | None: ...

    @property
    def template(self) -> MakeTemplate | None: ...


class AdmitClient(Protocol):
    def __call__(self, rng_key: Array, state: State, data: ClientData, index: Array) -> State:
        """The state with a client that joins, of number `index` i32[]."""
        ...


class TakeSnapshot(Protocol):
    def __call__(self, state: State) -> Mapping[str, Any]:
        """The arrays to keep of a state after a round that reported an event."""
        ...


class ClusterClients(Protocol):
    def __call__(self, rng_key: Array, state: State, mapping: ClientMapping = ONE_DEVICE) -> Array:
        """Labels i32[M]: what the server computes in one clustering of a round, and no more; `simulate` times it.

        None where the clients choose, or where `init` clusters once and measures that itself.
        """
        ...


class MakeTemplate(Protocol):
    def __call__(self, rng_key: Array, population: Population) -> tuple[State, RoundInfo]:
        """What `init` gives, in structure, shapes and dtypes, without its work, for a state that is read back.

        None where `init` is quick.
        """
        ...


class FinishedRun(Protocol):
    """A run with its data, its final state and what its method kept at events; a `SimulationResult` is one."""

    @property
    def algorithm(self) -> Any: ...  # the method; its options are attributes

    @property
    def federation(self) -> Federation: ...

    @property
    def state(self) -> State: ...

    @property
    def history(self) -> Mapping[str, Any]: ...  # columns over rounds

    @property
    def events(self) -> Sequence[Event]: ...

    @property
    def labels(self) -> Any: ...  # i32[M], −1 without a cluster

    @property
    def assignments(self) -> tuple[Any, Any]: ...  # rounds done i32[E], ascending; clusters then i32[E, M]
