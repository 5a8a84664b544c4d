"""What one device does in a compiled TPU program, counted from its text, loop by loop."""

import functools
import math
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from jaxrank.compiled import COLLECTIVES, bits_of

# These move nothing: they name what is there, or run what is counted on its own.
_FREE = frozenset(
    ("parameter", "constant", "get-tuple-element", "tuple", "bitcast", "while", "conditional")
    + ("call", "after-all", "partition-id", "replica-id", "optimization-barrier")
)
_READS_ROWS = frozenset({"gather", "dynamic-slice"})
_WRITES_ROWS = frozenset({"scatter", "dynamic-update-slice"})
# Passes in bfloat16 by which the matrix unit multiplies, by the precision of the operands.
_PASSES = {"default": 1, "high": 3, "highest": 6}


class Cost(NamedTuple):
    """One instruction, all the times that it runs.

    opcode: "all-to-all" also where it only starts one.
    runs: how often.
    scope: where in the program that JAX traced, as `transpose(jvp(Ranker))/tower/layer_0`.
    flops: of matrix products, once for each pass in bfloat16.
    memory_bytes: read from and written to HBM.
    cycles: that the compiler expects, 0 where it does not say.
    compared: keys of a sort times the passes over them.
    sent_bytes: of the result of a collective.
    """

    opcode: str
    runs: float
    scope: str = ""
    flops: float = 0.0
    memory_bytes: float = 0.0
    cycles: float = 0.0
    compared: float = 0.0
    sent_bytes: float = 0.0


class _Array(NamedTuple):
    dims: tuple[int, ...]
    bytes: int  # 0 where it is in the fast memory of the core


class _Instruction(NamedTuple):
    name: str
    opcode: str
    arrays: tuple[_Array, ...]
    operands: tuple[str, ...]
    rest: str  # of the line, behind the name of the opcode

    @property
    def bytes(self) -> int:
        return sum(array.bytes for array in self.arrays)

    @property
    def scope(self) -> str:
        match = re.search(r'op_name="([^"]*)"', self.rest)
        return match[1] if match else ""

    def called(self, what: str) -> str:
        match = re.search(rf"\b{what}=%?([\w.-]+)", self.rest)
        return match[1] if match else ""


def costs(text: str) -> list[Cost]:
    """The costs of the instructions of a program in HLO text, of all its steps.

    A loop whose number of runs depends on the data is taken to run once for each slice of what it
    goes over, and once where devices meet in it: the rounds of an exchange whose buffers suffice.
    Of the branches of a condition the one with the fewest exchanges is taken.
    """
    program = _Program(text)
    return list(program.walk(program.entry, 1.0))


