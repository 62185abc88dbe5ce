"""Wireless channels: matrices of channel state information, drawn or from files."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import scipy  # whose parts are loaded when first used

from fedjax_cluster.data import partition
from fedjax_cluster.data.scenarios.registry import scenario
from fedjax_cluster.data.scenarios.synthetic import check_drawn, sizes_of_drawn
from fedjax_cluster.options import as_path, shown
from fedjax_cluster.types import DatasetInfo, Examples, Federation


class Profile(NamedTuple):
    """A clustered-delay-line model of 3GPP TR 38.901, Sec. 7.7.1: what departs by each of its n paths.

    A model with a line of sight has it as its first path, which is no cluster of rays.
    """

    line_of_sight: bool
    spread: float  # of a cluster's rays around its angle of departure, in degrees
    delays: np.ndarray  # f64[n], normalised by the delay spread
    powers: np.ndarray  # f64[n], in dB
    angles: np.ndarray  # f64[n], azimuths of departure, in degrees


def _profile(line_of_sight: bool, spread: float, *columns: str) -> Profile:
    return Profile(line_of_sight, spread, *(np.array(column.split(), float) for column in columns))


# Tables 7.7.1-1 to 7.7.1-5: delays, powers, angles.
PROFILES = {
    "A": _profile(
        False,
        5.0,
        "0 0.3819 0.4025 0.5868 0.461 0.5375 0.6708 0.575 0.7618 1.5375 1.8978 2.2242 2.1718 2.4942 2.5119 3.0582 "
        "4.081 4.4579 4.5695 4.7966 5.0066 5.3043 9.6586",
        "-13.4 0 -2.2 -4 -6 -8.2 -9.9 -10.5 -7.5 -15.9 -6.6 -16.7 -12.4 -15.2 -10.8 -11.3 -12.7 -16.2 -18.3 -18.9 "
        "-16.6 -19.9 -29.7",
        "-178.1 -4.2 -4.2 -4.2 90.2 90.2 90.2 121.5 -81.7 158.4 -83 134.8 -153 -172 -129.9 -136 165.4 148.4 132.7 "
        "-118.6 -154.1 126.5 -56.2",
    ),
    "B": _profile(
        False,
        10.0,
        "0 0.1072 0.2155 0.2095 0.287 0.2986 0.3752 0.5055 0.3681 0.3697 0.57 0.5283 1.1021 1.2756 1.5474 1.7842 "
        "2.0169 2.8294 3.0219 3.6187 4.1067 4.279 4.7834",
        "0 -2.2 -4 -3.2 -9.8 -1.2 -3.4 -5.2 -7.6 -3 -8.9 -9 -4.8 -5.7 -7.5 -1.9 -7.6 -12.2 -9.8 -11.4 -14.9 -9.2 -11.3",
        "9.3 9.3 9.3 -34.1 -65.4 -11.4 -11.4 -11.4 -67.2 52.5 -72 74.3 -52.2 -50.5 61.4 30.6 -72.5 -90.6 -77.6 "
        "-82.6 -103.6 75.6 -77.6",
    ),
    "C": _profile(
        False,
        2.0,
        "0 0.2099 0.2219 0.2329 0.2176 0.6366 0.6448 0.656 0.6584 0.7935 0.8213 0.9336 1.2285 1.3083 2.1704 "
        "2.7105 4.2589 4.6003 5.4902 5.6077 6.3065 6.6374 7.0427 8.6523",
        "-4.4 -1.2 -3.5 -5.2 -2.5 0 -2.2 -3.9 -7.4 -7.1 -10.7 -11.1 -5.1 -6.8 -8.7 -13.2 -13.9 -13.9 -15.8 -17.1 "
        "-16 -15.7 -21.6 -22.8",
        "-46.6 -22.8 -22.8 -22.8 -40.7 0.3 0.3 0.3 73.1 -64.5 80.2 -97.1 -55.3 -64.3 -78.5 102.7 99.2 88.8 -101.9 "
        "92.2 93.3 106.6 119.5 -123.8",
    ),
    "D": _profile(
        True,
        5.0,
        "0 0 0.035 0.612 1.363 1.405 1.804 2.596 1.775 4.042 7.937 9.424 9.708 12.525",
        "-0.2 -13.5 -18.8 -21 -22.8 -17.9 -20.1 -21.9 -22.9 -27.8 -23.6 -24.8 -30 -27.7",
        "0 0 89.2 89.2 89.2 13 13 13 34.6 -64.5 -32.9 52.6 -132.1 77.2",
    ),
    "E": _profile(
        True,
        5.0,
        "0 0 0.5133 0.544 0.563 0.544 0.7112 1.9092 1.9293 1.9589 2.6426 3.7136 5.4524 12.0034 20.6419",
        "-0.03 -22.03 -15.8 -18.1 -19.8 -22.9 -22.4 -18.6 -20.8 -22.6 -22.3 -25.6 -20.2 -29.8 -29.2",
        "0 0 57.5 57.5 57.5 -20.1 16.2 9.3 9.3 9.3 19 32.7 0.5 55.9 57.6",
    ),
}
# Table 7.5-3: the twenty rays of a cluster, for a spread of a degree.
_HALF = np.array([0.0447, 0.1413, 0.2492, 0.3715, 0.5129, 0.6797, 0.8844, 1.1481, 1.5195, 2.1551])
RAYS = np.concatenate([_HALF, -_HALF])
DELAY_SPREAD, BANDWIDTH = 100e-9, 20e6  # seconds, "nominal" in Table 7.7.3-1; Hz
SECTOR = 60.0  # a terminal lies within so many degrees of the antennas' broadside
CHUNK = 128  # matrices drawn at once
DRAWN_PER_CLIENT = 200


@scenario
def channels(
    examples: None = None,
    *,
    clients: int = 10,
    profiles: Sequence[str] = tuple(PROFILES),
    files: Sequence[str] | None = None,
    size: int = 32,
    seed: int = 0,
    test_fraction: float = 0.3,
    examples_per_client: int | None = None,
) -> Federation:
    """Channel state information of several environments, for an autoencoder to compress (F.6 of CFL-GP).

    H = Σ_paths √(P/20) Σ_rays e^{jθ} a(φ_ray + φ₀) sinc(d − τ), by angle and delay: θ is uniform, φ₀ the terminal's
    bearing, a(φ) a row of antennas half a wavelength apart, transformed to angles. The paths are those of 3GPP
    TR 38.901's clustered delay lines at a delay spread of 100 ns and 20 MHz. The paper's CD2 has five environments
    of that report, made by another program (QuaDRiGa); its CD1 is COST2100's, of `files`.

    Args:
      examples: None; the argument exists because every scenario has it.
      clients: M, in equal groups of neighbours.
      profiles: letters of clustered delay lines, A to E, one for each group.
      files: .npy or .mat files in place of `profiles`, one for each group, such as COST2100's DATA_Htrainin.mat and
        DATA_Htrainout.mat, with [N, 2 · size · size] numbers or [N, 2, size, size]. Where all lie in [0, 1] their zero
        is 0.5, as COST2100's is.
      size: antennas, and as many delays, of the matrices that are drawn.
      seed: decides everything that is drawn.
      examples_per_client: training and test examples together; default 200 where they are drawn, all of a file's.

    Returns:
      A Federation with x = y f32[M, N, 2, size, size], real and imaginary parts, and `group` i32[M]. A drawn matrix
      has a mean square of 1.

    Raises:
      ValueError: an argument out of range, a file that cannot be read, or examples were given.

    >>> federation = channels(clients=4, profiles=("A", "D"), size=8, examples_per_client=10)
    >>> federation.train.x.shape, federation.info.group_names
    ((4, 7, 2, 8, 8), ('CDL-A', 'CDL-D'))
    """
    check_drawn("channels", examples)
    if files:
        if len(set(map(str, files))) < len(files):
            raise ValueError(f"files={list(map(str, files))} name one twice: give another for each group.")
        return _of_files(files, clients, seed, test_fraction, examples_per_client)
    names = [str(name).upper() for name in profiles]
    if not names or len(set(names)) < len(names) or not set(names) <= PROFILES.keys():
        raise ValueError(f"profiles={profiles!r} are not different letters from A to E: give one for each group.")
    group = partition.assign_groups(clients, len(names))
    sizes = sizes_of_drawn(clients, DRAWN_PER_CLIENT if examples_per_client is None else examples_per_client)
    draw, part = partition.generators(seed, 2)
    drawn = np.concatenate(
        [_matrices(draw, PROFILES[name], int(sizes[group == of].sum()), size) for of, name in enumerate(names)]
    )
    rows = partition.divide(np.arange(len(drawn)), sizes)
    return partition.federate(_csi(drawn), rows, part, test_fraction, group, tuple(f"CDL-{name}" for name in names))


def _csi(x: np.ndarray) -> Examples:
    return Examples(x, x, DatasetInfo("channels", x.shape[1:], 0, "reconstruction"))


def _matrices(draw: np.random.Generator, profile: Profile, count: int, size: int) -> np.ndarray:
    """`count` channels of a profile, f32[count, 2, size, size] by angle and delay, each with a mean square of 1."""
    pieces = [_some(draw, profile, min(CHUNK, count - start), size) for start in range(0, count, CHUNK)]
    return np.concatenate(pieces)


def _some(draw: np.random.Generator, profile: Profile, count: int, size: int) -> np.ndarray:
    paths = len(profile.powers)
    bearing = draw.uniform(-SECTOR, SECTOR, (count, 1, 1))
    departure = profile.angles[:, None] + profile.spread * RAYS
    gain = np.full((paths, len(RAYS)), len(RAYS) ** -0.5)
    if profile.line_of_sight:
        gain[0], departure[0] = np.arange(len(RAYS)) == 0, profile.angles[0]
    gain *= 10 ** (profile.powers[:, None] / 20)
    phases = draw.uniform(0, 2 * np.pi, (count, paths, len(RAYS)))
    step = np.exp(1j * np.pi * np.sin(np.deg2rad(departure + bearing))).astype(np.complex64)
    ray = (gain * np.exp(1j * phases)).astype(np.complex64)
    antennas = np.empty((count, size, paths), np.complex64)
    for antenna in range(size):
        antennas[:, antenna] = ray.sum(axis=-1)
        ray *= step
    angles = np.fft.fftshift(np.fft.fft(antennas, axis=1, norm="ortho"), axes=1)
    taps = np.sinc(np.arange(size) - profile.delays[:, None] * DELAY_SPREAD * BANDWIDTH)
    matrix = angles @ taps.astype(np.complex64)
    parts = np.stack([matrix.real, matrix.imag], axis=1)
    return (parts / np.sqrt(np.square(parts).mean(axis=(1, 2, 3), keepdims=True))).astype(np.float32)


def _of_files(
    files: Sequence[str], clients: int, seed: int, test_fraction: float, examples_per_client: int | None
) -> Federation:
    paths = [as_path("files", one) for one in files]
    group = partition.assign_groups(clients, len(paths), "files")
    parts = [_read(path) for path in paths]
    shapes = {part.shape[1:] for part in parts}
    if len(shapes) > 1:
        raise ValueError(f"the files hold matrices of different shapes, {sorted(shapes)}: give files of one shape.")
    deal, part = partition.generators(seed, 2)
    starts = np.cumsum([0, *(len(each) for each in parts)])
    rows: partition.Rows = []
    for of, each in enumerate(parts):
        count = int((group == of).sum())
        rows += [start + starts[of] for start in partition.deal(deal, len(each), count, examples_per_client)]
    names = tuple(path.stem for path in paths)
    return partition.federate(_csi(np.concatenate(parts)), rows, part, test_fraction, group, names)


def _read(path: pathlib.Path) -> np.ndarray:
    """The matrices of a file, f32[N, 2, size, size]."""
    try:
        values = _stored(path)
    except Exception as error:  # of readers, which raise whatever a damaged file makes of them
        # `path.exists()` raises an error of its own for a name that is too long.
        why = (
            f"cannot be read ({getattr(error, 'strerror', None) or error})" if os.path.exists(path) else "is not there"
        )
        raise ValueError(f"files: {shown(str(path))} {why}: give a .npy file, or a .mat file of version 7.") from None
    size = round((values[0].size / 2) ** 0.5) if values.ndim in (2, 4) and len(values) else 0
    if values.dtype.kind not in "fiu" or size == 0 or values[0].size != 2 * size * size:
        raise ValueError(
            f"files: {shown(str(path))} holds {values.dtype} of shape {list(values.shape)}: give real numbers "
            "[N, 2 · size · size] or [N, 2, size, size], real and imaginary parts of square matrices."
        )
    x = values.reshape(len(values), 2, size, size).astype(np.float32)
    return x - 0.5 if x.min() >= 0 and x.max() <= 1 else x


def _stored(path: pathlib.Path) -> np.ndarray:
    if path.suffix.lower() != ".mat":
        values = np.load(path, allow_pickle=False)
        if not isinstance(values, np.ndarray):
            values.close()
            raise ValueError("it is an archive of several arrays")
        return values
    content: dict[str, Any] = scipy.io.loadmat(path)
    variables = {name: value for name, value in content.items() if not name.startswith("__")}
    if len(variables) != 1:
        raise ValueError(f"it holds {len(variables)} variables, {', '.join(variables)}, in place of one")
    return next(iter(variables.values()))
