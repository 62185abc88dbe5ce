"""What a simulation returns, and its one-page summary."""

from __future__ import annotations

import dataclasses
import functools
import io
import os
import pathlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from rich.console import Console

from fedjax_cluster import parallel, report
from fedjax_cluster.algorithms.round import labels
from fedjax_cluster.data.stored import dtype_of, rows_of_client, stored
from fedjax_cluster.data.validation import pixels_of
from fedjax_cluster.faults import faulty_clients
from fedjax_cluster.nn.precision import in_32_bits
from fedjax_cluster.options import as_path, checked
from fedjax_cluster.privacy.budget import Budget
from fedjax_cluster.simulation.assignments import Assignments, Kept
from fedjax_cluster.simulation.checkpoints import of_clients
from fedjax_cluster.simulation.client_files import write_clients
from fedjax_cluster.simulation.evaluation import evaluate_in_chunks, personal_models, predict_client, with_metrics
from fedjax_cluster.simulation.history import NOT_FINITE
from fedjax_cluster.simulation.model_files import check_folder, save_client, save_clusters
from fedjax_cluster.simulation.newcomers import admitted, before_admission, check_newcomers, with_newcomers
from fedjax_cluster.simulation.outliers import Outliers, outliers
from fedjax_cluster.simulation.private_runs import budget_of
from fedjax_cluster.types import ClientMapping, ClusteredAlgorithm, Event, Federation, Measure, State

SCREEN = 80  # characters


class PerClient(NamedTuple):
    """The clients of a run at its end, a row each."""

    accuracy: np.ndarray  # f32[M] on test rows; NaN without test rows, for the absent, and in regression
    loss: np.ndarray  # f32[M] likewise
    cluster: np.ndarray  # i32[M], −1 where it has none
    examples: np.ndarray  # i32[M], training rows
    metrics: dict[str, np.ndarray]  # f32[M] of each other metric, such as those given to `simulate`


