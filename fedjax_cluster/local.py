"""What one client does between receiving a model and sending back its change."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax

from fedjax_cluster.described import described
from fedjax_cluster.faults import Fault
from fedjax_cluster.lifting import is_zero
from fedjax_cluster.marked_clients import marked
from fedjax_cluster.nn.precision import Precision, mixed_precision
from fedjax_cluster.optimizers import NamedOptimizer, Schedule, check_schedule, has_schedule, rate_of
from fedjax_cluster.options import NOT_NEGATIVE, POSITIVE, Options, at_least, changed, option, shown
from fedjax_cluster.types import BatchGradient, ClientData, LocalResult, LocalUpdate, Model, PyTree, Variables


def shuffled_rows(rng_key: Array, start: Array | int, count: int, num_rows: Array | int) -> Array:
    """Places `start … start + count − 1` of a random order of `num_rows` rows, without sorting them.

    A keyed Feistel network permutes a square of side ⌈√n⌉; places that fall beyond n walk on along their cycle.
    Each place costs O(1), where `jax.random.permutation` sorts all rows for every mini-batch: for 64 of 3 000
    rows that is 1.3 ms on a CPU core, twice a training step of a small network. Each row is at each place equally
    often, but of fewer than ten rows some whole orders come up to four times as often as others.

    Args:
      rng_key: decides the order.
      start: i32[], first place.
      count: number of places.
      num_rows: i32[], n, at least 1.

    Returns:
      i32[count]; entries at places ≥ n are meaningless, for the caller to mask.

    >>> sorted(shuffled_rows(jax.random.key(0), 0, 5, 5).tolist())
    [0, 1, 2, 3, 4]
    """
    num_rows = jnp.asarray(num_rows, jnp.uint32)
    side = jnp.ceil(jnp.sqrt(num_rows.astype(jnp.float32))).astype(jnp.uint32)
    # The root of a large n is rounded; a square too small would not hold every row.
    side = jnp.maximum(side + (side * side < num_rows).astype(jnp.uint32), 1)
    round_keys = jax.random.bits(rng_key, (6,), jnp.uint32)

    def permute(place: Array) -> Array:
        left, right = place // side, jnp.fmod(place, side)
        for round_key in round_keys:
            left, right = right, jnp.fmod(left + jnp.fmod(_mix(right ^ round_key), side), side)
        return left * side + right

    place = jnp.fmod(jnp.asarray(start).astype(jnp.uint32) + jnp.arange(count, dtype=jnp.uint32), num_rows)
    walked = lax.while_loop(
        lambda place: jnp.any(place >= num_rows),
        lambda place: jnp.where(place >= num_rows, permute(place), place),
        permute(place),
    )
    return walked.astype(jnp.int32)


def _mix(bits: Array) -> Array:
    """A 32-bit finaliser: every input bit flips every output bit with probability about one half."""
    bits = (bits ^ (bits >> 16)) * jnp.uint32(0x7FEB352D)
    bits = (bits ^ (bits >> 15)) * jnp.uint32(0x846CA68B)
    return bits ^ (bits >> 16)


def mini_batch(
    rng_key: Array, data: ClientData, batch_size: int | None, step: Array | int = 0, fill: bool = False
) -> tuple[Array, Array, Array]:
    """The mini-batch of a local step: batches follow one another through epochs, each in a new random order.

    Args:
      rng_key: the client's key of this round.
      data: one client: x [N, ...], y [N, ...], num_examples i32[].
      batch_size: b; None takes all rows.
      step: i32[], counted over all epochs.
      fill: of all rows, whether a client's own stand again and again in the place of padding, as in a batch that is
        short: batch norm goes by every row that it sees.

    Returns:
      (x [b, ...], y [b, ...], mask bool[b]); the last batch of an epoch may be short.
    """
    rows = data.x.shape[0]
    num_given = jnp.asarray(data.num_examples, jnp.int32)
    num_examples = jnp.maximum(num_given, 1)
    if batch_size is None or batch_size >= rows:
        place = jnp.arange(rows, dtype=jnp.int32)
        mask = place < num_given
        if fill:
            return data.x[place % num_examples], data.y[place % num_examples], mask
        return *without_padding((data.x, data.y), mask), mask
    # Of what is not negative `lax.div` and `fmod` are `//` and `%`, in one operation where these take ten.
    steps_per_epoch = lax.div(num_examples + (batch_size - 1), jnp.int32(batch_size))
    step = jnp.asarray(step, jnp.int32)
    start = jnp.fmod(step, steps_per_epoch) * batch_size
    epoch = lax.div(step, steps_per_epoch)
    index = shuffled_rows(jax.random.fold_in(rng_key, epoch), start, batch_size, num_examples)
    mask = start + jnp.arange(batch_size, dtype=jnp.int32) < num_given
    return data.x[index], data.y[index], mask


def without_padding(rows: PyTree, mask: Array) -> PyTree:
    """Rows, leaves [N, ...], with the first in the place of those outside of mask bool[N].

    At the zeros of padding a gradient may be NaN, such as that of a norm, and is still when its weight is zero.
    """

    def filled(leaf: Array) -> Array:
        return jnp.where(mask.reshape(-1, *[1] * (leaf.ndim - 1)), leaf, leaf[:1])

    return jax.tree.map(filled, rows)


def mean_loss(
    model: Model, variables: Variables, batch: tuple[Array, Array, Array], *, train: bool, rng_key: Array | None = None
) -> tuple[Array, PyTree]:
    """Mean loss over a mini-batch's valid rows, and the batch-norm statistics after it."""
    x, y, mask = batch
    outputs, stats = model.apply(variables, x, train=train, rng_key=rng_key)
    losses = jnp.where(mask, model.loss(outputs, y), 0.0)
    return jnp.sum(losses) / jnp.maximum(jnp.sum(mask.astype(jnp.float32)), 1.0), stats


