"""Devices to compile for, whether they are there or not: what a data sheet says of each, and the compiler's form."""

from __future__ import annotations

import contextlib
import importlib.util
import math
import os
import re
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies

from fedjax_cluster import parallel
from fedjax_cluster.options import reason_of

GIB = 2**30


class DeviceKind(NamedTuple):
    """One device, by its maker's data sheet."""

    memory: int  # bytes
    flops: float  # per second, of the format that a float32 product is computed in unless more is asked for
    flops_of_halves: float  # of products of 16 bits
    bandwidth: float  # bytes per second to its memory
    link: float  # bytes per second to other devices
    clock: float  # cycles per second, where the compiler estimates cycles; 0 elsewhere
    source: str


# A TPU multiplies float32 in bfloat16 unless asked for more; an H100 in TF32. Clocks follow from the peak and the
# number of matrix units (v5e: 4 of 128×128; v6e: 2 of 256×256 in one core, at two products a place and cycle).
OF_A_SHEET = "data sheet, SXM5: TF32 without sparsity"
KINDS = {
    "v5e": DeviceKind(16 * GIB, 197e12, 197e12, 819e9, 200e9, 1.5e9, "cloud.google.com/tpu/docs/v5e"),
    "v6e": DeviceKind(32 * GIB, 918e12, 918e12, 1640e9, 448e9, 1.75e9, "cloud.google.com/tpu/docs/v6e"),
    "v5p": DeviceKind(95 * GIB, 459e12, 459e12, 2765e9, 600e9, 1.75e9, "cloud.google.com/tpu/docs/v5p"),
    "h100": DeviceKind(80 * GIB, 494e12, 989e12, 3352e9, 450e9, 0.0, f"NVIDIA H100 {OF_A_SHEET}"),
    "h200": DeviceKind(141 * 10**9, 494e12, 989e12, 4800e9, 450e9, 0.0, f"NVIDIA H200 {OF_A_SHEET}"),
}
# What devices that are there call themselves; the first that is found in the name.
OWN_NAMES = {
    **{r"\bH100 80GB HBM3$": "h100", r"\bH200$": "h200"},
    **{r"v5 ?lite|v5e": "v5e", r"v6 ?lite|v6e": "v6e", r"v5p?$": "v5p"},
}
LARGEST_TORUS = 256  # chips of v5e or v6e, whose shapes have two sides
KNOWN = "v5e:2x4, v6e:2x4, v5p:2x2x1 and other shapes, h100, h200, local"
PACKAGES = {"tpu": (("libtpu",), "tpu"), "cuda": (("jax_cuda13_plugin", "jax_cuda12_plugin"), "cuda12")}
# What libtpu would otherwise ask a machine of the cloud for; several processes may compile at once.
ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",  # no driver is needed to compile
}
# The text form of XLA's description of an H100.
H100 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 shared_memory_per_core: 233472
  threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128 block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535 block_dim_limit_z: 65535 memory_bandwidth: 3352320000000 l2_cache_size: 52428800
  clock_rate_ghz: 1.98 device_memory_size: 84929347584 shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 } registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
platform_name: "CUDA" dnn_version_info { major: 9 minor: 8 } runtime_version { major: 12 minor: 9 patch: 0 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""
# The same processor with more and faster memory.
H200 = (
    H100.replace("device_memory_size: 84929347584", "device_memory_size: 150754820096")
    .replace("memory_bandwidth: 3352320000000", "memory_bandwidth: 4800000000000")
    .replace("NVIDIA H100 80GB HBM3", "NVIDIA H200")
)


class Target(NamedTuple):
    """Devices to compile for."""

    name: str
    platform: str  # that is lowered for
    devices: tuple[Any, ...]
    memory: int  # bytes of each that can be used
    kind: DeviceKind | None  # None: no data sheet is known
    compiler_options: dict[str, Any]


def target(name: str) -> Target:
    """The devices of a name such as "v5e:2x4", "h200" or "local", which need not be there but for the last.

    Raises:
      ValueError: an unknown name, a shape that does not exist, or a compiler that is not installed.

    >>> target("local").devices[0].platform in ("cpu", "gpu", "tpu")
    True
    """
    if name == "local":
        return _local()
    found = re.fullmatch(r"(v5e|v6e|v5p)(?::(\d+(?:x\d+)+))?|(h100|h200)", str(name).lower())
    if found is None:
        raise ValueError(f"device is {name!r}; known: {KNOWN}; of GPUs one, of TPUs the sides of their torus")
    kind, shape = found[1] or found[3], found[2]
    sides = [int(side) for side in shape.split("x")] if shape else []
    if sides and kind != "v5p" and (len(sides) != 2 or math.prod(sides) > LARGEST_TORUS):
        raise ValueError(
            f"device is {name!r}, but {kind} make a torus of two sides and at most {LARGEST_TORUS} chips; give one "
            f"such as {kind}:2x4"
        )
    platform = "cuda" if found[3] else "tpu"
    packages, extra = PACKAGES[platform]
    if not any(importlib.util.find_spec(package) for package in packages):
        raise ValueError(
            f"to compile for {name} takes the package {packages[-1]}, which is not installed; "
            f'pip install "fedjax_cluster[{extra}]"'
        )
    with _environment():
        try:
            if platform == "cuda":
                given = {"target_config": H200 if kind == "h200" else H100, "topology": "1x1x1"}
                found = topologies.get_topology_desc(platform="cuda", **given)
            else:
                shape = shape or ("1x1x1" if kind == "v5p" else "1x1")
                found = topologies.get_topology_desc(platform="tpu", topology_name=f"{kind}:{shape}")
        except (RuntimeError, NotImplementedError, ValueError) as error:
            raise ValueError(f"the compiler makes no devices of {name} ({reason_of(error)}); known: {KNOWN}") from None
    options = {"xla_gpu_autotune_level": 0} if platform == "cuda" else {}
    return Target(name, platform, tuple(found.devices), KINDS[kind].memory, KINDS[kind], options)


def free_memory(device: Any) -> int | None:
    """Bytes that a device has left; None where it does not tell."""
    try:
        stats = device.memory_stats() or {}
    except jax.errors.JaxRuntimeError:  # it is only compiled for
        return None
    return stats["bytes_limit"] - stats.get("bytes_in_use", 0) if "bytes_limit" in stats else None


def _local() -> Target:
    devices = tuple(jax.devices())
    platform = "cuda" if devices[0].platform == "gpu" else devices[0].platform
    memory = free_memory(devices[0])
    if memory is None:
        memory = int(min(parallel.memory_left(), sys.maxsize)) // len(devices)
    own = str(devices[0].device_kind)
    kind = next((KINDS[kind] for name, kind in OWN_NAMES.items() if re.search(name, own)), None)
    return Target("local", platform, devices, memory, kind, {})


@contextlib.contextmanager
def _environment() -> Iterator[None]:
    """The variables that the compiler reads as it is loaded, where they are not set; afterwards as before."""
    own = {name: value for name, value in ENVIRONMENT.items() if name not in os.environ}
    os.environ.update(own)
    try:
        yield
    finally:
        for name in own:
            os.environ.pop(name, None)
