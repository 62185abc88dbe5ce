"""The picture of who was in which cluster as rounds went on, and the words for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from fedjax_cluster.report import style
from fedjax_cluster.report.curves import round_axis
from fedjax_cluster.report.names import group_label

ROW, LOWEST, HIGHEST = 0.12, 1.0, 3.4  # inches of a client, and of all of them
UPPER = 0.6  # inches of the panel of moves
MOST_OUTLINED, MOST_NUMBERED = 40, 26  # clients with lines between them, and whose numbers fit
MOST_COLORS_NAMED = 16
EARLY = 0.2  # of the rounds: where the last move lies before that, the axis is logarithmic
MOST_COLUMNS = 1500
THINNEST = 0.003  # of the axis: a bar
BAR = 0.85  # of a round's width, so that neighbours are told apart
LINE, LONGEST = 0.115, 24  # inches of a name; characters of a user's


class Move(NamedTuple):
    """A client that changed its cluster."""

    round: int  # rounds done
    client: int
    before: int  # −1: none
    after: int


def moves(rounds: Any, cluster: Any) -> list[Move]:
    """Who changed from one kept round to the next, in the order of the rounds.

    Args:
      rounds: i32[E], rounds done.
      cluster: i32[E, M], −1 where a client had none.

    >>> moves([1, 4], [[0, 1], [0, 0]])
    [Move(round=4, client=1, before=1, after=0)]
    """
    rounds, cluster = _checked(rounds, cluster)
    later, client = np.nonzero(cluster[1:] != cluster[:-1])
    return [
        Move(int(rounds[at + 1]), int(who), int(cluster[at, who]), int(cluster[at + 1, who]))
        for at, who in zip(later, client, strict=True)
    ]


def cluster_timeline(
    rounds: Any,
    cluster: Any,
    group: Any | None = None,
    group_names: Sequence[str] = (),
    index: Any | None = None,
    users: Any | None = None,
) -> Figure:
    """Draws the cluster of every client against communication rounds, above it how many moved; two columns wide.

    Clients stand in the order of their true group, within it of their last cluster; where all moves lie in the first
    fifth of the rounds, these are drawn on a logarithmic axis.

    Args:
      rounds: i32[E], rounds done, ascending.
      cluster: i32[E, M], clusters after them, which hold until the next.
      group: i32[M], true groups, −1 where unknown, named at the left with lines between them; None for none.
      group_names: what the groups are called.
      index: i64[M], the clients' numbers; None counts them.
      users: [M], what the clients are called, which stands beside up to 40 rows; None for none.

    Raises:
      ValueError: shapes that do not fit, or rounds that do not ascend.
    """
    rounds, cluster = _checked(rounds, cluster)
    clients, last = cluster.shape[1], int(rounds[-1])
    if group is not None and np.shape(group) != (clients,):
        raise ValueError(f"group has shape {np.shape(group)}, but cluster has {clients} clients")
    numbers = np.arange(clients) if index is None else np.asarray(index)
    groups = np.zeros(clients, int) if group is None else np.asarray(group)
    order = np.lexsort((numbers, cluster[-1], groups))
    moved = moves(rounds, cluster)
    early = last >= 20 and bool(moved) and moved[-1].round <= EARLY * last
    edges, held = _columns(rounds, cluster[:, order], last, early)
    called = None
    if users is not None and clients <= MOST_OUTLINED:
        called = [style.shortened(str(users[at]), LONGEST).replace("$", r"\$") for at in order]
    high = float(np.clip(ROW * clients, LOWEST, HIGHEST if called is None else ROW * MOST_OUTLINED))
    with style.drawing(style.DOUBLE, UPPER + high + 0.6) as figure:
        upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(UPPER, high))
        counts = np.bincount([move.round for move in moved], minlength=last + 1)[1:]
        wide = max(BAR, THINNEST * last)
        upper.bar(np.flatnonzero(counts) + 1, counts[counts > 0], wide, color="#6E6E6E")
        upper.set(ylabel="Moves", ylim=(0, 1.1 * max(1, counts.max(initial=0))))
        upper.yaxis.set_major_locator(MaxNLocator(2, integer=True, steps=(1, 2, 5, 10)))
        upper.tick_params(axis="x", length=0, labelbottom=False)
        if not moved:
            upper.set_yticks([])
            upper.grid(False)
            upper.text(0.5, 0.5, "no client moved", transform=upper.transAxes, ha="center", va="center")
        colors = style.value_colors(cluster)
        values = np.asarray(list(colors))
        table = np.asarray([to_rgb(color) for color in colors.values()])
        place = np.searchsorted(np.sort(values), held)
        lower.pcolormesh(edges, np.arange(clients + 1) - 0.5, table[np.argsort(values)][place].transpose(1, 0, 2))
        if clients <= MOST_OUTLINED:
            for border in np.arange(1, clients) - 0.5:
                lower.axhline(border, color="white", linewidth=0.4)
        if group is not None:
            for border in np.flatnonzero(np.diff(groups[order])) + 0.5:
                lower.axhline(border, color="black", linewidth=0.9)
        _name_rows(lower, groups[order] if group is not None else None, group_names, numbers[order], called, high)
        lower.grid(False)
        lower.spines[:].set_visible(False)
        if early:
            lower.set_xscale("log")
            style.ticks_at(lower.xaxis, [tick for tick in style.LOG_TICKS if tick <= last])
            lower.set_xlabel("Communication round")
        else:
            round_axis(lower)
        lower.set(xlim=(edges[0], edges[-1]), ylim=(clients - 0.5, -0.5))
        figure.align_ylabels((upper, lower))
        shown = list(colors.items())
        named = shown[:MOST_COLORS_NAMED]
        handles = [Patch(color=color, label="no cluster" if at < 0 else f"cluster {at}") for at, color in named]
        if len(shown) > len(named):
            handles.append(Patch(color="white", label=f"and {len(shown) - len(named)} more"))
        style.legend_above(figure, handles, [str(handle.get_label()) for handle in handles], lines=False)
    return figure


def _checked(rounds: Any, cluster: Any) -> tuple[np.ndarray, np.ndarray]:
    rounds, cluster = np.asarray(rounds), np.asarray(cluster)
    if rounds.ndim != 1 or cluster.ndim != 2 or len(rounds) != len(cluster) or 0 in cluster.shape:
        raise ValueError(f"rounds has shape {rounds.shape} and cluster {cluster.shape}; give [E] and [E, M]")
    if (np.diff(rounds) <= 0).any() or rounds[0] < 0:
        raise ValueError("rounds do not ascend from 0 or later; sort them, each once")
    return rounds, cluster


def _columns(rounds: np.ndarray, cluster: np.ndarray, last: int, early: bool) -> tuple[np.ndarray, np.ndarray]:
    """Edges [n + 1] of the columns and the clusters [n, M] in them; round r lies between r − ½ and r + ½."""
    every = np.unique(np.concatenate([np.maximum(rounds, 1), [last]]))
    if len(every) > MOST_COLUMNS:
        places = np.geomspace(1, last, MOST_COLUMNS) if early else np.linspace(1, last, MOST_COLUMNS)
        every = np.unique(places.astype(int))
    first = max(1, int(every[0]))
    every = np.union1d(every, [first])
    held = cluster[np.searchsorted(rounds, every, side="right") - 1]
    edges = np.append(every - 0.5, last + 0.5)
    return edges, held


def _name_rows(
    axes: Axes,
    groups: np.ndarray | None,
    names: Sequence[str],
    numbers: np.ndarray,
    users: Sequence[str] | None,
    high: float,
) -> None:
    """Names of the clients, or their numbers where they fit; names of the groups at the left, of users at the right."""
    clients = len(numbers)
    axes.tick_params(axis="y", length=0)
    if groups is None:
        axes.set_ylabel("Client")
        if users is not None or clients <= MOST_NUMBERED:
            axes.set_yticks(range(clients), numbers.astype(str) if users is None else users)
        else:
            axes.set_yticks([])
            axes.set_ylabel("Client, by last cluster")
        return
    axes.set_ylabel("Client, by true group")
    found, starts, sizes = np.unique(groups, return_index=True, return_counts=True)
    tall = sizes * high / clients
    texts = [style.wrapped(group_label(int(value), names), 18) for value in found]
    shown = [text if (text.count("\n") + 1) * LINE < room else "" for text, room in zip(texts, tall, strict=True)]
    axes.set_yticks(starts + (sizes - 1) / 2, shown)
    if users is not None:
        axes.yaxis.remove_overlapping_locs = False  # else the middle of a group would have one name for two
        axes.set_yticks(range(clients), users, minor=True)
        axes.tick_params("y", which="minor", length=0, labelleft=False, labelright=True)
