"""The tables of a run, of several methods, and of our results with a paper's."""

from __future__ import annotations

import math
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from fedjax_cluster.report import significance
from fedjax_cluster.report.histories import ARI, agreement_text
from fedjax_cluster.report.judged_by import HONEST, of_honest, value_of
from fedjax_cluster.report.names import counted, method_name, option_name, option_names, over_seeds, value_text
from fedjax_cluster.report.paper_rows import PaperRow, check_rows, is_known
from fedjax_cluster.report.table import NOT_FINITE, NOTHING, SAMPLE, Column, Number, Spread, Table, spread

MOST_NAMED = 12  # clients that stand out
COMPARABLE = ("scenario", "dataset", "clients")  # what runs have alike that are ranked and tested


class Runs(Protocol):
    """One method's runs over the seeds."""

    @property
    def label(self) -> str: ...

    @property
    def summaries(self) -> Sequence[Mapping[str, Any]]: ...  # what summary.json holds


def differing(runs: Sequence[Runs]) -> list[str]:
    """In what of their data runs differ, so that they are neither ranked nor tested: names of settings."""
    every = [each for method in runs for each in method.summaries]
    # Of a run that tells nothing of them they are not known.
    told = [own for method in runs if method.summaries and (own := dict(getattr(method, "data", {})))]
    if any("program" in each for each in told):  # of which nothing else is known
        return ["program"]
    found = [name for name in COMPARABLE if len({str(each.get(name)) for each in every}) > 1]
    if "scenario" in found:  # whose options differ all the same
        return found
    names = dict.fromkeys(name for each in told for name in each if name not in COMPARABLE)
    found += [option_name(name) for name in names if len({str(each.get(name)) for each in told}) > 1]
    return found


