"""Counts the cost of a compiled TPU program on one device from its text, loop by loop."""

import functools
import itertools
import math
import re
from collections.abc import Iterator
from typing import NamedTuple

from jaxrank.aot import hlo
from jaxrank.aot.hlo import COLLECTIVES, Instruction

# These move no data: they rename arrays, or run computations that are counted separately.
_FREE = frozenset(
    ("parameter", "constant", "get-tuple-element", "tuple", "bitcast", "while", "conditional")
    + ("call", "after-all", "partition-id", "replica-id", "optimization-barrier")
)
_FREE_CALLS = ('custom_call_target="AllocateBuffer"', 'custom_call_target="ConcatBitcast"')
_READS_PARTS = frozenset({"gather", "dynamic-slice", "slice"})
_WRITES_PARTS = {"scatter": 2, "dynamic-update-slice": 1}  # number of times the part is moved
_STARTS = frozenset(f"{kind}-start" for kind in COLLECTIVES)
_AWAITS = frozenset(f"{kind}-done" for kind in COLLECTIVES)
# Their results are the arrays that they send, the arrays that they receive, and a third part.
_HANDS_ON = frozenset({"all-to-all-start", "all-gather-start", "collective-permute-start"})
# Number of bfloat16 passes of the matrix unit, by the precision of the operands.
_PASSES = {"default": 1, "high": 3, "highest": 6}


class Cost(NamedTuple):
    """Cost of one instruction over all its runs.

    name: in the program.
    opcode: a collective that is only started counts as the collective, such as "all-to-all".
    runs: number of runs.
    beside: name of the collective that runs at the same time: it was started before and is awaited
        later. The first of several.
    scope: see `hlo.Instruction`.
    flops: of matrix products, once per bfloat16 pass.
    memory_bytes: bytes read from and written to HBM.
    cycles: the compiler's estimate, 0 if it has none.
    compared: keys of a sort times the number of passes over them.
    sent_bytes: bytes of a collective's result, or of its operands if it returns a part of a sum.
    """

    name: str
    opcode: str
    runs: float
    beside: str = ""
    scope: str = ""
    flops: float = 0.0
    memory_bytes: float = 0.0
    cycles: float = 0.0
    compared: float = 0.0
    sent_bytes: float = 0.0


def costs(text: str, *, steps: int = 0) -> list[Cost]:
    """Counts the costs of the instructions of a program in HLO text, over all its steps.

    A loop whose number of runs depends on the data is counted once per slice of its arrays. If
    devices exchange data in it, it is counted once: the rounds of an exchange with large enough
    buffers. Of the branches of a condition, the one with the fewest exchanges is counted.

    Args:
        steps: number of runs of an outermost loop that gets its number at run time, the loop over
            the steps of an execution. 0: there is no such loop.
    """
    program = _Program(text)
    return list(program.walk(program.entry, 1.0, steps=steps))


