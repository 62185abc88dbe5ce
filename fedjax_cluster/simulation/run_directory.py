"""The directory that a run leaves: config.json, metrics.csv, summary.json, checkpoints/, events/, plots/."""

from __future__ import annotations

import contextlib
import contextvars
import csv
import io
import logging
import pathlib
import platform
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from fedjax_cluster import parallel, simulation
from fedjax_cluster.files import (
    LOCK,
    STRAY,
    UNREADABLE,
    Taken,
    atomic_file,
    check_run_directory,
    digest,
    is_file_by_now,
    is_sealed,
    read_json,
    remove_strays,
    sealed,
    taken,
    write_json,
)
from fedjax_cluster.options import as_path
from fedjax_cluster.provenance import own_version
from fedjax_cluster.simulation.assignments import Kept, read_moves, write_moves
from fedjax_cluster.simulation.checkpoints import Damaged, Saved, newest_history
from fedjax_cluster.simulation.differences import differences, of_version_0_1, setting_differences
from fedjax_cluster.simulation.identity import identity_of
from fedjax_cluster.types import ClusteredAlgorithm, Event, Federation, State

LOG = logging.getLogger(__name__)
VERSION, SEALED, WHOLE = 4, 3, 4  # and the first versions that seal what they write, that keep all they know of a run
UNEVALUATED = "evaluation_due"  # in the summary of a run that was ended before the evaluation of its last round
CONFIG, METRICS, SUMMARY = "config.json", "metrics.csv", "summary.json"
TUNING = "tuning.json"  # may be there before a run
ASSIGNMENTS = "assignments.npz"
COUNTED = "round (from 1)"  # metrics.csv's column; the history counts from 0
MOST_NAMED = 4  # differences that a refusal names
READING = contextvars.ContextVar("READING", default=False)


class AnotherExperiment(ValueError):
    """A directory holds the run of another experiment."""