class _Program:
    def __init__(self, text: str):
        self.entry = ""
        self._computations: dict[str, list[_Instruction]] = {}
        inside: list[_Instruction] = []
        for line in text.splitlines():
            start = re.match(r"(ENTRY )?%?([\w.-]+) \(.*\{$", line)
            if start:
                inside = self._computations[start[2]] = []
                self.entry = start[2] if start[1] else self.entry
            elif found := _instruction(line):
                inside.append(found)

    def walk(self, name: str, runs: float) -> Iterator[Cost]:
        for one in self._computations[name]:
            if one.opcode == "while":
                yield from self.walk(one.called("body"), runs * self._trips(name, one))
            elif one.opcode == "conditional":
                yield from self.walk(self._branch(one), runs)
            elif one.opcode == "call":
                yield from self.walk(one.called("to_apply"), runs)
            elif one.opcode not in _FREE and not one.opcode.endswith("-done"):
                yield self._cost(name, one, runs)

    def _cost(self, computation: str, one: _Instruction, runs: float) -> Cost:
        kind = one.opcode.removesuffix("-start")
        if kind in COLLECTIVES:
            return Cost(kind, runs, sent_bytes=runs * _all_bytes(one))
        expected = re.search(r'"estimated_cycles":"(\d+)"', one.rest)
        compared = 0.0
        if one.opcode == "sort":
            keys = max(math.prod(array.dims) for array in one.arrays)
            levels = math.ceil(math.log2(max(2, keys)))
            compared = keys * levels * (levels + 1) / 2  # Batcher's network
        return Cost(
            one.opcode,
            runs,
            one.scope,
            flops=runs * self._flops(computation, one),
            memory_bytes=runs * self._traffic(computation, one),
            cycles=runs * (int(expected[1]) if expected else 0),
            compared=runs * compared,
        )

    # How often loops run.

    def _trips(self, caller: str, loop: _Instruction) -> float:
        body = loop.called("body")
        known = self._counted(caller, loop)
        if known is not None:
            return known
        if self._exchanges(body):
            return 1
        return max(self._slices(body), default=1)

    def _counted(self, caller: str, loop: _Instruction) -> int | None:
        """The runs of a loop that counts by 1 from a constant to a constant."""
        condition = self._computations[loop.called("condition")]
        root = condition[-1]
        if root.opcode != "compare" or "direction=LT" not in root.rest:
            return None
        here = {one.name: one for one in condition}
        counter, limit = (_origin(here, name) for name in root.operands)
        if counter is None or limit is None or counter.opcode != "get-tuple-element":
            return None
        place = _index(counter)
        if not self._counts(loop.called("body"), place):
            return None
        start = self._carried(caller, loop, place)
        if limit.opcode == "constant":
            stop = _constant(limit)
        elif limit.opcode == "get-tuple-element":
            stop = self._carried(caller, loop, _index(limit))
        else:
            stop = None
        return None if start is None or stop is None else max(0, stop - start)

    def _counts(self, body: str, place: int) -> bool:
        """Whether a loop's body adds 1 to what it carries there."""
        here = {one.name: one for one in self._computations[body]}
        root = self._computations[body][-1]
        if root.opcode != "tuple":
            return False
        after = _origin(here, root.operands[place])
        if after is None or after.opcode != "add":
            return False
        parts = [p for name in after.operands if (p := _origin(here, name))]
        carried = [p for p in parts if p.opcode == "get-tuple-element" and _index(p) == place]
        return bool(carried) and any(p.opcode == "constant" and _constant(p) == 1 for p in parts)

    def _carried(self, caller: str, loop: _Instruction, place: int) -> int | None:
        """The constant that a loop begins with there; None where it is no constant."""
        here = {one.name: one for one in self._computations[caller]}
        carried = here[loop.operands[0]]
        value = _origin(here, carried.operands[place]) if carried.opcode == "tuple" else None
        return _constant(value) if value is not None and value.opcode == "constant" else None

    def _inside(self, name: str) -> Iterator[_Instruction]:
        """All instructions of a computation and of those that it calls."""
        for one in self._computations.get(name, []):
            yield one
            for called in re.findall(r"(?:calls|body|to_apply)=%?([\w.-]+)", one.rest):
                yield from self._inside(called)
            for branch in _branches(one):
                yield from self._inside(branch)

    @functools.cache  # noqa: B019 - of a program that lives as long as it is counted
    def _exchanges(self, name: str) -> int:
        return sum(one.opcode.removesuffix("-start") in COLLECTIVES for one in self._inside(name))

    def _slices(self, body: str) -> Iterator[int]:
        """How many slices there are of each array of which a loop's body takes one."""
        for one in self._inside(body):
            sizes = re.search(r"dynamic_slice_sizes=\{([\d,]*)\}", one.rest)
            if sizes and sizes[1].startswith("1,"):
                whole = self._of_operand(one)
                if whole and len(whole.dims) > 1:
                    yield whole.dims[0]

    def _of_operand(self, one: _Instruction) -> _Array | None:
        for instructions in self._computations.values():
            for other in instructions:
                if other.name == one.operands[0] and other.arrays:
                    return other.arrays[0]
        return None

    def _branch(self, one: _Instruction) -> str:
        return min(_branches(one), key=self._exchanges)

    # What an instruction does.

    def _flops(self, computation: str, one: _Instruction) -> float:
        """Of the products in an instruction, fused ones included."""
        if one.opcode == "fusion":
            inside = one.called("calls")
            return sum(self._flops(inside, part) for part in self._computations[inside])
        if one.opcode not in ("dot", "convolution"):
            return 0.0
        here = {other.name: other for other in self._computations[computation]}
        left = here[one.operands[0]].arrays[0].dims
        summed = math.prod(left[d] for d in _summed(one, len(left)))
        window = re.search(r"window=\{size=([\dx]+)(.*?)\}", one.rest)
        if window and "lhs_dilate" not in window[2]:  # which is how batches of products look
            summed *= math.prod(int(n) for n in window[1].split("x"))
        precision = re.search(r"operand_precision=\{(\w+)", one.rest)
        passes = _PASSES[precision[1] if precision else "default"]
        return 2.0 * math.prod(one.arrays[0].dims) * summed * passes

    def _traffic(self, computation: str, one: _Instruction) -> float:
        """Bytes read and written."""
        here = {other.name: other for other in self._computations[computation]}
        if one.opcode == "fusion":
            inside = one.called("calls")
            reads = sum(
                self._read(inside, i, here[name].bytes if name in here else 0)
                for i, name in enumerate(one.operands)
            )
            return reads + self._written(inside, one.bytes)
        if one.opcode in _WRITES_ROWS:
            return 2.0 * sum(here[name].bytes for name in one.operands[1:] if name in here)
        operands = one.operands[1:] if one.opcode in _READS_ROWS else one.operands
        rows = one.bytes if one.opcode in _READS_ROWS else 0
        return one.bytes + rows + sum(here[name].bytes for name in operands if name in here)

    def _read(self, fused: str, index: int, whole: int) -> float:
        """Bytes that a fused computation reads of one of its operands."""
        here = self._computations[fused]
        names = {p.name for p in here if p.opcode == "parameter" and _number(p) == index}
        total = 0.0
        for one in here:
            if one.opcode == "bitcast" and one.operands and one.operands[0] in names:
                names.add(one.name)
                continue
            for place, name in enumerate(one.operands):
                if name not in names:
                    continue
                if one.opcode == "fusion":
                    total += self._read(one.called("calls"), place, whole)
                elif place == 0 and one.opcode in _READS_ROWS:
                    total += _all_bytes(one)
                elif place > 0 or one.opcode not in _WRITES_ROWS:
                    return whole
        return min(total, whole)

    def _written(self, fused: str, whole: float) -> float:
        here = {one.name: one for one in self._computations[fused]}
        root = self._computations[fused][-1]
        while root.opcode == "bitcast":
            root = here[root.operands[0]]
        if root.opcode == "fusion":
            return self._written(root.called("calls"), whole)
        if root.opcode in _WRITES_ROWS:
            update = here[root.operands[-1 if root.opcode == "scatter" else 1]]
            return min(2.0 * _all_bytes(update), whole)
        return whole


