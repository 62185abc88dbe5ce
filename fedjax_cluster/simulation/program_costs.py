"""What a round costs, read off the compiled program: products, bytes, messages, and the compiler's own cycles.

XLA's cost analysis counts the body of a loop once, whatever its turns. Here each computation counts as often as its
loops turn: the loop of the rounds once, a loop whose turns XLA knows so often, one over chunks of clients as the plan
says; others, such as steps of epochs, once, as is said in `unknown` where they have products or messages.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections import Counter
from collections.abc import Container, Mapping
from typing import NamedTuple

from fedjax_cluster.parallel.loop import BLOCKS, CLIENTS

BITS = re.compile(r"[a-z]+(\d+)")
SHAPE = re.compile(r"\b(pred|[a-z]+\d+\w*)\[([\d,]*)\]")
ARRAY = re.compile(SHAPE.pattern + r"(?:\{[^}]*\})?")
CLOSE = re.compile(r"S\([1-9]")  # in a layout: memory beside the products' unit, and not the device's
INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\(")
HEADER = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{$")
CALLERS = "calls|to_apply|body|branch_computations|true_computation|false_computation"
CALLED = re.compile(rf"(?:{CALLERS})=\{{?((?:%?[\w.\-]+(?:, )?)+)")
CHAIN = re.compile(r'chain_id="(\d+)"')  # of the parts of one message, sent while other things are computed
OVER_CLIENTS = re.compile(rf'op_name="[^"]*/{CLIENTS}/while"')  # that loop itself, and none inside it
OVER_BLOCKS = re.compile(rf'op_name="[^"]*/{BLOCKS}/while"')  # around it, whose turns are among those of that loop
LIBRARY = re.compile(r'custom_call_target="__cu(?:dnn|blas)\$([\w$]+)"')
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
# What no kernel writes.
NOTHING = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call", "iota"}


class ProgramCosts(NamedTuple):
    """Of one round, on each device."""

    flops: float  # of matrix products and convolutions
    bytes: float  # results of all kernels in the device's memory, written once and read once; of an update in place
    # what is new
    cycles: float  # estimated by the compiler; 0 where it does not
    messages: dict[str, tuple[int, float]]  # kind of collective -> number, bytes
    largest_message: int  # bytes
    unknown: int  # loops with products or messages whose turns are not known, counted once

    def message_bytes(self) -> float:
        """Bytes of all messages."""
        return sum(size for _, size in self.messages.values())


class _Line(NamedTuple):
    name: str
    shape: str
    kind: str
    text: str


def program_costs(text: str, chunks: int = 1) -> ProgramCosts:
    """The costs of one round in an optimised program's text.

    Args:
      text: of `compiled.as_text()`, of a segment of rounds.
      chunks: turns of the loop over chunks of clients.

    >>> program_costs("ENTRY %main (x: f32[2,3], y: f32[3,4]) -> f32[2,4] {\\n"
    ...     "  %x = f32[2,3]{1,0} parameter(0)\\n  %y = f32[3,4]{1,0} parameter(1)\\n"
    ...     "  ROOT %d = f32[2,4]{1,0} dot(%x, %y), lhs_contracting_dims={1}, rhs_contracting_dims={0}\\n}").flops
    48.0
    """
    computations, entry = _computations(text)
    fused = {
        name
        for lines in computations.values()
        for line in lines
        if line.kind in ("fusion", "reduce", "sort", "scatter", "reduce-window", "map", "select-and-scatter")
        for name in _called(line.text)
    }
    unknown: set[str] = set()
    chains: dict[str, tuple[str, int]] = {}

    def bodies(line: _Line) -> list[str]:
        return [name for name in _called(line.text) if name in computations]

    @functools.cache
    def cost(name: str, depth: int, inside: bool) -> tuple[float, float, float, tuple, int]:
        flops, written, cycles, largest = 0.0, 0.0, 0.0, 0
        messages: Counter = Counter()
        lines = {line.name: line for line in computations[name]}
        shapes = {name: line.shape for name, line in lines.items()}
        for line in computations[name]:
            flops += _flops(line, shapes)
            if not inside and line.kind not in NOTHING and not line.kind.endswith("-done"):
                written += _written(line, lines, computations)
            found = re.search(r'"estimated_cycles":"(\d+)"', line.text)
            cycles += float(found[1]) if found else 0.0
            kind = line.kind.removesuffix("-start")
            if (chain := CHAIN.search(line.text)) is not None and kind in COLLECTIVES:
                chains[chain[1]] = kind, _sent(line)
            elif kind in COLLECTIVES:
                messages[kind, "number"] += 1
                messages[kind, "bytes"] += _sent(line)
                largest = max(largest, _sent(line))
            times, deeper = 1, depth
            if line.kind == "while":
                deeper = depth + 1
                known = re.search(r'known_trip_count\\?":\{\\?"n\\?":\\?"(\d+)', line.text)
                if known:
                    times = int(known[1])
                elif OVER_CLIENTS.search(line.text):
                    times = chunks
                elif OVER_BLOCKS.search(line.text):
                    times = 1
                elif depth and any(of[0] or of[3] for of in (cost(name, deeper, inside) for name in bodies(line))):
                    unknown.add(line.name)
            for called in bodies(line):
                inner = cost(called, deeper, inside or called in fused)
                flops, written = flops + times * inner[0], written + times * inner[1]
                cycles += times * inner[2]
                for key, count in inner[3]:
                    messages[key] += times * count
                largest = max(largest, inner[4])
        return flops, written, cycles, tuple(messages.items()), largest

    flops, written, cycles, messages, largest = cost(entry, 0, False)
    found = Counter(dict(messages))
    for kind, size in chains.values():
        found[kind, "number"] += 1
        found[kind, "bytes"] += size
        largest = max(largest, size)
    kinds = {kind: (int(found[kind, "number"]), float(found[kind, "bytes"])) for kind, _ in found}
    return ProgramCosts(flops, 2 * written, cycles, kinds, largest, len(unknown))


def _computations(text: str) -> tuple[dict[str, list[_Line]], str]:
    """The instructions of each computation, and the name of the entry."""
    computations: dict[str, list[_Line]] = {}
    entry = name = ""
    for line in text.splitlines():
        if (header := HEADER.match(line)) is not None:
            name = header[1]
            computations[name] = []
            entry = name if line.startswith("ENTRY") else entry
        elif name and (found := INSTRUCTION.match(line)) is not None:
            computations[name].append(_Line(found[1], found[2], found[3], line))
    return computations, entry


def _called(text: str) -> list[str]:
    return [name.lstrip("%") for found in CALLED.finditer(text) for name in re.split(r", ", found[1]) if name]


def _dimensions(shape: str) -> list[int]:
    found = SHAPE.search(shape)
    return [int(part) for part in found[2].split(",") if part] if found else []


def _bytes(shape: str) -> int:
    total = 0
    for kind, dims in SHAPE.findall(shape):
        bits = BITS.match(kind)
        width = 8 if kind == "pred" else int(bits[1]) if bits else 32
        total += math.prod(int(part) for part in dims.split(",") if part) * width // 8
    return total


def _sent(line: _Line) -> int:
    """Bytes of a message: its results, which in one that is only begun stand behind what is sent, and before marks."""
    if not line.kind.endswith("-start") or line.kind == "all-reduce-start":
        return _bytes(line.shape)
    arrays = [found[0] for found in ARRAY.finditer(line.shape)]
    while len(arrays) > 2 and arrays[-1].startswith("u32[]"):
        arrays.pop()
    return sum(map(_bytes, arrays[len(arrays) // 2 :]))


def _operands(line: _Line, known: Container[str]) -> list[str]:
    """The names among those known of the instruction's operands, in their order."""
    given = line.text[line.text.index(f" {line.kind}(") + len(line.kind) + 2 :].partition(")")[0]
    return [name for name in re.findall(r"%?([\w.\-]+)", given) if name in known]