class RunDirectory:
    """One run's directory; refuses that of another experiment before anything is computed.

    Of several processes, which share it, the first takes and writes it; into checkpoints all of them write.
    """

    def __init__(
        self, path: str | pathlib.Path, identity: Mapping[str, Any], config: Mapping[str, Any] | None, num_clients: int
    ):
        # A run may change the working directory, and keeps its own.
        self.named = as_path("run_dir", path)
        self.path = self.named.absolute()
        self._identity, self._config, self._num_clients = dict(identity), config, num_clients
        self._lock = contextlib.ExitStack()
        self.is_ours: Callable[[], bool] = lambda: True  # whether the directory is still the one that was taken
        self._refusal: ValueError | None = None  # of everything but reading
        self._events: dict[str, str] = {}  # their files' digests
        self._unwritten: list[Event] = []
        self._checkpoints: Any = None  # once it is open
        try:
            check_run_directory(self.named)
        except ValueError as error:
            if not (self.path / CONFIG).is_file():
                raise
            self._refusal = error
        if READING.get():
            self._refusal = ValueError(f"{self.named} is only read here, and not whole; go on with it by resume")
        for name in ("checkpoints", "events", "plots"):
            if (self.path / name).exists() and not (self.path / name).is_dir():
                raise ValueError(f"{self.named / name} is a file, where the run leaves a directory; move it away")
        self._check()

    def _check(self) -> dict[str, Any] | None:
        """What is known of the run, if it is this one."""
        known = read_config(self.path) if (self.path / CONFIG).exists() else None
        if known is not None:
            identity = known["identity"] if "version" in known else of_version_0_1(known["identity"])
            version = known.get("version", 1)
            different = differences(identity, self._identity, whole=version >= WHOLE)
            if different or version < 3:  # the older ones do not hold all of it
                # The settings first: they are what a person has given.
                _refuse(self.named, setting_differences(known.get("experiment"), self._config) or different)
        elif listed(self.path):
            raise AnotherExperiment(f"the run directory {self.named} is not empty and holds no run; choose another")
        return known

    def open(self) -> None:
        """Makes and takes the directory; called once nothing can be refused any more.

        Raises:
          Taken: another run has it, and no checkpoint yet.
        """
        with parallel.processes.together():
            if self._refusal is None and parallel.is_first():
                self._take()
        with parallel.processes.together():
            if not is_file_by_now(self.path / CONFIG):
                raise ValueError(
                    f"{self.named} holds nothing of what process 0 wrote there; choose a run directory on a file "
                    "system that all processes share"
                )
        if parallel.processes.of_any(self._refusal is not None) and self._refusal is None:
            self._refusal = ValueError(f"another process cannot write to the directory {self.named}; choose another")
        begun = read_config(self.path)
        self._must_be_sealed = begun.get("version", 1) >= SEALED
        self._checkpoints = simulation.checkpoints.Checkpoints(
            self.path / "checkpoints",
            self._num_clients,
            run=digest(begun["identity"]),
            read_only=self._refusal is not None,
        )

    def _take(self) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        try:
            self.is_ours = self._lock.enter_context(taken(self.path))
        except Taken as error:
            if not self.has_checkpoint():
                raise
            self._refusal = error
        else:
            remove_strays(self.path)
            remove_strays(self.path / "events")
            self._write_config(self._check())  # once more: it may have been made in the meantime

    def _write_config(self, known: Mapping[str, Any] | None) -> None:
        """A new run's config.json, or that of one that is to have more rounds now."""
        versions = {"fedjax_cluster": own_version(), "jax": jax.__version__}
        if known is not None and known.get("versions", versions) != versions:
            text = " and ".join(f"{name} {version}" for name, version in known["versions"].items())
            LOG.warning(f"{self.named} was begun with {text}; with other versions the last digits may differ")
        if known is None:
            known = {"version": VERSION, "versions": versions, "machine": _machine(), "identity": self._identity}
        elif (self._config or {}).get("rounds", 0) <= (known["experiment"] or {}).get("rounds", 0):
            return
        write_json(self.path / CONFIG, sealed({**known, "experiment": self._config}))

    def check_open_for_more(self) -> None:
        """Raises a ValueError where the run can be read but not be continued."""
        if self._refusal is not None:
            raise self._refusal

    def has_checkpoint(self) -> bool:
        """Whether there is a state to read back, as far as can be told before `open`."""
        folder = self.path / "checkpoints"
        return folder.is_dir() and any(child.name.isdigit() for child in folder.iterdir())

    def restore(self, like: State) -> Saved | None:
        """What the newest checkpoint that is whole holds; None for a fresh run."""
        try:
            return self._checkpoints.restore(like, must_be_sealed=self._must_be_sealed)
        except Damaged as error:
            raise ValueError(
                f"no checkpoint in {self.named / 'checkpoints'} can be taken up: damaged, or of a model of another "
                f"size ({error}); choose another directory"
            ) from error

    def save(self, saved: Saved, moves: Kept) -> None:
        """Makes a checkpoint, and what is looked at beside it; an OSError where it cannot be made."""
        if self._refusal is not None:
            return
        self._check_ours()
        for event in self._unwritten[:]:
            self._keep(event)
            self._unwritten.remove(event)
        if parallel.is_first() and moves:
            # Before the checkpoint: of rounds after it nothing is read, but those before it are nowhere else.
            with self._beside(ASSIGNMENTS):
                write_moves(self.path / ASSIGNMENTS, moves)
        self._checkpoints.save(int(saved.state.round), saved._replace(events=self._events))
        if parallel.is_first():
            with self._beside(METRICS):
                write_history(self.path / METRICS, saved.history)

    def _check_ours(self) -> None:
        """Raises an OSError where the directory was removed, or is another's by now; puts back its config.json."""
        if not self.is_ours():
            raise OSError(f"the run directory {self.named} was removed, or another run has taken it")
        if parallel.is_first() and not (self.path / CONFIG).is_file():
            self._write_config(None)

    @contextlib.contextmanager
    def _beside(self, name: str) -> Iterator[None]:
        """Warns where a file cannot be written that the next checkpoint, or a resumed run, writes again."""
        try:
            yield
        except OSError as error:
            LOG.warning(f"cannot write {name} in {self.named} ({error.strerror}); a resumed run writes it again")

    def read_moves(self, done: int) -> Kept:
        """Who moved in the first `done` rounds, as far as it was kept."""
        kept = read_moves(self.path / ASSIGNMENTS, done, self._num_clients)
        if done and not kept and (self.path / ASSIGNMENTS).exists():
            LOG.warning(f"{self.named / ASSIGNMENTS} is damaged: who moved in the first {done} rounds is forgotten")
        return kept

    def write_event(self, event: Event) -> None:
        """Keeps an event's arrays in events/round+N.npz; a resumed run writes those it meets again anew.

        Where the disk is full it is tried again before the next checkpoint, which is not made without it.
        """
        if not parallel.is_first():
            return
        try:
            self._keep(event)
        except OSError as error:
            LOG.warning(f"cannot write the event of round {event.round + 1} in {self.named} ({error})")
            self._unwritten.append(event)

    def _keep(self, event: Event) -> None:
        self._check_ours()
        path = self.path / "events" / f"round{event.round:+08d}.npz"
        with atomic_file(path) as beside:
            np.savez_compressed(beside, **event.content)
        self._events[path.name] = digest(path.read_bytes())

    def read_events(self, saved: Saved) -> tuple[Event, ...]:
        """The events up to a checkpoint, in their order.

        Raises:
          ValueError: one is missing or damaged.
        """
        folder, done = self.path / "events", int(saved.state.round)
        known = saved.events
        if known is None:  # of a version that kept no digests; the next checkpoint has them
            known = {path.name: digest(path.read_bytes()) for path in folder.glob("round*.npz")}
        events = {name: self._read_event(folder / name, expected) for name, expected in known.items()}
        events = {name: event for name, event in events.items() if event.round < done}
        self._events = {name: known[name] for name in events}
        return tuple(sorted(events.values(), key=lambda event: event.round))

    def _read_event(self, path: pathlib.Path, expected: str) -> Event:
        try:
            if expected != digest(path.read_bytes()):
                raise ValueError("it is not what was written")
            with np.load(path) as content:
                return Event(int(path.stem.removeprefix("round")), dict(content))
        except UNREADABLE as error:
            raise ValueError(
                f"the event {path} is damaged or missing ({error}); put it back, or choose another directory"
            ) from None

    def leave(
        self, summary: Mapping[str, Any], history: Mapping[str, np.ndarray], *, only_missing: bool = False
    ) -> None:
        """summary.json, and metrics.csv where it is not that of the history; what cannot be written with a warning."""
        if self._refusal is not None or not parallel.is_first() or not self.is_ours():
            return
        with self._beside(METRICS):
            write_history(self.path / METRICS, history)
        with self._beside(SUMMARY):
            if not only_missing:
                write_json(self.path / SUMMARY, sealed(summary))

    def read_summary(self) -> dict[str, Any] | None:
        """The summary.json of a run that has ended before; None where there is none that is whole."""
        with contextlib.suppress(FileNotFoundError, ValueError):
            return read_json(self.path / SUMMARY)
        return None

    def close(self, failed: bool = False) -> None:
        """Lets go of the directory; where the run has failed, without waiting for other processes."""
        if self._checkpoints is not None and not (failed and parallel.several()):
            self._checkpoints.close()
        self._lock.close()