def comparison_table(runs: Sequence[Runs], cells: Mapping[str, Mapping[str, Any]] | None = None) -> Table:
    """Compares methods: accuracy, ARI, clusters, rounds, each seed, models sent and speed; means over the seeds.

    Of several methods over several seeds it has the mean ranks, and from three seeds on a paired test of the best
    method against each other; see `report.significance`.

    Args:
      runs: for each method its label and the summaries of its seeds. Where no run has an accuracy (regression), the
        test loss takes its place; where some clients are faulty accuracy and ARI are of the others. A method whose runs
        have all diverged has "not finite" there, one that `failed` (an attribute, seed -> reason; may be missing)
        "failed", and the reasons in a column or beneath the table. Seeds that are in `not_ended` as well (may be
        missing) were not run to their end: nobody is ranked by them. What decides the data, by name, may be in `data`.
      cells: of a sweep, label -> option -> value: the options are the first columns, and nothing is ranked or tested.

    Raises:
      ValueError: no runs, a method without a summary or a failure, or a figure that is no number.
    """
    if not runs:
        raise ValueError("there are no runs to compare; give those of one method at least")
    failed = [dict(getattr(method, "failed", {})) for method in runs]
    if empty := [method.label for method, of in zip(runs, failed, strict=True) if not (method.summaries or of)]:
        raise ValueError(f"{empty[0]} has no summaries; give one for each seed")
    every = [summary for method in runs for summary in method.summaries]
    counts = [len(method.summaries) + len(of) for method, of in zip(runs, failed, strict=True)]

    def column(read: Callable[[Mapping[str, Any]], float | None], decimals: int, deviation: bool = False):
        values = [[*map(read, method.summaries), *(None for _ in of)] for method, of in zip(runs, failed, strict=True)]
        found = [spread(of_seeds) for of_seeds in values]
        if not deviation:
            found = [value and Spread(value.mean) for value in found]
            # Whole numbers in all rows need no point.
            decimals = decimals if any(value and value.mean % 1 for value in found) else 0
        pairs = zip(found, values, strict=True)
        return [value and Number(*value, decimals=decimals, seeds=_share(of_seeds)) for value, of_seeds in pairs]

    accuracy, agreement = (of_honest(name, every) for name in ("accuracy", ARI))
    higher = any(figure(each, accuracy) is not None for each in every)
    faulty, honest = (name.endswith(HONEST) for name in (accuracy, agreement))
    name, heading, factor, decimals = (
        (accuracy, f"{'honest ' * faulty}test accuracy (%)", 100, 1) if higher else ("test_loss", "test loss", 1, 4)
    )
    best = column(lambda s: quality(s, name, factor), decimals, True)
    lost = [sum(map(diverged, method.summaries)) for method in runs]
    instead = [Number(math.nan) if count else "failed" if of else None for count, of in zip(lost, failed, strict=True)]
    seeds, values, ran = _by_seed(runs, failed, lambda s: quality(s, name, factor))
    unequal = len({str(summary.get("rounds")) for summary in every}) > 1
    swept = dict.fromkeys(option for values in (cells or {}).values() for option in values)
    apart = [] if cells else differing(runs)
    ranks, tests, told = ({}, {}, "") if cells or apart else _against_one_another(values, ran, higher)
    with_value = np.isfinite(values).sum(axis=1)
    if not (cells or apart) and len(runs) > 1:
        best = _with_best_marked(best, significance.best_of(values, higher=higher), with_value)
    columns = {
        Column(heading, SAMPLE): [number or other for number, other in zip(best, instead, strict=True)],
        Column(f"{'honest ' * honest}ARI", SAMPLE): column(lambda s: figure(s, agreement), 2, True),
        **(
            {Column("accuracy of all (%)", SAMPLE): column(lambda s: quality(s, "accuracy", 100), 1, True)}
            if faulty
            else {}
        ),
        **ranks,
        **tests,
        **({Column("rounds"): column(lambda s: figure(s, "rounds"), 1)} if unequal and "rounds" not in swept else {}),
        Column("clusters"): column(lambda s: figure(s, "num_clusters"), 1),
        Column("final after round"): column(lambda s: figure(s, "first_round_of_final_clustering"), 1),
        **{
            Column(f"seed {seed}", group="seeds"): [
                Number(value, decimals=decimals) if is_known(value) else None for value in of
            ]
            for seed, of in zip(seeds, values.T, strict=True)
            if len(seeds) > 1
        },
        Column("models down per client", group="costs"): column(lambda s: _per_client(s, "models_down"), 1),
        Column("models up per client", group="costs"): column(lambda s: _per_client(s, "models_up"), 1),
        Column("client rounds per second", group="costs"): column(_speed, 0),
    }
    if any(failed):
        columns[Column("failed", group="failed")] = [*map(_reasons, failed, counts)]
    names = [method_name(method.label) for method in runs]
    shown = names
    if len(set(counts)) > 1 and not cells:
        shown = [f"{name} ({counted(n, 'seed')})" for name, n in zip(names, counts, strict=True)]
    ended = ", ".join(f"{name} {n} of {all_}" for name, n, all_ in zip(names, lost, counts, strict=True) if n)
    partly = any(isinstance(number, Number) and number.seeds for cells in columns.values() for number in cells)
    notes = [
        f"mean ± sample standard deviation {over_seeds(counts)}" if max(counts) > 1 else "",
        "in brackets how many seeds have the figure" if partly else "",
        f"runs that ended not finite: {ended}" if ended else "",
        f"not ranked, as runs differ in {' and '.join(apart)}" if apart else "",
        told,
        "honest: of the clients that are not faulty" if faulty or honest else "",
    ]
    leading = {Column("method"): shown}
    if cells:
        found = {column.name for column in columns}
        leading = {
            # The number of clusters can be both an option and a result.
            Column(name + " (given)" * (name in found)): [value_text(cells[of.label].get(each)) for of in runs]
            for each, name in option_names(swept).items()
        }
    rows = tuple(zip(*leading.values(), *columns.values(), strict=True))
    caption = f"Comparison of {counted(len(runs), 'setting' if cells else 'method')} {over_seeds(counts)}".rstrip()
    bold = "the best mean" + " of those with the most seeds" * (len({*with_value.tolist()} - {0}) > 1)
    return Table("", (*leading, *columns), rows, "; ".join(filter(None, notes)), len(leading), caption, bold)


def _with_best_marked(
    numbers: Sequence[Number | None], best: int | None, with_value: np.ndarray
) -> list[Number | None]:
    """Marks a row's number, and those of as many seeds that do not differ from it in the digits shown."""
    if best is None:
        return [*numbers]
    shown = ["" if number is None else Number(number.mean, decimals=number.decimals).text() for number in numbers]
    return [
        number and number._replace(best=bool(count == with_value[best] and text == shown[best]))
        for number, text, count in zip(numbers, shown, with_value, strict=True)
    ]


