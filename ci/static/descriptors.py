"""Where the descriptors of Hopper's GEMMs come from, read from machine code.

A GEMM reads factors in on-chip memory through descriptors: uniform registers that hold an address
on chip and a layout. Both are made of constants and of the program's place in its cluster, so no
kernel argument may reach them. In loops, ptxas 12.8 (Triton 3.6) at times lets a register enter the
first turn with the argument that it held before: the GEMM then reads from anywhere, and its result
is wrong or the launch faults. ptxas 12.9 (Triton 3.9) compiled the same kernels rightly.

The registers are followed through all paths of a listing by nvdisasm. What a vector register gives
(R2UR) is trusted.
"""

from __future__ import annotations

import re
from typing import NamedTuple

ARGUMENT, MADE = 2, 1  # a uniform register holds an argument or nothing; or what was made of others
LINE = re.compile(r"/\*([0-9a-f]{4,6})\*/\s+(@!?U?P\w+\s+)?([A-Z][\w.]*)\s*([^;]*);")
LABEL = re.compile(r"^\s*(\.L_x?_?\w+):", re.MULTILINE)
REGISTER = re.compile(r"\bUR(\d+)\b")
GEMM = re.compile(r"(?:,\s*R\d+(?:\.\w+)*)?,\s*gdesc\[UR(\d+)\]")


class Instruction(NamedTuple):
    """One line: its address, whether it has a condition, its name and what stands behind it."""

    address: int
    conditional: bool
    name: str
    operands: str


def _parsed(listing: str) -> tuple[list[Instruction], dict[str, int]]:
    """Instructions, and the number of the one that follows each label."""
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in listing.splitlines():
        if label := LABEL.match(line):
            labels[label[1]] = len(instructions)
        elif m := LINE.search(line):
            instructions.append(Instruction(int(m[1], 16), bool(m[2]), m[3], m[4].strip()))
    return instructions, labels


def _next(code: list[Instruction], labels: dict[str, int], at: int) -> list[int]:
    """Numbers of the instructions that may follow one."""
    _, conditional, name, operands = code[at]
    after = [at + 1] if at + 1 < len(code) else []
    if name.startswith("BRA"):
        target = labels.get("".join(re.findall(r"`\((\S+)\)", operands)))
        jumps = [] if target is None or target >= len(code) else [target]
        return jumps + (after if conditional or not operands.startswith("`") else [])
    return after if conditional or name not in ("EXIT", "RET") else []


def _ran(one: Instruction, registers: dict[int, int]) -> dict[int, int]:
    """What uniform registers hold after an instruction."""
    first, _, rest = one.operands.partition(",")
    target = re.fullmatch(r"UR(\d+)", first.strip())
    if target is None:
        return registers
    wide = ".64" in one.name or ".WIDE" in one.name
    after = dict(registers)
    for half in range(1 + wide):
        step = half if ".64" in one.name else 0
        read = [registers.get(int(r) + step, ARGUMENT) for r in REGISTER.findall(rest)]
        value = ARGUMENT if one.name.startswith("ULDC") else max(read, default=MADE)
        if one.name.startswith(("R2UR", "S2UR")):
            value = MADE
        register = int(target[1]) + half
        after[register] = (
            max(value, registers.get(register, ARGUMENT)) if one.conditional else value
        )
    return after


def _registers_before(
    code: list[Instruction], labels: dict[str, int]
) -> list[dict[int, int] | None]:
    """What uniform registers may hold before every instruction, over all paths to it."""
    before: list[dict[int, int] | None] = [None] * len(code)
    before[0] = {}
    work = [0]
    while work:
        at = work.pop()
        registers = before[at]
        assert registers is not None
        after = _ran(code[at], registers)
        for to in _next(code, labels, at):
            known = before[to]
            joined = (
                after
                if known is None
                else {
                    r: max(known.get(r, ARGUMENT), after.get(r, ARGUMENT))
                    for r in known.keys() | after.keys()
                }
            )
            if joined != known:
                before[to] = joined
                work.append(to)
    return before


def misread(listing: str) -> tuple[int, ...]:
    """Addresses of the GEMMs, one descriptor of which an argument may reach.

    Args:
        listing: What ``nvdisasm -c`` prints of one kernel.
    """
    if "HGMMA" not in listing:
        return ()
    code, labels = _parsed(listing)
    wrong = []
    for one, registers in zip(code, _registers_before(code, labels), strict=True):
        gemm = GEMM.search(one.operands) if one.name.startswith("HGMMA") else None
        if gemm is None or registers is None:
            continue
        # four registers; the first two are not read where the left factor is in registers
        first = int(gemm[1]) + 2 * gemm[0].lstrip(", ").startswith("R")
        if any(registers.get(r, ARGUMENT) == ARGUMENT for r in range(first, int(gemm[1]) + 4)):
            wrong.append(one.address)
    return tuple(wrong)
