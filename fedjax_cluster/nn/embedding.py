"""What a network's last layer is given: the embedding of an example."""

from __future__ import annotations

from typing import Any

import flax.linen as linen
from jax import Array

from fedjax_cluster.types import Model, PyTree, Variables


def apply_with_embedding(
    model: Model, variables: Variables, x: Array, *, train: bool, rng_key: Array | None = None
) -> tuple[tuple[Any, Array], PyTree]:
    """A model's outputs together with the embeddings, which are the inputs of its layer `output`.

    Args:
      model: of a Flax module, as `from_flax` makes them.
      variables: its variables.
      x: raw inputs [N, ...].
      train: as of `Model.apply`.
      rng_key: as of `Model.apply`.

    Returns:
      (outputs [N, ...], embeddings f32[N, p]), and the batch-norm statistics after them.

    Raises:
      ValueError: the model has no layer of that name, or calls it several times.

    >>> import jax
    >>> from fedjax_cluster import nn
    >>> from fedjax_cluster.types import DatasetInfo
    >>> model = nn.mlp(hidden=(4,))
    >>> variables = model.init(jax.random.key(0), DatasetInfo("toy", (3,), 2))
    >>> (outputs, embeddings), _ = apply_with_embedding(model, variables, jax.numpy.ones((5, 3)), train=False)
    >>> outputs.shape, embeddings.shape
    ((5, 2), (5, 4))
    """
    seen: list[Array] = []

    def watch(following: Any, args: Any, kwargs: Any, context: Any) -> Any:
        if context.module.name == "output" and context.method_name == "__call__":
            seen.append(args[0] if args else next(iter(kwargs.values())))
        return following(*args, **kwargs)

    with linen.intercept_methods(watch):
        outputs, stats = model.apply(variables, x, train=train, rng_key=rng_key)
    if not seen:
        raise ValueError(
            "the model calls no layer of Flax Linen named 'output', of whose inputs embeddings are made; name the last "
            "layer of its module so (layers of NNX and plain functions are not seen: give a Linen module by from_flax)"
        )
    if len(seen) != 1:
        raise ValueError(
            f"the model calls {len(seen)} layers named 'output', of whose inputs embeddings are made; name its last so"
        )
    return (outputs, seen[0].reshape(x.shape[0], -1)), stats