class _Program:
    def __init__(self, text: str):
        self.entry, self._computations = hlo.computations(text)

    def walk(self, name: str, runs: float, beside: str = "", *, steps: int = 0) -> Iterator[Cost]:
        started: list[str] = []
        for instruction in self._computations[name].values():
            now = beside or next(iter(started), "")
            if instruction.opcode == "while":
                trips = self._trips(name, instruction, steps)
                yield from self.walk(instruction.called("body"), runs * trips, now)
            elif instruction.opcode == "conditional":
                yield from self.walk(min(instruction.branches, key=self._exchanges), runs, now)
            elif instruction.opcode == "call":
                body = instruction.called("to_apply")
                yield from self.walk(body, runs, now, steps=steps)
            elif not _is_free(instruction):
                yield self._cost(name, instruction, runs, now)
            if instruction.opcode in _STARTS:
                started.append(instruction.name)
            elif instruction.opcode in _AWAITS:
                started.remove(instruction.operands[0])

    def _cost(self, computation: str, instruction: Instruction, runs: float, beside: str) -> Cost:
        kind = instruction.opcode.removesuffix("-start")
        if kind in COLLECTIVES:
            sent = runs * self._sent(computation, instruction)
            return Cost(instruction.name, kind, runs, beside, sent_bytes=sent)
        compared = 0.0
        if instruction.opcode == "sort":
            dims = instruction.arrays[0].dims
            levels = math.ceil(
                math.log2(max(2, dims[int(instruction.search(r"dimensions=\{(\d+)"))]))
            )
            compared = math.prod(dims) * levels * (levels + 1) / 2  # Batcher's network
        return Cost(
            instruction.name,
            instruction.opcode,
            runs,
            beside,
            instruction.scope,
            flops=runs * self._flops(computation, instruction),
            memory_bytes=runs * self._traffic(computation, instruction),
            cycles=runs * int(instruction.search(r'"estimated_cycles":"(\d+)"') or 0),
            compared=runs * compared,
        )

    def _sent(self, computation: str, instruction: Instruction) -> int:
        if instruction.opcode.startswith("reduce-scatter"):
            instructions = self._computations[computation]
            return sum(
                instructions[name].size for name in instruction.operands if name in instructions
            )
        if instruction.opcode in _HANDS_ON:
            count = len(instruction.operands)
            return sum(array.size for array in instruction.arrays[count : 2 * count])
        return instruction.size

    # The number of runs of loops.

    def _trips(self, caller: str, loop: Instruction, steps: int) -> float:
        known = self._counted(caller, loop)
        if known is not None:
            return known
        if steps:
            return steps
        body = loop.called("body")
        return 1 if self._exchanges(body) else max(self._slices(body), default=1)

    def _counted(self, caller: str, loop: Instruction) -> int | None:
        """Returns the number of runs of a loop that counts by 1 from a constant to a constant."""
        condition = self._computations[loop.called("condition")]
        test = hlo.root(condition)
        if test.opcode != "compare" or "direction=LT" not in test.rest:
            return None
        counter, limit = (hlo.origin(condition, name) for name in test.operands)
        if counter is None or limit is None or counter.opcode != "get-tuple-element":
            return None
        if not self._counts(loop.called("body"), counter.element_index):
            return None
        start, stop = self._carried(caller, loop, counter.element_index), limit.value
        if limit.opcode == "get-tuple-element":
            stop = self._carried(caller, loop, limit.element_index)
        return None if start is None or stop is None else max(0, stop - start)

    def _counts(self, body: str, index: int) -> bool:
        """Returns True if a loop's body adds 1 to the value that it carries at `index`."""
        instructions = self._computations[body]
        result = hlo.root(instructions)
        if result.opcode != "tuple":
            return False
        after = hlo.origin(instructions, result.operands[index])
        if after is None or after.opcode != "add":
            return False
        parts = [part for name in after.operands if (part := hlo.origin(instructions, name))]
        carried = [p for p in parts if p.opcode == "get-tuple-element" and p.element_index == index]
        return bool(carried) and any(part.value == 1 for part in parts)

    def _carried(self, caller: str, loop: Instruction, index: int) -> int | None:
        """Returns the constant that a loop starts with at `index`. None if it is not a constant."""
        instructions = self._computations[caller]
        carried = instructions[loop.operands[0]]
        value = (
            hlo.origin(instructions, carried.operands[index]) if carried.opcode == "tuple" else None
        )
        return value.value if value else None

    def _inside(self, name: str) -> Iterator[tuple[str, Instruction]]:
        """Yields (computation, instruction) of a computation and of all that it calls."""
        for instruction in self._computations.get(name, {}).values():
            yield name, instruction
            for called in re.findall(r"(?:calls|body|to_apply)=%?([\w.-]+)", instruction.rest):
                yield from self._inside(called)
            if instruction.opcode == "conditional":
                for branch in instruction.branches:
                    yield from self._inside(branch)

    @functools.cache  # noqa: B019 - the program lives only while it is counted
    def _exchanges(self, name: str) -> int:
        kinds = (instruction.opcode.removesuffix("-start") for _, instruction in self._inside(name))
        return sum(kind in COLLECTIVES for kind in kinds)

    def _slices(self, body: str) -> Iterator[int]:
        """Yields the number of slices of each array of which a loop's body takes one slice."""
        for computation, instruction in self._inside(body):
            if instruction.search(r"dynamic_slice_sizes=\{([\d,]*)\}").startswith("1,"):
                whole = self._computations[computation][instruction.operands[0]].arrays[0]
                if len(whole.dims) > 1:
                    yield whole.dims[0]

    # The cost of an instruction.

    def _flops(self, computation: str, instruction: Instruction) -> float:
        """Counts the operations of the products in an instruction, with fused products."""
        if instruction.opcode == "fusion":
            inside = instruction.called("calls")
            parts = self._computations[inside].values()
            return sum(self._flops(inside, part) for part in parts)
        if instruction.opcode not in ("dot", "convolution"):
            return 0.0
        instructions = self._computations[computation]
        left = instructions[instruction.operands[0]].arrays[0].dims
        passes = _PASSES[instruction.search(r"operand_precision=\{(\w+)") or "default"]
        result = instruction.arrays[0].dims
        contracted = instruction.search(r"lhs_contracting_dims=\{([\d,]*)\}")
        if instruction.opcode == "dot":
            summed = math.prod(left[int(d)] for d in contracted.split(",") if d)
            return 2.0 * math.prod(result) * summed * passes
        return 2.0 * _multiplied(instruction, left, result) * passes

    def _traffic(self, computation: str, instruction: Instruction) -> float:
        """Counts the bytes read from HBM and written to it."""
        instructions = self._computations[computation]
        operands = [instructions[name] for name in instruction.operands if name in instructions]
        if instruction.opcode in ("copy-start", "slice-start"):
            # Target, source and a third part. A slice-start has the source first.
            target, source = (
                instruction.arrays[:2]
                if instruction.opcode == "copy-start"
                else instruction.arrays[1::-1]
            )
            return target.size * ((not target.is_fast) + (not source.is_fast))
        if instruction.opcode == "fusion":
            inside = instruction.called("calls")
            reads = sum(self._read(inside, i, o) for i, o in enumerate(operands))
            return reads + self._written(inside, hlo.root(self._computations[inside]), instruction)
        if instruction.opcode in _WRITES_PARTS:
            moved = sum(operand.hbm_bytes for operand in operands[1:])
            return moved + (
                _WRITES_PARTS[instruction.opcode] * operands[-1].size
                if instruction.hbm_bytes
                else 0
            )
        if instruction.opcode in _READS_PARTS:
            read = instruction.size if operands and operands[0].hbm_bytes else 0
            return read + instruction.hbm_bytes + sum(operand.hbm_bytes for operand in operands[1:])
        return instruction.hbm_bytes + sum(operand.hbm_bytes for operand in operands)

    def _read(self, fused: str, index: int, operand: Instruction) -> float:
        """Counts the bytes of HBM that a fused computation reads from one of its operands."""
        whole, total = operand.hbm_bytes, 0.0
        if not whole:
            return 0.0
        instructions = self._computations[fused]
        names = {
            p.name
            for p in instructions.values()
            if p.opcode == "parameter" and p.element_index == index
        }
        for instruction in instructions.values():
            if (
                instruction.opcode == "bitcast"
                and instruction.operands
                and instruction.operands[0] in names
            ):
                names.add(instruction.name)
                continue
            for i, name in enumerate(instruction.operands):
                if name not in names:
                    continue
                if instruction.opcode == "fusion":
                    total += self._read(instruction.called("calls"), i, operand)
                elif i == 0 and instruction.opcode in _READS_PARTS:
                    total += instruction.size
                elif i > 0 or instruction.opcode not in _WRITES_PARTS:
                    return whole
        return min(total, whole)

    def _written(self, fused: str, result: Instruction, whole: Instruction) -> float:
        """Counts the bytes of HBM that a fused computation moves for its result or a part of it.

        Args:
            whole: the instruction whose arrays are written.
        """
        instructions = self._computations[fused]
        if not whole.hbm_bytes:
            return 0.0
        if result.opcode == "bitcast":
            return self._written(fused, instructions[result.operands[0]], whole)
        if result.opcode == "tuple":
            parts = zip(result.operands, whole.arrays, strict=False)
            return sum(
                self._written(fused, instructions[n], whole._replace(arrays=(a,))) for n, a in parts
            )
        if result.opcode == "fusion":
            inside = result.called("calls")
            return self._written(inside, hlo.root(self._computations[inside]), whole)
        if result.opcode in _WRITES_PARTS:
            update = instructions[result.operands[-1 if result.opcode == "scatter" else 1]]
            return min(_WRITES_PARTS[result.opcode] * update.size, whole.hbm_bytes)
        return whole.hbm_bytes


