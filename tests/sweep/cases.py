"""Every registered pair of model type and class with a head, and how it is built tiny and stepped.

The numbers of a default configuration are made small by their names: ``RULES`` says how, and what a
model type needs beside it comes after them.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tests.sweep import multimodal

# --- pairs ---

KINDS = {
    "causal": "CAUSAL_LM",
    "image-text": "IMAGE_TEXT_TO_TEXT",
    "seq2seq": "SEQ_TO_SEQ_CAUSAL_LM",
    "masked": "MASKED_LM",
    "any-to-any": "MULTIMODAL_LM",
    "speech": "SPEECH_SEQ_2_SEQ",
}
"""Kind of a head to the part of the name of transformers' mapping."""


@dataclass(frozen=True, order=True)
class Pair:
    """One model type, one of its classes, and the first kind that it is registered for."""

    kind: str
    type: str
    cls: str

    @property
    def name(self) -> str:
        """How commands and pages call it."""
        return f"{self.type}/{self.cls}"


@dataclass
class Verdict:
    """What became of one pair.

    Attributes:
        kind: As in :class:`Pair`, like the next two.
        type: Model type.
        cls: Class.
        status: One of the words of what judges; "not built" where the pair has no step without us.
        why: The reason of a refusal, or what is wrong.
    """

    kind: str
    type: str
    cls: str
    status: str = "not built"
    why: str = ""


def registered() -> list[Pair]:
    """The pairs of the installed transformers, by kind and type."""
    from transformers.models.auto import modeling_auto

    pairs: dict[tuple[str, str], Pair] = {}
    for registry, name in KINDS.items():
        mapping = getattr(modeling_auto, f"MODEL_FOR_{name}_MAPPING_NAMES")
        for model_type, classes in mapping.items():
            for cls in (classes,) if isinstance(classes, str) else classes:
                pairs.setdefault((model_type, cls), Pair(registry, model_type, cls))
    return list(pairs.values())


def of_type(model_type: str, head: str | tuple[str, ...] = "ForCausalLM") -> Pair:
    """The pair of a type whose class ends so; skips a test where this transformers has none."""
    pairs = {pair.type: pair for pair in registered() if pair.cls.endswith(head)}
    if model_type not in pairs:
        import pytest

        pytest.skip(f"this transformers has no {model_type}")
    return pairs[model_type]


def as_lines(result: dict[str, Any]) -> str:
    """A result as JSON, one pair a line."""
    head = json.dumps({k: v for k, v in result.items() if k != "pairs"}, sort_keys=True)[:-1]
    lines = ",\n".join(f"  {json.dumps(one, sort_keys=True)}" for one in result["pairs"])
    return f'{head}, "pairs": [\n{lines}\n]}}\n'


# --- tiny configurations ---

HIDDEN, HEADS, PAIRS_OF_HEADS, HEAD, INNER = 64, 4, 2, 16, 96
VOCABULARY = 211  # a prime, so that no other axis is mistaken for it
LAYERS = 2

Number = Callable[[int, Any], int]


def _at_most(limit: int) -> Number:
    return lambda old, _: min(old, limit)


def _exactly(value: int) -> Number:
    return lambda old, _: value if old > 0 else old


def _key_heads(old: int, config: Any) -> int:
    every = getattr(config, "num_attention_heads", None)
    return old if old <= 1 else (HEADS if old == every else PAIRS_OF_HEADS)


def _layers(old: int, config: Any) -> int:
    return min(old, LAYERS)


