"""The picture of a sweep: how much one option matters, or two together."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MaxNLocator

from fedjax_cluster.report import style
from fedjax_cluster.report.curves import BAND, draw_line, value_axis
from fedjax_cluster.report.histories import ARI, column_label
from fedjax_cluster.report.judged_by import HONEST, of_honest
from fedjax_cluster.report.names import option_name, option_names, over_seeds, pictured, value_text
from fedjax_cluster.report.table import Spread, spread
from fedjax_cluster.report.tables import Runs, quality

LABELS = {
    **{"learning_rate": "Learning rate", "batch_size": "Mini-batch (examples)", "rounds": "Communication rounds"},
    **{"local_steps": "Local steps (mini-batches a round)", "local_epochs": "Local epochs (a round)"},
    **{"participation": "Participation (share of the clients)", "clients": "Clients", "clusters": "Clusters"},
}
COLORS = "cividis"  # even in lightness, and the same to colour-blind eyes
LEAST_RATIO = 4  # of values on a logarithmic axis
MOST_IN_LINE, MOST_SPREAD, MOST_NUMBERED = 3, 7, 20  # columns with room for mean ± std, both in two lines, the mean
CHARACTER = 0.56 * style.FONT_POINTS / 72  # inches, on average
LONGEST, LINE = 24, 12  # characters of a name on an axis, and of one of its lines at the side
LINE_HEIGHT = 1.15 * style.FONT_POINTS / 72  # inches
UPRIGHT = 12  # columns, beyond which their names stand upright
FAILED: dict[str, Any] = {"facecolor": "#EEEEEE", "edgecolor": "#BBBBBB", "hatch": "////", "linewidth": 0}


def sensitivity(runs: Sequence[Runs], cells: Mapping[str, Mapping[str, Any]]) -> Figure | None:
    """Draws the last accuracy, or test loss, and the adjusted Rand index where there is one, against swept options.

    One option: the mean over the seeds with a band of ± one sample standard deviation, and each run as a dot. Two: a
    heat map with the means as numbers, or where not every combination was run, as with random draws, a dot for each.
    The axis of an option is logarithmic where its values are rather even in proportion than in distance.

    Args:
      runs: the outcome of each cell.
      cells: label -> option -> value.

    Returns:
      The figure, of the honest clients where some are faulty; None for three options and more, and where no run has
      a figure.
    """
    options = list(dict.fromkeys(option for values in cells.values() for option in values))
    summaries = [summary for cell in runs for summary in cell.summaries]
    accuracy, agreement = (of_honest(name, summaries) for name in ("accuracy", ARI))
    kinds = [name for name in (accuracy, "test_loss") if any(quality(each, name) is not None for each in summaries)]
    metrics = kinds[:1] + [agreement] * any(quality(each, agreement) is not None for each in summaries)
    if not 1 <= len(options) <= 2 or not kinds:
        return None
    places = [[cells[of.label][option] for of in runs] for option in options]
    values = {
        metric: [
            [*(quality(each, metric, column_label(metric)[1]) for each in of.summaries), *([None] * _failures(of))]
            for of in runs
        ]
        for metric in metrics
    }
    if len(options) == 1:
        return _lines(options[0], places[0], values)
    full = len({tuple(map(value_text, pair)) for pair in zip(*places, strict=True)}) == len(levels_of(places[0])) * len(
        levels_of(places[1])
    )
    return (_heat_maps if full else _dots)(options, places, values)


def _lines(option: str, place: Sequence[Any], values: Mapping[str, list[list[float | None]]]) -> Figure:
    """A panel a metric: mean, band and runs against one option."""
    levels = levels_of(place)
    at, logarithmic = _positions(place, levels)
    order, texts = np.argsort(at), [value_text(level) for level in levels]
    with style.drawing(style.SINGLE, 0.6 + 1.4 * len(values)) as figure:
        panels, legend = figure.subplots(len(values), 1, sharex=True, squeeze=False)[:, 0], {}
        for axes, (metric, of_cells) in zip(panels, values.items(), strict=True):
            found = [spread(of_cells[index]) for index in order]
            mean = np.asarray([np.nan if each is None else each.mean for each in found])
            deviation = np.asarray([0.0 if each is None else each.std or 0.0 for each in found])
            highest = {"accuracy": 100.0, ARI: 1.0}.get(metric.removesuffix(HONEST), np.inf)
            if logarithmic:
                axes.set_xscale("log")
            if _numeric(levels):
                draw_line(axes, at[order], mean, deviation, label="mean", index=0, count=1, highest=highest)
                for line in axes.get_lines():
                    line.set_markevery(None)
            else:  # there is nothing between two names
                look = {"fmt": "o", "color": style.COLORS[0], "elinewidth": 1.0}
                axes.errorbar(at[order], mean, deviation if deviation.any() else None, label="mean", **look)
                axes.set_xlim(-0.5, len(levels) - 0.5)
            pairs = [(at[index], value) for index in order for value in of_cells[index] if value is not None]
            if len(pairs) > np.isfinite(mean).sum():
                axes.plot(*zip(*pairs, strict=True), **_dot(), label="_runs")
                legend["each run"] = Line2D([], [], **_dot())
                band = Patch(color=style.COLORS[0], alpha=2 * BAND, linewidth=0)
                bar = Line2D([], [], color=style.COLORS[0], linewidth=1.0)
                legend[f"± sample std {over_seeds(map(_known, of_cells))}"] = band if _numeric(levels) else bar
            if (missing := np.isnan(mean)).any():
                look = {"color": style.COLORS[1], "linestyle": "none", "marker": "x", "markersize": 5}
                # At the foot, whatever the scale of the values is.
                axes.plot(
                    at[order][missing], np.full(missing.sum(), 0.05), transform=axes.get_xaxis_transform(), **look
                )
                legend["failed or not finite"] = Line2D([], [], **look)
            if (some := np.asarray([_is_partly_lost(of_cells[index]) for index in order])).any():
                look = {"color": style.NEUTRAL, "linestyle": "none", "marker": "x", "markersize": 3.5}
                axes.plot(at[order][some], np.full(some.sum(), 0.05), transform=axes.get_xaxis_transform(), **look)
                legend["some runs failed or not finite"] = Line2D([], [], **look)
            axes.set_ylabel(_metric_label(metric))
            value_axis(axes, mean[:, None], 5)
            if metric.removesuffix(HONEST) == ARI:
                axes.set_ylim(min(0.0, float(np.nanmin(mean - deviation))) - 0.06, 1.06)
        if _numeric(levels):
            _mark(panels[-1], at, levels, texts, logarithmic)
        else:
            _name_columns(figure, panels[-1], texts, style.SINGLE - 0.6)
        panels[-1].set_xlabel(_label(option, (option,)))
        handles, labels = panels[0].get_legend_handles_labels()
        style.legend_above(figure, [*handles, *legend.values()], [*labels, *legend])
    return figure


def _heat_maps(
    options: Sequence[str], places: Sequence[Sequence[Any]], values: Mapping[str, list[list[float | None]]]
) -> Figure:
    """A map a metric: the option with more values along it, the other one upwards; the means as numbers."""
    along = int(len(levels_of(places[1])) > len(levels_of(places[0])))
    columns, rows = levels_of(places[along]), levels_of(places[1 - along])
    texts = [[value_text(level) for level in levels] for levels in (columns, rows)]
    names = _at_the_side(texts[1])
    lines = 1 + max(name.count("\n") for name in names)
    height = min(max(max(0.3, 0.1 + 0.1 * lines) * len(rows), 1.15), 6.0)
    with style.drawing(style.SINGLE, 0.5 + (height + 0.15) * len(values)) as figure:
        panels = figure.subplots(len(values), 1, sharex=True, squeeze=False)[:, 0]
        lost = starred = False
        for axes, (metric, of_cells) in zip(panels, values.items(), strict=True):
            shown = np.full((len(rows), len(columns)), np.nan)
            spreads: dict[tuple[int, int], Spread] = {}
            partly = set()
            for x, y, values_of in zip(places[along], places[1 - along], of_cells, strict=True):
                if (found := spread(values_of)) is not None:
                    cell = texts[1].index(value_text(y)), texts[0].index(value_text(x))
                    shown[cell], spreads[cell] = found.mean, found
                    partly |= {cell} if _is_partly_lost(values_of) else set()
            scale = Normalize(*_limits(shown, metric))
            image = axes.imshow(shown, cmap=COLORS, norm=scale, origin="lower", aspect="auto", interpolation="nearest")
            figure.colorbar(image, ax=axes, label=_metric_label(metric), pad=0.02)
            for row, column in np.ndindex(shown.shape):
                if np.isnan(shown[row, column]):
                    axes.add_patch(Rectangle((column - 0.5, row - 0.5), 1, 1, **FAILED))
                    lost = True
                elif len(columns) <= MOST_NUMBERED:
                    star = "*" * ((row, column) in partly)
                    _number(axes, column, row, spreads[row, column], metric, scale, len(columns), star)
                    starred = starred or bool(star)
            axes.set_yticks(range(len(rows)), names)
            axes.tick_params(which="both", length=0)
            axes.set_xticks(np.arange(1, len(columns)) - 0.5, minor=True)
            axes.set_yticks(np.arange(1, len(rows)) - 0.5, minor=True)
            axes.grid(False)
            axes.grid(which="minor", color="white", linewidth=0.8)
            axes.set_axisbelow(False)
            axes.spines[:].set_visible(False)
        panels[-1].set_xlabel(_label(options[along], options))
        figure.supylabel(style.wrapped(_label(options[1 - along], options), 24), fontsize=7.5)
        widest = max(len(line) for name in names for line in name.split("\n"))
        _name_columns(figure, panels[-1], texts[0], style.SINGLE - 0.8 - CHARACTER * widest)
        several = over_seeds(_counts(values)) if len(columns) <= MOST_SPREAD else ""
        handles: dict[str, Any] = {}
        if several:
            handles[f"mean ± sample std {several}"] = Line2D([], [], linestyle="none")
        if starred:
            handles["*: some runs failed or not finite"] = Line2D([], [], linestyle="none")
        if lost:
            handles["failed or not finite"] = Patch(**FAILED)
        style.legend_above(figure, list(handles.values()), list(handles), lines=False)
    return figure


def _dots(
    options: Sequence[str], places: Sequence[Sequence[Any]], values: Mapping[str, list[list[float | None]]]
) -> Figure:
    """A panel a metric: a dot for each combination, its colour the mean."""
    at = [_positions(place, levels_of(place)) for place in places]
    with style.drawing(style.SINGLE, 0.5 + 1.8 * len(values)) as figure:
        panels, lost = figure.subplots(len(values), 1, sharex=True, squeeze=False)[:, 0], False
        partly: dict[str, Any] = {"linestyle": "none", "marker": "+", "color": "black", "markersize": 11, "zorder": 5}
        lost_some = False
        for axes, (metric, of_cells) in zip(panels, values.items(), strict=True):
            mean = np.asarray([np.nan if (found := spread(each)) is None else found.mean for each in of_cells])
            known, (x, y) = np.isfinite(mean), (positions for positions, _ in at)
            low, high = _limits(mean, metric)
            look = {"cmap": COLORS, "vmin": low, "vmax": high, "s": 26, "edgecolor": "black", "linewidth": 0.4}
            image = axes.scatter(x[known], y[known], c=mean[known], **look)
            axes.plot(x[~known], y[~known], linestyle="none", marker="x", color=style.COLORS[1], markersize=5)
            some = known & np.asarray([_is_partly_lost(each) for each in of_cells])
            axes.plot(x[some], y[some], **partly)
            lost, lost_some = lost or not known.all(), lost_some or bool(some.any())
            figure.colorbar(image, ax=axes, label=_metric_label(metric), pad=0.02)
            for axis, name, (_, logarithmic), place in zip("xy", options, at, places, strict=True):
                axes.set(**{f"{axis}scale": "log"} if logarithmic else {})
                if axis == "y" or axes is panels[-1]:
                    axes.set(**{f"{axis}label": _label(name, options)})
                if not _numeric(place):
                    texts = [value_text(level) for level in levels_of(place)]
                    if axis == "y":
                        axes.set_yticks(range(len(texts)), _at_the_side(texts))
                    elif axes is panels[-1]:
                        _name_columns(figure, axes, texts, 0.6 * style.SINGLE)
                elif not logarithmic:
                    whole = all(isinstance(value, int) for value in place)
                    getattr(axes, f"{axis}axis").set_major_locator(MaxNLocator(5, steps=style.STEPS, integer=whole))
        legend = {"some runs failed or not finite": Line2D([], [], **partly)} if lost_some else {}
        if lost:
            cross = Line2D([], [], linestyle="none", marker="x", color=style.COLORS[1], markersize=5)
            legend["failed or not finite"] = cross
        if legend:
            style.legend_above(figure, [*legend.values()], [*legend], lines=False)
    return figure


def _number(
    axes: Axes, column: int, row: int, found: Spread, metric: str, scale: Normalize, columns: int, star: str = ""
) -> None:
    """A cell's mean, and beneath it the deviation, in the colour that can be read there."""
    decimals = {"accuracy": 1, ARI: 2}.get(metric.removesuffix(HONEST), 3)
    ink = style.ink_on(colormaps[COLORS](scale(found.mean)))
    text, look = (
        f"{found.mean:.{decimals}f}{star}",
        {"ha": "center", "va": "center", "fontsize": style.FONT_POINTS, "linespacing": 0.9},
    )
    if found.std is not None and columns <= MOST_SPREAD:
        text += f"{' ± ' if columns <= MOST_IN_LINE else chr(10) + '±'}{found.std:.{decimals}f}"
    rotation = 0 if columns <= MOST_SPREAD else 90
    axes.text(column, row, text, color=ink, rotation=rotation, **look)


