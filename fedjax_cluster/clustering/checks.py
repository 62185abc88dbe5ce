"""Checks of the clustering functions' input: shapes always, values outside `jit`, where they are known."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, ArrayLike, Bool, Float, Int

from fedjax_cluster.options import LARGEST_WHOLE, shown

Labels = Int[ArrayLike, " M"]  # -1 stands for a client without one
Mask = Bool[ArrayLike, " M"] | None  # clients that count; None means all
Scalar = Float[ArrayLike, ""]

_HOST_SIZE = 2**22  # entries


def is_concrete(*arrays: Any) -> bool:
    """Whether the values of all arrays can be read from Python."""
    return all(not isinstance(array, Tracer) and getattr(array, "is_fully_addressable", True) for array in arrays)


def as_array(values: Any, name: str) -> Array | np.ndarray:
    """`values` as an array, of NumPy unless they are one of JAX."""
    if isinstance(values, jax.Array):
        return values
    try:
        return np.asarray(values)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{name} is {shown(values)}, which is no array: give rows of equal length.") from error


def key(rng_key: Any) -> Any:
    """`rng_key`, if it is a random key of JAX, typed or of the older kind."""
    dtype, shape = getattr(rng_key, "dtype", None), getattr(rng_key, "shape", None)
    typed = dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)
    if not (typed and shape == ()) and not (dtype == np.uint32 and shape in ((2,), (4,))):
        raise ValueError(f"rng_key is {shown(rng_key)}; it must be a single key: give jax.random.key(0), say.")
    return rng_key


def floats(array: ArrayLike, name: str, *ndims: int, like: Array | None = None) -> Array:
    """`array` in the dtype of `like`, else as float32 or, where JAX keeps that, float64; `ndims` are allowed ranks."""
    array = as_array(array, name)
    if ndims and array.ndim not in ndims:
        wanted = " or ".join(str(ndim) for ndim in ndims)
        raise ValueError(f"{name} has shape {array.shape}; it must have {wanted} axes: reshape it.")
    if ndims and min(ndims) >= 2 and not array.size:
        raise ValueError(f"{name} has shape {array.shape}, which is empty: give at least one entry along each axis.")
    if not (jnp.issubdtype(array.dtype, jnp.floating) or jnp.issubdtype(array.dtype, jnp.integer)):
        raise ValueError(f"{name} has dtype {array.dtype}; it must hold real numbers: convert it to float32.")
    wide = jax.dtypes.canonicalize_dtype(array.dtype) == np.float64
    dtype = like.dtype if like is not None else np.float64 if wide else np.float32
    with np.errstate(over="ignore"):  # what becomes infinite is found by `finite`
        return jnp.asarray(array.astype(dtype))


def alike(*arrays: Array) -> tuple[Array, ...]:
    """The arrays in the widest of their dtypes."""
    dtype = functools.reduce(np.promote_types, (array.dtype for array in arrays))
    return tuple(array.astype(dtype) for array in arrays)


def square(array: ArrayLike, name: str) -> Array:
    """`array` as a matrix [M, M] of floats."""
    array = floats(array, name, 2)
    if array.shape[0] != array.shape[1]:
        raise ValueError(f"{name} has shape {array.shape}; it must be square: give one row and one column per client.")
    if array.shape[0] == 0:
        raise ValueError(f"{name} is empty; clustering needs at least one client: leave the call out.")
    return array


def labels(array: ArrayLike, name: str, length: int | None = None, least: int = -1) -> Array:
    """`array` as i32[M] labels from `least` on; -1 stands for a client without one."""
    array = as_array(array, name)
    if array.ndim != 1 or not jnp.issubdtype(array.dtype, jnp.integer):
        raise ValueError(f"{name} is {array.dtype} {array.shape}; labels are integers [M]: give one label per client.")
    if length is not None and array.shape[0] != length:
        raise ValueError(f"{name} has {array.shape[0]} labels for {length} clients: give one per client.")
    if array.dtype.itemsize < 4:
        array = array.astype(np.int32)  # whose range the bounds are in
    lowest = max(least, 0) if jnp.issubdtype(array.dtype, jnp.unsignedinteger) else least
    if not holds(lambda labels: ((labels >= lowest) & (labels <= LARGEST_WHOLE)).all(), array):
        raise ValueError(
            f"{name} holds {array.min()} to {array.max()}; labels are numbers from {least} on: renumber them."
        )
    return jnp.asarray(array.astype(np.int32))


def client_mask(mask: ArrayLike | None, length: int) -> Array:
    """`mask` as bool[M]; None means every client."""
    if mask is None:
        return jax.device_put(np.ones(length, bool))
    mask = as_array(mask, "mask")
    if mask.shape != (length,) or mask.dtype != bool:
        raise ValueError(
            f"mask has shape {mask.shape}, {mask.dtype}; it must be bool ({length},): give one per client."
        )
    return jnp.asarray(mask)


def labelled(mask: Array, labels: Array) -> Array:
    """bool[M]: clients that count and have a label."""
    if is_concrete(mask, labels):
        return jax.device_put(np.asarray(mask) & (np.asarray(labels) >= 0))
    return mask & (labels >= 0)


def holds(condition: Callable[..., Any], *arrays: Any) -> bool:
    """Whether a condition on arrays is met, True where it cannot be known yet."""
    if not is_concrete(*arrays):
        return True
    # NumPy compiles nothing; large arrays stay on their device.
    if sum(array.size for array in arrays) <= _HOST_SIZE:
        arrays = tuple(map(np.asarray, arrays))
    return bool(condition(*arrays))


def fused(condition: Callable[..., Any], *, static_argnames: str | tuple[str, ...] = ()) -> Callable[..., Any]:
    """`condition`, of JAX's arrays in one program: operation by operation large ones are copied several times."""
    program = jax.jit(condition, static_argnames=static_argnames)

    @functools.wraps(condition)
    def choose(*arrays: Any, **options: bool) -> Any:
        return (program if isinstance(arrays[0], jax.Array) else condition)(*arrays, **options)

    return choose


