"""Populations larger than memory: written to disk client by client, and opened without reading them.

A population is a folder of ArrayRecord files, shard by shard, with one index:

    population.json             sealed: format, version, the data's description, clients and sizes of each shard
    users.npy                   the users' ids, where clients have any
    clients.npy                 one record a client: training and test rows (int32), true group, checksum of its rows
    train-00000.arrayrecord     a record a client, in the clients' order: the bytes of its x, then those of its y
    test-00000.arrayrecord      its test rows likewise

Numbers are little-endian. ArrayRecord keeps a checksum of every record, and refuses one that does not fit.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import BadZipFile

import jax
import numpy as np
from array_record.python.array_record_module import ArrayRecordWriter

from fedjax_cluster.data.encoded_clients import ClientRows, Encoded, Encoder
from fedjax_cluster.data.stored import (
    CLIENT,
    PARTS,
    Files,
    Layout,
    Rows,
    client_data,
    on_disk,
    shard_file,
    some_of,
    stored,
)
from fedjax_cluster.files import (
    atomic_file,
    digest,
    is_sealed,
    plain,
    read_json,
    remove_strays,
    sealed,
    taken,
    write_json,
)
from fedjax_cluster.options import BELOW_ONE, POSITIVE, SEED, as_path, shown, with_checks
from fedjax_cluster.types import ClientData, DatasetInfo, Federation, UserFederation

FORMAT, VERSION = "fedjax_cluster population", 1
MANIFEST, INDEX, USERS, WRITING = "population.json", "clients.npy", "users.npy", ".writing"
OPTIONS = "group_size:1,uncompressed"  # a client is read alone


@with_checks(test_fraction=BELOW_ONE, seed=SEED, shard_megabytes=POSITIVE)
def write_population(
    folder: str | os.PathLike,
    clients: Any,
    *,
    info: DatasetInfo | None = None,
    test_fraction: float = 0.3,
    seed: int = 0,
    shard_megabytes: float = 128.0,
) -> Federation:
    """Writes clients to a folder, one after the other: of a population, never more than one client is in memory.

    The folder appears once all clients are in it. Until then they lie beside it, in FOLDER.writing; called again with
    the same clients after it was stopped, however that came about, it goes on after the last whole shard.

    Args:
      folder: where; must not exist.
      clients: a Federation without validation rows, or an iterable of (x, y), (x, y, test_x, test_y) or `ClientRows`:
        arrays as `from_arrays` takes them, with as many rows as each client has.
      info: the data's description. Default: named after the folder and what it holds; a regression where y is
        of floating-point numbers, else a classification whose classes are counted.
      test_fraction: share of the rows of a client given as (x, y) that it is tested on, drawn at random; 0 is
        none. A client with a single row keeps it for training.
      seed: decides which.
      shard_megabytes: after which a new file begins: what is written again after a kill.

    Returns:
      What `open_population` gives.

    Raises:
      ValueError: the folder exists, there are validation rows, a client has no training rows or other kinds of rows
        than the first, or its arrays cannot be trained on; or other clients than those of a write that is taken up.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     many = ((np.full((n, 4), n, np.float32), np.arange(n) % 2) for n in (5, 3, 8))
    ...     population = write_population(f"{folder}/mine", many, test_fraction=0.2)
    ...     population.train.x.shape, population.train.num_examples.tolist(), population.train.x[1][:3, 0].tolist()
    ((3, 6, 4), [4, 2, 6], [3.0, 3.0, 0.0])
    """
    folder = as_path("folder", folder)
    if folder.exists():
        raise ValueError(f"{folder} exists already: give another folder, or read what it holds with open_population")
    users = None
    if isinstance(clients, Federation):
        if clients.validation is not None:
            raise ValueError("a population has no validation rows: write federation._replace(validation=None)")
        info = clients.info if info is None else info
        users = getattr(clients, "user_ids", None)
        if users is not None and (users := np.asarray(users)).dtype == object:
            users = users.astype(str)
        clients = _of_federation(clients)
    if not isinstance(clients, Iterable):
        raise ValueError(f"clients is {shown(clients)}; it must be a Federation, or an iterable of clients' arrays")
    beside = folder.with_name(folder.name + WRITING)
    beside.mkdir(parents=True, exist_ok=True)
    with taken(beside):
        remove_strays(beside)
        known = _pieces(beside)
        _drop_from(beside, len(known))
        encoder = Encoder(beside, info, test_fraction, seed)
        new, done = encoder.encoded(clients, _clients(known)), len(known)
        while (first := next(new, None)) is not None:
            _write_shard(beside, done, itertools.chain([first], new), shard_megabytes * 1e6)
            done += 1
        _finish(beside, folder.name, encoder, users)
    os.replace(beside, folder)
    for piece in folder.glob("clients-*.np[yz]"):
        piece.unlink()
    return open_population(folder)


def open_population(folder: str | os.PathLike) -> Federation:
    """A population as `write_population` left it, without reading its rows.

    Args:
      folder: where it is.

    Returns:
      A Federation whose x and y are read a few clients at a time: `population.train.x[7]` is f32[N, ...], of client 7.
      `simulate` streams it. `group` is None where no client's is known.

    Raises:
      ValueError: there is none, it is of a later version, or files are missing, cut off or not what was written.

    >>> open_population("nowhere")
    Traceback (most recent call last):
    ...
    ValueError: there is no folder 'nowhere': correct the path, or write one with fc.data.write_population
    """
    folder = as_path("folder", folder)
    manifest = _manifest(folder)
    try:
        x, y = manifest["x"], manifest["y"]
        layout = Layout(np.dtype(x["dtype"]), tuple(x["shape"]), np.dtype(y["dtype"]), tuple(y["shape"]))
        names = {kind: tuple(manifest["info"].get(kind, ())) for kind in ("group_names", "class_names")}
        further = {"input_shape": layout.x_shape, **names}
        info = DatasetInfo(**{**manifest["info"], **further})
        shards, sizes = [int(shard["clients"]) for shard in manifest["shards"]], manifest["shards"]
        with (folder / INDEX).open("rb") as file:
            index = np.load(file, allow_pickle=False)
        whole = index.dtype == CLIENT and digest(index) == manifest["index"] and len(index) == sum(shards)
        users = np.load(folder / USERS, allow_pickle=False) if "users" in manifest else None
    except (KeyError, TypeError, OSError, ValueError, EOFError) as error:
        raise ValueError(f"the population in {folder} is damaged ({error}): write it anew, or put it back") from error
    for file, as_written in ((INDEX, whole), (USERS, users is None or digest(users) == manifest["users"])):
        if not as_written:
            raise ValueError(
                f"{folder / file} is not what was written there: write the population anew, or put it back"
            )
    for number, shard in enumerate(sizes):
        for part in PARTS:
            file = folder / shard_file(part, number)
            size = file.stat().st_size if file.is_file() else None
            if size != shard[part]:
                has = "is missing" if size is None else f"has {size} bytes of {shard[part]}"
                raise ValueError(f"{file} {has}: put it back as it was written, or write the population anew")
    store = Files(folder, layout, index, shards, manifest["index"])
    found = Federation(client_data(store, "train"), client_data(store, "test"), None, store.group, info)
    return found if users is None else UserFederation.of(found, users)


def in_memory(federation: Federation, clients: Any = None) -> Federation:
    """The rows of a population on disk, read: all of them, or those of some clients.

    Args:
      federation: of `open_population`, or one in memory.
      clients: i[C] of those to read; None is all.

    Returns:
      A Federation in memory, of the clients in the order given, with as many rows of padding.

    Raises:
      ValueError: a client there is not.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     many = [(np.full((5, 4), client, np.float32), np.arange(5) % 2) for client in range(6)]
    ...     in_memory(write_population(f"{folder}/mine", many), [4, 2]).train.x[:, 0, 0]
    array([4., 2.], dtype=float32)
    """
    everybody = np.arange(len(federation.train.num_examples))
    try:
        index = everybody if clients is None else everybody[np.asarray(clients)]
    except IndexError as error:
        raise ValueError(
            f"clients is {shown(clients)}, but the federation has {len(everybody)} clients ({error})"
        ) from error
    if index.ndim != 1:
        raise ValueError(f"clients is {shown(clients)}; give a list of clients")

    def taken_of(data: ClientData) -> ClientData:
        others = jax.tree.map(
            lambda leaf: some_of(leaf, index) if on_disk(leaf) else np.asarray(leaf)[index],
            data._replace(x=None, y=None, num_examples=None),
            is_leaf=on_disk,
        )
        return others._replace(**some_of(data, index)._asdict())

    validation = None if federation.validation is None else taken_of(federation.validation)
    group = None if federation.group is None else np.asarray(federation.group)[index]
    found = Federation(taken_of(federation.train), taken_of(federation.test), validation, group, federation.info)
    users = getattr(federation, "user_ids", None)
    return found if users is None else UserFederation.of(found, np.asarray(users)[index])


def on_devices(federation: Federation) -> Federation:
    """A population on disk whose rows `simulate` brings to the devices before the first round, and keeps there.

    For methods that need all clients in a round. The host holds no copy, but of what clients show to
    clusterings beside their own rows (see `faults`); of several processes each reads the clients of
    its own devices alone.

    Args:
      federation: of `open_population`; one in memory is given back as it is.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     many = [(np.full((5, 4), client, np.float32), np.arange(5) % 2) for client in range(6)]
    ...     on_devices(write_population(f"{folder}/mine", many)).train.x.brought
    True
    """
    if not stored(federation):
        return federation
    train, test = (
        jax.tree.map(
            lambda leaf: Rows(leaf.store, leaf.part, leaf.which, brought=True) if isinstance(leaf, Rows) else leaf,
            data,
            is_leaf=lambda leaf: isinstance(leaf, Rows),
        )
        for data in (federation.train, federation.test)
    )
    return federation._replace(train=train, test=test)


def is_population(folder: str | os.PathLike) -> bool:
    """Whether a folder looks like a population."""
    return (as_path("folder", folder) / MANIFEST).is_file()


def _of_federation(federation: Federation) -> Iterator[ClientRows]:
    for client in range(len(federation.train.num_examples)):
        x, y, test_x, test_y = (
            np.asarray(leaf[client])[: int(data.num_examples[client])]
            for data in (federation.train, federation.test)
            for leaf in data[:2]
        )
        yield ClientRows(x, y, test_x, test_y, -1 if federation.group is None else int(federation.group[client]))


class Piece(NamedTuple):
    """What a whole shard holds."""

    clients: np.ndarray  # CLIENT[]
    sizes: dict[str, int]  # bytes of its files, by part


def _pieces(beside: Path) -> list[Piece]:
    """The whole shards of an interrupted write; a shard's index comes after its rows, and has their files' sizes."""
    pieces = []
    for number in itertools.count():
        try:
            with (beside / f"clients-{number:05d}.npz").open("rb") as file:
                kept = np.load(file, allow_pickle=False)
                piece = Piece(kept["clients"], dict(zip(PARTS, kept["sizes"].tolist(), strict=True)))
            if piece.clients.dtype != CLIENT or piece.sizes != _sizes(beside, number):
                return pieces
        except (OSError, ValueError, EOFError, KeyError, BadZipFile):
            return pieces
        pieces.append(piece)
    return pieces


def _drop_from(beside: Path, number: int) -> None:
    """Removes the shards from a number on, of which some may be whole behind one that is not."""
    for file in [*beside.glob("clients-*.np[yz]"), *beside.glob("*-*.arrayrecord")]:
        if file.suffix == ".npy" or int(file.stem.rpartition("-")[2]) >= number:
            file.unlink()


def _clients(pieces: list[Piece]) -> np.ndarray:
    return np.concatenate([np.zeros(0, CLIENT), *(piece.clients for piece in pieces)])


def _sizes(beside: Path, number: int) -> dict[str, int]:
    return {part: (beside / shard_file(part, number)).stat().st_size for part in PARTS}


def _write_shard(beside: Path, number: int, clients: Iterator[Encoded], most_bytes: float) -> None:
    """Clients into the next shard until it is full."""
    entries, size = [], 0
    with ExitStack() as stack:
        writers = {}
        for part in PARTS:
            file = stack.enter_context(atomic_file(beside / shard_file(part, number)))
            writers[part] = ArrayRecordWriter(str(file), OPTIONS)
            stack.callback(writers[part].close)  # before the file is renamed
        for entry, *records in clients:
            for writer, record in zip(writers.values(), records, strict=True):
                writer.write(record)
                size += len(record)
            entries.append(entry)
            if size >= most_bytes:
                break
    sizes = list(_sizes(beside, number).values())
    with atomic_file(beside / f"clients-{number:05d}.npz") as file, file.open("wb") as opened:
        np.savez(opened, clients=np.array(entries, CLIENT), sizes=sizes)


def _save(path: Path, array: np.ndarray) -> None:
    with atomic_file(path) as file, file.open("wb") as opened:
        np.save(opened, array)


def _finish(beside: Path, name: str, encoder: Encoder, users: np.ndarray | None) -> None:
    """The index of all clients, and what says that they are all."""
    pieces, layout = _pieces(beside), encoder.layout
    assert layout is not None
    index = _clients(pieces)
    _save(beside / INDEX, index)
    info = encoder.info
    if info is None:
        task = "regression" if encoder.task == "regression" else "classification"
        info = DatasetInfo(f"{name}@{digest(index)[:8]}", layout.x_shape, encoder.classes, task)
    content = {
        "format": FORMAT,
        "version": VERSION,
        "info": plain(info._asdict()),
        "x": {"dtype": layout.x_dtype.str, "shape": layout.x_shape},
        "y": {"dtype": layout.y_dtype.str, "shape": layout.y_shape},
        "shards": [{"clients": len(piece.clients), **piece.sizes} for piece in pieces],
        "index": digest(index),
    }
    if users is not None:
        _save(beside / USERS, users)
        content["users"] = digest(users)
    write_json(beside / MANIFEST, sealed(content))


def _manifest(folder: Path) -> dict[str, Any]:
    beside = folder.with_name(folder.name + WRITING)
    if not folder.exists() and beside.is_dir():
        count = len(_clients(_pieces(beside)))
        raise ValueError(f"{folder} is not written to its end ({count} clients are): call write_population again")
    if not folder.is_dir():
        raise ValueError(f"there is no folder {str(folder)!r}: correct the path, or write one with "
                         "fc.data.write_population")  # fmt: skip
    foreign = f"{folder} holds no population: give a folder that fc.data.write_population wrote"
    try:
        manifest = read_json(folder / MANIFEST)
    except FileNotFoundError:
        raise ValueError(foreign) from None
    if manifest.get("format") != FORMAT:
        raise ValueError(foreign)
    if not is_sealed(folder / MANIFEST):
        raise ValueError(
            f"{folder / MANIFEST} is not what was written there: put it back, or write the population anew"
        )
    if manifest.get("version") != VERSION:
        raise ValueError(
            f"the population in {folder} has format {shown(manifest.get('version'))}, and this version of "
            f"fedjax_cluster knows {VERSION}: update it, or write the population anew"
        )
    return manifest
