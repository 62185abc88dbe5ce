"""A run's configuration: everything that decides its result, as one frozen dataclass."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import optax

from fedjax_cluster import data, local, nn
from fedjax_cluster.algorithms import REGISTRY
from fedjax_cluster.data.scenarios.registry import SCENARIOS
from fedjax_cluster.nn.precision import Precision, check_precision
from fedjax_cluster.types import Churn, ClusteredAlgorithm, Examples, Federation, LocalUpdate, Model

MODELS: dict[str, Callable[..., Model]] = {
    "mlp": nn.mlp,
    "cnn": nn.cnn,
    "lenet5": nn.lenet5,
    "linear": nn.linear,
    "resnet18": nn.resnet18,
    "mobilenet_v2": nn.mobilenet_v2,
}
# What every scenario and every method takes; the rest are its own options.
COMMON_SCENARIO = ("examples", "clients", "seed", "test_fraction", "examples_per_client")
COMMON_METHOD = ("model", "clusters", "local", "server", "participation")
# Their clients' own models count, not only the mean of what these send: they have no gradient averaging.
MODEL_AVERAGING_ONLY = ("fesem", "fedsoft", "flag")


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """One run of one method on one federation.

    Attributes:
      method: name in `fedjax_cluster.algorithms.REGISTRY`.
      scenario: name of a scenario of `fedjax_cluster.data.scenarios`.
      dataset: digits, or the TFDS name of an image classification set; several joined by + for mixed-datasets.
      model: mlp, cnn, lenet5, linear, resnet18 or mobilenet_v2.
      clients: M, number of clients.
      clusters: K where the method needs it, the largest K where it finds the number; auto estimates it (CFL-GP).
      rounds: communication rounds.
      batch_size: examples of a mini-batch.
      learning_rate: of the server under gradient averaging, of the clients under model averaging; with local-only it
        is always the clients'.
      local_steps: mini-batch steps of a client per round: model averaging. Without it and local-epochs each client
        sends one mini-batch gradient per round: gradient averaging. FeSEM, FedSoft and FLAG, to which the clients' own
        models matter, then average models after one step.
      local_epochs: passes over a client's data per round: model averaging.
      optimizer: the clients' optimiser under model averaging.
      momentum: of sgd; under gradient averaging the server's.
      weight_decay: weight of the penalty on the squared parameters.
      precision: format in which clients compute their gradients; parameters and evaluation stay float32.
      server_learning_rate: scale of the mean change under model averaging; FedSoft's server takes the mean as it is.
      participation: share of the clients in a round.
      seed: of data, initial models, cohorts and local training.
      churn: clients who join or leave before given rounds, see `simulate`.
      eval_every: rounds between evaluations.
      eval_clients: evaluate only that many random clients.
      test_fraction: share of each client's examples kept for testing.
      examples_per_client: at most that many examples per client, training and test together.
      model_options: further arguments of the model's factory.
      method_options: further arguments of the method's factory.
      scenario_options: further arguments of the scenario.
    """

    method: str = "cfl_gp"
    scenario: str = "rotated"
    dataset: str = "digits"
    model: str = "mlp"
    clients: int = 16
    clusters: int | Literal["auto"] = 4
    rounds: int = 100
    batch_size: int = 64
    learning_rate: float = 0.1
    local_steps: int | None = None
    local_epochs: int | None = None
    optimizer: Literal["sgd", "adam"] = "sgd"
    momentum: float = 0.0
    weight_decay: float = 0.0
    precision: Precision = "float32"
    server_learning_rate: float = 1.0
    participation: float = 1.0
    seed: int = 0
    churn: Sequence[Churn] = ()
    eval_every: int = 10
    eval_clients: int | None = None
    test_fraction: float = 0.3
    examples_per_client: int | None = None
    model_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    method_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    scenario_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        object.__setattr__(self, "method", known_name("method", self.method, REGISTRY))
        object.__setattr__(self, "scenario", known_name("scenario", self.scenario, SCENARIOS))
        object.__setattr__(self, "model", known_name("model", self.model, MODELS))
        # JSON knows lists only.
        changes = (Churn(number, tuple(join), tuple(leave)) for number, join, leave in self.churn)
        object.__setattr__(self, "churn", tuple(changes))
        for name in ("clients", "rounds", "batch_size", "eval_every"):
            _at_least_one(name, getattr(self, name))
        for name in ("local_steps", "local_epochs", "eval_clients", "examples_per_client"):
            if getattr(self, name) is not None:
                _at_least_one(name, getattr(self, name))
        if self.clusters != "auto":
            _at_least_one("clusters", self.clusters)
            if self.clusters > self.clients:
                raise ValueError(
                    f"clusters is {self.clusters} but there are only {self.clients} clients; "
                    f"ask for at most {self.clients} clusters"
                )
        if self.local_steps is not None and self.local_epochs is not None:
            raise ValueError("local_steps and local_epochs are both given; choose one")
        if not 0 < self.participation <= 1:
            raise ValueError(
                f"participation is {self.participation}; it is the share of clients in a round, above 0 and up to 1"
            )
        if not 0 < self.test_fraction < 1:
            raise ValueError(f"test_fraction is {self.test_fraction}; it must lie between 0 and 1")
        for name in ("learning_rate", "server_learning_rate"):
            if not (getattr(self, name) > 0 and math.isfinite(getattr(self, name))):
                raise ValueError(f"{name} is {getattr(self, name)}; it must be positive and finite")
        check_precision(self.precision)
        if self.optimizer not in ("sgd", "adam"):
            raise ValueError(f"optimizer is {self.optimizer!r}; choose 'sgd' or 'adam'")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum is {self.momentum}; it must be at least 0 and below 1")
        if self.momentum and self.optimizer == "adam":
            raise ValueError(f"momentum is {self.momentum:g}, but adam has its own; give no momentum, or optimizer sgd")
        if not (self.weight_decay >= 0 and math.isfinite(self.weight_decay)):
            raise ValueError(f"weight_decay is {self.weight_decay}; it must be finite and 0 or more")
        if not isinstance(self.seed, int) or self.seed < 0:
            raise ValueError(f"seed is {self.seed!r}; it must be a whole number, 0 or more")
        if self.server_learning_rate != 1.0 and self.local_steps is None and self.local_epochs is None:
            raise ValueError(
                f"server_learning_rate is {self.server_learning_rate:g}, but under gradient averaging learning_rate is "
                "the server's; give that alone, or --local-steps or --local-epochs"
            )
        check_options("method", self.method, self.method_options, REGISTRY[self.method], COMMON_METHOD)
        check_options("scenario", self.scenario, self.scenario_options, SCENARIOS[self.scenario], COMMON_SCENARIO)
        check_options("model", self.model, self.model_options, MODELS[self.model], ())

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> RunConfig:
        # Runs of version 0.1 call it membership.
        content = {{"membership": "churn"}.get(name, name): value for name, value in content.items()}
        unknown = sorted(set(content) - {field.name for field in dataclasses.fields(cls)})
        if unknown:
            raise ValueError(f"the configuration holds settings unknown here: {', '.join(unknown)}")
        return cls(**content)


def known_name(kind: str, name: str, registry: Mapping[str, Any]) -> str:
    """The registered spelling of a name given with hyphens or underscores.

    Raises:
      ValueError: unknown; says which are known, and the closest.

    >>> known_name("method", "cfl-gp", REGISTRY)
    'cfl_gp'
    """
    spelled = str(name).replace("-", "_").lower()
    if spelled in registry:
        return spelled
    close = difflib.get_close_matches(spelled, registry, 1)
    hint = f"did you mean {close[0]}? ".replace("_", "-") if close else ""
    raise ValueError(f"unknown {kind} {name!r}; {hint}known: {', '.join(sorted(registry)).replace('_', '-')}")


def own_options(factory: Callable, common: tuple[str, ...]) -> dict[str, inspect.Parameter]:
    """The parameters of a factory beyond those that all of its kind take."""
    return {name: parameter for name, parameter in inspect.signature(factory).parameters.items() if name not in common}


def check_options(kind: str, name: str, options: Mapping[str, Any], factory: Callable, common: tuple[str, ...]) -> None:
    """Raises a ValueError for an option that the factory does not have, or one that it needs and was not given."""
    allowed = own_options(factory, common)
    for option, parameter in allowed.items():
        if parameter.default is inspect.Parameter.empty and option not in options:
            raise ValueError(f"{kind} {name.replace('_', '-')} needs {option}; give it")
    for option in options:
        if option not in allowed:
            listed = ", ".join(sorted(allowed)) or "none"
            raise ValueError(f"{kind} {name.replace('_', '-')} has no option {option!r}; its options: {listed}")


def build_federation(config: RunConfig) -> Federation:
    """Loads the data and divides them among the clients."""
    scenario = SCENARIOS[config.scenario]
    parameters = inspect.signature(scenario).parameters
    arguments: dict[str, Any] = {"clients": config.clients, "seed": config.seed, **config.scenario_options}
    for name in ("test_fraction", "examples_per_client"):
        if name in parameters and getattr(config, name) is not None:
            arguments[name] = getattr(config, name)
    return scenario(load_examples(config), **arguments)


def load_examples(config: RunConfig) -> Examples | list[Examples] | None:
    """The source that a scenario divides: None where it makes its own data, a list where it mixes several."""
    if inspect.signature(SCENARIOS[config.scenario]).parameters["examples"].default is None:
        return None
    sources = [data.digits() if name == "digits" else data.tfds(name) for name in config.dataset.split("+")]
    if config.scenario == "mixed_datasets":
        return sources
    if len(sources) > 1:
        raise ValueError(
            f"dataset is {config.dataset!r}, but scenario {config.scenario.replace('_', '-')} takes a single one; "
            "use mixed-datasets"
        )
    return sources[0]


def build_model(config: RunConfig) -> Model:
    return MODELS[config.model](**config.model_options)


def build_local(config: RunConfig) -> tuple[LocalUpdate, optax.GradientTransformation]:
    """What clients and server do under the configuration's protocol.

    Gradient averaging: one step of rate 1, whose Δθ is minus the gradient, and the rate on the server. Model
    averaging: the rate on the clients.
    """
    momentum = config.momentum or None
    steps = config.local_steps
    if steps is None and config.local_epochs is None and config.method in MODEL_AVERAGING_ONLY:
        if momentum:
            raise ValueError(
                f"momentum is {momentum:g}, but clients start afresh every round and take a single step, in which it "
                "does nothing; give --local-steps or --local-epochs, or no momentum"
            )
        steps = 1
    if steps is None and config.local_epochs is None:
        own = local.sgd(
            1.0, batch_size=config.batch_size, steps=1, weight_decay=config.weight_decay, precision=config.precision
        )
        optimizer = optax.adam if config.optimizer == "adam" else None
        server = optimizer(config.learning_rate) if optimizer else optax.sgd(config.learning_rate, momentum=momentum)
        return own, server
    rate = config.learning_rate
    if config.optimizer == "adam":
        rate = optax.adam(rate)
    elif momentum:
        rate = optax.sgd(rate, momentum=momentum)
    own = local.sgd(
        rate,
        batch_size=config.batch_size,
        steps=steps,
        epochs=config.local_epochs,
        weight_decay=config.weight_decay,
        precision=config.precision,
    )
    return own, optax.sgd(config.server_learning_rate)


def build_algorithm(config: RunConfig) -> ClusteredAlgorithm:
    """The method of a configuration, composed from its parts."""
    factory = REGISTRY[config.method]
    own, server = build_local(config)
    arguments: dict[str, Any] = dict(config.method_options)
    parameters = inspect.signature(factory).parameters
    for name, value in (("clusters", config.clusters), ("participation", config.participation), ("server", server)):
        if name in parameters:
            arguments[name] = value
    if config.clusters == "auto" and config.method != "cfl_gp" and "clusters" in parameters:
        raise ValueError(f"clusters is 'auto', but {config.method.replace('_', '-')} needs a number")
    return factory(build_model(config), local=own, **arguments)


def _at_least_one(name: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} is {value!r}; it must be a whole number, 1 or more")
