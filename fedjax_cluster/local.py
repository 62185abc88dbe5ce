"""What one client does between receiving a model and sending back its change."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax

from fedjax_cluster.nn.precision import Precision, check_precision, mixed_precision
from fedjax_cluster.types import BatchGradient, ClientData, LocalResult, LocalUpdate, Model, PyTree, Variables


def shuffled_rows(rng_key: Array, start: Array | int, count: int, num_rows: Array | int) -> Array:
    """Places `start … start + count − 1` of a random order of `num_rows` rows, without sorting them.

    A keyed Feistel network permutes a square of side ⌈√n⌉; places that fall beyond n walk on along their cycle.
    Each place costs O(1), where `jax.random.permutation` sorts all rows for every mini-batch: for 64 of 3 000
    rows that is 1.3 ms on a CPU core, twice a training step of a small network.

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
        left, right = place // side, place % side
        for round_key in round_keys:
            left, right = right, (left + _mix(right ^ round_key) % side) % side
        return left * side + right

    place = (jnp.asarray(start).astype(jnp.uint32) + jnp.arange(count, dtype=jnp.uint32)) % num_rows
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
    rng_key: Array, data: ClientData, batch_size: int | None, step: Array | int = 0
) -> tuple[Array, Array, Array]:
    """The mini-batch of a local step: batches follow one another through epochs, each in a new random order.

    Args:
      rng_key: the client's key of this round.
      data: one client: x [N, ...], y [N, ...], num_examples i32[].
      batch_size: b; None takes all rows.
      step: i32[], counted over all epochs.

    Returns:
      (x [b, ...], y [b, ...], mask bool[b]); the last batch of an epoch may be short.
    """
    rows = data.x.shape[0]
    if batch_size is None or batch_size >= rows:
        return data.x, data.y, jnp.arange(rows) < data.num_examples
    num_examples = jnp.maximum(data.num_examples, 1)
    steps_per_epoch = (num_examples + batch_size - 1) // batch_size
    step = jnp.asarray(step, jnp.int32)
    start = (step % steps_per_epoch) * batch_size
    index = shuffled_rows(jax.random.fold_in(rng_key, step // steps_per_epoch), start, batch_size, num_examples)
    mask = start + jnp.arange(batch_size) < data.num_examples
    return data.x[index], data.y[index], mask


def mean_loss(
    model: Model, variables: Variables, batch: tuple[Array, Array, Array], *, train: bool, rng_key: Array | None = None
) -> tuple[Array, PyTree]:
    """Mean loss over a mini-batch's valid rows, and the batch-norm statistics after it."""
    x, y, mask = batch
    outputs, stats = model.apply(variables, x, train=train, rng_key=rng_key)
    losses = jnp.where(mask, model.loss(outputs, y), 0.0)
    return jnp.sum(losses) / jnp.maximum(jnp.sum(mask.astype(jnp.float32)), 1.0), stats


def rows_at_once() -> int:
    """How many rows go through a model together in inference.

    On a CPU as many as its caches hold: of a LeNet-5, 64 rows took 22 µs each, 256 took 41 and 512 took 48; an MLP has
    a tenth to lose. Elsewhere products must be large.
    """
    return 64 if jax.default_backend() == "cpu" else 256


def dataset_loss(model: Model, variables: Variables, data: ClientData, *, chunk: int | None = None) -> Array:
    """Mean loss f32[] of one client's examples in inference mode, `chunk` rows at a time."""
    rows = data.x.shape[0]
    chunk = min(chunk or rows_at_once(), rows)

    def add(number: Array, total: Array) -> Array:
        start = jnp.minimum(number * chunk, rows - chunk)
        x, y = (lax.dynamic_slice_in_dim(leaf, start, chunk) for leaf in (data.x, data.y))
        position = start + jnp.arange(chunk)
        fresh = (position >= number * chunk) & (position < data.num_examples)
        mean, _ = mean_loss(model, variables, (x, y, fresh), train=False)
        return total + mean * jnp.sum(fresh.astype(jnp.float32))

    total = lax.fori_loop(0, (data.num_examples + chunk - 1) // chunk, add, jnp.zeros(()))
    return total / jnp.maximum(data.num_examples, 1).astype(jnp.float32)


def example_losses(model: Model, variables: Variables, data: ClientData, *, chunk: int | None = None) -> Array:
    """Loss f32[N] of each of one client's examples in inference mode, `chunk` rows at a time; 0 on padding."""
    rows = data.x.shape[0]
    chunk = min(chunk or rows_at_once(), rows)

    def write(number: Array, losses: Array) -> Array:
        start = jnp.minimum(number * chunk, rows - chunk)
        x, y = (lax.dynamic_slice_in_dim(leaf, start, chunk) for leaf in (data.x, data.y))
        outputs, _ = model.apply(variables, x, train=False)
        return lax.dynamic_update_slice_in_dim(losses, model.loss(outputs, y), start, 0)

    losses = lax.fori_loop(0, (data.num_examples + chunk - 1) // chunk, write, jnp.zeros(rows))
    return jnp.where(jnp.arange(rows) < data.num_examples, losses, 0.0)


def sgd(
    learning_rate: float | optax.GradientTransformation,
    *,
    batch_size: int | None,
    steps: int | None = None,
    epochs: int | None = None,
    proximal: float = 0.0,
    weight_decay: float = 0.0,
    precision: Precision = "float32",
    gradient: Callable[..., BatchGradient] | None = None,
) -> LocalUpdate:
    """Local training by stochastic gradient steps.

    θ ← θ − η·(∇f(X, θ) + weight_decay·θ + proximal·(θ − θ_start)), over S steps or E epochs of mini-batches X.
    The optimiser's state starts afresh every round, unless the caller hands back what `run` left.

    Args:
      learning_rate: η, or any optax optimiser.
      batch_size: b; None takes all of a client's rows at every step.
      steps: S mini-batches a round; or
      epochs: E passes over the data, ⌈n_i/b⌉ mini-batches each, in a new random order each.
      proximal: weight of FedProx's term μ/2·‖θ − θ_start‖².
      weight_decay: weight of the penalty ½‖θ‖².
      precision: "bfloat16" computes ∇f in that format (`nn.mixed_precision`); the parameters, their gradients, the
        optimiser and what is sent stay float32, and so does every evaluation.
      gradient: `(batch_gradient, keys, model, variables, data, step) -> BatchGradient` that a step follows instead of
        ∇f, made of any calls `batch_gradient(keys, model, variables, data, step)` of that (Per-FedAvg).

    Returns:
      A LocalUpdate whose `run(rng_key, model, variables, data, anchor=None, first=None, optimizer=None)` gives the
      change Δθ, the loss of each mini-batch before its step, and the number of examples; `anchor` replaces θ_start in
      the proximal term, `first` is the first step's gradient where the caller has it already, `optimizer` the
      optimiser's state that the client's last round left.

    Raises:
      ValueError: a size, rate or number of steps that cannot be.

    >>> sgd(0.1, batch_size=64, steps=1).config["steps"]
    1
    """
    if (steps is None) == (epochs is None):
        raise ValueError(f"steps is {steps} and epochs is {epochs}; give exactly one of the two")
    for name, value in (("batch_size", batch_size), ("steps", steps), ("epochs", epochs)):
        if value is not None and value < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1")
    for name, value in (("proximal", proximal), ("weight_decay", weight_decay)):
        if not (value >= 0 and math.isfinite(value)):
            raise ValueError(f"{name} is {value}; it must be a finite number, 0 or more")
    check_precision(precision)
    if isinstance(learning_rate, optax.GradientTransformation):
        method, rate = learning_rate, "optax"
    else:
        if not (learning_rate > 0 and math.isfinite(learning_rate)):
            raise ValueError(f"learning_rate is {learning_rate}; it must be positive and finite")
        method, rate = optax.sgd(learning_rate), float(learning_rate)

    def batch_gradient(
        keys: Array, model: Model, variables: Variables, data: ClientData, number: Array | int
    ) -> BatchGradient:
        def loss(params):
            return mean_loss(trained, Variables(params, variables.stats), batch, train=True, rng_key=key)

        trained = mixed_precision(model, precision)
        batch, key = mini_batch(keys[0], data, batch_size, number), jax.random.fold_in(keys[1], number)
        (value, stats), gradient = jax.value_and_grad(loss, has_aux=True)(variables.params)
        return BatchGradient(value, gradient, stats)

    step_gradient = batch_gradient if gradient is None else functools.partial(gradient, batch_gradient)

    def run(
        rng_key: Array,
        model: Model,
        variables: Variables,
        data: ClientData,
        anchor: PyTree | None = None,
        first: BatchGradient | None = None,
        optimizer: PyTree | None = None,
    ) -> LocalResult:
        keys = jax.random.split(rng_key)
        start = variables.params
        optimizer = method.init(start) if optimizer is None else optimizer
        anchor = start if anchor is None else anchor

        def step(number, params, stats, optimizer_state, known=None):
            if known is None:
                known = step_gradient(keys, model, Variables(params, stats), data, number)
            value, gradient, stats = known
            if weight_decay:
                gradient = jax.tree.map(lambda g, p: g + weight_decay * p, gradient, params)
            if proximal:
                gradient = jax.tree.map(lambda g, p, a: g + proximal * (p - a), gradient, params, anchor)
            updates, optimizer_state = method.update(gradient, optimizer_state, params)
            return value, updates, stats, optimizer_state

        rows = data.x.shape[0]
        if steps is not None:
            max_steps, num_steps = steps, steps
        elif batch_size is None or batch_size >= rows:
            max_steps, num_steps = epochs, epochs
        else:
            max_steps = epochs * math.ceil(rows / batch_size)
            num_steps = epochs * ((data.num_examples + batch_size - 1) // batch_size)

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
        steps_taken = jnp.asarray(num_steps, jnp.int32)
        return LocalResult(delta, stats, losses, steps_taken, data.num_examples, optimizer)

    def first_loss(rng_key: Array, model: Model, variables: Variables, data: ClientData) -> Array:
        batch_key, _ = jax.random.split(rng_key)
        return mean_loss(model, variables, mini_batch(batch_key, data, batch_size), train=False)[0]

    def first_gradient(rng_key: Array, model: Model, variables: Variables, data: ClientData) -> BatchGradient:
        return step_gradient(jax.random.split(rng_key), model, variables, data, 0)

    def rebuild(**changes: Any) -> LocalUpdate:
        return sgd(changes.pop("learning_rate", learning_rate), **{**arguments, "gradient": gradient, **changes})

    arguments: dict[str, Any] = {
        "batch_size": batch_size,
        "steps": steps,
        "epochs": epochs,
        "proximal": proximal,
        "weight_decay": weight_decay,
        "precision": precision,
    }
    return LocalUpdate(run, first_loss, {"learning_rate": rate, **arguments}, first_gradient, rebuild, method.init)


def client_key(rng_key: Array, client: Array) -> Array:
    """The client's own key of a round: by its id, never by its position in the cohort."""
    return jax.random.fold_in(rng_key, client)


def server_key(rng_key: Array) -> Array:
    """The server's own key of a round, which no client has."""
    return jax.random.fold_in(rng_key, 2**32 - 1)


def mean_of_steps(result: LocalResult) -> Array:
    """Mean loss f32[] over a client's local steps."""
    return jnp.sum(result.losses) / jnp.maximum(result.num_steps, 1).astype(jnp.float32)
