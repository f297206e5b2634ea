"""What a plan cannot do by itself, said in sentences."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from liger_multi.memory.measure import format_bytes

if TYPE_CHECKING:
    from liger_multi.memory.planning.cards import Card
    from liger_multi.memory.planning.result import TrainingPlan
    from liger_multi.memory.planning.shapes import Shapes


def notes_of(plan: TrainingPlan, card: Card, shapes: Shapes) -> list[str]:
    """Notes on the best candidate, or on the nearest where nothing fits."""
    best = plan.best if plan.best.fits else plan.nearest
    made = [*_precision(best.settings, card), *_spread(best.settings, plan)]
    return [*made, *_rest(best, card, shapes)]


def _precision(settings: Any, card: Card) -> Iterator[str]:
    if settings.precision == "bf16":
        yield (
            "Weights and AdamW states in bfloat16: updates below a 256th of a weight are lost. "
            "precision='amp' keeps fp32 weights at 16 bytes a trained parameter."
        )
    elif settings.precision == "amp":
        yield (
            "Run forward and loss under torch.autocast(dtype=torch.bfloat16), backward outside of "
            "it; bfloat16 needs no loss scaling. Trainer and accelerate do so with bf16."
        )
    elif settings.precision == "fp16":
        yield (
            "float16 overflows at 65 504: scale the loss (torch.amp.GradScaler, starting at 2**16; "
            "unscale_ before clipping), skip steps with infinite gradients, keep fp32 weights. "
            "Trainer and accelerate do so with fp16, DeepSpeed by its fp16 section."
        )
    else:
        yield (
            "fp32 products run at the rate without TF32; "
            "torch.set_float32_matmul_precision('high') is faster where 10 bits of mantissa do."
        )
    if not card.bf16 and settings.precision in ("bf16", "amp"):
        yield f"{card.name} has no bfloat16 products in hardware; ask for precision='fp16'."


def _spread(settings: Any, plan: TrainingPlan) -> Iterator[str]:
    if plan.devices == 1:
        return
    if settings.spread == "ddp":
        yield (
            "DDP keeps buckets as large as the gradients, which are counted; "
            "gradient_as_bucket_view=True saves them. Where links are slow, PyTorch's "
            "communication hooks compress gradients: bf16_compress_hook or PowerSGD "
            "(torch.distributed.algorithms.ddp_comm_hooks; ddp_comm_hook of accelerate's "
            "DistributedDataParallelKwargs)."
        )
    if settings.spread.startswith("zero"):
        yield (
            "ZeRO++ of DeepSpeed compresses what ZeRO-3 sends: zero_quantized_weights, "
            "zero_quantized_gradients, zero_hpz_partition_size. "
            "compression=True writes them into the DeepSpeed JSON of a ZeRO-3 plan."
        )
    if settings.pipeline > 1:
        yield (
            "Stages of a pipeline need torch.distributed.pipelining or DeepSpeed's pipelines: "
            "neither Trainer nor accelerate cuts a model into stages, and no file says so."
        )
    if settings.tensor > 1:
        yield (
            "Tensor parallelism is counted with whole embeddings, norms and logits on every "
            "device (tp_plan='auto' of transformers divides attention and MLPs)."
        )


def _rest(best: Any, card: Card, shapes: Shapes) -> Iterator[str]:
    settings = best.settings
    if settings.recompute != "none" and settings.layers:
        yield (
            f"Recompute policy {settings.recompute!r} on the first {settings.layers} of "
            f"{shapes.count} layers: liger_multi.memory.apply(plan, model), or apply_recompute."
        )
    if settings.tiles > 1 or settings.offload_activations or settings.chunk:
        yield "apply(plan, model) sets what stands in no engine's file: chunks, tiles, offload."
    if best.host_bytes:
        yield f"{format_bytes(best.host_bytes)} of the host's memory are needed for each device."
    if shapes.quantized:
        yield (
            f"{format_bytes(shapes.quantized)} of frozen weights are counted at their stored "
            "size, and the largest of them once more as it is dequantized for a product."
        )
    if card.guessed:
        yield (
            f"The card is known by its memory only; times are told with the rates of {card.name}."
        )
    yield (
        "Times rank ways to train and are no forecast; windows of attention are not counted, nor "
        "are compilers."
    )
