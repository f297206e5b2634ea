"""Parts of a training step by what their kernels do, from a trace of PyTorch's profiler.

``python -m benchmarks.models --parts`` traces two steps of every variant after its last timed turn.
The steps follow one another without waiting, behind a kernel that keeps the device busy while the
host runs ahead. The trace records the device alone, so that the host is slowed little. The *span*
of a step reaches from the end of that kernel to the end of the last one, divided by the number of
steps; *no kernel runs* in what the union of all kernels leaves of it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from benchmarks.traces import Span, spans

GEMMS, EXPERTS, ATTENTION = "GEMMs", "GEMMs of experts", "attention"
BOUND = (GEMMS, EXPERTS, ATTENTION)
"""What every implementation has to compute; the rest of a step is the gap."""
RECURRENCES, LOSS, NORMS = "recurrences, convolutions", "rows of the loss", "norms"
ACTIVATION, ADDS, FLOAT8 = "gated activation", "adds", "FP8 rounding"
OPTIMIZER, ROTATION, ROUTING = "optimizer", "rotation", "routing"
ELEMENTWISE, OTHER, IDLE = "element-wise, sums, copies", "other", "no kernel runs"

PATTERNS: tuple[tuple[str, str], ...] = (
    (OPTIMIZER, r"multi_tensor|adam"),
    (ADDS, r"_attention_residuals|_streams_|_mixes_|sinkhorn"),  # of residual streams
    (LOSS, r"cross_entropy|LogSoftMax|nll_loss|log_softmax|log_prob|divergence|sparsemax"),
    (LOSS, r"^_?(scale|element_mul|softmax)_\w*kernel"),
    # kernels of ours, then of fla-core: delta rules, their triangular systems and gates
    (RECURRENCES, r"delta_rule|kimi_delta|_ssd_|selective_scan|conv(?!er)"),
    (RECURRENCES, r"^chunk_|recompute_w_u|wy_repr|solve_tril|to_\d+x\d+_inverse|gdn_|fused_beta"),
    (ATTENTION, r"sdpa|flash|fmha|attention|attn|cudnn::fusion|indexer|multi_token|pairs_of_lists"),
    (FLOAT8, r"_round_8_bits|_round_both_ways|_largest_kernel|_quantize_|_across_kernel"),
    (EXPERTS, r"grouped|group_?gemm|GroupProblemShape|fused_(up|down)_proj|_moe_(up|bwd)"),
    (ROUTING, r"_pairs_|_group_tiles|_zero_groups|_moe_(combine|bias|router)|token_gather"),
    (ROUTING, r"topk|bitonic"),
    (ACTIVATION, r"_moe_activation|swiglu|geglu|silu|gelu|_gated_(rows_)?(forward|backward)"),
    (ACTIVATION, r"_clamped_|_pointwise_"),
    (NORMS, r"norm|_dyt_|_sum_partials"),
    (ROTATION, r"rope(?!rty)"),
    (GEMMS, r"gemm|matmul|nvjet|cutlass|cublas|xmma|wgrad|Cijk_|splitKreduce"),
    (ADDS, r"CUDAFunctor_add|CUDAFunctorOnSelf_add"),
    (ATTENTION, r"soft_?max"),  # of scores that are materialized
    (ELEMENTWISE, r"elementwise|CatArray|copy|Memcpy|Memset|fill|reduce_kernel|gather|scatter"),
)
"""Parts by patterns in names of kernels; the first match counts, and without any it is other."""
PARTS = (
    *(*BOUND, RECURRENCES, ROUTING, ACTIVATION, NORMS, ROTATION, LOSS, FLOAT8, ADDS),
    *(ELEMENTWISE, OPTIMIZER, OTHER),
)
"""Parts in the order of tables."""
HEAD_START, STARTER = 2 * 10**8, "spin_kernel"  # cycles: a tenth of a second


def part_of(kernel: str) -> str:
    """The part of a step that a kernel belongs to."""
    for part, pattern in PATTERNS:
        if re.search(pattern, kernel, re.IGNORECASE):
            return part
    return OTHER


def busy(kernels: Iterable[Span]) -> float:
    """Microseconds in which at least one kernel runs."""
    total, reached = 0.0, float("-inf")
    for kernel in sorted(kernels, key=lambda one: one.start):
        total += max(0.0, kernel.end - max(kernel.start, reached))
        reached = max(reached, kernel.end)
    return total


def parts(trace: Sequence[Span], steps: int) -> dict[str, Any]:
    """Milliseconds of one step: its span, every part, and what no kernel fills.

    Args:
        trace: Kernels of some steps, by start, behind the one that gives the host its head start.
        steps: How many.
    """
    heads = [place for place, kernel in enumerate(trace) if STARTER in kernel.name]
    first = heads[-1] + 1 if heads else 0
    kernels = trace[first:]
    if not kernels:
        return {"failure": "the trace has no kernel"}
    begin = trace[first - 1].end if heads else kernels[0].start
    span, scale = max(kernel.end for kernel in kernels) - begin, 1e3 * steps
    times = dict.fromkeys(PARTS, 0.0)
    for kernel in kernels:
        times[part_of(kernel.name)] += kernel.length / scale
    return {
        "span_ms": span / scale,
        "idle_ms": (span - busy(kernels)) / scale,
        "kernels_ms": {part: time for part, time in times.items() if time},
        "others": longest(kernels, OTHER, scale),
    }


def longest(kernels: Iterable[Span], part: str, scale: float, count: int = 5) -> dict[str, float]:
    """Milliseconds of the kernels of a part that take longest, by name."""
    times: dict[str, float] = {}
    for kernel in kernels:
        if part_of(kernel.name) == part:
            times[kernel.name[:120]] = times.get(kernel.name[:120], 0.0) + kernel.length / scale
    return dict(sorted(times.items(), key=lambda item: -item[1])[:count])


def trace_steps(step: Callable[[], Any], device: torch.device, steps: int) -> dict[str, Any]:
    """The parts of a step that has been warmed up."""

    def run() -> None:
        sleep = getattr(torch.get_device_module(device), "_sleep", None)
        if sleep is not None:
            sleep(HEAD_START)
        for _ in range(steps):
            step()

    return parts(spans(run, device), steps)
