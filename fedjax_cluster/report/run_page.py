"""The page of a run: what happened, in which round, to whom, at what cost, and with which settings."""

from __future__ import annotations

import dataclasses
import itertools
import json
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedjax_cluster.data.stored import stored
from fedjax_cluster.report import captions, headlines
from fedjax_cluster.report import web_page as web
from fedjax_cluster.report.client_labels import label_counts
from fedjax_cluster.report.names import counted, group_name, method_name
from fedjax_cluster.report.shown_clients import ShownClients, shown_clients, without_newcomers
from fedjax_cluster.report.style import distinct
from fedjax_cluster.report.table import NOTHING
from fedjax_cluster.report.tables import figure, summary_table
from fedjax_cluster.report.timeline import Move, moves
from fedjax_cluster.report.web_page import Html, Section
from fedjax_cluster.types import FinishedRun

PAGE = "report.html"
MOST_ROUNDS, MOST_CLIENTS, MOST_CLASSES = 200, 500, 100  # rows of folded tables; columns
COSTS = ("models per client", "traffic", "mini-batches", "server's clustering", "speed", "time")  # of the summary
MOST_NAMED = 12  # clients that changed between the same two clusters


class Told(NamedTuple):
    """What a page tells beside the pictures; empty where it is not known."""

    summary: Mapping[str, Any]  # what summary.json holds
    settings: Mapping[str, Any]  # the configuration
    options: Mapping[str, Any]  # all of the method's, with defaults
    machine: Mapping[str, Any]  # versions and devices, by name
    per_client: Any = None  # accuracy and loss f32[M] on test rows, NaN for none
    outliers: Mapping[int, Sequence[str]] | None = None  # why clients stand out
    not_compared: Sequence[str] = ()  # of "rows" and "updates" of clients, those that tell nothing of who stands out


def write_run_page(
    directory: str | pathlib.Path, run: FinishedRun | None, plots: Sequence[pathlib.Path], told: Told, *, more: str = ""
) -> pathlib.Path:
    """Writes report.html into a run's directory and returns its path.

    Args:
      directory: where the page is left.
      run: the finished run; None where only its history is known: what needs its clients is left out.
      plots: its pictures; those that are PNG files go into the page.
      told: see there.
      more: where there are pictures that this page lacks.
    """
    directory, summary = pathlib.Path(directory), told.summary
    drawn: dict[str, list[Html]] = {}
    for path in (path for path in plots if path.suffix == ".png"):
        known = captions.caption(path.stem)
        link = path.relative_to(directory).as_posix() if path.is_relative_to(directory) else ""
        drawn.setdefault(known.section, []).append(web.picture(path, known.title, known.sentence, link))
    pictures = {name: web.figures(drawn.get(name, ())) for name in captions.SECTIONS}
    run = None if run is None else without_newcomers(run)
    clients = None if run is None else shown_clients(run)
    lines = summary_table(summary)
    told_once = dataclasses.replace(lines, title="", rows=tuple(row for row in lines.rows if row[0] not in COSTS))
    about_moves = "" if run is None else _moves(run)
    about_clients = "" if run is None or clients is None else _clients(run, clients, told)
    warning = web.paragraph(headlines.warning(summary), "warning")
    name = method_name(str(summary.get("algorithm", "the method")))
    sections = [
        Section("summary", "Summary", web.columns([web.table(told_once), _costs(summary)])),
        Section(captions.ROUNDS, "Over the rounds", pictures[captions.ROUNDS]),
        Section(captions.MOVES, "Who moved when", web.joined([pictures[captions.MOVES], about_moves])),
        Section(captions.CLIENTS, "Clients and clusters", web.joined([pictures[captions.CLIENTS], about_clients])),
        Section(captions.METHOD, f"Inside {name}", pictures[captions.METHOD]),
        Section("configuration", "Configuration", _configuration(told, name)),
        Section("environment", "Environment", web.pairs(told.machine.items())),
    ]
    return web.write_page(
        directory / PAGE,
        headlines.title(summary),
        headlines.lead(summary, None if clients is None else clients.group),
        sections,
        top=web.joined([warning, web.cards(headlines.main_figures(summary))]),
        end=web.joined([more, "Left by fedjax_cluster; all is in this file, which loads nothing from elsewhere."]),
    )


