"""A recurrent model for next-word prediction."""

from __future__ import annotations

import math
from collections.abc import Sequence

import flax.linen as linen
import jax
import jax.numpy as jnp
from jax import Array, lax

from fedjax_cluster.nn.initializers import Scheme, Uniform
from fedjax_cluster.nn.layers import dense
from fedjax_cluster.nn.losses import classification_metrics
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
      metrics include "perplexity", exp of the mean loss per token.

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
        x = linen.Embed(self.num_outputs, self.embedding, embedding_init=start, name="embedding")(tokens)
        for i, features in enumerate(self.hidden):
            x = linen.Dropout(self.dropout, deterministic=not train)(x)
            x = Lstm(features, self.scheme, name=f"lstm_{i}")(x)
        x = linen.Dropout(self.dropout, deterministic=not train)(x)
        return dense(x, self.num_outputs, self.scheme, "output")


class Lstm(linen.Module):
    """One LSTM layer from zero states: f32[N, T, inputs] → f32[N, T, features].

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
        inputs = x @ kernel + bias.reshape(1, 1, -1)

        def step(carry: tuple[Array, Array], given: Array) -> tuple[tuple[Array, Array], Array]:
            cell, output = carry
            into, forget, new, out = jnp.split(given + output @ recurrent, 4, axis=-1)
            cell = jax.nn.sigmoid(forget) * cell + jax.nn.sigmoid(into) * jnp.tanh(new)
            output = jax.nn.sigmoid(out) * jnp.tanh(cell)
            return (cell, output), output

        # The loop's carry must vary over a mesh's devices from the start, as it does after a step.
        zeros, _ = equally_varying(jnp.zeros((x.shape[0], self.features), inputs.dtype), inputs)
        _, outputs = lax.scan(step, (zeros, zeros), inputs.swapaxes(0, 1))
        return outputs.swapaxes(0, 1)
