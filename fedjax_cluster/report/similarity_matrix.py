"""Pictures of matrices over pairs of clients: similarities, and what FedGWC and FLAG draw in the same way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.patches import Patch, Rectangle

from fedjax_cluster.report import style
from fedjax_cluster.report.names import group_label

MOST_NAMED = 20  # clients whose indices fit at the axis
NARROWEST_NAMED = 0.03  # block, as a share of all clients


def similarity_matrix(
    similarity: Any, labels: Any, group: Any | None = None, group_names: Sequence[str] = (), *, index: Any | None = None
) -> Figure:
    """Draws a similarity matrix with the clients in the order of their clusters, lines between clusters.

    Args:
      similarity: f32[M, M], in [−1, 1].
      labels: i32[M], clusters; clients with −1 are left out.
      group: i32[M], true groups: orders within clusters, and is shown as a strip of colours; None leaves it out.
      group_names: what the groups are called; "group 3" where there is no name.
      index: i32[M], the clients' numbers; None numbers them from 0.

    Raises:
      ValueError: shapes that do not fit, entries that are not finite, or no client in a cluster.
    """
    labels = np.asarray(labels)
    similarity = check_matrix(similarity, "similarity", len(labels))
    kept, blocks = clients_by_cluster(labels, group)
    count = len(kept)
    with style.drawing(style.SINGLE, 0.78 * style.SINGLE) as figure:
        axes = figure.subplots()
        image = heat_map(axes, similarity[np.ix_(kept, kept)], blocks, "black", cmap="RdBu_r", vmin=-1, vmax=1)
        figure.colorbar(image, ax=axes, shrink=0.85, label=r"Cosine similarity $\alpha_{ij}$")
        axes.set_xticks(blocks.middles, blocks.names)
        order = kept[blocks.order]
        numbers = order if index is None else np.asarray(index)[order]
        axes.set_yticks(range(count), numbers.astype(str) if count <= MOST_NAMED else [""] * count)
        axes.tick_params(length=0)
        axes.set(xlabel="Cluster" if group is None else "Cluster; strip: true group", ylabel="Client, by cluster")
        if group is not None:
            groups, strip = np.asarray(group)[order], 0.025 * count
            colors = style.value_colors(groups)
            for place, value in enumerate(groups.tolist()):
                corner = count - 0.5 + strip, place - 0.5
                axes.add_patch(Rectangle(corner, 1.5 * strip, 1.0, color=colors[value], linewidth=0))
            axes.set_xlim(-0.5, count - 0.5 + 2.5 * strip)
            handles = [Patch(color=color, label=group_label(value, group_names)) for value, color in colors.items()]
            style.legend_above(figure, handles, [str(handle.get_label()) for handle in handles], lines=False)
    return figure


class Blocks(NamedTuple):
    """An order of clients in which those with equal values stand together."""

    order: np.ndarray  # i64[n]
    borders: np.ndarray  # between one block and the next, in units of clients
    middles: np.ndarray  # of the blocks, in units of clients
    values: np.ndarray  # of the blocks

    @property
    def names(self) -> list[str]:
        """The values as texts; "" for blocks too narrow for one."""
        sizes = np.diff([-0.5, *self.borders, len(self.order) - 0.5]) / len(self.order)
        return [str(value) if size > NARROWEST_NAMED else "" for value, size in zip(self.values, sizes, strict=True)]


def blocks_of(values: np.ndarray, within: np.ndarray | None = None) -> Blocks:
    """Orders clients by their values, those with equal values by `within` and then by index.

    >>> blocks_of(np.asarray([1, 0, 1])).order.tolist()
    [1, 0, 2]
    """
    order = np.lexsort((np.zeros_like(values) if within is None else within, values))
    found, sizes = np.unique(values, return_counts=True)
    ends = np.cumsum(sizes)
    return Blocks(order, ends[:-1] - 0.5, ends - sizes / 2 - 0.5, found)


def clients_by_cluster(labels: np.ndarray, group: Any | None) -> tuple[np.ndarray, Blocks]:
    """The clients in a cluster, i64[n], and their order: by cluster, within it by true group; ValueError for none."""
    if group is not None and np.shape(group) != labels.shape:
        raise ValueError(f"group has shape {np.shape(group)} and labels {labels.shape}; both must be [M]")
    kept = np.flatnonzero(labels >= 0)
    if not len(kept):
        raise ValueError("no client has a cluster; there is nothing to draw")
    return kept, blocks_of(labels[kept], None if group is None else np.asarray(group)[kept])


def check_matrix(matrix: Any, name: str, size: int) -> np.ndarray:
    """The matrix in float64; ValueError for another shape than [size, size] or entries that are not finite."""
    matrix = np.asarray(matrix, np.float64)
    if matrix.shape != (size, size) or not size:
        raise ValueError(f"{name} has shape {matrix.shape}; it must be [M, M] for the same {size} clients")
    if not np.isfinite(matrix).all():
        raise ValueError(f"{name} has entries that are not finite; leave out the clients that were not compared")
    return matrix


def without_diagonal(matrix: np.ndarray) -> np.ndarray:
    """The matrix with a diagonal of NaN, which is not drawn: known by definition, it would stretch the scale."""
    return np.where(np.eye(len(matrix), dtype=bool), np.nan, matrix)


def heat_map(axes: Axes, matrix: np.ndarray, blocks: Blocks, line_color: str, **options: Any) -> AxesImage:
    """Draws a matrix [n, n] in the order of blocks with lines between them; `options` are those of `imshow`."""
    shown = matrix[np.ix_(blocks.order, blocks.order)]
    image = axes.imshow(shown, interpolation="nearest", **options)
    for border in blocks.borders:
        axes.axhline(border, color=line_color, linewidth=0.8)
        axes.axvline(border, color=line_color, linewidth=0.8)
    axes.grid(False)
    axes.spines[:].set_visible(False)
    return image