def _counts(values: Mapping[str, list[list[float | None]]]) -> list[int]:
    """Of how many seeds cells have a figure."""
    return [_known(each) for of_cells in values.values() for each in of_cells]


def _failures(of: Runs) -> int:
    """How many of a cell's runs failed, besides those that have not ended."""
    return len(set(getattr(of, "failed", ())) - set(getattr(of, "not_ended", ())))


def _known(of_seeds: Sequence[float | None]) -> int:
    return sum(value is not None and math.isfinite(value) for value in of_seeds)


def _is_partly_lost(of_seeds: Sequence[float | None]) -> bool:
    return 0 < _known(of_seeds) < len(of_seeds)


def _limits(mean: np.ndarray, metric: str) -> tuple[float, float]:
    """What the colours span: of an index at least from 0 to 1."""
    low, high = float(np.nanmin(mean)), float(np.nanmax(mean))
    if metric.removesuffix(HONEST) == ARI:
        return min(low, 0.0), 1.0
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def levels_of(place: Sequence[Any]) -> list[Any]:
    """The values of an option, each once: numbers ascending, others as they come."""
    found = list({value_text(value): value for value in place}.values())
    return sorted(found) if _numeric(found) else found


def _numeric(place: Sequence[Any]) -> bool:
    return all(isinstance(value, int | float) and not isinstance(value, bool) for value in place)


