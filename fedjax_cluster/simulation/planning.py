"""What a run would need of devices that need not be there: its programs are compiled for them from shapes alone."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from typing import Any, NamedTuple

import jax
from jax.sharding import NamedSharding, PartitionSpec

from fedjax_cluster import parallel
from fedjax_cluster.data.stored import stored, streamed, too_large
from fedjax_cluster.nn.precision import in_32_bits
from fedjax_cluster.options import COUNT, checked, shown
from fedjax_cluster.parallel.ahead import CohortsAhead
from fedjax_cluster.report.names import counted, method_name
from fedjax_cluster.report.table import Column, Table
from fedjax_cluster.simulation.abstract import (
    PopulationShape,
    abstract_arguments,
    abstract_cohorts,
    in_a_round,
    shape_of,
    without_training,
    work_and_dealing,
)
from fedjax_cluster.simulation.advice import LONGEST_MESSAGE, advice, of_gpus
from fedjax_cluster.simulation.devices import Target, target
from fedjax_cluster.simulation.memory import USABLE, Memory, bytes_of, memory_of, size_text
from fedjax_cluster.simulation.other_plans import Other, other_programs, tested_bytes
from fedjax_cluster.simulation.program_costs import ProgramCosts, own_names, program_costs
from fedjax_cluster.simulation.segment import MOST_COMPARED, run_segment
from fedjax_cluster.simulation.streaming import draws_ahead, lot_of
from fedjax_cluster.simulation.together import run_together
from fedjax_cluster.types import ClientMapping, ClusteredAlgorithm, Federation, Selection

WHY = {"tpu": "matrix units are 128 wide, and it fits"}
MOST_COMPILATIONS = 3


class Plan(NamedTuple):
    """What `plan` finds."""

    method: str
    device: str
    devices: int
    clients: int
    rows: int
    cohort: int  # clients of a round
    available: int  # bytes of each device that can be used
    memory: Memory | None  # of the rounds; None: not even the smallest chunk could be compiled
    others: tuple[Other, ...]  # programs before the first round and of evaluations
    strategy: str
    chunk: int  # clients at a time on each device
    why: str  # that chunk
    costs: ProgramCosts | None  # of a round, on each device
    roofline: float | None  # seconds of a round at least; None without a data sheet
    source: str  # of the device's figures
    compile_seconds: float
    compilations: int
    advice: tuple[str, ...]  # what to change where it does not fit

    @property
    def fits(self) -> bool:
        """Whether the peaks are within the memory that can be used."""
        return self.memory is not None and self.memory.peak <= self.available and not self.too_large

    @property
    def too_large(self) -> tuple[Other, ...]:
        """The programs besides the rounds' that do not fit."""
        return tuple(each for each in self.others if each.peak is None or each.peak > self.available)

    @property
    def peak(self) -> int | None:
        """The most bytes of a device at any time of the run; None where some program does not even compile."""
        peaks = [None if self.memory is None else self.memory.peak, *(each.peak for each in self.others)]
        return None if None in peaks else max(peaks)  # pyright: ignore[reportArgumentType, reportCallIssue]

    def table(self) -> Table:
        """The plan as a table of two columns."""
        lines: dict[str, str] = {
            "devices": f"{self.devices} × {self.device}" + (f" ({self.source})" if self.source else ""),
            "clients": f"{self.clients:,} of {counted(self.rows, 'row')}, {self.cohort:,} a round",
            "fits": "yes" if self.fits else "no",
        }
        if self.memory is not None:
            lines["peak memory"] = f"{size_text(self.memory.peak)} of {size_text(self.available)} a device"
            lines |= {f"  {name}": size_text(value) for name, value in self.memory.parts().items() if value}
        for number, each in enumerate(self.others):
            size = "more than there is" if each.peak is None else size_text(each.peak)
            lines[each.when + " " * number] = f"{size}: {each.what}"
        lines["clients at a time"] = f"{self.chunk:,} a device ({self.why})"
        if self.costs is not None:
            lines |= _cost_lines(self)
        lines["compilation"] = f"{self.compile_seconds:.1f} s, {counted(self.compilations, 'program')}"
        lines |= {"to change" if not number else " " * number: each for number, each in enumerate(self.advice)}
        title = f"{method_name(self.method)}: compiled, not timed"
        return Table(title, (Column(""), Column("")), tuple(lines.items()))


