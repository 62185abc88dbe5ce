"""A run's configuration: everything that decides its result, as one value."""

from __future__ import annotations

import dataclasses
import inspect
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import optax

from fedjax_cluster import data, local, nn
from fedjax_cluster.algorithms import REGISTRY
from fedjax_cluster.algorithms.method import Averaging, Defaults
from fedjax_cluster.data.by_name import READING, OwnTask
from fedjax_cluster.data.scenarios.registry import SCENARIOS, draws_examples
from fedjax_cluster.experiments import installed
from fedjax_cluster.experiments.cluster_counts import clusters_at_start, estimates_clusters, own_clusters
from fedjax_cluster.experiments.on_disk import as_now, check_data, opened
from fedjax_cluster.experiments.robustness import (
    Robustness,
    check_robustness,
    server_settings,
    with_infinity,
    without_defaults,
)
from fedjax_cluster.experiments.unknown import unknown_name, unknown_option
from fedjax_cluster.files import plain
from fedjax_cluster.nn.precision import Precision
from fedjax_cluster.optimizers import named, schedule
from fedjax_cluster.options import (
    BELOW_ONE,
    COUNT,
    INSIDE_UNIT,
    NOT_NEGATIVE,
    POSITIVE,
    SEED,
    SHARE,
    Options,
    described_options,
    option,
)
from fedjax_cluster.simulation.arguments import checked_churn
from fedjax_cluster.simulation.evaluation import EVALUATIONS, usual_every
from fedjax_cluster.types import Churn, ClusteredAlgorithm, Examples, Federation, LocalUpdate, Model

MODELS: dict[str, Callable[..., Model]] = {
    make.__name__: make
    for make in (nn.mlp, nn.cnn, nn.lenet5, nn.linear, nn.resnet18, nn.mobilenet_v2, nn.lstm, nn.csi_autoencoder)
}


# Where neither the configuration nor the method says it. One gradient a round bears a larger rate than ten steps.
RATES: dict[Averaging, float] = {"gradients": 0.3, "models": 0.1}
USUAL_STEPS = Defaults().local_steps
# Where a method's usual number of clients would have fewer examples each, there are few clients.
FEWEST_EXAMPLES, FEW_CLIENTS = 100, 16
# Settings that the method decides where they are None.
OF_METHOD = (
    *("rounds", "batch_size", "learning_rate", "averaging", "local_steps", "local_epochs", "momentum"),
    *("participation", "eval_every"),
)


class Kind(NamedTuple):
    """A part of a configuration that is chosen by name."""

    registry: Mapping[str, Callable[..., Any]]
    common: tuple[str, ...]  # options that all of the kind take; the rest are options of one


KINDS = {
    "method": Kind(REGISTRY, ("model", "clusters", "local", "server", "participation", "aggregation", "privacy")),
    "scenario": Kind(SCENARIOS, ("examples", "clients", "seed", "test_fraction", "examples_per_client")),
    "model": Kind(MODELS, ()),
}
# Their clients' models count, not only the mean of what these send: they have no gradient averaging.
MODEL_AVERAGING_ONLY = ("ditto", "fedper", "fedproto", "fedrep", "fesem", "fedsoft", "flag", "flexcfl", "pfedme")