@fused
def _rows_are_finite(array: Any, mask: Any) -> Any:
    return ((abs(array) < math.inf).all(axis=tuple(range(1, array.ndim))) | ~mask).all()


def finite(array: Array, name: str, mask: Array | None = None) -> None:
    """Raises where a row of a client that counts holds NaN or infinity."""
    mask = client_mask(mask, array.shape[0])
    if not holds(_rows_are_finite, array, mask):
        raise ValueError(
            f"{name} holds NaN or infinite values in clients that count: leave them out with mask or repair them."
        )


def pairs(mask: Any, *, diagonal: bool) -> Any:
    """bool[M, M], of NumPy where the mask is: pairs of clients that count, with each and itself or without."""
    known = mask[:, None] & mask[None, :]
    return known if diagonal else known & ~(jnp if isinstance(mask, jax.Array) else np).eye(len(mask), dtype=bool)


@functools.partial(fused, static_argnames="diagonal")
def _pairs_are_finite(matrix: Any, mask: Any, *, diagonal: bool) -> Any:
    return ((abs(matrix) < math.inf) | ~pairs(mask, diagonal=diagonal)).all()


def client_matrix(array: ArrayLike, name: str, mask: ArrayLike | None, *, diagonal: bool = True) -> tuple[Array, Array]:
    """`array` as a matrix [M, M] of floats, finite between clients that count, and `mask` as bool[M].

    Without `diagonal`, that may hold anything.
    """
    matrix = square(array, name)
    known = client_mask(mask, matrix.shape[0])
    if not holds(functools.partial(_pairs_are_finite, diagonal=diagonal), matrix, known):
        raise ValueError(
            f"{name} holds NaN or infinite values between clients that count: leave them out with mask or repair them."
        )
    return matrix, known


def symmetric_matrix(matrix: Array, name: str, mask: Array, *, diagonal: bool = True) -> None:
    """Raises where entries ij and ji of clients that count differ by more than the largest's rounding."""
    if not holds(functools.partial(_is_symmetric, diagonal=diagonal), matrix, mask):
        raise ValueError(f"{name} is not symmetric: average it with its transpose, or pass another matrix.")


@functools.partial(fused, static_argnames="diagonal")
def _is_symmetric(matrix: Any, mask: Any, *, diagonal: bool) -> Any:
    xp = jnp if isinstance(matrix, jax.Array) else np
    known = xp.where(pairs(mask, diagonal=diagonal), matrix, 0.0)
    return (xp.abs(known - known.T) <= 1e-4 * xp.abs(known).max(initial=0.0)).all()


def count(value: Any, name: str, minimum: int = 1, maximum: int | None = None, there_are: str = "") -> int:
    """`value` as a Python int within bounds; it decides a shape, so it cannot be traced."""
    try:
        if isinstance(value, (bool, np.bool_)):
            raise TypeError(name)
        number = operator.index(value)
    except (TypeError, jax.errors.ConcretizationTypeError) as error:
        message = f"{name} is {shown(value)}; it decides a shape, so it must be a Python int: under jit make it static."
        raise ValueError(message) from error
    if number < minimum:
        raise ValueError(f"{name} is {shown(number)}; it must be at least {minimum}: choose a larger one.")
    if maximum is not None and number > maximum:
        raise ValueError(f"{name} is {shown(number)}, but only {maximum} {there_are}: ask for at most {maximum}.")
    return number


def num_clusters(k: Any, mask: Array, name: str = "k") -> int:
    """`k` as a Python int with 1 <= k <= clients that count."""
    valid = int(np.asarray(mask).sum()) if is_concrete(mask) else mask.shape[0]
    return count(k, name, maximum=valid, there_are="clients count")


def choice(value: Any, name: str, allowed: tuple[str, ...]) -> None:
    """Raises where `value` is none of the allowed names."""
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"{name} is {shown(value)}, which is unknown: choose {', '.join(map(repr, allowed))}.")
