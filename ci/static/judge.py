"""What the machine code of a launch must not have, and which launches may have some of it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable

from ci.static import TARGETS, StaticCase
from ci.static.code import Code
from ci.static.rows import Row

BYTES = {"*bf16": 2, "*fp16": 2, "*fp32": 4, "*i32": 4, "*i64": 8}


def _has_tensor(name: str) -> Callable[[StaticCase], bool]:
    return lambda case: case.signature.get(name, "")[:1] == "*"


def _above(name: str, most: int) -> Callable[[StaticCase], bool]:
    return lambda case: case.constant(name, 1) > most


def _any(case: StaticCase) -> bool:
    return True


# kernels, by how their names begin, whose launches may load from tensors of more than 2 GiB by 64
# bits a thread: which of the launches, and why. Nothing may store so.
ADDRESSED = {
    "_embedding_": (_above("ROWS", 1), "each row of a tile stands where an index in memory says"),
    "_rope_angles_": (
        _above("GRIDS", 1),
        "each pair of channels has its grid's angles, tensors apart",
    ),
    "_moe_up_": (
        _has_tensor("order_ptr"),
        "tokens of a tile stand where the order of pairs says",
    ),
    "_moe_bias_gradient_": (_has_tensor("routing_ptr"), "likewise"),
    "_moe_combine_": (_above("TOP_K", 3), "the rows of a token's pairs, 4 numbers for all threads"),
    "_grouped_product_": (
        _any,
        "likewise; without an order, pointers pass by strides of the caller's",
    ),
    "_grouped_weight_": (_any, "likewise, on one side or the other"),
    "_grouped_update_": (_any, "a factor of an adapter has strides of the caller's"),
    "_sparse_attention_": (
        _any,
        "listed keys stand where lists say, heads by strides",
    ),
    "_indexer_scores_": (_any, "likewise"),
    "_indexer_backward_": (_any, "likewise"),
    "_delta_rule_pairs_": (_any, "four tensors advance by columns in one loop"),
}
# kernels, by how their names begin, that may spill: bytes of a thread at most by target, and why
SPILLED = {
    "_ssd_pairs_": (
        {"sm90": 560, "sm100": 16},
        "4 warps, which spill, take half of the time of 8 on an H200; see launch/sm90.yaml",
    ),
    "_ssd_groups_": (
        {"sm90": 640, "sm80": 8},
        "sums of 64 tokens by 128 states stay in registers; see launch/sm90.yaml",
    ),
    "_mixes_backward_": (
        {"sm90": 16},
        "16 rows by 256 columns take 0.85 of the time of what fits; see launch/sm90.yaml",
    ),
    "_attention_backward_keys_": (
        {"sm90": 64},
        "plain causal masks, heads of 128: 4.6 ms in place of 5.8 on an H100; see launch/sm90.yaml",
    ),
    "_kimi_delta_scores_": (
        {"sm90": 48},
        "4 warps take three quarters of the time of 8 on an H100; see launch/sm90.yaml",
    ),
    "_sparse_attention_forward_": (
        {"sm90": 296, "gfx90a": 12, "gfx942": 12},
        "64 by 64 take a third of the time of 32 by 32 on an H100; three registers of a wave of 64",
    ),
    "_sparse_attention_backward_": ({"sm90": 1712}, "likewise, two fifths of the time"),
    "_selective_scan_backward_": (
        {"sm90": 88},
        "packed rows; four tokens a step take 3.0 ms, and two 3.4 on an H100; see launch/sm90.yaml",
    ),
}
# kernels, by how their names begin, that read a few numbers and stream nothing in
NOT_READ = ("_zero_groups_", "_sinkhorn_", "_multi_token_zero_", "_ssd_gates_", "_ssd_steps_")


def streamed(case: StaticCase, code: Code) -> int:
    """Bytes a thread that a streaming kernel loads at a time: 16, or all that its tile has."""
    widths = [
        BYTES.get(type_name, 16) for type_name in case.signature.values() if type_name[0] == "*"
    ]
    tile = case.constant("ROWS", 1) * case.constant("BLOCK", 2**20)
    return max(1, min(16, tile * min(widths, default=16) // code.threads))


def failures(row: Row) -> list[str]:
    """What a row must not have."""
    case, info, code = row.case, TARGETS[row.arch].info, row.code
    if row.refused:
        return [f"does not compile: {row.refused}"]
    wrong = []
    if code.threads > info.max_threads:
        wrong.append(f"{code.threads} threads, at most {info.max_threads}")
    if code.shared > info.shared_bytes:
        wrong.append(f"{code.shared} bytes on chip, at most {info.shared_bytes}")
    # formulas do not know alignment, and accesses of 2 bytes take the registers of some launches:
    # the table shows what those spill
    if code.spills > may_spill(case, row.arch) and row.variant.aligned:
        wrong.append(f"{code.spills} bytes of spilled registers")
    required = streamed(case, code)
    reads = not case.name.startswith(NOT_READ)
    if reads and case.streams and row.variant.aligned and code.widest_load < required:
        wrong.append(f"loads {code.widest_load} bytes at a time, wanted {required}")
    if code.swaps:
        wrong.append(f"{code.swaps} compare-and-swap instructions")
    if code.narrow_atomics:
        wrong.append(f"{code.narrow_atomics} atomic operations on 16 bits")
    if code.misread:
        wrong.append(f"{code.misread} GEMMs with kernel arguments in descriptors")
    if row.variant.large and code.unbounded_stores:
        wrong.append(f"{code.unbounded_stores} 16-byte stores lost their buffer operation")
    if row.variant.large and code.unbounded_loads and not addressed(case):
        wrong.append(f"{code.unbounded_loads} 16-byte loads lost their buffer operation")
    return wrong


def may_spill(case: StaticCase, arch: str) -> int:
    """Bytes of a thread that a launch may spill: any, if it is for what is not finite alone."""
    if case.constants.get("ISOLATED"):
        return sys.maxsize
    limits = (
        most.get(arch, 0) for name, (most, _) in SPILLED.items() if case.name.startswith(name)
    )
    return next(limits, 0)


def addressed(case: StaticCase) -> bool:
    """Whether a launch gathers, so that its loads have no common base."""
    return any(case.name.startswith(name) and which(case) for name, (which, _) in ADDRESSED.items())


def verdicts(rows: Iterable[Row]) -> list[str]:
    """One line a failure."""
    return [
        f"{row.arch} {row.case.name} ({row.case.label}, {row.variant.name}): {text}"
        for row in rows
        for text in failures(row)
    ]
