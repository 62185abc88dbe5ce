"""Benchmarks: `fedjax-cluster bench [SUITE...]`; comparisons with other software: `python -m benchmarks.peers`.

Every row states the work, its size, the median seconds, the FLOPs counted, the fraction of the rate of a large matrix
product timed in turn with it, and the ratio to a peer timed in turn with it.
"""

from __future__ import annotations

import importlib
import pathlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fedjax_cluster.bench import history, tables
from fedjax_cluster.bench.measure import Bench
from fedjax_cluster.files import check_writable, write_json
from fedjax_cluster.options import as_path

UNFINISHED = "-unfinished"  # at the end of a name

ATTEMPTS = 3
# Name of a module in this folder -> what its `run` measures.
SUITES = {
    "local": "local training of many clients",
    "convolution": "convolutions whose weights differ between clients, in their forms",
    "clustering": "every clustering function over M, K, d",
    "rounds": "whole runs of every method",
    "scale": "a hundred to a hundred thousand clients, and memory",
    "speed": "three small rows beside code that stays as it is, for --record and --check",
    "accelerator": "what is only worth running on a GPU or TPU",
}


def overview() -> str:
    """The suites, and where the others are, for the command's help."""
    suites = "; ".join(f"{name}: {about}" for name, about in SUITES.items())
    return (
        f"Suites: {suites}. Comparisons with PyTorch, pfl and Flower are not in the package: in a checkout, "
        "pip install -e '.[peers]' and python -m benchmarks.peers."
    )


def run_suites(
    names: Sequence[str] = (),
    *,
    smoke: bool = False,
    output: str | pathlib.Path | None = None,
    record: str | pathlib.Path | None = None,
    check: str | pathlib.Path | None = None,
    suites: Mapping[str, str] = SUITES,
    package: str = __name__,
) -> None:
    """Runs suites, prints their tables, and writes each as JSON where `output` is a folder.

    Args:
      names: of suites; all without any.
      smoke: tiny sizes, once each.
      output: where to write SUITE-BACKEND.json; of tiny sizes SUITE-BACKEND-smoke.json.
      record: a history to which the ratios are appended; see `history.record`.
      check: a history whose last record of this machine the ratios are compared with.
      suites: those there are.
      package: where their modules lie.

    Raises:
      ValueError: an unknown suite; with `check`, no history, or a row slower than recorded by the
        median of three runs.
    """
    for name in names:
        if name not in suites:
            raise ValueError(f"unknown suite {name!r}; suites: {', '.join(suites)}")
    if output is not None:
        check_writable(as_path("output", output))
    if check is not None:
        history.read(as_path("check", check))
    if record is not None:
        check_writable(as_path("record", record).resolve().parent)
        if as_path("record", record).exists():
            history.read(record)
    reports = [_run_suite(name, smoke, output, package) for name in names or suites]
    # Before they are recorded: they would be compared with themselves.
    if check is not None:
        _check(as_path("check", check), reports, lambda name: _run_suite(name, smoke, None, package))
    if record is not None:
        history.record(as_path("record", record), reports)
        print(f"recorded in {record}")


def _check(path: pathlib.Path, reports: list[dict[str, Any]], again: Callable[[str], dict[str, Any]]) -> None:
    """Other work on the machine can slow a row: what is slow is measured again, and the median counts."""
    found = history.slower(path, reports)
    if found is None:
        print(f"{path} has no record of this machine and these rows: nothing to compare with")
        return
    if found:
        suites = dict.fromkeys(name.partition(":")[0] for name in found)
        repeated = [again(suite) for _ in range(ATTEMPTS - 1) for suite in suites]
        found = history.slower(path, [*reports, *repeated])
    if found:
        rows = "; ".join(
            f"{name}: {now:.3g} times its peer's speed, recorded {then:.3g}" for name, (then, now) in found.items()
        )
        raise ValueError(f"slower than recorded in {path}: {rows}")
    print(f"as fast as recorded in {path}")


def _run_suite(name: str, smoke: bool, output: str | pathlib.Path | None, package: str) -> dict[str, Any]:
    bench = Bench(smoke=smoke)
    try:
        # Imported here: processes whose memory and start are measured must not load the libraries of other suites.
        importlib.import_module(f"{package}.{name}").run(bench)
    except BaseException:
        if output is not None and bench.rows:
            report = bench.report(name)
            path = _path(output, report)
            path = path.with_stem(path.stem + UNFINISHED)
            write_json(path, report)
            print(f"the rows so far are in {path}", file=sys.stderr)
        raise
    report = bench.report(name)
    print(tables.as_text(report))
    if output is not None:
        path = _path(output, report)
        write_json(path, report)
        path.with_stem(path.stem + UNFINISHED).unlink(missing_ok=True)
        print(f"left in {path}")
    return report


def _path(output: str | pathlib.Path, report: Mapping[str, Any]) -> pathlib.Path:
    return pathlib.Path(output) / f"{report['suite']}-{report['backend']}{'-smoke' if report['smoke'] else ''}.json"
