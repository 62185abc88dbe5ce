"""Clients of a population to be written: checked, one as the other, and brought to bytes."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedjax_cluster.data.sources import narrow, no_pixels, whole_tokens
from fedjax_cluster.data.stored import Layout
from fedjax_cluster.data.validation import check_finite, check_labels, check_lengths, check_pixels, check_tokens
from fedjax_cluster.options import shown
from fedjax_cluster.types import DatasetInfo


class ClientRows(NamedTuple):
    """What a client has; a tuple of the first two, four or five is taken too."""

    x: Any  # [n, ...]
    y: Any  # [n, ...]
    test_x: Any = None  # [m, ...]; None: some of the rows above are for testing
    test_y: Any = None
    group: int = -1  # the client's true distribution; −1: unknown


class Encoded(NamedTuple):
    """A client as it goes into the files."""

    entry: tuple[int, int, int, int]  # as CLIENT has it
    train: bytes
    test: bytes


class Encoder:
    """Clients checked and brought to bytes, each as the first one; counts their classes."""

    def __init__(self, beside: Path, info: DatasetInfo | None, test_fraction: float, seed: int):
        self.beside, self.info, self.test_fraction, self.seed = beside, info, test_fraction, seed
        self.layout: Layout | None = None
        self.classes = 0
        self.told = False  # of rows that look unscaled

    def encoded(self, clients: Iterable[Any], known: np.ndarray) -> Iterator[Encoded]:
        """The clients beyond those in `known` CLIENT[], which must be the same as before."""
        number = -1
        for number, client in enumerate(clients):
            try:
                found = self.encode(number, client)
            except ValueError as error:
                raise ValueError(f"client {number} of the population: {error}") from error
            if number >= len(known):
                yield found
            elif found.entry != known[number].item():
                raise ValueError(self._another(known, f"client {number} is another one now"))
        if number + 1 < len(known):
            raise ValueError(self._another(known, f"there are only {number + 1} clients now"))
        if number < 0:
            raise ValueError("there are no clients at all: give at least one")

    def _another(self, known: np.ndarray, what: str) -> str:
        return (
            f"{self.beside} holds {len(known)} clients of a write that was stopped, but {what}: give the same clients "
            "to go on, or remove that folder"
        )

    def encode(self, number: int, client: Any) -> Encoded:
        if not isinstance(client, tuple) or len(client) not in (2, 4, 5):
            raise ValueError(f"it is {shown(client)}: give (x, y), (x, y, test_x, test_y) or ClientRows")
        rows = ClientRows(*client)
        x, y = self._rows("x", rows.x), self._targets("y", rows.y)
        if rows.test_x is None:
            test_x, test_y = x[:0], y[:0]
            tests = round(self.test_fraction * len(x))
            if self.test_fraction and len(x) == len(y) > 1:
                order = np.random.default_rng([self.seed, number]).permutation(len(x))
                cut = min(max(1, tests), len(x) - 1)
                x, y, test_x, test_y = x[order[cut:]], y[order[cut:]], x[order[:cut]], y[order[:cut]]
        else:
            test_x, test_y = self._rows("test_x", rows.test_x), self._targets("test_y", rows.test_y)
        self._check(x, y, test_x, test_y)
        train, test = x.tobytes() + y.tobytes(), test_x.tobytes() + test_y.tobytes()
        group = -1 if rows.group is None else _whole(rows.group)
        return Encoded((len(x), len(test_x), group, zlib.crc32(test, zlib.crc32(train))), train, test)

    def _check(self, x: np.ndarray, y: np.ndarray, test_x: np.ndarray, test_y: np.ndarray) -> None:
        check_lengths(x, y)
        own = Layout(x.dtype, x.shape[1:], y.dtype, y.shape[1:])
        if self.layout is None:
            if self.info is not None and tuple(self.info.input_shape) != own.x_shape:
                raise ValueError(
                    f"inputs of shape {list(own.x_shape)}, but info.input_shape is {list(self.info.input_shape)}"
                )
            self.layout = own
        others = Layout(test_x.dtype, test_x.shape[1:], test_y.dtype, test_y.shape[1:])
        if len(test_x) != len(test_y):
            raise ValueError(f"{len(test_x)} rows of test_x and {len(test_y)} of test_y: give one label for each")
        for found in (own, others):
            if found != self.layout:
                raise ValueError(
                    f"rows of {_kind(found)} where the first client's are of {_kind(self.layout)}: give all alike"
                )
        task = self.task
        for inputs, targets in ((x, y), (test_x, test_y)) if len(test_x) else ((x, y),):
            check_finite("x", inputs)
            self.told |= check_pixels("x", inputs, inputs.ndim - 1, task, quiet=self.told)
            if task == "classification":
                if targets.dtype.kind not in "iu":
                    raise ValueError(f"y holds {targets.dtype}: number the classes from 0 on")
                self.classes = max(self.classes, int(targets.max()) + 1 if targets.size else 0)
                check_labels(targets, self.classes if self.info is None else self.info.num_classes)
            else:
                check_finite("y", targets)
            if task == "language" and self.info is not None:
                check_tokens(self.info.num_classes, x=inputs, y=targets)

    def _rows(self, name: str, value: Any) -> np.ndarray:
        array = narrow(name, value)
        if not array.ndim:
            raise ValueError(f"{name} is {shown(value)}: give an array with a row for each example")
        return whole_tokens(array) if self.info is not None and self.info.task == "language" else array

    def _targets(self, name: str, value: Any) -> np.ndarray:
        array = no_pixels(self._rows(name, value), None if self.info is None else self.info.task)
        # A column of classes is taken as `from_arrays` does.
        of_classes = array.dtype.kind in "iu" and (self.info is None or self.info.task == "classification")
        return array[:, 0] if of_classes and array.ndim == 2 and array.shape[1] == 1 else array

    @property
    def task(self) -> str:
        assert self.layout is not None
        if self.info is not None:
            return self.info.task
        return "regression" if self.layout.y_dtype.kind == "f" else "classification"


def _whole(group: Any) -> int:
    try:
        whole = int(group)
    except (TypeError, ValueError, OverflowError):
        whole = None
    if whole is None or whole != group or not -1 <= whole < 2**31:
        raise ValueError(f"its group is {shown(group)}: number groups from 0 on; -1 is one that is not known")
    return whole


def _kind(layout: Layout) -> str:
    x, y = (f"{dtype} {list(shape)}" for dtype, shape in (layout[:2], layout[2:]))
    return f"x {x} and y {y}"
