"""Configurations of models: published sizes, files, and names on the Hugging Face hub."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from typing import Any

from liger_multi.errors import (
    ConfigurationError,
    first_line,
    require_packages,
    shown,
    shown_path,
    summary,
    unknown,
)
from liger_multi.files.documents import read_json

# Of the config.json files of Qwen/Qwen2-0.5B, meta-llama/Llama-3.2-1B, Qwen/Qwen2.5-7B,
# meta-llama/Meta-Llama-3-8B, Qwen/Qwen2.5-14B and openai/gpt-oss-20b on the Hugging Face hub,
# positions included; the defaults of transformers are other models'. Instruct models of Qwen allow
# 32 768 positions.
SIZES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2-0.5b": (
        "Qwen2",
        {
            "hidden_size": 896,
            "intermediate_size": 4864,
            "num_hidden_layers": 24,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
            "vocab_size": 151936,
            "max_position_embeddings": 131072,
            "tie_word_embeddings": True,
        },
    ),
    "llama-3.2-1b": (
        "Llama",
        {
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 128256,
            "max_position_embeddings": 131072,
            "tie_word_embeddings": True,
        },
    ),
    "qwen2.5-7b": (
        "Qwen2",
        {
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "vocab_size": 152064,
            "max_position_embeddings": 131072,
            "tie_word_embeddings": False,
        },
    ),
    "llama-3-8b": (
        "Llama",
        {
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 128256,
            "max_position_embeddings": 8192,
            "tie_word_embeddings": False,
        },
    ),
    "qwen2.5-14b": (
        "Qwen2",
        {
            "hidden_size": 5120,
            "intermediate_size": 13824,
            "num_hidden_layers": 48,
            "num_attention_heads": 40,
            "num_key_value_heads": 8,
            "vocab_size": 152064,
            "max_position_embeddings": 131072,
            "tie_word_embeddings": False,
        },
    ),
    "gpt-oss-20b": (
        "GptOss",
        {
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_hidden_layers": 24,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "num_local_experts": 32,
            "num_experts_per_tok": 4,
            "vocab_size": 201088,
            "max_position_embeddings": 131072,
            "tie_word_embeddings": False,
        },
    ),
}


def config_of(model: str | Path, sequence: int = 0) -> Any:
    """A Hugging Face configuration, without running a model's own code.

    Args:
        model: A name of :data:`SIZES`, the JSON file of a configuration under any name, a folder
            with a ``config.json``, or the name of a model on the Hugging Face hub, which is looked
            up in the cache and, where it is allowed, over the network.
        sequence: Positions that a model of :data:`SIZES` needs at least.

    Raises:
        ConfigurationError: Neither a name that is known nor a place with a configuration, or a
            file that is no configuration of a model in transformers.
        MissingPackageError: Transformers cannot be imported.
    """
    require_packages("a model's configuration", ["transformers"], "transformers")
    import transformers

    if str(model) in SIZES:
        family, sizes = SIZES[str(model)]
        positions = max(sizes["max_position_embeddings"], sequence)
        config_class = getattr(transformers, f"{family}Config")
        return config_class(**{**sizes, "max_position_embeddings": positions})
    file = _file(model)
    data = read_json(file, "the configuration of a model")
    if not isinstance(data, dict):
        raise ConfigurationError(
            f"{shown_path(file)} must hold a mapping, the configuration of a model, got "
            f"{type(data).__name__} {shown(data)}"
        )
    model_type = data.get("model_type")
    if model_type is None:
        raise ConfigurationError(
            f"{shown_path(file)} has no model_type, which says whose configuration it is; its keys "
            f"are {shown(list(data))}"
        )
    if not isinstance(model_type, str) or model_type not in transformers.CONFIG_MAPPING:
        message = unknown(
            f"model_type in {shown_path(file)}", model_type, transformers.CONFIG_MAPPING
        )
        code_note = "; the code of its own that it names (auto_map) is not run" * (
            "auto_map" in data
        )
        raise ConfigurationError(f"{message} to transformers {transformers.__version__}{code_note}")
    try:
        return transformers.AutoConfig.from_pretrained(str(file), trust_remote_code=False)
    except Exception as error:  # classes of configurations check in their own ways
        raise ConfigurationError(
            f"{shown_path(file)} is no configuration of {model_type}: {summary(error)}"
        ) from error


class Source:
    """A configuration that is built when it is called for, and told apart from others before.

    Args:
        model: As of :func:`config_of`.
        weights: A format of 4 bits, for a model with a frozen base in it and adapters.
        rank: Of these.

    Attributes:
        identity: What the configuration is made from, as plain data.
        weights: The format, or None.

    Raises:
        ConfigurationError: As of :func:`config_of`, where nothing can be read.
    """

    def __init__(self, model: str | Path, weights: str | None = None, rank: int = 16) -> None:
        self._model: str | Path = model
        self.weights, self._rank = weights, rank
        if str(model) in SIZES:
            self.identity: Any = SIZES[str(model)]
        else:
            self._model = _file(model)
            self.identity = read_json(self._model, "the configuration of a model")
        if weights is not None:
            self.identity = {"base": self.identity, "weights": weights, "rank": rank}

    def __call__(self) -> Any:
        """The configuration, or the model with a frozen base."""
        config = config_of(self._model)
        if self.weights is None:
            return config
        from liger_multi.memory.estimation import adapted_in_four_bits

        return adapted_in_four_bits(config, self.weights, self._rank)


def positions_of(config: Any) -> int | None:
    """The longest sequence that a configuration allows, if it names one."""
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    return positions if isinstance(positions, int) and positions > 0 else None


def beyond(positions: int | None, sequence: int) -> str:
    """A note on a sequence that is longer than a model's positions, or nothing."""
    if positions is None or sequence <= positions:
        return ""
    return (
        f"The model has {positions:,} positions (max_position_embeddings); a sequence of "
        f"{sequence:,} tokens needs scaled rotary embeddings, or a model that was trained for it."
    )


