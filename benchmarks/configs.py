"""Models that benchmarks train: sizes by name, who patches them, and runs.

A run is written ``MODEL:BATCHxTOKENS[+checkpointing]``.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.harness import liger
from liger_multi.memory.sizes import SIZES

# of the sizes of Qwen3.5
_QWEN: dict[str, Any] = {
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "vocab_size": 248320,
    "max_position_embeddings": 262144,
}
HYBRIDS: dict[str, dict[str, Any]] = {
    "0.8B": {
        **_QWEN,
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "num_hidden_layers": 24,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "linear_num_value_heads": 16,
        "tie_word_embeddings": True,
    },
    "9B": {
        **_QWEN,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "linear_num_value_heads": 32,
        "tie_word_embeddings": False,
    },
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    **SIZES,
    "tiny": (
        "Llama",
        {
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": 512,
            "tie_word_embeddings": True,
        },
    ),
    # the layers of Mamba-2 and attention of a Bamba of 24 layers
    "bamba-24-layers": (
        "Bamba",
        {
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "mamba_n_heads": 64,
            "mamba_d_head": 64,
            "mamba_d_state": 128,
            "mamba_n_groups": 1,
            "vocab_size": 128256,
            "attn_layer_indices": [9, 18],
            "max_position_embeddings": 262144,
        },
    ),
    "llama-4-layers": ("Llama", {**SIZES["llama-3.2-1b"][1], "num_hidden_layers": 4}),
    # as google/gemma-3-1b-pt, Qwen/Qwen3-30B-A3B (48 layers) and Qwen/Qwen2.5-VL-3B-Instruct (36
    # layers of text and 32 of vision) on the Hugging Face hub
    "gemma-3-1b": (
        "Gemma3",
        {
            "hidden_size": 1152,
            "intermediate_size": 6912,
            "num_hidden_layers": 26,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "vocab_size": 262144,
            "sliding_window": 512,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3-30b-a3b-4-layers": (
        "Qwen3Moe",
        {
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_hidden_layers": 4,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
            "vocab_size": 151936,
            "tie_word_embeddings": False,
        },
    ),
    # 4 of the 24 layers of openai/gpt-oss-20b, which alternate windows and all tokens
    "gpt-oss-20b-4-layers": (
        "GptOss",
        {
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_hidden_layers": 4,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "num_local_experts": 32,
            "num_experts_per_tok": 4,
            "sliding_window": 128,
            "max_position_embeddings": 131072,
            "vocab_size": 201088,
            "tie_word_embeddings": False,
        },
    ),
    "qwen2.5-vl-3b-8-layers": (
        "Qwen2_5_VL",
        {
            "vocab_size": 151936,
            "image_token_id": 151655,
            "tie_word_embeddings": True,
            "text_config": {
                "hidden_size": 2048,
                "intermediate_size": 11008,
                "num_hidden_layers": 8,
                "num_attention_heads": 16,
                "num_key_value_heads": 2,
                "vocab_size": 151936,
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 1000000.0,
                    "mrope_section": [16, 24, 24],
                },
            },
            "vision_config": {
                "hidden_size": 1280,
                "intermediate_size": 3420,
                "depth": 8,
                "num_heads": 16,
                "out_hidden_size": 2048,
                "fullatt_block_indexes": [3, 7],
            },
        },
    ),
}
MODELS |= {f"qwen3.5-{name.lower()}": ("Qwen3_5", sizes) for name, sizes in HYBRIDS.items()}
NAMES = {
    "Gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM"),
    "Qwen3_5": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM"),
    "Qwen2_5_VL": ("Qwen2_5_VLConfig", "Qwen2_5_VLForConditionalGeneration"),
}
"""Classes of a family that does not name them as most do."""
ATTENTION = {"GptOss": "eager"}  # SDPA has no sinks
PATCHES = 32  # of a picture along each side, of which 2 x 2 become a token


@dataclass(frozen=True)
class Run:
    """A model, how many sequences of how many tokens, and whether layers are recomputed."""

    model: str
    batch: int
    tokens: int
    checkpointing: bool

    @classmethod
    def parse(cls, text: str) -> Run:
        """From the command line's form."""
        name, _, size = text.partition(":")
        size, _, extra = size.partition("+")
        batch, _, tokens = size.partition("x")
        if name not in MODELS or not (batch.isdigit() and tokens.isdigit()):
            raise ValueError(
                f"a run is MODEL:BATCHxTOKENS[+checkpointing] with a model of "
                f"{', '.join(MODELS)}; got {text!r}"
            )
        if extra not in ("", "checkpointing"):
            raise ValueError(f"only +checkpointing is known, got {text!r}")
        return cls(name, int(batch), int(tokens), bool(extra))

    def __str__(self) -> str:
        extra = "+checkpointing" if self.checkpointing else ""
        return f"{self.model}:{self.batch}x{self.tokens}{extra}"


