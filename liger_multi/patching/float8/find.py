"""Which linear layers run in FP8 (``linear_float8``): large ones, except heads and adapters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from liger_multi.modules.parameters import stored
from liger_multi.patching.evidence.facts import ModelFacts
from liger_multi.patching.float8.linear import (
    Float8Linear,
    Float8Settings,
    GatheringFloat8Linear,
    float8_refusal,
)
from liger_multi.patching.float8.weight import unit_of, units
from liger_multi.patching.head.module import find_heads
from liger_multi.patching.linear import LinearByRows
from liger_multi.patching.lora import looks_like_lora, matrices
from liger_multi.patching.options import Request
from liger_multi.patching.report import Skipped
from liger_multi.patching.swap import (
    Change,
    Patched,
    Replace,
    Restore,
    Swap,
    conflict_of,
    stock_class,
    swapped,
)


def find_float8(model: ModelFacts, request: Request) -> Iterator[Change]:
    """Large linear layers, except heads and adapters."""
    options = request.get("linear_float8")
    if options is None and not model.instances(Float8Linear):
        return
    heads = {id(m) for _, head in find_heads(model)[0] for m in head.modules()}
    holders = Counter(id(p) for _, p in model.root.named_parameters(remove_duplicate=False))
    low_rank = {id(m) for _, lora in model.modules if looks_like_lora(lora) for m in matrices(lora)}
    sharded = units(model.root)
    for path, module in model.linears:
        is_float8 = isinstance(module, Float8Linear)
        is_unclaimed = (
            is_float8 or not isinstance(module, Patched) or isinstance(module, LinearByRows)
        )
        if id(module) in low_rank or not is_unclaimed:
            continue
        head = id(module) in heads and "it is the output embedding, whose loss has head_gemms"
        stores_codes = options and (options.frozen or options.gather)
        shared = stores_codes and holders[id(stored(module))] > 1
        tied = shared and "its weight is that of another layer too, which would lose it"
        reason = options and (
            head
            or tied
            or conflict_of(module)
            or float8_refusal(module, options, unit_of(path, sharded))
        )
        swap = None
        if options is not None and not reason:
            settings = Float8Settings(options, options.frozen)
            behavior = GatheringFloat8Linear if options.gather else Float8Linear
            swap = Swap("linear_float8", stock_class(module), behavior, settings)
        current = swapped(module) if is_float8 else None
        if current is not None and current != swap and (fixed := current.behavior.fixed(module)):
            yield Skipped(path, "linear_float8", f"{fixed}; options are fixed")
            continue
        if is_float8 and swap is None:
            yield Restore(path, module)
        if reason:
            yield Skipped(path, "linear_float8", reason, strict=False)
        elif swap is not None:
            label = f"linear_float8{'[weight in FP8]' * options.frozen}"
            yield Replace(path, module, swap, label, options.shown())