def _written(line: _Line, lines: Mapping[str, _Line], computations: Mapping[str, list[_Line]]) -> int:
    """Bytes that a kernel, one of the `lines` of a computation, writes to the device's memory."""
    results, makers = [found[0] for found in ARRAY.finditer(line.shape)], [line.name]
    if line.kind.endswith("-start"):
        results = results[:1]  # the source, of the same size, and a mark follow
    if line.kind == "fusion":
        lines = {each.name: each for called in _called(line.text) for each in computations.get(called, ())}
        root = next((each for each in lines.values() if each.text.lstrip().startswith("ROOT")), None)
        made = [] if root is None else _operands(root, lines) if root.kind == "tuple" else [root.name]
        makers = [_behind(name, lines) for name in made]
    total = 0
    for result, maker in itertools.zip_longest(results, makers[: len(results)]):
        found = lines.get(maker or "")
        update = _operands(found, lines)[1:2] if found and found.kind == "dynamic-update-slice" else []
        if not CLOSE.search(result):
            total += _bytes(lines[update[0]].shape if update else result)
    return total


def _behind(name: str, lines: Mapping[str, _Line]) -> str:
    """The instruction whose result that one shows in another form."""
    while lines[name].kind == "bitcast" and (operands := _operands(lines[name], lines)):
        name = operands[0]
    return name