# --- building ---


def _classes(model: str) -> tuple[Any, Any]:
    """Classes of a model and of its configuration."""
    import transformers

    family = MODELS[model][0]
    config, causal = NAMES.get(family, (f"{family}Config", f"{family}ForCausalLM"))
    return getattr(transformers, config), getattr(transformers, causal)


def build(run: Run, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Any:
    """The model with random weights, made on its device."""
    family, sizes = MODELS[run.model]
    sizes = dict(sizes)
    text = sizes.get("text_config")
    if text is None:
        sizes = {"max_position_embeddings": max(2048, run.tokens), **sizes}
    config_class, model_class = _classes(run.model)
    config = config_class(**sizes)
    config._attn_implementation = ATTENTION.get(family, "sdpa")
    torch.manual_seed(0)
    with torch.device(device):
        model = model_class._from_config(config, dtype=dtype)
    model.train()
    model.config.get_text_config().use_cache = False
    if run.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def pictures(model: Any, ids: Tensor) -> dict[str, Tensor]:
    """A picture in every sequence, whose tokens are the first; nothing for a model of text."""
    token = getattr(model.config, "image_token_id", None)
    if token is None:
        return {}
    vision = model.config.vision_config
    count, width = ids.shape[0], 3 * vision.temporal_patch_size * vision.patch_size**2
    ids.masked_fill_(ids == token, 0)
    ids[:, : (PATCHES // vision.spatial_merge_size) ** 2] = token
    return {
        "pixel_values": torch.randn(
            count * PATCHES**2, width, device=ids.device, dtype=torch.bfloat16
        ),
        "image_grid_thw": torch.tensor([[1, PATCHES, PATCHES]] * count, device=ids.device),
        "mm_token_type_ids": (ids == token).to(torch.int32),
        "labels": ids.masked_fill(ids == token, -100),
    }


WARM_STEPS = 3  # of a run, which are not timed

# --- patching ---


def _ours(model: Any, run: Run, **choices: Any) -> Any:
    import liger_multi

    liger_multi.patch(model, **choices)
    return model


def _keep_attention(model: Any, run: Run) -> Any:
    """Recompute all but attention, in place of the model's own checkpointing."""
    from liger_multi.memory import apply_recompute

    model.gradient_checkpointing_disable()
    _ours(model, run)
    apply_recompute(model, "keep_attention")
    return model


def _chosen(model: Any, run: Run) -> Any:
    """Recompute as little as the peak of the model's own checkpointing allows."""
    from liger_multi.memory import TrainingSetup, apply_recompute, choose_within, estimate

    model.gradient_checkpointing_disable()
    _ours(model, run)
    dtype = str(model.dtype).removeprefix("torch.")
    setup = TrainingSetup(dtype=dtype, device=model.device.type)
    peak_bytes = estimate(model, run.batch, run.tokens, setup, checkpointing=True).peak_bytes
    choice = choose_within(model, peak_bytes, run.batch, run.tokens, setup)
    apply_recompute(model, choice.policies)
    return model


def _with_attention(model: Any, run: Run) -> Any:
    from liger_multi.patching import register_attention

    register_attention()
    model.set_attn_implementation("liger_multi")
    return _ours(model, run)


def _stock(model: Any, run: Run) -> Any:
    return model


def _liger(model: Any, run: Run) -> Any:
    return liger(model)


def _compiled(then: Callable[[Any, Run], Any]) -> Callable[[Any, Run], Any]:
    return lambda model, run: torch.compile(then(model, run))


VARIANTS: dict[str, Callable[[Any, Run], Any]] = {
    "stock": _stock,
    "liger": _liger,
    "ours": _ours,
    "ours+float8": functools.partial(_ours, linear_float8=True),
    "ours+keep_attention": _keep_attention,
    "ours+choose_within": _chosen,
    "stock+compile": _compiled(_stock),
    "liger+compile": _compiled(_liger),
    "ours+compile": _compiled(_ours),
    "ours+attention": _with_attention,
    "ours+attention+compile": _compiled(_with_attention),
}
CHECKPOINTED = ("ours+keep_attention", "ours+choose_within")
"""Variants of runs with checkpointing alone."""
FOR_EAGER = ("ours+attention",)
"""Variants that sets measure where the unpatched model has eager attention."""


def possible(run: Run, variants: Sequence[str]) -> list[str]:
    """The variants that a run can have."""
    return [name for name in variants if run.checkpointing or name not in CHECKPOINTED]


def load(run: Run, variant: str) -> None:
    """Import what a turn needs, while other processes measure; the device is left alone."""
    _classes(run.model)
    package = {"liger": "liger_kernel.transformers", "ours": "liger_multi.patching"}
    with contextlib.suppress(ImportError):  # a turn says so
        importlib.import_module(package.get(variant.partition("+")[0], "transformers"))


# --- what is measured together ---


class RunSet(NamedTuple):
    """Runs that one command measures on a card.

    Attributes:
        runs: What is trained.
        variants: Under which variants; those that want checkpointing, or another attention than
            the eager one, where that fits a run.
        parts: Whether steps are traced, too.
    """

    runs: tuple[str, ...]
    variants: tuple[str, ...]
    parts: bool

    @property
    def installed(self) -> list[str]:
        """The variants whose packages this environment has."""
        lacking = importlib.util.find_spec("liger_kernel") is None
        return [name for name in self.variants if not (lacking and name.startswith("liger"))]

    def planned(self) -> dict[Run, list[str]]:
        """The variants of every run."""
        by_run = {}
        for run in map(Run.parse, self.runs):
            is_eager = MODELS[run.model][0] in ATTENTION
            names = possible(run, self.installed)
            by_run[run] = [name for name in names if is_eager or name not in FOR_EAGER]
        return by_run


EAGER = ("stock", "liger", "ours")
DENSE = ("llama-3.2-1b:4x4096", "qwen2-0.5b:8x2048", "gemma-3-1b:4x2048")
MIXTURE = "qwen3-30b-a3b-4-layers:4x2048"
"""Runs of README of which all variants fit an 80 GB card."""
WHOLE = (
    "llama-3.2-1b:8x4096",
    "llama-3-8b:2x4096+checkpointing",
    "qwen2-0.5b:16x2048",
    MIXTURE,
    "gemma-3-1b:4x2048",
    "qwen2.5-vl-3b-8-layers:4x2048",
    "gpt-oss-20b-4-layers:4x2048",
    "qwen3.5-0.8b:4x2048",
)
HEADLINE = ("llama-3.2-1b:8x4096", DENSE[0], "qwen2-0.5b:16x2048", *DENSE[1:], MIXTURE)
"""Runs that the headline may show, of each model the first one of which all variants trained."""
SETS = {
    "readme": RunSet((*DENSE, MIXTURE), EAGER, parts=False),
    "table": RunSet(WHOLE, (*EAGER, "ours+float8", *CHECKPOINTED, "ours+attention"), parts=True),
}
SECONDS = 540  # that a set takes at most, but for first rounds that are slower
