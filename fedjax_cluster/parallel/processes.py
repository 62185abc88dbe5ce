"""Several processes of one run, on one machine or many: how they start, what they agree on, and what each holds.

All of them run the same program on one mesh of all their devices. What is decided by a clock, a signal or a file is
decided by the first of them, or told to all; what lies on the devices of another is sent for by all at once.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import logging
import os
import re
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.experimental import multihost_utils
from jax.sharding import Sharding

from fedjax_cluster.files import digest
from fedjax_cluster.options import POSITIVE, checked, reason_of, shown
from fedjax_cluster.types import PyTree

AUTO = "auto"
LOST_SECONDS = 60.0  # without a sign of life, after which a process counts as lost
START_SECONDS = 300.0  # for all processes to come
HINTS: list[str] = []  # how the run goes on, where this process ends without a word of its own
ENDING = threading.Lock()  # taken by who says why this process ends
HANDLERS: list[Any] = []  # of aborts, which nobody else holds
LONGEST_TEXT = 4096  # bytes of a text that processes agree on
# What gloo, NCCL and JAX's own service say where another process does not answer any more.
LOST = re.compile(r"gloo|nccl|peer|coordination|heartbeat|UNAVAILABLE|DEADLINE_EXCEEDED|ABORTED|barrier", re.IGNORECASE)


STARTED = "before any JAX calls"  # as JAX says where it has started already


class ProcessLost(RuntimeError):
    """Another process of the run has ended, or cannot be reached any more."""


def start_processes(
    coordinator: str = AUTO,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    start_seconds: float = START_SECONDS,
    lost_seconds: float = LOST_SECONDS,
) -> None:
    """Joins this process to the others of a run, each of which calls it before JAX's first computation.

    Every process then has the same program to run, `simulate` say, and an equal share of the clients. On CPUs the
    messages between processes go through gloo. `jax.distributed.initialize` does as well; this has checks and one line
    where a process is lost.

    Args:
      coordinator: HOST:PORT of process 0, with a port that is free there; "auto" finds it and the other two from SLURM,
        Open MPI (up to 4), Kubernetes or Cloud TPU. Of several processes of one node each then takes the GPU of its
        place among them, or what SLURM gives a task; one alone takes all.
      num_processes: how many there are in all.
      process_id: which of them this is, from 0.
      start_seconds: how long they wait for one another.
      lost_seconds: after which a process that gives no sign of life counts as lost.

    Raises:
      ValueError: an address that is none, a number out of range, or nothing that "auto" can find.
      ProcessLost: the others did not come in time.
      RuntimeError: JAX has started already.

    >>> start_processes("localhost:1234", 2, 2)
    Traceback (most recent call last):
    ...
    ValueError: process_id is 2, but there are 2 processes; count them from 0 to 1
    """
    check_processes(coordinator, num_processes, process_id)
    seconds = [round(checked(*each, float, POSITIVE)) for each in (("start_seconds", start_seconds),
                                                                     ("lost_seconds", lost_seconds))]  # fmt: skip
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # It would take SIGTERM, after which a run leaves a checkpoint.
    jax.config.update("jax_enable_preemption_service", False)
    for name in ("jax._src.distributed", "jax._src.clusters"):
        logging.getLogger(name).setLevel(logging.ERROR)
    address = None if coordinator == AUTO else coordinator
    late = f"not all processes came together{'' if address is None else f' at {address}'} within {start_seconds:g} s; "
    late += "start every one with the same coordinator and num_processes, and a process_id of its own"
    undo = _at_an_abort(late)
    try:
        warnings.filterwarnings("ignore", "(?s).*Kubernetes environment detected")  # said below
        jax.distributed.initialize(
            address,
            num_processes,
            process_id,
            cluster_detection_method="deactivate" if address else None,
            initialization_timeout=max(1, seconds[0]),
            heartbeat_timeout_seconds=max(1, seconds[1]),
        )
    except jax.errors.JaxRuntimeError as error:
        raise ProcessLost(f"{late} ({reason_of(error)})") from None
    except Exception as error:  # schedulers' own libraries have theirs
        if address is not None or STARTED in str(error) or jax.distributed.is_initialized():
            raise
        lacking = "KUBERNETES_SERVICE_HOST" in os.environ and importlib.util.find_spec("kubernetes") is None
        raise ValueError(
            "coordinator is auto, but no SLURM, Open MPI, Kubernetes or Cloud TPU tells of processes "
            f"({reason_of(error)}); give it as HOST:PORT, with num_processes and process_id"
            + (', or pip install "fedjax_cluster[k8s]", which reads what Kubernetes tells' if lacking else "")
        ) from None
    finally:
        undo()
    if address is None and _has_its_gpus(os.environ):
        # JAX has taken one, of the number of the process among those of its node.
        for name in ("jax_cuda_visible_devices", "jax_rocm_visible_devices"):
            jax.config.update(name, "all")
    _at_an_abort("another process of the run was lost, or XLA failed (TF_CPP_MIN_LOG_LEVEL=0 tells which)")
    sys.excepthook = _ended_by


def _has_its_gpus(environment: Mapping[str, str]) -> bool:
    """Whether all GPUs that a process sees are its own: it is alone on its node, or SLURM gives each task its own.

    >>> _has_its_gpus({"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_STEP_NUM_NODES": "4"})
    True
    """
    if "JAX_LOCAL_DEVICE_IDS" in environment:
        return False
    # Asked first, as by JAX: what SLURM tells of the job's first task goes on to all that mpirun starts.
    if "OMPI_MCA_orte_hnp_uri" in environment:
        return environment.get("OMPI_COMM_WORLD_LOCAL_SIZE") == "1"
    if environment.get("SLURM_NTASKS", "") == environment.get("SLURM_STEP_NUM_NODES"):
        return True
    # Tasks that are not bound to their GPUs see those of the others as well.
    seen = environment.get("CUDA_VISIBLE_DEVICES", environment.get("ROCR_VISIBLE_DEVICES", ""))
    count = len(seen.split(",")) if seen else 0
    return count == 1 or environment.get("SLURM_GPUS_PER_TASK", "").rpartition(":")[2] == str(count)


def check_processes(coordinator: str | None, num_processes: int | None, process_id: int | None) -> None:
    """Raises a ValueError of one line where these make no processes."""
    given = {"num_processes": num_processes, "process_id": process_id}
    if coordinator is None or coordinator == AUTO:
        if named := [name for name, value in given.items() if value is not None]:
            what = "but no coordinator" if coordinator is None else "but coordinator is auto, which finds it"
            raise ValueError(
                f"{named[0]} is {given[named[0]]}, {what}; give coordinator as HOST:PORT, that of process 0"
            )
        return
    found = re.fullmatch(r"[^\s:]+:(\d+)|\[[0-9a-fA-F:]+\]:(\d+)", checked("coordinator", coordinator, str))
    if found is None or not 0 < int(found[1] or found[2]) < 2**16:
        raise ValueError(f"coordinator is {shown(coordinator)}; give HOST:PORT, such as node1:8476, or auto")
    for name, value in given.items():
        if value is None:
            raise ValueError(f"coordinator is {coordinator}, but {name} is not given; give both num_processes and "
                             "process_id, or coordinator auto")  # fmt: skip
        checked(name, value, int)
    assert num_processes is not None
    assert process_id is not None
    if num_processes < 1:
        raise ValueError(f"num_processes is {num_processes}; give at least 1")
    if not 0 <= process_id < num_processes:
        raise ValueError(
            f"process_id is {process_id}, but there are {num_processes} processes; count them from 0 to "
            f"{num_processes - 1}"
        )


def several() -> bool:
    """Whether this is one of several processes."""
    return jax.process_count() > 1


def is_first() -> bool:
    """Whether this process writes, shows and prints what the run leaves.

    >>> is_first()
    True
    """
    return jax.process_index() == 0


# ------------------------------------------------------------------------------------------- agreement


def of_all(values: Any) -> np.ndarray:
    """What every process gives, [P, ...] in their order; a wait for all of them.

    Raises:
      ValueError: they have different numbers of devices, in all of them.
      ProcessLost: one has gone.
    """
    counts = np.bincount([device.process_index for device in jax.devices()], minlength=jax.process_count())
    if np.ptp(counts):
        other = int(np.argmax(counts != counts[0]))
        raise ValueError(
            f"process {other} has {counts[other]} devices and process 0 has {counts[0]}; give each process as many"
        )
    with losses():
        return np.asarray(multihost_utils.process_allgather(np.asarray(values)))


def agreed(number: int) -> int:
    """The number of the first process, for what a clock or a file decides."""
    return int(of_all(np.int32(number))[0]) if several() else number


def of_any(flag: bool) -> bool:
    """Whether it holds in some process."""
    return bool(of_all(np.int32(flag)).any()) if several() else flag


def agreed_text(text: str) -> str:
    """The text of the first process."""
    if not several():
        return text
    content = text.encode()[:LONGEST_TEXT].ljust(LONGEST_TEXT, b"\0")
    return of_all(np.frombuffer(content, np.uint8))[0].astype(np.uint8).tobytes().rstrip(b"\0").decode(errors="ignore")


@contextlib.contextmanager
def together() -> Iterator[None]:
    """What every process does for itself: an error of one ends all, where the others would wait for it.

    Raises:
      ValueError: another one failed.
      ProcessLost: one has gone. Nothing is asked of the others then: messages of two steps would meet.
    """
    error: Exception | None = None
    try:
        with losses():
            yield
    except ProcessLost:
        raise
    except Exception as found:
        if not several():
            raise
        error = found
    if not several():
        return
    failed = np.flatnonzero(of_all(np.int32(error is not None)))
    if error is not None:
        raise error
    if len(failed):
        raise ValueError(f"process {failed[0]} cannot go on, for a reason that it tells itself; this one ends with it")


def check_alike(what: Mapping[str, Any]) -> None:
    """Raises a ValueError where processes were given different values of JSON, and names what differs."""
    if not several():
        return
    mine = np.asarray([np.frombuffer(bytes.fromhex(digest(value)), np.int32) for value in what.values()])
    found = of_all(mine)
    for process, place in zip(*np.nonzero((found != found[:1]).any(axis=2)), strict=True):
        name = list(what)[place]
        raise ValueError(f"process {process} was given another {name} than process 0; give all processes the same")


def check_devices(num_clients: int, mesh: jax.sharding.Mesh | None) -> None:
    """Raises a ValueError where clients cannot be divided among the processes as they are."""
    if not several():
        return
    count = jax.process_count()
    if num_clients < count:
        raise ValueError(f"there are {num_clients} clients, fewer than the {count} processes; start fewer")
    used = {device.process_index for device in ([] if mesh is None else mesh.devices.flat)}
    if len(used) < count:
        raise ValueError(
            f"mapping has devices of {len(used)} of {count} processes; leave out its devices, or take all of them"
        )


# ------------------------------------------------------------------------------------------- arrays


def put(leaf: Any, sharding: Sharding | None) -> jax.Array:
    """An array on the devices; of one that every process has, each puts the parts of its own devices there."""
    if isinstance(leaf, Tracer) or sharding is None or sharding.is_fully_addressable or _is_divided(leaf):
        return jax.device_put(leaf, sharding)
    host = np.asarray(leaf)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def copied(leaf: jax.Array, sharding: Sharding) -> jax.Array:
    """A copy of an array that lies on the devices of several processes."""
    return jax.jit(jnp.copy, out_shardings=sharding)(leaf)


def fetched(values: PyTree) -> PyTree:
    """Arrays on the host, whole; in several processes all of them call it, and each has the whole of it then."""

    def whole(leaf: Any) -> Any:
        if not _is_divided(leaf):
            return leaf
        if leaf.is_fully_replicated:
            return np.asarray(leaf.addressable_data(0))
        return multihost_utils.process_allgather(leaf, tiled=True)

    with losses():
        return jax.device_get(jax.tree.map(whole, values) if several() else values)


def _is_divided(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and not leaf.is_fully_addressable


# ------------------------------------------------------------------------------------------- losses


@contextlib.contextmanager
def losses() -> Iterator[None]:
    """Makes one line of what JAX raises where another process has gone.

    Raises:
      ProcessLost: one has.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if not several() or not LOST.search(str(error)):
            raise
        raise ProcessLost(f"another process of the run was lost ({reason_of(error)})") from error