def kept_in(
    run_dir: str | pathlib.Path | None,
    config: Mapping[str, Any] | None,
    algorithm: ClusteredAlgorithm,
    federation: Federation,
    *decided: Any,
) -> RunDirectory | None:
    """The directory of a run by its `identity_of`, of which `decided` are the further arguments; None for none."""
    if run_dir is None:
        return None
    identity = identity_of(algorithm, federation, *decided)
    return RunDirectory(run_dir, identity, config, len(federation.train.num_examples))


def read_config(path: pathlib.Path) -> dict[str, Any]:
    """The config.json of a run directory.

    Raises:
      ValueError: there is none, it cannot be read, or it has been edited.
    """
    try:
        content = read_json(path / CONFIG)
    except FileNotFoundError:
        runs = sorted(each.parent.name for each in path.glob(f"*/{CONFIG}"))
        one = f"; it holds runs: give the directory of one, such as {path / runs[0]}" if runs else ""
        raise ValueError(f"{path} is not a run directory: it has no config.json{one}") from None
    version = content.get("version", 1)
    if not isinstance(version, int) or (version >= SEALED and not is_sealed(path / CONFIG)):
        raise ValueError(f"{path / CONFIG} has lost its seal: edited or damaged; put it back as it was")
    if not isinstance(content.get("identity"), dict) or not isinstance(content.get("experiment"), dict | None):
        raise ValueError(f"{path / CONFIG} is not the configuration of a run; choose another directory")
    return content


