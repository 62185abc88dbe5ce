"""What a round costs, read off the compiled program: products, bytes, messages, and the compiler's own cycles.

XLA's cost analysis counts the body of a loop once, whatever its turns. Here each computation counts as often as its
loops turn: the loop of the rounds once, a loop whose turns XLA knows so often, one over chunks of clients as its
scope says; others, such as steps of epochs, once, as is said in `unknown` where they have products or messages.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import re
from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import NamedTuple

import jax

from fedjax_cluster.parallel.contributions import ATTEMPTS
from fedjax_cluster.parallel.loop import BLOCKS, CLIENTS, IF_DUE, IF_NOT_DUE, IF_THERE

BITS = re.compile(r"[a-z]+(\d+)")
SHAPE = re.compile(r"\b(pred|[a-z]+\d+\w*)\[([\d,]*)\]")
ARRAY = re.compile(SHAPE.pattern + r"(?:\{[^}]*\})?")
HALF = re.compile(r"bf16|f16|f8")
CLOSE = re.compile(r"S\([1-9]")  # in a layout: memory beside the products' unit, and not the device's
INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\(")
HEADER = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{$")
CALLERS = "calls|to_apply|body|branch_computations|true_computation|false_computation"
CALLED = re.compile(rf"(?:{CALLERS})=\{{?((?:%?[\w.\-]+(?:, )?)+)")
CHAIN = re.compile(r'chain_id="(\d+)"')  # of the parts of one message, sent while other things are computed


def _named(scopes: str, operation: str) -> re.Pattern:
    """An operation itself of one of these scopes, and none inside it; several runs have them in a `vmap`."""
    return re.compile(rf'op_name="[^"]*/(?:\w+\()*(?:{scopes})\)*/{operation}"')


OVER_CLIENTS = _named(rf"{CLIENTS}_(\d+)", "while")  # its turns, at most
# Around it, whose turns are among those of that loop; and one of a single turn, as a rule.
ONE_TURN = _named(f"{BLOCKS}|{ATTEMPTS}", "while")
DUE = _named(IF_DUE, "while")  # of no turn in many rounds
OTHERWISE = _named(IF_NOT_DUE, "while")  # in the place of what is due, which does as much and more
THERE = _named(IF_THERE, "cond")  # whether a client takes part, which all may
LIBRARY = re.compile(r'custom_call_target="__cu(?:dnn|blas)\$([\w$]+)"')
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
# What no kernel writes.
NOTHING = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call", "iota"}


@contextlib.contextmanager
def own_names() -> Iterator[None]:
    """Where a program that JAX's cache has kept is not taken if it has other names, by which loops are known here."""
    name = "jax_compilation_cache_include_metadata_in_key"
    before = getattr(jax.config, name)
    jax.config.update(name, True)
    try:
        yield
    finally:
        jax.config.update(name, before)


class Least(NamedTuple):
    """What no round of a program goes without, on each device."""

    flops: float = 0.0
    bytes: float = 0.0
    message_bytes: float = 0.0

    def plus(self, other: Least, times: int = 1) -> Least:
        return Least(*(mine + times * theirs for mine, theirs in zip(self, other, strict=True)))


class ProgramCosts(NamedTuple):
    """Of one round, on each device."""

    flops: float  # of matrix products and convolutions
    bytes: float  # results of all kernels in the device's memory, written once and read once; of an update in place
    # what is new
    cycles: float  # estimated by the compiler; 0 where it does not
    messages: dict[str, tuple[int, float]]  # kind of collective -> number, bytes
    largest_message: int  # bytes
    least: Least  # of a round in which nothing is done that not every round does
    unknown: int  # loops with products or messages whose turns are not known, counted once
    halves: bool  # whether some product is of 16 bits

    def message_bytes(self) -> float:
        """Bytes of all messages."""
        return sum(size for _, size in self.messages.values())


class _Cost(NamedTuple):
    """Of one computation."""

    flops: float
    written: float
    cycles: float
    messages: tuple
    largest: int
    least: Least


class _Line(NamedTuple):
    name: str
    shape: str
    kind: str
    text: str