# The first pattern that matches an attribute decides; None leaves it.
RULES: tuple[tuple[str, Number | None], ...] = (
    (r"^_?(num_labels|type_vocab_size|num_channels|.*_channels$|.*version.*)", None),
    (r"(_stride|_factor|_frequency|_interval|_period|_offset|_step|_ratio|kernel_size)$", None),
    (r"(vocab_size|codebook_size|num_embeddings|entity_vocab_size)$", _at_most(VOCABULARY)),
    (r"^vocab_size_per_layer_input$", _at_most(VOCABULARY)),
    (r"^(num_kv_shared_layers|num_nextn_predict_layers|.*mtp.*)$", _exactly(0)),
    (r"^(first_k_dense_replace|num_dense_layers)$", _at_most(1)),
    (r"^(max_window_layers|moe_layer_end_index|rescale_every)$", _at_most(LAYERS)),
    (
        (
            r"^(n_layers?|.*num_(.*_)?layers|.*(encoder|decoder|attention)_layers|layers|depth|.*_depth"
            r"|num_self_attends_per_block|num_feedforward_networks|num_hidden_groups)$"
        ),
        _layers,
    ),
    (
        r"(experts_per_tok(en)?|moe_topk|moe_k|moe_top_k|top_k_experts|num_selected_experts)$",
        _at_most(2),
    ),
    (r"(num_shared_experts|n_shared_experts)$", _at_most(1)),
    (
        r"(num_experts|n_routed_experts|num_local_experts|moe_num_experts|zero_expert_num)$",
        _at_most(4),
    ),
    (r"^(n_group|topk_group|num_expert_group|limited_.*groups?)$", _at_most(1)),
    (r"(kv_heads|key_value_heads|kv_n_heads|query_groups)$", _key_heads),
    (r"(num_heads|n_heads?|attention_heads|_heads|n_head|num_attn_heads)$", _at_most(HEADS)),
    (r"^(qk_rope_head_dim|rotary_dim)$", _at_most(8)),
    (r"^(qk_nope_head_dim)$", _at_most(8)),
    (r"^(qk_head_dim|v_head_dim|index_head_dim)$", _at_most(HEAD)),
    (
        r"(head_dim|dim_head|d_head|d_kv|head_size|kv_channels|headdim|attention_head_dim)$",
        _at_most(HEAD),
    ),
    (r"(lora_rank|lowrank|rank)$", _at_most(16)),
    (
        (
            r"^(.*max.*position.*|max_seq_len|n_positions|n_ctx|context_length|model_max_length"
            r"|max_(source|target)_positions)$"
        ),
        _at_most(128),
    ),
    (r"(sliding_window|window_size|local_attention|chunk_size|attention_window)$", _at_most(8)),
    (r"(image_size|resolution|img_size|crop_size)$", _at_most(32)),
    (r"(patch_size)$", _at_most(8)),
    (r"(state_size|d_state)$", _at_most(16)),
    (
        (
            r"(intermediate_size|ffn_dim|d_ff|dim_ff|dff|mlp_dim|ffn_hidden_size|n_inner|d_inner|inner_dim"
            r"|feed_forward_size|intermediate_size_mlp|share_expert_dim|moe_hidden_size)$"
        ),
        _at_most(INNER),
    ),
    (
        (
            r"(hidden_size|d_model|n_embd|embed_dim|hidden_dim|embedding_size|embed_proj_dim|emb_dim"
            r"|projection_dim|proj_dim|_dim|^dim|out_hidden_size|d_latents|lru_width|emb_size"
            r"|embedding_dim)$"
        ),
        _at_most(HIDDEN),
    ),
)
TOKEN = re.compile(r"(token_id|token_index|_id|_idx|_index|tokens?_ids?)$")
DROP = re.compile(r"drop|jitter")


def shrink(config: Any, built: tuple[str, ...] = ()) -> Any:
    """``config`` with small numbers, in place; configurations within it as well.

    Args:
        config: A configuration of transformers.
        built: Model types that are small already.
    """
    from transformers import PreTrainedConfig

    if config.model_type in built:
        return config

    old_layers = getattr(config, "num_hidden_layers", None)
    renamed: dict[int, int] = {}
    before = dict(vars(config))
    for name, value in before.items():
        if isinstance(value, PreTrainedConfig):
            shrink(value, built)
        elif isinstance(value, float) and DROP.search(name):
            setattr(config, name, 0.0)
        elif isinstance(value, int) and not isinstance(value, bool):
            verdict = _number(config, name, value, renamed, before)
            if verdict != value:
                setattr(config, name, verdict)
    _lists(config, before, old_layers)
    _rope(config)
    return config


def _number(config: Any, name: str, old: int, renamed: dict[int, int], before: Any) -> int:
    if TOKEN.search(name):
        if old < 150:
            return old
        return renamed.setdefault(old, VOCABULARY - 1 - len(renamed))
    view = type("View", (), before)
    for pattern, rule in RULES:
        if re.search(pattern, name):
            return old if rule is None else rule(old, view)
    return old


