"""How far clients are from what most are, by statistics that few cannot move."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float

from fedjax_cluster.clustering import checks
from fedjax_cluster.clustering.checks import Mask

# Of a normal distribution, the standard deviation over the median absolute deviation: 1/Φ⁻¹(3/4).
OF_NORMAL = 1.482602218505602


def robust_deviations(values: Float[ArrayLike, " M"], mask: Mask = None) -> Float[Array, " M"]:
    r"""Deviations from the median in units of the median absolute deviation (Iglewicz and Hoaglin 1993, Sec. 3.4).

    .. math:: z_i = \frac{x_i - \tilde x}{1.4826 \cdot \mathrm{median}_j |x_j - \tilde x|}

    Up to half of the clients can be anything without moving the median or the unit; above 3.5 the authors call a value
    an outlier.

    Args:
      values: f[M], one of each client, in any unit.
      mask: bool[M], clients that count; None means all.

    Returns:
      f[M], without unit; ±∞ for what differs where more than half are equal, and 0 for clients that do not count.

    Raises:
      ValueError: wrong shapes, or non-finite values of clients that count.

    >>> robust_deviations(jnp.array([1.0, 2.0, 3.0, 4.0, 100.0])).round().tolist()
    [-1.0, -1.0, 0.0, 1.0, 65.0]
    """
    values = checks.floats(values, "values", 1)
    mask = checks.client_mask(mask, values.shape[0])
    if not len(values):
        return values
    checks.finite(values, "values", mask)
    return _robust_deviations(values, mask)


@jax.jit
def _robust_deviations(values: Array, mask: Array) -> Array:
    def median(of: Array) -> Array:
        return jnp.nan_to_num(jnp.nanmedian(jnp.where(mask, of, jnp.nan)))

    values = 0.25 * values  # the difference of two may be twice the largest number
    away = values - median(values)
    unit = OF_NORMAL * median(jnp.abs(away))
    return jnp.where(mask & (away != 0), away / jnp.where(away != 0, unit, 1.0), 0.0)
