"""What a private run has spent: ε at δ, by dp-accounting."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import math
from typing import Any, NamedTuple

import scipy  # whose parts are loaded when first used

from fedjax_cluster.options import COUNT, POSITIVE, at_least, checked
from fedjax_cluster.privacy.gaussian import gaussian

LARGE = 100.0  # ε, of which nobody needs a tighter bound
NEAR = 1e-4  # relative, to which a multiplier is searched for


class Budget(NamedTuple):
    """What is known of one client by the models and clusters of a run, ε at δ, and how it was counted."""

    epsilon: float  # infinite without noise
    delta: float
    accountant: str  # "rdp" or "pld"
    rounds: int  # releases of the clusters' means
    clients: int  # of whom one is replaced by another
    cohort: int  # clients in a round, where its secret draw is counted in; else all
    shown: int  # times that a client may have shown something to a clustering


def check_accountant() -> None:
    """Raises a ValueError where dp-accounting is not installed."""
    if importlib.util.find_spec("dp_accounting") is None:
        raise ValueError(
            'privacy counts its budget by dp-accounting, which is not installed: pip install "fedjax_cluster[privacy]"'
        )


def spent(privacy: gaussian, *, clients: int, cohort: int, rounds: int, shown: int = 0) -> Budget:
    """ε of so many rounds, for neighbours in which one client is replaced by another.

    Args:
      privacy: the mechanisms; of the means in every round, of what is shown `shown` times.
      clients: in all.
      cohort: drawn uniformly without replacement in each round, and not told; all of them for no amplification.
      rounds: done.
      shown: times that one client may have shown something to a clustering, of which no draw takes anything off.

    Raises:
      ValueError: dp-accounting is not installed, cohorts of some clients for "pld", or impossible numbers.
    """
    assert privacy.delta is not None
    checked("clients", clients, int, COUNT)
    for name, number in (("rounds", rounds), ("shown", shown)):
        checked(name, number, int, at_least(0))
    if not 1 <= cohort <= clients:
        raise ValueError(f"cohort is {cohort}, but there are {clients} clients; give 1 to {clients}")
    check_cohorts(privacy, clients, cohort)
    multipliers = (privacy.noise_multiplier, privacy.clustering_noise_multiplier)
    silent = (rounds > 0 and not multipliers[0]) or (shown > 0 and not multipliers[1])
    epsilon = math.inf
    if not silent:
        # A round whose cohort is not told is a mixture over cohorts, of which none tells more than a round of all: both
        # bounds hold. That of samples without replacement is the looser one where they have most of the clients.
        epsilon = min(
            _epsilon(privacy.accountant, *multipliers, clients, drawn, rounds, shown, delta=privacy.delta)
            for drawn in {cohort, clients}
        )
    return Budget(epsilon, privacy.delta, privacy.accountant, rounds, clients, cohort, shown)


def calibrated(
    privacy: gaussian, epsilon: float, *, clients: int, cohort: int, rounds: int, shown: int | None = None
) -> gaussian:
    """The mechanism whose multipliers, in the proportion that they have, spend ε in so many rounds, and no more.

    Args:
      privacy: with noise.
      epsilon: ε at its δ, above 0.
      clients, cohort, rounds, shown: as in `spent`; `shown` may be left out where there is no noise on it.

    Raises:
      ValueError: as in `spent`; noise on what is shown, and not how often; an ε that is not above 0 and finite, or that
        no multiplier from 10⁻⁴ to 10⁶ spends.
    """
    checked("epsilon", epsilon, float, POSITIVE)
    check_cohorts(privacy, clients, cohort)
    if privacy.clustering_noise_multiplier and shown is None:
        raise ValueError(
            "the mechanism has noise on what clients show to a clustering: give as shown how often that is, "
            "method.times_shown(rounds), and as cohort all clients; or no clustering_noise_multiplier"
        )
    shown = shown or 0

    def scaled(exponent: float) -> gaussian:
        factor, more = math.exp(exponent), privacy.clustering_noise_multiplier
        return dataclasses.replace(
            privacy,
            noise_multiplier=privacy.noise_multiplier * factor,
            clustering_noise_multiplier=None if more is None else more * factor,
        )

    def excess(exponent: float) -> float:
        return spent(scaled(exponent), clients=clients, cohort=cohort, rounds=rounds, shown=shown).epsilon - epsilon

    # Where the budget falls with the noise.
    low, high = math.log(1e-4), math.log(1e6)
    if privacy.accountant == "pld":  # whose time and memory grow with the budget, which is no larger than by "rdp"
        given = {"clients": clients, "cohort": cohort, "rounds": rounds, "shown": shown}
        bound = calibrated(dataclasses.replace(privacy, accountant="rdp"), epsilon, **given)
        names = "noise_multiplier", "clustering_noise_multiplier"
        high = low = math.log(max((getattr(bound, name) or 0.0) / (getattr(privacy, name) or 1.0) for name in names))
        while excess(low) <= 0:
            low -= math.log(2)
        high += NEAR
    if not excess(low) > 0 > excess(high):
        raise ValueError(
            f"epsilon is {epsilon:g}, which no noise spends in {rounds} rounds with what is shown {shown} times; give "
            "another, or some noise on all that clients send"
        )
    found: Any = scipy.optimize.brentq(excess, low, high, xtol=NEAR / 2)
    return scaled(found if excess(found) <= 0 else found + NEAR)


def check_cohorts(privacy: gaussian, clients: int, cohort: int) -> None:
    """Raises a ValueError where the accountant takes no cohorts of some clients."""
    if privacy.accountant == "pld" and cohort < clients:
        raise ValueError(
            f"accountant is 'pld', which has no law for {cohort} of {clients} clients drawn without replacement; give "
            "accountant 'rdp', or a participation of 1"
        )


@functools.cache
def _epsilon(
    accountant: str,
    noise: float,
    shown_noise: float | None,
    clients: int,
    cohort: int,
    rounds: int,
    shown: int,
    *,
    delta: float,
) -> float:
    check_accountant()
    import dp_accounting  # optional

    released: Any = dp_accounting.GaussianDpEvent(noise)
    if cohort < clients:
        released = dp_accounting.SampledWithoutReplacementDpEvent(clients, cohort, released)
    parts: list[Any] = [dp_accounting.SelfComposedDpEvent(released, rounds)] if rounds else []
    if shown and shown_noise is not None:
        parts.append(dp_accounting.SelfComposedDpEvent(dp_accounting.GaussianDpEvent(shown_noise), shown))
    event, relation = dp_accounting.ComposedDpEvent(parts), dp_accounting.NeighboringRelation
    from dp_accounting import rdp

    counting: Any = rdp.RdpAccountant(neighboring_relation=relation.REPLACE_ONE)
    epsilon = float(counting.compose(event).get_epsilon(delta))
    # A bound for both, where the other takes all memory.
    if accountant == "rdp" or epsilon > LARGE:
        return epsilon
    from dp_accounting import pld

    # Its REPLACE_ONE takes a multiplier of what one client adds, and doubles that; ours is of twice as much.
    counting = pld.PLDAccountant(neighboring_relation=relation.ADD_OR_REMOVE_ONE)
    return float(counting.compose(event).get_epsilon(delta))