def _lists(config: Any, before: dict[str, Any], old_layers: int | None) -> None:
    """Lists of a value a layer: the first of every kind, so that each is there."""
    long = {
        n: list(v)
        for n, v in before.items()
        if isinstance(v, (list, tuple)) and old_layers and len(v) == old_layers and old_layers > 1
    }
    if not long:
        return
    rows = list(zip(*long.values()))
    chosen: list[int] = []
    for at, row in enumerate(rows):
        if repr(row) not in {repr(rows[i]) for i in chosen} and len(chosen) < 4:
            chosen.append(at)
    while len(chosen) < LAYERS:
        chosen.append(next(i for i in range(len(rows)) if i not in chosen))
    for name, values in long.items():
        setattr(config, name, [_value(name, values[i]) for i in sorted(chosen)])
    config.num_hidden_layers = len(chosen)


def _value(name: str, value: Any) -> Any:
    if isinstance(value, int) and not isinstance(value, bool):
        for pattern, rule in RULES:
            if re.search(pattern, re.sub(r"_per_layer$", "", name)):
                return value if rule is None else rule(value, None)
    return value


def _rope(config: Any) -> None:
    """Sections and factors a channel, cut to the channels that there are."""
    heads, width = _read(config, "num_attention_heads"), _read(config, "hidden_size")
    head = _read(config, "head_dim") or (
        width // heads if isinstance(heads, int) and isinstance(width, int) and heads else None
    )
    for name in ("rope_parameters", "rope_scaling"):
        _rope_dict(getattr(config, name, None), head)


def _read(config: Any, name: str) -> Any:
    """An attribute; None also where layers differ in it, of which a configuration may say so."""
    try:
        return getattr(config, name, None)
    except Exception as error:
        if "per-layer" not in str(error):
            raise
        return None


def _rope_dict(rope: Any, head: int | None) -> None:
    if not isinstance(rope, dict) or not isinstance(head, int):
        return
    pairs = int(head * (rope.get("partial_rotary_factor") or 1.0)) // 2
    for key, value in list(rope.items()):
        if isinstance(value, dict):
            _rope_dict(value, head)
        elif key == "mrope_section":
            total = sum(value)
            parts = [max(1, v * pairs // total) for v in value[1:]]
            rope[key] = [pairs - sum(parts), *parts]
        elif key in ("long_factor", "short_factor"):
            rope[key] = list(value[:1]) * pairs


# --- what some types need beside ---

_GEMMA4: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size": HIDDEN,
    "hidden_size_per_layer_input": 8,
    "intermediate_size": INNER,
    "num_hidden_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"],
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "num_kv_shared_layers": 0,
    "head_dim": HEAD,
    "global_head_dim": 2 * HEAD,
    "sliding_window": 8,
    "max_position_embeddings": 128,
}
_GEMMA4_VISION: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "head_dim": HEAD,
    "patch_size": multimodal.PATCH,
    "pooling_kernel_size": 2,
    "position_embedding_size": 64,
}
_GEMMA4_EMBEDDERS: dict[str, dict[str, Any]] = {
    "vision": {
        "patch_size": multimodal.PATCH,
        "pooling_kernel_size": 2,
        "mm_embed_dim": HIDDEN,
        "mm_posemb_size": 64,
        "output_proj_dims": HIDDEN,
    },
    "audio": {"audio_embed_dim": 16, "output_proj_dims": 16},
}
BUILT: dict[str, dict[str, Any]] = {
    "gemma4_text": _GEMMA4,
    "gemma4_unified_text": {**_GEMMA4, "hidden_size_per_layer_input": 0},
    "diffusion_gemma_text": {**_GEMMA4, "hidden_size_per_layer_input": 0},
}
"""Arguments of configurations that cannot be changed after they were made."""

