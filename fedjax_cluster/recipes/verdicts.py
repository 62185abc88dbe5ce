"""Whether a figure of a paper was reached: fixed rules, and no person's judgement."""

from __future__ import annotations

import math
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from fedjax_cluster.report.paper_rows import Tolerance, usual_tolerance

RULES = """- **reached**: the mean of at least two seeds is within the tolerance of the paper's value, on its data set.
- **partly**: within the tolerance, but of one seed, of seeds some of which have no value, of a number of seeds that was
  not kept, or on another data set than the paper's; or better than the paper's value by more than the tolerance.
- **not**: worse than the paper's value by more than the tolerance.
- No verdict where the paper prints no number or no tolerance is stated, on an accuracy on another data set than the
  paper's, which says nothing of the paper's, and on fewer rounds than the paper's where some seeds did not get there:
  they are the mean of those that did.
- The tolerance is stated in the recipe before it runs: 2 points of a percentage, 0.05 of an ARI, a Rand index or a
  purity, none of a number of clusters or splits; other ones are 5 of a "first round at ARI 1", 0.005 of CFL-GP's test
  losses and 0.05 of the norms and cosines of CFL's Fig. 2.
- A bound ("> 0") is reached where the mean lies beyond it by more than the seeds' deviation, and partly by less."""
ORDER = ("reached", "partly", "not")
NUMBER = re.compile(r"(>?)\s*([-−]?\d+(?:\.\d+)?)(?: \(.*\))?")  # "> 0", "95.1 (public code)"
ROUNDING = 1e-6


class Verdict(NamedTuple):
    """One of `ORDER`, or "" for none; and why."""

    word: str
    why: str = ""

    def __str__(self) -> str:
        return f"**{self.word}**{f' ({self.why})' if self.why else ''}" if self.word else "–"


def verdict(row: Mapping[str, Any]) -> Verdict:
    """The verdict on a row of the results.

    >>> str(verdict({"quantity": "ARI", "ours": 0.97, "seeds": 3, "paper_value": 1.0}))
    '**reached**'
    >>> str(verdict({"quantity": "ARI", "ours": 0.97, "seeds": 1, "paper_value": 1.0}))
    '**partly** (one seed)'
    """
    ours, printed = mean(row["ours"]), _printed(row.get("paper_value"))
    stated = row.get("tolerance")
    tolerance = None if stated == [] else Tolerance(*stated) if stated else usual_tolerance(row["quantity"])
    elsewhere = row.get("paper_dataset") not in (None, row.get("dataset"))
    if ours is None or printed is None or (elsewhere and "(%)" in row["quantity"]):
        return Verdict("")
    bound, value = printed
    if bound:
        worse, better = not ours > value, False
    elif tolerance is None:
        return Verdict("")
    else:
        ahead = {"higher": ours - value, "lower": value - ours, "neither": -abs(ours - value)}[tolerance.better]
        allowed = tolerance.amount + ROUNDING
        worse, better = ahead < -allowed, ahead > allowed
    if worse:
        return Verdict("not")
    runs, valued = seeds(row["seeds"], row["ours"])
    if better and runs is not None and valued < runs and tolerance is not None and tolerance.better == "lower":
        return Verdict("")
    reasons = ["better"] if better else []
    if bound and runs != 1 and not ours - (row.get("ours_std") or deviation(row["ours"])) > value:
        reasons.append("less than the deviation")
    reasons += ["seeds not kept"] if runs is None else ["one seed"] if runs < 2 else []
    reasons += [f"{valued} of {runs} seeds"] if runs is not None and valued < runs else []
    reasons += ["other data"] if elsewhere else []
    return Verdict("partly" if reasons else "reached", ", ".join(reasons))


def counted_verdicts(found: Iterable[Verdict]) -> str:
    """How many of each, in a fixed order.

    >>> counted_verdicts([Verdict("not"), Verdict("reached"), Verdict(""), Verdict("not")])
    '1 reached, 2 not, 1 without'
    """
    count = Counter(each.word or "without" for each in found)
    return ", ".join(f"{count[word]} {word}" for word in (*ORDER, "without") if count[word])


def mean(ours: Any) -> float | None:
    """Of a row's value or values; None where there is no number."""
    if isinstance(ours, list):
        values = [value for value in ours if value is not None and math.isfinite(value)]
        return statistics.fmean(values) if values else None
    return ours if isinstance(ours, int | float) and math.isfinite(ours) else None


def deviation(ours: Any) -> float:
    """The sample's, of a row's values; 0 of one."""
    values = [v for v in ours if v is not None and math.isfinite(v)] if isinstance(ours, list) else []
    return statistics.stdev(values) if len(values) > 1 else 0.0


def seeds(kept: Any, ours: Any = None) -> tuple[int | None, int]:
    """How many seeds a row is of, None where that was not kept; and how many of them have a value.

    >>> seeds(3), seeds([4, 5]), seeds("9 of 10 seeds"), seeds("50 draws"), seeds(None)
    ((3, 3), (2, 2), (10, 9), (50, 50), (None, 0))
    """
    if isinstance(kept, str):
        numbers = list(map(int, re.findall(r"\d+", kept)))
        return numbers[-1], numbers[0]
    runs = len(kept) if isinstance(kept, list) else kept
    valued = sum(value is not None for value in ours) if isinstance(ours, list) else runs
    return runs, valued or 0


def _printed(value: Any) -> tuple[bool, float] | None:
    """A paper's value, and whether it is a bound from below; None for words."""
    if isinstance(value, str):
        found = NUMBER.fullmatch(value)
        return (bool(found[1]), float(found[2].replace("−", "-"))) if found else None
    return None if value is None or not math.isfinite(value) else (False, float(value))
