"""Train a GPT of Megatron-Core on a CPU.

``python -m tests.trainers.runs.megatron_cpu`` and its arguments do it.
Megatron-Core is a library without a command. This is the loop that a user writes: the local
specification, which needs no Transformer Engine, tensor parallel over the processes of
``torchrun``, and with ``--parts`` the call for Liger-Kernel. Megatron-Core asks CUDA for the
current device; here that is the CPU.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from tests.trainers.runs.setting import ALONE

PARTS = ("rms_norm", "cross_entropy", "swiglu")
CLASSES, LENGTH, BATCH = 64, 16, 4


def model(fused: bool) -> Any:
    """A GPT like Llama, of two layers."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel.random import initialize_rng_tracker
    from megatron.core.transformer.transformer_config import TransformerConfig

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=dist.get_world_size())
    initialize_rng_tracker(inference_rng_tracker=True)  # no random numbers of CUDA
    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        num_query_groups=2,
        ffn_hidden_size=64,
        use_cpu_initialization=True,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        bias_activation_fusion=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        persist_layer_norm=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        cross_entropy_loss_fusion=fused,
        tensor_model_parallel_size=dist.get_world_size(),
    )
    return GPTModel(
        config,
        get_gpt_layer_local_spec(normalization="RMSNorm"),
        CLASSES,
        LENGTH,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )


def loss_of(gpt: Any, ids: Tensor, labels: Tensor, smoothing: float) -> Tensor:
    """The loss of tokens: the model's own, or of its logits where labels are smoothed."""
    from megatron.core import tensor_parallel

    positions = torch.arange(LENGTH).expand_as(ids)
    later = torch.ones(LENGTH, LENGTH).triu(1).bool()[None, None]
    if not smoothing:
        return gpt(ids, positions, later, labels=labels)  # type: ignore[no-any-return]
    logits = gpt(ids, positions, later)
    return tensor_parallel.vocab_parallel_cross_entropy(logits, labels, smoothing)  # type: ignore[no-any-return]


def total(x: Tensor) -> float:
    """The sum over processes."""
    dist.all_reduce(x)
    return x.item()


def main() -> None:
    """Train, and print the numbers of every step, summed over processes."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--parts", nargs="*", default=[], choices=PARTS)
    parser.add_argument("--fused-loss", action="store_true")
    parser.add_argument("--smoothing", type=float, default=0.0)
    parser.add_argument("--steps", type=int, default=4)
    options = parser.parse_args()
    for variable, alone in ALONE.items():
        os.environ.setdefault(variable, alone)
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]
    dist.init_process_group("gloo")
    if options.parts:
        from liger_kernel.megatron import apply_liger_kernel_to_megatron

        apply_liger_kernel_to_megatron(**{part: part in options.parts for part in PARTS})
    torch.manual_seed(3)
    gpt = model(options.fused_loss)
    optimizer = torch.optim.AdamW(gpt.parameters(), lr=0.01)
    tokens = torch.randint(CLASSES, (BATCH, LENGTH + 1))
    for step in range(options.steps):
        loss = loss_of(gpt, tokens[:, :-1], tokens[:, 1:].contiguous(), options.smoothing).mean()
        optimizer.zero_grad()
        loss.backward()
        squares = sum(p.grad.square().sum() for p in gpt.parameters())
        numbers = total(loss.detach().clone()), total(squares) ** 0.5
        optimizer.step()
        if dist.get_rank() == 0:
            print(f"step: {step + 1} loss: {numbers[0]} grad_norm: {numbers[1]}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