def _by_seed(
    runs: Sequence[Runs], failed: Sequence[Mapping[int, str]], read: Callable[[Mapping[str, Any]], float | None]
) -> tuple[list[int], np.ndarray, np.ndarray]:
    """The seeds; a figure of each method and seed [methods, seeds], NaN where there is none; and whether it was run.

    Where summaries do not tell their seeds, or not apart, they are numbered in their order.
    """
    named: list[list[Any]] = [[summary.get("seed") for summary in method.summaries] for method in runs]
    told = all(len(set(of)) == len(of) and None not in of for of in named)
    named = named if told else [list(range(len(of))) for of in named]
    seeds = sorted({seed for of in (*named, *failed) for seed in of})
    values = np.full((len(runs), len(seeds)), np.nan)
    ran = np.asarray(
        [
            np.isin(seeds, [*of, *(seed for seed in without if seed not in getattr(method, "not_ended", ()))])
            for of, without, method in zip(named, failed, runs, strict=True)
        ]
    )
    for row, (of, method) in enumerate(zip(named, runs, strict=True)):
        for seed, summary in zip(of, method.summaries, strict=True):
            value = read(summary)
            values[row, seeds.index(seed)] = np.nan if value is None else value
    return seeds, values, ran


def _against_one_another(
    values: np.ndarray, ran: np.ndarray, higher: bool
) -> tuple[dict[Column, list], dict[Column, list], str]:
    """The columns of mean ranks and of tests against the best, if there are such, and what a note says of them."""
    methods, seeds = values.shape
    best = significance.best_of(values, higher=higher)
    if methods < 2 or seeds < 2 or best is None:
        return {}, {}, ""
    known, common = np.asarray(np.isfinite(values).any(axis=1)), np.asarray(ran.all(axis=0))
    ranks, told = {}, ""
    if common.any():
        found = iter(significance.mean_ranks(values[known][:, common], higher=higher))
        over = "" if common.all() else f"{common.sum()} of {seeds}"
        ranks = {
            Column("mean rank"): [
                Number(float(next(found)), decimals=1, seeds=over) if there else None for there in known
            ]
        }
        told = "rank 1 is best, runs without a value rank last; "
    tests: list[Any] = [
        found and Number(found.p, decimals=3, seeds="" if found.pairs == seeds else f"{found.pairs} of {seeds}")
        for found in significance.paired_tests(values, best)
    ]
    if not any(tests):
        return ranks, {}, told.removesuffix("; ")
    tests[best] = "best"
    told += f"p: {significance.TEST} against the best over the seeds of both, not adjusted for the number of methods"
    return ranks, {Column("p against best"): tests}, told


def _reasons(failed: Mapping[int, str], count: int) -> str:
    """Why runs failed, in one line; seeds are named where not all of them failed of the same."""
    reasons: dict[str, list[int]] = {}
    for seed, reason in failed.items():
        reasons.setdefault(reason, []).append(seed)
    if len(failed) == count and len(reasons) == 1:
        return next(iter(reasons))
    return "; ".join(f"seed {', '.join(map(str, seeds))}: {reason}" for reason, seeds in reasons.items())


def recipe_table(title: str, rows: Sequence[PaperRow]) -> Table:
    """Our values, the paper's, and the difference.

    Args:
      title: what is reproduced.
      rows: one value each. Rows of one metric stand together, with as many digits as its values need.

    Raises:
      ValueError: no rows, or not a single value.
    """
    check_rows(rows)
    lines = []
    for metric in dict.fromkeys(row.metric for row in rows):
        alike = [row for row in rows if row.metric == metric]
        decimals = _decimals(alike)
        for row in alike:
            share = "" if row.valued is None else f"{row.valued} of {row.seeds}"
            ours = _number(row.ours, row.ours_std, decimals, share)
            paper = _number(row.paper, row.paper_std, decimals)
            difference = Number(row.ours - row.paper, None, decimals, True) if ours and paper else None
            lines.append((metric, row.column, method_name(row.row), ours, paper, difference))
    deviations = {"ours": SAMPLE, "paper": "std"}
    names = ("metric", "setting", "method", "ours", "paper", "difference")
    over = over_seeds(row.seeds for row in rows if is_known(row.ours_std))
    notes = [f"ours: mean ± sample standard deviation {over}; the paper's as printed" if over else ""]
    notes += ["in brackets how many seeds have a value"] * any(row.valued is not None for row in rows)
    columns = tuple(Column(name, deviations.get(name, "")) for name in names)
    return Table(title, columns, tuple(lines), "; ".join(filter(None, notes)))