class BatchGradientOf(Protocol):
    def __call__(
        self, keys: Array, model: Model, variables: Variables, data: ClientData, number: Array | int, /
    ) -> BatchGradient:
        """The gradient on the mini-batch of this number; `keys` are those of batches and of dropout."""
        ...


@runtime_checkable
class StepGradient(Protocol):
    def __call__(
        self,
        batch_gradient: BatchGradientOf,
        keys: Array,
        model: Model,
        variables: Variables,
        data: ClientData,
        number: Array | int,
        /,
    ) -> BatchGradient:
        """What step `number` follows, made of any calls of `batch_gradient`."""
        ...


def with_gradient_term(update: LocalUpdate, purpose: str, term: Callable[[PyTree], PyTree]) -> LocalUpdate:
    """The local update whose steps follow their gradient plus `term` of the parameters.

    Raises:
      ValueError: one that cannot; `purpose` completes "the local update cannot be".
    """
    plain = getattr(update, "step_gradient", None)

    def step_gradient(batch_gradient: BatchGradientOf, *given: Any) -> BatchGradient:
        assert plain is not None  # by `changed`
        found, (_, _, variables, *_) = plain(*given), given
        return found._replace(gradient=jax.tree.map(jnp.add, found.gradient, term(variables.params)))

    return changed(update, purpose, gradient=step_gradient)


