"""Rows that lie on disk: arrays of a population of which a few clients at a time are read."""

from __future__ import annotations

import collections
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from array_record.python.array_record_module import ArrayRecordReader

from fedjax_cluster.files import digest
from fedjax_cluster.options import reason_of
from fedjax_cluster.types import ClientData, Federation

# A record of the index of clients: training and test rows, true group (−1: unknown), and the checksum of the rows.
CLIENT = np.dtype([("train", "<i4"), ("test", "<i4"), ("group", "<i4"), ("crc", "<u4")])
PARTS = ("train", "test")
ALIGNED = 64  # bytes
MOST_OPEN = 256  # files; a process may have some 1 000
READ_BYTES = 2**24  # of records brought at a time, beside the arrays that they go into
READING = {"options": "readahead_buffer_size:0", "file_reader_buffer_size": 32768}  # as few bytes as a client has


class Layout(NamedTuple):
    """The dtype and shape of one row."""

    x_dtype: np.dtype
    x_shape: tuple[int, ...]
    y_dtype: np.dtype
    y_shape: tuple[int, ...]


def shard_file(part: str, number: int) -> str:
    """The name of a shard's file.

    >>> shard_file("train", 3)
    'train-00003.arrayrecord'
    """
    return f"{part}-{number:05d}.arrayrecord"