EDITS: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_n_groups": 1},
    "granitemoehybrid": {"mamba_n_heads": 8, "mamba_n_groups": 1},
    "deepseek_v2": {"num_experts_per_tok": 2, "n_routed_experts": 4},
    "blt": {"encoder_hash_byte_group_vocab": 211},
    "blt_local_encoder": {"hidden_size_global": HIDDEN},
    "blt_local_decoder": {"hidden_size_global": HIDDEN},
    "blt_global_transformer": {"encoder_cross_output_size": 2 * HIDDEN},
    "emu3_vqgan": {"base_channels": 32, "channel_multiplier": (1, 1, 1), "num_res_blocks": 1},
    "vibevoice_acoustic_tokenizer_encoder": {"num_filters": 4, "depths": (1,) * 7},
    "lfm2": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "deepseek_ocr2_text": {"num_experts_per_tok": 2, "mlp_layer_types": ["dense", "sparse"]},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 4,
    },
    "granite4_vision": {"deepstack_layer_map": [], "downsample_rate": "1/2"},
    "blip-2": {"num_query_tokens": 4, "image_token_index": 200},
    "instructblip": {"num_query_tokens": 4, "image_token_index": 200},
    "instructblipvideo": {"num_query_tokens": 4, "video_token_index": 200},
    "kosmos-2.5": {"latent_query_num": 4},
    "step3p7_text": {"sliding_window": 8},
    "step3p5": {"sliding_window": 8},
    "qwen2_5_omni_thinker": {"vision_start_token_id": 203},
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 203},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "cohere_compass_text": {
        "rope_parameters": {
            k: {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}
            for k in ("full_attention", "sliding_attention")
        }
    },
    "dots1": {
        "num_local_experts": 4,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
    },
    "chameleon": {"vocabulary_map": {"<image>": 200, "IMGIMGA": 201}},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1},
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 1},
    "zamba2": {
        "mamba_headdim": 32,
        "n_mamba_heads": 4,
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "layers_block_type": ["mamba", "hybrid"] * 2,
        "num_hidden_layers": 4,
        "hybrid_layer_ids": [1, 3],
        "num_mem_blocks": 1,
    },
    "mistral4": {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e4,
            "llama_4_scaling_beta": 0.1,
            "original_max_position_embeddings": 128,
        }
    },
    "nemotron_h": {"mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 1},
    "xlstm": {"chunk_size": 4},
    "reformer": {
        "axial_pos_embds": False,
        "local_attn_chunk_length": 4,
        "lsh_attn_chunk_length": 4,
        "attn_layers": ["local", "local"],
        "num_hidden_layers": 2,
    },
    "xmod": {"default_language": "en_XX"},
    "perceiver": {"max_position_embeddings": 12, "num_latents": 6},
    "mobilebert": {"intra_bottleneck_size": 32, "true_hidden_size": 32, "embedding_size": 32},
    "esm": {"vocab_size": VOCABULARY, "pad_token_id": 1, "mask_token_id": 32},
    "zamba": {
        "layers_block_type": ["mamba", "hybrid"] * 2,
        "num_hidden_layers": 4,
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
    },
    "DbrxAttentionConfig": {"rope_theta": 1e4, "clip_qkv": 8.0},
}
TEXTS = (
    "text_config",
    "llm_config",
    "language_config",
    "decoder",
    "decoder_config",
    "thinker_config",
)


def configuration(pair: Pair) -> Any:
    """A small configuration for the pair's class."""
    import transformers
    from transformers import CONFIG_MAPPING

    config_class = CONFIG_MAPPING[pair.type]
    if pair.type in BUILT:
        return config_class(**BUILT[pair.type])
    maker = multimodal.for_pair(pair)
    verdict = config_class(**PARTS.get(pair.type, dict)())
    config_type = getattr(transformers, pair.cls).config_class
    if config_type is not None and not isinstance(verdict, config_type):
        parts = (getattr(verdict, name, None) for name in TEXTS)
        verdict = next((c for c in parts if isinstance(c, config_type)), verdict)
    shrink(verdict, tuple(BUILT))
    for config in _within(verdict):
        _finish(config)
    if maker is not None:
        maker.set(verdict)
    if pair.type == "reformer":
        verdict.is_decoder = pair.kind == "causal"
    return verdict


def _small(model_type: str, **arguments: Any) -> Any:
    from transformers import CONFIG_MAPPING

    return shrink(CONFIG_MAPPING[model_type](**arguments))


