"""The arguments of a run's program as shapes: a population and a state that are nowhere in memory."""

from __future__ import annotations

import contextvars
import functools
import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from fedjax_cluster import parallel
from fedjax_cluster.algorithms.method import Method
from fedjax_cluster.algorithms.planned import PLANNED, Planned
from fedjax_cluster.cohorts import cohort_size
from fedjax_cluster.data.stored import streamed
from fedjax_cluster.options import COUNT, at_least, changed, checked, shown
from fedjax_cluster.parallel.ahead import CohortsAhead
from fedjax_cluster.parallel.tiles import Tiled, tiles_of
from fedjax_cluster.quiet import without_notices
from fedjax_cluster.simulation.history import FEW_GROUPS, MANY, dtype_of_groups
from fedjax_cluster.simulation.segment import MOST_COMPARED, run_keys, work_of
from fedjax_cluster.types import (
    ONE_DEVICE,
    ClientData,
    ClientMapping,
    ClusteredAlgorithm,
    Cohort,
    DatasetInfo,
    Federation,
    Placement,
    Population,
    PyTree,
    Selection,
)

NUMBERS = (jnp.floating, jnp.integer, jnp.bool_)
FEWEST = 8  # clients of the federations of which states are made, beyond the number of clusters


ROWS_TO_A_TEST_ROW = 4  # where only shapes are given: a fifth of all rows is for tests