def summary_table(
    summary: Mapping[str, Any], directory: str | pathlib.Path | None = None, outlying: Sequence[int] = ()
) -> Table:
    """One run in some ten lines of two columns without headings; what it has no figure of is left out.

    A run that has diverged says so in place of figures of the models that it left behind.

    Args:
      summary: what summary.json holds.
      directory: where the run was left.
      outlying: the clients that stand out, of whom its page tells why.

    Raises:
      ValueError: a figure that is no number.
    """

    def line(template: str, *names: str, factor: float = 1.0) -> str | None:
        """The template filled with figures; None where one is missing."""
        values = [figure(summary, name, factor) for name in names]
        return None if None in values else template.format(*values)

    lost = f"{NOT_FINITE}: the run has diverged" if diverged(summary) else None
    accuracy = line("{:.1f} %", "accuracy", factor=100)
    names = "accuracy_std", "accuracy_worst_decile"
    clients = line("std over clients {:.1f}, worst decile {:.1f} %", *names, factor=100)
    named = {name: of_honest(name, [summary]) for name in ("accuracy", ARI)}
    told = {name: other for name, other in named.items() if name != other}
    honest = line("of the honest {:.1f} %", told["accuracy"], factor=100) if "accuracy" in told else None
    agreement = None if (known := figure(summary, ARI)) is None else agreement_text(known)
    if agreement and (ideal := line("{:.0f}", "first_round_of_ideal_agreement")):
        agreement += f", first after round {ideal}" if agreement == "1.00" else f" (1.00 first after round {ideal})"
    agreement = agreement and agreement + of_clustered(summary)
    if agreement and ARI in told:
        agreement += line("; of the honest {:.2f}", told[ARI]) or ""
    clusterings = figure(summary, "clusterings")
    clustering = None if clusterings is None else counted(clusterings, "time")
    if clustering and (each := line("{:,.3g} ms each", "seconds_per_clustering", factor=1e3)):
        clustering += f", {each}"
    sent = [_per_client(summary, name) for name in ("models_down", "models_up")]
    lines = {
        "diverged": line("in round {:.0f}", "first_round_not_finite"),
        "training loss": lost,
        "test accuracy": None if lost else accuracy and "; ".join(filter(None, (accuracy, clients, honest))),
        "balanced accuracy": None if lost else line("{:.1f} %", "balanced_accuracy", factor=100),
        "test loss": None if lost else line("{:.4g}", "test_loss"),
        "test perplexity": None if lost else line("{:.4g}", "perplexity"),
        "normalized MSE": None if lost else line("{:.4g}", "nmse"),
        "adjusted Rand index": agreement,
        "clusters": line("{:.0f}", "num_clusters"),
        "final clustering": line("after round {:.0f}", "first_round_of_final_clustering"),
        "privacy": _budget(summary),
        "rejected updates": line("{:,.0f}", "num_rejected") if figure(summary, "num_rejected") else None,
        "models per client": f"{sent[0]:,.1f} down, {sent[1]:,.1f} up" if None not in sent else None,
        "traffic": line("{:,.1f} MB down, {:,.1f} MB up", "bytes_down", "bytes_up", factor=1e-6),
        "mini-batches": line("{:,.0f} gradients, {:,.0f} losses", "gradient_evaluations", "loss_evaluations"),
        "server's clustering": clustering if figure(summary, "clusterings") else None,
        "speed": line("{:,.0f} client-rounds per second", "client_rounds_per_second"),
        "time": line("{:.1f} s compiling, {:.1f} s running", "compile_seconds", "run_seconds"),
        "standing out": _named(outlying) if outlying else None,
        "left in": None if directory is None else str(directory),
    }
    title = f"{method_name(str(summary.get('algorithm', 'run')))} on {summary.get('scenario', 'unknown data')}"
    if (clients := figure(summary, "clients")) is not None:
        rounds = figure(summary, "rounds")
        done = f"{NOTHING} rounds" if rounds is None else rounds_text(summary)
        title += f": {counted(clients, 'client')}, {done}, seed {summary.get('seed', NOTHING)}"
    rows = tuple((name, text) for name, text in lines.items() if text)
    return Table(title, (Column(""), Column("")), rows)


