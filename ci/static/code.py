"""What the machine code of a compiled kernel uses, read from its assembly: no device needed.

Registers, spills and on-chip memory are what the assembler wrote down. How many threads a core can
hold follows from them and from the sizes of its register file and memory (:class:`Core`), as the
vendors' occupancy tables say.
"""

from __future__ import annotations

import dataclasses
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import triton

from ci.static.descriptors import misread

BINARIES = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


@dataclasses.dataclass(frozen=True)
class Core:
    """One multiprocessor, or one pair of compute units that share their memory.

    Attributes:
        threads: Threads it can hold.
        registers: 32-bit registers, for all threads.
        granule: Registers a thread are handed out in multiples of this.
        slots: Parts of the core with an equal share of registers and warps.
        shared: On-chip memory for programs, in bytes.
        reserved: On-chip memory that every program costs beside its own.
        programs: Programs it can hold.
    """

    threads: int
    registers: int
    granule: int
    slots: int
    shared: int
    reserved: int
    programs: int


# CUDA Programming Guide, table of technical specifications per compute capability
CUDA = {
    "sm80": Core(2048, 65536, 8, 4, 164 << 10, 1024, 32),
    "sm90": Core(2048, 65536, 8, 4, 228 << 10, 1024, 32),
    "sm100": Core(2048, 65536, 8, 4, 228 << 10, 1024, 32),
}
# LLVM's AMDGPU back end (AMDGPUBaseInfo): registers, granules and waves of a SIMD. CDNA has 4 of
# them a compute unit; on RDNA two compute units share 128 KiB between the 4 of their pair.
AMD = {
    "gfx90a": Core(2048, 131072, 8, 4, 64 << 10, 0, 32),
    "gfx942": Core(2048, 131072, 8, 4, 64 << 10, 0, 32),
    "gfx950": Core(2048, 131072, 8, 4, 160 << 10, 0, 32),
    "gfx1100": Core(2048, 196608, 24, 4, 128 << 10, 0, 64),
    "gfx1201": Core(2048, 196608, 24, 4, 128 << 10, 0, 64),
}
CORES = CUDA | AMD