class sgd(Options):
    """Local training by stochastic gradient steps.

    θ ← θ − η·(∇f(X, θ) + weight_decay·θ + proximal·(θ − θ_start)), over S steps or E epochs of mini-batches X.
    The optimiser's state starts afresh every round, unless the caller hands back what `run` left. A schedule counts
    rounds, not local steps: all steps of round t, from 0 on, have the rate η(t).

    Raises:
      ValueError: a size, rate or number of steps that cannot be.

    >>> sgd(0.1, batch_size=64, steps=1).steps
    1
    >>> from fedjax_cluster import optimizers
    >>> fading = optimizers.schedule("exponential_decay", init_value=0.1, transition_steps=1, decay_rate=0.5)
    >>> f"{float(sgd(fading, batch_size=64, epochs=1).rate_at(2)):g}"
    '0.025'
    """

    learning_rate: float | optax.GradientTransformation | Schedule = option(
        "η; or a function of the round's number, such as `optimizers.schedule` or optax makes; or any optax "
        "optimiser, whose rate may be such a function in `optimizers.named`",
        bound=POSITIVE,
        kw_only=False,
    )
    batch_size: int | None = option("b; None takes all rows of a client at every step", bound=at_least(1))
    steps: int | None = option("S mini-batches a round", default=None, bound=at_least(1))
    epochs: int | None = option(
        "in place of steps: E passes over the data, ⌈n_i/b⌉ mini-batches each, in a new random order each",
        default=None,
        bound=at_least(1),
    )
    proximal: float = option("weight of FedProx's term μ/2·‖θ − θ_start‖²", default=0.0, bound=NOT_NEGATIVE)
    weight_decay: float = option("weight of the penalty ½‖θ‖²", default=0.0, bound=NOT_NEGATIVE)
    precision: Precision = option(
        '"bfloat16" computes ∇f in that format (`nn.mixed_precision`); the parameters, their gradients, the optimiser '
        "and what is sent stay float32, and so does every evaluation",
        default="float32",
    )
    gradient: StepGradient | None = option("what a step follows in place of ∇f (Per-FedAvg)", default=None)
    fault: Fault | None = option("of the clients that are marked; `simulate` gives it", default=None)

    def check(self) -> None:
        if (self.steps is None) == (self.epochs is None):
            raise ValueError(f"steps is {self.steps} and epochs is {self.epochs}; give exactly one of the two")
        if self.schedule is not None:
            check_schedule(f"learning_rate is {shown(self.schedule)}", self.schedule)

    def to_json(self) -> dict[str, Any]:
        options = super().to_json() | {"gradient": described(self.gradient)[0]}
        for name in ("gradient", "fault"):
            if getattr(self, name) is None:
                del options[name]
        # One of optax's own tells nothing of how it was made.
        named = isinstance(self.learning_rate, NamedOptimizer)
        own = isinstance(self.learning_rate, optax.GradientTransformation) and not named
        return {**options, "learning_rate": "optax"} if own else options

    @property
    def schedule(self) -> Schedule | None:
        """The rate as a function of the round's number, where it is one."""
        rate = self.learning_rate
        if isinstance(rate, NamedOptimizer):
            rate = dict(rate.numbers).get("learning_rate")
        return rate if callable(rate) else None

    @property
    def restarts(self) -> bool:
        """Whether the optimiser has a schedule of its own, which begins anew with the optimiser's state."""
        rate = self.learning_rate
        return isinstance(rate, optax.GradientTransformation) and self.schedule is None and has_schedule(rate)

    def rate_at(self, round: Array | int | None) -> Array | float:
        """η f32[] in the round of this number.

        Raises:
          ValueError: the steps are those of an optimiser, or the rate is a schedule and no round is given.
        """
        rate = self.schedule or self.learning_rate
        if isinstance(rate, optax.GradientTransformation):
            raise ValueError(
                "learning_rate is an optax optimiser, but a rate is asked for; give a number or a schedule"
            )
        if not callable(rate):
            return rate
        if round is None:
            raise ValueError("learning_rate is a function of the round, but no round is given; give round=state.round")
        return rate_of(rate, round)

    def optimizer_at(self, round: Array | int | None) -> optax.GradientTransformation:
        """The optimiser of the steps in the round of this number."""
        if isinstance(self.learning_rate, optax.GradientTransformation):
            if self.schedule is None:
                return self.learning_rate
            assert isinstance(self.learning_rate, NamedOptimizer)  # by `schedule`
            return self.learning_rate.with_rate(self.rate_at(round))
        return optax.sgd(self.rate_at(round))

    def init_optimizer(self, params: PyTree) -> PyTree:
        """The optimiser's state before any training."""
        return self.optimizer_at(0).init(params)

    def work(self, data: ClientData) -> np.ndarray:
        """What a round costs each of the clients with data [M, N, ...]: its steps, i[M]."""
        count = np.asarray(data.num_examples)
        return np.broadcast_to(self._num_steps(ClientData(data.x[0], data.y[0], count))[1], count.shape)

    def batch_rows(self, rows: int) -> int:
        """The rows of a full mini-batch of a client with room for `rows`."""
        return self.batch_size or rows

    def batch_gradient(
        self, keys: Array, model: Model, variables: Variables, data: ClientData, number: Array | int
    ) -> BatchGradient:
        """∇f on mini-batch `number`."""
        trained = mixed_precision(model, self.precision)
        # NOTE: statistics of a batch that is short of b rows count some of the client's rows once more than others.
        fill = bool(jax.tree.leaves(variables.stats))
        batch = mini_batch(keys[0], data, self.batch_size, number, fill)
        key = jax.random.fold_in(keys[1], number)

        def loss(params: PyTree) -> tuple[Array, PyTree]:
            return mean_loss(trained, Variables(params, variables.stats), batch, train=True, rng_key=key)

        (value, stats), gradient = jax.value_and_grad(loss, has_aux=True)(variables.params)
        return BatchGradient(value, gradient, stats)

    def step_gradient(
        self, keys: Array, model: Model, variables: Variables, data: ClientData, number: Array | int
    ) -> BatchGradient:
        """What step `number` follows."""
        if self.gradient is None:
            return self.batch_gradient(keys, model, variables, data, number)
        return self.gradient(self.batch_gradient, keys, model, variables, data, number)

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
        """The client's training; see `types.LocalUpdate`."""
        result = self._train(rng_key, model, variables, data, anchor, first, optimizer, round)
        faulty = marked(data)
        return result if self.fault is None or faulty is None else self.fault.sent(rng_key, result, faulty)

    def _train(
        self,
        rng_key: Array,
        model: Model,
        variables: Variables,
        data: ClientData,
        anchor: PyTree | None,
        first: BatchGradient | None,
        optimizer: PyTree | None,
        round: Array | int | None,
    ) -> LocalResult:
        """What an honest client sends."""
        keys, method = jax.random.split(rng_key), self.optimizer_at(round)
        start = variables.params
        if optimizer is None:
            # Of a model that all clients share, copies: zeros in the place of arrays that lie on several devices are
            # refused within one of them.
            optimizer = method.init(jax.tree.map(jnp.copy, start))
        anchor = start if anchor is None else anchor

        def step(number, params, stats, optimizer_state, known=None):
            if known is None:
                known = self.step_gradient(keys, model, Variables(params, stats), data, number)
            value, gradient, stats = known
            if not is_zero(self.weight_decay):
                gradient = jax.tree.map(lambda g, p: g + self.weight_decay * p, gradient, params)
            if not is_zero(self.proximal):
                gradient = jax.tree.map(lambda g, p, a: g + self.proximal * (p - a), gradient, params, anchor)
            updates, optimizer_state = method.update(gradient, optimizer_state, params)
            return value, updates, stats, optimizer_state

        max_steps, num_steps = self._num_steps(data)
        if self.fault is not None and (faulty := marked(data)) is not None:
            num_steps = self.fault.num_steps(num_steps, faulty)
        if max_steps == 1:
            # θ_start + Δ − θ_start would round the change to the parameters' precision.
            value, delta, stats, optimizer = step(0, start, variables.stats, optimizer, first)
            return LocalResult(delta, stats, value[None], jnp.asarray(1), data.num_examples, optimizer)

        def advance(number, carry, known=None):
            params, stats, optimizer_state, losses = carry
            value, updates, stats, optimizer_state = step(number, params, stats, optimizer_state, known)
            return optax.apply_updates(params, updates), stats, optimizer_state, losses.at[number].set(value)

        carry = (start, variables.stats, optimizer, jnp.zeros(max_steps))
        if first is not None:
            carry = advance(0, carry, first)
        params, stats, optimizer, losses = lax.fori_loop(0 if first is None else 1, num_steps, advance, carry)
        delta = jax.tree.map(jnp.subtract, params, start)
        return LocalResult(delta, stats, losses, jnp.asarray(num_steps, jnp.int32), data.num_examples, optimizer)

    def _num_steps(self, data: ClientData) -> tuple[int, Any]:
        """The most steps that a client with so many rows can take, and how many this one takes."""
        rows = data.x.shape[0]
        if self.epochs is None:
            assert self.steps is not None  # by `check`
            return self.steps, self.steps
        if self.batch_size is None or self.batch_size >= rows:
            return self.epochs, self.epochs
        count = jnp.asarray(data.num_examples, jnp.int32)
        batches = lax.div(count + (self.batch_size - 1), jnp.int32(self.batch_size))
        return self.epochs * math.ceil(rows / self.batch_size), self.epochs * batches

    def first_loss(self, rng_key: Array, model: Model, variables: Variables, data: ClientData) -> Array:
        """The loss f32[] on the mini-batch of the first step, in inference mode."""
        batch_key, _ = jax.random.split(rng_key)
        return mean_loss(model, variables, mini_batch(batch_key, data, self.batch_size), train=False)[0]

    def first_gradient(self, rng_key: Array, model: Model, variables: Variables, data: ClientData) -> BatchGradient:
        """What the first step follows."""
        return self.step_gradient(jax.random.split(rng_key), model, variables, data, 0)


def client_key(rng_key: Array, client: Array) -> Array:
    """The client's own key of a round: by its id, never by its position in the cohort."""
    return jax.random.fold_in(rng_key, client)


def server_key(rng_key: Array) -> Array:
    """The server's own key of a round, which no client has."""
    return jax.random.fold_in(rng_key, 2**32 - 1)


def mean_of_steps(result: LocalResult) -> Array:
    """Mean loss f32[] over a client's local steps."""
    return jnp.sum(result.losses) / jnp.maximum(result.num_steps, 1).astype(jnp.float32)


def num_batches(local: LocalUpdate, data: ClientData) -> Array:
    """f32[C]: mini-batches in one pass over each client's examples.

    Args:
      local: a client's training.
      data: of the cohort, x [C, N, ...].
    """
    size = local.batch_rows(data.x.shape[1])
    return ((data.num_examples + size - 1) // size).astype(jnp.float32)
