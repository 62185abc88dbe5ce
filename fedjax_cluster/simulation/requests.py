"""Several runs that are wanted, carried out with as few programs as there can be: side by side, or in turn."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from fedjax_cluster import lifting, parallel
from fedjax_cluster.data.stored import stored
from fedjax_cluster.faults import Fault, afflict
from fedjax_cluster.interruption import CHECKPOINT_SECONDS, Interrupt
from fedjax_cluster.simulation.arguments import check_arguments
from fedjax_cluster.simulation.churn import Schedule
from fedjax_cluster.simulation.evaluation import Callback, chosen_clients, with_metrics
from fedjax_cluster.simulation.history import dtype_of_groups
from fedjax_cluster.simulation.loop import simulate
from fedjax_cluster.simulation.memory import Memory, bytes_of
from fedjax_cluster.simulation.result import SimulationResult
from fedjax_cluster.simulation.run import Run, start_run
from fedjax_cluster.simulation.run_directory import kept_in
from fedjax_cluster.simulation.segment import placed_clients, run_segment
from fedjax_cluster.simulation.together import Batch, DoesNotFit, play_together
from fedjax_cluster.types import Churn, ClientData, ClientMapping, ClusteredAlgorithm, Federation, Measure

# What JAX raises where a traced number would decide a shape, a loop or a branch of Python.
DECIDES = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)


class Request(NamedTuple):
    """One run that is wanted; arguments as of `simulate`."""

    algorithm: ClusteredAlgorithm
    federation: Federation
    rounds: int
    seed: int = 0
    eval_every: int = 10
    eval_clients: int | None = None
    metrics: tuple[Measure, ...] = ()
    callbacks: tuple[Callback, ...] = ()
    churn: tuple[Churn, ...] = ()
    run_dir: Any = None
    config: Mapping[str, Any] | None = None
    fault: Fault | None = None

    def simulate(self, **options: Any) -> SimulationResult:
        """The run by itself."""
        given = self._asdict()
        return simulate(given.pop("algorithm"), given.pop("federation"), **given, **options)

    def shapes(self) -> Any:
        """What runs of one program have in common, beside their method."""
        rows = jax.tree.map(lambda leaf: (np.shape(leaf), str(np.asarray(leaf).dtype)), self.federation[:2])
        of_rounds = self.rounds, self.eval_every, self.eval_clients, self.metrics
        return str(rows), str(dtype_of_groups(self.federation.group)), self.federation.info, of_rounds, self.fault


def carry_out(
    requests: Sequence[Request],
    *,
    together: bool | None = None,
    mapping: ClientMapping | None = None,
    progress: bool | None = None,
    time_clustering: bool = False,
    checkpoint_every: float = CHECKPOINT_SECONDS,
) -> tuple[list[SimulationResult], bool, Memory | None]:
    """The results of runs, of which those share a program whose methods differ in numbers alone.

    Args:
      requests: the runs.
      together: as of `simulate_many`.
      mapping, progress, time_clustering, checkpoint_every: see `simulate`.

    Returns:
      The results in the order of the requests, whether any ran side by side, and the most that these took of a device.

    Raises:
      ValueError: as `simulate` raises it, or a number in which methods differ decides what their programs are.
    """
    mapping = parallel.client_mapping() if mapping is None else mapping
    together = pays(mapping) if together is None else together
    found: dict[int, SimulationResult] = {}
    memory: list[Memory] = []
    options = {"progress": progress, "time_clustering": time_clustering, "checkpoint_every": checkpoint_every}
    for members, numbers in lifting.differing([request.algorithm for request in requests]):
        groups: dict[Any, list[int]] = {}
        for index in members:
            groups.setdefault(requests[index].shapes() if can_go_together(requests[index]) else None, []).append(index)
        for shapes, own in groups.items():
            chosen = [requests[index] for index in own]
            try:
                with lifting.one_program(numbers):
                    if together and shapes is not None and len(chosen) > 1:
                        results, needed = _side_by_side(chosen, mapping, **options)
                        memory += needed
                    else:
                        results = [request.simulate(mapping=mapping, **options) for request in chosen]
            except DECIDES as error:
                refusal = _refusal(chosen[0], numbers, mapping) if numbers else None
                if refusal is None:  # the method's own mistake
                    raise
                raise ValueError(refusal) from error
            found |= dict(zip(own, results, strict=True))
    most = max(memory, key=lambda each: each.peak, default=None)
    return [found[index] for index in range(len(requests))], bool(memory), most


def pays(mapping: ClientMapping) -> bool:
    """Whether runs side by side are faster than in turn: they fill an accelerator, and a CPU is full of one."""
    return parallel.platform(mapping) != "cpu"


def can_go_together(request: Request) -> bool:
    """Whether a run can be one of several in a program: rows on disk are read, and clients join, for one run alone."""
    joining = request.fault is not None and request.fault.late
    return not request.churn and not joining and not stored(request.federation.train)


def without_mesh_of_cores(mapping: ClientMapping) -> ClientMapping:
    """The mapping of runs side by side: of several CPU devices, one.

    NOTE: 32 runs of CFL-GP on two CPU devices came to a standstill within their program (jax 0.10), and 16 did not:
    what XLA divides among its threads there waits for threads that wait for the other device.
    """
    return mapping._replace(mesh=None) if parallel.platform(mapping) == "cpu" else mapping


def _side_by_side(
    requests: Sequence[Request],
    mapping: ClientMapping,
    *,
    progress: bool | None,
    time_clustering: bool,
    checkpoint_every: float,
) -> tuple[list[SimulationResult], list[Memory]]:
    found: dict[int, SimulationResult] = {}
    memory: list[Memory] = []
    mapping = without_mesh_of_cores(mapping)
    with Interrupt() as interrupt, contextlib.ExitStack() as stack:
        runs, tests, choices = _started(requests, mapping, checkpoint_every, stack)
        stack.enter_context(interrupt.patiently())
        open_runs: dict[Any, list[int]] = {}
        for index, run in enumerate(runs):
            if run.ended(requests[index].rounds):
                found[index] = run.read_back()
                continue
            run.begin()
            shapes = str(jax.tree.map(np.shape, run.state))  # the number of clusters may be the data's
            open_runs.setdefault((run.done, run.evaluated, shapes), []).append(index)
        waiting, programs = list(open_runs.values()), {}
        while waiting and not interrupt.wanted:
            members = waiting.pop(0)
            first, lifted = requests[members[0]], [lifting.lifted(runs[index].algorithm) for index in members]
            batch = Batch(
                [runs[index] for index in members],
                lifted[0][0],
                [numbers for _, numbers in lifted],
                with_metrics(first.algorithm.model, first.metrics),
                [tests[index] for index in members],
                [choices[index] for index in members],
                first.rounds,
                first.eval_every,
                [requests[index].callbacks for index in members],
            )
            try:
                beside = _placed(runs, tests, batch) + _states(found.values(), mapping)
                options = {"progress": progress, "time_clustering": time_clustering}
                needed = play_together(batch, programs, beside=beside, **options)
            except DoesNotFit:
                half = (len(members) + 1) // 2
                waiting = [members[:half], members[half:], *waiting]
                continue
            memory.append(needed)
            with interrupt.obeyed():
                found |= {index: runs[index].finish() for index in members}
        interrupt.stop_if_wanted()
    return [found[index] for index in range(len(requests))], memory


def _placed(runs: Sequence[Run], tests: Sequence[ClientData], batch: Batch) -> int:
    """Bytes on each device of the clients' rows of all runs, each once, but for those that a batch's runs share."""
    rows = {
        id(run.train): (run.train.data.x, run.train.data.y, test.x, test.y)
        for run, test in zip(runs, tests, strict=True)
    }
    if batch.shared:
        rows.pop(id(batch.runs[0].train))
    return bytes_of(tuple(rows.values()), parallel.num_devices(runs[0].train.mapping))


def _states(ended: Iterable[SimulationResult], mapping: ClientMapping) -> int:
    """Bytes on each device of the states of runs that have ended, which their results keep there."""
    devices = parallel.num_devices(mapping)
    return sum(bytes_of(each.state.clients, devices) + bytes_of(each.state._replace(clients=()), 1) for each in ended)


def _started(
    requests: Sequence[Request], mapping: ClientMapping, checkpoint_every: float, stack: contextlib.ExitStack
) -> tuple[list[Run], list[ClientData], list[np.ndarray | None]]:
    """The runs before their next round, with states on the host, the test rows of each, and whom it evaluates."""
    several = mapping._replace(runs=len(requests))
    placed: dict[int, Any] = {}
    runs, tests, choices, kept = [], [], [], []
    one = len({id(request.federation) for request in requests}) == 1 and requests[0].fault is None
    for request in requests:
        _check(request)
    for request in requests:
        method, federation = afflict(request.algorithm, request.federation, request.fault, request.seed)
        kept.append(federation)  # or its number could become another's
        if id(federation) not in placed:
            rows = parallel.place_population(federation.test, federation.info, several).data
            # In each run other clients would be dealt to other devices.
            placed[id(federation)] = placed_clients(method, federation, several, by_work=one), rows
        clients, rows = placed[id(federation)]
        decided = request.seed, request.eval_every, request.eval_clients, (), request.fault, request.metrics
        schedule = Schedule((), method, federation.train.num_examples)
        directory = kept_in(request.run_dir, request.config, method, federation, *decided)
        run = start_run(method, federation, request.seed, mapping, directory, schedule, stack, clients)
        run.config, run.pause, run.metrics = request.config, checkpoint_every, request.metrics
        run.ended(request.rounds)
        run.state = jax.device_get(run.state)
        runs.append(run)
        tests.append(rows)
        choices.append(chosen_clients(len(federation.test.num_examples), request.eval_clients, request.seed))
    return runs, tests, choices


def _check(request: Request) -> None:
    """Raises what `simulate` would of these arguments."""
    given = request._asdict()
    check_arguments(given.pop("algorithm"), given.pop("federation"), **given)


def _refusal(request: Request, numbers: lifting.Numbers, mapping: ClientMapping) -> str | None:
    """Which of the numbers cannot be an argument of a program; None where it is none without them either."""
    method, federation = afflict(request.algorithm, request.federation, request.fault, request.seed)
    with contextlib.ExitStack() as stack:
        schedule = Schedule((), method, federation.train.num_examples)
        run = start_run(method, federation, request.seed, mapping, None, schedule, stack)

        def decide(some: lifting.Numbers) -> bool:
            with lifting.one_program(some):
                program, own = lifting.lifted(method)
                segment = functools.partial(run_segment, algorithm=program)
                try:
                    jax.eval_shape(segment, run.keys, run.state, run.train, run.group, run.info, 0, own)
                except DECIDES:
                    return True
            return False

        if decide({}):
            return None
        found = [path for path, number in numbers.items() if decide({path: number})]
    named = " and ".join(found or numbers)
    return f"{named} decides the shapes, loops or branches of {method.name}'s program: {lifting.ELSEWHERE}"
