"""A run's clients in a file, a row each, written some at a time."""

from __future__ import annotations

import contextlib
import csv
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from fedjax_cluster.files import atomic_file
from fedjax_cluster.simulation.history import NOT_FINITE

Table = dict[str, np.ndarray]


def write_clients(
    path: pathlib.Path,
    columns: Mapping[str, np.ndarray],
    chunks: Iterable[tuple[np.ndarray, Mapping[str, np.ndarray]]],
    group_names: Sequence[str] = (),
) -> pathlib.Path:
    """Writes clients to a `.csv` or `.parquet` file, which is there once it is whole.

    Args:
      path: where.
      columns: of all M clients, arrays [M].
      chunks: numbers i64[n] and metrics f32[n] of some clients at a time; numbers beyond M are left out.
      group_names: what the numbers of the column `group` are called; nothing where one has no name.

    Raises:
      ValueError: another kind of file.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     chunks = [(np.asarray([client]), {"accuracy": np.asarray([client / 2])}) for client in (0, 1)]
    ...     file = write_clients(pathlib.Path(folder, "c.csv"), {"cluster": np.asarray([3, 4])}, chunks)
    ...     file.read_text().split()
    ['client,cluster,accuracy', '0,3,0.0', '1,4,0.5']
    """
    kinds = {".csv": _csv, ".parquet": _parquet}
    if path.suffix not in kinds:
        raise ValueError(f"path is {str(path)!r}; give a file ending in {' or '.join(kinds)}")
    clients = len(next(iter(columns.values())))
    with atomic_file(path) as beside, kinds[path.suffix](beside) as write:
        for numbers, metrics in chunks:
            there = numbers < clients
            numbers = numbers[there]
            figures = {name: value[there] for name, value in metrics.items() if name != NOT_FINITE}
            found = {"client": numbers, **{name: value[numbers] for name, value in columns.items()}}
            if "group" in found and group_names:
                named = (found["group"] >= 0) & (found["group"] < len(group_names))
                found["group_name"] = np.array([*group_names, ""])[np.where(named, found["group"], len(group_names))]
            # A metric may be called as a column is.
            write({**found, **{f"{name} (metric)" if name in found else name: of for name, of in figures.items()}})
    return path


@contextlib.contextmanager
def _csv(path: pathlib.Path) -> Iterator[Callable[[Table], Any]]:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")

        def write(table: Table) -> None:
            if not file.tell():
                writer.writerow(table)
            # As texts, so that floats have no more digits than they tell.
            writer.writerows(zip(*(column.astype(str) for column in table.values()), strict=True))

        yield write


@contextlib.contextmanager
def _parquet(path: pathlib.Path) -> Iterator[Callable[[Table], Any]]:
    import pyarrow  # optional
    from pyarrow import parquet

    with contextlib.ExitStack() as stack:
        writers: list[Any] = []

        def write(table: Table) -> None:
            found = pyarrow.table(table)
            if not writers:
                writers.append(stack.enter_context(parquet.ParquetWriter(path, found.schema)))
            writers[0].write_table(found)

        yield write
