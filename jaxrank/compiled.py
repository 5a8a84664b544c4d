"""Reads what a compiled program does from its text: arrays that it makes, bytes that it sends."""

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

_BITS = {"pred": 8, "bf16": 16}  # of the types whose name does not end in their bits

# These give another name to what is there, or hand on what other instructions made.
_MAKES_NOTHING = frozenset({"parameter", "get-tuple-element", "bitcast", "tuple", "while", "call"})

COLLECTIVES = (
    "all-to-all",
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "collective-permute",
    "ragged-all-to-all",
)


class Result(NamedTuple):
    """What one instruction makes.

    elements: of its largest array.
    bytes: of all its arrays.
    """

    opcode: str
    elements: int
    bytes: int
    line: str


def bits_of(dtype: str) -> int:
    """Of one number of a type of HLO, as "f32"; 0 of what is no number."""
    return _BITS.get(dtype) or int((re.search(r"\d+", dtype) or [0])[0])


def results(text: str) -> Iterator[Result]:
    """The results of all instructions of a program in HLO text, in every computation."""
    for line in text.splitlines():
        match = re.search(r"= (.+?) ([a-z][\w-]*)\(", line)
        if not match:
            continue
        # What begins an exchange may hand on what is sent, in front of what will be received.
        made = re.sub(r"^\(\(.*?\), ", "(", match[1])
        sizes, total = [0], 0
        for dtype, dims in re.findall(r"\b([a-z]\w*)\[([\d,]*)\]", made):
            sizes.append(math.prod(int(d) for d in dims.split(",") if d))
            total += sizes[-1] * bits_of(dtype) // 8
        yield Result(match[2], max(sizes), total, line.strip())


def large_results(text: str, elements: int) -> list[Result]:
    """Instructions that make an array of at least so many elements, but for scatters.

    A scatter into a donated array works in place, and so does a fusion that is nothing else, and a
    custom call all of whose results are operands.
    """
    in_place = _scatter_computations(text)
    return [
        r
        for r in results(text)
        if r.elements >= elements
        and r.opcode not in _MAKES_NOTHING
        and r.opcode != "scatter"
        and not (r.opcode == "fusion" and _called(r.line) in in_place)
        and not _is_custom_call_in_place(r.line)
    ]


def _is_custom_call_in_place(line: str) -> bool:
    match = re.search(r"= (.+?) custom-call\(.*output_to_operand_aliasing=\{(.*?\))\}", line)
    return match is not None and match[1].count("[") == match[2].count(": (")


def _called(line: str) -> str:
    match = re.search(r"calls=%?([\w.-]+)", line)
    return match[1] if match else ""


def _scatter_computations(text: str) -> set[str]:
    """Names of the computations whose result is that of a scatter, or of a fusion that is one."""
    root_of, name = {}, ""
    for line in text.splitlines():
        start = re.match(r"(?:ENTRY )?%?([\w.-]+) \(.*\{$", line)
        if start:
            name = start[1]
        elif re.match(r"\s*ROOT ", line):
            root_of[name] = line
    found = {name for name, root in root_of.items() if " scatter(" in root}
    while True:
        more = {n for n, root in root_of.items() if " fusion(" in root and _called(root) in found}
        if more <= found:
            return found
        found |= more


def collective_bytes(text: str) -> dict[str, int]:
    """Bytes of the results of each kind of collective, on one device; each instruction once,
    however often a loop runs it."""
    found = dict.fromkeys(COLLECTIVES, 0)
    for result in results(text):
        kind = result.opcode.removesuffix("-start")
        if kind in found:
            found[kind] += result.bytes
    return {kind: count for kind, count in found.items() if count}