class PopulationShape(NamedTuple):
    """A federation without its data: M clients of N rows each.

    Attributes:
      clients: M.
      rows: N, training rows of each.
      info: shape of an input, classes, task.
      dtype: of the inputs.
      y_shape, y_dtype: of one target.
      groups: whether the clients' true groups are known; of more than 10 000 clients True stands for at most 64 of
        them, for more give "int32".
      uneven: whether clients have different numbers of rows, so that several devices are dealt clients by their work.
      test_rows: of each client; None is a fifth of all rows.
    """

    clients: int
    rows: int
    info: DatasetInfo
    dtype: Any = "uint8"
    y_shape: tuple[int, ...] = ()
    y_dtype: Any = "int32"
    groups: bool | str = False
    uneven: bool = False
    test_rows: int | None = None

    def nbytes(self) -> int:
        """Bytes of all training rows, without padding."""
        return self.clients * self.rows * self.row_bytes

    @property
    def row_bytes(self) -> int:
        x = math.prod(self.info.input_shape) * _in_32_bits(self.dtype).itemsize
        return x + math.prod(self.y_shape) * _in_32_bits(self.y_dtype).itemsize

    @property
    def tested_on(self) -> int:
        """Test rows of each client."""
        return -(-self.rows // ROWS_TO_A_TEST_ROW) if self.test_rows is None else self.test_rows


def shape_of(federation: Federation | PopulationShape) -> PopulationShape:
    """What of a federation decides the program of its rounds.

    Raises:
      ValueError: a shape of no clients or rows.
    """
    if not isinstance(federation, (Federation, PopulationShape)):
        raise ValueError(f"federation is {shown(federation)}; give a Federation, or a PopulationShape")
    if isinstance(federation, PopulationShape):
        if not isinstance(federation.info, DatasetInfo):
            raise ValueError(f"info is {shown(federation.info)}; give a DatasetInfo, as fc.types has it")
        checked("y_shape", federation.y_shape, Sequence[int], COUNT)
        for name in ("clients", "rows"):
            checked(name, getattr(federation, name), int, COUNT)
        checked("groups", federation.groups, bool | Literal["int8", "int32"])
        checked("test_rows", federation.test_rows, int | None, at_least(0))
        for name in ("dtype", "y_dtype"):
            if getattr(federation, name) is None:  # NumPy takes it for float64
                raise ValueError(f"{name} is None; give a type of NumPy, such as uint8 or float32")
            try:
                np.dtype(getattr(federation, name))
            except TypeError:
                given = shown(getattr(federation, name))
                raise ValueError(f"{name} is {given}; give a type of NumPy, such as uint8 or float32") from None
            if not any(jnp.issubdtype(np.dtype(getattr(federation, name)), kind) for kind in NUMBERS):
                given = shown(getattr(federation, name))
                raise ValueError(f"{name} is {given}; give a type of real numbers, such as uint8 or float32")
        for side in federation.info.input_shape:
            checked("input_shape", side, int, COUNT)
        return federation
    x, y, count = federation.train
    uneven = bool(np.ptp(np.asarray(count)))
    groups = False if federation.group is None else str(dtype_of_groups(federation.group))
    clients, rows, *_ = x.shape
    return PopulationShape(clients, rows, federation.info, x.dtype, y.shape[2:], y.dtype, groups, uneven)


def abstract_arguments(
    algorithm: ClusteredAlgorithm, shape: PopulationShape, mapping: ClientMapping, dealt: bool = True
) -> tuple:
    """The arguments of `run_segment` but the method, as shapes with shardings.

    Uneven clients are `dealt` to several devices by their work, or keep their order.

    A state's shapes follow from those of two small federations: each extent grows with M by a fixed number, and with
    the number of landmarks.

    Raises:
      ValueError: as `init` raises it; or a state of which some extent is no a·M + b.
    """
    devices = 1 if mapping.mesh is None else mapping.mesh.size
    clients = -(-shape.clients // devices) * devices
    state, info = without_notices()(_state_shapes)(algorithm, shape, clients)
    placed = _Placed(mapping)
    state = placed.everywhere(state)._replace(clients=placed.rows(state.clients))
    few = FEW_GROUPS if shape.clients > MANY else jnp.int32
    group = jax.ShapeDtypeStruct((clients,), few if shape.groups is True else shape.groups) if shape.groups else None
    keys = jax.eval_shape(lambda: run_keys(0))
    train = abstract_population(shape, mapping, dealt)
    stop = jax.ShapeDtypeStruct((), jnp.int32)
    group = placed.everywhere(group) if clients <= MOST_COMPARED else placed.rows(group)
    return (*placed.everywhere((keys,)), state, train, group, *placed.everywhere((info, stop)))


def abstract_population(shape: PopulationShape, mapping: ClientMapping, dealt: bool = True) -> Population:
    """The population as `place_population` puts it on the devices."""
    placed, devices = _Placed(mapping), parallel.num_devices(mapping)
    clients = -(-shape.clients // devices) * devices
    x = jax.ShapeDtypeStruct((clients, shape.rows, *shape.info.input_shape), _in_32_bits(shape.dtype))
    y = jax.ShapeDtypeStruct((clients, shape.rows, *shape.y_shape), _in_32_bits(shape.y_dtype))
    if parallel.platform(mapping) == "tpu":
        x, y = (_tiled_shape(leaf) for leaf in (x, y))
    each: Any = jax.ShapeDtypeStruct((clients,), jnp.int32)
    uneven = shape.uneven and devices > 1
    work = jax.ShapeDtypeStruct((clients,), jnp.float32) if uneven else None
    placement = Placement(each, each) if uneven and dealt else None
    x, y = placed.rows((x, y))
    each, work, placement = placed.everywhere((each, work, placement))
    return Population(ClientData(x, y, each), shape.info, mapping, work, placement)


def abstract_cohorts(drawn: Selection, lot: int, shape: PopulationShape, mapping: ClientMapping) -> CohortsAhead:
    """The cohorts of so many rounds as `read_cohorts` puts them on the devices, of clients whose rows are on disk."""
    placed, devices = _Placed(mapping), parallel.num_devices(mapping)
    lead = lot, -(-len(drawn.index) // devices) * devices
    x = jax.ShapeDtypeStruct((*lead, shape.rows, *shape.info.input_shape), _in_32_bits(shape.dtype))
    y = jax.ShapeDtypeStruct((*lead, shape.rows, *shape.y_shape), _in_32_bits(shape.y_dtype))
    number: Any = jax.ShapeDtypeStruct(lead, jnp.int32)
    mask: Any = jax.ShapeDtypeStruct(lead, jnp.bool_)
    weights: Any = drawn.weights
    if weights is not None:
        weights = jax.ShapeDtypeStruct((*lead, *weights.shape[1:]), weights.dtype)
    cohorts = Cohort(number, mask, ClientData(x, y, number), weights, mapping)
    return CohortsAhead(placed.everywhere(jax.ShapeDtypeStruct((), jnp.int32)), placed.cohorts(cohorts))


class _Placed:
    """Shapes with the shardings of `place_rows` and `replicate`."""

    def __init__(self, mapping: ClientMapping):
        mesh = mapping.mesh
        here = SingleDeviceSharding(jax.devices()[0])
        self._rows = here if mesh is None else NamedSharding(mesh, P(parallel.AXIS))
        self._everywhere = here if mesh is None else NamedSharding(mesh, P())
        self._cohorts = here if mesh is None else NamedSharding(mesh, P(None, parallel.AXIS))

    def rows(self, tree: PyTree) -> PyTree:
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=self._rows), tree)

    def cohorts(self, tree: PyTree) -> PyTree:
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=self._cohorts), tree)

    def everywhere(self, tree: PyTree) -> PyTree:
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=self._everywhere), tree)


def _in_32_bits(dtype: Any) -> np.dtype:
    """As which numbers of a type are on the devices, whatever JAX is set to here."""
    wide = {8: {"f": "float32", "i": "int32", "u": "uint32"}}
    return np.dtype(wide.get(np.dtype(dtype).itemsize, {}).get(np.dtype(dtype).kind, dtype))


def _tiled_shape(leaf: Any) -> Any:
    tiles = tiles_of(leaf)
    if tiles is None:
        return leaf
    return Tiled(jax.ShapeDtypeStruct((leaf.shape[0], *tiles), leaf.dtype), leaf.shape[1:])