def rounds_text(summary: Mapping[str, Any]) -> str:
    """How many rounds a run has; of one that was interrupted, of how many.

    >>> rounds_text({"rounds": 40}), rounds_text({"rounds": 1651, "rounds_asked": 9000})
    ('40 rounds', 'interrupted after 1,651 of 9,000 rounds')
    """
    done, asked = figure(summary, "rounds") or 0, figure(summary, "rounds_asked")
    if asked is not None and done >= asked:
        return f"interrupted before the evaluation of its last of {counted(asked, 'round')}"
    return counted(done, "round") if asked is None else f"interrupted after {done:,.0f} of {counted(asked, 'round')}"


def of_clustered(summary: Mapping[str, Any]) -> str:
    """Of how many clients an agreement with the groups is, where others are in no cluster yet."""
    missing, clients = figure(summary, "num_unclustered"), figure(summary, "clients")
    return f", of {clients - missing:.0f} of {counted(clients, 'client')}" if missing and clients else ""


def figure(summary: Mapping[str, Any], name: str, factor: float = 1.0) -> float | None:
    """A figure of a summary times `factor`; None where there is no finite one. Rounds count from 1, as in pictures.

    Raises:
      ValueError: what stands there is no number.
    """
    value = value_of(summary, name)
    if not isinstance(value, int | float | np.floating | np.integer | None):
        raise ValueError(f"a summary's {name} is {value!r}, which is no number; is its summary.json damaged?")
    known = None if value is None else float(value)
    return factor * (known + name.startswith("first_round")) if is_known(known) else None


def diverged(summary: Mapping[str, Any]) -> bool:
    """Whether a run ended without a finite training loss because its updates were rejected.

    Not where that is of its last cohorts alone, such as of clients who drop out: the models are as they were.
    """
    lost = "train_loss" in summary and figure(summary, "train_loss") is None and figure(summary, "num_rejected") != 0
    told = "first_round_not_finite"
    return lost and (told not in summary or figure(summary, told) is not None)


def quality(summary: Mapping[str, Any], name: str, factor: float = 1.0) -> float | None:
    """A figure of the models; None of those that a run left behind when it diverged."""
    return None if diverged(summary) else figure(summary, name, factor)


def _share(values: Sequence[float | None]) -> str:
    """How many of the seeds have a value, where some have one and others none."""
    known = sum(map(is_known, values))
    return f"{known} of {len(values)}" if 0 < known < len(values) else ""


def _per_client(summary: Mapping[str, Any], name: str) -> float | None:
    clients = figure(summary, "clients")
    return figure(summary, name, 1 / clients) if clients else None


def _named(clients: Sequence[int]) -> str:
    """Some clients, of whom report.html tells more."""
    more = f" and {len(clients) - MOST_NAMED} more" if len(clients) > MOST_NAMED else ""
    word = "client" if len(clients) == 1 else "clients"
    return f"{word} {', '.join(map(str, clients[:MOST_NAMED]))}{more}: see report.html"


def _budget(summary: Mapping[str, Any]) -> str | None:
    """ε at δ of a private run."""
    spent = summary.get("privacy")
    if not isinstance(spent, Mapping):
        return None
    known = figure(spent, "epsilon")
    epsilon = "∞, without noise" if known is None else f"{known:.3g}"
    return f"ε = {epsilon} at δ = {spent.get('delta', math.nan):g}, any one client replaced"


def _speed(summary: Mapping[str, Any]) -> float | None:
    return round(figure(summary, "client_rounds_per_second") or 0) or None


def _number(mean: float, std: float, decimals: int, seeds: str = "") -> Number | None:
    return Number(mean, std if is_known(std) else None, decimals, seeds=seeds) if is_known(mean) else None


def _decimals(rows: Sequence[PaperRow]) -> int:
    """Digits after the point: none for whole numbers, three for small ones, else two."""
    values = [value for row in rows for value in (row.ours, row.ours_std, row.paper) if is_known(value)]
    if not any(value % 1 for value in values):
        return 0
    largest = max(abs(value) for value in values)
    return 3 if largest < 0.9 else 2 if largest < 1000 else 1
