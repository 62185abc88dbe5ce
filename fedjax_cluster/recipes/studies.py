"""The parts of studies, which are not done again, and rows of what several seeds gave: a mean and its spread."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from fedjax_cluster.experiments.recipe import Kept
from fedjax_cluster.report.paper_rows import NAN, PaperRow, Tolerance, usual_tolerance


def rows_over_seeds(
    row: str,
    column: str,
    found: Sequence[Mapping[str, float]],
    dataset: str,
    paper: Mapping[str, float] | None = None,
    tolerances: Mapping[str, Tolerance] | None = None,
) -> list[PaperRow]:
    """A row for each quantity, its mean and deviation over the seeds that have a value.

    Args:
      row, column: as of a table.
      found: of each seed, metric with its unit -> value, NaN where it has none.
      dataset: that they ran on.
      paper: metric -> the paper's value.
      tolerances: metric -> how far ours may be from it; by default `usual_tolerance`'s.

    >>> [one] = rows_over_seeds("CFL", "XOR", [{"ARI": 1.0}, {"ARI": 0.8}], "synthetic", {"ARI": 1.0})
    >>> one.ours, round(one.ours_std, 3), one.paper, one.seeds, one.tolerance.amount
    (0.9, 0.141, 1.0, 2, 0.05)
    """
    rows = []
    for metric in found[0]:
        values = np.asarray([each[metric] for each in found], np.float64)
        known = values[np.isfinite(values)]
        rows.append(
            PaperRow(
                row,
                column,
                metric,
                float(known.mean()) if len(known) else NAN,
                float(known.std(ddof=1)) if len(known) > 1 else NAN,
                (paper or {}).get(metric, NAN),
                seeds=len(values),
                dataset=dataset,
                valued=len(known) if 0 < len(known) < len(values) else None,
                tolerance=(tolerances or {}).get(metric) or usual_tolerance(metric),
            )
        )
    return rows


def once(kept: Kept, name: str, do: Callable[[], Any]) -> Any:
    """What a part of a study gives, done where it is not kept.

    Args:
      kept: see `Study`.
      name: of the part, a file's.
      do: gives numbers, or lists or dicts by text of them.

    >>> kept = {"seed 0": 1.0}
    >>> once(kept, "seed 0", lambda: 5.0), once(kept, "seed 1", lambda: 2.0)
    (1.0, 2.0)
    """
    if name not in kept:
        kept[name] = do()
    return kept[name]


def of_seeds(kept: Kept, seeds: int, do: Callable[[int], Any], drawn: int = 0) -> list[Any]:
    """What the seeds give; the one whose pictures are drawn is done last and not kept, as its pictures are not.

    >>> kept, done = {}, []
    >>> of_seeds(kept, 3, lambda seed: done.append(seed) or 10 * seed), done, list(kept)
    ([0, 10, 20], [1, 2, 0], ['seed1', 'seed2'])
    """
    found = {seed: once(kept, f"seed{seed}", functools.partial(do, seed)) for seed in range(seeds) if seed != drawn}
    return [found[seed] if seed in found else do(seed) for seed in range(seeds)]
