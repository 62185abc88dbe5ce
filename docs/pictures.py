"""The site's pictures, drawn at build time: the stacked clients, and who has what in each scenario."""

from __future__ import annotations

import io
from collections.abc import Callable

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle

import fedjax_cluster as fc
from fedjax_cluster.data.scenarios.registry import SCENARIOS
from fedjax_cluster.report import client_labels, style

CLIENTS = 12
PALE = "#F4F4F4"
# Scenarios whose groups differ in what images look like or mean, with what shows it best.
SHOWN_AS_IMAGES = {
    "rotated": {},
    "mixture": {"kappa": 0.5},
    "domains": {"shares": (1, 1, 1), "noise": 0.5, "blur": 1.0},
    "label_swap": {"pairs": ((0, 1), (2, 3), (4, 5), (6, 7))},
    "label_permutation": {"num_groups": 3},
    "label_shift": {},
}


def all_of_them() -> dict[str, str]:
    """Name -> SVG."""
    drawn = {"stacked_clients": _svg(stacked_clients()), "first_run": _svg(first_run())}
    return drawn | {name: _svg(of_scenario(name)) for name in SCENARIOS}


def _svg(figure: Figure) -> str:
    buffer = io.StringIO()
    with style.style():
        figure.savefig(buffer, format="svg", facecolor="white", metadata={"Date": None})
    return buffer.getvalue()


def first_run() -> Figure:
    """The learning curves of the page's first run."""
    federation = fc.data.scenarios.rotated(fc.data.digits(), clients=16, angles=(0, 90, 180, 270))
    local = fc.local.sgd(1.0, batch_size=64, steps=1)
    server = fc.optimizers.named("sgd", learning_rate=0.1)
    method = fc.algorithms.cfl_gp(fc.nn.mlp(), clusters=4, local=local, server=server)
    return fc.simulate(method, federation, rounds=60, progress=False).plot()


def stacked_clients() -> Figure:
    """Arrays whose row i is client i, and models whose row k is cluster k."""
    sizes, group = (9, 6, 10, 4, 8, 7), (0, 1, 0, 2, 1, 2)
    with style.drawing(style.DOUBLE, 2.2) as figure:
        axes = figure.subplots()
        axes.set(xlim=(-1.9, 32.6), ylim=(9.1, -1.9), aspect="equal")
        axes.axis("off")
        for client, (size, own) in enumerate(zip(sizes, group, strict=True)):
            for row in range(10):
                filled = row < size
                _cell(axes, row, client, style.COLORS[own] if filled else PALE)
            axes.text(-0.35, client + 0.5, f"client {client}", ha="right", va="center")
            for cluster in range(3):
                _cell(axes, 13.5 + cluster, client, style.COLORS[own] if own == cluster else PALE)
                if own == cluster:
                    axes.text(14 + cluster, client + 0.52, "1", color="white", ha="center", va="center")
        for cluster in range(3):
            for parameter in range(8):
                _cell(axes, 23 + parameter, 1.5 + cluster, style.COLORS[cluster])
            axes.text(31.3, 2.0 + cluster, f"cluster {cluster}", va="center")
        for x, y, title, shape in (
            (0, -0.35, "Data of all clients", "x [M, N, …]"),
            (13.5, -0.35, "Membership", "[M, K]"),
            (23, 1.15, "Models of all clusters", "parameters [K, …]"),
        ):
            axes.text(x, y - 0.85, title, va="bottom", fontweight="bold")
            axes.text(x, y, shape, va="bottom", color=style.NEUTRAL)
        _arrow(axes, (22.6, 2.4), (17.0, 2.4))
        axes.text(19.8, 2.1, "each client trains\nits cluster's model", ha="center", va="bottom")
        _arrow(axes, (17.0, 3.6), (22.6, 3.6))
        axes.text(19.8, 3.9, "mean change\nof each cluster", ha="center", va="top")
        _brace(axes, 0, 16.5, 6.45)
        axes.text(0, 7.2, "row i is client i: dealt to the devices, all trained by one compiled program", va="center")
        _cell(axes, 0, 7.95, PALE)
        axes.text(1.3, 8.5, "padding: as many rows as the largest client; num_examples [M] tells how many count",
                  va="center")  # fmt: skip
    return figure


def _cell(axes, x: float, y: float, color: str) -> None:
    edge = "#BBBBBB" if color == PALE else "white"
    axes.add_patch(Rectangle((x + 0.04, y + 0.04), 0.92, 0.92, facecolor=color, edgecolor=edge, linewidth=0.5))


def _arrow(axes, start: tuple[float, float], end: tuple[float, float]) -> None:
    axes.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=8, color="black", linewidth=0.9))


def _brace(axes, left: float, right: float, y: float) -> None:
    axes.plot([left, left, right, right], [y - 0.2, y, y, y - 0.2], color=style.NEUTRAL, linewidth=0.8)