def _moves(run: FinishedRun) -> Html:
    """Who moved, in words; "" where there was never more than a cluster."""
    rounds, cluster = run.assignments
    shown = np.asarray(run.federation.train.num_examples) > 0
    if len(np.unique(cluster[:, shown])) < 2:
        return Html("")
    found = moves(rounds, cluster)
    if not found:
        return web.paragraph("Nobody moved to another cluster.")
    movers = len({move.client for move in found})
    text = f"{counted(len(found), 'move')} of {counted(movers, 'client')}, the last in round {found[-1].round}."
    by_round = [(at, list(of)) for at, of in itertools.groupby(found, key=lambda move: move.round)]
    lines = [(at, len(of), _who(of)) for at, of in by_round[:MOST_ROUNDS]]
    left_out = len(by_round) - len(lines)
    listed = web.grid(lines, ("round", "moves", "from → to: clients"), numeric=(True, True))
    more = web.paragraph(f"and {counted(left_out, 'more round')}" if left_out else "", "note")
    return web.joined([web.paragraph(text), web.folded("Each move", web.joined([listed, more]))])


def _who(found: Sequence[Move]) -> str:
    """The moves of a round: "0 → 2: 3, 5; none → 1: 4"."""
    ways: dict[tuple[int, int], list[int]] = {}
    for move in found:
        ways.setdefault((move.before, move.after), []).append(move.client)
    return "; ".join(
        f"{_cluster(before)} → {_cluster(after)}: {', '.join(map(str, of[:MOST_NAMED]))}"
        + (f" and {len(of) - MOST_NAMED} more" if len(of) > MOST_NAMED else "")
        for (before, after), of in sorted(ways.items())
    )


def _cluster(label: int) -> str:
    return "none" if label < 0 else str(label)


def _clients(run: FinishedRun, clients: ShownClients, told: Told) -> Html:
    """Who stands out, labels of each cluster, and every client in a row."""
    parts: list[Html] = [] if told.outliers is None else [_outliers(run.labels, told.outliers, told.not_compared)]
    info, train = run.federation.info, run.federation.train
    labelled = info.task == "classification" and 1 < info.num_classes <= MOST_CLASSES
    if labelled and not stored(run.federation) and train.y.ndim == 2:
        counts = label_counts(train, info.num_classes)[clients.index]
        lines = [_labels_of_cluster(label, clients.labels, counts) for label in distinct(clients.labels)]
        named = info.class_names or tuple(map(str, range(info.num_classes)))
        headings = ("cluster", "clients", "examples", *named)
        shares = web.grid(lines, headings, numeric=(False, *(True for _ in headings[1:])))
        parts += [
            web.element("h3", "Labels of each cluster"),
            web.paragraph(
                "Share of each label among the training examples of a cluster's clients, in per cent.", "note"
            ),
            web.element("div", shares, class_="shares"),
        ]
    counted_moves = np.bincount([move.client for move in moves(*run.assignments)], minlength=len(run.labels))
    tests = np.asarray(run.federation.test.num_examples)
    examples = np.asarray(train.num_examples)
    measured = {} if told.per_client is None else _measured(told.per_client)
    users = getattr(run.federation, "user_ids", None)
    rows = []
    for place, client in enumerate(clients.index[:MOST_CLIENTS].tolist()):
        group = NOTHING if clients.group is None else group_name(int(clients.group[place]), clients.group_names)
        of_client = (_cluster(int(clients.labels[place])), counted_moves[client], examples[client], tests[client])
        name = () if users is None else (str(users[client]),)
        rows.append((client, *name, group, *map(str, of_client), *(found[client] for found in measured.values())))
    texts = ("true group",) if users is None else ("user", "true group")
    numbers = ("cluster", "moves", "training examples", "test examples", *measured)
    numeric = (True, *(False for _ in texts), *(True for _ in numbers))
    listed = web.grid(rows, ("client", *texts, *numbers), numeric=numeric)
    left_out = len(clients.index) - len(rows)
    more = web.paragraph(f"and {counted(left_out, 'more client')}" if left_out else "", "note")
    return web.joined([*parts, web.folded("Each client", web.joined([listed, more]))])


