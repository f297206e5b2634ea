"""Sizes of models as their authors published them (config.json on the Hugging Face hub)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from liger_multi.documents import read_json
from liger_multi.errors import ConfigurationError, shown, shown_path, summary, unknown

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
    """A Hugging Face configuration, without the network and without running a model's own code.

    Args:
        model: A name of :data:`SIZES`, the JSON file of a configuration under any name, or a folder
            with a ``config.json``.
        sequence: Positions that a model of :data:`SIZES` needs at least.

    Raises:
        ConfigurationError: Neither a name that is known nor a place with a configuration, or a
            file that is no configuration of a model in transformers.
    """
    import transformers

    if str(model) in SIZES:
        family, sizes = SIZES[str(model)]
        made = getattr(transformers, f"{family}Config")
        return made(max_position_embeddings=max(2048, sequence), **sizes)
    file = _file(model)
    data = read_json(file, "the configuration of a model")
    if not isinstance(data, dict):
        raise ConfigurationError(
            f"{shown_path(file)} must hold a mapping, the configuration of a model, got "
            f"{type(data).__name__} {shown(data)}"
        )
    kind = data.get("model_type")
    if kind is None:
        raise ConfigurationError(
            f"{shown_path(file)} has no model_type, which says whose configuration it is; its keys "
            f"are {shown(list(data))}"
        )
    if not isinstance(kind, str) or kind not in transformers.CONFIG_MAPPING:
        said = unknown(f"model_type in {shown_path(file)}", kind, transformers.CONFIG_MAPPING)
        own = "; the code of its own that it names (auto_map) is not run" * ("auto_map" in data)
        raise ConfigurationError(f"{said} to transformers {transformers.__version__}{own}")
    try:
        return transformers.AutoConfig.from_pretrained(str(file), trust_remote_code=False)
    except Exception as error:  # classes of configurations check in their own ways
        raise ConfigurationError(
            f"{shown_path(file)} is no configuration of {kind}: {summary(error)}"
        ) from error


def _file(model: str | Path) -> Path:
    """The file that a path names, or a folder's ``config.json``."""
    name = str(model)
    if os.path.isdir(name):
        if not os.path.exists(os.path.join(name, "config.json")):
            raise ConfigurationError(f"the folder {shown_path(name)} has no config.json")
        return Path(name, "config.json")
    if not os.path.exists(name):
        known = unknown("model", name, SIZES)
        raise ConfigurationError(f"{known}; or the place of a config.json")
    return Path(name)