@contextlib.contextmanager
def hinting(text: str) -> Iterator[None]:
    """What is said meanwhile where XLA ends this process, after why."""
    HINTS.append(text)
    try:
        yield
    finally:
        HINTS.remove(text)


def end_at_once(status: int, error: BaseException | None = None) -> None:
    """Ends a process of several, after an error's traceback, without waiting for the others, which notice it."""
    if jax.distributed.is_initialized():
        if error is not None:
            traceback.print_exception(error)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _ended_by(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """An error that nobody catches: at the end of Python, JAX would wait for the other processes first."""
    sys.__excepthook__(kind, error, trace)
    end_at_once(1)


def _at_an_abort(message: str) -> Callable[[], None]:
    """Says this, and ends, where XLA aborts, until the function that is returned is called.

    It aborts when its own thread finds that another process is gone: of the callback that it takes in place of that, it
    asks what Python cannot be given (`std::bad_cast`, jaxlib 0.10). What it prints before, TF_CPP_MIN_LOG_LEVEL=4
    leaves out. Gloo's threads end by C++'s own `terminate`, which prints before it aborts.
    """

    def aborted(_: int = signal.SIGABRT) -> None:
        if ENDING.acquire(blocking=False):
            os.write(2, f"fedjax-cluster: {'; '.join([message, *HINTS])}\n".encode())
        else:
            time.sleep(1.0)  # the main thread is about to say why
        os._exit(1)

    at_a_signal = ctypes.CFUNCTYPE(None, ctypes.c_int)(aborted)
    at_the_end = ctypes.CFUNCTYPE(None)(aborted)
    HANDLERS.extend((at_a_signal, at_the_end))
    set_signal = _c_function(None, "signal", (ctypes.c_int, ctypes.c_void_p))
    set_terminate = _c_function("libstdc++.so.6", "_ZSt13set_terminatePFvvE", (ctypes.c_void_p,))
    signalled = set_signal(signal.SIGABRT, ctypes.cast(at_a_signal, ctypes.c_void_p))
    terminated = set_terminate(ctypes.cast(at_the_end, ctypes.c_void_p))

    def undo() -> None:
        set_signal(signal.SIGABRT, signalled)
        set_terminate(terminated)

    return undo


def _c_function(library: str | None, name: str, takes: Sequence[Any]) -> Callable[..., Any]:
    """A function of C that takes and gives the address of another; where a system has none, one that does nothing."""
    try:
        function = getattr(ctypes.CDLL(library), name)
    except (OSError, AttributeError):
        return lambda *_: None
    function.argtypes, function.restype = takes, ctypes.c_void_p
    return function