def _is_free(instruction: Instruction) -> bool:
    return (
        instruction.opcode in _FREE
        or instruction.opcode.endswith("-done")
        or any(target in instruction.rest for target in _FREE_CALLS)
    )


def _multiplied(instruction: Instruction, left: tuple[int, ...], result: tuple[int, ...]) -> int:
    """Counts the pairs of numbers that a convolution multiplies, without its padding.

    A TPU program has all products as convolutions. Batches of products lie along axes where only
    one place of the window meets a number.
    """
    labels = re.search(r"dim_labels=(\w+)_\w+->(\w+)", instruction.rest)
    assert labels, instruction.rest[:200]
    of_left, of_result = dict(zip(labels[1], left, strict=True)), labels[2]
    sides = dict(zip(of_result, result, strict=True))
    pairs = sides["b"] * sides["f"] * of_left["f"]
    window = instruction.search(r"window=\{([^}]*)\}")
    fields = dict(field.split("=") for field in window.split())
    for axis, size in enumerate(fields.get("size", "").split("x") if window else ()):
        field = functools.partial(_axis_text, fields, axis)
        low = int(field("pad", "0_0").split("_")[0])
        stride, dilated, steps = (
            int(field(name, "1")) for name in ("stride", "lhs_dilate", "rhs_dilate")
        )
        meets = 0
        for out, place in itertools.product(range(sides[str(axis)]), range(int(size))):
            at, rest = divmod(out * stride + place * steps - low, dilated)
            meets += rest == 0 and 0 <= at < of_left[str(axis)]
        pairs *= meets
    return pairs


def _axis_text(fields: dict[str, str], axis: int, name: str, otherwise: str) -> str:
    return fields[name].split("x")[axis] if name in fields else otherwise