_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def _file(model: str | Path) -> Path:
    """The file that a path names, a folder's ``config.json``, or that of a model on the hub."""
    name = str(model)
    if os.path.isdir(name):
        if not os.path.exists(os.path.join(name, "config.json")):
            raise ConfigurationError(f"the folder {shown_path(name)} has no config.json")
        return Path(name, "config.json")
    if os.path.exists(name):
        return Path(name)
    if not name.endswith(".json") and len(name) <= 96 and _HUB_NAME.fullmatch(name):
        return _from_hub(name)
    raise ConfigurationError(f"{unknown('model', name, SIZES)}; or the place of a config.json")


ANSWER = 5.0  # seconds that a hub has for its first answer


def _from_hub(name: str) -> Path:
    """The ``config.json`` of a model on the hub, from the cache or over the network."""
    from huggingface_hub import try_to_load_from_cache

    with contextlib.suppress(ValueError):  # of a name that the hub would not have
        cached = try_to_load_from_cache(name, "config.json")
        if isinstance(cached, str):
            return Path(cached)
    try:
        from transformers.utils import cached_file

        _reach(name)
        return Path(cached_file(name, "config.json"))
    except Exception as error:  # of the hub's client, the network, the cache's files
        cached = unknown("model", name, SIZES)
        raise ConfigurationError(
            f"{cached}; no file or folder has this name, and {_reason_of(error)}. Give the "
            "place of a config.json, or set HF_HOME to a cache that holds the model"
        ) from error


def _reach(name: str) -> None:
    """Ask the hub once: its client asks a network that is not there for half a minute."""
    from huggingface_hub import constants, hf_hub_url
    from huggingface_hub.utils import get_session  # type: ignore[attr-defined]

    if not constants.HF_HUB_OFFLINE:
        get_session().head(hf_hub_url(name, "config.json"), timeout=ANSWER)


def _reason_of(error: BaseException) -> str:
    offline = [n for n in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE") if os.environ.get(n)]
    if offline:
        return (
            "the Hugging Face cache does not hold it, while the hub is not asked: unset "
            f"{' and '.join(offline)} to download it"
        )
    return f"the Hugging Face hub gave no config.json of it ({first_line(error)})"
