"""Runs side by side in one program: a leading axis over them, one round counter, stops at an event of any."""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from fedjax_cluster import parallel
from fedjax_cluster.faults import faulty_clients
from fedjax_cluster.interruption import Interrupt
from fedjax_cluster.lifting import Numbers, with_numbers
from fedjax_cluster.report.names import counted
from fedjax_cluster.simulation.evaluation import evaluated_of
from fedjax_cluster.simulation.history import last_report
from fedjax_cluster.simulation.joint import heard
from fedjax_cluster.simulation.memory import USABLE, Memory, bytes_of, memory_of, size_text
from fedjax_cluster.simulation.progress import Progress
from fedjax_cluster.simulation.segment import LONGEST_SEGMENT, MOST_COMPARED, RunKeys, one_round, report
from fedjax_cluster.types import (
    ClientData,
    ClientMapping,
    ClusteredAlgorithm,
    Model,
    Population,
    PyTree,
    RoundInfo,
    State,
)

LOG = logging.getLogger(__name__)
SEGMENT_SECONDS = 1.0


@functools.partial(jax.jit, static_argnames=("algorithm", "shared"), donate_argnames="states")
def run_together(
    keys: RunKeys,
    states: State,
    train: Population,
    group: Array | None,
    initial: RoundInfo,
    numbers: Numbers,
    number: Array,
    stop: Array,
    due: Array | None = None,
    *,
    algorithm: ClusteredAlgorithm,
    shared: bool,
) -> tuple[State, dict[str, Array], Array]:
    """Rounds of R runs from `number` up to `stop`, or to an event of any of them.

    Args:
      keys: leaves [R], of each run.
      states: leaves [R, ...]; without their round, which is `number` in all of them.
      train, group: of the clients, leaves [R, ...]; or without that axis where all runs share them.
      initial: leaves [R, ...].
      numbers: path -> f32[R], what takes the place of the method's own numbers; see `lifting`.
      number, stop: i32[], rounds done, and the most to be done.
      due: i32[], the rounds at which the next evaluation is, for `segment.report`.
      algorithm: the method.
      shared: whether the runs share their clients.

    Returns:
      The states, the reports of the rounds, leaves [R, S, ...], and the rounds done.
    """
    start, axis = number, None if shared else 0

    def tell(info: RoundInfo, state: State, train: Population, group: Array | None) -> dict[str, Array]:
        return report(info, state._replace(round=start), train, group, due)

    def play(
        number: Array, keys: RunKeys, state: State, train: Population, group: Array | None, numbers: Numbers
    ) -> tuple[State, dict[str, Array]]:
        method = with_numbers(algorithm, numbers)
        state, row = one_round(method, keys, state._replace(round=number), train, group, due)
        return state._replace(round=()), row

    def unfinished(carry):
        number, _, _, event = carry
        return (number < stop) & ~event

    def advance(carry):
        number, states, buffer, _ = carry
        each = jax.vmap(functools.partial(play, number), in_axes=(0, 0, axis, axis, 0))
        states, row = each(keys, states, train, group, numbers)
        buffer = jax.tree.map(lambda all, one: all.at[:, number - start].set(one), buffer, row)
        return number + 1, states, buffer, jnp.any(row["event"])

    row = jax.vmap(tell, in_axes=(0, 0, axis, axis))(initial, states, train, group)
    buffer = jax.tree.map(lambda leaf: jnp.zeros((len(leaf), LONGEST_SEGMENT, *leaf.shape[1:]), leaf.dtype), row)
    number, states, buffer, _ = lax.while_loop(unfinished, advance, (number, states, buffer, jnp.asarray(False)))
    places = _shardings(states, train.mapping)
    states = states if places is None else lax.with_sharding_constraint(states, places)
    return states, buffer, number


@functools.partial(jax.jit, static_argnames=("model", "algorithm", "shared"))
def evaluate_together(
    keys: Array,
    states: State,
    train: Population,
    test: ClientData,
    numbers: Numbers,
    number: Array,
    chosen: Array | None = None,
    *,
    model: Model,
    algorithm: ClusteredAlgorithm,
    shared: bool,
) -> dict[str, Array]:
    """Metrics f32[R, M] of R runs, as `evaluation.evaluate_clients` has them; arguments as of `run_together`.

    `test` has rows [R, M, N', ...], or those that all runs share; `chosen` is i32[R, n].
    """
    axis = None if shared else 0

    def evaluate(
        key: Array, state: State, train: Population, test: ClientData, numbers: Numbers, chosen: Array | None
    ) -> dict[str, Array]:
        method = with_numbers(algorithm, numbers)
        return evaluated_of(key, state._replace(round=number), train, test, chosen, model, method)

    each = jax.vmap(evaluate, in_axes=(0, 0, axis, axis, 0, 0))
    return each(keys, states, train, test, numbers, chosen)