def program_costs(text: str) -> ProgramCosts:
    """The costs of one round in an optimised program's text.

    Args:
      text: of `compiled.as_text()`, of a segment of rounds.

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
    unknown, halves = set[str](), set[str]()
    chains: dict[str, tuple[str, int]] = {}

    def bodies(line: _Line) -> list[str]:
        return [name for name in _called(line.text) if name in computations]

    @functools.cache
    def cost(name: str, depth: int, inside: bool) -> _Cost:
        flops, written, cycles, largest, least = 0.0, 0.0, 0.0, 0, Least()
        messages: Counter = Counter()
        lines = {line.name: line for line in computations[name]}
        shapes = {name: line.shape for name, line in lines.items()}
        for line in computations[name]:
            own = _flops(line, shapes)
            halves.update(name for name in _operands(line, shapes) if own and HALF.match(shapes[name]))
            here = not inside and line.kind not in NOTHING and not line.kind.endswith("-done")
            mine = _written(line, lines, computations) if here else 0
            flops, written, least = flops + own, written + mine, least.plus(Least(own, 2 * mine))
            found = re.search(r'"estimated_cycles":"(\d+)"', line.text)
            cycles += float(found[1]) if found else 0.0
            kind = line.kind.removesuffix("-start")
            if (chain := CHAIN.search(line.text)) is not None and kind in COLLECTIVES:
                chains[chain[1]] = kind, _sent(line)
            elif kind in COLLECTIVES:
                messages[kind, "number"] += 1
                messages[kind, "bytes"] += _sent(line)
                largest, least = max(largest, _sent(line)), least.plus(Least(message_bytes=_sent(line)))
            times, fewest, done, deeper = 1, None, None, depth
            if line.kind == "while":
                deeper = depth + 1
                known = re.search(r'known_trip_count\\?":\{\\?"n\\?":\\?"(\d+)', line.text)
                if known:
                    times = int(known[1])
                elif (turns := _turns(line, lines, computations)) is not None:
                    times = turns
                elif over := OVER_CLIENTS.search(line.text):
                    times = int(over[1])
                elif ONE_TURN.search(line.text):
                    times = 1
                elif DUE.search(line.text):
                    fewest = 0
                elif OTHERWISE.search(line.text):
                    fewest, done = 1, 0
                elif depth and any(
                    of.flops or of.messages for of in (cost(name, deeper, inside) for name in bodies(line))
                ):
                    unknown.add(line.name)
            inner = [cost(called, deeper, inside or called in fused) for called in bodies(line)]
            # Of alternatives the larger one; messages of each.
            added = max if line.kind == "conditional" and inner else sum
            often = times if done is None else done
            flops += often * added([each.flops for each in inner])
            written += often * added([each.written for each in inner])
            cycles += often * added([each.cycles for each in inner])
            for each in inner:
                for key, count in each.messages:
                    messages[key] += often * count
                largest = max(largest, each.largest)
            least = _least(line, least, [each.least for each in inner], times if fewest is None else fewest)
        return _Cost(flops, written, cycles, tuple(messages.items()), largest, least)

    flops, written, cycles, messages, largest, least = cost(entry, 0, False)
    found = Counter(dict(messages))
    for kind, size in chains.values():
        found[kind, "number"] += 1
        found[kind, "bytes"] += size
        largest = max(largest, size)
    kinds = {kind: (int(found[kind, "number"]), float(found[kind, "bytes"])) for kind, _ in found}
    return ProgramCosts(flops, 2 * written, cycles, kinds, largest, least, len(unknown), bool(halves))


def _turns(loop: _Line, lines: Mapping[str, _Line], computations: Mapping[str, list[_Line]]) -> int | None:
    """How often a loop turns that counts by ones from a constant to one: compilers for TPUs do not write it down."""
    inside, body = (
        {each.name: each for each in computations.get(found[1] if found else "", ())}
        for found in (re.search(rf"{part}=%?([\w.\-]+)", loop.text) for part in ("condition", "body"))
    )
    end, given, after = _root(inside), _operand_lines(loop, lines), _root(body)
    if end is None or end.kind != "compare" or "direction=LT" not in end.text or after is None or not given:
        return None
    compared = _operand_lines(end, inside)
    place = re.search(r"index=(\d+)", compared[0].text) if len(compared) == 2 else None
    if place is None or compared[0].kind != "get-tuple-element":
        return None
    starts, steps = (
        _operand_lines(each, of) if each.kind == "tuple" else []
        for each, of in ((_origin(given[0], lines), lines), (after, body))
    )
    if int(place[1]) >= min(len(starts), len(steps)):
        return None
    first, step = _origin(starts[int(place[1])], lines), _origin(steps[int(place[1])], body)
    added = [_origin(each, body) for each in _operand_lines(step, body)] if step.kind == "add" else []
    counts = any(_constant(each) == 1 for each in added) and any(
        each.kind == "get-tuple-element" and f"index={place[1]}" in each.text for each in added
    )
    begun, bound = _constant(first), _constant(_origin(compared[1], inside))
    return None if begun is None or bound is None or not counts else max(0, bound - begun)


def _root(lines: Mapping[str, _Line]) -> _Line | None:
    return next((each for each in lines.values() if each.text.lstrip().startswith("ROOT")), None)


def _operand_lines(line: _Line, lines: Mapping[str, _Line]) -> list[_Line]:
    return [lines[name] for name in _operands(line, lines)]


def _origin(line: _Line, lines: Mapping[str, _Line]) -> _Line:
    """What an instruction is a copy of."""
    while line.kind in ("copy", "bitcast") and (given := _operand_lines(line, lines)):
        line = given[0]
    return line


def _constant(line: _Line) -> int | None:
    found = re.search(r"\bconstant\((-?\d+)\)", line.text) if line.kind == "constant" else None
    return None if found is None else int(found[1])


def _least(line: _Line, least: Least, inner: Sequence[Least], times: int) -> Least:
    """With what an instruction calls: of alternatives the smallest, but where they are who takes part."""
    if line.kind == "conditional" and inner:
        choose = max if THERE.search(line.text) else min
        return least.plus(Least(*(choose(part) for part in zip(*inner, strict=True))))
    for each in inner:
        least = least.plus(each, times)
    return least


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
