"""Scenarios with synthetic examples."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedjax_cluster.data import partition
from fedjax_cluster.data.scenarios.registry import scenario
from fedjax_cluster.types import DatasetInfo, Examples, Federation


@scenario
def linear_regression(
    examples: None = None,
    *,
    clients: int = 12,
    phi: float = 20.0,
    angles: Sequence[float] | None = None,
    noise: float = 0.2,
    seed: int = 0,
    test_fraction: float = 0.3,
    examples_per_client: int | None = None,
) -> Federation:
    """Three straight lines through the origin at angles −φ, 0 and φ (Sec. 5.1 and F.4 of CFL-GP).

    y = x·tan(φ_k) + n with n ~ N(0, noise²) and x ~ U(0, cos φ_k).

    Args:
      examples: None; the argument exists because every scenario has it.
      clients: M, in equal groups of neighbours.
      phi: φ in degrees, between 0 and 90.
      angles: slopes in degrees between −90 and 90, in place of −φ, 0, φ.
      noise: standard deviation of n; the best mean squared error is its square.
      seed: decides everything that is drawn.
      examples_per_client: training and test examples together; default 1 000, the paper does not give it.

    Returns:
      A Federation with x f32[M, N, 1], y f32[M, N] and `group` i32[M].

    Raises:
      ValueError: an argument out of range, or examples were given.

    >>> federation = linear_regression(phi=10)
    >>> federation.train.x.shape, federation.info.group_names
    ((12, 700, 1), ('-10', '0', '10'))
    """
    check_drawn("linear_regression", examples)
    slopes = np.asarray((-phi, 0.0, phi) if angles is None else angles, float)
    if slopes.ndim != 1 or not len(slopes) or not (np.abs(slopes) < 90).all():
        raise ValueError(f"angles={angles!r} are not one or more angles between −90 and 90 degrees: correct them.")
    if len(np.unique(slopes)) < len(slopes):
        raise ValueError(f"the slopes {slopes.tolist()} repeat one: groups that are alike are no true groups.")
    group = partition.assign_groups(clients, len(slopes))
    sizes = sizes_of_drawn(clients, 1000 if examples_per_client is None else examples_per_client)
    draw, part = partition.generators(seed, 2)
    radians = np.repeat(np.deg2rad(slopes[group]), sizes)
    x = draw.random(len(radians)) * np.cos(radians)
    y = x * np.tan(radians) + noise * draw.standard_normal(len(radians))
    info = DatasetInfo("linear_regression", (1,), 0, "regression")
    drawn = Examples(x[:, None].astype(np.float32), y.astype(np.float32), info)
    rows = partition.divide(np.arange(len(x)), sizes)
    return partition.federate(drawn, rows, part, test_fraction, group, tuple(f"{slope:g}" for slope in slopes))


@scenario
def xor(
    examples: None = None,
    *,
    clients: int = 10,
    noise: float = 0.25,
    seed: int = 0,
    test_fraction: float = 0.3,
    examples_per_client: int | None = None,
) -> Federation:
    """The federated XOR problem: each group is easy for a linear model, both together are not (Fig. 1 of CFL).

    Points lie around the corners (±1, ±1), with label 1 where the signs agree. One half of the clients has the
    upper corners, the other half the lower ones: opposite labels for left and right.

    Args:
      examples: None; the argument exists because every scenario has it.
      clients: M, in two equal groups of neighbours.
      noise: standard deviation of the points around their corner, in both coordinates.
      seed: decides everything that is drawn.
      examples_per_client: training and test examples together; default 200.

    Returns:
      A Federation with x f32[M, N, 2], y i32[M, N] in {0, 1} and `group` i32[M].

    Raises:
      ValueError: an argument out of range, or examples were given.

    >>> xor(clients=4).info.group_names
    ('upper', 'lower')
    """
    check_drawn("xor", examples)
    group = partition.assign_groups(clients, 2)
    sizes = sizes_of_drawn(clients, 200 if examples_per_client is None else examples_per_client)
    draw, part = partition.generators(seed, 2)
    up = np.repeat(np.where(group == 0, 1, -1), sizes)
    right = draw.choice([-1, 1], len(up))
    x = np.stack([right, up], axis=1) + noise * draw.standard_normal((len(up), 2))
    drawn = Examples(x.astype(np.float32), (up == right).astype(np.int32), DatasetInfo("xor", (2,), 2))
    rows = partition.divide(np.arange(len(up)), sizes)
    return partition.federate(drawn, rows, part, test_fraction, group, ("upper", "lower"))


def sizes_of_drawn(clients: int, count: int) -> np.ndarray:
    """How many examples each client gets, where as many are drawn as are wanted."""
    return partition.client_sizes(clients * max(count, 2), clients, count)


def check_drawn(name: str, examples: object) -> None:
    """Raises ValueError where a scenario that draws its examples was given some."""
    if examples is not None:
        raise ValueError(f"{name} draws its examples, but some were given: leave them out.")