def _flops(line: _Line, shapes: dict[str, str]) -> float:
    """Of a matrix product or a convolution: two for each multiplication and addition."""
    if line.kind == "custom-call":
        return _library_flops(line, shapes)
    if line.kind not in ("dot", "convolution"):
        return 0.0
    operands = _operands(line, shapes)
    if len(operands) < 2:
        return 0.0
    out = math.prod(_dimensions(line.shape))
    if line.kind == "dot":
        left = _dimensions(shapes[operands[0]])
        axes = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", line.text)
        return 2.0 * out * math.prod(left[int(axis)] for axis in axes[1].split(",") if axis) if axes else 0.0
    kernel = _dimensions(shapes[operands[1]])
    labels = re.search(r"dim_labels=\w+_(\w+)->", line.text)
    if labels is None:
        return 0.0
    # A TPU's product of many matrices is a convolution that spreads them out, and meets one with every output.
    sizes, spread = (_window(line.text, name) for name in ("size", "lhs_dilate"))
    taps = math.prod(-(-size // gap) for size, gap in zip(sizes, spread or [1] * len(sizes), strict=True))
    return 2.0 * out * kernel[labels[1].index("i")] * taps


def _library_flops(line: _Line, shapes: dict[str, str]) -> float:
    """Of what a GPU's program leaves to cuDNN and cuBLAS."""
    found = LIBRARY.search(line.text)
    operands = [_dimensions(shapes[name]) for name in _operands(line, shapes)[:2]]
    if found is None or len(operands) < 2:
        return 0.0
    (first, second), result, name = operands, _dimensions(line.shape), found[1]
    if not name.startswith("conv"):
        axes = re.search(r'lhs_contracting_dimensions":\[([^\]]*)\]', line.text)
        return (
            2.0
            * math.prod(result)
            * math.prod(first[int(axis)] for axis in re.findall(r"\d+", axes[1] if axes else ""))
        )
    # The labels are the convolution's, in whose gradients the result stands in an operand's place.
    places = {"convBackwardInput": (first, second), "convBackwardFilter": (second, result)}
    out, kernel = places.get(name, (result, second))
    labels = re.search(r"dim_labels=\w+_(\w+)->", line.text)
    return 2.0 * math.prod(out) * math.prod(kernel) / kernel[labels[1].index("o")] if labels else 0.0


def _window(text: str, name: str) -> list[int]:
    found = re.search(rf"window=\{{[^}}]*\b{name}=([\dx]+)", text)
    return [int(part) for part in found[1].split("x")] if found else []