def _outliers(labels: Any, reasons: Mapping[int, Sequence[str]], not_compared: Sequence[str]) -> Html:
    """The clients that stand out, with the reasons."""
    heading = web.element("h3", "Clients that stand out")
    unknown = f" {' and '.join(not_compared).capitalize()} were not compared." if not_compared else ""
    if not reasons:
        signs = {"rows": "copies", "updates": "learns"}
        seen = ["moved", *(sign for what, sign in signs.items() if what not in not_compared)]
        nobody = " or ".join(filter(None, (", ".join(seen[:-1]), seen[-1])))
        return web.joined([heading, web.paragraph(f"None: nobody {nobody} much unlike the others.{unknown}")])
    listed = [(i, _cluster(int(labels[i])), "; ".join(why)) for i, why in list(reasons.items())[:MOST_CLIENTS]]
    note = "Each trained once from a model drawn anew, and is compared with the median of every cluster."
    note = unknown.strip() if "updates" in not_compared else note + unknown
    left_out = len(reasons) - len(listed)
    more = web.paragraph(f"and {counted(left_out, 'more client')}" if left_out else "", "note")
    table = web.grid(listed, ("client", "cluster", "why"), numeric=(True, True, False))
    if len(listed) > MOST_NAMED:
        table = web.folded(f"{counted(len(reasons), 'client')}", table)
    return web.joined([heading, web.paragraph(note, "note"), table, more])


def _measured(per_client: Any) -> dict[str, list[str]]:
    """Columns of what clients were measured in, as texts."""
    kinds = {"test accuracy (%)": (100 * np.asarray(per_client.accuracy), ".1f"),
             "test loss": (np.asarray(per_client.loss), ".4g")}  # fmt: skip
    return {
        name: [f"{value:{digits}}" if np.isfinite(value) else NOTHING for value in values.tolist()]
        for name, (values, digits) in kinds.items()
        if np.isfinite(values).any()
    }


def _labels_of_cluster(label: int, labels: np.ndarray, counts: np.ndarray) -> list[object]:
    """A row of the table: shares as numbers on a ground that is the darker the larger they are."""
    of_cluster = counts[labels == label].sum(axis=0)
    shares = of_cluster / max(1, of_cluster.sum())
    cells = [
        Html(f'<span class="share" style="--share: {share:.2f}">{100 * share:.0f}</span>') if share else Html("")
        for share in shares.tolist()
    ]
    return [_cluster(label), int(np.sum(labels == label)), f"{of_cluster.sum():,}", *cells]


def _costs(summary: Mapping[str, Any]) -> Html:
    """What was sent and computed, in all and by client."""
    clients = figure(summary, "clients")
    kinds = (
        ("models sent to clients", "models_down", 1.0, 1),
        ("updates sent back", "models_up", 1.0, 1),
        ("megabytes sent to clients", "bytes_down", 1e-6, 2),
        ("megabytes sent back", "bytes_up", 1e-6, 2),
        ("gradients of mini-batches", "gradient_evaluations", 1.0, 1),
        ("losses of mini-batches", "loss_evaluations", 1.0, 1),
        ("clusterings on the server", "clusterings", 1.0, None),
        ("seconds of clustering", "clustering_seconds", 1.0, None),
        ("seconds of rounds", "run_seconds", 1.0, None),
        ("seconds of compilation", "compile_seconds", 1.0, None),
        ("client rounds per second", "client_rounds_per_second", 1.0, None),
    )
    lines = []
    for name, key, factor, decimals in kinds:
        value = figure(summary, key, factor)
        if value is not None:
            each = f"{value / clients:,.{decimals}f}" if clients and decimals is not None else ""
            lines.append((name, f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:,.3g}", each))
    headings = ("costs", "in all", "per client")
    return web.grid(lines, headings, numeric=(False, True, True)) if lines else Html("")


def _configuration(told: Told, name: str) -> Html:
    """The settings that have a value, and all options of the method."""
    found = []
    for heading, content in (("settings", told.settings), (f"options of {name}", told.options)):
        lines = [(key, as_text(value)) for key, value in flat(content)]
        found += [web.grid(lines, (heading, ""))] if lines else []
    return web.columns(found)


def flat(content: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Nested settings with a value, by the names that a reader sees.

    >>> dict(flat({"local": {"batch_size": 8, "epochs": None}, "rounds": 3}))
    {'local: batch size': 8, 'rounds': 3}
    """
    for key, value in content.items():
        name = f"{before}{str(key).replace('_', ' ')}"
        if isinstance(value, Mapping):
            yield from flat(value, f"{name}: ")
        elif value is not None and value != [] and value != ():
            yield name, value


def as_text(value: object) -> str:
    """A setting's value as a reader writes it.

    >>> as_text(True), as_text([0, 90]), as_text(1.0), as_text("cfl_gp")
    ('yes', '0, 90', '1', 'cfl_gp')
    """
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        plain = not any(isinstance(part, list | tuple | Mapping) for part in value)
        return ", ".join(map(as_text, value)) if plain else json.dumps(value)
    return f"{value:g}" if isinstance(value, float) else str(value)