class RunConfig(Robustness):
    """One run of one method on one federation."""

    method: str = option("name in `fedjax_cluster.algorithms.REGISTRY`", default="cfl_gp")
    scenario: str = option("name of a scenario of `fedjax_cluster.data.scenarios`", default="rotated")
    dataset: str = option(
        "digits; a file or folder of your own: an .npz file (arrays x, y and perhaps user, group, split), a .csv, .tsv "
        "or .parquet table, or, with a / in it, a folder of images by class or by user and class or of LEAF's files; "
        "the TFDS name of an image classification set, from OpenML where TFDS has no prepared copy; hf: and a name of "
        "the Hugging Face hub; several joined by +, their classes numbered on from one to the next, or kept by "
        "mixed-datasets",
        default="digits",
    )
    population: str | None = option("folder of `fc.data.write_population`, in place of scenario and data", default=None)
    label_column: str | None = option("column of a table that holds the labels; label if not given", default=None)
    user_column: str | None = option("column of a table that holds the users; user, where there is one", default=None)
    group_column: str | None = option("column of a table that holds the users' true groups, if known", default=None)
    split_column: str | None = option(
        "column of a table that tells train, test or validation rows, for the scenario users", default=None
    )
    input_shape: Sequence[int] | None = option(
        "of a table's rows that are images; height and width for a folder's images", default=None, bound=COUNT
    )
    task: OwnTask | None = option("regression where whole numbers of one's own are values and no classes", default=None)
    model: str = option(f"{', '.join(MODELS)}, or your own", default="mlp")
    clients: int | None = option(
        "M, number of clients; if not given the method's usual one, fewer where the data set is small, and in the "
        "scenario users all of them",
        default=None,
        bound=COUNT,
    )
    clusters: int | Literal["auto"] | None = option(
        "K where the method needs it, if not given the number of the scenario's groups; the largest K where it finds "
        "the number, if not given 16; auto estimates it (CFL-GP)",
        default=None,
        bound=COUNT,
    )
    rounds: int = option("communication rounds", default=None, bound=COUNT, filled=True)
    batch_size: int = option("examples of a mini-batch", default=None, bound=COUNT, filled=True)
    learning_rate: float = option(
        "of the server under gradient averaging, of the clients under model averaging; with local-only it is always "
        "the clients'",
        default=None,
        bound=POSITIVE,
        filled=True,
    )
    learning_rate_decay: float = option(
        "factor by which the learning rate falls from round to round, whoever's it is; the server's falls with its own "
        "steps, of which a cluster has none in a round without its clients",
        default=1.0,
        bound=SHARE,
    )
    averaging: Averaging = option(
        "what the server averages: one mini-batch gradient of each client a round, or the clients' models after some "
        "local steps. Methods to which the clients' models matter, such as FeSEM, FedSoft, FLAG and Ditto, take models "
        "after one step in place of gradients",
        default=None,
        filled=True,
    )
    local_steps: int | None = option(
        "mini-batch steps of a client per round, under model averaging", default=None, bound=COUNT
    )
    local_epochs: int | None = option(
        "passes over a client's data per round, under model averaging", default=None, bound=COUNT
    )
    optimizer: Literal["sgd", "adam"] = option("the clients' optimiser under model averaging", default="sgd")
    momentum: float = option(
        "of sgd; under gradient averaging the server's", default=None, bound=BELOW_ONE, filled=True
    )
    weight_decay: float = option("weight of the penalty on the squared parameters", default=0.0, bound=NOT_NEGATIVE)
    precision: Precision = option(
        "format in which clients compute their gradients; parameters and evaluation stay float32", default="float32"
    )
    server_learning_rate: float = option(
        "scale of the mean change under model averaging; FedSoft's server takes the mean unscaled, FedProto's none",
        default=1.0,
        bound=POSITIVE,
    )
    participation: float = option("share of the clients in a round", default=None, bound=SHARE, filled=True)
    seed: int = option("of data, initial models, cohorts and local training", default=0, bound=SEED)
    churn: Sequence[Churn] = option("clients who join or leave before given rounds, see `simulate`", default=())
    eval_every: int = option(
        f"rounds between evaluations; if not given 10, a quarter of a run below 40, a {EVALUATIONS}th of a long one",
        default=None,
        bound=COUNT,
        filled=True,
    )
    eval_clients: int | None = option("evaluate only that many random clients", default=None, bound=COUNT)
    test_fraction: float = option(
        "share of each client's examples kept for testing, where no split tells which", default=0.3, bound=INSIDE_UNIT
    )
    examples_per_client: int | None = option(
        "at most that many examples per client, training and test together", default=None, bound=COUNT
    )
    model_options: Mapping[str, Any] = option("further arguments of the model's factory", default_factory=dict)
    method_options: Mapping[str, Any] = option("further options of the method", default_factory=dict)
    scenario_options: Mapping[str, Any] = option("further arguments of the scenario", default_factory=dict)
    tuning: Mapping[str, Any] = option(
        "how the learning rate was chosen, by `experiments.tuning`", default_factory=dict
    )

    def __post_init__(self):
        for kind, (registry, _) in KINDS.items():
            object.__setattr__(self, kind, known_name(kind, getattr(self, kind), registry))
        object.__setattr__(self, "churn", checked_churn(self.churn))
        super().__post_init__()
        for name, value in self._of_method().items():
            object.__setattr__(self, name, value)

    def _of_method(self) -> dict[str, Any]:
        """The settings that the method decides, those not given as it has them."""
        own, given = REGISTRY[self.method].defaults, {name: getattr(self, name) for name in OF_METHOD}
        averaging = given["averaging"] or ("models" if self.local_steps or self.local_epochs else own.averaging)
        usual = own if averaging == own.averaging else Defaults(averaging)
        if averaging == "models" and not (self.local_steps or self.local_epochs):
            given |= {"local_steps": usual.local_steps, "local_epochs": usual.local_epochs}
        rounds = given["rounds"] or own.rounds
        found: dict[str, Any] = {
            "averaging": averaging,
            "learning_rate": usual.learning_rate or RATES[averaging],
            "momentum": 0.0 if self.optimizer == "adam" else usual.momentum,
            "batch_size": own.batch_size,
            "participation": own.participation,
            "rounds": rounds,
            "eval_every": usual_every(rounds),
        }
        return {name: found.get(name) if value is None else value for name, value in given.items()}

    def check(self) -> None:
        if self.averaging == "gradients" and (self.local_steps or self.local_epochs):
            given = "local_steps" if self.local_steps else "local_epochs"
            raise ValueError(
                f"averaging is 'gradients', in which a client sends one mini-batch gradient a round, but {given} is "
                f"{getattr(self, given)}; give averaging 'models', or no {given}"
            )
        if self.clients is not None and isinstance(self.clusters, int) and self.clusters > self.clients:
            raise ValueError(
                f"clusters is {self.clusters} but there are only {self.clients} clients; "
                f"ask for at most {self.clients} clusters"
            )
        if self.local_steps is not None and self.local_epochs is not None:
            raise ValueError("local_steps and local_epochs are both given; choose one")
        if self.momentum and self.optimizer == "adam":
            raise ValueError(f"momentum is {self.momentum:g}, but adam has its own; give no momentum, or optimizer sgd")
        of_server = self._of_method()["averaging"] == "gradients" and self.method not in MODEL_AVERAGING_ONLY
        if self.server_learning_rate != 1.0 and of_server:
            raise ValueError(
                f"server_learning_rate is {self.server_learning_rate:g}, but under gradient averaging learning_rate is "
                "the server's; give that alone, or averaging models, or --local-steps or --local-epochs"
            )
        check_robustness(self, REGISTRY[self.method])
        check_data(self)
        for kind in KINDS:
            _check_options(kind, getattr(self, kind), getattr(self, f"{kind}_options"))

    def to_json(self) -> dict[str, Any]:
        content = without_defaults(dataclasses.asdict(self), "split_column")
        return {
            name: with_infinity(value, str) if name.endswith("_options") else value for name, value in content.items()
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> RunConfig:
        installed.load(KINDS)  # whose scenarios may make their own data
        content = as_now(content)
        if "averaging" not in content and {"local_steps", "local_epochs"} <= content.keys():
            models = content["local_steps"] or content["local_epochs"]
            content["averaging"] = "models" if models else "gradients"
        unknown = sorted(set(content) - {field.name for field in dataclasses.fields(cls)})
        if unknown:
            raise ValueError(f"the configuration holds settings unknown here: {', '.join(unknown)}")
        return cls(
            **{name: with_infinity(of, float) if name.endswith("_options") else of for name, of in content.items()}
        )


def as_compared(config: RunConfig) -> dict[str, Any]:
    """Settings as JSON has them, without what tells infinity from None: files of before had null for it."""
    return plain(dataclasses.asdict(config))


def known_name(kind: str, name: str, registry: Mapping[str, Any]) -> str:
    """The registered spelling of a name given with hyphens or underscores; a ValueError says which are known.

    >>> known_name("method", "cfl-gp", REGISTRY)
    'cfl_gp'
    """
    installed.load(KINDS)
    spelled = str(name).replace("-", "_").lower()
    if spelled in registry:
        return spelled
    raise ValueError(unknown_name(kind, name, registry, KINDS))


def needed_options(kind: str, name: str) -> dict[str, bool]:
    """The options of a method, scenario or model beyond those that all of its kind take, and whether each is needed."""
    registry, common = KINDS[kind]
    factory = registry[name]
    if isinstance(factory, type) and issubclass(factory, Options):
        defaults = {found.name: found.default for found in described_options(factory)}
        return {option: value is dataclasses.MISSING for option, value in defaults.items() if option not in common}
    parameters = inspect.signature(factory).parameters.items()
    return {option: value.default is inspect.Parameter.empty for option, value in parameters if option not in common}


def _check_options(kind: str, name: str, options: Mapping[str, Any]) -> None:
    """Raises a ValueError for an option that the part does not have, or one that it needs and was not given."""
    allowed = needed_options(kind, name)
    for wanted, needed in allowed.items():
        if needed and wanted not in options:
            raise ValueError(f"{kind} {name.replace('_', '-')} needs {wanted}; give it")
    for given in options:
        if given not in allowed:
            raise ValueError(unknown_option(kind, name, given, allowed))


def settled(config: RunConfig, federation: Federation | None = None) -> tuple[RunConfig, Federation]:
    """The configuration with what only its data decide, the numbers of clients and clusters; and the federation.

    Args:
      config: the run.
      federation: the configuration's, where it has been built already.
    """
    federation = build_federation(config) if federation is None else federation
    present = len(federation.train.num_examples)
    # All users are asked for by no number: so many of them would be drawn.
    clients = present if config.clients is None and config.scenario != "users" else config.clients
    clusters = clusters_at_start(config, federation) if config.clusters is None else config.clusters
    return dataclasses.replace(config, clients=clients, clusters=clusters), federation


def training_text(config: RunConfig) -> str:
    """What clients and server do in a configuration, in a line.

    >>> training_text(RunConfig(method="fedavg", local_epochs=2, rounds=50))
    'models after 2 local epochs, rate 0.1, b = 64, 50 rounds'
    """
    if config.averaging == "gradients" and config.method not in MODEL_AVERAGING_ONLY:
        sent = "gradients"
    elif config.local_epochs:
        sent = f"models after {config.local_epochs} local epoch{'s' * (config.local_epochs > 1)}"
    else:
        steps = config.local_steps or 1
        sent = f"models after {steps} local step{'s' * (steps > 1)}"
    part = "" if config.participation == 1 else f", {100 * config.participation:g} % of the clients"
    rates = f"rate {config.learning_rate:g}" + (f", momentum {config.momentum:g}" if config.momentum else "")
    return f"{sent}, {rates}, b = {config.batch_size}{part}, {config.rounds} round{'s' * (config.rounds > 1)}"


def usual_clients(configs: Iterable[RunConfig]) -> int:
    """The number of clients that suits several methods: the largest of theirs."""
    return max(REGISTRY[config.method].defaults.clients for config in configs)


def build_federation(config: RunConfig, usual: int | None = None) -> Federation:
    """Loads the data and divides them among the clients.

    Args:
      config: the run.
      usual: how many clients there are where the configuration does not say it, if there are examples enough; None is
        its method's number.
    """
    if config.population is not None:
        return opened(config.population, config.clients)
    parameters = inspect.signature(scenario := SCENARIOS[config.scenario]).parameters
    shared = {name: getattr(config, name) for name in ("test_fraction", "examples_per_client") if name in parameters}
    given = {name: value for name, value in shared.items() if value is not None}
    examples, clients = load_examples(config), config.clients
    if clients is None and config.scenario != "users":
        clients = usual or usual_clients([config])
        if examples is not None:
            rows = sum(len(each.y) for each in (examples if isinstance(examples, list) else [examples]))
            clients = clients if rows >= clients * FEWEST_EXAMPLES else min(clients, FEW_CLIENTS)
    return scenario(examples, clients=clients, seed=config.seed, **config.scenario_options, **given)


def load_examples(config: RunConfig) -> Examples | list[Examples] | None:
    """The source that a scenario divides: None where it makes its own data, a list where it mixes several.

    For the other scenarios several data sets are one, in which each has classes of its own.
    """
    if draws_examples(config.scenario):
        return None
    # A path may have a plus in it.
    names = [config.dataset] if os.path.exists(os.path.expanduser(config.dataset)) else config.dataset.split("+")
    read = {name: getattr(config, name) for name in READING}
    sources = [data.load(name, **read) for name in names]
    if config.scenario == "mixed_datasets":
        return sources
    return data.joined(sources) if len(sources) > 1 else sources[0]


def build_model(config: RunConfig) -> Model:
    return MODELS[config.model](**config.model_options)


def build_local(config: RunConfig) -> tuple[LocalUpdate, optax.GradientTransformation]:
    """What clients and server do under the configuration's protocol.

    Gradient averaging: one step of rate 1, whose Δθ is minus the gradient, and the rate on the server. Model
    averaging: the rate on the clients.
    """
    steps, momentum = config.local_steps, config.momentum or None
    gradients = config.averaging == "gradients"
    if gradients and config.method in MODEL_AVERAGING_ONLY:
        if momentum:
            raise ValueError(
                f"momentum is {momentum:g}, but clients start afresh every round and take a single step, in which it "
                "does nothing; give --local-steps or --local-epochs, or no momentum"
            )
        steps, gradients = 1, False
    further = {"momentum": momentum} if config.optimizer == "sgd" else {}
    rate = config.learning_rate
    if config.learning_rate_decay < 1:
        factor = config.learning_rate_decay
        rate = schedule("exponential_decay", init_value=rate, transition_steps=1, decay_rate=factor)
    optimizer = named(config.optimizer, learning_rate=rate, **further)
    common = {name: getattr(config, name) for name in ("batch_size", "weight_decay", "precision")}
    if gradients:
        return local.sgd(1.0, steps=1, **common), optimizer
    rate = rate if config.optimizer == "sgd" and not momentum else optimizer
    server = named("sgd", learning_rate=config.server_learning_rate)
    return local.sgd(rate, steps=steps, epochs=config.local_epochs, **common), server


def build_algorithm(config: RunConfig) -> ClusteredAlgorithm:
    """The method of a configuration, composed from its parts."""
    method = REGISTRY[config.method]
    update, server = build_local(config)
    shared = {"clusters": config.clusters, "participation": config.participation, "server": server}
    shared |= server_settings(config)
    taken = {found.name for found in described_options(method)} & set(shared)
    if config.clusters is None and own_clusters(config.method) is not dataclasses.MISSING:
        taken.discard("clusters")
    unfit = config.clusters is None or (config.clusters == "auto" and not estimates_clusters(config.method))
    if "clusters" in taken and unfit:
        raise ValueError(f"clusters is {config.clusters!r}, but {config.method.replace('_', '-')} needs a number")
    arguments = {**config.method_options, **{name: shared[name] for name in taken}}
    return method(build_model(config), local=update, **arguments)
