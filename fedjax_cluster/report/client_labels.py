"""The picture of who has which labels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MaxNLocator

from fedjax_cluster.report import style
from fedjax_cluster.report.names import class_labels, group_label
from fedjax_cluster.types import ClientData

MOST_OUTLINED = 60  # clients whose cells are wide enough for lines between them
MOST_LABELS_NAMED = 26  # that fit one below the other
MOST_CLIENTS_NAMED = 16
UPPER = 0.6  # inches of the sizes
ROW, LOWEST, HIGHEST = 0.125, 1.1, 3.2  # inches of a label's row, and of all of them
STRIP = 0.07  # inches of the strip of groups


def client_labels(
    counts: Any, group: Any | None = None, group_names: Sequence[str] = (), class_names: Sequence[str] = ()
) -> Figure:
    """Draws the share of each label among a client's examples as a heat map, above it how many these are.

    Args:
      counts: int[M, classes], examples of each label that a client has, as `label_counts` gives them.
      group: i32[M], true groups, −1 where unknown: orders the clients, and is shown as a strip of colours; None leaves
        them in their order.
      group_names: what the groups are called; "group 3" where there is no name.
      class_names: what the labels are called; their numbers where there are none.

    Raises:
      ValueError: shapes or names that do not fit, negative counts, or a client without examples.

    >>> client_labels([[8, 2], [5, 5]]).axes[0].get_ylabel()
    'Examples'
    """
    counts = _checked(counts, group)
    clients, classes = counts.shape
    labels = class_labels(classes, class_names)
    order, by = _order(counts, group)
    counts = counts[order]
    sizes = counts.sum(axis=1)
    shares = counts / sizes[:, None]
    rows = float(np.clip(ROW * classes, LOWEST, HIGHEST))
    with style.drawing(style.SINGLE, rows + UPPER + 0.55) as figure:
        upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(UPPER, rows))
        upper.stairs(sizes, np.arange(clients + 1) - 0.5, fill=True, color="#8C8C8C")
        upper.set(ylabel="Examples", ylim=(0, 1.05 * sizes.max()))
        upper.yaxis.set_major_locator(MaxNLocator(2, integer=True, steps=(1, 2, 5, 10)))
        upper.tick_params(axis="x", length=0, labelbottom=False)
        upper.grid(False, axis="x")
        # Equal shares are seen to be equal: chance does not fill the scale. A label that a client lacks is white.
        most = max(float(shares.max()), min(1.0, 4 / classes))
        tints = ListedColormap(colormaps["Blues"](np.linspace(0.12, 1, 256)))
        options: dict[str, Any] = {"interpolation": "nearest" if clients <= 1000 else "auto", "aspect": "auto"}
        image = lower.imshow(np.ma.masked_equal(shares.T, 0), cmap=tints, vmin=0, vmax=most, **options)
        figure.colorbar(image, ax=lower, pad=0.02, fraction=0.08, label="Share of examples")
        _name_axes(lower, order, labels, by)
        line: dict[str, Any] = {"color": "#E4E4E4", "linewidth": 0.5}
        for place in np.arange(1, clients) - 0.5 if clients <= MOST_OUTLINED else ():
            lower.vlines(place, -0.5, classes - 0.5, **line)
        for place in np.arange(1, classes) - 0.5 if classes <= MOST_LABELS_NAMED else ():
            lower.axhline(place, **line)
        if group is not None:
            groups = np.asarray(group)[order]
            for border in np.flatnonzero(np.diff(groups)) + 0.5:
                lower.vlines(border, -0.5, classes - 0.5, color="black", linewidth=0.8)
            _show_groups(figure, lower, groups, group_names, STRIP * classes / rows)
        figure.align_ylabels((upper, lower))
    return figure


def label_counts(data: ClientData, num_classes: int) -> np.ndarray:
    """int[M, classes]: how many examples of each label a client has.

    Args:
      data: y int[M, N] in 0 … num_classes − 1, num_examples int[M].
      num_classes: number of classes.

    Raises:
      ValueError: labels of other shapes, as of examples with several each, or that are no classes.

    >>> label_counts(ClientData(None, np.array([[1, 1, 0], [2, 0, 0]]), np.array([3, 1])), 3)
    array([[1, 2, 0],
           [0, 0, 1]])
    """
    y, sizes = np.asarray(data.y), np.asarray(data.num_examples)
    if y.ndim != 2 or y.dtype.kind not in "iu":
        raise ValueError(
            f"y has shape {y.shape} and dtype {y.dtype}; only one whole number an example, [M, N], is counted"
        )
    filled = np.arange(y.shape[1]) < sizes[:, None]
    counts = np.zeros((len(y), num_classes), np.int64)
    np.add.at(counts, (np.nonzero(filled)[0], y[filled]), 1)
    return counts


def _checked(counts: Any, group: Any | None) -> np.ndarray:
    counts = np.asarray(counts)
    if counts.ndim != 2 or 0 in counts.shape:
        raise ValueError(f"counts has shape {counts.shape}; give [M, classes] with at least one client and one class")
    if group is not None and np.shape(group) != counts.shape[:1]:
        raise ValueError(f"group has shape {np.shape(group)}, but counts has {len(counts)} clients")
    if not (counts >= 0).all():
        raise ValueError("counts has entries that are negative or not finite; give numbers of examples")
    if not counts.any(axis=1).all():
        empty = int(np.argmin(counts.any(axis=1)))
        raise ValueError(f"client {empty} has no examples; leave such clients out")
    return counts


def _order(counts: np.ndarray, group: Any | None) -> tuple[np.ndarray, str]:
    """The order of the clients, and what the axis says of it."""
    if group is not None:
        return np.argsort(np.asarray(group), kind="stable"), "Client, by true group"
    if len(counts) <= MOST_OUTLINED:
        return np.arange(len(counts)), "Client"
    return np.argsort(counts.argmax(axis=1), kind="stable"), "Client, by most frequent label"


def _name_axes(axes: Axes, order: np.ndarray, labels: Sequence[str], name: str) -> None:
    axes.set(xlabel=name, ylabel="Label")
    axes.grid(False)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    clients = len(order)
    if clients <= MOST_CLIENTS_NAMED:
        axes.set_xticks(range(clients), order.astype(str))
    elif (order == np.arange(clients)).all():
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, steps=style.STEPS))
    else:
        axes.set_xticks([])
    if len(labels) <= MOST_LABELS_NAMED:
        axes.set_yticks(range(len(labels)), labels)
    else:
        axes.yaxis.set_major_locator(MaxNLocator(8, integer=True, steps=(1, 2, 5, 10)))


def _show_groups(figure: Figure, axes: Axes, groups: np.ndarray, names: Sequence[str], high: float) -> None:
    """A strip of colours above the heat map, and their legend; `high` in units of labels."""
    colors = style.value_colors(groups)
    top = axes.get_ylim()[1]
    for place, value in enumerate(groups.tolist()):
        corner = place - 0.5, top - 1.6 * high
        axes.add_patch(Rectangle(corner, 1.0, high, color=colors[value], linewidth=0, zorder=3))
    axes.set_ylim(top=top - 1.6 * high)
    handles = [Patch(color=color, label=group_label(value, names)) for value, color in colors.items()]
    style.legend_above(figure, handles, [str(handle.get_label()) for handle in handles], lines=False)