def _shardings(states: PyTree, mapping: ClientMapping) -> PyTree | None:
    """Where states with leaves [R, ...] are: each device has the rows of some clients, of every run."""
    if mapping.mesh is None:
        return None
    everywhere, rows = NamedSharding(mapping.mesh, P()), NamedSharding(mapping.mesh, P(None, parallel.AXIS))
    places = jax.tree.map(lambda _: everywhere, states)
    return places._replace(clients=jax.tree.map(lambda _: rows, states.clients))


@dataclasses.dataclass
class Batch:
    """Runs of one program, with states on the host until it is their turn."""

    runs: Sequence[Any]  # of `loop`, at the same round
    method: ClusteredAlgorithm  # the program's
    numbers: Sequence[Mapping[str, float]]  # of each run
    model: Model  # with the metrics to take
    tests: Sequence[ClientData]  # of each run, placed
    chosen: Sequence[np.ndarray | None]  # of each run, whom it evaluates
    rounds: int
    eval_every: int
    callbacks: Sequence[Sequence[Callable[..., Any]]]  # of each run

    @property
    def shared(self) -> bool:
        return all(run.train is self.runs[0].train for run in self.runs)

    @property
    def compared(self) -> bool:
        """Whether so many clients are compared with their groups that they are only where an evaluation is due."""
        return len(self.runs[0].state.clients.present) > MOST_COMPARED

    def arguments(self) -> tuple[Any, ...]:
        """Those of `run_together` up to `number`, stacked; the states are on the host still."""
        mapping, first = self.runs[0].train.mapping, self.runs[0]
        keys = _stacked([run.keys for run in self.runs])
        states = _stacked([run.state._replace(round=()) for run in self.runs])
        train, group = first.train, first.group
        if not self.shared:
            train, group = (_stacked([each(run) for run in self.runs]) for each in (_train_of, _group_of))
        initial = _stacked([run.info for run in self.runs])
        numbers = {path: np.asarray([of[path] for of in self.numbers], np.float32) for path in self.numbers[0]}
        done = jnp.asarray(first.done, jnp.int32)
        keys, initial, numbers, done = parallel.replicate(mapping, (keys, initial, numbers, done))
        return keys, states, train, group, initial, numbers, done

    def copied(self) -> int:
        """Bytes on each device of the clients' rows that are stacked for the batch beside those that are placed."""
        if self.shared:
            return 0
        devices = parallel.num_devices(self.runs[0].train.mapping)
        each = zip(self.runs, self.tests, strict=True)
        return sum(bytes_of((run.train.data.x, run.train.data.y, test.x, test.y), devices) for run, test in each)

    def test(self) -> ClientData:
        return self.tests[0] if self.shared else _stacked(list(self.tests))

    def evaluated(self) -> Array | None:
        """Whom each run evaluates, i32[R, n]; None is all."""
        found = [clients for clients in self.chosen if clients is not None]
        return parallel.replicate(self.runs[0].train.mapping, np.stack(found).astype(np.int32)) if found else None


def _train_of(run: Any) -> Population:
    return run.train


def _group_of(run: Any) -> Array | None:
    return run.group


def _stacked(trees: Sequence[PyTree]) -> PyTree:
    return jax.tree.map(lambda *leaves: _stack(leaves), *trees)


def _stack(leaves: Sequence[Any]) -> Any:
    return np.stack(leaves) if isinstance(leaves[0], np.ndarray) else jnp.stack(leaves)


@jax.jit
def _one_of(states: State, index: Array) -> State:
    return jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, index, 0, keepdims=False), states)


def memory_needed(batch: Batch, programs: dict[Any, Any]) -> tuple[Memory, Any, tuple[Any, ...]]:
    """What a batch takes of each device, its program, and the program's arguments with the states on the host still.

    `programs` has those of batches before, which may be of as many runs.
    """
    arguments, mapping = batch.arguments(), batch.runs[0].train.mapping
    keys, states, *others = arguments
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), states)
    kind = batch.method, batch.shared, str(shapes)
    if kind not in programs:
        if (places := _shardings(states, mapping)) is not None:
            shapes = jax.tree.map(
                lambda leaf, at: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=at), shapes, places
            )
        given = keys, shapes, *others, others[-1], others[-1] if batch.compared else None
        options = {"algorithm": batch.method, "shared": batch.shared}
        try:
            programs[kind] = run_together.lower(*given, **options).compile()
        except jax.errors.JaxRuntimeError as error:  # a TPU's compiler refuses what does not fit
            if len(batch.runs) == 1 or "RESOURCE_EXHAUSTED" not in str(error):
                raise
            raise DoesNotFit from error
    compiled = programs[kind]
    devices, tests = parallel.num_devices(mapping), 1 if batch.shared else len(batch.runs)
    test = tests * sum(leaf.nbytes for leaf in jax.tree.leaves(batch.tests[0])) // devices
    return memory_of(compiled, arguments, devices, test, parallel.platform(mapping)), compiled, arguments


