"""What the examples share: a model and text that need no download, and the ranks' devices.

Every example runs on a laptop in seconds: its model is a llama of two layers, and its text is made
of counted words, or of the bytes of a file.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch


def tiny_llama(vocab_size: int, **options: Any) -> Any:
    """A llama of two layers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocab_size, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, **options,
    )  # fmt: skip
    return LlamaForCausalLM(config)


# --- sentences of words ---

WORDS = [
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "and",
    "so",
    "on",
    "we",
    "count",
    "again",
]


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {w: i for i, w in enumerate(["<pad>", "<eos>", "<unk>", *WORDS])}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def loaded(name: str) -> tuple[Any, Any]:
    """Tokenizer and model by name, or the tiny ones without a name."""
    if not name:
        words = tokenizer()
        torch.manual_seed(0)
        return words, tiny_llama(
            len(words), max_position_embeddings=64, pad_token_id=words.pad_token_id,
            eos_token_id=words.eos_token_id,
        )  # fmt: skip
    from transformers import AutoModelForCausalLM, AutoTokenizer

    return AutoTokenizer.from_pretrained(name), AutoModelForCausalLM.from_pretrained(
        name, dtype="auto"
    )


def sentences(count: int, seed: int = 0) -> list[str]:
    """Sentences whose words follow one another, so that there is something to learn."""
    draw = random.Random(seed)
    starts = [draw.randrange(len(WORDS)) for _ in range(count)]
    return [" ".join(WORDS[(at + i) % len(WORDS)] for i in range(12)) for at in starts]


# --- bytes of a file, on one rank or on several ---


def model_and_ids(name: str | None, text: str | None, device: Any = "cpu") -> tuple[Any, Any]:
    """A causal model and one long row of tokens.

    Args:
        name: A model of the Hugging Face hub, or a folder; None makes a tiny one of bytes.
        text: A file to train on; None takes this file.
        device: Where the weights are made; the tokens stay on the CPU.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    content = Path(text or __file__).read_text(encoding="utf-8")
    torch.manual_seed(0)
    with torch.device(device):
        if name is not None:
            model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16)
            ids = AutoTokenizer.from_pretrained(name)(content, return_tensors="pt").input_ids[0]
            return model.train(), ids.cpu()
        model = tiny_llama(256, max_position_embeddings=256)
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
