"""The directory that a run leaves: config.json, metrics.csv, summary.json, checkpoints/, events/, plots/."""

from __future__ import annotations

import csv
import json
import pathlib
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from fedjax_cluster import simulation
from fedjax_cluster.files import atomic_file, check_writable, plain, write_json
from fedjax_cluster.types import Churn, ClusteredAlgorithm, Event, Federation, State

VERSION = 2


class RunDirectory:
    """One run's directory; refuses that of another experiment before anything is computed."""

    def __init__(
        self,
        path: str | pathlib.Path,
        algorithm: ClusteredAlgorithm,
        federation: Federation,
        seed: int,
        eval_every: int,
        config: Mapping[str, Any] | None,
        churn: Sequence[Churn] = (),
    ):
        self.path = pathlib.Path(path)
        check_writable(self.path)
        for name in ("checkpoints", "events", "plots"):
            if (self.path / name).exists() and not (self.path / name).is_dir():
                raise ValueError(f"{self.path / name} is a file, where the run leaves a directory; move it away")
        self._identity = {
            "algorithm": algorithm.name,
            "algorithm_config": dict(algorithm.config),
            "scenario": federation.info.name,
            "clients": len(federation.train.num_examples),
            "seed": seed,
            "eval_every": eval_every,
            "data": fingerprint(federation),
        }
        if churn:
            self._identity["churn"] = [change._asdict() for change in churn]
        known = read_config(self.path, missing_ok=True)
        if known is not None:
            # The settings first: they are what a person has given.
            _check_same_settings(self.path, known.get("experiment"), config)
            identity = known["identity"] if "version" in known else _of_version_0_1(known["identity"])
            _check_same(self.path, identity, plain(self._identity))
        elif self.path.exists() and any(self.path.iterdir()):
            raise ValueError(f"the run directory {self.path} is not empty and holds no run; choose another")
        self._config = config

    def open(self) -> None:
        """Makes the directory; called once nothing can be refused any more."""
        if not (self.path / "config.json").exists():
            write_json(
                self.path / "config.json", {"version": VERSION, "identity": self._identity, "experiment": self._config}
            )
        self._checkpoints = simulation.checkpoints.Checkpoints(self.path / "checkpoints")

    def has_checkpoint(self) -> bool:
        """Whether there is a state to read back, as far as can be told before `open`."""
        folder = self.path / "checkpoints"
        return folder.is_dir() and any(child.name.isdigit() for child in folder.iterdir())

    def restore(self, like: State) -> tuple[State, dict[str, np.ndarray]] | None:
        """The newest checkpoint's state and history; None for a fresh run."""
        latest = self._checkpoints.latest()
        if latest is None:
            return None
        try:
            return self._checkpoints.restore(latest, like)
        except (ValueError, KeyError, OSError, TypeError) as error:
            reason = " ".join(str(error).split())[:200]
            raise ValueError(
                f"the checkpoint {self.path / 'checkpoints' / str(latest)} cannot be taken up: it is damaged or of a "
                f"model of another size ({reason}); delete it to go on from the one before, or choose another directory"
            ) from error

    def save(self, state: State, history: dict[str, np.ndarray]) -> None:
        self._checkpoints.save(int(state.round), state, history)
        write_history(self.path / "metrics.csv", history)

    def write_event(self, event: Event) -> None:
        """Keeps an event's arrays in events/round+N.npz; a resumed run writes those it meets again anew."""
        with atomic_file(self.path / "events" / f"round{event.round:+08d}.npz") as beside:
            np.savez_compressed(beside, **event.content)

    def read_events(self, done: int) -> tuple[Event, ...]:
        """The events of the first `done` rounds, in their order."""
        events = []
        for path in (self.path / "events").glob("round*.npz"):
            number = int(path.stem.removeprefix("round"))
            if number < done:
                with np.load(path) as content:
                    events.append(Event(number, dict(content)))
        return tuple(sorted(events, key=lambda event: event.round))

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        write_json(self.path / "summary.json", dict(summary))

    def read_summary(self) -> dict[str, Any] | None:
        """The summary.json of a run that has ended before; None where there is none."""
        try:
            return json.loads((self.path / "summary.json").read_text())
        except FileNotFoundError:
            return None

    def close(self) -> None:
        self._checkpoints.close()


