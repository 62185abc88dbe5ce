"""What a method is: a value whose fields are its options, with the functions that most methods share."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, NamedTuple

import optax
from jax import Array

from fedjax_cluster import cohorts
from fedjax_cluster.aggregation import Aggregation, named
from fedjax_cluster.algorithms.round import personalize_by_label
from fedjax_cluster.lifting import always
from fedjax_cluster.local import server_key
from fedjax_cluster.nn.precision import in_32_bits
from fedjax_cluster.options import SHARE, Options, option
from fedjax_cluster.privacy.gaussian import ALL, SHOWN, Release, Sends, carrying_clip, gaussian, release
from fedjax_cluster.types import (
    ClientData,
    Clusters,
    Cohort,
    LocalUpdate,
    Model,
    Population,
    RoundInfo,
    Selection,
    State,
    Variables,
)

REGISTRY: dict[str, type[Method]] = {}
# One value, as programs are told apart by it: each call of optax.sgd makes another.
PLAIN = optax.sgd(1.0)
IN_32_BITS = {
    "init",
    "template",
    "select",
    "step",
    "personalize",
    "admit",
    "snapshot",
    "cluster",
    "standing",
    "draw",
    "recounted",
}

# Options that saved runs do not name where they are these: what was so before there was a choice.
LEFT_OUT = {"aggregation": None, "privacy": None, "landmarks": None, "profiles_of": "everybody"}

Averaging = Literal["gradients", "models"]
AGGREGATION = (
    "what the server makes of a cluster's changes in place of their mean, such as "
    "`aggregation.trimmed_mean(share=0.2)`, or the name of a rule; None is the mean"
)


class Defaults(NamedTuple):
    """What a run of a method has where its configuration says nothing (`experiments.RunConfig`).

    Attributes:
      averaging: of one mini-batch gradient a client, or of the clients' models.
      learning_rate: of the server or the clients, as it is; None is the usual one of the averaging.
      local_steps, local_epochs: of a client whose models are averaged.
      momentum, batch_size, participation, rounds, clients: as in `RunConfig`.
      finds_clusters: whether the method finds how many clusters there are, up to `clusters`.
    """

    averaging: Averaging = "models"
    learning_rate: float | None = None
    local_steps: int | None = 10
    local_epochs: int | None = None
    momentum: float = 0.0
    batch_size: int = 64
    participation: float = 1.0
    rounds: int = 100
    clients: int = 16
    finds_clusters: bool = False


FEWER_AT_A_TIME = "fewer clients at a time (chunk_size)"


class FirstProgram(NamedTuple):
    """A program that a method's `init` runs, with the shapes of its arguments; of plans.

    Attributes:
      what: it computes, in a few words.
      program: a jitted function.
      arguments, static: its arguments by place, and its static ones by name.
      instead: what to change where it does not fit.
      alone: whether it runs on one device whatever the number of devices.
    """

    what: str
    program: Callable[..., Any]
    arguments: tuple
    static: Mapping[str, Any] = {}
    instead: str = FEWER_AT_A_TIME
    alone: bool = False


class Method(Options):
    """A method of federated learning, as `types.ClusteredAlgorithm` describes it.

    A subclass is registered under its name, which gives it a command, its flags and a place in `list`. It has `init`
    and `step`, and where these defaults do not fit, `select`, `personalize` and the functions that are None here.
    """

    model: Model = option("what is trained", kw_only=False)
    local: LocalUpdate = option("what a client does in a round, such as `sgd(0.1, batch_size=64, epochs=1)`")
    participation: float = option("share of the clients in a round", default=1.0, bound=SHARE, shapes=always)
    privacy: gaussian | None = option(
        "clipping and noise on all that clients send, `privacy.gaussian(clip=1.0, noise_multiplier=1.0, delta=1e-5)`",
        default=None,
    )

    # What clients send, where differential privacy of it is settled, else why it is not. Neither is inherited: a
    # method that sends something else too would have its parent's budget.
    sends: ClassVar[Sends | None] = None
    not_private: ClassVar[str] = "does not say what its clients send"

    # What the server groups clients by: "nothing", the very "changes" that it averages, or what they have "shown" it
    # beside, which is of `marked_clients.shown_rows` then.
    clusters_by: ClassVar[Literal["nothing", "changes", "shown"]] = "nothing"

    # Of a run on the method's home ground, where nothing else is said.
    defaults = Defaults()

    # What a method may lack; see `types.ClusteredAlgorithm`.
    admit = None
    snapshot = None
    cluster = None
    template = None
    # Of a method whose draws depend on clusters between two events, and on what draws themselves change: what they
    # depend on, of a state. `draw(rng_key, standing)` then gives a selection and what the next depends on, so that the
    # rows of populations on disk are read ahead.
    standing = None
    draw = None
    recounted = None  # a state in which clients have left, with what the method keeps counted of them

    first_clustering: ClassVar[Any] = 0  # 0-based round before which nobody is told apart
    fewest_in_cohort: ClassVar[Any] = 1  # clients, however small the participation, where so many are there
    keep_optimizer = False  # whether clients keep their optimiser's state from round to round

    def __init_subclass__(cls, abstract: bool = False, **keywords: Any):
        super().__init_subclass__(**keywords)
        for name, function in [(name, vars(cls).get(name)) for name in IN_32_BITS]:
            if inspect.isfunction(function):
                setattr(cls, name, in_32_bits(function))
        if not abstract:
            REGISTRY[cls.__name__] = cls

    def __post_init__(self):
        if isinstance(rule := getattr(self, "aggregation", None), str):
            object.__setattr__(self, "aggregation", named(rule))
        super().__post_init__()
        if self.privacy is not None:
            self.check_privacy(self.privacy)
        if not self.keep_optimizer and getattr(self.local, "restarts", False):
            raise ValueError(
                "learning_rate of local is an optax optimiser with a schedule, which would start anew in every round; "
                "give local.sgd the schedule itself, or optimizers.named('adam', learning_rate=schedule) and the like"
            )

    @property
    def name(self) -> str:
        return type(self).__name__

    def to_json(self) -> dict[str, Any]:
        own = super().to_json()
        return {name: value for name, value in own.items() if name not in LEFT_OUT or value != LEFT_OUT[name]}

    def check_privacy(self, privacy: gaussian) -> None:
        """Raises a ValueError where it is not settled what the method releases of a client."""
        own, name = vars(type(self)), self.name.replace("_", "-")
        if own.get("sends") is None:
            why = own.get("not_private", Method.not_private)
            raise ValueError(f"privacy is given, but {name} {why}; give no privacy, or another method, such as fedavg")
        if (rule := getattr(self, "aggregation", None)) is not None:
            raise ValueError(
                f"privacy is given, but aggregation is {rule}, of which no sensitivity is known; give one of the two "
                "(privacy clips each change already)"
            )
        if (leak := self.unprotected(privacy)) is not None:
            raise ValueError(f"privacy is given, but {leak}")
        if self.sends == SHOWN and type(self).times_shown is Method.times_shown:
            raise ValueError(
                f"privacy is given, but {name} does not say how often a client shows something, which its budget "
                "counts; give the method times_shown(rounds), or another method, such as fedavg"
            )
        if self.sends == SHOWN and not privacy.shows:
            raise ValueError(
                f"privacy is given, but {name} clusters by what each client shows; give its clustering_clip and "
                "clustering_noise_multiplier as well (--privacy-clustering-clip, --privacy-clustering-noise)"
            )
        if self.sends != SHOWN and privacy.shows:
            raise ValueError(
                f"clustering_clip is {privacy.clustering_clip:g}, but clients of {name} show nothing to a clustering; "
                "leave out clustering_clip and clustering_noise_multiplier"
            )
        if self.sends == ALL and privacy.quantile is not None:
            raise ValueError(
                f"quantile is {privacy.quantile:g}, but {name} clips the changes of all its models together; give "
                "no quantile"
            )
        if self.sends != SHOWN and self.participation < 1 and not self.draws_ahead:
            raise ValueError(
                f"privacy is given, but {name}'s draw is not a sample of equal chances for all; give participation 1"
            )

    def unprotected(self, privacy: gaussian) -> str | None:
        """What the method's options have clients send beside what is clipped and noised, and what to do; or None."""
        return None

    def times_shown(self, rounds: int) -> int:
        """How often a client may have shown something to a clustering in so many rounds; of a method with `SHOWN`."""
        return 0

    def private(self, rng_key: Array, clusters: Clusters) -> Release | None:
        """What makes the means of a round where there is privacy; `rng_key` is that of the round."""
        if self.privacy is None or self.sends is None:
            return None
        return release(self.privacy, self.sends, server_key(rng_key), clusters)

    @property
    def config(self) -> dict[str, Any]:
        """The options as JSON has them, without the model."""
        return {name: value for name, value in self.to_json().items() if name != "model"}

    @property
    def reads_all(self) -> bool:
        """Whether `init` reads the rows of all clients, so that these cannot be on disk."""
        return False

    @property
    def draws_ahead(self) -> bool:
        """Whether `select` goes by the key, the round, who is present and a landmark alone: rows can be read ahead."""
        return type(self).select is Method.select and self.standing is None

    @property
    def draws_follow(self) -> bool:
        """Whether `select` is `draw` from `standing`, which a subclass with a `select` of its own has given up."""
        return type(self).select is Method.select and self.standing is not None

    def clients_in_round(self, present: int) -> int:
        """How many of so many clients the server's rule, such as Krum, has of a cluster while all are in one."""
        return min(present, max(cohorts.cohort_size(self.participation, present), self.fewest_in_cohort))

    @property
    def update(self) -> LocalUpdate:
        """What a client does; `local`, unless the method changes it."""
        return self.local

    def init(self, rng_key: Array, population: Population) -> tuple[State, RoundInfo]:
        """The state before the first round."""
        raise _missing(self, "init")

    def first_programs(self, rng_key: Array, state: State, population: Population) -> tuple[FirstProgram, ...]:
        """What `init` computes of all clients of a population on devices; all may be shapes."""
        return ()

    def step(self, rng_key: Array, state: State, cohort: Cohort) -> tuple[State, RoundInfo]:
        """One round."""
        raise _missing(self, "step")

    @in_32_bits
    def select(self, rng_key: Array, state: State) -> Selection:
        """A uniform draw of the clients that are present, or that of a method with `standing`."""
        if self.standing is not None and self.draw is not None:
            return self.draw(rng_key, self.standing(state))[0]
        return cohorts.uniform(rng_key, state.clients.present, self.participation)

    @in_32_bits
    def personalize(self, rng_key: Array, state: State, data: ClientData, index: Array) -> tuple[Variables, Array]:
        """The model of the client's cluster, alone in its mixture."""
        return personalize_by_label(state, index)


class AveragingMethod(Method, abstract=True):
    """A method whose server takes one optimiser step per cluster on the mean of its clients' changes."""

    server: optax.GradientTransformation | None = option(
        "any optax transformation of minus the mean change; None is plain averaging, `sgd(1.0)`", default=None
    )
    aggregation: Aggregation | None = option(AGGREGATION, default=None)

    @property
    def server_step(self) -> optax.GradientTransformation:
        """What the server does with the mean change."""
        return PLAIN if self.server is None else self.server

    @property
    def optimizer(self) -> optax.GradientTransformation:
        """The server's optimiser, with the clip in its state where that follows a quantile."""
        return carrying_clip(self.server_step, self.privacy)


def _missing(method: Method, function: str) -> NotImplementedError:
    return NotImplementedError(f"{type(method).__name__} has no {function}; a method needs init and step of its own")
