"""Sizes of models as their authors published them (config.json on the Hugging Face hub)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from liger_multi.errors import unknown

SIZES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2-0.5b": (
        "Qwen2",
        {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
         "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936,
         "tie_word_embeddings": True},
    ),
    "llama-3.2-1b": (
        "Llama",
        {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
         "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
         "tie_word_embeddings": True},
    ),
    "qwen2.5-7b": (
        "Qwen2",
        {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
         "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064,
         "tie_word_embeddings": False},
    ),
    "llama-3-8b": (
        "Llama",
        {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
         "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
         "tie_word_embeddings": False},
    ),
    "qwen2.5-14b": (
        "Qwen2",
        {"hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 48,
         "num_attention_heads": 40, "num_key_value_heads": 8, "vocab_size": 152064,
         "tie_word_embeddings": False},
    ),
}  # fmt: skip


def config_of(model: str | Path, sequence: int = 2048) -> Any:
    """A Hugging Face configuration, without the network.

    Args:
        model: A name of :data:`SIZES`, or a ``config.json`` or the folder of one.
        sequence: Positions that a model of :data:`SIZES` needs at least.

    Raises:
        ValueError: Neither a name that is known nor a place with a configuration.
    """
    import transformers

    if str(model) in SIZES:
        family, sizes = SIZES[str(model)]
        made = getattr(transformers, f"{family}Config")
        return made(max_position_embeddings=max(2048, sequence), **sizes)
    path = Path(model)
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise ValueError(f"{unknown('model', str(model), SIZES)}; or the place of a config.json")
    return transformers.AutoConfig.from_pretrained(file.parent)