def play_together(
    batch: Batch,
    programs: dict[Any, Any],
    *,
    beside: int = 0,
    progress: bool | None = None,
    time_clustering: bool = False,
) -> Memory:
    """Carries the runs of a batch out, as far as nobody interrupts them; returns what they take of each device.

    They have their histories, events, moves and final states then. `programs` are as in `memory_needed`, and `beside`
    are the bytes that each device holds for other runs of what is no argument.

    Raises:
      DoesNotFit: before anything is run.
    """
    started, runs = time.perf_counter(), batch.runs
    for run in runs:
        run.timed = time_clustering
    count, available = len(runs), USABLE * parallel.device_memory()
    if count > 1 and beside + batch.copied() > available:
        raise DoesNotFit
    memory, compiled, (keys, states, train, group, initial, numbers, _) = memory_needed(batch, programs)
    memory = memory._replace(rest=memory.rest + beside, peak=memory.peak + beside)
    LOG.info(
        f"{counted(count, 'run')} in one program: {size_text(memory.peak)} of {size_text(available)} a device, of it "
        f"{size_text(memory.population)} clients' rows, {size_text(memory.state)} models and states, "
        f"{size_text(memory.temporaries)} temporaries"
    )
    if memory.peak > available and count > 1:
        raise DoesNotFit
    places, test = _shardings(states, train.mapping), batch.test()
    states = jax.device_put(states) if places is None else jax.device_put(states, places)
    done, length, figures, speed = runs[0].done, 1, {}, 0.0
    on_devices = functools.partial(_on_devices, train.mapping)
    options = {"model": batch.model, "algorithm": batch.method, "shared": batch.shared}
    evaluate = functools.partial(evaluate_together, **options)
    chosen = batch.evaluated()
    jax.block_until_ready(evaluate(keys.evaluation, states, train, test, numbers, on_devices(done), chosen))  # compiles
    compile_seconds = (time.perf_counter() - started) / count
    interrupt = Interrupt.active or Interrupt()

    def fetch(which: Iterable[int]) -> None:
        for index in which:
            own = _one_of(states, jnp.asarray(index, jnp.int32))
            runs[index].state = own._replace(round=jnp.asarray(done, jnp.int32))

    with Progress(f"{batch.method.name} × {count}", batch.rounds, done, enabled=progress) as bar:
        while (done < batch.rounds or not runs[0].evaluated) and not heard(interrupt):
            if runs[0].evaluated:
                begun, before = time.perf_counter(), done
                due = min(batch.rounds, (done // batch.eval_every + 1) * batch.eval_every)
                end = on_devices(done), on_devices(min(due, done + length)), on_devices(due) if batch.compared else None
                states, reports, reached = compiled(keys, states, train, group, initial, numbers, *end)
                reports, done = jax.device_get(reports), int(reached)
                elapsed = time.perf_counter() - begun
                fetch(index for index in range(count) if reports["event"][index, done - before - 1])
                trained = 0.0
                for index, run in enumerate(runs):
                    own = {name: column[index] for name, column in reports.items()}
                    trained += run.add_rounds(own, before, done, elapsed / count)
                    run.evaluated = done < due
                speed = trained / max(elapsed, 1e-9)
                length = max(1, min(LONGEST_SEGMENT, int((done - before) * SEGMENT_SECONDS / max(elapsed, 1e-6))))
            if (done < batch.rounds or not runs[0].evaluated) and any(run.directory and run.saving_due for run in runs):
                fetch(range(count))
                for run in runs:
                    run.save()
            if not runs[0].evaluated and not heard(interrupt):
                given = keys.evaluation, states, train, test, numbers, on_devices(done), chosen
                found = jax.device_get(evaluate(*given))
                # Callbacks see the state, and honest clients' figures need the clusters.
                fetch(
                    index
                    for index, run in enumerate(runs)
                    if batch.callbacks[index] or faulty_clients(run.federation).any()
                )
                for index, run in enumerate(runs):
                    figures = run.add_figures({name: of[index] for name, of in found.items()}, batch.callbacks[index])
            bar.update(done, {**figures, **last_report(runs[0].history)}, speed)
    fetch(range(count))
    with interrupt.obeyed():
        for run in runs:
            if time_clustering and not interrupt.wanted:
                run.time_clustering()
            run.compile_seconds = compile_seconds
    return memory


class DoesNotFit(Exception):
    """More runs at a time than a device has room for."""


def _on_devices(mapping: ClientMapping, number: int) -> Array:
    return parallel.replicate(mapping, jnp.asarray(number, jnp.int32))