def _positions(place: Sequence[Any], levels: Sequence[Any]) -> tuple[np.ndarray, bool]:
    """Where values stand on an axis, and whether it is logarithmic; what is no number stands side by side."""
    if not _numeric(place):
        texts = [value_text(level) for level in levels]
        return np.asarray([texts.index(value_text(value)) for value in place], np.float64), False
    at = np.asarray(levels, np.float64)
    logarithmic = len(at) > 1 and at[0] > 0 and at[-1] / at[0] >= LEAST_RATIO
    if logarithmic and len(at) > 2:
        apart, times = np.diff(at), np.diff(np.log(at))
        logarithmic = bool(times.std() / times.mean() < apart.std() / apart.mean())
    return np.asarray(place, np.float64), logarithmic


def _mark(axes: Axes, at: np.ndarray, levels: Sequence[Any], texts: Sequence[str], logarithmic: bool) -> None:
    """Ticks at the values, which are numbers, as far as their texts have room."""
    places = np.unique(at)
    scaled = np.log(places) if logarithmic else places
    if len(places) == 1 or np.diff(scaled).min() / (scaled[-1] - scaled[0]) >= 0.018 * max(map(len, texts)) + 0.02:
        style.ticks_at(axes.xaxis, places.tolist())
    elif not logarithmic:
        whole = all(isinstance(level, int) for level in levels)
        axes.xaxis.set_major_locator(MaxNLocator(7, steps=style.STEPS, integer=whole))