def of_scenario(name: str) -> Figure:
    """Who has what: images of each group, or labels of each client."""
    if name in ("linear_regression", "xor"):
        return _points(name)
    if name == "channels":
        return _channels()
    if name == "topics":
        return _topics()
    digits = fc.data.digits()
    if name in SHOWN_AS_IMAGES:
        return _images(SCENARIOS[name](digits, clients=CLIENTS, **SHOWN_AS_IMAGES[name]))
    if name == "mixed_datasets":
        inverted = digits._replace(x=255 - digits.x)
        return _images(SCENARIOS[name]([digits, inverted], clients=CLIENTS, angles=((0, 180), (0,))))
    given = {"user_ids": np.arange(len(digits.y)) ** 2 // 300_000} if name == "users" else {}
    clients = {"users": None, "class_overlap": 16, "label_groups": 15}.get(name, CLIENTS)
    federation = SCENARIOS[name](digits, clients=clients, **given)
    counts = client_labels.label_counts(federation.train, federation.info.num_classes)
    names = federation.info.group_names, federation.info.class_names
    return client_labels.client_labels(counts, federation.group, *names)


def _images(federation: fc.types.Federation) -> Figure:
    """What the clients of each group call 0, 1, …: an image for each label."""
    data, groups, labels = federation.train, np.unique(federation.group), range(10)
    with style.drawing(style.SINGLE + 0.6, 0.42 * len(groups) + 0.2) as figure:
        grid = figure.subplots(len(groups), len(labels), squeeze=False)
        for row, group in enumerate(groups):
            own = np.flatnonzero(federation.group == group)
            filled = np.arange(data.y.shape[1]) < np.asarray(data.num_examples)[own, None]
            for label, axes in zip(labels, grid[row], strict=True):
                client, place = np.argwhere(filled & (data.y[own] == label))[0]
                axes.imshow(data.x[own[client]][place], cmap="gray_r", vmin=0, vmax=255)
                axes.set(xticks=[], yticks=[])
                axes.grid(False)
                axes.spines[:].set(visible=True, color="#BBBBBB")
                if row == 0:
                    axes.set_title(str(label), pad=3, fontsize=style.FONT_POINTS)
            name = style.wrapped(federation.info.group_names[group], 12)
            grid[row][0].set_ylabel(name, rotation=0, ha="right", va="center")
        grid[0][0].text(-0.5, 1.13, "label", transform=grid[0][0].transAxes, ha="right", va="bottom")
    return figure


def _points(name: str) -> Figure:
    """Inputs and targets of the made-up data, by group."""
    federation = SCENARIOS[name](clients=CLIENTS)
    data, info = federation.train, federation.info
    draw: Callable[..., None] = _line_points if name == "linear_regression" else _corner_points
    with style.drawing(style.SINGLE, 2.1) as figure:
        axes = figure.subplots()
        for group, color in style.value_colors(federation.group).items():
            client = int(np.flatnonzero(federation.group == group)[0])
            draw(axes, data.x[client][:60], data.y[client][:60], color, info.group_names[group])
        axes.legend(loc="center left", bbox_to_anchor=(1.02, 0.5))
    return figure


def _line_points(axes, x, y, color: str, name: str) -> None:
    axes.plot(x[:, 0], y, "o", color=color, markersize=2.5, label=f"{name}°")
    axes.set(xlabel="x", ylabel="y")


def _corner_points(axes, x, y, color: str, name: str) -> None:
    for label, marker in ((0, "o"), (1, "x")):
        axes.plot(*x[y == label].T, marker, color=color, markersize=3, label=f"{name}, label {label}")
    axes.set(xlabel="first input", ylabel="second input")


def _channels() -> Figure:
    """Two matrices of each environment: how much arrives from where, and when."""
    federation, each = SCENARIOS["channels"](clients=10, seed=1), 2
    with style.drawing(style.DOUBLE, 2.9) as figure:
        grid = figure.subplots(each, 5, squeeze=False, sharex=True, sharey=True)
        for column, name in enumerate(federation.info.group_names):
            for row in range(each):
                axes, (real, imaginary) = grid[row][column], federation.train.x[2 * column + row, 0]
                decibel = 20 * np.log10(np.hypot(real, imaginary) + 1e-9)
                shown = axes.imshow(decibel - decibel.max(), cmap="cividis", vmin=-40, vmax=0, aspect="auto")
                axes.grid(False)
                if row == 0:
                    axes.set_title(name)
                if row == each - 1:
                    axes.set_xlabel("Delay (tap)")
                if column == 0:
                    axes.set_ylabel("Angle (index)")
        figure.colorbar(shown, ax=grid.ravel().tolist(), label="Power (dB, of the largest)")
    return figure


def _topics() -> Figure:
    """Which word follows which, counted over the clients of each topic."""
    federation = SCENARIOS["topics"](clients=8, vocabulary=40, examples_per_client=1000)
    words, names = federation.info.num_classes, federation.info.group_names
    with style.drawing(style.DOUBLE, 1.95) as figure:
        panels = figure.subplots(1, len(names), sharey=True)
        for group, (axes, name) in enumerate(zip(panels, names, strict=True)):
            own = federation.group == group
            counts = np.zeros((words, words))
            np.add.at(counts, (federation.train.x[own].ravel(), federation.train.y[own].ravel()), 1)
            share = counts / np.maximum(counts.sum(1, keepdims=True), 1)
            shown = axes.imshow(share, cmap="cividis", vmin=0, vmax=0.4)
            axes.grid(False)
            axes.set(title=name, xlabel="Next word")
        panels[0].set_ylabel("Word")
        figure.colorbar(shown, ax=panels.tolist(), label="Share")
    return figure