def _state_shapes(algorithm: ClusteredAlgorithm, shape: PopulationShape, clients: int) -> tuple[PyTree, PyTree]:
    """Shapes of the state, and of what is told of it, before the first round."""
    slots, landmarks = (getattr(algorithm, name, None) for name in ("clusters", "landmarks"))
    # Enough for the clusters; of landmarks, for the least that one of these may have.
    least = getattr(algorithm, "min_size", 0) if isinstance(landmarks, int) else 0
    fewest = FEWEST + max(slots if isinstance(slots, int) else 0, least)
    if not (isinstance(algorithm, Method) and isinstance(landmarks, int) and landmarks > fewest):
        return _over_clients(algorithm, shape, fewest, clients)
    of_cohort = getattr(algorithm, "cluster_cohort", False)
    most, cohort = (cohort_size(algorithm.participation, of) if of_cohort else of for of in (shape.clients, clients))
    if landmarks > most:  # those that fill the devices up can be none
        raise ValueError(f"landmarks is {landmarks}, but only {most} clients can be some; give at most {most}")
    few = fewest, fewest + 1
    least = fewest + math.ceil(few[1] * clients / cohort)  # of whom so many are in a cohort
    fewer = [changed(algorithm, "planned", landmarks=number) for number in few]
    outcomes = [_over_clients(each, shape, least, clients) for each in fewer]
    return jax.tree.map(lambda *leaves: _grown(leaves, few, landmarks, "landmarks"), *outcomes)


def _over_clients(algorithm: ClusteredAlgorithm, shape: PopulationShape, least: int, clients: int) -> PyTree:
    sizes, context = (least, least + 3), contextvars.copy_context()
    context.run(PLANNED.set, Planned(shape.clients, clients))
    outcomes = [context.run(_outcome, algorithm, shape, size) for size in sizes]
    return jax.tree.map(lambda *leaves: _grown(leaves, sizes, clients), *outcomes)


def _host() -> Any:
    """A CPU device; where JAX_PLATFORMS leaves out the CPU, the first that there is."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return jax.local_devices()[0]


def _outcome(algorithm: ClusteredAlgorithm, shape: PopulationShape, clients: int) -> Any:
    """Shapes of what `init` gives for so many clients, all with the same rows, so that it finds one cluster."""
    rng = np.random.default_rng(0)
    size = (shape.rows, *shape.info.input_shape)
    floats = np.issubdtype(np.dtype(shape.dtype), np.floating)
    x = rng.random(size) if floats else rng.integers(0, 2, size)
    most = max(shape.info.num_classes, 1)
    y = np.arange(shape.rows * math.prod(shape.y_shape)).reshape(shape.rows, *shape.y_shape) % most
    x, y = (np.broadcast_to(of, (clients, *of.shape)) for of in (x.astype(shape.dtype), y.astype(shape.y_dtype)))
    start = algorithm.init if algorithm.template is None else algorithm.template
    with jax.default_device(_host()):
        data = ClientData(jnp.asarray(x), jnp.asarray(y), jnp.full(clients, shape.rows, jnp.int32))
        population = Population(data, shape.info, ONE_DEVICE)
        state, info = start(run_keys(0).initialization, population)
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), (state, info))


def _grown(leaves: Sequence[Any], sizes: Sequence[int], wanted: int, what: str = "clients") -> Any:
    """The leaf's shape for so many clients, or landmarks, from its shapes for two small numbers of them."""
    extents = []
    for dims in zip(*(leaf.shape for leaf in leaves), strict=True):
        slope = (dims[1] - dims[0]) // (sizes[1] - sizes[0])
        rest = dims[0] - slope * sizes[0]
        if any(slope * size + rest != dim for size, dim in zip(sizes, dims, strict=True)):
            raise ValueError(
                f"an extent of the state is {', '.join(map(str, dims))} for {', '.join(map(str, sizes))} {what}, "
                "which does not grow evenly; give a federation of the size itself to simulate()"
            )
        extents.append(slope * wanted + rest)
    return jax.ShapeDtypeStruct(tuple(extents), leaves[0].dtype)


def without_training(algorithm: ClusteredAlgorithm) -> ClusteredAlgorithm:
    """The method with first models of which none is trained: a state of the same shapes, sooner."""
    if getattr(algorithm, "start", None) != "clients" or not isinstance(algorithm, Method):
        return algorithm
    return without_notices()(changed)(algorithm, "planned", start="random")


def in_a_round(algorithm: ClusteredAlgorithm, shape: PopulationShape, drawn: int) -> int:
    """Clients of a round, of whom `drawn` are with those that fill up the devices."""
    part = getattr(algorithm, "participation", None)
    asked = getattr(algorithm, "clients_in_round", functools.partial(cohort_size, part) if part else None)
    return min(drawn, shape.clients if asked is None else asked(shape.clients))


def work_and_dealing(
    algorithm: ClusteredAlgorithm, federation: Federation | PopulationShape, shape: PopulationShape, devices: int
) -> tuple[bool, bool]:
    """Whether several devices know the clients' different work, and are dealt them by it, as in a run."""
    if isinstance(federation, PopulationShape) or devices == 1 or streamed(federation.train):
        return shape.uneven, shape.uneven
    work = work_of(algorithm, federation.train)
    differs = work is not None and bool(np.ptp(np.asarray(work)))
    return differs, differs and parallel.gains_by_dealing(np.asarray(work), devices)