@in_32_bits
def plan(
    algorithm: ClusteredAlgorithm,
    federation: Federation | PopulationShape,
    *,
    device: str = "local",
    chunk_size: int | None = None,
    runs: int = 1,
    whole: bool = True,
    eval_clients: int | None = None,
) -> Plan:
    """Compiles a run for devices that need not be there, and reports memory, work and messages.

    Args:
      algorithm: from `fedjax_cluster.algorithms`.
      federation: the data, or a `PopulationShape` of any size, of which nothing is made.
      device: "v5e:2x4", "v6e:4x4", "v5p:2x2x1" and other shapes of TPUs, "h100", "h200", or "local".
      chunk_size: clients at a time on each device, of each run; None lets the compiler's memory figures decide.
      runs: of several side by side on the same clients, as `simulate_many` has them; the plan is that of all, and of
        their rounds alone.
      whole: what comes before the first round and an evaluation as well, besides the rounds; of clients on disk and
        of several runs the rounds alone are compiled.
      eval_clients: how many clients the evaluation takes, as in `simulate`; None is all.

    Returns:
      A Plan; `plan.table().print()` shows it.

    Raises:
      ValueError: an unknown device, a compiler that is not installed, a number of clusters that the data decide, or a
        federation that the method refuses.

    >>> import fedjax_cluster as fc
    >>> from fedjax_cluster.types import DatasetInfo
    >>> shape = fc.PopulationShape(clients=100, rows=20, info=DatasetInfo("digits", (8, 8), 10))
    >>> found = plan(fc.algorithms.fedavg(fc.nn.linear(), local=fc.local.sgd(0.1, batch_size=8, steps=1)), shape)
    >>> found.fits, found.memory.peak > 0
    (True, True)
    """
    if not all(hasattr(algorithm, part) for part in ("name", "select", "step")):
        raise ValueError(f"algorithm is {shown(algorithm)}; give a method, such as fc.algorithms.fedavg(model, ...)")
    checked("eval_clients", eval_clients, int | None, COUNT)
    shape, aim = shape_of(federation), target(device)
    if getattr(algorithm, "clusters", None) == "auto":
        raise ValueError("clusters is 'auto', which a pilot on the data decides, and a plan has no data; give a number")
    runs = checked("runs", runs, int, COUNT)
    check_reading(algorithm, federation)
    if runs > 1 and aim.platform == "cpu":  # see `requests.without_mesh_of_cores`
        aim = aim._replace(devices=aim.devices[:1], memory=len(aim.devices) * aim.memory)
    mapping = parallel.client_mapping("auto", chunk_size, aim.devices)
    devices = parallel.num_devices(mapping)
    known, dealt = work_and_dealing(algorithm, federation, shape, devices)
    shape = shape._replace(uneven=known)
    arguments = abstract_arguments(without_training(algorithm), shape, mapping, dealt)
    drawn, lots = _drawn(algorithm, arguments[1]), 1
    if runs > 1 and isinstance(federation, Federation) and stored(federation):
        raise ValueError(f"runs is {runs}, but runs on a population on disk go one after the other; leave it out")
    if isinstance(federation, Federation) and streamed(federation.train):
        lot = lot_of(algorithm, federation.train, drawn, len(arguments[1].clients.present))
        train = abstract_cohorts(drawn, lot, shape, mapping)
        arguments, lots = (*arguments[:2], train, *arguments[3:]), 1 + draws_ahead(algorithm)
    cohort = -(-len(drawn.index) // devices) * devices
    share = -(-cohort // devices)
    test = tested_bytes(federation, shape, mapping)
    rounds = _compiled_rounds(algorithm, arguments, aim, runs, share, chunk_size, test, lots)
    memory, seconds, tried, others = rounds.memory, rounds.seconds, rounds.tried, ()
    if whole and runs == 1 and memory is not None and memory.peak <= aim.memory * USABLE:
        started = time.perf_counter()
        # Of all clients more go at a time than of a cohort of a few.
        most = chunk_size or parallel.MOST_AT_A_TIME.get(parallel.platform(mapping), rounds.chunk)
        chunk = min(most, -(-shape.clients // devices)) if rounds.chunk == share else rounds.chunk
        for at_a_time in (attempts := tuple(dict.fromkeys((chunk, chunk_size or rounds.chunk)))):
            given = _with_mapping(arguments, _at_a_time(mapping, at_a_time))
            with contextlib.suppress(*[ValueError] * (at_a_time != attempts[-1])):  # the compiler may take fewer
                others = other_programs(algorithm, federation, shape, given, aim, test, eval_clients)
                tried += len(others)
                if all(each.peak is not None and each.peak <= aim.memory * USABLE for each in others):
                    break
        seconds += time.perf_counter() - started
    costs = None if rounds.compiled is None or memory is None else program_costs(rounds.compiled.as_text())
    found = Plan(
        algorithm.name,
        aim.name,
        devices,
        shape.clients,
        shape.rows,
        in_a_round(algorithm, shape, len(drawn.index)),
        int(aim.memory * USABLE),
        memory,
        others,
        mapping.strategy,
        rounds.chunk,
        rounds.why,
        costs,
        None if costs is None else _roofline(costs, aim),
        "" if aim.kind is None else aim.kind.source,
        seconds,
        tried,
        (),
    )
    if found.fits:
        return found._replace(advice=of_gpus(found.peak, aim))
    state: Any = arguments[1]
    everywhere = bytes_of(state._replace(clients=None), 1)
    return found._replace(advice=advice(algorithm, found, shape, everywhere, rounds.failure))


class _Rounds(NamedTuple):
    """The rounds' program with as many clients at a time as fit."""

    compiled: Any
    memory: Memory | None
    chunk: int
    why: str
    failure: str  # the compiler's last message
    seconds: float
    tried: int


def _compiled_rounds(
    algorithm: ClusteredAlgorithm,
    arguments: tuple,
    aim: Target,
    runs: int,
    share: int,
    chunk_size: int | None,
    test: int,
    lots: int,
) -> _Rounds:
    """The rounds compiled for so many clients at a time as asked for, or as fit, of a device's share.

    `test` are bytes of test rows on each device, `lots` the lots of cohorts that are there at once.
    """
    train = arguments[2]
    mapping = (train.cohorts if isinstance(train, CohortsAhead) else train).mapping
    devices, room = parallel.num_devices(mapping), aim.memory * USABLE
    first = parallel.MOST_AT_A_TIME.get(parallel.platform(mapping), share)
    chunk, why, compiled, seconds, tried = 1, "a CPU device takes one after the other", None, 0.0, 0
    if mapping.strategy != "scan":
        chunk, why = min(chunk_size or first, share), "as asked for" if chunk_size else "all of a device's share"
    memory, failure, fallback = None, "", (chunk, why)
    while tried < MOST_COMPILATIONS:
        started = time.perf_counter()
        try:
            given = _with_mapping(arguments, _at_a_time(mapping, chunk)._replace(runs=runs))
            compiled = _compile(algorithm, given, aim, runs)
            memory = memory_of(compiled, side_by_side(given, runs), devices, test, aim.platform)
            # A lot of cohorts is brought to the devices while they compute with another.
            waiting = (lots - 1) * memory.population
            memory = memory._replace(population=memory.population + waiting, peak=memory.peak + waiting)
        except jax.errors.JaxRuntimeError as error:  # a TPU's compiler refuses what does not fit
            failure = " ".join(str(error).split())
            if "RESOURCE_EXHAUSTED" not in failure:  # a fault of the compiler's own
                if not tried:
                    raise ValueError(_not_compiled(aim, chunk, failure)) from error
                seconds, tried, chunk, why = seconds + time.perf_counter() - started, tried + 1, *fallback
                break
            memory = None
        seconds, tried = seconds + time.perf_counter() - started, tried + 1
        if chunk_size or chunk == 1 or (memory is not None and memory.peak <= room):
            break
        smaller = chunk // 4 if memory is None else _fitting(chunk, memory, room)
        if smaller < 1 or tried == MOST_COMPILATIONS:
            break
        fallback = chunk, f"the compiler fails with {smaller} at a time"
        why = f"{chunk} would take {size_text(memory.peak) if memory else 'more than there is'}"
        chunk = smaller
    if not chunk_size and chunk == first < share and memory is not None and memory.peak <= room:
        why = WHY.get(parallel.platform(mapping), "hundreds keep it busy, and it fits")
    return _Rounds(compiled, memory, chunk, why, failure, seconds, tried)


def _at_a_time(mapping: ClientMapping, chunk: int) -> ClientMapping:
    return mapping if mapping.strategy == "scan" else mapping._replace(chunk_size=chunk)


def _not_compiled(aim: Target, chunk: int, failure: str) -> str:
    what = f"the compiler for {aim.name} fails with {counted(chunk, 'client')} at a time"
    return f"{what} ({failure[:LONGEST_MESSAGE]}); give another chunk_size (--chunk-size)"


def _compile(algorithm: ClusteredAlgorithm, arguments: tuple, aim: Target, runs: int = 1) -> Any:
    if runs == 1:
        state, stop = arguments[1], arguments[-1]
        due = {"due": stop} if len(state.clients.present) > MOST_COMPARED else {}
        traced = run_segment.trace(*arguments, **due, algorithm=algorithm)
    else:
        stop, together = arguments[-1], side_by_side(arguments, runs)
        due = stop if len(arguments[1].clients.present) > MOST_COMPARED else None
        traced = run_together.trace(*together, {}, stop, stop, due, algorithm=algorithm, shared=True)
    with own_names():
        return traced.lower(lowering_platforms=(aim.platform,)).compile(compiler_options=aim.compiler_options or None)


def side_by_side(arguments: tuple, runs: int) -> tuple:
    """The arguments of several runs that share their clients; those of one as they are."""
    if runs == 1:
        return arguments
    keys, state, train, group, info, _ = arguments

    def stacked(leaf: Any) -> jax.ShapeDtypeStruct:
        place = leaf.sharding
        if isinstance(place, NamedSharding):
            place = NamedSharding(place.mesh, PartitionSpec(None, *place.spec))
        return jax.ShapeDtypeStruct((runs, *leaf.shape), leaf.dtype, sharding=place)

    keys, state, info = jax.tree.map(stacked, (keys, state._replace(round=()), info))
    return keys, state, train, group, info


def _with_mapping(arguments: tuple, mapping: ClientMapping) -> tuple:
    keys, state, train, *others = arguments
    if isinstance(train, CohortsAhead):
        train = dataclasses.replace(train, cohorts=dataclasses.replace(train.cohorts, mapping=mapping))
    else:
        train = dataclasses.replace(train, mapping=mapping)
    return (keys, state, train, *others)


def check_reading(algorithm: ClusteredAlgorithm, federation: Federation | PopulationShape) -> None:
    """Raises a ValueError where clients' rows are on disk, but the start would take all of them."""
    if isinstance(federation, Federation) and stored(federation) and getattr(algorithm, "reads_all", False):
        raise ValueError(too_large(federation.train.x))


def check_lots(algorithm: ClusteredAlgorithm, federation: Federation) -> None:
    """Raises a ValueError where clients' rows are on disk, but the start or a round would take all of them."""
    check_reading(algorithm, federation)
    if stored(federation):
        arguments = abstract_arguments(
            without_training(algorithm), shape_of(federation), parallel.client_mapping("auto")
        )
        state = arguments[1]
        lot_of(algorithm, federation.train, _drawn(algorithm, state), len(state.clients.present))


def _drawn(algorithm: ClusteredAlgorithm, state: Any) -> Selection:
    """Shapes of who takes part in a round."""
    return jax.eval_shape(lambda key, state: algorithm.select(key, state), jax.random.key(0), state)


def _fitting(chunk: int, memory: Memory, room: float) -> int:
    """The largest power of two of clients whose temporaries, taken to grow with them, have room."""
    left = room - (memory.peak - memory.temporaries)
    most = chunk * left / max(memory.temporaries, 1)
    return 2 ** int(math.log2(most)) if most >= 1 else 1 if chunk > 1 else 0


def _roofline(costs: ProgramCosts, aim: Target) -> float | None:
    if aim.kind is None:
        return None
    least, rate = costs.least, aim.kind.flops_of_halves if costs.halves else aim.kind.flops
    return max(least.flops / rate, least.bytes / aim.kind.bandwidth) + least.message_bytes / aim.kind.link


def _cost_lines(found: Plan) -> dict[str, str]:
    costs = found.costs
    assert costs is not None
    written = f"{size_text(costs.bytes)} of results, written and read"
    lines = {
        "work a round": f"{costs.flops / 1e9:,.3g} GFLOP and {written}, on each device",
        "messages a round": "; ".join(
            f"{number} × {kind}, {size_text(size)}" for kind, (number, size) in sorted(costs.messages.items())
        )
        or "none",
    }
    if found.roofline is not None:
        lines["a round takes at least"] = f"{1e3 * found.roofline:,.3g} ms (roofline)"
    if costs.cycles:
        lines["the compiler's estimate"] = f"{costs.cycles:,.3g} cycles a round"
    if costs.unknown:
        lines["counted once"] = f"{counted(costs.unknown, 'loop')} whose turns depend on the data"
    return lines
