"""Figures of many methods under many conditions: a panel of coloured cells for each kind of condition."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure

from fedjax_cluster.report import style

CELL_INCHES = 0.135
COLORMAP = "cividis"  # from dark to bright for every kind of eye
NO_VALUE = "#FFFFFF"


def share_panels(
    panels: Mapping[str, np.ndarray],
    rows: Sequence[str],
    columns_of_panel: Sequence[object],
    label: str,
    limits: tuple[float, float],
    *,
    side: int = 3,
    below: str = "",
) -> Figure:
    """Draws a value for each row and column of several panels as a colour, for one column of a paper.

    Args:
      panels: title -> values [R, C], NaN where there is none, which is left white with a small cross.
      rows: names of the R rows, such as methods.
      columns_of_panel: names of the C columns, such as shares in percent.
      label: of the colours, with the unit.
      limits: values of the darkest and the brightest colour.
      side: panels side by side.
      below: label of the horizontal axis.

    Raises:
      ValueError: no panels, or values of another shape.
    """
    shape = (len(rows), len(columns_of_panel))
    for title, values in panels.items():
        if np.shape(values) != shape:
            raise ValueError(f"panel {title!r} has values {list(np.shape(values))}; give {list(shape)}, rows × columns")
    if not panels:
        raise ValueError("panels is empty; give at least one")
    count = -(-len(panels) // side)
    with style.drawing(style.SINGLE, 0.55 + count * (0.25 + CELL_INCHES * len(rows))) as figure:
        grid = figure.subplots(count, side, sharex=True, sharey=True, squeeze=False)
        colors = colormaps[COLORMAP].with_extremes(bad=NO_VALUE)
        drawn = None
        for place, axes in enumerate(grid.flat):
            if place >= len(panels):
                axes.remove()
                continue
            title, values = list(panels.items())[place]
            drawn = axes.imshow(np.ma.masked_invalid(values), colors, aspect="auto", vmin=limits[0], vmax=limits[1])
            absent = np.argwhere(~np.isfinite(values))
            axes.plot(absent[:, 1], absent[:, 0], "x", color="#BBBBBB", markersize=1.8, markeredgewidth=0.4)
            axes.set_title(title, pad=2)
            axes.grid(visible=False)
            axes.spines[:].set_visible(False)
            axes.tick_params(length=0, pad=1.5, labelbottom=place + side >= len(panels))
        grid[0, 0].set_yticks(range(len(rows)), rows)
        turned = max(len(str(name)) for name in columns_of_panel) > 3
        grid[0, 0].set_xticks(range(len(columns_of_panel)), [str(name) for name in columns_of_panel])
        for axes in figure.axes:
            axes.tick_params(axis="x", labelrotation=90 if turned else 0)
        if below:
            figure.supxlabel(below)
        assert drawn is not None
        bar = figure.colorbar(drawn, ax=grid, location="top", aspect=40, shrink=0.7, pad=0.01)
        bar.set_label(label, labelpad=2)
        bar.ax.tick_params(length=1.5, pad=1)
        bar.outline.set_visible(False)  # pyright: ignore[reportCallIssue]
        figure.set_layout_engine("constrained", w_pad=0.02, h_pad=0.02, wspace=0.02, hspace=0.02)
    return figure