def _gemma4(**more: Any) -> Callable[[], dict[str, Any]]:
    def parts() -> dict[str, Any]:
        return {"text_config": {**_GEMMA4, "hidden_size_per_layer_input": 0, **more}}

    return parts


PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "gemma4": lambda: {
        **_gemma4(hidden_size_per_layer_input=8)(),
        "vision_config": _GEMMA4_VISION,
    },
    "gemma4_unified": lambda: {
        **_gemma4()(),
        "vision_config": _GEMMA4_EMBEDDERS["vision"],
        "audio_config": _GEMMA4_EMBEDDERS["audio"],
    },
    "gemma4_assistant": _gemma4(vocab_size_per_layer_input=0),
    "gemma4_unified_assistant": _gemma4(),
    "diffusion_gemma": _gemma4(moe_intermediate_size=48, num_experts=4, top_k_experts=2),
    "encoder-decoder": lambda: {
        "encoder": _small("bert").to_dict(),
        "decoder": _small("bert", is_decoder=True, add_cross_attention=True).to_dict(),
    },
    "vision-encoder-decoder": lambda: {
        "encoder": _small("vit").to_dict(),
        "decoder": _small("gpt2", add_cross_attention=True).to_dict(),
    },
}


def _within(config: Any) -> list[Any]:
    from transformers import PreTrainedConfig

    rope = [config]
    for value in vars(config).values():
        if isinstance(value, PreTrainedConfig):
            rope += _within(value)
    return rope


def _finish(config: Any) -> None:
    for known in (config.model_type, type(config).__name__):
        for name, value in EDITS.get(known, {}).items():
            setattr(config, name, value)
    has = vars(config)
    heads, width = has.get("num_attention_heads"), has.get("hidden_size")
    if "num_key_value_heads" in has and has["num_key_value_heads"] is None and heads:
        config.num_key_value_heads = heads
    if "head_dim" in has and has["head_dim"] is None and heads and width:
        config.head_dim = width // heads
    if "qk_rope_head_dim" in has and "head_dim" in has:
        config.head_dim = config.qk_rope_head_dim
    if "use_cache" in has:
        config.use_cache = False
    if getattr(config, "is_encoder_decoder", False):
        for name in ("decoder_start_token_id", "pad_token_id"):
            if getattr(config, name, None) is None:
                setattr(config, name, 0)
    if "pad_token_id" not in has:
        config.pad_token_id = None
    if getattr(config, "layers_block_type", ()) is None:  # granitemoehybrid in transformers 5.0
        config.layer_types = ["mamba"] * config.num_hidden_layers
    section = SECTIONS.get(config.model_type)
    if section:
        config.rope_parameters = {**(config.rope_parameters or {}), "mrope_section": section}


_QWEN = "glm4v_text glm_ocr_text glm46v_text paddleocr_vl_text qwen2_vl_text qwen2_5_vl_text"
SECTIONS = {
    **{key: [4, 2, 2] for key in (*_QWEN.split(), "qwen3_vl_text", "qwen2_5_omni_text")},
    "glm4v_moe_text": [2, 1, 1],
    "ernie4_5_vl_moe_text": [3, 3, 2],
    "hunyuan_vl_text": [2, 2, 2, 2],
}


def build(pair: Pair) -> Any:
    """A tiny model with random weights in train mode."""
    import transformers

    config = configuration(pair)
    torch.manual_seed(0)
    return getattr(transformers, pair.cls)(config).train()


def inputs(pair: Pair, model: Any, text: bool = False) -> dict[str, Any]:
    """One batch with labels, of all that the model takes or of text alone."""
    generator = torch.Generator().manual_seed(1)
    words = getattr(model.config.get_text_config(), "vocab_size", VOCABULARY)
    ids = torch.randint(10, min(140, words), (2, 12), generator=generator)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def normal(*shape: int) -> Any:
        return torch.randn(*shape, generator=generator)

    more = MORE.get(pair.cls)
    if more is not None:
        batch.update(more(model, ids, normal))
    if "labels" not in batch:
        batch["labels"] = batch["input_ids"].clone()
        batch["labels"][:, :2] = -100
    maker = None if text else multimodal.for_pair(pair)
    if maker is not None:
        return maker.add(model, batch, normal)
    if "mm_token_type_ids" in inspect.signature(model.forward).parameters:
        batch["mm_token_type_ids"] = torch.zeros_like(ids)
    return {k: v for k, v in batch.items() if v is not None}