def read_config(path: pathlib.Path, *, missing_ok: bool = False) -> dict[str, Any] | None:
    """The config.json of a run directory.

    Raises:
      ValueError: there is none, or it cannot be read.
    """
    try:
        return json.loads((path / "config.json").read_text())
    except FileNotFoundError:
        if missing_ok:
            return None
        raise ValueError(f"{path} is not a run directory: it has no config.json") from None
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(f"cannot read {path / 'config.json'}: {error}") from error


def read_history(path: pathlib.Path) -> dict[str, np.ndarray]:
    """The metrics.csv of a run directory as columns; an empty cell is NaN."""
    try:
        with (path / "metrics.csv").open(newline="") as file:
            rows = list(csv.reader(file))
    except FileNotFoundError:
        raise ValueError(f"{path} has no metrics.csv yet; the run has not reached its first checkpoint") from None
    if len(rows) < 2:
        raise ValueError(f"{path / 'metrics.csv'} holds no round yet")
    try:
        columns = zip(*rows[1:], strict=True)
        return {
            name: np.asarray([float(cell) if cell else np.nan for cell in column])
            for name, column in zip(rows[0], columns, strict=True)
        }
    except ValueError as error:
        raise ValueError(f"{path / 'metrics.csv'} is damaged ({error}); resume the run to write it anew") from None


def write_history(path: pathlib.Path, history: dict[str, np.ndarray]) -> None:
    """Writes one row a round; whole numbers without a point, NaN as an empty cell."""
    with atomic_file(path) as beside, beside.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(history)
        for row in zip(*history.values(), strict=True):
            writer.writerow(["" if value != value else f"{value:.9g}" for value in row])


def fingerprint(federation: Federation) -> int:
    """A checksum of all arrays of a federation."""
    total = 0
    for leaf in jax.tree.leaves((federation.train, federation.test, federation.group)):
        total = zlib.crc32(np.ascontiguousarray(leaf).data, total)
    return total


def _of_version_0_1(identity: dict[str, Any]) -> dict[str, Any]:
    """An identity of version 0.1 in today's words; options that it left open or changed itself are left out."""
    renamed = {{"membership": "churn"}.get(name, name): value for name, value in identity.items()}
    options = {name: value for name, value in identity.get("algorithm_config", {}).items() if value is not None}
    if "proximal" in options and isinstance(options.get("local"), dict):
        options["local"] = {name: value for name, value in options["local"].items() if name != "proximal"}
    return {**renamed, "algorithm_config": options}


def _check_same(path: pathlib.Path, known: dict[str, Any], wanted: dict[str, Any]) -> None:
    different = [
        f"{key} is {known.get(key)} there and {wanted.get(key)} here"
        for key in (*wanted, *(key for key in known if key not in wanted))
        if known.get(key) != wanted.get(key) and key != "algorithm_config"
    ]
    old, new = known.get("algorithm_config", {}), wanted["algorithm_config"]
    if known.get("algorithm") == wanted["algorithm"]:
        # What an older version did not keep cannot be compared.
        different += [
            f"{key} is {value} there and {new.get(key)} here"
            for key, value in sorted(old.items())
            if not _same_option(value, new.get(key))
        ]
    _refuse(path, different)


def _same_option(known: Any, wanted: Any) -> bool:
    if isinstance(known, dict) and isinstance(wanted, dict):
        return all(_same_option(value, wanted.get(name)) for name, value in known.items())
    return known == wanted


def _check_same_settings(path: pathlib.Path, known: dict[str, Any] | None, wanted: Mapping[str, Any] | None) -> None:
    """What an algorithm does not tell, such as the server's rate and the model; a run may only get longer."""
    if not known or not wanted:
        return
    different = [
        f"{key} is {known[key]} there and {value} here"
        for key, value in plain(dict(wanted)).items()
        if key != "rounds" and key in known and known[key] != value
    ]
    _refuse(path, different)


def _refuse(path: pathlib.Path, different: list[str]) -> None:
    if different:
        raise ValueError(
            f"the run directory {path} belongs to another experiment: {'; '.join(different)}; choose another directory"
        )
