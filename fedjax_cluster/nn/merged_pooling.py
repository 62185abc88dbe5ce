"""Maximum pooling of few channels on a TPU: clients side by side are further channels of the same images.

A TPU holds an array in tiles of 128 lanes along one axis. The images of fewer clients, [M, N, H, W, C], have none that
fills them: of 32 clients' with 32 channels they take four times their bytes, and again where their gradient is laid out
in another order. A convolution gives [N, H, W, M·C], and pooled so they stay; XLA's own pooling would split them first.
Of 128 clients these fill the lanes, and XLA's own takes fewer cycles.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from fedjax_cluster.nn.varying import equally_varying
from fedjax_cluster.nn.windows import Pair, Window, slices_by_tap

FEW_CHANNELS = 32  # of 64 XLA's form takes fewer cycles
FEWEST_CLIENTS = 128  # that are best pooled as they are

# Of adjacent windows: their maxima with the positions of these, the values at such positions, and values put there.
highest_p, picked_p, placed_p = map(Primitive, ("highest_of_windows", "picked_of_windows", "placed_in_windows"))
highest_p.multiple_results = True


def _pooled(x: Array, *, shape: Pair) -> Array:
    sides = (1, *shape, 1)
    return lax.reduce_window(x, -jnp.inf, lax.max, sides, sides, "VALID")


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def merged_max_pool(x: Array, shape: Pair) -> Array:
    """The maxima [N, H', W', C] of adjacent windows of x [N, H, W, C]; a remainder is left out."""
    return _pooled(x, shape=shape)


@merged_max_pool.defjvp
def _max_pool_jvp(shape: Pair, primals, tangents):
    (maximum, _), (tangent, _) = _highest_jvp(primals, tangents, shape=shape)
    return maximum, tangent


def _highest_jvp(primals: Any, tangents: Any, *, shape: Pair) -> tuple[Any, Any]:
    (x,), (tangent,) = primals, tangents
    if not isinstance(tangent, ad.Zero):
        x, tangent = equally_varying(x, tangent)
    maximum, first = highest_p.bind(x, shape=shape)
    nowhere = ad.Zero(jax.typeof(first).to_tangent_aval())
    if isinstance(tangent, ad.Zero):
        return (maximum, first), (ad.Zero(jax.typeof(maximum).to_tangent_aval()), nowhere)
    return (maximum, first), (_bound(picked_p, x, first, tangent, shape=shape), nowhere)


def _highest(x: Array, *, shape: Pair) -> tuple[Array, Array]:
    """The maxima [N, H', W', C], and which position of its window each has, the first of equal ones."""
    taps = slices_by_tap(x, shape, Window(shape))
    maximum = reduce(lax.max, taps)
    first = jnp.full_like(maximum, len(taps) - 1, jnp.int8 if len(taps) < 128 else jnp.int32)
    for position, tap in reversed(list(enumerate(taps[:-1]))):
        first = jnp.where(tap == maximum, jnp.full_like(first, position), first)
    return maximum, first


def _picked(x: Array, first: Array, values: Array, *, shape: Pair) -> Array:
    """Of values [N, H, W, C] those at positions [N, H', W', C] of their windows."""
    taps = enumerate(slices_by_tap(values, shape, Window(shape)))
    return reduce(lax.add, [jnp.where(first == position, tap, 0.0) for position, tap in taps])


def _placed(x: Array, first: Array, values: Array, *, shape: Pair) -> Array:
    """Values [N, H', W', C] at positions of their windows in images as x [N, H, W, C], zero elsewhere."""
    n, height, width, channels = values.shape
    rows, columns = height * shape[0], width * shape[1]
    taps = [jnp.where(first == position, values, 0.0) for position in range(shape[0] * shape[1])]
    # Joined and exchanged: sums of what `lax.pad` spreads take more cycles, and so do comparisons along new axes.
    tiles = jnp.stack(taps).reshape(*shape, n, height, width, channels).transpose(2, 3, 0, 4, 1, 5)
    rest = ((0, 0), (0, x.shape[1] - rows), (0, x.shape[2] - columns), (0, 0))
    return jnp.pad(tiles.reshape(n, rows, columns, channels), rest)


# The same in XLA's forms, of images as they are; what is not used of the arguments is not computed.
def _highest_by_xla(x: Array, *, shape: Pair) -> tuple[Array, Array]:
    return _pooled(x, shape=shape), _highest(x, shape=shape)[1]


def _picked_by_xla(x: Array, first: Array, values: Array, *, shape: Pair) -> Array:
    return jax.jvp(partial(_pooled, shape=shape), (x,), (values,))[1]


def _placed_by_xla(x: Array, first: Array, values: Array, *, shape: Pair) -> Array:
    return jax.vjp(partial(_pooled, shape=shape), x)[1](values)[0]


def _bound(primitive: Primitive, x: Array, first: Array, values: Array, **params: Any) -> Array:
    x, values = equally_varying(x, values)
    first, values = equally_varying(first, values)
    return primitive.bind(x, first, values, **params)


def _tangent(primitive: Primitive, primals: Any, tangents: Any, **params: Any) -> tuple[Array, Any]:
    """Both are linear in the values; where the maxima are changes nowhere."""
    x, first, values = primals
    out, tangent = _bound(primitive, x, first, values, **params), tangents[2]
    if isinstance(tangent, ad.Zero):
        return out, ad.Zero(jax.typeof(out).to_tangent_aval())
    return out, _bound(primitive, x, first, tangent, **params)


def _batched(primitive: Primitive, by_xla: Callable[..., Any], operands: Any, axes: Any, **params: Any) -> Any:
    """What is mapped over few clients, in one call with them among the channels; over many, as XLA has it."""
    count = next(leaf.shape[axis] for leaf, axis in zip(operands, axes, strict=True) if axis is not None)
    if count >= FEWEST_CLIENTS:
        found = jax.vmap(partial(by_xla, **params), axes)(*operands)
        return found, jax.tree.map(lambda _: 0, found)
    leaf, axis = operands[0], axes[0]
    channels = leaf.shape[-1] if axis is None or axis % leaf.ndim < leaf.ndim - 1 else leaf.shape[-2]

    def merged(leaf: Array, axis: int | None) -> Array:
        each = jnp.broadcast_to(leaf, (count, *leaf.shape)) if axis is None else jnp.moveaxis(leaf, axis, 0)
        return jnp.moveaxis(each, 0, 3).reshape(*each.shape[1:4], count * each.shape[4])

    found = primitive.bind(*map(merged, operands, axes), **params)
    split = jax.tree.map(lambda leaf: leaf.reshape(*leaf.shape[:3], count, channels), found)
    return split, jax.tree.map(lambda _: 3, split)


def _define(primitive: Primitive, form: Callable[..., Any], by_xla: Callable[..., Any]) -> None:
    several = primitive.multiple_results

    def shapes(*operands: Any, **params: Any) -> Any:
        found = jax.make_jaxpr(partial(form, **params))(*operands).out_avals
        return found if several else found[0]

    primitive.def_impl(jax.jit(form, static_argnames="shape"))
    primitive.def_abstract_eval(shapes)
    batching.primitive_batchers[primitive] = partial(_batched, primitive, by_xla)
    mlir.register_lowering(primitive, mlir.lower_fun(form, multiple_results=several))


_define(highest_p, _highest, _highest_by_xla)
ad.primitive_jvps[highest_p] = _highest_jvp
for primitive, form, by_xla, transposed in (
    (picked_p, _picked, _picked_by_xla, placed_p),
    (placed_p, _placed, _placed_by_xla, picked_p),
):
    _define(primitive, form, by_xla)
    ad.primitive_jvps[primitive] = partial(_tangent, primitive)
    ad.primitive_transposes[primitive] = lambda cotangent, x, first, values, of=transposed, **params: (
        None,
        None,
        _bound(of, x, first, cotangent, **params),
    )
