"""A recurrent model for next-word prediction."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from fedjax_cluster.nn.initializers import Scheme, Uniform
from fedjax_cluster.nn.layers import dense
from fedjax_cluster.nn.losses import classification_metrics
from fedjax_cluster.nn.sums import rows_of, with_bias
from fedjax_cluster.nn.varying import equally_varying
from fedjax_cluster.nn.wrapping import Sized, from_flax
from fedjax_cluster.options import BELOW_ONE, COUNT, with_checks
from fedjax_cluster.types import Model


@with_checks(hidden=COUNT, embedding=COUNT, dropout=BELOW_ONE, num_outputs=COUNT)
def lstm(
    hidden: Sequence[int] = (200, 200),
    *,
    embedding: int = 200,
    dropout: float = 0.0,
    init: Scheme = "torch",
    num_outputs: int | None = None,
) -> Model:
    """An LSTM over tokens that predicts the next one: `embedding`, `lstm_0`, ..., `output`.

    CFL trains two layers on news texts (Section VI-C, which gives no sizes).

    Args:
      hidden: sizes of the LSTM layers.
      embedding: size of a token's vector.
      dropout: rate before every LSTM layer and before the output; training then needs `rng_key`.
      init: "torch" (LSTM uniform ±1/√hidden, output uniform ±1/√fan_in, embedding normal) or "flax" (LeCun normal,
        orthogonal recurrence, zero bias).
      num_outputs: size of the vocabulary, where it differs from the data set's `num_classes`.

    Returns:
      A `Model` of integers x [N, T] and y [N, T] (x shifted by one token), with outputs f32[N, T, vocabulary]. Its
      metrics include "perplexity", exp of a client's mean loss per token; a run's is the mean over its clients.

    Raises:
      ValueError: an unknown `init`, a size below 1, or a dropout rate outside [0, 1).

    >>> from fedjax_cluster.types import DatasetInfo
    >>> model = lstm((8,), embedding=4)
    >>> variables = model.init(jax.random.key(0), DatasetInfo("news", (12,), 50, "language"))
    >>> model.apply(variables, jnp.zeros((2, 12), jnp.int32), train=False)[0].shape
    (2, 12, 50)
    """
    network = Sized(LanguageModel, scheme=init, hidden=hidden, embedding=embedding, dropout=dropout)
    return from_flax(network, loss="cross_entropy", num_outputs=num_outputs)._replace(metrics=_with_perplexity)


def _with_perplexity(predictions: Array, y: Array, mask: Array) -> dict[str, Array]:
    if y.ndim != predictions.ndim - 1:
        raise ValueError(
            f"lstm predicts the next token at each place, so that y is x shifted by one, but y has shape {y.shape} and "
            f"its outputs {predictions.shape}; to classify sequences give a module of your own by from_flax"
        )
    scores = classification_metrics(predictions, y, mask)
    return {**scores, "perplexity": jnp.exp(scores["loss"])}


class LanguageModel(linen.Module):
    """Embedding, LSTM layers, dense output over the vocabulary."""

    hidden: tuple[int, ...]
    embedding: int
    dropout: float
    num_outputs: int
    scheme: Scheme

    @linen.compact
    def __call__(self, tokens: Array, train: bool = False) -> Array:
        if tokens.ndim != 2 or not jnp.issubdtype(tokens.dtype, jnp.integer):
            given = f"inputs have shape {tokens.shape} and dtype {tokens.dtype}"
            raise ValueError(f"{given}; an lstm takes integers [N, T]")
        start = linen.initializers.normal(1.0) if self.scheme == "torch" else linen.linear.default_embed_init
        embedding = linen.Embed(self.num_outputs, self.embedding, embedding_init=start, name="embedding")
        # Time first through all layers, so that nothing large is transposed.
        x = rows_of(embedding.embedding, tokens.swapaxes(0, 1))
        for i, features in enumerate(self.hidden):
            x = linen.Dropout(self.dropout, deterministic=not train)(x)
            x = Lstm(features, self.scheme, name=f"lstm_{i}")(x)
        x = linen.Dropout(self.dropout, deterministic=not train)(x.swapaxes(0, 1))
        outputs = dense(x.reshape(-1, x.shape[-1]), self.num_outputs, self.scheme, "output")
        return outputs.reshape(*tokens.shape, -1)


class Lstm(linen.Module):
    """One LSTM layer from zero states: f32[T, N, inputs] → f32[T, N, features].

    The gates are concatenated in PyTorch's order (input, forget, cell, output); one bias serves both products.
    """

    features: int
    scheme: Scheme

    @linen.compact
    def __call__(self, x: Array) -> Array:
        gates = 4 * self.features
        if self.scheme == "torch":
            start = recurrent_start = bias_start = Uniform(1.0 / math.sqrt(self.features))
        else:
            start, recurrent_start = linen.initializers.lecun_normal(), linen.initializers.orthogonal()
            bias_start = linen.initializers.zeros
        kernel = self.param("kernel", start, (x.shape[-1], gates), jnp.float32)
        recurrent = self.param("recurrent_kernel", recurrent_start, (self.features, gates), jnp.float32)
        bias = self.param("bias", bias_start, (gates,), jnp.float32)
        # One matrix product for the inputs of all steps; only the recurrence needs the loop.
        return recurrence(with_bias(_at_all_steps(x, kernel), bias.reshape(1, 1, -1)), recurrent)


def _at_all_steps(x: Array, kernel: Array) -> Array:
    """x @ kernel of x [T, N, …] with its rows in one axis, whose gradients XLA computes without copies."""
    return (x.reshape(-1, x.shape[-1]) @ kernel).reshape(*x.shape[:2], -1)


@jax.custom_jvp
def recurrence(inputs: Array, kernel: Array) -> Array:
    """All outputs h_t = o_t tanh(c_t), c_t = f_t c_{t−1} + i_t n_t of an LSTM from zero states.

    (i, f, n, o)_t = (σ, σ, tanh, σ)(inputs_t + h_{t−1} kernel). Differentiated as a loop, the kernel's gradient would
    be added up step by step; here it is one product over all steps, of any order and in either mode.

    Args:
      inputs: f32[T, N, 4 features].
      kernel: f32[features, 4 features].

    Returns:
      f32[T, N, features].
    """
    return _all_steps(inputs, kernel)[0]


class _Kept(NamedTuple):
    """What the derivative of a step needs: its four gates, the cell before it, and tanh of the cell after it."""

    gates: Sequence[Array]
    before: Array
    squashed: Array


def _all_steps(inputs: Array, kernel: Array) -> tuple[Array, _Kept]:
    def step(carry: tuple[Array, Array], given: Array) -> tuple[tuple[Array, Array], tuple[Array, _Kept]]:
        before, output = carry
        into, forget, new, out = gates = _gates(given + output @ kernel)
        cell = forget * before + into * new
        squashed = jnp.tanh(cell)
        output = out * squashed
        return (cell, output), (output, _Kept(gates, before, squashed))

    return lax.scan(step, _zero_states(inputs, kernel), inputs)[1]


def _gates(inputs: Array) -> Sequence[Array]:
    """Of one step. σ(x) = (1 + tanh(x / 2)) / 2: one call for all gates takes a quarter of four calls' time."""
    features = inputs.shape[-1] // 4
    scale = np.repeat([0.5, 0.5, 1.0, 0.5], features).reshape(1, -1)
    scale, shift = jnp.asarray(scale, inputs.dtype), jnp.asarray(1.0 - scale, inputs.dtype)
    return jnp.split(jnp.tanh(inputs * scale) * scale + shift, 4, axis=-1)