def _origin(here: Mapping[str, _Instruction], name: str) -> _Instruction | None:
    """What was copied under that name, or is there itself."""
    found = here.get(name)
    while found is not None and found.opcode in ("copy", "bitcast"):
        found = here.get(found.operands[0])
    return found


def _instruction(line: str) -> _Instruction | None:
    match = re.match(r"\s+(?:ROOT )?%?([\w.-]+) = (.+?) ([a-z][\w-]*)\((.*)$", line)
    if match is None:
        return None
    name, kind, opcode, rest = match.groups()
    arrays = tuple(
        _Array(dims := tuple(int(d) for d in text.split(",") if d), _bytes(dtype, dims, layout))
        for dtype, text, layout in re.findall(r"\b([a-z]\w*)\[([\d,]*)\](\{[^}]*\})?", kind)
    )
    depth, end = 1, len(rest)
    for i, letter in enumerate(rest):
        depth += (letter == "(") - (letter == ")")
        if not depth:
            end = i
            break
    return _Instruction(name, opcode, arrays, tuple(re.findall(r"%([\w.-]+)", rest[:end])), rest)


def _bytes(dtype: str, dims: tuple[int, ...], layout: str) -> int:
    return 0 if re.search(r"S\([1-9]", layout) else math.prod(dims) * bits_of(dtype) // 8


def _all_bytes(one: _Instruction) -> int:
    """Of its arrays, taken for four bytes a number where they are in fast memory."""
    return sum(array.bytes or 4 * math.prod(array.dims) for array in one.arrays)


def _summed(one: _Instruction, rank: int) -> list[int]:
    """The axes of the left operand of a product that are summed over."""
    contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", one.rest)
    if contracted:
        return [int(d) for d in contracted[1].split(",") if d]
    labels = re.search(r"dim_labels=(\w+)_", one.rest)
    assert labels
    assert len(labels[1]) == rank, one.rest[:200]
    return [labels[1].index("f")]


def _branches(one: _Instruction) -> list[str]:
    found = re.search(r"branch_computations=\{([^}]*)\}", one.rest)
    if found:
        return [name.strip().lstrip("%") for name in found[1].split(",")]
    named = [one.called(f"{which}_computation") for which in ("true", "false")]
    return [name for name in named if name]


def _index(one: _Instruction) -> int:
    match = re.search(r"index=(\d+)", one.rest)
    assert match
    return int(match[1])


def _number(one: _Instruction) -> int:
    return int(one.rest.split(")")[0])


def _constant(one: _Instruction) -> int | None:
    text = one.rest.split(")")[0]
    return int(text) if re.fullmatch(r"-?\d+", text) else None
