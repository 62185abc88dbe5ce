"""The settings of a run about differential privacy."""

from __future__ import annotations

from typing import Any

from fedjax_cluster.options import INSIDE_UNIT, NOT_NEGATIVE, POSITIVE, Options, option
from fedjax_cluster.privacy.gaussian import Accountant, Clipping, gaussian

# Settings, all called privacy_... as FLAG has a delta of its own, and the options of `privacy.gaussian` that they give.
FLAGS = {
    "privacy_clip": "clip",
    "privacy_noise": "noise_multiplier",
    "privacy_clipping": "clipping",
    "privacy_quantile": "quantile",
    "privacy_clustering_clip": "clustering_clip",
    "privacy_clustering_noise": "clustering_noise_multiplier",
    "privacy_accountant": "accountant",
    "privacy_delta": "delta",
}
NEEDED = {"privacy_clip": 1, "privacy_noise": 1, "privacy_delta": 1e-5}  # and an example of each


class PrivacySettings(Options):
    """The part of a configuration that is about differential privacy."""

    privacy_clip: float | None = option(
        "the largest norm of what a client adds to a mean; with noise and delta it makes the run private",
        default=None,
        bound=POSITIVE,
    )
    privacy_noise: float | None = option(
        "standard deviation of the noise on the sums over their sensitivity, twice the clip",
        default=None,
        bound=NOT_NEGATIVE,
    )
    privacy_clipping: Clipping | None = option(
        "flat clips a change as a whole, layers each layer by itself; flat if not given", default=None
    )
    privacy_quantile: float | None = option(
        "the clip follows this quantile of the norms", default=None, bound=INSIDE_UNIT
    )
    privacy_clustering_clip: float | None = option(
        "the largest norm of what a client shows to a clustering, for cfl-gp, cfl, fedgwc and pacfl",
        default=None,
        bound=POSITIVE,
    )
    privacy_clustering_noise: float | None = option(
        "standard deviation of the noise on that over its sensitivity, twice its clip", default=None, bound=NOT_NEGATIVE
    )
    privacy_accountant: Accountant | None = option(
        "rdp, or pld where all clients take part in every round; rdp if not given", default=None
    )
    privacy_delta: float | None = option(
        "δ, at which the budget ε of a private run holds", default=None, bound=INSIDE_UNIT
    )


def build_privacy(config: PrivacySettings) -> gaussian | None:
    """The mechanism; None where no setting is given.

    Raises:
      ValueError: some of the settings without those that they need.
    """
    given: dict[str, Any] = {flag: getattr(config, flag) for flag in FLAGS if getattr(config, flag) is not None}
    if not given:
        return None
    for flag, example in NEEDED.items():
        if flag not in given:
            name, value = next(iter(given.items()))
            raise ValueError(f"{name} is {value}, but no {flag} is given; give it, such as {example:g}")
    return gaussian(**{FLAGS[flag]: value for flag, value in given.items()})