@dataclasses.dataclass(frozen=True, repr=False)
class SimulationResult:
    """A finished run.

    Attributes:
      algorithm: the method.
      federation: the data it ran on.
      state: final state.
      history: one row a round: `round` (0-based), `loss`, `num_clients`, `num_clusters`, `num_changed`,
        `num_rejected`, `event` (1 where the method reported one), `adjusted_rand_index`, `purity`, the costs,
        `clustering_seconds` where these were timed, `seconds`, and the metrics on test rows (NaN between evaluations).
        Of more than 65 536 clients, who all are gone through for them, `num_clusters`, `adjusted_rand_index` and
        `purity` are NaN between evaluations too, but for rounds with an event.
      events: what the method kept of its splits and the like, in the order of their rounds.
      summary: what summary.json holds.
      moves: rounds done -> the clients' clusters, where somebody moved; see `assignments`.
      metrics: those that were taken beside the model's.
      kept: whether the run directory has all of it; False where its disk was full, None where it was removed, or is
        another run's by now.
      before: the run's own result, where clients came after it, of which pages and pictures are.
    """

    algorithm: ClusteredAlgorithm
    federation: Federation
    state: State
    history: dict[str, np.ndarray]
    events: tuple[Event, ...]
    summary: dict[str, Any]
    evaluation_key: Array
    mapping: ClientMapping
    moves: Kept = dataclasses.field(default_factory=dict)
    metrics: tuple[Measure, ...] = ()
    kept: bool | None = True
    before: SimulationResult | None = None

    @property
    def labels(self) -> np.ndarray:
        """i32[M]: the cluster of each client, −1 where it has none."""
        return parallel.fetched(labels(self.state.clients.membership))[: len(self.federation.train.num_examples)]

    @property
    def user_ids(self) -> np.ndarray | None:
        """[M]: the clients' own ids, where the data have users; None where they have not."""
        return getattr(self.federation, "user_ids", None)

    @property
    def faulty(self) -> np.ndarray:
        """bool[M]: the clients that the run's fault was of; nobody without one."""
        return faulty_clients(self.federation)

    @functools.cached_property
    def privacy(self) -> Budget | None:
        """What the run has spent: ε at δ, see `privacy.spent`; None without privacy."""
        return budget_of(self.algorithm, self.federation, int(self.state.round))

    @functools.cached_property
    @in_32_bits
    def per_client(self) -> PerClient:
        """Metrics on all test rows, cluster and training rows of each client; evaluated when first asked for.

        `result.per_client.accuracy[result.per_client.cluster == 2]` are the accuracies in cluster 2.
        """
        nothing = np.full(len(self.federation.train.num_examples), np.nan, np.float32)
        accuracy, loss = (self._figures.get(name, nothing) for name in ("accuracy", "loss"))
        told = {"accuracy", "loss", NOT_FINITE}
        others = {name: value for name, value in self._figures.items() if name not in told}
        return PerClient(accuracy, loss, self.labels, np.asarray(self.federation.train.num_examples, np.int32), others)

    @functools.cached_property
    @in_32_bits
    def outliers(self) -> Outliers:
        """What tells of clients that moved, hold copies or are far from every cluster; looked at when first asked for.

        `result.outliers.reasons()` names those that stand out, {client: [why, ...]}. All clients train once from a
        model that is drawn anew; of a population on disk only moves are looked at.
        """
        place = functools.partial(parallel.place_population, info=self.federation.info, mapping=self.mapping)
        train = self.federation.train
        return outliers(self.algorithm, train, self.labels, self.assignments, self.evaluation_key, lambda: place(train))

    @functools.cached_property
    def _figures(self) -> dict[str, np.ndarray]:
        """All metrics of each client, arrays [M]."""
        count, parts = len(self.federation.train.num_examples), [figures for _, figures in self._evaluated()]
        return {name: np.concatenate([part[name] for part in parts])[:count] for name in parts[0]}

    def _evaluated(self) -> Iterator[tuple[np.ndarray, dict[str, np.ndarray]]]:
        """All clients' numbers and metrics, some at a time where their rows are on disk."""
        place = functools.partial(parallel.place_population, info=self.federation.info, mapping=self.mapping)
        train, test = place(self.federation.train), place(self.federation.test).data
        options = {"model": with_metrics(self.algorithm.model, self.metrics), "algorithm": self.algorithm}
        return evaluate_in_chunks(self.evaluation_key, self.state, train, test, **options)

    @in_32_bits
    def write_clients(self, path: str | os.PathLike) -> pathlib.Path:
        """Writes a row for each client: its cluster, numbers of training and test rows, and metrics on all of these.

        Users have their own ids in the column `user`, and `group` is the true one where it is known.

        Of a population on disk no more than a chunk of clients is held at a time.

        Args:
          path: of a `.csv` file, or of a `.parquet` one where pyarrow is installed.

        Returns:
          The file.

        Raises:
          ValueError: a path of another kind.
          ImportError: a `.parquet` without pyarrow.
        """
        train, test = self.federation.train, self.federation.test
        path = as_path("path", path)
        chunks = self._evaluated() if stored(self.federation) else [(np.arange(len(self.labels)), self._figures)]
        columns = {
            **({} if self.user_ids is None else {"user": np.asarray(self.user_ids)}),
            **({} if self.federation.group is None else {"group": np.asarray(self.federation.group)}),
            "cluster": self.labels,
            "train_examples": np.asarray(train.num_examples),
            "test_examples": np.asarray(test.num_examples),
        }
        if parallel.is_first():
            return write_clients(path, columns, chunks, self.federation.info.group_names)
        for _ in chunks:  # in which the first needs this process
            pass
        return path

    @property
    def assignments(self) -> Assignments:
        """The clusters after the first round, after each in which a client moved, after each event, and at the end.

        Of more than 2 048 clients only after events that the method kept them of (CFL, FedGWC, FLAG, PACFL, FL+HC,
        FlexCFL), and at the end.
        """
        count = len(self.federation.train.num_examples)
        of_events = {event.round + 1: np.asarray(event.content["labels"])[:count] for event in self.events
                     if "labels" in event.content}  # fmt: skip
        kept = {**self.moves, **of_events}
        kept[int(self.state.round)] = self.labels
        rounds = sorted(kept)
        return Assignments(np.asarray(rounds, np.int32), np.stack([kept[at] for at in rounds]).astype(np.int32))

    @in_32_bits
    def save_models(self, folder: str | os.PathLike, *, clients: bool = False) -> list[pathlib.Path]:
        """Writes a safetensors file for each cluster in use.

        Reading one back takes no part of this package but the model:

            from flax.traverse_util import unflatten_dict
            from safetensors.numpy import load_file
            read = unflatten_dict(load_file("models/cluster0.safetensors"), sep="/")
            outputs, _ = model.apply(fc.types.Variables(read["params"], read.get("stats", {})), x, train=False)

        Lists and tuples are dicts then, with their places as names; the page on results reads them as they were.

        Args:
          folder: where; cluster0.safetensors and so on, numbered as `labels` are.
          clients: also the personal models of each client, client0.safetensors and so on, which is all that methods
            such as local-only train: their arrays have an axis [P, ...] in front, and `mixture` f32[P] weights their
            predictions.

        Returns:
          The files.

        Raises:
          ValueError: the folder is a file, or holds models of clusters or clients that this result has not.
        """
        folder = as_path("folder", folder)
        clusters = np.flatnonzero(np.asarray(self.state.clusters.active))
        check_folder(folder, clusters, len(self.federation.train.num_examples) if clients else 0)
        files = save_clusters(folder, self.state, clusters, self._told())
        if clients:
            for client in range(len(self.federation.train.num_examples)):
                data = rows_of_client(self.federation.train, client)
                key = jax.random.fold_in(self.evaluation_key, client)
                variables, mixture = personal_models(self.algorithm, key, self.state, data, jnp.asarray(client))
                files.append(save_client(folder, client, variables, mixture, self._told()))
        return files

    def on_host(self) -> SimulationResult:
        """The result with its whole state in this process, which can draw and predict from it without the others.

        Of several processes all call it. What evaluates clients, such as `per_client`, is quicker asked for by all of
        them before: afterwards one process evaluates everybody.
        """
        if not parallel.several():
            return self
        here = parallel.client_mapping(self.mapping.strategy, self.mapping.chunk_size, jax.local_devices()[:1])
        # One device needs none of the rows that fill up several.
        state = of_clients(parallel.fetched(self.state), len(self.federation.train.num_examples))
        found = dataclasses.replace(self, state=state, mapping=here)
        found.__dict__.update(
            {name: value for name, value in self.__dict__.items() if name in ("per_client", "outliers", "_figures")}
        )
        return found

    @in_32_bits
    def admit(self, newcomers: Federation) -> SimulationResult:
        """The result with clients who were in no round: the method's own rule gives each a cluster, and nobody trains.

        It is the rule by which clients join during a run (`Churn`). What nobody has trained stays so: layers of a
        client's own, and the model of a cluster that a newcomer opens as it is far from all (PACFL, StoCFL).

        They are the last ones of the new result, whose `labels`, `per_client`, `predict` and `save_models` have them;
        models, history, summary and pictures are those of the run, which in its directory stays as it is.

        Args:
          newcomers: a federation of their own, with inputs and classes as the run's: such as
            `fc.data.from_arrays(x, y, client_ids, num_classes=10)`.

        Raises:
          ValueError: data of another kind, ids that the federation has already, or a run that admits nobody: of some
            methods, with privacy, in several processes.
        """
        check_newcomers(self.algorithm, self.federation, newcomers)
        known, number = len(self.federation.train.num_examples), len(newcomers.train.num_examples)
        federation = with_newcomers(self.federation, newcomers)
        state = of_clients(parallel.fetched(self.state), known)
        key = jax.random.fold_in(jax.random.fold_in(self.evaluation_key, known + number), number)
        here = parallel.client_mapping(self.mapping.strategy, self.mapping.chunk_size, jax.local_devices()[:1])
        state = admitted(key, self.algorithm, state, federation, here, known, self.summary["seed"])
        moves, events = before_admission({**self.moves, int(self.state.round): self.labels}, self.events, known, number)
        changes = {"federation": federation, "state": state, "events": events, "mapping": here, "moves": moves}
        return dataclasses.replace(self, **changes, kept=False, before=self.before or self)

    def _told(self) -> dict[str, str]:
        return {"algorithm": self.algorithm.name, "rounds": str(int(self.state.round))}

    def __repr__(self) -> str:
        """The summary, and what there is to look at."""
        text = io.StringIO()
        report.tables.summary_table(self.summary).print(Console(file=text, width=SCREEN))
        lines = [line.rstrip() for line in text.getvalue().splitlines()]
        columns = report.style.wrapped(f"history: {', '.join(self.history)}", SCREEN)
        more = "also: per_client, outliers, assignments, labels, events, state, plot(), predict(), to_pandas(), "
        more += "save_models(), admit()"
        return "\n".join([*lines, columns, report.style.wrapped(more, SCREEN)])

    @in_32_bits
    def predict(self, x: Any, client: int | str) -> Any:
        """Predictions of one client's personal model for rows x [N, ...]; a user's own id, as text, names the client.

        Arrays [N, ...] as the model's `predict` gives them, one or a tree of several.

        Raises:
          ValueError: no such client, no rows, rows of another shape than the client's, bytes where the client's are
            none, or, where these are, numbers that are neither whole from 0 to 255, which are taken for bytes, nor from
            0 to 1.
        """
        if isinstance(client, str) and self.user_ids is not None:
            own = np.flatnonzero(np.asarray(self.user_ids).astype(str) == client)
            if not len(own):
                raise ValueError(f"client is {client!r}, which is no user's id; see user_ids")
            client = int(own[0])
        client = int(checked("client", client, int))
        train = self.federation.train
        count = len(train.num_examples)
        if not 0 <= client < count:
            raise ValueError(f"client is {client}; the federation has clients 0 to {count - 1}")
        x = np.asarray(x)
        if x.dtype.kind not in "biuf" and x.dtype != jnp.bfloat16:
            raise ValueError(f"x holds {x.dtype}; give rows of numbers")
        if x.shape[1:] != np.shape(train.x)[2:]:
            raise ValueError(f"x has rows of shape {x.shape[1:]}; the clients' have {np.shape(train.x)[2:]}")
        if not len(x):
            raise ValueError("x has no rows; give at least one")
        if dtype_of(train.x) == np.uint8 != x.dtype:
            x = pixels_of(x)
        elif x.dtype == np.uint8 != dtype_of(train.x):
            raise ValueError(
                f"x holds bytes, which models divide by 255, and the clients' x {dtype_of(train.x)}; give that"
            )
        data = rows_of_client(train, client)
        key = jax.random.fold_in(self.evaluation_key, client)
        found = predict_client(key, self.state, data, jnp.asarray(client), x, algorithm=self.algorithm)
        return jax.tree.map(np.asarray, parallel.fetched(found))

    def plot(self, metric: str | None = None):
        """Draws accuracy (or another column of the history) and ARI against rounds; returns the figure."""
        return report.curves.learning_curves({self.algorithm.name: self.history}, metric=metric)

    def to_pandas(self):
        """The history as a data frame indexed by round."""
        import pandas  # slow to import

        return pandas.DataFrame(self.history).set_index("round")