def _image(model: Any, ids: Any, normal: Any) -> dict[str, Any]:
    return {"pixel_values": normal(2, 3, 32, 32)}


def _queries(model: Any, ids: Any, normal: Any) -> dict[str, Any]:
    ids[:, :4] = model.config.image_token_index
    return {"pixel_values": normal(2, 3, 32, 32)}


def _instructed(model: Any, ids: Any, normal: Any) -> dict[str, Any]:
    return {**_queries(model, ids, normal), "qformer_input_ids": ids % 100}


def _video(model: Any, ids: Any, normal: Any) -> dict[str, Any]:
    ids[:, :4] = model.config.video_token_index
    return {"pixel_values": normal(2, 1, 3, 32, 32), "qformer_input_ids": ids % 100}


def _codebooks(model: Any, ids: Any, normal: Any) -> dict[str, Any]:
    books = model.config.num_codebooks
    many = ids.repeat(1, books).reshape(2 * books, 12)
    return {"input_ids": many, "labels": many.reshape(2, books, 12).transpose(1, 2).contiguous()}


def _kosmos(model: Any, ids: Any, normal: Any) -> dict[str, Any]:
    place = torch.zeros_like(ids)
    place[:, :4] = 1
    return {"image_embeds": normal(2, 4, HIDDEN), "image_embeds_position_mask": place}


def _patches(model: Any, ids: Any, normal: Any) -> dict[str, Any]:
    width = model.config.vision_config.patch_embed_hidden_size
    return {
        "input_ids": None,
        "flattened_patches": torch.cat([torch.ones(2, 6, 2), normal(2, 6, width)], -1),
        "attention_mask": torch.ones(2, 6),
        "labels": ids,
    }


def _kosmos_2_5(model: Any, ids: Any, normal: Any) -> dict[str, Any]:
    place = torch.zeros_like(ids)
    place[:, : model.config.latent_query_num] = 1
    patches = _patches(model, ids, normal)["flattened_patches"]
    size = {"width": torch.tensor([3, 3]), "height": torch.tensor([2, 2])}
    return {"flattened_patches": patches, "image_embeds_position_mask": place, **size}


def _idefics(model: Any, ids: Any, normal: Any) -> dict[str, Any]:
    mask = torch.ones(2, 12, 1, dtype=torch.long)
    return {"pixel_values": normal(2, 1, 3, 32, 32), "image_attention_mask": mask}


def _formula(model: Any, ids: Any, normal: Any) -> dict[str, Any]:
    return {**_only_image(model, ids, normal), "decoder_input_ids": ids}


def _only_image(model: Any, ids: Any, normal: Any) -> dict[str, Any]:
    pixels = normal(2, 3, 32, 32)
    return {"input_ids": None, "attention_mask": None, "pixel_values": pixels, "labels": ids}


def _speech(model: Any, ids: Any, normal: Any) -> dict[str, Any]:
    return {"encoder_inputs_embeds": normal(2, 48, model.config.audio_config.hidden_size)}


MORE: dict[str, Callable[[Any, Any, Any], dict[str, Any]]] = {
    "BlipForConditionalGeneration": _image,
    "GitForCausalLM": _image,
    "Blip2ForConditionalGeneration": _queries,
    "InstructBlipForConditionalGeneration": _instructed,
    "InstructBlipVideoForConditionalGeneration": _video,
    "MusicgenForCausalLM": _codebooks,
    "MusicgenMelodyForCausalLM": _codebooks,
    "Kosmos2ForConditionalGeneration": _kosmos,
    "Kosmos2_5ForConditionalGeneration": _kosmos_2_5,
    "Pix2StructForConditionalGeneration": _patches,
    "IdeficsForVisionText2Text": _idefics,
    "PPFormulaNetForConditionalGeneration": _formula,
    "VisionEncoderDecoderModel": _only_image,
    "VoxtralRealtimeForConditionalGeneration": _speech,
}