def read_history(path: pathlib.Path) -> dict[str, np.ndarray]:
    """The history of a run directory as columns: the newest checkpoint's, of which metrics.csv is a copy to look at."""
    history = newest_history(path / "checkpoints")
    if history is None:
        raise ValueError(f"{path} has no checkpoint that is whole; resume it if it has none, or begin anew")
    return history


def write_history(path: pathlib.Path, history: Mapping[str, np.ndarray]) -> None:
    """Writes one row a round, counted from 1; whole numbers without a point, NaN as an empty cell."""
    text = io.StringIO()
    writer = csv.writer(text)
    columns = {COUNTED if name == "round" else name: column + (name == "round") for name, column in history.items()}
    writer.writerow(columns)
    for row in zip(*columns.values(), strict=True):
        writer.writerow(["" if value != value else f"{value:.9g}" for value in row])
    content = text.getvalue().encode()
    if not path.is_file() or path.read_bytes() != content:
        with atomic_file(path) as beside:
            beside.write_bytes(content)


def _machine() -> dict[str, str]:
    """What a run was begun on; a reader may want to know it, nothing depends on it."""
    devices = Counter(device.device_kind for device in jax.devices())
    return {
        "devices": ", ".join(f"{count} × {kind}" for kind, count in devices.items()),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
    }


def listed(path: pathlib.Path) -> list[pathlib.Path]:
    """What is in a directory, but for what may be there before a run; nothing where there is none."""
    there: list[pathlib.Path] = []
    # Another process, which tries whether one can be made there, may just have removed it again.
    with contextlib.suppress(FileNotFoundError):
        there = list(path.iterdir()) if path.is_dir() else []
    return [each for each in there if not (each.name in (LOCK, TUNING) or STRAY.fullmatch(each.name))]


def check_rounds(done: int, rounds: int, directory: RunDirectory | None) -> None:
    """Raises a ValueError where a run has done more rounds than are asked for."""
    if done > rounds:
        where = "the run" if directory is None else directory.named
        raise ValueError(f"{where} has {done} rounds already, but rounds is {rounds}; give at least {done}")


@contextlib.contextmanager
def only_reading() -> Iterator[None]:
    """Run directories that are opened here are left as they are."""
    token = READING.set(True)
    try:
        yield
    finally:
        READING.reset(token)


def _refuse(path: pathlib.Path, different: list[str]) -> None:
    if different:
        more = f" and {len(different) - MOST_NAMED} more" if len(different) > MOST_NAMED else ""
        raise AnotherExperiment(
            f"the run directory {path} belongs to another experiment: {'; '.join(different[:MOST_NAMED])}{more}; "
            "choose another directory"
        )
