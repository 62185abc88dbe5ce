"""The history of speeds: ratios to peers by commit and machine, in a file kept with the code."""

from __future__ import annotations

import datetime
import json
import pathlib
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from fedjax_cluster.files import write_json
from fedjax_cluster.provenance import commit

# Ratios of processor seconds differ by up to 8 % from run to run, medians of three by some 4 %; but from hour to hour,
# on a machine that others use too, by a seventh: k-means of one commit had 0.26 to 0.34 of plain JAX in a day.
TOLERANCE = 0.15
RECORDS = 3
SAME = ("processor", "cores", "device")


def ratios(report: Mapping[str, Any]) -> dict[str, float]:
    """Row -> the peer's processor seconds over ours, of a suite's report."""
    return {
        f"{report['suite']}: {row['what']}, {row['size']}": round(row["processor_ratio"], 3)
        for row in report["rows"]
        if row["processor_ratio"] is not None
    }


def record(path: str | pathlib.Path, reports: Sequence[Mapping[str, Any]]) -> None:
    """Appends commit, date, machine, versions and ratios of a call of `bench` to a history.

    Args:
      path: a JSON file; made where there is none.
      reports: of suites on one machine.

    Raises:
      ValueError: the file is no history.
    """
    path = pathlib.Path(path)
    found = {name: ratio for report in reports for name, ratio in ratios(report).items()}
    machine = {name: reports[0][name] for name in SAME}
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    entry = {
        "commit": commit(path.resolve().parent),
        "date": today,
        **machine,
        "versions": reports[0]["versions"],
        "ratios": found,
    }
    write_json(path, [*(read(path) if path.exists() else []), entry])


def slower(path: str | pathlib.Path, reports: Sequence[Mapping[str, Any]]) -> dict[str, tuple[float, float]] | None:
    """Rows slower by more than `TOLERANCE` than in the last records of this machine: name -> (ratio then, now).

    Args:
      path: a history.
      reports: of suites; of several of one suite the median counts, as of the last three records.

    Returns:
      None where the history has no such rows of such a machine.

    Raises:
      ValueError: there is no such file, or it is no history.
    """
    entries = [entry for entry in read(path) if all(entry[name] == reports[0][name] for name in SAME)]
    measured = [ratios(report) for report in reports]
    now = {name: _median(measured, name) for found in measured for name in found}
    recorded = [entry["ratios"] for entry in entries]
    then = {name: _median(recorded, name, RECORDS) for found in recorded for name in found if name in now}
    if not then:
        return None
    return {name: (then[name], now[name]) for name in then if now[name] < (1 - TOLERANCE) * then[name]}


def _median(records: Sequence[Mapping[str, float]], name: str, last: int = 0) -> float:
    return statistics.median([record[name] for record in records if name in record][-last:])


def read(path: str | pathlib.Path) -> list[dict[str, Any]]:
    """The records, oldest first."""
    path = pathlib.Path(path)
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
        for entry in entries:
            _ = [entry[name] for name in SAME], {name: float(ratio) for name, ratio in entry["ratios"].items()}
        return entries
    except FileNotFoundError:
        raise ValueError(f"there is no history {path} to check; bench --record {path} begins one") from None
    except (ValueError, TypeError, KeyError, AttributeError, IsADirectoryError) as error:
        raise ValueError(f"{path} is no history of speeds ({error}); give what bench --record wrote") from None