def _zero_states(inputs: Array, kernel: Array) -> tuple[Array, Array]:
    # The loop's carry must vary over a mesh's devices from the start, as it does after a step.
    zeros, _ = equally_varying(jnp.zeros((inputs.shape[1], kernel.shape[0]), inputs.dtype), inputs)
    return zeros, zeros


@recurrence.defjvp
def _recurrence_jvp(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    (inputs, kernel), (d_inputs, d_kernel) = primals, tangents
    outputs, kept = _all_steps(inputs, kernel)
    earlier = jnp.concatenate([jnp.zeros_like(outputs[:1]), outputs[:-1]])
    d_inputs += _at_all_steps(earlier, d_kernel)
    # Gradients go back through the loop by a product with it as it lies, a quarter faster than with its transpose.
    transposed = lax.optimization_barrier(kernel.T)

    def step(carry: tuple[Array, Array], at: tuple[Array, _Kept]) -> tuple[tuple[Array, Array], Array]:
        (d_cell, d_output), (d_given, ((into, forget, new, out), before, squashed)) = carry, at
        d_inner = d_given + lax.dot_general(d_output, transposed, (((1,), (1,)), ((), ())))
        d_into, d_forget, d_new, d_out = jnp.split(d_inner, 4, axis=-1)
        d_cell = (
            forget * d_cell
            + before * forget * (1 - forget) * d_forget
            + new * into * (1 - into) * d_into
            + into * (1 - new * new) * d_new
        )
        d_output = out * (1 - squashed * squashed) * d_cell + squashed * out * (1 - out) * d_out
        return (d_cell, d_output), d_output

    return outputs, lax.scan(step, _zero_states(d_inputs, kernel), (d_inputs, kept))[1]