def _name_columns(figure: Figure, axes: Axes, texts: Sequence[str], room: float) -> None:
    """Names beneath columns, turned where the longest is wider than a column of `room` inches' axis.

    They end at their ticks then, and the figure gets as much higher as they need. Of more than stand side by side
    upright, every second, third … has its name.
    """
    every = math.ceil(len(texts) * LINE_HEIGHT / room)
    names = [pictured(style.shortened(text, LONGEST)) for text in texts[::every]]
    axes.set_xticks(range(0, len(texts), every), names)
    width = CHARACTER * max(map(len, names))
    if len(names) * (width + CHARACTER) > room:
        angle = 60 if len(names) <= UPRIGHT else 90
        for label in axes.get_xticklabels():
            label.set(rotation=angle, rotation_mode="anchor", ha="right", va="center")
        figure.set_figheight(figure.get_figheight() + width * math.sin(math.radians(angle)))


def _at_the_side(texts: Sequence[str]) -> list[str]:
    """Names beside rows, in lines."""
    return [pictured(style.wrapped(style.shortened(text, LONGEST), LINE, within=True)) for text in texts]


def _dot() -> dict[str, Any]:
    return {"linestyle": "none", "marker": "o", "markersize": 2.2, "color": style.NEUTRAL, "alpha": 0.7, "zorder": 5}


def _label(option: str, options: Sequence[str]) -> str:
    name = option_names(options)[option]
    usual = LABELS.get(option.rpartition(".")[2]) if name == option_name(option) else None
    return usual or pictured(name.capitalize())


def _metric_label(metric: str) -> str:
    return column_label(metric)[0]
