"""A layer of sparse attention by its length: ``python -m benchmarks.sparse_layers``.

Memory and time of the attention of a layer of DeepSeek-V3.2 (MLA and an indexer, 671B sizes) in
bf16 with random weights: forward and backward of one sequence, every weight trained but the
indexer's, which no loss reaches. Unpatched it runs with ``sdpa``; patched with ``liger_multi``,
which makes no mask. First, both are compared on a short sequence in fp32. ``--tiny`` tries it on a
CPU.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import store
from benchmarks.lora import measured
from liger_multi import patch
from liger_multi.patching import register_attention

LAYER = {
    "hidden_size": 7168,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 2048,
}
SMALL = {
    "hidden_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "index_n_heads": 24,
    "index_head_dim": 32,
    "index_topk": 8,
}
LENGTHS = (4096, 8192, 16384, 32768, 65536, 131072)
VARIANTS = {"stock": "sdpa", "ours": "liger_multi"}
"""Attention implementations."""


class NoMLP(nn.Module):
    """A stand-in for an MLP that adds nothing."""

    def forward(self, x: Tensor) -> Tensor:
        """Zeros without memory."""
        return x.new_zeros(()).expand_as(x)


def build(
    sizes: dict[str, int], variant: str, device: torch.device, dtype: torch.dtype, length: int
) -> Any:
    """A model of one layer that has attention alone."""
    import transformers

    config = transformers.DeepseekV32Config(
        vocab_size=64,
        num_hidden_layers=1,
        first_k_dense_replace=1,
        intermediate_size=64,
        max_position_embeddings=length,
        use_cache=False,
        attn_implementation=VARIANTS[variant],
        mlp_layer_types=["dense"],
        **sizes,
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = transformers.DeepseekV32Model._from_config(config, dtype=dtype)
    model.layers[0].mlp, model.norm = NoMLP(), nn.Identity()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".indexer." not in name and "embed_tokens" not in name)
    if variant == "ours":
        assert patch(model).count("sparse_attention") == 2
    return model


def check(device: torch.device) -> None:
    """Compare output and gradients of a small layer in fp32 with the unpatched one's."""
    results = []
    for variant in VARIANTS:
        model = build(SMALL, variant, device, torch.float32, 64)
        torch.manual_seed(1)
        x = torch.randn(1, 60, SMALL["hidden_size"], device=device, requires_grad=True)
        y = model(inputs_embeds=x).last_hidden_state
        trained = [p for p in model.parameters() if p.requires_grad]
        results.append(
            [y, *torch.autograd.grad(y.square().sum(), [x, *trained], allow_unused=True)]
        )
    worst = 0.0
    for ours, stock in zip(results[1], results[0], strict=True):
        if stock is not None:
            worst = max(worst, float(((ours - stock).abs().max() / stock.abs().max()).detach()))
    if worst > 1e-3:  # PyTorch's GEMMs may round to TF32
        raise AssertionError(f"results differ from the unpatched layer's by {worst:.1e}")
    print(f"equal to the unpatched layer in fp32 (at most {worst:.1e} of the largest)")


def rows_of(
    sizes: dict[str, int], variant: str, lengths: Sequence[int], device: torch.device, rounds: int
) -> Iterator[dict[str, Any]]:
    """Time and memory by length, until one does not fit."""
    model = build(sizes, variant, device, torch.bfloat16, max(lengths))
    for length in lengths:
        torch.manual_seed(1)
        shape = (1, length, sizes["hidden_size"])
        x = torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True)

        def run(x: Tensor = x) -> Tensor:
            x.grad = None
            hidden: Tensor = model(inputs_embeds=x).last_hidden_state
            return hidden.sum(dtype=torch.float32)

        row = {"tokens": length, "variant": variant}
        try:
            yield row | measured(run, model, nullcontext, device, rounds)
        except torch.OutOfMemoryError as error:
            yield row | {"failed": str(error).partition(". GPU")[0]}
            return
        finally:
            del x, run
            gc.collect()
            if device.type != "cpu":
                torch.accelerator.empty_cache()


def line(row: dict[str, Any]) -> str:
    """A row as a table has it."""
    head = f"{row['variant']:6} {row['tokens']:7}"
    if "failed" in row:
        return f"{head}  {row['failed']}"
    return f"{head} {row['milliseconds']:10.1f} ms {row['added_bytes'] / 2**30:8.2f} GiB"


def main(arguments: Sequence[str] | None = None) -> None:
    """Check, measure, print and keep."""
    parser = argparse.ArgumentParser(description=__doc__)
    store.add_options(parser)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--tiny", action="store_true", help="shapes for a CPU")
    options = parser.parse_args(arguments)
    accelerator = (
        None if options.tiny else torch.accelerator.current_accelerator(check_available=True)
    )
    device, sizes = accelerator or torch.device("cpu"), SMALL if options.tiny else LAYER
    lengths = (64, 128) if options.tiny else options.lengths
    register_attention()
    check(device)
    rows = []
    for variant in VARIANTS:
        for row in rows_of(sizes, variant, lengths, device, options.rounds):
            print(line(row), flush=True)
            rows.append(row)
    run = store.head("sparse-layers", options, device)
    store.keep({**run, "rows": rows}, options)


if __name__ == "__main__":
    main()
