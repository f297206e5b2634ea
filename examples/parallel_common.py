"""What the examples of adapters and of several ranks share: a model and batches of text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch


def model_and_ids(name: str | None, text: str | None, device: Any = "cpu") -> tuple[Any, Any]:
    """A causal model and one long row of tokens.

    Args:
        name: A model of the Hugging Face hub, or a folder; None makes a tiny one of bytes.
        text: A file to train on; None takes this file.
        device: Where the weights are made; the tokens stay on the CPU.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    content = Path(text or __file__).read_text(encoding="utf-8")
    torch.manual_seed(0)
    with torch.device(device):
        if name is not None:
            model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16)
            ids = AutoTokenizer.from_pretrained(name)(content, return_tensors="pt").input_ids[0]
            return model.train(), ids.cpu()
        config = LlamaConfig(
            vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
        )  # fmt: skip
        model = LlamaForCausalLM(config)
    return model.train(), torch.tensor(list(content.encode()))


def batches(
    ids: torch.Tensor, rows: int, length: int, steps: int, rank: int = 0, ranks: int = 1
) -> Iterator[torch.Tensor]:
    """Rows of consecutive tokens; every rank gets others."""
    pieces = ids[: ids.numel() // length * length].view(-1, length)
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        yield pieces[torch.randint(len(pieces), (ranks, rows), generator=generator)[rank]]


def on_ranks(rank: int, ranks: int) -> torch.device:
    """This rank's device; starts the process group that fits it."""
    if not torch.accelerator.is_available():
        torch.distributed.init_process_group("gloo", rank=rank, world_size=ranks)
        return torch.device("cpu")
    kind = torch.accelerator.current_accelerator()
    device = torch.device(kind.type if kind is not None else "cuda", rank)
    torch.accelerator.set_device_index(rank)
    torch.distributed.init_process_group(rank=rank, world_size=ranks, device_id=device)
    return device