class Store:
    """Clients' rows that are read when they are needed, of files or made of others'; any thread may read."""

    folder: Path
    layout: Layout
    digest: str
    counts: Mapping[str, np.ndarray]  # part -> i32[M], rows of each client
    longest: Mapping[str, int]  # part -> N
    group: np.ndarray | None = None  # i32[M], true groups as far as they were written with the rows

    def read(self, part: str, clients: Any) -> ClientData:
        """Clients' rows, padded with zeros.

        Args:
          part: "train" or "test".
          clients: i[C]; numbers beyond the last client give no rows.

        Returns:
          x [C, N, ...], y [C, N, ...] and num_examples i32[C], with N the rows of the longest client of all.

        Raises:
          ValueError: a file is damaged or gone.
        """
        return ClientData(*self._read(part, np.asarray(clients, np.int64), ("x", "y")))

    def rows(self, part: str, which: str, clients: Any) -> np.ndarray:
        """ "x" or "y" alone of what `read` gives."""
        x, y, _ = self._read(part, np.asarray(clients, np.int64), (which,))
        return x if which == "x" else y

    def _read(self, part: str, clients: np.ndarray, wanted: Sequence[str]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """x, y and the numbers of rows; of what is not wanted an array without clients."""
        raise NotImplementedError

    def shape(self, part: str, which: str) -> tuple[int, ...]:
        """[M, N, ...] of "x" or "y"."""
        row = self.layout.x_shape if which == "x" else self.layout.y_shape
        return (len(self.counts[part]), self.longest[part], *row)

    def dtype(self, which: str) -> np.dtype:
        return self.layout.x_dtype if which == "x" else self.layout.y_dtype


class Files(Store):
    """The files of a population, opened as they are needed."""

    def __init__(self, folder: Path, layout: Layout, index: np.ndarray, shards: Sequence[int], digest: str):
        """Of a folder with `shards` clients in each shard; `index` CLIENT[M] says what each client has."""
        self.folder, self.layout, self.digest = folder, layout, digest
        self.counts = {part: np.ascontiguousarray(index[part], np.int32) for part in PARTS}
        self.group = group if ((group := np.ascontiguousarray(index["group"])) >= 0).any() else None
        # A client without test rows has a row of padding, so that there is always something to compute with.
        self.longest = {part: max(1, int(counts.max())) for part, counts in self.counts.items()}
        self._first = np.concatenate([[0], np.cumsum(shards)])
        self._readers: collections.OrderedDict[tuple[str, int], Any] = collections.OrderedDict()
        self._unread = dict(enumerate(index["crc"][self._first[:-1]].tolist()))  # shards; checksums of first clients
        self._lock = threading.Lock()

    def _read(self, part: str, clients: np.ndarray, wanted: Sequence[str]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        count = {which: len(clients) if which in wanted else 0 for which in ("x", "y")}
        x, y = (_zeros((of, *self.shape(part, which)[1:]), self.dtype(which)) for which, of in count.items())
        there = np.flatnonzero((clients >= 0) & (clients < len(self.counts[part])))
        counts = np.zeros(len(clients), np.int32)
        counts[there] = self.counts[part][clients[there]]
        shard = np.searchsorted(self._first, clients, side="right") - 1
        width = self.layout.x_dtype.itemsize * int(np.prod(self.layout.x_shape, dtype=np.int64))
        depth = self.layout.y_dtype.itemsize * int(np.prod(self.layout.y_shape, dtype=np.int64))
        at_a_time = max(1, READ_BYTES // max(1, self.longest[part] * (width + depth)))
        for number, places in _some_of_each(shard[there], there, at_a_time):
            records = self._records(part, number, clients[places] - self._first[number])
            for place, count, record in zip(places.tolist(), counts[places].tolist(), records, strict=True):
                if len(record) != count * (width + depth):
                    raise ValueError(_damaged(self.folder / shard_file(part, number), "a record of another length"))
                xs = np.frombuffer(record, self.layout.x_dtype, count * width // self.layout.x_dtype.itemsize)
                ys = np.frombuffer(record, self.layout.y_dtype, offset=count * width)
                if len(x):
                    x[place, :count] = xs.reshape(count, *self.layout.x_shape)
                if len(y):
                    y[place, :count] = ys.reshape(count, *self.layout.y_shape)
        return x, y, counts

    def _records(self, part: str, number: int, positions: np.ndarray) -> list[bytes]:
        if (checksum := self._unread.get(number)) is not None:
            # ArrayRecord would read a file of another shard or population as well.
            first = np.zeros(1, np.int64)
            train, test = (self._read_records(each, number, first)[0] for each in PARTS)
            if zlib.crc32(test, zlib.crc32(train)) != checksum:
                raise ValueError(_damaged(self.folder / shard_file(part, number), "not the rows that were written"))
            self._unread.pop(number, None)
        return self._read_records(part, number, positions)

    def _read_records(self, part: str, number: int, positions: np.ndarray) -> list[bytes]:
        file = self.folder / shard_file(part, number)
        with self._lock:
            try:
                reader = self._readers.pop((part, number), None)
                reader = ArrayRecordReader(str(file), **READING) if reader is None else reader
                self._readers[part, number] = reader
                if len(self._readers) > MOST_OPEN:
                    self._readers.popitem(last=False)[1].close()
                return reader.read(positions.tolist())
            except (RuntimeError, OSError, ValueError, IndexError) as error:
                raise ValueError(_damaged(file, reason_of(error))) from error


def _zeros(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An array that begins where XLA's do: on a CPU it is then used as it is, and not copied."""
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    memory = np.zeros(size + ALIGNED, np.uint8)
    first = -memory.ctypes.data % ALIGNED
    return memory[first : first + size].view(dtype).reshape(shape)


def _some_of_each(shard: np.ndarray, places: np.ndarray, most: int) -> Iterator[tuple[int, np.ndarray]]:
    """The places of each shard i[C], at most so many together."""
    for number in np.unique(shard).tolist():
        own = places[shard == number]
        for first in range(0, len(own), most):
            yield number, own[first : first + most]


def _damaged(file: Path, what: str) -> str:
    return f"{file} is damaged or gone ({what}): put it back as it was written, or write the population anew"


class Derived(Store):
    """Rows that are made of those of other clients, which are on disk, when they are read."""

    def __init__(
        self,
        rows: Rows,
        made: Callable[[np.ndarray], ClientData],
        counts: np.ndarray,
        longest: int | None = None,
        told: Any = None,
    ):
        """Of some part of a population.

        Args:
          rows: that they are made of, or most of them.
          made: of clients i64[C], where −1 is nobody, x and y [C, longest, ...].
          counts: i32[m], rows of each client.
          longest: by default as many as those of `rows`.
          told: a value that tells these from what else could be made of the same rows.
        """
        self.folder, self.layout = rows.store.folder, rows.store.layout
        self.digest = digest([rows.store.digest, rows.part, told])
        self.counts = {rows.part: np.ascontiguousarray(counts, np.int32)}
        self.longest = {rows.part: rows.shape[1] if longest is None else longest}
        self._made = made

    def _read(self, part: str, clients: np.ndarray, wanted: Sequence[str]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        there = (clients >= 0) & (clients < len(self.counts[part]))
        x, y, _ = self._made(np.where(there, clients, -1))
        counts = np.where(there, self.counts[part][np.where(there, clients, 0)], 0)
        return x[: len(x) * ("x" in wanted)], y[: len(y) * ("y" in wanted)], counts.astype(np.int32)


class Rows:
    """x or y of all clients of a population on disk: an array [M, N, ...] of which single clients can be taken."""

    def __init__(self, store: Store, part: str, which: str, brought: bool = False):
        self.store, self.part, self.which = store, part, which
        self.brought = brought  # to the devices as a whole, before the first round
        self.shape, self.dtype = store.shape(part, which), store.dtype(which)
        self.ndim = len(self.shape)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, clients: Any) -> np.ndarray:
        """One client's rows [N, ...], or those of clients i[C] as [C, N, ...]; a tuple goes on to take of them.

        Clients are chosen as NumPy does: from the end where negative, by bool[M], and with an IndexError beyond them.
        """
        first, *rest = clients if isinstance(clients, tuple) else (clients,)
        if first is None or (np.ndim(first) and any(np.ndim(index) for index in rest if not isinstance(index, slice))):
            raise IndexError("clients are taken by a number, numbers or a slice, and single rows or slices of theirs")
        several = np.asarray(np.arange(len(self))[first])
        found = self.store.rows(self.part, self.which, several.reshape(-1))
        found = found if several.ndim else found[0]
        return found[(slice(None), *rest) if several.ndim else tuple(rest)] if rest else found

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        raise ValueError(too_large(self))

    def __repr__(self) -> str:
        return f"Rows({self.part} {self.which} of {self.store.folder}, {self.dtype} {list(self.shape)})"


def _refuse(rows: Rows) -> Any:
    raise ValueError(too_large(rows))


def _refuse_parts(rows: Any, parts: Any) -> Rows:
    raise ValueError("rows on disk are not made of parts")


# JAX would take for an array what has its shape and dtype.
jax.tree_util.register_pytree_node(Rows, _refuse, _refuse_parts)


def too_large(rows: Rows) -> str:
    """Why what needs all rows at once does not get them."""
    size = np.prod(rows.shape, dtype=np.float64) * rows.dtype.itemsize / 1e6
    return (
        f"the rows of all {len(rows)} clients in {rows.store.folder} are wanted at once, {size:,.0f} MB, but are read "
        "a cohort at a time: bring them into memory with fc.data.in_memory(population), or use a method that streams"
    )


def stored(data: ClientData | Federation) -> bool:
    """Whether clients' rows lie on disk."""
    return isinstance((data.train if isinstance(data, Federation) else data).x, Rows)


def streamed(data: ClientData) -> bool:
    """Whether clients' rows lie on disk, and are read as rounds need them."""
    return isinstance(data.x, Rows) and not data.x.brought


def client_data(store: Store, part: str, brought: bool = False) -> ClientData:
    """All clients of a part, without reading them."""
    return ClientData(Rows(store, part, "x", brought), Rows(store, part, "y", brought), store.counts[part])


def made_anew(
    data: ClientData,
    change: Callable[[np.ndarray, ClientData], ClientData],
    *,
    told: Any,
    source: np.ndarray | None = None,
) -> ClientData:
    """Clients with other rows, made now, or of rows on disk as they are read.

    Args:
      data: the rows that there are.
      change: of numbers i[C] of clients, and of rows [C, N, ...]: what becomes of these, as many.
      told: a value that tells the change from others.
      source: i[M], whose rows each client has; None for its own.
    """
    counts = np.asarray(data.num_examples)
    if not isinstance(data.x, Rows):
        return change(np.arange(len(counts)), data if source is None else some_of(data, source))

    def made(clients: np.ndarray) -> ClientData:
        known = np.maximum(clients, 0)
        return change(known, some_of(data, clients if source is None else np.where(clients < 0, -1, source[known])))

    return made_of(data.x, made, counts if source is None else counts[source], told=told)


def made_of(rows: Rows, made: Callable[[np.ndarray], ClientData], counts: np.ndarray, **further: Any) -> ClientData:
    """Clients whose rows are made of others' when they are read; see `Derived`."""
    return client_data(Derived(rows, made, counts, **further), rows.part, rows.brought)


def some_of(data: ClientData, clients: np.ndarray) -> ClientData:
    """x, y and the numbers of rows of clients i[C], read or in memory; of −1 rows that do not count."""
    if isinstance(data.x, Rows):
        return data.x.store.read(data.x.part, clients)
    return ClientData(*(np.asarray(leaf)[clients] for leaf in data))


def dtype_of(leaf: Any) -> np.dtype:
    """Of an array, in memory or on disk."""
    return leaf.dtype if hasattr(leaf, "dtype") else np.asarray(leaf).dtype


def on_disk(tree: Any) -> bool:
    """Whether a part of a tree is clients whose rows lie on disk: what they show to clusterings, beside their own."""
    return isinstance(tree, ClientData) and isinstance(tree.x, Rows)


def rows_of_client(data: ClientData, client: int) -> ClientData:
    """One client's rows [N, ...] on the device, and those that it shows to clusterings where these are others."""
    return jax.tree.map(lambda leaf: jnp.asarray(leaf[client]), data, is_leaf=lambda leaf: isinstance(leaf, Rows))