def resident(core: Core, threads: int, warp_size: int, registers: int, shared: int) -> int:
    """Threads of one kernel that a core holds at a time.

    Args:
        core: Its sizes.
        threads: Threads of a program.
        warp_size: Threads that run in lock step.
        registers: Registers a thread.
        shared: On-chip memory of a program, in bytes.
    """
    granted = -(-max(registers, 1) // core.granule) * core.granule
    warps = min(
        core.threads // core.slots // warp_size,
        core.registers // core.slots // (granted * warp_size),
    )
    programs = min(core.programs, warps * core.slots // -(-threads // warp_size))
    if shared:
        programs = min(programs, core.shared // (shared + core.reserved))
    return programs * threads


@dataclasses.dataclass(frozen=True)
class Code:
    """What the machine code of one kernel uses; memory in bytes.

    Attributes:
        threads: Threads of a program.
        registers: Vector registers a thread.
        spills: Registers and stack in memory, of a thread.
        shared: On-chip memory of a program.
        resident: Threads that a core holds at a time.
        loads: Global loads by width: ``{16: 4}`` is four instructions of 16 bytes a thread.
        stores: Global stores by width.
        unbounded_loads: Those of 16 bytes that take no part in AMD's bounds checks (buffers): each
            needs a 64-bit address a thread, and a branch for its mask.
        unbounded_stores: The same of stores.
        matrix: Matrix instructions.
        instructions: Instructions altogether.
        swaps: Compare-and-swap instructions: an atomic operation that became a loop.
        narrow_atomics: Atomic operations on 16-bit numbers.
        misread: GEMMs whose factors may be read from anywhere (:mod:`ci.static.descriptors`).
    """

    threads: int
    registers: int
    spills: int
    shared: int
    resident: int
    loads: dict[int, int]
    stores: dict[int, int]
    unbounded_loads: int
    unbounded_stores: int
    matrix: tuple[str, ...]
    instructions: int
    swaps: int
    narrow_atomics: int
    misread: int = 0

    @property
    def widest_load(self) -> int:
        """Bytes of the widest global load."""
        return max(self.loads, default=0)

    @property
    def widest_store(self) -> int:
        """Bytes of the widest global store."""
        return max(self.stores, default=0)


def read(compiled: Any, arch: str, warp_size: int) -> Code:
    """The facts of one compiled kernel."""
    threads = compiled.metadata.num_warps * warp_size
    shared = max(int(compiled.metadata.shared), 0)
    facts = _amd(compiled.asm["amdgcn"]) if "amdgcn" in compiled.asm else _nvidia(compiled.asm)
    held = resident(CORES[arch], threads, warp_size, facts["registers"], shared)
    return Code(threads=threads, shared=shared, resident=held, **facts)


def _widths(widths: Iterable[int]) -> dict[int, int]:
    return dict(sorted(Counter(widths).items(), reverse=True))


DWORDS = {"x4": 16, "x3": 12, "x2": 8, "": 4}


def _amd_width(kind: str) -> int:
    """Bytes of an access from what stands behind ``load_`` or ``store_``."""
    if found := re.match(r"dword(x[234])?$", kind):
        return DWORDS[found[1] or ""]
    if found := re.match(r"b(\d+)$", kind):
        return int(found[1]) // 8
    return 2 if re.search(r"short|16", kind) else 1


def _amd(text: str) -> dict[str, Any]:
    body = text.partition(".amdhsa_kernel")[0]
    names = re.findall(r"^\t([a-z]\w+)", body, re.MULTILINE)
    access = [re.match(r"(global|buffer|flat)_(load|store)_(\w+)$", name) for name in names]
    found = [(m[1], m[2], _amd_width(m[3].removeprefix("lds_"))) for m in access if m]

    def number(key: str) -> int:
        value = re.search(rf"\.{key}:\s*(\d+)", text)
        return int(value[1]) if value else 0

    return {
        "registers": number("vgpr_count"),
        "spills": number("vgpr_spill_count") * 4 + number("private_segment_fixed_size"),
        "loads": _widths(width for _, kind, width in found if kind == "load"),
        "stores": _widths(width for _, kind, width in found if kind == "store"),
        **{
            f"unbounded_{kind}s": sum(
                space != "buffer" and width == 16 and kind == which for space, which, width in found
            )
            for kind in ("load", "store")
        },
        "matrix": tuple(sorted({n for n in names if re.match(r"v_(s?mfma|s?wmma)", n)})),
        "instructions": len(names),
        "swaps": sum("cmpswap" in n or "cmpst" in n for n in names),
        "narrow_atomics": sum(bool(re.search(r"atomic_\w*(bf16|f16)", n)) for n in names),
    }


def _tool(name: str, flag: str, code: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        command = [str(BINARIES / name), flag, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _nvidia(asm: Any) -> dict[str, Any]:
    usage = _tool("cuobjdump", "-res-usage", asm["cubin"])
    # the kernels have no arrays of their own: a stack is spilled registers
    held = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    if held is None:
        raise RuntimeError(f"cuobjdump printed no registers and stack: {usage!r}")
    listing = _tool("nvdisasm", "-c", asm["cubin"])
    names = re.findall(
        r"^\s+(?:/\*[0-9a-f]+\*/)\s+(?:@!?\w+\s+)?([A-Z][\w.]*)", listing, re.MULTILINE
    )

    def widths(prefix: str) -> list[int]:
        bits = [
            re.search(r"\.(?:U|S)?(8|16|64|128|256)\b", n) for n in names if n.startswith(prefix)
        ]
        return [int(b[1]) // 8 if b else 4 for b in bits]

    return {
        "registers": int(held[1]),
        "spills": int(held[2]),
        "loads": _widths([*widths("LDG."), *widths("LDGSTS.")]),
        "stores": _widths(widths("STG.")),
        "unbounded_loads": 0,
        "unbounded_stores": 0,
        "matrix": tuple(
            sorted({m[0] for m in (re.match(r"(?:UTC)?[A-Z]*MMA\b", n) for n in names) if m})
        ),
        "instructions": len(names),
        "swaps": sum(n.startswith("ATOM") and "CAS" in n for n in names),
        "narrow_atomics": sum(bool(re.match(r"(ATOM|RED).*(F16|BF16)", n)) for n in names),
        "misread": len(misread(listing)),
    }
